"""Sections of the page but for distributions: tiles, odd utterances, origin, storage."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from featcache.errors import FeatcacheError
from featcache.interface import Array, Codec
from featcache.registry import get_codec
from featcache.report_page.charts import (
    BARS,
    IN_FULL,
    Axis,
    Child,
    Html,
    View,
    bar_in_cell,
    day,
    element,
    facts_list,
    hours_text,
    image,
    joined,
    legend,
    nbytes,
    number,
    percent,
    picture,
    python,
    table,
)
from featcache.report_page.facts import RULES, CacheFacts, FeatureFacts, Finding
from featcache.report_page.values import FeatureValues, read_one

# Tiles, and what to look at first.


def tiles(view: View) -> Html:
    """Return the row of tiles."""
    facts, manifest = view.facts, view.facts.opened.manifest
    hours: Child = "unknown"
    if facts.hours is not None:
        hours = number(facts.hours, view.named("hours"), hours_text(facts.hours))
    state = "complete" if manifest.complete else "incomplete"
    damaged = sum(each.kind == "damaged" for each in facts.oddities)
    whole = "damaged" if damaged else "whole" if facts.checked and facts.chosen.is_all else ""
    some = [
        ("utterances", number(len(facts.table), view.named("utterances")), ""),
        ("hours", hours, facts.hours_of or "a feature with frame_s would tell"),
    ]
    first = facts.features[0] if facts.features else None
    if first is not None:
        unit = "frames" if first.has_frames else "arrays"
        some.append((unit, number(first.frames, view.named(f"frames of {first.name}")), first.name))
        some.append((first.dtype, _frame_shape(first), first.name))
    stored = sum(each.stored for each in facts.features)
    backends = ", ".join(dict.fromkeys(each.backend for each in facts.features))
    some.append(("stored", nbytes(stored, view.named("bytes")), backends))
    tone = "bad" if damaged else "good" if manifest.complete else "warn"
    said = f"{whole}: all that was read has its checksum" if whole == "whole" else whole
    some.append(("state", element("span", state, class_=tone), said))
    return element(
        "ul",
        (
            element(
                "li",
                element("span", what, class_="tile-what"),
                element("span", value, class_="tile-value"),
                element("span", note, class_="tile-note"),
            )
            for what, value, note in some
        ),
        class_="tiles",
    )


def _frame_shape(feature: FeatureFacts) -> str:
    """Return the shape of a frame in words."""
    if feature.dims is None:
        return "unknown"
    if not feature.dims:
        return "1 number"
    return f"{' x '.join(f'{size:,}' for size in feature.dims)} dims"


SIGNS = {"fault": ("!!", "fault"), "look": ("!", "look at"), "fine": ("✓", "fine")}


def look_first(view: View, found: Sequence[Finding]) -> Html:
    """Return the findings, each with a link to where more is said; eight at most."""
    fine = [each for each in found if each.level == "fine"]
    shown = [*found[: 8 - min(len(fine), 2)]] if len(found) > 8 else list(found)
    shown += [each for each in fine if each not in shown][: 8 - len(shown)]
    items = (
        element(
            "li",
            element("span", SIGNS[each.level][0], class_="sign", aria_hidden="true"),
            element("span", SIGNS[each.level][1], class_="level"),
            element("a", each.text, href=f"#{view.anchor(each.section)}"),
            class_=each.level,
        )
        for each in shown
    )
    left = dict.fromkeys(each.kind for each in found if each not in shown)
    more = element("p", f"and {len(left)} more: {', '.join(left)}", class_="note")
    return joined(element("ul", items, class_="findings"), more if left else "")


# Origin: whether it is the right cache.


def origin(view: View) -> Html:
    """Return what tells whether this is the cache that is wanted."""
    facts, manifest = view.facts, view.facts.opened.manifest
    recorded = cast(Mapping[str, object], facts.made_from.get("recorded", {}))
    command = recorded.get("command")
    words = command if isinstance(command, list) else [command] if command else []
    by = " ".join(map(str, words or filter(None, [facts.made_from["by"]])))
    expected = manifest.expected
    missing = None
    if expected is not None:
        missing = max(expected.count - len(facts.table) - len(facts.opened.failed), 0)
    chosen = facts.chosen
    checks = "adopted: its bytes were never read as a whole, so nothing tells whether they changed"
    if facts.checked:
        checks = (
            f"the arrays of {'all ' if chosen.is_all else ''}{len(chosen.rows):,} utterances were "
            "compared with their checksums"
        )
    pairs: list[tuple[str, Child]] = [
        ("directory", element("code", facts.path)),
        ("made", day(facts.made_from["made"])),
        ("by", element("code", by) if by else "not recorded"),
        ("generation", number(manifest.generation, view.named("generation"))),
        (
            "expected",
            "not known" if expected is None else number(expected.count, view.named("expected")),
        ),
        ("missing", "not known" if missing is None else number(missing, view.named("missing"))),
        ("failed", _failed(view)),
        ("checked now", checks),
    ]
    return joined(
        facts_list(pairs),
        element(
            "p",
            "Whether it fits the code of now, only that code can tell: open it with what it would "
            "make, and it is refused where they differ.",
        ),
        python(f"featcache.open({facts.path!r}, expect=brain.expectation())"),
    )


def _failed(view: View) -> Html:
    failed = list(view.facts.opened.failed)
    counted = number(len(failed), view.named("failed"))
    if not failed:
        return counted
    some = ", ".join(failed[:10]) + ", ..." * (len(failed) > 10)
    return joined(counted, ": ", element("code", some))


# What it was made from, and how the page was made.


def made_from(view: View) -> Html:
    """Return what the cache was made from: compared, recorded, and source."""
    told = view.facts.made_from
    fingerprint = dict(cast(Mapping[str, object], told.get("fingerprint", {})))
    declared = fingerprint.pop("features", {})
    recorded = dict(cast(Mapping[str, object], told.get("recorded", {})))
    sources = recorded.pop("sources", {})
    compared = [(key, _value(each)) for key, each in fingerprint.items()]
    parts = [
        element("h3", "Compared whenever it is written or opened"),
        facts_list([*compared, ("declarations", _folded("as JSON", declared))])
        if compared
        else joined(element("p", "Nothing but the declarations of its features was recorded."),
                    _folded("declarations", declared)),
        element("h3", "Recorded, and compared by nobody"),
        element("details", element("summary", f"{len(recorded)} records of the run"),
                facts_list((key, _value(each)) for key, each in recorded.items()))
        if recorded else element("p", "Nothing was recorded."),
    ]  # fmt: skip
    if isinstance(sources, Mapping) and sources:
        parts.append(element("h3", "Source"))
        parts += [
            element("details", element("summary", element("code", str(name))),
                    element("pre", element("code", str(code)), tabindex="0"))
            for name, code in sources.items()
        ]  # fmt: skip
    return joined(*parts, python(f"featcache.inspect.made_from({view.facts.path!r})"))


def _value(value: object) -> Html:
    if isinstance(value, str | int | float | bool) or value is None:
        return element("code", str(value))
    text = json.dumps(value, default=str)
    return element("code", text) if len(text) <= 100 else _folded("as JSON", value)


def _folded(what: str, value: object) -> Html:
    text = json.dumps(value, indent=1, default=str, ensure_ascii=False)
    return element("details", element("summary", what),
                   element("pre", element("code", text), tabindex="0"))  # fmt: skip


def rules() -> Html:
    """Return the rules by which utterances are odd."""
    rows = ((element("span", kind, class_="kind"), f"An utterance, if {said}.")
            for kind, said in RULES.items())  # fmt: skip
    return element("details", element("summary", "rules for odd utterances"),
                   table(["why", "rule"], rows, label="rules"))  # fmt: skip


# Storage: bytes by feature and codec, and what float16 and zstd would make of them.


TIMES_HALF = {"float32": 2, "float64": 4}  # the size of float16
TRIED = 64  # utterances that are compressed for trial, of each feature
TRIED_FEATURES = 16  # the largest ones
TRIED_BYTES = 1 << 22  # of a feature
CODEC = "zstd"


def storage(view: View) -> Html:
    """Return the bytes of each feature, and what other ways would take."""
    facts = view.facts
    codec = _codec()
    largest = sorted(facts.features, key=lambda each: -each.raw)[:TRIED_FEATURES]
    most = max((each.stored for each in facts.features), default=0) or 1
    rows = [
        (element("code", each.name), element("span", each.shape, class_="whole"), each.dtype,
         each.backend, each.codec,
         nbytes(each.stored, view.named(f"bytes of {each.name}")),
         percent(each.stored / each.raw if each.raw else 1.0, view.named(f"share of {each.name}")),
         *_smaller(view, each, codec if each in largest else None),
         bar_in_cell(each.stored / most))
        for each in facts.features
    ]  # fmt: skip
    heads = ["feature", "shape", "dtype", "format", "codec", "stored", "of raw", f"with {CODEC}",
             "as float16", f"float16, {CODEC}", BARS]  # fmt: skip
    stored = sum(each.stored for each in facts.features)
    pairs: list[tuple[str, Child]] = [
        ("files", [number(facts.containers, view.named("files")), " in ",
                   number(facts.parts, view.named("parts")),
                   f" part{'s' * (facts.parts != 1)}, ",
                   nbytes(facts.files, view.named("bytes of files"))]),
        ("beside arrays", [nbytes(max(facts.files - stored, 0), view.named("bytes beside")),
                           " of headers, padding, and utterances that were deleted"]),
    ]  # fmt: skip
    inner = table(heads, rows, label="bytes by feature", sorts=True)
    return joined(
        element("div", inner, class_="high" if len(rows) > IN_FULL else None),
        facts_list(pairs),
        element("p", _how(facts, codec), class_="note"),
        python(f"featcache.inspect.estimate({facts.path!r})"),
    )


def _codec() -> Codec | None:
    """Return the codec; None where it is not installed, or its library is not."""
    try:
        codec = get_codec(CODEC)()
        codec.encode(np.zeros(1))  # loads the library
    except FeatcacheError:
        return None
    return codec


def _how(facts: CacheFacts, codec: Codec | None) -> str:
    if codec is None:
        return f"Bytes with {CODEC} are tried where it is installed: pip install 'featcache[zarr]'."
    few = f", of the {TRIED_FEATURES} largest features" * (len(facts.features) > TRIED_FEATURES)
    return (
        f"Bytes with {CODEC} were tried on up to {min(TRIED, len(facts.table))} utterances{few}. "
        "All formats and codecs that are installed are tried by this line:"
    )


def _smaller(view: View, feature: FeatureFacts, codec: Codec | None) -> Iterator[Child]:
    """Yield bytes with the codec, as float16, and as float16 with the codec."""
    halves = feature.dtype in TIMES_HALF
    half = feature.raw // TIMES_HALF.get(feature.dtype, 1)
    arrays = _some(view.facts, feature) if codec is not None and feature.raw else []
    tried = [("", feature.raw, arrays)]
    if halves:
        with np.errstate(over="ignore", invalid="ignore"):
            tried.append(("float16 ", half, [each.astype(np.float16) for each in arrays]))
    about = "≈ " if len(arrays) < len(view.facts.table) else ""
    told: list[Child] = [
        "-" if codec is None or not some else
        [about, nbytes(round(whole * _ratio(codec, some)),
                       view.named(f"{what}{CODEC} of {feature.name}"))]
        for what, whole, some in tried
    ]  # fmt: skip
    yield told[0]
    yield nbytes(half, view.named(f"float16 bytes of {feature.name}")) if halves else "-"
    yield told[1] if halves else "-"


def _some(facts: CacheFacts, feature: FeatureFacts) -> list[Array]:
    """Return arrays of utterances evenly spread over those that were read."""
    rows = facts.chosen.drawn[:: -(-len(facts.chosen.drawn) // TRIED)]
    found: list[Array] = []
    for row in rows.tolist():
        array = read_one(facts.opened, feature.name, row)
        if array is not None and array.size:
            found.append(array)
        if sum(each.nbytes for each in found) >= TRIED_BYTES:
            break
    return found


def _ratio(codec: Codec, arrays: Sequence[Array]) -> float:
    encoded = sum(len(codec.encode(np.ascontiguousarray(each))) for each in arrays)
    return encoded / sum(each.nbytes for each in arrays)


# Odd utterances: their table, the search through all ids, and pictures.


MOST_ODD = 120  # rows of the table
Shown = tuple[int, str, str]  # row, feature, and why it is odd
FULL_WIDTH = 0.95  # of the lengths: pictures of longer utterances are squeezed


@dataclass(frozen=True)
class OddRow:
    """An utterance of the table."""

    row: int
    reasons: list[tuple[str, str, str]]  # kind, feature, sentence; the worst first


def odd_rows(facts: CacheFacts) -> list[OddRow]:
    """Return the worst utterances by each rule in turn, so that each rule is seen."""
    chosen: dict[int, None] = {}
    most = max((len(each.rows) for each in facts.oddities), default=0)
    for depth in range(min(most, MOST_ODD)):
        for each in facts.oddities:
            if depth < len(each.rows) and len(chosen) < MOST_ODD:
                chosen[int(each.rows[depth])] = None
    reasons: dict[int, list[tuple[str, str, str]]] = {row: [] for row in chosen}
    worst: dict[int, tuple[int, float]] = {}
    kinds = list(RULES)
    for each in facts.oddities:
        for place in np.flatnonzero(np.isin(each.rows, list(chosen))).tolist():
            row = int(each.rows[place])
            reasons[row].append((each.kind, each.feature, each.says(place)))
            worst.setdefault(row, (kinds.index(each.kind), -float(each.amounts[place])))
    return [OddRow(row, reasons[row]) for row in sorted(chosen, key=worst.__getitem__)]


def odd(view: View, rows: Sequence[OddRow], number_of_pictures: int, seed: int) -> Html:
    """Return the table of odd ones, the search, and pictures of odd and of random utterances."""
    facts = view.facts
    total = len(facts.odd_rows)
    if not total:
        said: Child = "No utterance is odd by any rule."
    else:
        shown = "" if len(rows) == total else f", {len(rows):,} of them here, some by each rule"
        are = "utterance is" if total == 1 else "utterances are"
        said = [number(total, view.named("odd")), f" {are} odd{shown}."]
    parts = [element("p", said, view.sampled()), _search(view)]
    if rows:
        parts.append(_odd_table(view, rows))
    parts.append(_pictures(view, rows, number_of_pictures, seed))
    line = "cache.read(id, feature)"
    return joined(*parts, python(line))


def _search(view: View) -> Html:
    own = view.anchor("search")
    return element(
        "div",
        element(
            "label", "search ids ", element("input", type="search", id=own, autocomplete="off")
        ),
        element("output", aria_live="polite"),
        element("ul", class_="hits"),
        class_="search script",
        data_ids=view.anchor("ids"),
    )


def _odd_table(view: View, rows: Sequence[OddRow]) -> Html:
    facts = view.facts
    frames = None if facts.main is None else facts.table.lengths(facts.main)
    heads = ["id", "frames", "why", "how much"] if frames is not None else ["id", "why", "how much"]
    body = []
    for each in rows:
        id = facts.table.id(each.row)
        cells: list[Child] = [element("code", id, id=view.anchor(f"odd-{each.row}"))]
        if frames is not None:
            cells.append(number(int(frames[each.row]), view.named(f"frames of {id}")))
        kinds = dict.fromkeys(kind for kind, _, _ in each.reasons)
        cells.append([element("span", kind, class_="kind") for kind in kinds])
        several = len(facts.features) > 1
        cells.append(
            [element("div", f"{feature}: {said}" if several else said)
             for _, feature, said in each.reasons]
        )  # fmt: skip
        body.append(cells)
    return element("div", table(heads, body, label="odd utterances", sorts=True), class_="high")


def _pictures(view: View, rows: Sequence[OddRow], pictures: int, seed: int) -> Html:
    facts = view.facts
    if not pictures:
        return Html("")
    shown = [(each.row, each.reasons[0][1], ", ".join(dict.fromkeys(r[0] for r in each.reasons)))
             for each in _varied([each for each in rows if _is_seen(facts, each)],
                                 pictures // 2)]  # fmt: skip
    feature, number = _pictured(facts), pictures - pictures // 2
    random = [] if feature is None else _at_random(facts, feature, number, shown, seed)
    cards = [list(_cards(view, each)) for each in (shown, random)]
    if not any(cards):
        return Html("")
    own = view.anchor("own-scale")
    names = {name for _, name, _ in [*shown, *random]}
    scales = [
        legend(*each.scale, each.name)
        for each in facts.values
        if each.name in names and each.width > 1
    ]
    parts: list[Html] = []
    for title, some_cards in zip(("Odd ones in pictures", "Some at random"), cards, strict=True):
        if some_cards:
            parts += [element("h3", title), element("div", some_cards, class_="pictures")]
    return element(
        "div",
        element(
            "p",
            "In pictures, time runs to the right, and the first dim is at the bottom. ",
            *scales,
            class_="scale",
        ),
        element("label", element("input", type="checkbox", id=own, class_="own-scale"),
                " each picture on its own scale, from its least to its largest value", for_=own),
        *parts,
        class_="gallery",
    )  # fmt: skip


def _at_random(
    facts: CacheFacts, feature: str, number: int, shown: Sequence[Shown], seed: int
) -> list[Shown]:
    """Return utterances that were drawn with the smallest hashes, and are not shown yet."""
    drawn = facts.chosen.drawn
    there = facts.opened.index.features[feature].rows[drawn] > 0
    rows = drawn[there & ~np.isin(drawn, [row for row, _, _ in shown])]
    if not len(rows):
        return []
    rows = facts.table.rows(facts.table.select(rows).sample(min(number, len(rows)), seed=seed).ids)
    return [(row, feature, "") for row in rows.tolist()]


def _is_seen(facts: CacheFacts, odd: OddRow) -> bool:
    """Whether there is something to draw."""
    kind, feature, _ = odd.reasons[0]
    return kind != "damaged" and int(facts.opened.index.features[feature].rows[odd.row]) > 0


def _varied(rows: Sequence[OddRow], most: int) -> list[OddRow]:
    """Return some rows, of each kind in turn."""
    by_kind: dict[str, list[OddRow]] = {}
    for each in rows:
        by_kind.setdefault(each.reasons[0][0], []).append(each)
    turns = [
        kind[turn] for turn in range(len(rows)) for kind in by_kind.values() if turn < len(kind)
    ]
    kept = {each.row for each in turns[:most]}
    return [each for each in rows if each.row in kept]


def _pictured(facts: CacheFacts) -> str | None:
    """Return the feature of pictures of random utterances: the first with dims and frames."""
    for each in (*facts.features,):
        if each.has_frames and each.dims:
            return each.name
    return facts.main


def _cards(view: View, shown: Sequence[Shown]) -> Iterator[Html]:
    facts = view.facts
    found = {each.name: each for each in facts.values}
    for row, name, why in shown:
        frames = read_one(facts.opened, name, row)
        if frames is None or not frames.size:
            continue
        id, values = facts.table.id(row), found[name]
        what = f"{len(frames):,} frames" if len(frames) != 1 else "one frame"
        alt = f"{name} of {id}, {what}{f', {why}' if why else ''}"
        full = facts.lengths[name].quantile(FULL_WIDTH) if name in facts.lengths else 1
        wide = f"width:{min(max(100 * len(frames) / max(full, 1), 6), 100):.1f}%"
        caption = element(
            "figcaption",
            element("code", id),
            element("span", f"{what}{f' of {name}' if len(facts.features) > 1 else ''}"),
            [element("span", kind, class_="kind") for kind in why.split(", ") if kind],
        )
        yield element(
            "figure", _drawn(frames, values, alt, wide), caption, id=view.anchor(f"picture-{row}")
        )


def _drawn(frames: Array, values: FeatureValues, alt: str, style: str) -> Html:
    """Return the picture on the scale of the cache, and on its own, of which one is seen."""
    if frames.shape[1] == 1:
        return _drawn_line(frames[:, 0], values, alt, style)
    shared, _, _ = picture(frames, *values.scale)
    finite = np.asarray(frames, np.float64)[np.isfinite(np.asarray(frames, np.float64))]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    own, _, _ = picture(frames, low, high)
    return joined(
        image(shared, alt, class_="of-cache", style=style),
        image(own, f"{alt}, on its own scale", class_="of-own", style=style),
    )


def _drawn_line(frames: Array, values: FeatureValues, alt: str, style: str) -> Html:
    numbers = np.asarray(frames, np.float64)
    step = max(len(numbers) // 480, 1)
    some = numbers[::step]
    finite = some[np.isfinite(some)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    x, y = Axis(0, max(len(some) - 1, 1), ""), Axis(low, high, "")
    points = " ".join(
        f"{x.place(at):.1f},{100 - y.place(value):.1f}"
        for at, value in enumerate(some.tolist()) if np.isfinite(value)
    )  # fmt: skip
    return element(
        "svg",
        element("title", alt),
        Html(f'<polyline class="line" points="{points}"/>'),
        viewBox="0 -4 100 108", preserveAspectRatio="none", role="img", aria_label=alt, style=style,
    )  # fmt: skip

"""Sections of the page on one cache: what each says, its chart, its table and its line of Python."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from featcache.interface import Ints
from featcache.report_page.annotated import Groups, Quantity, TextLengths
from featcache.report_page.charts import (
    Axis,
    Html,
    Mark,
    band,
    bar_in_cell,
    bars,
    bytes_text,
    curve,
    element,
    field_of_bins,
    image,
    joined,
    nbytes,
    number,
    percent,
    picture,
    short,
)
from featcache.report_page.facts import BUCKETS, CacheFacts, FeatureFacts, Finding
from featcache.report_page.lengths import (
    BATCH,
    LengthCounts,
    histogram,
    nice_edges,
)
from featcache.report_page.lengths import BUCKETS as BUCKET_NUMBERS
from featcache.report_page.odd import RULES, odd_dims
from featcache.report_page.values import FeatureValues, read_one

LENGTH_BINS = 64
MOST_POINTS = 256  # of a line over dims
MOST_TOKENS = 30
MOST_ODD = 120  # rows of the table
FAR_TEXTS = 20
LONG_TAIL = 3  # times the 99.5th percentile, where the histogram ends before the longest


@dataclass(frozen=True)
class Scales:
    """What charts of several caches have in common, so that they can be compared."""

    length_edges: Mapping[str, NDArray[np.float64]]
    tallest: Mapping[str, int]
    values: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, caches: Sequence[CacheFacts]) -> Scales:
        """Return the scales that hold the charts of all caches."""
        edges, tallest, values = {}, {}, {}
        for name in dict.fromkeys(name for each in caches for name in each.lengths):
            mine = [each.lengths[name] for each in caches if name in each.lengths]
            edges[name] = _length_edges(mine)
            counts = [histogram(each.lengths, each.counts, edges[name]).tallest for each in mine]
            tallest[name] = max(counts, default=0)
        for each in (value for cache in caches for value in cache.values):
            if each.stats is not None and each.stats.count:
                low = float(np.nanmin(each.stats.mean - each.stats.std, initial=np.inf))
                high = float(np.nanmax(each.stats.mean + each.stats.std, initial=-np.inf))
                was = values.get(each.name, (low, high))
                values[each.name] = min(was[0], low), max(was[1], high)
        return cls(edges, tallest, values)


def _length_edges(caches: Sequence[LengthCounts]) -> NDArray[np.float64]:
    some = [each for each in caches if len(each.lengths)]
    if not some:
        return np.array([0.0, 1.0])
    least = min(int(each.lengths[0]) for each in some)
    most = max(int(each.lengths[-1]) for each in some)
    usual = max(each.quantile(0.995) for each in some)
    return nice_edges(
        least, most if most <= LONG_TAIL * usual else usual, LENGTH_BINS, whole=True
    )


@dataclass(frozen=True)
class View:
    """A cache on the page."""

    facts: CacheFacts
    scales: Scales
    place: int  # 0; 1 for the second of two caches
    several: bool

    def named(self, what: str) -> str:
        """Return the name of a number, which tells its cache where there are two."""
        return f"{self.place} {what}" if self.several else what

    def anchor(self, what: str) -> str:
        """Return an id of an element."""
        return f"{what}-{self.place}"

    @property
    def opens(self) -> str:
        """The line of Python that opens the cache."""
        return f"cache = featcache.open({self.facts.path!r})"

    def sampled(self) -> Html:
        """Return what is said beside each number of a sample; nothing where all was read."""
        chosen = self.facts.chosen
        if chosen.is_all:
            return Html("")
        text = f"from {len(chosen.rows):,} of {chosen.of:,} utterances"
        return element("span", text, class_="sampled")


def python(code: str) -> Html:
    """Return a line of Python that gives the same."""
    return element(
        "div",
        element("code", code),
        element("button", "copy", type="button", class_="copy script", aria_label=f"copy: {code}"),
        class_="python",
    )


def table(
    headings: Sequence[Child], rows: Iterable[Sequence[Child]], *, label: str, sorts: bool = False
) -> Html:
    """Return a table in a box that scrolls."""
    head = element("tr", (element("th", each, scope="col") for each in headings))
    body = (element("tr", (element("td", cell) for cell in row)) for row in rows)
    inner = element("table", element("thead", head), element("tbody", body),
                    class_="sorts" if sorts else None)  # fmt: skip
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=label)


Child = str | Iterable[str]


def as_table(what: str, inner: Html) -> Html:
    """Return a table that is folded away."""
    return element("details", element("summary", f"as a table: {what}"), inner)


def facts_list(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Return names and what belongs to them."""
    return element(
        "dl",
        (element("div", element("dt", name), element("dd", each)) for name, each in pairs),
        class_="facts",
    )


# Tiles, and what to look at first.


def tiles(view: View) -> Html:
    """Return the row of tiles."""
    facts, manifest = view.facts, view.facts.opened.manifest
    hours: Child = "unknown"
    if facts.hours is not None:
        hours = number(facts.hours, view.named("hours"), f"{facts.hours:,.2f}")
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
        some.append((f"{first.dtype}", first.shape, first.name))
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
    return element("ul", items, class_="findings")


# Origin: whether it is the right cache.


def origin(view: View) -> Html:
    """Return what tells whether this is the cache that is wanted."""
    facts, manifest = view.facts, view.facts.opened.manifest
    recorded = cast(Mapping[str, object], facts.made_from.get("recorded", {}))
    command = recorded.get("command")
    words = command if isinstance(command, list) else [command] if command else []
    expected = manifest.expected
    missing = None if expected is None else expected.count - len(facts.table)
    chosen = facts.chosen
    checks = "adopted: its bytes were never read as a whole, so nothing tells whether they changed"
    if facts.checked:
        checks = (
            f"the arrays of {'all ' if chosen.is_all else ''}{len(chosen.rows):,} utterances were "
            "compared with their checksums"
        )
    pairs: list[tuple[str, Child]] = [
        ("directory", element("code", facts.path)),
        ("made", f"{facts.made_from.get('made', 'unknown')}"),
        ("by", element("code", " ".join(map(str, words))) if words else "not recorded"),
        ("generation", number(manifest.generation, view.named("generation"))),
        ("expected", "not known" if expected is None else number(expected.count, view.named("expected"))),
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


# Lengths.


def lengths(view: View) -> Html:
    """Return histograms of lengths, padding, and the choice of a cut."""
    facts = view.facts
    if not facts.lengths:
        return element("p", "No feature has frames: each utterance is one array of a fixed shape.")
    parts, seen = [], {}
    for name, counts in facts.lengths.items():
        if not counts.utterances:
            parts.append(element("p", f"{name}: there are no utterances, so there are no lengths."))
            continue
        key = counts.lengths.tobytes() + counts.counts.tobytes()
        if key in seen:
            parts.append(
                element("p", f"{name}: as many frames as {seen[key]}, length for length.")
            )
            continue
        seen[key] = name
        parts.append(_lengths_of(view, name, counts))
    return joined(*parts)


def _lengths_of(view: View, name: str, counts: LengthCounts) -> Html:
    frame_s = next(each.frame_s for each in view.facts.features if each.name == name)
    edges = view.scales.length_edges[name]
    binned = histogram(counts.lengths, counts.counts, edges)
    beyond = counts.utterances - int(binned.counts.sum())
    low, high, rare = (counts.quantile(share) for share in (0.1, 0.9, 0.99))
    said = (
        f"Eight of ten utterances have {low:,} to {high:,} frames of {name}; one in a hundred has "
        f"more than {rare:,}."
    )
    more = f" {beyond:,} are longer than the chart, up to {counts.lengths[-1]:,}." if beyond else ""
    unit = "frames" if frame_s is None else f"frames of {frame_s:g} s"
    x = Axis(float(edges[0]), float(edges[-1]), unit)
    y = Axis(0, view.scales.tallest[name] * 1.05 or 1, "utterances")
    borders = counts.borders(BUCKETS)
    marks = [Mark(each, f"bucket up to {each:,} frames") for each in borders if each < edges[-1]]
    rows = (
        (f"{short(left)} to {short(right - 1)}", number(count, view.named(f"{name} bin {short(left)}")))
        for left, right, count in zip(edges[:-1], edges[1:], binned.counts, strict=True)
    )
    chart = bars(f"Lengths of {name}", said + more, edges, binned.counts, (x, y), marks)
    return element(
        "div",
        element("h3", f"Lengths of {name}"),
        element("p", said, more, f" Dashed: borders of {BUCKETS} buckets of as many frames each."),
        chart,
        as_table("utterances by frames", table(["frames", "utterances"], rows, label="lengths")),
        element(
            "div",
            _quantiles(view, name, counts, frame_s),
            _paddings(view, name, counts),
            class_="side",
        ),
        _cut(view, name, counts),
        python(f"cache.lengths({name!r})"),
    )


SHARES = {"shortest": 0.0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "99 %": 0.99,
          "longest": 1.0}  # fmt: skip


def _quantiles(view: View, name: str, counts: LengthCounts, frame_s: float | None) -> Html:
    rows: list[list[Child]] = []
    for what, share in SHARES.items():
        length = counts.quantile(share)
        row: list[Child] = [what, number(length, view.named(f"{name} {what}"))]
        rows.append(row if frame_s is None else [*row, f"{length * frame_s:.2f} s"])
    mean = counts.frames / counts.utterances
    last: list[Child] = ["mean", number(mean, view.named(f"{name} mean"))]
    rows.append(last if frame_s is None else [*last, f"{mean * frame_s:.2f} s"])
    heads = ["of all", "frames", "seconds"][: 2 if frame_s is None else 3]
    return table(heads, rows, label=f"lengths of {name}")


def _paddings(view: View, name: str, counts: LengthCounts) -> Html:
    rows = []
    for buckets in BUCKET_NUMBERS:
        borders = counts.borders(buckets)
        share = counts.padding(buckets)
        rows.append(
            [
                "none" if buckets == 1 else f"{buckets}",
                percent(share, view.named(f"{name} padding {buckets}")),
                bar_in_cell(share),
                ", ".join(map(short, borders)) if 1 < buckets <= 8 else "",
            ]
        )
    heads = ["buckets", "padding", "", "longest of each"]
    return element(
        "div",
        table(heads, rows, label=f"padding of {name}"),
        element("p", f"Expected in batches of {BATCH} utterances at random within a bucket.",
                class_="note"),
    )  # fmt: skip


def _cut(view: View, name: str, counts: LengthCounts) -> Html:
    """Return the controls that need the script, and the counts that they answer from."""
    longest, utterances, frames = counts.binned(4096)
    data = {"longest": longest.tolist(), "utterances": utterances.tolist(),
            "frames": frames.tolist(), "batch": BATCH, "feature": name}  # fmt: skip
    least, most = int(counts.lengths[0]), int(counts.lengths[-1])
    own = view.anchor(f"cut-{name}")
    steps = "" if len(longest) == len(counts.lengths) else (
        f" (cuts are exact at {len(longest):,} lengths)"
    )  # fmt: skip
    return element(
        "form",
        element("label", "cut below ", element("input", type="number", name="least", min=0,
                value=least, step=1), class_="inline"),
        element("label", " and above ", element("input", type="number", name="most", min=0,
                value=most, step=1), " frames", class_="inline"),
        element("label", " buckets ", element("input", type="range", name="buckets", min=1, max=32,
                value=BUCKETS), element("span", str(BUCKETS), class_="buckets"), class_="inline"),
        element("output", steps.strip(), aria_live="polite"),
        python(f"cache.filter({_keyword(name, f'({least}, {most})')})"),
        json_block(data, own),
        class_="cut script",
        data_counts=own,
    )  # fmt: skip


def _keyword(name: str, value: str) -> str:
    return f"{name}={value}" if name.isidentifier() else f"**{{{name!r}: {value}}}"


def json_block(data: object, id: str) -> Html:
    """Return data for the script, which no browser runs."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    return element("script", Html(text), type="application/json", id=id)


# Values.


def values(view: View) -> Html:
    """Return charts of values by dim, and of tokens."""
    return joined(*(_values_of(view, each) for each in view.facts.values))


def _values_of(view: View, found: FeatureValues) -> Html:
    if not len(found.utterances.rows):
        text = "nothing was read of it" if found.damaged else "there are no values"
        return element("div", element("h3", found.name), element("p", f"{found.name}: {text}."))
    if found.tokens is not None:
        return _tokens(view, found)
    return _quantities(view, found)


def _quantities(view: View, found: FeatureValues) -> Html:
    facts = view.facts
    feature = next(each for each in facts.features if each.name == found.name)
    odd = odd_dims(found)
    u, stats = found.utterances, found.stats
    bad = int(u.not_finite.sum())
    pairs: list[tuple[str, Child]] = []
    if np.isfinite(u.least).any():
        least, most = float(np.nanmin(u.least)), float(np.nanmax(u.most))
        pairs += [("least", [number(least, view.named(f"{found.name} least")), " ", view.sampled()]),
                  ("largest", [number(most, view.named(f"{found.name} most")), " ", view.sampled()])]  # fmt: skip
    pairs.append(("not finite", [number(bad, view.named(f"{found.name} not finite")), " ", view.sampled()]))
    low, high = found.scale
    pairs.append(
        ("colours of pictures",
         [f"from {short(low)} to {short(high)}: the 1st and 99th percentile of "
          f"{len(found.frames):,} frames"])
    )  # fmt: skip
    parts: list[Html] = [element("h3", f"Values of {found.name}")]
    if stats is not None and stats.count:
        parts += _band(view, found, feature)
    parts.append(facts_list(pairs))
    if odd:
        rows = ((number(dim), said) for dim, said in odd[:MOST_ODD])
        parts.append(table(["dim", "what is odd"], rows, label=f"odd dims of {found.name}"))
    elif stats is not None and found.width > 1:
        parts.append(element("p", "No dimension is dead, loud or clipped."))
    parts.append(python(f"cache.stats({found.name!r})"))
    return element("div", *parts)


def _band(view: View, found: FeatureValues, feature: FeatureFacts) -> list[Html]:
    stats = found.stats
    assert stats is not None
    mean, std = stats.mean.reshape(-1), stats.std.reshape(-1)
    of: Child = [f"over all {stats.count:,} frames"]
    if not found.stats_are_whole:
        of = [f"over {stats.count:,} frames ", view.sampled()]
    if len(mean) == 1:
        text = [
            "mean ", number(float(mean[0]), view.named(f"{found.name} mean 0")), ", deviation ",
            number(float(std[0]), view.named(f"{found.name} deviation 0")), ", ", *of,
        ]  # fmt: skip
        return [element("p", text), _value_histogram(view, found)]
    at, low, middle, high, each = _points(mean, std)
    top = view.scales.values[found.name]
    margin = 0.03 * (top[1] - top[0]) or 1.0
    x = Axis(0, len(mean) - 1, "dim" if each == 1 else f"dim, {each} a point")
    y = Axis(top[0] - margin, top[1] + margin, "value")
    said = (
        f"means from {short(float(np.nanmin(mean)))} to {short(float(np.nanmax(mean)))}, "
        f"deviations from {short(float(np.nanmin(std)))} to {short(float(np.nanmax(std)))}"
    )
    rows = (
        (number(dim), number(float(mean[dim]), view.named(f"{found.name} mean {dim}")),
         number(float(std[dim]), view.named(f"{found.name} deviation {dim}")))
        for dim in range(min(len(mean), 1024))
    )  # fmt: skip
    chart = band(f"Mean and deviation of {found.name} by dim", said, at, (low, middle, high), (x, y))
    line = element("p", "Line: the mean of each dim; band: one deviation below and above it; ", of,
                   f". {said[0].upper()}{said[1:]}.")  # fmt: skip
    inner = table(["dim", "mean", "deviation"], rows, label=f"dims of {found.name}")
    return [line, chart, as_table("mean and deviation by dim", inner)]


def _points(mean: NDArray[Any], std: NDArray[Any]) -> tuple[Any, Any, Any, Any, int]:
    """Return dims, lower end, line and upper end, so many dims a point that they are few."""
    each = -(-len(mean) // MOST_POINTS)
    starts = np.arange(0, len(mean), each)
    counts = np.diff(np.append(starts, len(mean)))
    low, high = np.minimum.reduceat(mean - std, starts), np.maximum.reduceat(mean + std, starts)
    return starts, low, np.add.reduceat(mean, starts) / counts, high, each


def _value_histogram(view: View, found: FeatureValues) -> Html:
    """Return the histogram of a feature of one number a frame."""
    flat = np.asarray(found.frames, np.float64).reshape(-1)
    edges = nice_edges(*map(float, (flat.min(), flat.max())), LENGTH_BINS, whole=False)
    binned = histogram(flat, None, edges)
    x = Axis(float(edges[0]), float(edges[-1]), "value")
    y = Axis(0, binned.tallest * 1.05 or 1, "frames")
    said = f"{len(flat):,} frames, from {short(float(flat.min()))} to {short(float(flat.max()))}"
    rows = ((f"{short(left)} to {short(right)}", number(count))
            for left, right, count in zip(edges[:-1], edges[1:], binned.counts, strict=True))  # fmt: skip
    return joined(
        bars(f"Values of {found.name}", said, edges, binned.counts, (x, y)),
        element("p", f"{said}, evenly spread over the utterances that were read.", class_="note"),
        as_table("frames by value", table(["value", "frames"], rows, label="values")),
    )


def _tokens(view: View, found: FeatureValues) -> Html:
    tokens = found.tokens
    assert tokens is not None
    name, (order, counts) = found.name, tokens.most_frequent()
    total = max(tokens.total, 1)
    covered = np.cumsum(counts) / total
    half, most = (int(np.searchsorted(covered, share)) + 1 for share in (0.5, 0.9))
    said = (
        f"{half:,} of {len(order):,} tokens make half of all, {most:,} make nine tenths"
    )
    rows = (
        (number(int(token)), number(int(count), view.named(f"{name} token {token}")),
         percent(count / total), bar_in_cell(count / counts[0]))
        for token, count in zip(order[:MOST_TOKENS].tolist(), counts.tolist(), strict=False)
    )  # fmt: skip
    step = max(len(covered) // MOST_POINTS, 1)
    at = [0.0, *(np.arange(len(covered))[::step] + 1.0).tolist(), float(len(covered))]
    shares = [0.0, *covered[::step].tolist(), 1.0]
    axes = Axis(0, float(len(covered)), "tokens, the most frequent first"), Axis(0, 1, "share")
    left = max(len(order) - MOST_TOKENS, 0)
    pairs: list[tuple[str, Child]] = [
        ("used", [number(len(order), view.named(f"{name} used")), " ", view.sampled()]),
        ("never used",
         [number(tokens.unused, view.named(f"{name} unused")), f" of 0 to {int(order.max()):,} ",
          view.sampled()]),
        ("tokens read", number(tokens.total, view.named(f"{name} tokens"))),
    ]  # fmt: skip
    chart = curve(f"Coverage of {name}", said, at, shares, axes)
    heads = ["token", "times", "share", ""]
    return element(
        "div",
        element("h3", f"Tokens of {name}"),
        element("p", f"{said[0].upper()}{said[1:]}. ", view.sampled()),
        facts_list(pairs),
        element("div", table(heads, rows, label=f"tokens of {name}", sorts=True), chart,
                class_="side"),
        element("p", f"and {left:,} others", class_="note") if left else "",
    )  # fmt: skip


# Odd ones: the table, the search and pictures.


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
        said = [number(total, view.named("odd")), f" utterances are odd{shown}. "]
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
        element("label", "search ids ", element("input", type="search", id=own, autocomplete="off")),
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
    return table(heads, body, label="odd utterances", sorts=True)


def _pictures(view: View, rows: Sequence[OddRow], pictures: int, seed: int) -> Html:
    facts = view.facts
    shown = [(each.row, each.reasons[0][1], ", ".join(dict.fromkeys(r[0] for r in each.reasons)))
             for each in _varied(rows, pictures // 2)]  # fmt: skip
    known = {row for row, _, _ in shown}
    feature = _pictured(facts)
    if feature is not None and len(facts.table):
        count = min(pictures - len(shown), len(facts.chosen.drawn))
        view_of = facts.table.select(facts.chosen.drawn).sample(count, seed=seed)
        random = facts.table.rows(view_of.ids).tolist()
        shown += [(row, feature, "") for row in random if row not in known]
    cards = list(_cards(view, shown))
    if not cards:
        return Html("")
    own = view.anchor("own-scale")
    return element(
        "div",
        element("h3", "Pictures"),
        element(
            "p",
            "Time runs to the right, the first dim is below; dark is low, light is high. "
            "The first are the odd ones, then come some at random.",
        ),
        element("label", element("input", type="checkbox", id=own, class_="own-scale"),
                " each picture on its own scale, not on that of the cache", for_=own),
        element("div", cards, class_="pictures"),
        class_="gallery",
    )  # fmt: skip


def _varied(rows: Sequence[OddRow], most: int) -> list[OddRow]:
    """Return some rows, of each kind in turn."""
    by_kind: dict[str, list[OddRow]] = {}
    for each in rows:
        by_kind.setdefault(each.reasons[0][0], []).append(each)
    turns = [kind[turn] for turn in range(len(rows)) for kind in by_kind.values() if turn < len(kind)]
    kept = {each.row for each in turns[:most]}
    return [each for each in rows if each.row in kept]


def _pictured(facts: CacheFacts) -> str | None:
    """Return the feature of pictures of random utterances: the first with dims and frames."""
    for each in (*facts.features,):
        if each.has_frames and each.dims:
            return each.name
    return facts.main


def _cards(view: View, shown: Sequence[tuple[int, str, str]]) -> Iterator[Html]:
    facts = view.facts
    found = {each.name: each for each in facts.values}
    arrays = [(row, name, why, read_one(facts.opened, name, row)) for row, name, why in shown]
    longest = max((len(frames) for *_, frames in arrays if frames is not None), default=1)
    for row, name, why, frames in arrays:
        if frames is None or not frames.size:
            continue
        id, values = facts.table.id(row), found[name]
        what = f"{len(frames):,} frames" if len(frames) != 1 else "one frame"
        alt = f"{name} of {id}, {what}{f', {why}' if why else ''}"
        wide = f"width:{max(100 * len(frames) / max(longest, 1), 6):.1f}%"
        caption = element(
            "figcaption",
            element("code", id),
            element("span", f"{what}{f' of {name}' if len(facts.features) > 1 else ''}"),
            [element("span", kind, class_="kind") for kind in why.split(", ") if kind],
        )
        yield element("figure", _drawn(frames, values, alt, wide), caption, id=view.anchor(f"picture-{row}"))


def _drawn(frames: NDArray[Any], values: FeatureValues, alt: str, style: str) -> Html:
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


def _drawn_line(numbers: NDArray[Any], values: FeatureValues, alt: str, style: str) -> Html:
    numbers = np.asarray(numbers, np.float64)
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


# Annotations.


def annotations(view: View) -> Html:
    """Return who speaks and what: hours by value, numbers in bins, texts against frames."""
    facts, found = view.facts, view.facts.annotations
    parts = [_groups(view, each) for each in found.groups]
    parts += [_quantity(view, each) for each in found.quantities]
    parts += [_text(view, each) for each in found.texts]
    if found.others:
        named = ", ".join(f"{name} ({kind})" for name, kind in found.others.items())
        parts.append(element("p", f"Not summed up: {named}."))
    if not parts:
        return joined(
            element("p", "It has no annotations. With speakers, texts or durations beside the "
                    "features, the page tells who dominates, and which texts do not fit."),
            python("cache.annotate('speakers.csv')"),
        )  # fmt: skip
    return joined(*parts, python(f"cache.annotation({next(iter(facts.table.annotations))!r})"))


def _groups(view: View, found: Groups) -> Html:
    facts = view.facts
    total = max(int(next(iter(facts.lengths.values())).frames) if facts.lengths
                else len(facts.table), 1)  # fmt: skip
    hours = facts.hours
    unit = "hours" if hours is not None else "frames" if facts.lengths else "utterances"
    share = found.frames[0] / total if len(found.frames) else 0.0
    first = found.values[0] if found.values else ""
    said: Child = [
        number(found.groups, view.named(f"values of {found.name}")),
        f" value{'s' * (found.groups != 1)}",
        *([f"; the largest, {first}, has ", percent(share), f" of all {unit}"] if found.values else []),
        *([f"; {found.missing:,} utterances have none"] if found.missing else []), ".",
    ]  # fmt: skip
    most = max(int(found.frames.max(initial=0)), 1)
    rows = []
    for value, count, frames in zip(found.values, found.utterances, found.frames, strict=True):
        amount = frames / total * hours if hours is not None else frames
        named = view.named(f"{found.name} {value}")
        rows.append(
            (value, number(int(count), f"{named} utterances"),
             number(float(amount) if hours is not None else int(amount), f"{named} {unit}",
                    f"{amount:,.2f}" if hours is not None else None),
             percent(frames / total), bar_in_cell(frames / most))
        )  # fmt: skip
    left = found.groups - len(found.values)
    heads = [found.name, "utterances", unit, "share", ""]
    return element(
        "div",
        element("h3", found.name),
        element("p", said),
        table(heads, rows, label=f"{unit} by {found.name}", sorts=True),
        element("p", f"and {left:,} others", class_="note") if left else "",
    )


def _quantity(view: View, found: Quantity) -> Html:
    edges, binned = found.bins.edges, found.bins
    x = Axis(float(edges[0]), float(edges[-1]), found.name)
    y = Axis(0, binned.tallest * 1.05 or 1, "utterances")
    named = ("least", "median", "mean", "most")
    said = ", ".join(f"{what} {short(getattr(found, what))}" for what in named)
    rows = ((f"{short(left)} to {short(right)}", number(count))
            for left, right, count in zip(edges[:-1], edges[1:], binned.counts, strict=True))  # fmt: skip
    numbers = [
        [f"{what} ", number(getattr(found, what), view.named(f"{found.name} {what}")), " "]
        for what in named
    ]
    none = f"; {found.missing:,} utterances have none" if found.missing else ""
    return element(
        "div",
        element("h3", found.name),
        element("p", *numbers, none),
        bars(found.name, said, edges, binned.counts, (x, y)),
        as_table(f"utterances by {found.name}",
                 table([found.name, "utterances"], rows, label=found.name)),
    )  # fmt: skip


def _text(view: View, found: TextLengths) -> Html:
    facts = view.facts
    x = Axis(float(found.frame_edges[0]), float(found.frame_edges[-1]), "frames")
    y = Axis(float(found.character_edges[0]), float(found.character_edges[-1]), "characters")
    rate = found.frames_a_character
    said = f"the median is {short(rate)} frames a character; light bins hold more utterances"
    far = [each for each in facts.oddities if each.kind == "speech rate"][:1]
    rows = [
        (element("code", facts.table.id(int(each.rows[place]))), each.says(place))
        for each in far for place in range(min(FAR_TEXTS, len(each.rows)))
    ]  # fmt: skip
    numbers = [
        number(found.total, view.named(f"{found.name} characters")), " characters; the median is ",
        number(rate, view.named(f"{found.name} rate")), " frames a character",
        f"; {found.missing:,} utterances have no text" if found.missing else "", ".",
    ]  # fmt: skip
    counts = found.bins
    bins = ((f"{short(found.character_edges[up])} to {short(found.character_edges[up + 1] - 1)}",
             f"{short(found.frame_edges[across])} to {short(found.frame_edges[across + 1] - 1)}",
             number(int(counts[up, across])))
            for up, across in sorted(zip(*np.nonzero(counts), strict=True),
                                     key=lambda at: -counts[at])[:100])  # fmt: skip
    return element(
        "div",
        element("h3", f"{found.name} against frames"),
        element("p", numbers),
        field_of_bins(f"Characters of {found.name} against frames", said, counts, (x, y)),
        as_table("the fullest bins",
                 table(["characters", "frames", "utterances"], bins, label="bins")),
        table(["id", "furthest from the median"], rows, label="texts that fit badly")
        if rows else element("p", "No text fits its length badly."),
    )  # fmt: skip


# Storage, what it was made from, and how the page was made.


def storage(view: View) -> Html:
    """Return the bytes of each feature, and what other dtypes would take."""
    facts, rows = view.facts, []
    most = max((each.stored for each in facts.features), default=0) or 1
    for each in facts.features:
        half = each.raw // 2 if each.dtype == "float32" else each.raw // 4
        smaller = nbytes(half) if each.dtype in ("float32", "float64") else "-"
        ratio = each.stored / each.raw if each.raw else 1.0
        rows.append(
            (element("code", each.name), each.shape, each.dtype, each.backend, each.codec,
             nbytes(each.stored, view.named(f"bytes of {each.name}")),
             percent(ratio, view.named(f"share of {each.name}")), smaller,
             bar_in_cell(each.stored / most))
        )  # fmt: skip
    heads = ["feature", "shape", "dtype", "format", "codec", "stored", "of raw", "as float16", ""]
    stored = sum(each.stored for each in facts.features)
    pairs: list[tuple[str, Child]] = [
        ("files", [number(facts.containers, view.named("files")), " of ",
                   number(facts.parts, view.named("parts")), " parts, ",
                   nbytes(facts.files, view.named("bytes of files"))]),
        ("beside arrays", [nbytes(max(facts.files - stored, 0), view.named("bytes beside")),
                           " of headers, padding, and utterances that were deleted"]),
    ]  # fmt: skip
    return joined(
        table(heads, rows, label="bytes by feature", sorts=True),
        facts_list(pairs),
        python(f"featcache.inspect.estimate({facts.path!r})"),
    )


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
        facts_list((key, _value(each)) for key, each in recorded.items())
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


def ids_of(facts: CacheFacts, rows: Ints) -> list[str]:
    """Return the ids of rows."""
    return list(facts.table.selection.packed_ids(rows))


def size_text(value: int) -> str:
    """Return bytes as text."""
    return bytes_text(value)

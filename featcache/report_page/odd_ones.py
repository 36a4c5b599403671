"""Section on odd utterances: their table, the search through all ids, and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from featcache.interface import Array
from featcache.report_page.charts import (
    Axis,
    Html,
    element,
    image,
    joined,
    legend,
    number,
    picture,
)
from featcache.report_page.facts import CacheFacts
from featcache.report_page.rules import RULES
from featcache.report_page.values import FeatureValues, read_one
from featcache.report_page.view import Child, View, python, table

MOST_ODD = 120  # rows of the table
Shown = tuple[int, str, str]  # row, feature, and why it is odd
FULL_WIDTH = 0.95  # of the lengths: pictures of longer utterances are squeezed

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

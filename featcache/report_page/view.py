"""A cache on the page, the scales that several share, and the pieces that sections are made of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from featcache.report_page.charts import Html, element, joined
from featcache.report_page.facts import CacheFacts
from featcache.report_page.histograms import histogram, length_edges

IN_FULL = 12  # features; of more, one row each
Child = str | Iterable[str]
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


@dataclass(frozen=True)
class Scales:
    """Scales that charts of several caches share, so that they can be compared."""

    length_edges: Mapping[str, NDArray[np.float64]]
    tallest: Mapping[str, int]
    values: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, caches: Sequence[CacheFacts]) -> Scales:
        """Return the scales that hold the charts of all caches."""
        edges: dict[str, NDArray[np.float64]] = {}
        tallest: dict[str, int] = {}
        values: dict[str, tuple[float, float]] = {}
        for name in dict.fromkeys(name for each in caches for name in each.lengths):
            mine = [each.lengths[name] for each in caches if name in each.lengths]
            edges[name] = length_edges(mine)
            counts = [histogram(each.lengths, each.counts, edges[name]).tallest for each in mine]
            tallest[name] = max(counts, default=0)
        for each in (value for cache in caches for value in cache.values):
            if each.stats is not None and each.stats.count:
                low = float(np.nanmin(each.stats.mean - each.stats.std, initial=np.inf))
                high = float(np.nanmax(each.stats.mean + each.stats.std, initial=-np.inf))
                was = values.get(each.name, (low, high))
                values[each.name] = min(was[0], low), max(was[1], high)
        return cls(edges, tallest, values)


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
        return joined(" ", element("span", text, class_="sampled"))


def python(code: str) -> Html:
    """Return a line of Python that gives the same."""
    return element(
        "div",
        element("code", code),
        element("button", "copy", type="button", class_="copy script", aria_label=f"copy: {code}"),
        class_="python",
    )


def table(
    headings: Sequence[str], rows: Iterable[Sequence[Child]], *, label: str, sorts: bool = False
) -> Html:
    """Return a table in a box that scrolls; above a column of bars no heading is seen."""
    head = element(
        "tr",
        (
            element("th", each if each != BARS else element("span", each, class_="hidden"),
                    scope="col", class_="bars" if each == BARS else None)
            for each in headings
        ),
    )  # fmt: skip
    body = (element("tr", (element("td", cell) for cell in row)) for row in rows)
    inner = element("table", element("thead", head), element("tbody", body),
                    class_="sorts" if sorts else None)  # fmt: skip
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=label)


BARS = "as a bar"


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


def day(made: object) -> str:
    """Return an ISO time as people write it; what is none as it is.

    >>> day("2026-11-25T10:04:32+00:00")
    '25 Nov 2026, 10:04 UTC'
    """
    try:
        time = datetime.fromisoformat(str(made)).astimezone(UTC)
    except (ValueError, OverflowError):
        return str(made)
    return f"{time.day} {MONTHS[time.month - 1]} {time:%Y, %H:%M} UTC"


def json_block(data: object, id: str) -> Html:
    """Return data for the script, which no browser runs."""
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")
    return element("script", Html(text), type="application/json", id=id)

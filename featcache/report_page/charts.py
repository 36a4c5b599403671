"""Pieces of the page: markup that is safe by its type, tables, SVG, and heat maps as palette PNG.

Text and attributes are escaped where an element is made; only `Html` goes into the page as it is.
Labels of axes are HTML beside the SVG, so that they stay readable at any width.
"""

from __future__ import annotations

import base64
import html
import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from featcache.errors import bytes_text
from featcache.interface import Array, Ints
from featcache.report_page.facts import CacheFacts
from featcache.report_page.histograms import histogram, length_edges
from featcache.report_page.values import Floats


class Html(str):
    """Markup that needs no escaping: what `element` returned, or a constant of ours."""

    __slots__ = ()


Child = str | Iterable[str]


def element(name: str, /, *children: Child, **attributes: object) -> Html:
    """Return an element; text and attributes are escaped.

    Names of attributes end with `_` where Python has the word, and `_` stands for `-`. None and
    False leave one out, True gives it no value.

    >>> element("p", "a < b", class_="note", hidden=None)
    '<p class="note">a &lt; b</p>'
    """
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{escaped(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inner = joined(*children)
    if name in _VOID and not inner:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{inner}</{name}>")


def escaped(text: str) -> Html:
    r"""Return text as markup; characters that would hide or turn others round are shown.

    >>> print(escaped("a<b\x1b\u202e"))
    a&lt;b␛\u202e
    """
    return Html(html.escape(text.translate(_SHOWN)))


# control characters, and marks and overrides of the direction of writing
_CONTROL = (code for code in range(32) if chr(code) not in "\t\n")
_TURNING = (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN = {
    **{code: chr(0x2400 + code) for code in _CONTROL},
    0x7F: "\u2421",
    **{code: f"\\u{code:04x}" for code in _TURNING},
}
_VOID = {"br", "img", "input", "link", "meta", "hr"}


def joined(*children: Child) -> Html:
    """Return children one after the other, what is no `Html` escaped."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(escaped(child))
        else:
            parts.extend(joined(each) for each in child)
    return Html("".join(parts))


# Numbers in the text: each has its value and its name beside it, for scripts and tests.


def number(value: float, of: str | None = None, text: str | None = None) -> Html:
    """Return a number as text, with the value itself in `<data>`, and `of` what it is."""
    return element("data", text or short(value), value=_plain(value), data_of=of)


LARGE = 1e15  # numbers that are written in powers of ten


def _plain(value: float) -> str:
    whole = isinstance(value, int | np.integer) or (
        abs(value) < LARGE and float(value).is_integer()
    )
    return str(int(value)) if whole else repr(float(value))


def short(value: float) -> str:
    """Return a number in four digits, whole numbers in full.

    >>> short(59155), short(0.16432), short(-24.712345)
    ('59,155', '0.1643', '-24.71')
    """
    if isinstance(value, int | np.integer) or (abs(value) < LARGE and float(value).is_integer()):
        return f"{int(value):,}"
    return f"{value:,.0f}" if 10_000 <= abs(value) < LARGE else f"{value:,.4g}"


def hours_text(hours: float) -> str:
    """Return hours with two places, or in two digits where they are few.

    >>> hours_text(960.123), hours_text(0.3), hours_text(0.0123)
    ('960.12', '0.30', '0.012')
    """
    return f"{hours:,.2f}" if hours >= 0.1 or hours == 0 else f"{hours:.2g}"


def nbytes(value: int, of: str | None = None) -> Html:
    """Return a number of bytes."""
    return number(value, of, bytes_text(value))


def percent(share: float, of: str | None = None) -> Html:
    """Return a share as per cent."""
    return number(share, of, percent_text(share))


def percent_text(share: float) -> str:
    """Return a share as per cent, with a decimal near its ends.

    >>> percent_text(0.42), percent_text(0.076), percent_text(0.999)
    ('42 %', '7.6 %', '99.9 %')
    """
    places = 1 if 0 < share < 0.0995 or 0.9 < share < 1 else 0
    return f"{100 * share:.{places}f} %"


# Axes.


@dataclass(frozen=True)
class Axis:
    """Numbers from `least` to `most` along a side of a chart."""

    least: float
    most: float
    label: str
    whole: bool = False  # whether it counts: no ticks between whole numbers

    def place(self, value: float) -> float:
        """Return where a value is, from 0 to 100."""
        half = self.most / 2 - self.least / 2  # a half is never infinite
        return 100 * (value / 2 - self.least / 2) / half if half else 50.0

    def ticks(self, number: int = 6) -> list[float]:
        """Return round numbers on the axis, at most so many."""
        span = self.most - self.least
        if not 0 < span < math.inf:
            return [self.least]
        power = 10.0 ** math.floor(math.log10(span / number))
        for step in (power * each for each in (1, 2, 5, 10, 20, 50)):
            if self.whole and step < 1:
                continue
            first, last = math.ceil(self.least / step - 1e-9), math.floor(self.most / step + 1e-9)
            if last - first < number:
                break
        return [float(f"{each * step:.12g}") for each in range(first, last + 1)]


def _labelled(plot: Html, x: Axis, y: Axis, *, tall: bool = False) -> Html:
    """Put axes around what is drawn."""
    across = (
        element("span", short(tick), style=f"left:{x.place(tick):.2f}%") for tick in x.ticks()
    )
    up = (element("span", short(tick), style=f"bottom:{y.place(tick):.2f}%") for tick in y.ticks(4))
    return element(
        "div",
        element("div", y.label, class_="y-label", aria_hidden="true"),
        element(
            "div", element("div", up, class_="y-ticks", aria_hidden="true"), plot, class_="plot"
        ),
        element("div", across, class_="x-ticks", aria_hidden="true"),
        element("div", x.label, class_="x-label", aria_hidden="true"),
        class_="chart tall" if tall else "chart",
    )


def _svg(title: str, description: str, y: Axis, *shapes: str) -> Html:
    lines = (
        f'<line class="grid" x1="0" x2="100" y1="{_f(100 - y.place(tick))}" '
        f'y2="{_f(100 - y.place(tick))}"/>'
        for tick in y.ticks(4)
    )
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        Html("".join(lines)),
        [Html(shape) for shape in shapes],
        viewBox="0 0 100 100",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{title}: {description}",
    )


def _f(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"


@dataclass(frozen=True)
class Mark:
    """A dashed line across a histogram."""

    at: float
    label: str


def bars(
    title: str,
    description: str,
    edges: Floats,
    counts: Ints,
    axes: tuple[Axis, Axis],
    marks: Sequence[Mark] = (),
) -> Html:
    """Draw a histogram."""
    x, y = axes
    shapes = []
    for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if count:
            begin, end, top = x.place(float(left)), x.place(float(right)), y.place(float(count))
            gap = min((end - begin) * 0.06, 0.15)
            # a bar of few among many is still seen
            height = max(top, 0.8)
            shapes.append(
                f'<rect class="bar" x="{_f(begin + gap)}" width="{_f(end - begin - 2 * gap)}" '
                f'y="{_f(100 - height)}" height="{_f(height)}"/>'
            )
    for mark in marks:
        at = _f(x.place(mark.at))
        shapes.append(
            f'<line class="mark" x1="{at}" x2="{at}" y1="0" y2="100">'
            f"<title>{escaped(mark.label)}</title></line>"
        )
    return _labelled(_svg(title, description, y, *shapes), x, y)


def band(
    title: str,
    description: str,
    at: Ints,
    lines: tuple[Floats, Floats, Floats],
    axes: tuple[Axis, Axis],
) -> Html:
    """Draw a line within a band: `lines` are its lower end, the line, its upper end."""
    x, y = axes
    low, middle, high = (
        [
            f"{_f(x.place(float(a)))},{_f(100 - y.place(float(v)))}"
            for a, v in zip(at, each, strict=True)
        ]
        for each in lines
    )
    area = f'<polygon class="band" points="{" ".join([*low, *high[::-1]])}"/>'
    line = f'<polyline class="line" points="{" ".join(middle)}"/>'
    return _labelled(_svg(title, description, y, area, line), x, y)


def curve(
    title: str,
    description: str,
    at: Sequence[float],
    values: Sequence[float],
    axes: tuple[Axis, Axis],
) -> Html:
    """Draw a line."""
    x, y = axes
    points = " ".join(
        f"{_f(x.place(a))},{_f(100 - y.place(v))}" for a, v in zip(at, values, strict=True)
    )
    return _labelled(
        _svg(title, description, y, f'<polyline class="line" points="{points}"/>'), x, y
    )


def bar_in_cell(share: float) -> Html:
    """Draw a bar of a share of a table's cell; the number stands beside it."""
    return element("span", class_="cell-bar", style=f"width:{max(share, 0.004) * 100:.1f}%")


# Heat maps: 15 colours from dark to light, and one for what is no number.

RAMP = (
    *("#03020f", "#150b37", "#300a5b", "#4a0c6b", "#65156e", "#7f1e6c", "#992766", "#b3325a"),
    *("#ca404a", "#de5238", "#ed6925", "#f78410", "#fca309", "#f8c932", "#f3f586"),
)
NOT_FINITE = "#00b7c7"
_ROWS, _COLUMNS = 96, 480


def heat_map(values: Floats, low: float, high: float) -> tuple[str, int, int]:
    """Return a PNG as a data URL, its width and its height.

    Args:
        values: (rows, columns), the first row at the top; NaN where there is no number.
        low: what is drawn in the darkest colour, and all below.
        high: what is drawn in the lightest.
    """
    span = (high - low) or 1.0
    with np.errstate(all="ignore"):
        levels = np.clip((values - low) / span * len(RAMP), 0, len(RAMP) - 1)
        colours = np.where(np.isfinite(values), levels, len(RAMP)).astype(np.uint8)
    return _png(colours), colours.shape[1], colours.shape[0]


def picture(frames: Array, low: float, high: float) -> tuple[str, int, int]:
    """Return the heat map of an utterance, (frames, width): time to the right, dim 0 below."""
    return heat_map(_fitted(_fitted(frames, _COLUMNS).T, _ROWS)[::-1], low, high)


def _fitted(frames: Array | Floats, most: int) -> Floats:
    """Return the means of rows that follow each other, so many rows at most."""
    values: Floats = frames.astype(np.float64)
    if len(values) <= most:
        return values
    starts = np.arange(most) * len(values) // most
    ends = np.append(starts[1:], len(values))
    with np.errstate(all="ignore"):
        return np.asarray(np.add.reduceat(values, starts) / (ends - starts)[:, None])


def _png(colours: NDArray[np.uint8]) -> str:
    height, width = colours.shape
    even = np.zeros((height, width + width % 2), np.uint8)
    even[:, :width] = colours
    packed = (even[:, ::2] << 4) | even[:, 1::2]
    lines = np.concatenate([np.zeros((height, 1), np.uint8), packed], axis=1)  # no filter
    palette = bytes.fromhex("".join((*RAMP, NOT_FINITE)).replace("#", ""))
    # PNG, second edition, 5.3 and 11.2: signature, then length, type, data and CRC of each chunk
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 4, 3, 0, 0, 0)),
        (b"PLTE", palette),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(each)) + kind + each + struct.pack(">I", zlib.crc32(kind + each))
        for kind, each in chunks
    )
    return "data:image/png;base64," + base64.b64encode(data).decode()


def legend(low: float, high: float, of: str) -> Html:
    """Return the colours of heat maps with the numbers that they stand for."""
    colours = (element("i", style=f"background:{colour}") for colour in RAMP)
    return element(
        "span",
        f"{of} {short(low)} ", element("span", colours, class_="ramp", aria_hidden="true"),
        f" {short(high)}, not finite ",
        element("i", class_="ramp", style=f"background:{NOT_FINITE};width:12px"),
        class_="legend",
    )  # fmt: skip


def image(url: str, alt: str, **attributes: object) -> Html:
    """Return an image of pixels."""
    return element("img", src=url, alt=alt, **attributes)


def field_of_bins(title: str, description: str, bins: Ints, axes: tuple[Axis, Axis]) -> Html:
    """Draw numbers in two-dimensional bins, (up, across); empty ones stay empty."""
    x, y = axes
    with np.errstate(all="ignore"):
        shades = np.log1p(bins.astype(np.float64))
    most = float(shades.max(initial=0)) or 1.0
    url, _, _ = heat_map(shades[::-1], 0.0, most)
    plot = image(url, f"{title}: {description}", class_="field")
    return _labelled(plot, x, y, tall=True)


# A cache on the page, the scales that several share, and the pieces that sections are made of.

IN_FULL = 12  # features; of more, one row each
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

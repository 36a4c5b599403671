"""Printing for people and for scripts: tables, one JSON document, numbers, strangers' text."""

from __future__ import annotations

import json
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any

import click

import featcache
from featcache.errors import written_out

Told = Mapping[str, Any]  # what a verb found, as its JSON says it

_GAP = 2  # spaces between columns
_LEAST = 12  # characters that are left of what is cut
_MEASURED = 1000  # rows that the widths of columns are taken from
_COLOURS = {
    **dict.fromkeys(("complete", "whole"), "green"),
    **dict.fromkeys(("incomplete", "being written"), "yellow"),
    "damaged": "red",
}
_QUIET = "featcache.quiet"  # key of what a verb's context has


# Text: of strangers, which may hold anything.


def shown(text: str, *, lines: bool = False) -> str:
    """Return a stranger's text as a terminal may get it: control characters are written out.

    >>> shown("a\\x1b[2Jb"), shown("a\\nb"), shown("a\\nb", lines=True)
    ('a\\\\x1b[2Jb', 'a\\\\nb', 'a\\nb')
    """
    return written_out(text, "\n" if lines else "")


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes.

    >>> _width("anna"), _width("安娜"), _width("a\u0301")
    (4, 4, 1)
    """
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(unicodedata.combining(each) > 0 for each in text)


def _cut(text: str, width: int, mark: str) -> str:
    """Cut a text in its middle, since both ends tell most of an id.

    >>> _cut("speaker-anna-0001", 12, "~")
    'speak~a-0001'
    """
    if _width(text) <= width:
        return text
    front, back = "", ""
    for first, last in zip(text, reversed(text), strict=True):
        if _width(front + back + last) >= width:
            break
        back = last + back
        if _width(front + first + back) >= width:
            break
        front += first
    return f"{front}{mark}{back}"


def has_unicode() -> bool:
    """Whether the answer goes to where all characters can be written."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()


def in_colour() -> bool:
    """Whether the answer goes to where colours are wanted."""
    context = click.get_current_context(silent=True)
    wanted = None if context is None else context.color
    return sys.stdout.isatty() if wanted is None else wanted


def room() -> int | None:
    """Return the columns of the terminal that the answer goes to; None where it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def say(
    text: str,
    *,
    fg: str | None = None,
    bold: bool | None = None,
    dim: bool | None = None,
    err: bool = False,
    color: bool | None = None,
) -> None:
    """Print a line on stdout, or stderr, in the encoding that it has; click takes ASCII for wrong.

    `color` keeps the codes of the terminal that the text has.
    """
    stream = sys.stderr if err else sys.stdout
    styled = click.style(text, fg=fg, bold=bold, dim=dim) if fg or bold or dim else text
    click.echo(styled, file=stream, color=color)


# Answers, on stdout.


def print_json(name: str, content: Mapping[str, object]) -> None:
    """Print what a verb found as one JSON document."""
    say(json_line({"featcache": featcache.__version__, "verb": name, **content}))


def json_line(content: object) -> str:
    """Return JSON in one line, without a character that a terminal would act on."""
    text = json.dumps(content, ensure_ascii=not has_unicode(), allow_nan=False, default=_plain)
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


def _plain(value: object) -> object:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def plain(value: object) -> Any:
    """Return a value as JSON can hold it: numbers that are not finite are unknown."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Print rows below their heads, those of `right` flush right; a column "id" holds ids.

    In a terminal, columns that do not fit are left out from the right, and named; the first column
    is cut before. Widths are those of the first thousand rows.
    """
    lines = ([shown(cell) for cell in row] for row in rows)
    first = list(islice(lines, _MEASURED))
    heads = [shown(name) for name in columns]
    widths = [max(map(_width, column)) for column in zip(heads, *first, strict=True)]
    count, space, mark = len(columns), room(), "…" if has_unicode() else "~"
    if space is not None:
        least = min(widths[0], max(_LEAST, _width(heads[0])))
        while count > 1 and least + sum(widths[1:count]) + _GAP * (count - 1) > space:
            count -= 1
        others = sum(widths[1:count]) + _GAP * (count - 1)
        widths[0] = min(widths[0], max(least, space - others))

    def line(row: Sequence[str], bold: bool) -> str:
        parts: list[str] = []
        for name, cell, width in zip(columns[:count], row, widths, strict=False):
            text = cell if space is None else _cut(cell, width, mark)
            filling = " " * (width - _width(text))
            colour = "cyan" if name == "id" else _COLOURS.get(cell) if name == "state" else None
            styled = click.style(text, fg=colour, bold=bold or None) if bold or colour else text
            parts.append(f"{filling}{styled}" if name in right else f"{styled}{filling}")
        return (" " * _GAP).join(parts).rstrip()

    say(line(heads, bold=True))
    told = filter(None, (line(row, bold=False) for row in chain(first, lines)))
    while some := "\n".join(islice(told, _MEASURED)):
        say(some)
    if count < len(columns):
        hint(f"too narrow for: {', '.join(heads[count:])}")


# All else, on stderr.


def hint(text: str) -> None:
    """Print what is no part of the answer."""
    if not is_quiet():
        say(shown(text), dim=True, err=True)


def is_quiet() -> bool:
    """Whether the verb prints nothing but errors."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_QUIET))


def be_quiet() -> None:
    """Print nothing but errors from now on."""
    click.get_current_context().meta[_QUIET] = True


# Numbers for people.


def number(value: float | None) -> str:
    """Return a number for people; "-" where it is not known."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.2g}"


def value_text(value: float | None) -> str:
    """Return a measured value for people.

    >>> value_text(-24.6789), value_text(None)
    ('-24.68', '-')
    """
    return "-" if value is None or value != value else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return a time for people.

    >>> duration(0.26), duration(86), duration(7320)
    ('0.3 s', '1 min 26 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def ago(when: str) -> str:
    """Return how long ago a time in ISO 8601 was."""
    from featcache.reading import ago as in_words

    return in_words((datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds())

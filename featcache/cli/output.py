"""Printing for people and for scripts: tables, one JSON document, errors in one sentence."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import ParamSpec

import click

from featcache.errors import CacheLockedError, FeatcacheError

P = ParamSpec("P")
NO, IMPOSSIBLE, LATER, INTERRUPTED = 1, 2, 75, 130  # exit codes
_GAP = 2  # spaces between columns
_LEAST = 12  # characters that are left of an id that is cut
_COLOURS = {
    **dict.fromkeys(("complete", "whole"), "green"),
    **dict.fromkeys(("incomplete", "being written"), "yellow"),
    **dict.fromkeys(("damaged", "DAMAGED"), "red"),
}


class Answer(click.ClickException):
    """Ends a verb whose answer is no: all was printed."""

    exit_code = NO

    def show(self, file: object = None) -> None:
        """Print nothing more."""


def verb(function: Callable[P, None]) -> click.Command:
    """Make a verb of a function: the options that all have, and errors as people want them."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> None:
        own = dict(kwargs)
        debug, color = own.pop("debug"), own.pop("color")
        click.get_current_context().color = _colours(str(color))
        with _errors(function.__name__.replace("_", "-"), bool(own.get("as_json")), bool(debug)):
            function(*args, **own)  # type: ignore[arg-type]

    for option in (
        click.option("--debug", is_flag=True, help="Show where an error came from."),
        click.option(
            "--color", type=click.Choice(["auto", "always", "never"]), default="auto",
            help="auto: in a terminal; NO_COLOR and FORCE_COLOR are heard.",
        ),
    ):  # fmt: skip
        called = option(called)
    name = function.__name__.replace("_", "-")
    return click.command(name, context_settings={"help_option_names": ["-h", "--help"]})(called)


def as_json(function: Callable[P, None]) -> Callable[P, None]:
    """Add `--json` to a verb, which gets `as_json`."""
    told = "Print one JSON document."
    return click.option("--json", "as_json", is_flag=True, help=told)(function)


def _colours(wanted: str) -> bool | None:
    if wanted != "auto":
        return wanted == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


@contextlib.contextmanager
def _errors(name: str, is_json: bool, debug: bool) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # `| head`: whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except (FeatcacheError, OSError) as error:
        if debug:
            raise
        code = LATER if isinstance(error, CacheLockedError) else IMPOSSIBLE
        if is_json:
            told = {"type": type(error).__name__, "message": str(error)}
            print_json(name, {"error": told})
        click.secho(f"{name}: {shown(str(error), lines=True)}", fg="red", err=True)
        raise SystemExit(code) from error


def print_json(name: str, content: Mapping[str, object]) -> None:
    """Print what a verb found as one JSON document."""
    click.echo(json.dumps({"verb": name, **content}, ensure_ascii=False, allow_nan=False))


def shown(text: str, *, lines: bool = False) -> str:
    """Return a stranger's text as a terminal may get it: control characters are written out.

    >>> shown("a\\x1b[2Jb"), shown("a\\nb"), shown("a\\nb", lines=True)
    ('a\\\\x1b[2Jb', 'a\\\\nb', 'a\\nb')
    """
    return "".join(
        each if each.isprintable() or (lines and each == "\n") else _written_out(each)
        for each in text
    )


def _written_out(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Print rows below their heads, those of `right` flush right.

    In a terminal, columns that do not fit are left out from the right, and named.
    """
    cells = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    count = len(columns)
    if sys.stdout.isatty():
        room = shutil.get_terminal_size().columns
        first = max(_LEAST, room - sum(widths[1:]) - _GAP * (count - 1))
        widths[0] = min(widths[0], first)
        while count > 1 and sum(widths[:count]) + _GAP * (count - 1) > room:
            count -= 1

    def line(row: Sequence[str], bold: bool) -> str:
        parts: list[str] = []
        for name, cell, width in zip(columns[:count], row, widths, strict=False):
            text = _cut(cell, width)
            padded = text.rjust(width) if name in right else text.ljust(width)
            parts.append(click.style(padded, bold=bold or None, fg=_COLOURS.get(cell)))
        return (" " * _GAP).join(parts).rstrip()

    click.echo(line(columns, bold=True))
    for row in cells:
        click.echo(line(row, bold=False))
    if count < len(columns):
        hint(f"too narrow for: {', '.join(columns[count:])}")


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    front = (width - 1) // 2
    return f"{text[:front]}…{text[len(text) - (width - 1 - front) :]}"


def hint(text: str) -> None:
    """Print what is no part of the answer, on stderr."""
    click.secho(shown(text), dim=True, err=True)


def size(count: float) -> str:
    """Return bytes for people.

    >>> size(950), size(4_300_000)
    ('950 B', '4.3 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError


def number(value: float | None) -> str:
    """Return a number for people; "-" where it is not known."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "utterance"), counted(1200, "utterance")
    ('1 utterance', '1,200 utterances')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ago(when: str) -> str:
    """Return how long ago a time in ISO 8601 was."""
    from featcache.reading.opening import ago as in_words

    return in_words((datetime.now(UTC) - datetime.fromisoformat(when)).total_seconds())

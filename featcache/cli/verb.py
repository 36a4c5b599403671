"""A verb made of a function: options that all have, exit codes, errors in one sentence.

What a verb prints, too, for people and for scripts: tables, one JSON document, numbers, text of
strangers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import click

import featcache
from featcache._progress import without_bars
from featcache.cli import reason, settle_output
from featcache.errors import (
    CacheLockedError,
    ConfigError,
    FeatcacheError,
    NotACacheError,
    counted,
    written_out,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from featcache.store import Cache


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


P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])
# exit codes; the last one is that of a program whose reader has gone, in any shell
NO, IMPOSSIBLE, LATER, UNREAD = 1, 2, 75, 141


def place(name: str, kind: str = "dir", *, many: bool = False) -> Callable[[F], F]:
    """Return an argument that a shell completes: by directories, or by files as well ("file")."""

    def complete(ctx: click.Context, param: click.Parameter, text: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(text, type=kind)]

    metavar = name.upper() if not many else f"{name.upper().removesuffix('S')}..."
    return click.argument(
        name, metavar=metavar, nargs=-1 if many else 1, required=True, shell_complete=complete
    )


CACHE, CACHES = place("cache"), place("caches", many=True)
WHERE = click.option(
    "--where",
    metavar="EXPR",
    multiple=True,
    help="One comparison of a column: fbank>60, speaker=anna|ben, text~hello, snr= (missing).",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_COMMON = (
    click.option("--debug", is_flag=True, help="Show where an error came from."),
    click.option("-q", "--quiet", is_flag=True, help="Print errors alone: the exit code answers."),
    click.option(
        "--color", type=click.Choice(["auto", "always", "never"]), default="auto",
        help="auto: in a terminal; NO_COLOR and FORCE_COLOR are heard.",
    ),
)  # fmt: skip


def end(code: int) -> NoReturn:
    """End a verb that has printed all, with an exit code."""
    sys.stdout.flush()  # so that a reader that has gone is noticed here
    raise SystemExit(code)


def verb(function: Callable[P, None]) -> click.Command:
    """Make a verb of a function."""
    name = function.__name__.replace("_", "-")

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> None:
        own = dict(kwargs)
        debug, quiet, color = own.pop("debug"), own.pop("quiet"), own.pop("color")
        click.get_current_context().color = _colours(str(color))
        if quiet:
            be_quiet()
        _send_all_characters()
        with (
            _errors(name, bool(own.get("as_json")), bool(debug)),
            _log_to_stderr(),
            _silence() if quiet else contextlib.nullcontext(),
        ):
            function(*args, **own)  # type: ignore[arg-type]
            sys.stdout.flush()

    for option in _COMMON:
        called = option(called)
    return click.command(name, context_settings={"help_option_names": ["-h", "--help"]})(called)


def _colours(wanted: str) -> bool | None:
    if wanted != "auto":
        return wanted == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return True if os.environ.get("FORCE_COLOR") else None


def _send_all_characters() -> None:
    """Write out what the encoding of a terminal or pipe lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Send the answer nowhere, and show no bar."""
    with (
        without_bars(),
        open(os.devnull, "w", encoding="utf-8") as nowhere,  # noqa: PTH123 (no file)
        contextlib.redirect_stdout(nowhere),
    ):
        yield


# of the library's messages, which say what to do in Python
_WORDS = {
    "featcache.store.repair(path) (first with dry_run=True)": "featcache repair (--dry-run first)",
    "featcache.store.repair(path)": "featcache repair",
    "call collect() of the cache once, opened without that": "run featcache collect on it once",
    "call collect() of it once": "run featcache collect on it once",
    "as check_reads needs": "as verify needs",
    "opening the cache with verify='arrays' tells": "featcache verify tells",
    " (or open the cache with featcache.open to read it)": "",
    " (settings of featcache.adopt, such as kind=, are given as adopting={'kind': ...})": "",
    "cache.repair()": "featcache repair",
    "Cache.delete": "featcache delete",
    "featcache.convert makes a cache of it, by a copy (adopting= takes the settings of adopt)": (
        "featcache convert makes a cache of it, by a copy"
    ),
    "open the cache with roots={": "write its place into adopted.json in the cache: {",
    "open the cache without version= to": "name it without @TAG to",
}


class _Told(logging.Handler):
    """Prints warnings of the library for people."""

    def emit(self, record: logging.LogRecord) -> None:
        if not is_quiet():
            say(shown(record.getMessage(), lines=True), fg="yellow", err=True)


@contextlib.contextmanager
def _log_to_stderr() -> Iterator[None]:
    logger, told = logging.getLogger("featcache"), _Told(logging.WARNING)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(told)
    try:
        yield
    finally:
        logger.removeHandler(told)
        logger.propagate = before


def in_words(text: str) -> str:
    """Return a message of the library in the words of the command line.

    Arguments that it advises become options, where the verb has them.
    """
    for python, word in _WORDS.items():
        text = text.replace(python, word)
    context = click.get_current_context(silent=True)
    for each in context.command.params if context else ():
        if isinstance(each, click.Option):
            name, option = rf"(?<![\w.]){each.name}=", each.opts[-1]
            text = re.sub(rf"{name}(True\b|(?=\W|$)(?!'))", option, text)
            text = re.sub(rf"{name}'(\w+)'", rf"{option} \1", text)
            text = re.sub(rf"{name}('[^']*'|\d+\b)", rf"{option} \1", text)
    return _CALL.sub(_typed, text)


# a call of a verb with paths and options alone
_CALL = re.compile(
    r"featcache\.(adopt|convert)\(('[^']*'), '(\w+)'((?:, --[\w-]+ (?:'[^']*'|\w+))*)\)"
)


def _typed(call: re.Match[str]) -> str:
    return f"featcache {call[1]} {call[2]} {call[3]}{call[4].replace(', --', ' --')}"


def json_of(file: IO[str]) -> Any:
    """Read JSON from a file that is named on the command line."""
    try:
        return json.load(file)
    except ValueError as error:
        raise ConfigError(f"{file.name!r} is no JSON: {error}") from error


@contextlib.contextmanager
def _errors(name: str, is_json: bool, debug: bool) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # `| head`: whoever reads has read enough
        settle_output()
        raise SystemExit(UNREAD) from None
    except click.UsageError as error:
        if is_json:
            _print_error(name, error, error.format_message())
        raise
    except (click.Abort, click.exceptions.Exit):  # an interrupted question
        raise
    except click.ClickException as error:
        _tell(name, error, error.format_message(), is_json, debug)
    except FeatcacheError as error:
        _tell(name, error, str(error), is_json, debug)
    except OSError as error:
        _tell(name, error, reason(error), is_json, debug)
    except Exception as error:
        text = f"{type(error).__name__}: {error}; an error of featcache's own, see --debug"
        _tell(name, error, text, is_json, debug)


def _tell(name: str, error: Exception, text: str, is_json: bool, debug: bool) -> None:
    text = in_words(text)
    if is_json:
        with contextlib.suppress(OSError):  # which may be the error
            _print_error(name, error, text)
    if debug:
        traceback.print_exc()
    settle_output()
    say(f"featcache {name}: {shown(text, lines=True)}", fg="red", err=True)
    raise SystemExit(LATER if isinstance(error, CacheLockedError) else IMPOSSIBLE) from error


def _print_error(name: str, error: Exception, text: str) -> None:
    print_json(name, {"error": {"type": type(error).__name__, "message": text}})


# Caches, as they are named on the command line.

_DEEPEST = 3  # folders below one that is named


def opened(text: str | Path, *, version: str | None = None, check_reads: bool = False) -> Cache:
    """Open CACHE, or CACHE@TAG, to look at it: nothing is expected of what it was made from.

    A URL is opened, too. One that names a user is not cut at its `@`: it is refused as a whole.
    """
    from urllib.parse import urlsplit

    from featcache.reading import OpenSettings, located, open_generation
    from featcache.store import Cache

    path, at, tag = str(text).rpartition("@")
    if at and path and "@" not in urlsplit(str(text)).netloc and not Path(text).exists():
        return opened(path, version=tag, check_reads=check_reads)
    place, settings = located(text, OpenSettings(check_reads=check_reads, version=version))
    return Cache(open_generation(place, None, settings))


def tell_pending(cache: Cache) -> int | None:
    """Print how many utterances are in no generation yet, if any are.

    Return their number; None where damage, or a lack of rights, hides it.
    """
    from featcache.reading import pending_of

    try:
        count, writer = pending_of(cache.opened)
    except OSError as error:
        hint(in_words(reason(error)))
        return None
    if count and writer is None:
        left = f"{counted(count, 'utterance')} left by a killed writer"
        hint(f"{cache.path}: {left}, not counted here; see: featcache recover {cache.path}")
    elif count:
        writes = f"{writer.host}, process {writer.pid}" if writer else ""
        hint(f"{cache.path}: {counted(count, 'utterance')} more, being written by {writes}")
    return count


def found(texts: tuple[str, ...]) -> tuple[list[str], bool]:
    """Return the caches that are named, and those that lie below a folder that is named.

    Also whether a folder could not be looked into, which is told.
    """
    caches: list[str] = []
    refused: list[PermissionError] = []
    for text in texts:
        within = list(_below(Path(text), _DEEPEST, refused)) if Path(text).is_dir() else [text]
        if not within and not refused:
            raise NotACacheError(f"there is no cache in {text!r}, nor in a folder below it")
        caches += within
    for error in refused:
        say(shown(reason(error)), fg="red", err=True)
    return caches, bool(refused)


def _below(folder: Path, levels: int, refused: list[PermissionError]) -> Iterator[str]:
    try:
        if (folder / "featcache.json").exists():
            yield str(folder)
        elif levels:
            for each in sorted(each for each in folder.iterdir() if each.is_dir()):
                yield from _below(each, levels - 1, refused)
    except PermissionError as error:
        refused.append(error)

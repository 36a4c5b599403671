"""A verb made of a function: options that all have, exit codes, errors in one sentence."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import click

from featcache._progress import without_bars
from featcache.cli import reason, settle_output
from featcache.cli.output import be_quiet, hint, is_quiet, print_json, say, shown
from featcache.errors import (
    CacheLockedError,
    ConfigError,
    FeatcacheError,
    NotACacheError,
    counted,
)

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from featcache.remote import RemoteOptions
    from featcache.store import Cache

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


def at_url(function: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of a store behind a URL, as its argument `remote`."""

    @functools.wraps(function)
    def called(
        *, endpoint: str | None, region: str | None, anonymous: bool, **others: object
    ) -> None:
        from featcache.remote import RemoteOptions

        function(
            remote=RemoteOptions(endpoint=endpoint, region=region, anonymous=anonymous), **others
        )

    for option in (
        click.option("--anonymous", is_flag=True, help="Send no credentials."),
        click.option(
            "--region", metavar="NAME", help="Of the bucket; else as the environment says."
        ),
        click.option("--endpoint", metavar="URL", help="A server that speaks S3."),
    ):
        called = option(called)
    return called


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
            say(shown(in_words(record.getMessage()), lines=True), fg="yellow", err=True)


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
            text = re.sub(rf"{name}(True\b|(?=\W|$)(?!['-]))", option, text)
            text = re.sub(rf"{name}'(\w+)'", rf"{option} \1", text)
            text = re.sub(rf"{name}('[^']*'|-?\d+\b)", rf"{option} \1", text)
    text = re.sub(r"RemoteOptions\((--[\w-]+)\)", r"\1", text)
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


def opened(
    text: str | Path,
    *,
    version: str | None = None,
    check_reads: bool = False,
    remote: RemoteOptions | None = None,
) -> Cache:
    """Open CACHE, or CACHE@TAG, to look at it: nothing is expected of what it was made from.

    A URL is opened, too. One that names a user is not cut at its `@`: it is refused as a whole.
    """
    from urllib.parse import urlsplit

    from featcache.reading import OpenSettings, located, open_generation
    from featcache.remote import DEFAULT
    from featcache.store import Cache

    path, at, tag = str(text).rpartition("@")
    if at and path and "@" not in urlsplit(str(text)).netloc and not Path(text).exists():
        return opened(path, version=tag, check_reads=check_reads, remote=remote)
    asked = OpenSettings(check_reads=check_reads, version=version)
    place, settings = located(text, asked, remote or DEFAULT)
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

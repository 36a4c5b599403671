"""The command `featcache`: a look at caches, and their editing, from a shell.

A verb parses, calls what Python has, and prints. Its module is loaded when it is called, so that
`--help` and completion load none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

import featcache

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# a verb -> the module that has it, and its line of help
VERBS: Mapping[str, tuple[str, str]] = {
    "info": ("info", "What caches hold, and how far they are."),
    "ls": ("look", "Utterances of a cache: ids, frames, annotations."),
    "show": ("look", "Single utterances: shapes, values, a picture."),
    "stats": ("look", "Mean and deviation of each feature."),
    "made-from": ("look", "What a cache was made from."),
    "diff": ("compare", "How two caches differ in what they hold and were made from."),
    "verify": ("compare", "Whether the bytes of caches are what was written."),
    "report": ("make", "A page about a cache, or two side by side, for a browser."),
    "repair": ("edit", "Save what is intact of a damaged cache, and name what is lost."),
    "recover": ("edit", "Publish what a writer that was killed has left."),
    "delete": ("edit", "Delete utterances."),
    "compact": ("edit", "Rewrite what holds deleted utterances, and small parts."),
    "tag": ("edit", "Name the current generation, or list the names."),
    "annotate": ("edit", "Give utterances values from a file."),
    "accept": ("edit", "Take another fingerprint for what a cache was made from."),
    "collect": ("edit", "Read an adopted cache once, for checksums and statistics."),
    "estimate": ("make", "How large a cache would be in other formats."),
    "convert": ("make", "Write a cache, or another store, anew in another format."),
    "adopt": ("make", "Make a cache of a store where it lies, without a copy."),
    "push": ("make", "Copy a cache to an object store."),
    "pull": ("make", "Copy a cache from an object store."),
    "sync": ("make", "Copy the later generation to where the earlier one is."),
}
IMPOSSIBLE, INTERRUPTED = 2, 130  # exit codes


class Verbs(click.Group):
    """The verbs, each loaded when it is called."""

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the command; what cannot be printed, help as well, is no answer."""
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # closed by whoever called
                setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115
        try:
            return super().main(*args, **settings)
        except OSError as error:
            click.echo(f"featcache: {reason(error)}", err=True)
            settle_output()
            sys.exit(IMPOSSIBLE)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of the verbs."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a verb."""
        if cmd_name not in VERBS:
            return None
        module = import_module(f"featcache.cli.{VERBS[cmd_name][0]}")
        verb: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return verb

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a verb, of which none is loaded."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=line)
            for name, (_, line) in VERBS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs, each with its line."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, line) for name, (_, line) in VERBS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a verb; an unknown one is told with its nearest name."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in VERBS and not ctx.resilient_parsing:
            ctx.fail(f"no verb {name!r}; {featcache.errors.nearest(name, VERBS)}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Call a verb; an interrupt, also of a question, has its exit code."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            ctx.exit(INTERRUPTED)


def reason(error: OSError) -> str:
    """Return what an error of the system says, as the errors of this library say it."""
    if error.strerror is None:
        return str(error)
    said = error.strerror[:1].lower() + error.strerror[1:]
    return f"{str(error.filename)!r}: {said}" if error.filename is not None else said


def settle_output() -> None:
    """Print what is left of the answer, or send it nowhere: it would fail once more at the end."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # stdout is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(
    cls=Verbs,
    subcommand_metavar="VERB [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(featcache.__version__, prog_name="featcache")
def main() -> None:
    """Look at caches of speech features, and edit them.

    A CACHE is its directory; CACHE@TAG is the generation that a tag names. Exit codes: 0 yes, 1 the
    answer is no, 2 it could not be done, 75 try again later, 130 interrupted.
    """

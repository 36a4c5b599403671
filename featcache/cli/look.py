"""The verbs that read columns and records: ls, stats, made-from."""

from __future__ import annotations

import contextlib
import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, cast

import click

from featcache.cli.output import (
    hint,
    json_line,
    number,
    plain,
    print_json,
    print_table,
    room,
    say,
    shown,
    value_text,
)
from featcache.cli.verb import CACHE, JSON, NO, WHERE, end, opened, verb
from featcache.errors import KeyNotFoundError, MissingDependencyError, counted, nearest

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable

_DEAD = 1e-6  # a deviation below it: the dimension says nothing


@verb
@CACHE
@WHERE
@click.option("--sort", metavar="[-]COLUMN", help="By a column; - for descending.")
@click.option("--columns", metavar="A,B", help="Only these, besides the id.")
@click.option("-n", "count", type=click.IntRange(0), help="At most so many.")
@click.option(
    "--format", "form", type=click.Choice(["table", "csv", "jsonl", "parquet"]), default="table"
)
@click.option("-o", "output", metavar="FILE", type=click.Path(dir_okay=False), help="Into a file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document a line, as jsonl.")
def ls(
    cache: str, where: tuple[str, ...], sort: str | None, columns: str | None, count: int | None,
    form: str, output: str | None, as_json: bool,
) -> None:  # fmt: skip
    """List utterances: id, frames of each feature, annotations. Exit code 1: there is none."""
    from featcache.cli.where import TableColumns, matching

    whole = opened(cache)
    table = matching(whole, where)
    if sort is not None:
        by = TableColumns(table).feature_of(sort.removeprefix("-"))
        table = table.sort(by, descending=sort.startswith("-"))
    matched = len(table)
    if count is not None and count < matched:
        table = table.select(range(count))
    of_table = TableColumns(table)
    names = list(of_table) if columns is None else columns.split(",")
    form = "jsonl" if as_json else form
    if form == "parquet":
        _write_parquet(table, names, output)
    else:
        _write_rows(table, {name: of_table[name] for name in names}, form, output)
    if output is None and form == "table":
        hint(f"{len(table):,} shown, {matched:,} match, of {len(whole):,}")
    if not matched:
        end(NO)


def _write_rows(
    table: FeatureTable, columns: Mapping[str, Any], form: str, output: str | None
) -> None:
    rows = zip(table, *columns.values(), strict=True)
    if form == "table" and output is None:
        right = [name for name, column in columns.items() if column.kind in ("int", "float")]
        cells = ([id, *map(_cell, values)] for id, *values in rows)
        print_table(["id", *columns], cells, right=right)
        return
    with (
        contextlib.nullcontext(sys.stdout)
        if output is None
        else open(output, "w", encoding="utf-8")  # noqa: PTH123 (a word of the command line)
    ) as file:
        if form == "jsonl":
            _write_jsonl(file, ["id", *columns], rows)
        else:
            _write_csv(file, ["id", *columns], rows)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else str(value)


def _write_jsonl(file: IO[str], names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    for row in rows:
        file.write(json_line(dict(zip(names, map(plain, row), strict=True))) + "\n")


def _write_csv(file: IO[str], names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    writer = csv.writer(file, lineterminator="\n")
    quoting = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
    safe = shown if room() is not None and file is sys.stdout else str
    for row in chain([names], rows):
        cells = ["" if value is None else safe(str(value)) for value in row]
        # Python's csv before 3.13 takes a lone carriage return for text that needs no quotes
        (quoting if any("\r" in cell for cell in cells) else writer).writerow(cells)


def _write_parquet(table: FeatureTable, names: Sequence[str], output: str | None) -> None:
    if output is None:
        raise click.UsageError("parquet goes into a file: -o FILE")
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError(
            "--format parquet needs 'pyarrow'; try: pip install pyarrow"
        ) from error
    parquet.write_table(table.to_arrow().select(["id", *names]), output)


@verb
@CACHE
@WHERE
@click.option("--feature", metavar="FEATURE", multiple=True, help="Only these features.")
@click.option(
    "--npz",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Into a file, with ESPnet's keys: count, sum, sum_square.",
)
@JSON
def stats(
    cache: str, where: tuple[str, ...], feature: tuple[str, ...], npz: str | None, as_json: bool
) -> None:
    """Print mean and deviation of each feature, over all frames and dimensions."""
    from featcache.cli.where import matching

    table = matching(opened(cache), where)
    told = {name: table.stats(name) for name in feature or _with_stats(table)}
    if npz is not None:
        if len(told) != 1:
            raise click.UsageError(f"--npz holds one feature: --feature {' or '.join(told)}")
        told[next(iter(told))].save(npz)
    if as_json:
        known = {
            name: {"count": each.count, "mean": plain(each.mean), "std": plain(each.std)}
            for name, each in told.items()
        }
        print_json("stats", {"utterances": len(table), "features": known})
        return
    rows = []
    for name, each in told.items():
        deviation = each.std
        dead = int((deviation < _DEAD).sum()) if each.count else 0
        rows.append([
            name, number(each.count), str(deviation.size),
            *(value_text(float(part.mean())) for part in (each.mean, deviation)),
            value_text(float(deviation.min())), value_text(float(deviation.max())), number(dead),
        ])  # fmt: skip
    head = ["feature", "frames", "dims", "mean", "deviation", "least", "most", "constant dims"]
    print_table(head, rows, right=head[1:])
    hint(f"of {counted(len(table), 'utterance')}; least and most deviation of a dimension")


def _with_stats(table: FeatureTable) -> list[str]:
    """Return the features that have statistics; all where none has, so that it is said why."""
    having, others = [], []
    for name in table.features:
        try:
            table.stats(name)
            having.append(name)
        except KeyNotFoundError:
            others.append(name)
    if having and others:
        hint(f"{', '.join(others)}: no statistics, as declared")
    return having or others


MOST_RECORDED = 6  # entries of a kind that are listed unasked


@verb
@CACHE
@click.argument("key", required=False)
@click.option("--source", is_flag=True, help="The text of the functions, too.")
@JSON
def made_from(cache: str, key: str | None, source: bool, as_json: bool) -> None:
    """Show what a cache was made from: what is compared, and what was recorded beside it.

    KEY chooses a part of it, such as fbank, or recorded.command.
    """
    from featcache import inspect
    from featcache.reading.opening import made_by

    told = inspect.made_from(opened(cache))
    recorded = dict(cast(Mapping[str, Any], told["recorded"]))
    by = made_by(recorded)
    sources = recorded.get("sources") or {}
    if not source:
        recorded.pop("sources", None)
    parts = {"compared": told["fingerprint"], "recorded": recorded}
    if as_json:
        print_json("made-from", {**told, "recorded": recorded})
        return
    if key is None:
        count = counted(cast(int, told["utterances"]), "utterance")
        made = f"made {told['made']}{f' by {by}' if by else ''}"
        say(shown(f"{told['path']}: {made}, generation {told['generation']}, {count}"))
    if key is None:
        parts["recorded"] = _in_short(recorded)
    leaves = [
        (part, path, value)
        for part, content in parts.items()
        for path, value in _leaves(cast(Mapping[str, object], content), short=key is None)
        if key is None or f".{part}.{path}.".find(f".{key}.") >= 0
    ]
    if key is not None and not leaves:
        known = {name for content in parts.values() for name in cast(Mapping[str, Any], content)}
        raise KeyNotFoundError(f"nothing is known of {key!r}; {nearest(key, known)}")
    _print_leaves(leaves, whole=source or key is not None)
    if key is None and sources and not source:
        hint(f"source of {counted(len(sources), 'function')}: --source")


def _in_short(recorded: Mapping[str, object]) -> dict[str, object]:
    """Return what was recorded of a run, with the number of entries where these are many."""
    found: dict[str, object] = {}
    for name, value in recorded.items():
        leaves = len([*_leaves(value, short=False)]) if isinstance(value, Mapping) else 1
        many = f"{leaves} entries: featcache made-from CACHE recorded.{name}"
        found[name] = value if leaves <= MOST_RECORDED else many
    return found


def _leaves(
    content: Mapping[str, object], path: str = "", *, short: bool
) -> Iterator[tuple[str, object]]:
    """Yield paths and values; where it is `short`, a declaration of a feature is one line."""
    for name, value in content.items():
        if not isinstance(value, Mapping) or not value:
            yield f"{path}{name}", value
        elif short and path == "features.":
            said = {key: each for key, each in value.items() if key != "name" and each != {}}
            yield f"{path}{name}", ", ".join(f"{key} {each}" for key, each in said.items())
        else:
            yield from _leaves(value, f"{path}{name}.", short=short)


def _print_leaves(leaves: Sequence[tuple[str, str, object]], *, whole: bool) -> None:
    space, before = room(), ""
    for part, path, value in leaves:
        if part != before:
            say(part, bold=True)
            before = part
        text = shown(f"  {path}: {value}", lines=whole)
        cut = space is not None and not whole and len(text) > space
        say(f"{text[: space - 1]}…" if cut and space else text)

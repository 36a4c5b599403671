"""The verbs that look into one cache: ls, stats, made-from; show, utterances with a picture."""

from __future__ import annotations

import base64
import contextlib
import csv
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import click
import numpy as np
from numpy.typing import NDArray

from featcache.cli.output import (
    Told,
    has_unicode,
    hint,
    in_colour,
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
from featcache.cli.verb import CACHE, JSON, NO, WHERE, end, opened, tell_pending, verb
from featcache.errors import KeyNotFoundError, MissingDependencyError, counted, nearest
from featcache.interface import Array

if TYPE_CHECKING:
    from featcache.store import Cache
    from featcache.tables import FeatureTable

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
    wanted = of_table if columns is None else columns.split(",")
    names = [name for name in dict.fromkeys(wanted) if name != "id"]
    form = "jsonl" if as_json else form
    if form == "parquet":
        _write_parquet(table, names, output)
    else:
        _write_rows(table, {name: of_table[name] for name in names}, form, output)
    if output is None and form == "table":
        hint(f"{len(table):,} shown, {matched:,} match, of {len(whole):,}")
    tell_pending(whole)
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
            *(value_text(float(part.mean()) if each.count else None)
              for part in (each.mean, deviation)),
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

    told = inspect.made_from(opened(cache))
    recorded, by = dict(cast(Told, told["recorded"])), told["by"]
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
        known = {name for content in parts.values() for name in cast(Told, content)}
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


# Single utterances, as numbers and as a picture of characters.

_SHADES = " ░▒▓█"
_ASCII_SHADES = " .:*#"
_LINES, _LINES_IN_COLOUR = 10, 16  # of a picture
_NAMED = 5  # runs of equal frames
_SHOWN = 64  # values of a sequence


@verb
@CACHE
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--feature", metavar="FEATURE", multiple=True, help="Only these features.")
@click.option("--frames", metavar="START:STOP", help="Only these frames.")
@click.option(
    "-o",
    "output",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write an array (.npy), or its picture (.png).",
)
@JSON
def show(
    cache: str, ids: tuple[str, ...], feature: tuple[str, ...], frames: str | None,
    output: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Show single utterances: shapes, values, a picture, annotations."""
    whole = opened(cache)
    start, stop = _frames(frames)
    features = feature or tuple(whole.features)
    if output is not None and (len(ids), len(features)) != (1, 1):
        raise click.UsageError(f"-o writes one array: one ID, --feature {' or '.join(features)}")
    if output is not None and Path(output).suffix not in (".npy", ".png"):
        raise click.UsageError(f"-o writes .npy or .png, not {output!r}")
    whole.rows(ids)  # all ids are there, before anything is printed
    documents: list[dict[str, object]] = []
    for id in ids:
        arrays = {name: _read(whole, id, name, start, stop) for name in features}
        told = {name: _described(array) for name, array in arrays.items()}
        row = int(whole.rows([id])[0])
        notes = {name: whole.annotation(name)[row] for name in whole.annotations}
        if as_json:
            documents.append({"id": id, "features": told, "annotations": plain(notes)})
        else:
            _print(id, arrays, told, notes)
        if output is not None:
            _write(Path(output), arrays[features[0]])
    if as_json:
        print_json("show", documents[0] if len(ids) == 1 else {"utterances": documents})


def _write(file: Path, array: Array) -> None:
    """Write an array as .npy, or its picture as .png."""
    if file.suffix == ".npy":
        np.save(file, array)
        return
    from featcache.report_page.charts import picture

    frames = array.reshape(len(array), -1).astype(np.float64)
    finite = frames[np.isfinite(frames)]
    low, high = np.percentile(finite, (1, 99)) if finite.size else (0.0, 1.0)
    url, _, _ = picture(frames, float(low), float(high))
    file.write_bytes(base64.b64decode(url.partition(",")[2]))


def _frames(text: str | None) -> tuple[int, int | None] | tuple[None, None]:
    if text is None:
        return None, None
    start, colon, stop = text.partition(":")
    if not colon or not all(each.isdecimal() or not each for each in (start, stop)):
        raise click.UsageError(f"--frames takes START:STOP, such as 0:200, not {text!r}")
    return int(start or 0), int(stop) if stop else None


def _read(cache: Cache, id: str, feature: str, start: int | None, stop: int | None) -> Array:
    if start is None or not cache.has_frames(feature):
        return cache.read(id, feature)
    return cache.read(id, feature, start, stop)


def _described(array: Array) -> dict[str, object]:
    """Return what is true of the values of an array; None stands for what it has not."""
    with np.errstate(all="ignore"):
        values = array.astype(np.float64).ravel()
        finite = values[np.isfinite(values)]
        numbers = (finite.mean(), finite.std(), finite.min(), finite.max()) if finite.size else ()
    known = dict(zip(("mean", "std", "min", "max"), map(float, numbers), strict=False))
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        **{name: known.get(name) for name in ("mean", "std", "min", "max")},
        "not_finite": int(values.size - finite.size),
        "constant_frames": _equal_runs(array) if array.ndim > 1 else None,
    }


def _equal_runs(array: Array) -> list[list[int]]:
    """Return runs of three and more equal frames: the first one, and the one behind the last.

    >>> _equal_runs(np.array([[1], [2], [2], [2], [3]])), _equal_runs(np.zeros((2, 4)))
    ([[1, 4]], [])
    """
    frames = array.reshape(len(array), -1)
    same = np.zeros(len(frames) + 1, np.int8)
    same[1:-1] = (frames[1:] == frames[:-1]).all(axis=1)
    bounds = np.flatnonzero(np.diff(same, append=0))
    runs = zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True)
    return [[first, last + 1] for first, last in runs if last + 1 - first >= 3]


def _print(
    id: str,
    arrays: Mapping[str, Array],
    told: Mapping[str, Told],
    notes: Mapping[str, object],
) -> None:
    say(shown(id), fg="cyan", bold=True)
    for name, value in notes.items():
        say(shown(f"  {name}: {'-' if value is None else value}"))
    for name, each in told.items():
        line = f"  {name} {tuple(each['shape'])} {each['dtype']}"
        for word, key in (
            ("mean", "mean"),
            ("deviation", "std"),
            ("least", "min"),
            ("most", "max"),
        ):
            line += f"   {word} {value_text(each[key])}"
        warning = _warning(each)
        say(shown(line) + (click.style(warning, fg="yellow") if warning else ""))
        array = arrays[name]
        if array.size and array.ndim > 1:
            _print_picture(array)
        elif array.size:
            values = " ".join(map(str, array.ravel()[:_SHOWN].tolist()))
            say(f"    {values}{' ...' * (array.size > _SHOWN)}")


def _warning(told: Told) -> str:
    runs = told["constant_frames"] or []
    words = [f"{told['not_finite']:,} values are not finite"] if told["not_finite"] else []
    if runs:
        named = ", ".join(f"{first}-{behind - 1}" for first, behind in runs[:_NAMED])
        words.append(f"equal frames {named}{', ...' * (len(runs) > _NAMED)}")
    return "".join(f"   {each}" for each in words)


def _print_picture(array: Array) -> None:
    """Print the values of frames, from left to right; high dims are above.

    In colour they are half blocks, two values each, in the colours of the report; else five shades.
    """
    colours = has_unicode() and in_colour()
    height = 2 * _LINES_IN_COLOUR if colours else _LINES
    space = (room() or 80) - 12
    frames = array.reshape(len(array), -1).astype(np.float64)
    picture = _means(_means(frames, max(space, 10)).T, height)[::-1]
    finite = np.isfinite(picture)
    least = picture[finite].min(initial=np.inf)
    most = picture[finite].max(initial=-np.inf)
    if not least < most:
        return
    scaled = (np.where(finite, picture, least) - least) / (most - least)
    lines = _in_half_blocks(scaled, finite) if colours else _in_shades(scaled)
    for at, line in enumerate(lines):
        side = "high" if at == 0 else "low" if at == len(lines) - 1 else ""
        say(f"{side:>8}  {line}".rstrip())
    if len(frames) > space:
        hint(f"          {len(frames):,} frames in {picture.shape[1]} columns of their means")


def _in_shades(scaled: NDArray[np.float64]) -> list[str]:
    shades = _SHADES if has_unicode() else _ASCII_SHADES
    levels = np.minimum((scaled * len(shades)).astype(int), len(shades) - 1)
    return ["".join(shades[level] for level in row) for row in levels]


def _in_half_blocks(scaled: NDArray[np.float64], finite: NDArray[np.bool_]) -> list[str]:
    """Return lines of half blocks, each a value above, and one below: as letter and as ground."""
    from featcache.report_page.charts import NOT_FINITE, RAMP

    codes = [_colour_code(each) for each in (*RAMP, NOT_FINITE)]
    levels = np.minimum((scaled * len(RAMP)).astype(int), len(RAMP) - 1)
    levels[~finite] = len(RAMP)
    lines = []
    for top in range(0, len(levels), 2):
        below = levels[top + 1] if top + 1 < len(levels) else [None] * levels.shape[1]
        grounds = ("" if each is None else f"\x1b[48;{codes[each]}m" for each in below)
        blocks = (
            f"\x1b[38;{codes[each]}m{ground}▀"
            for each, ground in zip(levels[top], grounds, strict=True)
        )
        lines.append("".join(blocks) + "\x1b[0m")
    return lines


def _colour_code(colour: str) -> str:
    """Return a colour as terminals take it: whole where they say so, else the nearest of 216.

    >>> _colour_code("#f3f586") if "COLORTERM" not in os.environ else "5;228"
    '5;228'
    """
    parts = bytes.fromhex(colour.removeprefix("#"))
    if os.environ.get("COLORTERM") in ("truecolor", "24bit"):
        return "2;" + ";".join(map(str, parts))
    levels = (0, 95, 135, 175, 215, 255)  # of xterm's cube of 256 colours
    red, green, blue = (min(range(6), key=lambda at: abs(levels[at] - part)) for part in parts)
    return f"5;{16 + 36 * red + 6 * green + blue}"


def _means(rows: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Return at most so many rows, each the mean of several."""
    if len(rows) <= most:
        return rows
    starts = np.arange(most) * len(rows) // most
    with np.errstate(all="ignore"):
        sums = np.add.reduceat(rows, starts, axis=0)
    means: NDArray[np.float64] = sums / np.diff(starts, append=len(rows))[:, None]
    return means

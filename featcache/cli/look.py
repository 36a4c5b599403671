"""The verbs that look: info, ls, show, stats, verify, diff, made-from, estimate. None writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import click

from featcache.cli.output import (
    Answer,
    ago,
    as_json,
    counted,
    hint,
    number,
    print_json,
    print_table,
    shown,
    size,
    verb,
)
from featcache.errors import FeatcacheError, NotACacheError

_CACHES = click.argument("caches", metavar="CACHE...", nargs=-1, required=True)
_CACHE = click.argument("cache", metavar="CACHE")
_WHERE = click.option(
    "--where",
    metavar="EXPR",
    multiple=True,
    help="One comparison: fbank>60, speaker=anna|ben, text~hello.",
)
_SHOWN = 10  # values of a token sequence
_REQUIREMENTS = ("complete",)


def opened(text: str, **how: Any) -> Any:
    """Open CACHE, or CACHE@TAG."""
    import featcache

    path, at, tag = text.rpartition("@")
    if at and not Path(text).exists():
        return featcache.open(path, version=tag, **how)
    return featcache.open(text, **how)


def _found(texts: tuple[str, ...]) -> list[Path]:
    """Return the caches that are named, and those that lie in folders."""
    found: list[Path] = []
    for text in texts:
        path = Path(text)
        if (path / "featcache.json").exists() or not path.is_dir():
            found.append(path)
            continue
        within = sorted(each.parent for each in path.glob("*/featcache.json"))
        if not within:
            raise NotACacheError(f"there is no cache in {text!r}, nor in a folder of it")
        found += within
    return found


@verb
@_CACHES
@click.option("--watch", is_flag=True, help="Again each second, while caches are written.")
@click.option(
    "--require", multiple=True, type=click.Choice(_REQUIREMENTS), help="Exit 1 unless all are so."
)
@as_json
def info(caches: tuple[str, ...], watch: bool, require: tuple[str, ...], as_json: bool) -> None:
    """Tell what caches hold, and how far they are; a folder stands for the caches in it."""
    from featcache import inspect

    before: dict[str, tuple[float, int]] = {}
    while True:
        found = [inspect.info(path) for path in _found(caches)]
        if as_json:
            print_json("info", {"caches": found})
        else:
            _print_info(found)
            for each in found:
                _print_writer(each, before)
        if not (watch and any(each["writer"] for each in found)):
            break
        time.sleep(1)
    if require and not all(each["state"] == "complete" for each in found):
        raise Answer("")


def _print_info(found: list[dict[str, Any]]) -> None:
    if len(found) > 1:
        known = [each for each in found if each["state"] != "damaged"]
        total = sum(each["utterances"] for each in known)
        stored = size(sum(each["bytes"] for each in known))
        click.secho(f"{len(found)} caches, {counted(total, 'utterance')}, {stored}", bold=True)
    head = [
        "cache",
        "utterances",
        "hours",
        "feature",
        "frames",
        "dims",
        "dtype",
        "backend",
        "bytes",
        "state",
        "made",
    ]
    rows: list[list[str]] = []
    for each in found:
        made = each["made"] and f"{ago(each['made']['when'])}{_by(each['made']['by'])}"
        hours = number(each["hours"])
        front = [
            each["path"] if len(found) == 1 else Path(each["path"]).name,
            number(each["utterances"]),
            hours,
        ]
        behind = [each["state"], made or "-"]
        for feature in each["features"] or [None]:
            rows.append([*front, *_cells(feature), *behind])
            front, behind = ["", "", ""], ["", ""]
    print_table(head, rows, right=("utterances", "hours", "frames", "dims", "bytes"))
    for each in found:
        if each["error"]:
            click.secho(shown(each["error"], lines=True), fg="red", err=True)


def _by(script: str | None) -> str:
    return f" by {script}" if script else ""


def _cells(feature: Mapping[str, Any] | None) -> list[str]:
    if feature is None:
        return ["-"] * 6
    dims = feature["dims"]
    backend = feature["backend"] + ("" if feature["codec"] == "raw" else f", {feature['codec']}")
    return [
        feature["name"],
        number(feature["frames"]),
        "-" if dims is None else "x".join(map(str, dims)) or "1",
        feature["dtype"],
        backend,
        size(feature["bytes"]),
    ]


def _print_writer(found: Mapping[str, Any], before: dict[str, tuple[float, int]]) -> None:
    writer = found["writer"]
    if writer is None:
        return
    done, now = found["utterances"] + writer["utterances"], time.monotonic()
    of = "" if found["expected"] is None else f" of {found['expected']:,}"
    by = f"{writer['host']}, process {writer['pid']}, since {writer['since']}"
    words = [f"{found['path']} is being written by {by}"]
    words.append(f"{done:,}{of} durable, {writer['utterances']:,} of them not published")
    then, there = before.get(found["path"], (now, done))
    before[found["path"]] = now, done
    if now > then and done > there:
        rate = (done - there) / (now - then)
        words.append(f"{rate:,.0f}/s")
        if found["expected"]:
            words.append(f"{(found['expected'] - done) / rate:,.0f} s left")
    click.echo(shown("   ".join(words)))


@verb
@_CACHE
@_WHERE
@click.option("--sort", metavar="[-]COLUMN", help="By a column; - for descending.")
@click.option("--columns", metavar="A,B", help="Only these, besides the id.")
@click.option("-n", "count", type=click.IntRange(0), help="At most so many.")
@click.option(
    "--format", "form", type=click.Choice(["table", "csv", "jsonl", "parquet"]), default="table"
)
@click.option("-o", "output", type=click.Path(dir_okay=False), help="Into a file.")
@as_json
def ls(
    cache: str, where: tuple[str, ...], sort: str | None, columns: str | None, count: int | None,
    form: str, output: str | None, as_json: bool,
) -> None:  # fmt: skip
    """List utterances: id, frames of each feature, annotations. Exit code 1: there is none."""
    from featcache.cli.where import matching

    whole = opened(cache)
    table = matching(whole, where)
    if sort is not None:
        table = table.sort(sort.removeprefix("-"), descending=sort.startswith("-"))
    found = len(table)
    if count is not None:
        table = table.select(range(min(count, found)))
    names = columns.split(",") if columns else None
    _write_rows(table, names, "jsonl" if as_json else form, output)
    if output is None and form == "table" and not as_json:
        hint(f"{len(table):,} shown, {found:,} match, of {len(whole):,}")
    if not found:
        raise Answer("")


def _write_rows(table: Any, names: list[str] | None, form: str, output: str | None) -> None:
    from featcache.tables.columns import Columns

    columns = Columns(table)
    names = [name for name in columns if name != "id"] if names is None else names
    if form == "parquet":
        import pyarrow.parquet

        if output is None:
            raise click.UsageError("parquet goes into a file: -o FILE")
        pyarrow.parquet.write_table(table.to_arrow().select(["id", *names]), output)
        return
    chosen = {name: columns[name] for name in names}
    if form == "table" and output is None:
        rows = [
            [id, *("" if value is None else f"{value}" for value in values)]
            for id, *values in zip(table, *chosen.values(), strict=True)
        ]
        right = [name for name, column in chosen.items() if column.kind in ("int", "float")]
        print_table(["id", *names], rows, right=right)
        return
    with click.open_file(output or "-", "w", encoding="utf-8") as file:
        lines = zip(table, *chosen.values(), strict=True)
        if form == "jsonl":
            for values in lines:
                file.write(
                    json.dumps(dict(zip(["id", *names], values, strict=True)), ensure_ascii=False)
                    + "\n"
                )
            return
        import csv

        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", *names])
        writer.writerows(["" if value is None else value for value in values] for values in lines)


@verb
@_CACHE
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@click.option("--feature", multiple=True, help="Only these features.")
@click.option("--frames", metavar="START:STOP", help="Only these frames.")
@as_json
def show(
    cache: str, ids: tuple[str, ...], feature: tuple[str, ...], frames: str | None, as_json: bool
) -> None:
    """Show single utterances: shapes, values, annotations."""
    table = opened(cache)
    start, stop = _frames(frames)
    for id in ids:
        row = int(table.rows([id])[0])
        told = {name: table.annotation(name)[row] for name in table.annotations}
        found = {
            name: _described(table.read(id, name, start, stop) if frames else table.read(id, name))
            for name in feature or table.features
        }
        if as_json:
            print_json("show", {"id": id, "features": found, "annotations": told})
            continue
        click.secho(shown(id), fg="cyan", bold=True)
        rows = [
            [f"  {name}", f"{tuple(each['shape'])}", each["dtype"], *_values_of(each)]
            for name, each in found.items()
        ]
        print_table(
            ["  feature", "shape", "dtype", "mean", "deviation", "least", "most", "values"], rows
        )
        for name, value in told.items():
            click.echo(f"  {shown(name)}: {shown(str(value))}")


def _frames(text: str | None) -> tuple[int, int | None]:
    if text is None:
        return 0, None
    start, colon, stop = text.partition(":")
    try:
        return int(start or 0), int(stop) if stop else None if colon else int(start) + 1
    except ValueError:
        raise click.UsageError(f"--frames takes START:STOP, such as 0:200, not {text!r}") from None


def _described(array: Any) -> dict[str, Any]:
    import numpy as np

    values = array.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    summary = (finite.mean(), finite.std(), finite.min(), finite.max()) if finite.size else ()
    known = dict(zip(("mean", "std", "min", "max"), map(float, summary), strict=False))
    frames = array.reshape(len(array), -1) if array.ndim else array.reshape(1, -1)
    same = (frames[1:] == frames[:-1]).all(axis=1) if frames.size else np.zeros(0, bool)
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        **{name: known.get(name) for name in ("mean", "std", "min", "max")},
        "not_finite": int(values.size - finite.size),
        "equal_frames": int(same.sum()),
        "first": array.ravel()[:_SHOWN].tolist() if array.ndim == 1 else None,
    }


def _values_of(found: Mapping[str, Any]) -> list[str]:
    cells = [
        "-" if found[name] is None else f"{found[name]:.4g}"
        for name in ("mean", "std", "min", "max")
    ]
    notes = [" ".join(map(str, found["first"]))] if found["first"] else []
    notes += [f"{found['not_finite']} not finite"] if found["not_finite"] else []
    if found["equal_frames"] and len(found["shape"]) > 1:
        notes.append(f"{counted(found['equal_frames'], 'frame')} equal to the one before")
    return [*cells, ", ".join(notes)]


@verb
@_CACHE
@_WHERE
@click.option(
    "--npz",
    type=click.Path(dir_okay=False),
    help="Into a file, with ESPnet's keys: count, sum, sum_square.",
)
@click.option("--feature", help="The one of --npz, where there are several.")
@as_json
def stats(
    cache: str, where: tuple[str, ...], npz: str | None, feature: str | None, as_json: bool
) -> None:
    """Print mean and deviation of each feature, over all frames and dimensions."""
    import numpy as np

    from featcache.cli.where import matching

    table = matching(opened(cache), where)
    found = {name: table.stats(name) for name in ([feature] if feature else table.features)}
    if npz is not None:
        if len(found) != 1:
            raise click.UsageError(f"--npz holds one feature; choose --feature: {', '.join(found)}")
        (only,) = found.values()
        only.save_npz(npz)
        return
    if as_json:
        print_json(
            "stats",
            {
                "features": {
                    name: {
                        "count": each.count,
                        "mean": each.mean.tolist(),
                        "std": each.std.tolist(),
                    }
                    for name, each in found.items()
                }
            },
        )
        return
    rows = [
        [
            name,
            number(each.count),
            *(f"{float(part):.4g}" for part in (np.mean(each.mean), np.mean(each.std))),
        ]
        for name, each in found.items()
    ]
    print_table(
        ["feature", "frames", "mean", "deviation"], rows, right=("frames", "mean", "deviation")
    )


@verb
@_CACHES
@click.option("--columns", is_flag=True, help="Sizes and checksums of index and statistics alone.")
@as_json
def verify(caches: tuple[str, ...], columns: bool, as_json: bool) -> None:
    """Compare all bytes of caches with their checksums. Exit code 1: damage."""
    import featcache
    from featcache.errors import CorruptCacheError

    level = "columns" if columns else "arrays"
    found: list[dict[str, object]] = []
    for path in _found(caches):
        begun, damage = time.perf_counter(), ""
        nbytes = utterances = 0
        try:
            cache = featcache.open(path)
            nbytes, utterances = cache.nbytes, len(cache)
            featcache.open(path, verify=cast(Any, level))
        except CorruptCacheError as error:
            damage = str(error)
        seconds = time.perf_counter() - begun
        found.append(
            {
                "path": str(path),
                "checked": level,
                "bytes": nbytes,
                "seconds": seconds,
                "utterances": utterances,
                "damage": damage.splitlines(),
            }
        )
        if not as_json:
            state = click.style("DAMAGED", fg="red") if damage else click.style("whole", fg="green")
            what = f"{counted(utterances, 'utterance')}, {size(nbytes)}, {seconds:.1f} s"
            click.echo(f"{state} {shown(str(path))}: {what}")
            if damage:
                click.echo(shown(damage, lines=True))
    if as_json:
        print_json("verify", {"caches": found})
    if any(each["damage"] for each in found):
        raise Answer("")


@verb
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@as_json
def diff(a: str, b: str, as_json: bool) -> None:
    """Tell how two caches differ: ids, features, what they were made from. Exit code 1: they do."""
    from featcache import inspect

    first, second = opened(a), opened(b)
    mine, others = set(first), set(second)
    ids = {"only_a": len(mine - others), "only_b": len(others - mine), "both": len(mine & others)}
    one, two = (
        {each["name"]: each for each in inspect.info(cache)["features"]}
        for cache in (first, second)
    )  # type: ignore[attr-defined]
    features: dict[str, dict[str, list[object]]] = {}
    for name in sorted({*one, *two}):
        was, now = one.get(name, {}), two.get(name, {})
        changed = {
            key: [was.get(key), now.get(key)]
            for key in {**was, **now}
            if was.get(key) != now.get(key)
        }
        if changed:
            features[name] = changed
    made = inspect.diff(first, second)
    same = not (ids["only_a"] or ids["only_b"] or features or any(made.values()))
    if as_json:
        print_json("diff", {"same": same, "ids": ids, "features": features, "made_from": made})
    else:
        only = f"{ids['only_a']:,} only in the first, {ids['only_b']:,} only in the second"
        click.echo(f"ids: {ids['both']:,} in both, {only}")
        for name, changed in features.items():
            told = ", ".join(f"{key} {was} -> {now}" for key, (was, now) in changed.items())
            click.echo(shown(f"{name}: {told}"))
        for lines in made.values():
            for line in lines:
                click.echo(shown(line))
        if same:
            click.secho("same", fg="green")
    if not same:
        raise Answer("")


@verb
@_CACHE
@click.argument("key", required=False)
@click.option("--source", is_flag=True, help="The text of the functions, too.")
@as_json
def made_from(cache: str, key: str | None, source: bool, as_json: bool) -> None:
    """Tell what a cache was made from: what is compared, and what was recorded beside it."""
    from featcache import inspect

    found = inspect.made_from(opened(cache))
    recorded = cast(dict[str, Any], found["recorded"])
    if not source:
        found["recorded"] = {name: each for name, each in recorded.items() if name != "sources"}
    if as_json:
        print_json("made-from", found)
        return
    click.echo(
        f"{shown(str(found['path']))}, generation {found['generation']}, made {found['made']}"
    )
    for part in ("fingerprint", "recorded"):
        content = cast(dict[str, Any], found[part])
        click.secho("compared" if part == "fingerprint" else part, bold=True)
        for path, value in _leaves(content):
            if key is None or path == key or path.startswith(f"{key}."):
                click.echo(shown(f"  {path}: {value}", lines=source))


def _leaves(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


@verb
@_CACHE
@as_json
def estimate(cache: str, as_json: bool) -> None:
    """Estimate how large a cache would be in other formats, by a sample of it."""
    raise FeatcacheError("not yet")

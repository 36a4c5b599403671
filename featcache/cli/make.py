"""The verbs that make: pages on caches, caches in other formats or of other stores, copies."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import numpy as np

from featcache.cli.output import Told, duration, hint, is_quiet, print_json, print_table, say, shown
from featcache.cli.verb import CACHE, CACHES, JSON, at_url, opened, place, tell_pending, verb
from featcache.errors import UnknownNameError, bytes_text, counted, nearest

if TYPE_CHECKING:
    from featcache.adoptable import TimeAxis
    from featcache.declaration import FeatureStorageConfig
    from featcache.extraction.estimate import StorageEstimate
    from featcache.remote import RemoteOptions
    from featcache.report_page import Report
    from featcache.store import Cache
    from featcache.transfer import Transfer


_LEVELS = {"fault": "red", "look": "yellow"}  # of findings
_KIND = click.option("--kind", metavar="KIND", help="Of a store of others; it is recognised.")
_PATTERN = click.option(
    "--pattern", metavar="P", help="Names of arrays in a store of others, such as {feature}/{id}."
)
_OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace what DST holds.")


@verb
@place("src", "file")
@place("dst")
@click.option("-b", "--backend", metavar="BACKEND", help="Such as hdf5, zarr, memmap.")
@click.option("-c", "--codec", metavar="CODEC", help="Such as raw, zstd, lilcom.")
@click.option("-d", "--dtype", metavar="DTYPE", help="Of features of this kind of numbers.")
@click.option("-f", "--feature", metavar="FEATURE", multiple=True, help="These features alone.")
@click.option("-j", "--jobs", metavar="JOBS", type=click.IntRange(1), default=1, help="Processes.")
@_KIND
@_PATTERN
@click.option("--time-axis", type=int, help="Of the frames in a store of others; 1: transposed.")
@_OVERWRITE
@at_url
@JSON
def convert(
    src: str, dst: str, backend: str | None, codec: str | None, dtype: str | None,
    feature: tuple[str, ...], jobs: int, kind: str | None, pattern: str | None,
    time_axis: int | None, overwrite: bool, remote: RemoteOptions, as_json: bool,
) -> None:  # fmt: skip
    """Write a cache, or a store of others, anew as DST; stopped, the same call goes on."""
    from featcache.adoption.adopt import foreign_source
    from featcache.extraction.convert import convert_opened
    from featcache.extraction.foreign_rows import declarations_in, opened_source
    from featcache.workers.config import config_or_client

    asked = {"backend": backend, "codec": codec, "dtype": dtype}
    settings = {"kind": kind, "pattern": pattern, "time_axis": time_axis, "remote": remote}
    known = {name: value for name, value in settings.items() if value is not None}
    if foreign_source(src, remote) is None:
        opened(src, remote=remote).close()  # which tells of a wrong path as other verbs do
    path = Path(dst).absolute()
    with opened_source(src, path, known) as source:
        declared = declarations_in(source)
        _require(feature, declared)
        features = [_declared(declared[name], asked) for name in feature or declared]
        workers = config_or_client({"env": "local", "n_workers": jobs}) if jobs > 1 else None
        try:
            new = convert_opened(source, path, features, workers, overwrite, not is_quiet())
        except KeyboardInterrupt:
            hint("stopped; the same call goes on from what is stored")
            raise
    _print_made("convert", new, as_json)


def _require(names: Sequence[str], known: Mapping[str, object]) -> None:
    for name in names:
        if name not in known:
            raise UnknownNameError(f"no feature {name!r}; {nearest(name, known)}")


def _declared(
    feature: FeatureStorageConfig, asked: Mapping[str, str | None]
) -> FeatureStorageConfig:
    """Return a feature as it is asked for: integers stay integers, floats floats.

    Another backend has its own codec where it has not that of now.
    """
    from featcache.registry import get_backend

    changed: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if "dtype" in changed and _is_float(changed["dtype"]) != _is_float(feature.dtype):
        hint(f"{feature.name} stays {feature.dtype}, which is another kind of number")
        del changed["dtype"]
    if "backend" in changed and "codec" not in changed:
        codecs = get_backend(changed["backend"]).codecs
        changed["codec"] = feature.codec if feature.codec in codecs else codecs[0]
    if {"codec", "backend"} & changed.keys():
        changed["options"] = {}
    return replace(feature, **changed)


def _is_float(dtype: str) -> bool:
    from featcache.interface import storage_dtype

    return dtype == "bfloat16" or np.dtype(storage_dtype(dtype)).kind == "f"


def _print_made(name: str, cache: Cache, as_json: bool) -> None:
    from featcache import inspect

    told = inspect.info(cache)
    if as_json:
        print_json(name, {"cache": told})
    else:
        count = counted(len(cache), "utterance")
        features = ", ".join(cache.features)
        say(shown(f"{cache.path}: {count} of {features}, {bytes_text(cache.nbytes)}"))


@verb
@place("src", "file")
@place("dst")
@_KIND
@_PATTERN
@click.option("--feature", metavar="NAME", default="feats", help="Where SRC names none.")
@click.option(
    "--time-axis",
    type=click.Choice(["auto", "0", "1", "-1", "none"]),
    default="auto",
    help="0, 1, -1: the first, second, last axis is the frames; none: there are no frames.",
)
@click.option(
    "--nonfinite",
    type=click.Choice(["raise", "keep"]),
    default="raise",
    help="keep: arrays may hold NaN or infinity.",
)
@click.option("--collect", is_flag=True, help="Read all once, for checksums and statistics.")
@_OVERWRITE
@at_url
@JSON
def adopt(
    src: str, dst: str, kind: str | None, pattern: str | None, feature: str, time_axis: str,
    nonfinite: Literal["raise", "keep"], collect: bool, overwrite: bool, remote: RemoteOptions,
    as_json: bool,
) -> None:  # fmt: skip
    """Make a cache DST of the store SRC where it lies, without a copy; SRC is never written."""
    import featcache

    axes: dict[str, TimeAxis] = {"auto": "auto", "0": 0, "1": 1, "-1": -1, "none": None}
    cache = featcache.adopt(
        src,
        dst,
        kind=kind,
        feature=feature,
        pattern=pattern,
        time_axis=axes[time_axis],
        nonfinite=nonfinite,
        overwrite=overwrite,
        remote=remote,
    )
    if collect:
        cache.collect()
    _print_made("adopt", cache, as_json)


@verb
@CACHES
@click.option(
    "-o",
    "output",
    metavar="FILE",
    required=True,
    type=click.Path(dir_okay=False),
    help="The page, such as report.html.",
)
@click.option(
    "--pictures", metavar="N", type=click.IntRange(0), default=48, help="At most so many."
)
@click.option("--sample", metavar="N", help="Utterances whose values are read, or all.")
@click.option("--seed", metavar="N", type=click.IntRange(0), default=0, help="Draw others.")
@click.option("--open", "browse", is_flag=True, help="Show it in the browser.")
@JSON
def report(
    caches: tuple[str, ...],
    output: str,
    pictures: int,
    sample: str | None,
    seed: int,
    browse: bool,
    as_json: bool,
) -> None:
    """Write a page about a cache, or about two side by side: one file that needs no network."""
    from featcache import inspect

    begun = time.perf_counter()
    looked_at = [opened(each) for each in caches]
    for cache in looked_at:
        tell_pending(cache)
    told = inspect.report(
        looked_at,
        output,
        pictures=pictures,
        sample=_sample(sample),
        seed=seed,
    )
    took = duration(time.perf_counter() - begun)
    if as_json:
        found = [
            {"cache": e.cache, "kind": e.kind, "count": e.count, "ids": list(e.ids)}
            for e in told.findings
        ]
        whole = {"path": str(told.path), "bytes": told.bytes, "sampled": told.sampled}
        print_json("report", {**whole, "of": told.of, "findings": found})
    else:
        _print_report(told, took, several=len(caches) > 1)
    if browse:
        import webbrowser

        webbrowser.open(Path(told.path).absolute().as_uri())


def _print_report(told: Report, took: str, *, several: bool) -> None:
    which = f"{told.sampled:,} of {told.of:,}" if told.sampled < told.of else f"all {told.of:,}"
    say(shown(f"{told.path}  {bytes_text(told.bytes)}, values of {which} utterances, {took}"))
    named = ""
    for each in told.findings:
        if several and each.cache != named:
            say(shown(f"  {each.cache}"), bold=True)
            named = each.cache
        say(shown(f"  {each.text}"), fg=_LEVELS.get(each.level))


def _sample(text: str | None) -> int | Literal["all"] | None:
    if text is None or text == "all":
        return text  # type: ignore[return-value]
    if not text.isdecimal() or not int(text):
        raise click.UsageError(f"--sample takes a number of utterances, or all, not {text!r}")
    return int(text)


@verb
@place("src", "file")
@click.option("-f", "--feature", metavar="FEATURE", multiple=True, help="These features alone.")
@click.option(
    "-n", "utterances", metavar="N", type=click.IntRange(1), help="So many utterances are tried."
)
@_KIND
@_PATTERN
@at_url
@JSON
def estimate(
    src: str, feature: tuple[str, ...], utterances: int | None, kind: str | None,
    pattern: str | None, remote: RemoteOptions, as_json: bool,
) -> None:  # fmt: skip
    """Estimate bytes, time and losses of a cache in other formats, by a few utterances of it."""
    from featcache import inspect
    from featcache.adoption.adopt import foreign_source
    from featcache.extraction.estimate import losses

    settings = {"kind": kind, "pattern": pattern, "remote": remote}
    known = {name: value for name, value in settings.items() if value is not None}
    told = inspect.estimate(
        opened(src, remote=remote) if foreign_source(src, remote) is None else src,
        list(feature) or None,
        **({} if utterances is None else {"utterances": utterances}),
        adopting=known,
    )
    rows = [_way(row) for row in told.rows]
    if as_json:
        whole = {"utterances": told.utterances, "bytes": told.nbytes, "seconds": told.hours * 3600}
        others = {"frames": dict(told.frames), "ways": rows, "advice": told.advice}
        print_json("estimate", {**whole, **others})
        return
    time = duration(told.hours * 3600)
    say(
        f"{counted(told.utterances, 'utterance')}, as declared {bytes_text(told.nbytes)}, {time} "
        "in one process", bold=True,
    )  # fmt: skip
    print_table(
        ["feature", "backend", "codec", "dtype", "bytes", "time", "note", *_LOSSES],
        [[*_cells(row), *losses(each)] for row, each in zip(rows, told.rows, strict=True)],
        right=["bytes", "time", *_LOSSES],
    )
    say(shown(told.advice))


_LOSSES = ["largest", "rms", "of std", "cosine", "GB/s"]


def _way(row: StorageEstimate) -> dict[str, object]:
    return {
        "feature": row.feature,
        "backend": row.backend,
        "codec": row.codec,
        "dtype": row.dtype,
        "bytes": row.nbytes,
        "seconds": row.hours * 3600,
        "declared": row.declared,
        "lossless": row.lossless,
        "largest_error": row.largest_error,
        "rms_error": row.rms_error,
        "rms_of_std": row.rms_of_std,
        "cosine": row.cosine,
        "read_gb_s": row.read_gb_s,
    }


def _cells(row: Told) -> list[str]:
    note = "as declared" if row["declared"] else "" if row["lossless"] else "lossy"
    names = [row[name] for name in ("feature", "backend", "codec", "dtype")]
    time = duration(row["seconds"]) if row["seconds"] >= 1 else "under 1 s"
    return [*names, bytes_text(row["bytes"]), time, note]


# The verbs between a disk and an object store: `push`, `pull`, `sync`.

URL = click.argument("url", metavar="URL")


def _carries(function: Callable[..., Transfer]) -> Callable[..., None]:
    """Give a verb the options of a store and `--dry-run`, and tell what it has copied."""

    @functools.wraps(function)
    def called(*, dry_run: bool, as_json: bool, **arguments: object) -> None:
        done = function(**arguments, dry_run=dry_run)
        _tell(function.__name__, done, dry_run, as_json)

    dry = click.option("--dry-run", is_flag=True, help="Only say what would be copied.")
    return dry(at_url(JSON(called)))


@verb
@CACHE
@URL
@_carries
def push(cache: str, url: str, remote: RemoteOptions, dry_run: bool) -> Transfer:
    """Copy a cache to an object store: what is not there yet, the manifest last."""
    from featcache import transfer

    return transfer.push(cache, url, remote=remote, dry_run=dry_run)


@verb
@CACHE
@URL
@_carries
def sync(cache: str, url: str, remote: RemoteOptions, dry_run: bool) -> Transfer:
    """Push a cache to an object store, or pull it from there: the later generation of the two."""
    from featcache import transfer

    return transfer.sync(cache, url, remote=remote, dry_run=dry_run)


@verb
@URL
@CACHE
@_carries
def pull(url: str, cache: str, remote: RemoteOptions, dry_run: bool) -> Transfer:
    """Copy a cache from an object store, and compare it with its checksums."""
    from featcache import transfer

    return transfer.pull(url, cache, remote=remote, dry_run=dry_run)


def _tell(name: str, done: Transfer, dry_run: bool, as_json: bool) -> None:
    if as_json:
        told = {
            "way": done.verb,
            "files": done.files,
            "bytes": done.nbytes,
            "skipped": done.skipped,
        }
        print_json(name, {**told, "requests": done.requests, "dry_run": dry_run})
    else:
        say(f"{done.verb}: {'would copy' if dry_run else 'copied'} {done}")

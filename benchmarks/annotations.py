"""Annotations of ten million utterances: opening, filtering, batches, and the cost of writing.

    python benchmarks/annotations.py [--utterances 10000000]

The cache is that of `scale.py`, with a text, a speaker and a duration for each utterance.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from machine import describe
from scale import OPEN, line, timed, write_cache

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.format import (
    AnnotationEntry,
    Codes,
    Column,
    ColumnFile,
    Strings,
    ends_of,
    read_manifest,
    save_columns,
    stored_columns,
    write_manifest,
)

SPEAKERS = 5000
WRITTEN = 20_000


@click.command()
@click.option("--utterances", default=10_000_000, show_default=True)
def main(utterances: int) -> None:
    """Print the table of costs."""
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as name:
        path = Path(name) / "cache"
        print(describe(Path(name), "numpy"))
        write_cache(path, utterances)
        print(f"{utterances:,} utterances, warm{'':35}{'median':>12}{'worst':>12}")
        plain = [opened_alone(path) for _ in range(5)]
        line("open, without annotations", plain, "ms")
        annotate(path, utterances)
        annotated = [opened_alone(path) for _ in range(5)]
        line("open, with a text, a speaker and a duration each", annotated, "ms")
        read(path, utterances)
        written = [write(Path(name), number, annotated=number % 2 == 1) for number in range(6)]
        line(f"writing {WRITTEN:,} utterances, without", written[::2], "s")
        line(f"writing {WRITTEN:,} utterances, annotated", written[1::2], "s")


def opened_alone(path: Path) -> float:
    """Return the milliseconds of opening a cache in a new process."""
    command = [sys.executable, "-c", OPEN, str(path)]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout) * 1e3


def annotate(path: Path, count: int) -> None:
    """Add columns to the index of a cache."""
    random = np.random.default_rng(1)
    lengths = random.integers(20, 160, count)
    texts = Strings(ends_of(lengths), np.full(int(lengths.sum()), ord("e"), np.uint8))
    names = Strings.of([f"speaker-{number}" for number in range(SPEAKERS)])
    codes = random.integers(0, SPEAKERS, count).astype(np.int32)
    columns = {
        "duration": Column("float", random.uniform(1, 30, count)),
        "speaker": Column("str", Codes(codes, names)),
        "text": Column("str", texts),
    }
    before = read_manifest(path)
    with ColumnFile(path, before.index) as file:
        kept = [(name, file.column(name, np.dtype(d).type)) for name, d in file.dtypes.items()]
    (path / before.index).unlink()
    more = [each for name, column in columns.items() for each in stored_columns(name, column)]
    digest = save_columns(path / before.index, [*kept, *more])
    entries = {name: AnnotationEntry(column.kind, False) for name, column in columns.items()}
    after = dataclasses.replace(before, index_digest=digest, sizes={}, annotations=entries)
    write_manifest(path, after)


def read(path: Path, count: int) -> None:
    """Time what training and filters do."""
    some = {f"speaker-{number}" for number in range(0, SPEAKERS, 7)}
    cache = featcache.open(path)
    first = [each * 1e3 for each in timed(lambda: featcache.open(path).annotation("text"))]
    line("annotation('text'), in a cache just opened", first, "ms")
    line(
        "annotation('speaker').is_in(700 of 5,000)",
        timed(lambda: cache.annotation("speaker").is_in(some)),
        "s",
    )
    line(
        "annotation('duration').to_numpy()",
        timed(lambda: cache.annotation("duration").to_numpy()),
        "s",
    )
    line("annotation('speaker').codes()", timed(lambda: cache.annotation("speaker").codes()), "s")
    rows = np.random.default_rng(2).integers(0, count, (200, 32))
    for name in ("text", "speaker", "duration"):
        annotation = cache.annotation(name)
        took = timed(lambda annotation=annotation: [annotation.take(each) for each in rows])  # type: ignore[misc]
        line(f"annotation({name!r}).take(32 rows)", [each / 200 * 1e6 for each in took], "us")


def write(folder: Path, number: int, *, annotated: bool) -> float:
    """Return the seconds of writing and publishing a cache."""
    frames = np.zeros((50, 80), np.float32)
    told = {"text": "some words of a sentence that somebody read", "speaker": "a", "duration": 3.5}
    started = time.perf_counter()
    with CacheWriter(folder / f"written-{number}", [FeatureStorageConfig("fbank")]) as writer:
        for each in range(WRITTEN):
            writer.write(f"utt-{each}", {"fbank": frames}, annotations=told if annotated else None)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

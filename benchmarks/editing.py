"""Editing a cache: deletion and compaction against copying what stays, and many appends.

    python benchmarks/editing.py            both of these:
    python benchmarks/editing.py compact    a tenth of a cache, drawn at random, is deleted and
                                            compacted away; against `cp` of what stays, with fsync
    python benchmarks/editing.py append     200 appends of 100 utterances, one after the other
                                            (python benchmarks/editing.py compact --gigabytes 1 is
                                            quicker)

Utterances are float32 of (700, 80), as filterbanks of 7 s. What a table compares runs in turns, on
the same disk; the least of several rounds counts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from machine import describe

import featcache
from featcache import CacheWriter, FeatureStorageConfig

FRAMES, MELS = 700, 80
UTTERANCE_BYTES = FRAMES * MELS * 4


def fill(path: Path, backend: str, first: int, count: int) -> None:
    """Append utterances of random numbers to a cache."""
    arrays = np.random.default_rng(0).standard_normal((64, FRAMES, MELS)).astype(np.float32)
    with CacheWriter(path, [FeatureStorageConfig("fbank", backend=backend)]) as writer:
        for number in range(first, first + count):
            array = arrays[number % len(arrays)]
            array[0, 0] = number  # so that no two are the same
            writer.write(f"utterance-{number:07d}", {"fbank": array})


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def copied(folder: Path, nbytes: int) -> tuple[float, float]:
    """Return the seconds that `cp` takes of a file of so many bytes, until they are durable.

    And its processor time.
    """
    file, copy = folder / "stays", folder / "copy"
    if not file.exists():
        block = np.random.default_rng(1).integers(0, 256, 1 << 24, np.uint8).tobytes()
        with file.open("wb") as stream:
            for start in range(0, nbytes, len(block)):
                stream.write(block[: nbytes - start])
    os.sync()
    begun, busy_s = time.perf_counter(), processor_s()
    subprocess.run(["cp", "--reflink=never", file, copy], check=True)
    descriptor = os.open(copy, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    took = time.perf_counter() - begun, processor_s() - busy_s
    copy.unlink()
    return took


def compact(folder: Path, backend: str, gigabytes: float, rounds: int) -> None:
    """Delete a tenth and compact, against copying the rest."""
    count = int(gigabytes * 1e9 / UTTERANCE_BYTES)
    gone = np.random.default_rng(2).permutation(count)[: count // 10].tolist()
    stays = (count - len(gone)) * UTTERANCE_BYTES
    path = folder / "cache"
    delete_s: list[float] = []
    compact_s: list[float] = []
    copy_s: list[float] = []
    busy: list[tuple[float, float]] = []  # of both edits, and of cp
    for _ in range(rounds):
        fill(path, backend, 0, count)
        seconds, cp_busy_s = copied(folder, stays)
        copy_s.append(seconds)
        os.sync()
        busy_s = processor_s()
        cache = featcache.open(path)
        start = time.perf_counter()
        cache.delete(f"utterance-{number:07d}" for number in gone)
        delete_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        cache.compact()
        compact_s.append(time.perf_counter() - start)
        busy.append((processor_s() - busy_s, cp_busy_s))
        cache.refresh()
        assert len(cache) == count - len(gone)
        cache.close()
        shutil.rmtree(path)
    (folder / "stays").unlink()
    both = min(a + b for a, b in zip(delete_s, compact_s, strict=True))
    print(
        f"{backend}: {len(gone)} of {count} utterances, {stays / 1e9:.2f} GB stay, least of "
        f"{rounds}: delete {min(delete_s):.2f} s, compact {min(compact_s):.2f} s, both "
        f"{both:.2f} s; cp and fsync of what stays {min(copy_s):.2f} s: x {both / min(copy_s):.2f}"
    )
    edits, cp = (min(each) for each in zip(*busy, strict=True))
    print(f"  processor time: {edits:.2f} s of both, {cp:.2f} s of cp")
    for name, each in (("delete", delete_s), ("compact", compact_s), ("cp", copy_s)):
        print(f"  {name}: {', '.join(f'{seconds:.2f}' for seconds in each)} s")


def append(folder: Path, appends: int, utterances: int) -> None:
    """Append again and again."""
    path, took = folder / "cache", []
    for number in range(appends):
        start = time.perf_counter()
        fill(path, "memmap", number * utterances, utterances)
        took.append(time.perf_counter() - start)
    parts = len(list((path / "parts").iterdir()))
    first, last = sum(took[: appends // 4]), sum(took[-appends // 4 :])
    print(
        f"{appends} appends of {utterances} utterances ({utterances * UTTERANCE_BYTES / 1e6:.0f} "
        f"MB): {sum(took):.1f} s, median {np.median(took):.3f} s, longest {max(took):.2f} s, the "
        f"first quarter {first:.1f} s, the last {last:.1f} s; {parts} parts lie there then"
    )
    shutil.rmtree(path)


@click.command()
@click.argument("what", type=click.Choice(["all", "compact", "append"]), default="all")
@click.option("--backend", default="memmap", help="Of the cache to compact.")
@click.option("--gigabytes", default=5.0, help="Size of the cache to compact.")
@click.option("--rounds", default=3, help="The least of so many counts.")
@click.option("--appends", default=200, help="How many.")
@click.option("--directory", type=click.Path(path_type=Path), help="On which disk.")
def main(
    what: str, backend: str, gigabytes: float, rounds: int, appends: int, directory: Path | None
) -> None:
    """Measure edits of a cache."""
    with tempfile.TemporaryDirectory(dir=directory) as name:
        print(describe(Path(name), "numpy", "featcache"))
        if what in ("all", "compact"):
            compact(Path(name), backend, gigabytes, rounds)
        if what in ("all", "append"):
            append(Path(name), appends, utterances=100)


if __name__ == "__main__":
    main()

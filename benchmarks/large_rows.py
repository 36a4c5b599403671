"""An epoch's beginning at up to a hundred million rows, in buckets and packed: opening, resuming.

The caches are made up, as those of `scale.py`; each is measured in a process of its own, warm. A
hundred million rows take 8 GB of disk and, to be made, as much memory.

    python benchmarks/large_rows.py [--most 100000000]
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from machine import describe
from scale import private_bytes, write_cache

CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
from large_rows import measured
print(measured(sys.argv[1], sys.argv[3]))
"""
BATCHES_OF = {"bucketed": 60_000, "packed": 20_000}  # kinds of samplers, most frames
BATCHES = 2000  # taken before a resume, and after it
FORKED = 2


@click.command()
@click.option("--most", default=100_000_000, show_default=True, help="Rows of the largest cache.")
@click.option("--directory", type=click.Path(path_type=Path), help="On a real disk, with room.")
def main(most: int, directory: Path | None) -> None:
    """Print a line for each number of rows."""
    with tempfile.TemporaryDirectory(prefix="featcache-bench-", dir=directory) as name:
        print(describe(Path(name), "numpy"))
        heads = f"{'open':>9}{'first batch':>13}{'resume':>9}{'anew':>9}{'private':>12}"
        print(f"{'rows':>12}{'batches':>10}{heads}")
        print(f"{'':>22}{'ms':>9}{'s':>13}{'s':>9}{'s':>9}{'bytes a row':>12}{'a worker':>10}")
        count = 1_000_000
        while count <= most:
            path = Path(name) / "cache"
            if not path.exists():
                write_cache(path, count)
            for kind in BATCHES_OF:
                report(path, count, kind)
            path.rename(Path(name) / f"cache-{count}")
            subprocess.run(["rm", "-r", str(Path(name) / f"cache-{count}")], check=True)
            count *= 10


def report(path: Path, count: int, kind: str) -> None:
    """Print the figures of a cache and a kind of batches: medians of three processes."""
    command = [sys.executable, "-c", CHILD, str(path), str(Path(__file__).parent), kind]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    open_s, first_s, resume_s, anew_s, private, worker = (
        statistics.median(run[key] for run in runs) for key in runs[0]
    )
    print(
        f"{count:12,}{kind:>10}{open_s * 1e3:9.1f}{first_s:13.2f}{resume_s:9.2f}{anew_s:9.2f}"
        f"{private / count:12.2f}{worker / count:10.2f}",
        flush=True,
    )


def measured(path: str, kind: str) -> str:
    """Return the figures of one process."""
    import featcache
    from featcache.samplers import BucketBatchSampler, PackedBatchSampler

    make = {"bucketed": BucketBatchSampler, "packed": PackedBatchSampler}[kind]
    opening = featcache.open  # and all that it needs is loaded
    started = time.perf_counter()
    cache = opening(path)
    open_s = time.perf_counter() - started
    before = private_bytes()
    started = time.perf_counter()
    sampler = make(cache, max_frames=BATCHES_OF[kind], seed=1)
    batches = iter(sampler)
    next(batches)
    first_s = time.perf_counter() - started
    for _ in range(BATCHES):
        next(batches)
    state = sampler.state_dict()
    count = len(cache)
    far = {**state, "position": count // 3 * 2}
    started = time.perf_counter()
    sampler.load_state_dict(far)
    next(iter(sampler))
    resume_s = time.perf_counter() - started
    private = private_bytes() - before
    worker = max(in_workers(cache.table))
    started = time.perf_counter()
    anew = make(cache, max_frames=BATCHES_OF[kind], seed=1)
    anew.load_state_dict(far)
    next(iter(anew))
    anew_s = time.perf_counter() - started
    figures = open_s, first_s, resume_s, anew_s, private, worker
    return json.dumps(dict(zip("abcdef", figures, strict=True)))


def in_workers(table: object) -> list[int]:
    """Return the private memory that workers take which read lengths of the table."""
    context = multiprocessing.get_context("fork")
    with context.Pool(FORKED) as pool:
        return pool.map(lengths_read, [(table, seed) for seed in range(FORKED)])


def lengths_read(task: tuple[object, int]) -> int:
    """Read lengths of rows all over a table; return the private bytes that this took."""
    import numpy as np

    table, seed = task
    before = private_bytes()
    rows = np.random.default_rng(seed).integers(0, len(table), 100_000)  # type: ignore[arg-type]
    table.lengths("fbank", rows=rows).sum()  # type: ignore[attr-defined]
    return private_bytes() - before


if __name__ == "__main__":
    main()

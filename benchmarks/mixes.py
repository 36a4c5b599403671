"""Mixing five tables of two million rows: planning, shares, states, resuming.

The caches are made up, as those of `scale.py`: their arrays are holes, which nobody reads here.
Planning and resuming are in seconds of processor time, so that a busy machine does not count.

    python benchmarks/mixes.py [--rows 2000000]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from machine import describe
from scale import timed, write_cache

import featcache
from featcache import FeatureTable
from featcache.samplers import BucketBatchSampler
from featcache.samplers.epoch import EpochSampler
from featcache.samplers.shuffled import PlainBatchSampler

NAMES = ("libri", "giga", "common", "vox", "own")
SHARES = dict(zip(NAMES, (0.4, 0.3, 0.15, 0.1, 0.05), strict=True))
WINDOW = 1000  # rows
SAMPLERS: dict[str, Callable[[FeatureTable], EpochSampler]] = {
    "plain": lambda table: PlainBatchSampler(table, 32, shuffle=True, seed=1),
    "bucket": lambda table: BucketBatchSampler(table, max_frames=60_000, seed=1),
}


@click.command()
@click.option("--rows", default=2_000_000, show_default=True, help="Of each of five tables.")
def main(rows: int) -> None:
    """Print the table of costs."""
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as name:
        print(describe(Path(name), "numpy"))
        for source in NAMES:
            write_cache(Path(name) / source, rows, prefix=source)
        tables = {source: featcache.open(Path(name) / source).table for source in NAMES}
        print(f"five tables of {rows:,} rows, warm; medians of 5\n")
        weights = {source: np.linspace(1, 2, rows) * share for source, share in SHARES.items()}
        plans: dict[str, dict[str, Any]] = {
            "shares, no row twice": {"weights": SHARES},
            "shares, all rows": {"weights": SHARES, "epoch_size": "all"},
            "weights of rows": {"weights": weights, "epoch_size": 5 * rows},
        }
        for what, plan in plans.items():
            measure(what, tables, plan)


def measure(what: str, tables: Mapping[str, FeatureTable], plan: Mapping[str, Any]) -> None:
    """Print what a mix costs."""

    def make() -> FeatureTable:
        return featcache.mix(tables, **plan)

    made = statistics.median(timed(make, 3))
    table = make()
    size = len(table.epoch_rows(0))
    took = statistics.median(processor(lambda: table.epoch_rows(1)[:]) for _ in range(3))
    print(f"{what}: {size:,} rows an epoch")
    print(f"  made in {made:.2f} s; an epoch planned at {took / size * 1e6:.3f} us a row")
    print(f"  shares of {WINDOW} rows are off by up to {worst(table):.2%} of them")
    for name, sampler_of in SAMPLERS.items():
        started = time.perf_counter()
        sampler = sampler_of(table)
        next(iter(sampler))
        first_s = time.perf_counter() - started
        sampler.set_epoch(7)
        count, state = len(sampler), sampler.state_dict()
        states = [{**state, "position": size // 9 * step} for step in (1, 8, 3, 6, 4)]
        again = statistics.median(processor(partial(resumed, sampler, each)) for each in states)
        anew = statistics.median(
            processor(partial(resumed_anew, sampler_of, table, each)) for each in states
        )
        shares = sampler.source_shares(WINDOW)
        far = max(max(each.most - each.share, each.share - each.least) for each in shares.values())
        print(
            f"  {name}: {count:,} batches, the first after {first_s:.2f} s; state of "
            f"{len(json.dumps(state))} bytes; resumed in {again * 1e3:.0f} ms, by a new sampler in "
            f"{anew * 1e3:.0f} ms; shares of {WINDOW} rows in batches off by up to {far:.1%}"
        )


def processor(make: Callable[[], object]) -> float:
    """Return the seconds of processor time that a call takes."""
    started = time.process_time()
    make()
    return time.process_time() - started


def resumed(sampler: EpochSampler, state: dict[str, object]) -> list[int] | list[str]:
    """Return the first batch after a resume."""
    sampler.load_state_dict(state)
    return next(iter(sampler))


def resumed_anew(
    sampler_of: Callable[[FeatureTable], EpochSampler],
    table: FeatureTable,
    state: dict[str, object],
) -> list[int] | list[str]:
    """Return the first batch after a resume by a new sampler."""
    return resumed(sampler_of(table), state)


def worst(table: FeatureTable) -> float:
    """Return how far shares are from those planned, over any `WINDOW` rows of an epoch."""
    plan = table.plan
    assert plan is not None
    source_of = plan.source_of(table.epoch_rows(2)[:])
    far = 0.0
    for number, count in enumerate(plan.taken.values()):
        before = np.concatenate([[0], np.cumsum(source_of == number)])
        some = before[WINDOW:] - before[:-WINDOW]
        far = max(far, float(np.abs(some / WINDOW - count / plan.size).max()))
    return far


if __name__ == "__main__":
    main()

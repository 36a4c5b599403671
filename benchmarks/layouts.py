"""How fast batches come in each layout: padded, packed, jagged, with `FeatureLoader`.

The same batches in all layouts, in turns of another order each round; GB/s count real frames, no
padding. Random batches have much padding, those of like lengths little, those of the packed sampler
have utterances of all lengths. Warm: all in the page cache. Cold: opened anew, its files dropped
from the page cache.

    python benchmarks/layouts.py [--utterances 3000] [--warm 9] [--cold 3] [--directory D]
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import corpus
import numpy as np
import torch
from machine import describe
from method import Chosen, Rows
from numpy.typing import NDArray
from packing import speech
from page_cache import evict

import featcache
from featcache import FeatureLoader
from featcache.loading import Layout, Packed
from featcache.samplers import BucketBatchSampler, PackedBatchSampler

MAX_FRAMES = 20_000
LAYOUTS: dict[str, str | Layout] = {
    "padded": "padded",
    "packed": "packed",
    "packed, with positions": Packed(position_ids=True),
    "jagged": "jagged",
}
Loader = FeatureLoader[dict[str, Any]]


@click.command()
@click.option("--utterances", default=3000, show_default=True)
@click.option("--batches", default=60, show_default=True, help="Batches of each round.")
@click.option("--warm", default=9, show_default=True, help="Warm rounds; 0: none.")
@click.option("--cold", default=3, show_default=True, help="Cold rounds; 0: none.")
@click.option("--directory", type=click.Path(path_type=Path), help="On a real disk.")
def main(utterances: int, batches: int, warm: int, cold: int, directory: Path | None) -> None:
    """Print a table for each kind of batches, warm and cold."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="featcache-bench-", dir=directory) as name:
        cache = Path(name) / "cache"
        print(f"{describe(cache.parent, 'numpy', 'torch')}, torch with one thread")
        lengths = write(cache, utterances)
        gigabytes = lengths.sum() * corpus.MELS * 4 / 1e9
        print(f"{utterances} utterances, lognormal, x {corpus.MELS} float32 ({gigabytes:.2f} GB)")
        for kind, plan in plans(lengths).items():
            rounds = [plan(number)[:batches] for number in range(max(warm, cold))]
            for threads, count, evicted in ((0, warm, False), (2, warm, False), (2, cold, True)):
                if count:
                    report(
                        f"{kind}, {threads} threads, {'cold' if evicted else 'warm'}, "
                        f"median of {count} rounds",
                        measure(cache, rounds[:count], lengths, threads, evicted=evicted),
                    )


def write(path: Path, count: int) -> NDArray[np.int64]:
    """Write a cache; returns the lengths by row."""
    random, lengths = np.random.default_rng(1), speech(count)
    with featcache.CacheWriter(path, [featcache.FeatureStorageConfig("fbank")]) as writer:
        for number, frames in enumerate(lengths.tolist()):
            array = random.standard_normal((frames, corpus.MELS), np.float32)
            writer.write(f"utt-{number:06d}", {"fbank": array})
    return lengths


def plans(lengths: NDArray[np.int64]) -> dict[str, Callable[[int], Rows]]:
    """Return functions that give the batches of a round, by their kind."""

    def drawn(number: int) -> Rows:
        order = np.random.default_rng(number).permutation(len(lengths))
        rows: Rows = order[: len(order) // 32 * 32].reshape(-1, 32).tolist()
        return rows

    def of(sampler: BucketBatchSampler | PackedBatchSampler, number: int) -> Any:
        return list(sampler.epoch_batches(number))

    return {
        "32 random ones": drawn,
        "of like lengths": partial(of, BucketBatchSampler(lengths, max_frames=MAX_FRAMES)),
        "of all lengths, packed": partial(of, PackedBatchSampler(lengths, max_frames=MAX_FRAMES)),
    }


def measure(
    cache: Path, rounds: Sequence[Rows], lengths: NDArray[np.int64], threads: int, *, evicted: bool
) -> dict[str, list[float]]:
    """Return the GB/s of each round, by layout."""
    names = list(LAYOUTS)
    found: dict[str, list[float]] = {name: [] for name in names}
    kept = {} if evicted else {name: opened(cache, name, threads) for name in names}
    for name, (loader, chosen) in kept.items():
        check(name, loader, chosen, rounds[0], cache)
    for number, rows in enumerate(rounds):
        for name in np.random.default_rng(number).permutation(names).tolist():
            if evicted:
                gc.collect()
                loader, chosen = opened(cache, name, threads)
                evict(cache)
            else:
                loader, chosen = kept[name]
            chosen.rows = rows
            began = time.perf_counter()
            for batch in loader:
                del batch
            seconds = time.perf_counter() - began
            frames = sum(int(lengths[row].sum()) for row in rows)
            found[name].append(frames * corpus.MELS * 4 / seconds / 1e9)
            del loader, chosen
    return found


def opened(cache: Path, name: str, threads: int) -> tuple[Loader, Chosen]:
    """Return a loader in a layout, and the sampler that is told its batches."""
    chosen = Chosen()
    loader: Loader = FeatureLoader(
        cache, "fbank", batch_sampler=chosen, layout=LAYOUTS[name], threads=threads
    )
    return loader, chosen


def check(name: str, loader: Loader, chosen: Chosen, rows: Rows, cache: Path) -> None:
    """See that the frames of a round are those of the cache; warms up, too."""
    table = featcache.open(cache)
    chosen.rows = rows
    for batch in loader:
        values = batch["fbank"]
        if name == "padded":
            ends = batch["fbank_lengths"].tolist()
            arrays = [row[:end] for row, end in zip(values, ends, strict=True)]
        else:
            flat = values.values() if name == "jagged" else values
            arrays = list(flat.split(batch["fbank_lengths"].tolist()))
        for id, array in zip(batch["id"], arrays, strict=True):
            np.testing.assert_array_equal(array.numpy(), table.read(id, "fbank"))


def report(title: str, found: dict[str, list[float]]) -> None:
    """Print a table; the ratio is the median of those of the rounds."""
    print(f"\n{title}\n{'':26}{'GB/s':>7}{'quartiles':>16}{'x padded':>10}")
    for name, rates in found.items():
        low, median, high = np.percentile(rates, (25, 50, 75))
        ratio = np.median(np.divide(rates, found["padded"]))
        print(f"{name:26}{median:7.2f}{f'{low:.2f} to {high:.2f}':>16}{ratio:10.2f}", flush=True)


if __name__ == "__main__":
    main()

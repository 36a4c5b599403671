"""How full batches without padding are, and how long planning them takes; against Grain's packing
where it is installed.

Lengths are as those of speech: lognormal, mean of log 6.4, sigma 0.5, 50 to 3,000 frames; 20,000
frames a batch. Ours plans an epoch of row numbers. Grain packs while it reads, so its elements here
are as small as can be, a byte a frame, and the time of reading them without packing is subtracted.
Seconds are of processor time, in turns, the median of a few rounds.

    python benchmarks/packing.py [--utterances 1000000] [--grains 100000] [--rounds 3]
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from featcache.samplers import BucketBatchSampler, PackedBatchSampler

MAX_FRAMES = 20_000
BINS = (16, 64, 256)  # of Grain, that are filled side by side
Planned = tuple[float, float, int]  # seconds, fill, batches


def speech(count: int) -> NDArray[np.int64]:
    """Return frames of utterances."""
    lengths = np.random.default_rng(0).lognormal(6.4, 0.5, count)
    return lengths.clip(50, 3000).astype(np.int64)


@click.command()
@click.option("--utterances", default=1_000_000, show_default=True, help="For our samplers.")
@click.option("--grains", default=100_000, show_default=True, help="For ours and Grain's.")
@click.option("--rounds", default=3, show_default=True)
def main(utterances: int, grains: int, rounds: int) -> None:
    """Print a table for each number of utterances."""
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}", end=""
    )
    print(f", numpy {version('numpy')}; processor time, in turns, median of {rounds} rounds")
    report(utterances, ours(speech(utterances)), rounds)
    if find_spec("grain") is not None:
        print(f"Grain {version('grain')}")
    report(grains, ours(speech(grains)) | grain(speech(grains)), rounds)


def ours(lengths: NDArray[np.int64]) -> dict[str, Callable[[int], Planned]]:
    """Return our ways to plan an epoch, by name."""
    ways: dict[str, Callable[[int], Planned]] = {
        f"PackedBatchSampler, window={window}{', the default' * (window == 1024)}": partial(
            plan, PackedBatchSampler(lengths, max_frames=MAX_FRAMES, window=window)
        )
        for window in (256, 1024, 4096)
    }
    ways["BucketBatchSampler, padded"] = partial(
        plan, BucketBatchSampler(lengths, max_frames=MAX_FRAMES)
    )
    return ways


def plan(sampler: PackedBatchSampler | BucketBatchSampler, epoch: int) -> Planned:
    """Plan an epoch; the fill is of real frames."""
    if epoch == 1:
        sampler.epoch_batches(0)  # settles the number of batches, once
    began = time.process_time()
    batches = sampler.epoch_batches(epoch)
    seconds = time.process_time() - began
    frames = int(sampler._of.longest[:].sum())
    return seconds, frames / (len(batches) * MAX_FRAMES), len(batches)


def grain(lengths: NDArray[np.int64]) -> dict[str, Callable[[int], Planned]]:
    """Return Grain's ways, by name; none where it is not installed."""
    if find_spec("grain") is None:
        return {}
    return {f"Grain, best fit, {bins} bins": partial(grains, lengths, bins) for bins in BINS}


def grains(lengths: NDArray[np.int64], bins: int, epoch: int) -> Planned:
    """Pack an epoch with Grain."""
    import grain as library

    order = np.random.default_rng(epoch).permutation(len(lengths))
    frames = np.zeros(MAX_FRAMES, np.uint8)
    elements = library.MapDataset.source([{"x": frames[:n]} for n in lengths[order].tolist()])
    read = elements.to_iter_dataset(library.ReadOptions(num_threads=0))
    reading, _ = counted(read)
    packed = library.experimental.BestFitPackIterDataset(
        read, length_struct={"x": MAX_FRAMES}, num_packing_bins=bins, seed=epoch
    )
    seconds, count = counted(packed)
    return seconds - reading, float(lengths.sum()) / (count * MAX_FRAMES), count


def counted(elements: Iterable[Any]) -> tuple[float, int]:
    """Return the seconds of an iteration, and its number of elements."""
    began = time.process_time()
    count = sum(1 for _ in elements)
    return time.process_time() - began, count


def report(count: int, ways: dict[str, Callable[[int], Planned]], rounds: int) -> None:
    """Measure in turns, and print a table."""
    found: dict[str, list[Planned]] = {name: [] for name in ways}
    for epoch in range(1, rounds + 1):
        for name, way in ways.items():
            found[name].append(way(epoch))
    print(f"\n{count} utterances, {MAX_FRAMES} frames a batch")
    print(f"{'':44}{'us a row':>10}{'seconds':>10}{'fill':>8}{'batches':>9}")
    for name, planned in found.items():
        seconds, fill, batches = np.median(planned, axis=0)
        print(f"{name:44}{seconds / count * 1e6:10.3f}{seconds:10.3f}{fill:8.4f}{batches:9.0f}")


if __name__ == "__main__":
    main()

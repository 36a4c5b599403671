"""Reading through a cache: what it costs where all is there, and where nothing is.

`python benchmarks/through.py [directory]`. Warm: whole reads in random order of a published cache,
`featcache.cache`'s item and `Cache.read` in turns, and SpeechBrain's two decorators on the same
utterances; medians of the pairs' ratios with quartiles. Cold: one epoch of a DataLoader with two
forked workers over an item that computes for a given time, with each decorator and without any.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.integrations.hdf5.cached_item import CachedHDF5DynamicItem
from speechbrain.utils.data_pipeline import CachedDynamicItem, DynamicItem
from torch.utils.data import DataLoader

import featcache

PAIRS = 11
UTTERANCES = 2000
SHAPES = ((700, 80), (50, 80))  # 224 kB and 16 kB an utterance
COLD = 400
COMPUTE_S = 0.005
Decorator = Callable[[Any], Any]


def main(directory: Path) -> None:
    print(describe(directory, "torch", "speechbrain", "numpy"))
    for frames, mels in SHAPES:
        warm(directory, frames, mels)
    cold(directory)


def item(frames: int, mels: int, compute_s: float = 0.0) -> Any:
    """A SpeechBrain item of an id."""

    def compute(id: str) -> torch.Tensor:
        time.sleep(compute_s)
        return torch.full((frames, mels), 1.5)

    return DynamicItem(["id"], compute, ["feats"])


def decorators(directory: Path) -> dict[str, Decorator]:
    """Ours and SpeechBrain's, each with a directory of its own."""
    return {
        "featcache.cache": featcache.cache(directory / "ours"),
        "CachedDynamicItem": CachedDynamicItem.cache(directory / "torch"),
        "CachedHDF5DynamicItem": CachedHDF5DynamicItem.cache(directory / "hdf5"),
    }


def warm(parent: Path, frames: int, mels: int) -> None:
    """Print the time of a read by each decorator, as a multiple of `Cache.read`'s."""
    directory = parent / "through-warm"
    shutil.rmtree(directory, ignore_errors=True)
    ids = [f"utt-{number}" for number in range(UTTERANCES)]
    items = {name: each(item(frames, mels)) for name, each in decorators(directory).items()}
    for id in ids:
        for each in items.values():
            each(id)
    items["featcache.cache"].func.close()
    cache = featcache.open(directory / "ours")

    def plain(id: str) -> torch.Tensor:
        return torch.from_numpy(cache.read(id, "feats"))

    ratios: dict[str, list[float]] = {name: [] for name in items}
    times: list[float] = []
    for _ in range(PAIRS):
        random.shuffle(ids)
        for name, each in items.items():
            base = seconds(plain, ids)
            ratios[name].append(seconds(each, ids) / base)
            times.append(base)
    print(f"\nwarm, {frames}x{mels} float32, {UTTERANCES} utterances")
    print(f"  Cache.read and from_numpy: {statistics.median(times) / UTTERANCES * 1e6:.1f} us")
    for name, found in ratios.items():
        low, middle, high = statistics.quantiles(found)
        print(f"  {name:22} {middle:6.2f} times that ({low:.2f} to {high:.2f})")
    shutil.rmtree(directory)


def cold(parent: Path) -> None:
    """Print the time of the first epoch, and how many utterances are stored after it."""
    directory = parent / "through-cold"
    print(f"\ncold, {COLD} utterances of {COMPUTE_S * 1e3:.0f} ms, 2 workers: seconds, stored")
    plain: Decorator = lambda each: each  # noqa: E731
    for name, decorate in {"no decorator": plain, **decorators(directory)}.items():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        dataset = DynamicItemDataset({f"utt-{number}": {} for number in range(COLD)})
        decorate = {"no decorator": plain, **decorators(directory)}[name]
        dataset.add_dynamic_item(decorate(item(*SHAPES[0], COMPUTE_S)))
        dataset.set_output_keys(["feats"])
        begun = time.perf_counter()
        assert len([*DataLoader(dataset, batch_size=None, num_workers=2)]) == COLD
        print(f"  {name:22} {time.perf_counter() - begun:6.2f}  {stored(directory)}")
    shutil.rmtree(directory)


def stored(directory: Path) -> int:
    """Count the utterances that a decorator has stored."""
    if (directory / "hdf5" / "cache.hdf5").exists():
        import h5py

        with h5py.File(directory / "hdf5" / "cache.hdf5") as file:
            if len(file):
                return len(file)
    if (directory / "ours" / "featcache.json").exists():
        return len(featcache.open(directory / "ours"))
    return len([*directory.glob("torch/*.pt")])


def seconds(read: Callable[[str], object], ids: list[str]) -> float:
    """Return the time that it takes to read utterances."""
    begun = time.perf_counter()
    for id in ids:
        read(id)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm"))

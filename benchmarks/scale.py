"""What ten million utterances cost: opening, looking up, memory of workers, and batch samplers.

The cache is made up: its index is written as any other, its containers are files of holes. All of
it is in the page cache, as after the first epoch.

    python benchmarks/scale.py [--utterances 10000000]
"""

from __future__ import annotations

import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from machine import describe
from made_up import write_index
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

import featcache
from featcache import FeatureDataset
from featcache.format import Column, make_directory
from featcache.interface import Ints
from featcache.tables import FeatureTable

MELS = 80
FRAME_BYTES = MELS * 4
CONTAINERS = 100
LOOK_UPS = 20_000  # at a time
BATCHES = 100  # of look-ups, by two workers
OPEN = """
import sys, time, featcache.store as store
started = time.perf_counter()
store.open(sys.argv[1])
print(time.perf_counter() - started)
"""


@click.command()
@click.option("--utterances", default=10_000_000, show_default=True)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="On a real disk; else where temporary files go.",
)
def main(utterances: int, directory: Path | None) -> None:
    """Print the table of costs."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="featcache-bench-", dir=directory) as name:
        path = Path(name) / "cache"
        print(describe(Path(name), "numpy", "torch"))
        started = time.perf_counter()
        write_cache(path, utterances)
        size = sum(file.stat().st_size for file in path.glob("index-*")) / 1e9
        took = time.perf_counter() - started
        print(
            f"{utterances:,} utterances of one feature, warm; index of {size:.2f} GB, made in "
            f"{took:.0f} s"
        )
        print(f"\n{'':54}{'median':>12}{'worst':>12}  bar")
        look_ups(path, utterances)
        workers(path, utterances)
        samplers(path)


def line(what: str, values: Sequence[float], unit: str, bar: str = "") -> None:
    """Print a row of the table."""
    median, worst = f"{statistics.median_low(values):.2f} {unit}", f"{max(values):.2f} {unit}"
    print(f"{what:54}{median:>12}{worst:>12}  {bar}", flush=True)


def timed(make: Callable[[], object], times: int = 5) -> list[float]:
    """Return the seconds that a call took, each time."""
    took = []
    for _ in range(times):
        started = time.perf_counter()
        result = make()
        took.append(time.perf_counter() - started)
        del result
    return took


def write_cache(
    path: Path,
    count: int,
    annotations: Mapping[str, Column] | None = None,
    prefix: str = "utt",
) -> None:
    """Write a cache whose arrays are holes in sparse files."""
    lengths = np.random.default_rng(0).integers(100, 3500, count)
    container = (np.arange(count) * CONTAINERS // count).astype(np.int32)
    starts = np.searchsorted(container, np.arange(CONTAINERS))
    sizes = np.add.reduceat(lengths * FRAME_BYTES, starts).tolist()
    make_directory(path / "parts" / "made")
    files = {f"parts/made/fbank-{number}.npy": size for number, size in enumerate(sizes)}
    for file, size in files.items():
        with (path / file).open("wb") as opened:
            opened.truncate(size)
    feature = featcache.FeatureStorageConfig("fbank", stats=False)
    columns = _extent_columns(lengths, container, starts)
    write_index(path, feature, MELS, count, columns, files, annotations or {}, prefix)


def _extent_columns(
    lengths: Ints, container: NDArray[np.int32], starts: Ints
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the columns of arrays that lie one after another in each container."""
    count, nbytes = len(lengths), lengths * FRAME_BYTES
    yield "fbank.rows", lengths
    yield "fbank.checksum", np.zeros(count, np.uint64)
    yield "fbank.first", np.arange(count + 1)
    yield "fbank.container", container
    begins = np.cumsum(nbytes) - nbytes
    yield "fbank.offset", begins - begins[starts][container]
    yield "fbank.nbytes", nbytes


def look_ups(path: Path, count: int) -> None:
    """Measure what opens and looks up."""
    command = [sys.executable, "-c", OPEN, str(path)]
    opened = [
        float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
        for _ in range(7)
    ]
    line("open, each in a new process", [value * 1e3 for value in opened], "ms", "< 20 ms")
    line(
        "open again in one process",
        [value * 1e3 for value in timed(lambda: featcache.open(path))],
        "ms",
    )
    cache = featcache.open(path)
    one_by_one(cache, random_ids(count, LOOK_UPS, 0))
    took = [value * 1e6 for value in one_by_one(cache, random_ids(count, LOOK_UPS, 1))]
    line(
        "look-up of one random id (worst: p99)",
        [np.median(took), np.percentile(took, 99)],
        "us",
        "< 10 us",
    )
    table = FeatureTable.of(cache)
    draws = [random_ids(count, LOOK_UPS, seed) for seed in range(2, 9)]
    each = [timed(partial(table.rows, ids), 1)[0] / LOOK_UPS * 1e6 for ids in draws]
    line(f"look-up of {LOOK_UPS:,} random ids at once, each", each, "us", "< 10 us")
    line(
        "lengths of all, a copy",
        [value * 1e3 for value in timed(lambda: cache.lengths("fbank"))],
        "ms",
    )
    line(
        "lengths of all, mapped",
        [value * 1e6 for value in timed(lambda: table.lengths("fbank"))],
        "us",
    )
    line(
        "FeatureTable of an open cache",
        [value * 1e6 for value in timed(lambda: FeatureTable.of(cache))],
        "us",
    )
    line(
        "FeatureDataset of an open cache",
        [value * 1e6 for value in timed(lambda: FeatureDataset(cache))],
        "us",
    )
    line(
        "FeatureDataset of a path",
        [value * 1e3 for value in timed(lambda: FeatureDataset(path))],
        "ms",
    )


def random_ids(count: int, number: int, seed: int) -> list[str]:
    """Return ids of random utterances."""
    return [
        f"utt-{row:08d}" for row in np.random.default_rng(seed).integers(0, count, number).tolist()
    ]


def one_by_one(cache: featcache.Cache, ids: Sequence[str]) -> list[float]:
    """Return the seconds that each look-up took."""
    took = []
    for id in ids:
        started = time.perf_counter()
        found = id in cache
        took.append(time.perf_counter() - started)
        assert found
    return took


class Probe(Dataset[int]):
    """Looks up ids, where it has a data set, and tells how much of its memory is private."""

    def __init__(self, dataset: FeatureDataset | None, count: int) -> None:
        self._dataset, self._count = dataset, count

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, seed: int) -> int:
        ids = random_ids(self._count, LOOK_UPS, seed)
        if self._dataset is not None:
            rows = self._dataset.table.rows(ids)
            self._dataset.table.lengths("fbank")[rows].sum()
        return private_bytes()


def private_bytes() -> int:
    """Return the bytes that only this process has.

    Without clean pages of mapped files: these are the system's, and count as private only as long
    as no other process has looked at the same ones.
    """
    values = dict(
        row.split()[:2] for row in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    )
    return int(values["Private_Dirty:"]) * 1024


def workers(path: Path, count: int) -> None:
    """Measure the private memory of workers, two with the cache beside two without."""
    for method in ("fork", "spawn"):
        found = {}
        for dataset in (None, FeatureDataset(path)):
            loader = DataLoader(
                Probe(dataset, count),
                batch_size=None,
                num_workers=2,
                multiprocessing_context=multiprocessing.get_context(method),
            )
            found[dataset is None] = [value / 2**20 for value in loader][-BATCHES // 4 :]
        empty = statistics.median(found[True])
        more = [value - empty for value in found[False]]
        bar = f"< 20 MiB  (an empty one: {empty:.0f} MiB)"
        line(f"private memory of a worker over an empty one's, {method}", more, "MiB", bar)


def samplers(path: Path) -> None:
    """Measure how long batch samplers of all utterances take to make."""
    from featcache.espnet import build_batch_sampler, build_category_batch_sampler
    from featcache.samplers import BucketBatchSampler

    lengths = FeatureTable.of(path).lengths("fbank")
    random = np.random.default_rng(0)
    categories, datasets = (
        random.integers(0, 1000, len(lengths)),
        random.integers(0, 10, len(lengths)),
    )
    options: dict[str, dict[str, Any]] = {
        "unsorted": {"batch_size": 32},
        "sorted": {"batch_size": 32},
        "folded": {"batch_size": 32, "fold_lengths": [800]},
        "length": {"batch_bins": 60_000},
        "numel": {"batch_bins": 60_000},
    }
    for kind, arguments in options.items():
        made = timed(partial(build_batch_sampler, kind, lengths=lengths, **arguments), 3)
        line(f"build_batch_sampler {kind!r}", made, "s")
    labels = {"lengths": lengths, "categories": categories}
    drawn: dict[str, dict[str, Any]] = {
        "catbel": {"batch_size": 32, **labels},
        "catpow": {"batch_bins": 60_000, **labels},
        "catpow_balance_dataset": {"batch_bins": 60_000, **labels, "datasets": datasets},
    }
    for kind, arguments in drawn.items():
        made = timed(partial(build_category_batch_sampler, kind, **arguments), 1)
        line(f"build_category_batch_sampler {kind!r}", made, "s")
    line(
        "BucketBatchSampler", timed(lambda: BucketBatchSampler(lengths, max_frames=60_000), 3), "s"
    )
    sampler = BucketBatchSampler(lengths, max_frames=60_000)
    line("BucketBatchSampler, batches of an epoch", timed(lambda: sampler.epoch_batches(1), 3), "s")


if __name__ == "__main__":
    main()

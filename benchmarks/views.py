"""What views of ten million utterances cost: to make, to go on from a state, and in workers.

The cache is that of `scale.py`, with a speaker and a duration of each utterance.

    python benchmarks/views.py [--utterances 10000000]
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import numpy as np
import torch
from machine import describe
from scale import BATCHES, LOOK_UPS, line, private_bytes, random_ids, timed, write_cache
from torch.utils.data import DataLoader, Dataset

import featcache
from featcache import FeatureDataset, FeatureLoader
from featcache.format import Codes, Column, Strings
from featcache.samplers import BucketBatchSampler
from featcache.tables import FeatureTable

SPEAKERS = 10_000


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
        write_cache(path, utterances, annotations_of(utterances))
        print(f"{utterances:,} utterances, {SPEAKERS:,} speakers, warm")
        print(f"\n{'':54}{'median':>12}{'worst':>12}  bar")
        table = featcache.open(path).table
        views(table)
        states(table)
        workers(table, utterances)


def annotations_of(count: int) -> dict[str, Column]:
    """Return a speaker and a duration of each utterance."""
    random = np.random.default_rng(1)
    speakers = Codes(
        random.integers(0, SPEAKERS, count).astype(np.int32),
        Strings.of([f"speaker-{number:05d}" for number in range(SPEAKERS)]),
    )
    return {
        "speaker": Column("str", speakers),
        "duration": Column("float", random.uniform(1, 35, count)),
    }


def views(table: FeatureTable) -> None:
    """Measure what makes views."""
    some = {f"speaker-{number:05d}" for number in range(0, SPEAKERS, 2)}
    shares = {"train": 0.9, "valid": 0.05, "test": 0.05}
    made: dict[str, tuple[Callable[[], object], str]] = {
        "filter by frames and a number": (
            lambda: table.filter(fbank=(300, 3000), duration=(2, 20)),
            "< 1 s",
        ),
        "filter by frames and half of the speakers": (
            lambda: table.filter(fbank=(300, 3000), speaker=some),
            "< 1 s",
        ),
        "split by speaker in three": (
            lambda: table.split(shares, by="speaker", seed=1),
            "< 5 s",
        ),
        "split in three": (lambda: table.split(shares, seed=1), ""),
        "sample of a tenth": (lambda: table.sample(0.1), ""),
        "sort by frames": (lambda: table.sort("fbank"), ""),
        "sort by a number": (lambda: table.sort("duration", descending=True), ""),
    }
    for what, (make, bar) in made.items():
        line(what, timed(make, 3), "s", bar)
    view = table.filter(fbank=(300, 3000), duration=(2, 20))
    line(
        "filter of a view by frames and a number",
        timed(lambda: view.filter(fbank=(500, 2000), duration=(5, 15)), 3),
        "s",
        "< 1 s",
    )
    ids = [view.id(row) for row in range(0, len(view), len(view) // 20_000 or 1)]
    line(
        "look-up of 20,000 ids of a view, each",
        [value / len(ids) * 1e6 for value in timed(partial(view.rows, ids))],
        "us",
        "< 10 us",
    )
    turned = table.select(np.arange(len(table))[::-1])
    line("the first look-up in a view in another order", timed(partial(turned.rows, ids), 1), "s")


def states(table: FeatureTable) -> None:
    """Measure what a state of a view has, and how long it takes to go on from it."""
    view = table.filter(fbank=(300, 3000), duration=(2, 20)).sort("duration")
    loader = FeatureLoader(view, batch_sampler=BucketBatchSampler(view, max_frames=60_000))
    state = loader.state_dict()
    line("a state of its loader", [len(json.dumps(state))], "B", "< 1000 B")
    view = table.filter(fbank=(300, 3000), duration=(2, 20)).sort("duration")
    other = FeatureLoader(view, batch_sampler=[[0]])
    state = other.state_dict()
    fresh = [FeatureTable(pickle.loads(pickle.dumps(view.selection))) for _ in range(5)]  # noqa: S301
    took = []
    for each in fresh:
        other = FeatureLoader(each, batch_sampler=[[0]])
        started = time.perf_counter()
        other.load_state_dict(state)  # with the digest of the view, for the first time
        took.append(time.perf_counter() - started)
    line("resume: the proof that a state is of this view", took, "s", "< 0.1 s")


class Finder(Dataset[int]):
    """Looks up ids and lengths as a batch needs them, and tells how much memory is private."""

    def __init__(self, dataset: FeatureDataset | None, count: int) -> None:
        self._dataset, self._count = dataset, count

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, seed: int) -> int:
        ids = random_ids(self._count, LOOK_UPS, seed)
        if self._dataset is not None:
            rows = self._dataset.table.find(ids)
            self._dataset.table.lengths("fbank", rows=rows[rows >= 0]).sum()
        return private_bytes()


def workers(table: FeatureTable, count: int) -> None:
    """Measure the private memory of workers: without a data set, with the cache and with a view."""
    view = table.filter(fbank=(300, 3000), duration=(2, 20)).sort("duration")
    for method in ("fork", "spawn"):
        found = []
        for dataset in (None, FeatureDataset(table), FeatureDataset(view)):
            loader = DataLoader(
                Finder(dataset, count),
                batch_size=None,
                num_workers=2,
                multiprocessing_context=multiprocessing.get_context(method),
            )
            found.append([value / 2**20 for value in loader][-BATCHES // 4 :])
        empty, whole, some = map(statistics.median, found)
        line(f"private memory of a worker over an empty one's, {method}", [whole - empty], "MiB")
        line("the same with a view", [some - empty], "MiB", "no more")


if __name__ == "__main__":
    main()

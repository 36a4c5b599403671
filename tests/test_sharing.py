"""Every public class that reads: threads, forks and pickles share it as its docstring says."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sharing_helpers import INTERVALS_S, ROUNDS, at_once, switching

import featcache
from featcache import (
    CacheWriter,
    FeatureDataset,
    FeatureLoader,
    FeatureReader,
    FeatureStorage,
    FeatureStorageConfig,
    FeatureTable,
    GlobalMVN,
)
from featcache.errors import CacheError
from featcache.samplers import BucketBatchSampler, ShuffledBatchSampler
from featcache.writing.part_writer import PartWriter

FEATURES = [FeatureStorageConfig("fbank")]
FEW = range(6)
Make = Callable[[Path], Any]
Use = Callable[[Any], object]


def write(path: Path, numbers: range) -> None:
    with CacheWriter(path, FEATURES) as writer:
        for number in numbers:
            writer.write(f"utt-{number}", {"fbank": np.full((number + 1, 2), number, np.float32)})


def edit(path: Path, number: int) -> None:
    """Append, delete and compact: other generations than the one that is being read."""
    write(path, range(100 + 4 * number, 104 + 4 * number))
    cache = featcache.open(path)
    cache.delete([f"utt-{100 + 4 * number}"])
    cache.compact()


def all_read(cache: Any) -> object:
    arrays = [cache.read(f"utt-{number}", "fbank").tolist() for number in FEW]
    return arrays, [cache.lengths("fbank", ids=["utt-3"]).tolist()]


def all_items(dataset: Any) -> object:
    batch = dataset.__getitems__([f"utt-{number}" for number in FEW])
    return batch["id"], batch["fbank"].tolist(), dataset["utt-2"]["fbank"].tolist()


# an object, what it gives, and whether threads may share it
SHARED: dict[type, tuple[Make, Use]] = {
    featcache.Cache: (featcache.open, all_read),
    FeatureTable: (FeatureTable.of, all_read),
    FeatureReader: (
        lambda path: FeatureReader(path, "fbank"),
        lambda reader: [reader(f"utt-{number}").tolist() for number in FEW],
    ),
    FeatureStorage: (
        lambda path: FeatureStorage(path.parent, FEATURES),
        lambda storage: (storage.path("train"), [*storage.features]),
    ),
    FeatureDataset: (FeatureDataset, all_items),
    GlobalMVN: (
        lambda path: GlobalMVN(mean=[1.0, 2.0], std=[1.0, 4.0]),
        lambda mvn: mvn(torch.ones(1, 3, 2)).tolist(),
    ),
}
ALONE: dict[type, tuple[Make, Use]] = {
    FeatureLoader: (
        lambda path: FeatureLoader(path, batch_size=2, shuffle=True, seed=1),
        lambda loader: [batch["fbank"].tolist() for batch in loader],
    ),
    BucketBatchSampler: (lambda path: BucketBatchSampler(range(1, 9), max_frames=12), list),
    ShuffledBatchSampler: (lambda path: ShuffledBatchSampler([[0, 1], [2], [3]]), list),
}
ALL = SHARED | ALONE


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    write(tmp_path / "train", FEW)
    return tmp_path / "train"


def in_child(use: Use, shared: Any) -> object:
    """What a forked process gets from an object."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=lambda: theirs.send(use(shared)))
    child.start()
    assert ours.poll(60)
    found: object = ours.recv()
    child.join()
    return found


@pytest.mark.parametrize("interval_s", INTERVALS_S)
@pytest.mark.parametrize("kind", SHARED)
def test_threads_that_share_an_object_get_what_one_gets(
    cache: Path, kind: type, interval_s: float
) -> None:
    make, use = SHARED[kind]
    right = use(make(cache))
    for number in range(ROUNDS):
        edits = number % 5 == 0
        shared, found = make(cache), list[object]()
        jobs = [lambda shared=shared, found=found: found.append(use(shared))] * 4
        with switching(interval_s):
            # of a generation whose files were compacted away: open it again
            at_once(jobs + [partial(edit, cache, number)] * edits, (CacheError,) if edits else ())
        assert all(each == right for each in found)
        assert len(found) == 4 or edits


@pytest.mark.parametrize("interval_s", INTERVALS_S)
def test_threads_that_read_a_cache_while_another_edits_it_get_what_is_right(
    cache: Path, interval_s: float
) -> None:
    right = all_read(featcache.open(cache))

    def edits(shared: featcache.Cache, number: int) -> None:
        shared.annotate({"utt-2": {"round": number}})
        shared.delete([f"utt-{100 + number}"])
        shared.compact()
        assert (shared.annotation("round")[2], f"utt-{100 + number}" in shared) == (number, False)

    def reads(shared: featcache.Cache) -> None:
        for _ in range(4):
            shared.refresh()  # which opens no files: those may go before they are read
            assert all_read(shared) == right
            assert shared.read_batch(["utt-5", "utt-1"], "fbank").lengths.tolist() == [6, 2]
            assert shared["utt-3"]["fbank"].shape == (4, 2)
            assert {*shared.filter(fbank=(1, 6))} >= {f"utt-{each}" for each in FEW}

    for number in range(ROUNDS):
        write(cache, range(100 + number, 101 + number))
        shared = featcache.open(cache)
        before = shared.table
        with switching(interval_s):
            at_once([partial(reads, shared)] * 3 + [partial(edits, shared, number)])
        assert f"utt-{100 + number}" in before  # whose generation it keeps
        reads(shared)


@pytest.mark.parametrize("kind", ALL)
def test_forks_and_pickles_of_an_object_get_what_it_gets(cache: Path, kind: type) -> None:
    make, use = ALL[kind]
    right = use(make(cache))
    shared = make(cache)
    assert in_child(use, shared) == right  # before it was used
    assert use(pickle.loads(pickle.dumps(shared))) == right  # noqa: S301
    assert use(shared) == right
    assert kind in ALONE or in_child(use, shared) == right


@pytest.mark.parametrize("kind", ALONE)
def test_a_fork_or_a_pickle_that_iterates_leaves_the_place_of_its_original(
    cache: Path, kind: type
) -> None:
    make, use = ALONE[kind]
    right = use(make(cache))
    assert isinstance(right, list)
    shared = make(cache)
    iteration: Iterator[Any] = iter(shared)
    first = next(iteration)
    first = first["fbank"].tolist() if kind is FeatureLoader else first
    in_child(use, shared)
    use(pickle.loads(pickle.dumps(shared)))  # noqa: S301
    rest = [each["fbank"].tolist() if kind is FeatureLoader else each for each in iteration]
    assert [first, *rest] == right


@pytest.mark.parametrize("kind", [CacheWriter, PartWriter])
def test_a_writer_is_neither_pickled_nor_used_in_a_fork(cache: Path, kind: type) -> None:
    with CacheWriter(cache, FEATURES) as driver:
        writer = driver if kind is CacheWriter else PartWriter(cache, FEATURES)
        with writer:
            with pytest.raises(TypeError, match="cannot be pickled"):
                pickle.dumps(writer)

            def used(writer: Any) -> str:
                try:
                    return str(writer.commit())
                except featcache.errors.ClosedError as error:
                    return str(error)

            assert "forked from it" in str(in_child(used, writer))


def test_each_class_says_who_may_share_it() -> None:
    kinds: list[type] = [*SHARED, *ALONE, CacheWriter, PartWriter]
    for kind, word in itertools.product(kinds, ("thread", "fork", "pickl")):
        assert word in " ".join((kind.__doc__ or "").lower().split()), kind

"""Looking into a loader while it runs: ids of any step, other places, numbers, slow batches."""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loader_helpers import BATCHES, NUMBERS, ids_of
from store_helpers import make_cache

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig
from featcache.errors import ConfigError
from featcache.loading import Packed, Padded
from featcache.reading import containers
from featcache.samplers import BucketBatchSampler, ShuffledBatchSampler

Loader = FeatureLoader[dict[str, Any]]
SAMPLERS: dict[str, Callable[[featcache.Cache, int, int], Any]] = {
    "buckets": lambda cache, rank, size: BucketBatchSampler(
        cache.lengths("fbank"), max_frames=30, seed=5, rank=rank, world_size=size
    ),
    "shuffled": lambda cache, rank, size: ShuffledBatchSampler(BATCHES, rank=rank, world_size=size),
    "a list": lambda cache, rank, size: BATCHES[rank::size],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> featcache.Cache:
    return featcache.open(make_cache(tmp_path_factory.mktemp("cache"), NUMBERS))


def loader_of(cache: featcache.Cache, kind: str, threads: int = 1) -> Loader:
    return FeatureLoader(cache, batch_sampler=SAMPLERS[kind](cache, 0, 1), threads=threads)


def batches_of(loader: Iterable[dict[str, Any]]) -> list[list[str]]:
    return [batch["id"] for batch in loader]


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_any_step_of_the_epoch_is_known(
    cache: featcache.Cache, kind: str, rank: int, size: int
) -> None:
    loader: Loader = FeatureLoader(cache, batch_sampler=SAMPLERS[kind](cache, rank, size))
    before = [loader.explain(step) for step in range(len(loader))]
    for epoch in range(2):
        found = []
        for step, batch in enumerate(loader):
            assert loader.metrics()["step"] == step + 1
            assert loader.metrics()["epoch"] == loader.epoch == epoch
            found.append(batch["id"])
            told = [loader.explain(each) for each in (0, step, len(loader) - 1)]
            assert told[:2] == [found[0], found[step]]
            assert told[2] == loader.explain(len(loader) - 1)
        assert loader.epoch == epoch  # until the next one begins, or is chosen
        assert [loader.explain(step) for step in range(len(loader))] == found
        if epoch == 0:
            assert before == found
    loader.set_epoch(0)
    assert [loader.explain(step) for step in range(len(loader))] == before
    for wrong in (len(loader), -1):
        with pytest.raises(ConfigError, match="step"):
            loader.explain(wrong)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_an_iteration_begins_at_any_step(cache: featcache.Cache, kind: str) -> None:
    loader = loader_of(cache, kind)
    whole = batches_of(loader)
    for step in (0, 1, 5, len(whole) - 1):
        loader.set_epoch(1)
        loader.set_epoch(0)
        loader.seek(step)
        assert loader.metrics()["step"] == step
        assert loader.explain(step) == whole[step]
        assert batches_of(loader) == whole[step:]
    loader.set_epoch(1)
    loader.set_epoch(0)
    with pytest.raises(ConfigError, match="no step"):
        loader.seek(len(whole) + 1)
    assert batches_of(loader) == whole


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("threads", [0, 1])
def test_batches_around_a_bad_one_are_skipped(
    cache: featcache.Cache, kind: str, threads: int
) -> None:
    loader = loader_of(cache, kind, threads)
    whole, saved = batches_of(loader), {}
    loader.set_epoch(1)
    loader.set_epoch(0)
    for step, _ in enumerate(loader):
        if step == 1:
            saved = json.loads(json.dumps(loader.state_dict()))
        if step == 4:
            break
    loader.skip(2)
    assert batches_of(loader) == whole[7:]
    loader.load_state_dict(saved)
    loader.skip(3)
    assert loader.metrics()["step"] == 5
    assert loader.state_dict() != saved
    assert batches_of(loader) == whole[5:]
    loader.load_state_dict(saved)
    with pytest.raises(ConfigError, match="no step"):
        loader.skip(len(whole))
    assert batches_of(loader) == whole[2:]


CHOICES: dict[str, tuple[Callable[[Loader, dict[str, Any]], None], int, int]] = {
    "another epoch": (lambda loader, saved: loader.set_epoch(3), 3, 0),
    "a step": (lambda loader, saved: loader.seek(5), 0, 5),
    "those to come left out": (lambda loader, saved: loader.skip(2), 0, 5),
    "a state": (lambda loader, saved: loader.load_state_dict(saved), 0, 1),
}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("more", [0, 1, 99])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_place_that_is_chosen_in_a_loop_stays_whatever_the_loop_still_gets(
    cache: featcache.Cache, kind: str, threads: int, more: int, choice: str
) -> None:
    choose, epoch, step = CHOICES[choice]
    loader = loader_of(cache, kind, threads)
    loader.set_epoch(epoch)
    expected = [loader.explain(each) for each in range(len(loader))][step:]
    loader.set_epoch(0)
    loop, saved = iter(loader), {}
    for number in range(3):
        if number == 1:
            saved = loader.state_dict()
        next(loop)
    choose(loader, saved)
    chosen = loader.state_dict()
    for _ in islice(loop, more):
        assert loader.metrics()["step"] == step
    assert (loader.metrics()["epoch"], loader.metrics()["step"]) == (epoch, step)
    assert loader.state_dict() == chosen
    assert batches_of(loader) == expected


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("threads", [0, 1])
def test_the_epoch_that_runs_may_be_chosen_anew(
    cache: featcache.Cache, kind: str, threads: int
) -> None:
    loader = loader_of(cache, kind, threads)
    batches_of(loader)
    for step, batch in enumerate(loader):
        loader.set_epoch(1)
        assert loader.metrics()["step"] == step + 1
        assert loader.explain(step) == batch["id"]
        other = loader_of(cache, kind)
        other.load_state_dict(loader.state_dict())
        assert other.metrics()["step"] == step + 1


@pytest.mark.parametrize("kind", SAMPLERS)
def test_of_two_loops_at_once_the_newer_one_is_the_place(cache: featcache.Cache, kind: str) -> None:
    loader = loader_of(cache, kind)
    whole = [loader.explain(step) for step in range(len(loader))]
    older = iter(loader)
    next(older)
    newer = iter(loader)
    for step in range(len(whole) - 1):
        next(newer)
        next(older)
        assert loader.metrics()["step"] == step + 1
    state = loader.state_dict()
    del newer, older
    loader.load_state_dict(state)
    assert batches_of(loader) == whole[-1:]


def test_steps_count_on_where_other_ranks_took_those_before(cache: featcache.Cache) -> None:
    def loader_of(rank: int, size: int) -> Loader:
        return FeatureLoader(cache, batch_sampler=SAMPLERS["buckets"](cache, rank, size))

    before = loader_of(0, 3)
    batches = iter(before)
    taken = [next(batches)["id"] for _ in range(2)]
    state = before.state_dict()
    after = loader_of(0, 2)
    after.load_state_dict(state)
    first = int(after.metrics()["step"])
    assert first == 3  # 2 steps of 3 ranks
    told = [after.explain(step) for step in range(first, first + 3)]
    rest = batches_of(after)
    assert rest[:3] == told
    assert not {id for batch in taken for id in batch} & {id for batch in rest for id in batch}


def test_a_sampler_that_cannot_be_looked_into_says_so(cache: featcache.Cache) -> None:
    class Foreign:
        def __iter__(self) -> Any:
            return iter(BATCHES)

    loader: Loader = FeatureLoader(cache, batch_sampler=Foreign())
    with pytest.raises(ConfigError, match=r"Foreign gives its batches one after the other"):
        loader.explain(0)
    loader.seek(3)
    assert batches_of(loader) == BATCHES[3:]


@pytest.mark.parametrize("transform", [None, lambda item, rng: item], ids=["stored", "made"])
def test_numbers_for_a_logger(tmp_path: Path, transform: Any) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("x"), FeatureStorageConfig("y")]) as writer:
        for number in range(20):
            frames = 10 * (1 + number % 2)
            writer.write(
                f"{number:02}", {"x": np.ones((frames, 8), "f4"), "y": np.ones((6, 4), "f4")}
            )
    loader: Loader = FeatureLoader(tmp_path, "x", batch_size=2, transform=transform)
    assert loader.metrics()["step"] == 0
    for step, _ in enumerate(loader, 1):
        found = loader.metrics()
        assert found["fill"] == 0.75
        assert found["step"] == step
        assert found["ahead_batches"] * 2 * 20 * 8 * 4 == found["ahead_bytes"]
    assert found["ahead_batches"] == 0
    assert json.loads(json.dumps(found)) == found
    ended = loader.metrics()
    assert ended["gb_per_s"] > 0
    assert ended["read_gb_per_s"] > 0
    time.sleep(0.01)
    assert loader.metrics() == ended  # it goes on no more
    assert ended["waited_s"] == loader.waited_s
    if transform is None:
        assert pickle.loads(pickle.dumps(loader)).metrics()["ahead_batches"] == 0  # noqa: S301


@pytest.mark.parametrize("layout", [Padded(pad_to=3000), Packed(multiple_of=640)])
def test_padding_of_batches_that_a_transform_makes_is_counted(
    cache: featcache.Cache, layout: Any
) -> None:
    found = []
    for transform in (None, lambda item, rng: item):
        dataset = FeatureDataset(cache, "fbank", transform=transform, layout=layout)
        loader: Loader = FeatureLoader(dataset, batch_size=4)
        list(loader)
        found.append(loader.metrics()["fill"])
    assert found[0] == found[1] < 0.9


def test_a_transform_may_make_items_short_enough_to_pad(cache: featcache.Cache) -> None:
    def shortened(item: dict[str, Any], rng: object) -> dict[str, Any]:
        return item | {"fbank": item["fbank"][:5]}

    dataset = FeatureDataset(cache, "fbank", transform=shortened, layout=Padded(pad_to=[7]))
    loader: Loader = FeatureLoader(dataset, batch_size=4)
    assert {batch["fbank"].shape[1] for batch in loader} == {7}


def test_what_is_read_ahead_is_counted(cache: featcache.Cache) -> None:
    loader: Loader = FeatureLoader(cache, batch_sampler=BATCHES)
    batches = iter(loader)
    next(batches)
    for _ in range(500):
        if loader.metrics()["ahead_batches"] == len(BATCHES) - 1:
            break
        time.sleep(0.01)
        next_ones = loader.metrics()["ahead_batches"]
        if next_ones >= 4:
            break
    assert loader.metrics()["ahead_batches"] >= 4
    assert loader.metrics()["ahead_bytes"] > 0


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_slow_batch_is_told_with_file_and_place(
    tmp_path: Path,
    mapped: bool,
    threads: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_cache(tmp_path, NUMBERS)
    caplog.clear()
    read, slow = containers.Containers._file, [2]

    def slowly(self: containers.Containers, container: int) -> Any:
        if self._at and slow[0]:
            slow[0] -= 1
            time.sleep(0.4)
        return read(self, container)

    monkeypatch.setattr(containers.Containers, "_file", slowly)
    opened = featcache.open(tmp_path, mapped=mapped)
    loader: Loader = FeatureLoader(
        opened, "fbank", batch_sampler=BATCHES, threads=threads, watchdog_s=0.1
    )
    with caplog.at_level(logging.WARNING, "featcache"):
        assert batches_of(loader) == BATCHES
    assert len(caplog.messages) == 1
    # the first batch has an utterance without frames: where it is mapped, no file is asked
    assert f"batch {int(mapped)} of epoch 0" in caplog.text
    assert "fbank.npy', bytes " in caplog.text


@pytest.mark.parametrize("threads", [0, 1])
def test_a_slow_transform_is_told_as_such(
    cache: featcache.Cache, threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(item: dict[str, Any], rng: object) -> dict[str, Any]:
        time.sleep(0.15 * (item["id"] == BATCHES[1][0]))
        return item

    loader: Loader = FeatureLoader(
        cache, batch_sampler=BATCHES, transform=slow, threads=threads, watchdog_s=0.05
    )
    with caplog.at_level(logging.WARNING, "featcache"):
        ids_of(loader)
    assert len(caplog.messages) == 1
    assert "batch 1 of epoch 0" in caplog.text
    assert "transform" in caplog.text


def test_a_watchdog_needs_a_time(cache: featcache.Cache) -> None:
    with pytest.raises(ConfigError, match="watchdog_s"):
        FeatureLoader(cache, batch_sampler=BATCHES, watchdog_s=0)

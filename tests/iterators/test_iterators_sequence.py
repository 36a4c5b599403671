from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from iterators_helpers import cached, only, pairs

from featcache.errors import ConfigError
from featcache.espnet import CommonCollateFn, SequenceIterFactory
from featcache.espnet.dataset_input import PaddedBatch
from featcache.samplers import Batches

LENGTHS = {f"u{number}": 1 + number * 7 % 20 for number in range(12)}
BATCHES = [["u3", "u1"], ["u7"], ["u0", "u11", "u2"]]


def taken(factory: SequenceIterFactory, epoch: int, shuffle: bool | None = None) -> list[Any]:
    sampler = factory.build_iter(epoch, shuffle).batch_sampler
    assert sampler is not None
    return list(sampler)


def seeds_of_a_worker(items: Sequence[object]) -> tuple[float, float]:
    return random.random(), float(np.random.random())


@given(
    count=st.integers(1, 9),
    per_epoch=st.integers(1, 25),
    epochs=st.integers(1, 6),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    as_arrays=st.booleans(),
)
def test_epochs_of_any_size_take_all_batches_equally_often(
    count: int, per_epoch: int, epochs: int, seed: int, shuffle: bool, as_arrays: bool
) -> None:
    listed = [[number] for number in range(count)]
    batches = Batches.of(listed) if as_arrays else listed
    factory = SequenceIterFactory({}, batches, per_epoch, seed, shuffle)
    found = [batch[0] for epoch in range(1, epochs + 1) for batch in taken(factory, epoch)]
    assert len(found) == per_epoch * epochs
    for start in range(0, len(found) - count + 1, count):
        assert sorted(found[start : start + count]) == list(range(count))
    if not shuffle:
        assert found[:count] == list(range(count))[: len(found)]


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    seed=st.integers(0, 9),
    shuffle=st.booleans(),
)
def test_mixing_batches_is_the_same_for_lists_and_arrays(
    sizes: list[int], seed: int, shuffle: bool
) -> None:
    ends = np.cumsum([0, *sizes])
    arrays = Batches(np.arange(ends[-1]), ends, keys=[f"u{row}" for row in range(int(ends[-1]))])
    found = [
        taken(SequenceIterFactory({}, kind, None, seed, shuffle, True), 2)
        for kind in (arrays, list(arrays))
    ]
    assert found[0] == found[1]
    first = taken(SequenceIterFactory({}, arrays, None, seed, shuffle), 2)[0]
    assert [len(batch) for batch in found[0][:-1]] == [len(first)] * (len(found[0]) - 1)
    assert sorted(chain.from_iterable(found[0])) == sorted(
        f"u{row}" for row in range(int(ends[-1]))
    )


def test_shuffling_leaves_global_generators_and_the_users_batches_alone() -> None:
    batches = [list(batch) for batch in BATCHES]
    before = random.getstate(), pickle.dumps(np.random.get_state())
    factory = SequenceIterFactory(
        pairs(LENGTHS), batches, seed=3, shuffle=True, shuffle_within_batch=True
    )
    assert taken(factory, 1) != taken(factory, 2)
    assert taken(factory, 1) == taken(factory, 1)
    assert taken(factory, 1, shuffle=False) != taken(factory, 1)
    assert batches == BATCHES
    assert before == (random.getstate(), pickle.dumps(np.random.get_state()))


def test_workers_are_seeded_by_epoch_and_seed() -> None:
    factory = SequenceIterFactory(
        [1, 2], [[0], [1]], seed=5, num_workers=2, collate_fn=seeds_of_a_worker
    )
    drawn = []
    for seed in (7, 8):
        random_state, numpy_state = random.Random(seed), np.random.RandomState(seed)
        drawn.append((random_state.random(), float(numpy_state.random_sample())))
    assert list(factory.build_iter(2)) == drawn


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "collate_fn", [None, CommonCollateFn(int_pad_value=0, not_sequence=["speaker"])]
)
def test_a_cache_gives_the_batches_that_its_utterances_give(
    tmp_path: Path, workers: int, collate_fn: CommonCollateFn | None
) -> None:
    names = ("fbank", "units", "speaker")
    utterances, dataset = (
        only(pairs(LENGTHS), *names),
        cached(tmp_path / "cache", pairs(LENGTHS), *names),
    )
    collate = CommonCollateFn(int_pad_value=0, not_sequence=["speaker"])
    expected = list(SequenceIterFactory(utterances, BATCHES, collate_fn=collate).build_iter(1))
    found = list(
        SequenceIterFactory(
            dataset, BATCHES, collate_fn=collate_fn, num_workers=workers
        ).build_iter(1)
    )
    assert_same(found, expected)


def assert_same(found: Sequence[PaddedBatch], expected: Sequence[PaddedBatch]) -> None:
    for (ids, batch), (expected_ids, expected_batch) in zip(found, expected, strict=True):
        assert ids == expected_ids
        assert set(batch) == set(expected_batch)
        for name, tensor in batch.items():
            assert torch.equal(tensor, expected_batch[name])
            assert tensor.dtype == expected_batch[name].dtype


def test_the_collate_function_of_a_user_gets_a_caches_utterances_one_by_one(tmp_path: Path) -> None:
    class Noisy:
        """As the documentation of ESPnet3 adds noise."""

        def __call__(self, items: Sequence[tuple[str, dict[str, Any]]]) -> PaddedBatch:
            return CommonCollateFn(int_pad_value=-1)(
                [
                    (id, {**sample, "fbank": sample["fbank"] + np.ones(sample["fbank"].shape)})
                    for id, sample in items
                ]
            )

    dataset = cached(tmp_path / "cache", pairs(LENGTHS), "fbank", "units", "speaker")
    ids, batch = next(iter(SequenceIterFactory(dataset, BATCHES, collate_fn=Noisy()).build_iter(1)))
    assert ids == ["u3", "u1"]
    assert batch["fbank"][:, :3, 0].tolist() == [[2, 3, 0], [2, 3, 4]]
    assert batch["units"][0].tolist() == [1, 2, -1, -1, -1, -1, -1, -1]
    assert batch["fbank"].dtype == torch.float64


def test_batches_are_made_from_the_lengths_of_a_cache(tmp_path: Path) -> None:
    dataset = cached(tmp_path / "cache", pairs(LENGTHS), "fbank")
    factory = SequenceIterFactory(
        dataset, {"type": "sorted", "batch_size": 3, "sort_in_batch": "ascending"}
    )
    assert sorted(chain.from_iterable(taken(factory, 1))) == list(range(12))
    lengths = [
        length for _, batch in factory.build_iter(1) for length in batch["fbank_lengths"].tolist()
    ]
    assert lengths == sorted(LENGTHS.values())


def test_batches_are_made_from_shape_files(tmp_path: Path) -> None:
    file = tmp_path / "feats_shape"
    file.write_text("a 3,80\nb 1,80\nc 2,80\n")
    factory = SequenceIterFactory(
        {}, {"type": "sorted", "batch_size": 1, "shape_files": [str(file)]}
    )
    assert taken(factory, 1) == [["b"], ["c"], ["a"]]


def test_batches_may_be_arrays_or_come_from_a_generator() -> None:
    rows = np.arange(6).reshape(3, 2)
    for batches in (rows, list(rows), (row for row in rows)):
        factory = SequenceIterFactory({}, batches)  # type: ignore[arg-type]
        assert [list(batch) for batch in taken(factory, 1)] == rows.tolist()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (["a", "b"], "the first one is 'a'"),
        ("ab", "not 'ab'"),
        (7, "not 7"),
        ([3, 4], "the first one is 3"),
        ({"type": "sorted", "batchsize": 4}, "no argument 'batchsize'; did you mean 'batch_size'"),
    ],
)
def test_what_is_no_list_of_batches_is_refused(batches: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SequenceIterFactory({}, batches)


def test_epochs_that_have_no_seed_or_no_batches_are_refused() -> None:
    with pytest.raises(ConfigError, match="epochs count from 1"):
        SequenceIterFactory({}, BATCHES, shuffle=True).build_iter(-1)
    with pytest.raises(ConfigError, match="epochs count from 1"):
        SequenceIterFactory({}, BATCHES, 2, shuffle=True).build_iter(0)
    with pytest.raises(ConfigError, match="no batches"):
        SequenceIterFactory({}, [], 2).build_iter(1)
    with pytest.raises(ConfigError, match="at least 1 batch, not 0"):
        SequenceIterFactory({}, BATCHES, 0)
    with pytest.raises(ConfigError, match="first batch is empty"):
        SequenceIterFactory({}, [[], ["a"]], shuffle_within_batch=True).build_iter(1)
    assert taken(SequenceIterFactory({}, [], shuffle_within_batch=True), 1) == []

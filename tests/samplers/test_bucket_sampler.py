from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray
from store_helpers import arrays_of, make_cache

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig, FeatureTable
from featcache.errors import ConfigError, CorruptCacheError
from featcache.samplers import BucketBatchSampler

Ints = NDArray[np.int64]


def rows_of(batches: Iterable[list[int] | list[str]]) -> list[list[int]]:
    return [cast(list[int], batch) for batch in batches]


def speech(count: int) -> Ints:
    """Frames of read speech as LibriSpeech's: 1 to 35 s, many of 12 to 16 s, and a hump of short
    ones.
    """
    random = np.random.default_rng(0)
    long, short = random.normal(1450, 130, count), random.gamma(2.5, 240, count) + 100
    return np.where(random.random(count) < 0.6, long, short).clip(100, 3500).astype(np.int64)


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    cap=st.integers(1, 250),
    batch_size=st.none() | st.integers(1, 9),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_every_utterance_comes_once_and_no_batch_is_over_its_limits(
    lengths: list[int], cap: int, batch_size: int | None, world_size: int, epoch: int, shuffle: bool
) -> None:
    rows = [row for row, length in enumerate(lengths) if length <= cap]
    limits: dict[str, Any] = {
        "max_frames": cap,
        "batch_size": batch_size,
        "too_long": "skip",
        "shuffle": shuffle,
    }
    if not rows:
        with pytest.raises(ConfigError, match=r"; raise max_frames$"):
            BucketBatchSampler(lengths, **limits)
        return
    with warnings.catch_warnings(action="ignore"):
        samplers = [
            BucketBatchSampler(lengths, rank=rank, world_size=world_size, **limits)
            for rank in range(world_size)
        ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        assert sorted([*rows, *sampler.too_long.tolist()]) == list(range(len(lengths)))
    count = len(samplers[0].epoch_batches(epoch))
    if -(-count // world_size) * world_size > len(rows):
        with pytest.raises(ConfigError, match="cannot be shared"):
            list(samplers[0])
        return
    shares = [rows_of(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {-(-count // world_size)}
    batches = [batch for share in shares for batch in share]
    assert sorted(row for batch in batches for row in batch) == rows
    for batch in batches:
        assert len(batch) * max(lengths[row] for row in batch) <= cap
        assert len(batch) <= (batch_size or len(lengths))


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=60),
    cap=st.integers(12, 48),
    size=st.integers(1, 30),
)
def test_sorted_batches_are_filled_up_to_a_limit(lengths: list[int], cap: int, size: int) -> None:
    batches = rows_of(BucketBatchSampler(lengths, max_frames=cap, batch_size=size, shuffle=False))
    frames = [[lengths[row] for row in batch] for batch in batches]
    assert [length for batch in frames for length in batch] == sorted(lengths)
    for batch, following in pairwise(frames):
        assert len(batch) == size or (len(batch) + 1) * following[0] > cap


def test_batch_size_alone_is_a_limit() -> None:
    assert list(BucketBatchSampler([5, 1, 4, 2, 3], batch_size=2, shuffle=False)) == [
        [1, 3],
        [4, 2],
        [0],
    ]
    assert list(BucketBatchSampler([0, 0, 0], max_frames=1, shuffle=False)) == [[0, 1, 2]]


@pytest.mark.parametrize("max_frames", [3500, 10_000, 40_000])
def test_batches_of_real_lengths_are_full_and_never_over_the_limit(max_frames: int) -> None:
    lengths = speech(5000)
    sampler = BucketBatchSampler(lengths, max_frames=max_frames)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        padded = [len(batch) * lengths[batch].max() for batch in rows_of(sampler)]
        assert max(padded) <= max_frames
        assert np.mean(padded) > 0.75 * max_frames


def test_utterances_of_one_length_have_new_companions_in_each_epoch() -> None:
    sampler = BucketBatchSampler(np.full(1000, 300), batch_size=10)
    for epoch in range(2):
        assert (
            np.mean([max(batch) - min(batch) for batch in rows_of(sampler.epoch_batches(epoch))])
            > 500
        )


def test_few_utterances_of_different_lengths_have_new_companions_too() -> None:
    sampler = BucketBatchSampler([int(1.1**power) for power in range(30, 90)], batch_size=6)
    ends = [{max(batch) for batch in rows_of(sampler.epoch_batches(epoch))} for epoch in range(30)]
    assert set.union(*ends) == set(range(60))
    assert all(len(sampler.epoch_batches(epoch)) <= 11 for epoch in range(30))


def test_the_batches_of_an_epoch_are_in_no_order_of_length() -> None:
    lengths = speech(20_000)
    sampler = BucketBatchSampler(lengths, max_frames=40_000)
    longest = [
        [lengths[batch].max() for batch in rows_of(sampler.epoch_batches(epoch))]
        for epoch in range(2)
    ]
    assert all(abs(np.corrcoef(epoch, np.arange(len(epoch)))[0, 1]) < 0.5 for epoch in longest)
    assert len(sampler) == len(longest[0])


@pytest.mark.parametrize(
    ("limits", "least"), [({"max_frames": 40_000}, 0.97), ({"batch_size": 16}, 0.97)]
)
def test_little_of_a_batch_is_padding(limits: dict[str, int], least: float) -> None:
    lengths = speech(20_000)
    sampler = BucketBatchSampler(lengths, **limits)  # type: ignore[arg-type]
    assert sampler.padding_efficiency > least
    assert BucketBatchSampler(lengths, shuffle=False, **limits).padding_efficiency > 0.99  # type: ignore[arg-type]
    padded = sum(len(batch) * lengths[batch].max() for batch in rows_of(sampler))
    assert sampler.padding_efficiency == pytest.approx(lengths.sum() / padded)


def test_ranks_get_batches_of_similar_length_in_a_step() -> None:
    lengths = speech(100_000)
    shares = [
        rows_of(BucketBatchSampler(lengths, max_frames=40_000, rank=rank, world_size=8))
        for rank in range(8)
    ]
    longest = np.array([[lengths[batch].max() for batch in share] for share in shares])
    assert np.mean(longest.max(axis=0) < 1.15 * longest.min(axis=0)) > 0.9


def test_each_of_several_features_keeps_to_the_limit() -> None:
    first, second = np.array([10, 20, 30, 40]), np.array([80, 7, 1, 40], np.int16)
    sampler = BucketBatchSampler([first, second], max_frames=80, shuffle=False)
    assert list(sampler) == [[1, 2], [3], [0]]
    assert sampler.padding_efficiency == pytest.approx((100 + 128) / (60 + 40 + 10 + 14 + 40 + 80))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=60),
    most=st.integers(1, 1000),
    cap=st.none() | st.integers(20, 200),
    shuffle=st.booleans(),
)
def test_what_all_padded_features_hold_keeps_to_the_limit(
    lengths: list[tuple[int, int]], most: int, cap: int | None, shuffle: bool
) -> None:
    frames = np.array(lengths).T

    class Table(FeatureTable):
        features = ("wide", "flat")
        plan = None

        def __init__(self) -> None:
            pass

        def __len__(self) -> int:
            return len(lengths)

        def has_frames(self, feature: str) -> bool:
            return True

        def dims(self, feature: str) -> tuple[int, ...]:
            return {"wide": (2, 3), "flat": ()}[feature]

        def lengths(self, feature: str, *, ids: Any = None, rows: Any = None) -> Any:
            return frames[self.features.index(feature)]

        def id(self, row: int) -> str:
            return f"u{row}"

    def elements(rows: list[int]) -> int:
        return len(rows) * int(frames[0, rows].max() * 6 + frames[1, rows].max())

    fit = [
        row
        for row in range(len(lengths))
        if elements([row]) <= most and max(lengths[row]) <= (cap or 50)
    ]
    if not fit:
        with pytest.raises(ConfigError, match="the longest is 'u"):
            BucketBatchSampler(Table(), max_elements=most, max_frames=cap)
        return
    with warnings.catch_warnings(action="ignore"):
        sampler = BucketBatchSampler(
            Table(), max_elements=most, max_frames=cap, shuffle=shuffle, too_long="skip"
        )
    batches = rows_of(sampler)
    assert sorted(row for batch in batches for row in batch) == fit
    for batch in batches:
        assert elements(batch) <= most
        assert len(batch) * int(frames[:, batch].max()) <= (cap or most)


def test_elements_of_one_feature_are_its_frames_times_its_width(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path / "cache", range(40)))
    fbank = FeatureDataset(cache, "fbank")  # frames of four numbers
    assert list(BucketBatchSampler(fbank, max_elements=241)) == list(
        BucketBatchSampler(fbank, max_frames=60)
    )
    lengths = cache.lengths("fbank")
    assert list(BucketBatchSampler(lengths, max_elements=60)) == list(
        BucketBatchSampler(lengths, max_frames=60)
    )


def test_utterances_that_are_too_long_are_reported_or_left_out_with_a_warning(
    tmp_path: Path,
) -> None:
    lengths = [5, 30, 7, 40, 8]
    message = (
        r"2 of 5 utterances are longer than max_frames=20, the longest is row 3 with 40 frames"
    )
    with pytest.raises(
        ConfigError, match=message + "; raise max_frames, or leave them out: too_long=skip"
    ):
        BucketBatchSampler(lengths, max_frames=20)
    with pytest.warns(UserWarning, match=message + "; they are left out") as caught:
        sampler = BucketBatchSampler(lengths, max_frames=20, too_long="skip", shuffle=False)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert sampler.too_long.tolist() == [1, 3]
    assert list(sampler) == [[0, 2], [4]]
    with pytest.raises(
        ConfigError, match=r"5 of 5 utterances are longer than max_frames=2, .*; raise max_frames$"
    ):
        BucketBatchSampler(lengths, max_frames=2, too_long="skip")
    cache = featcache.open(make_cache(tmp_path / "cache", range(9)))
    longest = max(range(9), key=lambda number: len(arrays_of(number)["fbank"]))
    with pytest.raises(
        ConfigError, match=rf"the longest is 'spk\d/utt-{longest}' \(row \d\) with 20 frames"
    ):
        BucketBatchSampler(cache, max_frames=10)


def test_a_cache_a_table_or_a_data_set_gives_the_lengths_of_its_features(tmp_path: Path) -> None:
    path = make_cache(tmp_path / "cache", range(40))
    cache = featcache.open(path)
    table = FeatureTable.of(cache)

    class Units:
        table = FeatureTable.of(cache)
        features = ("units",)

    # the units are half as many
    expected = list(BucketBatchSampler(cache.lengths("fbank"), max_frames=60))
    for source in (path, str(path), cache, table):
        assert list(BucketBatchSampler(source, max_frames=60)) == expected
    units = BucketBatchSampler(Units(), max_frames=60)
    assert list(units) == list(BucketBatchSampler(cache.lengths("units"), max_frames=60))


def test_a_cache_without_a_time_axis_has_no_lengths(tmp_path: Path) -> None:
    features = [featcache.FeatureStorageConfig("speaker", time_axis=None)]
    with featcache.CacheWriter(tmp_path / "cache", features) as writer:
        writer.write("a", {"speaker": np.zeros(4, np.float32)})
    with pytest.raises(ConfigError, match=r"no feature of .* has a time axis"):
        BucketBatchSampler(tmp_path / "cache", batch_size=1)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {"max_frames": 9}, "lengths is empty"),
        (np.zeros(0, np.int64), {"max_frames": 9}, "lengths is empty"),
        ([3, -1, -4], {"max_frames": 9}, "negative: row 2 has -4"),
        ([0.5, 1.0], {"max_frames": 9}, "integers, not float64"),
        ([True, False], {"max_frames": 9}, "integers, not bool"),
        (["3"], {"max_frames": 9}, "integers, not <U1"),
        (np.ones((2, 2), int), {"max_frames": 9}, r"of shape \(2, 2\)"),
        (5, {"max_frames": 9}, r"of shape \(\)"),
        ([[1, 2], [3]], {"max_frames": 9}, r"lengths for \[2, 1\] utterances"),
        ([1], {}, "max_frames, max_elements or batch_size"),
        ([1], {"max_frames": 0}, "max_frames must be an integer of at least 1, not 0"),
        ([1], {"max_frames": 1.5}, "max_frames must be an integer"),
        ([1], {"max_elements": 0}, "max_elements must be an integer of at least 1, not 0"),
        ([1], {"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ([1], {"max_frames": 9, "too_long": "skipp"}, "'skipp'.*'skip'"),
        ([1], {"max_frames": 9, "seed": -3}, "seed must be"),
    ],
)
def test_what_cannot_work_is_refused(lengths: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BucketBatchSampler(lengths, **options)


def test_lengths_may_be_any_integers_and_are_not_changed() -> None:
    lengths = speech(300)
    lengths.flags.writeable = False
    expected = list(BucketBatchSampler(lengths, max_frames=9000))
    for other in (
        lengths.tolist(),
        lengths.astype(np.uint16),
        torch.tensor(lengths.tolist()),
        lengths[::-1][::-1],
    ):
        assert list(BucketBatchSampler(other, max_frames=9000)) == expected
    (ordered,) = rows_of(BucketBatchSampler(lengths * 1000, max_frames=10**30, shuffle=False))
    assert ordered == np.argsort(lengths, kind="stable").tolist()


def test_the_repr_says_what_is_sampled_without_making_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with warnings.catch_warnings(action="ignore"):
        sampler = BucketBatchSampler(
            [10, 20, 999], max_frames=40, too_long="skip", rank=1, world_size=2
        )
    monkeypatch.setattr(sampler, "epoch_batches", None)
    assert (
        repr(sampler) == "<BucketBatchSampler: 2 utterances, max_frames=40, epoch 0, rank 1 of 2>"
    )


@pytest.mark.parametrize(
    "limits", [{"max_frames": 4000}, {"batch_size": 7}, {"max_elements": 40_000}]
)
@pytest.mark.parametrize("count", [9, 60, 1000])
def test_all_epochs_have_the_same_number_of_batches(count: int, limits: dict[str, int]) -> None:
    for seed in range(3):
        sampler = BucketBatchSampler(speech(count), seed=seed, **limits)  # type: ignore[arg-type]
        later = BucketBatchSampler(speech(count), seed=seed, **limits)  # type: ignore[arg-type]
        later.set_epoch(17)
        assert {len(sampler.epoch_batches(epoch)) for epoch in range(30)} == {len(later)}
        natural = len(BucketBatchSampler(speech(count), shuffle=False, **limits))  # type: ignore[arg-type]
        assert len(later) <= 1.05 * natural + 2


def test_a_loader_over_other_utterances_than_the_sampler_numbers_is_refused(tmp_path: Path) -> None:
    before = featcache.open(make_cache(tmp_path / "growing", range(4)))
    sampler = BucketBatchSampler(before, batch_size=2)
    make_cache(tmp_path / "growing", range(4, 6))  # adds to it
    make_cache(tmp_path / "same", range(4))
    with pytest.raises(
        ConfigError, match=r"4 utterances .* not those of .* 6 utterances .*: give both"
    ):
        FeatureLoader(tmp_path / "growing", batch_sampler=sampler)
    for fits in (before, tmp_path / "same"):
        batches = list(FeatureLoader(fits, batch_sampler=sampler))
        assert sorted(id for batch in batches for id in batch["id"]) == sorted(before)


def test_a_damaged_length_of_a_cache_is_refused(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "c", [FeatureStorageConfig("fbank")]) as writer:
        for number in range(3):
            writer.write(str(number), {"fbank": np.zeros((2 + number, 3), np.float32)})
    cache = featcache.open(tmp_path / "c")
    cache.opened.features["fbank"].lengths = np.array([2, -5, 4])
    with pytest.raises(CorruptCacheError, match=r"'fbank' is damaged: .* -5 to 4 frames"):
        BucketBatchSampler(cache, max_frames=10)

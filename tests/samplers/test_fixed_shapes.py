"""`BucketBatchSampler` with few shapes, and with the cost of attention."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from store_helpers import make_cache
from test_packed_sampler import utterances

import featcache
from featcache.errors import ConfigError, StateError
from featcache.loading import Padded
from featcache.samplers import Batches, BucketBatchSampler

Shape = tuple[int, int]


def shapes_of(sampler: BucketBatchSampler, epoch: int, pad_to: list[int]) -> Counter[Shape]:
    """The shapes of an epoch's batches when they are padded, with their numbers."""
    lengths = utterances(sampler.epoch_batches(epoch).utterances)
    return Counter(
        (len(batch), min(n for n in pad_to if n >= lengths[cast(list[int], batch)].max()))
        for batch in sampler.epoch_batches(epoch)
    )


PAD_TO = [200, 400, 700, 1000, 1500, 3000]


def test_all_batches_but_one_have_one_of_few_shapes_the_same_in_all_epochs() -> None:
    sampler = BucketBatchSampler(utterances(5000), max_frames=20_000, pad_to=PAD_TO)
    wanted = {(20_000 // length, length) for length in PAD_TO}
    first = shapes_of(sampler, 0, PAD_TO)
    assert sum(count for shape, count in first.items() if shape not in wanted) <= 1
    for epoch in (1, 5):
        assert shapes_of(sampler, epoch, PAD_TO) == first
        batches = [tuple(cast(list[int], batch)) for batch in sampler.epoch_batches(epoch)]
        assert sorted(row for batch in batches for row in batch) == list(range(5000))
        assert batches != list(map(tuple, sampler.epoch_batches(0)))


def test_batches_of_a_mix_whose_sources_come_whole_have_one_of_few_shapes(tmp_path: Path) -> None:
    sources = {
        name: featcache.open(make_cache(tmp_path / name, numbers))
        for name, numbers in (("a", range(700)), ("b", range(700, 1400)))
    }
    table = featcache.mix(sources, repeat={"a": 1, "b": 1})
    lengths = table.lengths("fbank")
    pad_to = [int(np.median(lengths)), int(lengths.max())]
    sampler = BucketBatchSampler(table, max_frames=2 * pad_to[1], pad_to=pad_to)
    full = {(2 * pad_to[1] // length, length) for length in pad_to}
    for epoch in (0, 1):
        found = [
            (len(batch), min(n for n in pad_to if n >= lengths[cast(list[int], batch)].max()))
            for batch in sampler.epoch_batches(epoch)
        ]
        assert sum(shape not in full for shape in found) <= 1


def test_sizes_of_batches_may_be_given_for_each_length() -> None:
    sizes = [64, 48, 28, 20, 12, 6]
    sampler = BucketBatchSampler(utterances(5000), pad_to=PAD_TO, batch_sizes=sizes)
    found = shapes_of(sampler, 3, PAD_TO)
    assert sum(count for shape, count in found.items() if shape not in zip(sizes, PAD_TO)) <= 1  # noqa: B905


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60),
    pad_to=st.integers(1, 60) | st.lists(st.integers(1, 70), min_size=1, unique=True).map(sorted),
    cap=st.integers(70, 300),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_padded_batches_keep_to_the_limit(
    lengths: list[int], pad_to: Any, cap: int, shuffle: bool, epoch: int
) -> None:
    if not isinstance(pad_to, int) and max(lengths) > pad_to[-1]:
        with pytest.raises(ConfigError, match=r"longer than max_frames=.* or pad_to="):
            BucketBatchSampler(lengths, max_frames=cap, pad_to=pad_to)
        return
    steps = range(pad_to, 200, pad_to) if isinstance(pad_to, int) else pad_to
    if min(n for n in steps if n >= max(lengths)) > cap:
        return
    sampler = BucketBatchSampler(lengths, max_frames=cap, pad_to=pad_to, shuffle=shuffle)
    batches = [cast(list[int], batch) for batch in sampler.epoch_batches(epoch)]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = min(n for n in steps if n >= max(lengths[row] for row in batch))
        assert len(batch) * padded <= cap


def test_an_efficiency_counts_what_is_padded_to() -> None:
    sampler = BucketBatchSampler([5, 5, 9, 9], batch_size=2, pad_to=[6, 12])
    assert sampler.padding_efficiency == pytest.approx(28 / 36)


@pytest.mark.parametrize("pad_to", [100, [100, 200]])
def test_a_batch_without_frames_has_a_shape_of_the_others(pad_to: int | list[int]) -> None:
    assert Padded(pad_to).ends(np.array([0, 0])).tolist() == [0, 100, 200]
    assert BucketBatchSampler([0, 0], batch_size=2, pad_to=pad_to).padding_efficiency == 0


def test_long_utterances_come_in_smaller_batches_where_squares_count() -> None:
    lengths = np.array([100] * 40 + [1000] * 40)
    for quadratic, sizes in (
        (None, {(100, 20), (1000, 2)}),
        (1000, {(100, 18), (100, 4), (1000, 1)}),
    ):
        sampler = BucketBatchSampler(
            lengths, max_frames=2000, quadratic_frames=quadratic, shuffle=False
        )
        batches = [cast(list[int], batch) for batch in sampler]
        assert {(int(lengths[batch].max()), len(batch)) for batch in batches} == sizes


def test_squares_count_beside_a_limit_of_elements(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path / "cache", range(40)))
    frames = cache.lengths("fbank")
    sampler = BucketBatchSampler(cache, max_frames=60, max_elements=10**6, quadratic_frames=20)
    for batch in sampler:
        longest = int(frames[cast(list[int], batch)].max())
        assert len(batch) * (longest + longest * longest // 20) <= 60


def test_a_state_of_other_shapes_is_refused() -> None:
    def made(**options: Any) -> BucketBatchSampler:
        return BucketBatchSampler(utterances(100), max_frames=9000, **options)

    state = made(pad_to=PAD_TO).state_dict()
    made(pad_to=PAD_TO).load_state_dict(state)
    for other in (made(pad_to=[*PAD_TO, 4000]), made(), made(quadratic_frames=900)):
        with pytest.raises(StateError):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_to": [4, 2], "max_frames": 9}, "a list of lengths, the shortest first"),
        ({"pad_to": [], "max_frames": 9}, "the shortest first"),
        ({"pad_to": 0, "max_frames": 9}, "pad_to must be an integer of at least 1"),
        ({"pad_to": "8", "max_frames": 9}, "pad_to must be an integer"),
        ({"pad_to": [8]}, "a batch needs a limit"),
        ({"batch_sizes": [3]}, "batch_sizes go with pad_to"),
        ({"pad_to": [8], "batch_sizes": [3], "max_frames": 9}, "no other limit"),
        ({"pad_to": [4, 8], "batch_sizes": [3]}, "1 batch_sizes for 2 lengths"),
        ({"pad_to": [8], "batch_sizes": [0]}, "batch_size must be an integer"),
        ({"quadratic_frames": 9, "batch_size": 4}, "quadratic_frames changes what counts for"),
    ],
)
def test_shapes_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BucketBatchSampler([3, 5, 2], **options)


def test_batches_of_other_samplers_know_no_shapes() -> None:
    assert not hasattr(Batches([0], [0, 1]), "pad_to")

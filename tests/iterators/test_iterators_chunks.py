from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from iterators_helpers import cached, only, pairs

from featcache import FeatureDataset
from featcache.errors import ConfigError, FeatureError
from featcache.espnet import CategoryChunkIterFactory, ChunkIterFactory, CommonCollateFn
from featcache.espnet.dataset_input import PaddedBatch

LENGTHS = {f"u{number}": 3 + number * 17 % 60 for number in range(30)}
ONE_EACH = [[id] for id in LENGTHS]
COLLATE = CommonCollateFn(not_sequence=["speaker", "utt2category", "utt2fs"])
Chunk = tuple[str, int, int]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chunks") / "cache"
    cached(path, pairs(LENGTHS))
    return path


def chunks(batches: Sequence[PaddedBatch], name: str = "units") -> list[Chunk]:
    """Return each chunk's id, start and frames that are not padding."""
    return [
        (id, int(chunk[0]) - 1, int((chunk != 0).sum()))
        for ids, batch in batches
        for id, chunk in zip(ids, batch[name], strict=True)
    ]


@pytest.mark.parametrize(
    "names", [["fbank", "units"], ["units", "speaker", "utt2category"], ["units", "utt2fs"]]
)
@pytest.mark.parametrize(
    "arguments",
    [
        {"chunk_length": 8, "shuffle": False},
        {"chunk_length": "5-9,20", "shuffle": True, "num_cache_chunks": 9},
        {
            "chunk_length": "10,20",
            "shuffle": True,
            "num_samples_per_epoch": 17,
            "chunk_max_abs_length": 12,
        },
        {"chunk_length": 12, "shuffle": True, "default_fs": 8000, "chunk_shift_ratio": 0.9},
        {"chunk_length": 20, "shuffle": True, "discard_short_samples": False},
    ],
)
def test_a_cache_gives_the_chunks_that_its_utterances_give(
    cache: Path, names: list[str], arguments: dict[str, Any]
) -> None:
    utterances, dataset = only(pairs(LENGTHS), *names), FeatureDataset(cache, names)
    for epoch in (1, 2):
        expected = ChunkIterFactory(
            utterances, 3, ONE_EACH, collate_fn=COLLATE, **arguments
        ).build_iter(epoch)
        found = ChunkIterFactory(dataset, 3, ONE_EACH, collate_fn=COLLATE, **arguments).build_iter(
            epoch
        )
        for (ids, batch), (expected_ids, expected_batch) in zip(found, expected, strict=True):
            assert (ids, list(batch)) == (expected_ids, list(expected_batch))
            assert all(torch.equal(tensor, expected_batch[name]) for name, tensor in batch.items())


def test_workers_read_the_same_chunks(cache: Path) -> None:
    dataset = FeatureDataset(cache, ["units"])
    found = [
        chunks(
            list(
                ChunkIterFactory(
                    dataset, 3, ONE_EACH, 7, shuffle=True, num_workers=workers
                ).build_iter(1)
            )
        )
        for workers in (0, 2)
    ]
    assert found[0] == found[1]


def test_only_the_frames_of_chunks_are_read(tmp_path: Path) -> None:
    lengths = {"long": 50, "short": 9}
    dataset = cached(tmp_path / "cache", pairs(lengths), "units")
    wanted: list[object] = []

    class Watched(FeatureDataset):
        def __getitems__(self, indices: Sequence[Any]) -> dict[str, Any]:
            wanted.append(indices)
            return super().__getitems__(indices)

    dataset = Watched(tmp_path / "cache", "units")
    list(ChunkIterFactory(dataset, 2, [["short"], ["long"]], 20).build_iter(1))
    row = dataset.table.numbers(["long"])[0]
    assert wanted == [
        [(row, slice(start, start + 20)) for start in starts] for starts in ((0, 10), (20, 30))
    ]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8),
    width=st.integers(2, 20),
    ratio=st.sampled_from([0.5, 1.0, 1.5]),
    batch_size=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_chunks_cover_utterances_in_equal_steps(
    lengths: list[int], width: int, ratio: float, batch_size: int, shuffle: bool
) -> None:
    utterances = only(
        pairs({f"u{number}": length for number, length in enumerate(lengths)}), "units"
    )
    factory = ChunkIterFactory(
        utterances, batch_size, [[id] for id in utterances], width, ratio, shuffle=shuffle
    )
    batches = list(factory.build_iter(1))
    assert all(len(ids) == batch_size == len(batch["units"]) for ids, batch in batches)
    assert all(
        list(batch) == ["units"] and batch["units"].shape[1] == width for _, batch in batches
    )
    shift = int(width * ratio)
    whole = sum((length - width) // shift + 1 for length in lengths if length > width)
    assert len(batches) == whole // batch_size
    found = sorted(chunks(batches))
    assert len(set(found)) == len(found)
    for (id, start, size), (next_id, next_start, _) in pairwise(found):
        assert start + size <= len(utterances[id][1]["units"])
        assert id != next_id or (next_start - start) % shift == 0


def test_chunks_of_a_batch_are_of_one_category(cache: Path) -> None:
    dataset = FeatureDataset(cache, ["units", "utt2category"])
    batches = list(ChunkIterFactory(dataset, 4, ONE_EACH, 8, shuffle=True).build_iter(1))
    assert {len(set(batch["utt2category"].flatten().tolist())) for _, batch in batches} == {1}
    mixed = list(CategoryChunkIterFactory(dataset, 4, ONE_EACH, 8, shuffle=True).build_iter(1))
    assert max(len(set(batch["utt2category"].flatten().tolist())) for _, batch in mixed) == 3


def test_at_least_a_batch_of_chunks_waits(cache: Path) -> None:
    dataset = FeatureDataset(cache, "units")
    found = [
        chunks(
            list(
                ChunkIterFactory(
                    dataset, 6, ONE_EACH, 8, num_cache_chunks=least, shuffle=True
                ).build_iter(1)
            )
        )
        for least in (1, 6, 7)
    ]
    assert found[0] == found[1] != found[2]


def test_of_a_cache_no_chunk_reaches_into_the_padding(cache: Path) -> None:
    ids = list(LENGTHS)
    batches = [ids[:7], ids[7:18], ids[18:]]
    utterances, dataset = only(pairs(LENGTHS), "units"), FeatureDataset(cache, "units")
    padded = list(
        CategoryChunkIterFactory(
            utterances, 1, batches, 10, collate_fn=CommonCollateFn(0, 0)
        ).build_iter(1)
    )
    found = chunks(list(CategoryChunkIterFactory(dataset, 1, batches, 10).build_iter(1)))
    assert all(size == 10 for _, _, size in found)
    full = [chunk for chunk in chunks(padded) if chunk[2] == 10 and LENGTHS[chunk[0]] != 10]
    assert len(padded) > len(full) == len(found)
    assert found == full


def test_excluded_names_are_given_whole(cache: Path) -> None:
    utterances = {
        f"u{number}": (f"u{number}", {"enroll1": np.arange(5), "x": np.arange(9)})
        for number in range(2)
    }
    factory = ChunkIterFactory(utterances, 2, [["u0"], ["u1"]], 4, excluded_key_prefixes=["enroll"])
    _, batch = next(iter(factory.build_iter(1)))
    assert batch["enroll1"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch["x"].tolist() == [[0, 1, 2, 3], [2, 3, 4, 5]]
    dataset, row = FeatureDataset(cache, ["fbank", "units"]), [["u3"]]
    _, batch = next(
        iter(ChunkIterFactory(dataset, 2, row, 4, excluded_key_prefixes=["units"]).build_iter(1))
    )
    assert (batch["fbank"].shape, batch["units"].shape) == ((2, 4, 3), (2, LENGTHS["u3"]))


def test_short_utterances_are_kept_whole_where_they_are_wanted(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = FeatureDataset(cache, "units")
    short = [id for id, length in LENGTHS.items() if length <= 40]
    with caplog.at_level(logging.WARNING, "featcache"):
        found = chunks(list(ChunkIterFactory(dataset, 1, ONE_EACH, 40).build_iter(1)))
    assert not {id for id, _, _ in found} & set(short)
    assert [record.getMessage()[:60] for record in caplog.records] == [
        f"{len(short)} utterances are no longer than chunks of 40 frames and left "[:60]
    ]
    batches = list(
        ChunkIterFactory(dataset, 3, ONE_EACH, 40, discard_short_samples=False).build_iter(1)
    )
    whole = [batch["units_lengths"].tolist() for ids, batch in batches if set(ids) <= set(short)]
    assert len(whole) == len(short) // 3
    assert all(batch["units"].shape[1] == max(batch["units_lengths"]) for _, batch in batches)


@pytest.mark.parametrize("chunk_length", ["", "1-2-3", "5-", "-5", "9-3", "a", 0, -1, "0-4", "3.5"])
def test_chunk_lengths_that_make_no_sense_are_refused(chunk_length: int | str) -> None:
    with pytest.raises(ConfigError, match=f"chunk_length is .*, not {chunk_length!r}"):
        ChunkIterFactory({}, 1, [["a"]], chunk_length)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": [["a"], ["b", "c"]]}, r"number 1 is \['b', 'c'\]"),
        (
            {"batches": {"type": "unsorted", "lengths": [3, 4, 5], "batch_size": 3}},
            r"number 0 is \[0, 1, 2\]",
        ),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"default_fs": 0}, "default_fs must be at least 1"),
        (
            {"chunk_max_abs_length": 1},
            r"chunks of 1 frames would not move on with chunk_shift_ratio 0\.5",
        ),
        ({"chunk_shift_ratio": 0.0}, "would not move on"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChunkIterFactory(
            **{"dataset": {}, "batch_size": 1, "batches": [["a"]], "chunk_length": 4, **arguments}
        )


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"x": np.ones(9), "y": np.ones(8)},
            "'u' cannot be cut into chunks, as its lengths differ: 'x' 9, 'y' 8",
        ),
        ({"utt2fs": np.ones(1)}, "'u' has nothing with a time axis"),
        (
            {"x": np.ones(9), "utt2fs": np.array([11025])},
            "'u': sample rate 11025 and default_fs 8000",
        ),
        (
            {"x": np.ones(9), "utt2category": np.array([1, 2])},
            "'u', 'utt2category': one number is needed",
        ),
    ],
)
def test_an_utterance_that_cannot_be_cut_is_named(arrays: dict[str, Any], message: str) -> None:
    factory = ChunkIterFactory({"u": ("u", arrays)}, 1, [["u"]], 4, default_fs=8000)
    with pytest.raises(FeatureError, match=message):
        list(factory.build_iter(1))


def test_chunks_that_do_not_stack_are_named() -> None:
    utterances = {
        id: (id, {"x": np.ones(9), "utt2spk": np.ones(size)}) for id, size in (("u", 2), ("v", 3))
    }
    factory = ChunkIterFactory(
        utterances, 4, [["u"], ["v"]], 4, 1.0, excluded_key_prefixes=["utt2spk"]
    )
    with pytest.raises(
        FeatureError, match=r"'v', 'utt2spk': shape \(3,\) in a chunk does not fit \(2,\) of 'u'"
    ):
        list(factory.build_iter(1))

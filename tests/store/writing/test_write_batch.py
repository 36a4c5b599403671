"""`write_batch`: what it stores is what `write` stores, and nothing of a batch that it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from store_helpers import (
    FINGERPRINT,
    Arrays,
    arrays_of,
    check_cache,
    id_of,
    make_cache,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ClosedError, ConfigError, DuplicateIdError, FeatureError
from featcache.format import Stamps
from featcache.writing import arrays, part_writer
from featcache.writing.part_writer import PartWriter


def padded(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Arrays with something beside them that must not be stored."""
    longest = max(map(len, arrays))
    batch = np.full((len(arrays), longest, *arrays[0].shape[1:]), 99, arrays[0].dtype)
    for row, array in zip(batch, arrays, strict=True):
        row[: len(array)] = array
    return batch


def batch_of(numbers: Sequence[int], layout: str) -> tuple[list[str], Arrays, dict[str, list[int]]]:
    each = [arrays_of(number) for number in numbers]
    together = padded if layout == "padded" else np.concatenate
    arrays = {name: together([one[name] for one in each]) for name in each[0]}
    lengths = {name: [len(one[name]) for one in each] for name in each[0]}
    return [id_of(number) for number in numbers], arrays, lengths


def write_batches(
    writer: CacheWriter | PartWriter, numbers: Sequence[int], size: int, layout: Any = "padded"
) -> None:
    for start in range(0, len(numbers), size):
        ids, arrays, lengths = batch_of(numbers[start : start + size], layout)
        writer.write_batch(ids, arrays, lengths, layout=layout)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_a_batch_is_stored_as_its_utterances_are(tmp_path: Path, layout: str, size: int) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write_batches(writer, range(40), size, layout)
        assert len(writer) == 40
        assert id_of(3) in writer
    check_cache(tmp_path, range(40))


@pytest.mark.parametrize("backend", featcache.registry.backend_names())
def test_every_format_takes_batches_and_utterances_in_turns(tmp_path: Path, backend: str) -> None:
    other = "memmap" if backend == "lilcom" else backend
    features = [
        FeatureStorageConfig("fbank", backend="memmap" if backend == "lilcom" else backend),
        FeatureStorageConfig("units", dtype="int16", backend=other),
    ]
    with CacheWriter(tmp_path, features, FINGERPRINT) as writer:
        write(writer, range(5))
        write_batches(writer, range(5, 30), 9)
        write(writer, range(30, 33))
        writer.commit()
        write_batches(writer, range(33, 40), 3, "packed")
    check_cache(tmp_path, range(40))


@pytest.mark.parametrize(
    ("backend", "codec"), [("hdf5", "gzip"), ("zarr", "zstd"), ("lilcom", "lilcom")]
)
def test_codecs_give_the_same_from_batches(tmp_path: Path, backend: str, codec: str) -> None:
    features = [FeatureStorageConfig("fbank", backend=backend, codec=codec)]
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((number % 9, 4), np.float32) for number in range(20)]
    ids = [id_of(number) for number in range(20)]
    with CacheWriter(tmp_path / "batch", features) as writer:
        writer.write_batch(ids, {"fbank": padded(arrays)}, list(map(len, arrays)))
    with CacheWriter(tmp_path / "single", features) as writer:
        for id, array in zip(ids, arrays, strict=True):
            writer.write(id, {"fbank": array})
    one, other = (featcache.open(tmp_path / name, verify="arrays") for name in ("batch", "single"))
    for id in ids:
        np.testing.assert_array_equal(one.read(id, "fbank"), other.read(id, "fbank"), strict=True)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=9),
    dims=st.sampled_from([(), (3,), (2, 3), (0,)]),
    dtype=st.sampled_from(["float16", "float32", "bfloat16", "int16", "bool"]),
    layout=st.sampled_from(["padded", "packed"]),
    as_tensor=st.booleans(),
)
def test_any_batch_is_read_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    dims: tuple[int, ...],
    dtype: str,
    layout: Any,
    as_tensor: bool,
) -> None:
    path = tmp_path_factory.mktemp("cache")
    random = np.random.default_rng(sum(lengths))
    arrays = [random.integers(0, 2, (length, *dims)).astype(np.float32) for length in lengths]
    together = padded(arrays) if layout == "padded" else np.concatenate(arrays)
    value: Any = torch.from_numpy(together).to(getattr(torch, dtype))
    if not as_tensor and dtype != "bfloat16":
        value = value.numpy()
    ids = [f"utt-{number}" for number in range(len(lengths))]
    feature = FeatureStorageConfig("x", dtype=dtype, dims=dims)
    with CacheWriter(path, [feature]) as writer:
        writer.write_batch(ids, {"x": value}, lengths, layout=layout)
    cache = featcache.open(path, verify="arrays")
    for id, array in zip(ids, arrays, strict=True):
        np.testing.assert_array_equal(cache.read(id, "x").astype(np.float32), array)
        assert cache.lengths("x", ids=[id]).tolist() == [len(array)]


def test_vectors_need_no_lengths(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((5, 16), np.float32)
    features = [FeatureStorageConfig("xvector", time_axis=None)]
    with CacheWriter(tmp_path, features) as writer:
        writer.write_batch([f"utt-{row}" for row in range(5)], {"xvector": vectors})
    cache = featcache.open(tmp_path)
    for row, vector in enumerate(vectors):
        np.testing.assert_array_equal(cache.read(f"utt-{row}", "xvector"), vector, strict=True)
    np.testing.assert_allclose(cache.stats("xvector").mean, vectors.mean(axis=0), rtol=1e-5)


def test_a_batch_may_be_changed_once_it_is_written(tmp_path: Path) -> None:
    for layout in ("padded", "packed"):
        batch = np.ones((3, 2, 4), np.float32)
        value = batch if layout == "padded" else batch.reshape(6, 4)
        with CacheWriter(tmp_path / layout, [FeatureStorageConfig("x")]) as writer:
            writer.write_batch(["a", "b", "c"], {"x": value}, [2, 2, 2], layout=layout)
            batch[:] = 7
        assert (featcache.open(tmp_path / layout).read("b", "x") == 1).all()


def test_annotations_and_stamps_go_with_their_ids(tmp_path: Path) -> None:
    ids, arrays, lengths = batch_of(range(1, 4), "padded")
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        writer.write_batch(
            ids,
            arrays,
            lengths,
            annotations={ids[2]: {"speaker": "anna"}, ids[0]: {"speaker": "eva", "snr": 3}},
            stamps={ids[1]: Stamps(5, 6)},
        )
    cache = featcache.open(tmp_path)
    speakers = dict(zip(cache, cache.annotation("speaker"), strict=True))
    assert speakers == {ids[0]: "eva", ids[1]: None, ids[2]: "anna"}
    check_cache(tmp_path, range(1, 4))


Change = Mapping[str, Any]
REFUSED: list[tuple[Change, type[Exception], str]] = [
    ({"ids": ["a", "b", "a"]}, FeatureError, "'a' is in the batch twice"),
    ({"ids": "abc"}, FeatureError, "list of strings"),
    ({"ids": ["a", "", "c"]}, FeatureError, "not usable"),
    (
        {"ids": ["a", "b", "old"]},
        DuplicateIdError,
        "'old' was given twice: as number 0 and as number 3",
    ),
    ({"ids": ["a", "b"]}, FeatureError, "3 lengths do not fit 2 ids"),
    ({"lengths": [1, 2]}, FeatureError, "2 lengths do not fit 3 ids"),
    ({"lengths": [1, 2, 6]}, FeatureError, "'c', feature 'x': length 6 is not within 0 to 5"),
    ({"lengths": [1, 2, -1]}, FeatureError, "'c', feature 'x': length -1"),
    ({"lengths": [0.5, 1.0, 1.0]}, FeatureError, "must be frames, integers"),
    ({"lengths": None}, FeatureError, "'x' has no lengths"),
    ({"lengths": {"y": [1, 2, 3]}}, FeatureError, "'y', which is not declared"),
    ({"layout": "jagged"}, ConfigError, "'padded' or 'packed'"),
    ({"layout": "packed"}, FeatureError, "has 3 rows, but lengths of 6"),
    ({"arrays": {}}, FeatureError, "feature 'x' is missing"),
    ({"arrays": {"x": np.zeros((2, 5, 4), np.float32)}}, FeatureError, "each of 3 ids"),
    ({"arrays": {"x": np.zeros((3, 5, 9), np.float32)}}, FeatureError, r"\(9,\)"),
    ({"arrays": {"x": np.zeros(3, np.float32)}}, FeatureError, "no padded batch"),
    ({"arrays": {"x": [[1.0]]}}, FeatureError, "numpy array or a torch tensor"),
    ({"arrays": {"x": np.zeros((3, 5, 4), np.complex64)}}, FeatureError, "complex64"),
    ({"annotations": {"z": {"speaker": "anna"}}}, FeatureError, "'z', which is not in the batch"),
    ({"annotations": {"c": {"speaker": 3}}}, FeatureError, "'speaker' of utterance 'c'"),
    ({"annotations": [{"speaker": "anna"}]}, FeatureError, "annotations of a batch are a mapping"),
    ({"annotations": []}, FeatureError, "annotations of a batch are a mapping"),
    ({"stamps": [(1, 2)]}, FeatureError, "stamps of a batch are a mapping"),
]


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED)
def test_nothing_is_stored_of_a_batch_that_is_refused(
    tmp_path: Path, change: Change, kind: type[Exception], message: str
) -> None:
    right: dict[str, Any] = {
        "ids": ["a", "b", "c"],
        "arrays": {"x": np.ones((3, 5, 4), np.float32)},
        "lengths": [1, 2, 3],
        "layout": "padded",
        "annotations": {"a": {"speaker": "eva"}},
    }
    with CacheWriter(tmp_path, [FeatureStorageConfig("x")]) as writer:
        writer.write("old", {"x": np.ones((2, 4), np.float32)}, annotations={"speaker": "eva"})
        given = right | dict(change)
        with pytest.raises(kind, match=message):
            writer.write_batch(
                given["ids"],
                given["arrays"],
                given["lengths"],
                layout=given["layout"],
                annotations=given["annotations"],
                stamps=given.get("stamps"),
            )
        assert len(writer) == 1
        writer.write_batch(right["ids"], right["arrays"], right["lengths"])
    assert sorted(featcache.open(tmp_path, verify="arrays")) == ["a", "b", "c", "old"]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e300])
@pytest.mark.parametrize("stats", [True, False])
def test_a_number_that_cannot_be_stored_is_named(tmp_path: Path, wrong: float, stats: bool) -> None:
    batch = np.ones((3, 5, 4))
    batch[1, 2, 3] = wrong
    batch[0, 4] = np.nan  # padding
    with CacheWriter(tmp_path, [FeatureStorageConfig("x", stats=stats)]) as writer:
        with pytest.raises(FeatureError, match=r"utterance 'b', feature 'x': .* at \(2, 3\)"):
            writer.write_batch(["a", "b", "c"], {"x": batch}, [4, 3, 5])
        writer.write_batch(["a", "b", "c"], {"x": batch}, [4, 2, 5])
    assert featcache.open(tmp_path).lengths("x").tolist() == [4, 2, 5]


def test_what_a_format_cannot_hold_is_refused_whole(tmp_path: Path) -> None:
    batch = np.ones((2, 5, 4), np.float32)
    with CacheWriter(tmp_path, [FeatureStorageConfig("x", backend="hdf5")]) as writer:
        with pytest.raises(FeatureError, match="takes 66,000 bytes as a name"):
            writer.write_batch(["a", "b" * 66_000], {"x": batch}, [5, 5])
        writer.write_batch(["a", "c"], {"x": batch}, [5, 5])
    assert list(featcache.open(tmp_path)) == ["a", "c"]


def test_batches_go_on_in_the_next_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "PART_ROWS", 8)
    monkeypatch.setattr(arrays, "PIECE_ROWS", 3)
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write_batches(writer, range(40), 10)
        writer._parts.seal()
        assert len(list((tmp_path / "parts").iterdir())) >= 5
    check_cache(tmp_path, range(40))


def test_a_batch_without_utterances_is_nothing(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("x")]) as writer:
        writer.write_batch([], {"x": np.zeros((0, 5, 4), np.float32)}, [])
        writer.write_batch([], {"x": np.zeros((0, 4), np.float32)}, [], layout="packed")
    assert len(featcache.open(tmp_path)) == 0


def test_a_part_writer_takes_batches(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        with PartWriter(tmp_path, two_features(), FINGERPRINT) as part:
            write_batches(part, range(20), 6)
        writer.publish(complete=True)
    check_cache(tmp_path, range(20))


def test_a_closed_writer_takes_no_batch(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    writer.close()
    with pytest.raises(ClosedError):
        write_batches(writer, range(3, 5), 2)


def test_frames_of_one_utterance_lie_one_behind_the_other(tmp_path: Path) -> None:
    """What lies in the files is what `write` leaves there, byte for byte."""
    for name in ("batch", "single"):
        with CacheWriter(tmp_path / name, two_features(), FINGERPRINT) as writer:
            if name == "batch":
                write_batches(writer, range(30), 11)
            else:
                write(writer, range(30))
    files = [sorted((tmp_path / name).glob("parts/*/*.npy")) for name in ("batch", "single")]
    for one, other in zip(*files, strict=True):
        assert one.read_bytes() == other.read_bytes()

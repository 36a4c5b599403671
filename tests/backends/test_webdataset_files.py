from __future__ import annotations

import json
import mmap
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import hypothesis.strategies as st
import numpy as np
import pytest
import webdataset
from hypothesis import example, given, settings

from featcache.errors import ConfigError, FeatureError
from featcache.interface import Array, EncodedArray, Extent, FeatureSpec
from featcache_backends.webdataset import WebDatasetBackend

FBANK = FeatureSpec("fbank", "float32", (4,))
TOKENS = FeatureSpec("tokens", "int64", ())
SPEAKER = FeatureSpec("speaker", "bfloat16", (3,), has_frames=False)
FEATURES = (FBANK, TOKENS, SPEAKER)

Sample = tuple[str, dict[str, Array]]  # id, and each feature's array as the user sees it


def make_array(feature: FeatureSpec, rows: int, seed: int = 0) -> Array:
    random = np.random.default_rng((seed, rows))
    shape = feature.shape(rows)
    return np.asarray(random.integers(0, 2**15, size=shape)).astype(feature.storage_dtype)


def make_sample(
    id: str, rows: int, features: Sequence[FeatureSpec] = FEATURES, seed: int = 0
) -> Sample:
    return id, {feature.name: make_array(feature, rows, seed) for feature in features}


def encoded(feature: FeatureSpec, array: Array) -> EncodedArray:
    rows = len(array) if feature.has_frames else 1
    return EncodedArray(rows, (array.tobytes(),) if rows else ())


def write(
    directory: Path,
    samples: Sequence[Sample],
    features: Sequence[FeatureSpec] = FEATURES,
    backend: WebDatasetBackend | None = None,
) -> list[dict[str, tuple[Extent, ...]]]:
    writer = (backend or WebDatasetBackend()).open_writer(directory, features)
    places = [
        writer.append(
            id, {feature.name: encoded(feature, arrays[feature.name]) for feature in features}
        )
        for id, arrays in samples
    ]
    writer.close()
    return places


def read_extents(directory: Path, extents: Sequence[Extent]) -> bytes:
    pieces = [
        np.fromfile(directory / e.container, "u1", e.nbytes, offset=e.offset) for e in extents
    ]
    return b"".join(piece.tobytes() for piece in pieces)


def assert_extents_hold(
    directory: Path, places: Sequence[Mapping[str, Sequence[Extent]]], samples: Any
) -> None:
    for place, (_, arrays) in zip(places, samples, strict=True):
        for name, array in arrays.items():
            assert len(place[name]) == (array.nbytes > 0)
            assert read_extents(directory, place[name]) == array.tobytes()


def read_with_webdataset(directory: Path) -> list[dict[str, Any]]:
    shards = [str(path) for path in sorted(directory.glob("shard-*.tar"))]
    with warnings.catch_warnings():
        # webdataset leaves closing its files to the collector
        warnings.simplefilter("ignore", ResourceWarning)
        return list(webdataset.WebDataset(shards, shardshuffle=False, empty_check=False).decode())


def assert_webdataset_reads(directory: Path, samples: Sequence[Sample]) -> None:
    read = read_with_webdataset(directory)
    assert [sample["json"]["id"] for sample in read] == [id for id, _ in samples]
    for sample, (id, arrays) in zip(read, samples, strict=True):
        assert unquote(sample["__key__"]) == id
        fields = {field for field in sample if not field.startswith("__")}
        assert fields == {"json", *(f"{name}.npy" for name in arrays)}
        for name, array in arrays.items():
            field = sample[f"{name}.npy"]
            assert (field.dtype, field.shape) == (array.dtype, array.shape)
            np.testing.assert_array_equal(field, array)


unicode_ids = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=130
)
awkward_ids = st.text(
    st.sampled_from("aA./%_ \\\n\r\t\x1b\x85\u2028é😀{}[]*?~"), min_size=1, max_size=130
)


@settings(deadline=None, max_examples=60)
@given(
    ids=st.lists(unicode_ids | awkward_ids, unique=True, max_size=6),
    rows=st.integers(0, 40),
    shard_bytes=st.integers(1, 20_000),
)
@example(
    ids=["u.1", "u.2", "u", "U", "__u__", "__u__/x", "a", "a/b", "..", "%2E", "u.json"],
    rows=2,
    shard_bytes=1,
)
@example(ids=["n" * 89, "n" * 90, "n" * 91, "é" * 1000, "." * 1000], rows=1, shard_bytes=10**9)
def test_any_ids_and_shard_borders_read_back_through_extents_and_webdataset(
    ids: list[str], rows: int, shard_bytes: int
) -> None:
    samples = [make_sample(id, rows + index, seed=index) for index, id in enumerate(ids)]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        places = write(directory, samples, backend=WebDatasetBackend(shard_bytes=shard_bytes))
        assert_extents_hold(directory, places, samples)
        assert_webdataset_reads(directory, samples)


@settings(deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from(
        ["float16", "float32", "float64", "int8", "uint16", "int32", "uint64", "bool", "bfloat16"]
    ),
    dims=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    has_frames=st.booleans(),
    rows=st.lists(st.integers(0, 30), max_size=4),
)
def test_every_dtype_and_shape_is_a_plain_npy_member(
    dtype: str, dims: tuple[int, ...], has_frames: bool, rows: list[int]
) -> None:
    features = (FeatureSpec("x", dtype, dims, has_frames),)
    samples = [
        make_sample(f"utt{index}", count, features, seed=index) for index, count in enumerate(rows)
    ]
    with tempfile.TemporaryDirectory() as name:
        places = write(Path(name), samples, features)
        assert_extents_hold(Path(name), places, samples)
        assert_webdataset_reads(Path(name), samples)


def test_keys_are_ids_with_awkward_characters_percent_encoded(tmp_path: Path) -> None:
    ids = ["u.1", "u.2", "spk/u", "50%", "a\tb\x85\x9f", "Ünter {strich}_*?\u2028😀"]
    write(tmp_path, [make_sample(id, 2) for id in ids])
    keys = ["u%2E1", "u%2E2", "spk%2Fu", "50%25", "a%09b%C2%85%C2%9F", "Ünter {strich}_*?\u2028😀"]
    assert [sample["__key__"] for sample in read_with_webdataset(tmp_path)] == keys


def test_arrays_start_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    places = write(tmp_path, [make_sample(id, 3) for id in ("a", "é", "n" * 1000)])
    assert {
        extent.offset % 64 for place in places for extents in place.values() for extent in extents
    } == {0}


def test_members_of_an_utterance_are_adjacent_and_anonymous(tmp_path: Path) -> None:
    write(tmp_path, [make_sample("b", 2), make_sample("a", 2)])
    with tarfile.open(tmp_path / "shard-000000.tar") as tar:
        members = tar.getmembers()
    fields = ["fbank.npy", "tokens.npy", "speaker.npy", "json"]
    assert [member.name for member in members] == [
        f"{key}.{field}" for key in "ba" for field in fields
    ]
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime, m.mode, m.type) for m in members} == {
        (0, 0, "", "", 0, 0o644, tarfile.REGTYPE)
    }


def test_short_ascii_names_need_no_pax_record(tmp_path: Path) -> None:
    write(tmp_path, [make_sample("n" * (100 - len(".speaker.npy")), 2), make_sample("é", 2)])
    with tarfile.open(tmp_path / "shard-000000.tar") as tar:
        sizes = [member.offset_data - member.offset for member in tar]
    assert sizes == [512] * 4 + [1536] * 4


def test_the_json_member_tells_the_declared_dtype_of_bfloat16(tmp_path: Path) -> None:
    write(tmp_path, [make_sample("spk/utt.1", 5)])
    (sample,) = read_with_webdataset(tmp_path)
    assert sample["json"] == {
        "id": "spk/utt.1",
        "features": {
            "fbank": {"dtype": "float32", "shape": [5, 4]},
            "tokens": {"dtype": "int64", "shape": [5]},
            "speaker": {"dtype": "bfloat16", "shape": [3]},
        },
    }


@pytest.mark.parametrize(
    ("spare_bytes", "expected"), [(0, [0, 1, 1, 1, 2, 2, 2]), (-1, [0, 1, 1, 2, 2, 3, 3])]
)
def test_a_shard_ends_before_the_sample_that_would_pass_its_size(
    tmp_path: Path, spare_bytes: int, expected: list[int]
) -> None:
    # header, npy header, 24 frames, header of the json, json
    sample_bytes = 512 + 128 + 16 * 24 + 512 + 512
    shard_bytes = 3 * sample_bytes + 1024 + spare_bytes
    samples = [
        make_sample(f"utt{index}", rows, (FBANK,)) for index, rows in enumerate([1000] + [24] * 6)
    ]
    places = write(tmp_path, samples, (FBANK,), WebDatasetBackend(shard_bytes=shard_bytes))
    # the large one has a shard of its own, and none is empty
    assert [place["fbank"][0].container for place in places] == [
        f"shard-{shard:06d}.tar" for shard in expected
    ]
    shards = [path.read_bytes() for path in sorted(tmp_path.iterdir())]
    assert [len(shard) > shard_bytes for shard in shards] == [True] + [False] * expected[-1]
    assert {shard[-1024:] for shard in shards} == {bytes(1024)}
    assert_webdataset_reads(tmp_path, samples)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    samples = [make_sample(id, rows) for rows, id in enumerate(["a", "b.c", "é", "n" * 300])]
    shards = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, samples, backend=WebDatasetBackend(shard_bytes=6000))
        shards.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert shards[0] == shards[1]
    assert len(shards[0]) > 1


KILLED = """
import itertools, json, sys
from pathlib import Path
from featcache.interface import EncodedArray, FeatureSpec
from featcache_backends.webdataset import WebDatasetBackend

features = [FeatureSpec("x", "uint8", ())]
writer = WebDatasetBackend(shard_bytes=30_000).open_writer(Path(sys.argv[1]), features)
for index in itertools.count():
    data = bytes([index % 251]) * (500 + index)
    (extent,) = writer.append(f"utt.{index}", {"x": EncodedArray(len(data), (data,))})["x"]
    if index < 100:
        print(json.dumps(extent))
    if index == 99:
        writer.flush()
        print("flushed", flush=True)
"""


def test_what_was_flushed_survives_kill_9(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        *told, flushed = [process.stdout.readline() for _ in range(101)]
        process.kill()
    assert (flushed, process.returncode) == (b"flushed\n", -signal.SIGKILL)
    extents = [Extent(*json.loads(line)) for line in told]
    assert len({extent.container for extent in extents}) > 1
    for index, extent in enumerate(extents):
        assert read_extents(tmp_path, [extent]) == bytes([index % 251]) * (500 + index)


def test_an_array_too_large_for_a_tar_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    features = (FeatureSpec("x", "uint8", ()),)
    small = make_sample("small", 100, features)
    writer = WebDatasetBackend().open_writer(tmp_path, features)
    with (
        mmap.mmap(-1, 8**11 - 128) as large,
        memoryview(large) as block,
        pytest.raises(FeatureError, match="feature 'x' of 'large' has 8,589,934,464 bytes"),
    ):
        writer.append("large", {"x": EncodedArray(len(block), (block,))})
    place = writer.append("small", {"x": encoded(features[0], small[1]["x"])})
    writer.close()
    assert_extents_hold(tmp_path, [place], [small])
    assert_webdataset_reads(tmp_path, [small])


def test_a_full_disk_costs_only_the_sample_being_written(tmp_path: Path) -> None:
    writer = WebDatasetBackend().open_writer(tmp_path, (FBANK,))
    samples = [make_sample(f"utt{index}", 500, (FBANK,), seed=index) for index in range(2)]
    first, second = ({"fbank": encoded(FBANK, arrays["fbank"])} for _, arrays in samples)
    place = writer.append("utt0", first)
    writer.flush()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # writes stop half-way, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, hard))
    try:
        writer.append("utt1", second)
        with pytest.raises(OSError, match="File too large"):
            writer.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.abort()
    writer.abort()  # harmless
    assert_extents_hold(tmp_path, [place], samples[:1])


@pytest.mark.parametrize("shard_bytes", [0, -1, 1e9, "1GB", None])
def test_a_shard_size_that_is_no_size_is_refused(shard_bytes: Any) -> None:
    with pytest.raises(ConfigError, match="shard_bytes must be a positive number of bytes, not"):
        WebDatasetBackend(shard_bytes=shard_bytes)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("fbank", "Fbank"), "features 'fbank' and 'Fbank' are one field"),
        (("__x",), "decodes no field"),
    ],
)
def test_names_that_webdataset_cannot_serve_are_refused(
    tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        WebDatasetBackend().open_writer(
            tmp_path, [FeatureSpec(name, "float32", ()) for name in names]
        )
    assert list(tmp_path.iterdir()) == []


def test_shards_of_somebody_else_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "shard-000000.tar").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        WebDatasetBackend().open_writer(tmp_path, FEATURES)
    assert (tmp_path / "shard-000000.tar").read_bytes() == b"precious"

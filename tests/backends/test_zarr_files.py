from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import zarr
from hypothesis import example, given, settings

from featcache.interface import Array, Codec, EncodedArray, Extent, FeatureSpec
from featcache_backends.zarr import BloscCodec, ZarrBackend, ZstdCodec

SMALL = ZarrBackend(chunk_bytes=64, shard_bytes=256)
DTYPES = ["float16", "float32", "float64", "bfloat16", "bool"]
DTYPES += ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
CODECS = (
    ZstdCodec(),
    BloscCodec(),
    BloscCodec(cname="zstd", shuffle="shuffle"),
    BloscCodec(shuffle="noshuffle"),
)

Arrays = list[Array]  # of one feature, in storage dtype, shape (rows, *dims), by utterance
Places = list[tuple[Extent, ...]]


def make_arrays(feature: FeatureSpec, rows: Sequence[int], seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    shapes = [(count if feature.has_frames else 1, *feature.dims) for count in rows]
    return [random.integers(0, 100, size=shape).astype(feature.storage_dtype) for shape in shapes]


def encoded(feature: FeatureSpec, array: Array, backend: ZarrBackend) -> EncodedArray:
    if feature.codec is None:
        return EncodedArray(len(array), (array.tobytes(),) if len(array) else ())
    cut = backend.blocks(feature)
    assert cut.rows is not None
    assert cut.padded
    padded = np.zeros((-(-len(array) // cut.rows) * cut.rows, *feature.dims), array.dtype)
    padded[: len(array)] = array
    blocks = [padded[start : start + cut.rows] for start in range(0, len(padded), cut.rows)]
    return EncodedArray(len(array), tuple(map(feature.codec.encode, blocks)))


def write(
    directory: Path, feature: FeatureSpec, arrays: Arrays, backend: ZarrBackend = SMALL
) -> Places:
    writer = backend.open_writer(directory, [feature])
    places = [
        writer.append(f"utt{index}", {feature.name: encoded(feature, array, backend)})[feature.name]
        for index, array in enumerate(arrays)
    ]
    writer.close()
    return places


def read_extents(directory: Path, extents: Sequence[Extent]) -> list[bytes]:
    return [
        np.fromfile(directory / e.container, "u1", e.nbytes, offset=e.offset).tobytes()
        for e in extents
    ]


def assert_zarr_reads(directory: Path, feature: FeatureSpec, arrays: Arrays) -> None:
    group: Any = zarr.open_group(directory / f"{feature.name}.zarr", mode="r")
    frames = group[feature.name]
    assert frames.dtype == feature.storage_dtype
    assert frames.shape[1:] == feature.dims
    assert list(group["ids"][:]) == [f"utt{index}" for index in range(len(arrays))]
    if not feature.has_frames:
        np.testing.assert_array_equal(frames[...], np.array(arrays).reshape(-1, *feature.dims))
        return
    assert list(group["lengths"][:]) == [len(array) for array in arrays]
    for start, array in zip(group["offsets"][:], arrays, strict=True):
        np.testing.assert_array_equal(frames[start : start + len(array)], array)


features = st.builds(
    FeatureSpec,
    name=st.just("fbank"),
    dtype=st.sampled_from(DTYPES),
    dims=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    has_frames=st.booleans(),
)
backends = st.builds(
    lambda chunk, shard: ZarrBackend(chunk_bytes=min(chunk, shard), shard_bytes=shard),
    chunk=st.integers(1, 300),
    shard=st.integers(1, 3000),
)


@settings(deadline=None, max_examples=40)
@given(feature=features, rows=st.lists(st.integers(0, 60), max_size=5), backend=backends)
def test_raw_frames_lie_back_to_back_and_zarr_reads_them(
    feature: FeatureSpec, rows: list[int], backend: ZarrBackend
) -> None:
    arrays = make_arrays(feature, rows)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        places = write(directory, feature, arrays, backend)
        for extents, array in zip(places, arrays, strict=True):
            assert b"".join(read_extents(directory, extents)) == array.tobytes()
            # cut only where one shard ends and the next begins
            assert all(extent.offset == 0 for extent in extents[1:])
            assert all(
                extent.nbytes > 0 and extent.offset % feature.row_bytes == 0 for extent in extents
            )
        assert_zarr_reads(directory, feature, arrays)
        if feature.has_frames:
            group: Any = zarr.open_group(directory / "fbank.zarr", mode="r")
            assert group["offsets"][:].tolist() == [sum(rows[:index]) for index in range(len(rows))]


@settings(deadline=None, max_examples=40)
@given(
    feature=features,
    codec=st.sampled_from(CODECS),
    rows=st.lists(st.integers(0, 60), max_size=5),
    backend=backends,
)
def test_every_encoded_block_is_an_inner_chunk_and_zarr_reads_them(
    feature: FeatureSpec, codec: Codec, rows: list[int], backend: ZarrBackend
) -> None:
    feature = FeatureSpec(feature.name, feature.dtype, feature.dims, feature.has_frames, codec)
    arrays = make_arrays(feature, rows)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        places = write(directory, feature, arrays, backend)
        block_rows = backend.blocks(feature).rows or 0
        for extents, array in zip(places, arrays, strict=True):
            stored = read_extents(directory, extents)
            blocks = [
                codec.decode(memoryview(data), array.dtype, feature.dims, block_rows)
                for data in stored
            ]
            assert [len(block) for block in blocks] == [block_rows] * math.ceil(
                len(array) / block_rows
            )
            assert b"".join(block.tobytes() for block in blocks)[: array.nbytes] == array.tobytes()
        assert_zarr_reads(directory, feature, arrays)
        if feature.has_frames:
            group: Any = zarr.open_group(directory / "fbank.zarr", mode="r")
            assert all(start % block_rows == 0 for start in group["offsets"][:])


@settings(deadline=None, max_examples=25)
@given(
    ids=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unique=True, max_size=6
    )
)
@example(ids=["a/b", "a", "..", "é😀", " ", "n" * 1000, "\n"])
def test_ids_are_strings_to_zarr(ids: list[str]) -> None:
    feature = FeatureSpec("tokens", "int64", ())
    with tempfile.TemporaryDirectory() as name:
        writer = SMALL.open_writer(Path(name), [feature])
        for index, id in enumerate(ids):
            writer.append(id, {"tokens": EncodedArray(1, (index.to_bytes(8, "little"),))})
        writer.close()
        group: Any = zarr.open_group(Path(name) / "tokens.zarr", mode="r")
        assert [str(id) for id in group["ids"][:]] == ids
        assert list(group["tokens"][:]) == list(range(len(ids)))


def test_an_utterance_has_one_extent_for_every_shard_it_lies_in(tmp_path: Path) -> None:
    feature = FeatureSpec("fbank", "float32", (2,))  # 8 bytes a frame, 32 frames a shard
    places = write(tmp_path, feature, make_arrays(feature, [20, 20, 24, 70]))
    shard = "fbank.zarr/fbank/c.{}.0".format
    assert places == [
        (Extent(shard(0), 0, 160),),
        (Extent(shard(0), 160, 96), Extent(shard(1), 0, 64)),
        (Extent(shard(1), 64, 192),),  # up to the border and not beyond
        (Extent(shard(2), 0, 256), Extent(shard(3), 0, 256), Extent(shard(4), 0, 48)),
    ]


def test_inner_chunks_that_were_not_written_are_missing_from_the_index(tmp_path: Path) -> None:
    feature = FeatureSpec("fbank", "float32", (2,))
    write(tmp_path, feature, make_arrays(feature, [9]))  # 8 frames fill a chunk, the 9th starts one
    data = (tmp_path / "fbank.zarr/fbank/c.0.0").read_bytes()
    index = np.frombuffer(data[128:-4], "<u8").reshape(4, 2)
    missing = 2**64 - 1
    assert index.tolist() == [[0, 64], [64, 64], [missing, missing], [missing, missing]]
    assert data[72:128] == bytes(56)


@pytest.mark.parametrize("codec", [None, ZstdCodec(), BloscCodec()])
def test_a_frame_larger_than_a_chunk_is_a_chunk(tmp_path: Path, codec: Codec | None) -> None:
    feature = FeatureSpec("fbank", "float64", (50,), codec=codec)
    arrays = make_arrays(feature, [3, 1])
    write(tmp_path, feature, arrays)
    assert_zarr_reads(tmp_path, feature, arrays)
    group: Any = zarr.open_group(tmp_path / "fbank.zarr", mode="r")
    assert (group["fbank"].chunks, group["fbank"].shards) == ((1, 50), (1, 50))


@pytest.mark.parametrize("codec", [None, ZstdCodec(), BloscCodec()])
@pytest.mark.parametrize(
    ("rows", "dims"), [([], (3,)), ([0, 0], (3,)), ([4, 0, 2], (0,)), ([2], (3, 0, 2))]
)
def test_utterances_without_bytes_are_kept(
    tmp_path: Path, codec: Codec | None, rows: list[int], dims: tuple[int, ...]
) -> None:
    feature = FeatureSpec("fbank", "float32", dims, codec=codec)
    writer = SMALL.open_writer(tmp_path, [feature])
    for index, count in enumerate(rows):
        assert writer.append(f"utt{index}", {"fbank": EncodedArray(count, ())}) == {"fbank": ()}
    writer.close()
    assert_zarr_reads(tmp_path, feature, make_arrays(feature, rows))
    group: Any = zarr.open_group(tmp_path / "fbank.zarr", mode="r")
    assert group["fbank"].shape == (sum(rows), *dims)
    # of no utterances: one empty slot, which no chunk fills
    assert group["ids"].chunks == (max(1, len(rows)),)
    assert (tmp_path / "fbank.zarr/ids/c.0").exists() == bool(rows)


@pytest.mark.parametrize(
    ("has_frames", "codec", "layout", "attributes"),
    [
        (True, None, "contiguous_ragged", {"sample_dimension": "frame"}),
        (True, ZstdCodec(), "padded_ragged", {}),
        (False, None, "rows", None),
        (False, ZstdCodec(), "rows", None),
    ],
)
def test_attributes_tell_the_layout(
    tmp_path: Path,
    has_frames: bool,
    codec: Codec | None,
    layout: str,
    attributes: dict[str, str] | None,
) -> None:
    feature = FeatureSpec("fbank", "bfloat16", (3,), has_frames, codec)
    write(tmp_path, feature, make_arrays(feature, [5, 6]))
    group: Any = zarr.open_group(tmp_path / "fbank.zarr", mode="r")
    assert dict(group.attrs) == {"layout": layout}
    assert dict(group["fbank"].attrs) == {"dtype_of_bits": "bfloat16"}
    assert group["fbank"].metadata.dimension_names == (
        "frame" if has_frames else "utterance",
        "dim_1",
    )
    assert sorted(group.keys()) == (
        ["fbank", "ids", "lengths", "offsets"] if has_frames else ["fbank", "ids"]
    )
    assert attributes is None or dict(group["lengths"].attrs) == attributes


@pytest.mark.parametrize("codec", [None, ZstdCodec(), BloscCodec()])
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, codec: Codec | None) -> None:
    feature = FeatureSpec("fbank", "float32", (80,), codec=codec)
    # large enough for Blosc to think of threads
    backend = ZarrBackend(chunk_bytes=1 << 20, shard_bytes=1 << 21)
    arrays = make_arrays(feature, [4000, 700])
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, feature, arrays, backend)
        files.append(
            [path.read_bytes() for path in sorted((tmp_path / name).rglob("*")) if path.is_file()]
        )
    assert files[0] == files[1]


KILLED = """
import itertools, json, sys
from pathlib import Path
import numpy as np
from featcache.interface import EncodedArray, FeatureSpec
from featcache_backends.zarr import ZarrBackend, ZstdCodec

codec = {"raw": None, "zstd": ZstdCodec()}[sys.argv[2]]
features = [FeatureSpec("x", "uint8", (), codec=codec)]
writer = ZarrBackend(chunk_bytes=100, shard_bytes=1000).open_writer(Path(sys.argv[1]), features)
for index in itertools.count():
    block = np.full(100, index % 251, "u1")
    encoded = EncodedArray(100, (codec.encode(block) if codec else bytes(block),))
    extents = writer.append(f"utt{index}", {"x": encoded})
    if index < 125:
        print(json.dumps(*extents["x"]))
    if index == 124:
        writer.flush()
        print("flushed", flush=True)
"""


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_was_flushed_survives_kill_9(tmp_path: Path, codec: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), codec], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        *told, flushed = [process.stdout.readline() for _ in range(126)]
        process.kill()
    assert (flushed, process.returncode) == (b"flushed\n", -signal.SIGKILL)
    extents = [Extent(*json.loads(line)) for line in told]
    # ten chunks a shard: the last one was under way
    assert len({extent.container for extent in extents}) == 13
    for index, data in enumerate(read_extents(tmp_path, extents)):
        plain = (
            data
            if codec == "raw"
            else ZstdCodec().decode(memoryview(data), np.dtype("u1"), (), 1 << 20).tobytes()
        )
        assert plain == bytes([index % 251]) * 100


def test_an_aborted_writer_leaves_its_frames_and_no_group(tmp_path: Path) -> None:
    feature = FeatureSpec("fbank", "float32", (2,))
    (array,) = make_arrays(feature, [5])
    writer = SMALL.open_writer(tmp_path, [feature])
    extents = writer.append("utt0", {"fbank": encoded(feature, array, SMALL)})["fbank"]
    writer.abort()
    writer.abort()  # harmless
    assert read_extents(tmp_path, extents) == [array.tobytes()]
    with pytest.raises(FileNotFoundError):
        zarr.open_group(tmp_path / "fbank.zarr", mode="r")


@pytest.mark.parametrize(
    ("dtype", "fill_value"), [("bool", "false"), ("int8", "0"), ("float32", "0.0")]
)
def test_the_fill_value_has_the_type_that_zarr_demands(
    tmp_path: Path, dtype: str, fill_value: str
) -> None:
    write(tmp_path, FeatureSpec("x", dtype, ()), [])
    assert f'"fill_value": {fill_value},' in (tmp_path / "x.zarr/x/zarr.json").read_text()


def test_features_have_a_group_each(tmp_path: Path) -> None:
    features = [
        FeatureSpec("fbank", "float32", (2,)),
        FeatureSpec("tokens", "int64", (), codec=ZstdCodec()),
    ]
    arrays = {feature.name: make_arrays(feature, [7, 9]) for feature in features}
    writer = SMALL.open_writer(tmp_path, features)
    for index in range(2):
        writer.append(
            f"utt{index}", {f.name: encoded(f, arrays[f.name][index], SMALL) for f in features}
        )
    writer.close()
    for feature in features:
        assert_zarr_reads(tmp_path, feature, arrays[feature.name])


def test_writing_needs_no_zarr_library(tmp_path: Path) -> None:
    code = "import sys; sys.modules.update(zarr=None, numcodecs=None)\n" + KILLED.replace(
        "itertools.count()", "[124]"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "raw"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.endswith("flushed\n")

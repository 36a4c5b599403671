from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
import zarr
from hypothesis import given, settings

from featcache.errors import ConfigError, MissingDependencyError
from featcache.interface import Array, Codec, FeatureSpec, SupportsBlocks, storage_dtype
from featcache_backends import zarr as backend
from featcache_backends.zarr import BloscCodec, ZarrBackend, ZstdCodec

CODECS = (
    ZstdCodec(),
    ZstdCodec(level=1),
    BloscCodec(),
    BloscCodec("zstd", 9, "shuffle"),
    BloscCodec("zlib", 1, "noshuffle"),
)


@settings(deadline=None, max_examples=50)
@given(
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(
        ["float16", "float32", "float64", "int8", "uint16", "int32", "uint64", "bool", "bfloat16"]
    ),
    dims=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    rows=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_codecs_give_back_blocks_and_leave_them_alone(
    codec: Codec, dtype: str, dims: tuple[int, ...], rows: int, seed: int
) -> None:
    block = (
        np.random.default_rng(seed)
        .integers(0, 100, size=(rows, *dims))
        .astype(storage_dtype(dtype))
    )
    before = block.tobytes()
    block.flags.writeable = False
    data = codec.encode(block)
    assert block.tobytes() == before
    decoded = codec.decode(memoryview(data), block.dtype, dims, rows)
    assert (decoded.dtype, decoded.shape) == (block.dtype, block.shape)
    np.testing.assert_array_equal(decoded, block)


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_make_frames_smaller(codec: Codec) -> None:
    block = np.arange(20_000, dtype="f4").reshape(-1, 80)
    assert isinstance(codec, Codec)
    assert len(codec.encode(block)) < 0.7 * block.nbytes


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64", "bool"])
@pytest.mark.parametrize("codec", CODECS)
def test_zarr_itself_would_write_the_same_bytes(codec: ZstdCodec | BloscCodec, dtype: str) -> None:
    block = np.random.default_rng(0).integers(0, 2, size=(30, 80)).astype(dtype)
    store: dict[str, Any] = {}
    frames = zarr.create_array(
        zarr.storage.MemoryStore(store),
        shape=block.shape,
        chunks=block.shape,
        dtype=block.dtype,
        compressors=[codec.zarr_metadata(block.dtype)],
    )
    frames[...] = block
    assert store["c/0/0"].to_bytes() == codec.encode(block)


def test_blosc_gives_the_same_bytes_each_time_also_without_zarr() -> None:
    code = """if True:
        import numpy as np
        from featcache_backends.zarr import BloscCodec
        block = np.random.default_rng(0).normal(size=(4000, 80)).astype("f4")
        codec = BloscCodec(cname="zstd")
        print(len({codec.encode(block) for _ in range(50)}))
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "1\n"


def test_padding_to_a_block_stays_short_however_small_the_frames() -> None:
    assert isinstance(ZarrBackend(), SupportsBlocks)
    tokens = FeatureSpec("tokens", "int64", (), codec=ZstdCodec())
    speaker = FeatureSpec("speaker", "float32", (192,), has_frames=False, codec=ZstdCodec())
    assert (ZarrBackend().blocks(tokens).rows, ZarrBackend().blocks(speaker).rows) == (256, 1)


def test_a_missing_library_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("google_crc32c", "numcodecs", "numcodecs.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    backend._numcodecs.cache_clear()  # as in a process that has used no codec yet
    remedy = r"; try: pip install 'featcache\[zarr\]'"
    with pytest.raises(
        MissingDependencyError, match="backend 'zarr' needs 'google_crc32c'" + remedy
    ):
        ZarrBackend().open_writer(tmp_path, [])
    with pytest.raises(MissingDependencyError, match="codec 'zstd' needs 'numcodecs'" + remedy):
        ZstdCodec().encode(np.zeros(3, "f4"))


@pytest.mark.parametrize(
    "options", [{"chunk_bytes": 0}, {"shard_bytes": "1GB"}, {"chunk_bytes": 9, "shard_bytes": 8}]
)
def test_impossible_sizes_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"_bytes must be an integer from \d+ to \d+, not"):
        ZarrBackend(**options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ZstdCodec(level=23), "level must be an integer from 1 to 22, not 23"),
        (lambda: BloscCodec(clevel=10), "clevel must be an integer from 1 to 9, not 10"),
        (lambda: BloscCodec(cname="gzip"), "cname must be one of 'blosclz', 'lz4', .*, not 'gzip'"),
        (lambda: BloscCodec(shuffle="bits"), "shuffle must be one of 'noshuffle', .*, not 'bits'"),
    ],
)
def test_options_of_codecs_are_checked_when_made(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@dataclass(frozen=True)
class Foreign:
    name: ClassVar[str] = "foreign"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[frozenset[str] | None] = None

    def encode(self, block: Array) -> bytes:
        return block.tobytes()

    def decode(
        self, data: memoryview, dtype: np.dtype[np.generic], dims: tuple[int, ...], rows: int
    ) -> Array:
        return np.frombuffer(data, dtype).reshape(-1, *dims)


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (FeatureSpec("ids", "float32", ()), "feature 'ids': a zarr group keeps this name"),
        (FeatureSpec("__x", "float32", ()), "feature '__x': a zarr group keeps this name"),
        (
            FeatureSpec("x", "float32", (), codec=Foreign()),
            "feature 'x': zarr does not know codec 'foreign'",
        ),
    ],
)
def test_what_cannot_stand_in_a_zarr_group_is_refused(
    tmp_path: Path, feature: FeatureSpec, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ZarrBackend().open_writer(tmp_path, [feature])
    assert list(tmp_path.iterdir()) == []


def test_blosc_starts_no_threads_to_read() -> None:
    code = """if True:
        import threading, numpy as np
        from pathlib import Path
        from featcache_backends.zarr import BloscCodec
        import numcodecs.blosc as blosc
        block = np.arange(1 << 20, dtype="i8")
        blosc.use_threads = False
        data = blosc.compress(block, b"lz4", 5, 1)
        blosc.use_threads = None  # as it is in a new process
        blosc.set_nthreads(4)
        before = len(list(Path("/proc/self/task").iterdir()))
        decoded = BloscCodec().decode(memoryview(data), block.dtype, (), len(block))
        assert (decoded == block).all()
        print(len(list(Path("/proc/self/task").iterdir())) - before)
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "0\n"

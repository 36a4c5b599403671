from __future__ import annotations

import subprocess
import sys
from typing import Any

import h5py
import hypothesis.strategies as st
import numpy as np
import pytest
from hdf5_helpers import FBANK, make, specs, write
from hypothesis import given, settings

from featcache.errors import ConfigError, CorruptCacheError
from featcache.interface import Array, FeatureSpec
from featcache_backends.hdf5 import BLOCK_BYTES, GzipCodec, Hdf5Backend, link_name
from featcache_backends.lilcom import LilcomCodec


def decoded(codec: GzipCodec, block: bytes, feature: FeatureSpec) -> Array:
    return codec.decode(memoryview(block), feature.storage_dtype, feature.dims, 1 << 20)


@settings(max_examples=60, deadline=None)
@given(
    specs(GzipCodec()),
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.integers(0, 9),
    st.booleans(),
)
def test_gzip_chunks_decode_to_what_h5py_decompresses(
    feature: FeatureSpec, lengths: list[int], level: int, shuffle: bool
) -> None:
    codec = GzipCodec(level, shuffle)
    feature = FeatureSpec(feature.name, feature.dtype, feature.dims, feature.has_frames, codec)
    with write([feature], [(f"utt-{i}", rows) for i, rows in enumerate(lengths)]) as written:
        for (id, name), array in written.arrays.items():
            native = written.native(id, name)
            assert native.dtype == array.dtype
            assert native.shape == (array.shape if feature.has_frames or feature.dims else (1,))
            assert native.tobytes() == array.tobytes()
            blocks = [decoded(codec, block, feature) for block in written.blocks(id, name)]
            assert b"".join(block.tobytes() for block in blocks)[: array.nbytes] == array.tobytes()
            assert all(extent.offset % 64 == 0 for extent in written.extents[id, name])


@pytest.mark.parametrize("dims", [(80,), (), (3, 7, 11), (40_000,)])
def test_gzip_cuts_long_arrays_into_chunks_of_about_96_kib(dims: tuple[int, ...]) -> None:
    codec = GzipCodec(level=1)
    feature = FeatureSpec("f", "float32", dims, codec=codec)
    size = Hdf5Backend().blocks(feature).rows
    assert size is not None
    assert size == 1 or BLOCK_BYTES - feature.row_bytes < size * feature.row_bytes <= BLOCK_BYTES
    rows = 2 * size + 1
    with write([feature], [("a", rows), ("b", size), ("c", 1)]) as written:
        assert [len(written.extents[id, "f"]) for id in "abc"] == [3, 1, 1]
        for id in "abc":
            assert np.array_equal(written.native(id, "f"), written.arrays[id, "f"])
        blocks = [decoded(codec, block, feature) for block in written.blocks("a", "f")]
        assert [block.shape for block in blocks] == [(size, *dims)] * 3
        assert np.array_equal(np.concatenate(blocks)[:rows], written.arrays["a", "f"])
        assert not np.concatenate(blocks)[rows:].any()


def test_gzip_is_declared_as_hdf5s_own_filters() -> None:
    feature = FeatureSpec("f", "float32", (4,), codec=GzipCodec(level=7))
    plain = FeatureSpec("g", "float32", (4,), codec=GzipCodec(shuffle=False))
    with write([feature, plain], [("a", 5)]) as written, h5py.File(written.path) as file:
        assert (file["f/a"].compression, file["f/a"].compression_opts, file["f/a"].shuffle) == (
            "gzip",
            7,
            True,
        )
        assert (file["g/a"].compression, file["g/a"].compression_opts, file["g/a"].shuffle) == (
            "gzip",
            4,
            False,
        )
        assert file["f/a"].id.get_chunk_info(0).filter_mask == 0  # no filter was skipped


def test_gzip_leaves_the_block_that_it_encodes_as_it_is() -> None:
    block = make(FBANK, 50)
    before = block.copy()
    block.flags.writeable = False
    GzipCodec().encode(block)
    assert np.array_equal(block, before)


@pytest.mark.parametrize(
    "options", [{"level": 10}, {"level": -1}, {"level": 2.0}, {"level": True}, {"shuffle": 1}]
)
def test_gzip_refuses_options_that_cannot_work_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError,
        match=f"gzip: {next(iter(options))} must be .* not {next(iter(options.values()))}",
    ):
        GzipCodec(**options)


def test_gzip_says_that_a_block_is_corrupt() -> None:
    data = GzipCodec().encode(make(FBANK, 50))
    with pytest.raises(CorruptCacheError, match="cannot be decompressed"):
        GzipCodec().decode(memoryview(data)[:-10], FBANK.storage_dtype, FBANK.dims, 50)


@pytest.mark.parametrize("has_frames", [True, False])
@pytest.mark.parametrize("dims", [(), (8,), (3, 2, 1)])
def test_lilcom_is_one_opaque_scalar_an_array(dims: tuple[int, ...], has_frames: bool) -> None:
    feature = FeatureSpec("f", "float32", dims, has_frames, LilcomCodec())
    with write([feature], [("a", 1200), ("b", 1)]) as written:
        for id in "ab":
            native = written.native(id, "f")
            assert isinstance(native, np.void)
            assert written.blocks(id, "f") == [native.tobytes()]


def test_lilcom_without_frames_is_an_empty_dataset() -> None:
    feature = FeatureSpec("f", "float32", (8,), codec=LilcomCodec())
    with write([feature], [("a", 0)]) as written:
        assert written.extents["a", "f"] == ()
        assert (written.native("a", "f").shape, written.native("a", "f").dtype) == (
            (0, 8),
            np.float32,
        )


def test_lhotse_reads_raw_and_lilcom() -> None:
    from lhotse.features.io import LilcomHdf5Reader, NumpyHdf5Reader, close_cached_file_handles

    lilcom = FeatureSpec("lilcom", "float32", (80,), codec=LilcomCodec())
    with write([FBANK, lilcom], [("a", 700), ("a/b 100%", 3)]) as written:
        for id in ("a", "a/b 100%"):
            fbank = NumpyHdf5Reader(written.path).read(f"fbank/{link_name(id)}", 1, 600)
            assert np.array_equal(fbank, written.arrays[id, "fbank"][1:600])
            lossy = LilcomHdf5Reader(written.path).read(f"lilcom/{link_name(id)}", 1, 600)
            assert np.abs(lossy - written.arrays[id, "lilcom"][1:600]).max() <= 2**-6
        close_cached_file_handles()


def test_reading_gzip_needs_no_h5py() -> None:
    code = (
        "import sys, numpy as np; from featcache_backends.hdf5 import GzipCodec, Hdf5Backend; "
        "Hdf5Backend(); c = GzipCodec(); a = np.ones((3, 4), 'f4'); d = "
        "c.decode(memoryview(c.encode(a)), a.dtype, (4,), 3); assert (a == d).all(); assert 'h5py' "
        "not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

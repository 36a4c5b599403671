"""The limits of our formats: refused before anything is written, and the writer goes on."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from featcache.errors import FeatureError
from featcache.interface import ChecksArrays, EncodedArray, FeatureSpec
from featcache_backends.hdf5 import GzipCodec, Hdf5Backend
from featcache_backends.memmap import MemmapBackend
from featcache_backends.webdataset import WebDatasetBackend
from featcache_backends.zarr import BloscCodec, ZarrBackend

ONE = EncodedArray(1, (b"\1",))
FEATURE = FeatureSpec("f", "uint8", ())


def test_webdataset_refuses_an_array_that_no_tar_holds(tmp_path: Path) -> None:
    writer = WebDatasetBackend().open_writer(tmp_path, [FEATURE])
    assert isinstance(writer, ChecksArrays)
    most = 8**11 - (1 << 16) - 1  # with any header of a .npy
    writer.check("a", {"f": (most, most)})
    with pytest.raises(
        FeatureError,
        match="feature 'f' of 'a' has 8,589,869,056 bytes, a tar holds less than 8 GiB",
    ):
        writer.check("a", {"f": (most + 1, most + 1)})
    writer.append("a", {"f": ONE})
    writer.close()


@pytest.mark.parametrize("id", ["x" * 65_001, "é" * 32_501, "/" * 21_667])
def test_hdf5_refuses_an_id_that_is_too_long_for_a_link(tmp_path: Path, id: str) -> None:
    writer = Hdf5Backend().open_writer(tmp_path, [FEATURE])
    assert isinstance(writer, ChecksArrays)
    writer.check(id[:-1], {"f": (1, 1)})
    for refuse in (lambda: writer.check(id, {"f": (1, 1)}), lambda: writer.append(id, {"f": ONE})):
        with pytest.raises(
            FeatureError,
            match=r"takes 65,00[0-9] bytes as a name, HDF5 holds 65,000; give a shorter",
        ):
            refuse()
    writer.append(id[:-1], {"f": ONE})
    writer.close()
    with h5py.File(tmp_path / "f.h5") as file:
        assert [dataset[()].tolist() for dataset in file["f"].values()] == [[1]]


@pytest.mark.parametrize("codec", [None, GzipCodec()])
def test_hdf5_holds_32_axes_and_no_more(tmp_path: Path, codec: GzipCodec | None) -> None:
    backend = Hdf5Backend()
    for has_frames, axes in ((True, 31), (False, 32)):
        most = FeatureSpec(f"f{axes}", "uint8", (1,) * axes, has_frames, codec)
        backend.open_writer(tmp_path, [most]).close()
        more = FeatureSpec("f", "uint8", (1,) * (axes + 1), has_frames, codec)
        with pytest.raises(
            FeatureError, match="feature 'f': arrays have 33 axes, HDF5 holds 32 at most"
        ):
            backend.open_writer(tmp_path, [more])
    assert not (tmp_path / "f.h5").exists()


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (
            FeatureSpec("f", "uint8", (1 << 32,), codec=GzipCodec()),
            "a frame has 4,294,967,296 bytes, a chunk of HDF5",
        ),
        (
            FeatureSpec("f", "uint8", ((1 << 31) - 16,), codec=BloscCodec()),
            "a frame has 2,147,483,632 bytes, Blosc",
        ),
    ],
)
def test_a_frame_that_no_chunk_holds_is_refused(
    tmp_path: Path, feature: FeatureSpec, message: str
) -> None:
    backend = (
        Hdf5Backend() if isinstance(feature.codec, GzipCodec) else ZarrBackend(shard_bytes=1 << 33)
    )
    with pytest.raises(FeatureError, match=message):
        backend.open_writer(tmp_path, [feature])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("axes", [1, 40, 45, 50, 55, 60, 63])
def test_a_npy_file_holds_as_many_axes_as_numpy(tmp_path: Path, axes: int) -> None:
    feature = FeatureSpec("f", "float64", (2, *(1 for _ in range(axes - 2)))[: axes - 1])
    array = np.arange(3 * 2 ** min(axes - 1, 1), dtype=np.float64).reshape(3, *feature.dims)
    writer = MemmapBackend().open_writer(tmp_path, [feature])
    (extent,) = writer.append("a", {"f": EncodedArray(3, (array.tobytes(),))})["f"]
    writer.close()
    assert extent.offset % 64 == 0
    read = np.load(tmp_path / "f.npy", mmap_mode="r")
    np.testing.assert_array_equal(read, array)
    assert (tmp_path / "f.npy").stat().st_size == extent.offset + extent.nbytes

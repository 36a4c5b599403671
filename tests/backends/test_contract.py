from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import native_readers
from native_readers import Arrays, Places

import featcache
from featcache.interface import FeatureSpec, SupportsPages
from featcache.testing import BackendContract
from featcache.testing.backend_under_test import Storage
from featcache.testing.contract import packages
from featcache.testing.promises import append_all, contents_below


class KnowsItsPages:
    """Files are hashed on their way, and not read for that when the part is sealed."""

    def test_the_pages_of_all_files_are_known(self, storage: Storage, tmp_path: Path) -> None:
        writer, _ = append_all(storage, tmp_path)
        writer.close()
        assert isinstance(writer, SupportsPages)
        assert set(writer.pages()) == set(contents_below(tmp_path))


class TestMemmap(BackendContract, KnowsItsPages):
    backend = "memmap"
    tolerance: ClassVar[Mapping[str, float]] = {"int8": 200 / 506}

    def read_natively(self, directory: Path, feature: FeatureSpec, extents: Places) -> Arrays:
        return native_readers.read_npy(directory, feature, extents)


class TestHdf5(BackendContract, KnowsItsPages):
    backend = "hdf5"
    tolerance: ClassVar[Mapping[str, float]] = {"lilcom": 2.0**-5 / 2}

    def read_natively(self, directory: Path, feature: FeatureSpec, extents: Places) -> Arrays:
        return native_readers.read_hdf5(directory, feature, extents)


class TestLilcom(BackendContract, KnowsItsPages):
    backend = "lilcom"
    tolerance: ClassVar[Mapping[str, float]] = {"lilcom": 2.0**-5 / 2}

    def read_natively(self, directory: Path, feature: FeatureSpec, extents: Places) -> Arrays:
        return native_readers.read_lilcom(directory, feature, extents)


class TestWebDataset(BackendContract, KnowsItsPages):
    backend = "webdataset"

    def read_natively(self, directory: Path, feature: FeatureSpec, extents: Places) -> Arrays:
        return native_readers.read_shards(directory, feature, extents)


class TestZarr(BackendContract, KnowsItsPages):
    backend = "zarr"

    def read_natively(self, directory: Path, feature: FeatureSpec, extents: Places) -> Arrays:
        return native_readers.read_zarr(directory, feature, extents)


class TestZarrInManyShards(TestZarr):
    options: ClassVar[Mapping[str, object]] = {"chunk_bytes": 1 << 11, "shard_bytes": 1 << 13}
    examples = 3


class TestWebDatasetInManyShards(TestWebDataset):
    options: ClassVar[Mapping[str, object]] = {"shard_bytes": 1 << 13}
    examples = 3


def test_every_backend_is_under_contract() -> None:
    tested = {each.backend for each in BackendContract.__subclasses__()}
    assert tested == set(featcache.registry.backend_names())


def test_looking_backends_up_imports_no_format_library() -> None:
    loaded = packages(
        "import featcache, featcache.registry\n"
        "for name in featcache.registry.backend_names(): featcache.registry.get_backend(name)()\n"
        "for name in featcache.registry.codec_names(): name == 'raw' or "
        "featcache.registry.get_codec(name)()\n"
    )
    assert {"featcache", "featcache_backends"} <= loaded
    assert loaded.isdisjoint(
        {"h5py", "zarr", "numcodecs", "google_crc32c", "lilcom", "webdataset", "torch"}
    )

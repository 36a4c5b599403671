from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from featcache.testing import BackendContract
from featcache.testing.reading import packages


class TestEveryBackend(BackendContract):
    tolerance: ClassVar[Mapping[str, float]] = {"lilcom": 2.0**-5 / 2}


class TestZarrInManyShards(BackendContract):
    backend = "zarr"
    options: ClassVar[Mapping[str, object]] = {"chunk_bytes": 1 << 11, "shard_bytes": 1 << 13}
    examples = 3


class TestWebDatasetInManyShards(BackendContract):
    backend = "webdataset"
    options: ClassVar[Mapping[str, object]] = {"shard_bytes": 1 << 13}
    examples = 3


def test_looking_backends_up_imports_no_format_library() -> None:
    loaded = packages(
        "import featcache, featcache.registry\n"
        "for name in featcache.backend_names(): featcache.get_backend(name)()\n"
        "for name in featcache.registry.codec_names(): name == 'raw' or featcache.registry.get_codec(name)()\n"
    )
    assert {"featcache", "featcache_backends"} <= loaded
    assert loaded.isdisjoint({"h5py", "zarr", "numcodecs", "google_crc32c", "lilcom", "webdataset", "torch"})

"""Eight ways to store two features: all backends and codecs; and utterances with known content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from store_helpers import FINGERPRINT, Arrays, arrays_of, id_of

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.format import UNKNOWN, Stamps

SMALL: dict[str, dict[str, object]] = {  # several files a feature
    "webdataset": {"shard_bytes": 6000},
    "zarr": {"chunk_bytes": 64, "shard_bytes": 512},
}
TICK_POWER = -12


def _two(backend: str, codec: str | None = None, **options: object) -> list[FeatureStorageConfig]:
    settings = {**SMALL.get(backend, {}), **options}
    return [
        FeatureStorageConfig("fbank", backend=backend, codec=codec, options=settings),
        FeatureStorageConfig(
            "units", dtype="int16", backend=backend, codec=codec, options=settings
        ),
    ]


LAYOUTS: dict[str, list[FeatureStorageConfig]] = {
    "memmap": _two("memmap"),
    "hdf5": _two("hdf5"),
    "hdf5 gzip": _two("hdf5", "gzip"),
    "lilcom": [
        FeatureStorageConfig("fbank", backend="lilcom", options={"tick_power": TICK_POWER}),
        FeatureStorageConfig("units", dtype="int16"),
    ],
    "webdataset": _two("webdataset"),
    "zarr": _two("zarr"),
    "zarr zstd": _two("zarr", "zstd"),
    "zarr blosc": _two("zarr", "blosc"),
}


def arrays(number: int, build: int = 0) -> Arrays:
    """The features of an utterance; another build has other values."""
    return arrays_of(number + 1000 * build, (number * 5) % 23)


def stamps_of(number: int, build: int = 0) -> Stamps:
    """The stamps of an utterance."""
    return Stamps((number % 251 << 56) | 1, build + 1)


def annotations_of(number: int, build: int = 0) -> dict[str, Any]:
    """The annotations of an utterance; some have none."""
    if number % 3 == 0:
        return {}
    tags = [*range(number % 5)]
    return {
        "text": f"said {build} {number}",
        "n": number,
        "speaker": f"s{number % 2}",
        "tags": tags,
    }


def write(writer: CacheWriter, numbers: Iterable[int], build: int = 0) -> None:
    for number in numbers:
        stamps = stamps_of(number, build) if number % 4 else UNKNOWN
        told = annotations_of(number, build)
        writer.write(id_of(number), arrays(number, build), annotations=told, stamps=stamps)


def write_missing(writer: CacheWriter, numbers: Iterable[int], build: int = 0) -> None:
    write(writer, [number for number in numbers if id_of(number) not in writer], build)


def is_right(found: Mapping[str, Any], number: int, build: int = 0) -> bool:
    """Whether these are the stored arrays of an utterance; lilcom rounds."""
    return all(
        array.shape == found[name].shape
        and np.allclose(array, found[name], rtol=0, atol=2.0**TICK_POWER if name == "fbank" else 0)
        for name, array in arrays(number, build).items()
    )


def wrong_ids(cache: featcache.Cache, numbers: Iterable[int], build: int = 0) -> list[str]:
    """The utterances of `numbers` that a cache lacks or has other arrays or annotations of."""
    wrong = []
    for number in numbers:
        id = id_of(number)
        if id not in cache or not is_right(cache[id], number, build):
            wrong.append(id)
            continue
        row = cache.opened.row(id)
        found = {name: cache.annotation(name)[row] for name in cache.annotations if name != "given"}
        there = {name: value for name, value in found.items() if value is not None}
        if there != annotations_of(number, build):
            wrong.append(id)
    return wrong


def open_writer(path: Any, layout: str, *, overwrite: bool = False) -> CacheWriter:
    return CacheWriter(path, LAYOUTS[layout], FINGERPRINT, overwrite=overwrite)

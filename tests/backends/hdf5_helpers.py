"""What the tests of the HDF5 backend share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import hypothesis.strategies as st
import numpy as np

from featcache.interface import Array, EncodedArray, Extent, FeatureSpec
from featcache_backends.hdf5 import GzipCodec, Hdf5Backend, link_name

FLOATS = ["float16", "float32", "float64", "bfloat16"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FBANK = FeatureSpec("fbank", "float32", (80,))
IDS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40
)


@dataclass
class Written:
    """What a closed HDF5 file holds: for each (id, feature) the array, its shape as the user sees
    it.
    """

    directory: Path
    features: Sequence[FeatureSpec]
    arrays: dict[tuple[str, str], Array]
    extents: dict[tuple[str, str], tuple[Extent, ...]]

    @property
    def path(self) -> Path:
        (path,) = self.directory.glob("*.h5")
        return path

    def blocks(self, id: str, feature: str) -> list[bytes]:
        return [read(self.directory, extent) for extent in self.extents[id, feature]]

    def native(self, id: str, feature: str) -> Any:
        with h5py.File(self.path) as file:
            return file[f"{feature}/{link_name(id)}"][()]


def read(directory: Path, extent: Extent) -> bytes:
    with (directory / extent.container).open("rb") as file:
        file.seek(extent.offset)
        return file.read(extent.nbytes)


def encoded(feature: FeatureSpec, array: Array) -> EncodedArray:
    rows = array if feature.has_frames else array[np.newaxis]
    if rows.size == 0:
        return EncodedArray(len(rows), ())
    if feature.codec is None:
        return EncodedArray(len(rows), (memoryview(rows.tobytes()),))
    cut = Hdf5Backend().blocks(feature)
    size = cut.rows or len(rows)
    if cut.padded:
        rows = np.concatenate([rows, np.zeros((-len(rows) % size, *feature.dims), rows.dtype)])
    blocks = tuple(
        feature.codec.encode(rows[start : start + size]) for start in range(0, len(rows), size)
    )
    return EncodedArray(len(array) if feature.has_frames else 1, blocks)


def make(feature: FeatureSpec, rows: int, seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    shape, dtype = feature.shape(rows), feature.storage_dtype
    if dtype.kind == "f":
        return np.asarray(random.standard_normal(shape)).astype(dtype)
    octets = random.integers(0, 2 if feature.dtype == "bool" else 256, (*shape, dtype.itemsize))
    return octets.astype(np.uint8).view(dtype)[..., 0]


@contextmanager
def write(features: Sequence[FeatureSpec], items: Sequence[tuple[str, int]]) -> Iterator[Written]:
    with tempfile.TemporaryDirectory() as name:
        written = Written(Path(name), features, {}, {})
        writer = Hdf5Backend().open_writer(written.directory, features)
        for seed, (id, rows) in enumerate(items):
            arrays = {feature.name: make(feature, rows, seed) for feature in features}
            encodings = {
                feature.name: encoded(feature, arrays[feature.name]) for feature in features
            }
            for feature, extents in writer.append(id, encodings).items():
                written.arrays[id, feature] = arrays[feature]
                written.extents[id, feature] = extents
        writer.close()
        yield written


@st.composite
def specs(draw: st.DrawFn, codec: GzipCodec | None = None) -> FeatureSpec:
    dims = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    return FeatureSpec(
        "f", draw(st.sampled_from([*FLOATS, *INTEGERS, "bool"])), dims, draw(st.booleans()), codec
    )

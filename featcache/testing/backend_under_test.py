"""A backend with one of its codecs, and arrays to store with it.

Arrays are handled here as they are stored, in `storage_dtype`: bfloat16 as the uint16 of its bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from featcache._tensors import ArrayLike
from featcache.declaration import DTYPES, FeatureStorageConfig
from featcache.format import from_storage
from featcache.interface import Array, EncodedArray, FeatureSpec, storage_dtype
from featcache.registry import RAW, get_codec
from featcache.store import Cache
from featcache.writing.cache_writer import CacheWriter

if TYPE_CHECKING:
    import torch

# of `some_features`
DIMS: Mapping[str, tuple[int, ...]] = {"fbank": (80,), "energy": (), "speaker": (4,)}

Utterances = Mapping[str, Mapping[str, Array]]  # id -> feature -> array as it is stored


@dataclass(frozen=True)
class Storage:
    """A backend with one of its codecs, and options of both."""

    backend: str
    codec: str
    options: Mapping[str, object] = dataclasses.field(default_factory=dict, hash=False)
    # how far a lossy codec may move a number; None: unknown, so any way
    tolerance: float | None = None

    def __str__(self) -> str:
        return f"{self.backend}-{self.codec}"

    @property
    def lossless(self) -> bool:
        """Whether what is read must be what was written, bit for bit."""
        return self.codec == RAW or get_codec(self.codec).lossless

    @property
    def dtypes(self) -> tuple[str, ...]:
        """All dtypes that the codec can hold, float32 first if it is among them."""
        known = None if self.codec == RAW else get_codec(self.codec).dtypes
        names = [name for name in DTYPES if known is None or name in known]
        return tuple(sorted(names, key=lambda name: name != "float32"))

    def declare(
        self,
        name: str = "fbank",
        dtype: str | None = None,
        time_axis: int | None = 0,
        keep: bool = False,
    ) -> FeatureStorageConfig:
        """Declare a feature of this storage; `keep` allows NaN and infinity."""
        return FeatureStorageConfig(
            name,
            dtype or self.dtypes[0],
            backend=self.backend,
            codec=self.codec,
            options=self.options,
            time_axis=time_axis,
            nonfinite="keep" if keep else "raise",
        )

    def assert_same(self, read: Array, written: Array, dtype: str, what: object = "") -> None:
        """Fail unless `read`, as `Cache.read` gave it, is what was `written`, as it is stored."""
        expected = from_storage(written, dtype)
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape), what
        if self.lossless:
            assert read.tobytes() == expected.tobytes(), what
        elif self.tolerance is not None:
            moved = np.abs(read.astype(np.float64) - expected.astype(np.float64))
            assert moved.max(initial=0) <= self.tolerance, what

    def assert_holds(
        self, cache: Cache, features: Iterable[FeatureStorageConfig], utterances: Utterances
    ) -> None:
        """Fail unless a cache holds exactly `utterances`, in canonical order."""
        assert list(cache) == sorted(utterances, key=str.encode)
        for feature in features:
            for id, arrays in utterances.items():
                read = cache.read(id, feature.name)
                self.assert_same(read, arrays[feature.name], feature.dtype, (id, feature.name))


def some_features(storage: Storage) -> list[FeatureStorageConfig]:
    """Declare frames of several numbers, of one number, and an embedding.

    The one number is of another dtype, if there is.
    """
    return [
        storage.declare("fbank"),
        storage.declare("energy", storage.dtypes[-1]),
        storage.declare("speaker", time_axis=None),
    ]


def some_utterances(
    features: Iterable[FeatureStorageConfig], frames: Mapping[str, int]
) -> Utterances:
    """Make utterances of `some_features` of the given ids and numbers of frames."""
    utterances = {}
    for seed, (id, count) in enumerate(frames.items()):
        shapes = {name: (count, *dims) for name, dims in DIMS.items()} | {
            "speaker": DIMS["speaker"]
        }
        utterances[id] = {f.name: random_numbers(f.dtype, shapes[f.name], seed) for f in features}
    return utterances


def write(
    path: Path,
    features: Iterable[FeatureStorageConfig],
    utterances: Utterances,
    ids: Iterable[str] | None = None,
) -> None:
    """Write utterances, all or those of `ids` in that order, with a `CacheWriter` of their own."""
    features = list(features)
    with CacheWriter(path, features) as writer:
        for id in utterances if ids is None else ids:
            writer.write(id, {f.name: as_given(utterances[id][f.name], f.dtype) for f in features})


def as_given(stored: Array, dtype: str) -> ArrayLike:
    """Return what a user would hand to `CacheWriter.write`."""
    if dtype != "bfloat16":
        return stored
    import torch

    return torch.from_numpy(stored).view(torch.bfloat16)


def assert_tensor(tensor: torch.Tensor, read: Array, dtype: str) -> None:
    """Fail unless a `FeatureReader`'s tensor has the declared dtype and `Cache.read`'s bits."""
    assert str(tensor.dtype) == f"torch.{dtype}"
    exact = tensor.float() if dtype == "bfloat16" else tensor  # numpy has no bfloat16
    assert exact.numpy().shape == read.shape
    assert exact.numpy().tobytes() == read.tobytes()


def random_bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Return numbers of every bit pattern alike.

    NaN payloads, infinities and extremes are among them.
    """
    kind = storage_dtype(dtype)
    octets = np.random.default_rng(seed).integers(0, 256, (*shape, kind.itemsize), np.uint8)
    return (octets & 1 if dtype == "bool" else octets).reshape(-1).view(kind).reshape(shape)


def random_numbers(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Return tame numbers, finite and within -100 to 100."""
    numbers = np.random.default_rng(seed).normal(3, 10, shape).clip(-100, 100)
    if dtype == "bfloat16":
        return np.asarray(numbers.astype("<f4").view("<u4") >> 16, "<u2")
    if dtype.startswith("u"):
        numbers = np.abs(numbers)
    return np.asarray(numbers > 3 if dtype == "bool" else numbers).astype(storage_dtype(dtype))


def encode(spec: FeatureSpec, feature: FeatureStorageConfig, array: Array) -> EncodedArray:
    """Encode an array of shape (rows, *dims) as the store hands it to a `ContainerWriter`."""
    blocks = feature.blocks(spec.dims)
    if array.size == 0:
        return EncodedArray(len(array), ())
    if blocks is None or spec.codec is None:
        return EncodedArray(len(array), (array.tobytes(),))
    rows = blocks.rows or len(array)
    missing = -len(array) % rows if blocks.padded else 0
    padded = np.concatenate([array, np.zeros((missing, *spec.dims), array.dtype)])
    cut = np.split(padded, range(rows, len(padded), rows))
    return EncodedArray(
        len(array), tuple(spec.codec.encode(np.ascontiguousarray(block)) for block in cut)
    )

"""Checks of what a kind found: anybody may bring a kind, and sources are untrusted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from featcache.adoptable import RAW, Found, FoundFeature
from featcache.errors import AdoptionError, FeatureError
from featcache.interface import Ints, storage_dtype
from featcache.store.format.ids import check_id


def check_found(found: Found, sizes: Sequence[int]) -> None:
    """Raise `AdoptionError`, naming an id, for what cannot be a cache's columns.

    Args:
        found: by a kind.
        sizes: bytes of each of its containers.
    """
    if not len(found.ids):
        raise AdoptionError("the source holds no utterance")
    if not found.features:
        raise AdoptionError("the source holds no feature")
    for id in found.ids:
        try:
            check_id(id)
        except FeatureError as error:
            raise AdoptionError(str(error)) from error
    if len(set(found.ids)) < len(found.ids):
        twice, _ = Counter(found.ids).most_common(1)[0]
        raise AdoptionError(f"the source has utterance {twice!r} twice")
    for name, values in found.annotations.items():
        if len(values) != len(found.ids):
            raise AdoptionError(f"annotation {name!r} has not a value for each utterance")
    for name, feature in found.features.items():
        _Checked(name, feature, found.ids, np.array(sizes, np.int64)).check()


class _Checked:
    def __init__(self, name: str, feature: FoundFeature, ids: Sequence[str], sizes: Ints) -> None:
        self._name, self._feature, self._ids, self._sizes = name, feature, ids, sizes

    def check(self) -> None:
        feature = self._feature
        self._check_lengths()
        row_bytes = storage_dtype(feature.dtype).itemsize * math.prod(feature.dims)
        self._refuse_rows(feature.rows < 0, "has a negative length")
        if not feature.has_frames:
            self._refuse_rows(feature.rows != 1, "has no time axis, but not one row")
        container = feature.container
        wrong = (container < 0) | (container >= len(self._sizes))
        self._refuse_extents(wrong, "lies in no file of the source")
        wrong = (feature.offset < 0) | (feature.nbytes <= 0)
        wrong |= feature.nbytes > self._sizes[container] - feature.offset
        self._refuse_extents(wrong, "lies beyond the end of its file")
        ends = np.append(0, np.cumsum(feature.nbytes))
        stored = ends[feature.first[1:]] - ends[feature.first[:-1]]
        if feature.codec == RAW:
            wrong = stored // max(row_bytes, 1) != feature.rows
            wrong |= stored % max(row_bytes, 1) != 0
            self._refuse_rows(wrong & (row_bytes > 0), "has not the bytes of its frames")
        else:
            self._refuse_rows((stored == 0) & (feature.rows * row_bytes > 0), "has no bytes")
            self._check_blocks()

    def _check_lengths(self) -> None:
        feature, count = self._feature, len(self._ids)
        extents = {len(feature.container), len(feature.offset), len(feature.nbytes)}
        optional = [each for each in (feature.block_rows, feature.skip) if each is not None]
        fits = len(feature.rows) == len(feature.first) - 1 == count
        fits = fits and all(len(each) == count for each in optional)
        fits = fits and int(feature.first[0]) == 0 and bool((np.diff(feature.first) >= 0).all())
        if not fits or extents != {int(feature.first[-1])}:
            raise AdoptionError(f"feature {self._name!r}: its columns have different lengths")

    def _check_blocks(self) -> None:
        feature, zeros = self._feature, np.zeros(len(self._ids), np.int64)
        block_rows = zeros if feature.block_rows is None else feature.block_rows
        skip = zeros if feature.skip is None else feature.skip
        counts = np.diff(feature.first)
        self._refuse_rows((block_rows < 0) | (skip < 0), "has negative blocks")
        self._refuse_rows((block_rows == 0) & (skip > 0), "begins in a block of unknown length")
        most = np.where(block_rows == 0, feature.rows, block_rows * counts - skip)
        self._refuse_rows((feature.rows > most) & (counts > 0), "has fewer blocks than frames")

    def _refuse_rows(self, wrong: np.ndarray[tuple[int], np.dtype[np.bool_]], why: str) -> None:
        if wrong.any():
            id = self._ids[int(wrong.argmax())]
            raise AdoptionError(f"utterance {id!r}, feature {self._name!r} {why}")

    def _refuse_extents(self, wrong: np.ndarray[tuple[int], np.dtype[np.bool_]], why: str) -> None:
        if wrong.any():
            extent = int(wrong.argmax())
            row = int(self._feature.first.searchsorted(extent, side="right")) - 1
            raise AdoptionError(f"utterance {self._ids[row]!r}, feature {self._name!r} {why}")

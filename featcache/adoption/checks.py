"""Checks of what a kind found: anybody may bring a kind, and sources are untrusted.

Also hints at names and shapes that look like mistakes, as a writer gives them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from featcache.adoptable import RAW, Found, FoundFeature, Options, Stored, TimeAxis
from featcache.adoptable.names import named_as_statistics, refuse_splits, refuse_whole
from featcache.declaration import FrameTimes, first_contradiction
from featcache.errors import AdoptionError, FeatureError
from featcache.format import check_id
from featcache.interface import Ints, storage_dtype

FEW = 8  # arrays, which may be batches where each frame looks like an utterance
MOST_LAYERS = 50  # of frames of two axes
_log = logging.getLogger("featcache")


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


def check_shapes(
    source: str,
    ids: Sequence[str],
    features: Mapping[str, FoundFeature | Stored],
    options: Options,
    pattern: str | None,
) -> None:
    """Refuse batches and statistics among utterances; warn of what else looks like a mistake.

    Nothing in shapes is certain: with `time_axis=0` the user says that axis 0 is the frames, with
    another number that this axis was; with a pattern, that names are ids (`pattern`: the one that
    would say so of this source; None: none would). That utterances have no frames is told all the
    same.

    Raises `AdoptionError`, naming the first id, where each of several arrays is a single frame of
    two axes or more, or all are equally many such frames, and for features that cannot end
    together.
    """
    _check_names(source, ids, None if options.pattern else pattern)
    for name, feature in features.items():
        if feature.has_frames:
            _check_shape(source, ids, name, feature, options.time_axis)
    _check_times(ids, features)


def _check_shape(
    source: str, ids: Sequence[str], name: str, feature: FoundFeature | Stored, axis: TimeAxis
) -> None:
    rows, dims = feature.rows, feature.dims
    empty = np.flatnonzero(rows == 0)
    if len(empty):
        _log.warning(
            "%d of the utterances of %r have no frames of feature %r, the first is %r; see "
            "why, or delete them from the cache (Cache.delete; the source stays as it is)",
            len(empty), source, name, ids[int(empty[0])],
        )  # fmt: skip
    if isinstance(axis, int) or not dims:
        return
    sure = "give time_axis=0 if the first axis is the frames all the same"
    are_batches = _as_batches(rows)
    are_few = len(ids) <= FEW and MOST_LAYERS < dims[0] != dims[-1]
    if len(dims) > 1 and (are_batches or are_few):
        up_to = "" if are_batches else "up to "
        told = f"feature {name!r}: each array is {up_to}{rows.max()} frames of shape {dims}, "
        why = "are these batches? store array[n] of each by an id of its own, or give "
        why += "time_axis=1 if the second axis is the frames, or "
        if rows.max() == 1:
            told = f"feature {name!r}: each array is one frame of shape {dims}, "
            why = "was a batch axis left in? store array[0] of each, or "
        told += f"the first is {ids[0]!r}; {why}{sure}"
        if len(ids) > 1 and are_batches:
            raise AdoptionError(told)
        _log.warning("%r: %s", source, told)
    if len(dims) == 1 and len(ids) > 1 and 1 < rows[0] < dims[0] and (rows == rows[0]).all():
        _log.warning(
            "each of the %d arrays of %r, feature %r, has %d frames of %d numbers: are they "
            "transposed? give time_axis=1 if the second axis is the frames; %s",
            len(ids), source, name, rows[0], dims[0], sure,
        )  # fmt: skip


def _check_names(source: str, ids: Sequence[str], pattern: str | None) -> None:
    """Refuse names of splits, and of all utterances; of statistics, or warn where no pattern is."""
    if pattern is not None:
        refuse_splits(source, ids)
        refuse_whole(source, ids)
    found = named_as_statistics(ids)
    if not found:
        return
    told = f"{source!r}: {', '.join(map(repr, found))} among {len(ids):,} arrays may be statistics"
    delete = "delete them from the cache (Cache.delete; the source stays as it is)"
    if pattern is None:
        _log.warning("%s; if they are, %s", told, delete)
        return
    raise AdoptionError(
        f"{told}, by their names; if they are, move them elsewhere, or give pattern={pattern!r} "
        f"and {delete}; if each is an utterance, give pattern={pattern!r}"
    )


def _as_batches(rows: Ints) -> bool:
    """Whether arrays are equally long, but for one, which is the rest."""
    most = int(rows.max(initial=0))
    shorter = int(np.count_nonzero(rows < most))
    return most > 0 and shorter <= (1 if len(rows) > 2 and most > 1 else 0)


def _check_times(ids: Sequence[str], features: Mapping[str, FoundFeature | Stored]) -> None:
    found = {name: each for name, each in features.items() if isinstance(each, FoundFeature)}
    times = {
        name: FrameTimes(each.frame_s, each.offset_s)
        for name, each in found.items()
        if each.frame_s is not None and each.has_frames
    }
    wrong = first_contradiction(times, {name: found[name].rows for name in times})
    if wrong is not None:
        raise AdoptionError(
            f"utterance {ids[wrong[0]]!r}: {wrong[1]}, which cannot both be right; see whether "
            "both are of the same audio, and mend what the source says of the seconds of a frame"
        )


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

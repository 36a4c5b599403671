"""Arrays of a feature, one by one, on their way to a `FoundFeature`.

For kinds of stores whose arrays may lie in several pieces or in blocks, or of which only windows
are asked for; `adoptable.one_piece` is enough for all others.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn, Protocol, runtime_checkable

import numpy as np

from featcache.adoptable import (
    CONVERT,
    COPY,
    RAW,
    FoundFeature,
    Place,
    TimeAxis,
    frames_first,
    stored_as,
)
from featcache.adoptable.names import refuse_features
from featcache.errors import AdoptionError
from featcache.interface import Ints, storage_dtype

REORDERED = "reordered"  # codec of whole arrays that lie in another order
NO_OPTIONS: Mapping[str, object] = {}
ONE_BY_ONE = (
    "adopt the features one by one into one cache: it has the utterances that have all of them"
)


class PlacedArray(NamedTuple):
    """An array of a file."""

    dtype: str  # as declared
    shape: tuple[int, ...]
    extents: Sequence[tuple[int, int]]  # offset and bytes: of all of it, or of each block
    codec: str = RAW
    options: Mapping[str, object] = NO_OPTIONS
    block_rows: int = 0  # of each full block; 0: one block
    # without a codec: the axes in the order in which their numbers lie, the slowest first; (): C
    # order. In Fortran order it is (1, 0) for a matrix.
    axes: tuple[int, ...] = ()
    big_endian: bool = False
    # the number of the file of each extent in `Found.containers`; (): they lie in one
    files: Sequence[int] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of several numbers in the order in which they lie; () where one is all."""
        if 0 in self.shape:
            return ()
        axes = self.axes or range(len(self.shape))
        found = tuple(axis for axis in axes if self.shape[axis] > 1)
        return found if len(found) > 1 else ()

    def frames_first(self, time_axis: TimeAxis) -> PlacedArray:
        """Return the same array with the axis of the frames in front; its bytes stay."""
        axes = frames_first(self.shape, time_axis)
        if axes == tuple(range(len(axes))):
            return self
        return self._replace(
            shape=tuple(self.shape[axis] for axis in axes),
            axes=tuple(axes.index(axis) for axis in self.axes or range(len(axes))),
        )

    def row(self, number: int) -> PlacedArray:
        """Return the array at a place of the first axis.

        Raises `AdoptionError` where its bytes do not lie side by side.
        """
        if self.codec != RAW or self.order != tuple(sorted(self.order)):
            raise AdoptionError(
                f"rows of an array of shape {self.shape} do not lie one after the other, or are "
                f"compressed; {COPY}"
            )
        placed, _ = _raw_window(self._replace(axes=()), (number, number + 1))
        return placed._replace(shape=self.shape[1:], block_rows=0)

    def cut(self, row: int | None) -> PlacedArray:
        """Return a row, or all of it."""
        return self if row is None else self.row(row)


class NamedArrays(Protocol):
    """An open file that holds arrays by name."""

    def place(self, name: str) -> PlacedArray:
        """Return where an array lies; raises `AdoptionError` if it cannot be adopted, or is not."""

    def blocks(self, name: str) -> Sequence[tuple[int, int]]:
        """Return offset and bytes of each value of a list of bytes, or of the only one."""

    def close(self) -> None:
        """Close the file."""


@runtime_checkable
class NamesArrays(Protocol):
    """A kind of store whose files hold arrays by name, for manifests of others that name them."""

    def open(self, place: Place, path: str) -> NamedArrays:
        """Open a file; raises `AdoptionError` if it is none of this kind."""


class ArrayColumns:
    """Columns of a feature to which arrays are added.

    Args:
        feature: its name.
        time_axis: as in `Options`.
        remedy: what to do where an utterance lacks the feature, as the end of a message.
        copies: whether `featcache.convert` makes a cache of arrays that lie in several ways.
    """

    def __init__(
        self,
        feature: str,
        time_axis: TimeAxis = "auto",
        remedy: str = ONE_BY_ONE,
        *,
        copies: bool = False,
    ) -> None:
        self.feature, self._remedy, self._copies = feature, remedy, copies
        self.ids: list[str] = []
        self._time_axis = time_axis
        self._shapes: list[tuple[int, ...]] = []
        self._dtypes: list[str] = []
        # of arrays with bytes, and the id of the first one
        self._encoding: tuple[str, Mapping[str, object]] | None = None
        self._encoded_id = ""
        # by `PlacedArray.order` all axes, by byte order nothing; and the id of the first one
        self._orders: dict[tuple[int, ...], tuple[tuple[int, ...], str]] = {}
        self._byte_orders: dict[bool, str] = {}
        self._counts, self._container = array("q"), array("i")
        self._offset, self._nbytes = array("q"), array("q")
        self._block_rows, self._skip = array("q"), array("q")

    def add(
        self, id: str, container: int, placed: PlacedArray, window: tuple[int, int] | None = None
    ) -> None:
        """Add the array of an id, or its frames `window[0]` to before `window[1]`.

        `container` is the number of its file, where the array names none.
        """
        try:
            placed = placed.frames_first(self._time_axis)
        except AdoptionError as error:
            self._refuse(id, str(error), CONVERT)
        if placed.extents:
            self._check_encoding(id, placed)
        skip = 0
        if window is not None and window != (0, placed.shape[0]):
            in_rows = placed.codec == RAW and placed.order == tuple(sorted(placed.order))
            placed, skip = (_raw_window if in_rows else _blocks)(placed, window)
        self.ids.append(id)
        self._shapes.append(placed.shape)
        self._dtypes.append(placed.dtype)
        self._counts.append(len(placed.extents))
        self._container.extend(placed.files or [container] * len(placed.extents))
        for offset, nbytes in placed.extents:
            self._offset.append(offset)
            self._nbytes.append(nbytes)
        self._block_rows.append(placed.block_rows)
        self._skip.append(skip)

    def found(
        self, ids: Sequence[str], frame_s: float | None = None, files: Sequence[str] = ()
    ) -> FoundFeature:
        """Return the feature, in the order of `ids`; `files` have names for messages.

        Raises `AdoptionError`, naming an id, if the arrays do not make one feature, or are not
        those of `ids`, each one once.
        """
        stored = stored_as(
            self.feature, self.ids, self._shapes, self._dtypes, self._time_axis, copies=self._copies
        )
        codec, options = self._encoding or (RAW, NO_OPTIONS)
        if codec == RAW and (reordered := self._reordered(stored.has_frames)):
            codec, options = REORDERED, reordered
        counts = np.frombuffer(self._counts, np.int64)
        if codec == REORDERED or not stored.has_frames:
            several = (counts > 1) & (codec != RAW)
            if several.any():
                self._refuse(
                    self.ids[int(several.argmax())],
                    "lies in several blocks, which an array in another order, or without a time "
                    "axis, cannot",
                )
        order = self._order(ids, files)
        first = np.append(0, np.cumsum(counts[order]))
        extents = _ragged(np.append(0, np.cumsum(counts)), first, order)
        rows_a_block = np.frombuffer(self._block_rows, np.int64)[order]
        skip = np.frombuffer(self._skip, np.int64)[order]
        return FoundFeature(
            dtype=stored.dtype,
            dims=stored.dims,
            has_frames=stored.has_frames,
            rows=stored.rows[order],
            first=first,
            container=np.frombuffer(self._container, np.int32)[extents],
            offset=np.frombuffer(self._offset, np.int64)[extents],
            nbytes=np.frombuffer(self._nbytes, np.int64)[extents],
            codec=codec,
            options=options,
            block_rows=rows_a_block if stored.has_frames and rows_a_block.any() else None,
            skip=skip if skip.any() else None,
            frame_s=frame_s if stored.has_frames else None,
        )

    def _check_encoding(self, id: str, placed: PlacedArray) -> None:
        encoding = placed.codec, placed.options
        if self._encoding is None:
            self._encoding, self._encoded_id = encoding, id
        elif self._encoding != encoding:
            self._refuse(
                id,
                f"is stored {_described(*encoding)}, {self._encoded_id!r} "
                f"{_described(*self._encoding)}",
            )
        if placed.codec != RAW:
            if placed.axes:
                self._refuse(id, f"is stored with {placed.codec}, by its first axis alone")
            return
        if placed.order:
            self._orders.setdefault(placed.order, (placed.axes, id))
        if storage_dtype(placed.dtype).itemsize > 1:
            self._byte_orders.setdefault(placed.big_endian, id)

    def _reordered(self, has_frames: bool) -> dict[str, object]:
        """Return the options of the codec for numbers in another order; none if it needs none."""
        if len(self._byte_orders) > 1:
            self._refuse(
                self._byte_orders[True],
                f"has big-endian numbers, {self._byte_orders[False]!r} little-endian ones",
            )
        options: dict[str, object] = {"big_endian": True} if True in self._byte_orders else {}
        if all(order == tuple(sorted(order)) for order in self._orders):
            return options
        orders = [*self._orders]
        known = [axes or tuple(range(len(self._shapes[0]))) for axes, _ in self._orders.values()]
        fits = (axes for axes in known if all(_is_within(order, axes) for order in orders))
        axes = next(fits, None)
        if axes is None:
            (_, one), (_, other) = [*self._orders.values()][:2]
            self._refuse(
                other,
                f"has its axes in another order than {one!r}, such as Fortran's, or transposed",
            )
        return {"axes": [*axes] if has_frames else [0, *(axis + 1 for axis in axes)], **options}

    def _order(self, ids: Sequence[str], files: Sequence[str]) -> Ints:
        if self.ids == ids and len(set(ids)) == len(ids):
            return np.arange(len(ids))
        numbers = {id: number for number, id in enumerate(self.ids)}
        if len(numbers) < len(self.ids):
            seen: set[str] = set()
            twice = next(id for id in self.ids if id in seen or seen.add(id))  # type: ignore[func-returns-value]
            self._refuse(twice, f"is there twice{self._where(twice, files)}", CONVERT)
        for lacks in set(ids) ^ numbers.keys():
            raise AdoptionError(
                f"feature {self.feature!r}: utterance {lacks!r} lacks it, or another feature: a "
                f"cache holds each feature of each utterance; {self._remedy}"
            )
        return np.fromiter((numbers[id] for id in ids), np.int64, len(ids))

    def _where(self, id: str, files: Sequence[str]) -> str:
        """Return the files of an id, for a message."""
        first = np.append(0, np.cumsum(np.frombuffer(self._counts, np.int64)))
        rows = (row for row, each in enumerate(self.ids) if each == id and self._counts[row])
        named = dict.fromkeys(files[self._container[first[row]]] for row in rows if files)
        return f", in {' and in '.join(map(repr, named))}" if named else ""

    def _refuse(self, id: str, what: str, way: str = "") -> NoReturn:
        way = way or (COPY if self._copies else CONVERT)
        raise AdoptionError(f"feature {self.feature!r}: utterance {id!r} {what}; {way}")


def found_features(
    source: str,
    columns: Mapping[str, ArrayColumns],
    ids: Sequence[str],
    *,
    is_named: bool,
    files: Sequence[str] = (),
) -> dict[str, FoundFeature]:
    """Return all features of a source, in the order of `ids`; `files` have names for messages.

    Raises what `ArrayColumns.found` does; and `AdoptionError` where names look like several
    features of the same utterances, unless `is_named`: a pattern says what they are.
    """
    try:
        found = {name: each.found(ids, files=files) for name, each in sorted(columns.items())}
    except AdoptionError:
        if not is_named:
            refuse_features(source, ids, None)
        raise
    if not is_named and found:
        refuse_features(source, ids, next(iter(found.values())).rows)
    return found


def _is_within(order: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether some axes stand in this order among all of them."""
    return tuple(axis for axis in axes if axis in order) == order


def _ragged(old: Ints, new: Ints, order: Ints) -> Ints:
    """Return the numbers of the extents of arrays, taken in another order."""
    shift = old[:-1][order] - new[:-1]
    return np.arange(new[-1]) + np.repeat(shift, np.diff(new))


def _raw_window(placed: PlacedArray, window: tuple[int, int]) -> tuple[PlacedArray, int]:
    frame = placed.shape[1:]
    row_bytes = storage_dtype(placed.dtype).itemsize * math.prod(frame)
    begin, end = (row * row_bytes for row in window)
    extents: list[tuple[int, int]] = []
    files: list[int] = []
    for number, (offset, nbytes) in enumerate(placed.extents):
        first, last = max(begin, 0), min(end, nbytes)
        if first < last:
            extents.append((offset + first, last - first))
            files += placed.files[number : number + 1]
        begin, end = begin - nbytes, end - nbytes
    shape = window[1] - window[0], *frame
    return placed._replace(shape=shape, extents=extents, files=files), 0


def _blocks(placed: PlacedArray, window: tuple[int, int]) -> tuple[PlacedArray, int]:
    start, stop = window
    size = placed.block_rows or placed.shape[0]
    some = slice(start // size, -(-stop // size)) if start < stop else slice(0, 0)
    array = placed._replace(
        shape=(stop - start, *placed.shape[1:]),
        extents=placed.extents[some],
        files=placed.files[some],
        block_rows=size,
    )
    return array, start % size if start < stop else 0


def _described(codec: str, options: Mapping[str, object]) -> str:
    if codec == RAW:
        return "without a codec"
    text = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"with {codec}" + (f" ({text})" if text else "")

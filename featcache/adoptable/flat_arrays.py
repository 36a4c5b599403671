"""Arrays that hold all utterances, and the arrays beside them that say how to cut them.

Beside the arrays, which may be those of several features, lies one integer array that is called
`offsets` or `lengths` (or as `OFFSETS` and `LENGTHS` have it), or both, and maybe one of ids.

- Frames one after the other: offsets are those of all utterances and the end, or without the end,
  or the ends alone; which of these is told by their first and last number and how many there are.
- Padded, (utterances, frames, ...): as many lengths as utterances, and the longest fills it; with
  `time_axis=0`, or another one of each utterance, it need not.
- Ids alone, without offsets or lengths: each utterance is a row, such as an embedding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.adoptable import CONVERT, TimeAxis, frames_first
from featcache.errors import AdoptionError
from featcache.interface import Array, Ints

OFFSETS = frozenset({"offsets", "offset", "starts", "indptr"})
LENGTHS = frozenset({"lengths", "length", "lens", "len", "num_frames"})
IDS = frozenset({"ids", "id", "keys", "utt_ids", "utts", "names"})
OF_ROWS = IDS - {"id"}  # beside one array an utterance there may be its "id"
MOST_ROWS = 8  # arrays whose rows are utterances, where ids alone say so


class FlatNames(NamedTuple):
    """Arrays of a source by what they are, told by their names."""

    frames: Sequence[str]
    offsets: str | None
    lengths: str | None
    ids: str | None


class Cut(NamedTuple):
    """An utterance: a row of an array, or all of it; and frames of that, or all of them."""

    id: str
    row: int | None
    window: tuple[int, int] | None
    time_axis: TimeAxis  # before the frames are put first

    @property
    def rows(self) -> slice:
        """The rows of the first axis that hold it."""
        begin, end = (self.window or (0, 0)) if self.row is None else (self.row, self.row + 1)
        return slice(begin, end)

    @property
    def turned_axis(self) -> TimeAxis:
        """The axis of the frames, once it is put first."""
        return 0 if isinstance(self.time_axis, int) else self.time_axis

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return its shape, the frames first, by that of the array; raises `AdoptionError`."""
        shape = whole if self.row is None else whole[1:]
        shape = tuple(shape[axis] for axis in frames_first(shape, self.time_axis))
        return shape if self.window is None else (self.window[1] - self.window[0], *shape[1:])

    def taken(self, rows: Array) -> Array:
        """Return it, the frames first, by its `rows`."""
        if self.row is None:
            return rows
        found: Array = rows[0].transpose(frames_first(rows.shape[1:], self.time_axis))
        return found if self.window is None else found[slice(*self.window)]


class CutArrays(NamedTuple):
    """Utterances of arrays that hold all of them."""

    ids: Sequence[str]
    begin: Ints
    end: Ints
    in_rows: bool  # each is a row, of which these are the frames
    time_axis: TimeAxis  # of each utterance

    def each(self) -> Iterator[Cut]:
        """Go through the utterances."""
        for row, id in enumerate(self.ids):
            window = (int(self.begin[row]), int(self.end[row])) if len(self.begin) else None
            yield Cut(id, row if self.in_rows else None, window, self.time_axis)


def flat_names(names: Iterable[str]) -> FlatNames | None:
    """Return which arrays are which; None where none is called like offsets, lengths or ids.

    >>> flat_names(["feats", "lengths"])
    FlatNames(frames=['feats'], offsets=None, lengths='lengths', ids=None)
    """
    names = [*names]
    found = {
        what: [name for name in names if name.lower() in known]
        for what, known in (("offsets", OFFSETS), ("lengths", LENGTHS), ("ids", IDS))
    }
    columns = {name for each in found.values() for name in each}
    frames = [name for name in names if name not in columns]
    by_rows = len(frames) <= MOST_ROWS and any(name.lower() in OF_ROWS for name in found["ids"])
    if not frames or not (found["offsets"] or found["lengths"] or by_rows):
        return None
    if any(len(each) > 1 for each in found.values()):
        return None
    return FlatNames(frames, *(next(iter(each), None) for each in found.values()))


def cuts(
    source: str,
    shapes: Mapping[str, tuple[int, ...]],
    names: FlatNames,
    read: Callable[[str], NDArray[np.generic]],
    read_ids: Callable[[str], Sequence[str]],
    time_axis: TimeAxis = "auto",
) -> CutArrays:
    """Return the frames of each utterance.

    Args:
        source: its name, for messages.
        shapes: of each array of frames.
        names: of the arrays.
        read: returns the numbers of an array.
        read_ids: returns ids; without any they are numbers from 00000000 on.
        time_axis: of each utterance, where arrays are padded.

    Raises `AdoptionError` where these are not the cuts of these arrays.
    """
    total = _common_rows(source, shapes)
    ids = None if names.ids is None else read_ids(names.ids)
    lengths = None if names.lengths is None else _whole(source, names.lengths, read)
    none = np.zeros(0, np.int64)
    if names.offsets is None and lengths is None:
        if ids is not None and len(ids) == total:
            return CutArrays(ids, none, none, True, time_axis)
        raise _not_cut(source, names, shapes, lengths)
    if names.offsets is None and lengths is not None and _fills(lengths, shapes, time_axis):
        if int(lengths.sum()) == total or len(ids or lengths) != total:
            raise _not_cut(source, names, shapes, lengths)
        begin = np.zeros(total, np.int64)
        axis = time_axis if isinstance(time_axis, int) else 0
        return CutArrays(_numbered(ids, total), begin, lengths, True, axis)
    counts = [len(each) for each in (ids, lengths) if each is not None]
    utterances = counts[0] if counts else None
    if names.offsets is not None:
        offsets = _whole(source, names.offsets, read)
    else:
        offsets = np.append(0, np.cumsum(lengths if lengths is not None else []))
    begin, end = _of_offsets(offsets, total, utterances, lengths)
    fits = len(begin) == len(end) > 0 and utterances in (None, len(begin))
    fits = fits and (lengths is None or np.array_equal(end - begin, lengths))
    fits = fits and bool((begin <= end).all()) and int(begin[0]) == 0 and int(end[-1]) == total
    if not fits or not np.array_equal(begin[1:], end[:-1]):
        raise _not_cut(source, names, shapes, lengths)
    return CutArrays(_numbered(ids, len(begin)), begin, end, False, 0)


def _common_rows(source: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    for name, shape in shapes.items():
        if not shape:
            raise AdoptionError(f"{source!r}: {name!r} is one number, no frames; {CONVERT}")
    total = next(iter(shapes.values()))[0]
    for name, (count, *_) in shapes.items():
        if count != total:
            raise AdoptionError(
                f"{source!r}: arrays {next(iter(shapes))!r} and {name!r} have {total:,} and "
                f"{count:,} frames, which one cut into utterances does not fit; {CONVERT}"
            )
    return total


def _fills(lengths: Ints, shapes: Mapping[str, tuple[int, ...]], time_axis: TimeAxis) -> bool:
    """Whether there is a length for each row of all arrays, and the longest fills its row."""
    sizes = set()
    if time_axis is None:  # there are no frames, it was said
        return False
    for count, *shape in shapes.values():
        if not shape or len(lengths) != count or not count or lengths.min() < 0:
            return False
        try:
            sizes.add(shape[frames_first(tuple(shape), time_axis)[0]])
        except AdoptionError:
            return False
    longest = int(lengths.max())
    return len(sizes) == 1 and (
        longest <= sizes.pop() if isinstance(time_axis, int) else longest in sizes
    )


def _not_cut(
    source: str, names: FlatNames, shapes: Mapping[str, tuple[int, ...]], lengths: Ints | None
) -> AdoptionError:
    columns = ", ".join(repr(name) for name in names[1:] if name is not None)
    shape = shapes[names.frames[0]]
    padded = ""
    if lengths is not None and _fills(lengths, shapes, 0) and not _fills(lengths, shapes, "auto"):
        padded = "; if each row is an utterance, padded to more than the longest, give time_axis=0"
    return AdoptionError(
        f"{source!r}: {columns} do not cut the {shape[0]:,} frames of {names.frames[0]!r} into "
        f"utterances one after the other, nor its rows of shape {shape[1:]}{padded}; {CONVERT}"
    )


def _numbered(ids: Sequence[str] | None, count: int) -> Sequence[str]:
    return [f"{number:08d}" for number in range(count)] if ids is None else ids


def ids_in(source: str, name: str, found: NDArray[np.generic]) -> list[str]:
    """Return the ids that an array of text, or of whole numbers, holds.

    Raises `AdoptionError` for any other array.
    """
    kind: str = found.dtype.kind
    if found.ndim == 1 and kind == "U" and found.size and found.dtype.itemsize:
        codes = np.ascontiguousarray(found, found.dtype.newbyteorder("=")).view(np.uint32)
        if codes.max() > sys.maxunicode:  # which str would hold all the same
            kind = ""
    values = found.tolist() if found.ndim == 1 and kind in (*"USTOiu",) else [None]
    try:
        ids = [each.decode() if isinstance(each, bytes) else each for each in values]
    except UnicodeDecodeError:
        ids = [None]
    if not all(isinstance(each, str | int) for each in ids):
        raise AdoptionError(
            f"{source!r}: {name!r} is {found.dtype} of shape {found.shape}, no list of ids; "
            f"{CONVERT}"
        )
    return [str(each) for each in ids]


def _of_offsets(
    offsets: Ints, total: int, count: int | None, lengths: Ints | None
) -> tuple[Ints, Ints]:
    """Return begins and ends by offsets with the end, or of begins alone, or of ends alone."""
    has_end = len(offsets) > 0 and int(offsets[-1]) == total
    has_begin = len(offsets) > 0 and int(offsets[0]) == 0
    if count is None:
        # begins alone cannot end at the end, unless the last utterance is empty
        count = len(offsets) - 1 if has_begin and has_end else len(offsets)
    if len(offsets) == count + 1:
        return offsets[:-1], offsets[1:]
    if has_begin and has_end and lengths is None:  # begins, or ends: one utterance is empty
        return offsets, offsets[:0]
    of_begins, of_ends = np.append(offsets, total), np.append(0, offsets)
    if not has_begin or (lengths is not None and np.array_equal(np.diff(of_ends), lengths)):
        return of_ends[:-1], of_ends[1:]
    return of_begins[:-1], of_begins[1:]


def _whole(source: str, name: str, read: Callable[[str], NDArray[np.generic]]) -> Ints:
    found = read(name)
    if found.ndim != 1 or found.dtype.kind not in "iu" or (found.size and found.max() >= 1 << 62):
        raise AdoptionError(
            f"{source!r}: {name!r} is {found.dtype} of shape {found.shape}, no list of whole "
            f"numbers; {CONVERT}"
        )
    return found.astype(np.int64)

"""Frames of all utterances one after the other in one array, and the arrays that say how to cut it.

Beside the frames, which may be those of several features, lies one integer array that is called
`offsets` or `lengths` (or as `OFFSETS` and `LENGTHS` have it), or both, and maybe one of ids.
Offsets are those of all utterances and the end, or without the end, or the ends alone: which of
these is told by their first and last number and by how many there are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.adoptable import CONVERT
from featcache.errors import AdoptionError
from featcache.interface import Ints

OFFSETS = frozenset({"offsets", "offset", "starts", "indptr"})
LENGTHS = frozenset({"lengths", "length", "lens", "len", "num_frames"})
IDS = frozenset({"ids", "id", "keys", "utt_ids", "utts", "names"})


class FlatNames(NamedTuple):
    """Arrays of a source by what they are, told by their names."""

    frames: Sequence[str]
    offsets: str | None
    lengths: str | None
    ids: str | None


class CutArrays(NamedTuple):
    """Utterances of flat arrays: the frames of each."""

    ids: Sequence[str]
    begin: Ints
    end: Ints


def flat_names(names: Iterable[str]) -> FlatNames | None:
    """Return which arrays are which; None where none is called like offsets or lengths.

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
    if not frames or not (found["offsets"] or found["lengths"]):
        return None
    if any(len(each) > 1 for each in found.values()):
        return None
    return FlatNames(frames, *(next(iter(each), None) for each in found.values()))


def cuts(
    source: str,
    rows: Mapping[str, int],
    names: FlatNames,
    read: Callable[[str], NDArray[np.generic]],
    read_ids: Callable[[str], Sequence[str]],
) -> CutArrays:
    """Return the frames of each utterance.

    Args:
        source: its name, for messages.
        rows: frames of each array of frames.
        names: of the arrays.
        read: returns the numbers of an array.
        read_ids: returns ids; without any they are numbers from 00000000 on.

    Raises `AdoptionError` where these are not the cuts of these arrays.
    """
    total = next(iter(rows.values()))
    for name, count in rows.items():
        if count != total:
            raise AdoptionError(
                f"{source!r}: arrays {next(iter(rows))!r} and {name!r} have {total:,} and "
                f"{count:,} frames, which one cut into utterances does not fit; {CONVERT}"
            )
    ids = None if names.ids is None else read_ids(names.ids)
    lengths = None if names.lengths is None else _whole(source, names.lengths, read)
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
        columns = ", ".join(repr(name) for name in names[1:] if name is not None)
        raise AdoptionError(
            f"{source!r}: {columns} do not cut the {total:,} frames of {names.frames[0]!r} into "
            f"utterances one after the other; {CONVERT}"
        )
    known = [f"{number:08d}" for number in range(len(begin))] if ids is None else ids
    return CutArrays(known, begin, end)


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

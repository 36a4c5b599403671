"""Kaldi's archives: an scp file, a data directory with `feats.scp`, or `.ark` files by themselves.

`ark_objects` has the layout of an archive. Matrices are features with frames; so are vectors,
unless all are equally long and of floats, as x-vectors are. The tables `text`, `utt2spk`, `utt2dur`
and `utt2lang` beside an scp are the annotations text, speaker, duration and language; the file
`frame_shift` has the seconds of a frame.
"""

from __future__ import annotations

import logging
import math
import re
from array import array
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from featcache.adoptable import (
    CONVERT,
    ByteSource,
    Found,
    FoundFeature,
    Options,
    Place,
    Value,
)
from featcache.adoptable.placed_arrays import ArrayColumns, PlacedArray
from featcache.adoption.ark import HEAD_BYTES, ID_BYTES, ArkObject, ark_object, check_end
from featcache.adoption.place import Window, is_pattern
from featcache.adoption.scp import (
    Scp,
    first_line,
    is_there,
    read_annotations,
    read_scp,
    read_table,
    seconds_of,
)
from featcache.errors import AdoptionError
from featcache.interface import Ints

LOOK_AT = 100  # files of a folder, to see whether archives are in it
SCP = "feats.scp"
# Kaldi takes a range that ends up to two rows behind the matrix, as durations are rounded
BEYOND = 3
OF_KALDI = {"numbers": "kaldi"}  # of the codec
_log = logging.getLogger("featcache")


class KaldiKind:
    """Archives of Kaldi."""

    name = "kaldi"

    def recognises(self, place: Place, what: str) -> bool:
        """Whether this is an scp of archives, or archives."""
        path = what or _scp_or_ark(place)
        if path.endswith(".scp"):
            line = first_line(place, path).split()
            return len(line) > 1 and not line[-1].endswith(b".npy")
        return _is_ark(path)

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Find all objects of the archives."""
        path = what or _scp_or_ark(place)
        if path.endswith(".scp"):
            scp = _joined(place, [path] if what else _scps(place, path))
            objects = objects_of(place, scp)
            if not what:
                _tell_others(place)
            annotations = read_annotations(place, path, scp.ids)
        else:
            archives = [what] if what else [each for each in place.files() if _is_ark(each)]
            if not archives:
                raise AdoptionError(f"there is no {SCP} nor .ark file in {place.name!r}")
            if not what and not is_pattern(place.name):
                _refuse_several(place, archives)
            scp, objects = _walked(place, archives)
            annotations = {}
        feature = _feature(place, scp, objects, options, _frame_s(place, path))
        return _found(scp, options.feature, feature, annotations)


KIND = KaldiKind()


def objects_of(place: Place, scp: Scp) -> list[ArkObject]:
    """Return the object of each line; several lines may have ranges of one."""
    objects: dict[int, ArkObject] = {}
    order = np.lexsort((scp.offset, scp.file))
    ends = np.searchsorted(scp.file[order], np.arange(len(scp.files)), "right").tolist()
    begin = 0
    for path, end in zip(scp.files, ends, strict=True):
        with place.open(path) as source:
            window, last = Window(source), -1
            for row in order[begin:end].tolist():
                offset = int(scp.offset[row])
                if offset != last:
                    found = object_at(window, offset, scp.ids[row])
                objects[row], last = found, offset
        begin = end
    return [objects[row] for row in range(len(scp.ids))]


def object_at(source: ByteSource, offset: int, id: str) -> ArkObject:
    """Return the object of an id, by its head; raises `AdoptionError` if it is no matrix."""
    try:
        if offset > source.size:
            raise ValueError("the file ends before it")
        found = ark_object(source.read(offset, min(HEAD_BYTES, source.size - offset)))
        end = offset + found.nbytes
        if end > source.size:
            raise ValueError(f"the file ends before its {found.nbytes} bytes do")
        check_end(source.read(end, min(ID_BYTES, source.size - end)))
    except ValueError as error:
        if isinstance(error, AdoptionError):
            raise
        raise AdoptionError(
            f"utterance {id!r} at byte {offset} of {source.path!r} is not adopted: {error}; "
            f"{CONVERT}"
        ) from None
    return found


def _walked(place: Place, archives: list[str]) -> tuple[Scp, list[ArkObject]]:
    """Go through archives from object to object."""
    ids: list[str] = []
    file, offset, found = array("q"), array("q"), list[ArkObject]()
    for number, path in enumerate(archives):
        with place.open(path) as source:
            window, at = Window(source), 0
            while at < source.size:
                id, begin = _id_at(window, at)
                found.append(object_at(window, begin, id))
                ids.append(id)
                file.append(number)
                offset.append(begin)
                at = begin + found[-1].nbytes
    return Scp(ids, archives, np.array(file, np.int64), np.array(offset, np.int64)), found


def _id_at(source: ByteSource, at: int) -> tuple[str, int]:
    id, space, _ = source.read(at, min(ID_BYTES, source.size - at)).partition(b" ")
    try:
        if not space or not id or b"\0" in id:
            raise ValueError("there is no id")
        return id.decode(), at + len(id) + 1
    except ValueError as error:
        raise AdoptionError(f"byte {at} of {source.path!r}: {error}: it is damaged") from None


def _range(within: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the first row of a range of Kaldi's, `<first>:<last>[,<first>:<last>]`, and its end.

    Raises `ValueError` for what is no range of the rows.
    """
    rows, _, columns = within.partition(",")
    if len(shape) != 2:
        raise ValueError(f"it has no rows; {CONVERT}")
    if _bounds(columns, shape[1]) != (0, shape[1]):
        raise ValueError(f"it leaves columns out; {CONVERT}")
    begin, end = _bounds(rows, shape[0])
    if not 0 <= begin < end < shape[0] + BEYOND or begin >= shape[0]:
        raise ValueError(f"it has {shape[0]} rows")
    return begin, min(end, shape[0])


def _bounds(text: str, length: int) -> tuple[int, int]:
    if text in ("", ":"):
        return 0, length
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise ValueError("that is no range")
    return int(first), int(last) + 1


def _feature(
    place: Place, scp: Scp, objects: list[ArkObject], options: Options, frame_s: float | None
) -> FoundFeature:
    if {each.dtype for each in objects} == {"int32"} and {each.shape for each in objects} == {(0,)}:
        raise AdoptionError(
            f"all utterances, such as {scp.ids[0]!r}, are empty vectors of integers, or zeros: "
            f"both have the same bytes; {CONVERT}"
        )
    # empty matrices, which Kaldi writes without columns, have the columns of the others
    empty = (0, *next((each.shape for each in objects if each.shape[0]), (0, 0))[1:])
    is_raw = all(each.is_raw for each in objects)
    columns = ArrayColumns(options.feature, options.time_axis, CONVERT)
    lines = zip(scp.ids, scp.file.tolist(), scp.offset.tolist(), objects, strict=True)
    for row, (id, file, offset, each) in enumerate(lines):
        shape = empty if each.shape == (0, 0) else each.shape
        placed = placed_object(each, offset, shape, is_raw)
        try:
            window = _range(scp.ranges[row], shape) if row in scp.ranges else None
        except ValueError as error:
            raise AdoptionError(
                f"{place.name!r}: utterance {id!r} is [{scp.ranges[row]}] of an array: {error}"
            ) from None
        columns.add(id, file, placed, window)
    return columns.found(scp.ids, frame_s, scp.files)


def placed_object(
    found: ArkObject, offset: int, shape: tuple[int, ...], is_raw: bool
) -> PlacedArray:
    """Return where an object lies that begins at `offset`, its numbers alone where they are raw."""
    begin = found.begin if is_raw else 0
    extents = ((offset + begin, found.nbytes - begin),) if math.prod(shape) else ()
    if is_raw:
        return PlacedArray(found.dtype, shape, extents)
    return PlacedArray(found.dtype, shape, extents, "kaldi", OF_KALDI)


def _found(
    scp: Scp, name: str, feature: FoundFeature, annotations: dict[str, list[Value]]
) -> Found:
    """Leave out the files that no extent lies in."""
    used: Ints = np.unique(feature.container)
    numbers: NDArray[np.int32] = np.searchsorted(used, feature.container).astype(np.int32)
    containers = [scp.files[number] for number in used.tolist()]
    return Found(containers, scp.ids, {name: replace(feature, container=numbers)}, annotations)


def _tell_others(place: Place) -> None:
    """Warn of scps of archives in a folder that are passed over, such as that of the pitch."""
    others = [name for name in place.names("") if name.endswith(".scp") and name != SCP]
    others = [name for name in others if b".ark:" in first_line(place, name)]
    if others:
        _log.warning(
            "%r: %s alone is adopted, not %s; adopt these by their names into the same cache, each "
            "with a feature= of its own",
            place.name, SCP, ", ".join(map(repr, others)),
        )  # fmt: skip


def _scps(place: Place, first: str) -> list[str]:
    """Return the scps that a pattern names, or the one of a folder."""
    named = [path for path in place.files() if path.endswith(".scp")]
    return named if is_pattern(place.name) else [first]


def _joined(place: Place, paths: list[str]) -> Scp:
    """Return the lines of several scps as those of one."""
    joined, *others = (read_scp(place, path) for path in paths)
    for each in others:
        files = joined.files + [path for path in each.files if path not in joined.files]
        numbers = np.array([files.index(path) for path in each.files], np.int64)
        begin = len(joined.ids)
        joined = Scp(
            joined.ids + each.ids,
            files,
            np.append(joined.file, numbers[each.file]),
            np.append(joined.offset, each.offset),
            joined.ranges | {begin + row: within for row, within in each.ranges.items()},
        )
    return joined


def _refuse_several(place: Place, archives: list[str]) -> None:
    """Raise `AdoptionError` for archives whose names differ by more than a number."""
    names = {re.sub(r"\d+", "#", path): path for path in archives}
    if len(names) > 1:
        told = ", ".join(map(repr, [*names.values()][:4]))
        raise AdoptionError(
            f"{place.name!r} holds archives such as {told}, which may be several features, or "
            f"splits; name one, its scp or those of one by a pattern, as {place.name + '/*.ark'!r}"
        )


def _scp_or_ark(place: Place) -> str:
    """Return the scp of a folder, or an archive where it has none; "" where there is neither.

    Of a pattern the first one, be it an scp or an archive.
    """
    if is_pattern(place.name):
        named = (path for path in place.files() if path.endswith((".scp", ".ark")))
        return next(named, "")
    if is_there(place, SCP):
        return SCP
    return next(filter(_is_ark, islice(place.files(), LOOK_AT)), "")


def _is_ark(path: str) -> bool:
    return path.endswith(".ark")


def _frame_s(place: Place, path: str) -> float | None:
    folder = path.rpartition("/")[0]
    table = f"{folder}/frame_shift" if folder else "frame_shift"
    said = next(iter(read_table(place, table)), None)
    if said is None:
        return None
    seconds = seconds_of(said.encode(), table)
    if seconds <= 0:
        raise AdoptionError(f"{place.name!r}: {table!r} gives {said!r}, but frames take time")
    return seconds

"""Kaldi's archives: an scp file, a data directory with `feats.scp`, or `.ark` files by themselves.

`ark_objects` has the layout of an archive. Matrices are features with frames; so are vectors,
unless all are equally long and of floats, as x-vectors are. The tables `text`, `utt2spk`, `utt2dur`
and `utt2lang` beside an scp are the annotations text, speaker, duration and language; the file
`frame_shift` has the seconds of a frame.
"""

from __future__ import annotations

import logging
import math
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
    Stored,
    Value,
    one_piece,
    stored_as,
)
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
            scp = read_scp(place, path)
            objects = _objects_of(place, scp)
            if not what:
                _tell_others(place)
            annotations = read_annotations(place, path, scp.ids)
        else:
            archives = [what] if what else [each for each in place.files() if _is_ark(each)]
            if not archives:
                raise AdoptionError(f"there is no {SCP} nor .ark file in {place.name!r}")
            scp, objects = _walked(place, archives)
            annotations = {}
        feature = _feature(scp, objects, options, _frame_s(place, path))
        return _found(scp, options.feature, feature, annotations)


KIND = KaldiKind()


class _Objects:
    """Columns of the objects of archives, by row; shapes and dtypes are shared objects."""

    def __init__(self, count: int) -> None:
        self.begin, self.nbytes = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.skip = np.zeros(count, np.int64)
        self.block_rows = np.zeros(count, np.int64)
        self.shapes: list[tuple[int, ...]] = [()] * count
        self.dtypes: list[str] = [""] * count
        self.is_raw = True
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def put(self, row: int, found: ArkObject) -> None:
        self.begin[row], self.nbytes[row] = found.begin, found.nbytes
        self.block_rows[row] = found.shape[0]
        self.shapes[row] = self._shapes.setdefault(found.shape, found.shape)
        self.dtypes[row] = found.dtype
        self.is_raw &= found.is_raw

    def cut(self, row: int, within: str) -> None:
        """Leave the rows of a range, `[first:last]` in an scp."""
        begin, end = _range(within, self.shapes[row])
        self.skip[row], self.shapes[row] = begin, (end - begin, *self.shapes[row][1:])

    def name_columns(self) -> None:
        """Give empty matrices, which Kaldi writes without columns, the columns of the others."""
        if (0, 0) in self._shapes:
            shape = next((shape for shape in self.shapes if shape[0]), (0, 0))
            empty = (0, *shape[1:])
            self.shapes = [empty if shape == (0, 0) else shape for shape in self.shapes]


def _objects_of(place: Place, scp: Scp) -> _Objects:
    objects = _Objects(len(scp.ids))
    order = np.lexsort((scp.offset, scp.file))
    ends = np.searchsorted(scp.file[order], np.arange(len(scp.files)), "right").tolist()
    begin = 0
    for path, end in zip(scp.files, ends, strict=True):
        with place.open(path) as source:
            window, last = Window(source), -1
            for row in order[begin:end].tolist():
                offset = int(scp.offset[row])
                if offset != last:  # an object may have several ranges
                    found = _object_at(window, offset, scp.ids[row])
                objects.put(row, found)
                last = offset
        begin = end
    for row, within in scp.ranges.items():
        try:
            objects.cut(row, within)
        except ValueError as error:
            raise AdoptionError(
                f"{place.name!r}: utterance {scp.ids[row]!r} is [{within}] of an array: {error}"
            ) from None
    return objects


def _object_at(source: ByteSource, offset: int, id: str) -> ArkObject:
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


def _walked(place: Place, archives: list[str]) -> tuple[Scp, _Objects]:
    """Go through archives from object to object."""
    ids: list[str] = []
    file, offset, found = array("q"), array("q"), []
    for number, path in enumerate(archives):
        with place.open(path) as source:
            window, at = Window(source), 0
            while at < source.size:
                id, begin = _id_at(window, at)
                found.append(_object_at(window, begin, id))
                ids.append(id)
                file.append(number)
                offset.append(begin)
                at = begin + found[-1].nbytes
    objects = _Objects(len(ids))
    for row, each in enumerate(found):
        objects.put(row, each)
    scp = Scp(ids, archives, np.array(file, np.int64), np.array(offset, np.int64))
    return scp, objects


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


def _feature(scp: Scp, objects: _Objects, options: Options, frame_s: float | None) -> FoundFeature:
    if {*objects.dtypes} == {"int32"} and {*objects.shapes} == {(0,)}:
        raise AdoptionError(
            f"all utterances, such as {scp.ids[0]!r}, are empty vectors of integers, or zeros: "
            f"both have the same bytes; {CONVERT}"
        )
    objects.name_columns()
    stored = stored_as(options.feature, scp.ids, objects.shapes, objects.dtypes, options.time_axis)
    if frame_s is not None and not stored.has_frames:
        frame_s = None
    if not objects.is_raw:
        return _encoded(scp, objects, stored, frame_s)
    row_bytes = np.dtype(stored.dtype).itemsize * math.prod(stored.dims)
    offset = scp.offset + objects.begin + objects.skip * row_bytes
    return replace(one_piece(stored, scp.file, offset), frame_s=frame_s)


def _encoded(scp: Scp, objects: _Objects, stored: Stored, frame_s: float | None) -> FoundFeature:
    has_bytes = stored.rows * math.prod(stored.dims) > 0
    cut = objects.skip.any() or bool(scp.ranges)
    return FoundFeature(
        dtype=stored.dtype,
        dims=stored.dims,
        has_frames=stored.has_frames,
        rows=stored.rows,
        first=np.append(0, np.cumsum(has_bytes)).astype(np.int64),
        container=scp.file[has_bytes].astype(np.int32),
        offset=scp.offset[has_bytes],
        nbytes=objects.nbytes[has_bytes],
        codec="kaldi",
        block_rows=objects.block_rows if cut else None,
        skip=objects.skip if cut else None,
        frame_s=frame_s,
    )


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


def _scp_or_ark(place: Place) -> str:
    """Return the scp of a folder, or an archive where it has none; "" where there is neither."""
    if not is_pattern(place.name) and is_there(place, SCP):
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

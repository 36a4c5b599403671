"""lhotse's manifests and the stores that they name, adopted where they lie."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import NamedTuple

from featcache.adoptable import CONVERT, MOST_AXES, RAW, ByteSource, Found, Options, Place
from featcache.adoptable.placed_arrays import (
    NO_OPTIONS,
    ArrayColumns,
    NamedArrays,
    NamesArrays,
    PlacedArray,
)
from featcache.adoption.kaldi import object_at, objects_of, placed_object
from featcache.adoption.listed_entries import SUFFIXES, entries, first_entry
from featcache.adoption.npy_files import npy_header_of, read_npy_header
from featcache.adoption.place import GatheredValues, Window
from featcache.adoption.scp import read_scp
from featcache.adoption.webdataset import TarMember, members
from featcache.errors import AdoptionError, ConfigError, describe
from featcache.registry import get_kind

# Lines of lhotse manifests: where the arrays of each cut are stored, and what is said of it.
#
# Understood are cuts (`MonoCut`, `MultiCut`) and features, one JSON object a line, as in a
# `.jsonl` file, or a list of all of them, as in a `.json` or `.yaml` file; each maybe with gzip,
# `.gz`. lhotse's own rules turn seconds to frames, so that a cut has the
# frames that `cut.load_features()` gives; but where that repeats the last frame, since one is
# stored less than the cut should have, the frames are those that are stored.

CUTS = ("MonoCut", "MultiCut")
OTHER_CUTS = ("MixedCut", "PaddingCut")
BEFORE_START = 1e-3  # seconds that a cut may begin before its features
FRAME_DIGITS = 8
SPEAKERS = ("speaker", "language", "gender")
Fields = Mapping[str, object]


class StoredArray(NamedTuple):
    """An array as a manifest describes it."""

    storage: str  # lhotse's name of a reader
    path: str
    key: str
    shape: tuple[int, ...]
    has_time: bool
    frame_s: float | None = None
    first: int = 0  # of the frames that count
    most: int | None = None  # of the frames from there on; None: all


class Item(NamedTuple):
    """A line of a manifest."""

    id: str
    features: StoredArray | None
    others: Mapping[str, StoredArray]  # by name, from `custom`
    annotations: Mapping[str, object]


def manifest_items(source: ByteSource) -> Iterator[Item]:
    """Yield what each entry of a manifest says; raises `AdoptionError` for one that is none."""
    for where, fields in entries(source):
        try:
            if not isinstance(fields, dict):
                raise TypeError(f"it is no object but {fields!r:.60}")
            yield _features(fields) if "storage_type" in fields else _cut(fields)
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
            if isinstance(error, AdoptionError):
                raise AdoptionError(f"{where}: {error}") from None
            raise AdoptionError(
                f"{where} is no cut nor features of lhotse: {describe(error)}"
            ) from error


def is_manifest(source: ByteSource) -> bool:
    """Whether the first entry of a file is a cut, or features."""
    try:
        fields = first_entry(source)
    except (AdoptionError, ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and (
        {"storage_type", "num_frames"} <= fields.keys()
        or fields.get("type") in (*CUTS, *OTHER_CUTS)
    )


def _features(fields: Fields) -> Item:
    id = fields.get("recording_id")
    if not isinstance(id, str):
        raise AdoptionError("these features name no recording; adopt the manifest of the cuts")
    return Item(id, _whole_features(fields), {}, {"duration": float(_seconds(fields, "duration"))})


def _cut(fields: Fields) -> Item:
    kind, id = fields.get("type"), fields.get("id")
    if kind in OTHER_CUTS:
        raise AdoptionError(
            f"cut {id!r} is a {kind}, whose features are computed when they are loaded; save the "
            "cuts without it, or compute its features into storage of their own"
        )
    if kind not in CUTS:
        raise TypeError(f"its type is {kind!r}")
    start, duration = _seconds(fields, "start"), _seconds(fields, "duration")
    features, others = None, {}
    if fields.get("features"):
        features = _features_of_cut(_object(fields, "features"), start, duration)
    annotations: dict[str, object] = {"duration": float(duration), **_supervised(fields)}
    recording = _recording(fields)
    if recording not in (None, id):
        annotations["recording"] = recording
    custom = _object(fields, "custom") if fields.get("custom") else {}
    for name, value in custom.items():
        if isinstance(value, dict) and ("array" in value or "shape" in value):
            others[name] = _custom(name, value, start, duration)
        else:
            annotations.setdefault(name, value)
    return Item(_text(fields, "id"), features, others, annotations)


def _whole_features(fields: Fields) -> StoredArray:
    return StoredArray(
        *_stored(fields),
        shape=(_count(fields["num_frames"]), _count(fields["num_features"])),
        has_time=True,
        frame_s=_seconds(fields, "frame_shift"),
    )


def _features_of_cut(fields: Fields, start: float, duration: float) -> StoredArray:
    begins, frame_s = _seconds(fields, "start"), _seconds(fields, "frame_shift")
    if start < begins - BEFORE_START:
        raise AdoptionError(f"it begins at {start} s, before its features, at {begins} s")
    hz = _count(fields["sampling_rate"])
    first = 0 if math.isclose(start, begins) else _feature_frames(start - begins, frame_s, hz)
    return _whole_features(fields)._replace(
        first=max(first, 0), most=_feature_frames(duration, frame_s, hz)
    )


def _custom(name: str, fields: Fields, start: float, duration: float) -> StoredArray:
    if "array" not in fields:
        return _array(fields)
    stored, begins = _array(_object(fields, "array")), _seconds(fields, "start")
    if fields["temporal_dim"] != 0:
        raise AdoptionError(
            f"array {name!r} has its frames along axis {fields['temporal_dim']}, not 0"
        )
    frame_s = _seconds(fields, "frame_shift")
    first = 0 if math.isclose(start, begins) else _array_frames(start - begins, frame_s)
    return stored._replace(
        has_time=True, frame_s=frame_s, first=max(first, 0), most=_array_frames(duration, frame_s)
    )


def _array(fields: Fields) -> StoredArray:
    shape = fields["shape"]
    if not isinstance(shape, list) or len(shape) > MOST_AXES:
        raise TypeError(f"the shape of an array is {shape!r:.60}")
    return StoredArray(
        *_stored(fields),
        shape=tuple(_count(length) for length in shape),
        has_time=False,
    )


def _stored(fields: Fields) -> tuple[str, str, str]:
    return (
        _text(fields, "storage_type"),
        _text(fields, "storage_path"),
        _text(fields, "storage_key"),
    )


def _feature_frames(seconds: float, frame_s: float, hz: int) -> int:
    """Return frames as lhotse's `compute_num_frames` counts them."""
    hop = round(frame_s * hz)
    return (round(seconds * hz) + hop // 2) // hop


def _array_frames(seconds: float, frame_s: float) -> int:
    """Return frames as lhotse's `seconds_to_frames` counts them."""
    frames = Decimal(round(seconds / frame_s, ndigits=FRAME_DIGITS))
    return int(frames.quantize(Decimal(0), rounding=ROUND_HALF_UP))


def _supervised(fields: Fields) -> dict[str, str]:
    """Return the texts of a cut's supervisions in their order, and what all of them agree on."""
    segments = fields.get("supervisions") or []
    if not isinstance(segments, list) or not all(isinstance(segment, dict) for segment in segments):
        raise TypeError("its supervisions are no list of objects")
    found: dict[str, str] = {}
    texts = [
        segment["text"]
        for segment in sorted(segments, key=lambda segment: _seconds(segment, "start"))
        if isinstance(segment.get("text"), str)
    ]
    if texts:
        found["text"] = " ".join(texts)
    for name in SPEAKERS:
        said = {segment.get(name) for segment in segments}
        if len(said) == 1 and isinstance(value := said.pop(), str):
            found[name] = value
    return found


def _recording(fields: Fields) -> str | None:
    for name, key in (("recording", "id"), ("features", "recording_id")):
        about = fields.get(name)
        if isinstance(about, dict) and isinstance(about.get(key), str):
            return str(about[key])
    return None


def _object(fields: Fields, name: str) -> Fields:
    value = fields[name]
    if not isinstance(value, dict):
        raise TypeError(f"{name!r} is no object but {value!r:.60}")
    return value


def _text(fields: Fields, name: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"{name!r} is no text but {value!r:.60}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise TypeError(f"a number of frames, features or hertz is {value!r:.60}")
    return value


def _seconds(fields: Fields, name: str) -> float:
    value = fields[name]
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise TypeError(f"{name!r} is no number but {value!r:.60}")
    return value  # type: ignore[return-value]


# Where lhotse's storage types put arrays.
#
# ::
#
#     numpy_hdf5           an HDF5 file, a dataset an array
#     lilcom_hdf5          an HDF5 file, a dataset of one opaque value: the array, a lilcom block
#     chunked_lilcom_hdf5  an HDF5 file, a dataset of lilcom blocks, each of variable length
#     lilcom_chunky        lilcom blocks of 500 frames one after another; the key
#                          "offset,n0,n1,..." has the place of the first and the bytes of each
#     numpy_files          a folder of .npy files; the key is the path below it
#     lilcom_files         a folder of files, each one lilcom block
#     kaldiio              Kaldi's feats.scp, the key is the id in it; or a place in an archive
#     featcache            a cache, which needs no adopting
#     shar                 tar files of .npy files, or of lilcom blocks (.llc); the key is the id
#
# A relative path is one from the current directory, as for lhotse.

CHUNK_FRAMES = 500  # of lilcom_chunky
CHUNK_SIZE = "__LHOTSE_INTERNAL_CHUNK_SIZE__"  # dataset of chunked_lilcom_hdf5
MOST_CHUNK_FRAMES = 1 << 31
# numbers of a block, and of a block a byte: lilcom holds any number of constant ones in no byte
ANY_NUMBERS, MOST_NUMBERS_A_BYTE = 1 << 24, 4096
OPEN_FILES = 64
SHAR = "shar"
CACHE = "featcache"
LILCOM = ".llc"


class LhotseStorage:
    """The files that a manifest names, those of HDF5 open; close with `with`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._open: dict[str, NamedArrays] = {}
        # asked for of each array
        self._size = cache(self._read_size)
        self._chunk_frames = cache(self._read_chunk_frames)
        self._absolute = cache(lambda path: str(Path(path).absolute()))
        self._scps = cache(self._read_scp)
        self._members: dict[str, dict[str, TarMember]] = {}
        self._ways: dict[str, Callable[[StoredArray], tuple[str, PlacedArray]]] = {
            "numpy_hdf5": self._numpy_hdf5,
            "lilcom_hdf5": self._lilcom_hdf5,
            "chunked_lilcom_hdf5": self._chunked_lilcom_hdf5,
            "lilcom_chunky": self._lilcom_chunky,
            "numpy_files": self._numpy_files,
            "lilcom_files": self._lilcom_files,
            "kaldiio": self._kaldi,
            SHAR: self._shar,
        }

    def __enter__(self) -> LhotseStorage:
        return self

    def __exit__(self, *args: object) -> None:
        with ExitStack() as stack:
            for file in self._open.values():
                stack.callback(file.close)

    def place(self, stored: StoredArray) -> tuple[str, PlacedArray]:
        """Return the file that an array is in, and where in it."""
        way = self._ways.get(stored.storage)
        if stored.storage == CACHE:
            raise AdoptionError(
                f"its features lie in a cache already; featcache.open({stored.path!r}) reads it"
            )
        if way is None:
            raise AdoptionError(
                f"storage type {stored.storage!r} is not adopted, only "
                f"{', '.join(self._ways)}; {CONVERT}"
            )
        if "://" in stored.path:
            raise AdoptionError(f"{stored.path!r} is no local path; copy it here, or {CONVERT}")
        return way(stored)

    def _numpy_hdf5(self, stored: StoredArray) -> tuple[str, PlacedArray]:
        path = self._absolute(stored.path)
        return path, self._hdf5(path).place(stored.key)

    def _lilcom_hdf5(self, stored: StoredArray) -> tuple[str, PlacedArray]:
        path = self._absolute(stored.path)
        blocks = self._hdf5(path).blocks(stored.key)
        if len(blocks) != 1:
            raise AdoptionError(f"{path!r}: dataset {stored.key!r} is no lilcom block")
        return path, _lilcom(stored, blocks)

    def _chunked_lilcom_hdf5(self, stored: StoredArray) -> tuple[str, PlacedArray]:
        path = self._absolute(stored.path)
        blocks = self._hdf5(path).blocks(stored.key)
        return path, _lilcom(stored, blocks, self._chunk_frames(path))

    def _read_chunk_frames(self, path: str) -> int:
        placed = self._hdf5(path).place(CHUNK_SIZE)
        if placed.codec == RAW and placed.shape == () and placed.extents:
            with self._place.open(path) as source:
                frames = int.from_bytes(source.read(*placed.extents[0]), "little")
            if 0 < frames < MOST_CHUNK_FRAMES:
                return frames
        raise AdoptionError(f"{path!r}: dataset {CHUNK_SIZE!r} is no number of frames")

    def _lilcom_chunky(self, stored: StoredArray) -> tuple[str, PlacedArray]:
        path = self._absolute(stored.path)
        try:
            offset, *sizes = map(int, stored.key.split(","))
        except ValueError:
            raise AdoptionError(f"{stored.key!r} is no key of lilcom_chunky") from None
        end, extents = offset, []
        for nbytes in sizes:
            extents.append((end, nbytes))
            end += nbytes
        if min(offset, *sizes, 0) < 0 or end > self._size(path):
            raise AdoptionError(
                f"{path!r} has not the bytes {offset} to {end} of an array: it is cut short"
            )
        return path, _lilcom(stored, extents, CHUNK_FRAMES)

    def _numpy_files(self, stored: StoredArray) -> tuple[str, PlacedArray]:
        path = self._below(stored)
        return path, npy_header_of(self._place, path, stored.key).placed()

    def _lilcom_files(self, stored: StoredArray) -> tuple[str, PlacedArray]:
        path = self._below(stored)
        return path, _lilcom(stored, [(0, self._size(path))])

    def _kaldi(self, stored: StoredArray) -> tuple[str, PlacedArray]:
        if stored.path.endswith(".scp"):
            found = self._scps(self._absolute(stored.path)).get(stored.key)
            if found is None:
                raise AdoptionError(f"{stored.path!r} has no line of {stored.key!r}")
            path, placed = found
        else:
            name, _, offset = stored.path.rpartition(":")
            if not offset.isdigit():
                raise AdoptionError(f"{stored.path!r} is no scp, nor a place in an archive")
            path = self._absolute(name)
            with self._place.open(path) as source:
                each = object_at(source, int(offset), stored.key)
            placed = placed_object(each, int(offset), each.shape, each.is_raw)
        if placed.shape == (0, 0):
            placed = placed._replace(shape=(0, *stored.shape[1:]))
        return path, placed

    def _read_scp(self, path: str) -> dict[str, tuple[str, PlacedArray]]:
        """Return where the objects of an scp lie, by id."""
        scp = read_scp(self._place, path)
        if scp.ranges:
            raise AdoptionError(f"{path!r} names ranges of matrices; adopt the scp itself")
        objects = objects_of(self._place, scp)
        is_raw = all(each.is_raw for each in objects)
        return {
            id: (scp.files[file], placed_object(each, offset, each.shape, is_raw))
            for id, file, offset, each in zip(
                scp.ids, scp.file.tolist(), scp.offset.tolist(), objects, strict=True
            )
        }

    def _shar(self, stored: StoredArray) -> tuple[str, PlacedArray]:
        if stored.path not in self._members:
            if len(self._members) >= OPEN_FILES:  # shards come in turn
                del self._members[next(iter(self._members))]
            self._members[stored.path] = self._data_members(stored.path)
        member = self._members[stored.path].get(stored.key)
        if member is None:
            raise AdoptionError(f"{stored.path!r} has no data of it")
        if member.name.endswith(LILCOM):
            return stored.path, _lilcom(stored, [(member.offset, member.nbytes)])
        where = f"{stored.path!r}, {member.name!r}"
        with self._place.open(stored.path) as source:
            header = read_npy_header(source.read, member.offset, member.nbytes, where)
        return stored.path, header.placed(member.offset)

    def _data_members(self, path: str) -> dict[str, TarMember]:
        with self._place.open(path) as source:
            found = {
                member.name.rpartition(".")[0]: member
                for member in members(Window(source))
                if member.name.endswith((LILCOM, ".npy"))
            }
        for member in found.values():
            if not member.is_plain:
                raise AdoptionError(f"{path!r}: member {member.name!r} is no plain file")
        return found

    def _hdf5(self, path: str) -> NamedArrays:
        if path in self._open:
            return self._open[path]
        kind: object = get_kind("hdf5")
        if not isinstance(kind, NamesArrays):
            raise ConfigError(
                f"the kind of store 'hdf5' is {type(kind).__name__!r}, which does not give the "
                "datasets of a file by name"
            )
        if len(self._open) >= OPEN_FILES:
            self._open.pop(next(iter(self._open))).close()
        return self._open.setdefault(path, kind.open(self._place, path))

    def _below(self, stored: StoredArray) -> str:
        key = stored.key.removeprefix("/")
        if not key or ".." in key.split("/"):
            raise AdoptionError(f"key {stored.key!r} is no path below {stored.path!r}")
        return f"{self._absolute(stored.path)}/{key}"

    def _read_size(self, path: str) -> int:
        with self._place.open(path) as source:
            return source.size


def _lilcom(stored: StoredArray, blocks: Sequence[tuple[int, int]], frames: int = 0) -> PlacedArray:
    """Return an array of lilcom blocks of `frames` frames each; 0: of all frames."""
    if not stored.shape or 0 in stored.shape[1:]:
        raise AdoptionError(f"lilcom holds no array of shape {stored.shape}")
    if len(blocks) != -(-stored.shape[0] // (frames or stored.shape[0] or 1)):
        raise AdoptionError(
            f"{stored.key!r} has {len(blocks)} lilcom blocks, which are not those of "
            f"{stored.shape[0]} frames"
        )
    numbers = math.prod(stored.shape[1:]) * min(frames or stored.shape[0], stored.shape[0])
    for _, nbytes in blocks:
        if numbers > max(ANY_NUMBERS, MOST_NUMBERS_A_BYTE * nbytes):
            raise AdoptionError(
                f"{stored.key!r} would have {numbers:,} numbers in a lilcom block of {nbytes:,} "
                f"bytes: it is damaged, or {CONVERT}"
            )
    return PlacedArray("float32", stored.shape, blocks, "lilcom", NO_OPTIONS, frames)


# lhotse's manifests, adopted with what they name: features, other arrays, texts and speakers.
#
# `adopt("cuts.jsonl.gz", ...)`, or `.json` or `.yaml`: the ids are those of the cuts (of the
# recordings, where it is a manifest of features), never storage keys. The array that lhotse calls
# `features` is called as the user says; arrays in `custom` keep their names. Annotations are
# `duration` (seconds), `text` of all supervisions of a cut in their order, `speaker`, `language`
# and `gender` where the supervisions agree, `recording` where it is not the id, and what `custom`
# has of texts, numbers and lists of numbers, each name of one kind.
#
# A folder with one manifest is adopted by that. A folder of Shar (`cuts.000000.jsonl.gz` beside
# `features.000000.tar` and others) is adopted as a whole.

SHARD = re.compile(r"((?:.*/)?)cuts\.(\d+)\.jsonl(?:\.gz)?")


class AdoptedLhotse:
    """Manifests of cuts or features."""

    name = "lhotse"

    def recognises(self, place: Place, what: str) -> bool:
        """Whether the first line is a cut, or features, or it is a folder of Shar, or of such."""
        if what:
            return _is_manifest(place, what)
        shards = _shards(place)
        return _is_manifest(place, shards[0]) if shards else bool(_manifests(place))

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Find the arrays of all cuts."""
        shards = [] if what else _shards(place)
        manifest = what or _only_manifest(place, shards)
        with LhotseStorage(place) as storage:
            collected = _Collected(options, storage)
            for path in [manifest] if manifest else shards:
                with place.open(path) as source:
                    for item in manifest_items(source):
                        collected.add(item if manifest else _in_shard(item, path))
        return collected.found(place.name)


KIND = AdoptedLhotse()


def _shards(place: Place) -> list[str]:
    """Return the manifests of the cuts of a folder of Shar."""
    return [path for path in place.files() if SHARD.fullmatch(path)]


def _manifests(place: Place) -> list[str]:
    """Return the manifests in a folder that are no shards; not those below it."""
    named = (name for name in place.names("") if ".jsonl" in name and not SHARD.fullmatch(name))
    return [name for name in named if _is_manifest(place, name)]


def _is_manifest(place: Place, path: str) -> bool:
    if not path.endswith(SUFFIXES):
        return False
    with place.open(path) as source:
        return is_manifest(source)


def _only_manifest(place: Place, shards: Sequence[str]) -> str:
    """Return the only manifest of a folder, "" where it has shards alone."""
    found = _manifests(place)
    if len(found) + bool(shards) > 1:
        told = ", ".join(map(repr, [*found, *shards][:4]))
        raise AdoptionError(
            f"{place.name!r} holds several manifests, such as {told}, and a cache is of one; name "
            f"it, as {f'{place.name}/{found[0]}'!r}"
        )
    return found[0] if found else ""


def _in_shard(item: Item, path: str) -> Item:
    """Return an item whose arrays lie in the tar files beside the manifest of a shard."""
    if (shard := SHARD.fullmatch(path)) is None:
        raise AdoptionError(f"{path!r} is no shard of cuts")
    folder, number = shard.groups()

    def stored(name: str, array: StoredArray) -> StoredArray:
        if array.storage != SHAR:
            return array
        return array._replace(path=f"{folder}{name}.{number}.tar", key=item.id)

    features = item.features and stored("features", item.features)
    others = {name: stored(name, array) for name, array in item.others.items()}
    return item._replace(features=features, others=others)


class _Collected:
    def __init__(self, options: Options, storage: LhotseStorage) -> None:
        self._options = options
        self._storage = storage
        self._ids: list[str] = []
        self._seen: dict[str, int] = {}
        self._containers: dict[str, int] = {}
        self._features: dict[str, ArrayColumns] = {}
        self._frame_s: dict[str, set[float | None]] = {}
        self._said = GatheredValues()

    def add(self, item: Item) -> None:
        if self._seen.setdefault(item.id, len(self._ids)) < len(self._ids):
            raise AdoptionError(f"utterance {item.id!r} is there twice")
        for name, stored in self._arrays(item):
            try:
                self._add_array(item.id, name, stored)
            except AdoptionError as error:
                raise AdoptionError(f"cut {item.id!r}, array {name!r}: {error}") from error
        self._said.add(len(self._ids), item.annotations)
        self._ids.append(item.id)

    def found(self, source: str) -> Found:
        if not self._features:
            raise AdoptionError(f"{source!r} names no features, nor other arrays")
        features = {}
        for name, columns in self._features.items():
            shifts = self._frame_s[name]
            features[name] = columns.found(self._ids, shifts.pop() if len(shifts) == 1 else None)
        annotations = self._said.columns(len(self._ids), without=features)
        return Found(list(self._containers), self._ids, features, annotations)

    def _arrays(self, item: Item) -> Iterator[tuple[str, StoredArray]]:
        if item.features is not None:
            if self._options.feature in item.others:
                raise AdoptionError(
                    f"cut {item.id!r} has an array {self._options.feature!r} beside its features; "
                    "give these another name, feature='...'"
                )
            yield self._options.feature, item.features
        yield from item.others.items()

    def _add_array(self, id: str, name: str, stored: StoredArray) -> None:
        path, placed = self._storage.place(stored)
        if name not in self._features:
            axis = 0 if stored.has_time or placed.codec == "lilcom" else self._options.time_axis
            self._features[name] = ArrayColumns(name, axis)
            self._frame_s[name] = set()
        window = None
        if stored.most is not None and placed.shape:
            first = min(stored.first, placed.shape[0])
            window = first, min(first + max(stored.most, 0), placed.shape[0])
        number = self._containers.setdefault(path, len(self._containers))
        self._features[name].add(id, number, placed, window)
        self._frame_s[name].add(stored.frame_s)

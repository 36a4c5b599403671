"""Zarr groups of others, formats 2 and 3, adopted where they lie: chunks as extents.

One array an utterance, named as datasets of HDF5 are (`adopted_hdf5`); or arrays of all utterances
in the root beside `offsets`, `lengths` or `ids` (`featcache.adoptable.flat_arrays`). Understood are
chunks of whole frames without a compressor, which are files of their own::

    <array>/.zarray      format 2: shape, chunks, dtype, order, and null as compressor and filters
    <array>/<i>.0...     chunk i, of full size also at the end; in folders <i>/0... where
                         dimension_separator is "/"
    <array>/zarr.json    format 3: shape, chunk_grid, data_type, and bytes as the only codec
    <array>/c/<i>/0...   chunk i

All else is read by zarr, for a copy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from featcache.adoptable import (
    COMPLEX,
    CONVERT,
    COPY,
    Found,
    Options,
    Place,
    Readable,
    copied_as,
    frames_first,
)
from featcache.adoptable.flat_arrays import Cut, cuts, flat_names, ids_in
from featcache.adoptable.names import EACH, Names, match_in_groups, refuse_features
from featcache.adoptable.placed_arrays import ArrayColumns, PlacedArray, found_features
from featcache.errors import AdoptionError
from featcache_backends._refusals import DAMAGE, import_library

ENDS = ("/.zarray", "/zarr.json")
ROOTS = {".zgroup", ".zarray", ".zmetadata", "zarr.json"}
MOST_BYTES = 1 << 22  # of a description
MOST_CHUNKS = 1 << 24


class AdoptedZarr:
    """Zarr groups with one array an utterance, or of flat arrays."""

    name = "zarr"
    takes_pattern = True

    def recognises(self, place: Place, what: str) -> bool:
        """Whether the folder is a Zarr group."""
        return not what and bool(ROOTS & {*place.names("")})

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Find the chunks of all arrays that the pattern names."""
        store = _Store.of(place)
        containers: dict[str, int] = {}
        features: dict[str, ArrayColumns] = {}
        for feature, id, array, cut in _arrays(store, options):
            if feature not in features:
                axis = options.time_axis if cut is None else cut.time_axis
                features[feature] = ArrayColumns(feature, axis, copies=True)
            placed, window = store.placed(array, containers), None
            if cut is not None:
                placed, window = placed.cut(cut.row), cut.window
            features[feature].add(id, 0, placed, window)
        ids = next(iter(features.values())).ids
        found = found_features(place.name, features, ids, is_named=options.pattern is not None)
        return Found([*containers], ids, found, pattern=None if cut else EACH)

    @contextmanager
    def readable(self, place: Place, what: str, options: Options) -> Iterator[Readable]:
        """Read arrays by zarr, however they are stored."""
        store = _Store.of(place)
        found: dict[str, dict[str, tuple[_Array, Cut | None]]] = {}
        for feature, id, array, cut in _arrays(store, options):
            if found.setdefault(feature, {}).setdefault(id, (array, cut)) != (array, cut):
                raise AdoptionError(f"{place.name!r}: utterance {id!r} is there twice")
        ids = list(next(iter(found.values())))

        def read(number: int) -> Mapping[str, NDArray[Any]]:
            return {name: store.read(*each[ids[number]], options) for name, each in found.items()}

        features = {}
        for name, each in found.items():
            for id in {*ids} ^ each.keys():
                raise AdoptionError(f"utterance {id!r} has not all features, as {name!r}")
            dtypes = [each[id][0].dtype for id in ids]
            shapes = [_shape(*each[id]) for id in ids]
            cut = each[ids[0]][1]
            axis = options.time_axis if cut is None else cut.turned_axis
            features[name] = copied_as(name, ids, shapes, dtypes, axis)
        if options.pattern is None:
            refuse_features(place.name, ids, next(iter(features.values())).rows)
        files = [path for path in place.files() if not path.endswith(".lock")]
        yield Readable(files, ids, features, read, pattern=None if cut else EACH)


KIND = AdoptedZarr()


@dataclass(frozen=True)
class _Array:
    """An array by its description."""

    described: str  # the path of its description
    name: str  # its path in the group
    shape: tuple[int, ...]
    dtype: str  # as declared
    chunks: tuple[int, ...]
    prefix: str  # of the names of its chunks
    separator: str
    big_endian: bool
    in_fortran_order: bool
    why: str  # it is not read in place; "" if it is
    type: str  # of its elements, where these are no plain numbers; "" if they are

    def chunk(self, number: int) -> str:
        """Return the path of a chunk of whole frames."""
        places = [str(number), *["0"] * (len(self.chunks) - 1)] if self.chunks else ["0"]
        if self.prefix:  # format 3
            places = [self.prefix, *(places if self.chunks else [])]
        return f"{self.name}/{self.separator.join(places)}".lstrip("/")


def _shape(array: _Array, cut: Cut | None) -> tuple[int, ...]:
    """Return the shape of an array, or of the part of it that is an utterance."""
    return array.shape if cut is None else cut.shape(array.shape)


def _arrays(store: _Store, options: Options) -> Iterator[tuple[str, str, _Array, Cut | None]]:
    """Yield feature, id, array and part of it, of what the pattern names."""
    names = Names(options)
    by_name = {array.name: array for array in store.arrays}
    flat = None
    if not names.is_given:
        flat = flat_names(name for name in by_name if "/" not in name)
    some = False
    if flat is not None:
        cut = cuts(
            store.name,
            {name: by_name[name].shape for name in flat.frames},
            flat,
            lambda name: store.values(by_name[name]),
            lambda name: ids_in(store.name, name, store.values(by_name[name])),
            options.time_axis,
        )
        for name in flat.frames:
            feature = names.feature if len(flat.frames) == 1 else name
            store.check_type(by_name[name])
            for each in cut.each():
                some = True
                yield feature, each.id, by_name[name], each
    else:
        for name, array in by_name.items():
            if matched := match_in_groups(names, name, store.name):
                some = True
                store.check_type(array)
                yield *matched, array, None
    if not some:
        one = " (it is one array itself, no group of them)" * ("" in by_name)
        told = f"{store.name!r} has no array called like {names.pattern!r}{one}; {CONVERT}"
        raise AdoptionError(told)


class _Store:
    def __init__(self, place: Place, arrays: Sequence[_Array]) -> None:
        self._place, self.arrays = place, arrays
        self.name = place.name

    @classmethod
    def of(cls, place: Place) -> _Store:
        """Read the descriptions of all arrays of a group."""
        arrays = []
        described = [path for path in place.files() if f"/{path}".endswith(ENDS)]
        place.expect(described)
        for path in described:
            if (array := _described(place, path)) is not None:
                arrays.append(array)
        return cls(place, arrays)

    def placed(self, array: _Array, containers: dict[str, int]) -> PlacedArray:
        """Return where the chunks of an array lie; numbers new files."""
        if array.why:
            self._refuse(array, array.why)
        if array.chunks[1:] != array.shape[1:]:
            self._refuse(array, f"of shape {array.shape} has chunks of shape {array.chunks}")
        placed = PlacedArray(array.dtype, array.shape, (), big_endian=array.big_endian)
        if 0 in array.shape:
            return placed
        frame = np.dtype(array.dtype).itemsize * math.prod(array.shape[1:])
        chunk_rows = array.chunks[0] if array.chunks else 1
        rows = array.shape[0] if array.shape else 1
        if array.in_fortran_order and len(array.shape) > 1:
            if chunk_rows != rows:
                self._refuse(array, "has chunks in Fortran order")
            placed = placed._replace(axes=tuple(range(len(array.shape)))[::-1])
        extents, files = [], []
        for number in range(-(-rows // chunk_rows)):
            path = array.chunk(number)
            try:
                with self._place.open(path) as source:
                    size = source.size
            except AdoptionError:
                self._refuse(array, f"lacks the chunk {path!r}: it is of the fill value")
            if size != chunk_rows * frame:
                self._refuse(array, f"has a chunk {path!r} of {size} bytes, which is damaged")
            files.append(containers.setdefault(path, len(containers)))
            extents.append((0, min(rows - number * chunk_rows, chunk_rows) * frame))
        return placed._replace(extents=extents, files=files)

    def check_type(self, array: _Array) -> None:
        """Raise `AdoptionError` for an array of no plain numbers."""
        if array.type:
            way = COMPLEX if array.type[1:2] == "c" else CONVERT
            raise AdoptionError(
                f"{self.name!r}: array {array.name!r} has elements of type {array.type}, no plain "
                f"numbers; {way}"
            )

    def values(self, array: _Array, frames: slice | None = None) -> NDArray[Any]:
        """Read an array by zarr, or some frames of it."""
        zarr = import_library("zarr", "reading a Zarr group of others", "zarr")
        try:
            with self._folder(array) as folder:
                opened = zarr.open_array(str(folder), mode="r")
                found = np.asarray(opened[...] if frames is None else opened[frames])
        except AdoptionError:
            raise
        except (*DAMAGE, OSError, LookupError, TypeError) as error:
            raise AdoptionError(
                f"{self.name!r}: zarr cannot read {array.name!r}: {error}; {CONVERT}"
            ) from error
        return found

    @contextmanager
    def _folder(self, array: _Array) -> Iterator[Path]:
        """Return the folder of an array; that of a copy, for the while, behind a URL."""
        if self._place.is_local:
            yield self._place.local(array.described).parent
            return
        prefix = f"{array.name}/".lstrip("/")
        with TemporaryDirectory(prefix="featcache-array-") as folder:
            for path in self._place.files():
                if path.startswith(prefix):
                    into = Path(folder, path.removeprefix(prefix))
                    into.parent.mkdir(parents=True, exist_ok=True)
                    with self._place.open(path) as source:
                        into.write_bytes(source.read(0, source.size))
            yield Path(folder)

    def read(self, array: _Array, cut: Cut | None, options: Options) -> NDArray[Any]:
        """Read an array, or a part of it, by zarr, the frames first."""
        found = self.values(array, None if cut is None else cut.rows)
        found = np.asarray(found, found.dtype.newbyteorder("="))
        if cut is not None:
            return cut.taken(found)
        return found.transpose(frames_first(found.shape, options.time_axis))

    def _refuse(self, array: _Array, why: str) -> NoReturn:
        raise AdoptionError(f"{self.name!r}: array {array.name!r} {why}; {COPY}")


def _described(place: Place, path: str) -> _Array | None:
    """Return an array by its description; None for that of a group."""
    try:
        with place.open(path) as source:
            if source.size > MOST_BYTES:
                raise ValueError(f"it has {source.size:,} bytes")
            told = json.loads(source.read(0, source.size))
        if path.endswith(".zarray"):
            return _format_2(path, told)
        return _format_3(path, told) if told["node_type"] == "array" else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, AdoptionError):
            raise
        raise AdoptionError(f"{path!r} describes no array of Zarr: {error!r}") from None


def _format_2(path: str, told: Mapping[str, Any]) -> _Array:
    dtype = np.dtype(told["dtype"]) if isinstance(told["dtype"], str) else np.dtype("V1")
    why = ""
    if told["compressor"] is not None or told.get("filters"):
        why = "is compressed, or filtered"
    separator = told.get("dimension_separator", ".")
    in_fortran_order = {"C": False, "F": True}[told["order"]]
    return _array(path, told["shape"], told["chunks"], dtype, "", separator, in_fortran_order, why)


def _format_3(path: str, told: Mapping[str, Any]) -> _Array:
    known = isinstance(told["data_type"], str) and told["data_type"] != "string"
    dtype = np.dtype(told["data_type"] if known else "V1")
    codecs = told["codecs"]
    why = "" if [each["name"] for each in codecs] == ["bytes"] else "is compressed, or in shards"
    keys = told["chunk_key_encoding"]
    is_default = keys["name"] == "default"
    separator = (keys.get("configuration") or {}).get("separator", "/" if is_default else ".")
    chunks = told["chunk_grid"]["configuration"]["chunk_shape"]
    if not why and (codecs[0].get("configuration") or {}).get("endian") == "big":
        dtype = dtype.newbyteorder(">")
    prefix = "c" if is_default else ""
    return _array(path, told["shape"], chunks, dtype, prefix, separator, False, why)


def _array(
    path: str,
    shape: Sequence[int],
    chunks: Sequence[int],
    dtype: np.dtype[Any],
    prefix: str,
    separator: str,
    in_fortran_order: bool,
    why: str,
) -> _Array:
    for number in (*shape, *chunks):
        if type(number) is not int or not 0 <= number < 1 << 56:
            raise ValueError(f"its shape is {shape!r}, its chunks {chunks!r}")
    if len(chunks) != len(shape) or 0 in chunks:
        raise ValueError(f"its chunks {chunks!r} are not those of {shape!r}")
    if shape and -(-shape[0] // chunks[0]) > MOST_CHUNKS:
        raise ValueError(f"it has more than {MOST_CHUNKS:,} chunks")
    if separator not in ("/", "."):
        raise ValueError(f"its separator is {separator!r}")
    is_plain = dtype.kind in "biuf" and dtype.itemsize <= 8
    name = dtype.newbyteorder("=").name
    return _Array(
        path, path.rpartition("/")[0], tuple(shape), name, tuple(chunks), prefix, separator,
        dtype.byteorder == ">", in_fortran_order, why, "" if is_plain else dtype.str,
    )  # fmt: skip

"""Where lhotse's storage types put arrays.

::

    numpy_hdf5           an HDF5 file, a dataset an array
    lilcom_hdf5          an HDF5 file, a dataset of one opaque value: the array as one lilcom block
    chunked_lilcom_hdf5  an HDF5 file, a dataset of lilcom blocks, each of variable length
    lilcom_chunky        lilcom blocks of 500 frames one after another; the key
                         "offset,n0,n1,..." has the place of the first and the bytes of each
    numpy_files          a folder of .npy files; the key is the path below it
    lilcom_files         a folder of files, each one lilcom block
    shar                 tar files of .npy files, or of lilcom blocks (.llc); the key is the id

A relative path is one from the current directory, as for lhotse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from featcache.adoptable import CONVERT, Place
from featcache.adoptable.placed_arrays import NO_OPTIONS, NamedArrays, NamesArrays, PlacedArray
from featcache.adoption.lhotse_manifest import StoredArray
from featcache.adoption.npy_files import npy_header_of
from featcache.adoption.npy_header import NpyHeader, read_npy_header
from featcache.adoption.webdataset.tar_walk import Member, Window, members
from featcache.errors import AdoptionError, ConfigError
from featcache.registry import get_kind

CHUNK_FRAMES = 500  # of lilcom_chunky
CHUNK_SIZE = "__LHOTSE_INTERNAL_CHUNK_SIZE__"  # dataset of chunked_lilcom_hdf5
OPEN_FILES = 64
SHAR = "shar"
LILCOM = ".llc"


class LhotseStorage:
    """The files that a manifest names, those of HDF5 open; close with `with`."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._open: dict[str, NamedArrays] = {}
        self._sizes: dict[str, int] = {}
        self._chunk_frames: dict[str, int] = {}
        self._members: dict[str, dict[str, Member]] = {}
        self._absolutes: dict[str, str] = {}
        self._ways: dict[str, Callable[[StoredArray], tuple[str, PlacedArray]]] = {
            "numpy_hdf5": self._numpy_hdf5,
            "lilcom_hdf5": self._lilcom_hdf5,
            "chunked_lilcom_hdf5": self._chunked_lilcom_hdf5,
            "lilcom_chunky": self._lilcom_chunky,
            "numpy_files": self._numpy_files,
            "lilcom_files": self._lilcom_files,
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
        if path not in self._chunk_frames:
            ((offset, nbytes),) = self._hdf5(path).place(CHUNK_SIZE).extents
            with self._place.open(path) as source:
                self._chunk_frames[path] = int.from_bytes(source.read(offset, nbytes), "little")
        blocks = self._hdf5(path).blocks(stored.key)
        return path, _lilcom(stored, blocks, self._chunk_frames[path])

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
        return path, _npy(npy_header_of(self._place, path, stored.key))

    def _lilcom_files(self, stored: StoredArray) -> tuple[str, PlacedArray]:
        path = self._below(stored)
        return path, _lilcom(stored, [(0, self._size(path))])

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
        return stored.path, _npy(header, member.offset)

    def _data_members(self, path: str) -> dict[str, Member]:
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

    def _absolute(self, path: str) -> str:
        if path not in self._absolutes:
            self._absolutes[path] = str(Path(path).absolute())
        return self._absolutes[path]

    def _size(self, path: str) -> int:
        if path not in self._sizes:
            with self._place.open(path) as source:
                self._sizes[path] = source.size
        return self._sizes[path]


def _npy(header: NpyHeader, begin: int = 0) -> PlacedArray:
    extents = ((begin + header.offset, header.nbytes),) if header.nbytes else ()
    return PlacedArray(header.dtype, header.shape, extents)


def _lilcom(stored: StoredArray, blocks: Sequence[tuple[int, int]], frames: int = 0) -> PlacedArray:
    """Return an array of lilcom blocks of `frames` frames each; 0: of all frames."""
    if not stored.shape or 0 in stored.shape[1:]:
        raise AdoptionError(f"lilcom holds no array of shape {stored.shape}")
    if len(blocks) != -(-stored.shape[0] // (frames or stored.shape[0] or 1)):
        raise AdoptionError(
            f"{stored.key!r} has {len(blocks)} lilcom blocks, which are not those of "
            f"{stored.shape[0]} frames"
        )
    return PlacedArray("float32", stored.shape, blocks, "lilcom", NO_OPTIONS, frames)

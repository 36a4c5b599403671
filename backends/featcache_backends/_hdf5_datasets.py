"""The places of datasets in an HDF5 file that somebody else wrote.

h5py's low-level interface: `file[name]` alone takes four times as long as all of this.
"""

from __future__ import annotations

import gc
import math
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from featcache.adoptable import COMPLEX, CONVERT, COPY, ByteSource, Place, SourceFile
from featcache.adoptable.placed_arrays import PlacedArray
from featcache.errors import AdoptionError, FeatcacheError, describe
from featcache_backends._refusals import import_library

if TYPE_CHECKING:
    import h5py


ELEMENT = struct.Struct("<IQI")
COLLECTION = struct.Struct("<4sB3xQ")
OBJECT = struct.Struct("<HH4xQ")


class GlobalHeap:
    """The global heap of a file: elements of variable length, whose places h5py does not tell.

    As HDF5's file format has it (III.E, Global Heap), with 8 bytes an address: an element is its
    length (u32), the address of a collection of the global heap (u64) and the number of an object
    in it (u32). A collection is "GCOL", version 1, 3 bytes, its own size (u64), and objects: number
    (u16), references (u16), 4 bytes, size (u64), and the bytes, filled up to a multiple of 8.
    Object 0 is free space.
    """

    def __init__(self, file: ByteSource) -> None:
        self._file = file
        self._walked = 0  # bytes of collections
        self._collections: dict[int, dict[int, tuple[int, int]]] = {}

    def elements(self, offset: int, count: int) -> list[tuple[int, int]]:
        """Return offset and length of the bytes of elements, of which the first is at `offset`."""
        places = []
        for length, address, number in ELEMENT.iter_unpack(
            self._read(offset, count * ELEMENT.size)
        ):
            if address not in self._collections:
                self._collections[address] = self._objects(address)
            begin, nbytes = self._collections[address].get(number, (0, -1))
            if length > nbytes:
                raise AdoptionError(f"{self._file.path!r}: its global heap is damaged")
            places.append((begin, length))
        return places

    def _objects(self, address: int) -> dict[int, tuple[int, int]]:
        magic, version, size = COLLECTION.unpack(self._read(address, COLLECTION.size))
        if magic != b"GCOL" or version != 1 or size < COLLECTION.size:
            raise AdoptionError(f"{self._file.path!r} has no global heap at byte {address}")
        self._read(address + size, 0)
        self._walked += size
        if self._walked > self._file.size:
            raise AdoptionError(f"{self._file.path!r}: collections of its global heap overlap")
        objects, at = {}, COLLECTION.size
        while at + OBJECT.size <= size:
            number, _, nbytes = OBJECT.unpack(self._read(address + at, OBJECT.size))
            at += OBJECT.size
            if number == 0 or at + nbytes > size:
                break
            objects[number] = (address + at, nbytes)
            at += -(-nbytes // 8) * 8
        return objects

    def _read(self, offset: int, nbytes: int) -> bytes:
        if not 0 <= offset <= offset + nbytes <= self._file.size:
            raise AdoptionError(f"{self._file.path!r} has no bytes {offset} to {offset + nbytes}")
        return self._file.read(offset, nbytes)


DEPTH = 32  # of groups
NODE_HEAD = 24  # bytes of a node of a tree, before the first key
HEADER_BYTES = 512  # of an object, as HDF5 reads at first
CHUNKS_BYTES = 4096  # of a node that lists chunks: 24, and 64 times 8, and 65 times 24 to 56
LAYOUT = 8  # a message in a header: how a dataset is stored
DEFLATE, SHUFFLE = 1, 2
MOST_DEFLATED = 1032  # bytes in a byte of deflate: 258 in two bits
# what is read by HDF5 itself, which fills up what was never written: bytes, and bytes in one
ANY_BYTES, MOST_BYTES_A_BYTE = 1 << 24, 1 << 15
FILTERS = {
    **{1: "deflate", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset"},
    **{32000: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32015: "zstd"},
}
Extents = Sequence[tuple[int, int]]
BROKEN = (OSError, RuntimeError, ValueError, KeyError, TypeError)  # what h5py raises


class _Collector:
    """Python's garbage collector, off while HDF5 reads what threads fetch from a store.

    HDF5 asks for bytes with h5py's lock held. A thread that fetches them must not run the collector
    meanwhile: where that finds an object of h5py, it waits for the lock, and HDF5 for the thread
    (h5py, "Python file-like objects").
    """

    def __init__(self) -> None:
        self._users: set[object] = set()
        self._was_on = False
        self._lock = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_anew)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Begin no collection until the end of a block."""
        user = object()
        try:
            with self._lock:
                self._was_on = gc.isenabled() or self._was_on
                self._users.add(user)
                gc.disable()
            yield
        finally:
            with self._lock:
                self._users.discard(user)
                self._turn_on()

    def _turn_on(self) -> None:
        if self._was_on and not self._users:
            gc.enable()
            self._was_on = False

    def _begin_anew(self) -> None:
        """Turn it on in a child of a process of which another thread had turned it off."""
        self._lock = threading.Lock()
        self._users.clear()
        self._turn_on()


COLLECTOR = _Collector()
P = ParamSpec("P")
R = TypeVar("R")


def _reads(
    method: Callable[Concatenate[Hdf5Datasets, str, P], R],
) -> Callable[Concatenate[Hdf5Datasets, str, P], R]:
    """Mark what lets HDF5 read a dataset or a group; what is broken is refused by its name."""

    @wraps(method)
    def reads(self: Hdf5Datasets, name: str, /, *args: P.args, **settings: P.kwargs) -> R:
        with self._collecting():
            try:
                return method(self, name, *args, **settings)
            except FeatcacheError:
                self._bytes.raise_error()  # once: it leads to the file
                raise
            except (*BROKEN, MemoryError) as error:
                self._refuse(name or "/", f"cannot be read ({describe(error)})")

    return reads


class Hdf5Datasets:
    """An open HDF5 file.

    Args:
        place: that it lies in.
        path: of the file there.
    """

    def __init__(self, place: Place, path: str) -> None:
        self._h5py = import_library("h5py", "adopting an HDF5 file", "hdf5")
        self._types: list[tuple[object, str]] = []  # known to be plain
        self._closing = ExitStack()
        self._collecting = nullcontext if place.is_local else COLLECTOR.off
        source = self._closing.enter_context(place.open(path))
        self._path: Path | str = place.local(path) if place.is_local else path
        self._load = "load" if place.is_local else "download and load"
        self._nodes = None if place.is_local else _NodesAhead(source)
        self._bytes = SourceFile(self._nodes or source)
        with self._collecting():
            self._open(source)

    def _open(self, source: ByteSource) -> None:
        h5py = self._h5py
        try:
            self._file = self._opened_file()
            self._closing.callback(self._file.close)
            self._root = h5py.h5g.open(self._file, b"/")
            made = self._file.get_create_plist()
            # some versions of HDF5 count chunks from the end of the user block
            self._has_userblock = made.get_userblock() > 0
            self._has_heap = not self._has_userblock and made.get_sizes() == (8, 8)
            self._size = source.size
            self._heap = GlobalHeap(source)
        except BROKEN as error:
            self._closing.close()
            self._bytes.raise_error()  # in the place of HDF5's words for it
            raise AdoptionError(
                f"{str(self._path)!r} cannot be opened as an HDF5 file: {describe(error)}; was its "
                "writer killed, or does it still write?"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._root = None
        self._closing.close()

    @_reads
    def place(self, name: str, dataset: h5py.h5d.DatasetID | None = None) -> PlacedArray:
        """Return where the array of a dataset lies; no link to somewhere else is followed."""
        dataset = dataset or self._opened(name)
        shape, dtype = dataset.shape, self._dtype(name, dataset.get_type())
        if shape is None:
            self._refuse(name, "has no shape")
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes == 0:
            return PlacedArray(dtype, shape, ())
        offset = dataset.get_offset()
        if offset is None:
            placed = self._in_chunks(name, dataset, dtype, shape)
        elif dataset.get_storage_size() != nbytes:
            self._refuse(name, "was made, but never written")
        else:
            placed = PlacedArray(dtype, shape, ((offset, nbytes),))
        self._within(name, placed.extents)
        return placed

    @_reads
    def blocks(self, name: str) -> Extents:
        """Return where the elements of a dataset lie: bytes of variable length, or one opaque."""
        dataset = self._opened(name)
        offset, shape, kind = dataset.get_offset(), dataset.shape, dataset.get_type()
        if offset is None or shape is None or not dataset.get_storage_size():
            self._refuse(name, "is not stored in one piece of this file")
        if isinstance(kind, self._h5py.h5t.TypeOpaqueID) and shape == ():
            return self._within(name, [(offset, kind.get_size())])
        if not isinstance(kind, self._h5py.h5t.TypeVlenID) or not self._has_heap:
            self._refuse(name, "holds no elements of variable length")
        if kind.get_super().get_size() != 1:
            self._refuse(name, "holds elements of something else than bytes")
        return self._heap.elements(offset, math.prod(shape))

    def all(self) -> Iterator[tuple[str, h5py.h5d.DatasetID]]:
        """Yield the name of each dataset, and what opens it, for `place` and `readable`.

        Raises `AdoptionError` for a link to somewhere else.
        """
        return self._below("", self._root, set())

    def in_root(self) -> list[str]:
        """Return the names of all that lies in the root, groups too."""
        return [self._text("", link) for link, _ in self._links("", self._root)]

    @_reads
    def readable(
        self, name: str, dataset: h5py.h5d.DatasetID | None = None
    ) -> tuple[tuple[int, ...], str]:
        """Return shape and dtype of a dataset that HDF5 reads without another file.

        Raises `AdoptionError` for any other.
        """
        dataset = dataset or self._opened(name)
        layouts = (self._h5py.h5d.CONTIGUOUS, self._h5py.h5d.CHUNKED, self._h5py.h5d.COMPACT)
        made, shape = dataset.get_create_plist(), dataset.shape
        dtype = self._numbers(name, dataset.get_type())
        if made.get_layout() not in layouts or made.get_external_count():
            self._refuse_elsewhere(name, "is stored in other files")
        if shape is None:
            self._refuse(name, "has no shape")
        stored, nbytes = dataset.get_storage_size(), math.prod(shape) * dtype.itemsize
        if nbytes and not stored:
            self._refuse(name, "was made, but never written")
        if nbytes > max(ANY_BYTES, MOST_BYTES_A_BYTE * stored):
            self._refuse(name, f"would have {nbytes:,} bytes in {stored:,}: it is damaged")
        return shape, dtype.newbyteorder("=").name

    @_reads
    def read(self, name: str, frames: slice | None = None) -> NDArray[Any]:
        """Read the array of a dataset, or some frames of it, in the byte order of this machine."""
        array = self._h5py.Dataset(self._opened(name))[() if frames is None else frames]
        return np.asarray(array, array.dtype.newbyteorder("="))

    @_reads
    def texts(self, name: str) -> list[str]:
        """Read a dataset of text, or of whole numbers."""
        found = self._h5py.Dataset(self._opened(name))
        if found.shape is None:
            self._refuse(name, "has no shape")
        kept = found.asstr()[()] if found.dtype.kind in "OS" else found[()]
        if np.ndim(kept) != 1 or kept.dtype.kind not in "OUiu":
            self._refuse(name, f"is {kept.dtype} of shape {np.shape(kept)}, no list of ids")
        return [str(each) for each in kept.tolist()]

    def _opened_file(self) -> h5py.h5f.FileID:
        h5f, h5p = self._h5py.h5f, self._h5py.h5p
        if isinstance(self._path, Path):
            return h5f.open(str(self._path).encode(), h5f.ACC_RDONLY)
        access = h5p.create(h5p.FILE_ACCESS)
        access.set_fileobj_driver(self._h5py.h5fd.fileobj_driver, self._bytes)
        # a group that an error's traceback holds would keep the file open until the process ends,
        # where HDF5 closes it by calling Python, which is gone by then: a segmentation fault
        access.set_fclose_degree(h5f.CLOSE_STRONG)
        return h5f.open(repr(self._bytes).encode(), h5f.ACC_RDONLY, access)

    def _opened(self, name: str) -> h5py.h5d.DatasetID:
        try:
            member, *below = self._root, *name.encode().split(b"/")
            for link in below:
                if member.links.get_info(link).type != self._h5py.h5l.TYPE_HARD:
                    self._refuse(name, "is a link to somewhere else")
                member = self._h5py.h5o.open(member, link)
        except FeatcacheError:
            raise
        except (*BROKEN, AttributeError) as error:
            self._bytes.raise_error()
            raise AdoptionError(f"{str(self._path)!r} has no dataset {name!r}") from error
        if not isinstance(member, self._h5py.h5d.DatasetID):
            self._refuse(name, "is no dataset")
        return member

    def _below(
        self, prefix: str, group: h5py.h5g.GroupID, seen: set[int]
    ) -> Iterator[tuple[str, h5py.h5d.DatasetID]]:
        for link, kind in self._links(prefix, group):
            name = prefix + self._text(prefix, link)
            if kind != self._h5py.h5l.TYPE_HARD:
                self._refuse_elsewhere(name, "is a link to somewhere else")
            member, address = self._member(name, group, link)
            if isinstance(member, self._h5py.h5d.DatasetID):
                yield name, member
            elif isinstance(member, self._h5py.h5g.GroupID):
                if name.count("/") >= DEPTH:
                    self._refuse(name, f"lies more than {DEPTH} groups deep")
                if address in seen:
                    self._refuse(name, "is a group that has another name, too")
                seen.add(address)
                yield from self._below(f"{name}/", member, seen)

    @_reads
    def _member(
        self, name: str, group: h5py.h5g.GroupID, link: bytes
    ) -> tuple[h5py.h5g.GroupID | h5py.h5d.DatasetID, int]:
        """Return what a link leads to, and the address of a group, 0 of all else."""
        member = self._h5py.h5o.open(group, link)
        is_group = isinstance(member, self._h5py.h5g.GroupID)
        return member, self._h5py.h5o.get_info(member).addr if is_group else 0

    @_reads
    def _links(self, prefix: str, group: h5py.h5g.GroupID) -> list[tuple[bytes, int]]:
        """Return the links of a group, and their kinds; the headers they lead to are asked for."""
        links: list[tuple[bytes, int, int]] = []
        group.links.iterate(lambda name, info: links.append((name, info.type, info.u)), info=True)
        if self._nodes is not None:
            hard = [at for _, kind, at in links if kind == self._h5py.h5l.TYPE_HARD]
            self._nodes.expect_objects(hard)
        return [(name, kind) for name, kind, _ in links]

    def _text(self, prefix: str, link: bytes) -> str:
        try:
            return link.decode()
        except UnicodeDecodeError:
            self._refuse(f"{prefix}{link!r}", "has a name that is no UTF-8")

    def _within(self, name: str, extents: Extents) -> Extents:
        for offset, nbytes in extents:
            if offset < 0 or offset + nbytes > self._size:
                self._refuse(name, "has bytes behind the end of the file: it is cut short")
        return extents

    def _dtype(self, name: str, kind: h5py.h5t.TypeID) -> str:
        """Return the declared dtype of a dataset's type; refuses all but plain numbers."""
        for known, dtype in self._types:
            if kind.equal(known):
                return dtype
        found = self._numbers(name, kind)
        if found.byteorder == ">":
            self._refuse(name, f"has big-endian numbers ({found.str})", COPY)
        self._types.append((kind, found.name))
        return str(found.name)

    def _numbers(self, name: str, kind: h5py.h5t.TypeID) -> np.dtype[np.generic]:
        """Return numpy's dtype of a dataset's type; refuses all but plain numbers."""
        found: np.dtype[np.generic] = np.dtype(kind.dtype)
        plain = found.kind in "biuf" and found.itemsize <= 8
        if not plain or not kind.equal(self._h5py.h5t.py_create(found, logical=True)):
            told = f"has elements of type {_described(kind, found)}, no plain numbers"
            self._refuse(name, told, self._way(name, found))
        return found

    def _way(self, name: str, found: np.dtype[np.generic]) -> str:
        """Return how h5py reads what is no plain numbers, or skips it where it is text."""
        file, group = f"h5py.File({str(self._path)!r})", name.rpartition("/")[0]
        arrays = "for k, d in FILE.items()"
        if found.kind == "c":
            load = f"{{k: {{x: getattr(d[()], x) for x in ('real', 'imag')}} {arrays}}}"
        elif found.names is not None:
            load = f"{{k: {{n: d[n] for n in d.dtype.names}} {arrays}}}"
        elif self._h5py.check_string_dtype(found) is None and found.kind == "O":
            load = f"{{f'{{n:08d}}': v for n, v in enumerate(FILE[{name!r}][()])}}"
            ids = next(
                (each for each in ("ids", "id", "utt_ids", "keys") if each in self._root), None
            )
            if ids is not None and not group:
                load = f"dict(zip(FILE[{ids!r}].asstr()[()].tolist(), FILE[{name!r}][()]))"
            group = ""
        else:
            load = f"{{k: d[()] {arrays} if d.dtype.kind in 'biuf'}}"
        if "/" in group or (group and found.kind != "O"):
            return COMPLEX if found.kind == "c" else CONVERT
        if group:  # an utterance
            load = f"{{i: {load.replace('FILE', 'g')} for i, g in {file}.items()}}"
        load = load.replace("FILE", file)
        line = f"{self._load} it yourself, as by featcache.convert({load}, 'features')"
        return (
            f"store real and imaginary parts as two features: {line}" * (found.kind == "c") or line
        )

    def _in_chunks(
        self, name: str, dataset: h5py.h5d.DatasetID, dtype: str, shape: tuple[int, ...]
    ) -> PlacedArray:
        made = dataset.get_create_plist()
        if made.get_layout() == self._h5py.h5d.CONTIGUOUS and not made.get_external_count():
            self._refuse(name, "was made, but never written")
        if made.get_layout() == self._h5py.h5d.COMPACT:
            self._refuse(name, "is stored in the header of this file", COPY)
        if made.get_layout() != self._h5py.h5d.CHUNKED:
            self._refuse_elsewhere(name, "is stored in other files")
        if not dataset.get_storage_size():
            self._refuse(name, "was made, but never written")
        chunk = made.get_chunk()
        if chunk[1:] != shape[1:]:
            cut = f"of shape {shape} has chunks of shape {chunk}, which cut another axis than 0"
            self._refuse(name, cut, COPY)
        codec, options = self._codec(name, made)
        extents = self._chunks(name, dataset, chunk, shape)
        row_bytes = np.dtype(dtype).itemsize * math.prod(chunk[1:])
        if codec is None:
            if any(nbytes != chunk[0] * row_bytes for _, nbytes in extents):
                self._refuse(name, "has a chunk of a wrong size")
            rest = shape[0] - (len(extents) - 1) * chunk[0]
            extents[-1] = (extents[-1][0], rest * row_bytes)
            return PlacedArray(dtype, shape, extents)
        if any(chunk[0] * row_bytes > MOST_DEFLATED * nbytes for _, nbytes in extents):
            self._refuse(name, "has chunks of fewer bytes than their shape needs: it is damaged")
        return PlacedArray(dtype, shape, extents, codec, options, chunk[0])

    def _codec(self, name: str, made: h5py.h5p.PropDCID) -> tuple[str | None, dict[str, object]]:
        filters = [made.get_filter(number)[0] for number in range(made.get_nfilters())]
        if not filters:
            return None, {}
        if filters not in ([DEFLATE], [SHUFFLE, DEFLATE]):
            names = ", ".join(FILTERS.get(code, f"number {code}") for code in filters)
            self._refuse(name, f"has the filters {names}, and only deflate is known", COPY)
        return "gzip", {"shuffle": len(filters) == 2}

    def _chunks(
        self,
        name: str,
        dataset: h5py.h5d.DatasetID,
        chunk: tuple[int, ...],
        shape: tuple[int, ...],
    ) -> list[tuple[int, int]]:
        if self._has_userblock:
            self._refuse(name, "has chunks in a file with a user block", COPY)
        found: list[tuple[int, int, int, int]] = []
        dataset.chunk_iter(
            lambda at: found.append((at.chunk_offset[0], at.byte_offset, at.size, at.filter_mask))
        )
        found.sort()
        needed = range(0, shape[0], chunk[0])  # counted first: it may be a trillion
        if len(found) != len(needed) or [at[0] for at in found] != list(needed):
            self._refuse(name, "has chunks that were never written", COPY)
        if any(at[3] for at in found):
            self._refuse(name, "has chunks whose filters were left out", COPY)
        return [(offset, nbytes) for _, offset, nbytes, _ in found]

    def _refuse_elsewhere(self, name: str, what: str) -> NoReturn:
        load = f"{{k: d[()] for k, d in h5py.File({str(self._path)!r}).items()}}"
        way = f"{self._load} it yourself, as by featcache.convert({load}, 'features')"
        self._refuse(name, what, CONVERT if "/" in name else way)

    def _refuse(self, name: str, what: str, remedy: str = CONVERT) -> NoReturn:
        self._bytes.raise_error()
        raise AdoptionError(f"{str(self._path)!r}: dataset {name!r} {what}; {remedy}")


class _NodesAhead:
    """A source of which HDF5 reads nodes that name others: these are asked for all at once.

    HDF5 itself reads one after the other. Nodes are those of version 1, of the names in a group: a
    "TREE" has the addresses of others, or of "SNOD"s, which have those of the headers of objects.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source, self.path, self.size = source, source.path, source.size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly these bytes."""
        data = self._source.read(offset, nbytes)
        if data.startswith((b"TREE\0", b"SNOD\1")) and nbytes > NODE_HEAD:
            is_tree = data.startswith(b"TREE")
            count = int.from_bytes(data[6:8], "little")
            begin, step = (NODE_HEAD + 8, 16) if is_tree else (16, 40)
            places = range(begin, min(begin + step * count, nbytes - 7), step)
            addresses = (int.from_bytes(data[at : at + 8], "little") for at in places)
            self.expect(addresses, HEADER_BYTES)
        return data

    def expect(self, offsets: Iterable[int], nbytes: int) -> None:
        """Ask for bytes at each of some places."""
        self._source.expect(offsets, nbytes)

    def expect_objects(self, headers: Sequence[int]) -> None:
        """Ask for headers, and for the trees of chunks that they name."""
        headers = [at for at in headers if at < self.size]  # of a damaged file not all are
        self.expect(headers, HEADER_BYTES)
        self.expect(filter(None, map(self._chunks_of, headers)), CHUNKS_BYTES)

    def _chunks_of(self, header: int) -> int | None:
        """Return where the chunks of a dataset are listed, if its header, of version 1, says so."""
        data = self._source.read(header, min(HEADER_BYTES, self.size - header))
        if not data.startswith(b"\1\0"):
            return None
        at, end = 16, 16 + int.from_bytes(data[8:12], "little")
        while at + 8 < min(end, len(data)):
            kind, size = (int.from_bytes(data[at + k : at + k + 2], "little") for k in (0, 2))
            if kind == LAYOUT and data[at + 8 : at + 10] == b"\3\2":
                return int.from_bytes(data[at + 11 : at + 19], "little")
            at += 8 + size
        return None


def _described(kind: h5py.h5t.TypeID, found: np.dtype[np.generic]) -> str:
    if found.kind == "O":
        return "variable length"
    if found.kind == "V" and found.names is None:
        return "opaque bytes (if lhotse wrote them, adopt the manifest that names them)"
    return "compound" if found.names is not None else found.str

"""Elements of variable length in an HDF5 file: their places, which HDF5's interface does not tell.

As HDF5's file format has it (III.E, Global Heap), with 8 bytes an address: an element is its
length (u32), the address of a collection of the global heap (u64) and the number of an object in it
(u32). A collection is "GCOL", version 1, 3 bytes, its own size (u64), and objects: number (u16),
references (u16), 4 bytes, size (u64), and the bytes, filled up to a multiple of 8. Object 0 is free
space.
"""

from __future__ import annotations

import struct

from featcache.adoptable import ByteSource
from featcache.errors import AdoptionError

ELEMENT = struct.Struct("<IQI")
COLLECTION = struct.Struct("<4sB3xQ")
OBJECT = struct.Struct("<HH4xQ")


class GlobalHeap:
    """The global heap of a file."""

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

"""Samples of WebDataset, as the bytes in a tar that lie around the arrays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from featcache.container_files import bytes_at
from featcache.interface import EncodedArray, Extent, FeatureSpec
from featcache_backends._npy_header import npy_header
from featcache_backends._tar_members import BLOCK_BYTES, padded, tar_header

SMALL_BYTES = 1 << 13  # pieces smaller than this are put together: each costs a microsecond
ENCODED = {ord(char): f"%{ord(char):02X}" for char in "%./"} | {
    code: "".join(f"%{byte:02X}" for byte in chr(code).encode())
    for code in (*range(0x20), *range(0x7F, 0xA0))
}


class TarSample:
    """A sample of a tar: all bytes but those of its arrays, which it leaves room for.

    Args:
        features: in the order of declaration.
        id: of the utterance.
        arrays: by feature, the number of rows and of bytes.
    """

    def __init__(
        self, features: Sequence[FeatureSpec], id: str, arrays: Mapping[str, tuple[int, int]]
    ) -> None:
        key = id.translate(ENCODED)
        self._names = [feature.name for feature in features]
        # the bytes in front of each array, and behind the last one, and where they begin
        self._frames: list[tuple[int, bytes]] = []
        self._room: dict[str, tuple[int, int]] = {}  # where each array starts, and its bytes
        self.nbytes = 0
        shapes: list[str] = []
        padding = b""
        for feature in features:
            rows, nbytes = arrays[feature.name]
            npy, shape = _npy_and_shape(feature, rows)
            size = len(npy) + nbytes
            self._add_frame(padding + tar_header(f"{key}.{feature.name}.npy", size) + npy)
            self._room[feature.name] = (self.nbytes, nbytes)
            self.nbytes += nbytes
            padding = bytes(-size % BLOCK_BYTES)
            shapes.append(shape)
        # what `json.dumps` makes of it all
        text = f'{{"id": {json.dumps(id)}, "features": {{{", ".join(shapes)}}}}}'.encode()
        self._add_frame(padding + tar_header(f"{key}.json", len(text)) + padded(text))

    def _add_frame(self, frame: bytes) -> None:
        self._frames.append((self.nbytes, frame))
        self.nbytes += len(frame)

    def extents(self, container: str, begin: int) -> dict[str, tuple[Extent, ...]]:
        """Return the places of the arrays in a sample that begins at `begin`."""
        return {
            name: (Extent(container, begin + start, nbytes),) if nbytes else ()
            for name, (start, nbytes) in self._room.items()
        }

    def filled(self, arrays: Mapping[str, EncodedArray]) -> Iterator[bytes | memoryview]:
        """Yield all bytes of the sample, those of its arrays among them."""
        for name, (_, frame) in zip(self._names, self._frames, strict=False):
            yield frame
            yield from arrays[name].blocks
        yield self._frames[-1][1]

    def lies_in(
        self, file: BinaryIO, begin: int, extents: Mapping[str, tuple[Extent, ...]]
    ) -> bool:
        """Whether a shard holds the sample from `begin` on: compares all but the arrays."""
        return extents == self.extents(Path(file.name).name, begin) and all(
            bytes_at(file.fileno(), len(frame), begin + start) == frame
            for start, frame in self._frames
        )


class TarPieces:
    """Pieces of bytes to be written one behind the other, small ones put together."""

    def __init__(self) -> None:
        self._pieces: list[bytes | memoryview] = []
        self._small: list[bytes | memoryview] = []

    def add(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Put pieces behind those that there are."""
        for piece in pieces:
            if len(piece) < SMALL_BYTES:
                self._small.append(piece)
            else:
                self._pieces += [b"".join(self._small), piece]
                self._small = []

    def taken(self) -> list[bytes | memoryview]:
        """Return them all, and begin anew."""
        pieces = [*self._pieces, b"".join(self._small)]
        self._pieces, self._small = [], []
        return pieces


@lru_cache(maxsize=4096)  # utterances have few lengths
def _npy_and_shape(feature: FeatureSpec, rows: int) -> tuple[bytes, str]:
    """Return the header of an array's `.npy`, and what stands of it in the JSON member."""
    shape = feature.shape(rows)
    told = json.dumps({"dtype": feature.dtype, "shape": shape})
    return npy_header(feature.storage_dtype, shape), f"{json.dumps(feature.name)}: {told}"

"""Digests of the pages of a file in which a library writes, and we beside it.

Pages that lie within arrays are hashed while these are in hand. The others are read when the file
is finished; what there is of arrays in them must be what was in hand.
"""

from __future__ import annotations

import errno
import os
from array import array
from typing import BinaryIO

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from featcache.container_files import PAGE_BYTES, Pages, bytes_at


class PagePieces:
    """Pieces of a file whose bytes were in hand, each within one page."""

    def __init__(self) -> None:
        self._begins, self._sizes, self._digests = array("q"), array("q"), array("Q")
        self._begin = self._end = 0  # of the piece that may go on
        self._state = xxh3_64()  # of that

    def add(self, offset: int, data: memoryview) -> None:
        """Hash bytes that lie in the file from `offset` on."""
        if offset != self._end:
            self._cut()
            self._begin = self._end = offset
        start = 0
        while start < len(data):
            piece = data[start : start + PAGE_BYTES - self._end % PAGE_BYTES]
            start += len(piece)
            self._end += len(piece)
            self._state.update(piece)
            if self._end % PAGE_BYTES == 0:
                self._cut()

    def _cut(self) -> None:
        if self._begin < self._end:
            self._note(self._state.intdigest())
            self._state.reset()

    def _note(self, digest: int) -> None:
        self._begins.append(self._begin)
        self._sizes.append(self._end - self._begin)
        self._digests.append(digest)
        self._begin = self._end

    def pages_of(self, file: BinaryIO) -> Pages:
        """Return the digests of the pages of the finished file.

        Raises `OSError` if a piece in a page that is read is not what was in hand.
        """
        self._cut()
        begins = np.array(self._begins, np.int64)
        order = np.argsort(begins)
        begins = begins[order]
        sizes = np.array(self._sizes, np.int64)[order]
        digests = np.array(self._digests, np.uint64)[order]
        pages = np.zeros(-(-os.fstat(file.fileno()).st_size // PAGE_BYTES), np.uint64)
        bounds = np.arange(len(pages) + 1) * PAGE_BYTES
        firsts = begins.searchsorted(bounds).tolist()  # of the pieces of each page
        if firsts[-1] < len(begins):
            raise _not_written(file, int(begins[-1]))
        whole = sizes == PAGE_BYTES
        known = begins[whole] // PAGE_BYTES
        pages[known] = digests[whole]
        for number in np.setdiff1d(np.arange(len(pages)), known).tolist():
            page = memoryview(bytes_at(file.fileno(), PAGE_BYTES, number * PAGE_BYTES))
            pages[number] = xxh3_64_intdigest(page)
            first, last = firsts[number], firsts[number + 1]
            starts = (begins[first:last] - number * PAGE_BYTES).tolist()
            lengths = sizes[first:last].tolist()
            found = [
                xxh3_64_intdigest(page[start : start + length])
                for start, length in zip(starts, lengths, strict=True)
            ]
            wrong = np.flatnonzero(np.array(found, np.uint64) != digests[first:last])
            if len(wrong):
                raise _not_written(file, int(begins[first + wrong[0]]))
        return pages


def _not_written(file: BinaryIO, offset: int) -> OSError:
    what = f"the array at byte {offset} is not what was written"
    return OSError(errno.EIO, what, str(file.name))

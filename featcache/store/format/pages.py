"""Pages: the checksums of a container file, a page at a time.

Any piece of it can be checked alone by them.
"""

from __future__ import annotations

import os

import numpy as np
import xxhash

from featcache.container_files import PAGE_BYTES, Pages, bytes_at

DIGEST_BYTES = 16  # of a container


def page_count(size: int) -> int:
    """Return the number of pages of a file; the last one may be short, an empty file has none."""
    return -(-size // PAGE_BYTES)


def pages_of(descriptor: int, first: int = 0, count: int | None = None) -> Pages:
    """Read pages of an open file, from page `first` on, and return the xxh3-64 of each."""
    size = os.fstat(descriptor).st_size
    total = page_count(size)
    last = total if count is None else min(first + count, total)
    pages = np.empty(max(last - first, 0), np.uint64)
    for number in range(first, last):
        pages[number - first] = xxhash.xxh3_64_intdigest(
            bytes_at(descriptor, PAGE_BYTES, number * PAGE_BYTES)
        )
    return pages


def container_digest(pages: Pages, size: int) -> bytes:
    """Return the digest of a container.

    That is the xxh3-128 of the checksums of its pages and its size, both u64.

    16 bytes, the most significant one first.
    """
    state = xxhash.xxh3_128(
        np.ascontiguousarray(pages, "<u8").data.cast("B") if len(pages) else b""
    )
    state.update(size.to_bytes(8, "little"))
    return state.digest()

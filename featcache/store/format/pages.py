"""Pages: checksums of a container file, a page each, so that any piece can be checked alone."""

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
    total = page_count(os.fstat(descriptor).st_size)
    last = total if count is None else min(first + count, total)
    pages = (bytes_at(descriptor, PAGE_BYTES, page * PAGE_BYTES) for page in range(first, last))
    return np.fromiter(map(xxhash.xxh3_64_intdigest, pages), np.uint64)


def container_digest(pages: Pages, size: int) -> bytes:
    """Return the digest of a container: 16 bytes, the most significant one first.

    That is the xxh3-128 of the checksums of its pages and of its size, u64 each.
    """
    return xxhash.xxh3_128_digest(pages.astype("<u8").tobytes() + size.to_bytes(8, "little"))

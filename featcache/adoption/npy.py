"""A folder of `.npy` files of one array each, as `numpy.save` writes them; folders may nest.

Ids are the paths below the folder without `.npy`: `speaker/utt-1.npy` is `speaker/utt-1`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from featcache.adoptable import Found, Options, Place, one_piece, stored_as
from featcache.adoption.npy_header import MOST, NpyHeader, header_bytes, read_npy_header
from featcache.errors import AdoptionError

SUFFIX = ".npy"
_LOOK_AT = 64  # files, to recognise a folder
_AT_ONCE = 512  # files that a thread reads before it takes the next
_THREADS = 8


class NpyFolder:
    """A folder of `.npy` files."""

    name = "npy"

    def recognises(self, place: Place, what: str) -> bool:
        """Tell whether the first files of a folder are `.npy` files."""
        if what:
            return False
        try:
            first = list(itertools.islice(place.files(), _LOOK_AT))
        except AdoptionError:
            return False
        return bool(first) and all(path.endswith(SUFFIX) for path in first)

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Read the header of each file."""
        paths = [path for path in place.files() if path.endswith(SUFFIX)]
        if not paths:
            raise AdoptionError(f"there is no {SUFFIX} file in {place.name!r}")
        batches = _batches(paths)
        with ThreadPoolExecutor(_THREADS) as threads:
            read = threads.map(lambda batch: _headers(place, batch), batches)
            headers = list(itertools.chain.from_iterable(read))
        ids = [path.removesuffix(SUFFIX) for path in paths]
        shapes = [header.shape for header in headers]
        dtypes = [header.dtype for header in headers]
        stored = stored_as(options.feature, ids, shapes, dtypes, options.time_axis)
        offsets = np.fromiter((header.offset for header in headers), np.int64, len(headers))
        feature = one_piece(stored, np.arange(len(paths)), offsets)
        return Found(paths, ids, {options.feature: feature})


def _batches(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(paths), _AT_ONCE):
        yield paths[start : start + _AT_ONCE]


def _headers(place: Place, paths: Sequence[str]) -> list[NpyHeader]:
    headers = []
    for path in paths:
        with place.open(path) as source:
            front = source.read(0, min(source.size, MOST))
            needed = header_bytes(front, repr(path))
            if needed > len(front):
                front = source.read(0, needed)
            headers.append(read_npy_header(front, source.size, repr(path)))
    return headers


KIND = NpyFolder()

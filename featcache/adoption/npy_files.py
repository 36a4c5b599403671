"""Files of `.npy` of one array each, many of them: where the arrays lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from featcache.adoptable import FoundFeature, Place, one_piece, stored_as
from featcache.adoption.npy_header import NpyHeader, read_npy_header
from featcache.adoption.scp import is_there

LENGTHS = (".len", ".lengths")  # of files beside an array that is cut into utterances
THREADS = 8  # network file systems answer many at once
FILES_A_TASK = 256


def npy_header_of(place: Place, path: str, id: str) -> NpyHeader:
    """Return the header of a file; raises `AdoptionError`, naming the id, if it has none."""
    where = f"utterance {id!r}, {path!r}"
    with place.open(path) as source:
        return read_npy_header(source.read, 0, source.size, where)


def lengths_beside(place: Place, path: str) -> str:
    """Return the file beside an array that has the lengths of utterances; "" if there is none."""
    stem = path.removesuffix(".npy")
    return next((stem + end for end in LENGTHS if is_there(place, stem + end)), "")


def npy_feature(
    place: Place,
    name: str,
    ids: Sequence[str],
    paths: Sequence[str],
    numbers: Sequence[int],
    time_axis: Literal[0, "auto"] | None,
) -> FoundFeature:
    """Return a feature whose arrays are files.

    Args:
        place: of the source.
        name: of the feature.
        ids: of the utterances.
        paths: of their files.
        numbers: of the files in `Found.containers`.
        time_axis: as in `Options`.
    """

    def headers(begin: int) -> list[NpyHeader]:
        some = slice(begin, begin + FILES_A_TASK)
        return [
            npy_header_of(place, path, id) for path, id in zip(paths[some], ids[some], strict=True)
        ]

    with ThreadPoolExecutor(THREADS) as pool:
        chunks: Iterator[list[NpyHeader]] = pool.map(headers, range(0, len(ids), FILES_A_TASK))
        found = [header for chunk in chunks for header in chunk]
    shapes = [header.shape for header in found]
    stored = stored_as(name, ids, shapes, [header.dtype for header in found], time_axis)
    return one_piece(stored, numbers, [header.offset for header in found])

"""Writing an index: utterances in any order are put into the canonical one, a column at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache.store.files import Number, digest_file, save_column, sync_directory
from featcache.store.index import FeatureColumns, Hashes, Index
from featcache.store.journal import Utterance
from featcache.store.order import Ints, order_of, take


def index_of(utterances: Sequence[Utterance], containers: Mapping[str, int], names: Sequence[str]) -> Index:
    """Return the columns of utterances as they are, for `save_index`; `containers` numbers the files."""
    keys = [utterance.id.encode() for utterance in utterances]
    features = {}
    for name in names:
        placed = [utterance.arrays[name] for utterance in utterances]
        extents = [extent for array in placed for extent in array.extents]
        features[name] = FeatureColumns(
            rows=np.array([array.rows for array in placed], np.int64),
            checksum=np.array([array.checksum for array in placed], np.uint64),
            first=_ends([len(array.extents) for array in placed]),
            container=np.array([containers[extent.container] for extent in extents], np.int32),
            offset=np.array([extent.offset for extent in extents], np.int64),
            nbytes=np.array([extent.nbytes for extent in extents], np.int64),
        )
    return Index(
        hashes=np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys)),
        hash_rows=np.arange(len(keys)),
        id_ends=_ends([len(key) for key in keys]),
        id_bytes=np.frombuffer(b"".join(keys), np.uint8),
        features=features,
    )


def save_index(
    indexes: Sequence[Index], container_counts: Sequence[int], names: Sequence[str], directory: Path
) -> dict[str, str]:
    """Join indexes, and write the columns into a new directory, durably; returns the digest of each file.

    Args:
        indexes: of parts, whose containers are numbered on from those of the one before.
        container_counts: how many containers each of them has.
        names: of the features.
        directory: is made.
    """
    directory.mkdir()
    files = []
    for name, column in _columns(indexes, container_counts, names):  # one in memory: together they may be gigabytes
        files.append(f"{name}.npy")
        save_column(directory / files[-1], column)
    sync_directory(directory)
    return {file: digest_file(directory / file) for file in files}


def _columns(
    indexes: Sequence[Index], container_counts: Sequence[int], names: Sequence[str]
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    id_bytes = _joined([*(index.id_bytes for index in indexes), np.zeros(8, np.uint8)], np.uint8)
    id_ends = _ends(_joined([np.diff(index.id_ends) for index in indexes], np.int64))
    order = order_of(id_bytes, id_ends)
    id_bytes, id_ends = take(id_bytes, id_ends, order)
    yield "id_bytes", id_bytes
    yield "id_ends", id_ends
    del id_bytes, id_ends
    hashes = _joined([_hashes_by_row(index) for index in indexes], np.uint64)[order]
    hash_rows = np.argsort(hashes, kind="stable").astype(np.int64, copy=False)
    yield "hashes", hashes[hash_rows]
    yield "hash_rows", hash_rows
    del hashes, hash_rows
    shifts = np.cumsum([0, *container_counts])
    for name in names:
        parts = [index.features[name] for index in indexes]
        yield f"{name}.rows", _joined([part.rows for part in parts], np.int64)[order]
        yield f"{name}.checksum", _joined([part.checksum for part in parts], np.uint64)[order]
        counts = _joined([np.diff(part.first) for part in parts], np.int64)
        first = _ends(counts[order])
        yield f"{name}.first", first
        # the extents of row r come, in their order, from those of row order[r]
        source = _ends(counts)[order]
        source -= first[:-1]
        source = np.repeat(source, counts[order])
        source += np.arange(first[-1])
        del counts, first
        containers = [part.container + shift for part, shift in zip(parts, shifts, strict=False)]
        yield f"{name}.container", _joined(containers, np.int32)[source]
        yield f"{name}.offset", _joined([part.offset for part in parts], np.int64)[source]
        yield f"{name}.nbytes", _joined([part.nbytes for part in parts], np.int64)[source]


def _hashes_by_row(index: Index) -> Hashes:
    hashes = np.empty(len(index), np.uint64)
    hashes[index.hash_rows] = index.hashes
    return hashes


def _ends(counts: Sequence[int] | Ints) -> Ints:
    ends = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def _joined(columns: Sequence[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    return np.concatenate([np.empty(0, dtype), *columns]).astype(dtype, copy=False)

"""Caches whose index is written as any other, and whose arrays are made up: a file, or holes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache import FeatureStorageConfig
from featcache.format import (
    AnnotationEntry,
    Column,
    ContainerColumns,
    Manifest,
    PartEntry,
    Strings,
    container_columns,
    index_file,
    new_generation_name,
    save_columns,
    stored_columns,
    string_columns,
    write_manifest,
)

Named = Iterable[tuple[str, NDArray[Any]]]


def write_index(
    path: Path,
    feature: FeatureStorageConfig,
    dim: int,
    count: int,
    columns: Named,
    files: Mapping[str, int],
    annotations: Mapping[str, Column],
    prefix: str = "utt",
) -> None:
    """Write index and manifest of utterances utt-00000000, ... of one part, "made".

    Args:
        path: of the cache, with its containers.
        feature: of frames of `dim` numbers.
        dim: numbers of a frame.
        count: number of utterances.
        columns: lengths and places of its arrays, by the names that they have in an index.
        files: containers and their sizes.
        annotations: their columns by name.
        prefix: of the ids, in the place of "utt".
    """
    name = feature.name
    containers = ContainerColumns.of(list(files), list(files.values()))
    chain = itertools.chain(
        _id_columns(count, prefix),
        columns,
        container_columns([""], [containers]).items(),
        string_columns("failed", Strings.of([])),
        *(stored_columns(each, column) for each, column in annotations.items()),
    )
    file = index_file(new_generation_name(1))
    manifest = Manifest(
        {"features": {name: feature.to_json()}},
        1,
        index=file,
        index_digest=save_columns(path / file, chain),
        complete=True,
        rows=count,
        dims={name: (dim,)},
        parts=(PartEntry("made", count, {name: 0}, ""),),
        annotations={
            each: AnnotationEntry(column.kind, carried=False)
            for each, column in annotations.items()
        },
    )
    write_manifest(path, manifest)


def _id_columns(count: int, prefix: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the columns of the ids `<prefix>-00000000` and on."""
    width = len(prefix) + 9
    ids = np.empty((count, width), np.uint8)
    ids[:, : len(prefix) + 1] = np.frombuffer(f"{prefix}-".encode(), np.uint8)
    for digit in range(8):
        ids[:, -1 - digit] = np.arange(count) // 10**digit % 10 + ord("0")
    yield "id_ends", np.arange(count + 1) * width
    yield "id_bytes", ids.reshape(-1)
    data = ids.reshape(-1).data
    keys = (data[at : at + width] for at in range(0, len(data), width))
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, count)
    rows = np.argsort(hashes)
    yield "hashes", hashes[rows]
    yield "hash_rows", rows

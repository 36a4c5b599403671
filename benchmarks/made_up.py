"""Caches whose index is written as any other, and whose arrays are made up: a file, or holes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash

from featcache import FeatureStorageConfig
from featcache.format.annotation_columns import Column, stored_columns
from featcache.format.columns import Strings, save_columns
from featcache.format.index import DIGEST_BYTES, ContainerColumns, FeatureColumns, Index
from featcache.format.manifest import (
    AnnotationEntry,
    Manifest,
    PartEntry,
    index_file,
    new_generation_name,
    write_manifest,
)
from featcache.format.part import container_columns, index_columns, rows_of, string_columns

ID_BYTES = 12  # utt-00000007


def write_index(
    path: Path,
    feature: FeatureStorageConfig,
    dim: int,
    columns: FeatureColumns,
    files: Mapping[str, int],
    annotations: Mapping[str, Column],
) -> None:
    """Write index and manifest of utterances utt-00000000, ... of one part, "made".

    Args:
        path: of the cache, with its containers.
        feature: of frames of `dim` numbers.
        dim: numbers of a frame.
        columns: lengths and places of its arrays.
        files: containers and their sizes.
        annotations: their columns by name.
    """
    count = len(columns.rows)
    ids = b"".join(b"utt-%08d" % number for number in range(count))
    keys = (ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES))
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, count)
    hash_rows = np.argsort(hashes)
    containers = ContainerColumns(
        Strings.of(list(files)),
        np.array(list(files.values()), np.int64),
        np.zeros(len(files) * DIGEST_BYTES, np.uint8),
        np.zeros(len(files), np.int32),
    )
    strings = Strings(np.arange(count + 1) * ID_BYTES, np.frombuffer(ids, np.uint8))
    name = feature.name
    index = Index(hashes[hash_rows], hash_rows, strings, {name: columns}, containers, {})
    chain = itertools.chain(
        index_columns([index], rows_of([index], []), [name], {}),
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

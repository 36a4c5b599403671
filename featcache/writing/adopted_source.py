"""Publishing what an adopted source holds, as the first generation of a cache or of a build."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from featcache.adoptable import Found
from featcache.errors import CacheError, NotACacheError
from featcache.format.annotation_columns import Column
from featcache.format.annotations import Values, check_annotations, kinds_of
from featcache.format.feature_sets import stored_sets
from featcache.format.files import explained
from featcache.format.index import ContainerColumns, FeatureColumns, Index
from featcache.format.journal import Header
from featcache.format.manifest import ADOPTED, Adopted, read_manifest
from featcache.reading.containers import read_roots, write_root
from featcache.writing.compact import seal_adopted
from featcache.writing.held import HeldCache
from featcache.writing.open_part import Declarations
from featcache.writing.session import session_of
from featcache.writing.sets import directory_to_write


@dataclass(frozen=True, slots=True)
class Source:
    """A source and its files, as they were when they were first looked at."""

    kind: str
    root: Path  # without links on the way
    paths: list[str]  # relative to the root
    sizes: list[int]
    mtimes: list[int]  # nanoseconds


def publish_adopted(
    cache: Path, features: Declarations, found: Found, source: Source, *, overwrite: bool
) -> None:
    """Make a source a cache, or a feature set of one; whoever is killed here runs the same again.

    Raises `CacheError` where something is stored already, unless that is to be overwritten.
    """
    index = _index_of(found, source)
    annotations = _columns_of(found, features)
    directory = directory_to_write(cache, features)
    if not overwrite and _rows_in(directory):
        raise CacheError(
            f"cache {str(directory)!r} holds something already; give another directory, or "
            "overwrite=True to replace it"
        )
    made_from = {ADOPTED: source.kind}
    with (
        explained(directory, lambda: "the source is as it was"),
        session_of(directory, features, made_from, overwrite=overwrite) as session,
    ):
        key = _key_of((directory, *(each for each, _ in stored_sets(cache))), source)
        write_root(directory, key, source.root)
        header = _header_for(session.held, found)
        seal_adopted(directory, header, Adopted(key, False), index, annotations)
        session.close(True, publish=True)


def _rows_in(cache: Path) -> int:
    try:
        return read_manifest(cache).rows
    except NotACacheError:
        return 0


def _key_of(caches: Iterable[Path], source: Source) -> str:
    """Return a key for the root of a source, which no other root has in a cache or its sets."""
    known, name = [read_roots(each) for each in caches], source.root.name or "root"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(
        key for key in names if all(each.get(key, source.root) == source.root for each in known)
    )


def _header_for(held: HeldCache, found: Found) -> Header:
    """Return the header of the part, which replaces what a killed run left sealed."""
    return Header(
        build=held.manifest.building,
        fingerprint=held.manifest.building_fingerprint,
        dims={name: feature.dims for name, feature in found.features.items()},
        block_rows=dict.fromkeys(found.features, 0),
        replaces=tuple(part.entry.name for part in held.sealed()),
    )


def _index_of(found: Found, source: Source) -> Index:
    features = {
        name: FeatureColumns(
            rows=feature.rows,
            checksum=np.zeros(len(found.ids), np.uint64),
            first=feature.first,
            container=feature.container,
            offset=feature.offset,
            nbytes=feature.nbytes,
            block_rows=feature.block_rows,
            skip=feature.skip,
        )
        for name, feature in found.features.items()
    }
    files = ContainerColumns.of(source.paths, source.sizes)
    containers = replace(files, mtimes=np.array(source.mtimes, np.int64))
    return Index.of(found.ids, features, containers, {})


def _columns_of(found: Found, features: Declarations) -> dict[str, Column]:
    """Return annotations as columns, checked as those of a writer are."""
    names = list(found.annotations)
    values: list[Values] = [
        check_annotations(id, dict(zip(names, each, strict=True)), features)
        for id, each in zip(found.ids, zip(*found.annotations.values(), strict=True), strict=False)
    ]
    kinds: Mapping[str, str] = kinds_of(zip(found.ids, values, strict=False))
    return {
        name: Column.of([each.get(name) for each in values], kind) for name, kind in kinds.items()
    }

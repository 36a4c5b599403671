"""Publishes a generation: the sealed parts become one index and one set of statistics, then the manifest names them."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from featcache.errors import DuplicateIdError, FeatureError
from featcache.stats import FeatureStats
from featcache.store.columns import save_index
from featcache.store.fingerprint import fingerprint_digest
from featcache.store.index import Index, load_index
from featcache.store.journal import read_header
from featcache.store.lock import is_locked
from featcache.store.manifest import PARTS, Manifest, write_manifest
from featcache.store.part import SealedPart, list_parts, remove_part, save_stats
from featcache.store.verify import verify_containers

Dims = Mapping[str, tuple[int, ...]]


def sealed_parts(cache: Path, build: int, fingerprint: str) -> list[SealedPart]:
    """List the sealed parts of a build that were made with a fingerprint, in the order of their names."""
    return [
        part
        for _, part in list_parts(cache)
        if part is not None and (part.header.build, part.header.fingerprint) == (build, fingerprint)
    ]


def publish(cache: Path, manifest: Manifest, complete: bool) -> Manifest:
    """Publish all sealed parts of the build that `manifest` is building as the next generation, and return it.

    Only the holder of the cache's lock may call this. Parts of earlier builds are removed once it is out.
    """
    parts = sealed_parts(cache, manifest.building, manifest.building_fingerprint)
    names = list(manifest.features)
    after = dataclasses.replace(
        manifest,
        generation=manifest.generation + 1,
        build=manifest.building,
        complete=complete,
        rows=sum(part.entry.rows for part in parts),
        dims=_common_dims(parts),
        parts=tuple(part.entry for part in parts),
    )
    index_directory, stats_directory = cache / after.index_directory, cache / after.stats_directory
    for directory in (index_directory, stats_directory):  # left by a writer that died while it published
        shutil.rmtree(directory, ignore_errors=True)
    indexes = [part.index(cache, names) for part in parts]
    written = save_index(indexes, [len(part.entry.containers) for part in parts], names, index_directory)
    digests = {f"{after.index_directory}/{k}": v for k, v in written.items()}
    _check_unique(cache, load_index(index_directory, []), parts, names)
    stats = _merged_stats(cache, parts, after)
    digests |= {f"{after.stats_directory}/{k}": v for k, v in save_stats(stats, stats_directory).items()}
    after = dataclasses.replace(after, digests=digests)
    verify_containers(cache, after)
    write_manifest(cache, after)
    remove_superseded(cache, after)
    return after


def _common_dims(parts: Sequence[SealedPart]) -> Dims:
    for part in parts[1:]:
        for name, dims in part.header.dims.items():
            if dims != parts[0].header.dims[name]:
                raise FeatureError(
                    f"feature {name!r} has frames of shape {parts[0].header.dims[name]} in part "
                    f"{parts[0].entry.name!r} and of {dims} in {part.entry.name!r}; remove the wrong one"
                )
    return parts[0].header.dims if parts else {}


def _check_unique(cache: Path, index: Index, parts: Sequence[SealedPart], names: list[str]) -> None:
    same_hash = np.flatnonzero(index.hashes[1:] == index.hashes[:-1])
    ids = [index.id(row) for row in index.hash_rows[np.union1d(same_hash, same_hash + 1)].tolist()]
    if len(set(ids)) < len(ids):
        id = max(ids, key=ids.count)
        holders = [part.entry.name for part in parts if part.index(cache, names).find(id) >= 0]
        raise DuplicateIdError(
            f"utterance {id!r} is in parts {' and '.join(map(repr, holders))} of {str(cache / PARTS)!r}; "
            "remove one of them, its utterances will be computed again"
        )


def _merged_stats(cache: Path, parts: Sequence[SealedPart], manifest: Manifest) -> dict[str, FeatureStats]:
    merged = {}
    for name, feature in manifest.features.items():
        if feature["stats"]:
            stats = FeatureStats.empty(manifest.dims.get(name, ()))
            for part in parts:
                stats = stats.merge(part.stats(cache, name))
            merged[name] = stats
    return merged


def remove_superseded(cache: Path, manifest: Manifest) -> None:
    """Remove what no reader of this generation or of the one before needs, and the parts of overwritten builds.

    These are the parts of lower builds, and those of an overwrite that was given up for the one that took its number.
    """
    for kind in ("index", "stats"):
        for directory in cache.glob(f"{kind}-" + "[0-9]" * 6):
            if int(directory.name[-6:]) < manifest.generation - 1:
                shutil.rmtree(directory)
    current = (manifest.build, fingerprint_digest(manifest.fingerprint))
    for name, part in list(list_parts(cache)):
        directory = cache / PARTS / name
        header = part.header if part is not None else read_header(directory)
        if header is None or header.build > manifest.build or (header.build, header.fingerprint) == current:
            continue
        if not is_locked(directory):
            remove_part(directory)

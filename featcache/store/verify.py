"""Checks that the bytes of a cache are the ones that were written."""

from __future__ import annotations

from pathlib import Path

import xxhash

from featcache.errors import CorruptCacheError
from featcache.store.extents import Containers
from featcache.store.files import digest_file
from featcache.store.index import Index
from featcache.store.manifest import PARTS, Manifest
from featcache.store.part import SEAL, read_part


def verify_containers(cache: Path, manifest: Manifest) -> None:
    """Raise `CorruptCacheError` unless all containers are there, in the size that was written."""
    for part in manifest.parts:
        for file, size in part.containers:
            found = (cache / file).stat().st_size if (cache / file).exists() else None
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes, not the {size} that were written"
                raise CorruptCacheError(
                    f"container {str(cache / file)!r} {what}; put it back, or remove its part, "
                    f"{str(cache / PARTS / part.name)!r}, to compute its utterances again"
                )


def verify_columns(cache: Path, manifest: Manifest) -> None:
    """Raise `CorruptCacheError` unless index, statistics and parts have the checksums that their parents name."""
    digests = dict(manifest.digests)
    for entry in manifest.parts:
        directory = f"{PARTS}/{entry.name}"
        digests[f"{directory}/{SEAL}"] = entry.digest
        part = read_part(cache, entry.name)
        if part is not None:
            digests |= {f"{directory}/{file}": value for file, value in part.digests.items()}
    for file, expected in digests.items():
        if not (cache / file).exists():
            raise CorruptCacheError(f"{str(cache / file)!r} is missing")
        if digest_file(cache / file) != expected:
            raise CorruptCacheError(f"{str(cache / file)!r} is damaged: its checksum does not match")


def verify_arrays(manifest: Manifest, index: Index, containers: Containers) -> None:
    """Raise `CorruptCacheError`, naming the utterance, unless all stored arrays have the checksums of the index."""
    for name in manifest.features:
        columns = index.features[name]
        for row in range(len(index)):
            state = xxhash.xxh3_64()
            for extent in range(int(columns.first[row]), int(columns.first[row + 1])):
                container, offset = int(columns.container[extent]), int(columns.offset[extent])
                state.update(containers.view(container, offset, int(columns.nbytes[extent])).data)
            if state.intdigest() != int(columns.checksum[row]):
                raise CorruptCacheError(
                    f"utterance {index.id(row)!r}, feature {name!r} is damaged: its checksum does not match"
                )

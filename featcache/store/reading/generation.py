"""Opening the current generation of a cache: its manifest, and the index that this names."""

from __future__ import annotations

from pathlib import Path

from featcache.errors import CacheError, CorruptCacheError
from featcache.store.format.column_file import ColumnFile
from featcache.store.format.index import Index, read_index, read_strings
from featcache.store.format.manifest import Manifest, read_manifest
from featcache.store.format.strings import Strings
from featcache.store.reading.verify import raise_damage


def load_generation(
    path: Path, *, mapped: bool = True, checked: bool = False
) -> tuple[Manifest, Index, Strings]:
    """Read the manifest, the index and the failed ids of the current generation.

    Others may be published meanwhile.

    Args:
        path: the cache directory.
        mapped: map the index into memory; False reads it.
        checked: compare all of the index with its checksums.
    """
    manifest = read_manifest(path)
    while True:
        try:
            file = ColumnFile(path, manifest.index, mapped=mapped, expected=manifest.index_digest)
        except FileNotFoundError as error:
            # published anew in between: the columns of the generation before go then
            newer = read_manifest(path)
            if newer.write_id == manifest.write_id:
                raise CacheError(
                    f"cache {str(path)!r} lacks {error.filename!r}; put it back, or remove "
                    "featcache.json and write "
                    "the cache again: what is sealed is kept"
                ) from error
            manifest = newer
            continue
        with file:
            if checked:
                raise_damage(file.damage())
            index, failed = read_index(file, list(manifest.features)), read_strings(file, "failed")
        if len(index) != manifest.rows:
            raise CorruptCacheError(
                f"cache {str(path)!r} is damaged: {len(index)} of {manifest.rows} rows"
            )
        parts = index.containers.parts
        if len(parts) and not 0 <= int(parts.min()) <= int(parts.max()) < len(manifest.parts):
            raise CorruptCacheError(
                f"cache {str(path)!r} is damaged: its containers are in parts that are not there"
            )
        missing = [
            name
            for name, feature in manifest.features.items()
            if feature["stats"] and name not in index.stats
        ]
        if missing:
            raise CorruptCacheError(
                f"cache {str(path)!r} is damaged: it has no statistics of {missing[0]!r}"
            )
        return manifest, index, failed

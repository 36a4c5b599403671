"""Manifest and columns of a generation, read while others may publish."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from featcache.errors import CacheError, CorruptCacheError
from featcache.store.format.column_file import ColumnFile
from featcache.store.format.index import Index, read_index, read_strings
from featcache.store.format.manifest import Manifest, manifest_file, read_manifest
from featcache.store.format.strings import Strings
from featcache.store.reading.verify import raise_damage


def _manifest_of(path: Path, name: str | None) -> Manifest:
    """Read the manifest of a generation; that of the current one is what counts of it."""
    current = read_manifest(path)
    if name is None or name == current.name:
        return current
    return read_manifest(path, manifest_file(name))


def opened_columns(
    path: Path, mapped: bool, checked: bool, name: str | None
) -> tuple[Manifest, Index, Strings, ColumnFile]:
    """Read manifest, index and failed ids, while others may publish.

    The file of columns comes, too: those of annotations are taken out of it when they are needed.
    With `checked`, all of the index is compared with its checksums.
    """
    manifest = _manifest_of(path, name)
    while True:
        try:
            file = ColumnFile(path, manifest.index, mapped=mapped, expected=manifest.index_digest)
            break
        except FileNotFoundError as error:
            # others may have published since: the columns of the generation before go then
            newer = _manifest_of(path, name)
            if newer.write_id == manifest.write_id:
                raise CacheError(
                    f"cache {str(path)!r} lacks {error.filename!r}; put it back, or remove "
                    "featcache.json and write the cache again: what is sealed is kept"
                ) from error
            manifest = newer
    with file.until_read(later=bool(manifest.annotations)):
        if checked:
            raise_damage(file.damage())
        index, failed = read_index(file, list(manifest.features)), read_strings(file, "failed")
    for wrong in _misfits(manifest, index):
        raise CorruptCacheError(f"cache {str(path)!r} is damaged: {wrong}")
    return manifest, index, failed, file


def _misfits(manifest: Manifest, index: Index) -> Iterator[str]:
    """Say in what an index is not what its manifest says."""
    if len(index) != manifest.rows:
        yield f"{len(index)} of {manifest.rows} rows"
    parts = index.containers.parts
    if len(parts) and not 0 <= int(parts.min()) <= int(parts.max()) < len(manifest.parts):
        yield "its containers are in parts that are not there"
    for name, feature in manifest.features.items():
        if feature["stats"] and manifest.is_collected and name not in index.stats:
            yield f"it has no statistics of {name!r}"

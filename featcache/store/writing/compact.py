"""Compacts a cache: parts are rewritten without what was deleted, small ones become few.

Afterwards no file of the cache holds a byte of what was deleted or replaced, or this is an error.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from featcache.container_files import sync_directory
from featcache.errors import CacheError, CorruptCacheError, StorageFullError
from featcache.store.format.column_file import ColumnFile
from featcache.store.format.index import Index, read_index
from featcache.store.format.lock import WriterLock
from featcache.store.format.manifest import MANIFESTS, PARTS, Manifest, manifest_file, read_manifest
from featcache.store.format.part import as_known, list_parts, remove_part
from featcache.store.reading.generation import Generation
from featcache.store.writing.adopted_part import seal_again
from featcache.store.writing.changes import Changes
from featcache.store.writing.completeness import Outcome
from featcache.store.writing.open_part import Declarations
from featcache.store.writing.publish import publish, sealed_parts
from featcache.store.writing.rewrite import check_space, rewrite, what_counts
from featcache.store.writing.small_parts import FANOUT, as_on_disk, packed, tiers

UNCHANGED = Outcome(complete=False, unchanged=True)
_log = logging.getLogger("featcache")


def merge_small(cache: Path, features: Declarations, manifest: Manifest) -> Manifest:
    """Make few parts of many small ones; return the manifest of then.

    Whatever was written is published before: where the parts must stay, the log says why.
    """
    if len(manifest.parts) < FANOUT:
        return manifest
    parts = as_known(sealed_parts(cache, manifest), manifest)
    try:
        for group in tiers(as_on_disk(cache, part) for part in parts):
            check_space(cache, group, manifest)
            rewrite(cache, features, manifest, [each.part for each in group])
    except (CorruptCacheError, StorageFullError) as error:
        _log.warning("small parts of %r stay as they are: %s", str(cache), error)
    now = {part.entry.name for part in sealed_parts(cache, manifest)}
    if now == {entry.name for entry in manifest.parts}:
        return manifest
    return publish(cache, manifest, UNCHANGED)


def refuse_tags(cache: Path, manifest: Manifest) -> None:
    """Raise `CacheError` while a tag holds what was deleted."""
    if in_the_way := dict(_tags_that_hold(cache, manifest)):
        told = "; ".join(f"{tag!r}: {why}" for tag, why in in_the_way.items())
        raise CacheError(
            f"tags of cache {str(cache)!r} hold what was deleted or replaced since ({told}); "
            "untag these generations, or compact with drop_tags=True; nothing was changed"
        )


def compact(cache: Path, features: Declarations, manifest: Manifest) -> Manifest:
    """Rewrite what holds deleted utterances, and small parts; return the manifest of then.

    The generation before goes, too, and tags that hold what was deleted. Only the holder of the
    cache's lock may call this.
    """
    in_the_way = dict(_tags_that_hold(cache, manifest))
    parts = as_known(sealed_parts(cache, manifest), manifest)
    groups = [*packed(what_counts(cache, part, list(features)) for part in parts)]
    copied = [each for each in itertools.chain(*groups) if not each.is_adopted]
    check_space(cache, copied, manifest)
    emptied = [each.part.entry.name for group in groups for each in group if not each.rows]
    for group in groups:
        filled = [each.part for each in group if each.rows]
        if filled and group[0].is_adopted:
            seal_again(cache, filled[0], manifest)
        elif filled:
            rewrite(cache, features, manifest, filled)
    left = any((cache / PARTS / name).exists() for name in manifest.replaced)
    if groups or in_the_way or left or manifest.previous is not None:
        changes = Changes(emptied=emptied, untagged=in_the_way, alone=True)
        manifest = publish(cache, manifest, UNCHANGED, changes)
    _remove_given_up(cache, manifest)
    for directory in filter(Path.exists, (cache / PARTS, cache / MANIFESTS, cache)):
        sync_directory(directory)  # or a power cut might bring back what was removed
    _check_gone(cache, manifest)
    return manifest


def _tags_that_hold(cache: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Give the tags that hold what the current generation does not, and say what of it."""
    current = Generation(cache).index if manifest.tags else None
    deleted = {entry.name for entry in manifest.parts if entry.tombstones}
    for tag, name in manifest.tags.items():
        tagged = manifest if name == manifest.name else read_manifest(cache, manifest_file(name))
        if deleted & {entry.name for entry in tagged.parts}:
            yield tag, "its parts hold them"
        elif current is not None and name != manifest.name:
            with ColumnFile(cache, tagged.index, expected=tagged.index_digest) as file:
                index = read_index(file, list(tagged.features))
            if count := _others(index, current):
                yield tag, f"{count} utterances"


def _others(index: Index, current: Index) -> int:
    """Count the utterances of a tag's index that the current one lacks, or has with other bytes.

    Those of an overwritten build, too: which of them were deleted and written again, nobody knows.
    """
    if not len(current) or not index.features.keys() <= current.features.keys():
        return len(index)
    places = np.minimum(current.hashes.searchsorted(index.hashes), len(current) - 1)
    there = current.hashes[places] == index.hashes
    ours, theirs = index.hash_rows, current.hash_rows[places]
    for name, columns in index.features.items():
        there &= columns.checksum[ours] == current.features[name].checksum[theirs]
    return int((~there).sum())


def _remove_given_up(cache: Path, manifest: Manifest) -> None:
    """Remove parts of overwrites that were given up."""
    for name, part in list(list_parts(cache)):
        if part is not None and part.header.build > manifest.build:
            lock = WriterLock(cache / PARTS / name)
            try:
                remove_part(cache / PARTS / name)
            finally:
                lock.release()


def _check_gone(cache: Path, manifest: Manifest) -> None:
    """Raise `CacheError` if anything lies among the parts that no kept generation names."""
    kept = [read_manifest(cache, manifest_file(name)) for name in {*manifest.tags.values()}]
    named = {entry.name for each in (manifest, *kept) for entry in each.parts}
    left = sorted(path.name for path in (cache / PARTS).glob("*") if path.name not in named)
    if left:
        raise CacheError(
            f"cache {str(cache)!r} is compacted, but these directories in {PARTS!r} belong to no "
            f"generation, and may hold what was deleted: {', '.join(map(repr, left))}; remove them"
        )

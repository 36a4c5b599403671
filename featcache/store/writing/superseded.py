"""Removes what no reader needs any more, once a newer generation is out."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from featcache.container_files import sync_directory
from featcache.errors import CacheError, CacheLockedError
from featcache.store.format.files import remove_unfinished
from featcache.store.format.fingerprint import fingerprint_digest
from featcache.store.format.journal import read_journal
from featcache.store.format.lock import WriterLock
from featcache.store.format.manifest import (
    INDEX,
    MANIFESTS,
    PARTS,
    Manifest,
    generation_number,
    kept_manifests,
    manifest_file,
    read_manifest,
)
from featcache.store.format.part import list_parts, remove_part

_log = logging.getLogger("featcache")


def remove_superseded(cache: Path, manifest: Manifest) -> None:
    """Remove what no reader of this generation or of the one before needs.

    And the parts of overwritten builds.

    These are the parts of lower builds, and those of an overwrite that was given up for the one
    that took its number. What a tag names stays.
    """
    sync_directory(cache)  # a killed writer may not have come to make its manifest durable
    kept = {manifest.name, manifest.previous, *manifest.tags.values()}
    for entry in list(cache.iterdir()):
        found = INDEX.fullmatch(entry.name)
        if found and found[1] not in kept and generation_number(found[1]) < manifest.generation:
            entry.unlink(missing_ok=True)
    for directory in (cache, cache / MANIFESTS):
        remove_unfinished(directory)
    for name in list(kept_manifests(cache)):
        if name not in kept and generation_number(name) < manifest.generation:
            (cache / manifest_file(name)).unlink(missing_ok=True)
    try:
        tagged = [read_manifest(cache, manifest_file(name)) for name in {*manifest.tags.values()}]
    except CacheError as error:
        _log.warning(
            "no part of %r is removed, since what a tag names is lost: %s", str(cache), error
        )
        return
    tagged_parts = {part.name for each in tagged for part in each.parts}
    current = (manifest.build, fingerprint_digest(manifest.fingerprint))
    for name, part in list(list_parts(cache)):
        if part is not None:
            header = part.header
        else:
            journal = read_journal(cache, f"{PARTS}/{name}")
            if journal is None or journal.damaged:
                continue
            header = journal.header
        if (
            header.build > manifest.build
            or (header.build, header.fingerprint) == current
            or name in tagged_parts
        ):
            continue
        with contextlib.suppress(CacheLockedError):  # its writer has lost its build, and ends soon
            _remove(cache / PARTS / name)


def _remove(part: Path) -> None:
    held = WriterLock(part)
    try:
        remove_part(part)
    finally:
        held.release()

"""Removes what no reader needs any more, once a newer generation is out."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from featcache.container_files import sync_directory
from featcache.errors import CacheError, CacheLockedError
from featcache.store.format.files import remove_unfinished
from featcache.store.format.fingerprint import fingerprint_digest
from featcache.store.format.joint_edit import settle
from featcache.store.format.journal import read_journal
from featcache.store.format.journal_lines import Header
from featcache.store.format.kept_files import KEPT_FILE
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


def stored_indexes(cache: Path) -> dict[str, Path]:
    """List the index files that lie in a cache, by the names of their generations."""
    named = ((INDEX.fullmatch(entry.name), entry) for entry in cache.iterdir())
    return {found[1]: entry for found, entry in named if found}


def remove_superseded(cache: Path, manifest: Manifest) -> None:
    """Remove what no reader of this generation or of the one before needs.

    With it go the parts of lower builds, and those of an overwrite that was given up for the one
    that took its number. What a tag names stays.
    """
    settle(cache)
    sync_directory(cache)  # a killed writer may not have come to make its manifest durable
    manifests = {name: cache / manifest_file(name) for name in kept_manifests(cache)}
    kept = {manifest.name, manifest.previous, *manifest.tags.values()}
    for name, file in (*stored_indexes(cache).items(), *manifests.items()):
        if name not in kept and generation_number(name) < manifest.generation:
            file.unlink(missing_ok=True)
    for directory in (cache, cache / MANIFESTS):
        remove_unfinished(directory)
    remove_unnamed(cache, manifest)
    try:
        tagged = [read_manifest(cache, manifest_file(name)) for name in {*manifest.tags.values()}]
    except CacheError as error:
        _log.warning(
            "no part of %r is removed, since what a tag names is lost: %s", str(cache), error
        )
        return
    tagged_parts = {part.name for each in tagged for part in each.parts}
    replaced = _replaced_for_good(cache, manifest) - tagged_parts
    current = {fingerprint_digest(manifest.fingerprint), *manifest.accepted}
    for name, part in list(list_parts(cache)):
        header = _header(cache, name) if part is None else part.header
        if header is None or header.build > manifest.build or name in tagged_parts:
            continue
        old = header.build < manifest.build or header.fingerprint not in current
        if old or name in replaced:
            # its writer, if it is locked, has lost its build and ends soon
            with contextlib.suppress(CacheLockedError), contextlib.ExitStack() as held:
                held.callback(WriterLock(cache / PARTS / name).release)
                remove_part(cache / PARTS / name)


def _replaced_for_good(cache: Path, manifest: Manifest) -> set[str]:
    """Return the parts that others have taken the place of, also for readers of the last one."""
    replaced = {*manifest.replaced}
    if not replaced or manifest.previous is None:
        return replaced
    try:
        before = read_manifest(cache, manifest_file(manifest.previous))
    except CacheError:  # whether its readers need them is not known
        return set()
    return replaced - {part.name for part in before.parts}


def remove_unnamed(cache: Path, manifest: Manifest) -> None:
    """Remove files of roles and stamps that no manifest names which is kept.

    They were superseded, or are those of a writer that died before it named them.
    """
    try:
        kept = {manifest.previous, *manifest.tags.values()} - {None, manifest.name}
        others = [read_manifest(cache, manifest_file(name)) for name in kept if name]
    except CacheError:
        return  # what that names is not known, and may be needed
    all_ = [manifest, *others]
    files = {path for each in all_ for path in (*each.files, *each.building_files)}
    for entry in cache.iterdir():
        if KEPT_FILE.fullmatch(entry.name) and entry.name not in files:
            entry.unlink(missing_ok=True)
    parts = [part for each in all_ for part in (*each.parts, *each.building_parts)]
    stamps = {f"{part.name}/{part.stamps.file}" for part in parts if part.stamps}
    for file in (cache / PARTS).glob("*/stamps-*.columns"):
        if file.relative_to(cache / PARTS).as_posix() not in stamps:
            file.unlink(missing_ok=True)


def _header(cache: Path, name: str) -> Header | None:
    """Return what an open part was started with; None if its journal is damaged or none."""
    journal = read_journal(cache, f"{PARTS}/{name}")
    return None if journal is None or journal.damaged else journal.header

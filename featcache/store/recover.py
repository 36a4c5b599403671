"""Brings back what a writer that died had committed.

The containers of a part that was never sealed may be unreadable for their own tools (an `.h5` is), but its committed
bytes lie where the journal says. They are copied, block by block as they are, into a new part, which is sealed; only
then the old one is removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import numpy as np

from featcache.errors import CacheLockedError, CorruptCacheError
from featcache.feature import FeatureStorageConfig
from featcache.interface import EncodedArray
from featcache.store.extents import Containers
from featcache.store.journal import Journal, Placed, read_journal
from featcache.store.lock import holder, is_locked
from featcache.store.manifest import PARTS, read_manifest
from featcache.store.part import SEAL, OpenPart, checksum, list_parts, read_part, remove_part

SUFFIX = "-recovered"


def recover_parts(
    cache: Path, features: Mapping[str, FeatureStorageConfig], build: int, fingerprint: str
) -> None:
    """Seal what dead writers of this build and fingerprint had committed; their parts are gone afterwards.

    Parts of other builds stay as they are. Raises `CacheLockedError` if one of the writers still lives.
    """
    for name, sealed in list(list_parts(cache)):
        directory = cache / PARTS / name
        if sealed is not None or not directory.exists():
            continue
        if is_locked(directory):
            found = holder(directory)
            which = "" if found is None else f" ({found.pid} on {found.host}, since {found.since})"
            raise CacheLockedError(
                f"part {str(directory)!r} is still being written by another process; end it first{which}"
            )
        if read_part(cache, name) is not None:  # sealed in the meantime, by a writer that has ended now
            continue
        journal = read_journal(directory)
        if journal is None or not journal.utterances or _is_unfinished_copy(directory):
            remove_part(directory)
        elif journal.header.build == build and journal.header.fingerprint == fingerprint:
            _recover(cache, name, features, journal)


def committed_builds(cache: Path) -> dict[str, int]:
    """Return, by fingerprint, the latest build that any part, sealed or not, holds committed utterances of."""
    builds: dict[str, int] = {}
    for name, sealed in list_parts(cache):
        journal = None if sealed is not None else read_journal(cache / PARTS / name)
        if sealed is not None or (journal is not None and journal.utterances):
            header = sealed.header if sealed is not None else cast(Journal, journal).header
            builds[header.fingerprint] = max(header.build, builds.get(header.fingerprint, 0))
    return builds


def committed(cache: Path) -> Iterator[str]:
    """Iterate over the ids in all parts of the build that is being written: sealed, left by dead writers, or open."""
    manifest = read_manifest(cache)
    current = (manifest.building, manifest.building_fingerprint)
    for name, sealed in list(list_parts(cache)):
        journal = None if sealed is not None else read_journal(cache / PARTS / name)
        if journal is None:  # or its writer has sealed it since
            sealed = sealed or read_part(cache, name)
        if sealed is not None and (sealed.header.build, sealed.header.fingerprint) == current:
            yield from sealed.index(cache, []).ids()
        elif journal is not None and (journal.header.build, journal.header.fingerprint) == current:
            yield from (utterance.id for utterance in journal.utterances)


def _is_unfinished_copy(directory: Path) -> bool:
    original = directory.name.removesuffix(SUFFIX)
    return original != directory.name and directory.with_name(original).exists()


def _recover(
    cache: Path, name: str, features: Mapping[str, FeatureStorageConfig], journal: Journal
) -> None:
    source = cache / PARTS / name
    target = source.with_name(name + SUFFIX)
    if not (target / SEAL).exists():
        if target.exists():
            remove_part(target)
        part = OpenPart(cache, target.name, features, journal.header)
        try:
            _copy(source, journal, part)
            part.commit(stats=journal.stats)
            part.seal()
        except BaseException:
            part.discard()
            raise
    remove_part(source)


def _copy(source: Path, journal: Journal, part: OpenPart) -> None:
    arrays = (placed for utterance in journal.utterances for placed in utterance.arrays.values())
    paths = sorted({extent.container for placed in arrays for extent in placed.extents})
    numbers = {path: number for number, path in enumerate(paths)}
    containers = Containers(source, paths, [_size(source / path) for path in paths])
    for utterance in journal.utterances:
        encoded = {}
        for feature, placed in utterance.arrays.items():
            blocks = _blocks(containers, numbers, placed)
            if checksum(blocks) != placed.checksum:
                raise CorruptCacheError(
                    f"part {str(source)!r} is damaged: utterance {utterance.id!r}, feature {feature!r} is not what was "
                    "committed; remove that directory to compute its utterances again"
                )
            encoded[feature] = EncodedArray(placed.rows, blocks)
        part.append_encoded(utterance.id, encoded)


def _blocks(containers: Containers, numbers: Mapping[str, int], placed: Placed) -> tuple[memoryview, ...]:
    return tuple(
        np.ascontiguousarray(containers.view(numbers[extent.container], extent.offset, extent.nbytes)).data
        for extent in placed.extents
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1

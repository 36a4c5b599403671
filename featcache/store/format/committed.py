"""Ids that writers have committed, in parts that are sealed, open, or left by dead writers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from featcache.store.format.journal import Journal, read_journal
from featcache.store.format.manifest import PARTS, read_manifest
from featcache.store.format.part import (
    SealedPart,
    as_known,
    list_parts,
    read_part,
    that_count,
)


def committed_builds(cache: Path) -> dict[str, int]:
    """Return, by fingerprint, the latest build of which any part, sealed or not, has utterances."""
    builds: dict[str, int] = {}
    for name, sealed in list_parts(cache):
        found = sealed or read_journal(cache, f"{PARTS}/{name}")
        if isinstance(found, SealedPart) or (found is not None and found.utterances):
            header = found.header
            builds[header.fingerprint] = max(header.build, builds.get(header.fingerprint, 0))
    return builds


def committed(cache: Path, parts: Iterable[str] | None = None) -> Iterator[str]:
    """Iterate over the ids of the build that is being written, in all its parts or in some.

    Without those that are deleted.
    """
    manifest = read_manifest(cache)
    named = (
        list_parts(cache) if parts is None else ((name, read_part(cache, name)) for name in parts)
    )
    sealed: list[SealedPart] = []
    open_: list[Journal] = []
    for name, part in list(named):
        # its writer may seal it before its journal is read
        found = part or read_journal(cache, f"{PARTS}/{name}") or read_part(cache, name)
        if found is None or not manifest.is_building(found.header.build, found.header.fingerprint):
            continue
        if isinstance(found, SealedPart):
            sealed.append(found)
        elif not found.header.replaces:  # or a copy, which counts once it is sealed
            open_.append(found)
    for known in as_known(that_count(sealed, manifest), manifest):
        yield from known.ids(cache)
    for journal in open_:
        yield from (utterance.id for utterance in journal.utterances)

"""Looks at what writers have committed, in parts of every state.

Parts are sealed, open, or left by writers that died.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from featcache.store.format.journal import Journal, read_journal
from featcache.store.format.manifest import PARTS, read_manifest
from featcache.store.format.part import list_parts, read_part


def committed_builds(cache: Path) -> dict[str, int]:
    """Return, by fingerprint, the latest build that any part holds utterances of.

    They are committed ones; the part may be sealed or not.
    """
    builds: dict[str, int] = {}
    for name, sealed in list_parts(cache):
        journal = None if sealed is not None else read_journal(cache, f"{PARTS}/{name}")
        if sealed is not None or (journal is not None and journal.utterances):
            header = sealed.header if sealed is not None else cast(Journal, journal).header
            builds[header.fingerprint] = max(header.build, builds.get(header.fingerprint, 0))
    return builds


def committed(cache: Path, parts: Iterable[str] | None = None) -> Iterator[str]:
    """Iterate over the ids in all parts, or some, of the build that is being written.

    Parts are sealed, left by dead writers, or open.
    """
    manifest = read_manifest(cache)
    current = (manifest.building, manifest.building_fingerprint)
    named = (
        list_parts(cache) if parts is None else ((name, read_part(cache, name)) for name in parts)
    )
    for name, sealed in list(named):
        journal = None if sealed is not None else read_journal(cache, f"{PARTS}/{name}")
        if journal is None:  # or its writer has sealed it since
            sealed = sealed or read_part(cache, name)
        if sealed is not None and (sealed.header.build, sealed.header.fingerprint) == current:
            yield from sealed.index(cache, []).ids()
        elif journal is not None and (journal.header.build, journal.header.fingerprint) == current:
            yield from (utterance.id for utterance in journal.utterances)

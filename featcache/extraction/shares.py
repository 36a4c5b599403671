"""Shares of a declaration: the features of each set that a cache has, and those to be added."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.storage import FeatureStorage
from featcache.store.format.feature_sets import stored_sets
from featcache.store.reading.expectation import note_compared
from featcache.store.writing.new_sets import directory_of, holds_any


class Share(NamedTuple):
    """Features that are stored together."""

    path: Path
    features: Mapping[str, FeatureStorageConfig]
    # whether features were added to the declaration after these were stored, and the code with them
    others_added: bool = False


def shares_of(storage: FeatureStorage, split: str, *, overwrite: bool) -> list[Share]:
    """Cut the declared features of a split into those of each set; new ones come last.

    A plain cache that is overwritten takes the new ones, too: all is computed anyway.
    """
    cache, rest = storage.path(split), dict(storage.features)
    shares: list[Share] = []
    for directory, manifest in stored_sets(cache):
        mine = {name: rest.pop(name) for name in [*rest] if name in manifest.features}
        if not mine:
            continue
        whole = directory == cache and rest and manifest.features.keys() <= mine.keys()
        if whole and (overwrite or not holds_any(cache)):
            return [Share(cache, storage.features)]
        shares.append(Share(directory, mine))
    if rest:
        shares = [share._replace(others_added=True) for share in shares]
        shares.append(Share(directory_of(cache, rest), rest))
    return shares


def note_sets_compared(cache: Path, features: Collection[str]) -> None:
    """Note that the sets of some features were compared with what these are made from."""
    for directory, manifest in stored_sets(cache):
        if not manifest.features.keys().isdisjoint(features):
            note_compared(directory, manifest)

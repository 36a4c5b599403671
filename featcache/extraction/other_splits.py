"""A data set under the name of the wrong split: noticed by its ids, before anything is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import CacheError, ConfigError
from featcache.extraction.datasets import named
from featcache.extraction.unfinished import is_overwriting
from featcache.store.format.feature_sets import stored_sets
from featcache.store.format.fingerprint import cache_fingerprint, differences
from featcache.store.format.manifest import NAME
from featcache.store.reading.generation import Generation

_SOME = 100_000  # ids that are looked up at once


class OtherSplits:
    """The caches of all other splits of a storage: those of its root with the same features."""

    def __init__(
        self, root: Path, split: str, features: Mapping[str, FeatureStorageConfig]
    ) -> None:
        self._root, self._split, self._features = root, split, features

    def refuse_strangers(self, ids: Sequence[str]) -> None:
        """Raise `ConfigError` if a feature set of this split is complete without any of them."""
        for directory, manifest in stored_sets(self._root / self._split):
            if len(ids) and manifest.features.keys().isdisjoint(self._features):
                refuse_another(directory, ids, self._split)

    def refuse(self, ids: Sequence[str]) -> None:
        """Raise `ConfigError` if another split has one of these utterances."""
        for split, opened in self._caches.items():
            there = rows_of(opened, ids) >= 0
            if there.any():
                found = [ids[number] for number in np.flatnonzero(there).tolist()]
                raise ConfigError(
                    f"split {self._split!r} is to get utterances that split {split!r} of "
                    f"{str(self._root)!r} has ({len(found)} of {len(ids)}): "
                    f"{named(found, 3)}; give the stage= or split= that this data set belongs to, "
                    "or shared=True if both are meant to have them"
                )

    @cached_property
    def _caches(self) -> dict[str, Generation]:
        found = {}
        declared = cache_fingerprint(self._features, None)["features"]
        for path in sorted(self._root.glob(f"*/{NAME}")):
            split = path.parent.absolute()
            for directory, manifest in stored_sets(split) if split.name != self._split else ():
                # one of other features, or damaged: whoever reads it is told
                with contextlib.suppress(OSError):
                    if not differences(manifest.features, declared):
                        found[split.name] = Generation(directory)
        return found


def refuse_another(path: Path, ids: Sequence[str], split: str) -> None:
    """Raise `ConfigError` for a complete cache that a data set has no utterance in common with."""
    try:
        cache = Generation(path.absolute())
    except (CacheError, OSError):  # none, or damaged: whoever opens it says so
        return
    there, failed = cache.index.ids, {*cache.failed}
    known = cache.manifest.complete and len(there) and not is_overwriting(path)
    if not known or not failed.isdisjoint(ids):
        return
    if any((rows >= 0).any() for rows in _rows_of_some(cache, ids)):
        return
    raise ConfigError(
        f"the data set shares no utterance with cache {str(path)!r}, which is complete: "
        f"{named(ids, 3)} here, {named([*islice(there, 3)], 3)} there. Is it another split than "
        f"{split!r}? Give its stage= or split=; or append=True to add its utterances, "
        "overwrite=True to replace those there"
    )


def rows_of(cache: Generation, ids: Sequence[str]) -> NDArray[np.int64]:
    """Return the rows of ids in a cache, -1 where there is none."""
    return np.concatenate([np.empty(0, np.int64), *_rows_of_some(cache, ids)])


def _rows_of_some(cache: Generation, ids: Sequence[str]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(ids), _SOME):
        yield cache.find(ids[start : start + _SOME])

"""Utterances whose inputs have changed, and utterances that another split holds already."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache.declaration import FeatureStorageConfig
from featcache.errors import CacheError, ConfigError, StaleCacheError
from featcache.extraction.dataset_batches import DatasetBatches, Loading
from featcache.extraction.datasets import counted, dataset_of, is_map_style, named
from featcache.extraction.stamping import Entries, InputsOnly
from featcache.extraction.unfinished import is_overwriting
from featcache.format.feature_sets import stored_sets
from featcache.format.fingerprint import cache_fingerprint, differences
from featcache.format.index import StampColumns, Stamps
from featcache.format.manifest import NAME
from featcache.reading.generation import Generation
from featcache.store import Cache
from featcache.writing.cache_writer import CacheWriter

# A data set under the name of the wrong split: noticed by its ids, before anything is computed.

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
                        found[split.name] = Generation.at(directory)
        return found


def refuse_another(path: Path, ids: Sequence[str], split: str) -> None:
    """Raise `ConfigError` for a complete cache that a data set has no utterance in common with."""
    try:
        cache = Generation.at(path.absolute())
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


# Stored utterances against the data set of now: by a stat each, and by loading what looks new.

OnChanged = Literal["raise", "recompute"]
_LOADED_AT_ONCE = 16
_NOT_COMPARED = {"batch_size", "sampler", "batch_sampler", "collate_fn"}
_log = logging.getLogger("featcache")


class ChangedUtterances(NamedTuple):
    """Utterances that are unlike what their features were computed from, or only look so."""

    changed: Sequence[str] = ()
    alike: Mapping[str, Stamps] = {}  # their entries changed, but not their inputs

    def apply(self, writer: CacheWriter) -> None:
        """Delete what has changed, so that it is missing; restamp what only looks so."""
        if self.alike:
            writer.restamp(self.alike)
        if self.changed:
            number, some = counted(len(self.changed)), named(self.changed, 3)
            text = "computing %s of cache %r again, whose input has changed: %s"
            _log.warning(text, number, str(writer.path), some)
            writer.delete(self.changed)


@dataclass
class ChangedInputs:
    """Compares the utterances that a cache holds with a data set.

    Args:
        source: the data set, or a loader, whose data set it is.
        loader_kwargs: arguments of a DataLoader, for what has to be loaded.
        mentioned: the keys of an item that count as its input.
        on_changed: "raise" refuses a cache of which utterances have changed, "recompute" computes
            them again.
    """

    source: Any
    loader_kwargs: Mapping[str, Any] = field(default_factory=dict)
    mentioned: frozenset[str] = frozenset()
    on_changed: OnChanged = "raise"

    def __post_init__(self) -> None:
        dataset = dataset_of(self.source)
        self._dataset = dataset if is_map_style(dataset) else None
        self._entries = Entries(self._dataset)
        self._ids: Sequence[str] | None = None
        self._seed: int | None = None

    def find(
        self,
        path: Path,
        ids: Sequence[str],
        stored: StampColumns | None,
        remembered: Mapping[str, int] | None = None,
        *,
        seed: int | None = None,
    ) -> ChangedUtterances:
        """Find the utterances of cache `path` that have changed.

        Args:
            path: the cache directory.
            ids: of the data set.
            stored: their stamps in the cache, 0 for those that it lacks.
            remembered: entries that were looked at before, by id: their inputs are as they were.
            seed: of random data, whose items are loaded from generators of their own.

        Raises `StaleCacheError`, which names the utterances, unless they are to be computed again.
        """
        self._ids, self._seed = ids, seed
        if stored is None or not self._entries:
            return ChangedUtterances()
        there = np.flatnonzero(stored.entry)
        now = self._entries.stamps(there.tolist())
        suspects = np.flatnonzero((now != stored.entry[there]) & (now != 0))
        entries = {
            number: entry
            for number, entry in zip(there[suspects].tolist(), now[suspects].tolist(), strict=True)
            if (remembered or {}).get(ids[number]) != entry
        }
        found = self._look(path, ids, stored.input, entries)
        if found.changed and self.on_changed == "raise":
            raise _refusal(path, found.changed)
        return found

    def _look(
        self, path: Path, ids: Sequence[str], before: NDArray[np.uint64], entries: dict[int, int]
    ) -> ChangedUtterances:
        """Load the utterances whose entries have changed, by number, and compare their inputs."""
        alike: dict[str, Stamps] = {}
        changed: list[int] = []
        unknown: list[str] = []
        for number, now in self._inputs(list(entries)):
            if not now or not before[number]:
                unknown.append(ids[number])
            elif now == before[number]:
                alike[ids[number]] = Stamps(now, entries[number])
            else:
                changed.append(number)
        if changed and self._is_random(changed[0]):
            unknown += [ids[number] for number in changed]
            changed = []
        if unknown:
            text = (
                "the entries of %s of cache %r have changed since (%s), and their items cannot be "
                "compared: they cannot be loaded, are random, or hold what has no digest; the "
                "features stay as they are"
            )
            _log.warning(text, counted(len(unknown)), str(path), named(unknown, 3))
        return ChangedUtterances([ids[number] for number in changed], alike)

    def _inputs(self, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Iterate over numbers and the stamps of their inputs of now, 0 where there is none."""
        single = self.loader_kwargs.get("batch_size", 1) is None
        kwargs = {k: v for k, v in self.loader_kwargs.items() if k not in _NOT_COMPARED}
        kwargs["collate_fn"] = InputsOnly(self.mentioned, batched=not single)
        kwargs["batch_size"] = None if single else _LOADED_AT_ONCE
        batches = DatasetBatches(
            self._dataset, numbers, kwargs, self._ids, Loading(seed=self._seed)
        )
        for batch in batches:
            singles = [batch] if batch.error is None else batches.singly(batch)
            for each in singles:
                inputs = [0] * len(each.indices) if each.data is None else each.data
                for number, input in zip(each.indices, inputs, strict=True):
                    failed = each.error is not None
                    yield number, 0 if failed else input or self._entries.input_of(number)

    def _is_random(self, number: int) -> bool:
        """Whether an item is another each time that it is loaded."""
        (first,), (second,) = (list(self._inputs([number])) for _ in range(2))
        return first != second


def _refusal(path: Path, changed: Sequence[str]) -> StaleCacheError:
    have, these = ("has", "it") if len(changed) == 1 else ("have", "these")
    return StaleCacheError(
        f"the input of {counted(len(changed))} of cache {str(path)!r} {have} changed since the "
        f"features were computed: {named(changed)}; on_changed='recompute' computes {these} again, "
        "overwrite=True all"
    )


def stamps_in(cache: Cache, ids: Sequence[str]) -> StampColumns | None:
    """Return the stamps of utterances in a cache, 0 for those that it lacks; None: it has none."""
    stamps = cache.opened.stamps
    if stamps is None:
        return None
    rows = rows_of(cache.opened, ids)
    there = rows >= 0
    found = StampColumns.unknown(len(ids))
    for column, stored in zip(found, stamps, strict=True):
        column[there] = stored[rows[there]]
    return found


# Entries of utterances whose inputs are as they were, of caches that cannot be written to
_ALIKE: dict[tuple[str, str], dict[str, int]] = {}


def remember(cache: Cache, alike: Mapping[str, Stamps]) -> None:
    """Note in this process that the inputs of these utterances are as they were."""
    known = _ALIKE.setdefault(_key(cache), {})
    known.update((id, stamps.entry) for id, stamps in alike.items())


def remembered(cache: Cache) -> Mapping[str, int]:
    """Return the entries of which that was noted, by id."""
    return _ALIKE.get(_key(cache), {})


def _key(cache: Cache) -> tuple[str, str]:
    return str(cache.path.absolute()), cache.opened.manifest.write_id

"""A cache that others are filling: what is published, and what lies in parts beside it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import (
    CacheError,
    ConfigError,
    CorruptCacheError,
    NotACacheError,
    StaleCacheError,
)
from featcache.interface import Array
from featcache.lazy.results import ONE, Features, Results
from featcache.lazy.stale import changed_since, stale
from featcache.store.format.committed import committed_builds
from featcache.store.format.disk_errors import reading
from featcache.store.format.feature_sets import set_of
from featcache.store.format.manifest import NAME, FeatureSetsError
from featcache.store.reading.expectation import note_compared
from featcache.store.reading.generation import Generation
from featcache.store.reading.unpublished import Unpublished
from featcache.store.writing.part_writer import PartWriter

ABSENT = object()
_TRIES = 3  # of what another publisher may take away meanwhile


class LiveCache:
    """The current generation of a cache, and what is written beside it.

    `look` is called by one thread at a time.

    Attributes:
        path: the cache directory, or that of the feature set in it.
        features: the declarations, by name.
        results: the form of the results that they are of.
        has_form: whether that was recorded; a cache that others filled says nothing of it.
    """

    def __init__(self, path: Path, generation: Generation) -> None:
        manifest = generation.manifest
        self.path = path
        declared = manifest.features.items()
        self.features: Features = {
            name: FeatureStorageConfig.from_json(each) for name, each in declared
        }
        made_from = manifest.fingerprint
        self.results = Results.from_json(made_from.get("results"), list(self.features))
        self.has_form = made_from.get("results") is not None
        self._made_from = made_from
        self._converters = self.results.converters(self.features)
        self._is_one = self.results.form == ONE
        self._seen = _stamp(path)
        self._show(generation)
        self._unpublished = Unpublished(path, self.features)
        self._unpublished.look(manifest)

    @classmethod
    def opened(
        cls,
        path: Path,
        names: Sequence[str],
        features: Features | None,
        fingerprint: Callable[[], Mapping[str, object]],
    ) -> Self | None:
        """Open a cache; None if there is none, or one without anything, made from something else.

        Raises `StaleCacheError`, with the differences, for one of another function or other
        declarations.
        """
        place = set_of(path, names[0])
        with reading(place):
            try:
                generation = Generation(place)
            except FeatureSetsError as error:
                raise ConfigError(
                    f"cache {str(path)!r} has feature sets, none of them with {names[0]!r}; give "
                    "the function a directory of its own"
                ) from error
            except NotACacheError:
                return None
            manifest = generation.manifest
            changed = changed_since(manifest, features, fingerprint())
            if changed and not (manifest.rows or committed_builds(place)):
                return None
        if changed:
            raise stale(place, manifest, changed)
        note_compared(place, manifest)
        return cls(place, generation)

    def published(self, id: str) -> object:
        """Return the result of a published utterance; `ABSENT` if there is none."""
        find, columns = self._rows  # at once: another thread may show a newer generation
        row = find(id)
        if row < 0:
            return ABSENT
        try:
            if self._is_one:
                arrays, convert = columns[0]
                return convert(arrays.read(row))
            values = [convert(arrays.read(row)) for arrays, convert in columns]
        except CorruptCacheError:
            # small parts became one since, twice: the files of this generation may be gone
            if Generation(self.path).manifest.write_id == self._generation.manifest.write_id:
                raise
            self._show(Generation(self.path))
            return self.published(id)
        return self.results.of_values(values)

    def unpublished(self, id: str) -> object:
        """Return the result of an utterance that is stored, and not published; or `ABSENT`."""
        found = self._unpublished.read(id)
        return ABSENT if found is None else self.result_of(found)

    def result_of(self, arrays: Mapping[str, Array]) -> object:
        """Return arrays, as they are stored and in the user's shape, as a result."""
        return self.results.of_values([convert(arrays[name]) for name, convert in self._converters])

    @property
    def has_left(self) -> bool:
        """True where there are parts beside the generation, of writers that live or died."""
        return bool(self._unpublished.parts)

    def look(self) -> None:
        """Find out what others have published and written since the last look.

        Raises `StaleCacheError` if the cache was made anew from something else.
        """
        seen = _stamp(self.path)
        if seen != self._seen:
            with reading(self.path):
                generation = Generation(self.path)
            if generation.manifest.fingerprint != self._made_from:
                raise StaleCacheError(
                    f"cache {str(self.path)!r} was made anew from something else meanwhile; start "
                    "this process again"
                )
            self._show(generation)
            self._seen = seen
        with reading(self.path):
            self._unpublished.look(self._generation.manifest)

    def _show(self, generation: Generation) -> None:
        self._generation = generation
        columns = [(generation.features[name], each) for name, each in self._converters]
        self._rows = generation.index.find, columns

    def part_writer(self) -> PartWriter:
        """Return a writer of a part of its own, which needs no lock of the cache."""
        made_from = {key: each for key, each in self._made_from.items() if key != "features"}
        for left in reversed(range(_TRIES)):
            try:
                writer = PartWriter(self.path, self.features, made_from)
                writer.forget()  # closed by who has it
                return writer
            except StaleCacheError:
                raise
            except CacheError:  # others may publish, and take away what was named before
                if not left:
                    raise
        raise AssertionError("unreachable")


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes with each publish."""
    try:
        found = os.stat(path / NAME)  # noqa: PTH116  # each miss waits
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size

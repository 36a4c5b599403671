"""Reading a cache: ids, lengths, statistics, and arrays straight from their bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from numpy.typing import NDArray

from featcache._checks import directory
from featcache.errors import CacheError, UnknownNameError, nearest
from featcache.format.feature_sets import stored_sets
from featcache.format.files import from_storage, reading
from featcache.format.lock import at_work
from featcache.reading.containers import NO_ROOTS, absolute_roots
from featcache.reading.described import Described
from featcache.reading.generation import Generation, PaddedFeatures, read_padded
from featcache.reading.opening import (
    Expectation,
    OpenSettings,
    damage_of,
    open_generation,
    settings_of,
)
from featcache.reading.reader import FeatureReader
from featcache.reading.verify import WHAT_TO_DO, raise_damage, tell_unequal_ends
from featcache.writing import edit
from featcache.writing.annotate import AnnotationSource, annotate

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable

CachePath = str | os.PathLike[str]
VERIFY = ("columns", "arrays")


class Cache(Described, Mapping[str, dict[str, NDArray[Any]]]):
    """One published generation of a cache, as `featcache.open` returns it.

    Threads, forks and pickles may share it: a pickle opens the same generation again, or the
    current one where that is gone, unless it was made anew from something else meanwhile.

    A mapping from utterance ids to dicts of arrays, and a context manager. Rows, and with them
    `ids`, iteration and `lengths`, are in the order of the ids' UTF-8 bytes. Where features were
    added later, as a feature set, they are the utterances that all sets have.

    Attributes:
        path: the cache directory.
        version: the tag that it was opened by; None: none.
        opened: manifest, index and containers, for what is built on caches.
    """

    def __init__(self, path: Path, opened: Generation, version: str | None = None) -> None:
        self.path = path
        self._show(opened, version)

    def _show(self, opened: Generation, version: str | None) -> None:
        self.opened, self.version, self._index = opened, version, opened.index

    def as_opened(self) -> tuple[Expectation, OpenSettings]:
        """Return with what the same is opened again, or the current generation of it."""
        settings = settings_of(self.opened, self.version)
        return Expectation.of_opened(self.opened), settings._replace(features=self.features)

    def __reduce__(self) -> tuple[object, ...]:
        return open_with, (self.path, *self.as_opened())

    def __repr__(self) -> str:
        writer = "" if self.complete or self.version else at_work(self.path)
        state = "complete" if self.complete else f"incomplete{writer and f', {writer}'}"
        features = ", ".join(self.features)
        return f"<Cache {str(self.path)!r}: {len(self)} utterances of {features}, {state}>"

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the container files: arrays cannot be read any more, ids and lengths can.

        A cache that nobody holds closes itself. Copies, readers and pickles open their own files.
        """
        self.opened.close()

    __eq__ = object.__eq__  # a mapping would compare all arrays
    __hash__ = object.__hash__

    def __contains__(self, id: object) -> bool:
        return isinstance(id, str) and self._index.find(id) >= 0

    def __getitem__(self, id: str) -> dict[str, NDArray[Any]]:
        row = self.opened.row(id)
        return {
            name: from_storage(arrays.read(row), arrays.declared_dtype)
            for name, arrays in self.opened.features.items()
        }

    @property
    def table(self) -> FeatureTable:
        """All utterances as a table, of which views are made: `cache.table.select(ids)`."""
        from featcache.tables.table import FeatureTable

        return FeatureTable.of(self)

    def read(
        self,
        id: str,
        feature: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        copy: bool = True,
    ) -> NDArray[Any]:
        """Return a writable copy of an array, or of its frames from `start` to before `stop`.

        Shape (frames, *dims), or `dims` without a time axis; declared dtype, bfloat16 as the
        float32 of the same value. Only the bytes of these frames are read, or the blocks that hold
        them where a codec is used.

        With `copy=False` the array is read-only: the mapped bytes themselves where they are the
        array, that is without a codec, in one piece, no bfloat16, not with `mapped=False`. It stays
        good as long as you hold it, after `close`, `refresh` and `compact`, too; so long the disk
        keeps its file. Whoever cuts an adopted file short ends the process, as with any mapped one.
        `torch.from_numpy` warns of an array that is read-only.

        Raises `KeyNotFoundError` for an unknown id or feature, `WindowError` unless 0 <= start <=
        stop <= frames.
        """
        opened = self.opened
        arrays = opened.arrays(feature)
        stored = opened.read(id, arrays, start, stop, copy=copy)
        return from_storage(stored, arrays.declared_dtype, writable=copy)

    def read_batch(self, ids: Iterable[str], feature: str) -> PaddedFeatures:
        """Return the arrays of several utterances, copied into one array padded with zeros.

        Raises `KeyNotFoundError` for an unknown id or feature.
        """
        return read_padded(self.opened, ids, feature)

    def annotate(
        self, source: AnnotationSource, *, unknown: Literal["raise", "skip"] = "raise"
    ) -> None:
        """Annotate utterances, atomically and durably, as a new generation.

        `featcache.open` reads it; this one stays as it is. Annotations and utterances that are not
        in the source keep what they have; None, an empty cell, or "nan" in a column of numbers,
        takes a value away. Later writers keep values by id, through overwrites, too; a deleted
        utterance loses them.

        Args:
            source: `{"utt-1": {"speaker": "anna", "snr": 13.5}, ...}`; or a file with a column "id"
                or "ID", .csv, .tsv or .jsonl; or an Arrow table with one.
            unknown: "raise" refuses ids that are not in the cache, "skip" passes over them.

        Raises `KeyNotFoundError` with the unknown ids, `FeatureError` for values of no kind or not
        of that which is there, `ConfigError` for no source, `DuplicateIdError` for an id that comes
        twice, `CacheLockedError` while the cache is written; then nothing is changed.
        """
        self._refuse_version("annotate it")
        mine = {*self.features}
        sets = [each for each, found in stored_sets(self.path) if mine & found.features.keys()]
        annotate(self.path, sets or [self.path], source, unknown)

    def reader(self, feature: str, *, dtype: object = None) -> FeatureReader:
        """Return a picklable callable that gives the torch tensor of an id.

        It has this cache's settings. `dtype` is that of the tensors; None: as declared.
        """
        self.opened.arrays(feature)
        return FeatureReader.of(self.opened, feature, self.version, dtype=dtype)

    def refresh(self) -> None:
        """Read the current generation from now on, or what `version` names now.

        Tables and loaders that were made of it before go on with what they have.
        """
        same, settings = self.as_opened()
        now = open_with(self.path, same, settings._replace(names=()))
        self._show(now.opened, now.version)

    def delete(self, ids: Iterable[str]) -> None:
        """Delete utterances, durably, as a new generation; they are no more expected.

        Those that have failed are forgotten. Readers see it from their next open or `refresh`, this
        one too. The bytes stay in the files until `compact`. An utterance that a data set still
        lists is computed again when `cache_features` or `extract` fills the cache again.

        Raises `KeyNotFoundError`, and deletes nothing, for an id that is neither stored nor failed;
        `CacheLockedError` while the cache is written.
        """
        self._refuse_version("delete from it")
        edit.delete(self.path, ids, self.opened.roots)

    def collect(self) -> None:
        """Read all bytes of adopted sources once: their checksums and statistics are kept.

        Then `stats`, `check_reads` and `verify="arrays"` serve an adopted cache, too; this one
        reads the new generation. Other caches have all that. A killed run changes nothing. Raises
        `CorruptCacheError` if a source has changed since it was adopted, `FeatureError` for NaN or
        infinity, which have no statistics: `delete` these utterances, or adopt with
        `nonfinite="keep"`.
        """
        self._refuse_version("collect")
        edit.collect(self.path, self.opened.roots)
        self.refresh()

    def _refuse_version(self, what: str) -> None:
        if self.version is not None:
            raise CacheError(
                f"version {self.version!r} of cache {str(self.path)!r} does not change; open the "
                f"cache without version= to {what}"
            )

    @property
    def tags(self) -> dict[str, int]:
        """Tags of the cache as it is now, and the numbers of the generations that they name."""
        return edit.tags(self.path)

    def tag(self, name: str) -> None:
        """Give this generation a name, by which `featcache.open(path, version=name)` opens it.

        It stays whole through appends, deletions, overwrites and `compact`, until `untag`. Raises
        `ConfigError` for a name that another generation has.
        """
        edit.tag(self.path, name, self.opened.names)

    def untag(self, name: str) -> None:
        """Take a tag away, and remove what only that kept."""
        edit.untag(self.path, name)

    def compact(self, *, drop_tags: bool = False) -> None:
        """Rewrite what holds deleted utterances, and small parts, and remove the old files.

        Afterwards no file of the cache holds a byte of what was deleted or replaced. Who has an
        earlier generation open must open the cache again.

        Args:
            drop_tags: take away the tags that hold what was deleted or replaced, which the log
                names; without this, they are an error. Other tags stay.

        Raises `CacheError` for such tags, and for leftovers that only a person may remove;
        `StorageFullError` if the disk has no room for the copies.
        """
        edit.compact(self.path, drop_tags=drop_tags)


def open(
    path: CachePath,
    *,
    verify: Literal["columns", "arrays"] | None = None,
    check_reads: bool = False,
    expect: Mapping[str, object] | None = None,
    version: str | None = None,
    mapped: bool = True,
    roots: Mapping[str, CachePath] = NO_ROOTS,
) -> Cache:
    """Open a cache for reading; `with featcache.open(path) as cache:` closes it, too.

    Args:
        path: the cache directory.
        verify: None checks the size of each file when it is first read; "columns" those of all
            files now, and the checksums of index and statistics; "arrays" those of every byte of
            every file, which reads the whole cache. All damage is told at once. Utterances whose
            features, by their `frame_s`, end more than two frames apart are named in the log.
        check_reads: compare whatever is read with its checksum: whole arrays by their own, windows
            by those of the pages that they lie on. The index is compared when the cache is opened.
        expect: the fingerprint that the features should have, plain data as `brain.expectation()`
            and `featcache.inspect.provenance(function).fingerprint({})` return it: each key is
            compared with the cache's. Without it, a cache that nothing has compared in this process
            is told of in the log, once.
        version: a tag: the generation that it names is opened, not the current one.
        mapped: read through memory maps; False uses pread, for network file systems, where a mapped
            file that shrinks kills the process with SIGBUS.
        roots: where adopted sources lie now, by the keys that the cache has for them
            (`adopted.json`), if they lie elsewhere than when they were adopted.

    Raises `StaleCacheError`, with the differences, for a cache that was made from something else
    than is expected; `NotACacheError`, `FormatVersionError` or `CorruptCacheError`.
    """
    if verify not in (None, *VERIFY):
        raise UnknownNameError(f"verify has no level {verify!r}; {nearest(verify, VERIFY)}")
    place = directory(path, "a cache").absolute()
    settings = OpenSettings(mapped, check_reads, version=version, roots=absolute_roots(roots))
    cache = open_with(place, Expectation.of(expect), settings)
    if verify is not None:
        if verify == "arrays":
            cache.opened.check_collected("verify='arrays'")
        with reading(place):
            arrays, alone = verify == "arrays", version is not None
            raise_damage(damage_of(cache.opened, arrays=arrays, alone=alone), WHAT_TO_DO)
            tell_unequal_ends(place, cache.opened.manifest, cache.opened.index)
    return cache


def open_with(path: Path, expectation: Expectation, settings: OpenSettings) -> Cache:
    """Open a cache as another one was opened, or with settings that users do not have."""
    with reading(path):
        opened = open_generation(path, expectation, settings)
    return Cache(path, opened, settings.version)


def open_features(
    path: Path, features: Iterable[str], expect: Mapping[str, object] | None = None
) -> Cache:
    """Open the feature sets of a cache that have some features, also those not complete yet."""
    settings = OpenSettings(features=tuple(features))
    return open_with(path.absolute(), Expectation.of(expect), settings)

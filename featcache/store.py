"""Opened caches: `open`, `Cache` (a generation as a table, to edit as well) and `FeatureReader`."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from featcache._checks import directory
from featcache._progress import bar
from featcache._tensors import as_tensor
from featcache.container_files.lock import at_work
from featcache.declaration import dtype_name
from featcache.errors import CacheError, UnknownNameError, nearest
from featcache.format import as_id, reading, set_of, stored_sets, tags_of_sets
from featcache.reading import (
    NO_PLACES,
    CachePath,
    Expectation,
    Generation,
    OpenSettings,
    absolute_roots,
    check_roots,
    damage_of,
    located,
    missing_from,
    open_again,
    open_generation,
    raise_damage,
    remedy_of,
    tell_unequal_ends,
)
from featcache.remote import DEFAULT, RemoteOptions
from featcache.tables import FeatureTable, Selection, cache_line, table_html

if TYPE_CHECKING:
    from featcache._tensors import Tensor
    from featcache.writing.annotate import AnnotationSource
    from featcache.writing.repair import Repair


VERIFY = ("columns", "arrays")


class Cache(FeatureTable):
    """The table of a cache, as `featcache.open` returns it, which can also be edited.

    It reads one published generation: the one that was current when it was opened, refreshed or
    edited last. Tables, views, readers and loaders that were made of it before keep theirs.
    Threads, forks and pickles may share it; while one thread edits, each call of another reads the
    generation before or the one after. Row numbers hold for one generation: threads that use them
    while others edit take `cache.table`, which stays. A pickle opens the same generation again, or
    the current one where that is gone, unless it was made anew from something else meanwhile.

    A mapping from utterance ids to dicts of arrays, and a context manager. Rows, and with them
    `ids`, iteration and `lengths`, are in the order of the ids' UTF-8 bytes. Where features were
    added later, as a feature set, they are the utterances that all sets have.
    """

    def __init__(self, opened: Generation) -> None:
        super().__init__(Selection.of(opened))
        self._edits: list[object] = []  # those that threads make now
        self._refreshing = os.getpid(), threading.Lock()

    def _has_moved_on(self, selection: Selection) -> bool:
        if self._edits:  # which may have removed files of the generation before
            self.refresh()
        before, now = selection.blocks.generations[0], self.opened
        return before.manifest.write_id != now.manifest.write_id

    @contextmanager
    def _editing(self, what: str) -> Iterator[None]:
        """Refuse an edit of a version; read the generation that an edit publishes."""
        self._require_here(what)
        if self.version is not None:
            raise CacheError(
                f"version {self.version!r} of cache {str(self.path)!r} does not change; open the "
                f"cache without version= to {what}"
            )
        self._edits.append(what)
        try:
            yield
            self.refresh()
        finally:
            self._edits.pop()

    def _require_here(self, what: str) -> None:
        remote = self.opened.settings.remote
        if remote is not None:
            raise CacheError(
                f"cache {remote.place.url!r} lies in an object store, where it is only read; "
                f"{what} where it was made, and push it again"
            )

    def __reduce__(self) -> tuple[object, ...]:
        how = Expectation.of_opened(self.opened), OpenSettings.of(self.opened)
        return open_with, (self.path, *how)

    def __repr__(self) -> str:
        return f"<Cache {cache_line(self, self.opened.place, self._state)}>"

    def _repr_html_(self) -> str:
        version = f", version {self.version!r}" if self.version else ""
        return table_html(self, version, self._state)

    @property
    def _state(self) -> str:
        """State in words: complete, or not and who is at work on it."""
        writer = "" if self.complete or self.version else at_work(self.path)
        return "complete" if self.complete else f"incomplete{writer and f', {writer}'}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the container files: arrays cannot be read any more, ids and lengths can.

        A cache that nobody holds closes itself. Tables of it are closed, too; readers and pickles
        open their own files.
        """
        self.opened.close()

    @property
    def table(self) -> FeatureTable:
        """The table of the generation that is read now, which stays when the cache is edited."""
        return FeatureTable(self.selection)

    @property
    def opened(self) -> Generation:
        """Manifest, index and containers, for what is built on caches."""
        return self.selection.blocks.generations[0]

    @property
    def version(self) -> str | None:
        """The tag that it was opened by; None: none."""
        return self.opened.settings.version

    @property
    def generation(self) -> int:
        """Number of this generation, counted up with each publish."""
        return self.opened.manifest.generation

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint: what the cache was made from, its declarations under "features"."""
        return copy.deepcopy(dict(self.opened.manifest.fingerprint))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as they are stored, as small as their codecs made them."""
        return sum(int(columns.nbytes.sum()) for columns in self.opened.index.features.values())

    @property
    def expected(self) -> int | None:
        """Number of utterances that the cache is to hold; None if its writer did not know."""
        expected = self.opened.manifest.expected
        return None if expected is None else expected.count

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the expected utterances that could not be computed.

        They are in the order of their UTF-8 bytes.
        """
        return tuple(self.opened.failed)

    def missing(self, feature: str) -> tuple[str, ...]:
        """Return the ids that lack a feature and have others, in the order of their UTF-8 bytes.

        None but in a cache of feature sets, whose rows are the utterances that all of them have.
        """
        opened = self.opened
        opened.arrays(feature)
        return tuple(missing_from(opened, feature))

    def reader(self, feature: str, *, dtype: object = None) -> FeatureReader:
        """Return a picklable callable that gives the torch tensor of an id.

        It has this cache's settings. `dtype` is that of the tensors; None: as declared.
        """
        opened = self.opened
        opened.arrays(feature)
        return FeatureReader(opened, feature, dtype=dtype)

    def refresh(self) -> None:
        """Read the current generation from now on, or what `version` names now.

        Raises `StaleCacheError`, and goes on with what it has, for a cache that was made anew from
        something else.
        """
        pid, lock = self._refreshing
        if pid != os.getpid():  # of a fork, whose parent may have held it
            pid, lock = self._refreshing = os.getpid(), threading.Lock()
        with lock:  # what another thread opened before is not shown after what this one opens
            self.selection = Selection.of(open_again(self.opened, names=()))

    def annotate(
        self, source: AnnotationSource, *, unknown: Literal["raise", "skip"] = "raise"
    ) -> None:
        """Annotate utterances, atomically and durably, as a new generation, which is read then.

        Annotations and utterances that are not in the source keep what they have; None, an empty
        cell, or "nan" in a column of numbers, takes a value away. Later writers keep values by id,
        through overwrites, too; a deleted utterance loses them.

        Args:
            source: `{"utt-1": {"speaker": "anna", "snr": 13.5}, ...}`; or a file with a column "id"
                or "ID", .csv, .tsv or .jsonl; or an Arrow table with one.
            unknown: "raise" refuses ids that are not in the cache, "skip" passes over them.

        Raises `KeyNotFoundError` with the unknown ids, `FeatureError` for values of no kind or not
        of that which is there, `ConfigError` for no source, `DuplicateIdError` for an id that comes
        twice, `CacheLockedError` while the cache is written; then nothing is changed.
        """
        from featcache.writing.annotate import annotate

        with self._editing("annotate it"):
            mine = {*self.features}
            sets = [each for each, found in stored_sets(self.path) if mine & found.features.keys()]
            annotate(self.path, sets or [self.path], source, unknown)

    def delete(self, ids: Iterable[str]) -> None:
        """Delete utterances, durably, as a new generation, which is read then.

        They are no more expected; those that have failed are forgotten. Others see it from their
        next open or `refresh`. The bytes stay in the files until `compact`. An utterance that a
        data set still lists is computed again when `cache_features` or `extract` fills the cache
        again.

        Raises `KeyNotFoundError`, and deletes nothing, for an id that is neither stored nor failed;
        `CacheLockedError` while the cache is written.
        """
        from featcache.writing import edit

        with self._editing("delete from it"):
            edit.delete(self.path, ids, self.opened.settings.roots)

    def collect(self) -> None:
        """Read all bytes of adopted sources once: their checksums and statistics are kept.

        Then `stats`, `check_reads` and `verify="arrays"` serve an adopted cache, too, whose new
        generation is read. Other caches have all that. A killed run changes nothing. Raises
        `CorruptCacheError` if a source has changed since it was adopted, `FeatureError` for NaN or
        infinity, which have no statistics: `delete` these utterances, or adopt with
        `nonfinite="keep"`.
        """
        from featcache.writing import edit

        with self._editing("collect"):
            edit.collect(self.path, self.opened.settings.roots)

    def repair(self, *, dry_run: bool = False) -> Repair:
        """Save all utterances whose bytes are intact, set what is damaged aside, and tell of both.

        All bytes are read and compared. Of a whole cache nothing is changed. Of a damaged one,
        parts with damage are copied without the utterances that are lost, and what can be made anew
        is: indexes, statistics, checksums of pages. A new generation is published, and read then;
        it is incomplete if anything is lost, so who fills the cache again computes that alone.
        Generations that tags name are made anew, too. Killed at any moment, it leaves the cache as
        it was, or repaired. No byte of a damaged file is deleted, and the disk needs room for the
        copies. Adopted sources are never written: the rows that are lost are dropped.

        A cache that cannot even be opened is repaired by `featcache.store.repair(path)`.

        Args:
            dry_run: only look, and change nothing.

        A damaged manifest is restored from `manifests` where its hash or its `write_id`, still to
        be read, proves which copy it was. What names the feature sets names those that are whole.

        Raises `CacheLockedError` while the cache is written, `CorruptCacheError` for another
        damaged manifest (put a copy back), `StorageFullError` without room for the copies.
        """
        from featcache.writing.repair import repair

        roots = self.opened.settings.roots
        if dry_run:
            self._require_here("repair it")
            return repair(self.path, roots, dry_run=True)
        with self._editing("repair it"):
            return repair(self.path, roots)

    @property
    def tags(self) -> dict[str, int]:
        """Tags of the cache as it is now, and the numbers of the generations that they name."""
        return tags_of_sets(self.path)

    def tag(self, name: str) -> None:
        """Give this generation a name, by which `featcache.open(path, version=name)` opens it.

        That is the one that is read, also where there is a newer one. It stays whole through
        appends, deletions, overwrites and `compact`, until `untag`. Raises `ConfigError` for a name
        that another generation has.
        """
        from featcache.writing import edit

        self._require_here("tag it")
        edit.tag(self.path, name, self.opened.names)

    def untag(self, name: str) -> None:
        """Take a tag away, and remove what only that kept."""
        from featcache.writing import edit

        self._require_here("untag it")
        edit.untag(self.path, name)

    def compact(self, *, drop_tags: bool = False) -> None:
        """Rewrite what holds deleted utterances, and small parts, and remove the old files.

        Afterwards no file of the cache holds a byte of what was deleted or replaced, and the new
        generation is read. Tables and loaders of an earlier one must be made again.

        Args:
            drop_tags: take away the tags that hold what was deleted or replaced, which the log
                names; without this, they are an error. Other tags stay.

        Raises `CacheError` for such tags, and for leftovers that only a person may remove;
        `StorageFullError` if the disk has no room for the copies.
        """
        from featcache.writing import edit

        with self._editing("compact it"):
            edit.compact(self.path, drop_tags=drop_tags)


def open(
    path: CachePath,
    *,
    verify: Literal["columns", "arrays"] | None = None,
    check_reads: bool = False,
    expect: Mapping[str, object] | None = None,
    version: str | None = None,
    mapped: bool = True,
    roots: Mapping[str, CachePath] = NO_PLACES,
    remote: RemoteOptions = DEFAULT,
) -> Cache:
    """Open a cache for reading; `with featcache.open(path) as cache:` closes it, too.

    Args:
        path: the cache directory, or its URL in an object store: `"s3://bucket/train"`.
        verify: None checks the size of each file when it is first read; "columns" those of all
            files now, and the checksums of index and statistics; "arrays" those of every byte of
            every file, which reads the whole cache. All damage is told at once. Utterances whose
            features, by their `frame_s`, end more than two frames apart are named in the log.
        check_reads: compare whatever is read with its checksum: whole arrays by their own, windows
            by those of the pages that they lie on. The index is compared when the cache is opened.
        expect: the fingerprint that the features should have, plain data as `brain.expectation()`
            and `featcache.inspect.provenance(function).fingerprint({})` return it: each key is
            compared with the cache's. Without it, a cache that nothing has compared in this process
            is told of in the log, once: as a warning where code that it was made by has changed
            since, as far as this process can see.
        version: a tag: the generation that it names is opened, not the current one.
        mapped: read through memory maps; False uses pread, for network file systems, where a mapped
            file that shrinks kills the process with SIGBUS.
        roots: where adopted sources lie now, by the keys that the cache has for them
            (`adopted.json`), if they lie elsewhere than when they were adopted: paths, or URLs.
        remote: of a URL, also one that was adopted: where pages of it are kept, and how its store
            is asked.

    Raises `StaleCacheError`, with the differences, for a cache that was made from something else
    than is expected; `NotACacheError`, `FormatVersionError` or `CorruptCacheError`.
    """
    if verify not in (None, *VERIFY):
        raise UnknownNameError(f"verify has no level {verify!r}; {nearest(verify, VERIFY)}")
    places = absolute_roots(roots, remote)
    settings = OpenSettings(mapped, check_reads, version=version, roots=places)
    place, settings = located(path, settings, remote)
    cache = open_with(place, Expectation.of(expect), settings)
    if verify is not None:
        if verify == "arrays":
            cache.opened.check_collected("verify='arrays'")
        arrays, alone = verify == "arrays", version is not None
        with (
            reading(place),
            bar(f"verify {place.name}", cache.opened.container_bytes, shown=arrays) as shown,
        ):
            found = damage_of(cache.opened, arrays=arrays, alone=alone, tell=shown.update)
            raise_damage(found, remedy_of(settings.remote))
            tell_unequal_ends(place, cache.opened.manifest, cache.opened.index)
    return cache


def repair(
    path: CachePath, *, dry_run: bool = False, roots: Mapping[str, CachePath] = NO_PLACES
) -> Repair:
    """Repair a cache as `Cache.repair` does, also one that is too damaged to be opened."""
    from featcache.writing import repair as repairing

    place = directory(path, "a cache").absolute()
    return repairing.repair(place, absolute_roots(roots), dry_run=dry_run)


def open_with(path: Path, expectation: Expectation, settings: OpenSettings) -> Cache:
    """Open a cache as another one was opened, or with settings that users do not have."""
    return Cache(open_generation(path, expectation, settings))


def open_features(
    path: Path, features: Iterable[str], expect: Mapping[str, object] | None = None
) -> Cache:
    """Open the feature sets of a cache that have some features, also those not complete yet."""
    settings = OpenSettings(features=tuple(features))
    return open_with(path.absolute(), Expectation.of(expect), settings)


# `FeatureReader`: from an id to a torch tensor, wherever a pipeline takes it.


class FeatureReader:
    """Read one feature of a cache by id, as a SpeechBrain dynamic item or any other callable.

    Threads, forks and pickles may share it, and it costs next to nothing to make or copy: the cache
    is opened at the first call in each process, and copies share nothing. One that was made anew
    from something else since the reader was made or first opened is refused then with a
    `StaleCacheError`. What is read is a tensor of its own, shape (frames, *dims), or `dims` without
    a time axis.

    Args:
        path: the cache directory; or what `Cache.opened` is, whose settings hold then.
        feature: the name of the feature.
        dtype: dtype of the tensors, "float32" or `torch.float32`; None: as declared.
        check_reads, expect, mapped, roots: as of `featcache.open`.

    >>> # to be given to `dataset.add_dynamic_item(reader, "id", "fbank")`
    >>> reader = FeatureReader("features/train", "fbank")
    """

    def __init__(
        self,
        path: str | PathLike[str] | Generation,
        feature: str,
        *,
        dtype: object = None,
        check_reads: bool = False,
        expect: Mapping[str, object] | None = None,
        mapped: bool = True,
        roots: Mapping[str, str | PathLike[str]] = NO_PLACES,
    ) -> None:
        self.feature = feature
        self._dtype = None if dtype is None else dtype_name(dtype)
        self._name: str | None = None  # of the generation; None: the current one
        self._opened: Generation | None = None
        if isinstance(path, Generation):
            opened = path.of_feature(feature)
            self.path, self._settings = opened.path, opened.settings
            self._expectation = Expectation.of_opened(opened)
            if opened.settings.version is not None:
                self._name = opened.manifest.name
            return
        self.path = directory(path, "a cache").absolute()
        self._settings = OpenSettings(mapped, check_reads, roots=absolute_roots(roots))
        self._expectation = Expectation.of(expect).with_what_is_there(self._place)

    def __call__(self, id: str) -> Tensor:
        """Return the tensor of an utterance; raises `KeyNotFoundError` for an unknown id."""
        return self.read(id)

    def read(self, id: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """Return the frames from `start` to before `stop` of an utterance, as `Cache.read` does.

        An id that is a whole number, or a tensor of one, is taken as text.
        """
        id = cast(str, as_id(id))
        opened = self.opened
        arrays = opened.arrays(self.feature)
        stored = arrays.read(opened.row(id), start, stop, id=id)
        return as_tensor(
            stored, arrays.declared_dtype, self._dtype, needed_by="featcache.FeatureReader"
        )

    def lengths(self, ids: Iterable[str] | None = None) -> list[int]:
        """Return the frames of all utterances in row order, or of some.

        `DynamicBatchSampler` takes those of `dataset.data_ids`: `lengths_list`.
        """
        if not (ids is None or isinstance(ids, str)):
            ids = [cast(str, as_id(id)) for id in ids]
        lengths: list[int] = self.opened.lengths(self.feature, ids=ids).tolist()
        return lengths

    @property
    def opened(self) -> Generation:
        """The generation of the cache that is read, opened when first needed."""
        if self._opened is None:
            with reading(self.path):
                if self._settings.remote is not None:
                    self._settings.remote.refresh()
                opened = Generation.at(
                    self._place, self._settings, name=self._name, cache_path=self.path
                )
                if self._expectation.same is None:  # nobody has opened the cache before
                    self._check_roots()
                self._expectation.check(opened)
            opened.arrays(self.feature)  # an unknown feature is an error here, with its name
            self._opened, self._expectation = opened, Expectation.of_opened(opened)
        return self._opened

    def _check_roots(self) -> None:
        if self._settings.roots.places:
            parts = [part for _, each in stored_sets(self.path) for part in each.parts]
            check_roots(self.path, parts, self._settings.roots)

    @property
    def _place(self) -> Path:
        """The directory that holds the feature, of its set where there are several."""
        return set_of(self.path, self.feature)

    def __repr__(self) -> str:
        return f"FeatureReader({str(self.path)!r}, {self.feature!r})"

    def __getstate__(self) -> dict[str, object]:
        expectation = self._expectation.as_of_now(self._place)
        return {**self.__dict__, "_expectation": expectation, "_opened": None}

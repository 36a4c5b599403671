"""lhotse's storage of arrays in caches: the writer and the reader of its registry.

That is one of each process: whoever stores or loads so imports `featcache.interop.lhotse`, also
workers that are spawned. Cuts and manifests of a cache are in that module.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

import numpy as np
from lhotse.features.io import FeaturesReader, FeaturesWriter, register_reader, register_writer
from numpy.typing import NDArray

from featcache._closing import close_after
from featcache.container_files.lock import is_locked
from featcache.declaration import FeatureStorageConfig
from featcache.errors import (
    CacheError,
    CacheLockedError,
    ClosedError,
    ConfigError,
    FeatureError,
    KeyNotFoundError,
    NotACacheError,
    WindowError,
)
from featcache.format.feature_sets import set_of
from featcache.format.files import from_storage
from featcache.format.journal import read_journal
from featcache.format.manifest import NAME, PARTS, BuildState, Manifest, read_manifest
from featcache.format.part import list_parts, part_directories, read_part, sealed_in
from featcache.interface import Array
from featcache.interop.in_caches import opened
from featcache.reading.unpublished import Unpublished, count_unpublished
from featcache.store import open_features
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.part_writer import PartWriter
from featcache.writing.sets import claim_directory, directory_to_write

STORAGE = "featcache"  # lhotse's name of caches
FEATURE = "feats"  # name of a feature that nobody named, as for `featcache.adopt`
JOB = "job"  # annotation of what several jobs write: the number of the one
_JOB = re.compile(r"feats-(\d+)")  # lhotse's names of the storages of several jobs
_MOST = 64  # caches beside which a process looks
_PATIENCE_S, _PAUSE_S = 60.0, 0.05  # for a job that begins the cache, or publishes it
_looking = threading.Lock()  # at what lies beside a generation
_writing: WeakValueDictionary[str, FeatcacheWriter] = WeakValueDictionary()  # by path


@register_writer
class FeatcacheWriter(FeaturesWriter):  # type: ignore[misc]
    """Writer of caches in lhotse's registry, as `storage_type=FeatcacheWriter`; a context manager.

    What is written is to be read at once, from this process also before it is closed. The storage
    key of an array is `<feature>/<id>`, and its id the key that lhotse gives: that of the cut in
    `compute_and_store_features_batch`, else a random one. All arrays of a writer are one feature;
    other kinds have a writer of their own, of the same cache if they have the same ids.

    lhotse's several jobs, which it names `<path>/feats-<number>`, write one cache at `<path>`,
    which the last one publishes. They delete nothing: a job refuses a cache that holds what no job
    wrote, or what one of its own number wrote in an earlier run.

    Args:
        storage_path: the directory of the cache.
        mode: None or "w" writes it anew, beside the old one, which stays until this is closed; "a"
            goes on with it, unless writing it anew was stopped. Where it is given, as by
            `compute_and_store_features_batch`, no end of the process loses an array after `write`
            returned.
        feature: its declaration; None: "feats", of the dtype of the first array, without `frame_s`,
            which `to_cuts` needs. `storing` hands one on.
        fingerprint: what the features are made from, e.g. `extractor.to_dict()`.

    Raises what `CacheWriter` raises, `CacheError` for a cache that it refuses, `ClosedError` once
    it is closed, and `FeatureError` for an array of another dtype than the first one where none is
    declared.

    >>> import tempfile, lhotse
    >>> with FeatcacheWriter(tempfile.mkdtemp()) as writer:
    ...     stored = writer.store_array("utt-1", np.arange(6.0).reshape(3, 2))
    >>> stored.storage_key, stored.load().shape
    ('feats/utt-1', (3, 2))
    """

    name: ClassVar[str] = STORAGE

    def __init__(
        self,
        storage_path: str | os.PathLike[str],
        mode: str | None = None,
        *,
        feature: FeatureStorageConfig | None = None,
        fingerprint: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__()
        if mode is not None and mode[:1] not in ("a", "w"):
            raise ConfigError(f"mode is 'w', which writes anew, or 'a', not {mode!r}")
        self._path, self._job = _place(storage_path)
        self._mode, self._declared, self._fingerprint = mode, feature, fingerprint
        self._feature: FeatureStorageConfig | None = None  # until the first array
        self._cache: CacheWriter | None = None  # none of several jobs holds it
        self._part: PartWriter | None = None
        self._beside: Unpublished  # what it has written
        self._new: set[str] = set()
        self._opening = threading.Lock()
        self._closed = False

    @classmethod
    def storing(
        cls, feature: FeatureStorageConfig, fingerprint: Mapping[str, object] | None = None
    ) -> Any:
        """Return a `storage_type` for lhotse: this writer, with a declaration.

        >>> from featcache import FeatureStorageConfig
        >>> fbank = FeatureStorageConfig("fbank", dtype="float16", frame_s=0.01)
        >>> storage_type = FeatcacheWriter.storing(fbank)
        >>> storage_type.name
        'featcache'
        """
        made: Any = partial(cls, feature=feature, fingerprint=fingerprint)
        made.name = cls.name  # which lhotse asks of the type; pickled with it
        return made

    @property
    def storage_path(self) -> str:
        """The path of the cache."""
        return str(self._path)

    def __contains__(self, id: str) -> bool:
        """Whether this writer has written an array of this id."""
        return id in self._new

    def write(self, key: str, value: Array) -> str:
        """Store an array, and return its storage key; raises what `CacheWriter.write` raises.

        In a cache that is gone on with, it takes the place of one of an earlier run.
        """
        if self._closed:
            raise ClosedError(f"the writer of {str(self._path)!r} is closed; open another one")
        array = np.asarray(value)
        with self._opening:
            if self._part is None:
                self._begin(array)
        assert self._part is not None
        assert self._feature is not None
        feature = self._feature.name
        if self._declared is None and array.dtype != self._feature.dtype:
            raise FeatureError(
                f"{key!r} is {array.dtype}, and the arrays before it are {self._feature.dtype}; "
                "give other arrays a writer of their own, FeatcacheWriter.storing(...)"
            )
        job = None if self._job is None else {JOB: self._job}
        if job or not (key in self._part and key not in self._new and self._has(key, array)):
            write = self._part.write if self._mode is None else self._part.write_through
            write(key, {feature: array}, annotations=job)
        self._new.add(key)
        return f"{feature}/{key}"

    def stored(self, id: str) -> NDArray[Any] | None:
        """Return an array that was written; None if it is published, where all can read it."""
        if self._part is None or self._feature is None:
            return None
        self._part.commit(durably=False)
        manifest, name = read_manifest(self._part.path), self._feature.name
        declared = {**manifest.made_from, "features": {name: self._feature.to_json()}}
        return _stored(self._beside, replace(manifest, fingerprint=declared), id, name)

    def close(self) -> None:
        """Publish what was written; the cache is complete then, unless other jobs still write."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._closed = True
        part, self._part = self._part, None
        if part is None:
            return
        if self._cache is not None:
            close_after(error, part.close)
            self._cache.__exit__(kind, error, traceback)
        elif error is None:
            part.close()
            self._end_run(part.path, complete=True)
        else:  # as if killed, so that who publishes it knows that this job has not ended well
            close_after(error, partial(_leave, part))
            close_after(error, partial(self._end_run, part.path, complete=False))

    def _end_run(self, place: Path, *, complete: bool) -> None:
        """Publish what all jobs wrote, unless one of them is still at work, or has done so."""
        assert self._feature is not None
        until = time.monotonic() + _PATIENCE_S
        while not complete or count_unpublished(place, read_manifest(place)):
            lives, died = _unsealed(place)
            if lives:
                return
            complete = complete and not died
            try:
                CacheWriter(self._path, [self._feature], self._fingerprint).close(complete)
                return
            except CacheLockedError:  # another one publishes, or begins
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE_S)

    def _begin(self, first: Array) -> None:
        """Open the cache, declared as the first array is."""
        axis = 0 if first.ndim else None
        made = self._declared or FeatureStorageConfig(
            FEATURE, dtype=first.dtype.name, time_axis=axis
        )
        self._feature = made
        if self._job is None:
            overwrite = self._mode is None or self._mode.startswith("w")
            if not overwrite:
                _check_not_overwritten(self._path, made.name)
            self._cache = CacheWriter(self._path, [made], self._fingerprint, overwrite=overwrite)
            place = self._cache.path
            if overwrite:  # what an interrupted run left has keys of that run
                self._cache.delete([id for id in _left(place) if id in self._cache])
        else:
            _check_not_overwritten(self._path, made.name)
            place = _begun(self._path, made, self._fingerprint)
            _check_of_this_run(self._path, place, made.name, self._job)
        self._part = PartWriter(place, [made], self._fingerprint)
        self._beside = Unpublished(place, self._part.features)
        _writing[str(self._path)] = self

    def _has(self, id: str, array: Array) -> bool:
        """Whether an earlier run stored this array; another one in its place is deleted."""
        assert self._feature is not None
        assert self._cache is not None
        assert self._part is not None
        name = self._feature.name
        self._part.check(id, {name: array})  # else what is refused would delete what is stored
        stored = _read(str(self._path), name, id)
        if np.array_equal(stored, array.astype(stored.dtype)):
            return True
        self._part.close()
        self._cache.delete([id])
        self._part = PartWriter(self._cache.path, [self._feature], self._fingerprint)
        return False


def _place(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Return the directory of a cache, and the number of the job of lhotse's that writes to it."""
    directory = Path(path).absolute()
    job, parent = _JOB.fullmatch(directory.name), directory.parent
    if job is not None and parent.is_dir() and not directory.exists():
        with suppress(NotACacheError):  # it holds something else, and lhotse did not make it
            claim_directory(parent)
            return parent, int(job[1])
    return directory, None


def _left(place: Path) -> Iterator[str]:
    """Yield the ids that the build which is being written holds already, deleted ones, too."""
    for part in sealed_in(place, read_manifest(place)):
        yield from part.ids(place)


def _check_not_overwritten(path: Path, feature: str) -> None:
    """Raise `CacheError` where an overwrite was stopped: to go on would mix two builds."""
    place = directory_to_write(path, [feature])
    if (place / NAME).exists() and read_manifest(place).state is BuildState.ASIDE:
        raise CacheError(
            f"cache {str(path)!r} was being written anew, which was not finished, and going on "
            "would mix features of two runs; run it again with overwrite=True (mode 'w')"
        )


def _check_of_this_run(path: Path, place: Path, feature: str, job: int) -> None:
    """Raise `CacheError` unless other jobs wrote all that a cache holds, published or not."""
    for writer in _written_by(path, place, feature):
        if writer is None or writer == job:
            whose = "no job of lhotse's" if writer is None else f"job {job} of an earlier run"
            raise CacheError(
                f"cache {str(path)!r} holds features {feature!r} that {whose} wrote, and jobs "
                "delete nothing; remove the cache, or choose another path"
            )


def _written_by(path: Path, place: Path, feature: str) -> Iterator[object]:
    """Yield the number of the job that wrote each utterance of a cache; None: no job did."""
    manifest = read_manifest(place)
    if manifest.rows:
        cache = open_features(path, [feature])
        yield from cache.annotation(JOB) if JOB in cache.annotations else [None]
    published = {entry.name for entry in manifest.parts}
    for part in sealed_in(place, manifest):
        if part.entry.name not in published and part.entry.rows:
            kinds = part.index(place, []).annotations
            yield from part.annotation(place, JOB, kinds[JOB]) if JOB in kinds else [None]
    for directory in part_directories(place):
        journal = read_journal(place, f"{PARTS}/{directory.name}")
        if journal is not None:
            yield from (each.annotations.get(JOB) for each in journal.utterances)


def _unsealed(place: Path) -> tuple[bool, bool]:
    """Return whether a part is being written, and whether one was left by a writer that died."""
    lives = died = False
    for name, sealed in list_parts(place):
        if sealed is None:
            with suppress(FileNotFoundError):  # its writer has removed it
                if is_locked(place / PARTS / name):
                    lives = True
                elif read_part(place, name) is None:  # else it was sealed meanwhile
                    died = True
    return lives, died


def _leave(part: PartWriter) -> None:
    try:
        part.commit()
    finally:
        part.leave()


def _begun(
    path: Path, feature: FeatureStorageConfig, fingerprint: Mapping[str, object] | None
) -> Path:
    """Return where several jobs write a feature, once one of them has begun it."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        place = directory_to_write(path, [feature.name])
        if (place / NAME).exists():
            return place
        try:
            CacheWriter(path, [feature], fingerprint).close(complete=False)
        except CacheLockedError:  # another job begins it
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)


@register_reader
class FeatcacheReader(FeaturesReader):  # type: ignore[misc]
    """Reader of caches in lhotse's registry: path a cache, key `<feature>/<id>`.

    lhotse makes a reader for each array; the caches stay open in the process, and one that was
    written anew is opened anew. What a `FeatcacheWriter` writes is read before it is published.
    Frames beyond the end are cut off, as by lhotse's own readers.

    >>> import tempfile, featcache, numpy as np
    >>> path = tempfile.mkdtemp()
    >>> with featcache.CacheWriter(path, [featcache.FeatureStorageConfig("f")]) as writer:
    ...     writer.write("utt-1", {"f": np.zeros((5, 3))})
    >>> FeatcacheReader(path).read("f/utt-1", left_offset_frames=3).shape
    (2, 3)
    """

    name: ClassVar[str] = STORAGE

    def __init__(self, storage_path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = os.fspath(storage_path)

    def read(
        self, key: str, left_offset_frames: int = 0, right_offset_frames: int | None = None
    ) -> Array:
        """Return a copy of an array, or of some of its frames; raises as `cache.read` does."""
        feature, _, id = key.partition("/")
        frames = slice(left_offset_frames, right_offset_frames)
        if _writing:
            writer = _writing.get(os.path.abspath(self._path))  # noqa: PTH100  # as below
            if writer is not None and id in writer:
                found = writer.stored(id)
                if found is not None:
                    return found[frames]
        return _read(self._path, feature, id, frames)


def _read(path: str, feature: str, id: str, frames: slice = slice(None)) -> Array:
    """Read from the generation, or else what lies beside it; raises as `cache.read` does."""
    try:
        cache = opened(path)
        if frames.start in (0, None) and frames.stop is None:
            return cache.read(id, feature)
        with suppress(WindowError):  # mostly the frames are there: one look for the id less
            return cache.read(id, feature, frames.start, frames.stop)
        length = int(cache.lengths(feature, rows=cache.rows([id]))[0])
        start, stop, _ = frames.indices(length)
        return cache.read(id, feature, start, max(start, stop))
    except (KeyNotFoundError, NotACacheError):
        found = _unpublished(path, feature, id)
        if found is None:
            raise
        return found[frames]


def _unpublished(path: str, feature: str, id: str) -> Array | None:
    """Return an array that is stored and that no generation holds yet; None if there is none."""
    place = set_of(Path(path).absolute(), feature)
    with suppress(NotACacheError):
        manifest = read_manifest(place)
        if manifest.state is BuildState.CURRENT:  # else readers see the old one until it is whole
            return _stored(_beside(place, manifest.building_fingerprint), manifest, id, feature)
    return None


@lru_cache(maxsize=_MOST)
def _beside(place: Path, made_from: str) -> Unpublished:
    return Unpublished(place, read_manifest(place).declared)


def _stored(beside: Unpublished, manifest: Manifest, id: str, feature: str) -> Array | None:
    with _looking:
        beside.look(manifest)
        found = beside.read(id)
    return None if found is None else from_storage(found[feature], manifest.declared[feature].dtype)

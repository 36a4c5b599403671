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
from typing import Any, ClassVar, Self, cast
from weakref import WeakValueDictionary

import numpy as np
from lhotse.features.io import FeaturesReader, FeaturesWriter, register_reader, register_writer
from numpy.typing import NDArray

from featcache._closing import close_after
from featcache.declaration import FeatureStorageConfig
from featcache.errors import (
    CacheLockedError,
    ConfigError,
    FeatureError,
    KeyNotFoundError,
    NotACacheError,
    WindowError,
)
from featcache.format.feature_sets import set_of
from featcache.format.files import from_storage
from featcache.format.manifest import NAME, BuildState, Manifest, read_manifest
from featcache.format.part import list_parts, sealed_in
from featcache.interop.in_caches import opened
from featcache.reading.unpublished import Unpublished
from featcache.store import Cache, open_features
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.part_writer import PartWriter
from featcache.writing.recover import check_none_lives
from featcache.writing.session import publish_sealed
from featcache.writing.sets import claim_directory, directory_to_write

STORAGE = "featcache"  # lhotse's name of caches
FEATURE = "feats"  # name of a feature that nobody named, as for `featcache.adopt`
JOB, BEGAN = "job", "job_began_ns"  # annotations of what several jobs write
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

    lhotse's several jobs, which it names `<path>/feats-<number>`, write one cache at `<path>`. What
    the job of the same number wrote in an earlier run is deleted then.

    Args:
        storage_path: the directory of the cache.
        mode: None or "w" writes it anew, beside the old one, which stays until this is closed; "a"
            goes on with it. Where it is given, as by `compute_and_store_features_batch`, no end of
            the process loses an array after `write` returned.
        feature: its declaration; None: "feats", of the dtype of the first array, without `frame_s`,
            which `to_cuts` needs. `storing` hands one on.
        fingerprint: what the features are made from, e.g. `extractor.to_dict()`.

    Raises what `CacheWriter` raises, and `FeatureError` for an array of another dtype than the
    first one where none is declared.

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
        told = {JOB: self._job, BEGAN: time.time_ns()}
        self._told = None if self._job is None else told

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

    def write(self, key: str, value: NDArray[Any]) -> str:
        """Store an array, and return its storage key; raises what `CacheWriter.write` raises.

        In a cache that is gone on with, it takes the place of one of an earlier run.
        """
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
        if not (key in self._part and key not in self._new and self._has(key, array)):
            self._part.write(key, {feature: array}, annotations=self._told)
        self._new.add(key)
        if self._mode is not None:
            self._part.commit(durably=False)
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
        part, self._part = self._part, None
        if part is not None:
            close_after(error, part.close)
            if self._cache is not None:
                self._cache.__exit__(kind, error, traceback)
            else:
                close_after(error, partial(self._publish, part.path, error is None))

    def _publish(self, place: Path, complete: bool) -> None:
        """Publish what a job wrote; the last one leaves out what earlier runs wrote."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                check_none_lives(place, list_parts(place))
            except CacheLockedError:  # another job still writes, and does the rest
                publish_sealed(place, patience_s=_PATIENCE_S)
                return
            try:
                self._end_run(complete)
                return
            except CacheLockedError:  # another one publishes
                if time.monotonic() > until:
                    raise
                time.sleep(_PAUSE_S)

    def _end_run(self, complete: bool) -> None:
        assert self._feature is not None
        writer = CacheWriter(self._path, [self._feature], self._fingerprint)
        try:
            writer.delete(_superseded(open_features(self._path, [self._feature.name])))
        finally:
            writer.close(complete)

    def _begin(self, first: NDArray[Any]) -> None:
        """Open the cache, declared as the first array is."""
        axis = 0 if first.ndim else None
        made = self._declared or FeatureStorageConfig(
            FEATURE, dtype=first.dtype.name, time_axis=axis
        )
        self._feature = made
        if self._job is None:
            overwrite = self._mode is None or self._mode.startswith("w")
            self._cache = CacheWriter(self._path, [made], self._fingerprint, overwrite=overwrite)
            place = self._cache.path
            if overwrite:  # what an interrupted run left has keys of that run
                self._cache.delete([id for id in _left(place) if id in self._cache])
        else:
            place = _begun(self._path, made, self._fingerprint)
        self._part = PartWriter(place, [made], self._fingerprint)
        self._beside = Unpublished(place, self._part.features)
        _writing[str(self._path)] = self

    def _has(self, id: str, array: NDArray[Any]) -> bool:
        """Whether an earlier run stored this array; another one in its place is deleted."""
        assert self._feature is not None
        stored = _read(str(self._path), self._feature.name, id)
        if np.array_equal(stored, array.astype(stored.dtype)):
            return True
        if self._cache is not None and self._part is not None:
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


def _superseded(cache: Cache) -> list[str]:
    """Return the ids that no job wrote, or one before another of its number wrote others."""
    written = cast(
        "list[tuple[int | None, int]]",
        [*zip(cache.annotation(JOB), cache.annotation(BEGAN), strict=True)],
    )
    last: dict[int | None, int] = {}
    for job, began in written:
        if job is not None:
            last[job] = max(began, last.get(job, 0))
    told = zip(cache, written, strict=True)
    return [id for id, (job, began) in told if job is None or began < last[job]]


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
    ) -> NDArray[Any]:
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


def _read(path: str, feature: str, id: str, frames: slice = slice(None)) -> NDArray[Any]:
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


def _unpublished(path: str, feature: str, id: str) -> NDArray[Any] | None:
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


def _stored(beside: Unpublished, manifest: Manifest, id: str, feature: str) -> NDArray[Any] | None:
    with _looking:
        beside.look(manifest)
        found = beside.read(id)
    return None if found is None else from_storage(found[feature], manifest.declared[feature].dtype)

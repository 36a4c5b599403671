"""`CacheWriter`: the one writer of a cache that recovers, resumes, overwrites and publishes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from featcache.errors import ConfigError, NotACacheError, StaleCacheError
from featcache.feature import FeatureStorageConfig
from featcache.store.arrays import ArrayLike
from featcache.store.closing import close_after
from featcache.store.files import make_directory
from featcache.store.fingerprint import cache_fingerprint, differences, fingerprint_digest
from featcache.store.format.disk_errors import explained
from featcache.store.generation import load_generation
from featcache.store.lock import WriterLock
from featcache.store.manifest import (
    MANIFESTS,
    NAME,
    PARTS,
    Manifest,
    check_writable,
    read_manifest,
    write_manifest,
)
from featcache.store.part_writer import Features, PartWriter, by_name
from featcache.store.recover import committed_builds, recover_parts
from featcache.store.verify import container_damage, raise_damage
from featcache.store.writing.publish import Outcome, publish, remove_superseded, sealed_parts
from featcache.store.writing.unclosed import close_when_dropped

OTHERS = "work-"  # names in a cache directory that begin so are those of whoever works there


class CacheWriter:
    """Write a cache: start it, or go on with what is there.

    What an earlier writer committed before it died is recovered first. As a context manager it publishes the cache as
    complete at the end; after an error all that was written is kept and published as incomplete, or, when it would
    take the place of a cache to be overwritten, kept beside that. A writer that nobody closed does the same when it is
    dropped or its process ends, with a warning.

    Args:
        path: the cache directory; made if it does not exist.
        features: the declarations of all features.
        fingerprint: what the features are made from (JSON values): model, layer, sample rate, ...
        overwrite: build the cache anew beside the old one, which stays good until the new one is published. A second
            try goes on with what an interrupted one had committed.

    Raises `StaleCacheError`, with the differences, if the cache was made from something else than declared here;
    `CacheLockedError` if it is being written; `NotACacheError` if the path holds something else.

    >>> import tempfile, featcache, numpy as np
    >>> from featcache import CacheWriter, FeatureStorageConfig
    >>> path = tempfile.mkdtemp()
    >>> with CacheWriter(path, [FeatureStorageConfig("fbank")], {"sample_rate_hz": 16000}) as writer:
    ...     writer.write("utt-1", {"fbank": np.zeros((300, 80), np.float32)})
    >>> featcache.open(path).read("utt-1", "fbank").shape
    (300, 80)
    """

    def __init__(
        self,
        path: str | Path,
        features: Features,
        fingerprint: Mapping[str, object] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        self._work = _Writing(Path(path).absolute(), by_name(features), fingerprint or {}, overwrite)
        self._parts = self._work.parts
        what = f"the writer of {str(self.path)!r}"
        self._forget = close_when_dropped(self, self._work, what, _Writing.finish_unclosed)

    @property
    def path(self) -> Path:
        """The cache directory."""
        return self._work.path

    @property
    def features(self) -> Mapping[str, FeatureStorageConfig]:
        """The declarations, by name."""
        return self._work.features

    def __repr__(self) -> str:
        state = "closed" if self._parts.closed else f"{len(self)} utterances written"
        return f"<CacheWriter {str(self.path)!r}: {', '.join(self.features)}, {state}>"

    def __contains__(self, id: str) -> bool:
        """Say whether an utterance is in the cache, or was written now."""
        return id in self._parts

    def __len__(self) -> int:
        """Return how many utterances were written now."""
        return len(self._parts)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a writer cannot be pickled: it belongs to its process")

    @property
    def bytes_written(self) -> int:
        """Bytes of all arrays that were written now, before any codec."""
        return self._parts.bytes_written

    def write(self, id: str, arrays: Mapping[str, ArrayLike]) -> None:
        """Store the features of one utterance; the arrays may be used again as soon as this returns.

        Args:
            id: any non-empty Unicode string without NUL.
            arrays: exactly the declared features, each a numpy array or torch tensor of shape (frames, *dims), or
                `dims` for a feature without a time axis.

        Raises `FeatureError` for arrays that cannot be stored as declared and `DuplicateIdError` for a known id; then
        nothing of the utterance is stored and writing may go on. Raises `StorageFullError` before the disk is full, and
        `ConfigError` in a process that was forked from the writer's.
        """
        self._parts.write(id, arrays)

    def expect(self, ids: Iterable[str]) -> None:
        """Say which utterances the cache is to hold in the end, those that it holds already among them.

        The cache is complete, then, when each of them is stored or has failed, and otherwise not, however the
        writer is closed.
        """
        if isinstance(ids, str | int):
            raise ConfigError(f"the expected ids are a list of strings, not {ids!r}")
        self._work.expected = frozenset(ids)

    def expect_more(self, utterances: int) -> None:
        """Say how many utterances are still to come, so that a disk that is too small is noticed early."""
        self._parts.expect_more(utterances)

    def fail(self, id: str) -> None:
        """Note that an expected utterance cannot be computed; forgotten once it is stored."""
        self._work.failed.add(id)

    def commit(self) -> int:
        """Make all that was written durable; returns how many utterances this writer has made so.

        Happens by itself every two seconds.
        """
        return self._parts.commit()

    def publish(self, complete: bool = False) -> None:
        """Let readers see all that was written here, and the parts that other `PartWriter`s have closed."""
        self._parts.seal()
        self._work.publish(complete)

    def recover(self) -> None:
        """Seal what `PartWriter`s that died meanwhile had committed.

        Raises `CacheLockedError` if one of them lives; this writer's own arrays must have been published.
        """
        self._work.recover()

    def close(self, complete: bool = True) -> None:
        """Publish, and let go of the cache; `complete` holds where no ids are expected."""
        self._work.close(complete, publish=True)
        self._forget()

    def abort(self) -> None:
        """Remove what was written since the last `publish`, and let go of the cache."""
        self._work.abort()
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        publishes = error is None or not self._work.is_aside
        close_after(error, lambda: self._work.close(complete=error is None, publish=publishes))
        self._forget()


class _Writing:
    """What a `CacheWriter` works on; the thread that stores knows this one, so that the writer itself can be dropped."""

    def __init__(
        self, path: Path, features: dict[str, FeatureStorageConfig], fingerprint: Mapping[str, object], overwrite: bool
    ) -> None:
        self.path = path
        self.features = features
        self.expected: frozenset[str] | None = None
        self.failed: set[str] = set()
        content = cache_fingerprint(features, fingerprint)
        self._fingerprint = fingerprint_digest(content)
        with explained(path, _kept):
            _claim_directory(path)
            self._lock = WriterLock(path)
            try:
                self._manifest = self._start(content, overwrite)
                remove_superseded(path, read_manifest(path))  # if the last writer died before it came to that
                _check_containers(path)
                recover_parts(path, features, self._manifest.building, self._fingerprint)
                self._publish_recovered()
                self.parts = PartWriter(path, features, fingerprint)
            except BaseException:
                self._lock.release()
                raise

    @property
    def is_aside(self) -> bool:
        """Whether what is written is to take the place of a cache that readers still see."""
        return self._manifest.building > self._manifest.build

    def publish(self, complete: bool) -> None:
        """Publish what is sealed, if that changes anything."""
        sealed = sealed_parts(self.path, self._manifest.building, self._fingerprint)
        changed = {part.entry.name for part in sealed} != {entry.name for entry in self._manifest.parts}
        if changed or self.failed or self.expected is not None or complete != self._manifest.complete:
            with explained(self.path, _kept):
                outcome = Outcome(complete, self.expected, frozenset(self.failed))
                self._manifest = publish(self.path, self._manifest, outcome)
            self.parts.published()

    def recover(self) -> None:
        with explained(self.path, _kept):
            recover_parts(self.path, self.features, self._manifest.building, self._fingerprint)

    def close(self, complete: bool, *, publish: bool) -> None:
        if self.parts.closed:
            return
        try:
            self.parts.close()
            if publish:
                self.publish(complete)
        finally:
            if self.parts.closed:  # not in a process that was forked
                self._lock.release()

    def abort(self) -> None:
        try:
            self.parts.abort()
        finally:
            if self.parts.closed:
                self._lock.release()

    def finish_unclosed(self) -> None:
        self.close(complete=False, publish=not self.is_aside)

    def _publish_recovered(self) -> None:
        """Let readers see what was recovered, or each writer would have to read its ids anew."""
        known = {entry.name for entry in self._manifest.parts}
        sealed = {part.entry.name for part in sealed_parts(self.path, self._manifest.building, self._fingerprint)}
        if not self.is_aside and sealed - known:
            self._manifest = publish(self.path, self._manifest, Outcome(complete=False))

    def _start(self, content: Mapping[str, object], overwrite: bool) -> Manifest:
        """Return the manifest to build on, which on disk names the build that all writers add parts to."""
        if not (self.path / NAME).exists():
            builds = committed_builds(self.path)  # none, unless the manifest was lost
            if set(builds) - {self._fingerprint}:
                raise StaleCacheError(
                    f"cache {str(self.path)!r} has lost its {NAME}, and its parts were made from something else than "
                    f"is declared now; declare it as it was, or remove {str(self.path / PARTS)!r}"
                )
            build = builds.get(self._fingerprint, 1)
            fresh = Manifest(content, build=build, building=build, building_fingerprint=self._fingerprint)
            return publish(self.path, fresh, Outcome(complete=False))
        manifest = read_manifest(self.path)
        check_writable(self.path, manifest)
        changed = differences(manifest.fingerprint, content)
        if overwrite and (manifest.rows or (changed and committed_builds(self.path))):
            return self._start_overwrite(manifest, content)
        if changed and (manifest.rows or committed_builds(self.path)):
            lines = "".join(f"\n  {line}" for line in changed)
            raise StaleCacheError(
                f"cache {str(self.path)!r} was made from something else than is declared now:{lines}\n"
                "overwrite it (overwrite=True), or give another directory"
            )
        if changed or manifest.building != manifest.build:
            manifest = dataclasses.replace(
                manifest, fingerprint=content, building=manifest.build, building_fingerprint=self._fingerprint
            )
            manifest = write_manifest(self.path, manifest)
        return manifest

    def _start_overwrite(self, manifest: Manifest, content: Mapping[str, object]) -> Manifest:
        interrupted = manifest.building > manifest.build and manifest.building_fingerprint == self._fingerprint
        if not interrupted:
            building = max(manifest.build, manifest.building) + 1
            manifest = dataclasses.replace(manifest, building=building, building_fingerprint=self._fingerprint)
            manifest = write_manifest(self.path, manifest)
        return dataclasses.replace(manifest, fingerprint=content)


def _kept() -> str:
    return "all that was committed before is kept"


def _check_containers(path: Path) -> None:
    """Raise `CorruptCacheError` if files of published parts are lost: what they hold would count as stored.

    A part whose whole directory is gone was removed to compute its utterances again.
    """
    manifest, index, _ = load_generation(path)
    there = [(path / PARTS / entry.name).exists() for entry in manifest.parts]
    rows = np.flatnonzero(np.array(there, bool)[index.containers.parts]).tolist()
    raise_damage(container_damage(path, index.containers, rows))


def _claim_directory(path: Path) -> None:
    """Make the directory, or see that it is a cache or empty."""
    if path.exists() and not path.is_dir():
        raise NotACacheError(f"{str(path)!r} is a file; a cache is a directory")
    try:
        make_directory(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotACacheError(f"{str(path)!r} cannot be made a directory: {error}") from error
    files = rf"{NAME}(\.tmp)?|{PARTS}|{MANIFESTS}|writer\.(lock|json)|index-[0-9]{{6,}}-[0-9a-f]{{8}}\.columns"
    ours = re.compile(rf"{files}|{OTHERS}.*")
    names = sorted(entry.name for entry in path.iterdir())  # once: another writer may be making the cache
    foreign = [name for name in names if not ours.fullmatch(name)]
    if NAME not in names and foreign:
        raise NotACacheError(f"{str(path)!r} holds other files ({foreign[0]!r}); give a new or empty directory")

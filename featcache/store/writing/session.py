"""A `CacheWriter`'s work from opening to publishing: the lock, the manifest, the parts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import NotACacheError, StaleCacheError
from featcache.store.format.committed import committed_builds
from featcache.store.format.disk_errors import explained
from featcache.store.format.files import check_own_directory, make_directory
from featcache.store.format.fingerprint import cache_fingerprint, differences, fingerprint_digest
from featcache.store.format.lock import WriterLock
from featcache.store.format.manifest import (
    INDEX,
    MANIFESTS,
    NAME,
    PARTS,
    Manifest,
    check_writable,
    read_manifest,
    write_manifest,
)
from featcache.store.reading.generation import Generation
from featcache.store.reading.verify import container_damage, raise_damage
from featcache.store.writing.part_writer import PartWriter
from featcache.store.writing.publish import Outcome, publish, sealed_parts
from featcache.store.writing.recover import recover_parts
from featcache.store.writing.superseded import remove_superseded

OTHERS = "work-"  # names in a cache directory that begin so are those of whoever works there


class WriteSession:
    """Work of a `CacheWriter`: its lock, its manifest, its parts.

    The thread that stores knows this one, so that the writer itself can be dropped.
    """

    def __init__(
        self,
        path: Path,
        features: dict[str, FeatureStorageConfig],
        fingerprint: Mapping[str, object],
        overwrite: bool,
    ) -> None:
        self.path = path
        self.features = features
        self.expected: Sequence[str] | None = None
        self.failed: set[str] = set()
        content = cache_fingerprint(features, fingerprint)
        self._fingerprint = fingerprint_digest(content)
        with explained(path, _kept):
            _claim_directory(path)
            self._lock = WriterLock(path)
            try:
                self._manifest = self._start(content, overwrite)
                # if the last writer died before it came to that
                remove_superseded(path, read_manifest(path))
                _check_containers(path)
                recover_parts(path, features, self._manifest.building, self._fingerprint)
                self._publish_recovered()
                self.parts = PartWriter(path, features, fingerprint)
            except BaseException:
                self._lock.release()
                raise

    @property
    def is_aside(self) -> bool:
        """True while a cache that readers still see is built anew beside it."""
        return self._manifest.building > self._manifest.build

    def publish(self, complete: bool) -> None:
        """Publish what is sealed, if that changes anything."""
        with explained(self.path, _kept):
            before = self._manifest
            sealed = sealed_parts(self.path, before.building, self._fingerprint)
            changed = {part.entry.name for part in sealed} != {part.name for part in before.parts}
            told = self.failed or self.expected is not None or complete != before.complete
            if changed or told:
                outcome = Outcome(complete, self.expected, frozenset(self.failed))
                self._manifest = publish(self.path, before, outcome)
                self.parts.published()

    def recover(self) -> None:
        """Seal what writers of parts that died had committed."""
        with explained(self.path, _kept):
            recover_parts(self.path, self.features, self._manifest.building, self._fingerprint)

    def close(self, complete: bool, *, publish: bool) -> None:
        """Seal what was written, publish it, and let go of the cache.

        It is not published if it waits beside an older cache.
        """
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
        """Remove what is not published, and let go of the cache."""
        try:
            self.parts.abort()
        finally:
            if self.parts.closed:
                self._lock.release()

    def finish_unclosed(self) -> None:
        """Keep what was written, as `CacheWriter` does after an error."""
        self.close(complete=False, publish=not self.is_aside)

    def _publish_recovered(self) -> None:
        """Let readers see what was recovered, or each writer would have to read its ids anew."""
        known = {entry.name for entry in self._manifest.parts}
        sealed = {
            part.entry.name
            for part in sealed_parts(self.path, self._manifest.building, self._fingerprint)
        }
        if not self.is_aside and sealed - known:
            self._manifest = publish(self.path, self._manifest, Outcome(complete=False))

    def _start(self, content: Mapping[str, object], overwrite: bool) -> Manifest:
        """Return the manifest to build on.

        On disk it names the build that all writers add parts to.
        """
        if not (self.path / NAME).exists():
            builds = committed_builds(self.path)  # none, unless the manifest was lost
            if set(builds) - {self._fingerprint}:
                raise StaleCacheError(
                    f"cache {str(self.path)!r} has lost its {NAME}, and its parts were made from "
                    "something else than is declared now; declare it as it was, or remove "
                    f"{str(self.path / PARTS)!r}"
                )
            build = builds.get(self._fingerprint, 1)
            fresh = Manifest(
                content, build=build, building=build, building_fingerprint=self._fingerprint
            )
            return publish(self.path, fresh, Outcome(complete=False))
        manifest = read_manifest(self.path)
        check_writable(self.path, manifest)
        changed = differences(manifest.fingerprint, content)
        if overwrite and (manifest.rows or (changed and committed_builds(self.path))):
            return self._start_overwrite(manifest, content)
        if changed and (manifest.rows or committed_builds(self.path)):
            lines = "".join(f"\n  {line}" for line in changed)
            raise StaleCacheError(
                f"cache {str(self.path)!r} was made from something else than is declared "
                f"now:{lines}\n"
                "overwrite it (overwrite=True), or give another directory"
            )
        if changed or manifest.building != manifest.build:
            manifest = dataclasses.replace(
                manifest,
                fingerprint=content,
                building=manifest.build,
                building_fingerprint=self._fingerprint,
            )
            manifest = write_manifest(self.path, manifest)
        return manifest

    def _start_overwrite(self, manifest: Manifest, content: Mapping[str, object]) -> Manifest:
        interrupted = (
            manifest.building > manifest.build
            and manifest.building_fingerprint == self._fingerprint
        )
        if not interrupted:
            building = max(manifest.build, manifest.building) + 1
            manifest = dataclasses.replace(
                manifest, building=building, building_fingerprint=self._fingerprint
            )
            manifest = write_manifest(self.path, manifest)
        return dataclasses.replace(manifest, fingerprint=content)


def _kept() -> str:
    return "all that was committed before is kept"


def _check_containers(path: Path) -> None:
    """Raise `CorruptCacheError` if files of published parts are lost.

    What they hold would count as stored.

    A part whose whole directory is gone was removed to compute its utterances again.
    """
    opened = Generation(path)
    containers = opened.index.containers
    there = [(path / PARTS / entry.name).exists() for entry in opened.manifest.parts]
    rows = np.flatnonzero(np.array(there, bool)[containers.parts]).tolist()
    raise_damage(container_damage(path, containers, rows))


def _claim_directory(path: Path) -> None:
    """Make the directory, or see that it is a cache or empty."""
    if path.exists() and not path.is_dir():
        raise NotACacheError(f"{str(path)!r} is a file; a cache is a directory")
    try:
        make_directory(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotACacheError(f"{str(path)!r} cannot be made a directory: {error}") from error
    for directory in (PARTS, MANIFESTS):
        check_own_directory(path / directory)
    locks = r"writer\.(lock|lock\.soft|json)"
    files = rf"{NAME}(\.[0-9a-f]{{8}}\.tmp)?|{INDEX.pattern}|{PARTS}|{MANIFESTS}|{locks}"
    ours = re.compile(rf"{files}|{OTHERS}.*")
    # once: another writer may be making the cache
    names = sorted(entry.name for entry in path.iterdir())
    foreign = [name for name in names if not ours.fullmatch(name)]
    if NAME not in names and foreign:
        raise NotACacheError(
            f"{str(path)!r} holds other files ({foreign[0]!r}); give a new or empty directory"
        )

"""`CacheWriter`: the one writer of a cache that recovers, resumes, overwrites and publishes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from featcache.errors import NotACacheError, StaleCacheError
from featcache.store.arrays import ArrayLike
from featcache.store.closing import close_after
from featcache.store.files import make_directory
from featcache.store.fingerprint import cache_fingerprint, differences, fingerprint_digest
from featcache.store.lock import WriterLock
from featcache.store.manifest import NAME, PARTS, Manifest, read_manifest, write_manifest
from featcache.store.merge import publish, remove_superseded, sealed_parts
from featcache.store.part_writer import GO_ON, Features, PartWriter, by_name, full_disk_explained
from featcache.store.recover import committed_builds, recover_parts

RUN = "extraction-"  # then 8 hexadecimal digits: what the workers of an extraction share while it runs


class CacheWriter:
    """Write a cache: start it, or go on with what is there.

    What an earlier writer committed before it died is recovered first. As a context manager it publishes the cache as
    complete at the end; after an error all that was written is kept and published as incomplete, or, when it would
    take the place of a cache to be overwritten, kept beside that.

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
        self.path = Path(path).absolute()
        self.features = by_name(features)
        content = cache_fingerprint(self.features, fingerprint)
        self._fingerprint = fingerprint_digest(content)
        with full_disk_explained(self.path, _kept):
            _claim_directory(self.path)
            self._lock = WriterLock(self.path)
            try:
                self._manifest = self._start(content, overwrite)
                remove_superseded(self.path, read_manifest(self.path))  # if the last writer died before it came to that
                recover_parts(self.path, self.features, self._manifest.building, self._fingerprint)
                self._parts = PartWriter(self.path, self.features, fingerprint)
            except BaseException:
                self._lock.release()
                raise

    def __contains__(self, id: str) -> bool:
        """Say whether an utterance is in the cache, or was written now."""
        return id in self._parts

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
        nothing of the utterance is stored and writing may go on. Raises `StorageFullError` before the disk is full.
        """
        self._parts.write(id, arrays)

    def expect(self, utterances: int) -> None:
        """Say how many utterances are still to come, so that a disk that is too small is noticed early."""
        self._parts.expect(utterances)

    def commit(self) -> int:
        """Make all that was written durable; returns how many utterances this writer has made so.

        Happens by itself every two seconds.
        """
        return self._parts.commit()

    def publish(self, complete: bool = False) -> None:
        """Let readers see all that was written here, and the parts that other `PartWriter`s have closed."""
        self._parts.seal()
        self._publish(complete)

    def recover(self) -> None:
        """Seal what `PartWriter`s that died meanwhile had committed.

        Raises `CacheLockedError` if one of them lives; this writer's own arrays must have been published.
        """
        recover_parts(self.path, self.features, self._manifest.building, self._fingerprint)

    def close(self, complete: bool = True) -> None:
        """Publish, and let go of the cache."""
        self._close(complete, publish=True)

    def abort(self) -> None:
        """Remove what was written since the last `publish`, and let go of the cache."""
        try:
            self._parts.abort()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        aside = self._manifest.building > self._manifest.build
        close_after(error, lambda: self._close(complete=error is None, publish=error is None or not aside))

    def _close(self, complete: bool, publish: bool) -> None:
        if self._parts.closed:
            return
        try:
            self._parts.close()
            if publish:
                self._publish(complete)
        finally:
            self._lock.release()

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
            return publish(self.path, fresh, complete=False)
        manifest = read_manifest(self.path)
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
            write_manifest(self.path, manifest)
        return manifest

    def _start_overwrite(self, manifest: Manifest, content: Mapping[str, object]) -> Manifest:
        interrupted = manifest.building > manifest.build and manifest.building_fingerprint == self._fingerprint
        if not interrupted:
            building = max(manifest.build, manifest.building) + 1
            manifest = dataclasses.replace(manifest, building=building, building_fingerprint=self._fingerprint)
            write_manifest(self.path, manifest)
        return dataclasses.replace(manifest, fingerprint=content)

    def _publish(self, complete: bool) -> None:
        parts = sealed_parts(self.path, self._manifest.building, self._fingerprint)
        names = {part.entry.name for part in parts}
        if names != {entry.name for entry in self._manifest.parts} or complete != self._manifest.complete:
            with full_disk_explained(self.path, _kept):
                self._manifest = publish(self.path, self._manifest, complete)
            self._parts.published()


def _kept() -> str:
    return f"all that was written before is kept: {GO_ON}"


def _claim_directory(path: Path) -> None:
    """Make the directory, or see that it is a cache or empty."""
    if path.exists() and not path.is_dir():
        raise NotACacheError(f"{str(path)!r} is a file; a cache is a directory")
    try:
        make_directory(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotACacheError(f"{str(path)!r} cannot be made a directory: {error}") from error
    numbered = rf"(index|stats)-[0-9]{{6}}|{RUN}[0-9a-f]{{8}}"
    ours = re.compile(rf"{NAME}\.tmp|{PARTS}|writer\.(lock|json)|failures\.jsonl|{numbered}")
    names = sorted(entry.name for entry in path.iterdir())  # once: another writer may be making the cache
    foreign = [name for name in names if not ours.fullmatch(name)]
    if NAME not in names and foreign:
        raise NotACacheError(f"{str(path)!r} holds other files ({foreign[0]!r}); give a new or empty directory")

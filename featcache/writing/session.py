"""Work under the lock of a cache: a `CacheWriter`'s session, and publishing what others sealed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from featcache.declaration import FeatureStorageConfig
from featcache.errors import CacheLockedError, StaleCacheError
from featcache.format.files import create_durably, digest, explained
from featcache.format.fingerprint import (
    Difference,
    cache_fingerprint,
    differences,
    fingerprint_digest,
)
from featcache.format.index import StampColumns, Stamps
from featcache.format.lock import WriterLock
from featcache.format.manifest import (
    ADOPTED,
    NAME,
    PARTS,
    Manifest,
    check_writable,
    new_file,
    of_role,
    read_manifest,
    role_of,
    write_manifest,
)
from featcache.format.part import as_known, committed_builds
from featcache.reading.generation import Generation
from featcache.reading.opening import note_compared
from featcache.reading.verify import container_damage, own_containers, raise_damage
from featcache.writing.background import close_at_exit, nothing
from featcache.writing.changes import Changes, find_tombstones, with_changes
from featcache.writing.compact import UNCHANGED, merge_small
from featcache.writing.open_part import Declarations
from featcache.writing.part_writer import PartWriter
from featcache.writing.publish import (
    ExpectedIds,
    prepared,
    publish,
    remove_superseded,
    remove_unnamed,
    sealed_parts,
)
from featcache.writing.recover import check_none_lives, recover_parts
from featcache.writing.sets import claim_directory, clear_up, name_set

# `BuildFiles`: the files of roles that are kept with a build while it is written.


class BuildFiles:
    """Keeps files for the holder of a cache's lock; the manifest on disk always names them.

    Args:
        cache: the cache directory, in which a manifest lies.

    Attributes:
        waiting: True while files wait for the build to be published.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._kept: set[str] = set()  # by this writer, since the last publish
        self.waiting = bool(read_manifest(cache).building_files)

    def keep(self, role: str, data: bytes) -> None:
        """Keep a file of a role, unless it is there as it is."""
        before = read_manifest(self._cache)
        published = before.files if before.building == before.build else {}
        now = of_role(before.building_files, role) or of_role(published, role)
        if digest(data) in now.values():
            return
        name = new_file(role)
        create_durably(self._cache / name, data)
        self._kept.add(name)
        files = before.building_files.items()
        others = {path: each for path, each in files if role_of(path) != role}
        self._name(before, others | {name: digest(data)})

    def drop(self) -> None:
        """Remove those that were kept since the last publish."""
        if self._kept:
            before = read_manifest(self._cache)
            files = before.building_files.items()
            self._name(before, {path: each for path, each in files if path not in self._kept})

    def published(self) -> None:
        """Take note that all are published."""
        self._kept.clear()
        self.waiting = False

    def _name(self, before: Manifest, files: Mapping[str, str]) -> None:
        after = write_manifest(self._cache, replace(before, building_files=files))
        self.waiting = bool(files)
        remove_unnamed(self._cache, after)


# A `CacheWriter`'s work from opening to publishing: the lock, the manifest, the parts.


class WriteSession:
    """Work of a `CacheWriter`: its lock, its manifest, its parts.

    The thread that stores knows the session, but not the writer that owns it: a writer that nobody
    closed can be dropped, and what it wrote is kept as after an error.
    """

    def __init__(
        self,
        owner: object,
        path: Path,
        features: Declarations,
        fingerprint: Mapping[str, object] | None,
        overwrite: bool,
    ) -> None:
        self.path = path
        self.features = features
        self.expected: Sequence[str] | None = None
        self.failed: set[str] = set()
        self.stamps: dict[str, Stamps] = {}  # new ones of what is stored
        self._forget: Callable[[], object] = nothing
        with explained(path, _kept):
            content = cache_fingerprint(features, fingerprint)
            claim_directory(path)
            self._lock = WriterLock(path)
            try:
                clear_up(path)
                check_none_lives(path)  # before anything is begun anew: its rows would be lost
                self._manifest = self._start(content, fingerprint_digest(content), overwrite)
                note_compared(path, self._manifest)
                # if the last writer died before it came to that
                remove_superseded(path, read_manifest(path))
                _check_containers(path)
                self.recover()
                self._publish_recovered()
                self.files = BuildFiles(path)
                self.parts = PartWriter(path, features, fingerprint)
            except BaseException:
                self._lock.release()
                raise
            try:
                what = f"the writer of {str(path)!r}"
                self._forget = close_at_exit(self, what, WriteSession.keep, owner)
                self.parts.forget()  # or they would be closed first, and not published
            except BaseException:
                self.abort()
                raise

    @property
    def is_aside(self) -> bool:
        """True while a cache that readers still see is built anew beside it."""
        return self._manifest.building > self._manifest.build

    def publish(self, complete: bool) -> None:
        """Publish what is sealed, if that changes anything."""
        with explained(self.path, _kept):
            told = self.failed or self.expected is not None
            told = told or bool(self.stamps or self.files.waiting)
            if told or complete != self._manifest.complete or self._sealed() != self._published():
                self._publish(self._outcome(complete), Changes(self.stamps))
            if self._manifest.complete:
                name_set(self.path)

    def without(self, outcome: ExpectedIds, changes: Changes) -> Manifest:
        """Delete utterances that are stored in sealed parts; the caller writes the manifest."""
        with explained(self.path, _kept):
            return prepared(self.path, self._manifest, outcome, changes)

    def delete(self, ids: Collection[str]) -> None:
        """Delete utterances that are stored in sealed parts, durably, and publish that.

        A cache that is to take the place of another is not published for that.
        """
        with explained(self.path, _kept):
            if self.is_aside:
                before = read_manifest(self.path)
                parts = as_known(sealed_parts(self.path, self._manifest), before)
                parts = with_changes(self.path, parts, Changes(deleted=ids), self._manifest)
                deleted = tuple(part.entry for part in parts if part.entry.tombstones)
                write_manifest(self.path, replace(before, building_parts=deleted))
            else:
                self._publish(self._outcome(complete=False), Changes(self.stamps, ids))
        for id in ids:
            self.stamps.pop(id, None)
        self.parts.look_again()

    def keep_file(self, role: str, data: bytes) -> None:
        """Keep a file of a role with the build that is being written."""
        with explained(self.path, _kept):
            self.files.keep(role, data)

    def _outcome(self, complete: bool) -> ExpectedIds:
        return ExpectedIds(complete, self.expected, frozenset(self.failed))

    def _publish(self, outcome: ExpectedIds, changes: Changes) -> None:
        self._manifest = publish(self.path, self._manifest, outcome, changes)
        self.stamps = {}
        self.files.published()
        self.parts.published()

    def recover(self) -> None:
        """Seal what writers of parts that died had committed."""
        with explained(self.path, _kept):
            recover_parts(self.path, self.features, self._manifest)

    def close(self, complete: bool, *, publish: bool) -> None:
        """Seal what was written, publish it if wanted, and let go of the cache."""
        with self.parts.lock:
            try:
                if not self.parts.closed:
                    self.parts.close()
                    if publish:
                        self.publish(complete)
                        self._merge_small()
            finally:
                self._let_go()

    def abort(self) -> None:
        """Remove what is not published, and let go of the cache.

        Parts of other writers stay, and with them the files that were kept for their build.
        """
        with self.parts.lock:
            ended = self.parts.closed
            try:
                self.parts.abort()
                if not ended and self._sealed() <= self._published():
                    with explained(self.path, _kept):
                        self.files.drop()
            finally:
                self._let_go()

    def keep(self) -> None:
        """Close after an error, or when nobody does: all that was written is kept.

        It is published as incomplete, unless it is to take the place of a cache.
        """
        self.close(complete=False, publish=not self.is_aside)

    def _publish_recovered(self) -> None:
        """Publish what another writer left sealed.

        Or each writer of a part would have to read the ids of it.
        """
        published = self._published()
        parts = sealed_parts(self.path, self._manifest)
        new = [part for part in parts if part.entry.name not in published]
        if new and not self.is_aside:
            # copies of what is stored change nothing
            copied = all(part.header.replaces for part in new)
            outcome = UNCHANGED if copied else ExpectedIds(complete=False)
            self._manifest = publish(self.path, self._manifest, outcome)

    def _merge_small(self) -> None:
        with explained(self.path, lambda: "all that was written is published"):
            self._manifest = merge_small(self.path, self.features, self._manifest)

    def _let_go(self) -> None:
        if self.parts.closed:  # not in a process that was forked
            self._lock.release()
            self._forget()

    def _sealed(self) -> set[str]:
        return {part.entry.name for part in sealed_parts(self.path, self._manifest)}

    def _published(self) -> set[str]:
        return {entry.name for entry in self._manifest.parts}

    def _start(self, content: Mapping[str, object], digest: str, overwrite: bool) -> Manifest:
        """Return the manifest to build on.

        On disk it names the build that all writers add parts to, and the `digest` of its `content`.
        """
        if not (self.path / NAME).exists():
            return self._start_new(content, digest)
        manifest = read_manifest(self.path)
        check_writable(self.path, manifest)
        changed = differences(manifest.fingerprint, content)
        stored = manifest.rows or (changed and committed_builds(self.path))
        if changed and stored and not overwrite:
            lines = "".join(f"\n  {line}" for line in changed)
            raise StaleCacheError(
                f"cache {str(self.path)!r} was made from something else than is declared "
                f"now:{lines}\n"
                f"{_cure(manifest, content, changed)}overwrite it (overwrite=True), or give "
                "another directory"
            )
        build, building = manifest.build, manifest.building
        if overwrite and stored:
            if building <= build or manifest.building_fingerprint != digest:
                manifest = replace(_without_build(manifest), building=max(build, building) + 1)
                manifest = replace(manifest, building_fingerprint=digest)
                manifest = write_manifest(self.path, manifest)
            return replace(manifest, fingerprint=content)  # on disk once it is published
        # files of an empty cache count no more where it is begun anew, as a cache with arrays is
        empty = (changed or overwrite) and not committed_builds(self.path)
        files = {path: each for path, each in manifest.files.items() if role_of(path) is None}
        old = manifest.building_files or files != manifest.files
        if changed or building != build or (empty and old):
            manifest = replace(_without_build(manifest), building=build)
            manifest = replace(manifest, building_fingerprint=digest, fingerprint=content)
            manifest = replace(manifest, files=files if empty else manifest.files)
            if any(each.path[0] == "features" for each in changed):  # the index has other columns
                return publish(self.path, manifest, ExpectedIds(complete=False))
            manifest = write_manifest(self.path, manifest)
        return manifest

    def _start_new(self, content: Mapping[str, object], digest: str) -> Manifest:
        builds = committed_builds(self.path)  # none, unless the manifest was lost
        if set(builds) - {digest}:
            raise StaleCacheError(
                f"cache {str(self.path)!r} has lost its {NAME}, and its parts were made from "
                "something else than is declared now; declare it as it was, or remove "
                f"{str(self.path / PARTS)!r}"
            )
        build = builds.get(digest, 1)
        fresh = Manifest(content, build=build, building=build, building_fingerprint=digest)
        parts = (find_tombstones(self.path, each, fresh) for each in sealed_parts(self.path, fresh))
        deleted = tuple(part.entry for part in parts if part.entry.tombstones)
        fresh = replace(fresh, building_parts=deleted)
        return publish(self.path, fresh, ExpectedIds(complete=False))


def _cure(before: Manifest, content: Mapping[str, Any], changed: Sequence[Difference]) -> str:
    """Offer to append to adopted arrays, or to add features alone, where that is what is new."""
    if len(changed) == 1 and ADOPTED in before.fingerprint and ADOPTED not in content:
        kind = {ADOPTED: before.fingerprint[ADOPTED]}
        return f"give the fingerprint {kind!r} to append to adopted arrays, "
    new = {*content["features"]} - before.features.keys()
    if len(new) < len(changed) or not new:
        return ""
    return f"add what is new alone (declare {', '.join(map(repr, sorted(new)))} and no other), "


def _without_build(manifest: Manifest) -> Manifest:
    """Forget what belongs to a build that is given up."""
    return replace(manifest, building_files={}, building_parts=())


def _kept() -> str:
    return "all that was committed before is kept"


def _check_containers(path: Path) -> None:
    """Raise `CorruptCacheError` for lost files of published parts: their utterances are not stored.

    A part whose whole directory is gone was removed to compute its utterances again.
    """
    opened = Generation.at(path)
    containers = opened.index.containers
    there = [(path / PARTS / entry.name).exists() for entry in opened.manifest.parts]
    own = own_containers(containers, opened.manifest.parts)
    numbers = [number for number in own if there[containers.parts[number]]]
    raise_damage(container_damage(path, containers, numbers))


# Publishing by whoever writes parts and happens to get the cache's lock: the others go on.


def publish_sealed(
    cache: Path,
    *,
    complete: bool | None = None,
    expected: Collection[str] | None = None,
    patience_s: float = 0.0,
) -> bool:
    """Publish what writers of parts have sealed, and what dead ones had committed.

    Parts that are being written stay as they are. Returns False, having done nothing, if another
    process held the cache's lock for `patience_s`: it publishes, or the next one does.

    Args:
        cache: the cache directory, or that of a feature set.
        complete: whether the cache is, where no ids are expected; None: as it was.
        expected: the ids that the cache is to hold in the end; None: nobody says.
        patience_s: seconds to wait for the lock.
    """
    try:
        lock = WriterLock(cache, patience_s)
    except CacheLockedError:
        return False
    with lock, explained(cache, lambda: "all that was committed before is kept"):
        _publish(cache, complete, expected)
    return True


def _publish(cache: Path, complete: bool | None, expected: Collection[str] | None) -> None:
    manifest = read_manifest(cache)
    check_writable(cache, manifest)
    clear_up(cache)
    declared = manifest.features.items()
    features = {name: FeatureStorageConfig.from_json(each) for name, each in declared}
    recover_parts(cache, features, manifest, pass_live=True)
    if manifest.building != manifest.build:  # an overwrite is published by its own writer
        return
    if complete is None:
        complete = manifest.complete
    if _is_news(cache, manifest, complete, expected):
        manifest = publish(cache, manifest, ExpectedIds(complete, expected))
        merge_small(cache, features, manifest)


def _is_news(
    cache: Path, manifest: Manifest, complete: bool, expected: Collection[str] | None
) -> bool:
    sealed = {part.entry.name for part in sealed_parts(cache, manifest)}
    if sealed != {entry.name for entry in manifest.parts}:
        return True
    if expected is None:
        return complete != manifest.complete
    told = manifest.expected is not None and manifest.expected.count == len(expected)
    return not (told and manifest.complete)


# Accepts another fingerprint for a cache: what it holds stays, and counts as made from that.


def says_when(difference: Difference) -> bool:
    """Whether a difference is one of times of frames: they change no byte.

    >>> says_when(Difference(("features", "fbank", "frame_s"), None, 0.01))
    True
    """
    path = difference.path
    return len(path) == 3 and path[0] == "features" and path[2] in ("frame_s", "offset_s")


def accept(
    cache: Path,
    features: Mapping[str, FeatureStorageConfig],
    fingerprint: Mapping[str, object],
    *,
    patience_s: float = 0.0,
) -> list[Difference]:
    """Take a fingerprint for what a cache was made from, and return in what it differs.

    Whoever calls this has seen that both compute the same. An overwrite that is under way is given
    up. Raises `StaleCacheError` for declarations that read the bytes in another way (other times of
    frames do not), `CacheLockedError` while the cache is written, for longer than `patience_s`.
    """
    content = cache_fingerprint(features, fingerprint)
    with explained(cache, lambda: "the cache is as it was"), WriterLock(cache, patience_s):
        manifest = read_manifest(cache)
        check_writable(cache, manifest)
        changed = differences(manifest.fingerprint, content)
        declared = differences(manifest.features, content["features"], ("features",))
        if declared := [each for each in declared if not says_when(each)]:
            lines = "".join(f"\n  {each}" for each in declared)
            raise StaleCacheError(
                f"cache {str(cache)!r} was declared in another way, which cannot be "
                f"accepted:{lines}\ndeclare it as it was, or overwrite it (overwrite=True)"
            )
        if changed:
            before = fingerprint_digest(manifest.fingerprint)
            if manifest.building > manifest.build:
                manifest = replace(manifest, building_files={}, building_parts=())
            manifest = replace(
                manifest,
                fingerprint=content,
                building=manifest.build,
                building_fingerprint=fingerprint_digest(content),
                accepted=tuple(dict.fromkeys((*manifest.accepted, before))),
            )
            write_manifest(cache, manifest)
    return changed


# Stamps of the build that is being written, which readers may not see yet.


def stored_stamps(cache: Path, ids: Sequence[str]) -> StampColumns:
    """Return the stamps of utterances that are sealed, 0 for those that are not."""
    manifest, found = read_manifest(cache), StampColumns.unknown(len(ids))
    for part in as_known(sealed_parts(cache, manifest), manifest):
        index = part.stamped_index(cache, [])
        if index.stamps is not None:
            rows = index.find_many(list(ids))
            rows[np.isin(rows, part.tombstones(cache))] = -1
            there = rows >= 0
            for column, of_part in zip(found, index.stamps, strict=True):
                column[there] = of_part[rows[there]]
    return found

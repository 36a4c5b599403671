"""Work under the lock of a cache: a `CacheWriter`'s session, and publishing what others sealed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from featcache.container_files import create_durably, sync_directory
from featcache.declaration import FeatureStorageConfig
from featcache.errors import CacheLockedError, StaleCacheError, counted, indented
from featcache.format.files import digest, explained, program
from featcache.format.fingerprint import (
    Difference,
    cache_fingerprint,
    differences,
    digest_of_canonical,
)
from featcache.format.index import StampColumns, Stamps
from featcache.format.manifest import (
    ADOPTED,
    NAME,
    OUTER,
    PARTS,
    SETS,
    BuildState,
    Manifest,
    new_file,
    read_manifest,
    role_of,
)
from featcache.format.part import SealedPart, committed_builds, sealed_in
from featcache.reading.stale import note_compared
from featcache.reading.verify import container_damage, own_containers, raise_damage
from featcache.writing.background import close_at_exit, nothing
from featcache.writing.compact import UNCHANGED, merge_small
from featcache.writing.held import (
    HeldCache,
    check_writable,
    held_to_edit,
    remove_superseded,
    remove_unnamed,
)
from featcache.writing.open_part import Declarations
from featcache.writing.part_writer import PartWriter
from featcache.writing.publish import ExpectedIds, publish
from featcache.writing.recover import check_none_lives, recover_parts
from featcache.writing.sets import claim_directory, clear_up, name_set
from featcache.writing.tombstones import Changes, find_tombstones, with_changes

_log = logging.getLogger("featcache")

# A `CacheWriter`'s work from opening to publishing: the cache, held, and the parts.


class WriteSession:
    """Work of a `CacheWriter`: the cache, held, and what is written to it.

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
        self._expected: Sequence[str] | None = None
        self._failed: set[str] = set()
        self._stamps: dict[str, Stamps] = {}  # new ones of what is stored
        self._kept_files: set[str] = set()  # since the last publish
        self._forget: Callable[[], object] = nothing
        with explained(path, _kept):
            content = cache_fingerprint(features, fingerprint)
            claim_directory(path)
            self.held = HeldCache(path, made_from=content)
            try:
                clear_up(path)
                # before anything is begun anew: its rows would be lost
                check_none_lives(path, self.held.list_parts())
                start(self.held, content, overwrite)
                note_compared(path, self.held.building)
                _check_containers(self.held)
                recover_parts(self.held, features)
                self._publish_recovered(self._tell_taken_over())
                self.parts = PartWriter(path, features, held=self.held)
            except BaseException:
                self.held.release()
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
        """Whether a cache that readers still see is being built anew beside it."""
        return self.held.manifest.state is BuildState.ASIDE

    def restamp(self, stamps: Mapping[str, Stamps]) -> None:
        """Give stored utterances other stamps with the next publish."""
        self._stamps |= stamps

    def expect(self, ids: Sequence[str]) -> None:
        """Set the ids that the cache is to hold in the end."""
        self._expected = ids

    def fail(self, id: str) -> None:
        """Note that an expected utterance cannot be computed."""
        self._failed.add(id)

    def publish(self, complete: bool) -> None:
        """Publish what is sealed, if that changes anything."""
        with explained(self.path, _kept):
            manifest = self.held.manifest
            told = self._failed or self._expected is not None
            told = told or bool(self._stamps or manifest.building_files)
            if told or complete != manifest.complete or not self.held.is_published():
                self._publish(self._outcome(complete), Changes(self._stamps))
            if self.held.manifest.complete:
                name_set(self.path)

    def delete(self, ids: Collection[str]) -> None:
        """Delete utterances that are stored in sealed parts, durably, and publish that.

        A cache that is to take the place of another is not published for that.
        """
        with explained(self.path, _kept):
            if self.is_aside:
                parts, changes = self.held.sealed(), Changes(deleted=ids)
                parts = with_changes(self.path, parts, changes, self.held.building)
                deleted = tuple(part.entry for part in parts if part.entry.tombstones)
                self.held.write(replace(self.held.manifest, building_parts=deleted))
            else:
                self._publish(self._outcome(complete=False), Changes(self._stamps, ids))
        for id in ids:
            self._stamps.pop(id, None)
        self.parts.look_again()

    def keep_file(self, role: str, data: bytes) -> None:
        """Keep a file of a role with the build that is being written, unless it is there as it is.

        The manifest on disk always names those that are kept.
        """
        before = self.held.manifest
        if digest(data) in before.building_file(role).values():
            return
        with explained(self.path, _kept):
            after = _with_file(self.path, before, role, data)
            self._kept_files |= after.building_file(role).keys()
            self._name_files(after.building_files)

    def _name_files(self, files: Mapping[str, str]) -> None:
        self.held.write(replace(self.held.manifest, building_files=files))
        remove_unnamed(self.held)

    def _outcome(self, complete: bool) -> ExpectedIds:
        return ExpectedIds(complete, self._expected, frozenset(self._failed))

    def _publish(self, outcome: ExpectedIds, changes: Changes) -> None:
        publish(self.held, outcome, changes)
        self._stamps = {}
        self._kept_files.clear()
        self.parts.published()

    def recover(self) -> None:
        """Seal what writers of parts that died had committed."""
        with explained(self.path, _kept):
            recover_parts(self.held, self.features)

    def close(self, complete: bool, *, publish: bool) -> None:
        """Seal what was written, publish it if wanted, and let go of the cache."""
        with self.parts.lock:
            try:
                if not self.parts.closed:
                    self.parts.close()
                    if publish:
                        self.publish(complete)
                        with explained(self.path, lambda: "all that was written is published"):
                            merge_small(self.held, self.features)
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
                new = {part.entry.name for part in self.held.sealed()} - self.held.published
                if self._kept_files and not (ended or new):
                    files = self.held.manifest.building_files.items()
                    with explained(self.path, _kept):
                        self._name_files({p: e for p, e in files if p not in self._kept_files})
            finally:
                self._let_go()

    def keep(self) -> None:
        """Close after an error, or when nobody does: all that was written is kept.

        It is published as incomplete, unless it is to take the place of a cache.
        """
        self.close(complete=False, publish=not self.is_aside)

    def _tell_taken_over(self) -> list[SealedPart]:
        """Log what another writer left sealed and did not publish, and return its parts."""
        published = self.held.published
        new = [part for part in self.held.sealed() if part.entry.name not in published]
        own = [part for part in new if not part.header.replaces]
        if count := sum(part.entry.rows - len(part.tombstones(self.path)) for part in own):
            _log.info(
                "cache %r: goes on with %s that a writer before this one had committed and not "
                "published",
                str(self.path),
                counted(count, "utterance"),
            )
        return new

    def _publish_recovered(self, new: Sequence[SealedPart]) -> None:
        """Publish what another writer left sealed.

        Or each writer of a part would have to read the ids of it.
        """
        if new and not self.is_aside:
            # copies of what is stored change nothing
            copied = all(part.header.replaces for part in new)
            publish(self.held, UNCHANGED if copied else ExpectedIds(complete=False))

    def _let_go(self) -> None:
        if self.parts.closed:  # not in a process that was forked
            self.held.release()
            self._forget()


class _Call:
    """A call, which a session belongs to until it ends."""


@contextmanager
def session_of(
    path: Path,
    features: Declarations,
    fingerprint: Mapping[str, object],
    *,
    overwrite: bool = False,
) -> Iterator[WriteSession]:
    """Yield the session of a call, which ends with it; what was not published by then is not."""
    call = _Call()
    session = WriteSession(call, path, features, fingerprint, overwrite)
    try:
        yield session
    finally:
        session.close(False, publish=False)


def _with_file(cache: Path, manifest: Manifest, role: str, data: bytes) -> Manifest:
    """Return the manifest that names a new file of a role, which is durable."""
    name = new_file(role)
    create_durably(cache / name, data)
    others = {p: each for p, each in manifest.building_files.items() if role_of(p) != role}
    return replace(manifest, building_files=others | {name: digest(data)})


def start(held: HeldCache, content: Mapping[str, object], overwrite: bool) -> None:
    """Make the manifest on disk name the build that all writers add parts to, from `content`.

    What the last writer left superseded goes.
    """
    path = held.path
    if not (path / NAME).exists():
        _start_new(held, content)
        return
    # the last writer may have died before it made its manifest durable, and before it removed
    sync_directory(path)
    manifest = held.manifest
    check_writable(path, manifest)
    changed = differences(manifest.fingerprint, content)
    builds = committed_builds(path) if changed or overwrite else {}
    stored = manifest.rows or (changed and builds)
    if changed and stored and not overwrite:
        raise StaleCacheError(
            f"cache {str(path)!r} was made from something else than is declared now:"
            f"{indented(changed)}",
            cure=f"{_cure(manifest, content, changed)}overwrite it (overwrite=True), or give "
            "another directory",
        )
    if overwrite and stored:
        after = manifest.overwritten(content)
    else:
        after = manifest
        # files of an empty cache count no more where it is begun anew, as a cache with arrays is
        empty = (changed or overwrite) and not builds
        files = {each: of for each, of in manifest.files.items() if role_of(each) is None}
        old = manifest.building_files or files != manifest.files
        if changed or manifest.state is BuildState.ASIDE or (empty and old):
            after = replace(manifest.begun_anew(content), files=files if empty else manifest.files)
    if any(each.path[0] == "features" for each in changed) and after.state is BuildState.CURRENT:
        held.begin(after)  # the index has other columns
        publish(held, ExpectedIds(complete=False))
    else:
        if after is not manifest:
            held.write(after)
        remove_superseded(held)


def _start_new(held: HeldCache, content: Mapping[str, object]) -> None:
    path, made_of = held.path, digest_of_canonical(content)
    builds = committed_builds(path)  # none, unless the manifest was lost
    if set(builds) - {made_of}:
        raise StaleCacheError(
            f"cache {str(path)!r} has lost its {NAME}, and its parts were made from "
            "something else than is declared now; declare it as it was, or remove "
            f"{str(path / PARTS)!r}"
        )
    build = builds.get(made_of, 1)
    requires = (SETS,) if (path / OUTER).exists() else ()
    fresh = Manifest(
        content,
        build=build,
        building=build,
        building_fingerprint=made_of,
        requires=requires,
        by=program(),
    )
    held.begin(fresh)
    if builds:
        parts = (find_tombstones(path, each, fresh) for each in held.sealed())
        deleted = tuple(part.entry for part in parts if part.entry.tombstones)
        fresh = replace(fresh, building_parts=deleted)
    (path / PARTS).mkdir(exist_ok=True)  # so that its name is durable with the manifest's
    held.write(fresh)


def _cure(before: Manifest, content: Mapping[str, Any], changed: Sequence[Difference]) -> str:
    """Offer to append to adopted arrays, or to add features alone, where that is what is new."""
    if len(changed) == 1 and ADOPTED in before.fingerprint and ADOPTED not in content:
        kind = {ADOPTED: before.fingerprint[ADOPTED]}
        return f"give the fingerprint {kind!r} to append to adopted arrays, "
    new = {*content["features"]} - before.features.keys()
    if len(new) < len(changed) or not new:
        return ""
    return f"add what is new alone (declare {', '.join(map(repr, sorted(new)))} and no other), "


def _kept() -> str:
    return "all that was committed before is kept"


def _check_containers(held: HeldCache) -> None:
    """Raise `CorruptCacheError` for lost files of published parts: their utterances are not stored.

    A part whose whole directory is gone was removed to compute its utterances again.
    """
    parts = held.manifest.parts
    if not parts:
        return
    containers = held.index.containers
    there = [(held.path / PARTS / entry.name).exists() for entry in parts]
    own = own_containers(containers, parts)
    numbers = [number for number in own if there[containers.parts[number]]]
    raise_damage(container_damage(held.path, containers, numbers))


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
    with explained(cache, _kept):
        try:
            held = HeldCache(cache, patience_s)
        except CacheLockedError:
            return False
        with held:
            _publish(held, complete, expected)
    return True


def _publish(held: HeldCache, complete: bool | None, expected: Collection[str] | None) -> None:
    manifest = held.manifest
    check_writable(held.path, manifest)
    clear_up(held.path)
    features = manifest.declared
    recover_parts(held, features, pass_live=True)
    if manifest.state is BuildState.ASIDE:  # an overwrite is published by its own writer
        return
    if complete is None:
        complete = manifest.complete
    if _is_news(held, complete, expected):
        publish(held, ExpectedIds(complete, expected))
        merge_small(held, features)


def _is_news(held: HeldCache, complete: bool, expected: Collection[str] | None) -> bool:
    manifest = held.manifest
    if not held.is_published():
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
    files: Mapping[str, bytes] | None = None,
    patience_s: float = 0.0,
) -> list[Difference]:
    """Take a fingerprint for what a cache was made from, and return in what it differs.

    Whoever calls this has seen that both compute the same. An overwrite that is under way is given
    up. `files` are kept by role with the cache if anything differs, in the same step. Raises
    `StaleCacheError` for declarations that read the bytes in another way (other times of frames do
    not), `CacheLockedError` while the cache is written, for longer than `patience_s`.
    """
    content = cache_fingerprint(features, fingerprint)
    with held_to_edit(cache, patience_s) as held:
        manifest = held.manifest
        changed = differences(manifest.fingerprint, content)
        declared = differences(manifest.features, content["features"], ("features",))
        if declared := [each for each in declared if not says_when(each)]:
            raise StaleCacheError(
                f"cache {str(cache)!r} was declared in another way, which cannot be accepted:"
                f"{indented(declared)}\ndeclare it as it was, or overwrite it (overwrite=True)"
            )
        if changed:
            after = manifest.accepting(content)
            for role, data in (files or {}).items():
                after = _with_file(cache, after, role, data)
            held.write(after)
            if files:  # readers see those of a generation
                publish(held, UNCHANGED if held.is_published() else ExpectedIds(complete=False))
    return changed


# Stamps of the build that is being written, which readers may not see yet.


def stored_stamps(cache: Path, ids: Sequence[str]) -> StampColumns:
    """Return the stamps of utterances that are sealed, 0 for those that are not."""
    manifest, found = read_manifest(cache), StampColumns.unknown(len(ids))
    for part in sealed_in(cache, manifest):
        index = part.stamped_index(cache, [])
        if index.stamps is not None:
            rows = index.find_many(list(ids))
            rows[np.isin(rows, part.tombstones(cache))] = -1
            there = rows >= 0
            for column, of_part in zip(found, index.stamps, strict=True):
                column[there] = of_part[rows[there]]
    return found

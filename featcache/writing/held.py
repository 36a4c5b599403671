"""`HeldCache`: a cache whose lock is held, with its manifest and its sealed parts in hand.

Here, too, is the end of each publish: the removal of what no reader needs any more, once a newer
generation is out, and the page for people.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from featcache.container_files import sync_directory
from featcache.container_files.lock import Held, WriterLock
from featcache.errors import CacheError, CacheLockedError, FeatcacheError, FormatVersionError
from featcache.format.columns import ColumnFile
from featcache.format.files import entries, explained, program, remove_unfinished
from featcache.format.fingerprint import digest_of_canonical
from featcache.format.index import Index
from featcache.format.journal import Header, read_journal
from featcache.format.manifest import (
    INDEX,
    KEPT_FILE,
    KNOWN,
    MANIFESTS,
    NAME,
    OUTER,
    PARTS,
    BuildState,
    Manifest,
    cache_of_set,
    generation_number,
    manifest_file,
    read_manifest,
    settle,
    write_manifest,
)
from featcache.format.part import (
    SEAL,
    SealedPart,
    part_directories,
    read_part,
    remove_part,
    sealed_parts,
    with_sizes,
)
from featcache.reading.generation import Generation

# `HeldCache`: a cache whose lock is held, with its manifest and its sealed parts in hand.


@contextlib.contextmanager
def held_to_edit(cache: Path, patience_s: float = 0.0) -> Iterator[HeldCache]:
    """Hold a cache for a change of its manifest, after so many seconds of patience at most."""
    with explained(cache, lambda: "the cache is as it was"), HeldCache(cache, patience_s) as held:
        check_writable(cache, held.manifest)
        yield held


def check_writable(cache: Path, manifest: Manifest) -> None:
    """Raise `FormatVersionError` if a writer must know more than this featcache does."""
    unknown = sorted({*manifest.requires_to_write} - KNOWN)
    if unknown:
        raise FormatVersionError(
            f"cache {str(cache)!r} can be read, but to write it a featcache is needed that knows "
            f"{', '.join(map(repr, unknown))}; upgrade featcache"
        )


def check_not_overwritten(cache: Path, manifest: Manifest) -> None:
    """Raise `CacheError` for a cache of which an overwrite is under way."""
    if manifest.state is BuildState.ASIDE:
        raise CacheError(
            f"cache {str(cache)!r} is being overwritten: finish that (overwrite=True, with what it "
            "is made from), or give it up by opening a CacheWriter without overwrite"
        )


class HeldCache(Held):
    """A cache, or a feature set, whose lock is held.

    Nobody else changes the manifest meanwhile, and a sealed part stays as it is, so each is read
    once. Writers of parts may seal more at any time: whoever lists the parts comes to see these.

    Args:
        path: the cache directory.
        patience_s: seconds to wait for the lock.
        made_from: the fingerprint of the build that is being written, where that may not be what
            the manifest has: it has that of the build which is to be overwritten.

    Raises `CacheLockedError` if another process holds the lock.
    """

    def __init__(
        self, path: Path, patience_s: float = 0.0, made_from: Mapping[str, object] | None = None
    ) -> None:
        self.path = path
        self._file = str(path / NAME)
        self._made_from = made_from
        self._manifest: Manifest | None = None
        self._seen: tuple[int, ...] | None = None
        self._kept: dict[str, Manifest] = {}  # this generation and the one before, by name
        self._sealed: dict[str, SealedPart] = {}
        self._durable: set[str] = set()  # names of parts that would survive a power cut
        self._index: tuple[str, Index] | None = None  # by the name of its file
        # last, as an interrupt (Ctrl-C) behind it would leave it held
        self._lock = WriterLock(path, patience_s)
        try:
            outer = (cache_of_set(path) or path) / OUTER
            if outer.exists():  # who wrote it may have been killed before that was durable
                sync_directory(outer.parent)
            settle(path)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the cache; harmless the second time."""
        self._lock.release()

    @property
    def manifest(self) -> Manifest:
        """The manifest as it is on disk, or is to be there first.

        Read again where the file is another one: a write of it may have failed after it was out,
        and where locks count for nothing others publish, too. What is being built stays.
        """
        seen, ours = self._stamp(), self._manifest
        if ours is None or seen not in (None, self._seen):
            found = read_manifest(self.path)
            if ours is not None:
                made_of = ours.building_fingerprint
                found = replace(found, building=ours.building, building_fingerprint=made_of)
            self._manifest, self._seen = found, seen
            return found
        return ours

    def _stamp(self) -> tuple[int, ...] | None:
        """Return what tells the file of the manifest from all others; None: it is gone."""
        try:
            found = os.stat(self._file)  # noqa: PTH116 (asked often, and the quicker one)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def begin(self, manifest: Manifest) -> None:
        """Take a manifest for the one that the next `write` follows, whatever is on disk."""
        self._manifest, self._seen = manifest, self._stamp()

    def write(self, manifest: Manifest, *, keep: bool = False, file: str = NAME) -> Manifest:
        """Write the manifest as `write_manifest` does, and return it as it stands there.

        It tells the sizes of the files that it names.
        """
        sized = with_sizes(self.path, manifest)
        written = write_manifest(self.path, sized, keep=keep, file=file)
        if keep:
            before = {name: each for name, each in self._kept.items() if name == written.previous}
            self._kept = before | {written.name: written}
        if file == NAME:
            self.begin(written)
        return written

    def kept(self, name: str) -> Manifest:
        """Return the manifest of a generation that was kept under its name."""
        return self._kept.get(name) or read_manifest(self.path, manifest_file(name))

    @property
    def building(self) -> Manifest:
        """The manifest with the fingerprint of the build that is being written."""
        manifest = self.manifest
        made_from = self._made_from
        return manifest if made_from is None else replace(manifest, fingerprint=made_from)

    @property
    def index(self) -> Index:
        """The index of the current generation, with all its features."""
        name = self.manifest.index
        if self._index is None or self._index[0] != name:
            self._index = name, Generation.at(self.path).index
        return self._index[1]

    def list_parts(self) -> Iterator[tuple[str, SealedPart | None]]:
        """Iterate over the parts on disk by name, as `format.part.list_parts` does."""
        for directory in part_directories(self.path):
            name = directory.name
            known = self._sealed.get(name)
            if known is None or not (directory / SEAL).exists():
                known = read_part(self.path, name)
            if known is not None:
                self._sealed[name] = known
            yield name, known

    def sealed(self, *, durably: bool = False) -> list[SealedPart]:
        """List the sealed parts of the build that is being written, by name, those that count.

        With the tombstones and stamps that the manifest says they have. With `durably`, all of them
        would survive a power cut: a writer may have been killed after it sealed one, before the
        names in its directory were durable.
        """
        manifest = self.manifest
        parts = sealed_parts([part for _, part in self.list_parts()], manifest)
        if durably:
            known = self._durable.union(entry.name for entry in manifest.parts)
            for part in parts:
                if part.entry.name not in known:
                    sync_directory(self.path / part.directory)
                    self._durable.add(part.entry.name)
        return parts

    def is_published(self) -> bool:
        """Whether there is a generation, and of exactly the parts that are sealed."""
        manifest = self.manifest
        return bool(manifest.index) and (
            {each.entry.name for each in self.sealed()} == {each.name for each in manifest.parts}
        )

    @property
    def published(self) -> set[str]:
        """Names of the parts of the current generation."""
        return {entry.name for entry in self.manifest.parts}

    def take(self, part: SealedPart) -> None:
        """Note a part that was sealed by the holder of the lock, durably."""
        self._sealed[part.entry.name] = part
        self._durable.add(part.entry.name)


# Removes what no reader needs any more, once a newer generation is out.

_log = logging.getLogger("featcache")
_KEPT_MANIFEST = re.compile(r"(.*)\.json")
_BESIDE = re.compile(r"(stamps|tombstones)-.*\.columns")


def stored_indexes(cache: Path) -> dict[str, Path]:
    """List the index files that lie in a cache, by the names of their generations."""
    named = (INDEX.fullmatch(entry.name) for entry in entries(cache))
    return {found[1]: cache / found[0] for found in named if found}


def remove_superseded(held: HeldCache) -> None:
    """Remove what no reader of this generation or of the one before needs.

    The manifest is durable. With it go the parts of lower builds, and those of an overwrite that
    was given up for the one that took its number. What a tag names stays.
    """
    cache, manifest = held.path, held.manifest
    kept = {manifest.name, manifest.previous, *manifest.tags.values()}
    for directory, files in ((cache, INDEX), (cache / MANIFESTS, _KEPT_MANIFEST)):
        names = [entry.name for entry in entries(directory)]
        for file in filter(None, map(files.fullmatch, names)):
            if file[1] not in kept and generation_number(file[1]) < manifest.generation:
                (directory / file[0]).unlink(missing_ok=True)
        remove_unfinished(directory, names)
    remove_unnamed(held)
    try:
        tagged = [held.kept(name) for name in {*manifest.tags.values()}]
    except CacheError as error:
        _log.warning(
            "no part of %r is removed, since what a tag names is lost: %s", str(cache), error
        )
        return
    tagged_parts = {part.name for each in tagged for part in each.parts}
    replaced = _replaced_for_good(held) - tagged_parts
    current = {digest_of_canonical(manifest.fingerprint), *manifest.accepted}
    for name, part in list(held.list_parts()):
        header = _header(cache, name) if part is None else part.header
        if header is None or header.build > manifest.build or name in tagged_parts:
            continue
        old = header.build < manifest.build or header.fingerprint not in current
        if old or name in replaced:
            # its writer, if it is locked, has lost its build and ends soon
            directory, gone = cache / PARTS / name, (CacheLockedError, FileNotFoundError)
            with contextlib.suppress(*gone), WriterLock(directory):
                remove_part(directory)


def _replaced_for_good(held: HeldCache) -> set[str]:
    """Return the parts that others have taken the place of, also for readers of the last one."""
    manifest = held.manifest
    replaced = {*manifest.replaced}
    if not replaced or manifest.previous is None:
        return replaced
    try:
        before = held.kept(manifest.previous)
    except CacheError:  # whether its readers need them is not known
        return set()
    return replaced - {part.name for part in before.parts}


def remove_unnamed(held: HeldCache) -> None:
    """Remove files of roles, stamps and tombstones that no manifest names which is kept.

    They were superseded, or are those of a writer that died before it named them.
    """
    cache, manifest = held.path, held.manifest
    try:
        kept = {manifest.previous, *manifest.tags.values()} - {None, manifest.name}
        others = [held.kept(name) for name in kept if name]
    except CacheError:
        return  # what that names is not known, and may be needed
    all_ = [manifest, *others]
    files = {path for each in all_ for path in (*each.files, *each.building_files)}
    for entry in entries(cache):
        if KEPT_FILE.fullmatch(entry.name) and entry.name not in files:
            (cache / entry.name).unlink(missing_ok=True)
    parts = [part for each in all_ for part in (*each.parts, *each.building_parts)]
    beside = {(part.name, each.file) for part in parts for each in part.beside}
    for directory in part_directories(cache):
        for file in entries(directory):
            if _BESIDE.fullmatch(file.name) and (directory.name, file.name) not in beside:
                (directory / file.name).unlink(missing_ok=True)


def _header(cache: Path, name: str) -> Header | None:
    """Return what an open part was started with; None if its journal is damaged or none."""
    journal = read_journal(cache, f"{PARTS}/{name}")
    return None if journal is None or journal.damaged else journal.header


# `README.txt` in a cache directory: what it is, for somebody who finds it. Nothing reads it.

README = "README.txt"
_TEXT = """\
A featcache cache: speech features, computed once and stored to be read again and again.

{content}
{state}; generation {generation}, written {when} by {program}

In Python:    featcache.open({path!r})
In a shell:   featcache info {path}

Please change nothing by hand. This page is written anew with each generation, and nothing reads it.
"""


def write_readme(cache: Path, manifest: Manifest) -> None:
    """Write the page of a generation that is out; a disk that refuses it costs nothing else."""
    with contextlib.suppress(OSError, FeatcacheError):
        text = _TEXT.format(
            content="\n".join(_content(cache, manifest)),
            state="complete" if manifest.complete else "not complete",
            generation=manifest.generation,
            when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            program=program(),
            path=cache.name,
        )
        page = cache / README
        page.unlink(missing_ok=True)  # a file that is cut to nothing is written out when it closes
        page.write_bytes(text.encode("utf-8", "backslashreplace"))


def _content(cache: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a line for the utterances, and one for each feature."""
    yield f"{manifest.rows:,} utterances"
    with ColumnFile(cache, manifest.index, expected=manifest.index_digest) as file:
        for name, declared in manifest.features.items():
            frames = int(file.column(f"{name}.rows", np.int64).sum())
            shape = ", ".join(map(str, ("frames", *manifest.dims.get(name, ()))))
            frame_s = declared.get("frame_s")
            hours = f", {frames * frame_s / 3600:,.2f} hours" if frame_s else ""
            codec = "" if declared["codec"] == "raw" else f", {declared['codec']}"
            yield (
                f"{name}: ({shape}) {declared['dtype']}, {declared['backend']}{codec}; "
                f"{frames:,} frames{hours}"
            )

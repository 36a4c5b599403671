"""Editing of a cache that is not being written: delete, tag, compact, collect."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import xxhash

from featcache._checks import are_listed
from featcache._progress import bar
from featcache.container_files import PAGE_BYTES, Pages, write_durably
from featcache.errors import (
    CacheError,
    ConfigError,
    CorruptCacheError,
    FeatureError,
    KeyNotFoundError,
    UnknownNameError,
    nearest,
)
from featcache.format.feature_sets import every_directory
from featcache.format.files import explained, from_storage, reading
from featcache.format.index import FeatureColumns, Index, container_digest, page_count, pages_of
from featcache.format.manifest import (
    PARTS,
    Manifest,
    manifest_file,
    of_role,
    read_kept,
    read_manifest,
)
from featcache.format.part import SEAL, SealedPart
from featcache.interface import Ints
from featcache.reading.feature_arrays import OpenedPart
from featcache.reading.generation import Generation
from featcache.reading.roots import NO_ROOTS, AdoptedFiles, Roots
from featcache.reading.verify import pages_in_store
from featcache.stats import FeatureStats
from featcache.writing.compact import UNCHANGED, live_rows, refused_tags, seal_again
from featcache.writing.compact import compact as compact_parts
from featcache.writing.held import HeldCache, check_not_overwritten, held_to_edit
from featcache.writing.open_part import Declarations
from featcache.writing.publish import ExpectedIds, prepared, publish
from featcache.writing.session import WriteSession, session_of
from featcache.writing.sets import write_together
from featcache.writing.tombstones import Changes

# Lines about utterances that are deleted, in files of whoever works in a cache.
#
# The store knows none of their names. But in each `work-*.jsonl`, a line with an "id" is about
# that utterance.


def forget_lines(cache: Path, ids: Collection[str]) -> None:
    """Take the lines about some utterances out; a file without lines goes."""
    for file in sorted(cache.glob("work-*.jsonl")):
        if file.is_symlink() or not file.is_file():
            continue
        lines = file.read_bytes().splitlines(keepends=True)
        left = [line for line in lines if _id_in(line) not in ids]
        if not left:
            file.unlink()
        elif len(left) < len(lines):
            write_durably(file, b"".join(left))


def _id_in(line: bytes) -> str | None:
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(line)
        found = content.get("id") if isinstance(content, dict) else None
        return found if isinstance(found, str) else None
    return None


# Collects checksums and statistics of adopted parts: one pass over the bytes of their sources.
#
# Each part is sealed again with what was collected, in the place of the one before. A killed run
# has changed nothing of the parts that it had not come to.

MOST_TOLD = 5
PAGES_OF_REQUEST, REQUESTS_AHEAD = 256, 4  # of what lies behind a URL


def collect_parts(held: HeldCache, features: Declarations, roots: Roots) -> None:
    """Collect what is missing of adopted parts, and publish it."""
    for part in held.sealed():
        if not part.entry.is_collected:
            collected = _Collected(held.path, part, features, held.manifest, roots)
            seal_again(held.path, part, held.manifest, collected.index(), collected.pages)
    publish(held, UNCHANGED)


class _Collected:
    """One pass over the bytes of a part: checksums of pages and arrays, and statistics."""

    def __init__(
        self,
        cache: Path,
        part: SealedPart,
        features: Declarations,
        manifest: Manifest,
        roots: Roots,
    ) -> None:
        self._index = part.stamped_index(cache, list(features))
        declared = {name: manifest.features[name] for name in features}
        opened = OpenedPart.of(cache, part, declared, self._index, roots)
        self._containers, self._arrays = opened.containers, opened.arrays
        self._checksums = {name: np.zeros(len(self._index), np.uint64) for name in features}
        self._stats = {
            name: FeatureStats.empty(part.header.dims[name])
            for name, feature in features.items()
            if feature.stats
        }
        self._not_finite: dict[str, list[str]] = {name: [] for name in features}
        self.pages: list[Pages] = []
        if opened.adopted is not None:
            files = _ReadAhead(self._index.containers.sizes, opened, self.pages)
            self._read(files, live_rows(cache, part))
        self._check_finite()

    def index(self) -> Index:
        """Return the part's index with what was collected."""
        columns = self._index.containers
        sizes = columns.sizes.tolist()
        pairs = zip(self.pages, sizes, strict=True)
        digests = b"".join(container_digest(pages, size) for pages, size in pairs)
        features = {
            name: dataclasses.replace(each, checksum=self._checksums[name])
            for name, each in self._index.features.items()
        }
        digest_column = np.frombuffer(digests, np.uint8)
        containers = dataclasses.replace(columns, digests=digest_column)
        return dataclasses.replace(
            self._index, features=features, containers=containers, stats=self._stats
        )

    def _read(self, files: _ReadAhead, rows: Ints) -> None:
        names = list(self._arrays)
        with contextlib.closing(files):
            for number, row in _in_order_of_bytes([*self._index.features.values()], rows):
                self._read_array(names[number], row, files)
            files.finish()

    def _read_array(self, name: str, row: int, files: _ReadAhead) -> None:
        columns, state = self._index.features[name], xxhash.xxh3_64()
        for at in range(int(columns.first[row]), int(columns.first[row + 1])):
            place = (int(columns.container[at]), int(columns.offset[at]), int(columns.nbytes[at]))
            files.come_to(place[0], place[1] + place[2])
            state.update(self._containers.view(*place).data)
        self._checksums[name][row] = state.intdigest()
        if name not in self._stats:
            return
        arrays = self._arrays[name]
        frames = from_storage(arrays.read(row), arrays.declared_dtype)
        stats = FeatureStats.of(frames if arrays.has_frames else frames[np.newaxis])
        if not np.isfinite(stats.mean).all():
            self._not_finite[name].append(self._index.id(row))
        self._stats[name] = self._stats[name].merge(stats)

    def _check_finite(self) -> None:
        for name, ids in self._not_finite.items():
            if ids:
                told = ", ".join(map(repr, ids[:MOST_TOLD])) + ", ..." * (len(ids) > MOST_TOLD)
                raise FeatureError(
                    f"feature {name!r} has NaN or infinity in {len(ids)} utterances ({told}), so "
                    "it has no statistics: delete these from the cache (Cache.delete; the source "
                    "stays as it is), or adopt it with nonfinite='keep'"
                )


class _ReadAhead:
    """Reads containers one after the other, page by page, just ahead of the arrays in them.

    So the arrays are in memory when they are read, and each byte comes from the disk once.

    Args:
        sizes: the bytes of each container.
        opened: the part that they are of, an adopted one.
        pages: gets the checksums of the pages of each container, in order.
    """

    def __init__(self, sizes: Ints, opened: OpenedPart, pages: list[Pages]) -> None:
        self._sizes = sizes.tolist()
        self._adopted = cast(AdoptedFiles, opened.adopted)
        self._containers = opened.containers
        self._pages = pages
        self._descriptor = -1  # of the container that is being read, the next one of `pages`
        self._read_pages: list[Pages] = []  # of it
        self._done = 0
        self.bar = bar("collect", sum(self._sizes))

    def come_to(self, container: int, end: int) -> None:
        """Read at least up to a byte of a container."""
        while len(self._pages) < container:
            self._finish_file()
        if len(self._pages) == container:
            self._read(-(-end // PAGE_BYTES))

    def finish(self) -> None:
        """Read all that is left."""
        while len(self._pages) < len(self._sizes):
            self._finish_file()

    def close(self) -> None:
        """Release the container that is being read."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.bar.close()

    def _finish_file(self) -> None:
        number = len(self._pages)
        self._read(page_count(self._sizes[number]))
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._adopted.check(number)  # it has not changed meanwhile
        self._pages.append(np.concatenate([np.empty(0, np.uint64), *self._read_pages]))
        self._read_pages, self._done = [], 0

    def _read(self, last: int) -> None:
        number = len(self._pages)
        there = self._containers.remote_of(number) is not None
        while last > self._done:
            if there:
                new = self._in_store(number, min(last - self._done, PAGES_OF_REQUEST))
            else:
                if self._descriptor < 0:
                    self._descriptor, _ = self._adopted.open(number)
                new = pages_of(self._descriptor, self._done, last - self._done)
            self._read_pages.append(new)
            self._done = self._done + len(new) if there else last
            self.bar.update(len(new) * PAGE_BYTES)

    def _in_store(self, number: int, count: int) -> Pages:
        """Return checksums of the next pages; asks for those behind them meanwhile."""
        size = self._sizes[number]
        begin = self._done // PAGES_OF_REQUEST * PAGES_OF_REQUEST * PAGE_BYTES
        ahead = min(REQUESTS_AHEAD * PAGES_OF_REQUEST * PAGE_BYTES, size - begin)
        self._containers.prefetch([(number, begin, ahead)])
        return pages_in_store(self._containers, number, size, self._done, count)


def _in_order_of_bytes(features: Sequence[FeatureColumns], rows: Ints) -> Iterator[tuple[int, int]]:
    """Yield the arrays of rows, each as number of its feature and row, in the order of bytes."""
    places = zip(*(columns.places(rows) for columns in features), strict=True)
    containers, offsets = map(np.concatenate, places)
    of_feature, place = np.divmod(np.lexsort((offsets, containers)), max(len(rows), 1))
    yield from zip(of_feature.tolist(), rows[place].tolist(), strict=True)


# Edits of a published cache: utterances deleted, generations tagged, parts rewritten.
#
# Each takes the cache's lock, brings back first what a killed writer had committed, and is
# durable when it returns. The declarations are those of the cache itself.

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_MOST_TOLD = 5
_MOST_LOOKED_FOR = 100  # ids in a probe: each look goes through all of it


def delete(cache: Path, ids: Iterable[str], roots: Roots = NO_ROOTS) -> None:
    """Delete utterances, durably, from all feature sets at once; they are no more expected.

    Those that have failed are forgotten, and so are lines that name one of them in files of those
    who work in the cache. A probe that names one goes, too. Raises `KeyNotFoundError`, and deletes
    nothing, if one is neither stored nor has failed.
    """
    if not are_listed(ids):
        raise ConfigError(f"the ids are a list of strings, not {ids!r}")
    listed = list(dict.fromkeys(ids))
    with ExitStack() as stack:
        sessions = [stack.enter_context(_editing(each)) for each in every_directory(cache)]
        failed = {each.path: {*Generation.at(each.path).failed} for each in sessions}
        missing = [
            id
            for id in listed
            if not isinstance(id, str)
            or all(id not in each.parts and id not in failed[each.path] for each in sessions)
        ]
        if missing:
            told = ", ".join(map(repr, missing[:_MOST_TOLD]))
            raise KeyNotFoundError(
                f"of {len(listed)} utterances to delete, {len(missing)} are not in cache "
                f"{str(cache)!r}: {told}{', ...' * (len(missing) > _MOST_TOLD)}; none was deleted"
            )
        after: dict[HeldCache, Manifest] = {}
        for session in sessions:
            its = failed[session.path]
            mine = [id for id in listed if id in session.parts]
            if mine or not its.isdisjoint(listed):
                outcome = _without(session.held.manifest, its, listed)
                probes = _probes(session.held, listed)
                changes = Changes(deleted=mine, files=probes, roots=roots)
                after[session.held] = prepared(session.held, outcome, changes)
        for held in after:
            forget_lines(held.path, listed)
        with explained(cache, lambda: "nothing was deleted"):
            write_together(cache, after)


def recover(cache: Path) -> None:
    """Publish what killed writers had committed, in all feature sets.

    Raises `CacheLockedError` if one of them lives, `CacheError` while the cache is overwritten.
    """
    with ExitStack() as stack:
        for each in every_directory(cache):
            stack.enter_context(_editing(each))


def compact(cache: Path, *, drop_tags: bool) -> None:
    """Rewrite what holds deleted utterances, and small parts, as `Cache.compact` says."""
    with ExitStack() as stack:
        sessions = [stack.enter_context(_editing(each)) for each in every_directory(cache)]
        caches = [session.held for session in sessions]
        tags = {tag for h in caches for tag in refused_tags(h.path, h.manifest, drop_tags)}
        if tags and len(sessions) > 1:  # a version goes with all its sets
            having = [held for held in caches if tags & {*held.manifest.tags}]
            write_together(cache, {held: _untagged(held.manifest, tags) for held in having})
        for session in sessions:
            compact_parts(session.held, session.features)


def collect(cache: Path, roots: Roots) -> None:
    """Collect checksums and statistics of adopted parts, as `Cache.collect` says."""
    with ExitStack() as stack:
        for directory in every_directory(cache):
            if not read_manifest(directory).is_collected:
                session = stack.enter_context(_editing(directory))
                collect_parts(session.held, session.features, roots)


def tag(cache: Path, name: str, generations: Collection[str]) -> None:
    """Give a generation a name, or one of each feature set; it stays until that is taken away."""
    if not (isinstance(name, str) and _TAG.fullmatch(name)):
        raise ConfigError(
            f"the name of a tag has 1 to 64 letters, digits, '_', '-' and '.', and begins with "
            f"none of the last two, not {name!r}"
        )
    with ExitStack() as stack:
        places = [stack.enter_context(held_to_edit(each)) for each in every_directory(cache)]
        tagged = {
            held: generation
            for held in places
            for generation in generations
            if generation and (generation == held.manifest.name or _is_whole(held.path, generation))
        }
        for held in places:
            known = held.manifest.tags.get(name)
            if known not in (None, tagged.get(held)):
                raise ConfigError(
                    f"tag {name!r} of cache {str(cache)!r} names generation {known!r} already; "
                    "untag that first, or give another name"
                )
        if gone := [each for each in generations if each not in tagged.values()]:
            raise CacheError(
                f"generation {gone[0]!r} of cache {str(cache)!r} is no longer there; refresh() "
                "the cache and tag the one that is"
            )
        given = {
            held: replace(held.manifest, tags={**held.manifest.tags, name: generation})
            for held, generation in tagged.items()
            if name not in held.manifest.tags
        }
        write_together(cache, given)


def untag(cache: Path, name: str) -> None:
    """Take a name away from a generation, and remove what only that kept."""
    with ExitStack() as stack:
        places = [stack.enter_context(held_to_edit(each)) for each in every_directory(cache)]
        having = [held for held in places if name in held.manifest.tags]
        if not having:
            known = {tag for held in places for tag in held.manifest.tags}
            raise UnknownNameError(
                f"cache {str(cache)!r} has no tag {name!r}; {nearest(name, sorted(known))}"
            )
        write_together(cache, {held: _untagged(held.manifest, [name]) for held in having})


def _untagged(manifest: Manifest, names: Collection[str]) -> Manifest:
    tags = {tag: each for tag, each in manifest.tags.items() if tag not in names}
    return replace(manifest, tags=tags)


@contextmanager
def _editing(cache: Path) -> Iterator[WriteSession]:
    """Write to a cache as it is declared."""
    with reading(cache):
        manifest = read_manifest(cache)
    check_not_overwritten(cache, manifest)
    with (
        session_of(cache, manifest.declared, manifest.made_from) as session,
        explained(cache, lambda: "what is published stays as it is"),
    ):
        yield session


def _is_whole(cache: Path, generation: str) -> bool:
    """Whether a generation's index and parts are there."""
    with suppress(CacheError):
        manifest = read_manifest(cache, manifest_file(generation))
        seals = (cache / PARTS / part.name / SEAL for part in manifest.parts)
        return all(path.exists() for path in (cache / manifest.index, *seals))
    return False


def _without(manifest: Manifest, failed: Collection[str], ids: Collection[str]) -> ExpectedIds:
    """Return what is expected of a cache without some ids: the others.

    Where some were still to come, which ones they are is not known.
    """
    if manifest.expected is None or not manifest.complete:
        return ExpectedIds(manifest.complete, forgotten=ids)
    return ExpectedIds(complete=True, expected=tuple({*failed}.difference(ids)))


def _probes(held: HeldCache, ids: Collection[str]) -> list[str]:
    """Return the files of probes that may name one of some ids: their content is not known here."""
    found: list[str] = []
    for files in (held.manifest.files, held.manifest.building_files):
        data: bytes | None = None
        with suppress(CorruptCacheError):
            data = read_kept(held.path, files, "probe")
        if data is None or len(ids) > _MOST_LOOKED_FOR or any(_names(data, i) for i in ids):
            found += of_role(files, "probe")
    return found


def _names(data: bytes, id: str) -> bool:
    """Whether bytes name an id, as JSON has it."""
    forms = (json.dumps(id), json.dumps(id, ensure_ascii=False))
    return any(form.encode() in data for form in forms)

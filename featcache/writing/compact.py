"""Compaction: small parts, deleted rows and superseded ones become parts that hold what counts."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from featcache._progress import bar
from featcache.container_files import Pages, sync_directory
from featcache.container_files.lock import FILES as LOCK_FILES
from featcache.container_files.lock import WriterLock
from featcache.errors import CacheError, CorruptCacheError, StorageFullError
from featcache.format.columns import ColumnFile
from featcache.format.files import entries, make_directory
from featcache.format.index import Index, read_index
from featcache.format.journal import Header
from featcache.format.manifest import (
    MANIFESTS,
    PARTS,
    Adopted,
    Manifest,
    manifest_file,
    read_manifest,
)
from featcache.format.part import (
    SEAL,
    SealedPart,
    container_columns,
    index_columns,
    new_part_name,
    remove_part,
    rows_of,
)
from featcache.format.value_columns import Column, stored_columns
from featcache.interface import Ints
from featcache.reading.generation import Generation
from featcache.writing.copies import FANOUT, LARGE, CopySource, StoredArrays, copy_rows, fullness
from featcache.writing.free_space import check_free, margin
from featcache.writing.held import HeldCache
from featcache.writing.open_part import Declarations, page_columns, write_seal
from featcache.writing.publish import AnnotatedRows, ExpectedIds, merged_stats, publish
from featcache.writing.recover import check_none_lives
from featcache.writing.tombstones import Changes

# Groups of small parts that become one, so that many appends leave few parts.
#
# The fullness of a part is its share of the most that a part holds, in bytes or in rows. Parts
# whose fullness is alike, within a factor of eight, are of one tier; eight of a tier become one,
# of the next tier or near it. So n appends of the same size leave at most 7 log8(n) small parts,
# and copy each utterance log8(n) times.


@dataclass(frozen=True, slots=True)
class Sized:
    """A part with the rows that are to be copied of it, and the bytes of these."""

    part: SealedPart
    rows: int
    nbytes: int

    @property
    def fullness(self) -> float:
        """Its share of the most that a part holds."""
        return fullness(self.rows, self.nbytes)

    @property
    def shape(self) -> object:
        """Shape and cut of its arrays, which parts must share to become one."""
        header = self.part.header
        return tuple(sorted(header.dims.items())), tuple(sorted(header.block_rows.items()))

    @property
    def is_adopted(self) -> bool:
        """Whether its bytes lie elsewhere, and stay there."""
        return self.part.entry.adopted is not None

    @property
    def is_tombstoned(self) -> bool:
        """Whether rows of it count no more."""
        return self.part.entry.tombstones is not None


def as_on_disk(cache: Path, part: SealedPart) -> Sized:
    """Return a part with the size of its files: a little more than that of its arrays."""
    files = (file for file in (cache / part.directory).rglob("*") if file.is_file())
    return Sized(part, part.entry.rows, sum(file.stat().st_size for file in files))


def tiers(parts: Iterable[Sized]) -> Iterator[list[Sized]]:
    """Yield groups of small parts that are to become one, where a tier holds enough of them."""
    by_tier: dict[object, list[Sized]] = {}
    for part in parts:
        if part.is_adopted:
            continue
        if 0 < part.fullness < LARGE:
            tier = math.floor(math.log(part.fullness, FANOUT))
            by_tier.setdefault((tier, part.shape), []).append(part)
    yield from (alike for alike in by_tier.values() if len(alike) >= FANOUT)


def packed(parts: Iterable[Sized]) -> Iterator[list[Sized]]:
    """Yield groups of parts that fit into one: those with tombstones, and small ones with them.

    A part without tombstones that would be alone in its group stays as it is. An adopted part is in
    a group of its own.
    """
    by_shape: dict[object, list[list[Sized]]] = {}
    for part in parts:
        if part.is_adopted:
            if part.is_tombstoned:
                yield [part]
        elif part.is_tombstoned or part.fullness < LARGE:
            groups = by_shape.setdefault(part.shape, [[]])
            if sum(each.fullness for each in groups[-1]) + part.fullness > 1:
                groups.append([])
            groups[-1].append(part)
    for group in itertools.chain(*by_shape.values()):
        if len(group) > 1 or any(part.is_tombstoned for part in group):
            yield group


# Parts of a cache whose containers lie elsewhere: their columns are written, and no other byte.

_NOTHING = np.empty(0, np.int64)


def seal_adopted(
    cache: Path,
    header: Header,
    adopted: Adopted,
    index: Index,
    annotations: Mapping[str, Column],
    *,
    pages: Sequence[Pages] | None = None,
    left_out: Ints = _NOTHING,
) -> SealedPart:
    """Write the columns of an adopted part, and seal it.

    Only the holder of the cache's lock may call this. From the moment of its seal, the part counts.

    Args:
        cache: the cache directory.
        header: of the part.
        adopted: the key of the source.
        index: the rows, with paths of containers relative to the source.
        annotations: of the rows of the index, by name.
        pages: the checksums of the pages of each container; None: they are not collected.
        left_out: rows of the index that do not come into the part, ascending.
    """
    name = new_part_name()
    directory = cache / PARTS / name
    make_directory(directory)
    known = [np.empty(0, np.uint64)] * len(index.containers) if pages is None else pages
    rows = rows_of([index], [left_out])
    columns = itertools.chain(
        index_columns([index], rows, list(header.dims), index.stats),
        container_columns([""], [index.containers]).items(),
        page_columns(known),
        *(
            stored_columns(each, annotations[each].gather(rows.order))
            for each in sorted(annotations)
        ),
    )
    try:
        return write_seal(cache, name, header, len(rows.ids), columns, adopted=adopted)
    except BaseException:
        if not (directory / SEAL).exists():  # or it counts
            shutil.rmtree(directory)
        raise


def seal_again(
    cache: Path,
    part: SealedPart,
    manifest: Manifest,
    index: Index | None = None,
    pages: Sequence[Pages] | None = None,
) -> SealedPart:
    """Seal an adopted part once more without the rows that count no more, in its place.

    With an `index` and `pages`, these are what was collected.
    """
    adopted = part.entry.adopted
    if adopted is None:
        raise CorruptCacheError(f"part {part.entry.name!r} is not adopted")
    header = _header([part], manifest)
    if index is not None:
        adopted = dataclasses.replace(adopted, collected=True)
    else:
        index = part.stamped_index(cache, list(manifest.features))
        stats = merged_stats(cache, [part], manifest)
        index = dataclasses.replace(index, stats=stats)
        pages = part.pages(cache)
    annotations = {
        name: part.annotation(cache, name, kind) for name, kind in index.annotations.items()
    }
    left_out = part.tombstones(cache)
    return seal_adopted(cache, header, adopted, index, annotations, pages=pages, left_out=left_out)


# Rewrites sealed parts: the rows that count are copied, block by block as they are, into one.
#
# The new part takes the place of the others at the moment of its seal, published or not. Until
# then it counts for nothing: what a killed rewriter leaves open is removed.


def what_counts(cache: Path, part: SealedPart, names: Sequence[str]) -> Sized:
    """Return a part with the rows that count, and the bytes of their arrays as they are stored."""
    index, rows = part.index(cache, [*names]), live_rows(cache, part)
    sizes = (columns.sizes()[rows].sum() for columns in index.features.values())
    return Sized(part, len(rows), sum(map(int, sizes)))


def live_rows(cache: Path, part: SealedPart) -> Ints:
    """Return the rows of a part that count, ascending."""
    return np.setdiff1d(np.arange(part.entry.rows), part.tombstones(cache))


def check_space(cache: Path, parts: Iterable[Sized], manifest: Manifest) -> None:
    """Raise `StorageFullError` unless the disk has room for copies, and to publish them."""
    listed = list(parts)
    rows = sum(each.rows for each in listed)
    needed = sum(each.nbytes for each in listed)
    needed += margin(len(manifest.features), manifest.rows + 2 * rows)
    check_free(
        cache,
        needed,
        f"to rewrite {rows:,} utterances, {needed:,} are needed until the old files go: free some "
        "space and run the same again; nothing was changed",
    )


def rewrite(
    cache: Path,
    features: Declarations,
    manifest: Manifest,
    parts: Sequence[SealedPart],
    tell: Callable[[int, int], object] = lambda utterances, nbytes: None,
) -> None:
    """Copy what counts of parts of one shape into a new part, and seal that.

    `tell` is called with numbers of utterances and bytes.

    Only the holder of the cache's lock may call this. Raises `CorruptCacheError` for an array that
    is not what was written; then nothing has changed.
    """

    def sources() -> Iterator[CopySource]:
        for part in parts:
            index = part.stamped_index(cache, [*features])
            arrays = StoredArrays(cache, part.directory, index, features)
            annotated = AnnotatedRows.of_part(cache, part, index)
            yield CopySource(arrays, annotated, live_rows(cache, part))

    stats = merged_stats(cache, parts, manifest)
    copy_rows(cache, features, _header(parts, manifest), sources(), stats, tell=tell)


def _header(parts: Sequence[SealedPart], manifest: Manifest) -> Header:
    """Return the header of a part that takes the place of others, which are of one shape."""
    return dataclasses.replace(
        parts[0].header,
        build=manifest.build,
        fingerprint=manifest.building_fingerprint,
        replaces=tuple(part.entry.name for part in parts),
    )


# Compacts a cache: parts are rewritten without what was deleted, small ones become few.
#
# Afterwards no file of the cache holds a byte of what was deleted or replaced, or this is an
# error.

UNCHANGED = ExpectedIds(complete=False, unchanged=True)
_log = logging.getLogger("featcache")


def merge_small(held: HeldCache, features: Declarations) -> None:
    """Make few parts of many small ones.

    Whatever was written is published before: where the parts must stay, the log says why.
    """
    cache, manifest = held.path, held.manifest
    if len(manifest.parts) < FANOUT:
        return
    try:
        for group in tiers(as_on_disk(cache, part) for part in held.sealed()):
            check_space(cache, group, manifest)
            rewrite(cache, features, manifest, [each.part for each in group])
    except (CorruptCacheError, StorageFullError) as error:
        _log.warning("small parts of %r stay as they are: %s", str(cache), error)
    if not held.is_published():
        publish(held, UNCHANGED)


def refused_tags(cache: Path, manifest: Manifest, drop_tags: bool) -> Iterable[str]:
    """Return the tags that hold what was deleted; raise `CacheError` unless they may go."""
    in_the_way = dict(_tags_that_hold(cache, manifest))
    told = "; ".join(f"{tag!r}: {why}" for tag, why in in_the_way.items())
    if in_the_way and drop_tags:
        _log.warning(
            "cache %r: compacting it removes the tags that hold deleted or replaced utterances: %s",
            str(cache),
            told,
        )
    elif in_the_way:
        raise CacheError(
            f"tags of cache {str(cache)!r} hold what was deleted or replaced since ({told}); "
            "untag these generations, or compact with drop_tags=True; nothing was changed"
        )
    return in_the_way


def compact(held: HeldCache, features: Declarations) -> None:
    """Rewrite what holds deleted utterances, and small parts.

    The generation before goes, too, and tags that hold what was deleted; those of the generation
    that is current name the new one, which holds the same.
    """
    cache, manifest = held.path, held.manifest
    before = [path for path in map(Path, entries(cache / PARTS)) if _holds_anything(path)]
    # parts that are begun from here on hold nothing that was deleted
    check_none_lives(held.path, held.list_parts())
    in_the_way = dict(_tags_that_hold(cache, manifest))
    current = [tag for tag, name in manifest.tags.items() if name == manifest.name]
    groups = [*packed(what_counts(cache, part, list(features)) for part in held.sealed())]
    copied = [each for each in itertools.chain(*groups) if not each.is_adopted]
    check_space(cache, copied, manifest)
    emptied = [each.part.entry.name for group in groups for each in group if not each.rows]
    with bar(f"compact {cache.name}", sum(each.nbytes for each in copied)) as shown:
        for group in groups:
            filled = [each.part for each in group if each.rows]
            if filled and group[0].is_adopted:
                seal_again(cache, filled[0], manifest)
            elif filled:
                rewrite(cache, features, manifest, filled, lambda _, nbytes: shown.update(nbytes))
    left = any((cache / PARTS / name).exists() for name in manifest.replaced)
    if groups or in_the_way or left or manifest.previous is not None:
        moved = current if _has_deleted(manifest) else ()
        changes = Changes(emptied=emptied, untagged=in_the_way, retagged=moved, alone=True)
        publish(held, UNCHANGED, changes)
    _remove_given_up(held)
    for directory in filter(Path.exists, (cache / PARTS, cache / MANIFESTS, cache)):
        sync_directory(directory)  # or a power cut might bring back what was removed
    _check_gone(held, before)


def _tags_that_hold(cache: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the tags that hold what the current generation does not, and say what of it."""
    earlier = {tag: name for tag, name in manifest.tags.items() if name != manifest.name}
    current = Generation.at(cache).index if earlier else None
    for tag, name in earlier.items():
        tagged = read_manifest(cache, manifest_file(name))
        with ColumnFile(cache, tagged.index, expected=tagged.index_digest) as file:
            index = read_index(file, list(tagged.features))
        if current is not None and (count := _others(index, current)):
            yield tag, f"{count} utterances"
        elif _has_deleted(manifest, {entry.name for entry in tagged.parts}):
            yield tag, "none of them, but its files have their bytes"


def _has_deleted(manifest: Manifest, names: Collection[str] | None = None) -> bool:
    """Whether any part, or one of some names, has rows that count no more."""
    deleted = {entry.name for entry in manifest.parts if entry.tombstones}
    return bool(deleted if names is None else deleted.intersection(names))


def _others(index: Index, current: Index) -> int:
    """Count the utterances of a tag's index that the current one lacks, or has with other bytes.

    Those of an overwritten build, too: which of them were deleted and written again, nobody knows.
    """
    if not len(current) or not index.features.keys() <= current.features.keys():
        return len(index)
    places = np.minimum(current.hashes.searchsorted(index.hashes), len(current) - 1)
    there = current.hashes[places] == index.hashes
    ours, theirs = index.hash_rows, current.hash_rows[places]
    for name, columns in index.features.items():
        there &= columns.checksum[ours] == current.features[name].checksum[theirs]
    return int((~there).sum())


def _remove_given_up(held: HeldCache) -> None:
    """Remove parts of overwrites that were given up."""
    for name, part in list(held.list_parts()):
        if part is not None and part.header.build > held.manifest.build:
            with WriterLock(held.path / PARTS / name):
                remove_part(held.path / PARTS / name)


def _check_gone(held: HeldCache, before: Iterable[Path]) -> None:
    """Raise `CacheError` if any of what lay among the parts is left that no kept generation names.

    Of what lay there `before` anything was rewritten: others hold nothing that was deleted.
    """
    cache, manifest = held.path, held.manifest
    kept = [read_manifest(cache, manifest_file(name)) for name in {*manifest.tags.values()}]
    named = {entry.name for each in (manifest, *kept) for entry in each.parts}
    named.update(part.entry.name for part in held.sealed())
    if left := [part.name for part in before if part.name not in named and _holds_anything(part)]:
        raise CacheError(
            f"cache {str(cache)!r} is compacted, but these directories in {PARTS!r} belong to no "
            f"generation, and may hold what was deleted: {', '.join(map(repr, left))}; remove them"
        )


def _holds_anything(path: Path) -> bool:
    """Whether anything lies there but a lock."""
    if path.is_dir() and not path.is_symlink():
        return any(each.name not in LOCK_FILES for each in entries(path))
    return os.path.lexists(path)

"""Publishing: a generation of what is sealed, and the removal of what no reader needs any more."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache.container_files import sync_directory
from featcache.errors import CacheError, CacheLockedError, CorruptCacheError, FeatureError
from featcache.format.annotation_columns import Column, joined, read_whole_column, stored_columns
from featcache.format.annotations import wider_kind
from featcache.format.columns import DAMAGED, ColumnFile, Strings, are_equal, save_columns
from featcache.format.files import make_directory, remove_unfinished
from featcache.format.fingerprint import fingerprint_digest
from featcache.format.index import (
    Hashes,
    Index,
    are_below,
    read_index,
    read_stats,
    read_strings,
)
from featcache.format.journal import Header, read_journal
from featcache.format.lock import WriterLock
from featcache.format.manifest import (
    ADOPTED,
    ANNOTATIONS,
    INDEX,
    KEPT_FILE,
    MANIFESTS,
    NAME,
    PARTS,
    ROLES,
    STAMPS,
    AnnotationEntry,
    Expected,
    Manifest,
    PartEntry,
    generation_number,
    index_file,
    kept_manifests,
    manifest_file,
    new_generation_name,
    read_manifest,
    role_of,
    settle,
    with_needed,
    write_manifest,
)
from featcache.format.part import (
    Columns,
    RowIds,
    SealedPart,
    as_known,
    container_columns,
    doubled_rows,
    entries,
    hashes_of,
    index_columns,
    list_parts,
    part_directories,
    remove_part,
    rows_of,
    string_columns,
    that_count,
)
from featcache.interface import Ints
from featcache.reading.verify import container_damage, own_containers, raise_damage
from featcache.stats import FeatureStats
from featcache.writing.changes import Changes, with_changes, without_doubled

# The outcome of writing: which ids are expected, which of them failed, and what that comes to.

Stored = Sequence[tuple[Index, Ints]]  # of each part the index, and its rows that count no more


@dataclass(frozen=True, slots=True)
class ExpectedIds:
    """Ids that a writer expects, and those of them that failed."""

    complete: bool  # what the writer says, where no ids are expected
    expected: Collection[str] | None = None
    failed: Collection[str] = ()
    unchanged: bool = False  # the same utterances as before: complete or not as it was
    forgotten: Collection[str] = ()  # ids that have failed no more


def failed_ids(
    cache: Path, before: Manifest, manifest: Manifest, outcome: ExpectedIds, stored: Stored
) -> list[str]:
    """Return the ids that failed, now or earlier in this build, and are not stored, in order."""
    failed = set(outcome.failed)
    if before.index and before.build == manifest.building:
        with ColumnFile(cache, before.index, mapped=False, expected=before.index_digest) as file:
            failed |= set(read_strings(file, "failed"))
    failed.difference_update(outcome.forgotten)
    if failed and outcome.expected is not None:  # one that has left the data set counts no more
        failed.intersection_update(outcome.expected)
    return sorted(failed - _among(stored, failed), key=str.encode)


def completeness(
    outcome: ExpectedIds, before: Manifest, ids: Strings, failed: Sequence[str], stored: Stored
) -> tuple[bool, Expected | None]:
    """Compare what is there with what is expected: these ids, and all that are there."""
    if outcome.unchanged:
        return before.complete, before.expected
    if outcome.expected is None:
        return outcome.complete, None
    missing: set[str] = set()
    expected = iter(outcome.expected)
    while some := list(itertools.islice(expected, 65536)):  # ten million ids need no second set
        missing.update({*some}.difference(failed, _among(stored, some)))
    everything: Iterable[str] = ids
    if failed or missing:
        everything = sorted({*ids, *failed, *missing}, key=str.encode)
    count = len(ids) + len(failed) + len(missing)
    return not missing, Expected(count, expected_digest(everything))


def _among(stored: Stored, ids: Iterable[str]) -> set[str]:
    """Return those of some ids that are stored."""
    found: set[str] = set()
    rest = list(ids)
    for index, left_out in stored:
        rows = index.find_many(rest)
        held = (rows >= 0) & ~np.isin(rows, left_out)
        found.update(itertools.compress(rest, held))
        rest = list(itertools.compress(rest, ~held))
    return found


def expected_digest(ids: Iterable[str]) -> str:
    """Return the xxh3-128 of ids in the order of their UTF-8, with a zero byte behind each.

    >>> expected_digest(["a", "b"])
    'b061d902c67ac49e07b999952ccfc0e4'
    """
    state = xxhash.xxh3_128()
    for id in ids:
        state.update(id.encode() + b"\0")
    return state.hexdigest()


# `AnnotatedRows`: annotations of the rows of a part or a generation, to be joined or copied.


@dataclass(frozen=True, slots=True)
class AnnotatedRows:
    """Annotations of rows, which are read when they are asked for.

    Attributes:
        part: name of the part, for messages.
        count: number of rows.
        kinds: of the annotations, by name.
        column: returns one of them, of all rows.
        left_out: returns the rows that count no more.
    """

    part: str
    count: int
    kinds: Mapping[str, str]
    column: Callable[[str], Column]
    left_out: Callable[[], Ints]

    @classmethod
    def of_part(cls, cache: Path, part: SealedPart, index: Index) -> AnnotatedRows:
        """Return those of a sealed part."""

        def column(name: str) -> Column:
            return part.annotation(cache, name, index.annotations[name])

        return cls(
            part.entry.name, len(index), index.annotations, column, lambda: part.tombstones(cache)
        )

    def has_values(self, name: str) -> bool:
        """Whether any row that counts has a value of an annotation."""
        return not np.delete(self.column(name).missing, self.left_out()).all()

    def of_kind(self, name: str, kind: str) -> Column:
        """Return an annotation of all rows, of its own kind.

        Of `kind`, and without any value, where there is none that `kind` can hold.
        """
        own = self.kinds.get(name)
        if own is None or wider_kind(own, kind) != kind:
            return Column.empty(self.count, kind)
        return self.column(name)


def widest_kinds(
    cache: Path, parts: Sequence[AnnotatedRows], known: Mapping[str, str]
) -> dict[str, str]:
    """Return the kinds of annotations that hold those of all parts, by name.

    A part whose rows that count have no value of an annotation has no say in its kind where that of
    others does not fit. `known` are kinds from elsewhere. Raises `FeatureError` for an annotation
    of several kinds.
    """
    kinds = dict(known)
    for name in dict.fromkeys(name for part in parts for name in part.kinds):
        having = [part for part in parts if name in part.kinds]
        try:
            kinds[name] = _widest(cache, having, name, known.get(name))
        except FeatureError:
            having = [part for part in having if part.has_values(name)]
            kinds[name] = _widest(cache, having, name, known.get(name))
    return kinds


def _widest(cache: Path, parts: Sequence[AnnotatedRows], name: str, known: str | None) -> str:
    widest = known
    for each in parts:
        wider = wider_kind(widest, each.kinds[name])
        if wider is None:
            raise FeatureError(
                f"annotation {name!r} is {each.kinds[name]} in part {each.part!r} of "
                f"{str(cache)!r} and {widest} in others, written at the same time; nothing is "
                f"lost, but nothing is published either: if {each.kinds[name]} is wrong, remove "
                f"'{cache / PARTS / each.part}', and its {each.count} utterances are written again "
                "by the next call, else the others; with one kind for all"
            )
        widest = wider
    return cast(str, widest)


# Annotations of a generation: joined from those of its parts, and from the generation before.
#
# What was given to a whole generation, by `annotate`, is in no part: it is carried on, by id.

_AT_ONCE = 65536  # ids that are compared at once


class GenerationAnnotations:
    """Annotations of a generation that is being published.

    A row of a part that the generation before has keeps what it had there, where that was given to
    the generation. One of a new part has its own value or, where it has none, that of its id.

    Args:
        cache: the cache directory.
        before: the generation before.
        parts: those of the new one.
        indexes: theirs.
        rows: those of the joined index.

    Attributes:
        entries: by name, for the manifest; complete once all `columns` were taken.

    Raises `FeatureError` for an annotation of several kinds.
    """

    def __init__(
        self,
        cache: Path,
        before: Manifest,
        parts: Sequence[SealedPart],
        indexes: Sequence[Index],
        rows: RowIds,
    ) -> None:
        self.entries: dict[str, AnnotationEntry] = {}
        self._cache = cache
        self._before = before
        self._parts = list(zip(parts, indexes, strict=True))
        self._rows = rows
        kinds = {name: each.kind for name, each in before.annotations.items() if each.carried}
        self._carried = {*kinds}
        self._annotated = [AnnotatedRows.of_part(cache, *each) for each in self._parts]
        self._kinds = dict(sorted(widest_kinds(cache, self._annotated, kinds).items()))

    def columns(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield the columns of all annotations, one annotation at a time."""
        for name, kind in self._kinds.items():
            # taken away from all rows, it must not be forgotten: parts may have values of it
            told = name in self._carried and any(
                name in each.annotations for _, each in self._parts
            )
            for stored in stored_columns(name, self._joined(name, kind), always=told):
                self.entries[name] = AnnotationEntry(kind, name in self._carried)
                yield stored

    def _joined(self, name: str, kind: str) -> Column:
        column = joined([each.of_kind(name, kind) for each in self._annotated], kind)
        if name not in self._carried:
            return column.gather(self._rows.order)
        earlier, its_rows = self._of_before(name), self._rows_before
        own = self._is_new & ~column.missing[self._rows.order]
        chosen = np.where(own | (its_rows < 0), self._rows.order, its_rows + len(column))
        return joined([column, earlier], kind).gather(chosen)

    def _of_before(self, name: str) -> Column:
        with self._open_before() as file:
            kind = self._before.annotations[name].kind
            return read_whole_column(file, name, kind, self._before.rows)

    def _open_before(self) -> ColumnFile:
        digest = self._before.index_digest
        return ColumnFile(self._cache, self._before.index, expected=digest)

    @cached_property
    def _rows_before(self) -> Ints:
        """The rows of the ids in the generation before, -1 where there is none."""
        hashes = hashes_of([index for _, index in self._parts], self._rows.order)
        with self._open_before() as file:
            raise_damage(file.damage(["hashes", "hash_rows", "id_ends", "id_bytes"]))
            return rows_in(read_index(file, []), self._rows.ids, hashes)

    @cached_property
    def _is_new(self) -> NDArray[np.bool_]:
        """Return for each row whether its part is not in the generation before.

        A part that others were rewritten into is as old as they are.
        """
        known = {entry.name for entry in self._before.parts}
        made_of = ((part.entry.name, *part.header.replaces) for part, _ in self._parts)
        new = [known.isdisjoint(names) for names in made_of]
        return np.repeat(np.array(new, bool), [len(each) for _, each in self._parts])[
            self._rows.order
        ]


def rows_in(index: Index, ids: Strings, hashes: Hashes) -> Ints:
    """Return the rows of ids in an index, -1 where there is none.

    Args:
        index: the index.
        ids: in any order; those of an index are quicker in that of its rows.
        hashes: theirs.
    """
    if not len(index) or not len(ids):
        return np.full(len(ids), -1)
    order = np.argsort(hashes, kind="stable")
    places = np.empty(len(ids), np.int64)  # in the order of the hashes, they are all close by
    places[order] = index.hashes.searchsorted(hashes[order])
    np.minimum(places, len(index) - 1, out=places)
    rows = index.hash_rows[places]
    if not are_below(rows, len(index)):
        raise CorruptCacheError(f"{DAMAGED}: it names rows that are not there")
    rows[index.hashes[places] != hashes] = -1
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        for at in np.flatnonzero((some >= 0) & ~_are_ids(index.ids, some, ids, start)).tolist():
            some[at] = index.find(ids[start + at])  # several ids have that hash
    return rows


def _are_ids(known: Strings, rows: Ints, ids: Strings, first: int) -> NDArray[np.bool_]:
    """Return for each id from the `first` on whether a row has it; row -1 has none."""
    same = rows >= 0
    places = np.flatnonzero(same)
    same[places] = are_equal(ids.take(places + first), known.take(rows[places]))
    return same


# Removes what no reader needs any more, once a newer generation is out.

_log = logging.getLogger("featcache")
_BESIDE = re.compile(r"(stamps|tombstones)-.*\.columns")


def stored_indexes(cache: Path) -> dict[str, Path]:
    """List the index files that lie in a cache, by the names of their generations."""
    named = ((INDEX.fullmatch(entry.name), entry) for entry in cache.iterdir())
    return {found[1]: entry for found, entry in named if found}


def remove_superseded(cache: Path, manifest: Manifest) -> None:
    """Remove what no reader of this generation or of the one before needs.

    With it go the parts of lower builds, and those of an overwrite that was given up for the one
    that took its number. What a tag names stays.
    """
    settle(cache)
    sync_directory(cache)  # a killed writer may not have come to make its manifest durable
    manifests = {name: cache / manifest_file(name) for name in kept_manifests(cache)}
    kept = {manifest.name, manifest.previous, *manifest.tags.values()}
    for name, file in (*stored_indexes(cache).items(), *manifests.items()):
        if name not in kept and generation_number(name) < manifest.generation:
            file.unlink(missing_ok=True)
    for directory in (cache, cache / MANIFESTS):
        remove_unfinished(directory)
    remove_unnamed(cache, manifest)
    try:
        tagged = [read_manifest(cache, manifest_file(name)) for name in {*manifest.tags.values()}]
    except CacheError as error:
        _log.warning(
            "no part of %r is removed, since what a tag names is lost: %s", str(cache), error
        )
        return
    tagged_parts = {part.name for each in tagged for part in each.parts}
    replaced = _replaced_for_good(cache, manifest) - tagged_parts
    current = {fingerprint_digest(manifest.fingerprint), *manifest.accepted}
    for name, part in list(list_parts(cache)):
        header = _header(cache, name) if part is None else part.header
        if header is None or header.build > manifest.build or name in tagged_parts:
            continue
        old = header.build < manifest.build or header.fingerprint not in current
        if old or name in replaced:
            # its writer, if it is locked, has lost its build and ends soon
            directory, gone = cache / PARTS / name, (CacheLockedError, FileNotFoundError)
            with contextlib.suppress(*gone), WriterLock(directory):
                remove_part(directory)


def _replaced_for_good(cache: Path, manifest: Manifest) -> set[str]:
    """Return the parts that others have taken the place of, also for readers of the last one."""
    replaced = {*manifest.replaced}
    if not replaced or manifest.previous is None:
        return replaced
    try:
        before = read_manifest(cache, manifest_file(manifest.previous))
    except CacheError:  # whether its readers need them is not known
        return set()
    return replaced - {part.name for part in before.parts}


def remove_unnamed(cache: Path, manifest: Manifest) -> None:
    """Remove files of roles, stamps and tombstones that no manifest names which is kept.

    They were superseded, or are those of a writer that died before it named them.
    """
    try:
        kept = {manifest.previous, *manifest.tags.values()} - {None, manifest.name}
        others = [read_manifest(cache, manifest_file(name)) for name in kept if name]
    except CacheError:
        return  # what that names is not known, and may be needed
    all_ = [manifest, *others]
    files = {path for each in all_ for path in (*each.files, *each.building_files)}
    for entry in cache.iterdir():
        if KEPT_FILE.fullmatch(entry.name) and entry.name not in files:
            entry.unlink(missing_ok=True)
    parts = [part for each in all_ for part in (*each.parts, *each.building_parts)]
    beside = {(part.name, each.file) for part in parts for each in part.beside}
    for file in (each for part in part_directories(cache) for each in entries(part)):
        if _BESIDE.fullmatch(file.name) and (file.parent.name, file.name) not in beside:
            file.unlink(missing_ok=True)


def _header(cache: Path, name: str) -> Header | None:
    """Return what an open part was started with; None if its journal is damaged or none."""
    journal = read_journal(cache, f"{PARTS}/{name}")
    return None if journal is None or journal.damaged else journal.header


# Publishes a generation: the sealed parts become one index, then the manifest names it.

KEPT = ("tags", "others")  # of the generation before
_NO_CHANGES = Changes()


def sealed_parts(cache: Path, manifest: Manifest) -> list[SealedPart]:
    """List the sealed parts of the build that a manifest is building, in order of names.

    Without those that others have taken the place of.
    """
    of_build = (
        part
        for _, part in list_parts(cache)
        if part is not None and manifest.is_building(part.header.build, part.header.fingerprint)
    )
    return that_count(of_build, manifest)


def publish(
    cache: Path, manifest: Manifest, outcome: ExpectedIds, changes: Changes = _NO_CHANGES
) -> Manifest:
    """Publish the sealed parts of the build that `manifest` is building; return the new manifest.

    Only the holder of the cache's lock may call this. Parts of earlier builds are removed once the
    new one is out.
    """
    return write_generation(cache, prepared(cache, manifest, outcome, changes))


def prepared(cache: Path, manifest: Manifest, outcome: ExpectedIds, changes: Changes) -> Manifest:
    """Make all durable that a generation names, and return its manifest, which is not written.

    What `manifest` says of the generation before is taken from the disk: an earlier publish may
    have failed after its manifest was out.
    """
    before = read_manifest(cache) if (cache / NAME).exists() else manifest
    names = list(manifest.features)
    parts = _known_parts(cache, sealed_parts(cache, manifest), before)
    parts = with_changes(cache, parts, changes, manifest)
    indexes = [part.stamped_index(cache, names) for part in parts]
    _check_dims(parts, names)
    parts, rows = _without_doubled(cache, parts, indexes, manifest)
    stored = [(index, part.tombstones(cache)) for index, part in zip(indexes, parts, strict=True)]
    failed = failed_ids(cache, before, manifest, outcome, stored)
    complete, expected = completeness(outcome, before, rows.ids, failed, stored)
    name = new_generation_name(next_generation(cache, before))
    annotations = GenerationAnnotations(cache, before, parts, indexes, rows)
    stats = merged_stats(cache, parts, manifest)
    columns = _columns(indexes, rows, parts, names, stats, failed)
    columns = itertools.chain(columns, annotations.columns())
    digest = _save_index(cache, index_file(name), columns, [part.entry for part in parts])
    after = replace(
        manifest,
        generation=generation_number(name),
        previous=None if changes.alone else before.name or None,
        index=index_file(name),
        index_digest=digest,
        build=manifest.building,
        complete=complete,
        expected=expected,
        rows=len(rows.ids),
        dims=parts[0].header.dims if parts else {},
        parts=tuple(part.entry for part in parts),
        replaced=_replaced(cache, before, changes),
        **_kept(before, manifest.building) | _of_columns(before, indexes, annotations, parts),
    )
    return _without(after, changes)


def write_generation(cache: Path, manifest: Manifest) -> Manifest:
    """Show readers a generation that is durable, and remove those that it supersedes."""
    make_directory(cache / MANIFESTS)
    written = write_manifest(cache, manifest, keep=True)
    remove_superseded(cache, written)
    return written


def _without_doubled(
    cache: Path, parts: list[SealedPart], indexes: Sequence[Index], manifest: Manifest
) -> tuple[list[SealedPart], RowIds]:
    """Leave out of the parts what an earlier one holds; return them with the rows that count."""
    rows = rows_of(indexes, [part.tombstones(cache) for part in parts])
    doubled = doubled_rows(indexes, rows)
    if any(map(len, doubled)):
        pairs = zip(parts, doubled, strict=True)
        parts = [without_doubled(cache, part, some, manifest) for part, some in pairs]
        rows = rows_of(indexes, [part.tombstones(cache) for part in parts])
    return parts, rows


def _columns(
    indexes: Sequence[Index],
    rows: RowIds,
    parts: Sequence[SealedPart],
    names: Sequence[str],
    stats: Mapping[str, FeatureStats],
    failed: Sequence[str],
) -> Columns:
    """Yield the columns of the joined index, but for those of annotations."""
    yield from index_columns(indexes, rows, names, stats)
    prefixes = [f"{part.directory}/" if part.entry.adopted is None else "" for part in parts]
    yield from container_columns(prefixes, [index.containers for index in indexes])
    yield from string_columns("failed", Strings.of(failed))


def _save_index(
    cache: Path,
    name: str,
    columns: Iterable[tuple[str, NDArray[Any]]],
    parts: Sequence[PartEntry],
) -> str:
    """Write an index durably and return its digest; the containers that it names must be there.

    Those of adopted parts are compared when they are read.
    """
    digest = save_columns(cache / name, columns)
    with ColumnFile(cache, name, expected=digest) as file:
        containers = read_index(file, []).containers
        damage = container_damage(cache, containers, own_containers(containers, parts))
        raise_damage(damage, "the cache is not published")
    return digest


def _known_parts(cache: Path, sealed: Sequence[SealedPart], before: Manifest) -> list[SealedPart]:
    """Add tombstones and stamps to the parts that are known, and make new parts durable.

    A new part's writer may have been killed after it sealed it, before the directory was synced.
    """
    known = {entry.name for entry in before.parts}
    for part in sealed:
        if part.entry.name not in known:
            sync_directory(cache / part.directory)
    return as_known(sealed, before)


def _check_dims(parts: Sequence[SealedPart], names: Sequence[str]) -> None:
    for part, name in itertools.product(parts, names):
        first, dims = parts[0].header.dims[name], part.header.dims[name]
        if dims != first:
            raise FeatureError(
                f"feature {name!r} has frames of shape {first} in part {parts[0].entry.name!r} and "
                f"of {dims} in {part.entry.name!r}; remove the wrong one"
            )


def merged_stats(
    cache: Path, parts: Sequence[SealedPart], manifest: Manifest
) -> dict[str, FeatureStats]:
    """Return the statistics of the rows that count of parts, by feature.

    None while those of an adopted part are not collected.
    """
    if not all(part.entry.is_collected for part in parts):
        return {}
    merged = {
        name: FeatureStats.empty(parts[0].header.dims[name] if parts else ())
        for name, feature in manifest.features.items()
        if feature["stats"]
    }
    for part in parts:
        with part.open_stats(cache) as file:
            for name in merged:
                merged[name] = merged[name].merge(read_stats(file, name))
    return merged


def _kept(before: Manifest, building: int) -> dict[str, Any]:
    """Return the keys of a manifest that stay from the one before, or follow from its keys."""
    return {
        **{key: getattr(before, key) for key in KEPT},
        "files": _files(before, building),
        "building_files": {},
        "building_parts": (),
        "accepted": before.accepted if before.build == building else (),
    }


def _of_columns(
    before: Manifest,
    indexes: Sequence[Index],
    annotations: GenerationAnnotations,
    parts: Sequence[SealedPart],
) -> dict[str, Any]:
    """Return the keys of a manifest that tell of columns which not every index has."""
    stamped = any(index.stamps for index in indexes)
    adopted = {ADOPTED: any(part.entry.adopted is not None for part in parts)}
    needed = {STAMPS: stamped, ANNOTATIONS: bool(annotations.entries), **adopted}
    return {
        "annotations": annotations.entries,
        "requires": with_needed(before.requires, adopted),
        "requires_to_write": with_needed(before.requires_to_write, needed),
    }


def _replaced(cache: Path, before: Manifest, changes: Changes) -> tuple[str, ...]:
    """Return the names of parts on disk that count no more, though they are sealed."""
    sealed = {name: part for name, part in list_parts(cache) if part is not None}
    replaced = {*before.replaced, *changes.emptied}
    replaced = replaced.union(*(part.header.replaces for part in sealed.values()))
    return tuple(sorted(replaced & sealed.keys()))


def _without(manifest: Manifest, changes: Changes) -> Manifest:
    """Leave out tags and files that go; give others the new generation."""
    tags = {tag: name for tag, name in manifest.tags.items() if tag not in changes.untagged}
    tags |= dict.fromkeys(changes.retagged, manifest.name)
    files = {path: each for path, each in manifest.files.items() if path not in changes.files}
    return replace(manifest, tags=tags, files=files)


def _files(before: Manifest, building: int) -> dict[str, str]:
    """Return the files that belong to a generation: those of its build, and of later versions."""
    new = before.building_files
    replaced = {role_of(path) for path in new} if before.build == building else {*ROLES}
    stay = {path: each for path, each in before.files.items() if role_of(path) not in replaced}
    return stay | {**new}


def next_generation(cache: Path, before: Manifest) -> int:
    """Return a number above that of all generations of which anything lies on disk."""
    names = [before.name, *stored_indexes(cache), *kept_manifests(cache)]
    return max(before.generation, *map(generation_number, names)) + 1

"""Publishing: a generation of what is sealed, and the removal of what no reader needs any more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache._cached import cached_property
from featcache.errors import CorruptCacheError, FeatureError
from featcache.format.annotations import wider_kind
from featcache.format.columns import DAMAGED, ColumnFile, Strings, are_equal, save_columns
from featcache.format.index import (
    ContainerColumns,
    Hashes,
    Index,
    are_below,
    read_index,
    read_stats,
)
from featcache.format.manifest import (
    ADOPTED,
    ANNOTATIONS,
    PARTS,
    STAMPS,
    AnnotationEntry,
    BuildState,
    Expected,
    Manifest,
    generation_number,
    index_file,
    kept_manifests,
    new_generation_name,
)
from featcache.format.part import (
    Columns,
    RowIds,
    SealedPart,
    container_columns,
    doubled_rows,
    hashes_of,
    index_columns,
    rows_of,
    string_columns,
)
from featcache.format.value_columns import Column, joined, read_whole_column, stored_columns
from featcache.interface import Ints
from featcache.reading.verify import container_damage, own_containers, raise_damage
from featcache.stats import FeatureStats
from featcache.writing.held import HeldCache, remove_superseded, stored_indexes, write_readme
from featcache.writing.tombstones import Changes, with_changes, without_doubled

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


def failed_ids(cache: Path, before: Manifest, outcome: ExpectedIds, stored: Stored) -> list[str]:
    """Return the ids that failed, now or earlier in this build, and are not stored, in order."""
    failed = set(outcome.failed)
    if before.index and before.state is BuildState.CURRENT:
        with ColumnFile(cache, before.index, mapped=False, expected=before.index_digest) as file:
            failed |= set(file.strings("failed"))
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

    def columns(self) -> Columns:
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


# Publishes a generation: the sealed parts become one index, then the manifest names it.

_NO_CHANGES = Changes()


def publish(held: HeldCache, outcome: ExpectedIds, changes: Changes = _NO_CHANGES) -> None:
    """Publish the sealed parts of the build that is being written.

    Parts of earlier builds are removed once the new one is out.
    """
    write_readme(held.path, held.write(prepared(held, outcome, changes), keep=True))
    remove_superseded(held)


def prepared(held: HeldCache, outcome: ExpectedIds, changes: Changes) -> Manifest:
    """Make all durable that a generation names but its index, and return its manifest.

    The manifest is not written.
    """
    manifest = held.building
    parts = with_changes(held.path, held.sealed(durably=True), changes, manifest)
    after = generation_of(held.path, parts, held.manifest, manifest, outcome)
    return _changed(after, changes, _replaced(held, changes))


def generation_of(
    cache: Path,
    parts: list[SealedPart],
    before: Manifest,
    manifest: Manifest,
    outcome: ExpectedIds,
) -> Manifest:
    """Write the columns of a generation, and return its manifest, which is not written.

    The columns are durable once it is: `write_manifest` sees to that.

    Args:
        cache: the cache directory.
        parts: those of the generation, durable.
        before: the generation before.
        manifest: the same, with the fingerprint of the build that is being written.
        outcome: the ids that are expected.
    """
    names = list(manifest.features)
    indexes = [part.stamped_index(cache, names) for part in parts]
    _check_dims(parts, names)
    parts, rows = _without_doubled(cache, parts, indexes, manifest)
    stored = [(index, part.tombstones(cache)) for index, part in zip(indexes, parts, strict=True)]
    failed = failed_ids(cache, before, outcome, stored)
    complete, expected = completeness(outcome, before, rows.ids, failed, stored)
    name = new_generation_name(next_generation(cache, before))
    annotations = GenerationAnnotations(cache, before, parts, indexes, rows)
    columns = itertools.chain(
        index_columns(indexes, rows, names, merged_stats(cache, parts, manifest, indexes)),
        _containers(cache, parts, indexes).items(),
        string_columns("failed", Strings.of(failed)),
        annotations.columns(),
    )
    digest = save_columns(cache / index_file(name), columns, durably=False)
    return replace(
        manifest.published(),
        generation=generation_number(name),
        previous=before.name or None,
        index=index_file(name),
        index_digest=digest,
        complete=complete,
        expected=expected,
        rows=len(rows.ids),
        dims=parts[0].header.dims if parts else {},
        parts=tuple(part.entry for part in parts),
        **_of_columns(before, indexes, annotations, parts),
    )


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


def _containers(
    cache: Path, parts: Sequence[SealedPart], indexes: Sequence[Index]
) -> dict[str, NDArray[Any]]:
    """Return the columns of containers of all parts; those in the cache must be there.

    Those of adopted parts are compared when they are read.
    """
    prefixes = [f"{part.directory}/" if part.entry.adopted is None else "" for part in parts]
    columns = container_columns(prefixes, [index.containers for index in indexes])
    containers = ContainerColumns(
        paths=Strings(columns["container_path_ends"], columns["container_path_bytes"]),
        sizes=columns["container_size"],
        digests=columns["container_digest"],
        parts=columns["container_part"],
    )
    own = own_containers(containers, [part.entry for part in parts])
    raise_damage(container_damage(cache, containers, own), "the cache is not published")
    return columns


def _check_dims(parts: Sequence[SealedPart], names: Sequence[str]) -> None:
    for part, name in itertools.product(parts, names):
        first, dims = parts[0].header.dims[name], part.header.dims[name]
        if dims != first:
            raise FeatureError(
                f"feature {name!r} has frames of shape {first} in part {parts[0].entry.name!r} and "
                f"of {dims} in {part.entry.name!r}; remove the wrong one"
            )


def merged_stats(
    cache: Path, parts: Sequence[SealedPart], manifest: Manifest, indexes: Sequence[Index] = ()
) -> dict[str, FeatureStats]:
    """Return the statistics of the rows that count of parts, by feature.

    None while those of an adopted part are not collected. `indexes` are those of the parts, where
    they were read.
    """
    if not all(part.entry.is_collected for part in parts):
        return {}
    merged = {
        name: FeatureStats.empty(parts[0].header.dims[name] if parts else ())
        for name, feature in manifest.features.items()
        if feature["stats"]
    }
    for part, index in itertools.zip_longest(parts, indexes):
        stats = {} if index is None or part.entry.tombstones else index.stats
        if not merged.keys() <= stats.keys():
            with part.open_stats(cache) as file:
                stats = {name: read_stats(file, name) for name in merged}
        for name in merged:
            merged[name] = merged[name].merge(stats[name])
    return merged


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


def with_needed(names: Iterable[str], needed: Mapping[str, bool]) -> tuple[str, ...]:
    """Return `requires_to_write` with the names that are needed now, and without those not so."""
    now = {name for name, is_needed in needed.items() if is_needed}
    return tuple(sorted({*names} - {*needed} | now))


def _replaced(held: HeldCache, changes: Changes) -> tuple[str, ...]:
    """Return the names of parts on disk that count no more, though they are sealed."""
    sealed = {name: part for name, part in held.list_parts() if part is not None}
    replaced = {*held.manifest.replaced, *changes.emptied}
    replaced = replaced.union(*(part.header.replaces for part in sealed.values()))
    return tuple(sorted(replaced & sealed.keys()))


def _changed(manifest: Manifest, changes: Changes, replaced: tuple[str, ...]) -> Manifest:
    """Leave out tags and files that go; give others the new generation."""
    tags = {tag: name for tag, name in manifest.tags.items() if tag not in changes.untagged}
    tags |= dict.fromkeys(changes.retagged, manifest.name)
    files = {path: each for path, each in manifest.files.items() if path not in changes.files}
    previous = None if changes.alone else manifest.previous
    return replace(manifest, tags=tags, files=files, replaced=replaced, previous=previous)


def next_generation(cache: Path, before: Manifest) -> int:
    """Return a number above that of all generations of which anything lies on disk."""
    names = [before.name, *stored_indexes(cache), *kept_manifests(cache)]
    return max(before.generation, *map(generation_number, names)) + 1

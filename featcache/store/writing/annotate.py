"""Annotations that are given to a cache when it is there, as a new generation of the same parts."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from featcache.container_files import sync_directory
from featcache.errors import ConfigError, KeyNotFoundError
from featcache.store.format.annotation_columns import (
    PREFIX,
    Column,
    joined,
    read_column,
    stored_columns,
    stored_kinds,
)
from featcache.store.format.annotations import kinds_of, wider_kind
from featcache.store.format.column_file import ColumnFile, save_columns
from featcache.store.format.disk_errors import explained
from featcache.store.format.index import Index, read_index
from featcache.store.format.journal import read_journal
from featcache.store.format.lock import WriterLock
from featcache.store.format.manifest import (
    ANNOTATIONS,
    PARTS,
    Manifest,
    check_writable,
    index_file,
    new_generation_name,
    read_manifest,
    with_needed,
)
from featcache.store.format.manifest_entries import AnnotationEntry
from featcache.store.format.part import SealedPart, list_parts
from featcache.store.reading.verify import raise_damage
from featcache.store.writing.annotation_sources import AnnotationSource, Entry, entries_of
from featcache.store.writing.given_annotations import Given, GivenAnnotations
from featcache.store.writing.publish import next_generation
from featcache.store.writing.together import write_together

Unknown = Literal["raise", "skip"]
MOST_TOLD = 20
_AT_ONCE = 65536


def annotate(
    path: Path, caches: Sequence[Path], source: AnnotationSource, unknown: Unknown = "raise"
) -> None:
    """Give utterances of a cache annotations, as `Cache.annotate` does.

    Args:
        path: the cache.
        caches: the cache; or its feature sets. Each that has an annotation gets its values; the
            first one gets an annotation that none has.
        source: of the values.
        unknown: see `Cache.annotate`; of sets, ids that none of them has.
    """
    if unknown not in ("raise", "skip"):
        raise ConfigError(f"unknown is 'raise' or 'skip', not {unknown!r}")
    with ExitStack() as stack:
        places = [stack.enter_context(_locked(cache)) for cache in caches]
        kinds = [_kinds(cache, before) for cache, before, _ in places]
        known = {name: kind for each in kinds[::-1] for name, kind in each.items()}
        features = {name for _, before, _ in places for name in before.features}
        entries: Iterable[Entry] = entries_of(source, known)
        if len(places) == 1:
            after = {caches[0]: _annotated(*places[0], entries, (known, features), unknown)}
        else:
            entries = list(entries)
            if unknown == "raise":
                _refuse_strangers(path, [file for _, _, file in places], entries)
            after = {}
            for number, (place, mine) in enumerate(zip(places, kinds, strict=True)):
                others = {*known}.difference(mine)
                some = _of_names(entries, others, mine if number else None)
                after[place[0]] = _annotated(*place, some, (mine, features), "skip")
        changed = {cache: manifest for cache, manifest in after.items() if manifest is not None}
        with explained(path, lambda: "the cache is as it was"):
            write_together(path, changed)


@contextmanager
def _locked(cache: Path) -> Iterator[tuple[Path, Manifest, ColumnFile]]:
    """Hold the lock of a cache, with the generation that is current."""
    with explained(cache, lambda: "the cache is as it was"):
        lock = WriterLock(cache)
        try:
            manifest = read_manifest(cache)
            check_writable(cache, manifest)
            with ColumnFile(cache, manifest.index, expected=manifest.index_digest) as file:
                raise_damage(file.damage())
                yield cache, manifest, file
        finally:
            lock.release()


def _kinds(cache: Path, manifest: Manifest) -> dict[str, str]:
    """Return the kinds of annotations, also of those that are committed and not yet published."""
    kinds = {name: entry.kind for name, entry in manifest.annotations.items()}
    published = {entry.name for entry in manifest.parts}
    for name, sealed in list_parts(cache):
        part = None if name in published else sealed or read_journal(cache, f"{PARTS}/{name}")
        if part is None or not manifest.is_building(part.header.build, part.header.fingerprint):
            continue
        if isinstance(part, SealedPart):
            with part.open_columns(cache) as file:
                found = stored_kinds(file)
        else:
            found = kinds_of((each.id, each.annotations) for each in part.utterances)
        for annotation, kind in found.items():
            kinds[annotation] = wider_kind(kinds.get(annotation), kind) or kind
    return kinds


def _of_names(
    entries: Iterable[Entry], others: Collection[str], names: Collection[str] | None
) -> Iterator[Entry]:
    """Give what entries say of some names; None: of all but `others`."""
    for id, values in entries:
        yield (
            id,
            {
                name: value
                for name, value in values.items()
                if name not in others and (names is None or name in names)
            },
        )


def _refuse_strangers(cache: Path, files: Iterable[ColumnFile], entries: list[Entry]) -> None:
    ids = [id for id, _ in entries]
    there = np.zeros(len(ids), bool)
    for file in files:
        there |= read_index(file, []).find_many(ids) >= 0
    if not there.all():
        raise KeyNotFoundError(_not_there(cache, [ids[n] for n in np.flatnonzero(~there)]))


def _annotated(
    cache: Path,
    before: Manifest,
    file: ColumnFile,
    entries: Iterable[Entry],
    known: tuple[Mapping[str, str], Collection[str]],
    unknown: Unknown,
) -> Manifest | None:
    """Return the manifest of a generation of the same parts, with what entries say of its rows.

    Its index is durable, and the manifest yet to be written. None: nothing is said. `known` are the
    kinds of annotations that are there, and the names of the features.
    """
    index = read_index(file, [])
    given, kinds = _given(cache, index, iter(entries), known, unknown)
    if not any(each.rows for each in given.values()):
        return None
    annotations: dict[str, AnnotationEntry] = {}

    def columns() -> Iterator[tuple[str, NDArray[Any]]]:
        for name, dtype in file.dtypes.items():
            if not name.startswith(PREFIX):
                yield name, file.column(name, np.dtype(dtype).type)
        for name, kind in sorted(kinds.items()):
            there = name in before.annotations
            carried = name in given or (there and before.annotations[name].carried)
            column = _changed(before, file, name, kind, given.get(name, Given()))
            # taken away from all rows, it must not be forgotten: parts may have values of it
            for stored in stored_columns(name, column, always=there):
                annotations[name] = AnnotationEntry(kind, carried)
                yield stored

    generation = next_generation(cache, before)
    name = index_file(new_generation_name(generation))
    digest = save_columns(cache / name, columns())
    sync_directory(cache)
    return replace(
        before,
        generation=generation,
        previous=before.name,
        index=name,
        index_digest=digest,
        annotations=annotations,
        requires_to_write=with_needed(before.requires_to_write, {ANNOTATIONS: bool(annotations)}),
    )


def _changed(before: Manifest, file: ColumnFile, name: str, kind: str, given: Given) -> Column:
    """Return the column of an annotation, with the values that are given now."""
    if name in before.annotations:
        column = read_column(file, name, before.annotations[name].kind, before.rows)
    else:
        column = Column.missing(before.rows, kind)
    rows = np.arange(before.rows)
    rows[given.rows] = before.rows + np.arange(len(given.rows))
    return joined([column, Column.of(given.values, kind)], kind).take(rows)


def _given(
    cache: Path,
    index: Index,
    entries: Iterator[Entry],
    known: tuple[Mapping[str, str], Collection[str]],
    unknown: Unknown,
) -> tuple[Mapping[str, Given], Mapping[str, str]]:
    """Collect what entries say of rows of an index, with the kinds of all annotations.

    Raises `KeyNotFoundError` for ids that are not there, all at once.
    """
    collected = GivenAnnotations(index, *known)
    while some := list(itertools.islice(entries, _AT_ONCE)):
        collected.add(some)
    if collected.strangers and unknown == "raise":
        raise KeyNotFoundError(_not_there(cache, collected.strangers))
    kinds = collected.kinds
    return {name: each for name, each in collected.given.items() if name in kinds}, kinds


def _not_there(cache: Path, ids: list[str]) -> str:
    told = ", ".join(map(repr, ids[:MOST_TOLD])) + ", ..." * (len(ids) > MOST_TOLD)
    return (
        f"{len(ids)} utterances of the annotations are not in cache {str(cache)!r}: {told}; none "
        "was annotated; leave them out, or pass unknown='skip'"
    )

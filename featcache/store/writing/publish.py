"""Publishes a generation: the sealed parts become one index, then the manifest names it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from featcache.container_files import sync_directory
from featcache.errors import FeatureError
from featcache.stats import FeatureStats
from featcache.store.format.column_file import ColumnFile, save_columns
from featcache.store.format.files import make_directory
from featcache.store.format.index import Index, read_index, read_stats
from featcache.store.format.index_writer import (
    Columns,
    Rows,
    container_columns,
    doubled_rows,
    index_columns,
    rows_of,
    string_columns,
)
from featcache.store.format.kept_files import ROLES, role_of
from featcache.store.format.manifest import (
    ADOPTED,
    ANNOTATIONS,
    MANIFESTS,
    NAME,
    STAMPS,
    Manifest,
    generation_number,
    index_file,
    kept_manifests,
    new_generation_name,
    read_manifest,
    with_needed,
    write_manifest,
)
from featcache.store.format.manifest_entries import PartEntry
from featcache.store.format.part import SealedPart, as_known, list_parts, that_count
from featcache.store.format.strings import Strings
from featcache.store.reading.verify import container_damage, own_containers, raise_damage
from featcache.store.writing.changes import Changes, with_changes
from featcache.store.writing.completeness import Outcome, completeness, failed_ids
from featcache.store.writing.generation_annotations import GenerationAnnotations
from featcache.store.writing.superseded import remove_superseded, stored_indexes
from featcache.store.writing.tombstones import without_doubled

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
    cache: Path, manifest: Manifest, outcome: Outcome, changes: Changes = _NO_CHANGES
) -> Manifest:
    """Publish the sealed parts of the build that `manifest` is building; return the new manifest.

    Only the holder of the cache's lock may call this. What `manifest` says of the generation before
    is taken from the disk: an earlier publish may have failed after its manifest was out. Parts of
    earlier builds are removed once the new one is out.
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
    return write_generation(cache, _without(after, changes))


def write_generation(cache: Path, manifest: Manifest) -> Manifest:
    """Let readers see a generation that is durable, and remove those that it supersedes."""
    make_directory(cache / MANIFESTS)
    written = write_manifest(cache, manifest, keep=True)
    remove_superseded(cache, written)
    return written


def _without_doubled(
    cache: Path, parts: list[SealedPart], indexes: Sequence[Index], manifest: Manifest
) -> tuple[list[SealedPart], Rows]:
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
    rows: Rows,
    parts: Sequence[SealedPart],
    names: Sequence[str],
    stats: Mapping[str, FeatureStats],
    failed: Sequence[str],
) -> Columns:
    """Give the columns of the joined index, but for those of annotations."""
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
    """Give the parts that are known their tombstones and stamps, and make new parts durable.

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
    """Leave out tags and files that go."""
    tags = {tag: name for tag, name in manifest.tags.items() if tag not in changes.untagged}
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

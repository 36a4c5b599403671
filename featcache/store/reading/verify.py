"""Verification of a whole cache: all files are compared, then all damage is told at once."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ParamSpec

import numpy as np
import xxhash

from featcache.errors import CacheError, CorruptCacheError
from featcache.store.format.column_file import ColumnFile
from featcache.store.format.files import open_there, open_within, remedy
from featcache.store.format.index import ContainerColumns, Index, read_index
from featcache.store.format.manifest import (
    PARTS,
    Manifest,
    kept_manifests,
    manifest_file,
    read_manifest,
)
from featcache.store.format.manifest_entries import PartEntry
from featcache.store.format.part import COLUMNS, SEAL, read_part
from featcache.store.format.roots import NO_ROOTS, Roots
from featcache.store.reading.adopted_files import AdoptedFiles
from featcache.store.reading.page_damage import ContainerPages, page_damage

P = ParamSpec("P")
MOST_TOLD = 20
WHAT_TO_DO = (
    "of each of these files: put it back, as it was written; or remove the part that it lies in, "
    "or featcache.json if it lies in none, and write the cache again: all else that is sealed is "
    "kept"
)


def raise_damage(found: Iterable[str], what: str = "") -> None:
    """Raise `CorruptCacheError` with all sentences about damage, if there are any."""
    sentences = list(dict.fromkeys(found))  # generations share parts, and their damage
    if sentences:
        more = [f"... and {len(sentences) - MOST_TOLD} more"] if len(sentences) > MOST_TOLD else []
        raise CorruptCacheError(
            "\n".join(sentences[:MOST_TOLD] + more) + (f"\n{what}" if what else "")
        )


def own_containers(containers: ContainerColumns, parts: Sequence[PartEntry]) -> list[int]:
    """Return the numbers of the containers that lie in the cache, not below an adopted root."""
    own = np.array([part.adopted is None for part in parts], bool)
    return np.flatnonzero(own[containers.parts]).tolist() if len(parts) else []


def container_damage(
    cache: Path,
    containers: ContainerColumns,
    numbers: Sequence[int] | None = None,
    adopted: AdoptedFiles | None = None,
) -> Iterator[str]:
    """Say what is wrong with containers, all or some.

    One is not there, or not in the size that was written; an adopted one may also have changed.
    """
    for number in range(len(containers)) if numbers is None else numbers:
        if adopted is not None and number in adopted:
            yield from _adopted_damage(adopted, number)
            continue
        path, expected = containers.path(number), int(containers.sizes[number])
        try:
            descriptor = open_within(cache, path)
        except FileNotFoundError:
            yield f"container {str(cache / path)!r} is missing; {remedy(cache, path)}"
            continue
        except CorruptCacheError as error:
            yield str(error)
            continue
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
        if size != expected:
            yield (
                f"container {str(cache / path)!r} has {size} bytes, not the {expected} that were "
                f"written; {remedy(cache, path)}"
            )


def _adopted_damage(adopted: AdoptedFiles, number: int) -> Iterator[str]:
    try:
        os.close(adopted.open(number))
    except CorruptCacheError as error:
        yield str(error)


def _told(check: Callable[P, Iterable[str]]) -> Callable[P, Iterator[str]]:
    """Decorate a check that says what is damaged: an error that ends it is its last sentence."""

    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Iterator[str]:
        try:
            yield from check(*args, **kwargs)
        except FileNotFoundError as error:
            yield f"{str(error.filename)!r} is missing"
        except CacheError as error:
            yield str(error)

    return checked


def all_damage(
    cache: Path, manifest: Manifest, index: Index, *, arrays: bool, roots: Roots = NO_ROOTS
) -> Iterator[str]:
    """Compare all files of a cache with what their parents say of them.

    Args:
        cache: the cache directory.
        manifest: that of the current generation.
        index: that of the current generation.
        arrays: read the containers, too, not only their sizes.
        roots: places of adopted sources that count in place of those that the cache knows.
    """
    kept = list(kept_manifests(cache))
    for name in filter(None, {manifest.name, manifest.previous, *manifest.tags.values()}):
        if name not in kept:
            yield f"{str(cache / manifest_file(name))!r} is missing"
    yield from _column_damage(cache, manifest.index, manifest.index_digest)
    yield from _generation_damage(cache, manifest, index, arrays, roots)
    yield from _building_damage(cache, manifest)
    for name in kept:
        yield from _kept_damage(cache, name, manifest, arrays, roots)


@_told
def _kept_damage(
    cache: Path, name: str, current: Manifest, arrays: bool, roots: Roots
) -> Iterator[str]:
    """Compare what must be whole of a generation whose manifest is kept."""
    manifest = read_manifest(cache, manifest_file(name))
    if manifest.name != name:
        path = str(cache / manifest_file(name))
        yield f"{path!r} is damaged: it is the manifest of {manifest.name!r}"
        return
    tagged = name in current.tags.values() and name != current.name
    if tagged or name == current.previous:
        yield from _column_damage(cache, manifest.index, manifest.index_digest)
    if tagged:
        with ColumnFile(cache, manifest.index, expected=manifest.index_digest) as file:
            index = read_index(file, list(manifest.features))
        yield from _generation_damage(cache, manifest, index, arrays, roots)


@_told
def _building_damage(cache: Path, manifest: Manifest) -> Iterator[str]:
    """Compare what belongs to a build that is being written, unless its writer is at work on it."""
    files = (_file_damage(cache, *each) for each in manifest.building_files.items())
    parts = (_part_damage(cache, entry) for entry in manifest.building_parts)
    found = list(itertools.chain(*files, *parts))
    if found and read_manifest(cache).write_id == manifest.write_id:
        yield from found


def _generation_damage(
    cache: Path, manifest: Manifest, index: Index, arrays: bool, roots: Roots
) -> Iterator[str]:
    adopted = AdoptedFiles.of(cache, manifest.parts, index.containers, roots)
    for path, expected in manifest.files.items():
        yield from _file_damage(cache, path, expected)
    for entry in manifest.parts:
        yield from _part_damage(cache, entry)
    yield from container_damage(cache, index.containers, adopted=adopted)
    if arrays:
        known = ContainerPages(cache, manifest, index.containers, adopted)
        collected = np.array([part.is_collected for part in manifest.parts], bool)
        for container in np.flatnonzero(collected[index.containers.parts]).tolist():
            yield from page_damage(index, container, known)


@_told
def _column_damage(cache: Path, path: str, expected: str) -> Iterator[str]:
    with ColumnFile(cache, path, mapped=False, expected=expected) as file:
        yield from file.damage()


@_told
def _file_damage(cache: Path, path: str, expected: str) -> Iterator[str]:
    state = xxhash.xxh3_64()
    with open(open_there(cache, path), "rb") as file:  # noqa: PTH123 (a descriptor)
        while piece := file.read(1 << 20):
            state.update(piece)
    if state.hexdigest() != expected:
        yield f"{str(cache / path)!r} is damaged: its checksum does not match"


@_told
def _part_damage(cache: Path, entry: PartEntry) -> Iterator[str]:
    directory = f"{PARTS}/{entry.name}"
    part = read_part(cache, entry.name)
    if part is None:
        yield f"{str(cache / directory / SEAL)!r} is missing"
        return
    if part.entry.digest != entry.digest:
        yield f"{str(cache / directory / SEAL)!r} is damaged: its checksum does not match"
    yield from _column_damage(cache, f"{directory}/{COLUMNS}", part.columns)
    for beside in (entry.tombstones, entry.stamps):
        if beside is not None:
            yield from _column_damage(cache, f"{directory}/{beside.file}", beside.digest)

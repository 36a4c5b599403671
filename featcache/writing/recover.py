"""Recovery of what a writer that died had committed.

A part whose formats can be finished where they lie is sealed in place. Of others (an `.h5` that was
not closed is unreadable for its own tools) the committed bytes are copied, block by block as they
are, into a new part, which is sealed; only then the old one is removed. What is damaged is never
removed: its directory is set aside.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from featcache.container_files import sync_directory
from featcache.container_files.lock import (
    HOLDER,
    SOFT_NAME,
    WriterLock,
    holder,
    holder_text,
    is_locked,
    may_live,
)
from featcache.container_files.lock import NAME as LOCK
from featcache.errors import CacheLockedError, CorruptCacheError
from featcache.format import journal as journals
from featcache.format.annotations import kinds_of
from featcache.format.files import remedy, remove_unfinished
from featcache.format.index import ContainerColumns
from featcache.format.journal import Journal, Placed, Utterance, read_journal
from featcache.format.manifest import PARTS, Manifest
from featcache.format.part import SEAL, SealedPart, checksum, read_part, remove_part
from featcache.format.value_columns import Column
from featcache.interface import Extent, FinishesFiles
from featcache.reading.containers import Containers
from featcache.stats import FeatureStats
from featcache.writing.copies import CopySource, StoredArrays, copy_rows
from featcache.writing.free_space import check_free, margin
from featcache.writing.held import HeldCache
from featcache.writing.open_part import (
    Declarations,
    PartRows,
    container_groups,
    extents_of,
    seal_directory,
    with_arrays,
)
from featcache.writing.publish import AnnotatedRows

# Copies what a dead writer had committed into a new part, its blocks as they are.
#
# For parts whose files cannot be finished where they lie.

RECOVERED = "-recovered"
SPARE_BYTES = 1 << 18  # what must remain beside the copy of a part and its index


class DeadPart:
    """A part whose writer died: its journal, and the bytes of its containers."""

    def __init__(self, cache: Path, name: str, journal: Journal) -> None:
        self.cache = cache
        self.name = name
        self.directory = cache / PARTS / name
        self.journal = journal
        paths = sorted({extent.container for extent in extents_of(journal.utterances)})
        files = (self.directory / path for path in paths)
        sizes = [file.stat().st_size if file.is_file() else -1 for file in files]
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._columns = ContainerColumns.of(paths, sizes)
        self._containers = Containers(self.directory, self._columns)

    def holds(self, utterance: Utterance) -> bool:
        """Whether an utterance has all features, with the bytes that the journal says."""
        if utterance.arrays.keys() != self.journal.header.dims.keys():
            return False
        arrays = utterance.arrays.values()
        try:
            return all(checksum(self._blocks(placed)) == placed.checksum for placed in arrays)
        except CorruptCacheError:
            return False

    def source(self, features: Declarations, utterances: Sequence[Utterance]) -> CopySource:
        """Return utterances to be copied."""
        index = PartRows.of(utterances, [*features]).index(self._columns, {})
        kinds = kinds_of((each.id, each.annotations) for each in utterances)

        def column(name: str) -> Column:
            values = [each.annotations.get(name) for each in utterances]
            return Column.of(values, kinds[name])

        count, none = len(utterances), np.empty(0, np.int64)
        annotated = AnnotatedRows(self.name, count, kinds, column, lambda: none)
        arrays = StoredArrays(self.cache, f"{PARTS}/{self.name}", index, features)
        return CopySource(arrays, annotated, np.arange(count))

    def stats(self, features: Declarations) -> Mapping[str, FeatureStats] | None:
        """Return what the journal says of all its utterances; None where a copy counted none."""
        counted = {name for name, feature in features.items() if feature.stats}
        return self.journal.stats if counted <= self.journal.stats.keys() else None

    def let_go(self) -> None:
        """Close the files until they are needed again: not all systems remove open ones."""
        self._containers.let_go()

    def _blocks(self, placed: Placed) -> tuple[memoryview, ...]:
        places = ((self._numbers[e.container], e.offset, e.nbytes) for e in placed.extents)
        return tuple(self._containers.view(*place).data for place in places)


def copy_part(
    dead: DeadPart, features: Declarations, utterances: Sequence[Utterance], *, whole: bool
) -> None:
    """Copy utterances of a part into a new one and seal that.

    Statistics are computed again unless the journal is `whole`.
    """
    target = dead.directory.with_name(dead.name + RECOVERED)
    if (target / SEAL).exists():  # whoever sealed it may have been killed before it was durable
        sync_directory(target)
        return
    if target.exists():
        remove_part(target)
    _check_space(dead, utterances)
    sources = [dead.source(features, utterances)]
    stats = dead.stats(features) if whole else None
    try:
        copy_rows(dead.cache, features, dead.journal.header, sources, stats, name=target.name)
    finally:
        dead.let_go()


def _check_space(dead: DeadPart, utterances: Sequence[Utterance]) -> None:
    needed = sum(extent.nbytes for extent in extents_of(utterances))
    needed += margin(len(utterances[0].arrays), 2 * len(utterances), SPARE_BYTES)
    check_free(
        dead.cache,
        needed,
        f"to bring back what a writer that died had committed, part {dead.name!r} is copied once, "
        f"which needs {needed:,}: free some space and run the same again",
    )


DAMAGED = ".damaged"  # behind the name of a part that is set aside: nobody reads or removes it
_log = logging.getLogger("featcache")


def recover_parts(held: HeldCache, features: Declarations, *, pass_live: bool = False) -> None:
    """Seal what dead writers of the build that is being written had committed.

    Their open parts are gone afterwards; parts of other builds stay as they are. Raises
    `CacheLockedError` if one of the writers still lives, unless these are to be passed over, and
    `CorruptCacheError` for a part of a generation whose seal is gone: it is damaged, not open.
    """
    cache = held.path
    published = {entry.name for entry in held.manifest.parts}
    for name, sealed in list(held.list_parts()):
        directory = cache / PARTS / name
        if sealed is not None:
            _finish_seal(directory)
            continue
        if name in published:
            seal = f"{PARTS}/{name}/{SEAL}"
            raise CorruptCacheError(
                f"cache {str(cache)!r} is damaged: {seal!r} is gone; {remedy(cache, seal)}, or "
                "save what is intact: cache.repair()"
            )
        before = holder(directory)
        try:
            lock = WriterLock(directory)
        except FileNotFoundError:  # its writer has removed it
            continue
        except CacheLockedError as error:
            if pass_live:
                continue
            raise still_written(directory) from error
        with lock:
            if read_part(cache, name) is None:
                # where locks count for nothing, its writer may live, and go on
                _recover(cache, name, features, held.manifest, in_place=not may_live(before))
        if (directory / SEAL).exists():
            _finish_seal(directory)


def check_none_lives(cache: Path, parts: Iterable[tuple[str, SealedPart | None]]) -> None:
    """Raise `CacheLockedError` if one of the parts on disk is being written.

    Be anything of it durable or not.
    """
    for name, sealed in list(parts):
        directory = cache / PARTS / name
        with contextlib.suppress(FileNotFoundError):  # its writer has removed it
            if sealed is None and is_locked(directory):
                raise still_written(directory)


def still_written(directory: Path) -> CacheLockedError:
    """Return the error for a part that a live writer holds."""
    return CacheLockedError(
        f"part {str(directory)!r} is still being written by {holder_text(directory)}; end that "
        "first"
    )


def _recover(
    cache: Path, name: str, features: Declarations, manifest: Manifest, *, in_place: bool
) -> None:
    directory = cache / PARTS / name
    journal = read_journal(cache, f"{PARTS}/{name}")
    if _is_unfinished_copy(directory) or (journal is not None and journal.header.replaces):
        remove_part(directory)
    elif journal is None and journals.has_lines(cache, f"{PARTS}/{name}"):
        _set_aside(directory, "its journal cannot be read")
    elif journal is None or not (journal.utterances or journal.damaged):
        remove_part(directory)
    elif manifest.is_building(journal.header.build, journal.header.fingerprint):
        if features.keys() == journal.header.dims.keys() == journal.header.block_rows.keys():
            _recover_committed(DeadPart(cache, name, journal), features, in_place)
        else:
            _set_aside(directory, "its journal names other features")


def _recover_committed(dead: DeadPart, features: Declarations, in_place: bool) -> None:
    good: list[Utterance] = []
    lost: list[Utterance] = []  # bytes of theirs are damaged
    for utterance in dead.journal.utterances:
        (good if dead.holds(utterance) else lost).append(utterance)
    dead.let_go()
    whole = not (lost or dead.journal.damaged)
    if whole and in_place and _seal_in_place(dead, features):
        return
    if good:
        copy_part(dead, features, good, whole=whole)
    if dead.journal.damaged:
        why = f"lines of its journal do not check; {len(good)} utterances were salvaged"
        _set_aside(dead.directory, why)
    elif lost:
        ids = ", ".join(repr(utterance.id) for utterance in lost[:5]) + ", ..." * (len(lost) > 5)
        why = f"{len(lost)} utterances are not what was committed ({ids})"
        _set_aside(dead.directory, why)
    else:
        remove_part(dead.directory)


def _finish_seal(directory: Path) -> None:
    """Do what comes after the seal, where the writer failed or died just before that."""
    journal = directory / journals.JOURNAL
    if journal.exists():
        remove_unfinished(directory)
        sync_directory(directory)  # or a power cut might take the seal, and not the journal
        journal.unlink(missing_ok=True)
    for name in (HOLDER, SOFT_NAME, LOCK):  # which nobody needs any more
        (directory / name).unlink(missing_ok=True)


def _is_unfinished_copy(directory: Path) -> bool:
    original = directory.name.removesuffix(RECOVERED)
    return original != directory.name and directory.with_name(original).exists()


def _seal_in_place(dead: DeadPart, features: Declarations) -> bool:
    """Seal a part where it lies, if all its formats can finish their files; tells whether."""
    if (dead.directory.with_name(dead.name + RECOVERED) / SEAL).exists():
        return False  # it was copied, by one who died before it was removed
    header, utterances = dead.journal.header, dead.journal.utterances
    # in the order of then: in that of now, groups of features may have other directories
    order = utterances[0].arrays
    groups = [
        (prefix, names, features[names[0]].make_backend())
        for prefix, names in container_groups({key: features[key] for key in order})
    ]
    if not all(isinstance(backend, FinishesFiles) for _, _, backend in groups):
        return False
    stats = dead.stats(features)
    if stats is None:
        stats = _counted(dead, features)
    try:
        for prefix, names, backend in groups:
            specs = [features[key].spec(header.dims[key]) for key in names]
            written = [
                (each.id, {key: _within(prefix, each.arrays[key]) for key in names})
                for each in utterances
            ]
            cast(FinishesFiles, backend).finish(dead.directory / prefix, specs, written)
    except CorruptCacheError as error:
        _log.warning(
            "part %r is copied, for its files cannot be finished: %s", str(dead.directory), error
        )
        return False
    rows = PartRows.of(utterances, [*header.dims])
    seal_directory(dead.cache, dead.name, header, rows, stats, {})
    return True


def _counted(dead: DeadPart, features: Declarations) -> dict[str, FeatureStats]:
    header, source = dead.journal.header, dead.source(features, dead.journal.utterances)
    specs = {name: feature.spec(header.dims[name]) for name, feature in features.items()}
    named = (name for name, feature in features.items() if feature.stats)
    stats = {name: FeatureStats.empty(header.dims[name]) for name in named}
    for batch in source.arrays.batches(source.rows):
        stats = with_arrays(stats, batch.arrays, specs, header)
    source.arrays.let_go()
    return stats


def _set_aside(directory: Path, why: str) -> None:
    aside = directory.with_name(directory.name + DAMAGED)
    directory.rename(aside)
    sync_directory(directory.parent)
    _log.warning(
        "part %r is damaged: %s; what cannot be used of it was set aside in %r, and is computed "
        "again",
        str(directory),
        why,
        str(aside),
    )


def _within(prefix: str, placed: Placed) -> tuple[int, tuple[Extent, ...]]:
    """Return the rows and the extents of an array, these relative to the directory of its group."""
    return placed.rows, tuple(
        each._replace(container=each.container.removeprefix(prefix)) for each in placed.extents
    )

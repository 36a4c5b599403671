"""Repair of a damaged cache: what is intact is saved, and what is damaged set aside.

Damaged parts are copied without what is lost, by the one copier, into parts that count from the
moment that the next manifest accepts them. So whoever is killed here leaves the cache as it was.
What the files of then may still hold stays beside the cache's own, under other names.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np

from featcache._progress import bar
from featcache.container_files import Pages, sync_directory, sync_file, write_durably
from featcache.container_files.lock import WriterLock, is_locked
from featcache.errors import CorruptCacheError, counted
from featcache.format.columns import ColumnFile
from featcache.format.feature_sets import every_directory, set_directories, set_names
from featcache.format.files import digest, explained, read_within, reading
from featcache.format.fingerprint import digest_of_canonical
from featcache.format.index import (
    ContainerColumns,
    Index,
    StampColumns,
    container_digest,
    pages_of,
    taken_rows,
)
from featcache.format.journal import Header
from featcache.format.manifest import (
    NAME,
    NEXT,
    OUTER,
    OWN,
    PARTS,
    SETS,
    Expected,
    Manifest,
    index_file,
    manifest_file,
    proven_generation,
    read_manifest,
    set_name,
    write_manifest,
)
from featcache.format.part import SEAL, SealedPart, part_directories, remove_part, with_sizes
from featcache.format.value_columns import Column
from featcache.interface import Ints
from featcache.reading.feature_arrays import OpenedPart
from featcache.reading.roots import NO_ROOTS, Roots
from featcache.reading.salvage import (
    IDS,
    CacheDamage,
    GenerationDamage,
    IndexColumns,
    LostArray,
    PartDamage,
    Told,
)
from featcache.reading.verify import PageDamage, Tell, unless_damaged
from featcache.writing.compact import UNCHANGED, seal_adopted
from featcache.writing.copies import CopySource, StoredArrays, copy_rows
from featcache.writing.free_space import check_free, margin
from featcache.writing.held import (
    HeldCache,
    check_not_overwritten,
    held_to_edit,
    stored_indexes,
)
from featcache.writing.publish import (
    AnnotatedRows,
    expected_digest,
    generation_of,
    merged_stats,
    prepared,
)
from featcache.writing.recover import DAMAGED, still_written
from featcache.writing.sets import name_whole_sets, write_together
from featcache.writing.tombstones import Changes, stats_of

# The outcome of a repair, done or only looked at.


@dataclass(frozen=True)
class Repair:
    """Outcome of a repair; as text, a few sentences.

    Attributes:
        saved: number of utterances that are intact, in all feature sets.
        lost: the arrays that are damaged; their utterances are in the cache no more.
        unnamed: number of utterances that are lost, and their ids with them.
        elsewhere: damaged pages of containers that hold none of these arrays.
        rebuilt: other damaged or missing files, which are made anew or left out: paths in the
            cache of manifests, indexes, seals, and files of roles.
        annotations: names of annotations of which values are lost.
        set_aside: paths in the cache under which the damaged files lie now, as they were. Nobody
            reads or removes them.
        left: sentences about damage that only a person can mend.
        done: False if the cache was only looked at.
    """

    saved: int = 0
    lost: tuple[LostArray, ...] = ()
    unnamed: int = 0
    elsewhere: tuple[PageDamage, ...] = ()
    rebuilt: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    set_aside: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    done: bool = True

    @property
    def lost_ids(self) -> tuple[str, ...]:
        """The ids of the utterances that are lost, in the order of their UTF-8 bytes."""
        return tuple(sorted({array.id for array in self.lost}, key=str.encode))

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing to repair."""
        return not (self.set_aside or self.rebuilt or self.lost or self.unnamed or self.left)

    def __str__(self) -> str:
        if self.is_whole:
            return f"whole: {counted(self.saved, 'utterance')}, nothing to repair"
        ids, saved = self.lost_ids, counted(self.saved, "utterance")
        count = len(ids) + self.unnamed
        told = ", ".join(map(repr, ids[:5])) + ", ..." * (count > min(len(ids), 5))
        lost = f"{count:,} lost{told and f' ({told})'}" if count else "none lost"
        aside = ", ".join(map(repr, self.set_aside))
        moved = f"; set aside: {aside}" if self.set_aside else ""
        values = f"; values lost of: {', '.join(self.annotations)}" if self.annotations else ""
        return "; ".join([f"{saved} saved, {lost}{moved}{values}", *self.left])


def repair(cache: Path, roots: Roots = NO_ROOTS, *, dry_run: bool = False) -> Repair:
    """Repair a cache, as `Cache.repair` says, also one that cannot be opened."""
    with reading(cache):
        aside = _lost_names(cache)
        manifests = _manifests(cache, alone=aside is not None)
    with ExitStack() as stack:
        if dry_run:
            with reading(cache), _looking([*manifests]) as tell:
                found = [
                    _damage_of(each, manifest, roots, tell)
                    for each, (manifest, _) in manifests.items()
                ]
                outcome = _outcome(cache, found, done=False)
                return _with_restored(cache, manifests, aside, outcome)
        if aside is not None:
            _name_sets(cache, aside)
        for directory, (_, copy) in manifests.items():
            if copy is not None:
                _restore(directory)
        places = [stack.enter_context(held_to_edit(each)) for each in every_directory(cache)]
        for held in places:
            _check_idle(held)
        with explained(cache, lambda: "the cache is as it was"):
            with _looking([held.path for held in places]) as tell:
                found = [_damage_of(held.path, held.manifest, roots, tell) for held in places]
            works = [_Work(*each, roots) for each in zip(places, found, strict=True)]
            outcome = _outcome(cache, [work.damage for work in works], done=True)
            needed = [work for work in works if not work.damage.is_whole]
            write_together(cache, {work.held: work.prepared() for work in needed})
            for work in needed:
                work.remove_unsealed()
        annotations = sorted({name for work in works for name in work.annotations})
        outcome = replace(outcome, annotations=tuple(annotations))
        return _with_restored(cache, manifests, aside, outcome)


def _damage_of(directory: Path, manifest: Manifest, roots: Roots, tell: Tell) -> CacheDamage:
    check_not_overwritten(directory, manifest)
    return CacheDamage.of(directory, manifest, roots, tell)


@contextmanager
def _looking(directories: Sequence[Path]) -> Iterator[Tell]:
    """Show how much of the feature sets of a cache is read."""
    cache, parts = directories[0], (p for each in directories for p in part_directories(each))
    files = (file for part in parts for file in part.rglob("*") if file.is_file())
    with bar(f"look at {cache.name}", sum(file.stat().st_size for file in files)) as shown:
        yield shown.update


def _check_idle(held: HeldCache) -> None:
    """Raise `CacheLockedError` if a part is being written."""
    for directory in part_directories(held.path):
        with suppress(FileNotFoundError):  # its writer has removed it
            if not (directory / SEAL).exists() and is_locked(directory):
                raise still_written(directory)


def _outcome(cache: Path, found: Sequence[CacheDamage], *, done: bool) -> Repair:
    """Put together what was found in all feature sets of a cache."""
    ids = [{*each.ids()} for each in found] if len(found) > 1 else []
    outcomes = [_of_set(set_name(cache, each.path), each) for each in found]
    joined = reduce(_joined, outcomes)
    return replace(joined, saved=len(set.intersection(*ids)) if ids else joined.saved, done=done)


def _of_set(name: str, found: CacheDamage) -> Repair:
    where = "" if name == OWN else f"{SETS}/{name}/"

    def within(container: str) -> str:
        return where + container if container.startswith(f"{PARTS}/") else container

    arrays = {(each.id, each.feature): each for each in found.lost()}
    placed = (replace(each, container=within(each.container)) for each in arrays.values())
    pages = {
        (each.container, each.pages): replace(each, container=within(each.container))
        for part in found.damaged.values()
        for each in part.elsewhere
    }
    return Repair(
        saved=sum(part.count for part in found.counting),
        lost=tuple(placed),
        unnamed=found.unnamed,
        elsewhere=tuple(pages.values()),
        rebuilt=tuple(where + path for path in found.files),
        set_aside=tuple(where + path + DAMAGED for path in found.aside()),
        left=tuple(found.left),
    )


def _joined(one: Repair, other: Repair) -> Repair:
    """Join the outcomes of two feature sets."""
    return Repair(
        saved=min(one.saved, other.saved),
        lost=one.lost + other.lost,
        unnamed=one.unnamed + other.unnamed,
        elsewhere=one.elsewhere + other.elsewhere,
        rebuilt=one.rebuilt + other.rebuilt,
        set_aside=one.set_aside + other.set_aside,
        left=one.left + other.left,
    )


# What names the feature sets is made anew, as a writer makes one that is lost.
# A damaged `featcache.json` is restored where something proves which of the kept ones it was.

Manifests = dict[Path, tuple[Manifest, str | None]]  # with what a damaged one is set aside as


def _manifests(cache: Path, *, alone: bool) -> Manifests:
    """Read the manifests of all feature sets of a cache, or of damaged ones the copies.

    They are `alone` where what names the sets is lost.
    """
    own = _manifest_of(cache, alone)
    names = () if alone else set_names(cache, own[0]) or ()
    directories = set_directories(cache, names).values()
    return {each: own if each == cache else _manifest_of(each, alone) for each in directories}


def _manifest_of(directory: Path, alone: bool = False) -> tuple[Manifest, str | None]:
    try:
        return read_manifest(directory, alone=alone), None
    except CorruptCacheError:
        name = proven_generation(directory)
        if name is None:
            raise
        aside = f"{NAME}.{digest((directory / NAME).read_bytes())[:8]}{DAMAGED}"
        return read_manifest(directory, manifest_file(name)), aside


def _restore(directory: Path) -> None:
    with WriterLock(directory):
        manifest, aside = _manifest_of(directory)  # which another one may have restored
        if aside is not None:
            _keep(directory / NAME, directory / aside)
            data = read_within(directory, manifest_file(manifest.name))
            write_durably(directory / NAME, data)


def _lost_names(cache: Path) -> str | None:
    """Return as what the damaged file is set aside that names feature sets; None: it is whole.

    "" is one that is not there. Raises `CorruptCacheError` where it may have named an edit of
    several sets that is not in its place yet.
    """
    own = _manifest_of(cache, alone=True)[0]
    try:
        set_names(cache, own)
    except CorruptCacheError:
        if any((each / NEXT).exists() for each in set_directories(cache, ()).values()):
            raise
        file = cache / OUTER
        if not file.exists():
            return ""
        return f"{OUTER}.{digest(file.read_bytes())[:8]}{DAMAGED}"
    return None


def _name_sets(cache: Path, aside: str) -> None:
    """Name the feature sets of a cache again, those that are whole."""
    with WriterLock(cache / SETS):
        if aside and _lost_names(cache) == aside:  # another one may have done it
            _keep(cache / OUTER, cache / aside)
            sync_directory(cache / SETS)
            (cache / OUTER).unlink()
        if not (cache / OUTER).exists():
            name_whole_sets(cache)


def _with_restored(
    cache: Path, manifests: Manifests, of_names: str | None, outcome: Repair
) -> Repair:
    restored = [(each, aside) for each, (_, aside) in manifests.items() if aside is not None]
    rebuilt = [(each / NAME).relative_to(cache).as_posix() for each, _ in restored]
    kept = [(each / aside).relative_to(cache).as_posix() for each, aside in restored]
    left: list[str] = []
    if of_names is not None:
        rebuilt.insert(0, OUTER)
        kept = [*filter(None, [of_names]), *kept]
        left = [
            f"feature set {each.name!r} is not complete, so none of its features is shown before "
            "they are computed"
            for each, (manifest, _) in manifests.items()
            if each != cache and not (manifest.complete and manifest.rows)
        ]
    return replace(
        outcome,
        rebuilt=(*rebuilt, *outcome.rebuilt),
        set_aside=(*kept, *outcome.set_aside),
        left=(*left, *outcome.left),
    )


# Rows that are intact, as they are copied: with annotations and stamps from wherever these are
# whole, in the part's own index or in that of its generation.


class _Rows:
    """Intact rows of a part, as one index tells of them.

    Args:
        told: the index.
        rows: the rows.
        generation: the index of the generation; None where it cannot be read.
    """

    def __init__(self, told: Told, rows: Ints, generation: IndexColumns | None) -> None:
        self.told = told
        self.rows = rows
        self.index = taken_rows(told.index, rows)
        self._ids = [*self.index.ids]
        self._beside = [told.columns, *filter(None, [generation if told.is_own else None])]
        self._sources = {
            name: each
            for each in reversed(self._beside)
            for name in each.annotations
            if name in told.index.annotations
        }
        self.lost = told.index.annotations.keys() - self._sources.keys()
        if self.index.stamps is None:
            self.index = replace(self.index, stamps=self._stamps_beside())

    def _stamps_beside(self) -> StampColumns | None:
        for each in self._beside[1:]:
            rows = each.rows_of(self._ids)
            if each.stamps is not None and len(rows):
                there = rows >= 0
                return StampColumns(*(np.where(there, c[rows], 0) for c in each.stamps))
        return None

    def annotation(self, name: str) -> Column:
        """Return an annotation of the rows."""
        source = self._sources[name]
        rows = self.rows if source is self.told.columns else source.rows_of(self._ids)
        return source.annotation(self.told.cache, name).gather(rows)

    def annotated(self) -> AnnotatedRows:
        """Return the annotations of the rows."""
        kinds = {name: each.annotations[name] for name, each in self._sources.items()}
        none = np.empty(0, np.int64)
        return AnnotatedRows("", len(self.rows), kinds, self.annotation, lambda: none)

    def alone(self) -> Index:
        """Return the index with those of its containers that hold any of the rows."""
        index, columns = self.index, self.index.containers
        arrays = [each.container for each in index.features.values()]
        used = np.unique(np.concatenate([np.empty(0, np.int32), *arrays]))
        features = {
            name: replace(each, container=used.searchsorted(each.container).astype(np.int32))
            for name, each in index.features.items()
        }
        containers = ContainerColumns(
            paths=columns.paths.take(used.astype(np.int64)),
            sizes=columns.sizes[used],
            digests=columns.digests.reshape(-1, 16)[used].reshape(-1),
            parts=np.zeros(len(used), np.int32),
            mtimes=None if columns.mtimes is None else columns.mtimes[used],
        )
        return replace(index, features=features, containers=containers)


# The repair of a cache, or of a feature set, whose lock is held.


class _Work:
    """Repair of a cache, or of a feature set.

    Args:
        held: the cache.
        damage: of it.
        roots: places of adopted sources.

    Attributes:
        annotations: names of those of which values are lost.
    """

    def __init__(self, held: HeldCache, damage: CacheDamage, roots: Roots) -> None:
        self.held = held
        self.damage = damage
        self.annotations: set[str] = set()
        self._roots = roots
        self._made_of = secrets.token_hex(
            8
        )  # the next manifest accepts it, so what is copied counts
        self._copies: dict[str, list[SealedPart]] = {}  # by the name of the damaged part

    def prepared(self) -> Manifest:
        """Make the repaired generation durable, and return its manifest, which is not written.

        Until that is written, what is made here counts for nothing.
        """
        held, damage, current = self.held, self.damage, self.damage.current
        self._check_space()
        for path in damage.aside():
            _keep_aside(held.path / path)
        self._know_unsealed()
        before = self._readable(current)
        held.begin(replace(before, accepted=(*before.accepted, self._made_of)))
        for part in damage.counting:
            if not part.is_whole:
                header = self._header(part, before, before.build, replaces=(part.entry.name,))
                self._copies[part.entry.name] = self._copy(part, current, header)
        tagged = {
            name: self._tagged(name) for name, each in damage.tagged.items() if not each.is_whole
        }
        changes = Changes(
            emptied=[name for name, parts in self._copies.items() if not parts],
            files=current.files,
            retagged=[tag for tag, name in before.tags.items() if name == current.manifest.name],
            alone=bool(damage.manifests)
            or not current.has_index
            or any(p.sealed is None for p in damage.damaged.values()),
        )
        failed = self._failed(current, damage.counting)
        after = prepared(held, replace(UNCHANGED, failed=failed or ()), changes)
        lost = any(part.lost for part in damage.counting) or damage.unnamed
        complete = after.complete and not lost and failed is not None
        tags = {tag: tagged.get(name, name) for tag, name in after.tags.items()}
        return replace(after, complete=complete, tags=tags)

    def remove_unsealed(self) -> None:
        """Remove damaged parts without a seal, which no writer could list."""
        for name, part in self.damage.damaged.items():
            directory = self.held.path / PARTS / name
            if part.sealed is None and directory.exists():
                remove_part(directory)

    def _know_unsealed(self) -> None:
        """Make whoever lists the parts pass over the seals that cannot be read."""
        path = self.held.path
        for name in self.damage.strays:
            remove_part(path / PARTS / name)
        for generation in self.damage.generations:
            for part in generation.damaged:
                if part.sealed is None and (path / PARTS / part.entry.name / SEAL).exists():
                    manifest = generation.manifest
                    header = self._header(part, manifest, manifest.build)
                    made_of = digest_of_canonical(manifest.fingerprint)
                    self.held.take(SealedPart(part.entry, replace(header, fingerprint=made_of), ""))

    def _check_space(self) -> None:
        current = self.damage.current
        parts = [part for part in self.damage.damaged.values() if part.entry.adopted is None]
        sizes = (
            columns.sizes()[rows].sum()
            for part in parts
            for told, rows in part.saved
            for columns in told.index.features.values()
        )
        rows = sum(part.count for part in parts)
        needed = sum(map(int, sizes)) + margin(
            len(current.manifest.features), current.manifest.rows + 2 * rows
        )
        check_free(
            self.held.path,
            needed,
            f"to copy {counted(rows, 'utterance')} out of damaged parts, {needed:,} are needed: "
            "free some space and run the same again; nothing was changed",
        )

    def _readable(self, generation: GenerationDamage) -> Manifest:
        """Return the manifest of a generation without what cannot be read of its index."""
        manifest, columns = generation.manifest, generation.columns
        wrong = frozenset[str]() if columns is None else columns.wrong
        carried = {name for name, each in manifest.annotations.items() if each.carried}
        if not self._reads_failed(generation):
            self.annotations |= carried
            return replace(manifest, index="", index_digest="", annotations={})
        readable = {} if columns is None or wrong & IDS else columns.annotations
        lost = carried - readable.keys()
        self.annotations |= lost
        kept = {name: each for name, each in manifest.annotations.items() if name not in lost}
        return replace(manifest, annotations=kept)

    def _failed(
        self, generation: GenerationDamage, parts: Sequence[PartDamage]
    ) -> Sequence[str] | None:
        """Return ids that failed and that the index cannot tell; None where nothing else can.

        Where an id is expected that is not stored, it is in the index of another generation: the
        digest of all that are expected proves it.
        """
        manifest, expected = generation.manifest, generation.manifest.expected
        if self._reads_failed(generation) or not expected or expected.count == manifest.rows:
            return ()
        stored = {id for part in parts for id in part.ids}
        for name in reversed(stored_indexes(self.held.path)):
            failed: list[str] = []
            with unless_damaged(), ColumnFile(self.held.path, index_file(name)) as file:
                failed = [*file.strings("failed")]
            ids = sorted(stored.union(failed), key=str.encode)
            if expected == Expected(len(ids), expected_digest(ids)):
                return failed
        return None

    def _reads_failed(self, generation: GenerationDamage) -> bool:
        """Whether the ids that failed can be read."""
        columns = generation.columns
        if columns is None:
            return not generation.manifest.index
        return not columns.wrong & {"failed_ends", "failed_bytes"}

    def _header(
        self, part: PartDamage, manifest: Manifest, build: int, replaces: tuple[str, ...] = ()
    ) -> Header:
        dims, block_rows = dict(manifest.dims), dict(part.entry.block_rows)
        return Header(build, self._made_of, dims, block_rows, replaces)

    def _copy(
        self,
        part: PartDamage,
        generation: GenerationDamage,
        header: Header,
        left_out: Collection[str] = (),
    ) -> list[SealedPart]:
        """Copy what is intact of a part, but for some ids, into a new one."""
        manifest, cache = generation.manifest, self.held.path
        found = [
            _Rows(told, some, generation.columns)
            for told, rows in part.saved
            if len(some := _others(told, rows, left_out))
        ]
        self.annotations |= {name for each in found for name in each.lost}
        if not found:
            return []
        if part.entry.adopted is not None:
            return [self._seal_adopted(part, manifest, header, each) for each in found]
        features = manifest.declared
        sources = [
            CopySource(
                StoredArrays(cache, each.told.directory, each.index, features),
                each.annotated(),
                np.arange(len(each.rows)),
            )
            for each in found
        ]
        stats = None
        if not (part.lost or part.files or left_out) and part.sealed is not None:
            stats = merged_stats(cache, [part.sealed], manifest)
        columns = [each for rows in found for each in rows.index.features.values()]
        total = sum(int(each.nbytes.sum()) for each in columns)
        with bar(f"copy {part.entry.name}", total) as shown:

            def tell(utterances: int, nbytes: int) -> None:
                shown.update(nbytes)

            sealed, _ = copy_rows(cache, features, header, sources, stats, tell=tell)
        self.held.take(sealed)
        return [sealed]

    def _seal_adopted(
        self, part: PartDamage, manifest: Manifest, header: Header, rows: _Rows
    ) -> SealedPart:
        """Write the columns of an adopted part anew; its source stays as it is."""
        index, adopted, pages = rows.alone(), part.entry.adopted, None
        if adopted is None:
            raise CorruptCacheError(f"part {part.entry.name!r} is not adopted")
        if adopted.collected:
            source = SealedPart(part.entry, header, "")
            opened = OpenedPart.of(self.held.path, source, manifest.features, index, self._roots)
            pages = [*_pages_now(opened)]
            sizes = index.containers.sizes.tolist()
            digests = b"".join(map(container_digest, pages, sizes))
            containers = replace(index.containers, digests=np.frombuffer(digests, np.uint8))
            stats = {
                name: stats_of(opened.arrays[name], range(len(index)), header.dims[name])
                for name, feature in manifest.features.items()
                if feature["stats"]
            }
            index = replace(index, containers=containers, stats=stats)
        annotations = {name: rows.annotation(name) for name in rows.annotated().kinds}
        sealed = seal_adopted(self.held.path, header, adopted, index, annotations, pages=pages)
        self.held.take(sealed)
        return sealed

    def _tagged(self, name: str) -> str:
        """Make an earlier generation anew, and return the name of the new one.

        It shares the parts of the current one. What that lacks, deleted since, say, lies in parts
        of build 0, which are of no build, and stay for as long as a tag names them.
        """
        generation, cache = self.damage.tagged[name], self.held.path
        parts: list[SealedPart] = []
        for part in generation.parts:
            if part.sealed is not None and part.is_whole:
                parts.append(part.sealed)
                continue
            shared = self._copies.get(part.entry.name, [])
            parts += shared
            known = {id for each in shared for id in each.ids(cache)}
            header = self._header(part, generation.manifest, 0)
            parts += self._copy(part, generation, header, known)
        before = self._readable(generation)
        parts.sort(key=lambda part: part.entry.name)
        failed = self._failed(generation, generation.parts)
        outcome = replace(UNCHANGED, failed=failed or ())
        after = generation_of(cache, parts, before, before, outcome)
        lost = any(part.lost for part in generation.parts) or failed is None
        files = {path: each for path, each in after.files.items() if path not in generation.files}
        after = replace(after, previous=None, complete=after.complete and not lost, files=files)
        after = with_sizes(cache, after)
        return write_manifest(cache, after, file=manifest_file(after.name)).name


def _others(told: Told, rows: Ints, left_out: Collection[str]) -> Ints:
    """Return some rows without those of some ids."""
    if not left_out:
        return rows
    stay: Ints = rows[np.array([id not in left_out for id in told.index.ids.take(rows)], bool)]
    return stay


def _pages_now(opened: OpenedPart) -> Iterator[Pages]:
    """Yield the checksums of the pages of the containers of an adopted part, as they are now."""
    if opened.adopted is None:
        return
    for number in range(len(opened.index.containers)):
        with os.fdopen(opened.adopted.open(number)[0], "rb") as file:
            yield pages_of(file.fileno())


# Files that are set aside: a second name for each, so that nothing is copied nor lost.


def _keep_aside(path: Path) -> None:
    """Give a file, or each one below a directory, another name, which outlives the first.

    Where a file cannot have two names, it is copied. Harmless the second time.
    """
    aside = path.with_name(path.name + DAMAGED)
    if path.is_dir():
        aside.mkdir(exist_ok=True)
        for entry in sorted(path.iterdir()):
            _keep(entry, aside / entry.name)
        sync_directory(aside)
    else:
        _keep(path, aside)
    sync_directory(aside.parent)


def _keep(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        target.mkdir(exist_ok=True)
        for entry in sorted(source.iterdir()):
            _keep(entry, target / entry.name)
        sync_directory(target)
    elif not target.exists():
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            unfinished = target.with_name(f"{target.name}.tmp")
            shutil.copyfile(source, unfinished, follow_symlinks=False)
            with unfinished.open("rb") as file:
                sync_file(file)
            unfinished.replace(target)

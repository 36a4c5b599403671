"""Verification of a whole cache: all files are compared, then all damage is told at once."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import numpy as np
import xxhash

from featcache._closing import pool_of
from featcache.container_files import PAGE_BYTES, Pages
from featcache.declaration import FEW_FRAMES, FrameTimes
from featcache.errors import (
    CacheError,
    CorruptCacheError,
    NotACacheError,
    RemoteError,
    StorageFullError,
    counted,
)
from featcache.format import (
    COLUMNS,
    PARTS,
    SEAL,
    ColumnFile,
    ContainerColumns,
    FeatureColumns,
    Index,
    Manifest,
    PartEntry,
    container_digest,
    kept_manifests,
    manifest_file,
    open_there,
    open_within,
    pages_of,
    read_index,
    read_manifest,
    read_part,
    size_of,
)
from featcache.interface import Ints
from featcache.reading.containers import Containers
from featcache.reading.roots import NO_ROOTS, AdoptedFiles, Roots
from featcache.reading.shell import RemoteCache
from featcache.remote import Locks

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

# Errors of reading that are damage, and not a lack of rights, of open files or of memory.

_DAMAGE = (errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.EBADMSG, errno.EOVERFLOW)


@contextlib.contextmanager
def unless_damaged() -> Iterator[None]:
    """End a block at an error of reading that is damage; others are raised.

    So are those of a format that this featcache does not know.
    """
    try:
        yield
    except (CorruptCacheError, NotACacheError):
        pass
    except OSError as error:
        cause = error.__cause__ if isinstance(error, CacheError) else error
        if not (isinstance(cause, OSError) and cause.errno in _DAMAGE):
            raise


# Damage of containers, page by page, and of the arrays on damaged pages.

WRONG_PAGES = "the checksums of its pages are not those that were written"


class ContainerPages:
    """The checksums of the pages of a generation's containers, read with a part's first use.

    Safe to share between threads.
    """

    def __init__(
        self,
        cache: Path,
        manifest: Manifest,
        columns: ContainerColumns,
        adopted: AdoptedFiles | None,
        remote: RemoteCache | None = None,
    ) -> None:
        self.columns = columns
        self._remote = remote
        self._manifest = manifest
        self._reading: dict[int, Locks] = {}
        self._adopted = adopted
        self._cache = cache
        self._by_part: dict[int, list[Pages]] = {}
        # the first container of each part: those of a part follow each other
        self._first = np.searchsorted(columns.parts, np.arange(len(manifest.parts)))

    def file(self, container: int) -> str:
        """Return the path of a container."""
        if self._adopted is not None and container in self._adopted:
            return self._adopted.path(container)
        return str(self._cache / self.columns.path(container))

    def open(self, container: int) -> int:
        """Open a container for reading, and return its descriptor."""
        if self._adopted is not None and container in self._adopted:
            return self._adopted.open(container)[0]
        return open_within(self._cache, self.columns.path(container))

    def of(self, container: int) -> Pages:
        """Return the checksums of a container's pages.

        Raises `CorruptCacheError` if they are lost, or are not those that were written.
        """
        number = int(self.columns.parts[container])
        if number not in self._by_part:
            with self._reading.setdefault(number, Locks()).mine():
                if number not in self._by_part:
                    self._by_part[number] = self._of_part(number, container)
        known, place = self._by_part[number], container - int(self._first[number])
        pages = known[place] if 0 <= place < len(known) else np.empty(0, np.uint64)
        size = int(self.columns.sizes[container])
        if container_digest(pages, size) != self.columns.digest(container):
            raise CorruptCacheError(f"container {self.file(container)!r}: {WRONG_PAGES}")
        return pages

    def _of_part(self, number: int, container: int) -> list[Pages]:
        part = None
        if 0 <= number < len(self._manifest.parts):
            name = self._manifest.parts[number].name
            if self._remote is not None:
                files = [f"{PARTS}/{name}/{file}" for file in (SEAL, COLUMNS)]
                self._remote.fetch(self._cache, self._manifest, files)
            part = read_part(self._cache, name)
        if part is None:
            raise CorruptCacheError(
                f"the part of {self.file(container)!r} is missing; put it back, or open the "
                "cache again if it was overwritten meanwhile"
            )
        return part.pages(self._cache)


class DamagedArray(NamedTuple):
    """An array that has not its checksum, and the damaged pages that it lies on."""

    id: str
    feature: str
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageDamage:
    """Pages of a container that are not what was written; as text, a sentence.

    Attributes:
        container: its path.
        pages: their numbers; None where the checksums of the pages are damaged, too.
        arrays: those on them that do not have their checksum.
    """

    container: str
    pages: tuple[int, ...] | None
    arrays: tuple[DamagedArray, ...]

    def __str__(self) -> str:
        where = "" if self.pages is None else f" on {counted(len(self.pages), 'page')}"
        text = f"container {self.container!r} is damaged{where}"
        if not self.arrays:
            return f"{text}, but in none of its arrays"
        ids = list(dict.fromkeys(array.id for array in self.arrays))
        told = ", ".join(map(repr, ids[:5])) + ", ..." * (len(ids) > 5)
        return f"{text}: utterances that are not what was written: {len(ids)}, {told}"


Damage = str | PageDamage


Tell = Callable[[int], object]
Item = TypeVar("Item")
_PAGES_AT_ONCE = 256
_THREADS = 2  # while one reads, the other hashes
_REMOTE_THREADS = 4  # each with 16 MiB
_ASKED_AT_ONCE = 16  # containers, whether they are there
NO_DAMAGE = (RemoteError, StorageFullError)  # bytes did not come, or have no room here


def nobody(nbytes: int) -> None:
    """Ignore how many bytes were read."""


def page_damage(
    index: Index,
    container: int,
    known: ContainerPages,
    containers: Containers,
    tell: Tell = nobody,
) -> Iterator[Damage]:
    """Read a container and compare its pages, naming the utterances on those that differ.

    Where the checksums of the pages are themselves damaged, those of the arrays must do. `tell` is
    called with the bytes that were read, again and again.
    """
    pages: Pages | None = None
    try:
        pages = known.of(container)
    except NO_DAMAGE:
        raise
    except CacheError:
        yield f"container {known.file(container)!r}: {WRONG_PAGES}"
    try:
        with _opened(index.containers, container, known, containers) as file:
            if file.size != index.containers.sizes[container]:
                return
            wrong = None if pages is None else _wrong_pages(file, pages, tell)
        if wrong is not None and not len(wrong):
            return
        arrays = tuple(_damaged_arrays(containers, index, container, wrong))
    except NO_DAMAGE:
        raise
    except (CacheError, FileNotFoundError) as error:
        if containers.remote_of(container) is not None:  # it was replaced a moment ago
            yield str(error)
        return  # told by `container_damage`
    if arrays or wrong is not None:
        containers.forget([(container, 0, int(index.containers.sizes[container]))])
        numbers = None if wrong is None else tuple(wrong.tolist())
        yield PageDamage(known.file(container), numbers, arrays)


class _Opened(NamedTuple):
    """A container whose pages can be hashed, so many from one on; fewer where it ends."""

    hashes: Callable[[int, int], Pages]
    size: int
    threads: int


@contextlib.contextmanager
def _opened(
    columns: ContainerColumns, container: int, known: ContainerPages, containers: Containers
) -> Iterator[_Opened]:
    if containers.remote_of(container) is None:
        with os.fdopen(known.open(container), "rb") as file:
            yield _opened_file(file.fileno())
        return
    size = int(columns.sizes[container])
    yield _Opened(partial(pages_in_store, containers, container, size), size, _REMOTE_THREADS)


def pages_in_store(
    containers: Containers, container: int, size: int, first: int, count: int
) -> Pages:
    """Return the checksums of pages of a container that lies in an object store."""
    begin = first * PAGE_BYTES
    data = containers.view(container, begin, min(count * PAGE_BYTES, size - begin)).data
    starts = range(0, len(data), PAGE_BYTES)
    found = [xxhash.xxh3_64_intdigest(data[at : at + PAGE_BYTES]) for at in starts]
    return np.array(found, np.uint64)


def _opened_file(descriptor: int) -> _Opened:
    size = os.fstat(descriptor).st_size
    return _Opened(partial(pages_of, descriptor), size, _THREADS)


def wrong_pages(descriptor: int, pages: Pages, tell: Tell = nobody) -> Ints:
    """Return the numbers of the pages of an open file that are not what was written.

    Those that it lacks, and those that the disk cannot read, are among them.
    """
    return _wrong_pages(_opened_file(descriptor), pages, tell)


def _wrong_pages(file: _Opened, pages: Pages, tell: Tell) -> Ints:
    wrong: list[int] = []

    def compare(first: int) -> list[int]:
        return _wrong_from(file, first, pages[first : first + _PAGES_AT_ONCE])

    starts = range(0, len(pages), _PAGES_AT_ONCE)
    # one stretch is read while a thread begins; none reads the file any more when it is closed
    with pool_of(file.threads) if len(starts) > 1 else nullcontext() as pool:
        for first, found in zip(starts, _ahead(compare, starts, pool, file.threads), strict=True):
            wrong += found
            tell(max(min(_PAGES_AT_ONCE * PAGE_BYTES, file.size - first * PAGE_BYTES), 0))
    return np.array(wrong, np.int64)


def _ahead(
    work: Callable[[int], Item],
    numbers: Sequence[int],
    pool: ThreadPoolExecutor | None,
    threads: int,
) -> Iterator[Item]:
    """Yield what some work returns for each number, in order, done by a few threads if any."""
    if pool is None:
        yield from map(work, numbers)
        return
    coming: deque[Future[Item]] = deque()
    for number in numbers:
        coming.append(pool.submit(work, number))
        if len(coming) > threads:
            yield coming.popleft().result()
    while coming:
        yield coming.popleft().result()


def _wrong_from(file: _Opened, first: int, expected: Pages) -> list[int]:
    """Return the numbers of those of some pages, from one on, that are not what was written."""
    with _unless_unreadable():
        found = file.hashes(first, len(expected))
        differ = np.ones(len(expected), bool)
        differ[: len(found)] = found != expected[: len(found)]
        numbers: list[int] = (first + np.flatnonzero(differ)).tolist()
        return numbers
    of_pages = enumerate(expected.tolist(), first)  # one cannot be read: each by itself
    return [number for number, page in of_pages if not _is_page(file, number, page)]


def _is_page(file: _Opened, number: int, expected: int) -> bool:
    with _unless_unreadable():
        return bool(file.hashes(number, 1).tolist() == [expected])
    return False


@contextlib.contextmanager
def _unless_unreadable() -> Iterator[None]:
    """End a block at bytes that a disk cannot read; a store gives an object, or says why not."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CacheError) or error.errno not in _DAMAGE:
            raise


def _damaged_arrays(
    containers: Containers, index: Index, container: int, pages: Ints | None
) -> Iterator[DamagedArray]:
    """Yield the arrays in a container, on some pages of it, that do not have their checksum."""
    found: list[tuple[int, str, tuple[int, ...]]] = []
    for name, columns in index.features.items():
        for row in rows_on_pages(columns, container, pages).tolist():
            if not has_checksum(containers, columns, row):
                mine = np.intersect1d(
                    [] if pages is None else pages, pages_under(columns, row, container)
                )
                found.append((row, name, tuple(map(int, mine.tolist()))))
    return (DamagedArray(index.id(row), name, numbers) for row, name, numbers in sorted(found))


def rows_on_pages(columns: FeatureColumns, container: int, pages: Ints | None) -> Ints:
    """Return the rows of a feature with bytes on some pages of a container, ascending; None: any.

    Raises `IndexError` where the columns do not fit each other.
    """
    extents = np.flatnonzero(columns.container == container)
    if pages is not None:
        first = columns.offset[extents] // PAGE_BYTES
        last = (columns.offset[extents] + columns.nbytes[extents] - 1) // PAGE_BYTES
        extents = extents[pages.searchsorted(first) < pages.searchsorted(last, side="right")]
    return np.unique(columns.first.searchsorted(extents, side="right") - 1)


def pages_under(columns: FeatureColumns, row: int, container: int) -> Ints:
    """Return the pages of a container on which an array lies, ascending."""
    found = [np.empty(0, np.int64)]
    for at in range(int(columns.first[row]), int(columns.first[row + 1])):
        if columns.container[at] == container and columns.nbytes[at] > 0:
            offset, nbytes = int(columns.offset[at]), int(columns.nbytes[at])
            found.append(np.arange(offset // PAGE_BYTES, (offset + nbytes - 1) // PAGE_BYTES + 1))
    return np.unique(np.concatenate(found))


def has_checksum(containers: Containers, columns: FeatureColumns, row: int) -> bool:
    """Whether the bytes of an array have its checksum; not, if they cannot be read."""
    first, last = int(columns.first[row]), int(columns.first[row + 1])
    if not 0 <= first <= last <= len(columns.offset):
        return False
    state = xxhash.xxh3_64()
    with unless_damaged():
        for at in range(first, last):
            place = int(columns.container[at]), int(columns.offset[at]), int(columns.nbytes[at])
            state.update(containers.view(*place).data)
        return state.intdigest() == int(columns.checksum[row])
    return False


# Utterances whose features do not end together, by their lengths and `frame_s`.
#
# Nothing of them is damaged: a frame of padding more or less is usual, and a wrong `frame_s` is a
# matter of the declaration. So they are told of in the log.

_log = logging.getLogger("featcache")
_MOST_TOLD = 20


def tell_unequal_ends(cache: Path, manifest: Manifest, index: Index) -> None:
    """Warn of utterances whose features end more than two of the longest frames apart."""
    declared = {name: FrameTimes.declared(feature) for name, feature in manifest.features.items()}
    timed = {name: times for name, times in declared.items() if times is not None}
    if len(timed) < 2 or not len(index):
        return
    ends = {name: times.ends_s(index.features[name].rows) for name, times in timed.items()}
    apart = np.max([*ends.values()], axis=0) - np.min([*ends.values()], axis=0)
    allowed = FEW_FRAMES * max(times.frame_s for times in timed.values())
    rows = np.flatnonzero(apart > allowed * (1 + 1e-6)).tolist()
    if rows:
        told = [
            f"{index.id(row)!r} ({', '.join(f'{name} {ends[name][row]:.6g} s' for name in timed)})"
            for row in rows[:_MOST_TOLD]
        ]
        _log.warning(
            "cache %r: features of %d of %d utterances end more than %d frames (%.6g s) apart: "
            "%s%s; see whether frame_s and offset_s are right, and whether all were computed from "
            "the same audio",
            str(cache), len(rows), len(index), FEW_FRAMES, allowed, ", ".join(told),
            ", ..." * (len(rows) > _MOST_TOLD),
        )  # fmt: skip


# Verification of a whole cache: all files are compared, then all damage is told at once.

P = ParamSpec("P")
MOST_TOLD = 20
WHAT_TO_DO = (
    "put each of these files back, as it was written; or save all that is intact, and see what is "
    "lost, with featcache.store.repair(path) (first with dry_run=True)"
)
IN_A_STORE = "delete these objects, and push the cache again from where it was made"


def remedy_of(remote: RemoteCache | None) -> str:
    """Return what to do about damage of a cache on a disk, or of one in an object store."""
    return WHAT_TO_DO if remote is None else IN_A_STORE


def raise_damage(found: Iterable[Damage], what: str = "") -> None:
    """Raise `CorruptCacheError` with all sentences about damage, if there are any."""
    sentences = list(dict.fromkeys(map(str, found)))  # generations share parts, and their damage
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
    columns: ContainerColumns,
    numbers: Sequence[int] | None = None,
    adopted: AdoptedFiles | None = None,
    remote: RemoteCache | None = None,
) -> Iterator[str]:
    """Return what is wrong with containers, all or some.

    One is not there, or not in the size that was written; an adopted one may also have changed.
    """
    containers = _unmapped(cache, columns, adopted, remote)

    def damage(number: int) -> str | None:
        try:
            containers.check_file(number)
        except CorruptCacheError as error:
            return str(error)
        return None

    some = range(len(columns)) if numbers is None else numbers
    with pool_of(_ASKED_AT_ONCE) if containers.is_remote else nullcontext() as pool:
        yield from filter(None, _ahead(damage, some, pool, _ASKED_AT_ONCE))


def _unmapped(
    cache: Path,
    columns: ContainerColumns,
    adopted: AdoptedFiles | None,
    remote: RemoteCache | None,
) -> Containers:
    files = None if remote is None else remote.files(cache, columns)
    return Containers(cache, columns, mapped=False, adopted=adopted, remote=files)


def _told(check: Callable[P, Iterable[Damage]]) -> Callable[P, Iterator[Damage]]:
    """Decorate a check that says what is damaged: an error that ends it is its last sentence."""

    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Iterator[Damage]:
        try:
            yield from check(*args, **kwargs)
        except FileNotFoundError as error:
            yield f"{str(error.filename)!r} is missing"
        except NO_DAMAGE:
            raise
        except CacheError as error:
            yield str(error)

    return checked


def all_damage(
    cache: Path,
    manifest: Manifest,
    index: Index,
    *,
    arrays: bool,
    roots: Roots = NO_ROOTS,
    tell: Tell = nobody,
    remote: RemoteCache | None = None,
) -> Iterator[Damage]:
    """Compare all files of a cache with what their parents say of them.

    Args:
        cache: the cache directory.
        manifest: that of the current generation.
        index: that of the current generation.
        arrays: read the containers, too, not only their sizes.
        roots: places of adopted sources that count in place of those that the cache knows.
        tell: is called with the bytes of containers that were read, again and again.
        remote: where the containers are, of a cache of which only the shell lies here.
    """
    kept = list(kept_manifests(cache))
    for name in filter(None, {manifest.name, manifest.previous, *manifest.tags.values()}):
        if name not in kept:
            yield f"{str(cache / manifest_file(name))!r} is missing"
    if manifest.index:
        yield from _column_damage(cache, manifest, manifest.index, manifest.index_digest)
    yield from _generation_damage(cache, manifest, index, arrays, roots, tell, remote)
    yield from _building_damage(cache, manifest)
    for name in kept:
        yield from _kept_damage(cache, name, manifest, arrays, roots, tell)


@_told
def _kept_damage(
    cache: Path, name: str, current: Manifest, arrays: bool, roots: Roots, tell: Tell
) -> Iterator[Damage]:
    """Compare what must be whole of a generation whose manifest is kept."""
    manifest = read_manifest(cache, manifest_file(name))
    if manifest.name != name:
        path = str(cache / manifest_file(name))
        yield f"{path!r} is damaged: it is the manifest of {manifest.name!r}"
        return
    tagged = name in current.tags.values() and name != current.name
    if tagged or name == current.previous:
        yield from _column_damage(cache, manifest, manifest.index, manifest.index_digest)
    if tagged:
        with ColumnFile(cache, manifest.index, expected=manifest.index_digest) as file:
            index = read_index(file, list(manifest.features))
        yield from _generation_damage(cache, manifest, index, arrays, roots, tell)


@_told
def _building_damage(cache: Path, manifest: Manifest) -> Iterator[Damage]:
    """Compare what belongs to a build that is being written, unless its writer is at work on it."""
    files = (_file_damage(cache, manifest, *each) for each in manifest.building_files.items())
    parts = (_part_damage(cache, manifest, entry) for entry in manifest.building_parts)
    found = list(itertools.chain(*files, *parts))
    if found and read_manifest(cache).write_id == manifest.write_id:
        yield from found


def _generation_damage(
    cache: Path,
    manifest: Manifest,
    index: Index,
    arrays: bool,
    roots: Roots,
    tell: Tell,
    remote: RemoteCache | None = None,
) -> Iterator[Damage]:
    adopted = AdoptedFiles.of(cache, manifest.parts, index.containers, roots)
    for path, expected in manifest.files.items():
        yield from _file_damage(cache, manifest, path, expected)
    for entry in manifest.parts:
        yield from _part_damage(cache, manifest, entry)
    yield from container_damage(cache, index.containers, adopted=adopted, remote=remote)
    if arrays:
        known = ContainerPages(cache, manifest, index.containers, adopted)
        containers = _unmapped(cache, index.containers, adopted, remote)
        collected = np.array([part.is_collected for part in manifest.parts], bool)
        for container in np.flatnonzero(collected[index.containers.parts]).tolist():
            yield from page_damage(index, container, known, containers, tell)


@_told
def _column_damage(cache: Path, manifest: Manifest, path: str, expected: str) -> Iterator[str]:
    size = manifest.sizes.get(path)
    with ColumnFile(cache, path, mapped=False, expected=expected, size=size) as file:
        yield from file.damage()


@_told
def _file_damage(cache: Path, manifest: Manifest, path: str, expected: str) -> Iterator[str]:
    state = xxhash.xxh3_64()
    with open(open_there(cache, path), "rb") as file:  # noqa: PTH123 (a descriptor)
        while piece := file.read(1 << 20):
            state.update(piece)
    if state.hexdigest() != expected:
        yield f"{str(cache / path)!r} is damaged: its checksum does not match"
    elif (told := manifest.sizes.get(path)) not in (None, found := size_of(cache, path)):
        yield f"{str(cache / path)!r} is damaged: it has {found}; {told} were written"


@_told
def _part_damage(cache: Path, manifest: Manifest, entry: PartEntry) -> Iterator[Damage]:
    directory = f"{PARTS}/{entry.name}"
    part = read_part(cache, entry.name)
    if part is None:
        yield f"{str(cache / directory / SEAL)!r} is missing"
        return
    yield from _file_damage(cache, manifest, f"{directory}/{SEAL}", entry.digest)
    yield from _column_damage(cache, manifest, f"{directory}/{COLUMNS}", part.columns)
    for beside in (entry.tombstones, entry.stamps):
        if beside is not None:
            file = f"{directory}/{beside.file}"
            yield from _column_damage(cache, manifest, file, beside.digest)

"""An open part: the files and the journal of one writer, until they are sealed."""

from __future__ import annotations

import array
import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from featcache.container_files import (
    PAGE_BYTES,
    EncodedArrays,
    Extents,
    Pages,
    append_many,
    lock,
    sync_directory,
    sync_together,
    write_durably,
)
from featcache.container_files.lock import WriterLock
from featcache.declaration import FeatureStorageConfig
from featcache.errors import CacheError, CacheLockedError, CorruptCacheError
from featcache.format import journal
from featcache.format.annotations import NONE, Values
from featcache.format.columns import ends_of, save_columns
from featcache.format.files import (
    from_storage,
    make_directory,
    open_within,
    pack_json,
    remove_unfinished,
)
from featcache.format.index import (
    UNKNOWN,
    ContainerColumns,
    FeatureColumns,
    Index,
    StampColumns,
    Stamps,
    container_digest,
    page_count,
    pages_of,
)
from featcache.format.journal import Header, JournalWriter, PlacedArrays, Utterance
from featcache.format.manifest import PARTS
from featcache.format.part import (
    COLUMNS,
    SEAL,
    Columns,
    SealedPart,
    checksums,
    columns_of_annotations,
    container_columns,
    index_columns,
    new_part_name,
    part_of,
    remove_part,
    rows_of,
)
from featcache.interface import (
    ChecksArrays,
    ContainerWriter,
    EncodedArray,
    Extent,
    FeatureSpec,
    Ints,
    SupportsPages,
    WritesOut,
)
from featcache.reading.feature_arrays import joined
from featcache.stats import FeatureStats
from featcache.writing.arrays import CheckedUtterances, encoded, pieces_of
from featcache.writing.background import close_before_libraries_end

# Groups of features that share the containers of a part.


def container_groups(features: Mapping[str, FeatureStorageConfig]) -> list[tuple[str, list[str]]]:
    """Return which features share containers: (directory within the part, with a slash, names).

    Features with the same backend and the same options of it share. Where one backend has several
    groups, each has a directory of its own, named after its first feature; else that is "".
    """
    groups: dict[tuple[str, object], list[str]] = {}
    for name, feature in features.items():
        groups.setdefault((feature.backend, feature.make_backend()), []).append(name)
    backends = [backend for backend, _ in groups]
    return [
        ("" if backends.count(backend) == 1 else f"{names[0]}/", names)
        for (backend, _), names in groups.items()
    ]


Annotations = Callable[[Ints], Columns]

# `PartRows`: utterances that an open part has taken, as columns: objects of millions cost memory.
#
# Not how they are put in order and stored: that is `seal`'s.


class PartRows:
    """Utterances of a part, in the order of writing.

    Args:
        names: of the features.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.ids: list[str] = []
        self._stamps: list[Stamps] = []
        self._annotations: list[Values] = []
        self._arrays = {name: _Arrays() for name in names}

    @classmethod
    def of(cls, utterances: Sequence[Utterance], names: Sequence[str]) -> PartRows:
        """Return those that a journal names."""
        rows, placed = cls(names), {}
        for name in names:
            arrays = [utterance.arrays[name] for utterance in utterances]
            extents = Extents.of([array.extents for array in arrays])
            checksums = [array.checksum for array in arrays]
            placed[name] = PlacedArrays([array.rows for array in arrays], checksums, extents)
        ids, _, stamps, annotations = zip(*utterances, strict=True)
        rows.add(ids, placed, stamps, annotations)
        return rows

    def __len__(self) -> int:
        return len(self.ids)

    def add(
        self,
        ids: Sequence[str],
        placed: Mapping[str, PlacedArrays],
        stamps: Sequence[Stamps],
        annotations: Sequence[Values],
    ) -> None:
        """Take utterances that were stored."""
        self.ids += ids
        self._stamps += stamps
        self._annotations += annotations
        for name, arrays in placed.items():
            self._arrays[name].add(arrays)

    def paths(self) -> set[str]:
        """Return the containers that their arrays lie in."""
        return {path for arrays in self._arrays.values() for path in arrays.numbers}

    def index(self, containers: ContainerColumns, stats: Mapping[str, FeatureStats]) -> Index:
        """Return their index."""
        numbers = {path: number for number, path in enumerate(containers.paths)}
        features = {name: each.columns(numbers) for name, each in self._arrays.items()}
        return Index.of(self.ids, features, containers, stats, StampColumns.of(self._stamps))

    def annotations(self, order: Ints) -> Columns:
        """Return their annotations as columns, in the order of the rows that they become."""
        return columns_of_annotations(self.ids, self._annotations, order)


class _Arrays:
    """Columns of a feature."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}  # of containers, by path
        self._rows, self._checksums = array.array("q"), array.array("Q")
        self._counts, self._containers = array.array("q"), array.array("i")
        self._offsets, self._sizes = array.array("q"), array.array("q")

    def add(self, arrays: PlacedArrays) -> None:
        self._rows.extend(arrays.rows)
        self._checksums.extend(arrays.checksums)
        extents = arrays.extents
        numbers = [self.numbers.setdefault(p, len(self.numbers)) for p in extents.containers]
        containers = np.array(numbers, np.int32)[extents.container]
        self._counts.frombytes(_int64(extents.counts))
        self._containers.frombytes(containers.tobytes())
        self._offsets.frombytes(_int64(extents.offset))
        self._sizes.frombytes(_int64(extents.nbytes))

    def columns(self, numbers: Mapping[str, int]) -> FeatureColumns:
        """Return the columns of an index that numbers containers in another way."""
        renumbered = np.array([numbers[path] for path in self.numbers], np.int32)
        return FeatureColumns(
            rows=np.array(self._rows, np.int64),
            checksum=np.array(self._checksums, np.uint64),
            first=ends_of(np.array(self._counts, np.int64)),
            container=renumbered[np.array(self._containers, np.int32)],
            offset=np.array(self._offsets, np.int64),
            nbytes=np.array(self._sizes, np.int64),
        )


def _int64(values: Ints) -> bytes:
    return values.astype(np.int64, copy=False).tobytes()


# Sealing a part: its finished files get an index, and `part.json` names that.


_NO_CONTAINERS = (journal.JOURNAL, lock.NAME, lock.SOFT_NAME, lock.HOLDER, COLUMNS, SEAL)


def seal_directory(
    cache: Path,
    name: str,
    header: Header,
    rows: PartRows,
    stats: Mapping[str, FeatureStats],
    pages: Mapping[str, Pages],
    annotations: Annotations | None = None,
) -> SealedPart:
    """Seal a part whose containers are finished, as holder of its lock.

    Writes the columns, names them in `part.json`, and removes the journal. `pages` are those that
    are known; those of other files are read. `annotations` take the place of what `rows` have.
    """
    directory = cache / PARTS / name
    if not (directory / journal.JOURNAL).exists():
        raise CacheError(
            f"part {str(directory)!r} was taken over by another writer while this one was at work; "
            "see that one writer at a time works, and run the same again"
        )
    (directory / COLUMNS).unlink(missing_ok=True)  # of one who died here before
    remove_unfinished(directory)
    columns = _columns(directory, rows, stats, pages, annotations or rows.annotations)
    sealed = write_seal(cache, name, header, len(rows), columns)
    (directory / journal.JOURNAL).unlink(missing_ok=True)
    return sealed


def write_seal(
    cache: Path, name: str, header: Header, rows: int, columns: Columns, **content: object
) -> SealedPart:
    """Write the columns of a part, and name them in `part.json`: from then on the part counts."""
    directory = cache / PARTS / name
    content |= {"name": name, "rows": rows, "page_bytes": PAGE_BYTES, "header": header}
    content["block_rows"] = dict(header.block_rows)
    content["columns"] = save_columns(directory / COLUMNS, columns, durably=False)
    data = pack_json(content)
    # with the name of the part, which is new where nothing of it was committed
    write_durably(directory / SEAL, data, after=(directory / COLUMNS, directory.parent))
    return part_of(cache, name, data)


def page_columns(pages: Collection[Pages]) -> Columns:
    """Yield the checksums of the pages of each container as columns."""
    yield "page_ends", ends_of([len(each) for each in pages])
    yield "pages", np.concatenate([np.empty(0, np.uint64), *pages])


def _columns(
    directory: Path,
    rows: PartRows,
    stats: Mapping[str, FeatureStats],
    known_pages: Mapping[str, Pages],
    annotations: Annotations,
) -> Columns:
    pages = dict(_all_pages(directory, known_pages))
    sizes = {path: (directory / path).stat().st_size for path in pages}
    for path in sorted(rows.paths() - pages.keys()):
        raise CorruptCacheError(
            f"container {str(directory / path)!r} is not there: another writer took the part over, "
            "which can be where locks do not count (see docs/format.md); run the same again"
        )
    for path, size in sizes.items():
        if page_count(size) != len(pages[path]):
            raise CorruptCacheError(
                f"container {str(directory / path)!r} has {size} bytes, not what was written"
            )
    digests = b"".join(container_digest(pages[path], sizes[path]) for path in pages)
    containers = ContainerColumns.of([*pages], [*sizes.values()], digests)
    index = rows.index(containers, stats)
    in_order = rows_of([index], [])
    yield from index_columns([index], in_order, [*index.features], stats)
    yield from container_columns([""], [containers]).items()
    yield from page_columns(pages.values())
    yield from annotations(in_order.order)


def extents_of(utterances: Iterable[Utterance]) -> Iterator[Extent]:
    """Yield the extents of all arrays of utterances."""
    for utterance in utterances:
        for placed in utterance.arrays.values():
            yield from placed.extents


def _all_pages(directory: Path, known: Mapping[str, Pages]) -> Iterator[tuple[str, Pages]]:
    """Yield the pages of all files below a part's directory, in the order of their paths."""
    below = (Path(root, name) for root, _, names in os.walk(directory) for name in names)
    for path in sorted(file.relative_to(directory).as_posix() for file in below):
        if path in known:
            yield path, known[path]
        elif path not in _NO_CONTAINERS:
            with os.fdopen(open_within(directory, path), "rb") as file:
                yield path, pages_of(file.fileno())


# An open part: containers and a journal that grow, until they are sealed.

Declarations = Mapping[str, FeatureStorageConfig]  # by name


class OpenPart:
    """Writes one part; used by one thread.

    Args:
        cache: the cache directory.
        features: the declarations, by name.
        header: what the part is started with.
        name: that of the part; None gives it a new one.

    Attributes:
        hashed: paths of the files whose pages were hashed on their way to the disk, once it is
            sealed; the others were read for that.
    """

    def __init__(
        self, cache: Path, features: Declarations, header: Header, name: str | None = None
    ) -> None:
        self._cache = cache
        self._header = header
        self._features = features
        self._specs = {key: feature.spec(header.dims[key]) for key, feature in features.items()}
        cut = {key: feature.blocks(header.dims[key]) for key, feature in features.items()}
        self._blocks = {key: blocks for key, blocks in cut.items() if blocks is not None}
        codecs = {key: self._specs[key].codec for key in self._blocks}
        self._lossy = {key for key, codec in codecs.items() if codec and not codec.lossless}
        with_stats = [key for key, feature in features.items() if feature.stats]
        self._stats = {key: FeatureStats.empty(header.dims[key]) for key in with_stats}
        self._counted = 0  # utterances that these are of
        self._rows = PartRows([*features])
        # of those that the journal names; what was synced would survive a power cut, too
        self._appended = self._committed = self._synced = 0
        self._containers: list[tuple[str, list[str], ContainerWriter]] = []
        self._checking: list[tuple[list[str], ChecksArrays]] = []  # those of them that check
        self._writing_out: list[WritesOut] = []  # those of them that can
        self.hashed: set[str] = set()
        self._held = ExitStack()
        self.name, held = _new_directory(cache, name)
        try:
            self.directory = cache / PARTS / self.name
            self._held.callback(held.release)
            self._journal = JournalWriter(self.directory, header)
            self._held.callback(self._journal.close)
            self._open_containers()
        except BaseException:
            self.directory = cache / PARTS / self.name
            self._held.callback(held.release)  # which is harmless the second time
            self.discard()
            raise

    def ids(self) -> list[str]:
        """Return the ids of what was appended so far."""
        return [*self._rows.ids]

    def is_raw(self, name: str) -> bool:
        """Whether a feature is stored without a codec."""
        return name not in self._blocks

    def prepare(self, utterances: CheckedUtterances) -> CheckedUtterances:
        """Return utterances with the arrays of lossy codecs encoded; in any thread.

        Raises `FeatureError` for numbers that a codec refuses, as no lossless one does, and for
        what a format cannot hold.
        """
        arrays = utterances.arrays
        for names, container in self._checking:
            lengths = zip(*(arrays[name].lengths for name in names), strict=True)
            widths = [self._specs[name].row_bytes for name in names]
            for id, rows in zip(utterances.ids, lengths, strict=True):
                sizes = [(n, n * width) for n, width in zip(rows, widths, strict=True)]
                container.check(id, dict(zip(names, sizes, strict=True)))
        if not self._lossy:
            return utterances
        encoded = {name: self._encode(name, utterances) for name in self._lossy}
        told = utterances.stamps, utterances.annotations
        return CheckedUtterances(utterances.ids, arrays, *told, encoded)

    def append(self, utterances: CheckedUtterances) -> None:
        """Store utterances, and take them into the statistics."""
        self._journal.check_there()
        for name in self._stats:
            taken = utterances.arrays[name].stats
            if taken is not None:
                self._stats[name] = self._stats[name].merge(taken)
        self._counted += len(utterances)
        stored: dict[str, EncodedArrays] = {}
        known: dict[str, Sequence[int]] = {}
        for name, packed in utterances.arrays.items():
            if self.is_raw(name):
                stored[name] = pieces_of(packed.array, packed.lengths)
                known[name] = packed.checksums or ()
            else:
                encoded = utterances.encoded.get(name) or self._encode(name, utterances)
                stored[name] = EncodedArrays.of(encoded)
        ids = utterances.ids
        stamps = [utterances.stamps.get(id, UNKNOWN) for id in ids]
        annotations = [utterances.annotations.get(id, NONE) for id in ids]
        placed = self._store(ids, stored, known)
        self._journal.add(ids, placed, stamps, annotations)
        self._rows.add(ids, placed, stamps, annotations)
        self._appended += len(ids)

    def append_copies(
        self,
        ids: Sequence[str],
        arrays: Mapping[str, EncodedArrays],
        checksums: Mapping[str, Sequence[int]],
        stamps: Sequence[Stamps],
        annotations: Sequence[Values] | None = None,
    ) -> None:
        """Store what is stored elsewhere, too, as it is, without touching the statistics.

        Without `annotations` the journal does not name it: without a seal the part is removed. The
        columns of annotations come with the seal.
        """
        self._journal.check_there()
        placed = self._store(ids, arrays, checksums)
        if annotations is not None:
            self._journal.add(ids, placed, stamps, annotations)
            self._appended += len(ids)
        self._rows.add(ids, placed, stamps, [NONE] * len(ids))

    def count(self, arrays: Mapping[str, EncodedArrays]) -> None:
        """Take arrays that `append_copies` stores into the statistics."""
        self._stats = with_arrays(self._stats, arrays, self._specs, self._header)
        self._counted += len(next(iter(arrays.values())).rows)

    def _told_stats(self) -> Mapping[str, FeatureStats]:
        """Return the statistics of all utterances; none where they are of other ones."""
        return self._stats if self._counted == len(self._rows) else {}

    def _store(
        self,
        ids: Sequence[str],
        arrays: Mapping[str, EncodedArrays],
        known: Mapping[str, Sequence[int]],
    ) -> dict[str, PlacedArrays]:
        """Store arrays whose checksums may be known."""
        placed: dict[str, Extents] = {}
        for prefix, names, container in self._containers:
            extents = append_many(container, ids, {name: arrays[name] for name in names})
            placed |= {
                name: _below(prefix, extents[name]) if prefix else extents[name] for name in names
            }
        return {
            name: PlacedArrays(each.rows.tolist(), known.get(name) or checksums(each), placed[name])
            for name, each in arrays.items()
        }

    def commit(self, *, durably: bool = True) -> int:
        """Make all that was appended durable; returns how many utterances are.

        Not `durably`, it survives the end of the process, and not that of the machine.
        """
        if not durably and self._committed < self._appended:
            self._write_out()
            self._journal.commit({}, durably=False)  # after each utterance: recovery counts anew
        elif durably and self._synced < self._appended:
            self._flush()
            if not self._synced:  # the names of the journal, of directories of groups, and its own
                names = (self.directory, self.directory.parent)
                sync_together(*(partial(sync_directory, each) for each in names))
            self._journal.commit(self._told_stats())
            self._synced = self._appended
        self._committed = self._appended
        return self._committed

    def _flush(self) -> None:
        for _, _, container in self._containers:
            container.flush()

    def show(self) -> None:
        """Show other processes what was appended, which is not durable yet."""
        self._write_out()
        self._journal.show()

    def _write_out(self) -> None:
        for container in self._writing_out:
            container.write_out()

    def seal(
        self,
        annotations: Annotations | None = None,
        stats: Mapping[str, FeatureStats] | None = None,
    ) -> SealedPart | None:
        """Finish the files and name them in `part.json`; None if nothing was written.

        `annotations` and `stats` are those of what `append_copies` stored; None: as it was counted.
        """
        if not len(self._rows):
            self.discard()
            return None
        told = self._told_stats() if stats is None else {name: stats[name] for name in self._stats}
        # for who is killed in here: the seal is durable, and a part without a commit is seconds old
        if 0 < self._committed < self._appended:
            self._flush()
            self._journal.commit(told, durably=False)
        pages: dict[str, Pages] = {}
        while self._containers:
            prefix, _, container = self._containers[-1]
            container.close()
            if isinstance(container, SupportsPages):
                pages |= {prefix + path: each for path, each in container.pages().items()}
            self._containers.pop()
        self.hashed = {*pages}
        part = self._cache, self.name, self._header
        sealed = seal_directory(*part, self._rows, told, pages, annotations)
        self.release()
        (self.directory / lock.NAME).unlink(missing_ok=True)
        return sealed

    def release(self) -> None:
        """Release everything, leaving what is committed to a later recovery; never raises."""
        with self._held:
            self._abort_containers()

    def discard(self) -> None:
        """Remove the part, and let go of everything."""
        with self._held:
            self._abort_containers()
            remove_part(self.directory)

    def _abort_containers(self) -> None:
        for _, _, container in self._containers:
            container.abort()
        self._containers, self._writing_out = [], []

    def _encode(self, name: str, utterances: CheckedUtterances) -> list[EncodedArray]:
        spec, blocks = self._specs[name], self._blocks[name]
        arrays = zip(utterances.ids, utterances.arrays[name].each(), strict=True)
        return [encoded(id, array, spec, blocks) for id, array in arrays]

    def _open_containers(self) -> None:
        for prefix, names in container_groups(self._features):
            directory = self.directory / prefix
            if prefix:
                directory.mkdir(exist_ok=True)
            backend = self._features[names[0]].make_backend()
            writer = backend.open_writer(directory, [self._specs[name] for name in names])
            self._containers.append((prefix, names, writer))
            if isinstance(writer, ChecksArrays):
                self._checking.append((names, writer))
            if isinstance(writer, WritesOut):
                self._writing_out.append(writer)
        close_before_libraries_end()


def _below(prefix: str, extents: Extents) -> Extents:
    paths = [prefix + path for path in extents.containers]
    return dataclasses.replace(extents, containers=paths)


def with_arrays(
    stats: Mapping[str, FeatureStats],
    arrays: Mapping[str, EncodedArrays],
    specs: Mapping[str, FeatureSpec],
    header: Header,
) -> dict[str, FeatureStats]:
    """Return statistics with those of more arrays, as they are stored."""
    merged = {}
    for name, before in stats.items():
        spec, cut = specs[name], header.block_rows[name]
        decoded = (from_storage(joined(spec, each, cut), spec.dtype) for each in arrays[name])
        merged[name] = before.merge_all(map(FeatureStats.of, decoded))
    return merged


def _new_directory(cache: Path, name: str | None, tries: int = 10) -> tuple[str, WriterLock]:
    """Make the directory of a part, whose name is to be made durable, and lock it."""
    given = name or new_part_name()
    directory = cache / PARTS / given
    try:
        if directory.parent.is_dir():  # which the first manifest of a cache made durable
            directory.mkdir(exist_ok=True)
        else:
            make_directory(directory)
        return given, WriterLock(directory)
    except (CacheLockedError, FileNotFoundError):
        # somebody who recovers found it still empty, and removes it
        if name is not None or tries == 1:
            raise
    return _new_directory(cache, None, tries - 1)

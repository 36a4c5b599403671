"""An open part: the files and the journal of one writer, until they are sealed."""

from __future__ import annotations

import array
import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np

from featcache.container_files import (
    PAGE_BYTES,
    EncodedArrays,
    Extents,
    Pages,
    append_many,
    sync_directory,
)
from featcache.declaration import FeatureStorageConfig
from featcache.errors import CacheError, CacheLockedError, CorruptCacheError
from featcache.format import journal, lock
from featcache.format.annotations import NONE, Values
from featcache.format.columns import Strings, ends_of, save_columns
from featcache.format.files import (
    from_storage,
    make_directory,
    open_within,
    pack_json,
    remove_unfinished,
    write_durably,
)
from featcache.format.index import (
    UNKNOWN,
    ContainerColumns,
    FeatureColumns,
    Index,
    StampColumns,
    Stamps,
    container_digest,
    hash_of,
    page_count,
    pages_of,
)
from featcache.format.journal import Header, JournalWriter, PlacedArrays, Utterance
from featcache.format.lock import WriterLock
from featcache.format.manifest import PARTS
from featcache.format.part import (
    COLUMNS,
    SEAL,
    Columns,
    SealedPart,
    annotation_columns,
    checksums,
    container_columns,
    index_columns,
    index_of,
    new_part_name,
    read_part,
    remove_part,
    rows_of,
)
from featcache.interface import (
    Array,
    ChecksArrays,
    ContainerWriter,
    EncodedArray,
    Extent,
    Ints,
    SupportsPages,
    WritesOut,
)
from featcache.reading.feature_arrays import joined
from featcache.stats import FeatureStats
from featcache.writing.arrays import (
    Packed,
    PreparedArrays,
    UtteranceBatch,
    encoded,
    encoded_all,
    pieces_of,
)
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


# `PartRows`: utterances that an open part has taken, as columns: objects of millions cost memory.
#
# Not how they are put in order and stored: that is `seal`'s.


class PartRows:
    """The `Content` of a part that grows, in the order of writing.

    Args:
        names: of the features.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.ids: list[str] = []
        self._stamps: list[Stamps] = []
        self._annotations: list[Values] = []
        self._arrays = {name: _Arrays() for name in names}

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

    def index(
        self,
        containers: ContainerColumns,
        stats: Mapping[str, FeatureStats],
        names: Sequence[str],
    ) -> Index:
        """Return their index."""
        keys = [id.encode() for id in self.ids]
        numbers = {path: number for number, path in enumerate(containers.paths)}
        return Index(
            hashes=np.fromiter(map(hash_of, keys), np.uint64, len(keys)),
            hash_rows=np.arange(len(keys)),
            ids=Strings.of_bytes(keys),
            features={name: self._arrays[name].columns(numbers) for name in names},
            containers=containers,
            stats=stats,
            stamps=StampColumns.of(self._stamps),
        )

    def annotations(self, order: Ints) -> Columns:
        """Return their annotations as columns."""
        return annotation_columns(self.ids, self._annotations, order)


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


class Content(Protocol):
    """Utterances of a part that is being sealed."""

    def __len__(self) -> int: ...

    def paths(self) -> set[str]:
        """Return the containers that their arrays lie in."""

    def index(
        self,
        containers: ContainerColumns,
        stats: Mapping[str, FeatureStats],
        names: Sequence[str],
    ) -> Index:
        """Return their index, in the order in which they were written."""

    def annotations(self, order: Ints) -> Columns:
        """Return their annotations as columns, in the order of the rows that they become."""


class Listed:
    """Utterances that are objects."""

    def __init__(self, utterances: Sequence[Utterance]) -> None:
        self._utterances = utterances

    def __len__(self) -> int:
        return len(self._utterances)

    def paths(self) -> set[str]:
        """Return the containers that their arrays lie in."""
        return {extent.container for extent in extents_of(self._utterances)}

    def index(
        self,
        containers: ContainerColumns,
        stats: Mapping[str, FeatureStats],
        names: Sequence[str],
    ) -> Index:
        """Return their index."""
        return index_of(self._utterances, containers, stats, names)

    def annotations(self, order: Ints) -> Columns:
        """Return their annotations as columns."""
        ids = [utterance.id for utterance in self._utterances]
        return annotation_columns(ids, [each.annotations for each in self._utterances], order)


_NO_CONTAINERS = (journal.NAME, lock.NAME, lock.SOFT_NAME, lock.HOLDER, COLUMNS, SEAL)


def seal_directory(
    cache: Path,
    name: str,
    header: Header,
    content: Content,
    stats: Mapping[str, FeatureStats],
    pages: Mapping[str, Pages],
) -> SealedPart:
    """Seal a part whose containers are finished, as holder of its lock.

    Writes the columns, names them in `part.json`, and removes the journal. `pages` are those that
    are known; those of other files are read.
    """
    directory = cache / PARTS / name
    if not (directory / journal.NAME).exists():
        raise CacheError(
            f"part {str(directory)!r} was taken over by another writer while this one was at work; "
            "see that one writer at a time works, and run the same again"
        )
    (directory / COLUMNS).unlink(missing_ok=True)  # of one who died here before
    remove_unfinished(directory)
    told = {
        "name": name,
        "rows": len(content),
        "page_bytes": PAGE_BYTES,
        "block_rows": dict(header.block_rows),
        "header": header.to_json(),
        "columns": _save_columns(directory, list(header.dims), content, stats, pages),
    }
    write_durably(directory / SEAL, pack_json(told))
    sealed = read_part(cache, name)
    if sealed is None:
        raise CorruptCacheError(f"{str(directory / SEAL)!r} is not there after it was written")
    (directory / journal.NAME).unlink(missing_ok=True)
    return sealed


def _save_columns(
    directory: Path,
    names: list[str],
    content: Content,
    stats: Mapping[str, FeatureStats],
    known_pages: Mapping[str, Pages],
) -> str:
    pages = dict(_all_pages(directory, known_pages))
    sizes = {path: (directory / path).stat().st_size for path in pages}
    for path in sorted(content.paths() - pages.keys()):
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
    containers = ContainerColumns(
        paths=Strings.of(list(pages)),
        sizes=np.array(list(sizes.values()), np.int64),
        digests=np.frombuffer(digests, np.uint8),
        parts=np.zeros(len(pages), np.int32),
    )
    index = content.index(containers, stats, names)
    rows = rows_of([index], [])
    columns = itertools.chain(
        index_columns([index], rows, names, stats),
        container_columns([""], [containers]).items(),
        [
            ("page_ends", ends_of([len(each) for each in pages.values()])),
            ("pages", np.concatenate([np.empty(0, np.uint64), *pages.values()])),
        ],
        content.annotations(rows.order),
    )
    return save_columns(directory / COLUMNS, columns)


def extents_of(utterances: Iterable[Utterance]) -> Iterator[Extent]:
    """Yield the extents of all arrays of utterances."""
    for utterance in utterances:
        for placed in utterance.arrays.values():
            yield from placed.extents


def _all_pages(directory: Path, known: Mapping[str, Pages]) -> Iterator[tuple[str, Pages]]:
    """Yield the pages of all files below a part's directory, in the order of their paths."""
    below = (entry for entry in directory.rglob("*") if not entry.is_dir())
    for path in sorted(entry.relative_to(directory).as_posix() for entry in below):
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
        stats: those of the utterances so far, by feature; sealed with the part.
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
        self._blocks = {key: feature.blocks(header.dims[key]) for key, feature in features.items()}
        codecs = {key: spec.codec for key, spec in self._specs.items()}
        self._lossy = {key for key, codec in codecs.items() if codec and not codec.lossless}
        with_stats = [key for key, feature in features.items() if feature.stats]
        self.stats = {key: FeatureStats.empty(header.dims[key]) for key in with_stats}
        self._rows = PartRows([*features])
        self._committed = 0
        self.nbytes = 0
        self._containers: list[tuple[str, list[str], ContainerWriter]] = []
        self._checking: list[tuple[list[str], ChecksArrays]] = []  # those of them that check
        self.hashed: set[str] = set()
        self._held = ExitStack()
        self.name, held = _new_directory(cache, name)
        self.directory = cache / PARTS / self.name
        self._held.callback(held.release)
        try:
            self._journal = JournalWriter(self.directory, header)
            self._held.callback(self._journal.close)
            self._open_containers()
        except BaseException:
            self.discard()
            raise

    def ids(self) -> list[str]:
        """Return the ids of what was appended so far."""
        return [*self._rows.ids]

    @property
    def checks(self) -> bool:
        """True where `check` may refuse anything."""
        return bool(self._checking)

    def check(self, id: str, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Raise `FeatureError` for what a format cannot hold; in any thread.

        `sizes` are by feature the rows and the bytes of an array, before a codec.
        """
        for names, container in self._checking:
            container.check(id, {name: sizes[name] for name in names})

    def encode_lossy(self, id: str, arrays: Mapping[str, Array]) -> dict[str, EncodedArray]:
        """Return the arrays of lossy codecs as bytes; in any thread.

        Raises `FeatureError` for numbers that these refuse, as no other codec does.
        """
        return {name: self._encode(id, name, arrays[name]) for name in self._lossy}

    def is_raw(self, name: str) -> bool:
        """Whether a feature is stored without a codec."""
        return self._specs[name].codec is None

    def prepare_piece(
        self, ids: Sequence[str], packed: Mapping[str, Packed], start: int, stop: int
    ) -> dict[str, PreparedArrays]:
        """Make arrays of some utterances of a batch bytes, but for those of lossless codecs."""
        found: dict[str, PreparedArrays] = {}
        for name, each in packed.items():
            if self._specs[name].codec is None:
                found[name] = pieces_of(each.rows(start, stop), each.lengths[start:stop])
                continue
            arrays = each.arrays(start, stop)
            if name in self._lossy:
                some = zip(ids[start:stop], arrays, strict=True)
                found[name] = [self._encode(id, name, array) for id, array in some]
            else:
                found[name] = [*arrays]
        return found

    def append(self, batch: UtteranceBatch) -> None:
        """Store utterances, and take them into the statistics."""
        self._journal.check_there()
        for name in self.stats if batch.stats else ():
            self.stats[name] = self.stats[name].merge_all(each[name] for each in batch.stats)
        encoded = {
            name: encoded_all(batch.ids, each, self._specs[name], self._blocks[name])
            for name, each in batch.arrays.items()
        }
        self._append(batch.ids, encoded, batch.stamps, batch.annotations, batch.checksums)

    def append_encoded(
        self,
        id: str,
        arrays: Mapping[str, EncodedArray],
        stamps: Stamps = UNKNOWN,
        annotations: Values = NONE,
    ) -> None:
        """Store one utterance as it is, without touching the statistics."""
        self._journal.check_there()
        encoded = {name: EncodedArrays.of([array]) for name, array in arrays.items()}
        self._append([id], encoded, [stamps], [annotations], {})

    def _append(
        self,
        ids: Sequence[str],
        arrays: Mapping[str, EncodedArrays],
        stamps: Sequence[Stamps],
        annotations: Sequence[Values],
        known: Mapping[str, Sequence[int]],
    ) -> None:
        extents = self._store(ids, arrays)
        placed = {
            k: PlacedArrays(each.rows.tolist(), known.get(k) or checksums(each), extents[k])
            for k, each in arrays.items()
        }
        self._journal.add(ids, placed, stamps, annotations)
        self._rows.add(ids, placed, stamps, annotations)

    def append_many(
        self, ids: Sequence[str], arrays: Mapping[str, EncodedArrays]
    ) -> dict[str, Extents]:
        """Store what is stored elsewhere, too; tell where it lies.

        The journal does not name it: without a seal the part is removed. To seal it, `seal` is
        given its columns.
        """
        self._journal.check_there()
        return self._store(ids, arrays)

    def _store(self, ids: Sequence[str], arrays: Mapping[str, EncodedArrays]) -> dict[str, Extents]:
        placed: dict[str, Extents] = {}
        for prefix, names, container in self._containers:
            extents = append_many(container, ids, {name: arrays[name] for name in names})
            for name in names:
                found = extents[name]
                paths = [prefix + path for path in found.containers]
                placed[name] = dataclasses.replace(found, containers=paths)
                self.nbytes += int(arrays[name].nbytes.sum())
        return placed

    def add_to_stats(self, arrays: Mapping[str, Array]) -> None:
        """Take arrays as they are stored into the statistics."""
        for name in arrays.keys() & self.stats.keys():
            frames = from_storage(arrays[name], self._specs[name].dtype)
            self.stats[name] = self.stats[name].merge(FeatureStats.of(frames))

    def count_many(self, arrays: Mapping[str, EncodedArrays]) -> None:
        """Take arrays that `append_many` stored into the statistics."""
        for name in self.stats:
            for each in arrays[name]:
                self.add_to_stats({name: self.decode(name, each)})

    def decode(self, name: str, array: EncodedArray) -> Array:
        """Return an array of shape (rows, *dims), storage dtype, that `append_encoded` takes."""
        return joined(self._specs[name], array, self._header.block_rows[name])

    def commit(self) -> int:
        """Make all that was appended durable; returns how many utterances are."""
        if self._committed < len(self._rows):
            self._flush()
            if not self._committed:  # the names of the journal, and of directories of groups
                sync_directory(self.directory)
            self._journal.commit(self.stats)
            self._committed = len(self._rows)
        return self._committed

    def _flush(self) -> None:
        for _, _, container in self._containers:
            container.flush()

    def show(self) -> None:
        """Show other processes what was appended, which is not durable yet."""
        for _, _, container in self._containers:
            if isinstance(container, WritesOut):
                container.write_out()
        self._journal.show()

    def seal(self, copied: Content | None = None) -> SealedPart | None:
        """Finish the files and name them in `part.json`; None if nothing was written.

        `copied` is what `append_many` stored.
        """
        content = copied or self._rows
        if not len(content):
            self.discard()
            return None
        if self._committed < len(self._rows):  # for who is killed in here; the seal is durable
            self._flush()
            self._journal.commit(self.stats, durably=False)
        pages: dict[str, Pages] = {}
        while self._containers:
            prefix, _, container = self._containers[-1]
            container.close()
            if isinstance(container, SupportsPages):
                pages |= {prefix + path: each for path, each in container.pages().items()}
            self._containers.pop()
        self.hashed = {*pages}
        sealed = seal_directory(self._cache, self.name, self._header, content, self.stats, pages)
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
        self._containers = []

    def _encode(self, id: str, name: str, array: Array) -> EncodedArray:
        return encoded(id, array, self._specs[name], self._blocks[name])

    def _open_containers(self) -> None:
        for prefix, names in container_groups(self._features):
            directory = self.directory / prefix
            directory.mkdir(exist_ok=True)
            backend = self._features[names[0]].make_backend()
            writer = backend.open_writer(directory, [self._specs[name] for name in names])
            self._containers.append((prefix, names, writer))
            if isinstance(writer, ChecksArrays):
                self._checking.append((names, writer))
        close_before_libraries_end()


def _new_directory(cache: Path, name: str | None, tries: int = 10) -> tuple[str, WriterLock]:
    """Make the directory of a part, and lock it."""
    given = name or new_part_name()
    try:
        if (cache / PARTS).is_dir():  # which the first manifest of a cache made durable
            (cache / PARTS / given).mkdir(exist_ok=True)
            sync_directory(cache / PARTS)
        else:
            make_directory(cache / PARTS / given)
        return given, WriterLock(cache / PARTS / given)
    except (CacheLockedError, FileNotFoundError):
        # somebody who recovers found it still empty, and removes it
        if name is not None or tries == 1:
            raise
    return _new_directory(cache, None, tries - 1)

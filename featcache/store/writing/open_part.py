"""An open part: containers and a journal that grow, until they are sealed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from featcache.container_files import (
    EncodedArrays,
    Extents,
    Pages,
    append_many,
    sync_directory,
)
from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import CacheLockedError
from featcache.interface import (
    Array,
    ChecksArrays,
    ContainerWriter,
    EncodedArray,
    SupportsPages,
    WritesOut,
)
from featcache.stats import FeatureStats
from featcache.store.format import lock
from featcache.store.format.annotations import NONE, Values
from featcache.store.format.bfloat16 import from_storage
from featcache.store.format.files import make_directory
from featcache.store.format.journal import JournalWriter
from featcache.store.format.journal_lines import Header, PlacedArrays
from featcache.store.format.lock import WriterLock
from featcache.store.format.manifest import PARTS
from featcache.store.format.part import SealedPart, checksums, new_part_name, remove_part
from featcache.store.format.stamps import UNKNOWN, Stamps
from featcache.store.reading.block_decoding import joined
from featcache.store.writing.container_groups import container_groups
from featcache.store.writing.encoding import encoded, encoded_all, pieces_of
from featcache.store.writing.packed_batch import Packed
from featcache.store.writing.part_rows import PartRows
from featcache.store.writing.seal import Content, seal_directory
from featcache.store.writing.unclosed import close_before_libraries_end
from featcache.store.writing.utterance_batch import PreparedArrays, UtteranceBatch

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
        """Tell whether a feature is stored without a codec."""
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
            for array in arrays[name]:
                self.add_to_stats({name: self.decode(name, array)})

    def decode(self, name: str, array: EncodedArray) -> Array:
        """Return an array of shape (rows, *dims), storage dtype, that `append_encoded` takes."""
        return joined(self._specs[name], array, self._header.block_rows[name])

    def commit(self) -> int:
        """Make all that was appended durable; returns how many utterances are."""
        if self._committed < len(self._rows):
            for _, _, container in self._containers:
                container.flush()
            self._journal.commit(self.stats)
            self._committed = len(self._rows)
        return self._committed

    def show(self) -> None:
        """Let other processes find what was appended, which is not durable yet."""
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
        self.commit()
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
        """Let go of everything, leaving what is committed to a later recovery; never raises."""
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
            sync_directory(directory)
        sync_directory(self.directory)
        close_before_libraries_end()


def _new_directory(cache: Path, name: str | None, tries: int = 10) -> tuple[str, WriterLock]:
    """Make the directory of a part, and lock it."""
    given = name or new_part_name()
    make_directory(cache / PARTS / given)
    try:
        return given, WriterLock(cache / PARTS / given)
    except (CacheLockedError, FileNotFoundError):
        # somebody who recovers found it still empty, and removes it
        if name is not None or tries == 1:
            raise
    return _new_directory(cache, None, tries - 1)

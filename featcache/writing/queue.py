"""Utterances on their way to the thread that stores, some together; how often it commits."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from featcache._recycled import RecycledMemory
from featcache.container_files import sync_directory
from featcache.declaration import FeatureStorageConfig
from featcache.errors import ClosedError, StaleCacheError
from featcache.format.annotations import Values
from featcache.format.files import explained, from_storage
from featcache.format.index import Stamps
from featcache.format.journal import Header
from featcache.format.manifest import NAME, PARTS, Manifest, read_manifest
from featcache.format.part import SealedPart, remove_part
from featcache.interface import Array, Bytes, EncodedArray
from featcache.stats import FeatureStats
from featcache.writing.arrays import CheckedUtterances, PackedArrays
from featcache.writing.background import Background, always, nothing
from featcache.writing.held import HeldCache
from featcache.writing.known_ids import KnownIds
from featcache.writing.open_part import Declarations, OpenPart

# `PartsUnderWay`: the parts of a writer that are open or sealed, and not yet published.

MAPPED_PARTS = 128  # whose ids take no memory: ten million utterances; each keeps a file open


class PartsUnderWay:
    """Commits and seals the parts of a writer, in the thread that stores.

    Args:
        cache: the cache directory.
        known: told of the ids that are sealed.
        held: the cache in the hand of the one that writes the parts; None: another holds it.

    Attributes:
        unsealed: open parts, oldest first, as the thread works them off.
        committed: how many utterances of the writer are durable.
    """

    def __init__(self, cache: Path, known: KnownIds, held: HeldCache | None) -> None:
        self._cache = cache
        self._held = held
        self._known = known
        self.unsealed: list[OpenPart] = []
        self._sealed: list[str] = []
        self._sealed_rows = 0
        self.committed = 0

    def kept(self) -> str:
        """Return which part of the work is safe."""
        return f"{self.committed} utterances of this run are committed and kept"

    def start(self, features: Declarations, header: Header) -> OpenPart:
        """Open a part; in the thread of the one who writes, who is told what library is missing.

        Raises `CacheError` where nobody would have it: the cache was overwritten meanwhile, or is
        gone.
        """
        with explained(self._cache, self.kept):
            if self._held is None:  # who made it may have been killed before its names were durable
                sync_directory(self._cache)
            # at once among those that end with the writer: an interrupt (Ctrl-C) may come next
            self.unsealed.append(OpenPart(self._cache, features, header))
            try:  # with the part's lock: whoever changes the cache from now on sees that
                self._check_wanted(header)
            except BaseException:
                self.unsealed.pop().discard()
                raise
        return self.unsealed[-1]

    def _check_wanted(self, header: Header) -> None:
        if not self._manifest().is_building(header.build, header.fingerprint):
            raise StaleCacheError(
                f"cache {str(self._cache)!r} is being overwritten, or was, since this writer was "
                f"opened; open another one: {self.kept()}"
            )

    def _manifest(self) -> Manifest:
        if self._held is None or not (self._cache / NAME).exists():
            return read_manifest(self._cache)
        return self._held.manifest

    def commit(self, *, durably: bool = True) -> None:
        """Make what was stored durable, as `OpenPart.commit` does."""
        if self.unsealed:
            self.committed = self._sealed_rows + self.unsealed[0].commit(durably=durably)

    def show(self) -> None:
        """Show other processes what was stored, before it is durable."""
        for part in self.unsealed:
            part.show()

    def seal(self, part: OpenPart) -> None:
        """Finish the oldest part, whose ids its index knows from then on."""
        ids = part.ids()
        if (sealed := self.seal_last(part)) is not None:
            mapped = self._known.count <= MAPPED_PARTS
            self._known.sealed(ids, sealed.index(self._cache, [], mapped=mapped))

    def seal_last(self, part: OpenPart) -> SealedPart | None:
        """Finish the oldest part of a writer that takes no more; None if that was done before."""
        if part not in self.unsealed:
            return None
        sealed = part.seal()
        self.unsealed.remove(part)
        if sealed is not None:
            self._sealed.append(sealed.entry.name)
            if self._held is not None:
                self._held.take(sealed)
            self._sealed_rows += sealed.entry.rows
            self.committed = self._sealed_rows
        return sealed

    def published(self) -> None:
        """Take note that what was sealed is published: `discard` leaves it alone from now on."""
        self._sealed.clear()

    def release(self) -> None:
        """Release the open parts, once the thread has ended."""
        for part in self.unsealed:
            part.release()

    def discard(self) -> None:
        """Remove what is not published, once the thread has ended."""
        for part in self.unsealed:
            part.discard()
        if not self._sealed:
            return
        # a publish may have failed, or been interrupted (Ctrl-C), after its manifest was out
        there = (self._cache / NAME).exists()
        published = {entry.name for entry in self._manifest().parts} if there else set()
        for name in self._sealed:
            if name not in published:
                remove_part(self._cache / PARTS / name)


# `Staging`: utterances that wait until there are enough to be stored together.
#
# Their arrays are copied one behind the other, so that statistics and files take many as one.

T = TypeVar("T")
MOST_ROWS = 256  # utterances that are handed over together
LEAST_BYTES = 1 << 12  # of the memory of a feature
BLOCK_BYTES = 4 << 20  # of all of them: NumPy asks for large pages from here on
COUNTED_VALUES = 1 << 16  # whose statistics are taken together, while they are in cache


class Staging:
    """Utterances that were checked and cast, in the order in which they were given.

    An interrupt (Ctrl-C) in `add` leaves all of an utterance or nothing that counts: it counts from
    the moment on at which it is in one list, and the next one lies where the last in it ends.

    Args:
        part: takes them.
        features: the declarations, by name.
        memory: takes the copies.
        first: the first utterance; memory is shared out among the features as its arrays share it.

    Attributes:
        nbytes: of their arrays, before any codec.
        memory: bytes that are taken for them.
    """

    def __init__(
        self,
        part: OpenPart,
        features: Mapping[str, FeatureStorageConfig],
        memory: RecycledMemory,
        first: CheckedUtterances,
    ) -> None:
        self.part = part
        self.nbytes = self.memory = 0
        self._rows: dict[str, _Rows] = {}
        for name, packed in first.arrays.items():
            array = packed.array
            share = BLOCK_BYTES * array.nbytes // max(first.nbytes, 1)
            share = min(share, 2 * MOST_ROWS * array.nbytes)
            nbytes = max(share, array.nbytes, len(array), LEAST_BYTES)
            taken = memory.empty((nbytes,), np.dtype(np.uint8))
            self._rows[name] = _Rows(features[name], array, taken, is_raw=part.is_raw(name))
            self.memory += len(taken)
        self._taken: list[_Taken] = []
        self._counted = 0  # bytes up to where statistics were looked at
        self._batch: CheckedUtterances | None = None
        self._is_stored = False

    def __len__(self) -> int:
        return len(self._taken)

    def add(self, utterance: CheckedUtterances) -> bool:
        """Copy the arrays of one utterance; False if there is no room, or `batch` was called."""
        number = len(self._taken)
        if self._batch is not None or 0 < number >= MOST_ROWS:
            return False
        for rows, packed in zip(self._rows.values(), utterance.arrays.values(), strict=True):
            array, begin = packed.array, rows.ends[number]
            end = begin + len(array)
            if end > rows.most:
                return False
            copy = rows.values[begin:end]
            np.copyto(copy, array)
            if rows.is_raw:
                rows.checksums[number:] = (xxhash.xxh3_64_intdigest(copy.data),)
            rows.ends[number + 1 :] = (end,)
        self.nbytes += utterance.nbytes
        taken = utterance.ids[0], utterance.stamps, utterance.annotations, utterance.encoded
        self._taken.append(taken)
        if self.nbytes - self._counted >= COUNTED_VALUES:
            for rows in self._rows.values():
                rows.count(number + 1)
            self._counted = self.nbytes
        return True

    def batch(self) -> CheckedUtterances:
        """Return the utterances as the part takes them: the same object each time."""
        if self._batch is None:
            ids, stamps, annotations, encoded = zip(*self._taken, strict=True)
            arrays = {name: rows.packed(len(ids)) for name, rows in self._rows.items()}
            as_bytes = {name: [each[name][0] for each in encoded] for name in encoded[0]}
            told = _joined(stamps), _joined(annotations)
            self._batch = CheckedUtterances(ids, arrays, *told, as_bytes)
        return self._batch

    def store(self) -> None:
        """Store them, in the thread that stores: once, however often they were put there."""
        if not self._is_stored:
            self._is_stored = True
            self.part.append(self.batch())


# of one utterance: its id, stamps, annotations, and the arrays of lossy codecs
_Taken = tuple[
    str, Mapping[str, Stamps], Mapping[str, Values], Mapping[str, Sequence[EncodedArray]]
]


def _joined(mappings: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {id: each for mapping in mappings for id, each in mapping.items()}


class _Rows:
    """Memory for arrays of a feature, such as the first, one behind the other.

    Attributes:
        values: (rows, *dims), storage dtype.
        most: rows.
        ends: rows before the array of each utterance, and after the last: an interrupt may leave
            one more there, and in `checksums`.
    """

    def __init__(
        self, feature: FeatureStorageConfig, first: Array, memory: Bytes, *, is_raw: bool
    ) -> None:
        self._dtype, self._has_stats, self.is_raw = feature.dtype, feature.stats, is_raw
        dims = first.shape[1:]
        width = math.prod(dims)
        self.most = len(memory) // max(width * first.itemsize, 1)
        self.values = np.ndarray((self.most, *dims), first.dtype, memory.data)
        self.ends = [0]
        self.checksums: list[int] = []
        self._least = COUNTED_VALUES // max(width, 1)  # rows whose statistics are taken together
        self._counted: tuple[int, FeatureStats] = 0, FeatureStats.empty(dims)  # of so many rows

    def count(self, number: int, *, whole: bool = False) -> None:
        """Take the statistics of arrays of so many utterances, once enough rows wait for that."""
        (begin, stats), end = self._counted, self.ends[number]
        if self._has_stats and end - begin >= (1 if whole else self._least):
            taken = FeatureStats.of(from_storage(self.values[begin:end], self._dtype))
            self._counted = end, stats.merge(taken)

    def packed(self, number: int) -> PackedArrays:
        """Return the arrays of so many utterances."""
        self.count(number, whole=True)
        ends = self.ends[: number + 1]
        lengths = [end - begin for begin, end in itertools.pairwise(ends)]
        stats = self._counted[1] if self._has_stats else None
        checksums = self.checksums[:number] if self.is_raw else None
        return PackedArrays(self.values[: ends[-1]], lengths, stats, checksums)


# `HandOver`: utterances on their way from those who write to the thread that stores.

COMMIT_INTERVAL_S = 2.0  # what a killed writer loses at most, in time, of what has reached the disk
QUEUE_BYTES = 64 << 20  # arrays that wait for the disk; more would only cost fresh memory

NOTE_BYTES = 1 << 10  # of memory, beside the arrays of an utterance


class HandOver:
    """Gives utterances to the thread that stores: some together, which saves most of the work.

    Those that wait for more to come are stored with the first commit that finds nothing before them
    in the queue. One thread at a time may use it.

    Args:
        path: the cache directory.
        features: the declarations, by name.
        memory: takes the copies of arrays.
        under_way: the parts to store in.
    """

    def __init__(
        self, path: Path, features: Declarations, memory: RecycledMemory, under_way: PartsUnderWay
    ) -> None:
        self._pid = os.getpid()
        self._may_commit: Callable[[], bool] = always
        self._path = path
        self._commit: Callable[[], object] = under_way.commit
        self._features, self._memory = features, memory
        self._waiting: Staging | None = None  # for more
        self._taking = threading.Lock()  # either thread takes what waits
        told = explained(path, under_way.kept)
        self._background = Background(self._idle, COMMIT_INTERVAL_S, QUEUE_BYTES, told)

    def ask_before_commits(self, may_commit: Callable[[], bool]) -> None:
        """Make that thread ask whether it may, each time before it commits by itself."""
        self._may_commit = may_commit

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays that are not stored yet."""
        waiting = self._waiting
        return self._background.queued_bytes + (waiting.nbytes if waiting else 0)

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` has begun: then nothing more is taken."""
        return self._background.is_stopping

    def check_process(self) -> None:
        """Raise `ClosedError` in a child: the thread is not there, what it is given were lost."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the writer of {str(self._path)!r} belongs to process {self._pid}, and this is "
                f"{os.getpid()}, forked from it; let one process write, give each a cache of its "
                "own, or use featcache.extract(parallel=...)"
            )

    def check(self) -> None:
        """Raise the error that ended the thread, if one did."""
        self._background.check()

    def add(self, part: OpenPart, utterance: CheckedUtterances) -> None:
        """Copy an utterance, as `Staging.add` does, and hand it over, maybe with some to follow."""
        with self._taking:
            if self._waiting is not None and self._waiting.add(utterance):
                return
        self._put_waiting()
        with self._taking:
            waiting = Staging(part, self._features, self._memory, utterance)
            waiting.add(utterance)
            self._waiting = waiting  # which is never empty, whatever interrupts this

    @property
    def stores_here(self) -> bool:
        """Whether `store` stores in this thread, unless the other one has something to do."""
        return self._background.may_run_here()

    def store(self, part: OpenPart, utterance: CheckedUtterances) -> None:
        """Store an utterance in this thread, without a copy, where that may be; else `add` it.

        `run` raises what goes wrong.
        """
        task = partial(part.append, utterance)
        if not self._background.run_here(partial(self._store_waiting, self._background, task)):
            self.add(part, utterance)

    def put_batch(self, part: OpenPart, batch: CheckedUtterances) -> None:
        """Hand over utterances."""
        self._put_waiting()
        self._put(partial(part.append, batch), batch, batch.nbytes)

    def put(self, task: Callable[[], object]) -> None:
        """Run a task behind all that was handed over before."""
        if not self._put_waiting(task):
            self._background.put(task, 0, 0)

    def run(self, task: Callable[[], object]) -> None:
        """Run a task behind all that was handed over before, and return once it is done.

        Raises what went wrong.
        """
        if not self._background.run_here(partial(self._store_waiting, self._background, task)):
            self.put(task)
        self._background.drain()

    def drain(self) -> None:
        """Return once all that was handed over before is stored; raises what went wrong."""
        self._put_waiting()
        self._background.drain()

    def stop(self, finish: bool) -> None:
        """End the thread, after what was handed over or before that; never raises."""
        self._background.stop(finish)
        self._waiting = None
        # or those who gave them live on in a circle
        self._commit, self._may_commit = nothing, always

    def _put_waiting(self, then: Callable[[], object] = nothing) -> bool:
        """Hand over what waits and a task behind it; False if nothing waited, nor the task."""
        waiting = self._waiting
        if waiting is not None:
            self._background.wait_for_room(waiting.memory + NOTE_BYTES * len(waiting))
            with self._taking:
                # an interrupt (Ctrl-C) anywhere here leaves them waiting, to be put once more
                if self._waiting is not None:
                    task = partial(_one_by_one, waiting.store, then)
                    self._put(task, waiting.batch(), waiting.memory)
                    self._waiting = None
                    return True
        return False

    def _put(self, task: Callable[[], object], batch: CheckedUtterances, memory: int) -> None:
        self._background.put(task, batch.nbytes, memory + NOTE_BYTES * len(batch))

    def _idle(self, background: Background) -> None:
        self._store_waiting(background)
        if self._may_commit():
            self._commit()

    def _store_waiting(self, background: Background, then: Callable[[], object] = nothing) -> None:
        """Store what waits for more to come, and run a task."""
        waiting = None
        with self._taking:
            if background.is_empty:  # what was handed over before comes first
                waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.store()
        then()


def _one_by_one(*tasks: Callable[[], object]) -> None:
    for task in tasks:
        task()

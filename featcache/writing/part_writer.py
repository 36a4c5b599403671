"""`PartWriter`: stores utterances, part after part.

It checks arrays in the caller's thread; another thread encodes and writes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from featcache._checks import directory
from featcache._closing import close_after
from featcache.container_files import EncodedArrays
from featcache.declaration import Features, FeatureStorageConfig, by_name
from featcache.errors import ClosedError, CorruptCacheError, FeatureError, nearest
from featcache.format.annotations import NONE, Values, check_annotations, with_kinds
from featcache.format.feature_sets import features_beside
from featcache.format.files import check_id, explained, reading
from featcache.format.fingerprint import cache_fingerprint, fingerprint_digest
from featcache.format.index import UNKNOWN, Stamps, check_stamps
from featcache.format.part import checksums, header_for
from featcache.interface import Array
from featcache.writing.arrays import (
    PIECE_ROWS,
    ArrayLike,
    BatchLayout,
    CopyMemory,
    FirstShapes,
    LengthsByFeature,
    Packed,
    UtteranceBatch,
    check_features,
    lengths_of,
    pack,
    store_all,
)
from featcache.writing.background import close_at_exit, nothing
from featcache.writing.free_space import FreeSpace
from featcache.writing.held import HeldCache
from featcache.writing.known_ids import KnownIds, find_stored
from featcache.writing.open_part import OpenPart
from featcache.writing.queue import HandOver, PartsUnderWay

# `CheckedBatch`: a batch of utterances that can be stored, in pieces that are handed over.


@dataclass(frozen=True)
class CheckedBatch:
    """Utterances that were checked, cast and copied together."""

    ids: list[str]
    features: Mapping[str, Packed]
    stamps: Mapping[str, Stamps]
    annotations: Mapping[str, Values]

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays, before any codec."""
        return sum(each.array.nbytes for each in self.features.values())

    def dims(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of a frame, by feature."""
        return {name: each.array.shape[1:] for name, each in self.features.items()}

    def pieces(self, part: OpenPart) -> list[UtteranceBatch]:
        """Return the utterances, `PIECE_ROWS` of them together.

        Raises `FeatureError` for one that a format or a lossy codec of the part cannot hold.
        """
        if part.checks:
            self._check(part)
        pieces = []
        for number, start in enumerate(range(0, len(self.ids), PIECE_ROWS)):
            stop = min(start + PIECE_ROWS, len(self.ids))
            piece = UtteranceBatch()
            piece.ids = self.ids[start:stop]
            piece.arrays = part.prepare_piece(self.ids, self.features, start, stop)
            piece.checksums = {
                name: checksums(each)
                for name, each in piece.arrays.items()
                if isinstance(each, EncodedArrays)
            }
            piece.stamps = [self.stamps.get(id, UNKNOWN) for id in piece.ids]
            piece.annotations = [self.annotations.get(id, NONE) for id in piece.ids]
            piece.add_stats(
                {name: each.stats[number] for name, each in self.features.items() if each.stats},
                sum(each.rows(start, stop).nbytes for each in self.features.values()),
            )
            pieces.append(piece)
        return pieces

    def _check(self, part: OpenPart) -> None:
        row_bytes = {
            name: each.array.nbytes // max(len(each.array), 1)
            for name, each in self.features.items()
        }
        lengths = zip(*(each.lengths for each in self.features.values()), strict=True)
        for id, rows in zip(self.ids, lengths, strict=True):
            sizes = zip(row_bytes.items(), rows, strict=True)
            part.check(id, {name: (length, length * row) for (name, row), length in sizes})


def check_batch(
    ids: Sequence[str],
    arrays: Mapping[str, ArrayLike],
    lengths: LengthsByFeature,
    layout: BatchLayout,
    annotations: Mapping[str, Values],
    stamps: Mapping[str, Stamps],
    features: Mapping[str, FeatureStorageConfig],
    memory: CopyMemory,
) -> CheckedBatch:
    """Return a batch of the declared features as it is stored; annotations and stamps are checked.

    Raises `FeatureError` for what cannot be stored, naming the utterance where it can.
    """
    listed = _checked_ids(ids, annotations, stamps)
    check_features(listed[0] if listed else "", arrays, features)
    rows = lengths_of(listed, lengths, features)
    packed = {
        name: pack(listed, arrays[name], rows[name], layout, feature, memory)
        for name, feature in features.items()
    }
    return CheckedBatch(listed, packed, stamps, annotations)


def _checked_ids(ids: Sequence[str], *by_id: Mapping[str, object]) -> list[str]:
    """Return the ids of a batch; raises `FeatureError` for one twice, and for what is by others."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise FeatureError(f"ids are a list of strings, not {ids!r}")
    listed = list(ids)
    for id in listed:
        check_id(id)
    known = set(listed)
    if len(known) < len(listed):
        twice = next(id for id in listed if listed.count(id) > 1)
        raise FeatureError(f"utterance {twice!r} is in the batch twice")
    for given in by_id:
        for id in given:
            if id not in known:
                raise FeatureError(
                    f"annotations or stamps are given for {id!r}, which is not in the batch; "
                    f"{nearest(str(id), listed)}"
                )
    return listed


# `PartWriter`: stores utterances, part after part.
#
# It checks arrays in the caller's thread; another thread encodes and writes them.

T = TypeVar("T")
PART_BYTES = 8 << 30  # a killed writer's part is read when it is recovered, and an HDF5 file copied
PART_ROWS = 100_000  # notes on these stay in memory until the part is sealed, about 1 KB each


class PartWriter:
    """Adds utterances to a cache whose `CacheWriter` is open in another process.

    What is written is in the cache once the `CacheWriter` publishes, after this one was closed. A
    writer that is still open when the process ends is closed then.

    Threads may share a writer; a process that is forked from its own is refused, and pickling it
    is, too.

    Args:
        path: the cache directory.
        features: the declarations, the same as the `CacheWriter`'s.
        fingerprint: what the features are made from, the same as the `CacheWriter`'s.
        held: the cache in the hand of the `CacheWriter` that this is the part writer of.
    """

    def __init__(
        self,
        path: str | Path,
        features: Features,
        fingerprint: Mapping[str, object] | None = None,
        *,
        held: HeldCache | None = None,
    ) -> None:
        self.path = directory(path, "a cache").absolute()
        self.features = by_name(features)
        self.bytes_written = 0
        self.closed = False
        self._lock = threading.RLock()  # of the `CacheWriter` too, if it is of one
        self._fingerprint = fingerprint_digest(cache_fingerprint(self.features, fingerprint))
        with reading(self.path):
            stored = find_stored(self.path, self._fingerprint, held)
            beside = features_beside(self.path)
        self._held, self._build, self._dims, self._kinds = held, *stored[:3]
        self._names = beside.union(self.features)  # which no annotation has
        self._known = KnownIds(self.path, stored.rows)
        self._memory = CopyMemory()
        self._first_shapes = FirstShapes(self.features)
        self._count = 0  # utterances that this writer took
        rows = sum(len(each.index) for each in stored.rows)
        self._space = FreeSpace(self.path, len(self.features), rows)
        # takes what is written; the thread that stores may be at the one before
        self._part: OpenPart | None = None
        self._part_bytes = self._part_rows = 0
        # told the name of each part before anything is written to it
        self.on_part: Callable[[str], object] = lambda name: None
        self._may_seal: Callable[[], bool] = _yes
        self._under_way = PartsUnderWay(self.path, self._known, held)
        self._thread = HandOver(self.path, self.features, self._memory, self._under_way)
        self.forget: Callable[[], object] = nothing
        try:
            what = f"the part writer of {str(self.path)!r}"
            self.forget = close_at_exit(self, what, PartWriter.close)
        except BaseException:
            self.abort()
            raise

    def __contains__(self, id: str) -> bool:
        """Whether an utterance is stored already, or was written now."""
        return id in self._known

    def __len__(self) -> int:
        """Return how many utterances this writer has taken."""
        return self._count

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "a writer cannot be pickled: it belongs to its process; open another one there"
        )

    def write(
        self,
        id: str,
        arrays: Mapping[str, ArrayLike],
        *,
        annotations: Mapping[str, object] | None = None,
        stamps: Stamps = UNKNOWN,
    ) -> None:
        """Store the features of one utterance, as `CacheWriter.write` does."""
        check_id(id)
        values = check_annotations(id, annotations, self._names) if annotations else NONE
        if stamps is not UNKNOWN:
            stamps = check_stamps(id, stamps)
        stored = store_all(id, arrays, self.features)
        with self.lock:
            self._take(id, stored, stamps, values)

    def _take(self, id: str, stored: Mapping[str, Array], stamps: Stamps, values: Values) -> None:
        self._check_not_closed()
        self._thread.check()
        self._known.check_new(id, self._count)
        kinds = with_kinds(id, values, self._kinds) if values else self._kinds
        nbytes = 0
        for name, array in stored.items():
            feature, shape = self.features[name], array.shape
            feature.check_dims(id, shape[1:], self._dims.get(name), shape[0])
            self._first_shapes.check(id, feature, shape)
            nbytes += array.nbytes
        if self._first_shapes.has_times:
            lengths = {name: [len(each)] for name, each in stored.items()}
            self._first_shapes.check_times([id], lengths)
        self._space.check(self._thread.nbytes + nbytes, self._under_way.kept)
        part = self._part  # here, since a call costs a twentieth of a short utterance
        if part is None:
            part = self._part_for({name: array.shape[1:] for name, array in stored.items()})
        # in this thread, so that a refused utterance is an error of its own `write`
        encoded = part.encode_lossy(id, stored)
        if part.checks:
            part.check(id, {name: (len(each), each.nbytes) for name, each in stored.items()})
        self._thread.add(part, id, stored, encoded, stamps, values)
        self._kinds = kinds
        self._count_taken([id], nbytes)

    def write_batch(
        self,
        ids: Sequence[str],
        arrays: Mapping[str, ArrayLike],
        lengths: LengthsByFeature = None,
        *,
        layout: BatchLayout = "padded",
        annotations: Mapping[str, Mapping[str, object]] | None = None,
        stamps: Mapping[str, Stamps] | None = None,
    ) -> None:
        """Store the features of some utterances, as `CacheWriter.write_batch` does."""
        told = _by_id("annotations", annotations)
        known = _by_id("stamps", stamps)
        values = {id: check_annotations(id, each, self._names) for id, each in told.items()}
        known = {id: check_stamps(id, each) for id, each in known.items()}
        given = (arrays, lengths, layout)
        batch = check_batch(ids, *given, values, known, self.features, self._memory)
        with self.lock:
            self._check_not_closed()
            self._thread.check()
            if batch.ids:
                self._take_batch(batch)

    def _take_batch(self, batch: CheckedBatch) -> None:
        self._known.check_all_new(batch.ids, self._count)
        kinds = self._kinds
        for id, each in batch.annotations.items():
            kinds = with_kinds(id, each, kinds)
        dims = batch.dims()
        for name, packed in batch.features.items():
            feature = self.features[name]
            feature.check_dims(batch.ids[0], dims[name], self._dims.get(name), packed.lengths[0])
            self._first_shapes.check_many(batch.ids, feature, packed.lengths, dims[name])
        lengths = {name: packed.lengths for name, packed in batch.features.items()}
        self._first_shapes.check_times(batch.ids, lengths)
        self._space.check(self._thread.nbytes + batch.nbytes, self._under_way.kept)
        pieces = batch.pieces(self._part_for(dims))
        self._kinds = kinds
        for piece in pieces:
            if self._part_rows + len(piece) > PART_ROWS and self._may_seal():
                self._end_part()
            self._thread.put_batch(self._part_for(dims), piece)
            self._count_taken(piece.ids, piece.nbytes)

    def _count_taken(self, ids: Sequence[str], nbytes: int) -> None:
        for id in ids:
            self._known.take(id, self._count)
            self._count += 1
        self.bytes_written += nbytes
        self._part_bytes += nbytes
        self._part_rows += len(ids)
        self._space.take(nbytes, len(ids))
        is_full = self._part_bytes >= PART_BYTES or self._part_rows >= PART_ROWS
        if is_full and self._may_seal():
            self._end_part()

    @property
    def part(self) -> str | None:
        """The name of the part that takes the next utterance; None: a new one."""
        return None if self._part is None else self._part.name

    def trust_shapes(self) -> None:
        """Take shapes that look like mistakes without a word: they are of arrays stored before."""
        self._first_shapes.trusting = True

    def expect_more(self, utterances: int) -> None:
        """Set how many utterances are still to come, so that a disk too small is noticed early."""
        with self.lock:
            self.check_open()
            self._space.expect(utterances)

    def commit(self) -> int:
        """Make all that was written durable; returns how many utterances of this writer are."""
        with self.lock:
            self.check_open()
            self._thread.put(self._under_way.commit)
            self._thread.drain()
            return self._under_way.committed

    @property
    def committed(self) -> int:
        """The utterances of this writer that are durable, in the order of writing."""
        return self._under_way.committed

    def ask_before(self, *, commits: Callable[[], bool], seals: Callable[[], bool]) -> None:
        """Ask both before anything is committed, or sealed, that nobody has asked for.

        While they say no, what was written is kept back, and lost with the process. `commits` is
        asked in any thread, every two seconds, `seals` when a part is full, within the call that
        fills it; `commit`, `seal` and `close` ask nobody.
        """
        self._thread.may_commit, self._may_seal = commits, seals

    def show(self) -> None:
        """Show other processes what was written soon, before it is durable."""
        with self.lock:
            self.check_open()
            self._thread.put(self._under_way.show)

    def seal(self) -> None:
        """Finish the files of what was written so far, so that it can be published."""
        with self.lock:
            self.check_open()
            self._end_part()
            self._thread.drain()
            for part in [*self._under_way.unsealed]:  # an interrupt came when they were ended
                self._thread.put(partial(self._under_way.seal, part))
            self._thread.drain()
            if self._under_way.committed < self._count:  # never: a promise worth a comparison
                raise CorruptCacheError(
                    f"{self._count} utterances were written to {str(self.path)!r}, fewer are "
                    "stored; run the same again, it goes on from what is stored"
                )

    def close(self) -> None:
        """Seal what was written and stop."""
        with self.lock:
            if not self.closed:
                try:
                    if not self._thread.is_stopping:  # else an interrupt came when this ended
                        self.seal()
                finally:
                    self._stop(finish=True, discard=False)
                    self._first_shapes.tell(self.path)

    def look_again(self) -> None:
        """Find out anew which utterances are stored: some were deleted since, and all is sealed."""
        with self.lock, reading(self.path):
            stored = find_stored(self.path, self._fingerprint, self._held)
            self._known.look_again(stored.rows)

    def published(self) -> None:
        """Take note that what was sealed is published: `abort` leaves it alone from now on."""
        self._under_way.published()

    def abort(self) -> None:
        """Remove what this writer has written and what is not published."""
        with self.lock:
            if not self.closed:
                self._stop(finish=False, discard=True)

    def leave(self) -> None:
        """Stop as if killed: what is committed is left to whoever publishes next, the rest lost."""
        with self.lock:
            if not self.closed:
                self._stop(finish=False, discard=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_after(error, self.close)

    @property
    def lock(self) -> AbstractContextManager[object]:
        """The lock that one thread at a time holds while it changes anything.

        Raises `ClosedError` in a process that was forked from the writer's, where nobody may be
        left to let go of it.
        """
        self._thread.check_process()
        return self._lock

    def check_open(self) -> None:
        """Raise `ClosedError` for a writer that is closed, or belongs to another process."""
        self._thread.check_process()
        self._check_not_closed()

    def _check_not_closed(self) -> None:
        if self.closed or self._thread.is_stopping:
            raise ClosedError(f"the writer of {str(self.path)!r} is closed; open another one")

    def _part_for(self, dims: Mapping[str, tuple[int, ...]]) -> OpenPart:
        if self._part is None:
            header = header_for(self.features, dims, self._build, self._fingerprint)
            self._part = self._under_way.start(self.features, header)
            self.on_part(self._part.name)
            self._dims = dims
        return self._part

    def _end_part(self) -> None:
        part, self._part = self._part, None
        self._part_bytes = self._part_rows = 0
        if part is not None:
            self._thread.put(partial(self._under_way.seal, part))

    def _stop(self, *, finish: bool, discard: bool) -> None:
        """End the thread and let go of all parts; an interrupt (Ctrl-C) leaves the writer open."""
        self._thread.stop(finish)
        try:
            if discard:
                with explained(self.path, self._under_way.kept):
                    self._under_way.discard()
            else:
                self._under_way.release()
        except Exception:
            self.closed = True
            raise
        self.closed = True
        self.forget()


def _yes() -> bool:
    return True


def _by_id(what: str, given: Mapping[str, T] | None) -> Mapping[str, T]:
    """Return what is said of utterances, by id; raises `FeatureError` for what is no mapping."""
    if given is not None and not isinstance(given, Mapping):
        raise FeatureError(
            f"the {what} of a batch are a mapping of ids to those of each, {{'utt-1': ...}}, not "
            f"{given!r:.80}"
        )
    return given or {}

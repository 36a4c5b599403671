"""`PartWriter`: stores utterances, part after part.

It checks arrays in the caller's thread; another thread encodes and writes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from featcache._checks import directory
from featcache._closing import close_after
from featcache._recycled import RecycledMemory
from featcache._tensors import ArrayLike
from featcache.declaration import Features, by_name
from featcache.errors import ClosedError, CorruptCacheError, FeatureError
from featcache.format.annotations import check_annotations, with_kinds
from featcache.format.feature_sets import features_beside
from featcache.format.files import check_id, explained, reading
from featcache.format.fingerprint import cache_fingerprint, digest_of_canonical
from featcache.format.index import UNKNOWN, Stamps, check_stamps
from featcache.format.part import header_for
from featcache.writing.arrays import (
    NOTHING,
    BatchLayout,
    CheckedUtterances,
    FirstShapes,
    LengthsByFeature,
    check_batch,
    check_one,
)
from featcache.writing.background import always, close_at_exit, nothing
from featcache.writing.free_space import FreeSpace
from featcache.writing.held import HeldCache
from featcache.writing.known_ids import KnownIds, find_stored
from featcache.writing.open_part import OpenPart
from featcache.writing.queue import QUEUE_BYTES, HandOver, PartsUnderWay

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
        held: the cache in the hand of the `CacheWriter` that this is the part writer of, which
            knows the fingerprint.
        on_part: told the name of each part before anything is written to it.

    Attributes:
        parts: the names of the parts that it has begun.
    """

    def __init__(
        self,
        path: str | Path,
        features: Features,
        fingerprint: Mapping[str, object] | None = None,
        *,
        held: HeldCache | None = None,
        on_part: Callable[[str], object] = lambda name: None,
    ) -> None:
        self.path = directory(path, "a cache").absolute()
        self.features = by_name(features)
        self.bytes_written = self._count = 0  # of the utterances that this writer took
        self.closed = False
        self._lock = threading.RLock()  # of the `CacheWriter` too, if it is of one
        self._fingerprint = _made_of(self.features, fingerprint, held)
        with reading(self.path):
            stored = find_stored(self.path, self._fingerprint, held)
            beside = features_beside(self.path)
        self._held, self._build, self._dims, self._kinds = held, *stored[:3]
        self._names = beside.union(self.features)  # which no annotation has
        self._known = KnownIds(self.path, stored.rows)
        self._memory = RecycledMemory(2 * QUEUE_BYTES)  # what waits, and as much to be used next
        self._first_shapes = FirstShapes(self.features)
        self._space = FreeSpace(self.path, len(self.features), stored.utterances)
        # takes what is written; the thread that stores may be at the one before
        self._part: OpenPart | None = None
        self._part_bytes = self._part_rows = 0
        self._on_part = on_part
        self.parts: list[str] = []
        self._may_seal: Callable[[], bool] = always
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
        utterance = self._checked(id, arrays, annotations, stamps)
        with self.lock:
            self._take((utterance,), self._thread.add)

    def write_through(
        self,
        id: str,
        arrays: Mapping[str, ArrayLike],
        *,
        annotations: Mapping[str, object] | None = None,
    ) -> None:
        """Store the features of one utterance, which survive the end of the process from then on.

        As `write` and `commit(durably=False)`, and quicker outside the main thread: arrays are not
        copied there, and what another thread changes in them meanwhile would be told as damage.
        """
        counted = self._thread.stores_here
        utterance = self._checked(id, arrays, annotations, UNKNOWN, counted=counted)
        with self.lock:
            self._take((utterance,), self._thread.store)
            self._thread.run(partial(self._under_way.commit, durably=False))

    def _checked(
        self,
        id: str,
        arrays: Mapping[str, ArrayLike],
        annotations: Mapping[str, object] | None,
        stamps: Stamps,
        *,
        counted: bool = False,
    ) -> CheckedUtterances:
        check_id(id)
        values = {id: check_annotations(id, annotations, self._names)} if annotations else NOTHING
        known = {id: check_stamps(id, stamps)} if stamps is not UNKNOWN else NOTHING
        return check_one(id, arrays, known, values, self.features, counted=counted)

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
        pieces = check_batch(ids, *given, values, known, self.features, self._memory)
        with self.lock:
            self._take(pieces, self._thread.put_batch)

    def check(self, id: str, arrays: Mapping[str, ArrayLike]) -> None:
        """Raise what `write` would raise for the arrays of an utterance, be it stored or not."""
        utterance = check_one(id, arrays, NOTHING, NOTHING, self.features)
        with self.lock:
            self.check_open()
            self._prepared((utterance,))

    def _take(
        self,
        pieces: Sequence[CheckedUtterances],
        hand_over: Callable[[OpenPart, CheckedUtterances], object],
    ) -> None:
        """Hand over utterances, once it is sure that all of them can be stored."""
        self.check_open()
        self._thread.check()
        kinds, number = self._kinds, self._count
        for piece in pieces:
            self._known.check_new(piece.ids, number)
            number += len(piece.ids)
            for id, values in piece.annotations.items():
                kinds = with_kinds(id, values, kinds)
        pieces = self._prepared(pieces)
        self._kinds = kinds
        for piece in pieces:
            if self._part_rows + len(piece.ids) > PART_ROWS and self._may_seal():
                self._end_parts(self._under_way.seal)
            hand_over(self._part_for(piece), piece)
            self._count_taken(piece)

    def _prepared(self, pieces: Sequence[CheckedUtterances]) -> list[CheckedUtterances]:
        """Return utterances as parts take them; raises what storing them would. `lock` is held."""
        nbytes = 0
        for piece in pieces:
            for name, packed in piece.arrays.items():
                shape = packed.array.shape[1:]
                self.features[name].check_dims(
                    piece.ids[0], shape, self._dims.get(name), packed.lengths[0]
                )
            self._first_shapes.check(piece)
            nbytes += piece.nbytes
        self._space.check(self._thread.nbytes + nbytes, self._under_way.kept)
        # in this thread, so that a refused utterance is an error of its own `write`
        return [self._part_for(piece).prepare(piece) for piece in pieces]

    def _count_taken(self, taken: CheckedUtterances) -> None:
        for id in taken.ids:
            self._known.take(id, self._count)
            self._count += 1
        self.bytes_written += taken.nbytes
        self._part_bytes += taken.nbytes
        self._part_rows += len(taken.ids)
        self._space.take(taken.nbytes, len(taken.ids))
        is_full = self._part_bytes >= PART_BYTES or self._part_rows >= PART_ROWS
        if is_full and self._may_seal():
            self._end_parts(self._under_way.seal)

    @property
    def part(self) -> str | None:
        """The name of the part that takes the next utterance; None: a new one."""
        return None if self._part is None else self._part.name

    def trust_shapes(self) -> None:
        """Take shapes that look like mistakes without a word: they are of arrays stored before."""
        self._first_shapes.trust()

    def expect_more(self, utterances: int) -> None:
        """Set how many utterances are still to come, so that a disk too small is noticed early."""
        with self.lock:
            self.check_open()
            self._space.expect(utterances)

    def commit(self, *, durably: bool = True) -> int:
        """Make all that was written durable; returns how many utterances of this writer are.

        Not `durably`, it survives the end of the process alone, and within two seconds that of the
        machine, too.
        """
        with self.lock:
            self.check_open()
            self._thread.run(partial(self._under_way.commit, durably=durably))
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
        self._thread.ask_before_commits(commits)
        self._may_seal = seals

    def show(self) -> None:
        """Show other processes what was written soon, before it is durable."""
        with self.lock:
            self.check_open()
            self._thread.put(self._under_way.show)

    def seal(self) -> None:
        """Finish the files of what was written so far, so that it can be published."""
        with self.lock:
            self.check_open()
            self._end_parts(self._under_way.seal)
            self._thread.drain()
            self._check_stored()

    def close(self) -> None:
        """Seal what was written and stop."""
        with self.lock:
            if not self.closed:
                ends = not self._thread.is_stopping  # else an interrupt came when it did
                try:
                    if ends:
                        self._end_parts(self._under_way.seal_last)
                finally:
                    self._stop(finish=True, discard=False)
                    self._first_shapes.tell(self.path)
                self._thread.check()
                if ends:
                    self._check_stored()

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
        """Raise `ClosedError` for a writer that is closed; `lock` is held."""
        if self.closed or self._thread.is_stopping:
            raise ClosedError(f"the writer of {str(self.path)!r} is closed; open another one")

    def _part_for(self, utterances: CheckedUtterances) -> OpenPart:
        if self._part is None:
            dims = {name: each.array.shape[1:] for name, each in utterances.arrays.items()}
            header = header_for(self.features, dims, self._build, self._fingerprint)
            self._part = self._under_way.start(self.features, header)
            self._on_part(self._part.name)
            self.parts.append(self._part.name)
            self._dims = dims
        return self._part

    def _end_parts(self, seal: Callable[[OpenPart], object]) -> None:
        """Seal all parts, in the thread that stores; some may be on their way to it already."""
        self._part, self._part_bytes, self._part_rows = None, 0, 0
        for part in [*self._under_way.unsealed]:
            self._thread.put(partial(seal, part))

    def _check_stored(self) -> None:
        if self._under_way.committed < self._count:  # never: a promise worth a comparison
            raise CorruptCacheError(
                f"{self._count} utterances were written to {str(self.path)!r}, fewer are "
                "stored; run the same again, it goes on from what is stored"
            )

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


def _made_of(
    features: Features, fingerprint: Mapping[str, object] | None, held: HeldCache | None
) -> str:
    """Return the digest of what is declared, which who holds the cache has in hand."""
    if held is not None:
        return held.manifest.building_fingerprint
    return digest_of_canonical(cache_fingerprint(by_name(features), fingerprint))


def _by_id(what: str, given: Mapping[str, T] | None) -> Mapping[str, T]:
    """Return what is said of utterances, by id; raises `FeatureError` for what is no mapping."""
    if given is not None and not isinstance(given, Mapping):
        raise FeatureError(
            f"the {what} of a batch are a mapping of ids to those of each, {{'utt-1': ...}}, not "
            f"{given!r:.80}"
        )
    return given or {}

"""`PartWriter`: stores utterances, part after part.

It checks arrays in the caller's thread; another thread encodes and writes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from featcache._checks import directory
from featcache._closing import close_after
from featcache.declaration.feature_config import Features, by_name
from featcache.errors import ClosedError, CorruptCacheError
from featcache.interface import Array
from featcache.store.format.annotations import NONE, Values, check_annotations, with_kinds
from featcache.store.format.disk_errors import explained, reading
from featcache.store.format.feature_sets import features_beside
from featcache.store.format.fingerprint import cache_fingerprint, fingerprint_digest
from featcache.store.format.ids import check_id
from featcache.store.format.part import header_for
from featcache.store.format.stamps import UNKNOWN, Stamps, check_stamps
from featcache.store.writing.casts import ArrayLike, store_all
from featcache.store.writing.checked_batch import CheckedBatch, check_batch
from featcache.store.writing.copy_memory import CopyMemory
from featcache.store.writing.first_shapes import FirstShapes
from featcache.store.writing.free_space import FreeSpace
from featcache.store.writing.hand_over import HandOver
from featcache.store.writing.known_ids import KnownIds, find_stored
from featcache.store.writing.open_part import OpenPart
from featcache.store.writing.packed_batch import BatchLayout, LengthsByFeature
from featcache.store.writing.parts_under_way import PartsUnderWay
from featcache.store.writing.unclosed import close_at_exit

PART_BYTES = 8 << 30  # a killed writer's part is read when it is recovered, and an HDF5 file copied
PART_ROWS = 100_000  # notes on these stay in memory until the part is sealed, about 1 KB each


class PartWriter:
    """Adds utterances to a cache whose `CacheWriter` is open in another process.

    What is written is in the cache once the `CacheWriter` publishes, after this one was closed. A
    writer that is still open when the process ends is closed then.

    Args:
        path: the cache directory.
        features: the declarations, the same as the `CacheWriter`'s.
        fingerprint: what the features are made from, the same as the `CacheWriter`'s.
    """

    def __init__(
        self, path: str | Path, features: Features, fingerprint: Mapping[str, object] | None = None
    ) -> None:
        self.path = directory(path, "a cache").absolute()
        self.features = by_name(features)
        self.bytes_written = 0
        self.closed = False
        self._one_at_a_time = threading.RLock()  # threads may share a writer
        self._fingerprint = fingerprint_digest(cache_fingerprint(self.features, fingerprint))
        with reading(self.path):
            found = find_stored(self.path, self._fingerprint)
            beside = features_beside(self.path)
        self._build, self._dims, self._kinds, stored = found
        self._names = beside.union(self.features)  # which no annotation has
        self._known = KnownIds(self.path, stored)
        self._memory = CopyMemory()
        self._first_shapes = FirstShapes()
        self._count = 0  # utterances that this writer took
        rows = sum(len(each.index) for each in stored)
        self._space = FreeSpace(self.path, len(self.features), rows)
        # takes what is written; the thread that stores may be at the one before
        self._part: OpenPart | None = None
        self._part_bytes = self._part_rows = 0
        # told the name of each part before anything is written to it
        self.on_part: Callable[[str], object] = lambda name: None
        self._under_way = PartsUnderWay(self.path, self._known)
        self._thread = HandOver(self.path, self.features, self._memory, self._under_way)
        what = f"the part writer of {str(self.path)!r}"
        self.forget = close_at_exit(self, what, PartWriter.close)

    def __contains__(self, id: str) -> bool:
        """Say whether an utterance is stored already, or was written now."""
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
        self.check_open()
        with self._one_at_a_time:
            self._take(id, stored, stamps, values)

    def _take(self, id: str, stored: Mapping[str, Array], stamps: Stamps, values: Values) -> None:
        self.check_open()
        self._thread.check()
        self._known.check_new(id, self._count)
        kinds = with_kinds(id, values, self._kinds) if values else self._kinds
        nbytes = 0
        for name, array in stored.items():
            feature, shape = self.features[name], array.shape
            feature.check_dims(id, shape[1:], self._dims.get(name), shape[0])
            self._first_shapes.check(id, feature, shape)
            nbytes += array.nbytes
        self._space.check(self._thread.nbytes + nbytes, self._under_way.kept)
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
        told, known = annotations or {}, stamps or {}
        values = {id: check_annotations(id, each, self._names) for id, each in told.items()}
        known = {id: check_stamps(id, each) for id, each in known.items()}
        given = (arrays, lengths, layout)
        batch = check_batch(ids, *given, values, known, self.features, self._memory)
        with self._one_at_a_time:
            self.check_open()
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
        self._space.check(self._thread.nbytes + batch.nbytes, self._under_way.kept)
        pieces = batch.pieces(self._part_for(dims))
        self._kinds = kinds
        for piece in pieces:
            if self._part_rows + len(piece) > PART_ROWS:
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
        if self._part_bytes >= PART_BYTES or self._part_rows >= PART_ROWS:
            self._end_part()

    @property
    def part(self) -> str | None:
        """The name of the part that takes the next utterance; None: a new one."""
        return None if self._part is None else self._part.name

    def trust_shapes(self) -> None:
        """Take shapes that look like mistakes without a word: they are of arrays stored before."""
        self._first_shapes.trusting = True

    def expect_more(self, utterances: int) -> None:
        """Say how many utterances are still to come, so that a disk too small is noticed early."""
        self.check_open()
        self._space.expect(utterances)

    def commit(self) -> int:
        """Make all that was written durable; returns how many utterances of this writer are."""
        self.check_open()
        with self._one_at_a_time:
            self._thread.put(self._under_way.commit)
            self._thread.drain()
        return self._under_way.committed

    @property
    def committed(self) -> int:
        """The utterances of this writer that are durable, in the order of writing."""
        return self._under_way.committed

    def show(self) -> None:
        """Let other processes find what was written soon, before it is durable."""
        self.check_open()
        with self._one_at_a_time:
            self._thread.put(self._under_way.show)

    def seal(self) -> None:
        """Finish the files of what was written so far, so that it can be published."""
        self.check_open()
        with self._one_at_a_time:
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
        self._thread.check_process()
        with self._one_at_a_time:  # or what another thread writes meanwhile would be lost
            if not self.closed:
                try:
                    self.seal()
                finally:
                    self._stop(finish=True)
                    self._first_shapes.tell(self.path)

    def look_again(self) -> None:
        """Find out anew which utterances are stored: some were deleted since, and all is sealed."""
        with reading(self.path):
            _, _, _, stored = find_stored(self.path, self._fingerprint)
        self._known.look_again(stored)

    def published(self) -> None:
        """Take note that what was sealed is published: `abort` leaves it alone from now on."""
        self._under_way.published()

    def abort(self) -> None:
        """Remove what this writer has written and what is not published."""
        self._thread.check_process()
        if not self.closed:
            self._stop(finish=False)
            with explained(self.path, self._under_way.kept):
                self._under_way.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        close_after(error, self.close)

    def check_open(self) -> None:
        """Raise `ClosedError` for a writer that is closed, or belongs to another process."""
        self._thread.check_process()
        if self.closed:
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

    def _stop(self, finish: bool) -> None:
        self.closed = True
        self.forget()
        self._thread.stop(finish)
        if finish:
            self._under_way.release()

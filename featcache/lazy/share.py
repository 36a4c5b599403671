"""The share of one process in filling a cache: what it reads, and the part that it writes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import CacheLockedError, DuplicateIdError, KeyNotFoundError
from featcache.interface import Array
from featcache.lazy.claims import Claims
from featcache.lazy.live_cache import ABSENT, LiveCache
from featcache.lazy.results import Results, as_read_back, declared_for, exactly_read_back
from featcache.store.format.disk_errors import explained
from featcache.store.writing.cache_writer import CacheWriter
from featcache.store.writing.casts import ArrayLike, check_features, to_storage
from featcache.store.writing.claim import claim_directory
from featcache.store.writing.part_writer import PartWriter
from featcache.store.writing.publish_sealed import publish_sealed

PATIENCE_S = 60.0  # then an utterance that another process computes is computed here, too
IDLE_S = 30.0  # without a miss, and what was written is published
LOCK_PATIENCE_S = 3.0  # torch gives a DataLoader's worker 5 s to leave
_PAUSES_S = (0.002, 0.05)


@dataclass(frozen=True)
class Plan:
    """The cache that is filled, and with what: the same in all processes."""

    path: Path
    features: Mapping[str, FeatureStorageConfig] | None  # None: as the first result has them
    names: Sequence[str]  # of the features, where the result does not name them
    fingerprint: Callable[[], Mapping[str, object]]
    # settings of features that nobody declares
    storage: Mapping[str, object] = field(default_factory=dict)
    read_only: bool = False
    accept: bool = False  # a change of code or settings, if an utterance comes out the same
    expected: Sequence[str] | None = None  # ids

    @property
    def known_names(self) -> Sequence[str]:
        """The names of the features, or the first of them."""
        return self.names if self.features is None else list(self.features)


class Share:
    """Work of one process on a cache that many fill; threads may share it.

    Attributes:
        pid: the process.
    """

    def __init__(self, plan: Plan) -> None:
        self.pid = os.getpid()
        self._plan = plan
        self._lock = threading.RLock()
        self._live = LiveCache.opened(plan.path, plan.known_names, plan.features, plan.fingerprint)
        self._claims: Claims | None = None
        self._writer: PartWriter | None = None
        self._fresh: dict[str, dict[str, Array]] = {}  # of the writer, in its order, not durable
        self._durable = 0  # number of those that are durable
        self._computing: set[str] = set()  # ids
        self._last_miss = 0.0

    def get(
        self, id: str, compute: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """Return the result of an utterance: read, or computed from it and the rest, and stored."""
        if self._live is not None:
            found = self._live.published(id)
            if found is not ABSENT:
                if self._writer is not None and time.monotonic() - self._last_miss > IDLE_S:
                    self.publish()
                return found
        found = self._unpublished(id)
        if found is ABSENT:
            found = self._awaited(id)
        if found is not ABSENT:
            return found
        if self._plan.read_only:
            raise KeyNotFoundError(f"no utterance {id!r} in cache {str(self._plan.path)!r}")
        return self._computed(id, partial(compute, id, *args, **kwargs))

    def publish(self, complete: bool | None = None, patience_s: float = LOCK_PATIENCE_S) -> bool:
        """Let readers see all that is stored; False if another process is at it for too long."""
        with self._lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
            if self._live is None:
                return True
            done = publish_sealed(
                self._live.path,
                complete=complete,
                expected=self._plan.expected,
                patience_s=patience_s,
            )
            self._live.look()
            self._fresh.clear()
            self._durable = 0
            return done

    def close(self) -> None:
        """Publish what was written, and give up all claims."""
        with self._lock:
            try:
                left = self._live is not None and self._live.has_left
                if self._writer is not None or (left and self._may_write()):
                    self.publish()
            finally:
                claims, self._claims = self._claims, None
                if claims is not None:
                    claims.close()

    def _may_write(self) -> bool:
        return not self._plan.read_only and os.access(self._plan.path, os.W_OK)

    def _unpublished(self, id: str) -> object:
        if self._live is None:
            return ABSENT
        fresh = self._fresh.get(id)
        if fresh is not None:
            return self._live.result_of({name: array.copy() for name, array in fresh.items()})
        return self._live.unpublished(id)

    def _awaited(self, id: str) -> object:
        """Return what another process computes now; `ABSENT`, with the claim, if nobody does."""
        until = time.monotonic() + PATIENCE_S
        pause, most = _PAUSES_S
        found = self._looked_up(id)
        while found is ABSENT and not self._plan.read_only:
            is_ours = self._is_ours(id, late=time.monotonic() > until)
            found = self._looked_up(id)  # who had claimed it may have delivered since the last look
            if is_ours:
                if found is not ABSENT:
                    self._done(id)
                break
            if found is ABSENT:
                time.sleep(pause)
                pause = min(1.5 * pause, most)
        return found

    def _looked_up(self, id: str) -> object:
        with self._lock:
            self._look()
        found = ABSENT if self._live is None else self._live.published(id)
        return self._unpublished(id) if found is ABSENT else found

    def _is_ours(self, id: str, *, late: bool) -> bool:
        """Claim an utterance; tells whether this thread is to compute it, at the latest if late."""
        with self._lock:
            if id in self._computing:  # another thread does
                return late
            if self._claims is None:
                with explained(self._plan.path, lambda: "all that was committed before is kept"):
                    claim_directory(self._plan.path)
                    self._claims = Claims(self._plan.path)
            holder = self._claims.take(id)
            if holder is not None and late:
                self._claims.wait_no_more(holder)
                holder = self._claims.take(id)
            if holder is None:
                self._computing.add(id)
            return holder is None

    def _look(self) -> None:
        if self._live is None:
            plan = self._plan
            self._live = LiveCache.opened(
                plan.path, plan.known_names, plan.features, plan.fingerprint
            )
        else:
            self._live.look()

    def _computed(self, id: str, compute: Callable[[], object]) -> object:
        try:
            value = compute()
            live = self._live or self._created(id, value)
            arrays = live.results.arrays(id, value)
            check_features(id, arrays, live.features)
            is_declared = self._plan.features is not None or not live.has_form
            back = as_read_back if is_declared else exactly_read_back
            read = {name: back(id, arrays[name], each) for name, each in live.features.items()}
            self._store(id, arrays, read, live)
        except BaseException:
            self._give_up(id)
            raise
        self._done(id)
        return live.result_of(read)

    def _store(
        self,
        id: str,
        arrays: Mapping[str, ArrayLike],
        read: Mapping[str, Array],
        live: LiveCache,
    ) -> None:
        with self._lock:
            self._last_miss = time.monotonic()
            writer = self._writer = self._writer or live.part_writer()
            for done in [*self._fresh][: writer.committed - self._durable]:
                del self._fresh[done]
                self._durable += 1
            try:
                writer.write(id, arrays)
            except DuplicateIdError:  # another process was as quick, or it was deleted since
                return
            self._fresh[id] = {name: array.copy() for name, array in read.items()}
            writer.show()

    def _created(self, id: str, value: object) -> LiveCache:
        """Make the cache, declared as its first result is, unless another process was quicker."""
        plan = self._plan
        with self._lock:
            results = Results.of(id, value, plan.known_names)
            features = plan.features or declared_for(id, results, value, plan.storage)
            first = results.arrays(id, value)
            check_features(id, first, features)
            for name, feature in features.items():  # or there would be a cache that holds none
                to_storage(id, first[name], feature)
            made_from = {**plan.fingerprint(), "results": results.to_json()}
            while self._live is None:
                try:
                    CacheWriter(plan.path, features, made_from).close(complete=False)
                except CacheLockedError:  # another one makes it
                    time.sleep(_PAUSES_S[0])
                self._look()
            return self._live

    def _done(self, id: str) -> None:
        with self._lock:
            self._computing.discard(id)

    def _give_up(self, id: str) -> None:
        with self._lock:
            self._computing.discard(id)
            if self._claims is not None:
                self._claims.give_up(id)

"""The share of one process in filling a cache: what it reads and writes, and its claims."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import xxhash

from featcache._closing import close_after
from featcache._tensors import ArrayLike
from featcache.container_files import bytes_at
from featcache.container_files.lock import WriterLock, holder_text, is_locked
from featcache.container_files.system import O_BINARY, O_NOFOLLOW
from featcache.declaration import FeatureStorageConfig
from featcache.errors import (
    CacheError,
    CacheLockedError,
    ComputeError,
    DuplicateIdError,
    FeatureError,
    ReadOnlyError,
    StaleCacheError,
)
from featcache.extraction.process_part import WhileFilling
from featcache.format import Stamps, check_annotations, check_id, check_own_directory, explained
from featcache.interface import Array
from featcache.lazy.arguments import Call
from featcache.lazy.live_cache import ABSENT, CURE, LiveCache, MadeFrom, StoredAgain, TwiceComputed
from featcache.lazy.results import Results, as_read_back, declared_for, exactly_read_back
from featcache.writing.arrays import check_features, to_storage
from featcache.writing.background import close_at_exit
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.part_writer import PartWriter
from featcache.writing.session import publish_sealed
from featcache.writing.sets import claim_directory

# Claims on utterances that are being computed, so that no two processes compute the same one.
#
# All processes that fill a cache append to one file, `work-through/claims`, records of 16 bytes:
# the xxh3-64 of an id, and the token of the claimant, an even number; the token plus one gives
# the claim up. Of an id the first claimant that lives has it. A claimant lives while it holds the
# lock of its directory, `work-through/<token>`, which goes with the process. Claims are advice:
# where they fail, an utterance is computed twice, and the store keeps one.

HOME = "work-through"
_FILE = "claims"
_RECORD = struct.Struct("<QQ")
_TOKEN = re.compile("[0-9a-f]{16}")
_CLOSED = -1
_MOST = 1 << 20  # claims that are remembered; the oldest are forgotten, being long computed


class Claims:
    """Claims of this process on utterances of a cache, and those of others; used by one thread."""

    def __init__(self, cache: Path) -> None:
        self._home = cache / HOME
        check_own_directory(self._home)
        self._home.mkdir(parents=True, exist_ok=True)
        self._read = 0  # bytes
        self._claimants: dict[int, list[int]] = {}  # by hash of the id, the first one first
        self._gone: set[int] = set()  # claimants that do not live, or that one waits for no more
        self._token, self._lock = self._begin()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | O_BINARY | O_NOFOLLOW
            self._file = os.open(self._home / _FILE, flags, 0o666)
        except BaseException:  # an interrupt, too, whose traceback may keep this alive
            self._lock.release()
            raise

    @property
    def closed(self) -> bool:
        """Whether all were given up."""
        return self._file == _CLOSED

    def take(self, id: str) -> int | None:
        """Claim an utterance; returns the one that has it already, or None: it is ours."""
        key = xxhash.xxh3_64_intdigest(id.encode())
        self._look()
        holder = self._holder(key)
        if holder is None:
            os.write(self._file, _RECORD.pack(key, self._token))
            self._look()
            holder = self._holder(key)
            if holder != self._token:  # another one was quicker; nobody is to wait for us after it
                self.give_up(id)
        return None if holder == self._token else holder

    def give_up(self, *ids: str) -> None:
        """Leave utterances to others: they failed here, or are stored, and may be deleted."""
        if self.closed:
            return
        keys = [xxhash.xxh3_64_intdigest(id.encode()) for id in ids]
        os.write(self._file, b"".join(_RECORD.pack(key, self._token + 1) for key in keys))

    def wait_no_more(self, claimant: int) -> None:
        """Take a claimant for gone: it has not delivered for too long."""
        self._gone.add(claimant)

    def close(self) -> None:
        """Give up all claims, and remove what processes that are gone have left.

        An interrupted one may be repeated.
        """
        self._lock.release()
        file, self._file = self._file, _CLOSED
        if file != _CLOSED:
            os.close(file)
        with contextlib.suppress(OSError):  # others may be at the same
            shutil.rmtree(self._home / f"{self._token:016x}")
        remove_left(self._home.parent)

    def _begin(self) -> tuple[int, WriterLock]:
        while True:
            token = secrets.randbits(63) << 1
            place = self._home / f"{token:016x}"
            place.mkdir(parents=True, exist_ok=True)
            try:
                return token, WriterLock(place)
            except (CacheLockedError, FileNotFoundError):  # another one that tidies up was quicker
                continue

    def _holder(self, key: int) -> int | None:
        for claimant in self._claimants.get(key, ()):
            if claimant == self._token or self._lives(claimant):
                return claimant
        return None

    def _lives(self, claimant: int) -> bool:
        if claimant in self._gone:
            return False
        place = self._home / f"{claimant:016x}"
        try:
            if place.is_dir() and is_locked(place):
                return True
        except OSError:  # it has just tidied up
            pass
        self._gone.add(claimant)
        return False

    def _look(self) -> None:
        """Take note of what all have claimed since the last look."""
        size = os.fstat(self._file).st_size
        count = (size - self._read) // _RECORD.size
        if count <= 0:
            return
        data = bytes_at(self._file, count * _RECORD.size, self._read)
        self._read += len(data) - len(data) % _RECORD.size
        for key, token in _RECORD.iter_unpack(data[: len(data) - len(data) % _RECORD.size]):
            if not token & 1:
                self._claimants.setdefault(key, []).append(token)
            elif token - 1 in (claimants := self._claimants.get(key, [])):
                claimants.remove(token - 1)
                if not claimants:
                    del self._claimants[key]
        while len(self._claimants) > _MOST:
            del self._claimants[next(iter(self._claimants))]


def remove_left(cache: Path) -> None:
    """Remove what processes that are gone have left, unless others are at work or it is foreign."""
    home = cache / HOME
    with contextlib.suppress(OSError):  # others may be at the same; mostly there is nothing
        if home.is_symlink():
            return
        others = [path for path in home.iterdir() if _TOKEN.fullmatch(path.name)]
        for path in others:
            if not (path.is_symlink() or is_locked(path)):
                shutil.rmtree(path)
        if not any(path.exists() for path in others):
            (home / _FILE).unlink(missing_ok=True)
            home.rmdir()  # unless somebody else has put something there


# The share of one process in filling a cache: what it reads, and the part that it writes.

PATIENCE_S = 60.0  # then an utterance that another process computes is computed here, too
IDLE_S = 30.0  # without a miss, and what was written is published
LOCK_PATIENCE_S = 3.0  # torch gives a DataLoader's worker 5 s to leave
_PAUSES_S = (0.002, 0.05)
_log = logging.getLogger("featcache")


class _Asked(threading.local):
    """Utterances that this thread is computing, by cache and id; one counts while it is locked."""

    def __init__(self) -> None:
        self.by_id: dict[tuple[str, str], threading.Lock] = {}


_asked = _Asked()


@dataclass(frozen=True)
class FillPlan:
    """The cache that is filled, and with what: the same in all processes."""

    path: Path
    features: Mapping[str, FeatureStorageConfig] | None  # None: as the first result has them
    names: Sequence[str]  # of the features, where the result does not name them
    fingerprint: MadeFrom
    # settings of features that nobody declares
    storage: Mapping[str, object] = field(default_factory=dict)
    read_only: bool = False
    accept: bool = False  # a change of code or settings, if an utterance comes out the same
    expected: Sequence[str] | None = None  # ids
    check: bool = True  # whether stored results are computed again

    @property
    def known_names(self) -> Sequence[str]:
        """The names of the features, or the first of them."""
        return self.names if self.features is None else list(self.features)


class Share:
    """Work of one process on a cache that many fill; threads may share it.

    One lock is held while anything of it changes, and while a result is computed once more in
    doubt; never while it is computed first.

    It is closed when its process ends, or its owner is dropped, which it does not know.
    """

    def __init__(self, plan: FillPlan, owner: object) -> None:
        self._plan = plan
        self._lock = threading.RLock()
        self._live = LiveCache.opened(plan.path, plan.known_names, plan.features, plan.fingerprint)
        self._filling = WhileFilling(plan.path, plan.fingerprint.watch(), self._lock)
        self._filling.begin()
        self._claims: Claims | None = None
        self._part: _OwnPart | None = None
        # by id, what the thread that computes it holds; one that nobody holds is of a call that was
        # interrupted, whose claim is still to be given up
        self._computing: dict[str, threading.Lock] = {}
        self._twice = TwiceComputed()
        # until enough stored results were computed again
        is_to_compare = plan.check and not plan.read_only
        self._again = StoredAgain() if is_to_compare and _is_first_worker() else None
        self._doubted = StoredAgain() if is_to_compare else None  # of other entries than now
        self._last_miss = 0.0
        self._closed = self._told_of_overwrite = False
        what = f"the part of {str(plan.path)!r} that is filled by reading"
        self._forget = close_at_exit(self, what, Share.close, owner, expected=True)

    @property
    def written(self) -> int:
        """The utterances that this process has written and not sealed."""
        part = self._part
        return 0 if part is None else len(part.writer)

    def published(self, id: str, entry: int) -> object:
        """Return a published result of arguments with this entry, as often as can be; `ABSENT`."""
        live = self._live
        if live is None or self._part is not None or self._again is not None:
            return ABSENT
        try:
            return live.read(id, entry)
        except CacheError:  # `get` finds out what to do
            return ABSENT

    def get(self, call: Call) -> object:
        """Return the result of an utterance: read, or computed and stored."""
        if self._live is not None:
            found = self._live.published(call)
            if found is not ABSENT:
                again = self._doubted if call.is_doubted else self._again
                if again is not None:
                    self._compare(call, found, self._live, again)
                if self._part is not None and time.monotonic() - self._last_miss > IDLE_S:
                    self.publish()
                return found
        found = self._unpublished(call)
        return self._missed(call) if found is ABSENT else found

    def _compare(self, call: Call, found: object, live: LiveCache, again: StoredAgain) -> None:
        """Raise `StaleCacheError` if a stored result is another one now."""
        again.compare(call, found, live)
        if again.told:
            self._again = self._doubted = again  # refused for good
            since = self._plan.fingerprint.record(live.path).since()
            lines = "\n  ".join([f"computed again, {again.told}", *since])
            raise StaleCacheError(
                f"cache {str(live.path)!r} was made from something else than there is now:\n  "
                f"{lines}\n{CURE}"
            )
        self._filling.begin()  # what computing has left behind is harmless
        if again.is_over and again is self._doubted:
            self._doubted = None
        elif again.is_over:
            self._again = None

    def publish(self, complete: bool | None = None, patience_s: float = LOCK_PATIENCE_S) -> bool:
        """Show readers all that is stored; False if another process is at it for too long."""
        with self._lock:
            try:
                self._end_part()
            except StaleCacheError as error:  # something has changed: what was before is published
                close_after(error, partial(self._publish_sealed, None, patience_s))
                raise
            return self._publish_sealed(complete, patience_s)

    def _publish_sealed(self, complete: bool | None, patience_s: float) -> bool:
        live = self._look()
        if live is None:
            return True
        done = publish_sealed(
            live.path, complete=complete, expected=self._plan.expected, patience_s=patience_s
        )
        live.look()
        if live.is_overwritten and not self._told_of_overwrite:
            self._told_of_overwrite = True
            text = (
                "cache %r is being overwritten, or that was given up halfway: what is computed "
                "here is published when it is done; let it end, or run it once more"
            )
            _log.warning(text, str(live.path))
        return done

    def publish_now(self, complete: bool | None) -> None:
        """Do so, though others be at it; raises `CacheLockedError` where they are for too long."""
        if not self.publish(complete, PATIENCE_S):
            path = self._plan.path if self._live is None else self._live.path
            raise CacheLockedError(
                f"cache {str(path)!r} could not be published: it is being written by "
                f"{holder_text(path)}, which publishes what is stored; wait for it, and try again"
            )

    def close(self) -> None:
        """Publish what was written, and give up all claims; calls under way do so at their end."""
        with self._lock:
            self._closed = True
            left = self._live is not None and self._live.has_left
            in_doubt = self._filling.is_in_doubt  # and a part is left
            try:
                if self._part is not None or ((left or in_doubt) and self._may_write()):
                    self.publish()
            finally:
                claims = self._claims
                if claims is not None and not self._computing:
                    claims.close()
                    self._claims = None
                if self._part is None and not self._computing:
                    self._forget()
            if self._claims is None and self._may_write():
                remove_left(self._plan.path)

    def _may_write(self) -> bool:
        return not self._plan.read_only and os.access(self._plan.path, os.W_OK)

    def _unpublished(self, call: Call) -> object:
        live, part = self._live, self._part
        if live is None:
            return ABSENT
        fresh = None if part is None else part.fresh.get(call.id)
        if fresh is not None:
            arrays, stamps = fresh
            call.check(stamps, live.path)
            return live.result_of({name: array.copy() for name, array in arrays.items()})
        return live.unpublished(call)

    def _missed(self, call: Call) -> object:
        """Return what nobody has stored yet, from whoever computes it now, or computed here."""
        check_id(call.id)
        # `with` alone takes it and lets go of it, so that no interrupt leaves an utterance that
        # seems to be computed, and is not
        mine = threading.Lock()
        key = str(self._plan.path), call.id
        held = _asked.by_id.get(key)
        if held is not None and held.locked():
            raise ComputeError(
                f"computing utterance {call.id!r} of cache {key[0]!r} asks for its own result; "
                "call the function itself, without the cache, or ask for another id"
            )
        try:
            with mine:
                _asked.by_id[key] = mine
                found = self._awaited(call, mine)
                if found is ABSENT:
                    found = self._computed(call, mine)
            _asked.by_id.pop(key, None)
            self._close_again()
        except BaseException as error:
            _asked.by_id.pop(key, None)
            self._settle()
            close_after(error, self._close_again)
            raise
        return found

    def _close_again(self) -> None:
        if self._closed:  # while this call was under way
            self.close()

    def _awaited(self, call: Call, mine: threading.Lock) -> object:
        """Return what another one computes now; `ABSENT`, with the claim, if nobody does."""
        id = call.id
        until = time.monotonic() + PATIENCE_S
        pause, most = _PAUSES_S
        found = self._looked_up(call)
        while found is ABSENT:
            if self._plan.read_only:
                raise ReadOnlyError(
                    f"no utterance {id!r} in cache {str(self._plan.path)!r}, and file_mode='r' "
                    "computes none: take file_mode='a', or ask for one that is stored"
                )
            is_ours = self._is_ours(id, mine, late=time.monotonic() > until)
            found = self._looked_up(call)  # the claimant may have delivered since the last look
            if is_ours:
                if found is not ABSENT:
                    self._done(id, mine, delivered=False)
                break
            if found is ABSENT:
                time.sleep(pause)
                pause = min(1.5 * pause, most)
        return found

    def _looked_up(self, call: Call) -> object:
        with self._lock:
            live = self._look()
        found = ABSENT if live is None else live.published(call)
        return self._unpublished(call) if found is ABSENT else found

    def _is_ours(self, id: str, mine: threading.Lock, *, late: bool) -> bool:
        """Claim an utterance; tells whether this thread is to compute it, at the latest if late."""
        with self._lock:
            self._settle()
            if id in self._computing:  # another thread does
                return late
            self._computing[id] = mine
            if self._claims is None or self._claims.closed:
                with explained(self._plan.path, lambda: "all that was committed before is kept"):
                    claim_directory(self._plan.path)
                    self._claims = Claims(self._plan.path)
            holder = self._claims.take(id)
            if holder is not None and late:
                self._claims.wait_no_more(holder)
                holder = self._claims.take(id)
            if holder is not None:
                del self._computing[id]
            return holder is None

    def _done(self, id: str, mine: threading.Lock, *, delivered: bool) -> None:
        with self._lock:
            if self._computing.get(id) is mine:
                del self._computing[id]
                if not delivered and self._claims is not None:
                    self._claims.give_up(id)

    def _settle(self) -> None:
        """Give up the claims of calls that ended without a result, by an error or an interrupt."""
        with self._lock:
            for id, held in [*self._computing.items()]:
                if not held.locked():
                    del self._computing[id]
                    if self._claims is not None:
                        self._claims.give_up(id)

    def _look(self) -> LiveCache | None:
        """Find out what others have written, published or made of the cache since the last look."""
        plan = self._plan
        if self._live is not None:
            self._live.look()
            return self._live
        self._live = LiveCache.opened(plan.path, plan.known_names, plan.features, plan.fingerprint)
        return self._live

    def _computed(self, call: Call, mine: threading.Lock) -> object:
        id, filling = call.id, self._begun_filling()
        try:
            value = self._twice.compute(call, self._taken, filling)
        finally:
            if filling.is_in_doubt:
                self._leave_part()
        live = self._live or self._created(id, value)
        is_declared = self._plan.features is not None or not live.has_form
        arrays = live.results.arrays(id, value, None if is_declared else live.features)
        stored, texts = live.results.parted(arrays)
        check_features(id, stored, live.features)
        back = as_read_back if is_declared else exactly_read_back
        read = {name: back(id, stored[name], each) for name, each in live.features.items()}
        read |= {name: cast(Array, arrays[name]) for name in texts}
        self._store(call, _Told(stored, texts, call.stamps()), read)
        self._done(id, mine, delivered=True)
        return live.result_of(read)

    def _taken(self, id: str, value: object) -> Mapping[str, ArrayLike]:
        """Return a result as arrays, by feature."""
        live = self._live
        results = Results.of(id, value, self._plan.known_names) if live is None else live.results
        return results.arrays(id, value)

    def _store(self, call: Call, told: _Told, read: Mapping[str, Array]) -> None:
        with self._lock:
            self._last_miss = time.monotonic()
            try:
                durable = self._add(call, told, read)
            except StaleCacheError:  # it was overwritten
                self._end_part()
                self._look()
                durable = self._add(call, told, read)
            if self._claims is not None and durable:
                self._claims.give_up(*durable)

    def _add(self, call: Call, told: _Told, read: Mapping[str, Array]) -> list[str]:
        """Store an utterance in the own part; returns ids of those that have become durable."""
        self._filling.check_open()
        if self._part is None:
            assert self._live is not None
            writer = self._live.part_writer()
            filling = self._filling
            writer.ask_before(commits=filling.vouch, seals=filling.may_seal)
            self._part = _OwnPart(writer)
        durable = self._part.add(call.id, told, read)
        if self._filling.is_sure:  # else with the next commit
            self._part.writer.show()
        return durable

    def _end_part(self) -> None:
        """Seal what this process has written, and stop its writer."""
        part = self._part
        if part is None:
            return
        try:
            self._filling.check(self._drop_part)
        finally:
            if self._filling.is_in_doubt:
                self._leave_part()
        if self._part is None:
            return
        try:
            part.writer.seal()  # an interrupt leaves it here, to be sealed once more
        except Exception as error:
            self._part = None
            close_after(error, part.writer.close)
            raise
        self._part = None
        part.writer.close()
        self._give_up_fresh(part)

    def _begun_filling(self) -> WhileFilling:
        """Return what compares, begun anew while there is no cache and no other thread computes."""
        with self._lock:
            if self._live is None and len(self._computing) < 2 and not self._filling.is_same:
                self._plan.fingerprint.begin()
                watch = self._plan.fingerprint.watch()
                self._filling = WhileFilling(self._plan.path, watch, self._lock)
            return self._filling

    def _leave_part(self) -> None:
        """Stop writing; what is committed of it is published with the next publish."""
        with self._lock:
            part, self._part = self._part, None
            if part is not None:
                part.writer.leave()
                self._give_up_fresh(part)

    def _drop_part(self) -> None:
        """Remove what this process has written and what is not sealed."""
        part, self._part = self._part, None
        if part is not None:
            part.writer.published()
            part.writer.abort()
            self._give_up_fresh(part)

    def _give_up_fresh(self, part: _OwnPart) -> None:
        if self._claims is not None and part.fresh:
            self._claims.give_up(*part.fresh)

    def _created(self, id: str, value: object) -> LiveCache:
        """Make the cache, declared as its first result is, unless another process was quicker."""
        plan = self._plan
        with self._lock:
            results = Results.of(id, value, plan.known_names)
            features = plan.features or declared_for(id, results, value, plan.storage)
            first, texts = results.parted(results.arrays(id, value))
            if declared := sorted(texts.keys() & features.keys()):
                raise FeatureError(
                    f"utterance {id!r}, feature {declared[0]!r}: a text is no feature; leave its "
                    "declaration out (features=), it is kept as an annotation"
                )
            check_features(id, first, features)
            check_annotations(id, texts, features)
            for name, feature in features.items():  # or there would be a cache that holds none
                to_storage(id, first[name], feature)
            made_from = {**plan.fingerprint(), "results": results.to_json()}
            record = plan.fingerprint.record(plan.path)
            live, until = self._live, time.monotonic() + PATIENCE_S
            while live is None:
                try:
                    writer = CacheWriter(plan.path, features, made_from)
                    try:
                        record.keep(writer)
                        writer.close(complete=False)
                    except BaseException as error:  # no `with`: an interrupt may come before it
                        close_after(error, partial(writer.close, complete=False))
                        raise
                    self._again = self._doubted = None  # all that it holds is of now
                except CacheLockedError:  # another one makes it
                    if time.monotonic() > until:
                        raise
                    time.sleep(_PAUSES_S[0])
                live = self._look()
            return live


def _is_first_worker() -> bool:
    """Whether this is no worker of a DataLoader, or the first one."""
    from torch.utils.data import get_worker_info

    worker = get_worker_info()
    return worker is None or worker.id == 0


class _Told(NamedTuple):
    """An utterance as it is stored: features, texts as annotations, stamps."""

    arrays: Mapping[str, ArrayLike]
    texts: Mapping[str, str]
    stamps: Stamps


class _OwnPart:
    """The part that a process writes, and what of it others cannot read for sure yet.

    Attributes:
        fresh: by id the arrays that are not known to be durable, as they will be read, and stamps.
    """

    def __init__(self, writer: PartWriter) -> None:
        self.writer = writer
        self.fresh: dict[str, tuple[dict[str, Array], Stamps]] = {}
        self._numbers: deque[tuple[int, str]] = deque()  # of these, among the writer's utterances

    def add(self, id: str, told: _Told, read: Mapping[str, Array]) -> list[str]:
        """Store an utterance; returns ids of those that have become durable."""
        durable: list[str] = []
        while self._numbers and self._numbers[0][0] <= self.writer.committed:
            durable.append(self._numbers[0][1])
            self.fresh.pop(durable[-1], None)
            self._numbers.popleft()
        with contextlib.suppress(DuplicateIdError):
            # another process was as quick, it was deleted since, or a write of it interrupted
            self.writer.write(id, told.arrays, annotations=told.texts, stamps=told.stamps)
        self.fresh[id] = {name: array.copy() for name, array in read.items()}, told.stamps
        self._numbers.append((len(self.writer), id))
        return durable

"""Requests to object stores: one thread of asyncio a process, so many at a time, errors typed.

What an answer holds is compared with what was asked for: a range past the end of an object comes
short, and without an error.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import xxhash

from featcache.errors import ClosedError, CorruptCacheError, RemoteError
from featcache.remote.places import RemotePlace

T = TypeVar("T")
STATUS = re.compile(r"status code: ([45]\d\d)\b")  # a name may have such numbers, too
NO_RANGES = re.compile("Range request not supported|Content-Range")
PIECE_BYTES = 8 << 20  # of an upload in pieces
PIECES_AT_ONCE = 4  # of one upload
DIGEST = "featcache"  # metadata of an object: the digest of what was put
MOST_BYTES = 32 << 20  # of an object that is read whole, far above any manifest of a cache
TRIES = 3
RECENT = 256  # requests, whose speed is that of now
KNOWN = 64  # latencies, from which on it is known that one is late
LATE = 3.0  # times the latency of the slowest hundredth, after which a request is made again
LEAST_LATE_S = 0.05
LOOK_S = 0.1  # between two looks for late ones, at most
BUSY = frozenset(("429", "503"))  # what a store says that is asked too often
EMPTY = "416"  # of a range of an object without bytes
BURST_S = 0.5  # in which the requests at a time are halved once at most
# Threads of obstore let go of Python's objects behind an answer; in an interpreter that ends
# meanwhile they abort the process. So it ends so many seconds later.
END_S = 0.1

# One loop a process. What obstore began before a fork hangs in the child, and then in the parent:
# so a child that inherits a loop gets an error in its place.

_loop: asyncio.AbstractEventLoop | None = None
_disk: SimpleQueue[Callable[[], object]] | None = None
_forked = False
_starting = threading.Lock()


def _after_fork() -> None:
    global _disk, _forked, _starting
    _starting = threading.Lock()
    _disk = None
    _forked = _loop is not None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def require_unforked(url: str) -> None:
    """Raise `ClosedError` in a process that was forked after its parent had read from a store."""
    if _forked:
        raise ClosedError(
            f"{url}: reads from object stores began before this process was forked, and cannot go "
            "on in it; read in threads (FeatureLoader does), or start workers anew: "
            "multiprocessing_context='forkserver' or 'spawn'"
        )


def begin(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine in the loop of this process."""
    return asyncio.run_coroutine_threadsafe(_alone(coroutine), loop())


async def _alone(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; its error does not lead to a store's own words, which may hold secrets."""
    try:
        return await coroutine
    except Exception as error:
        error.__context__ = None
        raise


def loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process, which runs in a thread of its own."""
    global _loop
    with _starting:
        if _loop is None:
            new, name = asyncio.new_event_loop(), "featcache-remote"
            try:
                threading.Thread(target=new.run_forever, name=name, daemon=True).start()
            except RuntimeError:  # too many threads: nobody may wait for one that has none
                new.close()
                raise
            _loop = new
            atexit.register(time.sleep, END_S)
        return _loop


def aside(work: Callable[[], object]) -> None:
    """Do what waits for a disk in a thread of this process, one after the other."""
    global _disk
    with _starting:
        if _disk is None:
            works: SimpleQueue[Callable[[], object]] = SimpleQueue()
            name = "featcache-pages"
            threading.Thread(target=_work, args=(works,), name=name, daemon=True).start()
            _disk = works
    _disk.put(work)


def _work(works: SimpleQueue[Callable[[], object]]) -> None:
    while True:
        works.get()()


@dataclass
class Counts:
    """Sums over the requests of a place."""

    gets: int = 0
    again: int = 0  # of these, those after one that failed
    hedges: int = 0  # of these, those beside one that was late
    nbytes: int = 0
    read_bytes: int = 0  # that were asked for, here or fetched


class Look(NamedTuple):
    """An object as it was at one moment."""

    size: int  # bytes
    state: int  # below 0, of its ETag: another content has another one
    is_sure: bool  # False: its time of change stands for an ETag that it has not, or a weak one

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Look:
        """Return what an answer says of an object."""
        etag = meta["e_tag"] or ""
        told = etag.removeprefix("W/").strip('"') or meta["last_modified"].isoformat()
        state = (xxhash.xxh3_64_intdigest(told.encode()) >> 1) - (1 << 63)
        return cls(meta["size"], state, etag != "" and not etag.startswith("W/"))


class _Pace:
    """Times of the last requests, and how many may be made at a time.

    A store that says it is asked too often is asked half as much at a time, at most twice a second;
    with each answer it is a little more again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.room = float(most)
        self._halved = 0.0
        self._latencies: deque[float] = deque(maxlen=RECENT)
        self._ends: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def begun(self, latency_s: float) -> None:
        """Note how long it took until an answer began."""
        self._latencies.append(latency_s)

    def ended(self, nbytes: int) -> None:
        """Note that an answer is there."""
        self._ends.append((time.perf_counter(), nbytes))
        self.room = min(self.room + 1 / self.room, self._most)

    def is_too_fast(self) -> None:
        """Halve the requests at a time, once for a burst of refusals."""
        now = time.perf_counter()
        if now - self._halved > BURST_S:
            self.room, self._halved = max(self.room / 2, 1.0), now

    def latency_s(self, share: float) -> float:
        """Return the latency that a share of the last answers did not exceed; 0 without any."""
        latencies = sorted(self._latencies)
        return latencies[int(share * (len(latencies) - 1))] if latencies else 0.0

    def bytes_per_s(self) -> float:
        """Return the rate of the last answers, all requests together."""
        ends = list(self._ends)
        if len(ends) < 2:
            return 0.0
        return sum(nbytes for _, nbytes in ends[1:]) / max(time.perf_counter() - ends[0][0], 1e-6)

    def late_s(self) -> float:
        """Return the seconds after which an answer is late; infinite while too few are known."""
        if len(self._latencies) < KNOWN:
            return math.inf
        return max(LATE * self.latency_s(0.99), LEAST_LATE_S)


@dataclass(eq=False)
class _Ask:
    """Bytes of an object that are asked for."""

    name: str
    first: int
    end: int
    size: int
    etags: dict[str, str]
    state: int | None
    answer: Future[memoryview] = field(default_factory=Future)
    began: float = 0.0


class Requests:
    """Asks a store for objects below a place, or ranges of them; for threads, not for forks."""

    def __init__(self, place: RemotePlace) -> None:
        self.place = place
        self.counts = Counts()
        self._pace = _Pace(place.options.concurrency)
        require_unforked(place.url)
        # what fails is heard of, and only then asked for with patience
        self._eager, self._store = place.store(patient=False), place.store()
        self._obstore = importlib.import_module("obstore")
        self._errors = importlib.import_module("obstore.exceptions")
        self._room: asyncio.Semaphore | None = None
        self._asked: deque[_Ask] = deque()
        self._is_woken = False
        self._serving: set[asyncio.Task[None]] = set()
        self._waiting: dict[_Ask, None] = {}  # for their answers to begin
        self._watch: asyncio.Task[None] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return Requests, (self.place,)  # the store holds secrets

    def whole(
        self, name: str, etag: str | None = None, most_bytes: int = MOST_BYTES
    ) -> tuple[bytes, str | None] | None:
        """Return an object and its ETag; None where it still has the `etag` given.

        Raises `FileNotFoundError` without one, `CorruptCacheError` for one of more than
        `most_bytes`, before any of it is read.
        """
        require_unforked(self.place.url)
        return begin(self._whole(name, etag, most_bytes)).result()

    def front(self, name: str, nbytes: int) -> tuple[Look, memoryview]:
        """Return a look at an object, and as many of its first bytes as it has of `nbytes`.

        Raises `FileNotFoundError` without one.
        """
        require_unforked(self.place.url)
        return begin(self._front(name, nbytes)).result()

    def some(
        self,
        name: str,
        first: int,
        end: int,
        size: int,
        etags: dict[str, str] | None = None,
        state: int | None = None,
    ) -> Future[memoryview]:
        """Ask for the bytes `first` to before `end` of an object that has `size` bytes.

        The future raises `CorruptCacheError` for an object that is gone, or has another ETag than
        in `etags`, or another size; `RemoteError` for what the store does not give.

        Args:
            name: of the object.
            first: byte.
            end: the byte after the last.
            size: of the whole object, in bytes.
            etags: by name, those of the first answers; they are put in.
            state: of the object, where it was looked at before.
        """
        require_unforked(self.place.url)
        ask = _Ask(name, first, end, size, {} if etags is None else etags, state)
        self._asked.append(ask)
        if not self._is_woken:  # one call wakes the loop for all that are asked meanwhile
            try:
                self._is_woken = True
                loop().call_soon_threadsafe(self._serve_more)
            except BaseException:  # Ctrl-C, too: the next one wakes it
                self._is_woken = False
                raise
        return ask.answer

    def listed(self, prefix: str) -> dict[str, int]:
        """Return the objects below a prefix of the place, and their sizes."""
        return {name: look.size for name, look in self.looks(prefix).items()}

    def looks(self, prefix: str) -> dict[str, Look]:
        """Return a look at each object below a prefix of the place."""
        require_unforked(self.place.url)
        return begin(self._looks(prefix)).result()

    def put(self, name: str, data: bytes | Path, digest: str | None = None) -> Future[None]:
        """Store an object that never changes, a file's bytes where a path is given.

        A digest of it may be stored with it.
        """
        require_unforked(self.place.url)
        return begin(self._put(name, data, digest))

    def digest(self, name: str) -> Future[str | None]:
        """Ask for the digest that an object was put with; None where it has none."""
        require_unforked(self.place.url)
        return begin(self._digest(name))

    def replace(self, name: str, data: bytes, etag: str | None) -> None:
        """Store an object in the place of the one with an ETag; None: where there is none.

        Raises `FileExistsError` where another one is there.
        """
        require_unforked(self.place.url)
        begin(self._replace(name, data, etag)).result()

    def gap_bytes(self) -> int:
        """Return the bytes that take as long as a request that is spared for them."""
        if self.place.options.gap_bytes is not None:
            return self.place.options.gap_bytes
        latency_s, concurrency = self._pace.latency_s(0.5), self.place.options.concurrency
        return int(self._pace.bytes_per_s() * latency_s / concurrency)

    async def _whole(
        self, name: str, etag: str | None, most_bytes: int
    ) -> tuple[bytes, str | None] | None:
        options = {} if etag is None else {"if_none_match": etag}
        try:
            async with self._limit():
                self.counts.gets += 1
                answer = await self._get(name, options)
                size = answer.meta["size"]
                data = b"" if size > most_bytes else bytes(await answer.bytes_async())
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.place.url}/{name}") from None
        except self._errors.NotModifiedError:
            return None
        except Exception as error:
            raise self._told(name, error) from None
        if size > most_bytes:
            raise CorruptCacheError(
                f"{self.place.url}/{name} has {size:,} bytes, and a cache has at most "
                f"{most_bytes:,} there; see what was put in its place"
            )
        self.counts.nbytes += len(data)
        if len(data) != size:
            raise self._short(name, len(data), size)
        return data, answer.meta["e_tag"]

    async def _front(self, name: str, nbytes: int) -> tuple[Look, memoryview]:
        options: dict[str, Any] = {"range": (0, nbytes)} if nbytes else {}
        try:
            async with self._limit():
                self.counts.gets += 1
                answer = await self._get(name, options)
                data = memoryview(await answer.bytes_async() if nbytes else b"")
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.place.url}/{name}") from None
        except Exception as error:
            status = STATUS.search(str(error))
            if nbytes and status is not None and status[1] == EMPTY:
                return await self._front(name, 0)
            raise self._told(name, error) from None
        self.counts.nbytes += len(data)
        look = Look.of(answer.meta)
        wanted = min(nbytes, look.size)
        if len(data) < wanted:
            raise self._short(name, len(data), wanted)
        return look, data[:wanted]

    def _serve_more(self) -> None:
        """Begin to answer what is asked for, so many at a time; in the loop."""
        self._is_woken = False
        more = min(int(self._pace.room) - len(self._serving), len(self._asked))
        for _ in range(more):
            task = loop().create_task(self._serve())
            self._serving.add(task)
            task.add_done_callback(self._served)
        if self._watch is None and self.place.options.hedge:
            self._watch = loop().create_task(self._hedge_late())

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if self._asked:
            self._serve_more()

    async def _serve(self) -> None:
        """Answer one after the other, until none is left, or too many are answered at a time."""
        while self._asked and len(self._serving) <= self._pace.room:
            ask = self._asked.popleft()
            ask.began = time.perf_counter()
            self._waiting[ask] = None
            await self._answer(ask)

    async def _answer(self, ask: _Ask) -> None:
        try:
            data = await _alone(self._some(ask))
        except BaseException as error:
            self._waiting.pop(ask, None)
            if not ask.answer.done():
                ask.answer.set_exception(error)
        else:
            if not ask.answer.done():
                ask.answer.set_result(data)

    async def _hedge_late(self) -> None:
        """Make requests again whose answers do not begin for long; the first answer counts."""
        again: set[asyncio.Task[None]] = set()
        while self._serving or self._asked:
            late_s = self._pace.late_s()
            await asyncio.sleep(min(late_s / 2, LOOK_S))
            now = time.perf_counter()
            for ask in list(self._waiting):
                if now - ask.began <= late_s:
                    break  # those behind it began later
                del self._waiting[ask]
                self.counts.hedges += 1
                again.add(loop().create_task(self._answer(ask)))
        self._watch = None

    async def _some(self, ask: _Ask) -> memoryview:
        name = ask.name
        options: dict[str, Any] = {"range": (ask.first, ask.end)}
        known = ask.etags.get(name)
        if known is not None and not known.startswith("W/"):  # which If-Match never matches
            options["if_match"] = known
        try:
            meta, data = await self._fetched(ask, options)
        except FileNotFoundError:
            raise self._changed(ask, "is missing") from None
        except self._errors.PreconditionError:
            raise self._changed(ask) from None
        except Exception as error:
            raise self._told(name, error) from None
        if meta["size"] != ask.size:
            told = f"has {meta['size']} bytes, not the {ask.size} that were written"
            raise self._changed(ask, told)
        if meta["e_tag"] and ask.etags.setdefault(name, meta["e_tag"]) != meta["e_tag"]:
            raise self._changed(ask)
        if ask.state is not None and Look.of(meta).state != ask.state:
            raise self._changed(ask)
        if len(data) != ask.end - ask.first:
            raise self._short(name, len(data), ask.end - ask.first)
        return data

    async def _fetched(
        self, ask: _Ask, options: dict[str, Any]
    ) -> tuple[Mapping[str, Any], memoryview]:
        """Return what the store says of an object, and bytes of it; tried again if it fails."""
        path, is_first = self.place.path(ask.name), True
        while True:
            self.counts.gets += 1
            began = time.perf_counter()
            try:
                store = self._eager if is_first else self._store
                answer = await self._obstore.get_async(store, path, options=options)
                if is_first:
                    self._pace.begun(time.perf_counter() - began)
                self._waiting.pop(ask, None)
                data = memoryview(await answer.bytes_async())
            except self._errors.GenericError as error:
                if not is_first:
                    raise
                status = STATUS.search(str(error))
                if status is not None and status[1] in BUSY:
                    self._pace.is_too_fast()
                is_first = False
                self.counts.again += 1
            else:
                self.counts.nbytes += len(data)
                self._pace.ended(len(data))
                return answer.meta, data

    async def _looks(self, prefix: str) -> dict[str, Look]:
        path = self.place.path(prefix)
        found: dict[str, Look] = {}
        for tries_left in reversed(range(TRIES)):  # obstore does not try a cut list again
            try:
                async for page in self._obstore.list(self._store, path):
                    found.update((each["path"], Look.of(each)) for each in page)
                break
            except Exception as error:
                if not tries_left:
                    raise self._told(prefix, error) from None
        below = len(path) - len(prefix)
        return {name[below:]: look for name, look in found.items()}

    async def _put(self, name: str, data: bytes | Path, digest: str | None) -> None:
        how = {"chunk_size": PIECE_BYTES, "max_concurrency": PIECES_AT_ONCE}
        attributes = None if digest is None else {DIGEST: digest}
        path = self.place.path(name)
        try:
            async with self._limit():
                await self._obstore.put_async(self._store, path, data, attributes=attributes, **how)
        except Exception as error:
            raise self._told(name, error) from None

    async def _digest(self, name: str) -> str | None:
        try:
            async with self._limit():
                answer = await self._get(name, {"head": True})
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._told(name, error) from None
        found: str | None = answer.attributes.get(DIGEST)
        return found

    async def _replace(self, name: str, data: bytes, etag: str | None) -> None:
        mode = "create" if etag is None else {"e_tag": etag}
        try:
            await self._obstore.put_async(self._store, self.place.path(name), data, mode=mode)
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            raise FileExistsError(f"{self.place.url}/{name}") from None
        except Exception as error:
            raise self._told(name, error) from None

    def _limit(self) -> asyncio.Semaphore:
        if self._room is None:
            self._room = asyncio.Semaphore(self.place.options.concurrency)
        return self._room

    async def _get(self, name: str, options: dict[str, Any]) -> Any:
        path = self.place.path(name)
        return await self._obstore.get_async(self._store, path, options=options)

    def _changed(
        self, ask: _Ask, how: str = "is another object than when it was first read"
    ) -> CorruptCacheError:
        do = "was the cache overwritten while it was open? open it again"
        if ask.state is not None:
            do = "it has changed since it was adopted: adopt its source again"
        return CorruptCacheError(f"{self.place.url}/{ask.name} {how}; {do}")

    def _short(self, name: str, there: int, wanted: int) -> RemoteError:
        return RemoteError(
            f"{self.place.url}/{name}: the store gave {there} bytes where {wanted} were asked for; "
            "try again, or see whether all of the object was uploaded"
        )

    def _told(self, name: str, error: Exception) -> RemoteError:
        """Return a typed error; of the store's own words, which may hold secrets, only a status."""
        where, errors = f"{self.place.url}/{name}", self._errors
        status = STATUS.search(str(error))
        refused = isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError)
        if refused or (status is not None and status[1] in ("401", "403")):
            return RemoteError(
                f"{where}: the store refuses to give it (permission denied); see whether the "
                "credentials are there, have not expired and may read the bucket, or give "
                "RemoteOptions(anonymous=True) for a public one"
            )
        said = f"status {status[1]}" if status else "no answer, or a broken one"
        if status is None and NO_RANGES.search(str(error)):
            said = "it may not know ranges, which are needed"
        tried = f"{self.place.options.retry_s:g} s of trying"
        return RemoteError(f"{where} cannot be reached after up to {tried}: {said}")

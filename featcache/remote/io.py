"""Requests to object stores: in threads, so many at a time, tried again, errors typed.

What an answer holds is compared with what was asked for: a range past the end of an object comes
short, and without an error.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import re
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from featcache.errors import ClosedError, CorruptCacheError, FeatcacheError, RemoteError
from featcache.remote.pace import Pace
from featcache.remote.pages import Locks
from featcache.remote.places import RemotePlace

T = TypeVar("T")
STATUS = re.compile(r"status code: ([45]\d\d)\b")  # a name may have such numbers, too
NO_RANGES = re.compile("Range request not supported|Content-Range")
PIECE_BYTES = 8 << 20  # of an upload in pieces
PIECES_AT_ONCE = 4  # of one upload
DIGEST = "featcache"  # metadata of an object: the digest of what was put
MOST_BYTES = 32 << 20  # of an object that is read whole, far above any manifest of a cache
TRIES_AGAIN = 10  # of a request that failed, at most, while `retry_s` are not over
TRIES = 3  # of a list that came cut
LOOK_S = 0.1  # between two looks for late ones, at most
BUSY = frozenset(("429", "503"))  # what a store says that is asked too often
EMPTY = "416"  # of a range of an object without bytes
AT_ONCE = 16  # answers that are handed on before anybody hears of one
MOST_WAITING_BYTES = 16 << 20  # of answers that wait to be handed on
TRIMMED_BYTES = 64 << 20  # of answers, after which what malloc holds of them goes back
LINGER_S = 2.0  # that a thread waits for something to do, before it ends
# Threads of obstore let go of Python's objects behind an answer, and ours come back with it; in an
# interpreter that ends meanwhile they abort the process. So it ends so many seconds later: the
# first at least, the second at most, while requests are under way.
END_S, MOST_END_S = 0.1, 1.0

# What obstore began before a fork hangs in the child, and then in the parent: so a child of a
# process that has asked gets an error in its place.

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
_has_asked = False
_forked = False
_running: weakref.WeakSet[_Threads] = weakref.WeakSet()


def _after_fork() -> None:
    global _forked
    _forked = _has_asked


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


# does some work, or gives it up for an error; raises nothing
_Job = Callable[[BaseException | None], object]


class _Threads:
    """Threads that carry out jobs, as many at a time as `room` says; without one they end soon."""

    def __init__(self, room: Callable[[], float]) -> None:
        self._room = room
        self._jobs: deque[_Job] = deque()
        self._all: set[threading.Thread] = set()
        self._busy = 0
        self._is_ending = False
        # taken by itself: an interrupt may come within `Condition.__enter__`, and it stays taken
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        _running.add(self)

    def do(self, jobs: Sequence[_Job]) -> None:
        """Give jobs to threads, in their order and behind those that wait."""
        global _has_asked
        _has_asked = True
        with self._lock:
            self._jobs += jobs
            try:
                self._start_some()
            except BaseException:  # Ctrl-C, too: nobody may wait for what is never done
                for _ in jobs:
                    self._jobs.pop()
                raise
            self._turn.notify(min(len(jobs), max(int(self._room()) - self._busy, 0)))

    def do_next(self, job: _Job) -> None:
        """Give a job to a thread before those that wait, unless the interpreter is ending."""
        with self._lock, suppress(RuntimeError):  # no more threads: the next that is free does it
            if not self._is_ending:
                self._jobs.appendleft(job)
                self._start_some()
                self._turn.notify()

    def end(self) -> list[threading.Thread]:
        """Give up the jobs that wait; return the threads, which end without one."""
        with self._lock:
            self._is_ending = True
            jobs, threads = list(self._jobs), list(self._all)
            self._jobs.clear()
            self._turn.notify_all()
        for job in jobs:  # who still reads at the end asks anew
            job(ClosedError("the interpreter is ending: no more is read of object stores"))
        return threads

    def _start_some(self) -> None:
        while len(self._all) < min(self._busy + len(self._jobs), int(self._room())):
            thread = threading.Thread(target=self._work, name="featcache-remote", daemon=True)
            self._all.add(thread)
            try:
                thread.start()
            except BaseException as error:
                self._all.discard(thread)
                if self._all and isinstance(error, RuntimeError):
                    return  # there can be no more: those that there are do it
                raise

    def _work(self) -> None:
        done = 0
        while self._has_done_next(done):  # and kept nothing of it
            done = 1

    def _has_done_next(self, done: int) -> bool:
        job = self._next(done)
        if job is not None:
            job(None)
        return job is not None

    def _next(self, done: int) -> _Job | None:
        with self._lock:
            self._busy -= done
            while not self._jobs or self._busy >= int(self._room()):
                is_over = self._is_ending and not self._jobs
                if is_over or (not self._turn.wait(LINGER_S) and not self._jobs):
                    self._all.discard(threading.current_thread())
                    return None
            self._busy += 1
            job = self._jobs.popleft()
            if self._jobs and self._busy < int(self._room()):  # there may be more than before
                with suppress(RuntimeError):
                    self._start_some()
                self._turn.notify()
            return job


@atexit.register
def _end() -> None:
    if not _has_asked or _forked:
        return
    ends = time.monotonic() + MOST_END_S
    threads = [thread for each in list(_running) for thread in each.end()]
    time.sleep(END_S)
    for thread in threads:
        thread.join(max(ends - time.monotonic(), 0.0))


def give_back_memory() -> None:
    """Give the system what malloc holds of answers that are gone: a pool for every few threads."""
    if _trim is not None:
        _trim(0)


@dataclass(eq=False, slots=True)
class Ask:
    """Bytes of an object that are asked for; arguments as of `Requests.some`.

    `told` is called with them, or their error, once for each that is asked for, and with those of
    several at a time that have the same `told`; it raises nothing.
    """

    name: str
    first: int
    end: int
    size: int
    etags: dict[str, str]
    state: int | None
    told: Told
    began: float = 0.0
    is_told: bool = False


Found = memoryview | BaseException
Came = Sequence[tuple[Ask, Found]]
Told = Callable[[Came], object]


class _Answers:
    """Answers on their way to those who asked, whom one thread at a time tells of several.

    Whoever brings one while another thread is at it goes on, as long as no more than
    `MOST_WAITING_BYTES` wait: each would take Python's lock, and threads that write pages would
    wait for each other in the kernel.
    """

    def __init__(self, hand_on: Callable[[Came], object]) -> None:
        self._hand_on = hand_on
        self._waiting: deque[tuple[Ask, Found]] = deque()
        self._nbytes = 0
        self._counted, self._turn = threading.Lock(), threading.Lock()

    def bring(self, ask: Ask, found: Found) -> None:
        """Bring one, and hand on what waits unless another thread does."""
        with self._counted:
            self._waiting.append((ask, found))
            self._nbytes += _nbytes(found)
        while self._waiting:
            if not self._turn.acquire(self._nbytes > MOST_WAITING_BYTES):
                return  # who is at it looks again once it has let go
            try:
                self._hand_on_some()
            finally:
                self._turn.release()

    def _hand_on_some(self) -> None:
        """Hand on what came first, unless another thread has taken the last ones."""
        with self._counted:
            some = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
        try:
            if some:
                self._hand_on(some)
        finally:
            with self._counted:
                self._nbytes -= sum(_nbytes(found) for _, found in some)


def _nbytes(found: Found) -> int:
    return len(found) if isinstance(found, memoryview) else 0


class Requests:
    """Asks a store for objects below a place, or ranges of them; for threads, not for forks."""

    def __init__(self, place: RemotePlace) -> None:
        self.place = place
        self.counts = Counts()
        self._prefix = place.path("")
        self._pace = Pace(place.options.concurrency)
        self._threads = _Threads(lambda: self._pace.room)
        require_unforked(place.url)
        # what fails is heard of, and only then asked for with patience
        self._eager, self._store = place.store(0), place.store(TRIES_AGAIN)
        self._obstore = importlib.import_module("obstore")
        self._errors = importlib.import_module("obstore.exceptions")
        self._locks = Locks()
        self._answers = _Answers(self._hand_on)
        self._waiting: dict[Ask, None] = {}  # for their answers to begin
        self._is_watched = not place.options.hedge

    @property
    def _lock(self) -> threading.RLock:
        return self._locks.mine()

    def __reduce__(self) -> tuple[object, ...]:
        return Requests, (self.place,)  # the store holds secrets

    def whole(
        self, name: str, etag: str | None = None, most_bytes: int = MOST_BYTES
    ) -> tuple[bytes, str | None] | None:
        """Return an object and its ETag; None where it still has the `etag` given.

        Raises `FileNotFoundError` without one, `CorruptCacheError` for one of more than
        `most_bytes`, before any of it is read.
        """
        return self._begin(partial(self._whole, name, etag, most_bytes)).result()

    def front(self, name: str, nbytes: int) -> tuple[Look, memoryview]:
        """Return a look at an object, and as many of its first bytes as it has of `nbytes`.

        Raises `FileNotFoundError` without one.
        """
        return self._begin(partial(self._front, name, nbytes)).result()

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
        found: Future[memoryview] = Future()
        known = {} if etags is None else etags
        self.ask([Ask(name, first, end, size, known, state, partial(_set_one, found))])
        return found

    def ask(self, asks: Sequence[Ask]) -> None:
        """Ask for bytes of objects, in this order; all of them, or none where it raises."""
        require_unforked(self.place.url)
        self._threads.do([partial(self._answer, each) for each in asks])

    def listed(self, prefix: str) -> dict[str, int]:
        """Return the objects below a prefix of the place, and their sizes."""
        return {name: look.size for name, look in self.looks(prefix).items()}

    def looks(self, prefix: str) -> dict[str, Look]:
        """Return a look at each object below a prefix of the place."""
        return self._begin(partial(self._looks, prefix)).result()

    def put(self, name: str, data: bytes | Path, digest: str | None = None) -> Future[None]:
        """Store an object that never changes, a file's bytes where a path is given.

        A digest of it may be stored with it.
        """
        return self._begin(partial(self._put, name, data, digest))

    def digest(self, name: str) -> Future[str | None]:
        """Ask for the digest that an object was put with; None where it has none."""
        return self._begin(partial(self._digest, name))

    def replace(self, name: str, data: bytes, etag: str | None) -> None:
        """Store an object in the place of the one with an ETag; None: where there is none.

        Raises `FileExistsError` where another one is there.
        """
        self._begin(partial(self._replace, name, data, etag)).result()

    def gap_bytes(self) -> int:
        """Return the bytes that take as long as a request that is spared for them."""
        if self.place.options.gap_bytes is not None:
            return self.place.options.gap_bytes
        latency_s, concurrency = self._pace.latency_s(0.5), self.place.options.concurrency
        return int(self._pace.bytes_per_s() * latency_s / concurrency)

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        """Do what waits for the store in a thread, so that Ctrl-C ends the wait for it."""
        require_unforked(self.place.url)
        found: Future[T] = Future()
        self._threads.do([lambda error: _set(found, _done(work) if error is None else error)])
        return found

    def _whole(
        self, name: str, etag: str | None, most_bytes: int
    ) -> tuple[bytes, str | None] | None:
        options = {} if etag is None else {"if_none_match": etag}
        try:
            self._count(gets=1)
            answer = self._get(name, options)
            size = answer.meta["size"]
            data = b"" if size > most_bytes else bytes(answer.bytes())
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
        self._count(nbytes=len(data))
        if len(data) != size:
            raise self._short(name, len(data), size)
        return data, answer.meta["e_tag"]

    def _front(self, name: str, nbytes: int) -> tuple[Look, memoryview]:
        options: dict[str, Any] = {"range": (0, nbytes)} if nbytes else {}
        try:
            self._count(gets=1)
            answer = self._get(name, options)
            data = memoryview(answer.bytes() if nbytes else b"")
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.place.url}/{name}") from None
        except Exception as error:
            status = STATUS.search(str(error))
            if nbytes and status is not None and status[1] == EMPTY:
                return self._front(name, 0)
            raise self._told(name, error) from None
        self._count(nbytes=len(data))
        look = Look.of(answer.meta)
        wanted = min(nbytes, look.size)
        if len(data) < wanted:
            raise self._short(name, len(data), wanted)
        return look, data[:wanted]

    def _answer(self, ask: Ask, error: BaseException | None = None) -> None:
        """Answer what is asked for, unless another request for it was faster, or with an error."""
        if ask.is_told:
            return
        if error is None:
            if ask.began:
                self._count(hedges=1)
            else:
                ask.began = time.perf_counter()
                self._waiting[ask] = None
                if not self._is_watched:
                    self._watch()
        found = _done(partial(self._some, ask)) if error is None else error
        self._waiting.pop(ask, None)
        self._answers.bring(ask, found)

    def _hand_on(self, came: Came) -> None:
        """Hand answers to those who asked, unless they had them of another request."""
        firsts: dict[Told, list[tuple[Ask, Found]]] = {}
        with self._lock:
            for ask, found in came:
                if not ask.is_told:
                    ask.is_told = True
                    firsts.setdefault(ask.told, []).append((ask, found))
        if answered := [len(found) for _, found in came if isinstance(found, memoryview)]:
            self._count(gets=len(answered), nbytes=sum(answered))
            self._pace.ended(len(answered), sum(answered))
        for told, some in firsts.items():
            told(some)

    def _watch(self) -> None:
        """Make requests again that are late, as long as any are waited for."""
        with self._lock:
            if self._is_watched:
                return
            self._is_watched = True
        with suppress(RuntimeError):  # without one more thread they are made once
            threading.Thread(target=self._hedge_late, name="featcache-late", daemon=True).start()

    def _hedge_late(self) -> None:
        """Make requests again whose answers do not begin for long; the first answer counts."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_watched = False
                    return
            late_s = self._pace.late_s()
            time.sleep(min(late_s / 2, LOOK_S))
            now = time.perf_counter()
            for ask in list(self._waiting):
                if now - ask.began <= late_s:
                    break  # those behind it began later
                if self._waiting.pop(ask, ask) is not ask:  # it has not begun meanwhile
                    self._pace.is_late()
                    self._threads.do_next(partial(self._answer, ask))

    def _some(self, ask: Ask) -> memoryview:
        name = ask.name
        options: dict[str, Any] = {"range": (ask.first, ask.end)}
        known = ask.etags.get(name)
        if known is not None and not known.startswith("W/"):  # which If-Match never matches
            options["if_match"] = known
        try:
            meta, data = self._fetched(ask, options)
        except FileNotFoundError:
            raise self._changed(ask, "is missing") from None
        except self._errors.PreconditionError:
            raise self._changed(ask) from None
        except Exception as error:
            raise self._told(name, error) from None
        wrong = self._wrong(ask, meta, len(data))
        if wrong is not None:
            self._count(gets=1, nbytes=len(data))  # others are, as they are handed on
            raise wrong
        return data

    def _wrong(self, ask: Ask, meta: Mapping[str, Any], nbytes: int) -> Exception | None:
        """Return the error of an answer that is not what was asked for."""
        if meta["size"] != ask.size:
            told = f"has {meta['size']} bytes, not the {ask.size} that were written"
            return self._changed(ask, told)
        if meta["e_tag"] and ask.etags.setdefault(ask.name, meta["e_tag"]) != meta["e_tag"]:
            return self._changed(ask)
        if ask.state is not None and Look.of(meta).state != ask.state:
            return self._changed(ask)
        if nbytes != ask.end - ask.first:
            return self._short(ask.name, nbytes, ask.end - ask.first)
        return None

    def _fetched(self, ask: Ask, options: dict[str, Any]) -> tuple[Mapping[str, Any], memoryview]:
        """Return what the store says of an object, and bytes of it; tried again if it fails."""
        path, is_first = self._prefix + ask.name, True
        while True:
            began = time.perf_counter()
            try:
                store = self._eager if is_first else self._store
                answer = self._obstore.get(store, path, options=options)
                if is_first:
                    self._pace.begun(time.perf_counter() - began)
                self._waiting.pop(ask, None)
                # of what another request has answered by now, no more is fetched
                data = memoryview(b"" if ask.is_told else answer.bytes())
            except Exception as error:
                is_last = (
                    ask.is_told or not is_first or not isinstance(error, self._errors.GenericError)
                )
                self._count(gets=1, again=not is_last)
                if is_last:
                    raise
                status = STATUS.search(str(error))
                if status is not None and status[1] in BUSY:
                    self._pace.is_too_fast()
                is_first = False
            else:
                return answer.meta, data

    def count_read(self, nbytes: int) -> None:
        """Count bytes that were asked for, here or fetched."""
        with self._lock:
            self.counts.read_bytes += nbytes

    def _count(self, gets: int = 0, again: int = 0, hedges: int = 0, nbytes: int = 0) -> None:
        with self._lock:
            before = self.counts.nbytes
            self.counts.gets += gets
            self.counts.again += again
            self.counts.hedges += hedges
            self.counts.nbytes += nbytes
        if before // TRIMMED_BYTES < (before + nbytes) // TRIMMED_BYTES:
            give_back_memory()

    def _looks(self, prefix: str) -> dict[str, Look]:
        path = self._prefix + prefix
        found: dict[str, Look] = {}
        for tries_left in reversed(range(TRIES)):  # obstore does not try a cut list again
            try:
                for page in self._obstore.list(self._store, path):
                    found.update((each["path"], Look.of(each)) for each in page)
                break
            except Exception as error:
                if not tries_left:
                    raise self._told(prefix, error, "listed") from None
        return {name[len(self._prefix) :]: look for name, look in found.items()}

    def _put(self, name: str, data: bytes | Path, digest: str | None) -> None:
        how = {"chunk_size": PIECE_BYTES, "max_concurrency": PIECES_AT_ONCE}
        attributes = None if digest is None else {DIGEST: digest}
        try:
            self._obstore.put(self._store, self._prefix + name, data, attributes=attributes, **how)
        except Exception as error:
            raise self._told(name, error, "written") from None

    def _digest(self, name: str) -> str | None:
        try:
            answer = self._get(name, {"head": True})
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._told(name, error) from None
        found: str | None = answer.attributes.get(DIGEST)
        return found

    def _replace(self, name: str, data: bytes, etag: str | None) -> None:
        mode = "create" if etag is None else {"e_tag": etag}
        try:
            self._obstore.put(self._store, self._prefix + name, data, mode=mode)
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            raise FileExistsError(f"{self.place.url}/{name}") from None
        except Exception as error:
            raise self._told(name, error, "written") from None

    def _get(self, name: str, options: dict[str, Any]) -> Any:
        return self._obstore.get(self._store, self._prefix + name, options=options)

    def _changed(
        self, ask: Ask, how: str = "is another object than when it was first read"
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

    def _told(self, name: str, error: Exception, what: str = "read") -> RemoteError:
        """Return a typed error; of the store's own words, which may hold secrets, only a status."""
        where, errors = f"{self.place.url}/{name}", self._errors
        status = STATUS.search(str(error))
        refused = isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError)
        if refused or (status is not None and status[1] in ("401", "403")):
            return RemoteError(
                f"{where}: the store does not let it be {what} (permission denied); see whether "
                "the credentials are there, have not expired and may do that there, or give "
                "RemoteOptions(anonymous=True) for a public one"
            )
        said = f"status {status[1]}" if status else "no answer, or a broken one"
        if status is None and NO_RANGES.search(str(error)):
            said = "it may not know ranges, which are needed"
        tried = f"{self.place.options.retry_s:g} s of trying"
        return RemoteError(f"{where} cannot be {what} after up to {tried}: {said}")


def _done(work: Callable[[], T]) -> T | BaseException:
    """Do work, and return its error, which does not lead to a store's words: they hold secrets.

    One that is expected does not lead to the frames of this thread either, which lead to it.
    """
    try:
        return work()
    except BaseException as error:
        error.__context__ = None
        is_expected = isinstance(error, FeatcacheError | FileNotFoundError)
        return error.with_traceback(None) if is_expected else error


def _set_one(future: Future[memoryview], came: Came) -> None:
    _set(future, came[0][1])


def _set(future: Future[T], found: T | BaseException) -> None:
    if isinstance(found, BaseException):
        future.set_exception(found)
    else:
        future.set_result(found)

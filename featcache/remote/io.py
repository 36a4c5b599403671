"""Requests to object stores: one thread of asyncio a process, so many at a time, errors typed.

What an answer holds is compared with what was asked for: a range past the end of an object comes
short, and without an error.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from featcache.errors import ClosedError, CorruptCacheError, RemoteError
from featcache.remote.places import RemotePlace

T = TypeVar("T")
STATUS = re.compile(r"\b([45]\d\d)\b")
PIECE_BYTES = 8 << 20  # of an upload in pieces
PIECES_AT_ONCE = 4  # of one upload
DIGEST = "featcache"  # metadata of an object: the digest of what was put
TRIES = 3
RECENT = 64  # requests, whose speed is that of now

# One loop a process. What obstore began before a fork hangs in the child, and then in the parent:
# so a child that inherits a loop gets an error in its place.

_loop: asyncio.AbstractEventLoop | None = None
_forked = False
_starting = threading.Lock()


def _after_fork() -> None:
    global _forked, _starting
    _starting = threading.Lock()
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
    global _loop
    with _starting:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            name = "featcache-remote"
            threading.Thread(target=_loop.run_forever, name=name, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _loop)


@dataclass
class Counts:
    """Sums over the requests of a place."""

    gets: int = 0
    nbytes: int = 0
    read_bytes: int = 0  # that were asked for, here or fetched
    latency_s: float = 0.0  # median until an answer begins, of late
    bytes_per_s: float = 0.0  # of all requests together, of late


@dataclass
class _Pace:
    """Times of the last requests."""

    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    ends: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))


class Requests:
    """Asks a store for objects below a place, or ranges of them; for threads, not for forks."""

    def __init__(self, place: RemotePlace) -> None:
        self.place = place
        self.counts = Counts()
        self._pace = _Pace()
        require_unforked(place.url)
        self._store = place.store()
        self._obstore = importlib.import_module("obstore")
        self._errors = importlib.import_module("obstore.exceptions")
        self._room: asyncio.Semaphore | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return Requests, (self.place,)  # the store holds secrets

    def whole(self, name: str, etag: str | None = None) -> tuple[bytes, str | None] | None:
        """Return an object and its ETag; None where it still has the `etag` given.

        Raises `FileNotFoundError` without one.
        """
        require_unforked(self.place.url)
        return begin(self._whole(name, etag)).result()

    def some(
        self, name: str, first: int, end: int, size: int, etags: dict[str, str] | None = None
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
        """
        require_unforked(self.place.url)
        return begin(self._some(name, first, end, size, {} if etags is None else etags))

    def listed(self, prefix: str) -> dict[str, int]:
        """Return the objects below a prefix of the place, and their sizes."""
        require_unforked(self.place.url)
        return begin(self._listed(prefix)).result()

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
        counts = self.counts
        return int(counts.bytes_per_s * counts.latency_s / self.place.options.concurrency)

    async def _whole(self, name: str, etag: str | None) -> tuple[bytes, str | None] | None:
        options = {} if etag is None else {"if_none_match": etag}
        try:
            async with self._limit():
                self.counts.gets += 1
                answer = await self._get(name, options)
                data = bytes(await answer.bytes_async())
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.place.url}/{name}") from None
        except self._errors.NotModifiedError:
            return None
        except Exception as error:
            raise self._told(name, error) from None
        self.counts.nbytes += len(data)
        if len(data) != answer.meta["size"]:
            raise self._short(name, len(data), answer.meta["size"])
        return data, answer.meta["e_tag"]

    async def _some(
        self, name: str, first: int, end: int, size: int, etags: dict[str, str]
    ) -> memoryview:
        options: dict[str, Any] = {"range": (first, end)}
        known = etags.get(name)
        if known is not None and not known.startswith("W/"):  # which If-Match never matches
            options["if_match"] = known
        try:
            async with self._limit():
                self.counts.gets += 1
                began = time.perf_counter()
                answer = await self._get(name, options)
                self._pace.latencies.append(time.perf_counter() - began)
                data = memoryview(await answer.bytes_async())
        except FileNotFoundError:
            raise CorruptCacheError(
                f"{self.place.url}/{name} is missing; was the cache overwritten while it was open? "
                "open it again"
            ) from None
        except self._errors.PreconditionError:
            raise self._changed(name) from None
        except Exception as error:
            raise self._told(name, error) from None
        meta = answer.meta
        if meta["size"] != size:
            raise CorruptCacheError(
                f"{self.place.url}/{name} has {meta['size']} bytes, not the {size} that were "
                "written; was the cache overwritten while it was open? open it again"
            )
        if meta["e_tag"] and etags.setdefault(name, meta["e_tag"]) != meta["e_tag"]:
            raise self._changed(name)
        if len(data) != end - first:
            raise self._short(name, len(data), end - first)
        self._note(len(data))
        return data

    async def _listed(self, prefix: str) -> dict[str, int]:
        path = self.place.path(prefix)
        found: dict[str, int] = {}
        for tries_left in reversed(range(TRIES)):  # obstore does not try a cut list again
            try:
                async for page in self._obstore.list(self._store, path):
                    found.update((each["path"], each["size"]) for each in page)
                break
            except Exception as error:
                if not tries_left:
                    raise self._told(prefix, error) from None
        below = len(path) - len(prefix)
        return {name[below:]: size for name, size in found.items()}

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

    def _note(self, nbytes: int) -> None:
        """Count an answer, and measure how fast they come."""
        now, counts, ends = time.perf_counter(), self.counts, self._pace.ends
        counts.nbytes += nbytes
        ends.append((now, nbytes))
        latencies = sorted(self._pace.latencies)
        counts.latency_s = latencies[len(latencies) // 2]
        if len(ends) > 1:
            took = max(now - ends[0][0], 1e-6)
            counts.bytes_per_s = sum(n for _, n in list(ends)[1:]) / took

    def _changed(self, name: str) -> CorruptCacheError:
        return CorruptCacheError(
            f"{self.place.url}/{name} is another object than when it was first read; was the cache "
            "overwritten meanwhile? open it again"
        )

    def _short(self, name: str, there: int, wanted: int) -> RemoteError:
        return RemoteError(
            f"{self.place.url}/{name}: the store gave {there} bytes where {wanted} were asked for; "
            "try again, or see whether all of the object was uploaded"
        )

    def _told(self, name: str, error: Exception) -> RemoteError:
        """Return a typed error; of the store's own words, which may hold secrets, only a status."""
        where, errors = f"{self.place.url}/{name}", self._errors
        if isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError):
            return RemoteError(
                f"{where}: the store refuses to give it (permission denied); see whether the "
                "credentials are there, have not expired and may read the bucket, or give "
                "RemoteOptions(anonymous=True) for a public one"
            )
        status = STATUS.search(str(error))
        said = f"status {status[1]}" if status else "no answer, or a broken one"
        if "range" in str(error).lower() and status is None:
            said = "it may not know ranges, which are needed"
        tried = f"{self.place.options.retry_s:g} s of trying"
        return RemoteError(f"{where} cannot be reached after up to {tried}: {said}")

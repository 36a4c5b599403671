"""Files that lie in an object store: fetched by ranges, planned together, kept as pages."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from multiprocessing.util import Finalize
from operator import itemgetter
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import xxhash

from featcache.errors import ConfigError, FeatcacheError
from featcache.interface import Bytes
from featcache.remote.io import Ask, Came, Found, Requests, Told, require_unforked
from featcache.remote.pages import Locks, MadeOnce, Pages
from featcache.remote.places import RemoteOptions, RemotePlace
from featcache.remote.ranges import Piece, Request, Span, planned

MOST_BYTES = 16 << 20  # of a request
MOST_AHEAD_BYTES = 128 << 20  # that are asked for before they are wanted, by one call
DOWNLOADS = 4  # ranges of a file that is fetched whole, at a time: 64 MiB of memory
EXTRA = 0.02  # of what is asked for, in gaps between pieces
KNOWN_NAMES = 4096  # of files, in memory
QUIET = 256  # pieces that were all here, after which nothing is asked for before it is read


class _Kept:
    """Bytes of a file that are asked for: to be waited for until they are pages.

    A window has thousands: each is one object, a future would be six.
    """

    __slots__ = ("_found", "_is_there", "_turn", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self._found: Found | None = None
        self._turn = threading.Lock()  # taken once: of who gives up, and who has the bytes
        self._is_there = threading.Lock()  # held until they are
        self._is_there.acquire()

    def result(self) -> memoryview:
        """Return the bytes, or raise their error, once they are there."""
        if self._found is None:
            with self._is_there:  # the next one may go on, too
                pass
        if isinstance(self._found, memoryview):
            return self._found
        error = cast(BaseException, self._found)
        # one of its own for who waits, whose frames it leads to: no other thread shall free these
        raise copy(error) if isinstance(error, FeatcacheError) else error

    def let_go(self, found: Found) -> None:
        """Wake those who wait, unless that was done before."""
        if self._turn.acquire(blocking=False):
            self._found = found
            self._is_there.release()


class _UnderWay:
    """Requests for bytes of a file that are under way, by their place; no two overlap."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._kept: dict[int, _Kept] = {}
        self._lock = threading.Lock()

    def add(self, kept: _Kept) -> None:
        """Add a request."""
        begin = kept.request.begin
        with self._lock:
            if begin not in self._kept:
                insort(self._begins, begin)
            self._kept[begin] = kept

    def remove(self, kept: _Kept) -> None:
        """Remove a request."""
        begin = kept.request.begin
        with self._lock:
            if self._kept.get(begin) is kept:
                del self._begins[bisect_left(self._begins, begin)]
                del self._kept[begin]

    def missing(self, begin: int, end: int) -> tuple[list[Span], list[_Kept]]:
        """Return the spans that no request asks for, and the requests for the others."""
        lacking: list[Span] = []
        asked: list[_Kept] = []
        with self._lock:
            at = bisect_right(self._begins, begin)
            if at and self._kept[self._begins[at - 1]].request.end > begin:
                at -= 1
            while begin < end:
                first = self._begins[at] if at < len(self._begins) else end
                if begin < first:
                    lacking.append((begin, min(first, end)))
                if first < end:
                    asked.append(self._kept[first])
                    begin = asked[-1].request.end
                    at += 1
                else:
                    begin = end
        return lacking, asked


class RemoteFiles:
    """Bytes of numbered files below a place; safe to share between threads.

    Args:
        requests: of the place.
        pages: what is here already, and what is kept.
        name: of a file, its path below the place.
        key: of a file, under which its pages are kept: another content has another one.
        size: of a file, in bytes.
        state: of a file, where it was looked at before: another one is an error.
    """

    def __init__(
        self,
        requests: Requests,
        pages: Pages,
        name: Callable[[int], str],
        key: Callable[[int], str],
        size: Callable[[int], int],
        state: Callable[[int], int | None] = lambda file: None,
    ) -> None:
        self._requests, self._pages = requests, pages
        self._size, self._state = size, state
        self._name = lru_cache(KNOWN_NAMES)(name)  # which takes 10 us to make
        self._key_of = key  # which takes 20 us
        self._keys: dict[int, str] = {}
        self._etags: dict[str, str] = {}  # of the first answers; who opens it again has new ones
        self._locks = Locks()
        self._under_way: dict[int, _UnderWay] = {}
        self._here = 0  # pieces of the last plans, all of which were here

    @property
    def _lock(self) -> threading.RLock:
        return self._locks.mine()

    def _key(self, file: int) -> str:
        return self._keys.get(file) or self._keys.setdefault(file, self._key_of(file))

    @property
    def place(self) -> RemotePlace:
        """The place that they lie in."""
        return self._requests.place

    def prefetch(self, pieces: Sequence[Piece], most_bytes: int = MOST_AHEAD_BYTES) -> None:
        """Ask for what is not here of some pieces, in as few requests as pay, without waiting.

        What is beyond `most_bytes` is asked for when it is wanted.
        """
        if not self._lacking(pieces, 1):  # a look that ends with the first
            self._here += len(pieces)
            return
        self._here = 0
        require_unforked(self.place.url)
        with self._lock:  # one asks at a time; what came meanwhile is a page by now
            lacking = [
                (file, first, last - first)
                for file, begin, nbytes in pieces
                for first, last in self._of(file).missing(begin, begin + nbytes)[0]
            ]
            lacking = self._lacking(lacking, most_bytes)
            self._begin(planned(lacking, self._requests.gap_bytes(), MOST_BYTES, EXTRA))

    @property
    def is_quiet(self) -> bool:
        """Whether all that was wanted lately was here, so that nothing need be asked for ahead.

        What is lacking then is asked for when it is read, and from there on ahead again.
        """
        return self._here >= QUIET

    def read_here(self, pieces: Sequence[Piece], outs: Sequence[Bytes]) -> list[int]:
        """Copy pieces that are known to be here, each to the front of one of `outs`.

        Return the numbers of the others, also of those that no file has.
        """
        others = self._pages.copy_known(self._keys, pieces, outs)
        nbytes = sum([piece[2] for piece in pieces]) - sum([pieces[each][2] for each in others])
        self._requests.count_read(nbytes)
        return others

    def read_many(self, pieces: Sequence[Piece], outs: Iterable[Bytes]) -> None:
        """Copy pieces, each to the front of one of `outs`; they are asked for together."""
        places, begin = iter(outs), 0
        while begin < len(pieces):
            end, nbytes = begin, 0
            while end < len(pieces) and nbytes < MOST_AHEAD_BYTES:
                nbytes += pieces[end][2]
                end += 1
            late: list[tuple[Piece, Bytes, list[Span]]] = []
            for piece in pieces[begin:end]:
                out = next(places)[: piece[2]]
                if lacking := self._pages.read_into(self._key(piece[0]), piece[1], out):
                    late.append((piece, out, lacking))
            self.prefetch([piece for piece, _, _ in late])
            for (file, offset, _), out, lacking in late:
                self._await(file, offset, out, lacking)
            self._requests.count_read(nbytes)
            begin = end

    def here(self, file: int, offset: int, nbytes: int) -> Bytes | None:
        """Return bytes of a file without a copy; None unless they are known to be here.

        Asked for bytes that no file has, it says None, too.
        """
        key = self._keys.get(file)
        return None if key is None else self._pages.view(key, offset, nbytes)

    def read_into(self, file: int, offset: int, out: Bytes) -> None:
        """Copy bytes of a file, fetched where they are not here."""
        if lacking := self._pages.read_into(self._key(file), offset, out):
            self._here = 0
            self._await(file, offset, out, lacking)

    def _await(self, file: int, offset: int, out: Bytes, lacking: Sequence[Span]) -> None:
        """Copy the spans that are lacking of bytes of a file, as soon as they come."""
        require_unforked(self.place.url)
        waiting: list[_Kept] = []
        with self._lock:
            for span in lacking:
                spans, asked = self._of(file).missing(*span)
                waiting += asked
                for first, last in spans:  # some may have come meanwhile
                    place = out[first - offset : last - offset]
                    for begin, end in self._pages.read_into(self._key(file), first, place):
                        waiting += self._begin(_exactly(file, begin, end))
        for kept in waiting:  # not from the pages, which may be removed again by now
            first = kept.request.begin
            data = kept.result()[max(offset - first, 0) : offset + len(out) - first]
            at = max(first - offset, 0)
            out[at : at + len(data)] = data

    def check(self, file: int) -> None:
        """Ask the store whether a file is there, in its size; whatever is here does not count.

        Raises `CorruptCacheError` unless it is, or where it is another one.
        """
        if size := self._size(file):
            name, state = self._name(file), self._state(file)
            self._requests.some(name, 0, 1, size, self._etags, state).result()

    def has(self, file: int, offset: int, nbytes: int) -> bool:
        """Whether bytes of a file are here already."""
        return not any(self._pages.missing(self._key(file), [(offset, offset + nbytes)]))

    def keep(self, file: int, data: memoryview) -> None:
        """Keep the first bytes of a file, which came in another way."""
        self._pages.write([(self._key(file), 0, data)])

    def forget(self, file: int, offset: int, nbytes: int) -> None:
        """Remove pages that are not what was written: the store may have it, now or again."""
        self._pages.remove(self._key(file), offset, offset + nbytes)

    def _lacking(self, pieces: Iterable[Piece], most_bytes: int) -> list[Piece]:
        """Return what is not here of some pieces, until it is `most_bytes`."""
        found: list[Piece] = []
        for file, some in groupby(pieces, itemgetter(0)):
            spans = ((offset, offset + nbytes) for _, offset, nbytes in some)
            for first, last in self._pages.missing(self._key(file), spans):
                if most_bytes <= 0:
                    return found
                found.append((file, first, min(last - first, most_bytes)))
                most_bytes -= last - first
        return found

    def _of(self, file: int) -> _UnderWay:
        return self._under_way.get(file) or self._under_way.setdefault(file, _UnderWay())

    def _begin(self, requests: Iterable[Request]) -> list[_Kept]:
        """Ask for bytes, which are to be waited for until they are pages."""
        begun: list[_Kept] = []
        kept_of: dict[Ask, _Kept] = {}
        told = partial(self._answered, kept_of)
        try:
            for request in requests:
                begun.append(_Kept(request))
                self._of(request.file).add(begun[-1])
            kept_of.update((self._ask_for(each.request, told), each) for each in begun)
            self._requests.ask([*kept_of])
        except BaseException as error:  # Ctrl-C, too: nobody may wait for what never comes
            for each in begun:
                self._done(each, error)
            raise
        return begun

    def _ask_for(self, request: Request, told: Told) -> Ask:
        file, begin, end = request
        name, size, state = self._name(file), self._size(file), self._state(file)
        return Ask(name, begin, end, size, self._etags, state, told)

    def _answered(self, kept_of: dict[Ask, _Kept], came: Came) -> None:
        """Make pages of what a store gave, and wake those who wait for it."""
        there: list[tuple[_Kept, memoryview]] = []
        for ask, found in came:
            kept = kept_of.pop(ask)
            if isinstance(found, memoryview):
                there.append((kept, found))
            else:
                self._done(kept, found)
        error: BaseException | None = None
        try:
            self._pages.write(
                [(self._key(kept.request.file), kept.request.begin, data) for kept, data in there]
            )
        except BaseException as raised:  # where the bytes are wanted
            error = raised
        for kept, data in there:
            self._done(kept, data if error is None else error)

    def _done(self, kept: _Kept, found: Found) -> None:
        """Wake those who wait for bytes."""
        self._of(kept.request.file).remove(kept)
        if isinstance(found, BaseException):
            self._under_way.clear()  # who reads on asks anew: others may fail for the same cause
        kept.let_go(found)

    def close(self) -> None:
        """Forget what is under way."""
        with self._lock:
            self._under_way.clear()


def _exactly(file: int, begin: int, end: int) -> list[Request]:
    return planned([(file, begin, end - begin)], 0, MOST_BYTES, 0.0)


def files_looked_at(
    place: RemotePlace,
    name: Callable[[int], str],
    size: Callable[[int], int],
    state: Callable[[int], int],
) -> RemoteFiles:
    """Return files that were looked at before, of which another content is an error.

    Their pages are the same below whichever place: that of a folder, or that of its bucket.

    Args:
        place: with a directory for pages.
        name: as of `RemoteFiles`.
        size: as of `Look`.
        state: as of `Look`.
    """
    parts, options = urlsplit(place.url), place.options
    store = f"{options.endpoint} {parts.scheme}://{parts.netloc}"

    def key(file: int) -> str:
        where = f"{store}/{place.path(name(file))} {size(file)} {state(file)}"
        return xxhash.xxh3_128_hexdigest(where.encode())

    pages = pages_at(str(options.pages), options.budget_bytes, options.floor_bytes)
    return RemoteFiles(requests_to(place), pages, name, key, size, state)


def with_pages(place: RemotePlace) -> RemotePlace:
    """Return a place that names a directory for its pages: of this process, where it had none."""
    return replace(place, options=options_with_pages(place.options))


def options_with_pages(options: RemoteOptions) -> RemoteOptions:
    """Return options that name a directory for pages: of this process, where they had none."""
    if options.pages is None:
        return replace(options, pages=_directory_of(os.getpid()))
    directory = Path(options.pages).expanduser().absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"pages: {str(directory)!r} can be no directory ({error.strerror}); give "
            "RemoteOptions(pages=) another one"
        ) from error
    return replace(options, pages=str(directory))


@MadeOnce
def _directory_of(process: int) -> str:
    """Return the directory for the pages of a process, which goes when that ends."""
    name = tempfile.mkdtemp(prefix="featcache-pages-")
    # `atexit` is not run in workers of multiprocessing, and in forks of others it is
    Finalize(None, shutil.rmtree, (name,), {"ignore_errors": True}, exitpriority=0)
    return name


@MadeOnce
def pages_at(directory: str, budget_bytes: int, floor_bytes: int) -> Pages:
    """Return the pages of a directory, the same at each call: they know what is in use."""
    return Pages(Path(directory), budget_bytes, floor_bytes)


@MadeOnce
def requests_to(place: RemotePlace) -> Requests:
    """Return what asks a place, the same at each call: it keeps connections."""
    return Requests(place)


def download(requests: Requests, name: str, size: int, file: int) -> None:
    """Write an object into an open file by ranges of at most 16 MiB, several at a time.

    Raises `CorruptCacheError` for an object that is gone, changes meanwhile, or has another size.
    """
    etags: dict[str, str] = {}  # of one object are all ranges
    under_way: deque[tuple[int, Future[memoryview]]] = deque()
    for piece in planned([(0, 0, size)], 0, MOST_BYTES, 0.0):
        if len(under_way) == DOWNLOADS:
            _put_down(*under_way.popleft(), file)
        answer = requests.some(name, piece.begin, piece.end, size, etags)
        under_way.append((piece.begin, answer))
    while under_way:
        _put_down(*under_way.popleft(), file)


def _put_down(begin: int, answer: Future[memoryview], file: int) -> None:
    data, done = answer.result(), 0
    while done < len(data):
        done += os.pwrite(file, data[done:], begin + done)

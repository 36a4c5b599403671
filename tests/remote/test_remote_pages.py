"""Pages of objects: shared by threads, processes and forks, bounded, and never waited for."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import shutil
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from range_server import Handler, serving

from featcache.errors import ClosedError, CorruptCacheError, RemoteError, StorageFullError
from featcache.interface import Bytes
from featcache.remote import (
    RemoteFiles,
    RemoteOptions,
    RemotePlace,
    Requests,
    files,
    io,
    pages_at,
    ranges,
    requests_to,
)
from featcache.remote import pages as module
from featcache.remote.io import Ask, Found
from featcache.remote.pages import Pages

SIZE = 1 << 16
PLACE = RemotePlace("http://nowhere/c")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", SIZE)


@pytest.fixture
def pages(tmp_path: Path) -> Pages:
    (tmp_path / "pages").mkdir()
    return Pages(tmp_path / "pages", 1 << 40, 0)


def put(pages: Pages, key: str, begin: int = 0, nbytes: int = 10) -> None:
    pages.write([(key, begin, memoryview(bytes([7]) * nbytes))])


def got(pages: Pages, key: str, begin: int = 0, nbytes: int = 10) -> tuple[list[object], set[int]]:
    """Return what is lacking, and which values the bytes have."""
    out: Bytes = np.zeros(nbytes, np.uint8)
    return list(pages.read_into(key, begin, out)), set(out.tolist())


def within_5_s(what: Callable[[], object]) -> object:
    """Return what a function gives in a thread, an error too; fails if it hangs."""
    said: Future[object] = Future()

    def run() -> None:
        try:
            said.set_result(what())
        except BaseException as error:
            said.set_result(type(error))

    threading.Thread(target=run, daemon=True).start()
    return said.result(timeout=5)


def in_a_fork(what: Callable[[], object]) -> object:
    """Return what a function gives in a forked child, an error too; fails if it hangs."""
    context = multiprocessing.get_context("fork")
    mine, others = context.Pipe()

    def run() -> None:
        try:
            others.send(what())
        except Exception as error:
            others.send(type(error))

    process = context.Process(target=run)
    process.start()
    try:
        assert mine.poll(5), "the child hangs"
        return mine.recv()
    finally:
        process.kill()
        process.join()


Tell = Callable[[Found], object]


class Asked:
    """Requests that are noted, and answered by hand."""

    place = PLACE

    def __init__(self) -> None:
        self.read_bytes = 0
        self.asked: list[tuple[int, int, Tell]] = []
        self.error: BaseException | None = None

    def count_read(self, nbytes: int) -> None:
        self.read_bytes += nbytes

    def gap_bytes(self) -> int:
        return 0

    def ask(self, asks: Sequence[Ask]) -> None:
        if self.error is not None:
            raise self.error
        for each in asks:
            told = partial(_tell, each)
            self.asked.append((each.first, each.end, told))

    def answer(self) -> None:
        for first, end, told in self.asked:
            told(memoryview(bytes([7]) * (end - first)))


def _tell(ask: Ask, found: Found) -> None:
    ask.told([(ask, found)])


def files_of(asked: object, pages: Pages, name: str = "x", size: int = 1 << 50) -> RemoteFiles:
    return RemoteFiles(
        cast(Requests, asked), pages, lambda _: name, lambda _: "key", lambda _: size
    )


def test_pages_that_are_closed_when_the_interpreter_ends_say_nothing(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(pages, "key")
    (segment,) = pages._segments.values()
    with monkeypatch.context() as ending:
        ending.setattr(module, "os", None)  # as the interpreter leaves it
        segment.__del__()
    segment._log = None  # is closed


def test_a_page_that_is_noted_while_another_is_looked_for_confuses_nobody(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    for begin in (0, 20, 40):
        put(pages, "key", begin)
    threads: list[threading.Thread] = []

    def interrupted(values: Sequence[int], value: int) -> int:
        at = bisect_right(values, value)
        if not threads:  # now another thread joins spans before this one
            threads.append(threading.Thread(target=put, args=(pages, "key", 10)))
            threads[0].start()
            threads[0].join(timeout=0.1)
        return at

    monkeypatch.setattr(ranges, "bisect_right", interrupted)
    assert got(pages, "key", 30) == ([(30, 40)], {0})
    threads[0].join()
    assert got(pages, "key") == ([], {7})


@pytest.mark.parametrize("error", [KeyboardInterrupt, ClosedError, ValueError])
def test_a_request_that_could_not_begin_is_begun_by_the_next_read(
    error: type[BaseException], pages: Pages
) -> None:
    asked = Asked()
    files = files_of(asked, pages)
    asked.error = error()
    out: Bytes = np.zeros(10, np.uint8)
    for _ in range(2):
        assert within_5_s(lambda: files.read_into(0, 0, out)) is error
    asked.error = None
    files.prefetch([(0, 0, 10)])
    asked.answer()
    files.read_into(0, 0, out)
    assert set(out.tolist()) == {7}


@pytest.mark.parametrize("way", ["prefetch", "read"])
def test_ctrl_c_in_one_thread_is_no_error_of_another_that_wants_the_same_bytes(
    way: str, pages: Pages
) -> None:
    files, out = files_of(asked := Asked(), pages), np.zeros(10, np.uint8)
    found: Future[object] = Future()

    def read() -> None:
        try:
            files.read_into(0, 0, out)
            found.set_result(None)
        except BaseException as error:
            found.set_result(type(error))

    other = threading.Thread(target=read, daemon=True)

    def interrupted(asks: Sequence[Ask]) -> None:
        asked.ask = plain  # type: ignore[method-assign]
        other.start()
        time.sleep(0.1)  # it waits by now, for whatever it does
        raise KeyboardInterrupt

    plain, asked.ask = asked.ask, interrupted  # type: ignore[method-assign]
    ask: dict[str, Callable[[], None]] = {
        "prefetch": lambda: files.prefetch([(0, 0, 10)]),
        "read": lambda: files.read_into(0, 0, np.zeros(10, np.uint8)),
    }
    with pytest.raises(KeyboardInterrupt):
        ask[way]()
    while not asked.asked and not found.done():
        time.sleep(0.001)
    asked.answer()
    assert found.result(timeout=5) is None
    assert set(out.tolist()) == {7}


def test_damaged_pages_are_asked_for_anew_though_others_have_removed_them_first(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "USED_S", 0.0)  # what others remove is noticed at once
    asked, out = Asked(), np.zeros(10, np.uint8)
    files = files_of(asked, pages, size=10)
    put(pages, "key")
    files.read_many([(0, 0, 10)], [out])
    Pages(pages.directory, 1 << 40, 0).remove("key", 0, 10)
    assert any(pages.missing("key", [(0, 10)]))
    files.forget(0, 0, 10)
    files.prefetch([(0, 0, 10)])
    assert len(asked.asked) == 1


def test_who_reads_on_after_an_error_waits_for_nothing_that_was_asked_before(pages: Pages) -> None:
    asked = Asked()
    files = files_of(asked, pages)
    files.prefetch([(0, 0, 10), (1, 50, 10)])
    (_, _, told), _ = asked.asked
    told(RemoteError("refused"))
    asked.asked.clear()
    files.prefetch([(0, 0, 10), (1, 50, 10)])
    assert [(first, end) for first, end, _ in asked.asked] == [(0, 10), (50, 60)]


def test_a_fork_does_not_wait_for_requests_of_its_parent(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "_has_asked", True)
    put(pages, "key")
    asked = Asked()
    files = files_of(asked, pages)
    files.prefetch([(0, 100, 10)])
    out: Bytes = np.zeros(10, np.uint8)
    assert in_a_fork(lambda: files.read_into(0, 100, out)) is ClosedError
    assert in_a_fork(lambda: files.prefetch([(0, 100, 10)])) is ClosedError
    assert in_a_fork(lambda: files.prefetch([(0, 0, 10)])) is None
    assert in_a_fork(lambda: files.read_into(0, 0, out)) is None  # a page


@pytest.mark.parametrize("whose", ["files", "pages", "segment"])
def test_a_fork_does_not_wait_for_a_lock_of_its_parent(
    whose: str, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "_has_asked", True)
    put(pages, "key")
    files = files_of(Asked(), pages)
    segment: Any = next(iter(pages._segments.values()))
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with {"files": files._lock, "pages": pages._lock, "segment": segment._lock}[whose]:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    out: Bytes = np.zeros(10, np.uint8)
    try:
        assert in_a_fork(lambda: got(pages, "key")) == ([], {7})
        assert in_a_fork(lambda: files.read_into(0, 0, out)) is None
        assert in_a_fork(lambda: files.prefetch([(0, 100, 10)])) is ClosedError
        assert in_a_fork(files.close) is None
        assert in_a_fork(lambda: put(pages, "key", 100)) is None
    finally:
        done.set()
        thread.join()
    assert got(pages, "key", 100) == ([], {7})  # that the child has written


def test_no_more_is_read_ahead_than_there_is_memory_for(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 64 << 20)
    asked = Asked()
    files_of(asked, pages).prefetch([(0, 0, 1 << 35), (0, 1 << 40, 1 << 35)], 1 << 30)
    assert sum(end - first for first, end, _ in asked.asked) == 1 << 30


def test_no_bytes_are_lacking_of_none(pages: Pages) -> None:
    assert got(pages, "key", 5, 0) == ([], set())
    assert list(pages.missing("key", [(5, 5)])) == []


def test_what_a_full_disk_does_not_take_is_an_error_and_the_next_is_written(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        for at in (0, 10):
            with pytest.raises(StorageFullError):
                put(pages, "key", at)
    put(pages, "key", 0)
    assert list(pages.missing("key", [(0, 20)])) == [(10, 20)]


def open_segments() -> list[os.stat_result]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        if path.is_symlink() and module.SUFFIX in str(path.readlink()):
            found.append(path.stat())
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files cannot be listed")
def test_few_segments_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (120, 120))
    pages = Pages(tmp_path, 1 << 40, 0)
    before = len(open_segments())
    for number in range(30):
        put(pages, f"key-{number}")
        got(pages, "key-0")
    assert len(open_segments()) - before <= 3 * 10
    assert got(pages, "key-1") == ([], {7})
    assert all(got(pages, f"key-{number}") == ([], {7}) for number in range(30))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files cannot be listed")
def test_segments_that_were_removed_are_not_kept_open(tmp_path: Path) -> None:
    pages = Pages(tmp_path, 1 << 16, 0)
    before = len(open_segments())
    for number in range(30):
        put(pages, f"key-{number}", nbytes=1 << 14)
    assert len(open_segments()) - before <= 3 * 8
    assert sum(not status.st_nlink for status in open_segments()) == 0


def test_a_full_disk_is_cleared_and_the_bytes_are_kept(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(pages, "old", nbytes=1 << 14)
    write = os.pwrite

    def full(descriptor: int, data: bytes, at: int) -> int:
        held = sum(os.fstat(each._file.fileno()).st_blocks for each in pages._segments.values())
        if held * 512 > 1 << 14:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    put(pages, "new", nbytes=1 << 14)
    assert got(pages, "new") == ([], {7})
    assert got(pages, "old") == ([(0, 10)], {0})


@pytest.mark.skipif(sys.platform != "linux", reason="blocks of a sparse file are counted")
def test_what_is_absent_is_not_read_either(pages: Pages) -> None:
    file = Path("/dev/shm", f"featcache-{os.getpid()}")
    if not file.parent.is_dir():
        pytest.skip("there is no tmpfs, where a look at absent bytes takes room, or kills")
    in_memory = Pages(file, 1 << 40, 0)
    try:
        put(in_memory, "key", 20_000)
        before = in_memory._path("key", 0).stat().st_blocks
        assert got(in_memory, "key", 0, 40_000) == ([(0, 20_000), (20_010, 40_000)], {0, 7})
        assert in_memory._path("key", 0).stat().st_blocks == before
    finally:
        shutil.rmtree(file)


def test_a_segment_that_others_remove_while_it_is_made_is_made_again(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, left = module._make, [2]

    def raced(path: Path) -> None:
        make(path)
        left[0] -= 1
        if left[0] >= 0:
            path.unlink()

    monkeypatch.setattr(module, "_make", raced)
    put(pages, "key")
    assert left[0] < 0
    assert got(pages, "key") == ([], {7})


@pytest.mark.parametrize("nbytes", [0, 3, SIZE - 1, SIZE + 5])
def test_a_segment_of_a_wrong_size_is_made_anew(nbytes: int, pages: Pages) -> None:
    path = pages._path("key", 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(nbytes))
    put(pages, "key")
    assert got(pages, "key") == ([], {7})
    path.write_bytes(bytes(nbytes))
    assert got(Pages(pages.directory, 1 << 40, 0), "key") == ([(0, 10)], {0})


def test_a_directory_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    pages = Pages(tmp_path / "pages", 1, 0)  # looked at, each time
    put(pages, "key")
    shutil.rmtree(tmp_path / "pages")
    put(pages, "other")
    assert pages._path("other", 0).exists()


def test_segments_are_readable_as_the_umask_says(pages: Pages) -> None:
    before = os.umask(0o027)
    try:
        put(pages, "key")
    finally:
        os.umask(before)
    assert pages._path("key", 0).stat().st_mode & 0o777 == 0o640
    assert [path.name for path in pages._path("key", 0).parent.iterdir()] == ["000000.segment"]


def test_records_are_kept_where_the_system_does_not_name_open_files(
    pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DESCRIPTORS", tmp_path / "none", raising=False)
    put(pages, "key")
    for each in (pages, Pages(pages.directory, 1 << 40, 0)):
        assert got(each, "key") == ([], {7})
    shutil.rmtree(pages.directory)
    put(pages, "key", 100)  # into a file without a name: nobody needs a record
    assert got(pages, "key", 100) == ([], {7})
    assert not pages.directory.exists()


def test_an_object_is_compared_with_the_one_that_was_first_read_since_it_was_opened(
    pages: Pages, tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    file = tmp_path / "bucket" / "x"
    file.parent.mkdir()
    file.write_bytes(bytes([7]) * 1000)
    out: Bytes = np.zeros(10, np.uint8)
    with serving(tmp_path / "bucket") as server:
        requests = Requests(RemotePlace(server.url, RemoteOptions(retry_s=20.0, timeout_s=10.0)))
        opened = files_of(requests, pages, size=1000)
        opened.read_into(0, 0, out)
        os.utime(file, ns=(0, 1))
        with pytest.raises(CorruptCacheError, match="open it again"):
            opened.read_into(0, 20, out)
        files_of(requests, pages, size=1000).read_into(0, 20, out)
    assert set(out.tolist()) == {7}


def test_weak_etags_are_compared_and_not_sent(pages: Pages, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    file = tmp_path / "bucket" / "x"
    file.parent.mkdir()
    file.write_bytes(bytes([7]) * 1000)
    etag, sent = ['W/"1"'], list[object]()

    def weak(handler: Handler, data: bytes, status: int) -> bool:
        sent.append(handler.headers.get("If-Match"))
        more = {"Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT", "ETag": etag[0]}
        handler.answer(status, data, more | {"Content-Range": handler.content_range})
        return True

    out: Bytes = np.zeros(10, np.uint8)
    with serving(tmp_path / "bucket") as server:
        server.fault = weak
        requests = Requests(RemotePlace(server.url, RemoteOptions(retry_s=20.0, timeout_s=10.0)))
        files = files_of(requests, pages, size=1000)
        for offset in (0, 20):
            files.read_into(0, offset, out)
        etag[0] = 'W/"2"'
        with pytest.raises(CorruptCacheError, match="another object"):
            files.read_into(0, 40, out)
    assert sent == [None] * 3


@pytest.mark.parametrize("budget_bytes", [0, SIZE])
def test_an_array_that_the_pages_have_no_room_for_is_read(
    budget_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 14)  # several requests, each of which clears
    data = np.random.default_rng(0).integers(256, size=4 * SIZE, dtype=np.uint8)
    (tmp_path / "x").write_bytes(data.tobytes())
    (tmp_path / "pages").mkdir()
    with serving(tmp_path) as server:
        requests = Requests(RemotePlace(server.url))
        remote = files_of(requests, Pages(tmp_path / "pages", budget_bytes, 0), size=len(data))
        out = np.zeros(3 * SIZE, np.uint8)
        assert within_5_s(lambda: remote.read_into(0, 100, out)) is None
        assert np.array_equal(out, data[100 : 100 + len(out)])
        assert server.nbytes == len(out)  # each byte once


def test_where_no_thread_can_be_started_a_read_says_so_and_the_next_one_reads(
    pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "featcache-remote":
            raise RuntimeError("can't start new thread")
        plain(thread)

    (tmp_path / "x").write_bytes(bytes([7]) * 100)
    out: Bytes = np.zeros(10, np.uint8)
    with serving(tmp_path) as server:
        remote = files_of(Requests(RemotePlace(server.url)), pages, size=100)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            for ask in (
                lambda: remote.prefetch([(0, 0, 10)]),
                lambda: remote.read_into(0, 0, out),
            ):
                assert within_5_s(ask) is RuntimeError
        assert within_5_s(lambda: remote.read_into(0, 0, out)) is None
        assert len(server.requests) == 1
    assert set(out.tolist()) == {7}


def test_threads_that_ask_end_when_there_is_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "LINGER_S", 0.01)
    (tmp_path / "x").write_bytes(bytes([7]) * 100)
    with serving(tmp_path) as server:
        requests = Requests(RemotePlace(server.url, RemoteOptions(concurrency=3)))
        for _ in range(2):
            asked = [requests.some("x", at, at + 1, 100) for at in range(20)]
            threads = list(requests._threads._all)
            assert len(threads) <= 3
            assert [answer.result(timeout=5) for answer in asked] == [bytes([7])] * 20
            for thread in threads:
                thread.join(5)
            assert not any(thread.is_alive() for thread in threads)


def test_ctrl_c_while_a_request_is_handed_on_leaves_none_that_is_never_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(bytes(9))

    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    with serving(tmp_path) as server:
        requests = Requests(RemotePlace(server.url))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                requests.some("x", 0, 9, 9)
        assert requests.some("x", 0, 9, 9).result(timeout=5) == bytes(9)


def test_more_threads_ask_where_a_store_can_be_asked_more_often() -> None:
    room, turn = [1.0], threading.Lock()
    at_work, most = [0], [0]
    done = threading.Semaphore(0)

    def job(error: BaseException | None) -> None:
        with turn:
            at_work[0] += 1
            most[0] = max(most[0], at_work[0])
        time.sleep(0.01)
        with turn:
            at_work[0] -= 1
            room[0] += 1.0
        done.release()

    threads = io._Threads(lambda: room[0])
    threads.do([job] * 100)
    assert all(done.acquire(timeout=10) for _ in range(100))
    assert most[0] > 3


def test_jobs_that_an_ending_interpreter_does_not_do_are_given_up() -> None:
    begun, may_end = threading.Event(), threading.Event()
    given_up: list[BaseException | None] = []

    def job(error: BaseException | None) -> None:
        begun.set()
        may_end.wait(10)

    threads = io._Threads(lambda: 1.0)
    threads.do([job])
    assert begun.wait(10)
    threads.do([given_up.append] * 3)
    ending = threads.end()
    assert [type(error) for error in given_up] == [ClosedError] * 3
    may_end.set()
    for thread in ending:
        thread.join(10)


def test_threads_that_ask_at_once_share_requests_and_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, place = threading.Barrier(2), RemotePlace("http://nowhere/both")
    plain, turn = Requests.__init__, threading.Lock()
    made: list[Requests] = []

    def slow(self: Requests, place: RemotePlace) -> None:
        plain(self, place)
        with turn:
            made.append(self)
        time.sleep(0.1)

    def ask() -> None:
        both.wait()
        found.append((requests_to(place), pages_at(str(tmp_path), 1, 1)))

    monkeypatch.setattr(Requests, "__init__", slow)
    found: list[tuple[Requests, Pages]] = []
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    requests_to.cache_clear()
    assert len(made) == 1
    assert found[0] == found[1]

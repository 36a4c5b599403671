"""Requests of an epoch over a cache behind a URL: few, of few bytes more, ahead, and bounded."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from range_server import Handler, RangeServer, serving

import featcache
from featcache import CacheWriter, FeatureLoader, FeatureStorageConfig
from featcache.errors import RemoteError
from featcache.loading import prefetch
from featcache.remote import (
    RemoteFiles,
    RemoteOptions,
    RemotePlace,
    Requests,
    files,
    io,
    pace,
    requests_to,
)
from featcache.remote.pace import KNOWN, LEAST_ROOM, RECENT, Pace
from featcache.remote.ranges import Piece, Spans, planned

pytest.importorskip("obstore")
BACKENDS = ("memmap", "hdf5", "webdataset", "zarr", "lilcom")
UTTERANCES, BATCH, WINDOW = 300, 8, 5


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("bucket")
    for backend in BACKENDS:
        rng = np.random.default_rng(0)
        features = [FeatureStorageConfig("fbank", backend=backend)]
        with CacheWriter(root / backend, features=features) as writer:
            for number in range(UTTERANCES):
                length = int(rng.integers(10, 60))
                array = rng.normal(size=(length, 8)).astype(np.float32)
                writer.write(f"utt-{number:03d}", {"fbank": array})
    return root


@pytest.fixture
def server(bucket: Path) -> Iterator[RangeServer]:
    with serving(bucket) as state:
        yield state
        requests_to.cache_clear()


def opened(server: RangeServer, backend: str, tmp_path: Path, **more: Any) -> featcache.Cache:
    more = {"hedge": False, **more}  # what is counted is what was planned
    how = RemoteOptions(pages=tmp_path / "pages", retry_s=20.0, timeout_s=10.0, **more)
    return featcache.open(f"{server.url}/{backend}", remote=how)


def batches_of(cache: featcache.Cache, windows: bool) -> list[list[Any]]:
    order: list[Any] = np.random.default_rng(1).permutation(UTTERANCES).tolist()
    if windows:
        order = [(row, slice(3, 3 + WINDOW)) for row in order]
    return [order[at : at + BATCH] for at in range(0, UTTERANCES, BATCH)]


def place_of(cache: featcache.Cache) -> RemotePlace:
    (opened,) = cache.selection.blocks.generations
    assert opened.settings.remote is not None
    return opened.settings.remote.place


class Planned:
    """Pieces that were planned together, and what the planner makes of them, none asked twice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gets = 0
        self._there: dict[int, Spans] = {}
        self._wanted: dict[int, Spans] = {}
        plain = RemoteFiles.prefetch

        def noted(remote: RemoteFiles, pieces: Sequence[Piece], *most: int) -> None:
            self._note(pieces, remote._requests.gap_bytes())
            plain(remote, pieces, *most)

        monkeypatch.setattr(RemoteFiles, "prefetch", noted)

    def _note(self, pieces: Sequence[Piece], gap_bytes: int) -> None:
        lacking = []
        for file, begin, nbytes in pieces:
            self._wanted.setdefault(file, Spans()).add(begin, begin + nbytes)
            for first, end in self._there.setdefault(file, Spans()).missing(begin, begin + nbytes):
                lacking.append((file, first, end - first))
        requests = planned(lacking, gap_bytes, files.MOST_BYTES, files.EXTRA)
        self.gets += len(requests)
        for file, begin, end in requests:
            self._there[file].add(begin, end)

    @property
    def nbytes(self) -> int:
        """Bytes that were wanted."""
        return sum(end - begin for spans in self._wanted.values() for begin, end in spans)


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_epoch_asks_for_what_is_planned_over_all_batches_ahead_and_for_few_bytes_more(
    backend: str,
    windows: bool,
    server: RangeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = opened(server, backend, tmp_path, gap_bytes=200)
    of_opening, least = len(server.requests), Planned(monkeypatch)
    for _ in FeatureLoader(cache, "fbank", batch_sampler=batches_of(cache, windows)):
        pass
    asked = [nbytes for _, _, nbytes in server.requests[of_opening:]]
    assert len(asked) <= 1.05 * least.gets
    assert sum(asked) <= 1.05 * least.nbytes


@pytest.mark.parametrize(
    ("nbytes", "rounds"), [(1, [1, 1, 2, 4, 8, 16, 32]), (10, [1, 1, 2]), (99, [1])]
)
def test_as_many_batches_as_are_ahead_are_planned_together_while_there_is_room(
    nbytes: int, rounds: list[int]
) -> None:
    together: list[int] = []
    plans = iter([lambda: prefetch.Planned(nbytes, lambda: None)] * 100)
    batches = prefetch.Prefetch(plans, 1, 70, together=lambda some: together.append(len(some)))
    next(batches)
    assert together[: len(rounds)] == rounds
    assert len(list(batches)) == 99
    assert sum(together) == 100


@pytest.mark.parametrize("backend", ["memmap", "webdataset"])
def test_where_all_arrays_are_here_nothing_is_planned_any_more(
    backend: str,
    bucket: Path,
    server: RangeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, wanted = opened(server, backend, tmp_path), featcache.open(bucket / backend)
    loader = FeatureLoader(cache, "fbank", batch_sampler=batches_of(cache, False))
    list(loader)
    asked = len(server.requests)
    list(loader)  # which finds that all is here
    planned = list[object]()
    monkeypatch.setattr(RemoteFiles, "prefetch", lambda *arguments: planned.append(arguments))
    for batch in loader:
        for id, row, length in zip(
            batch["id"], batch["fbank"], batch["fbank_lengths"], strict=True
        ):
            assert np.array_equal(row[: int(length)].numpy(), wanted.read(id, "fbank"))
    assert planned == []
    assert len(server.requests) == asked
    assert loader.metrics()["hits"] == 1


def test_metrics_tell_requests_bytes_and_hits_of_an_iteration(
    bucket: Path, server: RangeServer, tmp_path: Path
) -> None:
    cache = opened(server, "memmap", tmp_path)
    loader = FeatureLoader(cache, "fbank", batch_sampler=batches_of(cache, False))
    before = len(server.requests)
    list(loader)
    first, asked = loader.metrics(), server.requests[before:]
    assert first["gets"] == len(asked)
    assert first["get_bytes"] == sum(nbytes for _, _, nbytes in asked)
    assert first["hits"] < 0.05
    list(loader)
    then = loader.metrics()
    assert [then[name] for name in ("gets", "get_bytes", "hits")] == [0, 0, 1]
    assert "gets" not in FeatureLoader(bucket / "memmap", batch_size=1).metrics()


@pytest.mark.parametrize("hedge", [True, False])
def test_a_request_that_is_late_is_made_again_unless_that_is_off(
    hedge: bool,
    bucket: Path,
    server: RangeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pace, "LATE", 0.0)
    cache = opened(server, "memmap", tmp_path, gap_bytes=0, hedge=hedge)
    list(
        FeatureLoader(cache, "fbank", batch_sampler=batches_of(cache, True))
    )  # latencies are known
    monkeypatch.setattr(pace, "LEAST_LATE_S", 0.2)
    counts, left, release = requests_to(place_of(cache)).counts, [1], threading.Event()
    hedges = counts.hedges

    def late(_handler: Handler, _data: bytes, _status: int) -> bool:
        left[0] -= 1
        if left[0] == 0:
            release.wait(0.5)
        return False

    server.fault = late
    asked = len(server.requests)
    got = cache.read("utt-007", "fbank", start=9)
    release.set()
    wanted = featcache.open(bucket / "memmap").read("utt-007", "fbank", start=9)
    assert np.array_equal(got, wanted)
    ((_, times),) = Counter(server.requests[asked:]).most_common(1)  # late ones of before aside
    assert (counts.hedges - hedges, times) == ((1, 2) if hedge else (0, 1))


class Held:
    """A server's answers for one file, each of which waits until it is released."""

    def __init__(self, server: RangeServer) -> None:
        self.waiting: list[threading.Event] = []
        server.fault = self._hold

    def _hold(self, handler: Handler, _data: bytes, _status: int) -> bool:
        if handler.path == "/late":
            self.waiting.append(threading.Event())
            self.waiting[-1].wait(10)
        return False

    def wait_for(self, count: int) -> None:
        ends = time.monotonic() + 10
        while len(self.waiting) < count and time.monotonic() < ends:
            time.sleep(0.001)


@contextmanager
def hedging(
    root: Path, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> Iterator[tuple[Requests, RangeServer, Held]]:
    """Give requests that know how quick a server is, and answers of it that are late."""
    monkeypatch.setattr(pace, "LEAST_LATE_S", 0.1)
    monkeypatch.setattr(pace, "LATE", 0.0)
    for name in ("quick", "late"):
        (root / name).write_bytes(bytes(1000))
    with serving(root) as server:
        requests = Requests(RemotePlace(server.url, RemoteOptions(concurrency=concurrency)))
        for asked in [requests.some("quick", at, at + 1, 1000) for at in range(KNOWN)]:
            asked.result()
        held = Held(server)
        try:
            yield requests, server, held
        finally:
            for each in held.waiting:
                each.set()


def test_requests_that_are_made_again_are_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hedging(tmp_path, monkeypatch, 2) as (requests, server, held):
        server.most = 0
        asked = [requests.some("late", at, at + 1, 1000) for at in range(4)]
        held.wait_for(2)
        time.sleep(0.5)  # they are late by now
        assert server.most == 2
        held.waiting[0].set()
        held.wait_for(3)  # the other one again, before those that were not asked for yet
        assert {each for _, each, _ in server.of("late")[:3]} == {"bytes=0-0", "bytes=1-1"}
        server.fault = None
        for each in held.waiting:
            each.set()
        assert [each.result(timeout=10) for each in asked] == [bytes(1)] * 4
        assert server.most == 2


def test_of_an_answer_that_another_one_has_overtaken_no_byte_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hedging(tmp_path, monkeypatch, 8) as (requests, _, held):
        before = requests.counts.nbytes, requests.counts.gets
        answer = requests.some("late", 0, 1000, 1000)
        held.wait_for(2)
        held.waiting[1].set()
        assert answer.result(timeout=10) == bytes(1000)
        held.waiting[0].set()
        while requests.counts.gets < before[1] + 2:
            time.sleep(0.001)
        assert requests.counts.hedges == 1
        assert requests.counts.nbytes - before[0] == 1000


def test_the_end_of_the_interpreter_waits_for_a_request_that_was_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hedging(tmp_path, monkeypatch, 8) as (requests, _, held):
        answer = requests.some("late", 0, 1000, 1000)
        held.wait_for(2)
        held.waiting[0].set()
        assert answer.result(timeout=10) == bytes(1000)
        ending = requests._threads.end()
        for thread in ending:
            thread.join(0.2)
        assert any(thread.is_alive() for thread in ending)
        held.waiting[1].set()
        for thread in ending:
            thread.join(10)
        assert not any(thread.is_alive() for thread in ending)


def test_one_thread_tells_of_what_comes_meanwhile_and_others_wait_where_it_is_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(io, "MOST_WAITING_BYTES", 30)
    begun, may_go_on = threading.Event(), threading.Event()
    told: list[list[str]] = []
    tellers: set[int] = set()

    def hand_on(came: io.Came) -> None:
        tellers.add(threading.get_ident())
        begun.set()
        assert may_go_on.wait(10)
        told.append([ask.name for ask, _ in came])

    answers = io._Answers(hand_on)

    def bring(name: str) -> None:
        ask = io.Ask(name, 0, 10, 10, {}, None, lambda came: None)
        answers.bring(ask, memoryview(bytes(10)))

    threads = [threading.Thread(target=bring, args=(str(at),)) for at in range(6)]
    threads[0].start()
    assert begun.wait(10)
    for thread in threads[1:3]:
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    for thread in threads[3:]:
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    assert not told
    may_go_on.set()
    for thread in threads:
        thread.join(10)
    assert told[0] == ["0"]
    assert sorted(name for some in told for name in some) == list("012345")
    assert len(told[1]) == 5
    assert threads[0].ident in tellers


def test_a_store_that_is_asked_too_often_is_asked_less_at_a_time() -> None:
    paced = Pace(64)
    paced.is_too_fast()
    paced.is_too_fast()  # of the same burst
    assert paced.room == 32
    for _ in range(33):
        paced.ended(1, 1)
    assert 33 <= paced.room < 34
    for _ in range(1000):
        paced.ended(10, 10)
    assert paced.room == 64


@pytest.mark.parametrize("at_once", [1, 16])
def test_a_pause_is_soon_forgotten_in_the_rate(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced, now = Pace(64), 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for _ in range(1000 // at_once):
        now += at_once * 0.001
        paced.ended(at_once, at_once * 1000)
    now += 600
    for _ in range(RECENT // at_once):
        now += at_once * 0.001
        paced.ended(at_once, at_once * 1000)
    assert 0.9e6 < paced.bytes_per_s() < 1.1e6


def test_of_a_store_that_answers_soon_no_more_is_asked_at_a_time_than_can_be_taken_in() -> None:
    paced = Pace(64)
    for _ in range(RECENT):
        paced.begun(0.0005)
    assert paced.room == LEAST_ROOM
    for _ in range(RECENT // 2):  # such as those that waited for this process
        paced.begun(0.03)
    assert paced.room == LEAST_ROOM
    paced.is_late()
    assert paced.room == 64
    for _ in range(RECENT):
        paced.begun(0.002)
    assert paced.room == 16
    for _ in range(RECENT):
        paced.begun(0.03)
    assert paced.room == 64
    few = Pace(3)
    for _ in range(RECENT):
        few.begun(0.0005)
    assert few.room == 3


@pytest.mark.parametrize("status", [429, 503])
def test_what_a_busy_store_refuses_comes_later_and_slower(
    status: int, server: RangeServer, tmp_path: Path
) -> None:
    cache = opened(server, "memmap", tmp_path, gap_bytes=0)
    left = [5]

    def busy(handler: Handler, _data: bytes, _status: int) -> bool:
        left[0] -= 1
        if left[0] >= 0:
            handler.answer(status, b"")
        return left[0] >= 0

    server.fault = busy
    list(FeatureLoader(cache, "fbank", batch_sampler=batches_of(cache, False)[:8]))
    requests = requests_to(place_of(cache))
    assert left[0] < 0
    assert requests.counts.again >= 1
    assert requests._pace.room < RemoteOptions().concurrency


@pytest.mark.parametrize("name", ["train-other-500", "403", "429", "416", "orange"])
def test_numbers_and_words_in_names_are_no_statuses(name: str, tmp_path: Path) -> None:
    def refused(handler: Handler, _data: bytes, _status: int) -> bool:
        handler.answer(502, b"")
        return True

    (tmp_path / name).mkdir()
    (tmp_path / name / "x").write_bytes(bytes(9))
    with serving(tmp_path) as server:
        server.fault = refused
        requests = Requests(RemotePlace(f"{server.url}/{name}", RemoteOptions(retry_s=0.1)))
        for ask in (
            lambda: requests.front("x", 9),
            lambda: requests.some("x", 0, 9, 9).result(),
            lambda: requests.whole("x"),
        ):
            with pytest.raises(RemoteError, match="status 502"):
                ask()
    assert requests._pace.room == RemoteOptions().concurrency

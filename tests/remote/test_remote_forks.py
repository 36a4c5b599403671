"""Processes that are started after a cache behind a URL was opened, or read: each reads, or says
soon that it cannot, and the parent goes on."""

from __future__ import annotations

import copy
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from range_server import RangeServer, serving
from torch.utils.data import DataLoader

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig
from featcache.errors import ClosedError
from featcache.remote import (
    RemoteOptions,
    RemotePlace,
    options_with_pages,
    requests_to,
    with_pages,
)

pytest.importorskip("obstore")
METHODS = ("fork", "spawn", "forkserver")
ARRAYS = {
    f"utt-{number}": np.random.default_rng(number).normal(size=(40 + number, 8)).astype(np.float32)
    for number in range(8)
}
TOTAL = float(sum(array.sum(dtype=np.float64) for array in ARRAYS.values()))
SOON_S = 5.0  # a loaded machine starts a process in less; a hang is longer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    with CacheWriter(tmp_path / "bucket" / "c", [FeatureStorageConfig("fbank")]) as writer:
        for id, array in ARRAYS.items():
            writer.write(id, {"fbank": array})
    with serving(tmp_path / "bucket") as state:
        yield state
        requests_to.cache_clear()


def how(tmp_path: Path) -> RemoteOptions:
    return RemoteOptions(pages=tmp_path / "pages", retry_s=5.0, timeout_s=5.0)


def opened(server: RangeServer, tmp_path: Path) -> featcache.Cache:
    return featcache.open(f"{server.url}/c", remote=how(tmp_path))


def by_cache(cache: featcache.Cache) -> float:
    return float(sum(cache.read(id, "fbank").sum(dtype=np.float64) for id in cache.ids))


def by_reader(cache: featcache.Cache) -> float:
    reader = cache.reader("fbank")
    return float(sum(reader(id).double().sum() for id in ARRAYS))


def by_loader(cache: featcache.Cache) -> float:
    loader = FeatureLoader(cache, "fbank", batch_size=3)
    return float(sum(batch["fbank"].double().sum() for batch in loader))


def by_view(cache: featcache.Cache) -> float:
    view = cache.select(range(len(cache)))
    return float(sum(view.read(id, "fbank").sum(dtype=np.float64) for id in view))


WAYS: dict[str, Callable[[featcache.Cache], float]] = {
    "cache": by_cache,
    "reader": by_reader,
    "loader": by_loader,
    "view": by_view,
}


def _told(way: str, cache: featcache.Cache, answers: Any) -> None:
    begun = time.monotonic()
    try:
        answers.put((WAYS[way](cache), time.monotonic() - begun))
    except ClosedError as error:
        answers.put((str(error), time.monotonic() - begun))


def in_a_process(method: str, way: str, cache: featcache.Cache) -> float | str:
    """Return what a child reads, or says; fails if it does neither."""
    context: Any = multiprocessing.get_context(method)
    answers = context.SimpleQueue() if method == "fork" else context.Queue()
    process = context.Process(target=_told, args=(way, cache, answers), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    said, took_s = answers.get()
    assert took_s < SOON_S
    return said  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("method", "way"),
    [("fork", way) for way in WAYS]
    + [(method, way) for method in METHODS[1:] for way in ("cache", "loader")],
)
@pytest.mark.parametrize("before", ["opened", "read"])
def test_a_process_reads_or_says_why_not_and_its_parent_goes_on(
    method: str, before: str, way: str, server: RangeServer, tmp_path: Path
) -> None:
    cache = opened(server, tmp_path)
    if before == "read":
        cache.read("utt-1", "fbank")
    said = in_a_process(method, way, cache)
    if method == "fork":
        assert "forkserver" in str(said)
    else:
        assert said == pytest.approx(TOTAL)
    assert WAYS[way](cache) == pytest.approx(TOTAL)


@pytest.mark.parametrize("way", ["cache", "loader", "view"])  # a reader asks what is current
def test_a_fork_reads_what_is_kept_already(way: str, server: RangeServer, tmp_path: Path) -> None:
    cache = opened(server, tmp_path)
    assert by_cache(cache) == pytest.approx(TOTAL)
    asked = server.asked
    assert in_a_process("fork", way, cache) == pytest.approx(TOTAL)
    assert server.asked == asked


def test_a_fork_reads_while_a_thread_counts_requests(server: RangeServer, tmp_path: Path) -> None:
    cache = opened(server, tmp_path)
    assert by_cache(cache) == pytest.approx(TOTAL)
    requests = requests_to(with_pages(RemotePlace(f"{server.url}/c", how(tmp_path))))
    assert requests.counts.gets  # those of the cache
    with requests._lock:
        assert in_a_process("fork", "loader", cache) == pytest.approx(TOTAL)


@pytest.mark.parametrize("before", ["opened", "read"])
@pytest.mark.parametrize("method", METHODS)
def test_a_worker_of_a_data_loader_reads_or_says_why_not(
    method: str, before: str, server: RangeServer, tmp_path: Path
) -> None:
    cache = opened(server, tmp_path)
    if before == "read":
        cache.read("utt-1", "fbank")
    dataset = FeatureDataset(cache, "fbank")
    workers: DataLoader[Any] = DataLoader(
        dataset, batch_size=2, num_workers=1, multiprocessing_context=method, collate_fn=dict
    )

    def total() -> float:
        return float(sum(batch["fbank"].double().sum() for batch in workers))

    if method == "fork":
        with pytest.raises(ClosedError, match="forkserver"):
            total()
    else:
        assert total() == pytest.approx(TOTAL)
    assert by_cache(cache) == pytest.approx(TOTAL)


def test_a_fork_while_threads_read_says_so_and_they_go_on(
    server: RangeServer, tmp_path: Path
) -> None:
    cache = opened(server, tmp_path)
    server.delay_s = 0.01
    sums: list[float] = []
    threads = [threading.Thread(target=lambda: sums.append(by_cache(cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    while not server.now:
        time.sleep(0.001)
    said = in_a_process("fork", "cache", cache)
    for thread in threads:
        thread.join(60)
    assert sums == pytest.approx([TOTAL] * 4)
    assert "forkserver" in str(said) or said == pytest.approx(TOTAL)  # all may be there by then


@pytest.mark.parametrize("way", WAYS)
def test_what_was_pickled_reads_where_the_pages_have_gone(
    way: str, server: RangeServer, tmp_path: Path
) -> None:
    cache = copy.copy(opened(server, tmp_path))  # by pickle's protocol
    assert WAYS[way](cache) == pytest.approx(TOTAL)


def _pages_of(answers: Any) -> None:
    answers.put(options_with_pages(RemoteOptions()).pages)


def test_pages_of_a_worker_alone_go_with_it() -> None:
    context: Any = multiprocessing.get_context("fork")  # one of a forkserver ends the same
    answers = context.SimpleQueue()
    process = context.Process(target=_pages_of, args=(answers,))
    process.start()
    pages = Path(answers.get())
    process.join(60)
    assert not pages.exists()


ENDS = """
import sys
from featcache.remote import RemoteOptions, RemotePlace, Requests

requests = Requests(RemotePlace(sys.argv[1], RemoteOptions(retry_s=5.0, timeout_s=5.0)))
asked = [requests.some("x", at, at + 9, 1000) for at in range(900)]
"""


def test_a_process_that_ends_while_it_asks_ends_well_and_soon(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1000))
    with serving(tmp_path) as server:
        for delay_s in (0.0, 0.05, 0.15):
            server.delay_s = delay_s
            ended = subprocess.run([sys.executable, "-c", ENDS, server.url], check=False)
            assert ended.returncode == 0
            assert server.asked < 900  # what nobody waits for is not asked for
            server.asked = 0

"""Iterations over a cache behind a URL that are left, and found by the garbage collector."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from range_server import RangeServer, serving

import featcache
from featcache import CacheWriter, FeatureLoader, FeatureStorageConfig
from featcache.remote import RemoteOptions, requests_to
from featcache.remote.ranges import planned

obstore = pytest.importorskip("obstore")
COUNT = 200  # of 80 KB: four times what is read ahead


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    with CacheWriter(tmp_path / "bucket" / "c", [FeatureStorageConfig("fbank")]) as writer:
        for number in range(COUNT):
            writer.write(f"utt-{number:03d}", {"fbank": np.ones((500, 40), "f4")})
    with serving(tmp_path / "bucket") as state:
        yield state
        requests_to.cache_clear()


@pytest.fixture
def collector_off() -> Iterator[None]:
    """Let no collection begin but those of a test: where it does is the point."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Trainer:
    """A loop that keeps its iteration, and is kept by itself."""

    def __init__(self, cache: featcache.Cache) -> None:
        self.itself = self
        how: dict[str, Any] = {"shuffle": True, "threads": 2, "prefetch_bytes": 4 << 20}
        self.batches = iter(FeatureLoader(cache, "fbank", batch_size=2, **how))
        next(self.batches)


def opened(server: RangeServer, tmp_path: Path) -> featcache.Cache:
    # few at a time, so that some are under way for long
    how = RemoteOptions(pages=tmp_path / "pages", hedge=False, gap_bytes=0, concurrency=3)
    return featcache.open(f"{server.url}/c", remote=how)


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("collector_off")
def test_one_that_a_fetching_thread_finds_stops_nobody(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(server, tmp_path)
    is_left, has_collected = threading.Event(), threading.Event()
    get = obstore.get

    def get_and_collect(*args: Any, **how: Any) -> Any:
        found = get(*args, **how)
        is_fetching = threading.current_thread().name == "featcache-remote"
        if is_fetching and is_left.is_set() and not has_collected.is_set():
            gc.collect()  # its iteration waits for the bytes of this thread
            has_collected.set()
        return found

    monkeypatch.setattr(obstore, "get", get_and_collect)
    server.delay_s = 0.1
    trainer = Trainer(cache)
    next(trainer.batches)
    del trainer
    is_left.set()
    assert has_collected.wait(30)
    server.delay_s = 0.0
    rows = [id for batch in FeatureLoader(cache, "fbank", batch_size=50) for id in batch["id"]]
    assert len(rows) == COUNT


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("collector_off")
def test_one_that_is_found_while_requests_are_planned_stops_nobody(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(server, tmp_path)
    server.delay_s = 0.1
    trainer = Trainer(cache)
    has_collected = threading.Event()

    def collected_and_planned(*args: Any, **how: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not has_collected.is_set():
            has_collected.set()
            time.sleep(0.5)  # until threads of the iteration wait for the lock that is held here
            gc.collect()
        return planned(*args, **how)

    monkeypatch.setattr("featcache.remote.files.planned", collected_and_planned)
    del trainer
    assert len(cache.read_batch(cache.ids[::-1][:60], "fbank").lengths) == 60
    assert has_collected.is_set()

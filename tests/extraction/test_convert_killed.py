"""Conversions that are killed: the same call goes on, and what comes out is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from convert_helpers import KINDS, assert_same, make_source

import featcache
from featcache import FeatureStorageConfig
from featcache.registry import backend_names
from featcache.workers import get_client
from featcache.writing.session import publish_sealed

SCRIPT = Path(__file__).parent / "convert_kills.py"


@pytest.mark.parametrize("way", ["copy", "hdf5", "zarr", "overwrite"])
def test_a_conversion_killed_anywhere_goes_on(tmp_path: Path, way: str) -> None:
    paths = os.pathsep.join([str(SCRIPT.parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, way, "5"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


STOPPED = """
import os, signal, sys
import featcache
from featcache.extraction.job import ProgressBar
from featcache.writing import copies, queue

source, target, way = sys.argv[1:]
copies.BATCH_ARRAYS = 8  # four utterances at a time
queue.COMMIT_INTERVAL_S = 0.0 if way == "KILL" else 3600.0
count, told = ProgressBar.count, []


def stop(bar, utterances, nbytes):
    count(bar, utterances, nbytes)
    told.append(utterances)
    if len(told) == 5:
        os.kill(os.getpid(), getattr(signal, f"SIG{way}"))


ProgressBar.count = stop
featcache.convert(source, target, progressbar=False)
"""


@pytest.mark.parametrize("backend", backend_names())
@pytest.mark.parametrize("way", ["INT", "KILL"])
def test_a_stopped_copy_keeps_what_it_had_copied(tmp_path: Path, way: str, backend: str) -> None:
    native = make_source(tmp_path / "native", ["fbank", "units"])
    fbank = FeatureStorageConfig("fbank", backend=backend, frame_s=0.01, dims=[8])
    source = featcache.convert(native, tmp_path / "a", features=[fbank, "units"], progressbar=False)
    command: list[str] = [
        sys.executable,
        "-c",
        STOPPED,
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        way,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -getattr(signal, f"SIG{way}"), done.stderr
    if way == "KILL":
        assert publish_sealed(tmp_path / "b")
    with featcache.open(tmp_path / "b", verify="arrays") as cache:
        kept = cache.ids
        assert len(kept) == 20
        assert not cache.complete
        assert cache.stats("fbank").count == sum(len(source.read(id, "fbank")) for id in kept)
        for name in source.annotations:
            rows = [source.ids.index(id) for id in kept]
            assert [*cache.annotation(name)] == [source.annotation(name)[row] for row in rows]
    again = featcache.convert(source, tmp_path / "b", progressbar=False)
    assert_same(again, source, rtol=1e-12 if backend != "lilcom" else 0.1)  # of what it decodes


def test_workers_convert_the_same(tmp_path: Path) -> None:
    source = featcache.open(make_source(tmp_path / "a", [*KINDS]))
    features = [
        FeatureStorageConfig.from_json({**each.to_json(), "backend": "hdf5", "codec": "gzip"})
        for each in KINDS.values()
    ]
    cache = featcache.convert(
        source, tmp_path / "b", features=features, parallel={"n_workers": 2}, progressbar=False
    )
    assert_same(cache, source)
    assert len(cache.opened.manifest.parts) == 2
    # all is there: it is only compared once more
    again = featcache.convert(
        source, tmp_path / "b", features=features, parallel={"n_workers": 2}, progressbar=False
    )
    assert_same(again, source)


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    source = featcache.open(make_source(tmp_path / "a", ["fbank", "units"], 2000))
    zstd = FeatureStorageConfig("fbank", backend="zarr", codec="zstd")
    features: list[FeatureStorageConfig | str] = [zstd, "units"]
    with get_client({"n_workers": 2}) as client:

        def kill() -> None:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not list((tmp_path / "b").glob("parts/*/*.zarr")):
                time.sleep(0.01)
            os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        cache = featcache.convert(
            source, tmp_path / "b", features=features, parallel=client, progressbar=False
        )
        thread.join()
    assert cache.complete
    assert len(cache) == len(source)
    for id in source.ids[::50]:
        assert np.array_equal(cache.read(id, "fbank"), source.read(id, "fbank"))
    assert sum(part.rows for part in cache.opened.manifest.parts) == len(source)

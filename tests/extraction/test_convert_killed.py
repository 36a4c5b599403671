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
from featcache.workers import get_client

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

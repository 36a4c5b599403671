"""A full disk, and a disk that fails: what was committed stays, nothing leaks, and the next run
goes on.
"""

from __future__ import annotations

import errno
import gc
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_helpers import (
    FINGERPRINT,
    check_cache,
    free_space,
    id_of,
    make_cache,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import StorageFullError

HUGE = SimpleNamespace(free=1 << 60)


def frames(number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(number).standard_normal((300, 40)).astype(np.float32)


def fill(path: Path, features: list[FeatureStorageConfig], commit_every: int) -> int:
    """Write utterances until the disk is full; returns how many were committed before."""
    committed = 0
    with CacheWriter(path, features) as writer:
        for number in range(300):
            if str(number) not in writer:
                writer.write(str(number), {"fbank": frames(number)})
                if number % commit_every == 0:
                    writer.commit()
                    committed = number + 1
    return committed


@pytest.mark.parametrize("backend", ["hdf5", "memmap", "webdataset", "zarr"])
@pytest.mark.parametrize("noticed", ["before", "by the system"])
def test_what_is_committed_survives_a_full_disk(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, backend: str, noticed: str
) -> None:
    if noticed == "by the system":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: HUGE)
    features = [FeatureStorageConfig("fbank", backend=backend)]
    path = small_disk / "cache"
    with pytest.raises(
        StorageFullError, match=r"utterances of this run are committed and kept: free some space"
    ):
        fill(path, features, commit_every=1)
    gc.collect()
    free_space(small_disk)
    with CacheWriter(path, features) as writer:
        kept = [number for number in range(300) if str(number) in writer]
        assert kept == list(range(len(kept)))
        assert len(kept) > 30
        for number in range(100):
            if str(number) not in writer:
                writer.write(str(number), {"fbank": frames(number)})
    cache = featcache.open(path, verify="arrays")
    assert len(cache) == 100
    for number in range(100):
        np.testing.assert_array_equal(cache.read(str(number), "fbank"), frames(number))


def test_a_disk_that_is_full_from_the_start_is_said(small_disk: Path) -> None:
    make_cache(small_disk / "cache", range(5))
    fill_up(small_disk)
    for name, overwrite in (("new", False), ("cache", False), ("cache", True)):
        with pytest.raises(StorageFullError, match=r"free some space and run the same again"):
            make_cache(small_disk / name, range(5, 9), overwrite=overwrite)
    check_cache(small_disk / "cache", range(5))
    free_space(small_disk)
    make_cache(small_disk / "cache", range(5, 9))
    check_cache(small_disk / "cache", range(9))
    make_cache(small_disk / "new", range(5))
    check_cache(small_disk / "new", range(5))


def fill_up(path: Path) -> None:
    with (path / "filling").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017


class Fault:
    """Lets the n-th call of a kind fail, once or from then on."""

    def __init__(self, number: int, lasting: bool, code: int) -> None:
        self.calls = 0
        self._number, self._lasting, self._code = number, lasting, code

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self._number or (self._lasting and self.calls > self._number):
                raise OSError(self._code, os.strerror(self._code))
            return call(*args, **kwargs)

        return failing


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("name", ["fsync", "replace", "mkdir"])
def test_any_call_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lasting: bool
) -> None:
    # a format that fails to start leaves its first files to be closed with a warning, which would
    # hold on to the rest
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    number, failed = 0, True
    while failed:
        number += 1 if name != "fsync" or number < 8 else 5
        path = tmp_path / str(number)
        make_cache(path, range(3))
        gc.collect()
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        fault = Fault(number, lasting, errno.ENOSPC)
        committed: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fault.wrap(getattr(os, name)))
            try:
                run(path, committed)
                failed = fault.calls >= number  # no error in spite of it
            except StorageFullError as error:
                assert "run the same again" in str(error)  # noqa: PT017
        gc.collect()
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208
        assert set(featcache.open(path, verify="arrays")) >= {id_of(known) for known in range(3)}
        with CacheWriter(path, two_features(), FINGERPRINT) as writer:
            assert all(id_of(known) in writer for known in committed)
            write(writer, [missing for missing in range(9) if id_of(missing) not in writer])
        check_cache(path, range(9))


def run(path: Path, committed: list[int]) -> None:
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        for numbers in (range(3, 5), range(5, 7)):
            write(writer, numbers)
            writer.commit()
            committed += numbers
        writer.publish()
        write(writer, range(7, 9))
    committed += range(7, 9)

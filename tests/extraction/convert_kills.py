"""Kills conversions with SIGKILL, each at another sync of a file, and goes on after each.

    python convert_kills.py FOLDER WAY KILLS

Run by the tests: one process without threads, which forks, so that a kill costs milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from convert_helpers import KINDS, assert_same, make_source

import featcache
from featcache import FeatureStorageConfig
from featcache.writing import part_writer

NAMES = ["fbank", "units"]
WAYS: dict[str, list[str | FeatureStorageConfig]] = {
    "copy": [*NAMES],
    "hdf5": [
        FeatureStorageConfig("fbank", backend="hdf5", codec="gzip"),
        FeatureStorageConfig("units", "int32", backend="hdf5"),
    ],
    "zarr": [FeatureStorageConfig("fbank", "float64", backend="zarr"), KINDS["units"]],
    "overwrite": [FeatureStorageConfig("fbank", "float64"), KINDS["units"]],
}


def in_child(call: Callable[[], object]) -> int:
    """Call something in a forked process; return the signal that ended it, or its exit status."""
    child = os.fork()
    if not child:
        try:
            call()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(3)
    _, status = os.waitpid(child, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def killed_at(number: int, call: Callable[[], object]) -> Callable[[], None]:
    """Return a call that is killed at its so many-th sync; without one it tells how many it had."""

    def run() -> None:
        synced, left = os.fsync, [number]

        def sync(file: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            synced(file)

        vars(os)["fsync"] = sync  # for this process, which ends with it
        call()
        Path(sys.argv[1], "syncs").write_text(str(number - left[0]))

    return run


def check(target: Path, source: featcache.Cache) -> None:
    """Compare a cache with its source: all of it where nothing was changed, else the values."""
    with featcache.open(target, verify="arrays") as cache:
        assert cache.complete
        assert [*cache] == [*source]
        if sys.argv[2] == "copy":
            assert_same(cache, source)
        for id in source:
            for name, array in source[id].items():
                assert np.array_equal(cache.read(id, name), array), (id, name)


def main() -> None:
    """Kill and go on."""
    folder, way, kills = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    part_writer.PART_ROWS = 12  # several parts in the source
    source = featcache.open(make_source(folder / "source", NAMES))
    part_writer.PART_ROWS = 24 if way == "copy" else 90  # two or three in the target

    def convert(target: Path) -> None:
        again = way == "overwrite"
        featcache.convert(source, target, features=WAYS[way], overwrite=again, progressbar=False)

    assert in_child(killed_at(10**6, lambda: convert(folder / "whole"))) == 0
    total = int((folder / "syncs").read_text())
    for number in np.unique(np.linspace(1, total, kills).astype(int)).tolist():
        target = folder / f"target-{number}"
        if way == "overwrite":
            make_source(target, NAMES, 20)
        killed = in_child(killed_at(number, lambda: convert(target)))  # noqa: B023
        assert killed == -signal.SIGKILL or number > 0.8 * total
        if way == "overwrite" and number < total / 2:
            assert len(featcache.open(target)) == 20  # readers have the old one
        assert in_child(lambda: convert(target)) == 0  # noqa: B023
        check(target, source)


if __name__ == "__main__":
    main()

"""Real processes, killed at random: what was committed is neither lost nor computed again."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    assert_holds,
    id_of,
    make_cache,
    oracle,
    two_features,
)

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.writing import part_writer

KILLS = 12  # of each; `make crash` tries thousands
NUMBERS = range(60)
FEATURES = {
    "memmap": two_features(),
    "hdf5": two_features("hdf5", "hdf5"),
    "mixed": [
        FeatureStorageConfig("fbank", backend="hdf5", codec="gzip"),
        *two_features("memmap", "webdataset")[1:],
    ],
}


def work(path: Path, features: list[FeatureStorageConfig], log: Path, overwrite: bool) -> None:
    """Write what is missing, noting what is computed and what is committed."""
    part_writer.PART_ROWS = 17
    note = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with CacheWriter(path, features, FINGERPRINT, overwrite=overwrite) as writer:
        waiting = []
        for number in NUMBERS:
            if id_of(number) not in writer:
                os.write(note, f"computed {number}\n".encode())
                writer.write(id_of(number), arrays_of(number))
                waiting.append(number)
                if number % 3 == 0:
                    writer.commit()
                    os.write(note, "".join(f"committed {done}\n" for done in waiting).encode())
                    waiting = []
                if number % 25 == 24 and not overwrite:
                    writer.publish()


def killed(
    path: Path, features: list[FeatureStorageConfig], log: Path, overwrite: bool, delay_s: float
) -> bool:
    """Do the work in a process that is killed after a while; returns whether it was."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(path, features, log, overwrite)
            code = 0
        finally:
            os._exit(code)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("layout", FEATURES)
def test_a_killed_writer_goes_on_where_it_was(tmp_path: Path, layout: str, overwrite: bool) -> None:
    features, kills, rounds = FEATURES[layout], 0, 0
    moments = random.Random(f"{layout} {overwrite}")
    if "hdf5" in str(features):
        import h5py  # noqa: F401 - once, not in each process

    started = time.monotonic()
    make_cache(tmp_path / "whole", NUMBERS, features)
    longest_s = 2 * (time.monotonic() - started)
    while kills < KILLS:
        rounds += 1
        path, log = tmp_path / str(rounds), tmp_path / f"{rounds}.log"
        if overwrite:
            make_cache(path, range(5), features, {"model": "old"})
        while killed(path, features, log, overwrite, moments.uniform(0, longest_s)):
            kills += 1
            if (path / "featcache.json").exists():
                cache = featcache.open(path, verify="arrays")
                if overwrite and cache.fingerprint["model"] != "old":
                    break  # just after it was published
                if overwrite:
                    assert_holds(cache, oracle(range(5)))
        assert_whole(path, tmp_path / "whole", log)


def assert_whole(path: Path, whole: Path, log: Path) -> None:
    """Compare with a cache that was written without interruption, and see that nothing was done
    twice.
    """
    cache = featcache.open(path, verify="arrays")
    assert cache.complete
    assert_holds(cache, oracle(NUMBERS))
    one, other = cache.stats("fbank"), featcache.open(whole).stats("fbank")
    assert one.count == other.count
    assert abs(one.mean / other.mean - 1).max() < 1e-12
    assert abs(one.var / other.var - 1).max() < 1e-12
    history = log.read_text().splitlines()
    for line in history:
        if line.startswith("committed"):
            number = line.split()[1]
            assert f"computed {number}" not in history[history.index(line) :], (
                f"{number} was committed"
            )

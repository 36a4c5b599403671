"""Collect-stats on Dask workers: the same files for any number of them, and what is kept when they
die.
"""

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
from collect_stats_helpers import Provider, assert_collected, assert_right, calls, collect, files_of
from dask.distributed import Client, LocalCluster
from places import TESTS

from featcache.errors import CacheLockedError, ComputeError

TWO = {"env": "local", "n_workers": 2}
SEVEN_THREADS = {
    "env": "local",
    "n_workers": 7,
    "options": {"processes": False, "protocol": "tcp://"},
}


def test_seven_workers_give_the_same_files_to_the_byte(tmp_path: Path) -> None:
    serial = collect(Provider(tmp_path / "run"))
    before = files_of(tmp_path / "run" / "stats" / "train")
    merged = collect(Provider(tmp_path / "run"), parallel=SEVEN_THREADS, resume=False)
    assert files_of(tmp_path / "run" / "stats" / "train") == before
    for of_key, expected in ((merged[name], serial[name]) for name in ("sum", "sq", "count")):
        assert {key: np.asarray(value).tolist() for key, value in of_key.items()} == {
            key: np.asarray(value).tolist() for key, value in expected.items()
        }
    assert sorted(calls(tmp_path / "run")) == sorted([*range(30), *range(30)])


def test_a_worker_that_dies_takes_nothing_with_it_that_was_done(tmp_path: Path) -> None:
    collect(Provider(tmp_path / "serial"))
    collect(Provider(tmp_path / "run", kills_once=[9]), parallel=TWO, write_collected_feats=True)
    found, expected = (files_of(tmp_path / name / "stats" / "train") for name in ("run", "serial"))
    assert found == {**expected, "feat_keys_written.txt": b"feats\nfirst\n"}
    assert_collected(tmp_path / "run" / "stats" / "train", range(30))
    # the sample, and what the one that died was at
    assert len(calls(tmp_path / "run")) <= 4 + 30 + 4


def test_an_utterance_that_kills_every_worker_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        ComputeError, match=r"3 workers died when they were at utterances 4, 5, 6, 7 of .*is kept"
    ):
        collect(
            Provider(tmp_path / "run", kills=[6]), 12, parallel={"env": "local", "n_workers": 1}
        )
    assert calls(tmp_path / "run").count(6) == 3
    (tmp_path / "run" / "calls").unlink()
    collect(Provider(tmp_path / "run"), 12)
    assert_right(tmp_path / "run" / "stats" / "train", range(12))
    assert set(calls(tmp_path / "run")).isdisjoint(range(4))


def test_a_first_batch_that_kills_every_worker_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ComputeError, match="3 workers died when they were at utterances 0, 1, 2,"):
        collect(
            Provider(tmp_path / "run", kills=[1]),
            parallel={"env": "local", "n_workers": 1},
            write_collected_feats=True,
        )
    collect(Provider(tmp_path / "run"), write_collected_feats=True)
    assert_collected(tmp_path / "run" / "stats" / "train", range(30))


def test_an_utterance_that_fails_in_a_worker_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ComputeError, match=r"of 'spk1/utt-22' failed with ValueError: cannot compute 22"
    ):
        collect(
            Provider(tmp_path / "run", fails=[22]),
            parallel=SEVEN_THREADS,
            write_collected_feats=True,
        )
    collect(Provider(tmp_path / "run"), write_collected_feats=True)
    assert_collected(tmp_path / "run" / "stats" / "train", range(30))


def test_a_killed_run_goes_on_with_any_number_of_workers_and_another_batch_size(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for _ in range(2):
        start_and_kill(folder)
    done = len(list((folder / "stats" / "train" / "shards").glob("split.*/done")))
    assert 1 <= done < 8
    before = len(calls(folder))
    collect(Provider(folder), batch_size=3, parallel=TWO, write_collected_feats=True)
    assert_collected(folder / "stats" / "train", range(30))
    assert len(calls(folder)) - before <= 3 + 30 - 4 * done


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_does_not_wait_for_workers_of_somebody_else_that_hang(tmp_path: Path) -> None:
    pressed = []

    def press() -> None:
        until = time.monotonic() + 60
        while len(calls(tmp_path)) < 20 and time.monotonic() < until:
            time.sleep(0.05)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,  # type: ignore[no-untyped-call]
        Client(cluster) as client,  # type: ignore[no-untyped-call]
    ):
        threading.Thread(target=press).start()
        provider = Provider(tmp_path, seconds=0.05, hangs=[9])
        with pytest.raises(KeyboardInterrupt):
            collect(provider, parallel=client, write_collected_feats=True)
        assert time.monotonic() - pressed[0] < 20
    collect(Provider(tmp_path), write_collected_feats=True)
    assert_collected(tmp_path / "stats" / "train", range(30))


def start_and_kill(folder: Path) -> None:
    """Start a run, and kill it once it has computed ten more utterances."""
    before = len(calls(folder))
    script = TESTS / "collect_stats_helpers.py"
    process = subprocess.Popen([sys.executable, script, folder, "0.1"], stderr=subprocess.DEVNULL)
    while len(calls(folder)) < before + 10:
        assert process.poll() is None
        time.sleep(0.02)
    assert_locked(folder)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


def assert_locked(folder: Path) -> None:
    with pytest.raises(CacheLockedError, match="is being written by process"):
        collect(Provider(folder))

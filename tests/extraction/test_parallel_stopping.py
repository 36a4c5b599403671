"""How runs on workers end that do not come to their end: with the first error, all that was
committed, and at once.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from dask.distributed import Client, LocalCluster
from parallel_helpers import LOCAL, Provider, assert_holds, calls, extract
from places import TESTS
from store_helpers import free_space

from featcache.errors import ComputeError, IncompleteError, StorageFullError
from featcache.format import committed
from featcache.workers import get_client, workers

DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from parallel_helpers import Provider, extract
if __name__ == "__main__":
    extract(Provider(Path(sys.argv[2]), 40, 0.05, hangs=[39]))
"""

TWO_WORKERS = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}

# from Ctrl-C to the end of the process: 5 s where nothing else runs
ENDED_S = 20.0


def test_a_worker_that_hangs_does_not_keep_the_error_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "STOPPING_S", 1.0)
    monkeypatch.setattr(workers, "SILENCE_S", 0.0)
    with pytest.raises(
        ComputeError, match="of 'spk2/utt-5' failed with ComputingError: cannot"
    ) as caught:
        extract(Provider(tmp_path, hangs=[39], fails=[5]), retries=0)
    assert "stopping: up to 1 s for 2 workers to end their batch" in caplog.text
    assert "given up after 1 s, what it committed is kept: worker tcp://127.0.0.1:" in caplog.text
    assert "nothing has come from workers for 0 s; tasks are at tcp://127.0.0.1:" in caplog.text
    notes = "\n".join(caught.value.__notes__)
    # where it happened in the worker
    assert 'raise ComputingError(f"cannot compute {number}")' in notes
    kept = len(set(committed(tmp_path / "cache")))
    assert f"{kept} of 40 utterances are in cache" in notes
    assert kept > 20
    assert_holds(extract(Provider(tmp_path)), range(40))


def test_ctrl_c_ends_workers_that_hang(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", DRIVER, str(TESTS), str(tmp_path)]
    driver = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    until = time.monotonic() + 60
    while len(calls(tmp_path)) < 30:
        assert time.monotonic() < until
        time.sleep(0.05)
    workers = psutil.Process(driver.pid).children(recursive=True)
    began = time.monotonic()
    os.killpg(driver.pid, signal.SIGINT)  # as a terminal does, workers included
    _, shown = driver.communicate(timeout=60)
    assert time.monotonic() - began < ENDED_S
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    before, interrupt = shown.split("Traceback (most recent call last):")
    _, told = before.splitlines()  # the first one is the link of the dashboard
    assert re.match(r"stopped: \d+ of 40 utterances are in cache .* goes on from there", told)
    assert "\nKeyboardInterrupt" in interrupt
    assert len(set(committed(tmp_path / "cache"))) >= 20
    assert_holds(extract(Provider(tmp_path)), range(40))


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_does_not_wait_for_workers_of_somebody_else_that_hang(tmp_path: Path) -> None:
    pressed = []

    def press() -> None:
        until = time.monotonic() + 60
        while len(calls(tmp_path)) < 30 and time.monotonic() < until:
            time.sleep(0.05)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with (
        LocalCluster(**TWO_WORKERS) as cluster,  # type: ignore[no-untyped-call]
        Client(cluster) as client,  # type: ignore[no-untyped-call]
    ):
        threading.Thread(target=press).start()
        with pytest.raises(KeyboardInterrupt) as caught:
            extract(Provider(tmp_path, 40, 0.05, hangs=[20]), parallel=client)
        assert time.monotonic() - pressed[0] < ENDED_S
    assert "still being written" in "".join(caught.value.__notes__)
    assert len(set(committed(tmp_path / "cache"))) >= 20
    assert_holds(extract(Provider(tmp_path)), range(40))


@pytest.mark.parametrize("parallel", [None, {"env": "local", "n_workers": 1}])
def test_after_a_full_disk_the_same_process_goes_on(
    small_disk: Path, parallel: dict[str, object] | None
) -> None:
    provider = Provider(small_disk, 40)
    filling = small_disk / "filling"
    filling.write_bytes(bytes((4 << 20) - (160 << 10)))
    with pytest.raises(StorageFullError, match="free some space"):
        extract(provider, parallel=parallel)
    free_space(small_disk)
    assert_holds(extract(provider, parallel=parallel), range(40))


def test_no_more_workers_are_started_than_there_is_work_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extract(Provider(tmp_path, 39), parallel=None)
    assert_holds(extract(Provider(tmp_path, 40), parallel={**LOCAL, "n_workers": 8}), range(40))
    assert "dashboard of 1 local worker:" in capsys.readouterr().err


def test_a_cache_that_lost_a_part_meanwhile_is_not_taken_for_complete(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "parallel": None,
        "fingerprint": {"source": None, "constants": None, "attributes": None},
    }
    extract(Provider(tmp_path, 10), **settings)
    provider = Provider(tmp_path, 20)
    (part,) = (tmp_path / "cache" / "parts").iterdir()

    class Removing:
        def __init__(self) -> None:
            self.compute: Any = provider.build_env_local()["compute_features"]

        def __call__(self, items: list[int]) -> Any:
            shutil.rmtree(part, ignore_errors=True)
            return self.compute(items)

    env = {**provider.build_env_local(), "compute_features": Removing()}
    provider.build_env_local = lambda: env  # type: ignore[method-assign]
    with pytest.raises(
        IncompleteError, match=r"10 utterances of .* are neither stored nor reported"
    ):
        extract(provider, **settings)
    assert_holds(extract(Provider(tmp_path, 20), **settings), range(20))


def test_runs_at_the_same_time_share_the_workers_of_a_client_and_leave_no_tasks(
    tmp_path: Path,
) -> None:
    def run(name: str) -> None:
        assert_holds(extract(Provider(tmp_path / name, 30, 0.02), parallel=client), range(30))

    with get_client(LOCAL) as client, ThreadPoolExecutor() as threads:
        list(threads.map(run, ["a", "b"]))
        with pytest.raises(ComputeError):
            extract(Provider(tmp_path / "c", 40, 0.1, fails=[39]), parallel=client, retries=0)
        assert client.run_on_scheduler(tasks_of) == 0  # type: ignore[no-untyped-call]


def test_a_frozen_worker_keeps_nobody_from_working_nor_the_next_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "STOPPING_S", 1.0)
    with get_client(LOCAL) as client:
        # number 39 is the longest and comes first, 0 is the shortest and comes last
        with pytest.raises(ComputeError, match="cannot compute 0"):
            extract(Provider(tmp_path / "a", freezes=[39], fails=[0]), parallel=client, retries=0)
        # but one, all that was not given to the frozen worker was done
        assert len(set(committed(tmp_path / "a" / "cache"))) >= 36
        assert_holds(extract(Provider(tmp_path / "b"), parallel=client), range(40))


@pytest.mark.parametrize("raised", ["GeneratorExit", "CancelledError"])
def test_whatever_is_raised_in_a_worker_ends_the_run_with_its_name(
    tmp_path: Path, raised: str
) -> None:
    with pytest.raises(ComputeError, match=f"^{raised}: in utterance 7"):
        extract(
            Provider(tmp_path, 10, 0, **{raised: [7]}), parallel={"env": "local", "n_workers": 1}
        )


def tasks_of(dask_scheduler: Any) -> int:
    return len(dask_scheduler.tasks)

"""Workers, drivers and utterances that die: what is committed stays, what is not is computed, the
cache is the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from parallel_helpers import LOCAL, Numbers, Provider, assert_holds, calls, extract
from places import TESTS

import featcache
from featcache.errors import CacheLockedError, ComputeError, ConfigError, IncompleteError
from featcache.extraction import on_workers
from featcache.format import committed

IDS = Numbers(200).ids
DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from parallel_helpers import LOCAL, Provider, extract
if __name__ == "__main__":
    parallel = {**LOCAL, "n_workers": int(sys.argv[3])}
    extract(Provider(Path(sys.argv[2]), 200, 0.05), parallel=parallel)
"""


def start_driver(folder: Path, workers: int) -> subprocess.Popen[bytes]:
    arguments = [
        sys.executable,
        "-c",
        DRIVER,
        str(TESTS),
        str(folder),
        str(workers),
    ]
    return subprocess.Popen(arguments, stderr=subprocess.DEVNULL)


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_killed_workers_task_is_done_by_another_and_what_it_committed_stays(
    tmp_path: Path,
) -> None:
    cache = extract(
        Provider(tmp_path, 200, 0.02, kills_once=[30, 170]), batch_size=2, publish_every_s=0.5
    )
    assert_holds(cache, range(200))
    assert cache.generation > 3  # it was published in between
    tried = Counter(calls(tmp_path))
    again = {id for id, number in tried.items() if number > 1}
    assert {IDS[30], IDS[170]} <= again
    # two tasks of three or so batches were under way when each of them died
    assert len(again) < 2 * 2 * 8
    assert max(tried.values()) <= 3


def test_an_utterance_that_kills_its_worker_is_set_aside(tmp_path: Path) -> None:
    cache = extract(Provider(tmp_path, kills=[21]), on_error="skip", retries=1, batch_size=2)
    assert_holds(cache, set(range(40)) - {21})
    assert Counter(calls(tmp_path))[IDS[21]] == 3  # with another, alone, and again
    (line,) = map(json.loads, (cache.path / "work-failures.jsonl").read_text().splitlines())
    assert line["id"] == IDS[21]
    assert (
        "the worker that computed 'spk0/utt-21' died 2 times: out of memory, or a crash"
        in line["error"]
    )


def test_an_utterance_that_kills_its_worker_ends_the_run_otherwise(tmp_path: Path) -> None:
    with pytest.raises(ComputeError, match="'spk0/utt-21' died once"):
        # and none of the others is blamed
        extract(Provider(tmp_path, kills=[21]), retries=0, batch_size=4)
    assert 0 < len(featcache.open(tmp_path / "cache")) < 40
    assert_holds(extract(Provider(tmp_path), parallel=None), range(40))


class Broken(Provider):
    """Works in the driver only."""

    def __init__(self, folder: Path, deed: str) -> None:
        super().__init__(folder)
        self.deed = deed

    def build_worker_setup_fn(self) -> Any:
        deed, whole = self.deed, self.build_env_local()

        def build() -> dict[str, object]:
            if deed == "is another":
                return {**whole, "dataset": Numbers(41)}
            if deed == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("no such model")

        return build


@pytest.mark.parametrize(
    ("deed", "message"),
    [("fails", "no such model"), ("is another", "dataset of this process has other ids than")],
)
def test_an_environment_that_cannot_be_built_or_is_another_ends_the_run(
    tmp_path: Path, deed: str, message: str
) -> None:
    with pytest.raises((OSError, ConfigError), match=message):
        extract(Broken(tmp_path, deed), parallel={"env": "local", "n_workers": 1})


def test_workers_that_die_before_they_compute_anything_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_workers, "DEATHS_WITHOUT_PROGRESS", 2)
    with pytest.raises(IncompleteError, match="workers die before they compute anything"):
        extract(Broken(tmp_path, "dies"), parallel={"env": "local", "n_workers": 1})


def test_a_killed_drivers_run_goes_on_with_other_workers_and_a_second_driver_is_refused(
    tmp_path: Path,
) -> None:
    driver = start_driver(tmp_path, 2)
    wait_for(lambda: len(calls(tmp_path)) > 20)
    with pytest.raises(CacheLockedError, match=f"being written by process {driver.pid} on "):
        extract(Provider(tmp_path, 200))
    workers = psutil.Process(driver.pid).children(recursive=True)
    wait_for(lambda: len(calls(tmp_path)) > 80)
    driver.kill()
    driver.wait()
    psutil.wait_procs(workers, timeout=30)
    kept, before = set(committed(tmp_path / "cache")), len(calls(tmp_path))
    assert len(kept) > 20
    cache = extract(Provider(tmp_path, 200), parallel={**LOCAL, "n_workers": 1})
    assert_holds(cache, range(200))
    assert not kept & set(calls(tmp_path)[before:])

"""The demo's extraction on workers, which are killed at random moments, and so is their driver: the
cache is the same.

Takes some minutes; `make torture` runs it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from digits_runs import Extraction, assert_same

import featcache
from featcache.container_files.lock import holder, is_locked

WORKER_KILLS, DRIVER_KILLS = 30, 10


def workers_of(run: Extraction) -> list[int]:
    """The processes that have a part open."""
    parts = [
        path.parent for path in run.cache.glob("parts/*/journal.jsonl") if is_locked(path.parent)
    ]
    return [who.pid for who in map(holder, parts) if who is not None]


def wait_for_work(run: Extraction) -> None:
    before = len(run.noted())
    while run.driver.poll() is None and (len(run.noted()) == before or not workers_of(run)):
        time.sleep(0.02)


def ids_noted(run: Extraction) -> list[str]:
    return [id for id, _ in run.noted()]


def test_a_killed_extraction_ends_with_the_same_cache(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with Extraction(shared, tmp_path / "serial", None, batch_size=8, seconds=0.008) as serial:
        assert serial.driver.wait() == 0, serial.log()
    expected = featcache.open(serial.cache, verify="arrays")
    assert sorted(ids_noted(serial)) == sorted(expected)

    moments = random.Random(0)
    killed = {"worker": 0, "driver": 0}
    builds = computed = 0
    while killed["worker"] < WORKER_KILLS or killed["driver"] < DRIVER_KILLS:
        builds += 1
        seen: list[tuple[set[str], int]] = []  # what was committed when so many had been computed
        done = False
        while not done:
            parallel = {"env": "local", "n_workers": moments.randint(1, 3)}
            with Extraction(
                shared, tmp_path / f"build-{builds}", parallel, batch_size=8, seconds=0.008
            ) as run:
                done = goes_to_its_end(run, moments, killed, seen)
        noted = ids_noted(run)
        for kept, since in seen:
            assert not kept & set(noted[since:])
        computed += len(noted)
        assert_same(featcache.open(run.cache, verify="arrays"), expected)
    again = computed - builds * len(expected)
    print(
        f"{killed} over {builds} builds of {len(expected)} utterances, {again} of them computed "
        "again"
    )


def goes_to_its_end(
    run: Extraction,
    moments: random.Random,
    killed: dict[str, int],
    seen: list[tuple[set[str], int]],
) -> bool:
    """Kill workers of a run, and perhaps its driver: False then."""
    doomed = killed["driver"] < DRIVER_KILLS and moments.random() < 0.7
    end = time.monotonic() + moments.uniform(1, 8)
    while run.driver.poll() is None:
        wait_for_work(run)
        time.sleep(moments.uniform(0, 2))
        kept = set[str]().union(*run.committed())
        seen.append((kept, len(run.noted())))
        if doomed and time.monotonic() > end and run.driver.poll() is None:
            run.driver.kill()
            killed["driver"] += 1
        elif (
            (workers := workers_of(run))
            and killed["worker"] < WORKER_KILLS
            and run.driver.poll() is None
        ):
            with contextlib.suppress(ProcessLookupError):
                os.kill(moments.choice(workers), signal.SIGKILL)
                killed["worker"] += 1
    done = run.driver.wait() == 0
    assert done or (doomed and run.driver.returncode == -signal.SIGKILL), run.log()
    return done

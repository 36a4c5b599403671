"""The recipe's extraction of spoken digits by jobs of a real SLURM, whatever becomes of them,
equals a serial one.
"""

from __future__ import annotations

import signal
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from digits_runs import RECIPE, Extraction, assert_same

import featcache

from .queue_helpers import comes_true, squeue, the_queue_empties

SPEAKERS = ("dora", "john")
SIZE = 10 * len(SPEAKERS) * 22  # the recordings of the training set
BATCH = 4
TASK = 2 * BATCH  # a 64th of the utterances, and the rest of a batch


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold the recordings of `SPEAKERS`, for training all but two a digit, and what all drivers
    have in common.
    """
    folder = tmp_path_factory.mktemp("shared")
    with zipfile.ZipFile(RECIPE / "corpus.zip") as corpus:
        for digit in range(10):
            for speaker in SPEAKERS:
                for index in (0, 5, *range(8, 30)):
                    corpus.extract(f"{digit}_{speaker}_{index}.flac", folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def expected(shared: Path) -> featcache.Cache:
    """Give the features as one process computes them."""
    with Extraction(shared, shared / "serial", None, batch_size=BATCH, seconds=0) as serial:
        assert serial.driver.wait(120) == 0, serial.log()
    cache = featcache.open(serial.cache, verify="arrays")
    assert len(cache) == SIZE
    return cache


@pytest.fixture
def run(shared: Path, tmp_path: Path, options: dict[str, object]) -> Iterator[Extraction]:
    """Give an extraction on two jobs that is in the middle of it."""
    parallel = {"env": "slurm", "n_workers": 2, "options": options}
    with Extraction(shared, tmp_path / "run", parallel, batch_size=BATCH, seconds=0.03) as run:
        assert comes_true(lambda: run.driver.poll() is not None or is_amid(run), 120), run.log()
        assert run.driver.poll() is None, run.log()
        yield run


def is_amid(run: Extraction) -> bool:
    """Say whether each of two workers has committed a good deal."""
    sizes = [len(ids) for ids in run.committed()]
    return len(sizes) == 2 and min(sizes) > SIZE // 20


def assert_little_was_done_again(run: Extraction, kept: set[str], since: int, tasks: int) -> None:
    """What was committed was not computed again, nor anything but the tasks that ran in jobs that
    ended.
    """
    assert not kept & {id for id, _ in run.noted()[since:]}
    again = [id for id, times in Counter(id for id, _ in run.noted()).items() if times > 1]
    assert len(again) <= tasks * TASK


@pytest.mark.parametrize("how", [[], ["--signal=KILL"]], ids=["cancelled", "killed"])
def test_a_job_that_ends_in_the_middle_costs_no_more_than_the_task_that_ran_in_it(
    how: list[str], expected: featcache.Cache, run: Extraction
) -> None:
    kept, since = set[str]().union(*run.committed()), len(run.noted())
    doomed, other = sorted({job for _, job in run.noted()})
    subprocess.run(["scancel", *how, doomed], check=True)
    assert comes_true(lambda: doomed not in squeue(), 30)
    assert since < SIZE / 2
    later = len(run.noted())
    assert run.driver.wait(120) == 0, run.log()
    assert {job for _, job in run.noted()[later:]} == {other}
    assert_little_was_done_again(run, kept, since, tasks=1)
    assert_same(featcache.open(run.cache, verify="arrays"), expected)
    assert the_queue_empties()


def test_jobs_whose_driver_was_killed_end_and_another_goes_on_without_slurm(
    shared: Path, expected: featcache.Cache, run: Extraction
) -> None:
    kept, since = set[str]().union(*run.committed()), len(run.noted())
    run.driver.kill()
    assert len(squeue()) == 2
    local = {"env": "local", "n_workers": 1}
    # the jobs still end
    with Extraction(shared, run.folder, local, batch_size=BATCH, seconds=0) as next_one:
        assert next_one.driver.wait(120) == 0, next_one.log()
    jobs = [job for _, job in run.noted()]
    assert set(jobs[jobs.index("none") :]) == {"none"}
    assert the_queue_empties()
    assert_little_was_done_again(run, kept, since, tasks=2)
    assert_same(featcache.open(run.cache, verify="arrays"), expected)


def test_ctrl_c_cancels_the_jobs_keeps_what_was_committed_and_says_how_to_go_on(
    run: Extraction,
) -> None:
    kept = set[str]().union(*run.committed())
    run.driver.send_signal(signal.SIGINT)
    assert run.driver.wait(60) not in (0, None), run.log()
    assert "KeyboardInterrupt" in run.log()
    cache = featcache.open(run.cache)
    assert kept <= set(cache)
    assert f"stopped: {len(cache)} of {SIZE} utterances are in cache" in run.log()
    assert "the same call goes on from there" in run.log()
    assert the_queue_empties()

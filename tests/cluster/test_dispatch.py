"""Tasks that their workers take along: each is given out again, whatever Dask makes of it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from featcache.workers import get_client
from featcache.workers import workers as dispatching
from featcache.workers.workers import Dispatch, LostAttempt, Workers, run_env


def answer_and_die(folder: Path, attempt: int, task: int, env: str) -> int:
    """Kill the worker of every other task once, right after the answer, which may not have been
    fetched then.
    """
    note = folder / f"{task} was killed"
    if task % 2 == 0 and not note.exists():
        note.touch()
        threading.Timer(0.01 * task, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return task


def test_answers_and_tasks_that_are_lost_with_the_only_worker_come_in_the_end(
    tmp_path: Path,
) -> None:
    done = []
    with get_client({"env": "local", "n_workers": 1}) as client, run_env(client, dict) as env:
        function = partial(answer_and_die, tmp_path)
        dispatch = Dispatch[int](Workers(client, env, stay=False), tmp_path, function)
        for number in range(4):
            dispatch.add(number)
        for task, outcome in dispatch.outcomes():
            if isinstance(outcome, LostAttempt):
                assert outcome.batch is None  # nobody had claimed it
                dispatch.add(task)
            else:
                done.append(outcome)
    assert sorted(done) == list(range(4))


def test_an_answer_that_does_not_come_names_its_worker_and_leaves_no_error_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatching, "ANSWER_S", 0.0)
    with get_client({"env": "local", "n_workers": 1}) as client, run_env(client, dict) as env:
        workers = Workers(client, env, stay=False)
        dispatch = Dispatch[int](workers, tmp_path, partial(answer_and_die, tmp_path))
        dispatch.add(1)
        ((_, outcome),) = dispatch.outcomes()
    assert str(outcome.error) == f"worker {workers.addresses[0]} is gone"
    gc.collect()
    assert "never retrieved" not in caplog.text

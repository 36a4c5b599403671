"""Iterations that are left when the interpreter ends: no noise, no waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_helpers import make_cache

import featcache

UTTERANCES = 64
SCRIPT = """
import atexit, sys, threading, time

ended = threading.Event()
@atexit.register
def after_the_library():  # since it is registered before
    ended.set()
    time.sleep(LATE_S)

import featcache

first = featcache.open(sys.argv[1], expect={"model": "wavlm"}).ids[0]

def slow(item, rng):
    if item["id"] != first:
        time.sleep(2)
    print(item["id"], flush=True)
    return item

loader = featcache.FeatureLoader(
    sys.argv[1], batch_size=1, threads=int(sys.argv[2]), transform=slow, device=DEVICE
)
batches = iter(loader)
next(batches)
LEAVE
"""
LEAVE = {
    "the iterator is a global": "pass",
    "break": "for batch in loader: break",
    "an error": "for batch in loader: raise ValueError('mine')",
    "sys.exit": "for batch in loader: sys.exit(3)",
    "a generator of its own": (
        "def steps():\n    for batch in loader: yield batch\nsteps = steps(); next(steps)"
    ),
    "a cycle": (
        "class Keeps: pass\n"
        "keeps = Keeps(); keeps.keeps = keeps; keeps.batches = batches; del batches"
    ),
    "a thread that iterates": (
        "thread = threading.Thread(target=lambda: list(loader), daemon=True); thread.start()\n"
        "time.sleep(0.3)"
    ),
    "a thread that iterates late": (
        "def late(): ended.wait(); list(loader)\nthreading.Thread(target=late, daemon=True).start()"
    ),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cache(tmp_path_factory.mktemp("cache"), range(UTTERANCES))


@pytest.mark.parametrize(
    ("how", "threads", "device"),
    [*((how, 2, None) for how in LEAVE), ("break", 0, None), ("break", 2, "cpu")],
)
def test_a_script_may_end_within_an_iteration(
    how: str, threads: int, device: str | None, cache: Path
) -> None:
    script = SCRIPT.replace("LEAVE", LEAVE[how]).replace("DEVICE", repr(device))
    script = script.replace("LATE_S", "3" if "late" in how else "0")
    ended = subprocess.run(
        [sys.executable, "-c", script, cache, str(threads)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == {"an error": 1, "sys.exit": 3}.get(how, 0), ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert ended.stderr == "" or "ValueError: mine" in ended.stderr.splitlines()[-1]
    # those that were taken ahead are not waited for, but for the one that each thread is at
    done = ended.stdout.splitlines()
    assert len(done) < UTTERANCES
    if "late" in how:
        assert done.count(featcache.open(cache).ids[0]) == 1  # that of the first iteration


def test_an_iteration_that_begins_when_the_interpreter_ends_is_refused(cache: Path) -> None:
    script = """
import atexit, sys

@atexit.register
def after_the_library():  # since it is registered before
    list(loader)

import featcache
loader = featcache.FeatureLoader(sys.argv[1], batch_size=1)
next(iter(loader))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, cache], capture_output=True, text=True, check=False
    )
    assert "ClosedError: the interpreter is ending: no more batches are read" in ended.stderr


def test_a_fork_that_ends_within_an_iteration_of_its_parent_says_nothing(cache: Path) -> None:
    script = """
import os, sys, warnings
import featcache

loader = featcache.FeatureLoader(sys.argv[1], batch_size=1)
batches = iter(loader)
next(batches)
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
if os.fork() == 0:
    sys.exit(0)
assert os.wait()[1] == 0
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, str(cache)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (ended.stdout, ended.stderr) == ("", "")

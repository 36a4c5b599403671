"""Iterations that are left when the interpreter ends: no noise, no waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_helpers import make_cache

UTTERANCES = 64
SCRIPT = """
import atexit, sys, threading, time
import featcache

first = featcache.open(sys.argv[1]).ids[0]
leaving = threading.Event()
atexit.register(leaving.set)  # before the library's own, which was registered earlier

def slow(item):
    if item["id"] != first:
        leaving.wait()
        time.sleep(0.2)
    print("done", flush=True)
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
        "import threading\n"
        "thread = threading.Thread(target=lambda: list(loader), daemon=True); thread.start()\n"
        "time.sleep(0.3)"
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
    ended = subprocess.run(
        [sys.executable, "-c", script, cache, str(threads)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == {"an error": 1, "sys.exit": 3}.get(how, 0)
    assert "Exception ignored" not in ended.stderr
    assert ended.stderr == "" or "ValueError: mine" in ended.stderr.splitlines()[-1]
    # those that were taken ahead are not waited for, but for the one that each thread is at
    assert ended.stdout.count("done") < UTTERANCES

"""The demo, killed at random moments while it caches, then run again: nothing committed is computed
again or lost.

Takes some minutes; `make torture` runs it. `FEATCACHE_TORTURE_DATA` names a folder of recordings to
use instead of the corpus that comes with the recipe.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from digits_runs import RECIPE, assert_same
from digits_runs import committed as committed_parts

import featcache

SPLITS = ("train", "valid", "test")
KILLS = 20
# the recipe, noting the id of each utterance that is handed over to be stored
RUN = """
import os, runpy, sys
from featcache.writing.part_writer import PartWriter
note = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
write = PartWriter.write
def noted(self, id, arrays, **more):
    os.write(note, f"{self.path.name} {id}\\n".encode())
    write(self, id, arrays, **more)
PartWriter.write = noted
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = [
        sys.executable,
        "-c",
        RUN,
        str(folder / "noted"),
        str(RECIPE / "train.py"),
        str(RECIPE / "hparams.yaml"),
    ]
    command += ["--output_folder", str(folder / "out"), "--number_of_epochs", "1"]
    if data := os.environ.get("FEATCACHE_TORTURE_DATA"):
        command += ["--data_folder", data]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def noted(folder: Path) -> list[str]:
    path = folder / "noted"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def committed(folder: Path) -> set[str]:
    """Read from the bare files what is committed."""
    return {
        f"{split} {id}"
        for split in SPLITS
        for ids in committed_parts(folder / "out" / "features" / split)
        for id in ids
    }


def wait_for_the_cache_phase(run: subprocess.Popen[bytes], folder: Path, since: int) -> None:
    while run.poll() is None and len(noted(folder)) == since:
        time.sleep(0.01)


def is_done(folder: Path) -> bool:
    try:
        return all(featcache.open(folder / "out" / "features" / split).complete for split in SPLITS)
    except featcache.FeatcacheError:
        return False


def assert_same_caches(folder: Path, reference: Path) -> None:
    for split in SPLITS:
        cache, expected = (
            featcache.open(f / "out" / "features" / split, verify="arrays")
            for f in (folder, reference)
        )
        assert_same(cache, expected)


def test_a_killed_demo_goes_on_and_ends_with_the_same_cache(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    run = start(reference)
    wait_for_the_cache_phase(run, reference, since=0)
    begun = time.monotonic()
    while not is_done(reference):
        assert run.poll() is None, (reference / "log").read_text()
        time.sleep(0.02)
    seconds = time.monotonic() - begun
    assert run.wait() == 0
    assert len(noted(reference)) == len(set(noted(reference)))

    moments = random.Random(0)
    kills = builds = 0
    while kills < KILLS:
        builds += 1
        folder = tmp_path / f"build-{builds}"
        while True:
            kept, before = committed(folder), len(noted(folder))
            run = start(folder)
            wait_for_the_cache_phase(run, folder, since=before)
            time.sleep(moments.uniform(0, seconds * 0.7))
            if kills < KILLS and run.poll() is None and not is_done(folder):
                run.send_signal(signal.SIGKILL)
                kills += 1
            killed = run.wait() != 0
            assert killed == (run.returncode == -signal.SIGKILL), (folder / "log").read_text()
            assert kept <= committed(folder)
            assert not kept & set(noted(folder)[before:])
            if not killed:
                break
        assert_same_caches(folder, reference)
    print(f"{kills} kills over {builds} builds of {seconds:.1f} s")

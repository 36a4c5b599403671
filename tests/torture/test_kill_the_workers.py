"""The demo's extraction on workers, which are killed at random moments, and so is their driver: the cache is the same.

Takes some minutes; `make torture` runs it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import featcache
from featcache.store.journal import read_journal
from featcache.store.lock import holder, is_locked
from featcache.store.part import list_parts

RECIPE = Path(__file__).parents[2] / "recipes" / "digits"
WORKER_KILLS, DRIVER_KILLS = 30, 10
# the extraction of the recipe's training set, noting each utterance that is computed
RUN = """
import os, sys, time
from pathlib import Path
import numpy as np
import speechbrain as sb
from hyperpyyaml import load_hyperpyyaml
sys.path.insert(0, sys.argv[1])
import train

class Noting(train.DigitsBrain):
    def compute_features(self, batch, stage):
        note = os.open(self.hparams.note, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(note, "".join(f"{id}\\n" for id in batch.id).encode())
        os.close(note)
        time.sleep(self.hparams.seconds * len(batch.id))
        return super().compute_features(batch, stage)

def main(recipe, shared, folder, workers):
    with (Path(recipe) / "hparams.yaml").open() as file:
        hparams = load_hyperpyyaml(file, {"output_folder": folder})
    hparams |= {"note": folder + "/noted", "seconds": 0.008}
    shared = Path(shared)
    if not (shared / "train.json").exists():
        train.prepare(None, shared, hparams["sample_rate"])
    dataset, fbank = train.open_dataset(shared / "train.json"), hparams["modules"]["fbank"]
    train.fit_units(shared / "centroids.npy", dataset, fbank, hparams["number_of_units"], hparams["seed"])
    hparams["modules"]["units"] = train.Units(np.load(shared / "centroids.npy"))
    brain = Noting(hparams["modules"], hparams["opt_class"], hparams)
    parallel = {"env": "local", "n_workers": workers} if workers else None
    brain.cache_features(dataset, sb.Stage.TRAIN, loader_kwargs={"batch_size": 8}, parallel=parallel)

if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
"""


class Extraction:
    """One run of the driver over a folder."""

    def __init__(self, root: Path, name: str, workers: int) -> None:
        self.folder = root / name
        self.folder.mkdir(exist_ok=True)
        self.cache = self.folder / "features" / "train"
        (root / "run.py").write_text(RUN)
        (root / "shared").mkdir(exist_ok=True)
        command = [sys.executable, root / "run.py", RECIPE, root / "shared", self.folder, str(workers)]
        with (self.folder / "log").open("ab") as log:
            self.driver = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)

    def noted(self) -> list[str]:
        path = self.folder / "noted"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def committed(self) -> set[str]:
        """Read from the bare files what is committed, by whomever."""
        found: set[str] = set()
        with contextlib.suppress(FileNotFoundError):  # a part was sealed or removed meanwhile: fewer are checked
            for name, sealed in list_parts(self.cache):
                if sealed is not None:
                    found |= set(sealed.index(self.cache, []).ids())
                elif journal := read_journal(self.cache / "parts" / name):
                    found |= {utterance.id for utterance in journal.utterances}
        return found

    def workers(self) -> list[int]:
        """The processes that have a part open."""
        parts = [path.parent for path in self.cache.glob("parts/*/journal.jsonl") if is_locked(path.parent)]
        return [who.pid for who in map(holder, parts) if who is not None]

    def wait_for_work(self) -> None:
        before = len(self.noted())
        while self.driver.poll() is None and (len(self.noted()) == before or not self.workers()):
            time.sleep(0.02)

    def log(self) -> str:
        return (self.folder / "log").read_text()


def assert_same(cache: featcache.Cache, expected: featcache.Cache) -> None:
    assert cache.complete
    assert list(cache) == list(expected)
    for id in expected:
        for feature, array in expected[id].items():
            np.testing.assert_array_equal(cache[id][feature], array, strict=True)
    ours, theirs = cache.stats("fbank"), expected.stats("fbank")
    assert ours.count == theirs.count
    np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-12)
    np.testing.assert_allclose(ours.std, theirs.std, rtol=1e-12)
    assert not [path.name for path in cache.path.iterdir() if path.name.startswith(("extraction", "failures"))]


def test_a_killed_extraction_ends_with_the_same_cache(tmp_path: Path) -> None:
    serial = Extraction(tmp_path, "serial", 0)
    assert serial.driver.wait() == 0, serial.log()
    expected = featcache.open(serial.cache, verify="arrays")
    assert sorted(serial.noted()) == sorted(expected)

    moments = random.Random(0)
    killed = {"worker": 0, "driver": 0}
    builds = computed = 0
    while killed["worker"] < WORKER_KILLS or killed["driver"] < DRIVER_KILLS:
        builds += 1
        seen: list[tuple[set[str], int]] = []  # what was committed when so many had been computed
        done = False
        while not done:
            run = Extraction(tmp_path, f"build-{builds}", moments.randint(1, 3))
            doomed = killed["driver"] < DRIVER_KILLS and moments.random() < 0.7
            end = time.monotonic() + moments.uniform(1, 8)
            while run.driver.poll() is None:
                run.wait_for_work()
                time.sleep(moments.uniform(0, 2))
                kept = run.committed()
                seen.append((kept, len(run.noted())))
                if doomed and time.monotonic() > end and run.driver.poll() is None:
                    run.driver.kill()
                    killed["driver"] += 1
                elif (workers := run.workers()) and killed["worker"] < WORKER_KILLS and run.driver.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(moments.choice(workers), signal.SIGKILL)
                        killed["worker"] += 1
            done = run.driver.wait() == 0
            assert done or (doomed and run.driver.returncode == -signal.SIGKILL), run.log()
        noted = run.noted()
        for kept, since in seen:
            assert not kept & set(noted[since:])
        computed += len(noted)
        assert_same(featcache.open(run.cache, verify="arrays"), expected)
    again = computed - builds * len(expected)
    print(f"{killed} over {builds} builds of {len(expected)} utterances, {again} of them computed again")

"""The recipe's extraction of the spoken digits for training, by a driver of its own that may be
stopped or killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import numpy as np

import featcache
from featcache.format import list_parts, read_journal

RECIPE = Path(__file__).parents[1] / "recipes" / "digits"
# notes each utterance that is computed, and the job that does it
RUN = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
import speechbrain as sb
import torch
from hyperpyyaml import load_hyperpyyaml
import train

class Noting(train.DigitsBrain):
    def compute_features(self, batch, stage):
        job = os.environ.get("SLURM_JOB_ID", "none")
        note = os.open(self.hparams.note, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(note, "".join(f"{id} {job}\\n" for id in batch.id).encode())
        os.close(note)
        time.sleep(float(os.environ["UTTERANCE_S"]) * len(batch.id))
        return super().compute_features(batch, stage)

def main(recipe, shared, folder, batch_size, parallel):
    torch.set_num_threads(1)
    # ignored in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with (Path(recipe) / "hparams.yaml").open() as file:
        hparams = load_hyperpyyaml(file, {"output_folder": folder})
    hparams["note"] = folder + "/noted"
    shared = Path(shared)
    if not (shared / "train.json").exists():
        corpus = shared / "corpus"
        train.prepare(str(corpus) if corpus.exists() else None, shared, hparams["sample_rate"])
    dataset, fbank = train.open_dataset(shared / "train.json"), hparams["modules"]["fbank"]
    units, seed = hparams["number_of_units"], hparams["seed"]
    train.fit_units(shared / "centroids.npy", dataset, fbank, units, seed)
    hparams["modules"]["units"] = train.Units(np.load(shared / "centroids.npy"))
    brain = Noting(hparams["modules"], hparams["opt_class"], hparams, {"noprogressbar": True})
    settings = {"loader_kwargs": {"batch_size": int(batch_size)}, "parallel": json.loads(parallel)}
    settings["check"] = None  # which computes, too
    brain.cache_features(dataset, sb.Stage.TRAIN, **settings)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


class Extraction:
    """One run of the driver, which lives no longer than the `with` block.

    Args:
        shared: holds what all runs have in common; "corpus" in it, if there, is taken instead of
            the recipe's.
        folder: where the features go.
        parallel: on which workers; None: by the driver itself.
        batch_size: utterances a batch.
        seconds: how long an utterance takes at least.
    """

    def __init__(
        self,
        shared: Path,
        folder: Path,
        parallel: Mapping[str, object] | None,
        *,
        batch_size: int,
        seconds: float,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.cache = folder / "features" / "train"
        (shared / "run.py").write_text(RUN)
        command = [
            sys.executable,
            shared / "run.py",
            RECIPE,
            shared,
            folder,
            batch_size,
            json.dumps(parallel),
        ]
        # jobs inherit the environment, which says where the recipe is; the cache is not made from
        # how long it takes
        path = os.pathsep.join(filter(None, [str(RECIPE), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "UTTERANCE_S": str(seconds)}
        with (folder / "log").open("ab") as log:
            self.driver = subprocess.Popen(
                [str(part) for part in command], stdout=log, stderr=log, env=env
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.driver.kill()
        self.driver.wait()

    def noted(self) -> list[tuple[str, str]]:
        """The utterances that were computed, each with its job, in order."""
        path = self.folder / "noted"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(line.split()[0], line.split()[1]) for line in lines]

    def committed(self) -> list[set[str]]:
        """What is committed, part by part."""
        found: list[set[str]] = []
        # a part was sealed or removed meanwhile: fewer are seen
        with contextlib.suppress(FileNotFoundError):
            found.extend(committed(self.cache))
        return found

    def log(self) -> str:
        return (self.folder / "log").read_text()


def committed(cache: Path) -> Iterator[set[str]]:
    """Read from the bare files what is committed, part by part."""
    for name, sealed in list_parts(cache):
        if sealed is not None:
            yield set(sealed.index(cache, []).ids)
        elif journal := read_journal(cache, f"parts/{name}"):
            yield {utterance.id for utterance in journal.utterances}


def assert_same(cache: featcache.Cache, expected: featcache.Cache) -> None:
    """Compare two caches, array for array, and their statistics; nothing of a run is left."""
    assert cache.complete
    assert list(cache) == list(expected)
    for id in expected:
        for feature, array in expected[id].items():
            np.testing.assert_array_equal(cache[id][feature], array, strict=True)
    ours, theirs = cache.stats("fbank"), expected.stats("fbank")
    assert ours.count == theirs.count
    np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-12)
    np.testing.assert_allclose(ours.std, theirs.std, rtol=1e-12)
    assert not [path.name for path in cache.path.iterdir() if path.name.startswith("work-")]

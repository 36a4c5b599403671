"""Two scripts, as most recipes have them: one caches features, the other trains on them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPE = """
import torch
import featcache

GAIN = 1.0
storage = featcache.FeatureStorage("features", [featcache.FeatureStorageConfig("wave")])


class Waves:
    ids = ["a", "b"]

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return {"id": self.ids[number], "sig": torch.ones(number + 2, 3)}


class Extractor(featcache.FeatureCacheMixin):
    modules, device, noprogressbar = {}, "cpu", True

    def compute_features(self, batch, stage):
        return [{"id": item["id"], "wave": GAIN * item["sig"]} for item in batch]
"""
EXTRACT = """
import recipe

options = {"collate_fn": list}
recipe.Extractor().cache_features(
    recipe.Waves(), split="train", storage=recipe.storage, loader_kwargs=options
)
"""
TRAIN = """
import featcache
import recipe

expect = recipe.Extractor().expectation(collate_fn=list)
cache = recipe.storage.cache("train", expect=expect)
print(next(iter(featcache.FeatureLoader(cache, "wave", batch_size=1)))["wave"].sum())
"""
UNCHECKED = TRAIN.replace("expect=expect", "")


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", script]  # files change within a second, at the same length
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    scripts = {"recipe": RECIPE, "extract": EXTRACT, "train": TRAIN, "unchecked": UNCHECKED}
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)
    done = run(folder, "extract.py")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_training_script_that_expects_nothing_is_told_of_changed_code(folder: Path) -> None:
    done = run(folder, "unchecked.py")
    assert (done.stdout, done.stderr) == ("tensor(6.)\n", "")
    later = time.time() + 5
    os.utime(folder / "recipe.py", (later, later))
    done = run(folder, "unchecked.py")
    assert done.stdout == "tensor(6.)\n"
    (line,) = done.stderr.splitlines()
    assert "features/train': made " in line
    assert "by extract.py, recipe.py has changed since, " in line
    assert "not checked: give expect= when you open it, brain.expectation() or" in line


def test_a_training_script_refuses_features_of_changed_code(folder: Path) -> None:
    done = run(folder, "train.py")
    assert (done.stdout, done.stderr) == ("tensor(6.)\n", "")
    (folder / "recipe.py").write_text(RECIPE.replace("GAIN = 1.0", "GAIN = 3.0"))
    done = run(folder, "train.py")
    assert "StaleCacheError: cache " in done.stderr
    assert "GAIN: was 1.0, now 3.0" in done.stderr

"""Workers compute features of one state, as the process that fills a cache alone does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import featcache
from featcache import FeatureStorageConfig, StaleCacheError
from featcache.extraction import process_part
from featcache.extraction.on_workers import RunSettings, TaskRunner
from featcache.extraction.run import digest_of
from featcache.format import committed_builds
from featcache.inspect import provenance
from featcache.samplers import Batches
from featcache.staleness.watch import Watch
from featcache.writing import part_writer

pytestmark = pytest.mark.usefixtures("quick_workers")

IDS = [f"utt-{number}" for number in range(4)]
FEATURES = [FeatureStorageConfig("feats")]
LOCAL = {"env": "local", "n_workers": 1}


class Encoder:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 64)
        self.layers = torch.nn.Sequential(self.linear, torch.nn.BatchNorm1d(64))

    def compute(self, items: list[int]) -> list[dict[str, Any]]:
        results = [self.layers(torch.full((3, 8), float(item))) for item in items]
        return [{"id": IDS[n], "feats": each} for n, each in zip(items, results, strict=True)]


class Given(featcache.EnvironmentProvider):
    def __init__(self, *, learns: bool) -> None:
        self.learns = learns

    def build_env_local(self) -> dict[str, object]:
        encoder = Encoder()
        encoder.layers.train(self.learns)
        return {"dataset": range(4), "ids": IDS, "compute_features": encoder.compute}


def test_a_module_that_learns_on_a_worker_is_refused(tmp_path: Path) -> None:
    fill = partial(featcache.extract, parallel=LOCAL, progressbar=False, check=None)
    with pytest.raises(StaleCacheError, match=r"weights of .*1.running_mean(.|\n)*module.eval"):
        fill(Given(learns=True), tmp_path / "cache", FEATURES)
    assert len(fill(Given(learns=False), tmp_path / "cache", FEATURES)) == len(IDS)


def filling(tmp_path: Path, encoder: Encoder) -> tuple[TaskRunner, Any]:
    """Return what a worker computes tasks with, and the cache's writer."""
    path, directory = tmp_path / "cache", tmp_path / "cache" / "extraction-0"
    publisher = featcache.CacheWriter(path, FEATURES)
    directory.mkdir()
    settings = RunSettings(
        path,
        partial(part_writer.PartWriter, path, FEATURES, {}),
        directory,
        digest_of(IDS),
        skip_failures=False,
        retries=0,
        seal_every_s=None,
    )
    again = partial(provenances, encoder)
    env = {"dataset": range(4), "ids": IDS, "compute_features": encoder.compute}
    runner = TaskRunner(settings, lambda: (env, lambda: Watch(again(), again, {})))
    return runner, publisher


def provenances(encoder: Encoder) -> Any:
    return [provenance(encoder.compute)]


def run(runner: TaskRunner, number: int) -> None:
    task = Batches.of([[2 * number], [2 * number + 1]])
    runner.run(number, task, lambda progress: None)


@pytest.mark.parametrize("share", [1e-9, float("inf")])
def test_tasks_of_before_are_kept_where_weights_change_between_two(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_part, "SHARE", share)
    encoder = Encoder()
    encoder.layers.eval()
    runner, publisher = filling(tmp_path, encoder)
    run(runner, 0)
    with torch.no_grad():
        encoder.linear.weight += 1
    with pytest.raises(StaleCacheError, match=r"weights of .*layers: 0.weight"):
        run(runner, 1)
    runner.part.finish()
    publisher.close()
    with featcache.CacheWriter(tmp_path / "cache", FEATURES):
        pass  # as the next run does, which takes in what is left
    assert featcache.open(tmp_path / "cache").ids == IDS[:2]


def test_what_only_the_whole_fingerprint_shows_is_dropped_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_part, "SHARE", 1e-9)  # compared as a whole once, then at the end
    encoder = Encoder()
    encoder.layers.eval()
    runner, publisher = filling(tmp_path, encoder)
    run(runner, 0)
    encoder.linear.weight.data[5, 5] += 1  # no counter shows it
    run(runner, 1)
    with pytest.raises(StaleCacheError, match=r"while it was filled(.|\n)*layers: 0.weight"):
        runner.part.finish()
    runner.part.finish()
    assert not committed_builds(tmp_path / "cache")
    publisher.close()
    assert len(featcache.open(tmp_path / "cache")) == 0

"""Snippets of `docs/guides/espnet.md` on workers, collect-stats and HuggingFace data sets run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collect_stats_helpers import Provider, assert_right
from places import ROOT
from sound_helpers import huggingface, samples_of

import featcache
from featcache import EnvironmentProvider, FeatureStorageConfig, ParallelConfig

omegaconf = pytest.importorskip("omegaconf")
datasets = pytest.importorskip("datasets")
lhotse = pytest.importorskip("lhotse")
pytestmark = pytest.mark.usefixtures("quick_workers")

TEXT = (ROOT / "docs" / "guides" / "espnet.md").read_text()


def snippet(of: str, language: str = "python") -> str:
    """Return the snippet that holds some text."""
    (found,) = (
        code for code in re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) if of in code
    )
    return str(found)


def run(of: str, **names: Any) -> dict[str, Any]:
    exec(snippet(of), names)
    return names


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def config() -> Any:
    """A configuration as Hydra gives it."""
    return omegaconf.OmegaConf.create({"parallel": {"env": "local", "n_workers": 2, "options": {}}})


def test_the_parallel_block_is_read() -> None:
    block = omegaconf.OmegaConf.create(snippet("parallel:", "yaml"))
    found = ParallelConfig.of(block.parallel)
    assert found == ParallelConfig.of(omegaconf.OmegaConf.to_container(block)["parallel"])
    assert (found.env, found.n_workers) == ("slurm", 8)


def forward(index: int, dataset: Any) -> int:
    return len(dataset[index][1]["speech"])


def test_a_client_maps_a_function_with_its_environment(tmp_path: Path, config: Any) -> None:
    provider = Provider(tmp_path / "run")
    dataset: Any = provider.build_env_local()["dataset"]
    found = run(
        "client.map(with_worker_env",
        config=config,
        provider=provider,
        dataset=dataset,
        forward=forward,
    )
    assert found["results"] == [forward(index, dataset) for index in range(30)]


def test_collect_stats(tmp_path: Path, config: Any) -> None:
    provider = Provider(tmp_path / "run")
    run("runner = CollectStatsRunner", config=config, provider=provider, dataset=range(30))
    assert_right(tmp_path / "exp" / "stats" / "train", range(30))


def test_cuts_of_a_huggingface_data_set(tmp_path: Path, config: Any) -> None:
    dataset = huggingface([3, 1, 2])
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "set")
    run(
        "cutset_from_huggingface(",
        config=config,
        dataset=dataset,
        dataset_id=str(tmp_path / "set"),
        split="train",
    )
    cuts = lhotse.CutSet.from_file("cuts_train.jsonl.gz")
    assert [(cut.id, cut.supervisions[0].text) for cut in cuts] == [
        ("0", "text 3"),
        ("1", "text 1"),
        ("2", "text 2"),
    ]
    np.testing.assert_array_equal(next(iter(cuts)).load_audio()[0], samples_of(3))


def energies(batch: list[Any]) -> list[dict[str, object]]:
    return [
        {"id": item["id"], "energy": np.square(item["samples"]).sum(keepdims=True)}
        for item in batch
    ]


class Built(EnvironmentProvider):
    """Gives an environment that is there."""

    def __init__(self, env: dict[str, object]) -> None:
        self.env = env

    def build_env_local(self) -> dict[str, object]:
        return self.env


def test_features_of_a_huggingface_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    (tmp_path / "set").mkdir()
    huggingface([3, 1]).to_parquet(tmp_path / "set" / "train.parquet")
    names = {
        "datasets": datasets,
        "dataset_id": str(tmp_path / "set"),
        "split": "train",
        "compute_features": energies,
    }
    env = run('env = {"dataset": utterances(', **names)["env"]
    declared = [FeatureStorageConfig("energy", time_axis=None)]
    cache = featcache.extract(Built(env), tmp_path / "cache", declared, progressbar=False)
    assert cache.read("1", "energy") == np.square(samples_of(1)).sum()

"""Caching under a real torchrun: gloo, CPU, two and three ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrun import run_ranks

from featcache import FeatureStorage, FeatureStorageConfig
from featcache.errors import ConfigError
from featcache.extraction.run import Ranks

SCRIPT = """
import json, os, sys
from pathlib import Path

import torch
from speechbrain.core import Brain, Stage
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.distributed import ddp_init_group

from featcache import FeatcacheError, FeatureCacheMixin, FeatureStorage, FeatureStorageConfig, unpad

RANK = int(os.environ["RANK"])


class Recipe(FeatureCacheMixin, Brain):
    def compute_features(self, batch, stage):
        self.computed += batch.id
        self.bad, self.interrupts = self.bad, self.interrupts  # written, they count for nothing
        for id in batch.id:
            if id in self.bad:
                raise ValueError(f"cannot compute {id}")
            if id in self.interrupts:
                raise KeyboardInterrupt
        x = batch.sig.data + 0 * self.modules.encoder.weight
        return unpad(batch.id, batch.frames, {"x": x})


def dataset(utterances):
    data = {f"utt-{number}": {"frames": 1 + number % 3} for number in range(utterances)}
    signal = lambda id, frames: torch.full((frames, 2), float(id[4:]))
    items = [{"func": signal, "takes": ["id", "frames"], "provides": "sig"}]
    return DynamicItemDataset(data, items, ["id", "sig", "frames"])


class Hidden(torch.utils.data.Dataset):
    def __init__(self, dataset):
        self.dataset_ = dataset

    def __len__(self):
        return len(self.dataset_)

    def __getitem__(self, index):
        return self.dataset_[index]


def main(out, steps):
    ddp_init_group({"distributed_backend": "gloo"})
    torch.manual_seed(RANK)  # other weights on each rank: rank 0 says what the cache is made from
    storage = FeatureStorage(out / "features", [FeatureStorageConfig("x", dtype="float64")])
    modules = {"encoder": torch.nn.Linear(1, 1)}
    brain = Recipe(modules, hparams={"storage": storage}, run_opts={"device": "cpu"})
    report = []
    for step in steps:
        brain.computed, brain.bad = [], step.get("bad", [])
        brain.interrupts = step.get("interrupts", [])
        data = dataset(step["utterances"])
        if step.get("hidden"):
            data = Hidden(data)
            step["arguments"]["loader_kwargs"] = {"collate_fn": PaddedBatch}
        if step.get("loader"):
            data = torch.utils.data.DataLoader(data, collate_fn=PaddedBatch)
        try:
            arguments = {"check": None, **step["arguments"]}
            view = brain.cache_features(data, Stage.TRAIN, progressbar=False, **arguments)
            outcome = {"complete": view.complete, "utterances": len(view)}
            if "annotations" in arguments:
                outcome["told"] = list(view.annotation("frames"))
        except (FeatcacheError, KeyboardInterrupt) as error:
            cache = storage.cache(step["arguments"]["split"])
            notes = getattr(error, "__notes__", [])
            outcome = {"error": type(error).__name__, "text": str(error), "notes": notes}
        torch.distributed.barrier()
        report.append({"computed": brain.computed, **outcome})
    (out / f"rank-{RANK}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
"""


def run(folder: Path, ranks: int, steps: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Run the steps under torchrun; returns, for each step, what each rank reports."""
    run_ranks(SCRIPT, folder, folder, json.dumps(steps), ranks=ranks)
    reports = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return [list(step) for step in zip(*reports, strict=True)]


def storage_in(folder: Path) -> FeatureStorage:
    return FeatureStorage(folder / "features", [FeatureStorageConfig("x", dtype="float64")])


def ids(utterances: int) -> list[str]:
    return [f"utt-{number}" for number in range(utterances)]


def everything(reports: list[dict[str, Any]]) -> list[str]:
    return sorted(id for report in reports for id in report["computed"])


def test_two_ranks_share_the_work_and_go_on_after_errors(tmp_path: Path) -> None:
    skip = {"split": "skipped", "on_error": "skip"}
    batches = {"loader_kwargs": {"batch_size": 2}}
    first, again, more, failed, resumed, interrupted, skipped, left, retried, refused, stale = run(
        tmp_path,
        2,
        [
            {"utterances": 11, "arguments": {"split": "train", **batches}},
            {"utterances": 11, "arguments": {"split": "train"}},
            {"utterances": 14, "arguments": {"split": "train", "annotations": "frames"}},
            {"utterances": 8, "arguments": {"split": "failed"}, "bad": ["utt-3"]},
            {"utterances": 8, "arguments": {"split": "failed"}},
            {"utterances": 8, "arguments": {"split": "stopped"}, "interrupts": ["utt-4"]},
            {"utterances": 6, "arguments": {**skip, **batches}, "bad": ["utt-0", "utt-3"]},
            {"utterances": 7, "arguments": skip},
            {"utterances": 7, "arguments": {"split": "skipped"}},
            {"utterances": 6, "arguments": {"split": "loader"}, "loader": True},
            {"utterances": 11, "arguments": {"split": "train", "fingerprint": {"layer": 2}}},
        ],
    )

    assert everything(first) == sorted(ids(11))
    assert all(report["computed"] for report in first)
    assert all(report["complete"] and report["utterances"] == 11 for report in first)
    assert everything(again) == []
    assert sorted(everything(more)) == ["utt-11", "utt-12", "utt-13"]
    cache = storage_in(tmp_path).cache("train")
    told = [1 + int(id[4:]) % 3 for id in cache]
    assert [report["told"] for report in more] == [told, told]  # on each rank
    for id in cache:
        number = int(id[4:])
        np.testing.assert_array_equal(cache[id]["x"], np.full((1 + number % 3, 2), number))
    assert cache.stats("x").count == sum(1 + number % 3 for number in range(14))

    assert [report["error"] for report in failed] == ["IncompleteError", "ComputeError"]
    assert "rank 1 failed with ComputeError: computing the features of 'utt-3'" in failed[0]["text"]
    assert sorted({*everything(failed)} - {"utt-3"}) == sorted({*ids(8)} - {*everything(resumed)})
    assert all(report["complete"] for report in resumed)

    assert [report["error"] for report in interrupted] == ["KeyboardInterrupt", "IncompleteError"]
    # two of rank 0, all four of rank 1
    assert "6 of 8 utterances are in cache" in interrupted[0]["notes"][0]

    assert all((report["complete"], report["utterances"]) == (True, 4) for report in skipped)
    assert everything(left) == ["utt-6"]
    assert all((report["complete"], report["utterances"]) == (True, 5) for report in left)
    assert everything(retried) == ["utt-0", "utt-3"]
    assert all(report["complete"] for report in retried)
    assert [report["error"] for report in refused] == ["ConfigError", "ConfigError"]
    assert "map-style dataset" in refused[1]["text"]

    assert [report["error"] for report in stale] == ["StaleCacheError", "IncompleteError"]
    assert "layer: was (absent), now 2" in stale[1]["text"]


def test_three_ranks_with_less_to_do_than_ranks(tmp_path: Path) -> None:
    split = {"split": "train"}
    few, failed, overwritten, same, grown, subset, hidden, fewer = run(
        tmp_path,
        3,
        [
            {"utterances": 2, "arguments": split},
            {
                "utterances": 4,
                "arguments": {**split, "on_error": "skip"},
                "bad": ["utt-2", "utt-3"],
            },
            {"utterances": 4, "arguments": {**split, "overwrite": True}},
            {"utterances": 4, "arguments": split, "hidden": True},
            {"utterances": 6, "arguments": split, "hidden": True},
            {"utterances": 3, "arguments": split, "hidden": True},
            {"utterances": 5, "arguments": {"split": "hidden"}, "hidden": True},
            {"utterances": 5, "arguments": {"split": "hidden"}, "hidden": True},
        ],
    )
    assert [report["computed"] for report in few] == [["utt-0"], ["utt-1"], []]
    assert all(report["complete"] and report["utterances"] == 2 for report in few)
    assert all((report["complete"], report["utterances"]) == (True, 2) for report in failed)
    assert everything(overwritten) == ids(4)
    assert all(report["complete"] for report in overwritten)
    assert not (tmp_path / "features" / "train" / "work-failures.jsonl").exists()
    for step, computed, utterances in [
        (same, [], 4),
        (grown, ids(6)[4:], 6),
        (subset, [], 3),
        (hidden, ids(5), 5),
        (fewer, [], 5),
    ]:
        assert everything(step) == computed
        assert all(
            (report["complete"], report["utterances"]) == (True, utterances) for report in step
        )


def test_processes_that_are_not_connected_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="not connected; call ddp_init_group"):
        Ranks()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert (Ranks().rank, Ranks().size) == (0, 1)

"""Workers compute on a GPU where there is one, whatever the process that starts them has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import collect_stats_helpers
import pytest
import torch
from brain_helpers import Recipe, assert_holds, expected, make_brain, make_dataset

from featcache import FeatureStorage
from featcache.brain import _tell_device
from featcache.workers import get_client

ONE = {"env": "local", "n_workers": 1}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


class Noting(Recipe):
    """Notes on which devices each batch is computed."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        devices = {
            str(place)
            for place in (self.device, self.modules.encoder[0].weight.device, batch.sig.data.device)
        }
        with Path(self.hparams.note).open("a") as file:
            file.write(f"{' '.join(devices)} {torch.is_autocast_enabled('cuda')}\n")
        return super().compute_features(batch, stage)


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_modules_of_a_brain_and_its_batches_are_on_the_gpu_of_the_worker(
    storage: FeatureStorage, device: str, precision: str
) -> None:
    brain, dataset = (
        make_brain(storage, Noting, device=device, eval_precision=precision),
        make_dataset(),
    )
    brain.hparams.note = str(storage.root / "note")
    storage.root.mkdir()
    cache = brain.cache_features(dataset, parallel=ONE)
    noted = set((storage.root / "note").read_text().splitlines())
    assert noted == {f"cuda:0 {precision == 'bf16'}"}
    assert str(brain.device) == device
    assert brain.modules.encoder[0].weight.device.type == device
    if precision == "fp32":
        brain.modules.to("cpu")
        assert_holds(cache, expected(brain, dataset))


class OnGpu(collect_stats_helpers.Provider):
    """Has the model on the GPU, and says so."""

    def build_env_local(self) -> dict[str, object]:
        env: dict[str, Any] = super().build_env_local()
        return {**env, "model": env["model"].to("cuda"), "device": "cuda"}


@needs_gpu
@pytest.mark.parametrize("parallel", [None, ONE])
def test_statistics_are_collected_by_a_model_on_a_gpu(
    tmp_path: Path, parallel: dict[str, object] | None
) -> None:
    provider = OnGpu(tmp_path / "run")
    collect_stats_helpers.collect(provider, parallel=parallel, write_collected_feats=True)
    collect_stats_helpers.assert_collected(tmp_path / "run" / "stats" / "train", range(30))


@needs_gpu
def test_each_worker_has_a_gpu_of_its_own() -> None:
    pytest.importorskip("dask_cuda", reason="dask-cuda is not installed")
    gpus = torch.cuda.device_count()
    with get_client({"env": "local_gpu", "n_workers": gpus}) as client:
        client.wait_for_workers(gpus, timeout=60)
        first = client.run(first_gpu)
    assert len(set(first.values())) == len(first) == gpus


def first_gpu() -> str:
    return str(torch.cuda.get_device_properties("cuda:0").uuid)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_brain_on_another_kind_of_device_keeps_its_precision_of_evaluation(
    storage: FeatureStorage, precision: str
) -> None:
    brain = make_brain(storage, eval_precision=precision)
    here = brain.evaluation_ctx
    _tell_device(brain, "cpu")
    assert brain.evaluation_ctx is here
    _tell_device(brain, "xpu:0")  # one that can be told of without being there
    assert brain.device == "xpu:0"
    if precision == "fp32":
        assert brain.evaluation_ctx is here
    else:
        there = brain.evaluation_ctx
        assert (there.device, there.fast_dtype, there._enabled) == ("xpu", torch.bfloat16, True)

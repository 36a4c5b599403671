"""`cache_features(parallel=...)`: a Brain computes on workers what it would compute itself."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from brain_helpers import HOP, Recipe, assert_holds, expected, failures, make_brain, make_dataset
from parallel_helpers import LOCAL
from speechbrain.dataio.batch import PaddedBatch
from torch.utils.data import DataLoader

from featcache import FeatureCacheMixin, FeatureStorage, ParallelConfig, unpad
from featcache.brain import environment_of, provenance_of
from featcache.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_workers")


class Noting(Recipe):
    """Notes each utterance in a file, as workers share no memory."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        assert not torch.is_grad_enabled()
        assert not self.modules.training
        assert self.checkpointer is None
        with Path(self.hparams.note).open("a") as file:
            file.writelines(f"{stage.name} {id}\n" for id in batch.id)
        return super().compute_features(batch, stage)


def noting_brain(storage: FeatureStorage, **run_opts: Any) -> Any:
    brain = make_brain(storage, Noting, **run_opts)
    brain.hparams.note = str(storage.root / "note")
    storage.root.mkdir(exist_ok=True)
    return brain


def noted(storage: FeatureStorage) -> list[str]:
    path = storage.root / "note"
    return path.read_text().splitlines() if path.exists() else []


def test_workers_compute_what_the_brain_itself_would(storage: FeatureStorage) -> None:
    brain, dataset = noting_brain(storage), make_dataset(30)
    brain.cache_features(make_dataset(3), check=None)
    brain.checkpointer = threading.Lock()  # could not be sent, but is for training only
    brain.modules.train()
    cache = brain.cache_features(dataset, parallel=LOCAL, check=None)
    assert cache.complete
    assert_holds(cache, expected(brain, dataset))
    assert sorted(noted(storage)) == sorted(f"TRAIN spk/utt-{number}" for number in range(30))
    assert brain.modules.training
    assert cache.stats("ssl").count == sum(3 + number % 4 for number in range(30))
    brain.cache_features(dataset, check=None)
    assert len(noted(storage)) == 30


def test_what_fails_is_set_aside_samplers_are_heeded_and_debugging_ends_early(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as SpeechBrain's recipes set it
    monkeypatch.setattr(logging.getLogger("distributed"), "propagate", True)
    caplog.set_level(logging.INFO)
    brain = noting_brain(storage, debug=True, debug_batches=2)
    brain.bad = frozenset(["spk/utt-2"])
    kwargs = {"batch_sampler": [[4, 5], [2, 3], [6]], "num_workers": 2}
    config = ParallelConfig("local", 1)
    cache = brain.cache_features(
        make_dataset(),
        loader_kwargs=kwargs,
        parallel=config,
        on_error="skip",
        retries=1,
        check=None,
    )
    assert noted(storage)[:2] == ["TRAIN spk/utt-4", "TRAIN spk/utt-5"]
    assert noted(storage).count("TRAIN spk/utt-2") == 3  # with another, alone, and again
    assert sorted(cache) == [f"spk/utt-{number}" for number in (3, 4, 5)]
    assert not cache.complete
    assert [line["id"] for line in failures(storage)] == ["spk/utt-2"]
    distributed = [record for record in caplog.records if record.name.startswith("distributed")]
    # one for each connection; a busy machine's slow end of a worker is a warning
    assert not [record for record in distributed if record.levelno < logging.WARNING]


def test_what_workers_cannot_be_given_is_refused(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    with pytest.raises(
        ConfigError,
        match="map-style dataset, to give each worker utterances of it, not 'DataLoader'",
    ):
        brain.cache_features(DataLoader(make_dataset(), collate_fn=list), parallel=LOCAL)
    with pytest.raises(ConfigError, match="the ids of 'list' are not known before it is loaded"):
        brain.cache_features([1, 2, 3], parallel=LOCAL)
    with pytest.raises(ConfigError, match="asks for utterance 'spk/utt-0' 2 times; once is enough"):
        brain.cache_features(
            make_dataset(), loader_kwargs={"batch_sampler": [[0], [1, 0]]}, parallel=LOCAL
        )
    brain.hparams.lock = threading.Lock()
    with pytest.raises(
        ConfigError, match=r"cannot be sent brain\.hparams\.lock \(lock\): cannot pickle"
    ):
        brain.cache_features(make_dataset(), parallel=LOCAL)


def test_the_precision_of_evaluation_is_that_of_the_brain(storage: FeatureStorage) -> None:
    brain = make_brain(storage, eval_precision="bf16")
    (utterance,) = computed_by_a_copy(brain, make_dataset(1))
    assert utterance["ssl"].dtype == torch.bfloat16


class Extractor(FeatureCacheMixin, torch.nn.Module):
    device = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((), 3.0))

    def compute_features(self, batch: Any, stage: Any) -> Any:
        frames = batch.sig.data.unfold(1, HOP, HOP) * self.scale
        return unpad(
            batch.id,
            batch.frames,
            {"ssl": frames[..., :4], "units": torch.zeros(frames.shape[:2]).long()},
        )


def test_any_object_with_modules_and_a_device_will_do() -> None:
    dataset = make_dataset(1)
    (utterance,) = computed_by_a_copy(Extractor(), dataset)
    torch.testing.assert_close(utterance["ssl"], dataset[0]["sig"].reshape(-1, HOP)[:, :4] * 3)


class Scaled(Extractor):
    """Has a scaler of its own, which is no one's of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.full((), 2.0)

    def compute_features(self, batch: Any, stage: Any) -> Any:
        utterances = super().compute_features(batch, stage)
        return [each | {"ssl": each["ssl"] * self.scaler} for each in utterances]


def test_a_worker_has_what_the_code_names_whatever_it_is_called() -> None:
    dataset = make_dataset(1)
    (utterance,) = computed_by_a_copy(Scaled(), dataset)
    torch.testing.assert_close(utterance["ssl"], dataset[0]["sig"].reshape(-1, HOP)[:, :4] * 6)


def computed_by_a_copy(brain: Any, dataset: Any) -> Any:
    """Compute the features of a batch of all utterances by what a worker would have."""
    env, _ = environment_of(brain, dataset, None, {}, provenance_of(brain, None), {})()
    assert len(env["dataset"]) == len(dataset)
    return env["compute_features"](PaddedBatch(list(dataset)))

"""Batches of a cache in SpeechBrain: their form, a FeatureLoader in a Brain, training that is stopped and goes on."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import speechbrain as sb
import torch
from numpy.typing import NDArray
from speechbrain.dataio.batch import PaddedBatch, PaddedData
from speechbrain.dataio.dataloader import SaveableDataLoader
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.epoch_loop import EpochCounter
from torch.utils.data import DataLoader

import featcache
from featcache import CacheWriter, FeatureDataset, FeatureLoader, FeatureStorageConfig
from featcache.errors import ConfigError
from featcache.interop.speechbrain import padded_batch
from featcache.samplers import BucketBatchSampler

UTTERANCES = 23
DIMS = 3


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> featcache.Cache:
    path = tmp_path_factory.mktemp("features") / "train"
    features = [
        FeatureStorageConfig("fbank"),
        FeatureStorageConfig("units", dtype="int16"),
        FeatureStorageConfig("speaker", time_axis=None),
    ]
    with CacheWriter(path, features) as writer:
        for number in range(UTTERANCES):
            frames = 1 + number * 7 % 11
            arrays: dict[str, NDArray[Any]] = {
                "fbank": np.full((frames, DIMS), number, np.float32),
                "units": np.arange(2 * frames, dtype=np.int16),
                "speaker": np.full(DIMS, number, np.float32),
            }
            writer.write(f"utt-{number:02}", arrays)
    return featcache.open(path)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: beside a busy program two take a hundred times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Batches


def batches_in(cache: featcache.Cache, way: str) -> Any:
    indices = [[0, 5, 7], [3], [22, 1]]
    if way == "loader":
        return FeatureLoader(cache, batch_sampler=indices, collate=padded_batch)
    workers = {"saveable-with-2-workers": 2}.get(way, 0)
    make: Any = DataLoader if way == "torch" else SaveableDataLoader
    return make(FeatureDataset(cache), batch_sampler=indices, collate_fn=padded_batch, num_workers=workers)


@pytest.mark.parametrize("way", ["loader", "torch", "saveable", "saveable-with-2-workers"])
def test_a_batch_is_what_speechbrain_makes_of_the_same_utterances(cache: featcache.Cache, way: str) -> None:
    dataset = FeatureDataset(cache)
    seen = 0
    for batch, indices in zip(batches_in(cache, way), [[0, 5, 7], [3], [22, 1]], strict=True):
        items = [{key: value for key, value in dataset[i].items() if not key.endswith("_lengths")} for i in indices]
        theirs = PaddedBatch(items)
        assert type(batch) is PaddedBatch
        assert batch.id == batch["id"] == theirs.id
        assert len(batch) == batch.batchsize == len(indices)
        for feature in ("fbank", "units", "speaker"):
            ours, padded = batch[feature], theirs[feature]
            assert isinstance(ours, PaddedData)
            torch.testing.assert_close(ours.data, padded.data, rtol=0, atol=0)
            torch.testing.assert_close(ours.lengths, padded.lengths)
        assert [type(value) for value in batch] == [type(value) for value in theirs]
        seen += 1
    assert seen == 3


def test_the_tensor_of_a_batch_is_not_copied(cache: featcache.Cache) -> None:
    given = FeatureDataset(cache).__getitems__([0, 5, 7])
    made = padded_batch(given)
    for feature in ("fbank", "units", "speaker"):
        assert made[feature].data is given[feature]


def test_relative_lengths_give_the_frames_back() -> None:
    for longest in (1, 7, 999, 3001, 59_999):
        frames = torch.arange(longest + 1)
        batch = padded_batch({"id": ["a"] * len(frames), "x": torch.empty(len(frames), longest), "x_lengths": frames})
        assert batch.x.lengths.dtype == torch.float32
        assert torch.equal(torch.round(batch.x.lengths * longest).long(), frames)


def test_a_batch_without_any_frame_has_lengths_of_zero() -> None:
    batch = padded_batch({"id": ["a", "b"], "x": torch.empty(2, 0, 4), "x_lengths": torch.zeros(2, dtype=torch.int64)})
    assert batch.x.lengths.tolist() == [0, 0]


def test_numbers_and_other_things_of_a_transform_stay(cache: featcache.Cache) -> None:
    def with_labels(item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "digit": int(item["id"][4:]), "gain": 0.5, "words": ["a", "word"]}

    loader = FeatureLoader(cache, "fbank", batch_sampler=[[2, 4]], transform=with_labels, collate=padded_batch)
    (batch,) = loader
    batch = batch.to("meta")
    assert (batch.id, batch.words) == (["utt-02", "utt-04"], [["a", "word"], ["a", "word"]])
    assert (batch.digit.dtype, batch.gain.dtype) == (torch.int64, torch.float32)
    for tensor in (batch.digit, batch.gain, *batch.fbank):
        assert tensor.device.type == "meta"


# In a Brain


class StoppedError(Exception):
    """The training is stopped here."""


class Training(featcache.FeatureCacheMixin, sb.Brain):  # type: ignore[misc]
    """Notes which utterances it has seen in which epoch, and can be stopped."""

    stop_at: tuple[int, int] | None = None  # epoch, number of batches that have been trained on

    def on_stage_start(self, stage: Any, epoch: int | None = None) -> None:
        self.stage, self.epoch, self.batches = stage, epoch, 0

    def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
        if stage == sb.Stage.TRAIN and (self.epoch, self.batches) == self.stop_at:
            raise StoppedError
        self.batches += 1
        self.seen[stage.name, self.epoch] += batch.id
        predictions: torch.Tensor = self.modules.model(batch.fbank.data)
        return predictions

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Any) -> torch.Tensor:
        return predictions.square().mean()

    def on_stage_end(self, stage: Any, stage_loss: float, epoch: int | None = None) -> None:
        if stage == sb.Stage.TRAIN:
            self.checkpointer.save_checkpoint()


class BrainComesFirst(sb.Brain, featcache.FeatureCacheMixin):  # type: ignore[misc]
    stop_at: tuple[int, int] | None = None
    on_stage_start = Training.on_stage_start
    compute_forward = Training.compute_forward
    compute_objectives = Training.compute_objectives
    on_stage_end = Training.on_stage_end


class Seen(dict[tuple[str, int | None], list[str]]):
    def __missing__(self, key: tuple[str, int | None]) -> list[str]:
        return self.setdefault(key, [])


def make_brain(save: Path, cls: Any = Training, **run_opts: Any) -> Any:
    model, counter = torch.nn.Linear(DIMS, 1), EpochCounter(3)
    brain = cls(
        {"model": model},
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        run_opts={"device": "cpu", "noprogressbar": True, "ckpt_interval_minutes": 0, **run_opts},
        checkpointer=Checkpointer(save, {"model": model, "counter": counter}),
    )
    brain.counter, brain.seen = counter, Seen()
    return brain


def sampler_of(cache: featcache.Cache) -> BucketBatchSampler:
    return BucketBatchSampler(cache, max_frames=40, seed=5)


def feature_loader(brain: Any, cache: featcache.Cache) -> Any:
    return FeatureLoader(cache, batch_sampler=sampler_of(cache), collate=padded_batch)


def list_of_batches(brain: Any, cache: featcache.Cache) -> Any:
    batches = [list(range(start, min(start + 2, UTTERANCES))) for start in range(0, UTTERANCES, 2)]
    return FeatureLoader(cache, batch_sampler=batches, collate=padded_batch)


def saveable_loader(brain: Any, cache: featcache.Cache, workers: int = 0) -> Any:
    sampler = brain.train_sampler = sampler_of(cache)
    loader = SaveableDataLoader(
        FeatureDataset(cache), batch_sampler=sampler, collate_fn=padded_batch, num_workers=workers
    )
    brain.checkpointer.add_recoverable("dataloader-TRAIN", loader)
    return loader


def saveable_loader_with_workers(brain: Any, cache: featcache.Cache) -> Any:
    return saveable_loader(brain, cache, workers=2)


MAKES: list[Callable[[Any, featcache.Cache], Any]] = [
    feature_loader,
    list_of_batches,
    saveable_loader,
    saveable_loader_with_workers,
]


def assert_exactly_once(ids: Iterable[str], cache: featcache.Cache) -> None:
    assert Counter(ids) == Counter(list(cache))


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("cls", [Training, BrainComesFirst])
def test_training_that_is_stopped_within_an_epoch_goes_on_at_the_very_batch(
    cache: featcache.Cache, tmp_path: Path, cls: Any, make: Callable[[Any, featcache.Cache], Any]
) -> None:
    def train(save: str, stop_at: tuple[int, int] | None = None, **run_opts: Any) -> Seen:
        brain = make_brain(tmp_path / save, cls, **run_opts)
        brain.stop_at = stop_at
        with contextlib.nullcontext() if stop_at is None else pytest.raises(StoppedError):
            brain.fit(brain.counter, make(brain, cache))
        brain.checkpointer.recoverables.clear()  # a circle, which keeps a loader's workers waiting
        seen: Seen = brain.seen
        return seen

    whole = train("whole")
    first = train("save", stop_at=(2, 6), ckpt_interval_steps=3)
    second = train("save", stop_at=(2, 2), ckpt_interval_steps=1)
    third = train("save")
    assert ("TRAIN", 1) not in third
    for epoch in (1, 2, 3):
        together = [id for seen in (first, second, third) for id in seen["TRAIN", epoch]]
        assert together == whole["TRAIN", epoch]
        assert_exactly_once(together, cache)


def test_a_stopped_training_goes_on_in_the_same_process(cache: featcache.Cache, tmp_path: Path) -> None:
    brain = make_brain(tmp_path / "save", ckpt_interval_steps=2)
    loader = feature_loader(brain, cache)
    brain.stop_at = (2, 4)
    with pytest.raises(StoppedError):
        brain.fit(brain.counter, loader)
    brain.stop_at = None
    brain.fit(brain.counter, loader)
    for epoch in (1, 2, 3):
        assert_exactly_once(brain.seen["TRAIN", epoch], cache)


def test_each_epoch_has_its_own_order(cache: featcache.Cache, tmp_path: Path) -> None:
    brain = make_brain(tmp_path / "save")
    brain.fit(brain.counter, feature_loader(brain, cache))
    orders = [brain.seen["TRAIN", epoch] for epoch in (1, 2, 3)]
    assert len(set(map(tuple, orders))) == 3


def test_validation_and_test_take_a_loader_which_is_no_part_of_checkpoints(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    brain = make_brain(tmp_path / "save")
    train, valid, test = (list_of_batches(brain, cache) for _ in range(3))
    brain.fit(brain.counter, train, valid, valid_loader_kwargs={"batch_size": 7})
    assert_exactly_once(brain.seen["VALID", 3], cache)
    brain.evaluate(test)
    assert_exactly_once(brain.seen["TEST", None], cache)
    assert brain.train_sampler is train
    assert {name for name in brain.checkpointer.recoverables if name.startswith("dataloader")} == {"dataloader-TRAIN"}


@pytest.mark.parametrize("cls", [Training, BrainComesFirst])
def test_everything_else_goes_to_speechbrain(cache: featcache.Cache, tmp_path: Path, cls: Any) -> None:
    brain = make_brain(tmp_path / "save", cls)
    dataset = FeatureDataset(cache)
    loader = brain.make_dataloader(dataset, sb.Stage.TRAIN, batch_size=4, shuffle=True, collate_fn=padded_batch)
    assert type(loader) is SaveableDataLoader
    assert brain.train_sampler is loader.sampler
    assert brain.checkpointer.recoverables["dataloader-TRAIN"] is loader
    assert_exactly_once([id for batch in loader for id in batch.id], cache)


def test_a_make_dataloader_of_ones_own_is_asked_first(cache: featcache.Cache, tmp_path: Path) -> None:
    class Own(Training):
        def make_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            self.asked = dataset
            return super().make_dataloader(dataset, *args, **kwargs)

    brain = make_brain(tmp_path / "save", Own)
    loader = list_of_batches(brain, cache)
    assert brain.make_dataloader(loader, sb.Stage.TEST, ckpt_prefix=None) is loader
    assert brain.asked is loader


# Checkpoints


def test_a_checkpoint_holds_the_state_as_json_and_refuses_another_cache_by_name(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    loader = feature_loader(None, cache)
    next(iter(loader))
    checkpointer = Checkpointer(tmp_path, {"loader": loader})
    saved = checkpointer.save_checkpoint(end_of_epoch=False)
    assert json.loads(saved.paramfiles["loader"].read_text()) == loader.state_dict()
    other = BucketBatchSampler([3, 4, 5], max_frames=40, seed=5)
    with pytest.raises(ConfigError, match="the state was saved with data="):
        Checkpointer(tmp_path, {"loader": FeatureLoader(cache, batch_sampler=other)}).recover_if_possible()


@pytest.mark.parametrize("content", ["", "[1]", "{", "7"])
def test_a_checkpoint_that_holds_no_state_is_refused_by_its_path(
    cache: featcache.Cache, tmp_path: Path, content: str
) -> None:
    checkpointer = Checkpointer(tmp_path, {"loader": list_of_batches(None, cache)})
    path = checkpointer.save_checkpoint(end_of_epoch=False).paramfiles["loader"]
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"loader\.ckpt' holds no state of a FeatureLoader"):
        checkpointer.recover_if_possible()


def test_the_end_of_an_epoch_is_followed_by_a_whole_one(cache: featcache.Cache, tmp_path: Path) -> None:
    loader = list_of_batches(None, cache)
    checkpointer = Checkpointer(tmp_path, {"loader": loader})
    assert len(list(loader)) == len(loader)
    checkpointer.save_checkpoint()
    fresh = list_of_batches(None, cache)
    Checkpointer(tmp_path, {"loader": fresh}).recover_if_possible()
    assert_exactly_once([id for batch in fresh for id in batch.id], cache)

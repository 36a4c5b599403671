"""A Brain trains from a FeatureLoader: epochs, validation, stopped and resumed anywhere, under
torchrun.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import speechbrain as sb
from places import TESTS
from speechbrain.dataio.dataloader import SaveableDataLoader
from speechbrain.utils.checkpoints import Checkpointer
from torchrun import run_ranks
from training_helpers import (
    BrainComesFirst,
    Seen,
    StoppedError,
    Training,
    feature_loader,
    list_of_batches,
    make_brain,
    make_training_cache,
    saveable_loader,
    saveable_loader_with_workers,
)

import featcache
from featcache import FeatureDataset, FeatureLoader
from featcache.errors import StateError
from featcache.interop.speechbrain import padded_batch
from featcache.samplers import BucketBatchSampler

MAKES: list[Callable[[Any, featcache.Cache], Any]] = [
    feature_loader,
    list_of_batches,
    saveable_loader,
    saveable_loader_with_workers,
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> featcache.Cache:
    return make_training_cache(tmp_path_factory.mktemp("features") / "train")


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


def test_a_stopped_training_goes_on_in_the_same_process(
    cache: featcache.Cache, tmp_path: Path
) -> None:
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
    assert {name for name in brain.checkpointer.recoverables if name.startswith("dataloader")} == {
        "dataloader-TRAIN"
    }


@pytest.mark.parametrize("cls", [Training, BrainComesFirst])
def test_everything_else_goes_to_speechbrain(
    cache: featcache.Cache, tmp_path: Path, cls: Any
) -> None:
    brain = make_brain(tmp_path / "save", cls)
    dataset = FeatureDataset(cache)
    loader = brain.make_dataloader(
        dataset, sb.Stage.TRAIN, batch_size=4, shuffle=True, collate_fn=padded_batch
    )
    assert type(loader) is SaveableDataLoader
    assert brain.train_sampler is loader.sampler
    assert brain.checkpointer.recoverables["dataloader-TRAIN"] is loader
    assert_exactly_once([id for batch in loader for id in batch.id], cache)


def test_a_make_dataloader_of_ones_own_is_asked_first(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    class Own(Training):
        def make_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            self.asked = dataset
            return super().make_dataloader(dataset, *args, **kwargs)

    brain = make_brain(tmp_path / "save", Own)
    loader = list_of_batches(brain, cache)
    assert brain.make_dataloader(loader, sb.Stage.TEST, ckpt_prefix=None) is loader
    assert brain.asked is loader


# Several ranks

SCRIPT = """
import json, os, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import featcache
import training_helpers as helpers
from speechbrain.utils.distributed import ddp_init_group

folder, rank = Path(sys.argv[2]), os.environ["RANK"]
ddp_init_group({"distributed_backend": "gloo"})
brain = helpers.make_brain(folder / "save", ckpt_interval_steps=1)
brain._wrap_distributed = lambda: None  # asks for GPUs
brain.stop_at = (2, 2)
try:
    brain.fit(brain.counter, helpers.feature_loader(brain, featcache.open(folder / "features")))
except helpers.StoppedError:
    seen = [brain.seen["TRAIN", 1], brain.seen["TRAIN", 2]]
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
"""


def test_ranks_share_each_epoch_and_any_number_of_them_goes_on(tmp_path: Path) -> None:
    cache = make_training_cache(tmp_path / "features")
    run_ranks(SCRIPT, tmp_path, TESTS, tmp_path)
    one, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert_exactly_once(one[0] + other[0], cache)
    assert one[1]
    assert other[1]

    alone = make_brain(tmp_path / "save")
    alone.fit(alone.counter, feature_loader(alone, cache))
    assert_exactly_once(one[1] + other[1] + alone.seen["TRAIN", 2], cache)
    assert_exactly_once(alone.seen["TRAIN", 3], cache)


# Checkpoints


def test_a_checkpoint_holds_the_state_as_json_and_refuses_another_cache_by_name(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    loader = feature_loader(None, cache)
    next(iter(loader))
    checkpointer = Checkpointer(tmp_path, {"loader": loader})
    saved = checkpointer.save_checkpoint(end_of_epoch=False)
    assert json.loads(saved.paramfiles["loader"].read_text()) == loader.state_dict()
    other = BucketBatchSampler([3, 4, 5], ids=["utt-00", "utt-01", "utt-02"], max_frames=40, seed=5)
    with pytest.raises(StateError, match="the state was saved with data="):
        Checkpointer(
            tmp_path, {"loader": FeatureLoader(cache, batch_sampler=other)}
        ).recover_if_possible()


@pytest.mark.parametrize("content", ["", "[1]", "{", "7"])
def test_a_checkpoint_that_holds_no_state_is_refused_by_its_path(
    cache: featcache.Cache, tmp_path: Path, content: str
) -> None:
    checkpointer = Checkpointer(tmp_path, {"loader": list_of_batches(None, cache)})
    path = checkpointer.save_checkpoint(end_of_epoch=False).paramfiles["loader"]
    path.write_text(content)
    with pytest.raises(StateError, match=r"loader\.ckpt' holds no state of a FeatureLoader"):
        checkpointer.recover_if_possible()


def test_the_end_of_an_epoch_is_followed_by_a_whole_one(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    loader = list_of_batches(None, cache)
    checkpointer = Checkpointer(tmp_path, {"loader": loader})
    assert len(list(loader)) == len(loader)
    checkpointer.save_checkpoint()
    fresh = list_of_batches(None, cache)
    Checkpointer(tmp_path, {"loader": fresh}).recover_if_possible()
    assert_exactly_once([id for batch in fresh for id in batch.id], cache)

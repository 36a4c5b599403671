"""Lightning trains on each utterance once per epoch: alone, on two processes, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from host_helpers import IDS, assert_each_once, make_host_cache, note, run_two, seen_in
from places import ROOT
from torch.utils.data import DataLoader

import featcache
from featcache import FeatureDataset, FeatureLoader
from featcache.samplers import BucketBatchSampler, ShuffledBatchSampler

pytestmark = pytest.mark.filterwarnings("ignore")


class StoppedError(Exception):
    """The training is stopped here."""


class Model(lightning.LightningModule):  # type: ignore[misc]
    """Notes what it trains on; stops after some steps of an epoch, with a checkpoint."""

    def __init__(self, folder: Path, stop_at: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.folder, self.stop_at = folder, stop_at
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: dict[str, Any], number: int) -> torch.Tensor:
        note(self.folder, self.global_rank, self.current_epoch, batch["id"])
        loss: torch.Tensor = self.layer(batch["fbank"]).square().mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        if self.stop_at == (self.current_epoch, number + 1):
            self.trainer.save_checkpoint(self.folder / "stopped.ckpt")
            raise StoppedError

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(folder: Path, **options: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"enable_checkpointing": False, "devices": 1, **options},
    )


def bucket(cache: featcache.Cache) -> Any:
    return FeatureLoader(cache, batch_sampler=BucketBatchSampler(cache, max_frames=90, seed=2))


def shuffled(cache: featcache.Cache) -> Any:
    batches = [IDS[start : start + 4] for start in range(0, len(IDS), 4)]
    return FeatureLoader(cache, batch_sampler=ShuffledBatchSampler(batches, seed=2), threads=0)


def plain(cache: featcache.Cache) -> Any:
    return FeatureLoader(cache, batch_size=5, shuffle=True)


def data_loader(cache: featcache.Cache | FeatureDataset) -> Any:
    dataset = cache if isinstance(cache, FeatureDataset) else FeatureDataset(cache)
    sampler = BucketBatchSampler(dataset, max_frames=90)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=FeatureDataset.collate)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> featcache.Cache:
    return make_host_cache(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("make", [bucket, shuffled, plain, data_loader])
def test_each_epoch_has_all_utterances_in_another_order(
    make: Any, cache: featcache.Cache, tmp_path: Path
) -> None:
    trainer(tmp_path).fit(Model(tmp_path), make(cache), make(cache))
    assert_each_once(seen_in(tmp_path), epochs=4)


@pytest.mark.parametrize("make", [bucket, shuffled, plain])
@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("steps", [1, 5, -1])
def test_a_checkpoint_within_an_epoch_goes_on_with_the_next_batch(
    make: Any, epoch: int, steps: int, cache: featcache.Cache, tmp_path: Path
) -> None:
    at = steps if steps > 0 else len(make(cache))
    with pytest.raises(StoppedError):
        trainer(tmp_path).fit(Model(tmp_path, (epoch, at)), make(cache))
    trainer(tmp_path).fit(Model(tmp_path), make(cache), ckpt_path=tmp_path / "stopped.ckpt")
    assert_each_once(seen_in(tmp_path), epochs=4)


def test_a_checkpoint_of_the_end_of_an_epoch_goes_on_with_the_next(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path, save_top_k=-1, save_on_train_epoch_end=True
    )
    options: dict[str, Any] = {"enable_checkpointing": True}
    trainer(tmp_path, callbacks=[keep], **options).fit(Model(tmp_path), bucket(cache))
    whole = seen_in(tmp_path)
    first = next(path for path in tmp_path.glob("epoch=1*.ckpt"))
    (tmp_path / "seen-0.jsonl").unlink()
    trainer(tmp_path).fit(Model(tmp_path), bucket(cache), ckpt_path=first)
    assert seen_in(tmp_path) == {epoch: whole[epoch] for epoch in (2, 3)}


@pytest.fixture
def module(tmp_path: Path) -> Callable[[], Any]:
    """Makes the data module of the guide."""
    text = (ROOT / "docs" / "guides" / "lightning.md").read_text()
    names: dict[str, Any] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    for split in ("train", "valid"):
        make_host_cache(tmp_path / split)
    return partial(names["Features"], tmp_path, max_frames=90)


def test_the_data_module_of_the_guide_goes_on_within_an_epoch(
    module: Callable[[], Any], tmp_path: Path
) -> None:
    with pytest.raises(StoppedError):
        trainer(tmp_path).fit(Model(tmp_path, (1, 3)), datamodule=module())
    again = module()
    trainer(tmp_path).fit(Model(tmp_path), datamodule=again, ckpt_path=tmp_path / "stopped.ckpt")
    assert_each_once(seen_in(tmp_path), epochs=4)
    assert sorted(id for batch in again.val_dataloader() for id in batch["id"]) == IDS


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
sys.path.insert(0, {here!r})
import featcache
from test_lightning import Model, StoppedError, bucket, data_loader, trainer

folder = Path(sys.argv[1])
loader = bucket(featcache.open(folder / "cache"))  # before Lightning has started the other process
options = {{"devices": 2, "strategy": "ddp"}}
try:
    trainer(folder, **options).fit(Model(folder, (1, 3)), loader)
except StoppedError:
    again = bucket(featcache.open(folder / "cache"))
    trainer(folder, **options).fit(Model(folder), again, ckpt_path=folder / "stopped.ckpt")
try:
    trainer(folder, **options).fit(Model(folder / "refused"), data_loader(loader.dataset))
except Exception as error:
    assert "use_distributed_sampler=False" in str(error), error
options["use_distributed_sampler"] = False
trainer(folder, **options).fit(Model(folder / "torch"), data_loader(loader.dataset))
"""


def test_two_processes_share_each_epoch_and_resume_it(tmp_path: Path) -> None:
    make_host_cache(tmp_path / "cache")
    for name in ("refused", "torch"):
        (tmp_path / name).mkdir()
    here = Path(__file__).parent
    run_two(SCRIPT.format(tests=str(here.parent), here=str(here)), tmp_path, alone=True)
    assert_each_once(seen_in(tmp_path), epochs=4, ranks=2)
    assert_each_once(seen_in(tmp_path / "torch"), epochs=4, ranks=2)
    assert seen_in(tmp_path / "refused") == {}

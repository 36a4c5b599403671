"""HuggingFace's `Trainer` with a `FeatureLoader`: alone, on two processes, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from host_helpers import assert_each_once, make_host_cache, note, run_two, seen_in

import featcache
from featcache import FeatureLoader
from featcache.samplers import BucketBatchSampler

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, fbank: torch.Tensor, **others: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(fbank).square().mean()}


class Trainer(transformers.Trainer):
    """Trains on the batches of a loader, and notes them."""

    loader: Any = None

    def get_train_dataloader(self) -> Any:
        return self.loader or super().get_train_dataloader()

    def training_step(self, model: Any, inputs: Any, *others: Any) -> Any:
        epoch = int(self.state.epoch or 0)
        note(Path(str(self.args.output_dir)), self.args.process_index, epoch, inputs["id"])
        return super().training_step(model, inputs, *others)


def make_trainer(folder: Path, loader: Any, **options: Any) -> Trainer:
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=3,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_num_workers=0,
        **{"save_strategy": "no", **options},
    )
    trainer = Trainer(Model(), arguments)
    trainer.loader = loader
    return trainer


def bucket(cache: featcache.Cache) -> Any:
    sampler = BucketBatchSampler(cache, max_frames=90)
    return FeatureLoader(cache, batch_sampler=sampler, transform=labelled)


def plain(cache: featcache.Cache) -> Any:
    return FeatureLoader(cache, batch_size=5, shuffle=True)


def labelled(item: dict[str, Any], rng: object) -> dict[str, Any]:
    return {**item, "labels": 1}


class StopAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


@pytest.mark.parametrize("make", [bucket, plain])
@pytest.mark.parametrize("epochs", [0.3, 1, 1.4])
def test_each_utterance_comes_once_per_epoch_also_after_a_resume(
    make: Any, epochs: float, tmp_path: Path
) -> None:
    cache = make_host_cache(tmp_path / "cache")
    trainer = make_trainer(tmp_path, make(cache))
    step = int(epochs * len(make(cache)))
    trainer.add_callback(StopAt(step))
    trainer.train()
    make_trainer(tmp_path, make(cache)).train(
        resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}")
    )
    assert_each_once(seen_in(tmp_path), epochs=3)


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
import featcache
from test_trainer import StopAt, bucket, make_trainer

folder = Path(sys.argv[1])
cache = featcache.open(folder / "cache")
loader = bucket(cache)
options = {{"ddp_backend": "gloo"}}
trainer = make_trainer(folder, loader, **options)
step = len(loader) + 2
trainer.add_callback(StopAt(step))
trainer.train()
checkpoint = str(folder / f"checkpoint-{{step}}")
make_trainer(folder, bucket(cache), **options).train(resume_from_checkpoint=checkpoint)

plain = make_trainer(folder / "data", None, **options)
plain.train_dataset = featcache.FeatureDataset(cache)
plain.data_collator = featcache.FeatureDataset.collate
plain.train()
"""


def test_two_processes_share_each_epoch_and_resume_it(tmp_path: Path) -> None:
    make_host_cache(tmp_path / "cache")
    (tmp_path / "data").mkdir()
    here = Path(__file__).parent
    run_two(SCRIPT.format(paths=[str(here.parent), str(here)]), tmp_path)
    assert_each_once(seen_in(tmp_path), epochs=3, ranks=2)
    for shares in seen_in(
        tmp_path / "data"
    ).values():  # some come twice to make up the number: the Trainer's rule
        assert len({id for share in shares for id in share}) == 61

"""Collect-stats when workers are killed or cut off in the middle of a shard: all is stored once,
and counted once.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from collect_stats_helpers import Model, Provider, assert_collected, calls, collect, files_of
from distributed import get_worker

TWO = {"env": "local", "n_workers": 2}
SIZE = 24  # in two shards
AT = 5  # the utterance of the first one at which something happens
AFTER_S = 4.0  # longer than it takes another worker to come there


class Struck(Model):
    """Lets something happen to the first worker that comes to an utterance."""

    deed: Callable[[Path], None]

    def collect_feats(self, number: torch.Tensor, **batch: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Return the features, unless something happens."""
        mark = self.folder / "struck"
        if AT in number[:, 0].tolist() and not mark.exists():
            mark.touch()
            self.deed(self.folder)
        return super().collect_feats(number=number, **batch)  # type: ignore[arg-type]


class StruckProvider(Provider):
    """Builds a model whose worker is struck."""

    def __init__(self, folder: Path, deed: Callable[[Path], None]) -> None:
        super().__init__(folder, size=SIZE)
        self.deed = deed

    def build_env_local(self) -> dict[str, object]:
        model = Struck(self.folder, {}, 0.0)
        torch.nn.init.ones_(model.scale.weight)
        model.deed = self.deed
        return {**super().build_env_local(), "model": model}


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def killed_once_some_of_the_shard_is_stored(folder: Path) -> None:
    feats = folder / "stats" / "train" / "collect_feats" / "data_feats"
    assert wait_for(lambda: len(list(feats.glob("*.npy"))) >= AT, 20)
    os.kill(os.getpid(), signal.SIGKILL)


def cut_off_while_it_works_on(folder: Path) -> None:
    worker = get_worker()
    worker.loop.add_callback(worker.batched_stream.abort)
    wait_for(lambda: AT in calls(folder), AFTER_S)  # another worker is at it, too


@pytest.mark.parametrize(
    "deed", [killed_once_some_of_the_shard_is_stored, cut_off_while_it_works_on]
)
def test_a_worker_that_is_lost_in_the_middle_of_a_shard_leaves_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: Callable[[Path], None]
) -> None:
    monkeypatch.setattr("featcache.espnet.runner.MOST_SHARDS", 2)
    provider = StruckProvider(tmp_path / "run", deed)
    collect(provider, SIZE, batch_size=1, parallel=TWO, write_collected_feats=True)
    assert (provider.folder / "struck").exists()
    assert_collected(provider.folder / "stats" / "train", range(SIZE))
    assert max(Counter(calls(provider.folder)).values()) <= 3  # the sample is computed once more
    collect(Provider(tmp_path / "serial", size=SIZE), SIZE, batch_size=1)
    found, expected = (files_of(tmp_path / name / "stats" / "train") for name in ("run", "serial"))
    assert found == {**expected, "feat_keys_written.txt": b"feats\nfirst\n"}

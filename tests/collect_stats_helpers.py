"""A data set and a model for collect-stats, whose calls can be counted and whose utterances can
fail or kill.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import featcache
from featcache import EnvironmentProvider, FeatureStats
from featcache.espnet import CommonCollateFn
from featcache.espnet.runner import CollectStatsRunner, Totals

DIMS = 3


def id_of(number: int) -> str:
    """Ids whose order is not the order of their numbers."""
    return f"spk{number % 3}/utt-{number}"


def speech_of(number: int) -> NDArray[np.float32]:
    """What the model returns as features."""
    random = np.random.default_rng(number)
    return random.standard_normal((2 + number * 7 % 40, DIMS)).astype(np.float32) * 3 + 10


class Utterances:
    """Speech and tokens of some utterances, as ESPnet's data sets give them."""

    def __init__(self, size: int) -> None:
        self.ids = [id_of(number) for number in range(size)]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[str, dict[str, NDArray[Any]]]:
        return id_of(index), {
            "speech": speech_of(index),
            "text": np.arange(index % 4),
            "number": np.array([index]),
        }


class Model(torch.nn.Module):
    """Returns speech scaled by its weight, and notes which utterances it has seen."""

    def __init__(self, folder: Path, bad: dict[str, list[int]], seconds: float) -> None:
        super().__init__()
        self.scale = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.scale.weight)
        self.folder, self.bad, self.seconds = folder, bad, seconds

    def collect_feats(
        self,
        speech: torch.Tensor,
        speech_lengths: torch.Tensor,
        number: torch.Tensor,
        gain: float = 1.0,
        **others: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return two features: one with a time axis, one without."""
        assert not self.training, "statistics are those of evaluation"
        # failures pass: what the code itself writes is none of what features are made from
        self.bad, self.seconds = self.bad, self.seconds
        for index in number[:, 0].tolist():
            with (self.folder / "calls").open("a") as file:
                file.write(f"{index}\n")
            tried = Counter(calls(self.folder))[index]
            if index in self.bad.get("kills", ()) or (
                tried == 1 and index in self.bad.get("kills_once", ())
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            if index in self.bad.get("hangs", ()):
                time.sleep(3600)
            if index in self.bad.get("fails", ()):
                raise ValueError(f"cannot compute {index}")
            time.sleep(self.seconds)
        feats = speech * self.scale.weight * gain
        for index in self.bad.get("nan", ()):
            feats[number[:, 0] == index] = torch.nan
        return {"feats": feats, "feats_lengths": speech_lengths, "first": feats[:, 0]}


class Provider(EnvironmentProvider):
    """Builds the utterances and the model."""

    def __init__(
        self, folder: Path, *, size: int = 30, scale: float = 1.0, seconds: float = 0, **bad: Any
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.size, self.scale, self.seconds, self.bad = (
            folder,
            size,
            scale,
            seconds,
            bad,
        )

    def build_env_local(self) -> dict[str, object]:
        model = Model(self.folder, self.bad, self.seconds)
        torch.nn.init.constant_(model.scale.weight, self.scale)
        collate_fn = CommonCollateFn(not_sequence=["number"])
        return {
            "dataset": Utterances(self.size),
            "model": model,
            "collate_fn": collate_fn,
            "device": "cpu",
        }


def calls(folder: Path) -> list[int]:
    """The utterances that were computed, in order."""
    path = folder / "calls"
    return list(map(int, path.read_text().split())) if path.exists() else []


def collect(provider: Provider, count: int = 30, **settings: Any) -> Totals:
    """Collect statistics beside the provider's notes."""
    settings = {"batch_size": 4, **settings}
    return CollectStatsRunner(provider, provider.folder / "stats", "train", **settings)(
        range(count)
    )


def files_of(split: Path) -> dict[str, bytes]:
    """The files of a split, shards apart."""
    return {path.name: path.read_bytes() for path in split.iterdir() if path.is_file()}


def assert_right(split: Path, numbers: Iterable[int]) -> None:
    """Compare the files of a split with what they must hold."""
    numbers = sorted(numbers, key=id_of)
    assert (split / "feats_shape").read_text().splitlines() == [
        f"{id_of(number)} {len(speech_of(number))},{DIMS}" for number in numbers
    ]
    assert (split / "first_shape").read_text().splitlines() == [
        f"{id_of(number)} 1,{DIMS}" for number in numbers
    ]
    assert (split / "text_shape").read_text().splitlines() == [
        f"{id_of(number)} {number % 4}" for number in numbers
    ]
    frames = {
        "feats": np.concatenate([speech_of(number) for number in numbers]).astype(np.float64),
        "first": np.stack([speech_of(number)[0] for number in numbers]).astype(np.float64),
    }
    for key, expected in frames.items():
        stats = FeatureStats.load(split / f"{key}_stats.npz")
        assert stats.count == len(expected)
        np.testing.assert_allclose(stats.mean, expected.mean(0), rtol=1e-12)
        np.testing.assert_allclose(stats.var, expected.var(0), rtol=1e-12)
        with np.load(split / f"{key}_stats.npz") as found:
            np.testing.assert_allclose(found["sum"], expected.sum(0), rtol=1e-12)
            np.testing.assert_allclose(found["sum_square"], (expected**2).sum(0), rtol=1e-12)
            assert found["count"] == len(expected)
            assert found["sum"].dtype == found["sum_square"].dtype == np.float64
    assert (split / "shape_keys.txt").read_text() == "feats\nfirst\ntext\n"
    assert (
        (split / "stats_keys.txt").read_text()
        == (split / "stats_keys").read_text()
        == "feats\nfirst\n"
    )


def assert_collected(split: Path, numbers: Iterable[int]) -> None:
    """Compare files and features with what they must hold, each utterance once."""
    assert_right(split, numbers)
    cache = featcache.open(split / "collect_feats", verify="arrays")
    assert list(cache) == sorted(map(id_of, numbers))
    assert cache.complete
    for number in numbers:
        np.testing.assert_array_equal(
            cache.read(id_of(number), "feats"), speech_of(number), strict=True
        )


if __name__ == "__main__":  # a driver that is to be killed: folder, seconds an utterance
    import sys

    collect(Provider(Path(sys.argv[1]), seconds=float(sys.argv[2])), write_collected_feats=True)

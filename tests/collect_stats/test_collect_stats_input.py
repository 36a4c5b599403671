"""What collect-stats refuses: values without statistics, models and data sets of another kind, odd
arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collect_stats_helpers import Model, Provider, Utterances, collect, speech_of

from featcache.errors import ConfigError, DuplicateIdError, FeatureError
from featcache.espnet import CollectStatsRunner, CommonCollateFn


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_values_that_have_no_statistics_are_refused_with_their_utterance(folder: Path) -> None:
    with pytest.raises(FeatureError, match="'spk1/utt-7': 'feats' holds NaN or infinity"):
        collect(Provider(folder, nan=[7]))


def test_features_of_any_id_are_in_files_of_their_own(folder: Path) -> None:
    feats = folder / "stats" / "train" / "collect_feats"
    names = ["../../x", "a.b", "a", "A/b", "%2F", "ü" * 80, "y" * 900, "-"]
    settings: Any = {"write_collected_feats": True, "batch_size": None}
    collect(Other(folder, dataset=renamed(names.__getitem__)), len(names), **settings)
    paths = dict(line.split() for line in (feats / "feats.scp").read_text().splitlines())
    assert set(map(Path, paths.values())) == set((feats / "data_feats").iterdir())
    for number, name in enumerate(names):
        np.testing.assert_array_equal(np.load(paths[name]), speech_of(number))


class Other(Provider):
    """Replaces parts of the environment."""

    def __init__(self, folder: Path, **parts: Any) -> None:
        super().__init__(folder)
        self.parts = parts

    def build_env_local(self) -> dict[str, object]:
        return {**super().build_env_local(), **self.parts}


def returning(**feats: Any) -> Any:
    class Returning(torch.nn.Module):
        def collect_feats(self, **batch: torch.Tensor) -> dict[str, Any]:
            return feats

    return Returning()


def renamed(name: Callable[[int], str]) -> Any:
    class Renamed(Utterances):
        def __getitem__(self, index: int) -> tuple[str, dict[str, Any]]:
            return name(index), super().__getitem__(index)[1]

    return Renamed(30)


@pytest.mark.parametrize(
    ("parts", "error", "text"),
    [
        ({"model": torch.nn.Linear(1, 1)}, ConfigError, "'Linear' does not have"),
        ({"collate_fn": list}, ConfigError, r"collate_fn returns \(ids, batch\)"),
        (
            {"model": returning(feats=torch.ones(3, 2))},
            FeatureError,
            r"'feats' of shape \(3, 2\) for 1 utterances",
        ),
        (
            {"model": returning(feats=torch.ones(1, 5, 2), feats_lengths=torch.tensor([6]))},
            FeatureError,
            r"'spk0/utt-0': 'feats' of shape \(5, 2\) has no 6 frames",
        ),
        (
            {"model": returning(feats=torch.ones(1, 5, 2), feats_lengths=torch.tensor([1.0]))},
            FeatureError,
            "1 whole numbers, not float32",
        ),
        ({"model": returning()}, FeatureError, "no features, only an empty dict"),
        (
            {"model": returning(feats=torch.ones(1, 2, dtype=torch.complex64))},
            FeatureError,
            "complex64; .* real numbers",
        ),
        (
            {"dataset": renamed(lambda index: "an utterance")},
            FeatureError,
            "'an utterance' .* white space",
        ),
        (
            {"dataset": renamed(lambda index: "same")},
            DuplicateIdError,
            "two utterances have the id 'same'",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(
    folder: Path, parts: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        collect(Other(folder, **parts), batch_size=None)


@pytest.mark.parametrize("features", [True, False])
def test_two_utterances_of_one_id_in_a_batch_are_refused(folder: Path, features: bool) -> None:
    dataset = renamed(lambda index: f"utt-{index // 2}")
    with pytest.raises(DuplicateIdError, match=r"^2 utterances of a batch have the id 'utt-0'$"):
        collect(Other(folder, dataset=dataset), write_collected_feats=features)


def test_a_collate_function_that_drops_utterances_is_refused(folder: Path) -> None:
    with pytest.raises(FeatureError, match="a batch of 1 utterances out of 4"):
        collect(Other(folder, collate_fn=lambda items: CommonCollateFn()(items[:1])))


@pytest.mark.parametrize(
    ("shards", "text"), [(1, "'feats' of utterances 'spk2/utt-2'"), (9, "2/feats_stats.npz")]
)
def test_frames_of_another_shape_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shards: int, text: str
) -> None:
    monkeypatch.setattr("featcache.espnet.runner.MOST_SHARDS", shards)

    class Changing(Model):
        def collect_feats(  # type: ignore[override]
            self, number: torch.Tensor, **batch: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            return {"feats": torch.ones(len(number), 3 if number[0] < 2 else 2)}

    with pytest.raises(FeatureError, match=rf"{text}.* \(3,\) and \(2,\) do not merge"):
        collect(Other(folder, model=Changing(folder, {}, 0)), 4, batch_size=1)


def test_an_environment_without_a_model_is_refused(folder: Path) -> None:
    class Empty(Provider):
        def build_env_local(self) -> dict[str, object]:
            return {"dataset": Utterances(1)}

    with pytest.raises(ConfigError, match="the environment needs 'model'; it has 'dataset'"):
        collect(Empty(folder))


def test_shards_of_different_keys_do_not_merge(folder: Path) -> None:
    class Changing(Model):
        def collect_feats(  # type: ignore[override]
            self, number: torch.Tensor, **batch: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            return {f"feats{int(number[0] > 9)}": torch.ones(len(number), 2)}

    with pytest.raises(FeatureError, match="every utterance must have the same"):
        collect(Other(folder, model=Changing(folder, {}, 0)))


@pytest.mark.parametrize(
    ("settings", "indices", "text"),
    [
        ({"mode": "a/b"}, [0], "mode 'a/b'"),
        ({"batch_size": 0}, [0], "batch_size must be an integer of at least 1, not 0"),
        ({"parallel": {"env": "locale"}}, [0], "no parallel env 'locale'"),
        ({}, [], "at least one"),
        ({}, [1, 1], "twice"),
        ({}, [-1], "numbers of utterances"),
        ({}, [0.5], "numbers of utterances"),
    ],
)
def test_arguments_that_cannot_work_are_refused(
    folder: Path, settings: Any, indices: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        CollectStatsRunner(Provider(folder), folder, **{"mode": "train", **settings})(indices)

"""Training goes the same way whether its features were cached now or before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from brain_helpers import Recipe, make_brain, make_dataset
from parallel_helpers import ONE_WORKER, Provider, extract

from featcache import FeatureStorage
from featcache.errors import ComputeError


def states() -> list[Any]:
    """All that the global generators would give next."""
    return [random.getstate(), *map(str, np.random.get_state()), *torch.get_rng_state().tolist()]


class Drawing(Recipe):
    """Draws from all global generators as it computes."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        random.random(), np.random.rand(), torch.rand(1)
        return super().compute_features(batch, stage)


@pytest.mark.parametrize("loader_kwargs", [{}, {"batch_size": 2, "num_workers": 1}])
@pytest.mark.parametrize("fails", [False, True])
def test_the_global_generators_are_left_as_they_were(
    storage: FeatureStorage, loader_kwargs: dict[str, Any], fails: bool
) -> None:
    brain = make_brain(storage, Drawing)
    brain.bad = frozenset(["spk/utt-3"] if fails else [])
    before = states()
    try:
        brain.cache_features(make_dataset(4), loader_kwargs=loader_kwargs, retries=0)
    except ComputeError:
        assert fails
    assert states() == before
    brain.cache_features(make_dataset(2), loader_kwargs=loader_kwargs)
    assert states() == before


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("parallel", [None, ONE_WORKER])
def test_extract_leaves_them_too(tmp_path: Path, parallel: object) -> None:
    class Random(Provider):
        def build_env_local(self) -> dict[str, object]:
            random.random(), np.random.rand(), torch.rand(1)
            return super().build_env_local()

    before = states()
    extract(Random(tmp_path, 4), parallel=parallel)
    assert states() == before


def test_a_training_is_the_same_whether_the_cache_was_there_or_not(storage: FeatureStorage) -> None:
    def trained() -> tuple[list[list[str]], torch.Tensor]:
        brain = make_brain(storage, Training, seed=3)
        cache = brain.cache_features(make_dataset(), loader_kwargs={"batch_size": 3})
        assert cache.complete
        kwargs = {"batch_size": 2, "shuffle": True, "num_workers": 1}
        brain.fit([1, 2], make_dataset(), train_loader_kwargs=kwargs)
        return brain.seen, torch.cat(
            [part.detach().flatten() for part in brain.modules.parameters()]
        )

    (order, weights), (again, same) = trained(), trained()
    assert order == again
    torch.testing.assert_close(weights, same, rtol=0, atol=0)


class Training(Recipe):
    """Notes in what order the utterances come."""

    def compute_forward(self, batch: Any, stage: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), batch.id]
        return super().compute_forward(batch, stage)

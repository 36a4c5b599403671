"""`recipes/quantization`: centroids and tokens out of a cache are those without one, to the bit."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from places import ROOT

import featcache
from featcache.errors import StaleCacheError

pytest.importorskip("sklearn")
pytest.importorskip("transformers")

RECIPE = ROOT / "recipes" / "quantization"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quantization_recipe", RECIPE / "quantize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack 40 recordings."""
    folder = tmp_path_factory.mktemp("few")
    with zipfile.ZipFile(ROOT / "recipes" / "digits" / "corpus.zip") as corpus:
        corpus.extractall(folder, corpus.namelist()[::45])
    return folder


def run(recipe: ModuleType, few: Path, folder: Path, **settings: object) -> None:
    settings = {
        "data_folder": few,
        "output_folder": folder,
        "number_of_epochs": 2,
        "clusters": 8,
        "kmeans_batch_size": 100,
        **settings,
    }
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    threads = torch.get_num_threads()
    try:
        recipe.main([str(RECIPE / "hparams.yaml"), "--noprogressbar", *options])
    finally:
        torch.set_num_threads(threads)


def test_a_cache_changes_neither_centroids_nor_tokens(
    recipe: ModuleType, few: Path, tmp_path: Path
) -> None:
    cached, uncached = tmp_path / "cached", tmp_path / "uncached"
    run(recipe, few, uncached, use_cache=False)
    assert not [name for name in ("features", "tokens") if (uncached / name).exists()]
    for _ in range(2):  # computed, then read
        run(recipe, few, cached)
        for name in ("centroids.npy", "units.train.txt", "units.test.txt"):
            assert (cached / name).read_bytes() == (uncached / name).read_bytes()

    ssl = featcache.open(cached / "features" / "train")
    tokens = featcache.open(cached / "tokens" / "train")
    centroids = np.load(cached / "centroids.npy")
    assert tokens.complete
    assert len(tokens) == len(ssl) == 36
    for id in ssl:
        frames = ssl.read(id, "ssl")
        nearest = np.square(frames[:, None] - centroids).sum(2).argmin(1)
        assert tokens.read(id, "tokens").tolist() == nearest.tolist()
    lines = (cached / "units.train.txt").read_text().splitlines()
    assert dict(zip(tokens, tokens.annotation("units"), strict=True)) == dict(
        line.split(" ", 1) for line in lines
    )

    with pytest.raises(StaleCacheError, match="centroids"):
        run(recipe, few, cached, clusters=6)

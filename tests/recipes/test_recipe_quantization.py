"""`recipes/quantization`: centroids and tokens out of a cache are those without one, to the bit."""

from __future__ import annotations

import importlib.util
import warnings
import wave
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import speechbrain as sb
import torch
from places import ROOT
from speechbrain.dataio.dataloader import make_dataloader

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


def test_centroids_are_those_of_speechbrains_recipe(recipe: ModuleType, tmp_path: Path) -> None:
    """Of recordings of 25 frames, as SpeechBrain leaves frames out that fill no step."""
    with warnings.catch_warnings():  # that it moves, to where these functions are not
        warnings.simplefilter("ignore", DeprecationWarning)
        kmeans: Any = pytest.importorskip("speechbrain.utils.kmeans")
    threads: Any = pytest.importorskip("threadpoolctl").threadpool_limits
    torch.manual_seed(0)
    model = recipe.encoder(None).eval()
    model.save_pretrained(tmp_path / "model")
    samples = next(n for n in range(160, 9999) if model._get_feat_extract_output_lengths(n) == 25)
    few = tmp_path / "few"
    few.mkdir()
    draw = np.random.default_rng(0)
    for number in range(40):
        with wave.open(str(few / f"u{number:02}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, samples, "NONE", ""))
            loud = draw.integers(100, 9000)
            sound = draw.normal(0, loud, samples).clip(-32768, 32767)
            file.writeframes(sound.astype("<i2").tobytes())
    in_order = {"batch_size": 8, "shuffle": False}
    run(recipe, few, tmp_path / "ours", model=tmp_path / "model", loader=in_order)

    dataset = recipe.prepare(str(few), tmp_path)["train"]
    read = sb.dataio.dataio.read_audio
    dataset.add_dynamic_item(lambda wav: read(wav), takes="wav", provides="sig")
    dataset.set_output_keys(["id", "sig"])
    options = {"max_iter": 100, "batch_size": 100, "tol": 0.0, "max_no_improvement": 100}
    theirs = kmeans.fetch_kmeans_model(
        8, "k-means++", **options, n_init=1, reassignment_ratio=0.01, random_state=1,
        checkpoint_path=str(tmp_path / "none"),
    )  # fmt: skip

    def layers(wavs: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.stack(model(wavs, output_hidden_states=True).hidden_states)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threads(1):
            for _ in range(2):  # epochs
                loader = make_dataloader(dataset, batch_size=1)
                kmeans.train(theirs, loader, layers, str(tmp_path), 2, 100, "cpu", 10**9)
    finally:
        torch.set_num_threads(before)
    found = np.load(tmp_path / "ours" / "centroids.npy")
    # it hands lists of frames over, of which scikit-learn makes float64
    np.testing.assert_allclose(found, theirs.cluster_centers_, rtol=1e-5, atol=1e-6)

"""The block of `docs/guides/decorator.md` for SpeechBrain's pipelines runs as it is printed."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from places import ROOT
from speechbrain.dataio.dataset import DynamicItemDataset

import featcache

PAGE = ROOT / "docs" / "guides" / "decorator.md"
(BLOCK,) = re.findall(r"```python\n([^>].*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "guide_pipeline.py").write_text(BLOCK)
    yield
    sys.modules.pop("guide_pipeline", None)


def test_the_block_gives_a_data_set_features_that_are_stored(tmp_path: Path) -> None:
    data = {}
    for number in range(4):
        path = tmp_path / f"utt-{number}.wav"
        soundfile.write(path, np.random.default_rng(number).uniform(-0.5, 0.5, 8000), 16000)
        data[path.stem] = {"wav": str(path)}
    pipeline: Any = importlib.import_module("guide_pipeline")
    dataset = DynamicItemDataset(data, [pipeline.fbank], ["id", "feats"])
    computed = [item["feats"] for item in dataset]
    assert computed[0].shape == (51, 80)
    pipeline.fbank.func.publish(complete=True)
    cache = featcache.open("features/train")
    assert sorted(cache) == sorted(data)
    for item, feats in zip(dataset, computed, strict=True):
        assert item["feats"].equal(feats)
        np.testing.assert_array_equal(cache.read(item["id"], cache.features[0]), feats.numpy())

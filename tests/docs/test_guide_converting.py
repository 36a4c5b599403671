"""Figures of `docs/guides/converting.md`, where they are quickly found out."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from places import ROOT
from speechbrain.lobes.features import Fbank

import featcache

PER_DB = np.float32(np.log(10) / 10)  # an energy in dB, times this, is its natural log


@pytest.mark.parametrize(("scale", "low", "high"), [(1, 0.3, 0.4), (PER_DB, 0.2, 0.3)])
def test_lilcom_takes_the_share_of_float32_that_the_table_says(
    tmp_path: Path, scale: float, low: float, high: float
) -> None:
    fbank = Fbank(sample_rate=8000, n_mels=80)
    declared = featcache.FeatureStorageConfig("fbank", backend="lilcom")
    written = 0
    with (
        zipfile.ZipFile(ROOT / "recipes" / "digits" / "corpus.zip") as corpus,
        featcache.CacheWriter(tmp_path, [declared], fingerprint={}) as writer,
    ):
        for name in corpus.namelist()[::36]:
            samples, _ = soundfile.read(io.BytesIO(corpus.read(name)), dtype="float32")
            array = fbank(torch.from_numpy(samples)[None])[0].numpy() * scale
            writer.write(name, {"fbank": array})
            written += array.nbytes
    stored = sum(path.stat().st_size for path in tmp_path.glob("parts/*/*.lca"))
    assert low < stored / written < high

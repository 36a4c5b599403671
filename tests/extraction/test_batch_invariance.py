"""Features that depend on their batch are told when they are stored; the others in silence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.lobes.features import Fbank
from speechbrain.processing.features import InputNormalization

import featcache
from featcache import FeatureStorageConfig, unpad

transformers: Any = pytest.importorskip("transformers")

RATE, SHIFT = 16000, 160
UTTERANCES = 20
Compute = Callable[[PaddedBatch], list[dict[str, Any]]]


def waves() -> list[dict[str, Any]]:
    """Utterances of 0.3 to 1 s, of noise that slowly becomes louder."""
    items = []
    for number in range(UTTERANCES):
        generator = np.random.default_rng(number)
        samples = int(generator.integers(5000, 16000))
        wave = generator.normal(size=samples) * np.linspace(0.2, 1, samples)
        items.append({"id": f"utt-{number}", "sig": torch.tensor(wave, dtype=torch.float32)})
    return items


class Waves(list[dict[str, Any]]):
    """A data set that shows its ids and lengths."""

    def __init__(self) -> None:
        super().__init__(waves())
        self.ids = [item["id"] for item in self]
        self.lengths = [len(item["sig"]) for item in self]


class Provider(featcache.EnvironmentProvider):
    def __init__(self, compute: Compute) -> None:
        self.compute = compute

    def build_env_local(self) -> dict[str, object]:
        return {
            "dataset": Waves(),
            "compute_features": self.compute,
            "loader_kwargs": {"collate_fn": PaddedBatch},
        }


def samples(batch: Any) -> list[int]:
    return [round(float(each) * batch.sig.data.shape[1]) for each in batch.sig.lengths]


def fbank(batch: Any) -> list[dict[str, Any]]:
    frames = [count // SHIFT + 1 for count in samples(batch)]
    return unpad(batch.id, frames, {"x": Fbank(n_mels=23)(batch.sig.data)})


def sentence_norm(batch: Any) -> list[dict[str, Any]]:
    normalised = InputNormalization(norm_type="sentence")(
        Fbank(n_mels=23)(batch.sig.data), batch.sig.lengths
    )
    frames = [count // SHIFT + 1 for count in samples(batch)]
    return unpad(batch.id, frames, {"x": normalised})


def mean_over_padding(batch: Any) -> list[dict[str, Any]]:
    found = Fbank(n_mels=23)(batch.sig.data)
    frames = [count // SHIFT + 1 for count in samples(batch)]
    return unpad(batch.id, frames, {"x": found - found.mean(dim=1, keepdim=True)})


def convolution(batch: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    layers = [torch.nn.Conv1d(1, 16, 400, 160, padding=200), torch.nn.Conv1d(16, 8, 9, padding=4)]
    encoder = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])
    found = encoder(batch.sig.data[:, None]).transpose(1, 2)
    frames = [count // SHIFT + 1 for count in samples(batch)]
    return unpad(batch.id, frames, {"x": found})


def hubert(norm: str, masked: bool) -> Compute:
    torch.manual_seed(0)
    config = transformers.HubertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16,) * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm=norm,
        do_stable_layer_norm=norm == "layer",
    )
    model: Any = transformers.HubertModel(config)
    model.eval()

    def compute(batch: Any) -> list[dict[str, Any]]:
        counts = samples(batch)
        mask = torch.zeros(batch.sig.data.shape, dtype=torch.long)
        for row, count in zip(mask, counts, strict=True):
            row[:count] = 1
        found = model(batch.sig.data, attention_mask=mask if masked else None).last_hidden_state
        frames = model._get_feat_extract_output_lengths(torch.tensor(counts))
        return unpad(batch.id, frames, {"x": found})

    return compute


def normalised_over_the_batch(batch: Any) -> list[dict[str, Any]]:
    wave = batch.sig.data
    wave = (wave - wave.mean()) / wave.std()
    frames = [count // SHIFT + 1 for count in samples(batch)]
    return unpad(batch.id, frames, {"x": Fbank(n_mels=23)(wave)})


def one_at_a_time(batch: Any) -> list[dict[str, Any]]:
    rows = zip(batch.id, batch.sig.data, samples(batch), strict=True)
    return [{"id": id, "x": Fbank(n_mels=23)(row[None, :count])[0]} for id, row, count in rows]


# of the reference, with what of the utterances they touch
CASES = [
    pytest.param(fbank, None, id="fbank"),
    pytest.param(mean_over_padding, "means within", id="mean over padding"),
    pytest.param(convolution, "last frames", id="convolution"),
    pytest.param(hubert("group", False), "mask", id="group norm"),
    pytest.param(hubert("group", True), "mask", id="group norm, mask"),
    pytest.param(hubert("layer", False), "mask", id="layer norm"),
    pytest.param(hubert("layer", True), None, id="layer norm, mask"),
    pytest.param(normalised_over_the_batch, "utterance at a time", id="over the batch"),
    pytest.param(one_at_a_time, None, id="one at a time"),
]


def warned(compute: Compute, path: Path, check: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        featcache.extract(
            Provider(compute),
            path,
            [FeatureStorageConfig("x")],
            batch_size=8,
            check=check,
            progressbar=False,
        )
    return [str(each.message) for each in told if "stored otherwise" in str(each.message)]


@pytest.mark.parametrize(("compute", "cure"), CASES)
def test_features_that_depend_on_their_batch_are_told_with_the_cure(
    compute: Compute, cure: str | None, tmp_path: Path
) -> None:
    told = warned(compute, tmp_path / "cache", "probe")
    if cure is None:
        assert told == []
    else:
        (text,) = told
        assert "depend on the other utterances of their batch" in text
        assert cure in text
        assert "batch_size 1" in text


@pytest.mark.parametrize(("compute", "cure"), CASES)
def test_checking_all_tells_the_same_and_counts_them(
    compute: Compute, cure: str | None, tmp_path: Path
) -> None:
    told = warned(compute, tmp_path / "cache", "all")
    assert len(told) == (0 if cure is None else 1)
    assert all(f"of {UTTERANCES} utterances" in text for text in told)


def test_checking_all_finds_what_touches_a_few_utterances_only(tmp_path: Path) -> None:
    """A length that is rounded to one frame less escapes most samples of four."""
    (text,) = warned(sentence_norm, tmp_path / "cache", "all")
    assert "of 20 utterances" in text

"""Objects of libraries as they really are: a change of them counts, using them changes nothing."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from featcache.format import differences
from featcache.inspect import provenance

WAVES = torch.linspace(-1, 1, 4000).reshape(2, 2000)
FRAMES = torch.linspace(0, 1, 1000).reshape(2, 50, 10)
LENGTHS = torch.ones(2)
TINY_HUBERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}


class Extractor:
    def __init__(self, part: Any) -> None:
        self.hparams, self.modules = SimpleNamespace(part=part), dict[str, Any]()

    def compute_features(self, batch: Any, stage: object) -> Any:
        return self.hparams.part(batch)


class Kind(NamedTuple):
    """A kind of object: made, used, and changed."""

    make: Callable[[Path], Any]
    use: Callable[[Any], object]
    change: Callable[[Any], object]
    named: str  # in the difference


def global_normalization(_: Path) -> Any:
    features = pytest.importorskip("speechbrain.processing.features")
    made = features.InputNormalization()
    made.train()(FRAMES, LENGTHS)
    return made.eval()


def spectrogram(_: Path) -> Any:
    return pytest.importorskip("speechbrain.processing.features").STFT(16000)


def filterbanks(_: Path) -> Any:
    return pytest.importorskip("speechbrain.lobes.features").Fbank(n_mels=20)


def clusters(folder: Path) -> Any:
    cluster, joblib = (pytest.importorskip(name) for name in ("sklearn.cluster", "joblib"))
    frames = np.random.default_rng(0).normal(size=(200, 10)).astype(np.float32)
    made = cluster.MiniBatchKMeans(4, random_state=0, n_init=1).fit(frames)
    joblib.dump(made, folder / "kmeans.pt")
    return joblib.load(folder / "kmeans.pt")


def wrapped_clusters(_: Path) -> Any:
    pytest.importorskip("sklearn")
    kmeans = pytest.importorskip("speechbrain.integrations.audio_tokenizers.kmeans")
    made = kmeans.MiniBatchKMeansSklearn(n_clusters=4, random_state=0, n_init=1)
    made.fit(FRAMES)
    return made.eval()


def saved_hubert(folder: Path) -> str:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    transformers.HubertModel(transformers.HubertConfig(**TINY_HUBERT)).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return str(folder)


def hubert(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.HubertModel.from_pretrained(saved_hubert(folder)).eval()


def wrapped_hubert(folder: Path) -> Any:
    pytest.importorskip("transformers")
    hubert = pytest.importorskip("speechbrain.integrations.huggingface.hubert")
    return hubert.HuBERT(saved_hubert(folder), str(folder / "saved"), output_all_hiddens=True)


def discrete_hubert(folder: Path) -> Any:
    pytest.importorskip("transformers")
    tokens = pytest.importorskip("speechbrain.integrations.audio_tokenizers.discrete_ssl")
    made = object.__new__(tokens.DiscreteSSL)  # its constructor loads all parts from a hub
    torch.nn.Module.__init__(made)
    made.ssl_model, made.kmeans_models = wrapped_hubert(folder), [clusters(folder)]
    made.vocabularies = [each.cluster_centers_.copy() for each in made.kmeans_models]
    made.ssl_layer_ids, made.num_clusters = (1,), (4,)
    return made.eval()


def processor(_: Path) -> Any:
    return pytest.importorskip("transformers").Wav2Vec2FeatureExtractor()


def tokenizer(folder: Path) -> Any:
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABC"]
    (folder / "vocab.json").write_text(json.dumps({each: i for i, each in enumerate(letters)}))
    return pytest.importorskip("transformers").Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))


def fast_tokenizer(_: Path) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    return fast(tokenizer_object=made, unk_token="[UNK]", pad_token="[UNK]")


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 2.0
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.gain * self.linear(values)
        return scaled


def scripted(folder: Path) -> Any:
    torch.manual_seed(0)
    jit: Any = torch.jit
    jit.script(Scaled()).save(str(folder / "scripted.pt"))
    return jit.load(str(folder / "scripted.pt"))


def packed(_: Path) -> Any:
    torch.manual_seed(0)
    quantization: Any = torch.ao.quantization
    return quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def add_one(array: Any) -> None:
    array += 1


def centers(kmeans: Any) -> None:
    add_one(kmeans.cluster_centers_)


KINDS = {
    "a global normalisation": Kind(
        global_normalization,
        lambda part: part(FRAMES + 1, LENGTHS),
        lambda part: part.train()(FRAMES + 1, LENGTHS),
        "glob_mean",
    ),
    "a spectrogram": Kind(
        spectrogram,
        lambda part: part(WAVES),
        lambda part: setattr(part, "window", part.window * 2),
        "window",
    ),
    "filterbanks": Kind(
        filterbanks,
        lambda part: part(WAVES),
        lambda part: setattr(part.compute_fbanks, "amin", 1e-3),
        "amin",
    ),
    "clusters of a file": Kind(
        clusters, lambda part: part.predict(FRAMES[0].numpy()), centers, "cluster_centers_"
    ),
    "clusters in a module": Kind(
        wrapped_clusters, lambda part: part(FRAMES), lambda part: centers(part.kmeans), "kmeans"
    ),
    "an encoder": Kind(
        hubert,
        lambda part: part(WAVES, output_hidden_states=True),
        lambda part: setattr(part.config, "hidden_act", "relu"),
        "hidden_act",
    ),
    "an encoder in a module": Kind(
        wrapped_hubert,
        lambda part: part(WAVES),
        lambda part: setattr(part, "output_norm", True),
        "output_norm",
    ),
    "discrete units": Kind(
        discrete_hubert,
        lambda part: part.ssl_model(WAVES),
        lambda part: centers(part.kmeans_models[0]),
        "kmeans_models",
    ),
    "a processor": Kind(
        processor,
        lambda part: part(WAVES[0].numpy(), sampling_rate=16000),
        lambda part: setattr(part, "do_normalize", False),
        "do_normalize",
    ),
    "a tokenizer": Kind(
        tokenizer, lambda part: part("ABC"), lambda part: part.add_tokens(["AB"]), "added_tokens"
    ),
    "a fast tokenizer": Kind(
        fast_tokenizer,
        lambda part: part(["a b", "a"], padding=True),
        lambda part: part.add_tokens(["c"]),
        "added_tokens",
    ),
    "a scripted module": Kind(
        scripted, lambda part: part(torch.ones(2)), lambda part: setattr(part, "gain", 3.0), "gain"
    ),
    "scripted weights": Kind(
        scripted,
        lambda part: part(torch.ones(2)),
        lambda part: add_one(part.linear.weight.data),
        "weights",
    ),
    "a masked array": Kind(
        lambda _: np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False]),
        lambda part: part.mean(),
        lambda part: setattr(part, "mask", [True, False, False]),
        "part",
    ),
    "packed weights": Kind(
        packed,
        lambda part: part(torch.ones(1, 2)),
        lambda part: part[0].set_weight_bias(part[0].weight(), None),
        "saved",
    ),
}


def fingerprint(part: Any) -> dict[str, Any]:
    return provenance(Extractor(part).compute_features).fingerprint({})


@pytest.mark.filterwarnings("ignore")  # that parts of these libraries are deprecated
@pytest.mark.parametrize("kind", KINDS)
def test_objects_of_libraries_count_by_what_they_compute_with(kind: str, tmp_path: Path) -> None:
    make, use, change, named = KINDS[kind]
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    part = make(tmp_path / "one")
    before = fingerprint(part)
    json.dumps(before)
    with torch.no_grad():
        use(part)
    assert differences(before, fingerprint(part)) == []
    other = make(tmp_path / "other")  # another process, another place
    assert differences(before, fingerprint(other)) == []
    with torch.no_grad():
        change(other)
    assert any(named in each.field for each in differences(before, fingerprint(other)))


def test_what_nothing_describes_is_told_once_with_the_key_to_give(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with sqlite3.connect(":memory:") as words, caplog.at_level(logging.WARNING, "featcache"):
        found = provenance(Extractor(words).compute_features)
        assert found.opaque == ("part (sqlite3.Connection)",)
        found.fingerprint({"part": "words of May"})
        assert not caplog.records
        found.fingerprint({})
        found.fingerprint({})
    words.close()
    (record,) = caplog.records
    assert "part (sqlite3.Connection)" in record.message
    assert "fingerprint={'part': " in record.message


class Deep:
    """An object that computes with much, some of it deep inside."""

    def __init__(self, slope: float) -> None:
        self.tables: dict[str, dict[str, object]] = {
            f"table {number}": {"values": [*range(30)]} for number in range(12)
        }
        self.tables["table 7"]["inner"] = {"slope": slope}

    def of(self, id: str) -> object:
        return self.tables[id]


def of_closure(deep: Deep) -> Callable[[str], object]:
    return lambda id: deep.of(id)


def test_a_change_within_a_large_object_is_named_by_its_place() -> None:
    was, now = (provenance(of_closure(Deep(slope))).fingerprint({}) for slope in (0.1, 0.3))
    (difference,) = differences(was, now)
    assert difference.path[-4:] == ("deep", "tables", "table 7", "inner")
    assert len(json.dumps(was)) < 10_000

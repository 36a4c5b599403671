"""`recipes/librispeech`: caches of a tree of recordings and of cuts, on workers; k-means tokens; an
SSL encoder.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from places import ROOT

import featcache
from featcache.errors import ConfigError

pytest.importorskip("sklearn")
threadpoolctl = pytest.importorskip("threadpoolctl")
lhotse = pytest.importorskip("lhotse")

RECIPE = ROOT / "recipes" / "librispeech"
SETTINGS = str(RECIPE / "settings.yaml")
TOKENS = "{clusters: 8, frames: 400, seed: 1}"
SPLITS = "{train: train-tiny, valid: dev-tiny, test: null}"
SIZES = {"train": 12, "valid": 4}
RATE_HZ = 16000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree like LibriSpeech's: 12 utterances of 3 speakers for training, 4 of another for the
    rest.
    """
    root, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    for split, speakers in {"train-tiny": (19, 26, 27), "dev-tiny": (84,)}.items():
        for speaker in speakers:
            chapter = root / split / str(speaker) / "198"
            chapter.mkdir(parents=True)
            ids = [f"{speaker}-198-{number:04}" for number in range(4)]
            for id in ids:
                samples = 0.1 * rng.standard_normal(rng.integers(RATE_HZ // 2, RATE_HZ))
                soundfile.write(chapter / f"{id}.flac", samples, RATE_HZ)
            (chapter / f"{speaker}-198.trans.txt").write_text(
                "".join(f"{id} THIS IS {id}\n" for id in ids)
            )
    return root


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep to one thread: beside a busy program two take a hundred times as long."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpoolctl.threadpool_limits(1):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def extract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("extract", RECIPE / "extract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def options(corpus: Path, output: Path, **others: str) -> list[str]:
    given = {
        "data_folder": corpus,
        "output_folder": output,
        "splits": SPLITS,
        "tokens": TOKENS,
        **others,
    }
    return [
        SETTINGS,
        *(text for name, value in given.items() for text in (f"--{name}", str(value))),
    ]


def arrays(output: Path, split: str) -> dict[str, dict[str, Any]]:
    caches = [
        featcache.open(output / kind / split, verify="arrays") for kind in ("features", "tokens")
    ]
    return {
        id: {name: cache.read(id, name) for cache in caches for name in cache.features}
        for id in caches[0]
    }


def test_two_workers_fill_the_same_caches_as_one_process(
    corpus: Path, tmp_path: Path, extract: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    one_split = {"splits": "{train: train-tiny, valid: null, test: null}"}
    command = [
        sys.executable,
        str(RECIPE / "extract.py"),
        *options(corpus, tmp_path / "two", **one_split),
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    assert "dashboard of 2 local workers" in run.stderr
    extract.main(options(corpus, tmp_path / "one", parallel="null", **one_split))
    assert capsys.readouterr().out == run.stdout
    two, one = arrays(tmp_path / "two", "train"), arrays(tmp_path / "one", "train")
    assert list(two) == list(one)
    assert len(two) == 12
    for id, features in two.items():
        assert features["fbank"].shape == (len(features["tokens"]), 80)
        assert (features["fbank"].dtype, features["tokens"].dtype) == (np.float16, np.int16)
        np.testing.assert_array_equal(features["fbank"], one[id]["fbank"])
        np.testing.assert_array_equal(features["tokens"], one[id]["tokens"])


def test_a_second_run_computes_nothing(
    corpus: Path, tmp_path: Path, extract: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(corpus, tmp_path, parallel="null")
    extract.main(given)
    first = capsys.readouterr()
    assert "caching train" in first.err
    frames = {
        split: sum(len(found["tokens"]) for found in arrays(tmp_path, split).values())
        for split in SIZES
    }
    lines = [
        f"{split}: {SIZES[split]} utterances, {frames[split]} frames of fbank, tokens"
        for split in SIZES
    ]
    assert first.out.splitlines() == lines
    extract.main(given)
    second = capsys.readouterr()
    assert "caching" not in second.err
    assert second.out == first.out


def test_cuts_are_made_with_texts_and_speakers(
    corpus: Path, tmp_path: Path, extract: ModuleType
) -> None:
    cuts = lhotse.CutSet.from_file(
        extract.prepare(corpus / "train-tiny", tmp_path / "train.jsonl.gz", skip=False)
    )
    lhotse.validate(cuts)
    found = {cut.id: (cut.supervisions[0].text, cut.supervisions[0].speaker) for cut in cuts}
    assert len(found) == 12
    assert found["26-198-0003"] == ("THIS IS 26-198-0003", "26")


def test_cuts_of_any_corpus_with_its_own_clusters(
    corpus: Path, tmp_path: Path, extract: ModuleType
) -> None:
    recordings = sorted((corpus / "train-tiny").rglob("*.flac"))
    cuts = lhotse.CutSet.from_cuts(lhotse.Recording.from_file(path).to_cut() for path in recordings)
    halves = cuts.cut_into_windows(0.3).to_eager()
    halves.to_file(tmp_path / "halves.jsonl.gz")
    splits = "{train: halves.jsonl.gz, valid: null, test: null}"
    given = options(tmp_path, tmp_path / "out", splits=splits, parallel="null", fbank="{mels: 23}")
    extract.main(given)
    found = arrays(tmp_path / "out", "train")
    long_enough = [cut.id for cut in halves if cut.num_samples >= RATE_HZ // 40]  # for a frame
    assert sorted(found) == sorted(long_enough)
    assert len(found) < len(halves)
    assert {features["fbank"].shape[1] for features in found.values()} == {23}
    centroids = np.load(tmp_path / "out" / "centroids.npy")
    for features in found.values():
        distances = np.linalg.norm(
            features["fbank"].astype(np.float32)[:, None] - centroids, axis=2
        )
        named = distances[np.arange(len(distances)), features["tokens"]]
        # one of two as near, rounded
        np.testing.assert_allclose(named, distances.min(axis=1), rtol=1e-3)
    with pytest.raises(SystemExit, match=r"holds 8 clusters, not 5"):
        extract.main([*given, "--tokens", "{clusters: 5, frames: 400, seed: 1}"])


def test_tokens_may_be_left_out(
    corpus: Path, tmp_path: Path, extract: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    extract.main(options(corpus, tmp_path, parallel="null", tokens="null"))
    assert capsys.readouterr().out.splitlines()[1].endswith(" frames of fbank")
    assert not (tmp_path / "tokens").exists()


def test_other_recordings_are_refused(corpus: Path, tmp_path: Path, extract: ModuleType) -> None:
    extract.main(options(corpus, tmp_path, parallel="null", tokens="null"))
    splits = "{train: dev-tiny, valid: dev-tiny}"
    with pytest.raises(featcache.FeatcacheError, match="recordings"):
        extract.main(options(corpus, tmp_path, parallel="null", splits=splits))


def test_settings_that_cannot_work_are_refused(
    corpus: Path, tmp_path: Path, extract: ModuleType
) -> None:
    for others, message in [
        ({"feature": "mfcc"}, "feature is 'fbank' or 'ssl', not 'mfcc'"),
        (
            {"splits": "{test: dev-tiny, train: nowhere}"},
            r"no <speaker>/<chapter>/\*.flac in '.*nowhere'",
        ),
        ({"tokens": "{clusters: 4000, frames: 400, seed: 1}"}, "frames cannot make 4000 clusters"),
    ]:
        with pytest.raises(SystemExit, match=message):
            extract.main(options(corpus, tmp_path, **{"parallel": "null", **others}))
    with pytest.raises(SystemExit, match="tokens are fitted on the split 'train'"):
        extract.main(options(corpus, tmp_path, splits="{train: null, valid: dev-tiny}"))
    with pytest.raises(SystemExit, match="'--feature' has none"):
        extract.main([SETTINGS, "--feature"])


def test_recordings_that_cannot_be_opened_are_named_and_left_out_or_end_the_run(
    corpus: Path, tmp_path: Path, extract: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    split, cuts = tmp_path / "tiny", tmp_path / "tiny.jsonl.gz"
    shutil.copytree(corpus / "dev-tiny", split)
    bad = split / "84" / "198" / "84-198-0002.flac"
    bad.write_text("no sound")
    with pytest.raises(
        SystemExit,
        match=rf"1 of 4 recordings cannot be read:\n{re.escape(str(bad))}\n.*on_error skip",
    ):
        extract.prepare(split, cuts, skip=False)
    assert not cuts.exists()
    assert extract.prepare(split, cuts, skip=True) == cuts
    assert f"1 of 4 recordings cannot be read:\n{bad}\nthey are left out" in capsys.readouterr().err
    assert sorted(cut.id for cut in lhotse.CutSet.from_file(cuts)) == [
        f"84-198-000{number}" for number in (0, 1, 3)
    ]


def test_layers_of_an_ssl_encoder(corpus: Path, tmp_path: Path, extract: ModuleType) -> None:
    # its annotations fit no strict check
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.HubertConfig(
        **{
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        },
        **{
            "conv_dim": (8, 8),
            "conv_stride": (20, 16),
            "conv_kernel": (20, 16),
            "num_feat_extract_layers": 2,
        },
        **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2},
    )
    model = transformers.HubertModel(config).eval()
    model.save_pretrained(tmp_path / "hubert")
    normalise = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    normalise.save_pretrained(tmp_path / "hubert")
    layers = "{ssl: encoder.layers.1, low: encoder.layers.0}"
    ssl = f"{{model: {tmp_path / 'hubert'}, layers: {layers}}}"
    given = options(corpus, tmp_path, feature="ssl", ssl=ssl, parallel="null")
    extract.main(given)
    found = arrays(tmp_path, "valid")
    assert len(found) == 4
    for id, features in found.items():
        samples, _ = soundfile.read(
            corpus / "dev-tiny" / "84" / "198" / f"{id}.flac", dtype="float32"
        )
        inputs = normalise(samples, sampling_rate=RATE_HZ, return_tensors="pt")
        with torch.no_grad():
            _, low, expected, _ = model(**inputs, output_hidden_states=True).hidden_states
        np.testing.assert_allclose(features["ssl"], expected[0].numpy(), atol=2e-3)
        np.testing.assert_allclose(features["low"], low[0].numpy(), atol=2e-3)
        assert len(features["tokens"]) == expected.shape[1]
    with pytest.raises(ConfigError, match=r"no module 'encoder\.layers\.4'"):
        extract.Ssl(str(tmp_path / "hubert"), {"ssl": "encoder.layers.4"})

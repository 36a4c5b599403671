"""The data of the recipes: short synthesised recordings, lists of them, weights and clusters."""

from __future__ import annotations

import csv
import json
import runpy
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]
import numpy as np
import soundfile
import torch
import transformers
from numpy.typing import NDArray
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler
from transformers import HubertConfig, HubertModel, Wav2Vec2FeatureExtractor

RECIPES = Path(__file__).with_name("recipes")
RATE_HZ = 8000
SPEAKERS = ("ada", "ben", "cleo", "dan")
TEXTS = ("be", "cat", "dog", "eve", "fig", "gale", "hen")
IDS = [f"u{number:02}" for number in range(20)]
FROM_LONG = {"u18": (400, 3600), "u19": (4000, 8000)}  # parts of one recording


def make_corpus(folder: Path) -> None:
    """Write everything into a new folder."""
    (folder / "wavs").mkdir(parents=True)
    rng = np.random.default_rng(5)
    rows = []
    for number, id in enumerate(IDS):
        if id in FROM_LONG:
            name, (start, stop) = "wavs/long.wav", FROM_LONG[id]
        else:
            stop, start, name = int(rng.integers(2000, 4400)), 0, f"wavs/{id}.wav"
            write_wav(folder / name, voice(stop, 90.0 + 8 * number, rng))
        row = {"wav": name, "start": start, "stop": stop, "speaker": SPEAKERS[number % 4]}
        rows.append({"id": id, **row, "text": TEXTS[number % 7], "note": f"take {number}"})
    write_wav(folder / "wavs" / "long.wav", voice(8800, 130.0, rng))
    manifest = {
        row["id"]: {**row, "wav": f"{{data_root}}/{row['wav']}"} | {"id": None} for row in rows
    }
    for entry in manifest.values():
        del entry["id"]
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    with (folder / "recordings.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    levels = {speaker: 0.5 * number for number, speaker in enumerate(SPEAKERS)}
    (folder / "speakers.json").write_text(json.dumps(levels, indent=1))
    _make_models(folder, rng)


def voice(samples: int, pitch_hz: float, rng: np.random.Generator) -> NDArray[np.float32]:
    """Synthesise something voiced: harmonics that come and go, and noise."""
    times_s = np.arange(samples) / RATE_HZ
    wav = 0.02 * rng.normal(size=samples)
    for harmonic in range(1, 12):
        rate_hz, phase = rng.uniform(1, 9), rng.uniform(0, 6)
        loudness = 0.5 + 0.5 * np.sin(2 * np.pi * rate_hz * times_s + phase)
        wav += loudness / harmonic * np.sin(2 * np.pi * harmonic * pitch_hz * times_s)
    scaled: NDArray[np.float32] = (0.3 * wav / np.abs(wav).max()).astype(np.float32)
    return scaled


def write_wav(path: Path, wav: NDArray[np.float32]) -> None:
    """Write 16-bit samples."""
    soundfile.write(path, wav, RATE_HZ, subtype="PCM_16")


def _make_models(folder: Path, rng: np.random.Generator) -> None:
    torch.manual_seed(3)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    encoder = runpy.run_path(str(RECIPES / "brain" / "models.py"))["Encoder"](16)
    for block in encoder.blocks:
        block.norm.running_mean.uniform_(-0.2, 0.2)
        block.norm.running_var.uniform_(0.02, 0.1)
    torch.save(encoder.state_dict(), folder / "encoder.ckpt")
    np.save(folder / "codebook.npy", rng.normal(0.3, 0.4, (24, 16)).astype(np.float32))
    frames = rng.normal(1.0, 1.2, (600, 20)).astype(np.float32)
    kmeans = MiniBatchKMeans(16, random_state=0, n_init=1, batch_size=256).fit(frames)
    joblib.dump(kmeans, folder / "kmeans.joblib")

    cepstra = rng.normal(0, 20, (600, 13))
    joblib.dump(StandardScaler().fit(cepstra), folder / "scaler.joblib")
    hidden = rng.normal(0, 1, (600, 16)).astype(np.float32)
    pca = PCA(4, random_state=0).fit(hidden)
    joblib.dump(pca, folder / "pca.joblib")
    clusters = KMeans(12, random_state=0, n_init=1).fit(pca.transform(hidden))
    joblib.dump(clusters, folder / "clusters.joblib")
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (10, 8), "conv_kernel": (20, 8)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = HubertConfig.from_dict({"num_hidden_layers": 3, **shape, **convolutions, **positions})
    HubertModel(config).save_pretrained(folder / "hubert")
    extractor: Any = Wav2Vec2FeatureExtractor  # untyped
    extractor(do_normalize=True).save_pretrained(folder / "hubert")

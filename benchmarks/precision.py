"""What each dtype and codec loses, takes and costs: log-mel of speech, and an encoder's layer.

Speech is a folder of WAV files named `<digit>_<speaker>_<index>.wav`, as the Free Spoken Digit
Dataset has them: those of a speaker are joined to utterances of 5 to 20 words, or taken one by one.
The encoder is a HuBERT base of random weights, which tells nothing about trained ones. Every way
reads the same batches of 16 utterances into float32 tensors by `FeatureLoader`, in turns, all in
memory, torch on one thread, in the time of the processor.

    python benchmarks/precision.py SPEECH [--utterances 150] [--rounds 15] [--words]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import soundfile
import torch
import torchaudio
from machine import describe
from numpy.typing import NDArray

import featcache
from featcache import FeatureLoader, FeatureStorageConfig

Floats = NDArray[np.float32]
RATE_HZ = 16_000
LAYER = 6
BATCH = 16
WAYS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "backend": "zarr", "codec": "zstd"},
    {"dtype": "float16", "backend": "zarr", "codec": "blosc"},
    {"dtype": "float16", "backend": "zarr", "codec": "blosc", "options": {"cname": "zstd"}},
    {"dtype": "float16", "backend": "hdf5", "codec": "gzip"},
    {"dtype": "float32", "backend": "lilcom"},
    {"dtype": "float32", "codec": "int8"},
]


@click.command()
@click.argument("speech", type=click.Path(exists=True, path_type=Path))
@click.option("--utterances", default=150, show_default=True)
@click.option("--rounds", default=15, show_default=True)
@click.option("--words", is_flag=True, help="Words one by one, of some 0.4 s.")
def main(speech: Path, utterances: int, rounds: int, words: bool) -> None:
    """Print a table for each kind of features."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as name:
        root = Path(name)
        print(describe(root, "numpy", "torch", "numcodecs", "lilcom"))
        waves = [*islice(utterances_of(speech, words), utterances)]
        seconds = sum(map(len, waves)) / RATE_HZ
        print(f"{len(waves)} utterances, {seconds / len(waves):.1f} s on average")
        for kind, arrays in (("log-mel", log_mel(waves)), ("encoder", encoded(waves))):
            table(root / kind, kind, arrays, rounds)


def utterances_of(speech: Path, words: bool) -> Iterator[torch.Tensor]:
    """Iterate over samples at 16 kHz."""
    random = np.random.default_rng(0)
    by_speaker: dict[str, list[Path]] = {}
    for path in sorted(speech.glob("*.wav")):
        by_speaker.setdefault(path.stem.split("_")[1], []).append(path)
    while True:
        files = by_speaker[str(random.choice([*by_speaker]))]
        count = 1 if words else int(random.integers(5, 21))
        drawn = [files[int(place)] for place in random.integers(0, len(files), count)]
        read = [soundfile.read(path, dtype="float32") for path in drawn]
        wave = torch.from_numpy(np.concatenate([samples for samples, _ in read]))
        yield torchaudio.functional.resample(wave, read[0][1], RATE_HZ)


def log_mel(waves: list[torch.Tensor]) -> list[Floats]:
    """Compute 80 bands up to 4 kHz every 10 ms, natural log of power."""
    mel = torchaudio.transforms.MelSpectrogram(
        RATE_HZ, 1024, win_length=400, hop_length=160, n_mels=80, f_max=4000
    )
    return [torch.log(mel(wave).T + 1e-6).contiguous().numpy() for wave in waves]


@torch.no_grad()
def encoded(waves: list[torch.Tensor]) -> list[Floats]:
    """Compute a layer of an encoder of random weights, 768 numbers every 20 ms."""
    import transformers

    hubert: Any = transformers.HubertModel
    model = hubert(transformers.HubertConfig(num_hidden_layers=LAYER)).eval()
    return [model(wave[None]).last_hidden_state[0].numpy() for wave in waves]


def table(root: Path, kind: str, arrays: list[Floats], rounds: int) -> None:
    """Print a row for each way: bytes, losses, speed."""
    ids = [f"utt-{number:05d}" for number in range(len(arrays))]
    told, caches = [], []
    for number, way in enumerate(WAYS):
        path = root / str(number)
        with featcache.CacheWriter(path, [FeatureStorageConfig("x", **way)]) as writer:
            for id, array in zip(ids, arrays, strict=True):
                writer.write(id, {"x": array})
        caches.append(featcache.open(path))
        nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        told.append((nbytes, *losses(caches[-1], ids, arrays)))
    gigabytes = sum(array.size for array in arrays) * 4 / 1e9
    frames = sum(map(len, arrays))
    print(f"\n{kind}: {frames:,} frames of {arrays[0].shape[1]}, {gigabytes:.3f} GB in float32")
    times = measured(caches, rounds)
    print(
        f"{'':32}{'of float32':>11}{'largest':>9}{'rms':>9}{'of spread':>10}{'cosine':>10}"
        f"{'GB/s':>7}{'x float16':>10}"
    )
    for way, (nbytes, largest, rms, relative, cosine), took in zip(WAYS, told, times, strict=True):
        options = way.get("options", {})
        name = " ".join([way.get("backend", "memmap"), way.get("codec", ""), way["dtype"]])
        name = " ".join([*name.split(), *map(str, options.values())])
        ratio = statistics.median(a / b for a, b in zip(times[1], took, strict=True))
        print(
            f"{name:32}{nbytes / told[0][0]:11.3f}{largest:9.4f}{rms:9.5f}{relative:10.2%}"
            f"{cosine:10.6f}{gigabytes / statistics.median(took):7.2f}{ratio:10.2f}"
        )


def losses(
    cache: featcache.Cache, ids: list[str], arrays: list[Floats]
) -> tuple[float, float, float, float]:
    """Return the largest error, the rms one, its share of the spread, and the least cosine.

    The spread is the median over dimensions of their standard deviation, as is the rms error for
    the share; the cosine is that of an utterance.
    """
    largest, cosine, squares = 0.0, 1.0, np.zeros(arrays[0].shape[1])
    for id, array in zip(ids, arrays, strict=True):
        exact, read = array.astype(np.float64), cache.read(id, "x").astype(np.float64)
        apart = read - exact
        largest = max(largest, float(np.abs(apart).max()))
        squares += (apart**2).sum(axis=0)
        cosine = min(
            cosine, float((exact * read).sum() / np.sqrt((exact**2).sum() * (read**2).sum()))
        )
    rms = np.sqrt(squares / sum(map(len, arrays)))
    spread = np.concatenate(arrays).std(axis=0, dtype=np.float64)
    relative = float(np.median(rms / spread))
    return largest, float(np.sqrt((rms**2).mean())), relative, cosine


def measured(caches: list[featcache.Cache], rounds: int) -> list[list[float]]:
    """Return the seconds of the processor that each cache takes to be read, of each round."""
    loaders = [FeatureLoader(cache, batch_size=BATCH, dtypes={"x": "float32"}) for cache in caches]
    times: list[list[float]] = [[] for _ in caches]
    for number in range(rounds + 1):  # the first one is no part of it
        order = range(len(caches)) if number % 2 else reversed(range(len(caches)))
        for place in order:
            begin = time.process_time()
            for _ in loaders[place]:
                pass
            times[place].append(time.process_time() - begin)
    return [taken[1:] for taken in times]


if __name__ == "__main__":
    main()

"""Stamps of utterances: their cost while fbank is computed, and the search for one changed file.

    python benchmarks/stamps.py            both of these:
    python benchmarks/stamps.py cost       an extraction of SpeechBrain's fbank from WAV files,
                                           with stamps and without, in turns
    python benchmarks/stamps.py search     one of 100,000 files is written anew: the call that names
                                           it, the call that computes it again, the call after

The least of several rounds counts, so that a busy machine matters less.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import numpy as np
import soundfile
import speechbrain as sb
import torch
from machine import describe
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.lobes.features import Fbank

import featcache
from featcache.extraction import stamping
from featcache.extraction.computation import DatasetBatches

RATE_HZ = 16000
MELS = 80


class Filterbanks(featcache.FeatureCacheMixin, sb.Brain):  # type: ignore[misc]
    """Computes log-mel energies."""

    def compute_features(self, batch: Any, stage: Any) -> list[dict[str, Any]]:
        sounds = batch.sig.data
        return featcache.unpad(
            batch.id, batch.samples // 160 + 1, {"fbank": self.modules.fbank(sounds)}
        )


def cost(folder: Path, utterances: int, rounds: int) -> None:
    """Extract with stamps and without."""
    random = np.random.default_rng(0)
    lengths = (random.uniform(2, 16, utterances) * RATE_HZ).astype(int)
    listed = {}
    for number, samples in enumerate(lengths):
        path = folder / f"{number}.wav"
        soundfile.write(path, random.uniform(-0.5, 0.5, samples), RATE_HZ, subtype="PCM_16")
        listed[f"utt-{number}"] = {"wav": str(path), "samples": int(samples), "words": "some words"}
    items = [{"func": sb.dataio.dataio.read_audio, "takes": ["wav"], "provides": "sig"}]
    dataset = DynamicItemDataset(listed, items, ["id", "sig", "samples"])
    print(f"{utterances} utterances, {lengths.mean() / RATE_HZ:.1f} s of audio each on average")
    torch.set_num_threads(1)
    logging.disable()
    runs: dict[bool, list[Spent]] = {True: [], False: []}
    extract_fbank(dataset, folder / "warm-up", stamped=True)
    for number in range(rounds):
        for stamped in (True, False):
            root = folder / f"{number}-{stamped}"
            runs[stamped].append(extract_fbank(dataset, root, stamped=stamped))
    stamps_s = min(each.in_stamps for each in runs[True])
    with_stamps, without = (min(each.seconds for each in runs[kind]) for kind in (True, False))
    print(
        f"least of {rounds}: {with_stamps:.3f} s with stamps, {without:.3f} s without; "
        f"in stamps {stamps_s:.3f} s, {stamps_s / utterances * 1e6:.0f} us an utterance, "
        f"{stamps_s / without:.1%}"
    )


class Spent(NamedTuple):
    """Seconds of an extraction."""

    seconds: float
    in_stamps: float


def extract_fbank(dataset: Any, root: Path, *, stamped: bool) -> Spent:
    """Extract, and say what it took."""
    storage = featcache.FeatureStorage(root, [featcache.FeatureStorageConfig("fbank")])
    brain = Filterbanks(
        {"fbank": Fbank(n_mels=MELS)},
        hparams={"storage": storage},
        run_opts={"device": "cpu", "noprogressbar": True},
    )
    make, times = DatasetBatches.__init__, [0.0]

    def without(batches: DatasetBatches, *arguments: Any) -> None:
        make(batches, *arguments[:4])  # `mentioned` is the last one

    def timed(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                times.append(time.perf_counter() - began)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (stamping, "input_stamp"),
            (stamping.BatchStamps, "begin"),
            (stamping.BatchStamps, "end"),
        ):
            replacement = timed(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, replacement))
        if not stamped:
            stack.enter_context(mock.patch.object(DatasetBatches, "__init__", without))
        began = time.perf_counter()
        brain.cache_features(dataset, loader_kwargs={"batch_size": 8})
        return Spent(time.perf_counter() - began, sum(times))


class Paths(featcache.EnvironmentProvider):
    """Files whose first byte is all that there is to compute."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.ids = [Path(path).stem for path in paths]
        self.items = [{"id": id, "wav": path} for id, path in zip(self.ids, paths, strict=True)]

    def build_env_local(self) -> dict[str, object]:
        return {"dataset": self.items, "ids": self.ids, "compute_features": self.compute}

    def compute(self, items: list[dict[str, str]]) -> list[dict[str, object]]:
        arrays = (np.full((1, 1), Path(item["wav"]).read_bytes()[0], np.float32) for item in items)
        return [{"id": item["id"], "x": array} for item, array in zip(items, arrays, strict=True)]


def search(folder: Path, utterances: int) -> None:
    """Change one file, and look for it."""
    paths = [
        str(folder / f"{number % 1000:03}" / f"utt-{number}.wav") for number in range(utterances)
    ]
    for path in paths:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(b"x" * 100)
    run = partial(timed, paths, folder / "cache")
    print(f"{utterances:,} files; computed in {run()}")
    print(f"nothing changed: {run()}")
    changed = utterances // 3
    Path(paths[changed]).write_bytes(b"y" * 100)
    print(f"one changed: {run()}")
    print(f"computed again: {run(on_changed='recompute')}")
    cache = featcache.open(folder / "cache")
    assert cache.read(f"utt-{changed}", "x").item() == ord("y")
    print(f"nothing changed: {run()}")
    os.utime(paths[0])
    print(f"one touched: {run()}")


def timed(paths: Sequence[str], path: Path, **settings: Any) -> str:
    """Run an extraction; returns how long it took, and what it ended with."""
    provider = Paths(paths)
    features = [featcache.FeatureStorageConfig("x")]
    began = time.perf_counter()
    try:
        rows = len(
            featcache.extract(
                provider, path, features, batch_size=64, progressbar=False, **settings
            )
        )
        end = f"{rows:,} utterances stored"
    except featcache.errors.StaleCacheError as error:
        end = str(error)
    return f"{time.perf_counter() - began:.1f} s: {end}"


@click.command()
@click.argument("what", type=click.Choice(["all", "cost", "search"]), default="all")
@click.option("--rounds", default=5, show_default=True, help="Of `cost`.")
@click.option("--recordings", default=200, show_default=True, help="Of `cost`.")
@click.option("--files", default=100_000, show_default=True, help="Of `search`.")
def main(what: str, rounds: int, recordings: int, files: int) -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as directory:
        print(describe(Path(directory), "numpy", "torch", "speechbrain", "xxhash"))
        for name, measure in (
            ("cost", partial(cost, utterances=recordings, rounds=rounds)),
            ("search", partial(search, utterances=files)),
        ):
            folder = Path(directory) / name
            folder.mkdir()
            if what in ("all", name):
                measure(folder)


if __name__ == "__main__":
    main()

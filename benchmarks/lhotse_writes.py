"""`cuts.compute_and_store_features` of lhotse into a cache, and into lhotse's `NumpyHdf5Writer`.

    python benchmarks/lhotse_writes.py [--utterances 600] [--rounds 7] [--directory DIR]

Recordings of 2 to 15 s in WAV files, lhotse's `Fbank`; all at once and in batches. The two take
turns, in the time of the processor, threads included; the wall clock stands beside it.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TQDM_DISABLE"] = "1"  # lhotse shows a bar of each batch job, before it is imported

import click
import lhotse
import numpy as np
import soundfile
import torch
from machine import describe

from featcache.interop.lhotse import FeatcacheWriter

RATE_HZ = 16_000
WRITERS = {"featcache": FeatcacheWriter, "numpy_hdf5": lhotse.NumpyHdf5Writer}


@click.command()
@click.option("--utterances", default=600, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--directory", type=click.Path(path_type=Path), help="On a real disk.")
def main(utterances: int, rounds: int, directory: Path | None) -> None:
    """Print the time of each, and the median of their ratios."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="featcache-bench-", dir=directory) as name:
        folder = Path(name)
        print(describe(folder, "lhotse", "h5py"))
        cuts, extractor = recorded(folder, utterances), lhotse.Fbank()
        for what, store in (("one by one", one_by_one), ("in batches", in_batches)):
            compare(what, partial(store, cuts, extractor, folder), rounds)


def recorded(folder: Path, utterances: int) -> Any:
    """Return cuts of WAV files of noise."""
    random = np.random.default_rng(0)
    for number in range(utterances):
        samples = random.normal(0, 0.1, int(random.integers(200, 1500)) * RATE_HZ // 100)
        soundfile.write(folder / f"u{number}.wav", samples, RATE_HZ)
    recordings = lhotse.RecordingSet.from_dir(folder, "*.wav")
    return lhotse.CutSet.from_manifests(recordings=recordings).to_eager()


def one_by_one(cuts: Any, extractor: Any, folder: Path, writer: Any) -> Any:
    return cuts.compute_and_store_features(
        extractor, folder / "stored", storage_type=writer, progress_bar=False
    )


def in_batches(cuts: Any, extractor: Any, folder: Path, writer: Any) -> Any:
    return cuts.compute_and_store_features_batch(
        extractor,
        folder / "stored",
        folder / "stored.jsonl",
        batch_duration=60.0,
        num_workers=0,
        storage_type=writer,
        overwrite=True,
    )


def compare(what: str, store: Callable[[Any], Any], rounds: int) -> None:
    """Store all cuts in turns, in another order each round; the first round is no part of it."""
    processor = dict[str, list[float]]((name, []) for name in WRITERS)
    wall = dict[str, list[float]]((name, []) for name in WRITERS)
    for number in range(rounds + 1):
        for name in [*WRITERS][:: 1 if number % 2 else -1]:
            begin, clock = time.process_time(), time.perf_counter()
            stored = store(WRITERS[name])
            processor[name].append(time.process_time() - begin)
            wall[name].append(time.perf_counter() - clock)
            (path,) = {cut.features.storage_path for cut in stored}
            shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()
    for kind, times in (("processor", processor), ("wall", wall)):
        pairs = zip(times["featcache"][1:], times["numpy_hdf5"][1:], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        took = {name: statistics.median(each[1:]) for name, each in times.items()}
        told = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took.items())
        print(f"{what:11} {kind:10} {told}: {ratio:.3f} of numpy_hdf5")


if __name__ == "__main__":
    main()

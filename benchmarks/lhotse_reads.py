"""`cut.load_features()` of lhotse from a cache, and from lhotse's own `numpy_hdf5`.

    python benchmarks/lhotse_reads.py [--utterances 800] [--directory DIR]

Utterances of 2 to 15 s, 80 float32 a frame, in random order, from memory; whole ones, and one
second of each. The two take turns, in the time of the processor.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import lhotse
import numpy as np
from lhotse.utils import fastcopy
from machine import describe

import featcache

ROUNDS = 7


@click.command()
@click.option("--utterances", default=800, show_default=True)
@click.option("--directory", type=click.Path(path_type=Path), help="On a real disk.")
def main(utterances: int, directory: Path | None) -> None:
    """Print microseconds a cut of both, and the median of their ratios."""
    with tempfile.TemporaryDirectory(prefix="featcache-bench-", dir=directory) as name:
        print(describe(Path(name), "lhotse", "h5py"))
        ours, theirs = written(Path(name), utterances)
        compare("whole", ours, theirs)
        compare("one second", [second(cut) for cut in ours], [second(cut) for cut in theirs])


def written(folder: Path, utterances: int) -> tuple[list[Any], list[Any]]:
    """Write a cache and an HDF5 file of the same arrays; return the cuts of both."""
    random = np.random.default_rng(0)
    declared = [featcache.FeatureStorageConfig("fbank", frame_s=0.01)]
    with (
        featcache.CacheWriter(folder / "cache", declared) as writer,
        lhotse.NumpyHdf5Writer(folder / "numpy") as hdf5,
    ):
        for number in range(utterances):
            array = random.normal(size=(int(random.integers(200, 1500)), 80)).astype(np.float32)
            writer.write(f"u{number}", {"fbank": array})
            hdf5.write(f"u{number}", array)
    ours = list(featcache.open(folder / "cache").to_cuts(sample_rate_hz=16_000))
    stored = {"storage_type": "numpy_hdf5", "storage_path": hdf5.storage_path}
    theirs = [
        fastcopy(cut, features=fastcopy(cut.features, storage_key=cut.id, **stored)) for cut in ours
    ]
    return ours, theirs


def second(cut: Any) -> Any:
    return cut.truncate(offset=0.5, duration=1.0, preserve_id=True)


def compare(what: str, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Read all cuts in turns; the first round is no part of it."""
    random, times = np.random.default_rng(1), dict[str, list[float]](ours=[], theirs=[])
    for _ in range(ROUNDS + 1):
        order = random.permutation(len(ours)).tolist()
        for name, cuts in (("ours", ours), ("theirs", theirs)):
            begin = time.process_time()
            for number in order:
                cuts[number].load_features()
            times[name].append((time.process_time() - begin) / len(order) * 1e6)
    np.testing.assert_array_equal(ours[-1].load_features(), theirs[-1].load_features())
    pairs = zip(times["theirs"][1:], times["ours"][1:], strict=True)
    ratio = statistics.median(a / b for a, b in pairs)
    took = {name: statistics.median(each[1:]) for name, each in times.items()}
    print(
        f"{what:11} {took['ours']:5.1f} us, numpy_hdf5 {took['theirs']:5.1f} us: {ratio:.1f} times"
    )


if __name__ == "__main__":
    main()

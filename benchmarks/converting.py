"""Converting a cache, against a plain copy of its files.

    python benchmarks/converting.py               on the disk of temporary files
    python benchmarks/converting.py --folder /dev/shm --gigabytes 0.5
                                                  in memory: what the processor takes

Utterances are float32 of (200 to 1,200, 80), as filterbanks of 2 to 12 s: noise over steps, which
codecs can press. Conversion and copy (`cp`, then fsync of each file) run in turns
on the same disk, from files in memory; the median of the pairs' ratios counts, with its quartiles.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from machine import describe

import featcache
from featcache import CacheWriter, FeatureStorageConfig

MELS = 80
RAW = ("memmap", "hdf5", "webdataset", "zarr")
ENCODED = (
    FeatureStorageConfig("fbank", "float16"),
    FeatureStorageConfig("fbank", backend="hdf5", codec="gzip"),
    FeatureStorageConfig("fbank", backend="zarr", codec="zstd"),
    FeatureStorageConfig("fbank", backend="lilcom"),
)


def fill(path: Path, nbytes: int) -> Path:
    """Write a cache of about so many bytes."""
    random, written, number = np.random.default_rng(0), 0, 0
    with CacheWriter(path, [FeatureStorageConfig("fbank")]) as writer:
        while written < nbytes:
            frames = int(random.integers(200, 1200))
            curves = random.standard_normal((frames // 20 + 2, MELS)).repeat(20, axis=0)[:frames]
            array = (3 * curves + random.standard_normal((frames, MELS))).astype(np.float32)
            writer.write(f"utterance-{number:07d}", {"fbank": array})
            written, number = written + array.nbytes, number + 1
    return path


def size_of(path: Path) -> int:
    """Return the bytes of all files below a directory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def copy_s(source: Path, target: Path) -> float:
    """Return the seconds that a durable copy of a directory takes; the copy is removed."""
    begun = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", source, target], check=True)
    for file in target.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    took_s = time.perf_counter() - begun
    shutil.rmtree(target)
    return took_s


def convert_s(source: Path, target: Path, feature: FeatureStorageConfig) -> float:
    """Return the seconds that a conversion takes; the new cache stays."""
    shutil.rmtree(target, ignore_errors=True)
    begun = time.perf_counter()
    featcache.convert(source, target, features=[feature], progressbar=False).close()
    return time.perf_counter() - begun


def against_copies(source: Path, folder: Path, pairs: int) -> None:
    """Print the speed of conversion to each format, as a share of a copy's."""
    nbytes = size_of(source)
    for feature in (*(FeatureStorageConfig("fbank", backend=name) for name in RAW), *ENCODED):
        ratios, times = [], []
        for _ in range(pairs if feature.codec == "raw" else 1):
            plain = copy_s(source, folder / "copy")
            times.append(convert_s(source, folder / "new", feature))
            ratios.append(plain / times[-1])
        low, middle, high = np.percentile(ratios, [25, 50, 75])
        speed = nbytes / statistics.median(times) / 1e6
        click.echo(
            f"{feature.backend:11} {feature.codec:7} {feature.dtype:8} {speed:7.0f} MB/s, "
            f"{middle:.2f} of a copy's speed ({low:.2f} to {high:.2f})"
        )
        shutil.rmtree(folder / "new")


@click.command()
@click.option("--gigabytes", default=1.0)
@click.option("--pairs", default=9)
@click.option("--folder", default=None, help="where all is written; by default a temporary one")
def main(gigabytes: float, pairs: int, folder: str | None) -> None:
    """Time conversions."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        here = Path(temporary)
        click.echo(describe(here, "numpy", "h5py", "zarr"))
        source = fill(here / "source", int(gigabytes * 1e9))
        os.sync()
        against_copies(source, here, pairs)


if __name__ == "__main__":
    main()

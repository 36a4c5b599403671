"""Converting small arrays of others, against a loop that reads each and writes one `.npy`.

    python benchmarks/converting_others.py --utterances 20000 --pairs 3

Float32 arrays of (10 to 29, 40) in a folder of `.npz`, one Parquet file and one safetensors file.
The loop reads with NumPy, pyarrow and safetensors themselves. Both run in turns; processor time
counts, user and system, and the median of each.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
from machine import describe
from numpy.typing import NDArray

import featcache

Arrays = Iterator[tuple[str, NDArray[Any]]]


def fill(folder: Path, utterances: int) -> None:
    """Write the same arrays in each of the ways."""
    random = np.random.default_rng(0)
    arrays = {
        f"utt-{number:06}": random.standard_normal((10 + number % 20, 40), np.float32)
        for number in range(utterances)
    }
    (folder / "npz").mkdir()
    for id, array in arrays.items():
        np.savez(folder / "npz" / f"{id}.npz", feats=array)
    column = pa.array([list(array) for array in arrays.values()], pa.list_(pa.list_(pa.float32())))
    table = pa.table({"id": list(arrays), "feats": column})
    pq.write_table(table, folder / "all.parquet", row_group_size=1000)
    safetensors.numpy.save_file(arrays, folder / "all.safetensors")


def of_npz(source: Path) -> Arrays:
    """Read a folder with NumPy."""
    for path in sorted(source.iterdir()):
        with np.load(path) as file:
            yield path.stem, file["feats"]


def of_parquet(source: Path) -> Arrays:
    """Read rows with pyarrow."""
    for batch in pq.ParquetFile(source).iter_batches(1000):
        for id, row in zip(batch.column("id").to_pylist(), batch.column("feats"), strict=True):
            numbers = row.values.flatten().to_numpy()
            yield id, numbers.reshape(len(row), -1)


def of_safetensors(source: Path) -> Arrays:
    """Read tensors with safetensors."""
    with safetensors.safe_open(source, "numpy") as file:
        for id in file.keys():  # noqa: SIM118 (no mapping)
            yield id, file.get_tensor(id)


SOURCES: dict[str, Callable[[Path], Arrays]] = {
    "npz": of_npz,
    "all.parquet": of_parquet,
    "all.safetensors": of_safetensors,
}


def loop(read: Callable[[Path], Arrays], source: Path, target: Path) -> None:
    """Write one file an array."""
    target.mkdir()
    for id, array in read(source):
        np.save(target / f"{id}.npy", array)


def processor_s() -> float:
    """Return the seconds of processor time so far, of the system's side too."""
    times = os.times()
    return times.user + times.system


def took_s(work: Callable[[], object], target: Path) -> float:
    """Return the processor time of some work, and remove what it wrote."""
    begun = processor_s()
    work()
    taken = processor_s() - begun
    shutil.rmtree(target)
    return taken


@click.command()
@click.option("--utterances", default=20_000)
@click.option("--pairs", default=3)
@click.option("--folder", default=None, help="where all is written; by default a temporary one")
def main(utterances: int, pairs: int, folder: str | None) -> None:
    """Time conversions and loops."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        here = Path(temporary)
        click.echo(describe(here, "numpy", "pyarrow", "safetensors"))
        fill(here, utterances)
        for name, read in SOURCES.items():
            plain, ours = [], []
            source, target = here / name, here / "new"
            looping = partial(loop, read, source, target)
            converting = partial(featcache.convert, source, target, progressbar=False)
            for _ in range(pairs):
                plain.append(took_s(looping, target))
                ours.append(took_s(converting, target))
            loop_s, convert_s = statistics.median(plain), statistics.median(ours)
            ratio = convert_s / loop_s
            click.echo(f"{name:16} convert {convert_s:5.2f} s, loop {loop_s:5.2f} s: {ratio:.2f}")


if __name__ == "__main__":
    main()

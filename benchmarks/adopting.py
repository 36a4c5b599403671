"""Adopting HDF5 files and lhotse's manifests: how long, and reading after.

    python benchmarks/adopting.py adopt   `featcache.adopt` of 100,000 utterances of (20, 80)
                                          float32, by storage, by the clock and by the processor,
                                          and opening what it made
    python benchmarks/adopting.py read    whole reads and windows of 100 frames by id, in random
                                          order, of 2,000 utterances of 500 to 1,000 frames of 80
                                          float32 in one numpy_hdf5 file; against lhotse's reader
                                          and h5py, with the file kept open and a reader kept,
                                          and a copy from the mapped file (the limit)

h5py and lhotse write the files. All are in memory (warm) when they are read, and every array is
compared first. What a table compares runs in turns; the median of the rounds counts, quartiles in
brackets, and ratios are medians of the ratios of each round.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import h5py
import lhotse
import numpy as np
from lhotse.features import io
from machine import describe

import featcache

ADOPTED, READ = 100_000, 2_000
MELS, WINDOW = 80, 100
ROUNDS = 15
Span = tuple[str, int, int]  # id, first frame, behind the last one
Read = Callable[[str, int, int], Any]


def id_of(number: int) -> str:
    """Return the id of an utterance."""
    return f"spk{number % 251:03d}-utt{number:06d}"


def write_h5(folder: Path) -> Path:
    """Write a dataset an utterance with h5py."""
    array = np.random.default_rng(0).standard_normal((20, MELS)).astype(np.float32)
    with h5py.File(folder / "feats.h5", "w") as file:
        for number in range(ADOPTED):
            file[id_of(number)] = array
    return folder / "feats.h5"


def write_gzip(folder: Path) -> Path:
    """Write a compressed dataset an utterance with h5py, in chunks of 10 frames."""
    array = np.random.default_rng(0).standard_normal((20, MELS)).astype(np.float32)
    with h5py.File(folder / "feats.h5", "w") as file:
        for number in range(ADOPTED):
            options = {"chunks": (10, MELS), "compression": "gzip", "compression_opts": 1}
            file.create_dataset(id_of(number), data=array, **options)
    return folder / "feats.h5"


def write_cuts(folder: Path, writer: type[io.FeaturesWriter]) -> Path:
    """Write cuts with texts whose features lhotse stores; returns the manifest."""
    array = np.random.default_rng(0).standard_normal((20, MELS)).astype(np.float32)
    with writer(folder / "feats") as file, lhotse.CutSet.open_writer(folder / "cuts.jsonl") as cuts:
        for number in range(ADOPTED):
            cuts.write(cut_of(id_of(number), file, array))
    return folder / "cuts.jsonl"


def cut_of(id: str, writer: io.FeaturesWriter, array: np.ndarray) -> lhotse.MonoCut:
    """Store the features of a cut."""
    seconds = len(array) / 100
    features = lhotse.Features(
        type="fbank",
        num_frames=len(array),
        num_features=MELS,
        frame_shift=0.01,
        sampling_rate=16_000,
        start=0,
        duration=seconds,
        storage_type=writer.name,
        storage_path=str(writer.storage_path),
        storage_key=writer.write(id, array.copy()),
        recording_id=id,
        channels=0,
    )
    said = lhotse.SupervisionSegment(id, id, 0, seconds, text="hello", speaker=id[:6])
    return lhotse.MonoCut(id, 0, seconds, 0, features=features, supervisions=[said])


WRITERS: dict[str, Callable[[Path], Path]] = {
    "HDF5": write_h5,
    "HDF5, gzip": write_gzip,
    "lhotse numpy_hdf5": lambda folder: write_cuts(folder, io.NumpyHdf5Writer),
    "lhotse lilcom_chunky": lambda folder: write_cuts(folder, io.LilcomChunkyWriter),
}


def adopt(folder: Path) -> None:
    """Adopt what each tool wrote, and open it."""
    print(f"{'':24}{'adopt':>10}{'processor':>12}{'open':>10}")
    for number, (name, write) in enumerate(WRITERS.items()):
        place = folder / str(number)
        place.mkdir()
        source = write(place)
        begun, busy = time.perf_counter(), time.process_time()
        featcache.adopt(source, folder / f"cache-{number}").close()
        adopted, busy = time.perf_counter(), time.process_time() - busy
        featcache.open(folder / f"cache-{number}").close()
        opened = time.perf_counter()
        times = f"{adopted - begun:8.2f} s{busy:10.2f} s{1e3 * (opened - adopted):7.1f} ms"
        print(f"{name:24}{times}")


def read(folder: Path) -> None:
    """Read adopted utterances, and the same through lhotse and h5py."""
    rng = np.random.default_rng(0)
    lengths = {id_of(number): int(rng.integers(500, 1000)) for number in range(READ)}
    with io.NumpyHdf5Writer(folder / "feats") as writer:
        for id, length in lengths.items():
            writer.write(id, rng.standard_normal((length, MELS), np.float32))
    path = folder / "feats.h5"
    reader = io.NumpyHdf5Reader(str(path))
    octets = np.memmap(path, np.uint8, "r")
    mapped: dict[str, Any] = {}
    with h5py.File(path) as file:
        for id in file:
            begin = file[id].id.get_offset()
            mapped[id] = octets[begin : begin + file[id].nbytes].view("f4").reshape(-1, MELS)
    with featcache.adopt(path, folder / "cache") as cache, h5py.File(path) as file:
        ways: dict[str, Read] = {
            "featcache": lambda id, start, stop: cache.read(id, "feats", start, stop),
            "lhotse": lambda id, start, stop: reader.read(id, start, stop),
            "h5py": lambda id, start, stop: file[id][start:stop],
            "the limit": lambda id, start, stop: mapped[id][start:stop].copy(),
        }
        for id, length in lengths.items():
            for start, stop in ((0, length), (length // 2, length // 2 + WINDOW)):
                first, *others = [way(id, start, stop) for way in ways.values()]
                assert all(np.array_equal(first, other) for other in others)
        print("whole utterances")
        compare(ways, lambda id: (id, 0, lengths[id]), list(lengths))
        starts = {id: int(rng.integers(0, length - WINDOW)) for id, length in lengths.items()}
        print(f"windows of {WINDOW} frames")
        compare(ways, lambda id: (id, starts[id], starts[id] + WINDOW), list(lengths))


def compare(ways: dict[str, Read], span: Callable[[str], Span], ids: list[str]) -> None:
    """Print the time a read of each way, and how many times faster the first one is."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        order = [span(id) for id in np.random.default_rng(turn).permutation(ids).tolist()]
        for name, way in ways.items():
            begun = time.perf_counter()
            for id, start, stop in order:
                way(id, start, stop)
            if turn:  # the first one warms up
                took[name].append(1e6 * (time.perf_counter() - begun) / len(ids))
    ours = next(iter(took.values()))
    for name, times in took.items():
        ratios = [slow / quick for slow, quick in zip(times, ours, strict=True)]
        print(f"  {name:12}{spread(times)} us, x{spread(ratios)}")


def spread(values: list[float]) -> str:
    """Return the median, with quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:8.1f} [{low:.1f}, {high:.1f}]"


@click.command()
@click.argument("what", type=click.Choice(["adopt", "read"]))
def main(what: str) -> None:
    """Measure one of both."""
    with tempfile.TemporaryDirectory() as folder:
        print(describe(Path(folder), "featcache", "numpy", "h5py", "lhotse"))
        {"adopt": adopt, "read": read}[what](Path(folder))


if __name__ == "__main__":
    main()

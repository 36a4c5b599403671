"""Adopting what other tools wrote: how long, and reading after.

    python benchmarks/adopting.py adopt   `featcache.adopt` of 100,000 utterances of (20, 80)
                                          float32, by tool, by the clock and by the processor, and
                                          opening what it made
    python benchmarks/adopting.py read    2,000 utterances of 80 float32 a frame by id, in random
                                          order: whole, and windows of 100 frames, with and
                                          without a copy; against each tool's own reader with its
                                          files kept open, and a copy from a mapped file (the
                                          limit of copies)

Each tool writes its own files. All are in memory (warm) when they are read, and every array is
compared first. Reads count in processor time, which other work on the machine changes less. What a
table compares runs in turns; the median of the rounds counts, quartiles in brackets, and ratios are
medians of the ratios of each round. Needs kaldiio and webdataset.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import h5py
import kaldiio
import lhotse
import numpy as np
import webdataset
from lhotse.features import io
from machine import describe
from numpy.typing import NDArray

import featcache

ADOPTED, READ = 100_000, 2_000
MELS, WINDOW, ROUNDS = 80, 100, 15
FRAMES = ((100, 101), (500, 1000))  # of what is read
Floats = NDArray[np.float32]
Arrays = Mapping[str, Floats]
Read = Callable[[str, int, int], Any]  # id, first frame, behind the last one


def write_h5(folder: Path, arrays: Arrays, **options: Any) -> Path:
    """Write a dataset an utterance with h5py."""
    with h5py.File(folder / "feats.h5", "w") as file:
        for id, array in arrays.items():
            file.create_dataset(id, data=array, **options)
    return folder / "feats.h5"


def write_gzip(folder: Path, arrays: Arrays) -> Path:
    """Write a compressed dataset an utterance with h5py, in chunks of 10 frames."""
    return write_h5(folder, arrays, chunks=(10, MELS), compression="gzip", compression_opts=1)


def write_cuts(writer: type[io.FeaturesWriter]) -> Callable[[Path, Arrays], Path]:
    """Return what writes cuts with texts whose features lhotse stores; it gives the manifest."""

    def write(folder: Path, arrays: Arrays) -> Path:
        path = folder / "cuts.jsonl"
        with writer(folder / "feats") as file, lhotse.CutSet.open_writer(path) as cuts:
            for id, array in arrays.items():
                cuts.write(cut_of(id, file, array))
        return path

    return write


def cut_of(id: str, writer: io.FeaturesWriter, array: Floats) -> lhotse.MonoCut:
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


def write_archives(folder: Path, arrays: Arrays) -> Path:
    """Write ten archives and one scp with kaldiio; returns the scp."""
    lines = []
    for part in range(10):
        names = f"ark,scp:{folder / f'feats.{part}.ark'},{folder / f'feats.{part}.scp'}"
        with kaldiio.WriteHelper(names) as writer:
            for id in list(arrays)[part::10]:
                writer(id, arrays[id])
        lines += (folder / f"feats.{part}.scp").read_text().splitlines(keepends=True)
    (folder / "feats.scp").write_text("".join(sorted(lines)))
    (folder / "utt2spk").write_text("".join(f"{id} {id[:6]}\n" for id in arrays))
    return folder / "feats.scp"


def write_shards(folder: Path, arrays: Arrays) -> Path:
    """Write shards of arrays, texts and JSON with webdataset; returns the folder."""
    with webdataset.ShardWriter(str(folder / "%06d.tar"), maxcount=10_000, verbose=0) as writer:
        for id, array in arrays.items():
            fields = {"fbank.npy": array, "txt": "hello", "json": {"speaker": id[:6]}}
            writer.write({"__key__": id, **fields})
    return folder


def write_collected(folder: Path, arrays: Arrays) -> Path:
    """Write `.npy` files and an scp as ESPnet's collect_stats does; returns the scp."""
    paths = {id: folder / "data_feats" / f"{id}.npy" for id in arrays}
    (folder / "data_feats").mkdir()
    for id, path in paths.items():
        np.save(path, arrays[id])
    (folder / "feats.scp").write_text("".join(f"{id} {path}\n" for id, path in paths.items()))
    return folder / "feats.scp"


WRITERS: dict[str, Callable[[Path, Arrays], Path]] = {
    "HDF5": write_h5,
    "HDF5, gzip": write_gzip,
    "lhotse numpy_hdf5": write_cuts(io.NumpyHdf5Writer),
    "lhotse lilcom_chunky": write_cuts(io.LilcomChunkyWriter),
    "kaldi, ten archives": write_archives,
    "webdataset, three fields": write_shards,
    "espnet, a file each": write_collected,
}


def adopt(folder: Path) -> None:
    """Adopt what each tool wrote, and open it."""
    array = np.random.default_rng(0).standard_normal((20, MELS), np.float32)
    arrays = {id_of(number): array for number in range(ADOPTED)}
    print(f"{'':26}{'adopt':>10}{'processor':>12}{'open':>10}")
    for number, (name, write) in enumerate(WRITERS.items()):
        place = folder / str(number)
        place.mkdir()
        source = write(place, arrays)
        begun, busy = time.perf_counter(), time.process_time()
        featcache.adopt(source, folder / f"cache-{number}").close()
        adopted, busy = time.perf_counter(), time.process_time() - busy
        featcache.open(folder / f"cache-{number}").close()
        opened = time.perf_counter()
        times = f"{adopted - begun:8.2f} s{busy:10.2f} s{1e3 * (opened - adopted):7.1f} ms"
        print(f"{name:26}{times}")


def id_of(number: int) -> str:
    """Return the id of an utterance."""
    return f"spk{number % 251:03d}-utt{number:06d}"


def read(folder: Path) -> None:
    """Read adopted utterances, and the same with the tools that wrote them."""
    for least, most in FRAMES:
        rng = np.random.default_rng(0)
        arrays = {
            id_of(number): rng.standard_normal((int(rng.integers(least, most)), MELS), np.float32)
            for number in range(READ)
        }
        for name, ways_of in {"lhotse numpy_hdf5": hdf5_ways, "kaldi": kaldi_ways}.items():
            place = folder / f"{name}-{least}"
            place.mkdir()
            ways = {**ways_of(place, arrays), "the limit": mapped_way(place, arrays)}
            check(ways, arrays)
            print(f"{name}, {least} to {most - 1} frames")
            compare(ways, arrays, most)
            if least > WINDOW:
                compare(ways, arrays, WINDOW)


def hdf5_ways(folder: Path, arrays: Arrays) -> dict[str, Read]:
    """Return the ways to the arrays of an HDF5 file of lhotse's."""
    with io.NumpyHdf5Writer(folder / "feats") as writer:
        for id, array in arrays.items():
            writer.write(id, array)
    path = folder / "feats.h5"
    cache, file = featcache.adopt(path, folder / "cache"), h5py.File(path)
    return {
        **our_ways(cache),
        "lhotse": io.NumpyHdf5Reader(str(path)).read,
        "h5py": lambda id, start, stop: file[id][start:stop],
    }


def our_ways(cache: featcache.Cache) -> dict[str, Read]:
    """Return the ways to the arrays of an adopted cache: by a copy, and without one."""
    return {
        "featcache": lambda id, start, stop: cache.read(id, "feats", start, stop),
        "without copy": lambda id, start, stop: cache.read(id, "feats", start, stop, copy=False),
    }


def kaldi_ways(folder: Path, arrays: Arrays) -> dict[str, Read]:
    """Return the ways to the matrices of Kaldi's archives."""
    scp = write_archives(folder, arrays)
    cache = featcache.adopt(scp, folder / "cache")
    peer = kaldiio.load_scp(str(scp), max_cache_fd=32)
    return {
        **our_ways(cache),
        "kaldiio": lambda id, start, stop: peer[id][start:stop],
    }


def mapped_way(folder: Path, arrays: Arrays) -> Read:
    """Return copies from one mapped file, whose slices are at hand."""
    path, mapped, begin = folder / "all.npy", {}, 0
    np.save(path, np.concatenate(list(arrays.values())))
    frames = np.load(path, mmap_mode="r").view(np.ndarray)
    for id, array in arrays.items():
        mapped[id] = frames[begin : begin + len(array)]
        begin += len(array)
    return lambda id, start, stop: mapped[id][start:stop].copy()


def check(ways: Mapping[str, Read], arrays: Arrays) -> None:
    """Compare all arrays as they are read, whole and from the middle on."""
    for id, array in arrays.items():
        for start in (0, len(array) // 2):
            for way in ways.values():
                np.testing.assert_array_equal(way(id, start, len(array)), array[start:])


def compare(ways: Mapping[str, Read], arrays: Arrays, most: int) -> None:
    """Print the time a read of up to `most` frames, and how many times faster the first way is."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        rng = np.random.default_rng(turn)
        ids = rng.permutation(list(arrays)).tolist()
        starts = [int(rng.integers(0, max(len(arrays[id]) - most, 0) + 1)) for id in ids]
        order = [
            (id, start, min(start + most, len(arrays[id])))
            for id, start in zip(ids, starts, strict=True)
        ]
        for name, way in ways.items():
            begun = time.process_time()
            for id, start, stop in order:
                way(id, start, stop)
            if turn:  # the first one warms up
                took[name].append(1e6 * (time.process_time() - begun) / len(ids))
    print(f"  {f'{WINDOW} frames' if most == WINDOW else 'whole':14}{'us a read':>24}{'ratio':>20}")
    for name, times in took.items():
        ratios = [slow / quick for slow, quick in zip(times, took["featcache"], strict=True)]
        print(f"  {name:14}{spread(times):>24}{spread(ratios):>20}")


def spread(values: list[float]) -> str:
    """Return the median, with quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.1f} [{low:.1f}, {high:.1f}]"


@click.command()
@click.argument("what", type=click.Choice(["adopt", "read"]))
def main(what: str) -> None:
    """Measure one of both."""
    with tempfile.TemporaryDirectory() as folder:
        tools = ("h5py", "lhotse", "kaldiio", "webdataset")
        print(describe(Path(folder), "featcache", "numpy", *tools))
        {"adopt": adopt, "read": read}[what](Path(folder))


if __name__ == "__main__":
    main()

"""How long one warm random read of a whole utterance takes, against a plain memory copy and against
the peers.

Every method reads the same utterances in the same order, in turns, so that a slow moment of the
machine hits all of them; the figures are medians over the rounds, with the quartiles as the spread.

    python benchmarks/read.py [--utterances 3000] [--rounds 15]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import h5py
import numpy as np
import zarr
from machine import describe

import featcache

MELS = 80
FRAMES = (500, 1000)  # about 750: 7.5 s at 10 ms a frame
BACKENDS = ("memmap", "hdf5", "webdataset", "zarr")
READS = 300  # a round and method
Read = Callable[[str], np.ndarray]


@click.command()
@click.option("--utterances", default=3000, show_default=True)
@click.option("--rounds", default=15, show_default=True)
def main(utterances: int, rounds: int) -> None:
    """Print the table of whole-utterance reads."""
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as directory:
        root = Path(directory)
        lengths = write_caches(root, utterances)
        readers = make_readers(root, lengths)
        times = measure(readers, list(lengths), rounds)
    report(times, utterances)


def write_caches(root: Path, utterances: int) -> dict[str, int]:
    """Write one cache per format and one bare `.npy`, all of the same arrays; returns the frames of
    each id.
    """
    rng = np.random.default_rng(0)
    lengths = {f"utt-{number:06d}": int(rng.integers(*FRAMES)) for number in range(utterances)}
    for backend in BACKENDS:
        config = featcache.FeatureStorageConfig("fbank", backend=backend)
        with featcache.CacheWriter(root / backend, [config]) as writer:
            for number, (id, length) in enumerate(lengths.items()):
                writer.write(id, {"fbank": array_of(number, length)})
    bare = np.lib.format.open_memmap(
        root / "bare.npy", mode="w+", dtype=np.float32, shape=(sum(lengths.values()), MELS)
    )
    start = 0
    for number, length in enumerate(lengths.values()):
        bare[start : start + length] = array_of(number, length)
        start += length
    bare.flush()
    return lengths


def array_of(number: int, length: int) -> np.ndarray:
    """Return the array of an utterance, shape (frames, mels), float32."""
    return np.random.default_rng(number).standard_normal((length, MELS), np.float32)


def make_readers(root: Path, lengths: dict[str, int]) -> dict[str, Read]:
    """Return one function from an id to an array per method."""
    bare = np.load(root / "bare.npy", mmap_mode="r")
    ends = np.cumsum(list(lengths.values()))
    spans = {
        id: (int(end) - length, int(end))
        for (id, length), end in zip(lengths.items(), ends, strict=True)
    }

    def slice_and_copy(id: str) -> np.ndarray:
        start, end = spans[id]
        return np.array(bare[start:end])

    readers: dict[str, Read] = {"np.memmap slice and copy (the limit)": slice_and_copy}
    for backend in BACKENDS:
        cache = featcache.open(root / backend)
        readers[f"featcache {backend}"] = lambda id, cache=cache: cache.read(id, "fbank")  # type: ignore[misc]
    group = h5py.File(next(root.glob("hdf5/parts/*/fbank.h5")))["fbank"]
    readers["h5py, the same .h5 by key"] = lambda id: group[id][:]
    array = zarr.open_group(next(root.glob("zarr/parts/*/fbank.zarr")), mode="r")["fbank"]
    readers["zarr, the same group by slice"] = lambda id: np.asarray(
        array[spans[id][0] : spans[id][1]]
    )
    return readers


def measure(readers: dict[str, Read], ids: list[str], rounds: int) -> dict[str, np.ndarray]:
    """Return microseconds a read for each method and round; all give the same arrays."""
    rng = np.random.default_rng(1)
    expected = next(iter(readers.values()))
    # every byte once: a mapping's first touch of a page costs a fault
    for read in readers.values():
        for id in ids:
            np.testing.assert_array_equal(read(id), expected(id))
    times: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(rounds):
        chosen = rng.choice(ids, READS).tolist()
        for name, read in readers.items():
            count = READS // 10 if name.startswith("zarr") else READS  # milliseconds a read
            started = time.perf_counter()
            for id in chosen[:count]:
                read(id)
            times[name].append((time.perf_counter() - started) / count * 1e6)
    return {name: np.array(values) for name, values in times.items()}


def report(times: dict[str, np.ndarray], utterances: int) -> None:
    """Print the table."""
    print(describe(Path(tempfile.gettempdir()), "numpy", "h5py", "zarr"))
    print(
        f"{utterances} utterances of {FRAMES[0]} to {FRAMES[1]} frames x {MELS} float32, random "
        "ids, all read before"
    )
    rounds = len(next(iter(times.values())))
    print(f"warm, median of {rounds} rounds of {READS} reads (zarr: {READS // 10})")
    print(f"{'':38}{'us a read':>10}{'quartiles':>18}{'x limit':>9}{'x h5py':>9}")
    limit, h5 = (
        np.median(next(v for n, v in times.items() if n.startswith(p)))
        for p in ("np.memmap", "h5py")
    )
    for name, values in times.items():
        low, median, high = np.percentile(values, (25, 50, 75))
        print(
            f"{name:38}{median:10.1f}{f'{low:.1f} to {high:.1f}':>18}"
            f"{median / limit:9.2f}{h5 / median:9.2f}"
        )


if __name__ == "__main__":
    main()

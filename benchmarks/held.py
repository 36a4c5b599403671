"""How long reads take whose arrays are held while others are read, and dropped together: ours, the
peers, and a copy of a mapped slice.

malloc gives memory back to the system that is freed together, and each page of it costs a fault
when it is used again. What it does depends on all that a process has done before, so each method
has a process of its own. All read the same utterances, in turns; medians over the rounds.

    python benchmarks/held.py [--utterances 3000] [--rounds 15]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import click
import h5py
import kaldiio
import lhotse.features.io as lhotse_io
import numpy as np
from machine import describe
from read import FRAMES as WHOLE
from read import MELS, READS, array_of, write_caches

import featcache

HELD = 32
SMALL = 150  # frames of a window below 64 KiB, where nothing is recycled
Read = Callable[[int], object]
Open = Callable[[Path], Read]


def id_of(number: int) -> str:
    """Return the id of an utterance."""
    return f"utt-{number:06d}"


# Methods: each opens its files in its own process.


def slice_and_copy(frames: int, root: Path) -> Read:
    """Return the copy of slices of one mapped file, of whole utterances or `frames` of each."""
    bare, (starts, stops) = np.load(root / "bare.npy", mmap_mode="r"), np.load(root / "spans.npy")
    if frames:
        stops = starts + frames
    spans = list(zip(starts.tolist(), stops.tolist(), strict=True))
    return lambda number: np.array(bare[slice(*spans[number])])


def ours(name: str, frames: int, root: Path) -> Read:
    """Return `Cache.read`."""
    cache = featcache.open(root / name)
    (feature,) = cache.features
    if frames:
        return lambda number: cache.read(id_of(number), feature, 0, frames)
    return lambda number: cache.read(id_of(number), feature)


def adopted(source: str, root: Path) -> Read:
    """Return `Cache.read` of what others wrote."""
    cache = root / f"adopted-{source.replace('/', '-')}"
    if not cache.exists():
        featcache.adopt(root / source, cache).close()
    return ours(cache.name, 0, root)


def h5py_by_key(root: Path) -> Read:
    """Return h5py's own."""
    group = h5py.File(next(root.glob("hdf5/parts/*/fbank.h5")))["fbank"]
    return lambda number: group[id_of(number)][:]


def lhotse_reader(root: Path) -> Read:
    """Return lhotse's reader of its HDF5 file."""
    read = lhotse_io.NumpyHdf5Reader(str(root / "lhotse.h5")).read
    return lambda number: read(id_of(number))


def kaldiio_scp(root: Path) -> Read:
    """Return kaldiio's reader, which keeps the archives open."""
    scp = kaldiio.load_scp(str(root / "kaldi" / "feats.scp"), max_cache_fd=32)
    return lambda number: scp[id_of(number)]


METHODS: dict[str, tuple[str, Open]] = {
    "np.memmap slice and copy (the limit)": ("limit", partial(slice_and_copy, 0)),
    "featcache memmap": ("limit", partial(ours, "memmap", 0)),
    "featcache hdf5": ("limit", partial(ours, "hdf5", 0)),
    "h5py, the same .h5 by key": ("limit", h5py_by_key),
    "lhotse NumpyHdf5Reader": ("lhotse", lhotse_reader),
    "featcache, the same .h5 adopted": ("lhotse", partial(adopted, "lhotse.h5")),
    "kaldiio load_scp": ("kaldiio", kaldiio_scp),
    "featcache, the same ark adopted": ("kaldiio", partial(adopted, "kaldi/feats.scp")),
    f"np.memmap, {SMALL} frames": ("small", partial(slice_and_copy, SMALL)),
    f"featcache memmap, {SMALL} frames": ("small", partial(ours, "memmap", SMALL)),
}


def serve(connection: Connection, open: Open, root: Path, count: int) -> None:
    """Read what the other end asks for, held and dropped at once; answers microseconds a read."""
    read = open(root)
    for number in range(count):  # a mapping's first touch of a page costs a fault
        read(number)
    connection.send(None)
    while (numbers := connection.recv()) is not None:
        began = time.perf_counter()
        for first in range(0, len(numbers), HELD):
            held = [read(number) for number in numbers[first : first + HELD]]
            del held
        half = time.perf_counter()
        for number in numbers:
            read(number)
        ended = time.perf_counter()
        times = [(half - began) / len(numbers) * 1e6, (ended - half) / len(numbers) * 1e6]
        connection.send((*times, own_megabytes()))


def own_megabytes() -> float:
    """Return this process's memory that is no file's."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


@click.command()
@click.option("--utterances", default=3000, show_default=True)
@click.option("--rounds", default=15, show_default=True)
def main(utterances: int, rounds: int) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as directory:
        root = Path(directory)
        about = describe(root, "numpy", "h5py", "lhotse", "kaldiio")
        lengths = list(write_caches(root, utterances).values())
        write_others(root, lengths)
        figures = measure(root, utterances, rounds)
    print(about)
    print(
        f"{utterances} utterances of {WHOLE[0]} to {WHOLE[1]} frames x {MELS} float32, random "
        "ones, all read before; a process each, in turns\n"
        f"median of {rounds} rounds of {READS} reads, {HELD} arrays held at a time and "
        "then dropped; and each dropped at once"
    )
    print(f"{'':38}{'us held':>9}{'quartiles':>16}{'x first':>9}{'us at once':>12}{'own MB':>9}")
    firsts: dict[str, float] = {}
    for name, rows in figures.items():
        held, once, memory = rows.T
        low, median, high = np.percentile(held, (25, 50, 75))
        first = firsts.setdefault(METHODS[name][0], float(median))
        print(
            f"{name:38}{median:9.1f}{f'{low:.1f} to {high:.1f}':>16}{median / first:9.2f}"
            f"{np.median(once):12.1f}{memory.max():9.0f}"
        )


def write_others(root: Path, lengths: list[int]) -> None:
    """Write what lhotse and Kaldi store, and where the utterances lie in the bare file."""
    stops = np.cumsum(lengths)
    np.save(root / "spans.npy", np.stack([stops - lengths, stops]))
    (root / "kaldi").mkdir()
    names = f"ark,scp:{root}/kaldi/feats.ark,{root}/kaldi/feats.scp"
    with lhotse_io.NumpyHdf5Writer(str(root / "lhotse.h5")) as file:
        for number, length in enumerate(lengths):
            file.write(id_of(number), array_of(number, length))
    with kaldiio.WriteHelper(names) as writer:
        for number, length in enumerate(lengths):
            writer(id_of(number), array_of(number, length))


def measure(root: Path, count: int, rounds: int) -> dict[str, np.ndarray]:
    """Return microseconds held and dropped at once, and MB, for each method and round."""
    context, random = get_context("spawn"), np.random.default_rng(1)
    ends: dict[str, Connection] = {}
    for name, (_, open) in METHODS.items():
        ends[name], other = context.Pipe()
        context.Process(target=serve, args=(other, open, root, count), daemon=True).start()
        ends[name].recv()
    figures: dict[str, list[tuple[float, ...]]] = {name: [] for name in METHODS}
    for _ in range(rounds):
        chosen = random.integers(0, count, READS).tolist()
        for name in random.permutation(list(METHODS)).tolist():
            ends[name].send(chosen)
            figures[name].append(ends[name].recv())
    for end in ends.values():
        end.send(None)
    return {name: np.array(rows) for name, rows in figures.items()}


if __name__ == "__main__":
    main()

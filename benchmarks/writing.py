"""How fast caches are written: against plain writes of the same bytes, and against each format's
own tool.

Ours and the other are timed in turns, a pair at a time, so that a slow moment of the machine hits
both; a figure is the median of the pairs' ratios, with its quartiles. The arrays rotate over more
memory than the processor's cache holds. All times are from the first array to files that would
survive a power cut: ours with statistics, checksums, index and publishing, the others with one
fsync of each of their files.

    python benchmarks/writing.py               all of these:
    python benchmarks/writing.py long          750 x 80 float32, one by one and in batches of 16
    python benchmarks/writing.py short         sequences of 50 tokens, one by one and in batches
    python benchmarks/writing.py extract       0.5 s of audio an utterance, against lhotse's loop
    python benchmarks/writing.py memory        ten million token sequences: memory of the writer
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import h5py
import numpy as np
from machine import describe

import featcache

FRAMES, MELS = 750, 80
TOKENS = 50
BATCH = 256  # utterances of a batch of token sequences
LONG_BATCH = 16  # and of 750 frames
Write = Callable[[Path], object]


def arrays(nbytes: int) -> list[Any]:
    """Random arrays of together so many bytes."""
    random = np.random.default_rng(0)
    count = nbytes // (FRAMES * MELS * 4)
    return [random.standard_normal((FRAMES, MELS), np.float32) for _ in range(count)]


def tokens(count: int) -> Any:
    """Random sequences of 50 tokens, as rows."""
    return np.random.default_rng(0).integers(0, 1000, (count, TOKENS), np.int32)


def ids_of(count: int) -> list[str]:
    """Names of utterances."""
    return [f"speaker-{number % 1000:04d}/utt-{number:08d}" for number in range(count)]


def feature(backend: str, dtype: str = "float32") -> list[featcache.FeatureStorageConfig]:
    return [featcache.FeatureStorageConfig("fbank", dtype=dtype, backend=backend)]


def ours(backend: str, data: Any, ids: list[str], dtype: str = "float32") -> Write:
    """Write utterances one by one."""

    def write(path: Path) -> None:
        with featcache.CacheWriter(path / "cache", feature(backend, dtype)) as writer:
            for id, array in zip(ids, data, strict=True):
                writer.write(id, {"fbank": array})

    return write


def ours_in_batches(
    backend: str, data: Any, ids: list[str], dtype: str = "float32", size: int = BATCH
) -> Write:
    """Write utterances, all of one length, in padded batches."""
    batches = [
        (ids[start : start + size], np.stack(data[start : start + size]))
        for start in range(0, len(ids), size)
    ]

    def write(path: Path) -> None:
        with featcache.CacheWriter(path / "cache", feature(backend, dtype)) as writer:
            for some, batch in batches:
                writer.write_batch(some, {"fbank": batch}, [batch.shape[1]] * len(some))

    return write


def plain(data: Any, ids: list[str]) -> Write:
    """Write all arrays behind each other into one file, unbuffered."""

    def write(path: Path) -> None:
        with (path / "plain").open("wb", buffering=0) as file:
            for array in data:
                file.write(array.data)
            os.fsync(file.fileno())

    return write


def with_h5py(data: Any, ids: list[str]) -> Write:
    """Write a dataset an utterance."""

    def write(path: Path) -> None:
        with h5py.File(path / "plain.h5", "w") as file:
            group = file.create_group("fbank")
            for id, array in zip(ids, data, strict=True):
                group.create_dataset(id.replace("/", "%2F"), data=array)
        _sync(path / "plain.h5")

    return write


def with_webdataset(data: Any, ids: list[str]) -> Write:
    """Write a sample of an array an utterance with webdataset's own writer."""
    from webdataset import TarWriter

    def write(path: Path) -> None:
        with TarWriter(str(path / "plain.tar")) as sink:
            for id, array in zip(ids, data, strict=True):
                sink.write({"__key__": id, "fbank.npy": array})
        _sync(path / "plain.tar")

    return write


def _sync(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def timed(write: Write, folder: Path) -> tuple[float, float]:
    """Return the seconds, and those of the processor, that a way to write takes."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        os.sync()
        gc.collect()
        began, busy = time.perf_counter(), time.process_time()
        write(Path(name))
        return time.perf_counter() - began, time.process_time() - busy


def compare(what: str, one: Write, other: Write, folder: Path, pairs: int, size: float) -> None:
    """Print the ratio of the rates of two ways; `size` is what the rate is of."""
    spent = []
    for number in range(pairs + 1):
        turns = [one, other] if number % 2 else [other, one]
        found = {way: timed(way, folder) for way in turns}
        if number:  # the first pair warms up
            spent.append([*found[one], *found[other]])
    mine, busy, theirs, their_busy = np.array(spent).T
    low, middle, high = np.percentile(theirs / mine, [25, 50, 75])
    print(
        f"{what}: {middle:.2f} of the other's rate ({low:.2f} to {high:.2f}); "
        f"{size / np.median(mine):,.4g} against {size / np.median(theirs):,.4g} a second, "
        f"processor {np.median(busy / their_busy):.2f} times ({np.median(busy):.2f} s)",
        flush=True,
    )


def long(folder: Path, pairs: int, nbytes: int) -> None:
    """750 x 80 float32."""
    data = arrays(nbytes)
    ids = ids_of(len(data))
    size = sum(array.nbytes for array in data) / 1e9
    print(f"{len(data)} utterances of {FRAMES} x {MELS} float32, {size:.2f} GB; GB a second")
    raw = plain(data, ids)
    for backend in ("memmap", "webdataset", "zarr", "hdf5"):
        other, name = (with_h5py(data, ids), "h5py") if backend == "hdf5" else (raw, "plain writes")
        in_batches = ours_in_batches(backend, data, ids, size=LONG_BATCH)
        for how, one in (("one by one", ours(backend, data, ids)), ("in batches", in_batches)):
            compare(f"{backend} {how} against {name}", one, other, folder, pairs, size)


def short(folder: Path, pairs: int, count: int) -> None:
    """Sequences of 50 tokens."""
    data, ids = tokens(count), ids_of(count)
    print(f"{count} sequences of {TOKENS} int32; sequences a second")
    ways = {"memmap": plain, "zarr": plain, "webdataset": with_webdataset, "hdf5": with_h5py}
    for backend, tool in ways.items():
        other = tool(data, ids)
        for how, way in (("one by one", ours), ("in batches", ours_in_batches)):
            one = way(backend, data, ids, "int32")
            compare(f"{backend} {how} against {tool.__name__}", one, other, folder, pairs, count)


def extract(folder: Path, pairs: int, count: int) -> None:
    """Utterances of 0.5 s of audio, one by one, from files to a complete store."""
    import lhotse
    import soundfile
    import torch

    torch.set_num_threads(1)
    audio = folder / "audio"
    audio.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        samples = 0.1 * random.standard_normal(8000)
        soundfile.write(audio / f"utt-{number:06d}.wav", samples, 16000)
    recordings = [lhotse.Recording.from_file(path) for path in sorted(audio.iterdir())]
    cuts = lhotse.CutSet.from_manifests(lhotse.RecordingSet.from_recordings(recordings))
    fbank = lhotse.Fbank()

    def lhotse_loop(path: Path) -> None:
        cuts.compute_and_store_features(
            fbank, path / "feats", storage_type=lhotse.NumpyHdf5Writer, progress_bar=False
        ).to_file(path / "cuts.jsonl")
        _sync(path / "feats.h5")

    def ours_loop(path: Path) -> None:
        featcache.extract(Provider(cuts, fbank), path / "cache", feature("hdf5"), progressbar=False)

    print(f"{count} recordings of 0.5 s in files, 80 lhotse.Fbank bands; utterances a second")
    compare("extract to hdf5 against lhotse's loop", ours_loop, lhotse_loop, folder, pairs, count)


class Provider(featcache.EnvironmentProvider):
    """Cuts, and an extractor of lhotse's."""

    def __init__(self, cuts: Any, fbank: Any) -> None:
        self.cuts, self.fbank = cuts, fbank

    def build_env_local(self) -> dict[str, object]:
        return {
            "dataset": featcache.utterances(self.cuts),
            "compute_features": self.compute,
        }

    def compute(self, items: list[dict[str, Any]]) -> list[dict[str, object]]:
        return [
            {"id": item["id"], "fbank": self.fbank.extract(item["samples"], 16000)}
            for item in items
        ]


def memory(folder: Path, count: int) -> None:
    """Anonymous memory of this process while so many token sequences are written."""
    data = tokens(10_000).astype(np.int16)
    lengths = np.full(len(data), TOKENS)
    began = time.perf_counter()
    print(f"{count:,} sequences of {TOKENS} int16 in batches of {len(data):,}")
    with featcache.CacheWriter(folder / "tokens", feature("memmap", "int16")) as writer:
        for start in range(0, count, len(data)):
            ids = [f"utt-{number:08d}" for number in range(start, start + len(data))]
            writer.write_batch(ids, {"fbank": data}, lengths)
            if start % (count // 5) == 0:
                rate = start / (time.perf_counter() - began)
                print(f"  after {start:,}: {own_memory() / 1e6:.0f} MB, {rate:,.0f} a second")
    print(f"  published after {time.perf_counter() - began:.0f} s, {own_memory() / 1e6:.0f} MB")
    shutil.rmtree(folder / "tokens")


def own_memory() -> int:
    """Bytes of memory of this process that are of no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


@click.command()
@click.argument(
    "what", type=click.Choice(["all", "long", "short", "extract", "memory"]), default="all"
)
@click.option("--pairs", default=9, show_default=True)
@click.option("--mb", default=288, show_default=True, help="Of `long`.")
@click.option("--utterances", default=50_000, show_default=True, help="Of `short`.")
@click.option("--sequences", default=10_000_000, show_default=True, help="Of `memory`.")
@click.option(
    "--directory", "directories", multiple=True, default=["/dev/shm", "/tmp"], show_default=True
)
def main(
    what: str, pairs: int, mb: int, utterances: int, sequences: int, directories: tuple[str, ...]
) -> None:
    """Print the figures."""
    for directory in directories:
        with tempfile.TemporaryDirectory(prefix="featcache-bench-", dir=directory) as name:
            folder = Path(name)
            print(describe(folder, "numpy", "h5py", "webdataset", "zarr", "lhotse"))
            if what in ("all", "long"):
                long(folder, pairs, mb << 20)
            if what in ("all", "short"):
                short(folder, pairs, utterances)
            if what in ("all", "extract"):
                extract(folder, pairs, 1000)
            if what in ("all", "memory"):
                memory(folder, sequences)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()

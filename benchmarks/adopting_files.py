"""Adopting archives of Kaldi, shards of WebDataset and files of NumPy: how long, and reading after.

    python benchmarks/adopting_files.py adopt   `featcache.adopt` of 100,000 utterances of (20, 80)
                                                float32, by kind, and opening what it made
    python benchmarks/adopting_files.py read    2,000 utterances of an adopted archive by id, in
                                                random order: us an utterance; against kaldiio with
                                                its files kept open

Each tool writes its own files. All are in memory (warm) when they are read. What a table compares
runs in turns; the median of the rounds counts, quartiles in brackets. Needs kaldiio and webdataset.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import kaldiio
import numpy as np
import webdataset
from machine import describe
from numpy.typing import NDArray

import featcache

ADOPTED, READ = 100_000, 2_000
FRAMES, WINDOW, BATCH, ROUNDS = (100, 700), 100, 16, 15
Arrays = Mapping[str, NDArray[np.float32]]
Way = Callable[[list[str]], object]


def id_of(number: int) -> str:
    """Return the id of an utterance, as Kaldi sorts them."""
    return f"spk{number % 251:03d}-utt{number:06d}"


def write_archives(folder: Path, count: int, frames: int) -> Path:
    """Write ten archives and one scp with kaldiio; returns the scp."""
    array = np.random.default_rng(0).standard_normal((frames, 80)).astype(np.float32)
    lines = []
    for part in range(10):
        names = f"ark,scp:{folder / f'feats.{part}.ark'},{folder / f'feats.{part}.scp'}"
        with kaldiio.WriteHelper(names) as writer:
            for number in range(part, count, 10):
                writer(id_of(number), array)
        lines += (folder / f"feats.{part}.scp").read_text().splitlines(keepends=True)
    (folder / "feats.scp").write_text("".join(sorted(lines)))
    speakers = (f"{id_of(number)} {id_of(number)[:6]}\n" for number in range(count))
    (folder / "utt2spk").write_text("".join(speakers))
    return folder / "feats.scp"


def write_shards(folder: Path, count: int, frames: int) -> Path:
    """Write shards of arrays, texts and JSON with webdataset; returns the folder."""
    array = np.random.default_rng(0).standard_normal((frames, 80)).astype(np.float32)
    with webdataset.ShardWriter(str(folder / "%06d.tar"), maxcount=10_000, verbose=0) as writer:
        for number in range(count):
            fields = {"fbank.npy": array, "txt": "hello", "json": {"speaker": id_of(number)[:6]}}
            writer.write({"__key__": id_of(number), **fields})
    return folder


def write_collected(folder: Path, count: int, frames: int) -> Path:
    """Write `.npy` files and an scp as ESPnet's collect_stats does; returns the scp."""
    array = np.random.default_rng(0).standard_normal((frames, 80)).astype(np.float32)
    (folder / "data_feats").mkdir()
    lines = []
    for number in range(count):
        path = folder / "data_feats" / f"{id_of(number)}.npy"
        np.save(path, array)
        lines.append(f"{id_of(number)} {path}\n")
    (folder / "feats.scp").write_text("".join(lines))
    return folder / "feats.scp"


WRITERS: dict[str, Callable[[Path, int, int], Path]] = {
    "kaldi, ten archives": write_archives,
    "webdataset, three fields": write_shards,
    "espnet, a file each": write_collected,
}


def adopt(folder: Path) -> None:
    """Adopt what each tool wrote, and open it."""
    print(f"{'':28}{'adopt':>10}{'open':>10}")
    for number, (name, write) in enumerate(WRITERS.items()):
        place = folder / str(number)
        place.mkdir()
        source = write(place, ADOPTED, 20)
        begun = time.perf_counter()
        featcache.adopt(source, folder / f"cache-{number}").close()
        adopted = time.perf_counter()
        featcache.open(folder / f"cache-{number}").close()
        opened = time.perf_counter()
        print(f"{name:28}{adopted - begun:8.2f} s{1e3 * (opened - adopted):7.1f} ms")


def read(folder: Path) -> None:
    """Read adopted archives and the archives themselves."""
    for frames in FRAMES:
        place = folder / str(frames)
        place.mkdir()
        scp = write_archives(place, READ, frames)
        peer = kaldiio.load_scp(str(scp), max_cache_fd=32)
        with featcache.adopt(scp, folder / f"cache-{frames}") as cache:
            print(f"utterances of ({frames}, 80){'featcache':>19}{'kaldiio':>23}{'ratio':>20}")
            for name, ways in ways_of(cache, peer, frames).items():
                compare(name, *ways)


def ways_of(cache: featcache.Cache, peer: Arrays, frames: int) -> dict[str, tuple[Way, Way]]:
    """Return what is compared: ours and the peer's way to the arrays of some ids."""
    most = min(WINDOW, frames)

    def stacked(ids: list[str]) -> object:
        batch = np.zeros((len(ids), frames, 80), np.float32)
        for row, id in zip(batch, ids, strict=True):
            row[:] = peer[id]
        return batch

    return {
        "whole": (
            lambda ids: each(lambda id: cache.read(id, "feats"), ids),
            lambda ids: each(lambda id: peer[id], ids),
        ),
        f"padded, {BATCH} a batch": (lambda ids: cache.read_batch(ids, "feats"), stacked),
        f"windows of {most} frames": (
            lambda ids: each(lambda id: cache.read(id, "feats", 0, most), ids),
            lambda ids: each(lambda id: peer[id][:most], ids),
        ),
    }


def each(read_one: Callable[[str], object], ids: list[str]) -> None:
    """Read one after the other, and keep none."""
    for id in ids:
        read_one(id)


def compare(name: str, ours: Way, theirs: Way) -> None:
    """Print microseconds an utterance of both, in random order."""
    took: dict[Way, list[float]] = {ours: [], theirs: []}
    for turn in range(ROUNDS + 1):
        order = [id_of(int(n)) for n in np.random.default_rng(turn).permutation(READ)]
        batches = [order[begin : begin + BATCH] for begin in range(0, READ, BATCH)]
        for way, times in took.items():
            begun = time.perf_counter()
            for ids in batches:
                way(ids)
            if turn:  # the first one warms up
                times.append(1e6 * (time.perf_counter() - begun) / READ)
    ratios = [slow / quick for quick, slow in zip(*took.values(), strict=True)]
    print(f"{name:24}", *(f"{spread(values):>22}" for values in (*took.values(), ratios)))


def spread(values: list[float]) -> str:
    """Return the median, with quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:8.1f} [{low:.1f}, {high:.1f}]"


@click.command()
@click.argument("what", type=click.Choice(["adopt", "read"]))
def main(what: str) -> None:
    """Measure one of both."""
    with tempfile.TemporaryDirectory() as folder:
        print(describe(Path(folder), "featcache", "numpy", "kaldiio", "webdataset"))
        {"adopt": adopt, "read": read}[what](Path(folder))


if __name__ == "__main__":
    main()

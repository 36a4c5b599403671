"""Adopting archives of Kaldi, shards of WebDataset and files of NumPy: how long, and reading after.

    python benchmarks/adopting_files.py adopt   `featcache.adopt` of 100,000 utterances of (20, 80)
                                                float32, by kind, and opening what it made
    python benchmarks/adopting_files.py read    whole reads by id, in random order, of 2,000
                                                utterances of (700, 80) float32 of an adopted
                                                archive; against kaldiio with its files kept open

Each tool writes its own files. All are in memory (warm) when they are read. What a table compares
runs in turns; the median of the rounds counts, quartiles in brackets. Needs kaldiio and webdataset.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import kaldiio
import numpy as np
import webdataset
from machine import describe

import featcache

ADOPTED, READ = 100_000, 2_000


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
    """Read an adopted archive and the archive itself."""
    scp = write_archives(folder, READ, 700)
    ids = [id_of(number) for number in range(READ)]
    peer = kaldiio.load_scp(str(scp), max_cache_fd=32)
    took: dict[str, list[float]] = {"featcache": [], "kaldiio": []}
    with featcache.adopt(scp, folder / "cache") as cache:
        ways: dict[str, Callable[[str], object]] = {
            "featcache": lambda id: cache.read(id, "feats"),
            "kaldiio": lambda id: peer[id],
        }
        for turn in range(16):
            order = np.random.default_rng(turn).permutation(ids).tolist()
            for name, way in ways.items():
                begun = time.perf_counter()
                for id in order:
                    way(id)
                if turn:  # the first one warms up
                    took[name].append(1e6 * (time.perf_counter() - begun) / READ)
    for name, times in took.items():
        print(f"{name:12}{spread(times)} us an utterance")
    ratios = [slow / quick for slow, quick in zip(took["kaldiio"], took["featcache"], strict=True)]
    print(f"{'times faster':12}{spread(ratios)}")


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

"""The page of a report: seconds and bytes for 100,000 utterances, and for ten million, sampled.

The first cache is written as any other. Of the second the columns are those of ten million
utterances, with speakers, texts and checksums; their arrays are windows of one small file, each
from another byte on, so that all differ.

    python benchmarks/report.py [--utterances 100000] [--many 10000000]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import click
import numpy as np
import xxhash
from machine import describe
from made_up import write_index

import featcache
from featcache.format import Codes, Column, Strings, make_directory

MELS = 80
DIMS = 20  # of the many
SPEAKERS = 5000


@click.command()
@click.option("--utterances", default=100_000, show_default=True)
@click.option("--many", default=10_000_000, show_default=True)
@click.option("--directory", type=click.Path(path_type=Path), help="On a real disk.")
def main(utterances: int, many: int, directory: Path | None) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="featcache-bench-", dir=directory) as name:
        print(describe(Path(name), "numpy"))
        print(
            f"{'utterances':>12} {'read':>10} {'seconds':>8} {'of processor':>12} {'MB':>6}   bars"
        )
        for count, write, bars in (
            (utterances, write_cache, "10 s, 3 MB"),
            (many, write_columns, "60 s, 3 MB"),
        ):
            if count:
                path = Path(name) / str(count)
                write(path, count)
                measure(path, Path(name) / "report.html", bars)


def measure(path: Path, page: Path, bars: str) -> None:
    """Write a report twice, and print the first and the second time."""
    for _ in range(2):
        began, worked = time.perf_counter(), time.process_time()
        found = featcache.inspect.report(path, page)
        took, worked = time.perf_counter() - began, time.process_time() - worked
        print(
            f"{found.of:12,} {found.sampled:10,} {took:8.2f} {worked:12.2f} "
            f"{found.bytes / 1e6:6.2f}   {bars}",
            flush=True,
        )


def write_cache(path: Path, count: int) -> None:
    """Write utterances of 32 frames of 80 float16 on average, 513 MB of 100,000, with tokens."""
    random = np.random.default_rng(0)
    features = [
        featcache.FeatureStorageConfig("fbank", dtype="float16", dims=[MELS], frame_s=0.01),
        featcache.FeatureStorageConfig("units", dtype="uint16", dims=[], frame_s=0.01),
    ]
    noise = random.normal(-10, 4, (1 << 14, MELS)).astype(np.float16)
    tokens = (500 * random.random(1 << 14) ** 2).astype(np.uint16)
    lengths = random.integers(8, 57, count).tolist()
    starts = random.integers(0, (1 << 14) - 57, count).tolist()
    with featcache.CacheWriter(path, features) as writer:
        for number, (begin, frames) in enumerate(zip(starts, lengths, strict=True)):
            some = slice(begin, begin + frames)
            arrays = {"fbank": noise[some], "units": tokens[some]}
            speaker = f"speaker-{number % 251}"
            text = "word " * (frames // 8) + "end"
            writer.write(f"{speaker}/utterance-{number:07d}", arrays,
                         annotations={"speaker": speaker, "text": text})  # fmt: skip


def write_columns(path: Path, count: int) -> None:
    """Write the columns of many utterances, whose arrays overlap in one file."""
    random = np.random.default_rng(0)
    lengths = random.integers(20, 200, count)
    frame_bytes = DIMS * 2
    size = count + 200 * frame_bytes
    # any two of these bytes are a float16 from 0.125 to 2
    payload = random.integers(0x30, 0x40, size, np.uint8)
    file = "parts/made/fbank-0.npy"
    make_directory(path / "parts" / "made")
    payload.tofile(path / file)
    data = payload.data
    nbytes = lengths * frame_bytes
    checksums = np.fromiter(
        (xxhash.xxh3_64_intdigest(data[at : at + n]) for at, n in enumerate(nbytes.tolist())),
        np.uint64, count,
    )  # fmt: skip
    columns: dict[str, np.ndarray] = {
        "fbank.rows": lengths,
        "fbank.checksum": checksums,
        "fbank.first": np.arange(count + 1),
        "fbank.container": np.zeros(count, np.int32),
        "fbank.offset": np.arange(count),
        "fbank.nbytes": nbytes,
    }
    feature = featcache.FeatureStorageConfig("fbank", dtype="float16", stats=False, frame_s=0.01)
    annotations = annotation_columns(count, lengths)
    write_index(path, feature, DIMS, count, columns.items(), {file: size}, annotations)


def annotation_columns(count: int, lengths: np.ndarray) -> dict[str, Column]:
    """Return a speaker and a text of each utterance."""
    random = np.random.default_rng(1)
    speakers = Strings.of([f"speaker-{number:05d}" for number in range(SPEAKERS)])
    codes = (SPEAKERS * random.random(count) ** 2).astype(np.int32)
    letters = np.maximum(lengths // 6 + random.integers(-2, 3, count), 1)
    ends = np.append(0, np.cumsum(letters))
    texts = Strings(ends, random.integers(97, 123, int(ends[-1]), np.uint8))
    return {"speaker": Column("str", Codes(codes, speakers)), "text": Column("str", texts)}


if __name__ == "__main__":
    main()

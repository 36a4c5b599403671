"""The command line: its start, `ls --where` of ten million utterances, the speed of `verify`.

    python benchmarks/look.py [--utterances 10000000] [--directory DIR]

Starts are the best of fifteen, in turns, beside those of Python, click and NumPy alone; on a busy
machine the processor's time tells more than the clock. `verify` is compared with reading the same
bytes once, in turns, from memory. The ten million are those of `views.py`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import numpy as np
from machine import describe
from numpy.typing import NDArray
from scale import write_cache
from views import annotations_of

import featcache

Seconds = NDArray[np.float64]  # by the clock, and of the processor
STARTS = 15
BARE = "import click; click.command(add_help_option=True)(lambda: None)(['--help'])"
PIECE = 1 << 20


@click.command()
@click.option("--utterances", default=10_000_000, show_default=True)
@click.option("--stored", default=100_000, show_default=True, help="Of the cache with arrays.")
@click.option("--directory", type=click.Path(path_type=Path), help="On a real disk.")
def main(utterances: int, stored: int, directory: Path | None) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="featcache-bench-", dir=directory) as name:
        print(describe(Path(name), "numpy", "click"))
        path = Path(name) / "stored"
        write_arrays(path, stored)
        starts(path)
        verify(path)
        many = Path(name) / "many"
        write_cache(many, utterances, annotations_of(utterances))
        listing(many)


def write_arrays(path: Path, count: int) -> None:
    """Write utterances of 32 frames of 80 float16 on average, and tokens: 513 MB of 100,000."""
    features = [
        featcache.FeatureStorageConfig("fbank", dtype="float16", frame_s=0.01),
        featcache.FeatureStorageConfig("units", dtype="uint16"),
    ]
    random = np.random.default_rng(0)
    noise = random.normal(-10, 4, (1 << 14, 80)).astype(np.float16)
    lengths = random.integers(16, 49, count)
    with featcache.CacheWriter(path, features) as writer:
        for number, length in enumerate(lengths.tolist()):
            start = number % (len(noise) - 64)
            fbank = noise[start : start + length]
            units = np.arange(length, dtype=np.uint16)
            writer.write(f"utt-{number:07d}", {"fbank": fbank, "units": units})


def starts(path: Path) -> None:
    """Print how long processes take, the best of several in turns."""
    python, command = [sys.executable], [sys.executable, "-m", "featcache"]
    best = best_of(
        {
            "python": [*python, "-c", ""],
            "import click, --help of a bare program": [*python, "-c", BARE],
            "import numpy": [*python, "-c", "import numpy"],
            "featcache --help": [*command, "--help"],
            "featcache info CACHE": [*command, "info", str(path)],
            "featcache ls CACHE -n 10": [*command, "ls", str(path), "-n", "10"],
        },
        STARTS,
    )
    print(f"{'':50} {'wall':>8}    {'processor':>9}")
    for what, seconds in best.items():
        print(f"{what:50} {_ms(seconds)}")
    bare, alone = best["import click, --help of a bare program"], best["import numpy"]
    more = best["featcache --help"] - bare, best["featcache info CACHE"] - alone
    print(f"{'--help, more than the bare program':50} {_ms(more[0])}, bar 50")
    print(f"{'info, more than numpy':50} {_ms(more[1])}, bar 150")


def _ms(seconds: Seconds) -> str:
    wall, processor = (seconds * 1e3).tolist()
    return f"{wall:8.0f} ms {processor:8.0f} ms"


def best_of(commands: Mapping[str, Sequence[str]], times: int) -> dict[str, Seconds]:
    """Return the least seconds of each process, by the clock and of the processor, in turns."""
    # from bytecode, as users have it
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    best = {what: np.full(2, np.inf) for what in commands}
    for _ in range(times):
        for what, words in commands.items():
            begun = _clocks()
            subprocess.run(
                words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True,
                env=environment,
            )  # fmt: skip
            best[what] = np.minimum(best[what], _clocks() - begun)
    return best


def _clocks() -> Seconds:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return np.array([time.perf_counter(), used.ru_utime + used.ru_stime])


def verify(path: Path) -> None:
    """Print the speed of `verify` beside that of reading the same bytes once."""
    opened = featcache.open(path).opened
    containers = [
        path / opened.index.containers.path(n) for n in range(len(opened.index.containers))
    ]
    nbytes = sum(file.stat().st_size for file in containers)
    clocks = time.perf_counter, time.process_time
    read, verified = np.full(2, np.inf), np.full(2, np.inf)
    for _ in range(9):
        begun = np.array([clock() for clock in clocks])
        for file in containers:
            read_once(file)
        between = np.array([clock() for clock in clocks])
        featcache.open(path, verify="arrays")
        ended = np.array([clock() for clock in clocks])
        read = np.minimum(read, between - begun)
        verified = np.minimum(verified, ended - between)
    for what, seconds in (("read once in pieces of 1 MiB", read), ("verify, whole", verified)):
        by_clock, by_processor = (nbytes / seconds / 1e9).tolist()
        print(f"{what:50} {by_clock:6.2f} GB/s {by_processor:6.2f} GB/s")
    ratio, of_processor = (read / verified).tolist()
    print(f"{'verify to reading':50} {ratio:6.2f} x    {of_processor:6.2f} x, bar 0.8")


def read_once(file: Path) -> None:
    """Read a file as `cat` does."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        while os.read(descriptor, PIECE):
            pass
    finally:
        os.close(descriptor)


def listing(path: Path) -> None:
    """Print how long `ls --where` takes, process and printing included."""
    for where in ("duration>34.9966", "id~00777", "speaker=speaker-00007"):
        words = [sys.executable, "-m", "featcache", "ls", str(path), "--where", where]
        found, seconds = 0, []
        for _ in range(5):
            begun = time.perf_counter()
            done = subprocess.run(words, capture_output=True, check=True)
            seconds.append(time.perf_counter() - begun)
            found = done.stdout.count(b"\n") - 1
        what = f"ls --where '{where}': {found:,} found"
        print(f"{what:50} {float(np.median(seconds)):8.2f} s, bar 2")


if __name__ == "__main__":
    main()

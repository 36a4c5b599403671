"""Speed of this working tree against that of an earlier commit, in turns: what became slower.

python benchmarks/speed.py                  against the commit before
python benchmarks/speed.py --base v0.1.0    against another one

Each of eight figures is measured in processes of their own, one of either tree after the other, so
that a busy machine slows both. A figure whose median ratio is below 0.9 is named; then the exit
status is 1.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from machine import describe

HERE = Path(__file__).resolve().parent
LEAST = 0.9  # of the speed before
IDS = [f"utt-{number:05d}" for number in range(2_000)]
SECONDS = 0.3  # that a figure is measured for, at least


class Figures:
    """Eight things that are measured with the featcache of a tree."""

    def __init__(self, tree: Path, folder: Path) -> None:
        sys.path[:0] = [str(tree), str(tree / "backends")]
        import featcache

        self.featcache, self.folder = featcache, folder
        self.declared = [featcache.FeatureStorageConfig("fbank")]
        random = np.random.default_rng(0)
        lengths = random.integers(100, 900, 100).tolist()
        self.arrays = [random.standard_normal((each, 80)).astype(np.float32) for each in lengths]
        self.packed = np.concatenate(self.arrays[:16])
        self.order = [IDS[number] for number in random.permutation(len(IDS))]
        with featcache.CacheWriter(folder / "cache", self.declared) as writer:
            for number, id in enumerate(IDS):
                writer.write(id, {"fbank": self.arrays[number % 100]})
        self.cache = featcache.open(folder / "cache")
        self.made = itertools.count()

    def whole_reads(self) -> None:
        for id in self.order[:200]:
            self.cache.read(id, "fbank")

    def windows(self) -> None:
        for id in self.order[:500]:
            self.cache.read(id, "fbank", 20, 60)

    def batches(self) -> None:
        for _ in self.featcache.FeatureLoader(self.cache, batch_size=32, features=["fbank"]):
            pass

    def opening(self) -> None:
        for _ in range(20):
            self.featcache.open(self.folder / "cache").close()

    def one_utterance_written(self) -> None:
        path = self.folder / f"one-{next(self.made)}"
        with self.featcache.CacheWriter(path, self.declared) as writer:
            writer.write("a", {"fbank": self.arrays[0]})

    def batches_written(self) -> None:
        path, lengths = self.folder / f"many-{next(self.made)}", [*map(len, self.arrays[:16])]
        with self.featcache.CacheWriter(path, self.declared) as writer:
            for first in range(0, 640, 16):
                ids, packed = IDS[first : first + 16], {"fbank": self.packed}
                writer.write_batch(ids, packed, {"fbank": lengths}, layout="packed")

    def sampler(self) -> None:
        sampler = self.featcache.samplers.BucketBatchSampler
        for seed in range(20):
            for _ in sampler(self.cache, max_frames=20_000, seed=seed):
                pass

    def fingerprint(self) -> None:
        from featcache.staleness.provenance import provenance

        provenance(Encoder())


NAMES = [name for name in vars(Figures) if not name.startswith("_")]


class Encoder:
    """A small encoder, with what a fingerprint follows."""

    def __init__(self) -> None:
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12)))
        self.settings = {str(number): number for number in range(50)}

    def __call__(self, id: str) -> Any:
        return self.layers(id) * self.settings["3"]


def measured(call: Callable[[], None]) -> float:
    """Return the median seconds of a call."""
    call()
    took: list[float] = []
    while sum(took) < SECONDS or len(took) < 3:
        begun = time.perf_counter()
        call()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def of_process(tree: Path) -> dict[str, float]:
    """Return the figures of a tree, measured in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", str(HERE / "speed.py")]
        done = subprocess.run(
            [*command, "--figures", str(tree), folder], check=True, capture_output=True, text=True
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def exported(base: str, folder: Path) -> Path:
    """Write the files of a commit into a folder."""
    archive = subprocess.run(
        ["git", "archive", base, "featcache", "backends"],
        cwd=HERE.parent,
        check=True,
        capture_output=True,
    )
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


@click.command()
@click.option("--base", default="HEAD~1", help="The commit to compare with.")
@click.option("--rounds", default=7, help="Processes of either tree.")
@click.option("--figures", nargs=2, type=Path, hidden=True)
def main(base: str, rounds: int, figures: tuple[Path, Path] | None) -> None:
    """Compare the speed of this working tree with that of an earlier commit."""
    if figures:
        things = Figures(*figures)
        print(json.dumps({name: measured(getattr(things, name)) for name in NAMES}))
        return
    print(describe(Path(tempfile.gettempdir()), "torch", "numpy"))
    with tempfile.TemporaryDirectory() as folder:
        trees = exported(base, Path(folder) / "before"), HERE.parent
        pairs = [[of_process(tree) for tree in trees] for _ in range(rounds)]
    print(f"\n{rounds} processes each, in turns; before: {base}\n")
    print(f"{'':24}{'before':>12}{'now':>12}{'speed now / before':>22}")
    slower = []
    for name in NAMES:
        ratios = sorted(before[name] / now[name] for before, now in pairs)
        before, now = (statistics.median(pair[side][name] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(ratios)
        spread = f"{ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"{name.replace('_', ' '):24}{before * 1e3:9.2f} ms{now * 1e3:9.2f} ms{spread:>22}")
        slower += [name] if ratio < LEAST else []
    if slower:
        print(f"\nslower than {LEAST} of before: {', '.join(slower)}")
        sys.exit(1)


if __name__ == "__main__":
    main()

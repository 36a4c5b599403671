"""Extraction on local workers: how much faster two are than one, what Dask costs, and a plan for a million utterances.

    python benchmarks/extract.py speed      two workers against one, on features that only cost processor time
    python benchmarks/extract.py overhead   what is neither computing nor storing, at 50 ms an utterance
    python benchmarks/extract.py plan       a million utterances of no work: time of the plan, memory of the driver

Times are from the first utterance to the end, so that the start of Python and torch in the workers does not count; it
is printed by itself.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
from machine import describe

import featcache
from featcache.parallel import plan, runner

FEATURES = [featcache.FeatureStorageConfig("fbank")]
MELS = 80


class Ids(Sequence[str]):
    """Names of utterances that are made when asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self.size))]
        if not 0 <= index < self.size:
            raise IndexError(index)
        return f"speaker-{index % 1000:04d}/utt-{index:08d}"


class Provider(featcache.EnvironmentProvider):
    """Utterances that take some time each: of the processor, or asleep."""

    def __init__(self, folder: Path, size: int, frames: int, busy_s: float = 0, asleep_s: float = 0) -> None:
        self.folder, self.size, self.frames, self.busy_s, self.asleep_s = folder, size, frames, busy_s, asleep_s

    def build_env_local(self) -> dict[str, object]:
        return {"dataset": range(self.size), "ids": Ids(self.size), "compute_features": self.compute}

    def build_worker_setup_fn(self) -> Callable[[], dict[str, object]]:
        return self.build_env_local

    def compute(self, items: list[int]) -> list[dict[str, object]]:
        if self.busy_s or self.asleep_s:
            with (self.folder / "times").open("a") as file:
                file.write(f"{time.time()}\n")
            for _ in items:
                time.sleep(self.asleep_s)
                until = time.thread_time() + self.busy_s  # time of the processor, whoever else wants it
                while time.thread_time() < until:
                    pass
        array = np.zeros((self.frames, MELS), np.float32)
        return [{"id": Ids(self.size)[number], "fbank": array} for number in items]


def run(provider: Provider, workers: int, batch_size: int = 1) -> tuple[float, float]:
    """Extract; returns the seconds before the first utterance, and those from there to the end."""
    started = time.time()
    parallel = {"env": "local", "n_workers": workers}
    cache = featcache.extract(
        provider,
        provider.folder / f"cache-{time.time_ns()}",
        FEATURES,
        parallel=parallel,
        batch_size=batch_size,
        progressbar=False,
    )
    assert len(cache) == provider.size
    assert cache.complete
    ended, times = time.time(), provider.folder / "times"
    first = min(map(float, times.read_text().split())) if times.exists() else started
    times.unlink(missing_ok=True)
    return first - started, ended - first


def speed(folder: Path, rounds: int) -> None:
    """One worker and two, in turns."""
    provider = Provider(folder, 600, 750, busy_s=0.05)
    print("600 utterances of 50 ms of the processor each, 750 frames x 80 float32; start-up, then the rest")
    for _ in range(rounds):
        (start_1, one), (start_2, two) = run(provider, 1), run(provider, 2)
        print(f"one worker {start_1:.1f} + {one:.2f} s, two {start_2:.1f} + {two:.2f} s: {one / two:.2f} times as fast")


def overhead(folder: Path, rounds: int) -> None:
    """What an utterance costs beside computing it: of two workers that sleep, since then nobody is in the way."""
    provider = Provider(folder, 1200, 750, asleep_s=0.05)
    ideal = provider.size * provider.asleep_s / 2
    for _ in range(rounds):
        start, seconds = run(provider, 2)
        print(
            f"1200 utterances of 50 ms, two workers: start-up {start:.1f} s, then {seconds:.2f} s, computing alone "
            f"is {ideal:.2f} s: {100 * (seconds / ideal - 1):.1f} % more, storing included"
        )


def million(folder: Path, size: int) -> None:
    """The driver of a million utterances that take no time, on two workers."""
    began = time.perf_counter()
    ids = Ids(size)
    hashes = plan.hashes_of(ids)
    plan.check_ids(ids, hashes)
    lengths = np.random.default_rng(0).uniform(1, 30, size)
    with featcache.CacheWriter(folder / "empty", FEATURES):
        missing = np.flatnonzero(plan.missing_from(folder / "empty", hashes))
    batches = plan.batches_of(missing, lengths, 1)
    tasks = plan.cut(batches, lengths, 32 * 2)
    print(f"{size:,} utterances: plan of {len(tasks)} tasks in {time.perf_counter() - began:.1f} s, {memory()}")

    finish = runner.Run._finish
    before_merge = []

    def noted(run: runner.Run, writer: featcache.CacheWriter, error: BaseException | None) -> None:
        before_merge.append(memory())
        finish(run, writer, error)

    peak = Peak()
    with mock.patch.object(runner.Run, "_finish", noted):
        _, seconds = run(Provider(folder, size, 1), 2, batch_size=64)
    print(f"all of one frame each in {seconds:.0f} s; driver: {before_merge[0]} before the merge, {memory()} then")
    print(f"largest resident memory of its own (not mapped files): {peak.stop() / 1e6:.0f} MB")


def memory() -> str:
    """Say how much memory this process had at most."""
    return f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB"


class Peak:
    """Looks at this process's private memory every tenth of a second."""

    def __init__(self) -> None:
        self._most, self._running = 0, True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> int:
        """Return the most that was seen, in bytes."""
        self._running = False
        self._thread.join()
        return self._most

    def _watch(self) -> None:
        while self._running:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    self._most = max(self._most, int(line.split()[1]) * 1024)
            time.sleep(0.1)


@click.command()
@click.argument("what", type=click.Choice(["speed", "overhead", "plan"]))
@click.option("--rounds", default=3, show_default=True)
@click.option("--utterances", default=1_000_000, show_default=True, help="Of `plan`.")
def main(what: str, rounds: int, utterances: int) -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as directory:
        folder = Path(directory)
        print(describe(folder, "numpy", "torch", "distributed"))
        if what == "speed":
            speed(folder, rounds)
        elif what == "overhead":
            overhead(folder, rounds)
        else:
            million(folder, utterances)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()

"""Extraction on local workers: how much faster two are than one, what Dask costs, and a plan for a
million utterances.

    python benchmarks/extraction.py            all of these:
    python benchmarks/extraction.py speed      two workers against one, on features that only cost
                                               processor time
    python benchmarks/extraction.py overhead   what is neither computing nor storing, at 50 ms an
                                               utterance
    python benchmarks/extraction.py plan       a million utterances of no work: time of the plan,
                                               memory of the driver

Each worker notes when it computes and when it stores, so that a busy machine's waiting counts where
it happens. Times are from a worker's first utterance to its last, so that the start of Python and
torch in the workers does not count; it is printed by itself.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import numpy as np
from machine import describe

import featcache
from featcache.extraction import fill
from featcache.extraction import run as plan
from featcache.extraction.computation import wanted_batches
from featcache.extraction.datasets import IdNumbers
from featcache.writing.part_writer import PartWriter

FEATURES = [featcache.FeatureStorageConfig("fbank")]
MELS = 80
WORK = ("compute", "store")


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

    def __init__(
        self, folder: Path, size: int, frames: int, busy_s: float = 0, asleep_s: float = 0
    ) -> None:
        self.folder, self.size, self.frames, self.busy_s, self.asleep_s = (
            folder,
            size,
            frames,
            busy_s,
            asleep_s,
        )

    def build_env_local(self) -> dict[str, object]:
        return {
            "dataset": range(self.size),
            "ids": Ids(self.size),
            "compute_features": self.compute,
        }

    def build_worker_setup_fn(self) -> Callable[[], dict[str, object]]:
        return self.build_in_worker

    def build_in_worker(self) -> dict[str, object]:
        if self.busy_s or self.asleep_s:
            for name in ("write", "commit"):
                setattr(PartWriter, name, self.timed(getattr(PartWriter, name)))
        return self.build_env_local()

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def with_time(*args: Any) -> Any:
            with self.noted("store"):
                return method(*args)

        return with_time

    @contextlib.contextmanager
    def noted(self, what: str) -> Iterator[None]:
        begin = time.time()
        yield
        with (self.folder / "times").open("a") as file:
            file.write(f"{os.getpid()} {what} {begin} {time.time()}\n")

    def compute(self, items: list[int]) -> list[dict[str, object]]:
        if self.busy_s or self.asleep_s:
            with self.noted("compute"):
                for _ in items:
                    time.sleep(self.asleep_s)
                    # time of the processor, whoever else wants it
                    until = time.thread_time() + self.busy_s
                    while time.thread_time() < until:
                        pass
        array = np.zeros((self.frames, MELS), np.float32)
        return [{"id": Ids(self.size)[number], "fbank": array} for number in items]


class Times(NamedTuple):
    """Where the time of the workers went."""

    before_s: float  # the first utterance
    seconds: float  # from there to the last
    computing: float  # per cent of these, over all workers
    storing: float

    def __str__(self) -> str:
        rest = 100 - self.computing - self.storing
        return (
            f"start-up {self.before_s:.1f} s, then {self.seconds:.2f} s: {self.computing:.1f} % "
            f"computing, {self.storing:.1f} % storing, {rest:.1f} % everything else"
        )


def run(provider: Provider, workers: int, batch_size: int = 1) -> Times:
    """Extract into a new cache."""
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
    path = provider.folder / "times"
    if not path.exists():
        return Times(0, time.time() - started, 0, 0)
    times: dict[str, list[tuple[str, float, float]]] = {}
    for line in path.read_text().splitlines():
        worker, what, begin, end = line.split()
        times.setdefault(worker, []).append((what, float(begin), float(end)))
    path.unlink()
    first = min(begin for notes in times.values() for _, begin, _ in notes)
    spans = [(min(b for _, b, _ in notes), max(e for _, _, e in notes)) for notes in times.values()]
    spent = {
        what: sum(e - b for notes in times.values() for w, b, e in notes if w == what)
        for what in WORK
    }
    return Times(
        first - started,
        max(end for _, end in spans) - first,
        100 * spent["compute"] / sum(end - begin for begin, end in spans),
        100 * spent["store"] / sum(end - begin for begin, end in spans),
    )


def speed(folder: Path, rounds: int) -> None:
    """One worker and two, in turns."""
    provider = Provider(folder, 600, 750, busy_s=0.05)
    print("600 utterances of 50 ms of the processor each, 750 frames x 80 float32")
    for _ in range(rounds):
        one, two = run(provider, 1), run(provider, 2)
        print(f"one worker: {one}\ntwo: {two}\n{one.seconds / two.seconds:.2f} times as fast")


def overhead(folder: Path, rounds: int) -> None:
    """What an utterance costs beside computing and storing it."""
    provider = Provider(folder, 1200, 750, asleep_s=0.05)
    print("1200 utterances that sleep for 50 ms each, 750 frames x 80 float32, two workers")
    for _ in range(rounds):
        print(run(provider, 2))


def million(folder: Path, size: int) -> None:
    """The driver of a million utterances that take no time, on two workers."""
    began = time.perf_counter()
    ids = Ids(size)
    numbers = IdNumbers(ids)
    lengths = np.random.default_rng(0).uniform(1, 30, size)
    with featcache.CacheWriter(folder / "empty", FEATURES):
        missing = np.flatnonzero(~numbers.committed(folder / "empty"))
    order = plan.longest_first(missing, lengths)
    batches = wanted_batches(order, size, {"batch_size": 1})
    tasks = plan.cut(batches, lengths, 32 * 2)
    print(
        f"{size:,} utterances: plan of {len(tasks)} tasks in {time.perf_counter() - began:.1f} s, "
        f"{memory()}"
    )

    publish = fill._publish
    before_merge = []

    def noted(*args: Any) -> None:
        before_merge.append(memory())
        publish(*args)

    peak = Peak()
    with mock.patch.object(fill, "_publish", noted):
        seconds = run(Provider(folder, size, 1), 2, batch_size=64).seconds
    print(
        f"all of one frame each in {seconds:.0f} s; driver: {before_merge[0]} before the merge, "
        f"{memory()} then"
    )
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
@click.argument("what", type=click.Choice(["all", "speed", "overhead", "plan"]), default="all")
@click.option("--rounds", default=3, show_default=True)
@click.option("--utterances", default=1_000_000, show_default=True, help="Of `plan`.")
def main(what: str, rounds: int, utterances: int) -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as directory:
        folder = Path(directory)
        print(describe(folder, "numpy", "torch", "distributed"))
        if what in ("all", "plan"):  # first, as the most memory of this process counts
            million(folder, utterances)
        if what in ("all", "speed"):
            speed(folder, rounds)
        if what in ("all", "overhead"):
            overhead(folder, rounds)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()

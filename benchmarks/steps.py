"""What a `FeatureLoader` costs beside the steps of training, by the number of its threads.

A step does nothing, sleeps as one does that waits for a GPU, keeps a processor busy within torch,
or within Python, each for 5 ms. Measured is the time of an epoch less that of its steps alone, and
how long the loop waited for a batch. All in turns; medians over the rounds.

    python benchmarks/steps.py [--utterances 3000] [--rounds 7]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import torch
from corpus import make_arrays, make_ids, write_caches
from load import BATCH, data, in_batches
from machine import describe
from method import Chosen, Rows

from featcache import FeatureLoader

STEP_S = 0.005
THREADS = (0, 1, 2, 3)
BATCHES = 132  # three times as many as are read ahead
Step = Callable[[], object]


def calibrated(work: Step) -> Step:
    """Return what repeats some work as often as fits into a step."""
    times = []
    for _ in range(200):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    count = max(1, int(STEP_S / np.median(times)))

    def step() -> None:
        for _ in range(count):
            work()

    return step


def make_steps() -> dict[str, Step]:
    """Return the kinds of steps."""
    matrix = torch.randn(256, 256)
    return {
        "nothing": lambda: None,
        "asleep": lambda: time.sleep(STEP_S),
        "busy in torch": calibrated(lambda: matrix @ matrix),
        "busy in Python": calibrated(lambda: sum(range(1000))),
    }


def epoch(loader: FeatureLoader, step: Step) -> tuple[float, list[float]]:
    """Return the seconds of an epoch with its steps, and those waited for each batch."""
    waited = []
    began = asked = time.perf_counter()
    for batch in loader:
        waited.append(time.perf_counter() - asked)
        del batch
        step()
        asked = time.perf_counter()
    return time.perf_counter() - began, waited


@click.command()
@click.option("--utterances", default=3000, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="On a real disk; else where temporary files go.",
)
def main(utterances: int, rounds: int, directory: Path | None) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="featcache-bench-", dir=directory) as name:
        root = Path(name)
        about = describe(root, "numpy", "torch")
        arrays = make_arrays(utterances)
        write_caches(root, make_ids(utterances), arrays)
        figures = measure(root / "memmap", utterances, rounds)
    print(f"{about}, torch with one thread\n{data([*map(len, arrays)])}")
    print(f"warm, median of {rounds} rounds of {BATCHES} batches; steps of {STEP_S * 1e3:.0f} ms")
    print(
        f"{'step':16}{'threads':>8}{'ms a batch more':>17}{'quartiles':>18}{'ms waited':>11}"
        f"{'median':>8}{'p90':>7}"
    )
    for (kind, threads), rows in figures.items():
        more = [ms for ms, _ in rows]
        waited = np.concatenate([waits for _, waits in rows]) * 1e3
        low, median, high = np.percentile(more, (25, 50, 75))
        half, most = np.percentile(waited, (50, 90))
        print(
            f"{kind:16}{threads:8}{median:17.2f}{f'{low:.2f} to {high:.2f}':>18}"
            f"{waited.mean():11.2f}{half:8.2f}{most:7.2f}"
        )


Figures = dict[tuple[str, int], list[tuple[float, list[float]]]]


def measure(cache: Path, utterances: int, rounds: int) -> Figures:
    """Return for each kind of step and number of threads, and each round: ms a batch more than the
    steps alone, and the waits.
    """
    random, steps, chosen = np.random.default_rng(1), make_steps(), Chosen()
    loaders = {n: FeatureLoader(cache, "fbank", batch_sampler=chosen, threads=n) for n in THREADS}
    figures: Figures = {(kind, n): [] for kind in steps for n in THREADS}
    for loader in loaders.values():  # each page is touched once
        chosen.rows = in_batches(np.arange(utterances), utterances // BATCH)
        epoch(loader, steps["nothing"])
    for _ in range(rounds):
        times = -(-BATCHES * BATCH // utterances)
        order = np.concatenate([random.permutation(utterances) for _ in range(times)])
        rows: Rows = in_batches(order, BATCHES)
        chosen.rows = rows
        for kind, step in steps.items():
            for threads in random.permutation(THREADS).tolist():
                began = time.perf_counter()
                for _ in rows:
                    step()
                alone = time.perf_counter() - began
                seconds, waited = epoch(loaders[threads], step)
                figures[kind, threads].append(((seconds - alone) / len(rows) * 1e3, waited))
    return figures


if __name__ == "__main__":
    main()

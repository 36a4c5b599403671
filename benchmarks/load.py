"""How fast padded batches of random utterances come: ours, the peers, and the limits of memory and
disk.

Every method reads the same batches, in turns of another order each round, so that a slow moment of
the machine hits all of them and nobody always comes after another that read the same file. The
clock covers whole rounds, from asking for the first batch to having the last, so that nobody gains
by what is read ahead. Only the start of worker processes is not counted, for anyone: warm rounds
keep processes and mappings; cold ones open all anew, have it give two batches of one utterance, and
then drop its files from the page cache.

    python benchmarks/load.py [--utterances 3000] [--warm 7] [--cold 3]
    python benchmarks/load.py --alone --warm 31 --cold 0    ours and the limits of memory
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import corpus
import numpy as np
import torch
from machine import describe
from method import Feed, Method, Rows
from numpy.typing import NDArray
from ours import limits, ours
from page_cache import evict
from peers import peers
from streamers import installed, streamers, write_streamers

BATCH = 32
DOUBTFUL = 1.5  # times the fastest limit: what is faster was not measured rightly
COPY, H5 = "RAM to RAM copy, the same buffer again", "h5py by key + pad, 2 workers"
PACKAGES = (
    "numpy",
    "torch",
    "h5py",
    "lhotse",
    "speechbrain",
    "zarr",
    "webdataset",
    "datasets",
    "pyarrow",
)


@dataclass
class Figures:
    """Measurements of a method: the rate of each round, the waits for each batch of all rounds."""

    kind: str
    gb_per_s: list[float] = field(default_factory=list)
    utterances_per_s: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)


Table = dict[str, Figures]


@dataclass(frozen=True)
class Round:
    """Batches to measure, and before them the few that start a method, of other utterances."""

    start: Rows
    rows: Rows
    # the order of the methods: who comes later may find a disk's own cache filled
    turns: Sequence[int]


@click.command()
@click.option("--utterances", default=3000, show_default=True)
@click.option("--batches", default=44, show_default=True, help="Batches of each round.")
@click.option("--warm", default=7, show_default=True, help="Warm rounds.")
@click.option("--cold", default=3, show_default=True, help="Cold rounds; 0: no table of them.")
@click.option("--alone", is_flag=True, help="Leave the peers out.")
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="On a real disk; else where temporary files go.",
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Where to write the figures."
)
def main(
    utterances: int,
    batches: int,
    warm: int,
    cold: int,
    alone: bool,
    directory: Path | None,
    json_path: Path | None,
) -> None:
    """Print a table of warm and one of cold batches."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # the peers' own
    with tempfile.TemporaryDirectory(prefix="featcache-bench-", dir=directory) as name:
        root = Path(name)
        about = describe(root, *PACKAGES, *installed())
        arrays = write(root, utterances, alone)
        lengths = [len(array) for array in arrays]
        methods = [
            *limits(root, arrays),
            *ours(root),
            *([] if alone else peers(root, corpus.make_ids(utterances), lengths)),
            *([] if alone else streamers(root)),
        ]
        random = np.random.default_rng(1)
        orders = [random.permutation(utterances) for _ in range(max(warm, cold))]
        rounds = [
            Round(
                order[-2:, None].tolist(),
                in_batches(order[:-2], batches),
                random.permutation(len(methods)).tolist(),
            )
            for order in orders
        ]
        print(f"{about}, torch with one thread\n{data(lengths)}")
        warm_figures = measure_warm(methods, rounds[:warm], arrays)
        copies = [
            np.median(figures.gb_per_s)
            for figures in warm_figures.values()
            if figures.kind == "limit"
        ]
        title = (
            f"warm: all in the page cache, median of {warm} rounds of {len(rounds[0].rows)} batches"
        )
        report(warm_figures, title, DOUBTFUL * max(copies))
        cold_figures: Table = {}
        if cold:
            cold_figures, resident = measure_cold([m for m in methods if m.reads], rounds[:cold])
            worst = max(resident, key=resident.__getitem__)
            gone = f"at most {resident[worst]:.1%} of the sampled pages were in memory before"
            report(
                cold_figures,
                f"cold: dropped from the page cache, {gone} ({worst}), median of {cold} rounds as "
                "above",
            )
    if json_path:
        figures = {"warm": warm_figures, "cold": cold_figures}
        content = {
            kind: {n: [f.kind, *f.gb_per_s] for n, f in table.items()}
            for kind, table in figures.items()
        }
        json_path.write_text(
            json.dumps({"about": about, "data": data(lengths), **content}, indent=1) + "\n"
        )


def write(root: Path, count: int, alone: bool) -> list[corpus.Floats]:
    """Write all formats, or ours alone; returns the arrays."""
    ids, arrays = corpus.make_ids(count), corpus.make_arrays(count)
    corpus.write_caches(root, ids, arrays)
    if alone:
        return arrays
    for write_format in (
        corpus.write_h5,
        corpus.write_lhotse,
        corpus.write_tars,
    ):
        write_format(root, ids, arrays)
    corpus.write_arrow(root, ids, arrays)
    corpus.write_files(root, ids, arrays)
    corpus.write_zarr(root, arrays)
    write_streamers(root, arrays)
    return arrays


def data(lengths: Sequence[int]) -> str:
    """Describe the data."""
    size = sum(lengths) * corpus.MELS * 4 / 1e9
    shape = f"{corpus.FRAMES[0]} to {corpus.FRAMES[1]} frames x {corpus.MELS} float32"
    return f"{len(lengths)} utterances of {shape} ({size:.2f} GB), batches of {BATCH} random ones"


def measure_warm(
    methods: Sequence[Method], rounds: Sequence[Round], arrays: Sequence[corpus.Floats]
) -> Table:
    """Measure with all in memory, mapped and started; checks all batches of a first round."""
    feeds = [method.open() for method in methods]
    every = in_batches(np.arange(len(arrays)), len(arrays))
    for method, feed in zip(methods, feeds, strict=True):
        check(method, feed, every, arrays)
    table = {method.name: Figures(method.kind) for method in methods}
    for round in rounds:
        for number in round.turns:
            time_round(feeds[number], round.rows, table[methods[number].name])
    return table


def measure_cold(
    methods: Sequence[Method], rounds: Sequence[Round]
) -> tuple[Table, dict[str, float]]:
    """Measure with everything opened anew on evicted files; returns also the largest shares that
    were in memory.
    """
    table = {method.name: Figures(method.kind) for method in methods}
    resident = dict.fromkeys(table, 0.0)
    for round in rounds:
        for method in [methods[number] for number in round.turns if number < len(methods)]:
            # pages that are mapped cannot be evicted: no mapping of the round before may be left
            gc.collect()
            feed = method.open()
            for batch in feed(round.start):
                del batch
            assert method.reads is not None
            resident[method.name] = max(resident[method.name], evict(method.reads))
            time_round(feed, round.rows, table[method.name])
            del feed
    return table, resident


def in_batches(order: NDArray[np.int64], most: int) -> Rows:
    """Cut utterances into full batches, `most` at most."""
    count = min(len(order) // BATCH, most)
    rows: Rows = order[: count * BATCH].reshape(count, BATCH).tolist()
    return rows


def check(method: Method, feed: Feed, rows: Rows, arrays: Sequence[corpus.Floats]) -> None:
    """See that a method gives the arrays, padded."""
    for batch, padded, lengths in feed(rows):
        if not batch:  # the disk's limit gives none
            continue
        assert padded.dtype == torch.float32, method.name
        for row, found, length in zip(batch, padded.numpy(), lengths.tolist(), strict=True):
            assert length == len(arrays[row]), method.name
            np.testing.assert_allclose(
                found[:length], arrays[row], rtol=0, atol=method.tolerance, err_msg=method.name
            )
            assert not found[length:].any(), method.name


def time_round(feed: Feed, rows: Rows, figures: Figures) -> None:
    """Add a round's figures."""
    nbytes = utterances = 0
    waits = []
    started = began = time.perf_counter()
    for batch, padded, lengths in feed(rows):
        ended = time.perf_counter()
        waits.append((ended - began) * 1e3)
        nbytes += padded.nbytes
        utterances += len(batch)
        del batch, padded, lengths  # their memory may be used again
        began = time.perf_counter()
    seconds = ended - started
    figures.gb_per_s.append(nbytes / seconds / 1e9)
    figures.utterances_per_s.append(utterances / seconds)
    figures.wait_ms += waits


def report(table: Table, title: str, most: float = np.inf) -> None:
    """Print a table."""
    print(f"\n{title}")
    print(
        f"{'':58}{'GB/s':>7}{'quartiles':>16}{'utt/s':>9}"
        f"{'ms a batch':>12}{'p99':>7}{'x copy':>8}{'x h5py':>8}"
    )
    copy, h5 = (np.median(table[name].gb_per_s) if name in table else np.nan for name in (COPY, H5))
    for name, figures in table.items():
        low, median, high = np.percentile(figures.gb_per_s, (25, 50, 75))
        wait, late = np.percentile(figures.wait_ms, (50, 99))
        print(
            f"{name:58}{median:7.2f}{f'{low:.2f} to {high:.2f}':>16}"
            f"{np.median(figures.utterances_per_s):9.0f}"
            f"{wait:12.2f}{late:7.1f}{ratio(median, copy)}{ratio(median, h5)}"
            f"{'  doubtful: faster than any copy, is the machine busy?' if median > most else ''}"
        )


def ratio(rate: float, other: float) -> str:
    """Return a quotient as a cell."""
    return f"{'' if np.isnan(other) else f'{rate / other:.2f}':>8}"


if __name__ == "__main__":
    main()

"""How long the batch samplers take, from arrays and from the same shape files, against ESPnet's
where it is installed.

The lengths are uniform; categories are as uneven as languages are (Zipf), data sets are even.
Seconds are of processor time, so that a busy machine does not count, the best of a few rounds;
ESPnet runs once.

    python benchmarks/samplers.py [--utterances 1000000] [--rounds 3] [--no-files]
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from featcache.espnet import build_batch_sampler, build_category_batch_sampler

FRAMES = (100, 2000)
BINS = 40_000  # a batch of about 38 utterances
CATEGORIES, DATASETS = 100, 10
Arguments = dict[str, Any]
CASES: dict[str, Arguments] = {
    "unsorted": {"type": "unsorted", "batch_size": 32},
    "sorted": {"type": "sorted", "batch_size": 32},
    "folded": {"type": "folded", "batch_size": 32, "fold_lengths": [800]},
    "folded, 2 files": {"type": "folded", "batch_size": 32, "fold_lengths": [800, 150]},
    "length": {"type": "length", "batch_bins": BINS},
    "length, 2 files": {"type": "length", "batch_bins": BINS},
    "length, no padding": {"type": "length", "batch_bins": BINS, "padding": False},
    "numel": {"type": "numel", "batch_bins": BINS * 80},
    "numel, 2 files": {"type": "numel", "batch_bins": BINS * 80},
    "numel, no padding": {"type": "numel", "batch_bins": BINS * 80, "padding": False},
    "catbel": {"type": "catbel", "batch_size": 32},
    "catpow": {
        "type": "catpow",
        "batch_bins": BINS,
        "upsampling_factor": 0.5,
        "dataset_scaling_factor": 1.2,
    },
    "catpow_balance_dataset": {
        "type": "catpow_balance_dataset",
        "batch_bins": BINS,
        "category_upsampling_factor": 0.5,
        "dataset_upsampling_factor": 0.5,
        "dataset_scaling_factor": 1.2,
    },
}


@click.command()
@click.option("--utterances", default=1_000_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option(
    "--files/--no-files", default=True, show_default=True, help="Measure shape files, too."
)
def main(utterances: int, rounds: int, files: bool) -> None:
    """Print the table of samplers."""
    arrays = make_arrays(utterances)
    espnet = files and find_spec("espnet2") is not None
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy "
        f"{version('numpy')}"
    )
    print(f"{utterances} utterances, seconds of processor time, best of {rounds}")
    print(
        f"{'':24}{'arrays':>9}{'files':>9}{'ESPnet':>9}"
        f"{'x arrays':>10}{'x files':>9}{'batches':>10}"
    )
    with tempfile.TemporaryDirectory(prefix="featcache-bench-") as directory:
        if files:
            write_files(Path(directory), arrays)
        for name, case in CASES.items():
            row = f"{name:24}"
            build = (
                build_category_batch_sampler
                if case["type"].startswith("cat")
                else build_batch_sampler
            )
            ours, batches = measure(build, case | from_arrays(name, arrays), rounds)
            row += f"{ours:9.3f}"
            if files:
                parsed, _ = measure(build, case | from_files(name, directory), rounds)
                row += f"{parsed:9.3f}"
            if espnet:
                theirs, _ = measure(
                    espnet_builder(case["type"]), for_espnet(case | from_files(name, directory)), 1
                )
                row += f"{theirs:9.2f}{theirs / ours:10.0f}{theirs / parsed:9.0f}"
            print(f"{row}{batches:{10 if espnet else 38 if not files else 29}}", flush=True)


def make_arrays(utterances: int) -> dict[str, NDArray[np.int64]]:
    """Return shapes of two features, and the category and data set of each utterance."""
    rng = np.random.default_rng(0)
    frames = rng.integers(*FRAMES, utterances)
    share = 1 / np.arange(1, CATEGORIES + 1)
    return {
        "feats": np.column_stack([frames, np.full(utterances, 80)]),
        "text": np.column_stack(
            [frames // 12 + rng.integers(1, 20, utterances), np.full(utterances, 500)]
        ),
        "category": rng.choice(CATEGORIES, utterances, p=share / share.sum()),
        "dataset": rng.integers(0, DATASETS, utterances),
    }


def write_files(root: Path, arrays: dict[str, NDArray[np.int64]]) -> None:
    """Write the same as text, as ESPnet reads it."""
    ids = [f"speaker{row % 997:04}-utt{row:08}" for row in range(len(arrays["feats"]))]
    for name in ("feats", "text"):
        lines = zip(ids, arrays[name].tolist(), strict=True)
        (root / name).write_text("".join(f"{id} {frames},{dims}\n" for id, (frames, dims) in lines))
    lengths = zip(ids, arrays["feats"][:, 0].tolist(), strict=True)
    (root / "length").write_text("".join(f"{id} {frames}\n" for id, frames in lengths))
    for name in ("category", "dataset"):
        members: dict[int, list[str]] = {}
        for id, label in zip(ids, arrays[name].tolist(), strict=True):
            members.setdefault(label, []).append(id)
        listed = "".join(f"{name}{label} {' '.join(found)}\n" for label, found in members.items())
        (root / f"{name}2utt").write_text(listed)
    (root / "utt2dataset").write_text(
        "".join(f"{id} {d}\n" for id, d in zip(ids, arrays["dataset"], strict=True))
    )


def from_arrays(name: str, arrays: dict[str, NDArray[np.int64]]) -> Arguments:
    """Return what a sampler takes as arrays."""
    if name.startswith("cat"):
        labels: Arguments = {"categories": arrays["category"]}
        if name == "catpow_balance_dataset":
            labels["datasets"] = arrays["dataset"]
        return (
            labels
            if name == "catbel"
            else labels | {"lengths": np.ascontiguousarray(arrays["feats"][:, 0])}
        )
    return {"lengths": [arrays["feats"], arrays["text"]] if "2 files" in name else arrays["feats"]}


def from_files(name: str, root: str) -> Arguments:
    """Return what a sampler takes as files."""
    if name.startswith("cat"):
        named: Arguments = {"category2utt_file": f"{root}/category2utt"}
        if name == "catpow_balance_dataset":
            named["dataset2utt_parent_dir"] = root
        return named if name == "catbel" else named | {"shape_files": [f"{root}/length"]}
    return {
        "shape_files": [f"{root}/feats", f"{root}/text"] if "2 files" in name else [f"{root}/feats"]
    }


def espnet_builder(type: str) -> Callable[..., Any]:
    """Return ESPnet's function for a type of sampler."""
    from espnet2.samplers import build_batch_sampler as espnet  # type: ignore[import-not-found]

    category = type.startswith("cat")
    builder: Callable[..., Any] = (
        espnet.build_category_batch_sampler if category else espnet.build_batch_sampler
    )
    return builder


def for_espnet(arguments: Arguments) -> Arguments:
    """Return the arguments with those that ESPnet does not leave out."""
    needed = (
        {"min_batch_size": 1}
        if arguments["type"].startswith("cat")
        else {"batch_size": 1, "batch_bins": 1}
    )
    return needed | arguments


def measure(build: Callable[..., Any], arguments: Arguments, rounds: int) -> tuple[float, int]:
    """Return the best seconds of some rounds, and the number of batches."""
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        made = build(**arguments)
        seconds.append(time.process_time() - started)
    return min(seconds), len(made[0] if isinstance(made, tuple) else made)


if __name__ == "__main__":
    main()

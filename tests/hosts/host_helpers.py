"""Tests of other hosts: a cache, scripts on two processes, and what their ranks have seen."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from torchrun import LEAVE

import featcache
from featcache import CacheWriter, FeatureStorageConfig

IDS = [f"utt-{number:02}" for number in range(61)]
Seen = dict[int, list[list[str]]]  # per epoch the ids that each rank saw, in order


def make_host_cache(path: Path) -> featcache.Cache:
    """61 utterances of different lengths, three numbers a frame."""
    with CacheWriter(path, [FeatureStorageConfig("fbank")]) as writer:
        for number, id in enumerate(IDS):
            frames = 3 + number * 17 % 29
            writer.write(id, {"fbank": np.full((frames, 3), number, np.float32)})
    return featcache.open(path)


def run_two(script: str, folder: Path, *arguments: str, alone: bool = False) -> None:
    """Run a script in two connected processes, or in one that starts the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(1 if alone else 2):
        connected = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        environment = {
            **os.environ,
            **({} if alone else connected),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        path = folder / "script.py"
        path.write_text(script + LEAVE)
        processes.append(
            subprocess.Popen(
                [sys.executable, path, folder, *arguments],
                env=environment,
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = [process.communicate(timeout=120)[1] for process in processes]
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0, error[-3000:]


def note(folder: Path, rank: int, epoch: int, ids: list[str]) -> None:
    """Note a batch that a rank trains on."""
    with (folder / f"seen-{rank}.jsonl").open("a") as file:
        file.write(json.dumps([epoch, ids]) + "\n")


def seen_in(folder: Path) -> Seen:
    """What the ranks have noted, per epoch and rank."""
    found: Seen = defaultdict(list)
    for path in sorted(folder.glob("seen-*.jsonl")):
        epochs: dict[int, list[str]] = defaultdict(list)
        for line in path.read_text().splitlines():
            epoch, ids = json.loads(line)
            epochs[epoch] += ids
        for epoch, ids in epochs.items():
            found[epoch].append(ids)
    return dict(found)


def assert_each_once(seen: Seen, epochs: int, ranks: int = 1) -> None:
    """Each utterance once per epoch over all ranks, in another order in each epoch."""
    assert sorted(seen) == list(range(epochs))
    for shares in seen.values():
        assert len(shares) == ranks
        assert sorted(id for share in shares for id in share) == IDS
    assert len({tuple(map(tuple, shares)) for shares in seen.values()}) == epochs

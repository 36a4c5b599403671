"""The plan of an extraction: which utterances make up a task, and where workers find that."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches

TASKS_PER_WORKER = 32  # so that nobody waits for the last one longer than a thirtieth of the time
PLAN = "plan"
RUN = "work-extraction-"  # then 8 hexadecimal digits: the directory of a run, in that of the cache


class Task(NamedTuple):
    """Some batches of a list of batches that lies in the directory of the run."""

    name: str  # of the list
    start: int
    stop: int
    number: int = 0  # of this attempt: no two attempts at the same batches share it


def batches_of(indices: Ints, lengths: NDArray[np.float64] | None, batch_size: int) -> Batches:
    """Put utterances into batches, longest first; in the given order where lengths are not known.

    Args:
        indices: numbers of the utterances in their dataset.
        lengths: of all utterances of the dataset, in any unit.
        batch_size: utterances a batch; the last may hold fewer.
    """
    order = longest_first(indices, lengths)
    ends = np.append(np.arange(0, len(order), batch_size), len(order))
    return Batches(order, ends)


def longest_first(indices: Ints, lengths: NDArray[np.float64] | None) -> Ints:
    """Sort utterances by their lengths, the longest first; as they are without lengths."""
    return indices if lengths is None else indices[np.argsort(-lengths[indices], kind="stable")]


def cut(batches: Batches, lengths: NDArray[np.float64] | None, tasks: int) -> list[tuple[int, int]]:
    """Cut batches that follow each other into at most `tasks` ranges.

    These are of about equal total length (or count).

    No range is longer than an equal share plus its last batch.

    >>> cut(Batches.of([[0], [1], [2], [3]]), np.array([6.0, 2, 2, 2]), 2)
    [(0, 1), (1, 4)]
    """
    weights = (
        np.ones(len(batches.items)) if lengths is None else np.maximum(lengths[batches.items], 0)
    )
    sums = np.append(0, np.cumsum(weights))[batches.ends[1:]]
    if not len(sums) or sums[-1] == 0:
        return [(0, len(sums))] if len(sums) else []
    shares = np.searchsorted(sums, sums[-1] * np.arange(1, tasks + 1) / tasks * (1 - 1e-12)) + 1
    shares[-1] = len(sums)  # whatever weighs nothing at the end
    ends = np.unique(np.append(0, np.minimum(shares, len(sums))))
    return list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))


def digest_of(ids: Iterable[str]) -> str:
    """Return the xxh3-64 of ids in their order, the same in every process."""
    state = xxhash.xxh3_64()
    for id in ids:
        state.update(id.encode("utf-8", "surrogatepass") + b"\0")
    return state.hexdigest()


def check_lengths(lengths: object, size: int) -> NDArray[np.float64]:
    """Return lengths as an array; raises `ConfigError` unless there is one for each utterance."""
    try:
        found = np.asarray(lengths, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lengths are numbers, one for each utterance: {error}") from error
    if found.shape != (size,):
        raise ConfigError(
            f"lengths are {size} numbers, one for each utterance, not an array of {found.shape}"
        )
    if not np.isfinite(found).all():
        number = int(np.isfinite(found).argmin())
        raise ConfigError(
            f"lengths are finite numbers, one for each utterance, but number {number} is "
            f"{found[number]}"
        )
    return found


def save_batches(directory: Path, name: str, batches: Batches) -> None:
    """Write a list of batches where `load_batches` finds it."""
    for column, array in (("items", batches.items), ("ends", batches.ends)):
        np.save(directory / f"{name}-{column}.npy", array)


def load_batches(directory: Path, name: str) -> Batches:
    """Map a list of batches into memory."""
    items, ends = (
        np.load(directory / f"{name}-{column}.npy", mmap_mode="r") for column in ("items", "ends")
    )
    return Batches(items, ends)


def remove_runs(cache: Path) -> None:
    """Remove the directories of runs; what cannot be removed does no harm.

    By another name first: a worker that wakes up late then finds its run over, and writes nothing
    more into it.
    """
    for directory in cache.glob(f"{RUN}*"):
        gone = directory.with_name(f"work-removed-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            directory.rename(gone)
    for directory in cache.glob("work-removed-*"):
        shutil.rmtree(directory, ignore_errors=True)  # NFS keeps files that are open

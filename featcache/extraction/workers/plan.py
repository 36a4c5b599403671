"""The plan of an extraction: the batches of utterances of each task; and a run's directory."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.interface import Ints
from featcache.samplers.batches import Batches

TASKS_PER_WORKER = 32  # so that nobody waits for the last one longer than a thirtieth of the time
LARGEST_TASK = 200_000  # utterances; larger messages are hard on Dask
RUN = "work-extraction-"  # then 8 hexadecimal digits: the directory of a run, in that of the cache


def longest_first(indices: Ints, lengths: NDArray[np.float64] | None) -> Ints:
    """Sort utterances by their lengths, the longest first; as they are without lengths."""
    return indices if lengths is None else indices[np.argsort(-lengths[indices], kind="stable")]


def cut(batches: Batches, lengths: NDArray[np.float64] | None, tasks: int) -> list[Batches]:
    """Cut batches, in their order, into at most `tasks` tasks of about equal total length.

    Without lengths, utterances are counted. No task is longer than an equal share plus its last
    batch.

    >>> [list(task) for task in cut(Batches.of([[0], [1], [2], [3]]), np.array([6.0, 2, 2, 2]), 2)]
    [[[0]], [[1], [2], [3]]]
    """
    sums = batches.ends[1:].astype(float)
    if lengths is not None:
        sums = np.append(0, np.cumsum(np.maximum(lengths[batches.items], 0)))[batches.ends[1:]]
    if not len(sums) or sums[-1] == 0:
        return [batches] if len(sums) else []
    shares = np.searchsorted(sums, sums[-1] * np.arange(1, tasks + 1) / tasks * (1 - 1e-12)) + 1
    shares[-1] = len(sums)  # whatever weighs nothing at the end
    bounds = np.unique(np.append(0, np.minimum(shares, len(sums))))
    items, ends = batches.items, batches.ends
    return [
        Batches(items[ends[start] : ends[stop]], ends[start : stop + 1] - ends[start])
        for start, stop in pairwise(bounds)
    ]


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
    for number in np.flatnonzero(~np.isfinite(found)):
        raise ConfigError(
            f"lengths are finite numbers, one for each utterance, but number {number} is "
            f"{found[number]}"
        )
    return found


def make_run(cache: Path) -> Path:
    """Make a directory for a run, and remove those of killed runs."""
    remove_runs(cache)
    directory = cache / f"{RUN}{secrets.token_hex(4)}"
    directory.mkdir()
    return directory


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

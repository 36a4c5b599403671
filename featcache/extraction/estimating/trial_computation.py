"""A few utterances of a data set computed for trial, and what they tell of all."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.declaration import FeatureStorageConfig
from featcache.errors import ComputeError, ConfigError, describe
from featcache.extraction.computation import checked_result
from featcache.extraction.dataset_batches import DatasetBatches
from featcache.extraction.datasets import visible_lengths
from featcache.extraction.estimating.estimate import chosen, many, raw_bytes
from featcache.extraction.random_state import kept_random_state
from featcache.extraction.run import check_lengths
from featcache.extraction.table_rows import TableRow
from featcache.extraction.workers.executor import checked_environment, loader_options
from featcache.format.annotations import NONE
from featcache.format.index import UNKNOWN
from featcache.interface import Ints
from featcache.writing.arrays import check_features

Lengths = NDArray[np.float64]


@dataclass(frozen=True)
class ComputedSample:
    """Utterances that were computed, and what all of the data set come to."""

    rows: list[TableRow]
    utterances: int
    frames: Mapping[str, float]
    numbers: Mapping[str, float]  # in all arrays of a feature
    seconds: float
    uncertainty: float  # a standard error of the numbers, as a share


def compute_sample(
    environment: Mapping[str, Any], features: Mapping[str, FeatureStorageConfig], number: int
) -> ComputedSample:
    """Compute some utterances, each alone, and tell what all will be by their lengths.

    Raises `ComputeError` if one cannot be computed.
    """
    with kept_random_state():
        env = checked_environment(environment)
        size = len(env["ids"])
        if not size:
            raise ConfigError("the data set is empty: nothing can be tried")
        given = visible_lengths(env["dataset"]) if env.get("lengths") is None else env["lengths"]
        lengths = None if given is None else check_lengths(given, size)
        picked = chosen(np.arange(size) if lengths is None else lengths, min(number, size))
        rows, took_s = _computed(env, picked, features)
    known = None if lengths is None else lengths[picked]
    frames: dict[str, float] = {}
    numbers: dict[str, float] = {}
    errors = []
    for name, feature in features.items():
        sizes = np.array([math.prod(row.arrays[name].shape) for row in rows], np.float64)
        counts = [len(row.arrays[name]) if feature.time_axis == 0 else 1 for row in rows]
        frames[name], _ = _total(np.array(counts, np.float64), known, lengths, size)
        numbers[name], error = _total(sizes, known, lengths, size)
        errors.append(error)
    some = slice(1 if len(rows) > 1 else 0, None)  # the first one warms up
    seconds, _ = _total(
        np.array(took_s)[some], None if known is None else known[some], lengths, size
    )
    rows = _multiplied(rows, env["ids"], features)
    return ComputedSample(rows, size, frames, numbers, max(seconds, 0.0), max(errors))


def _multiplied(
    rows: list[TableRow], ids: Sequence[str], features: Mapping[str, FeatureStorageConfig]
) -> list[TableRow]:
    """Return the rows, and copies under other ids: formats note things beside small arrays."""
    sizes = [sum(raw_bytes(row.arrays, features).values()) for row in rows]
    number = min(len(ids), max(len(rows), many(max(float(np.mean(sizes)), 1.0))))
    mine, others = {row.id for row in rows}, (str(id) for id in ids)
    rest = islice((id for id in others if id not in mine), number - len(rows))
    more = [rows[place % len(rows)]._replace(id=id) for place, id in enumerate(rest)]
    return [*rows, *more]


def _computed(
    env: Mapping[str, Any], picked: Ints, features: Mapping[str, FeatureStorageConfig]
) -> tuple[list[TableRow], list[float]]:
    """Load and compute utterances one by one; return them, and the seconds of each."""
    options = loader_options(env)
    options.setdefault("batch_size", 1)
    rows: list[TableRow] = []
    took_s: list[float] = []
    begun = time.perf_counter()
    for batch in DatasetBatches(env["dataset"], picked, options, env["ids"]):
        try:
            if batch.error is not None:
                raise batch.error
            with torch.no_grad():
                ((id, arrays),) = checked_result(env["compute_features"](batch.data), batch.ids)
        except Exception as error:
            which = ", ".join(map(repr, batch.ids or ["an utterance"]))
            raise ComputeError(
                f"computing the features of {which} failed with {describe(error)}"
            ) from error
        check_features(id, arrays, features)
        rows.append(TableRow(id, {n: _as_numpy(each) for n, each in arrays.items()}, NONE, UNKNOWN))
        took_s.append(time.perf_counter() - begun)
        begun = time.perf_counter()
    return rows, took_s


def _as_numpy(array: Any) -> NDArray[Any]:
    if isinstance(array, torch.Tensor):
        tensor = array.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.asarray(array)


def _total(
    values: Lengths, known: Lengths | None, lengths: Lengths | None, size: int
) -> tuple[float, float]:
    """Return the sum over all utterances of what some have, and its standard error as a share.

    By a straight line over the lengths, where these are known; else by the mean.
    """
    if known is None or lengths is None or len({*known.tolist()}) < 2:
        total, apart = float(values.mean()) * size, values - values.mean()
    else:
        slope, offset = np.polyfit(known, values, 1)
        total = float(slope * lengths.sum() + offset * size)
        apart = values - (slope * known + offset)
    if len(values) == size or not total:
        return total, 0.0
    error = float(np.sqrt((apart**2).sum() / max(len(values) - 1, 1) / len(values)))
    return total, error * size / abs(total)

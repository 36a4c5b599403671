"""What the tests of the iterator factories share: utterances in a cache, and as a data set of
ESPnet's kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.testing._internal.distributed.fake_pg import FakeStore

from featcache import CacheWriter, FeatureDataset, FeatureStorageConfig

Arrays = dict[str, NDArray[Any]]
Pairs = dict[str, tuple[str, Arrays]]


def pairs(lengths: Mapping[str, int]) -> Pairs:
    """Utterances whose values are the numbers of their frames, counted from 1."""
    made: Pairs = {}
    for number, (id, length) in enumerate(lengths.items()):
        frames = np.arange(1, length + 1)
        arrays: Arrays = {
            "fbank": np.repeat(frames[:, None], 3, axis=1).astype(np.float32),
            "units": frames.astype(np.int16),
            "speaker": np.full(2, number, np.float32),
            "utt2category": np.array([number % 3]),
            "utt2fs": np.array([(16000, 8000)[number % 2]]),
        }
        made[id] = id, arrays
    return made


def cached(path: Path, utterances: Pairs, *names: str) -> FeatureDataset:
    """The same utterances in a cache, some of their features as a data set."""
    features = [
        FeatureStorageConfig("fbank"),
        FeatureStorageConfig("units", dtype="int16"),
        FeatureStorageConfig("speaker", time_axis=None),
        FeatureStorageConfig("utt2category", dtype="int64", time_axis=None),
        FeatureStorageConfig("utt2fs", dtype="int64", time_axis=None),
    ]
    with CacheWriter(path, features) as writer:
        for id, arrays in utterances.values():
            writer.write(id, arrays)
    return FeatureDataset(path, names or None)


def only(utterances: Pairs, *names: str) -> Pairs:
    """The utterances with some of their features."""
    return {id: (id, {name: arrays[name] for name in names}) for id, arrays in utterances.values()}


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Be a rank of a process group whose other ranks there need not be."""
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()

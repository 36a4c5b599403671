"""An extraction whose calls can be counted, whose utterances can fail or kill, and what its cache
must hold.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import featcache
from featcache import EnvironmentProvider, FeatureStorageConfig

FEATURES = [
    FeatureStorageConfig("fbank"),
    FeatureStorageConfig("units", dtype="int16", backend="hdf5"),
]
LOCAL = {"env": "local", "n_workers": 2}
ONE_WORKER = {"env": "local", "n_workers": 1}


class Numbers:
    """A dataset of utterance numbers."""

    def __init__(self, size: int) -> None:
        self.ids = [f"spk{number % 3}/utt-{number}" for number in range(size)]
        self.lengths = [1 + number % 50 for number in range(size)]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> int:
        return index


class ComputingError(ValueError):
    """One that cannot be pickled, as it holds what belongs to its process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Computing:
    """Computes features of utterances; notes each in a file, and does to some of them what a bad
    one may do.
    """

    def __init__(
        self, folder: Path, ids: Sequence[str], deeds: Mapping[str, Iterable[int]], seconds: float
    ) -> None:
        self.folder, self.ids, self.seconds = folder, ids, seconds
        self.deeds = {deed: set(numbers) for deed, numbers in deeds.items()}

    def __call__(self, items: list[int]) -> list[dict[str, Any]]:
        for number in items:
            with (self.folder / "calls").open("a") as file:
                file.write(f"{self.ids[number]}\n")
            tried = Counter(calls(self.folder))[self.ids[number]]
            if number in self.deeds.get("kills", ()) or (
                tried == 1 and number in self.deeds.get("kills once", ())
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            if number in self.deeds.get("fails", ()) or (
                tried == 1 and number in self.deeds.get("fails once", ())
            ):
                raise ComputingError(f"cannot compute {number}")
            if number in self.deeds.get("hangs", ()):
                time.sleep(3600)
            if number in self.deeds.get("freezes", ()):
                os.kill(os.getpid(), signal.SIGSTOP)
            for odd in (GeneratorExit, asyncio.CancelledError):
                if number in self.deeds.get(odd.__name__, ()):
                    raise odd(f"in utterance {number}")
            time.sleep(self.seconds)
        return [{"id": self.ids[number], **arrays_of(number)} for number in items]


class Provider(EnvironmentProvider):
    """Builds a dataset of numbers, and what computes them."""

    def __init__(
        self, folder: Path, size: int = 40, seconds: float = 0, **deeds: Iterable[int]
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.size, self.seconds = folder, size, seconds
        self.deeds = {deed.replace("_", " "): list(numbers) for deed, numbers in deeds.items()}

    def build_env_local(self) -> dict[str, object]:
        dataset = Numbers(self.size)
        computing = Computing(self.folder, dataset.ids, self.deeds, self.seconds)
        return {"dataset": dataset, "compute_features": computing}


def calls(folder: Path) -> list[str]:
    """The ids that were computed, in order."""
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def arrays_of(number: int) -> dict[str, Any]:
    """The features of an utterance."""
    random = np.random.default_rng(number)
    frames = 1 + number % 50
    return {
        "fbank": random.standard_normal((frames, 4)).astype(np.float32) * 3 + 40,
        "units": random.integers(-500, 500, frames, np.int16),
    }


def extract(provider: Provider, **settings: Any) -> featcache.Cache:
    """Extract into the cache beside the provider's notes, on two workers, which alone compute."""
    given = {
        "check": None,
        "parallel": LOCAL,
        # how slow a provider is changes no feature
        "fingerprint": {"model": "numbers", "attributes": None},
        "progressbar": False,
        **settings,
    }
    return featcache.open(
        featcache.extract(provider, provider.folder / "cache", FEATURES, **given).path
    )


def assert_holds(cache: featcache.Cache, numbers: Iterable[int], *, complete: bool = True) -> None:
    """Compare a cache, on disk, with what it must hold: arrays and statistics."""
    cache = featcache.open(cache.path, verify="arrays")
    expected = {f"spk{number % 3}/utt-{number}": arrays_of(number) for number in numbers}
    assert list(cache) == sorted(expected)
    for id, arrays in expected.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(cache.read(id, name), array, strict=True)
    frames = np.concatenate([arrays["fbank"] for arrays in expected.values()]).astype(np.float64)
    stats = cache.stats("fbank")
    assert stats.count == len(frames)
    np.testing.assert_allclose(stats.mean, frames.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(stats.var, frames.var(axis=0), rtol=1e-12)
    assert cache.complete == complete
    assert not list(cache.path.glob("work-*-*"))

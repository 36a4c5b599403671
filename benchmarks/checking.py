"""The cost of fingerprint and probe, when a cache is begun and when it is found complete.

    python benchmarks/checking.py

An encoder of 95 M parameters (HuBERT base, random weights) and filterbanks, of utterances of 5 s.
Of calls with the probe and without it, in turns: what they take beside the forward passes, in
seconds by the clock and of processor time, which a busy machine changes less. Medians, warm, one
thread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import describe

import featcache

RATE, SECONDS, UTTERANCES = 16000, 5, 8
BEGUN, FOUND = 3, 7  # calls


class Spent(NamedTuple):
    """Seconds."""

    clock: float
    processor: float

    @classmethod
    def now(cls) -> Spent:
        return cls(time.perf_counter(), time.process_time())

    def less(self, other: Spent) -> Spent:
        return Spent(self.clock - other.clock, self.processor - other.processor)

    def __str__(self) -> str:
        return f"{self.clock:7.3f} s ({self.processor:.3f} s of processor time)"


class Utterances(featcache.EnvironmentProvider):
    """Noise, and what computes features of it."""

    def __init__(self, encode: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.encode = encode
        self.passes = Spent(0, 0)

    def build_env_local(self) -> dict[str, object]:
        generator = torch.Generator().manual_seed(0)
        waves = torch.randn(UTTERANCES, RATE * SECONDS, generator=generator)
        ids = [f"utt-{number}" for number in range(UTTERANCES)]
        items = list(zip(ids, waves, strict=True))
        return {"dataset": items, "ids": ids, "compute_features": self.compute}

    def compute(self, items: list[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
        begin = Spent.now()
        found = [{"id": id, "x": self.encode(wave[None])[0]} for id, wave in items]
        spent = Spent.now().less(begin)
        self.passes = Spent(*map(sum, zip(self.passes, spent, strict=True)))
        return found


def fbank() -> Callable[[torch.Tensor], torch.Tensor]:
    from speechbrain.lobes.features import Fbank

    found: Callable[[torch.Tensor], torch.Tensor] = Fbank(n_mels=80)
    return found


def hubert() -> Callable[[torch.Tensor], torch.Tensor]:
    from transformers import HubertConfig, HubertModel

    model: Any = HubertModel(HubertConfig())
    model.eval()
    return lambda wave: model(wave).last_hidden_state


def call(provider: Utterances, path: Path, check: Any) -> tuple[Spent, Spent]:
    """Return what a call took beside its forward passes, and these."""
    provider.passes = Spent(0, 0)
    begin = Spent.now()
    features = [featcache.FeatureStorageConfig("x")]
    featcache.extract(provider, path, features, check=check, progressbar=False)
    return Spent.now().less(begin).less(provider.passes), provider.passes


def median(calls: list[tuple[Spent, Spent]]) -> tuple[Spent, Spent]:
    """Return the medians of own times and of passes."""
    own, passes = (
        Spent(*(statistics.median(each) for each in zip(*column, strict=True)))
        for column in zip(*calls, strict=True)
    )
    return own, passes


def main() -> None:
    print(describe(Path(tempfile.gettempdir()), "torch", "speechbrain", "transformers"))
    torch.set_num_threads(1)
    for name, encoder in (("fbank", fbank()), ("hubert", hubert())):
        provider = Utterances(encoder)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            call(provider, path / "first", "probe")  # imports
            for when, calls in (("begun", BEGUN), ("found complete", FOUND)):
                timed: dict[str | None, list[tuple[Spent, Spent]]] = {"probe": [], None: []}
                for number in range(calls):
                    for check, found in timed.items():
                        cache = f"{check}-{number if when == 'begun' else 0}"
                        found.append(call(provider, path / cache, check))
                (own, passes), (without, fewer) = median(timed["probe"]), median(timed[None])
                print(f"{name}, a cache is {when}, medians of {calls}")
                print(f"  without the probe   {without}")
                print(f"  with the probe      {own}")
                print(f"  the probe           {own.less(without)}")
                print(f"  its forward passes  {passes.less(fewer)}", flush=True)


if __name__ == "__main__":
    main()

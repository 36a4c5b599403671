"""The probe: what it costs to compute a few utterances again, before and after an extraction.

    python benchmarks/checking.py

An encoder of 95 M parameters (HuBERT base, random weights) and filterbanks, of utterances of 5 s:
the seconds of a call that finds its cache complete, with the probe and without it, less the forward
passes that the probe takes; and the seconds that the probe adds when a cache is begun. The best of
some calls, warm.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe

import featcache

RATE, SECONDS, UTTERANCES, TRIES = 16000, 5, 16, 5


class Utterances(featcache.EnvironmentProvider):
    """Noise, and what computes features of it."""

    def __init__(self, encode: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.encode = encode
        self.passes_s = 0.0

    def build_env_local(self) -> dict[str, object]:
        generator = torch.Generator().manual_seed(0)
        waves = torch.randn(UTTERANCES, RATE * SECONDS, generator=generator)
        ids = [f"utt-{number}" for number in range(UTTERANCES)]
        items = list(zip(ids, waves, strict=True))
        return {"dataset": items, "ids": ids, "compute_features": self.compute}

    def compute(self, items: list[tuple[str, torch.Tensor]]) -> list[dict[str, Any]]:
        begin = time.perf_counter()
        found = [{"id": id, "x": self.encode(wave[None])[0]} for id, wave in items]
        self.passes_s += time.perf_counter() - begin
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


def seconds(provider: Utterances, path: Path, check: Any) -> tuple[float, float]:
    """Seconds of a call, less those of forward passes, and these."""
    provider.passes_s = 0.0
    begin = time.perf_counter()
    features = [featcache.FeatureStorageConfig("x")]
    featcache.extract(provider, path, features, check=check, progressbar=False)
    return time.perf_counter() - begin - provider.passes_s, provider.passes_s


def main() -> None:
    print(describe(Path(tempfile.gettempdir())))
    for name, encoder in (("fbank", fbank()), ("hubert", hubert())):
        provider = Utterances(encoder)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            seconds(provider, path / "first", "probe")  # imports
            begun = {}
            for check in ("probe", None):
                begun[check] = seconds(provider, path / str(check), check)
            again = {
                check: min(seconds(provider, path / "probe", check) for _ in range(TRIES))
                for check in ("probe", None)
            }
        for when, found in (("a cache is begun", begun), ("a cache is complete", again)):
            own = found["probe"][0] - found[None][0]
            passes = found["probe"][1] - found[None][1]
            print(f"{name}, {when}: probe {own * 1e3:.0f} ms and {passes * 1e3:.0f} ms of passes")


if __name__ == "__main__":
    main()

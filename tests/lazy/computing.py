"""A function whose results several processes cache, and which notes what each of them computes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.data_pipeline import provides as _provides
from speechbrain.utils.data_pipeline import takes as _takes

import featcache

Decorate = Callable[..., Callable[[Callable[..., Any]], Any]]
takes: Decorate = _takes
provides: Decorate = _provides
PLACE = Path(os.environ.get("PLACE", "nowhere"))
PACE_S = float(os.environ.get("PACE_S", "0"))


def note(id: str) -> None:
    """Note that an utterance was computed: one line, written at once."""
    descriptor = os.open(PLACE / "computed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(descriptor, f"{id}\n".encode())
    os.close(descriptor)


def computed(place: Path) -> list[str]:
    """Return the ids that were computed, in this order, each time that they were."""
    return (place / "computed").read_text().split()


def frames_of(number: int) -> torch.Tensor:
    """Return the feature of an utterance, the same each time."""
    return torch.arange(8 * (number % 13 + 1), dtype=torch.float32).reshape(-1, 8) + number


@featcache.cache(PLACE / "cache")
@takes("id", "number")
@provides("feats")
def feats(id: str, number: int) -> torch.Tensor:
    time.sleep(PACE_S)
    note(id)
    return frames_of(number)


def utterances(count: int) -> Any:
    """A SpeechBrain data set of the item above."""
    data = {f"utt-{number}": {"number": number} for number in range(count)}
    dataset = DynamicItemDataset(data)
    dataset.add_dynamic_item(feats)
    dataset.set_output_keys(["id", "number", "feats"])
    return dataset

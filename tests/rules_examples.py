"""Functions whose fingerprints are kept, as the rules of each version described them.

A change of the functions is a change of these fingerprints: leave them as they are. Run this in
tests/ once `VERSION` was raised: python -m rules_examples
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from featcache.staleness.provenance import VERSION, provenance

WINDOW = torch.hann_window(8)
SETTINGS = {"mels": 4, "log": True, "eps": 1e-6}


@dataclasses.dataclass
class Shift:
    """A setting of a user's class."""

    by: float = 0.5
    parts: tuple[int, ...] = (1, 2)


class Scale(torch.nn.Module):
    """A user's module with a parameter, a buffer and settings, some with names that tell a lot."""

    def __init__(self) -> None:
        super().__init__()
        self.offset: torch.Tensor
        self.weight = torch.nn.Parameter(torch.arange(4.0))
        self.register_buffer("offset", torch.ones(4))
        self.ctc_temperature = 2.0
        self.dropout = torch.nn.Dropout(0.1)
        self.shift = Shift()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the last axis."""
        moved: torch.Tensor = self.dropout(x * self.weight / self.ctc_temperature + self.offset)
        return moved + self.shift.by


SCALE = Scale().eval()
LAYERS = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()


def plain(id: str) -> torch.Tensor:
    """Return frames made of the id alone."""
    number = sum(map(ord, id)) % 7
    frames = torch.arange(8.0).repeat(3, 1) * WINDOW + number
    return frames if SETTINGS["log"] else frames.exp()


def of_module(id: str) -> torch.Tensor:
    """Return frames scaled by a module."""
    with torch.no_grad():
        result: torch.Tensor = SCALE(plain(id)[:, : SETTINGS["mels"]])
    return result


def of_library(id: str) -> torch.Tensor:
    """Return frames of a module of a library, filled with numbers that no seed decides."""
    with torch.no_grad():
        result: torch.Tensor = LAYERS(plain(id)[:, :4])
    return result


def moved(id: str, by: int = 1) -> torch.Tensor:
    """Return frames moved along time."""
    return torch.roll(plain(id), by, 0)


for parameter, value in zip(LAYERS.parameters(), (0.5, -0.25), strict=True):
    torch.nn.init.constant_(parameter, value)

EXAMPLES: dict[str, Callable[[str], torch.Tensor]] = {
    "plain": plain,
    "of_module": of_module,
    "of_library": of_library,
    "partial": functools.partial(moved, by=2),
}


def kept(version: int) -> dict[str, dict[str, Any]]:
    """Return the fingerprints of a version, by example."""
    found: dict[str, dict[str, Any]] = json.loads(_file_of(version).read_text("utf-8"))
    return found


def _file_of(version: int) -> Path:
    return Path(__file__).parent / "staleness" / "rules" / f"version-{version}.json"


if __name__ == "__main__":
    now = {name: provenance(each).fingerprint({}) for name, each in EXAMPLES.items()}
    _file_of(VERSION).write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", "utf-8")

"""What is measured: ways from storage to padded batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

Rows = Sequence[Sequence[int]]  # the utterances of each batch
Batch = tuple[list[int], torch.Tensor, torch.Tensor]  # rows, padded to the longest, frames of each
Feed = Callable[[Rows], Iterator[Batch]]


@dataclass(frozen=True)
class Method:
    """A way to padded batches.

    `open` makes all ready, and what it returns gives the batches that it is asked for (a sequential
    format: those that come). Without a reference to it no mapping, handle or worker process is
    left.
    """

    name: str
    kind: Literal["limit", "ours", "peer"]
    open: Callable[[], Feed]
    reads: Path | None  # None: memory
    tolerance: float = 0  # how far lossy storage may be off
    padding: float = 0


class Chosen:
    """The batch sampler of a loader that lives for many epochs: the batches that are set."""

    def __init__(self) -> None:
        self.rows: Rows = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self.rows)

"""Data loaders of torch whose workers fail."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def read_all(loader: DataLoader[Any]) -> list[Any]:
    """Return all batches; workers end at once, also after an error of theirs.

    An error that a worker raised refers to itself, and to the iterator: collected as a cycle, that
    has lost the way to its workers, and waits five seconds for them.
    """
    batches: Any = iter(loader)
    try:
        return [*batches]
    finally:
        if loader.num_workers:
            batches._shutdown_workers()

"""Batches copied to a device, the next one while the last one is worked on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


def on_device(batches: Iterable[T], device: torch.device) -> Iterator[T]:
    """Iterate over batches moved to a device, copied one ahead; on a GPU in a stream of its own."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    ahead: list[tuple[T, torch.cuda.Event | None]] = []
    for batch in batches:
        ahead.append(_moved(batch, device, stream))
        if len(ahead) == 2:
            yield _ready(*ahead.pop(0))
    for moved in ahead:
        yield _ready(*moved)


def _moved(batch: T, device: torch.device, stream: torch.cuda.Stream | None) -> tuple[T, torch.cuda.Event | None]:
    if stream is None:
        return _to(batch, device), None
    # what was begun before may still read memory that is free by now: copy into it only after that
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        return _to(batch, device), stream.record_event()


def _ready(batch: T, copied: torch.cuda.Event | None) -> T:
    if copied is not None:
        torch.cuda.current_stream().wait_event(copied)
    return batch


def _to(batch: T, device: torch.device) -> T:
    if isinstance(batch, dict):
        return {key: _to(value, device) for key, value in batch.items()}  # type: ignore[return-value]
    move = getattr(batch, "to", None)
    return batch if move is None else move(device, non_blocking=True)

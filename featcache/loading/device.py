"""Batches copied to a device, the next one while the last one is worked on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch

from featcache.errors import ConfigError

T = TypeVar("T")


def on_device(batches: Iterable[T], device: torch.device) -> Iterator[T]:
    """Iterate over batches moved to a device, copied one ahead; on a GPU in a stream of its own."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    ahead: list[tuple[T, torch.cuda.Event | None]] = []
    for batch in batches:
        ahead.append(_moved(batch, device, stream))
        if len(ahead) == 2:
            yield _ready(*ahead.pop(0), device)
    for moved in ahead:
        yield _ready(*moved, device)


def usable_device(device: torch.device | str) -> torch.device:
    """Return a device; raises `ConfigError` for one that is not there, or torch does not know."""
    with _refused(f"device={str(device)!r}"):
        found = torch.device(device)
        torch.empty(0, device=found)
    return found


def check_pinned() -> None:
    """Raise `ConfigError` where memory cannot be pinned, which a GPU is needed for."""
    with _refused("pin_memory=True"):
        torch.empty(1, pin_memory=True)


@contextmanager
def _refused(setting: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{setting} cannot be used here: {reason}") from error


def to_device(data: T, device: torch.device | str, *, non_blocking: bool = False) -> T:
    """Move all tensors of a batch.

    Those of mappings, lists and tuples, and of whatever has a method `to`, which `non_blocking` is
    passed on to if it is true.
    """
    move = partial(to_device, device=device, non_blocking=non_blocking)
    moved: Any = data
    if hasattr(data, "to"):
        moved = data.to(device, non_blocking=True) if non_blocking else data.to(device)
    elif isinstance(data, Mapping):
        moved = {key: move(value) for key, value in data.items()}
    elif isinstance(data, tuple) and hasattr(data, "_fields"):
        moved = type(data)(*map(move, data))
    elif isinstance(data, list | tuple):
        moved = type(data)(map(move, data))
    return cast(T, moved)


def _moved(
    batch: T, device: torch.device, stream: torch.cuda.Stream | None
) -> tuple[T, torch.cuda.Event | None]:
    if stream is None:
        return to_device(batch, device, non_blocking=True), None
    # what was begun before may still read memory that is free by now: copy into it only after that
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        return to_device(batch, device, non_blocking=True), stream.record_event()


def _ready(batch: T, copied: torch.cuda.Event | None, device: torch.device) -> T:
    if copied is not None:
        torch.cuda.current_stream(device).wait_event(copied)
    return batch

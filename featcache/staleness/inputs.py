"""Digests of what `compute_features` is given of an utterance, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import xxhash


class _UnknownError(Exception):
    """A value that nothing describes."""


def input_digests(data: object, id: str, mentioned: frozenset[str] | None = None) -> dict[str, str]:
    """Return the xxh3-64 of each named value of a batch of one utterance.

    Values that nothing describes are left out, and so is the id.

    Args:
        data: the batch: a mapping, an object such as SpeechBrain's `PaddedBatch`, or a sequence.
        id: of the utterance.
        mentioned: names that count; None: all.

    >>> sorted(input_digests({"id": ["u1"], "sig": np.zeros(3), "text": "yes"}, "u1"))
    ['sig', 'text']
    """
    found = {}
    for name, value in _named(data):
        if not (mentioned is None or name in mentioned or name.isdigit()):
            continue
        if isinstance(value, str) and value == id:
            continue
        state = xxhash.xxh3_64()
        try:
            _feed(state, value)
        except (_UnknownError, RecursionError):
            continue
        found[name] = state.hexdigest()
    return found


def _named(data: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over the values of a batch by name, or by place where they have none."""
    while isinstance(data, list | tuple) and len(data) == 1 and not hasattr(data, "_fields"):
        data = data[0]
    if isinstance(data, list | tuple) and not hasattr(data, "_fields"):
        for place, value in enumerate(data):
            if isinstance(value, Mapping):
                yield from _named(value)
            else:
                yield str(place), value
        return
    fields = _fields(data)
    if fields is None:
        yield "0", data
        return
    for name, value in fields.items():
        if name != "id" and not name.startswith("_"):
            yield name, value


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the items of a mapping or the attributes of an object that holds values."""
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in value.items()}
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        return dict(zip(names, value, strict=True))
    if dataclasses.is_dataclass(value) or type(value).__module__.startswith("speechbrain."):
        return dict(vars(value))
    plain = hasattr(value, "shape") or isinstance(value, str | bytes | int | float | None)
    return None if plain or not hasattr(value, "__dict__") else dict(vars(value))


def _feed(state: Any, value: Any) -> None:
    """Add a value to a digest, the same in every process."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        state.update(str(tensor.dtype).encode())
        value = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:
            raise _UnknownError
        state.update(f"{array.dtype.str}{array.shape}".encode())
        state.update(array.data.cast("B") if array.size and array.ndim else array.tobytes())
    elif isinstance(value, str):
        state.update(b"s" if _is_path(value) else b"s" + value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        state.update(b"b" + bytes(value))
    elif isinstance(value, bool | int | float | complex | None):
        state.update(f"{type(value).__name__} {value!r}".encode())
    elif isinstance(value, Set):
        state.update(" ".join(sorted(map(repr, value))).encode())
    elif isinstance(value, list | tuple):
        state.update(f"[{len(value)}".encode())
        for inner in value:
            _feed(state, inner)
    else:
        _feed_fields(state, value)


def _feed_fields(state: Any, value: Any) -> None:
    fields = _fields(value)
    if fields is None:
        raise _UnknownError
    for name, inner in sorted(fields.items()):
        state.update(f"{{{name}".encode())
        _feed(state, inner)


def _is_path(text: str) -> bool:
    """Say whether a text is where something lies: the same data may lie elsewhere."""
    if not {"/", "\\"}.intersection(text) or len(text) > 4096 or "\0" in text:
        return False
    return Path(text).is_absolute() or Path(text).exists()

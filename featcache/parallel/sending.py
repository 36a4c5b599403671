"""What is sent to the workers: objects as bytes, and a clear word about those that cannot be."""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import torch

from featcache.errors import ComputeError, ConfigError, MissingDependencyError


def pack(named: Mapping[str, object]) -> bytes:
    """Turn objects into bytes, together, so that what they share stays shared; code of the main script included.

    Raises `ConfigError`, which names it, for an object that cannot be sent.
    """
    try:
        return _dumps(dict(named))
    except Exception as error:  # pickling runs code of all kinds of objects
        raise ConfigError(
            f"workers cannot be sent {_culprit('', named) or 'this'}: {error}; open such things when they are first "
            "used, or leave them out of the state (`__getstate__`)"
        ) from error


def unpack(data: bytes) -> dict[str, Any]:
    """Return what `pack` was given; tensors are on the CPU, wherever they were."""
    return cast(dict[str, Any], torch.load(io.BytesIO(data), map_location="cpu", weights_only=False))


def sendable(error: Exception) -> Exception:
    """Return an error with its traceback as a note, ready to be sent; another one in place of what cannot be.

    Errors hold whatever their makers put in: locks, open files, arguments that they do not take again.
    """
    note = f"in the worker:\n{''.join(traceback.format_exception(error))}"
    error.__cause__ = error.__context__ = error.__traceback__ = None
    try:
        unpack(_dumps({"error": error}))
    except Exception:  # whatever the objects in it raise
        error = ComputeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error


def _dumps(value: object) -> bytes:
    try:
        cloudpickle = import_module("cloudpickle")
    except ImportError as error:
        raise MissingDependencyError(
            f"workers are sent their code by 'cloudpickle', which does not load: {error}; "
            "try: pip install 'featcache[dask]'"
        ) from error
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=cloudpickle, pickle_protocol=pickle.DEFAULT_PROTOCOL)
    return buffer.getvalue()


def _culprit(path: str, value: object, depth: int = 4) -> str:
    """Return the innermost attribute or item that cannot be pickled, as `a.b.c`."""
    inner = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    if depth:
        for name, part in inner.items():
            try:
                _dumps(part)
            except Exception:  # the one that was looked for
                return _culprit(f"{path}.{name}" if path else str(name), part, depth - 1)
    return f"{path} ({type(value).__qualname__})" if path else ""

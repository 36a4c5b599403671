"""Objects for workers as bytes, and a clear error for those that cannot be sent."""

from __future__ import annotations

import contextlib
import io
import pickle
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from featcache.errors import ComputeError, ConfigError

R = TypeVar("R")
LARGEST_ERROR = 1 << 20  # in bytes


def pack(named: Mapping[str, object]) -> bytes:
    """Turn objects into bytes, code of the main script included; what they share stays shared.

    Raises `ConfigError`, which names it, for an object that cannot be sent.
    """
    try:
        return _dumps(dict(named))
    except Exception as error:  # pickling runs code of all kinds of objects
        raise ConfigError(
            f"workers cannot be sent {_culprit('', named) or 'this'}: {error}; open such things "
            "when they are first used, or leave them out of the state (`__getstate__`)"
        ) from error


def unpack(data: bytes) -> dict[str, Any]:
    """Turn the bytes of `pack` into objects again; tensors are on the CPU, wherever they were."""
    named = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    return cast(dict[str, Any], named)


def returned(call: Callable[[], R]) -> R | Exception:
    """Return what a call returns or raises: Dask prints errors that a task raises, or loses them.

    An error that is returned can be sent, and has its traceback as a note.
    """
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):  # which end the worker
        raise
    except BaseException as error:
        copy = _copy(error)
        copy.add_note(f"in the worker:\n{''.join(traceback.format_exception(error))}")
        return copy


def _copy(error: BaseException) -> Exception:
    """Return an error like this one that can be sent.

    It is of the same class if that is one of Python's or ours, and a `ComputeError` otherwise:
    errors of other classes may hold anything, and other processes may not be able to import these.
    """
    try:
        text = str(error)
    except Exception:  # whatever its class does there
        text = "an error that cannot be told"
    known = type(error).__module__.split(".")[0] in ("builtins", "featcache")
    if known and isinstance(error, Exception):
        with contextlib.suppress(Exception):
            copy = type(error)(*error.args)
            if str(copy) == text and len(pickle.dumps(copy)) < LARGEST_ERROR:
                return copy
    return ComputeError(f"{type(error).__name__}: {text[:LARGEST_ERROR]}")


def _dumps(value: object) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]

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

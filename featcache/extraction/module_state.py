"""State of a torch module that counts in a fingerprint: weights, classes and plain settings."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator

import torch
import xxhash

from featcache.store.format.files import digest

MAX_SETTINGS = 256  # of one module; beyond, their digest
_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


def describe_module(module: torch.nn.Module) -> dict[str, object]:
    """Return class, weights and settings of a module as JSON-able values."""
    module = unwrapped(module)
    settings = dict(sorted(_settings(module)))
    shown = settings if len(settings) <= MAX_SETTINGS else digest(repr(settings).encode())
    return {"weights": digest_weights(module), "settings": shown}


def digest_weights(module: torch.nn.Module) -> str:
    """Return the xxh3-64 of all parameters and persistent buffers: names, dtypes, shapes, values.

    It is the same on any device, and for a module in a `DataParallel` or a compiled one.
    """
    state = xxhash.xxh3_64()
    for name, value in sorted(unwrapped(module).state_dict().items()):
        if isinstance(value, torch.Tensor):
            state.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
            state.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def _settings(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    for path, part in module.named_modules():
        yield path or "class", type(part).__qualname__
        for name in inspect.signature(type(part).__init__).parameters:
            value = vars(part).get(name, module)
            if "device" not in name and is_plain(value):
                yield f"{path}.{name}" if path else name, value


def is_plain(value: object) -> bool:
    """Tell whether a value is plain data; a string that looks like a path is not."""
    if isinstance(value, str):
        return not re.search(r"[/\\]", value)
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(is_plain, value.values()))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of a parallel or compiled one."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, _PARALLEL):
            inner = module.module
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner

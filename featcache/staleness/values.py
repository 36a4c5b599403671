"""Description of any value as JSON: the same in every process, on every device.

Numbers and text are as they are, arrays and tensors a digest, objects their class and state. Left
out: paths, devices, locks, loggers, random generators, and what a library keeps for itself.
"""

from __future__ import annotations

import contextvars
import copyreg
import enum
import functools
import io
import itertools
import json
import logging
import os
import random
import threading
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from featcache.staleness.arrays import Array, is_array
from featcache.staleness.configurations import is_configuration, plain_configuration
from featcache.staleness.left_out import is_left_out
from featcache.staleness.plain_values import NOTHING as NOTHING
from featcache.staleness.plain_values import plain_of, seed_of, unicode_of
from featcache.staleness.source import is_users
from featcache.store.format.files import digest

MOST_ITEMS = 64  # of a container; beyond, their digest
MOST_LEAVES = 256  # of a value
_GENERATORS = (torch.Generator, np.random.Generator, np.random.BitGenerator)
_IGNORED: tuple[type, ...] = (
    torch.device,
    random.Random,
    np.random.RandomState,
    logging.Logger,
    logging.Handler,
    io.IOBase,
    os.PathLike,
    types.ModuleType,
    types.GeneratorType,
    types.FrameType,
    itertools.count,
    threading.Event,
    threading.Condition,
    threading.Thread,
    threading.local,
    type(threading.Lock()),
    type(threading.RLock()),
    type(Ellipsis),
    type(NotImplemented),
)
_CALLABLE = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    np.ufunc,
)


class Code(Protocol):
    """Knows the code that values refer to."""

    extractor: object

    def function(self, function: types.FunctionType, *, held: str) -> str | None:
        """Return the label of a function of the user's; None for a library's."""

    def wrapper(self, wrapper: object) -> None:
        """Learn of what stands around a function: it may hold others."""

    def named(self, cls: type) -> None:
        """Learn of a class that the code, or a value, names."""

    def attributes(self, value: object) -> Mapping[str, object] | None:
        """Return the attributes of an object that count; None: its whole state."""

    def reads(self, value: object, name: str) -> bool:
        """Tell whether the user's code mentions an attribute of an object."""

    def module(self, module: torch.nn.Module, values: Values) -> object:
        """Describe a torch module."""


@dataclass
class Values:
    """Describes values; `code` is told of the functions and classes among them.

    `data` are none of them: a data set and its ids, however they are reached.
    """

    code: Code
    data: Sequence[object] = ()
    opaque: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._within: set[int] = set()
        self._known: dict[int, tuple[object, object]] = {}  # keeps the value, and so its id

    def describe(self, value: Any, name: str = "") -> object:
        """Return a tree of dicts, lists, plain values and `Array`; `NOTHING` if none counts."""
        if isinstance(value, enum.Enum):
            return self._member(value, name)
        if value is None or isinstance(value, bool | int | float | str | bytes | complex):
            return plain_of(value, name)
        if isinstance(value, _GENERATORS):
            return seed_of(value)
        if isinstance(value, _IGNORED) or "device" in name.rpartition(".")[2]:
            return NOTHING
        if any(value is each for each in self.data):
            return NOTHING
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._within or value is self.code.extractor:
            return "(itself)"
        self._within.add(id(value))
        try:
            found = self._describe(value, name)
        finally:
            self._within.discard(id(value))
        if not self._within:
            self._known.clear()
        else:
            self._known[id(value)] = value, found
        return found

    def _describe(self, value: Any, name: str) -> object:
        if isinstance(value, np.ndarray) or is_array(value):
            return self._array(value, name)
        if isinstance(value, contextvars.ContextVar | weakref.ref):
            held = value.get(None) if isinstance(value, contextvars.ContextVar) else value()
            return self.describe(held, name)
        if isinstance(value, np.generic):
            item = value.item()  # of a longdouble: itself
            return str(item) if isinstance(item, np.generic) else self.describe(item, name)
        if is_configuration(value):
            return self.describe(plain_configuration(value), name)
        if isinstance(value, torch.dtype | np.dtype | range | slice | torch.Size):
            return str(value)
        if isinstance(value, torch.nn.Module):
            return self.code.module(value, self)
        if callable(value) and (found := self._callable(value, name)) is not None:
            return found
        if type(value) in (dict, types.MappingProxyType):
            return self.mapping(value, name)
        if type(value) in (list, tuple, set, frozenset):
            return self.items(value, name)
        return self._object(value, name)

    def _array(self, value: Any, name: str) -> object:
        if not is_array(value):  # of objects
            return {"shape": list(value.shape), "items": self.items(value.ravel().tolist(), name)}
        if isinstance(value, np.ma.MaskedArray):
            mask = np.ma.getmaskarray(value)
            return {"class": "MaskedArray", "values": Array(value.filled(0)), "mask": Array(mask)}
        return Array(value)

    def _member(self, value: enum.Enum, name: str) -> object:
        """Describe a member of an enumeration: a library's by its name."""
        shown = f"{type(value).__qualname__}.{value.name}"
        self.code.named(type(value))
        if not is_users(type(value)) or value.value == value.name:
            return shown
        return [shown, self.describe(value.value, name)]

    def items(self, values: Iterable[Any], name: str) -> list[object]:
        """Describe the items of a list, tuple or set."""
        found = [self.describe(each, name) for each in values]
        if isinstance(values, set | frozenset):
            found.sort(key=lambda each: json.dumps(settled(each), sort_keys=True))
        return [None if each is NOTHING else each for each in found]

    def mapping(self, values: Mapping[Any, Any], name: str) -> dict[str, object]:
        """Describe the values of a mapping."""
        found: dict[str, object] = {}
        for key, value in values.items():
            text = key if isinstance(key, str) else _key(self.describe(key))
            if (inner := self.describe(value, f"{name}.{text}")) is not NOTHING:
                found[unicode_of(text)] = inner
        return found

    def _callable(self, value: Any, name: str) -> object:
        """Describe what can be called by its code; None for an object with state."""
        if isinstance(value, types.MethodType):
            return {
                "method": self._callable(value.__func__, name),
                "of": self.describe(value.__self__),
            }
        if isinstance(value, functools.partial):
            parts = {"call": self.describe(value.func), "args": self.items(value.args, name)}
            return {**parts, **self.mapping(value.keywords, name)}
        if isinstance(value, _CALLABLE):
            owner = getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, types.ModuleType | type):
                return {"method": value.__name__, "of": self.describe(owner)}
            return f"function {value.__name__}"
        if isinstance(value, type):
            self.code.named(value)
            return f"class {value.__qualname__}"
        inner = value
        while not isinstance(inner, types.FunctionType) and hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__  # functools.lru_cache and the like
        if isinstance(inner, types.FunctionType):
            self.code.wrapper(value)
            label = self.code.function(inner, held=name)
            return f"function {inner.__qualname__ if label is None else label}"
        return None

    def _object(self, value: Any, name: str) -> object:
        cls = type(value)
        attributes = self.code.attributes(value)
        if attributes is not None:
            return {"class": cls.__qualname__, **self.mapping(attributes, name)}
        try:
            return {"class": cls.__qualname__, **self._state(value, name)}
        except RecursionError:
            raise
        except Exception:  # whatever its class does there: no lock, no session, no handle has state
            self.opaque.append(f"{name} ({cls.__module__}.{cls.__qualname__})")
            return {"class": cls.__qualname__}

    def _state(self, value: Any, name: str) -> dict[str, object]:
        if type(value).__module__.partition(".")[0] == "tokenizers" and hasattr(value, "to_str"):
            # a call with padding=True leaves these two behind
            kept = {
                k: v
                for k, v in json.loads(value.to_str()).items()
                if k not in ("truncation", "padding")
            }
            return self.mapping(kept, name)
        registered = copyreg.dispatch_table.get(type(value))  # of regular expressions, say
        reduced = value.__reduce_ex__(4) if registered is None else registered(value)
        if isinstance(reduced, str):
            return {"name": reduced}
        make, args, state, listed, keyed = (*reduced, None, None, None)[:5]
        found: dict[str, object] = {}
        if getattr(make, "__name__", "") not in ("__newobj__", "__newobj_ex__", "_reconstructor"):
            found["made by"] = getattr(make, "__qualname__", str(type(make)))
        rest = [each for each in args if each is not type(value) and each is not object]
        if rest:
            found["args"] = self.items(rest, name)
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, Mapping):
                kept = {k: v for k, v in part.items() if not is_left_out(str(k))}
                found |= self.mapping(kept, name)
            elif part is not None:
                found["state"] = self.describe(part, name)
        if listed is not None:
            found["items"] = self.items(list(listed), name)
        if keyed is not None:
            found["items"] = self.mapping(dict(keyed), name)
        return {key: inner for key, inner in found.items() if inner is not NOTHING}


def settled(tree: object) -> Any:
    """Return a description as plain JSON: arrays read, large parts as digests."""
    if isinstance(tree, Array):
        return tree.digest()
    if hasattr(tree, "to_json"):  # a module
        return tree.to_json()
    if isinstance(tree, dict):
        found = {key: settled(value) for key, value in tree.items()}
        return _shown(found, len(found))
    if isinstance(tree, list):
        return _shown([settled(value) for value in tree], len(tree))
    return tree


def _shown(tree: Any, items: int) -> Any:
    if items <= MOST_ITEMS and _leaves(tree) <= MOST_LEAVES:
        return tree
    text = json.dumps(tree, sort_keys=True)
    return f"{items} items {digest(text.encode())}"


def _leaves(tree: Any) -> int:
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    return 1 if inner is None else sum(map(_leaves, inner))


def _key(tree: object) -> str:
    return "(left out)" if tree is NOTHING else json.dumps(settled(tree), sort_keys=True)

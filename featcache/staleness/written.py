"""Attributes that objects of library classes write while they compute: caches and counters."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from featcache.staleness.names import Names, names_of
from featcache.staleness.source import nested

_STORES = {dis.opmap[name] for name in ("STORE_ATTR", "STORE_SUBSCR")}
_ENTRIES = ("forward", "__call__")
# ways to set attributes whose names do not stand there
_BY_OTHER_NAMES = frozenset(["setattr", "__setattr__", "__dict__", "vars"])
_MAKING = ("__init__", "__new__", "__post_init__", "__setstate__")
_BASES = (object, torch.nn.Module)


def written_attributes(names: Names) -> Iterator[str]:
    """Yield the attributes of its object that a method stores into."""
    for chain in names.stored:
        first = chain.steps[0] if chain.steps else None
        mine = chain.root is not None and chain.root == next(iter(names.parameters), None)
        if mine and first is not None and isinstance(first.name, str) and not first.item:
            yield first.name


@functools.lru_cache(4096)
def written_by(cls: type) -> frozenset[str]:
    """Return the attributes that calling an object of `cls` writes, in evaluation mode.

    The methods that `forward` or `__call__` names are followed, and those that these name.
    """
    methods = _methods(cls)
    if not any(_stores(each.__code__) for name, each in methods.items() if name != "__init__"):
        return frozenset()
    asking = frozenset(name for name, each in methods.items() if _asks(each.__code__))
    found: set[str] = set()
    pending, seen = [name for name in _ENTRIES if name in methods], set[str]()
    while pending:
        name = pending.pop()
        if name in seen or name not in methods:
            continue
        seen.add(name)
        names = _names(methods[name], asking)
        if names is not None:
            found.update(written_attributes(names))
            pending += [str(chain.steps[0].name) for chain in names.read if chain.steps]
    return frozenset(found)


@functools.lru_cache(4096)
def names_in_code(cls: type) -> frozenset[str] | None:
    """Return all names and texts in the code of a class; None if it makes others while it runs."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base not in _BASES:
            found.update(vars(base))  # methods that are replaced
            for function in _functions(vars(base).values()):
                for code in nested(function.__code__):
                    found.update(code.co_names)
                    found.update(each for each in code.co_consts if isinstance(each, str))
                    if code.co_name in _MAKING and not _BY_OTHER_NAMES.isdisjoint(code.co_names):
                        return None
    return frozenset(found)


def _functions(values: Iterable[Any]) -> Iterator[FunctionType]:
    for value in values:
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in parts:
            for attribute in ("func", "__func__"):  # cached_property; staticmethod
                part = getattr(part, attribute, part)
            whole: Any = part
            if isinstance(inner := inspect.unwrap(whole), FunctionType):
                yield inner  # not what wraps it: `torch.amp.custom_fwd` takes notes on the object


def _methods(cls: type) -> dict[str, FunctionType]:
    found: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if base not in _BASES:
            for name, value in vars(base).items():
                if isinstance(unwrapped := inspect.unwrap(value), FunctionType):
                    found[name] = unwrapped
    return found


def _names(function: FunctionType, asking: frozenset[str]) -> Names | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return names_of(tree, asking) if isinstance(tree, ast.FunctionDef) else None


def _stores(code: CodeType) -> bool:
    return not _STORES.isdisjoint(code.co_code[::2])


def _asks(code: CodeType) -> bool:
    return "training" in code.co_names

"""Fingerprint of what features are made from, found in the code of `compute_features`.

The code is followed: `compute_features`, then the methods of its object and the functions and
classes of its own file that it names, then those that these name. These count, where the code names
them:

- modules: `self.modules.X`, `self.modules["X"]`, `self.hparams.X`, `self.X`. Where they reach
  `self.modules` without a name (a loop, a variable as key), or name no module at all, all of
  `self.modules` count. A classifier that is trained on the features is not named, so training it
  makes no cache stale.
- hparams: `self.hparams.X`, if it is a plain value.
- constants: plain values of the file and of the class. Those of the object itself do not count,
  since they may change while it runs.
- source: the code that was followed, without comments, docstrings and formatting.

A module counts by its weights (parameters and persistent buffers) and its settings: the classes of
its submodules, and the plain values that these keep under the names of their constructors'
arguments. Strings that look like paths do not count.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch

from featcache.extraction.module_state import describe_module, is_plain, unwrapped
from featcache.store.format.files import digest

# ast may fail in two threads at once: https://github.com/python/cpython/issues/106905.
# The lock keeps our own threads apart; other libraries parse, too (numpy the header of each .npy
# file), so an attempt that fails is repeated.
_PARSING = threading.Lock()
PARSE_TRIES = 100
# their code is not followed: their versions do not count
_LIBRARIES = ("featcache", "speechbrain", "torch")
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CONTAINERS = ("modules", "raw_modules", "hparams")


@dataclass(frozen=True)
class Ingredients:
    """Modules, settings and code that a `compute_features` names."""

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    hparams: dict[str, object] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)  # qualified name -> xxh3-64

    def fingerprint(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the fingerprint; what the user has given takes the place of what was found."""
        plain = {"hparams": self.hparams, "constants": self.constants}
        found: dict[str, object] = {name: values for name, values in plain.items() if values}
        if "modules" not in given:  # reading large weights takes a moment
            found["modules"] = {name: describe_module(part) for name, part in self.modules.items()}
        return dict(sorted({"source": self.source, **found, **given}.items()))


def find_ingredients(extractor: object) -> Ingredients:
    """Follow the code of `extractor.compute_features` and return what it names."""
    found, names = Ingredients(), _Names()
    seen: set[object] = set(type(extractor).__mro__)  # of these only the methods that are named
    pending: list[Any] = list(_definitions(type(extractor), "compute_features"))
    files = {function.__module__ for function in pending}
    while True:
        while pending:
            item = pending.pop(0)
            if item not in seen:
                seen.add(item)
                pending += _follow(item, type(extractor), names, found)
        _find_named(extractor, names, found)
        parts = [part for module in found.modules.values() for part in module.modules()]
        classes = dict.fromkeys(map(type, parts))
        pending = [cls for cls in classes if cls.__module__ in files and cls not in seen]
        if not pending:
            return found


def _follow(item: Any, cls: type, names: _Names, found: Ingredients) -> list[Any]:
    """Note what a function or class names; returns the functions and classes to follow next."""
    tree = _tree(item)
    if tree is None:  # defined where no source is kept
        names.modules.add(None)
        _add_source(found, item, repr(_bytecode(item)))
        return [value for value in vars(item).values() if isinstance(value, FunctionType)]
    _add_source(found, item, ast.unparse(tree))
    names.add(tree)
    following: list[Any] = [m for name in sorted(names.attributes) for m in _definitions(cls, name)]
    for name, value in [*_namespace(item, tree), *_class_attributes(cls, names)]:
        if isinstance(value, FunctionType | type) and value.__module__ == item.__module__:
            following.append(value)
        elif is_plain(value) and not name.startswith("__") and "device" not in name:
            found.constants[name] = value
    return following


def _add_source(found: Ingredients, item: Any, text: str) -> None:
    name = item.__qualname__  # shared by functions that another function makes
    found.source[name] = digest((found.source.get(name, "") + text).encode())


class _Names:
    """The names that code mentions; None in `modules`: reached without a name."""

    def __init__(self) -> None:
        self.modules: set[str | None] = set()
        self.hparams: set[str | None] = set()
        self.attributes: set[str] = set()

    def add(self, tree: ast.AST) -> None:
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                self.attributes.add(node.attr)
                if node.attr == "hparams":
                    self.hparams.add(_member(node, parents))
                elif node.attr in _CONTAINERS:
                    self.modules.add(_member(node, parents))


def _member(node: ast.Attribute, parents: Mapping[ast.AST, ast.AST]) -> str | None:
    """Return X of <node>.X, <node>["X"] and getattr(<node>, "X")."""
    match parents.get(node):
        case ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return name
    return None


def _find_named(extractor: object, names: _Names, found: Ingredients) -> None:
    """Note the modules and hparams that code names, or all modules where it names none."""
    modules, hparams = modules_of(extractor), items_of(getattr(extractor, "hparams", {}))
    own = {**vars(extractor), **vars(extractor).get("_modules", {})}
    named = {name: modules[name] for name in modules.keys() & names.modules}
    settings = {name: hparams[name] for name in hparams.keys() & names.hparams}
    named |= settings
    named |= {name: own[name] for name in own.keys() & names.attributes - {*_CONTAINERS}}
    found.modules.update((k, v) for k, v in named.items() if isinstance(v, torch.nn.Module))
    found.hparams.update((k, v) for k, v in settings.items() if is_plain(v))
    if not names.modules <= modules.keys() or not found.modules:
        found.modules.update(modules)


def modules_of(extractor: object) -> dict[str, torch.nn.Module]:
    """Return the modules of a Brain or of anything like one."""
    if isinstance(extractor, torch.nn.Module):  # whose `modules` is a method
        return dict(extractor.named_children())
    modules = getattr(extractor, "modules", {})
    # wrapped as a whole
    if isinstance(modules, torch.nn.Module) and not isinstance(modules, torch.nn.ModuleDict):
        return dict(unwrapped(modules).named_children())
    return items_of(modules)


def roots_of(extractor: object) -> list[torch.nn.Module]:
    """Return the modules that hold all others of a Brain or of anything like one."""
    is_module = isinstance(extractor, torch.nn.Module)  # whose `modules` is a method
    whole = extractor if is_module else getattr(extractor, "modules", None)
    return [whole] if isinstance(whole, torch.nn.Module) else [*modules_of(extractor).values()]


def items_of(container: Any) -> dict[str, Any]:
    """Return the items of a mapping or the attributes of a namespace."""
    return dict(container.items() if hasattr(container, "items") else vars(container))


def _definitions(cls: type, name: str) -> Iterator[FunctionType]:
    """Yield the definitions of a method or property in `cls` and its bases, libraries aside."""
    for base in cls.__mro__:
        value: Any = vars(base).get(name)
        for attribute in ("fget", "func"):  # property; cached_property and partialmethod
            value = getattr(value, attribute, value)
        value = inspect.unwrap(value)  # of decorators, staticmethod and classmethod
        if isinstance(value, FunctionType) and not _is_library(value):
            yield value


def _is_library(item: Any) -> bool:
    # code that was executed without a `__name__` has no module
    return (item.__module__ or "").partition(".")[0] in _LIBRARIES


def _namespace(item: Any, tree: ast.AST) -> Iterator[tuple[str, object]]:
    """Yield what the bare names in a function or class stand for."""
    if not isinstance(item, FunctionType):
        values = vars(sys.modules[item.__module__])
    else:
        values = dict(item.__globals__)
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell: the variable is not bound yet
                values[name] = cell.cell_contents
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in values:
            value = values[node.id]
            yield node.id, inspect.unwrap(value) if callable(value) else value


def _class_attributes(cls: type, names: _Names) -> Iterator[tuple[str, object]]:
    """Yield the plain values in the bodies of a class and its bases that code mentions."""
    for base in reversed(cls.__mro__):
        for name in sorted(vars(base).keys() & names.attributes):
            if not _is_library(base) and is_plain(vars(base)[name]):
                yield name, vars(base)[name]


def _tree(item: Any) -> ast.AST | None:
    """Return the syntax tree of a function or class without its docstrings."""
    try:
        tree = _parsed(item)
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree


def _parsed(item: Any) -> ast.AST:
    """Parse the source of a function or class; again if another thread was parsing meanwhile."""
    tries = 0
    while True:
        try:
            with _PARSING:
                return ast.parse(textwrap.dedent(inspect.getsource(item)))
        except SystemError as error:
            tries += 1
            if tries == PARSE_TRIES or "recursion depth mismatch" not in str(error):
                raise
        time.sleep(0.001)


def _bytecode(item: Any) -> object:
    """Return what a function does, as values whose `repr` is the same in every process."""
    if isinstance(item, frozenset):
        return sorted(map(repr, item))
    code = item if isinstance(item, CodeType) else getattr(item, "__code__", None)
    if code is None:
        return None if isinstance(item, type) else item
    constants = [_bytecode(constant) for constant in code.co_consts]
    return (code.co_code, constants, code.co_names, code.co_varnames)

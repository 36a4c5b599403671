"""Reading of one function: what the chains of names in it stand for."""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from featcache.staleness.names import Names
from featcache.staleness.source import is_users, is_users_module
from featcache.staleness.steps import Chain, Step
from featcache.staleness.written import written_attributes

if TYPE_CHECKING:
    from featcache.staleness.follow import Follower, Function

MISSING = object()
# methods that make an object
MAKING = ("__init__", "__new__", "__post_init__")


def functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that an attribute of a class is made of: methods, properties."""
    parts = [value]
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    for part in parts:
        for attribute in ("func", "__func__"):  # cached_property, partialmethod; staticmethod
            part = getattr(part, attribute, part)
        if isinstance(part, FunctionType) and part.__code__.co_filename == "<string>":
            file = getattr(sys.modules.get(part.__module__), "__file__", None)
            if file is not None or part.__module__.startswith("namedtuple_"):
                continue  # made by `dataclass` or the like
        if isinstance(part, FunctionType) and is_users(part):
            yield part
        elif isinstance(inner := _unwrapped(part), FunctionType) and is_users(inner):
            yield inner
            yield from within(part)


def within(value: object) -> Iterator[FunctionType]:
    """Yield functions of the user's that a library's function holds: `functools.singledispatch`."""
    pending, seen = [value], set[int]()
    while pending:
        part = pending.pop()
        if id(part) in seen or not isinstance(part, FunctionType):
            continue
        seen.add(id(part))
        if is_users(part):
            yield part
            continue
        held = [*vars(part).values()]
        for cell in part.__closure__ or ():
            with contextlib.suppress(ValueError):  # not bound yet
                held.append(cell.cell_contents)
        for each in held:
            pending += each.values() if isinstance(each, dict | MappingProxyType) else (each,)


def _unwrapped(value: Any) -> Any:
    try:
        return inspect.unwrap(value)
    except ValueError:  # wraps itself
        return value


class FunctionReading:
    """Reading of one function: what its chains stand for."""

    def __init__(self, follower: Follower, found: Function, owner: type | None) -> None:
        self._to, self._found, self._owner = follower, found, owner
        function = found.function
        self._values: dict[str, object] = {}
        self._cells: dict[str, int] = {}
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._cells[name] = id(cell)
            try:
                self._values[name] = cell.cell_contents
            except ValueError:  # not bound yet
                self._values[name] = MISSING
        for name, module, attribute in found.names.imported:
            loaded: object = sys.modules.get(module, MISSING)
            self._values[name] = loaded if attribute is None else step_into(loaded, Step(attribute))

    def read(self) -> None:
        """Note what the function names, and take what is to be followed."""
        to, names = self._to, self._found.names
        to.text |= names.text
        function = self._found.function
        for chain in names.stored:
            self._note_stored(chain)
        for chain in names.read:
            self._resolve(chain)
        for name, default in self._defaults():
            self._value(name, default, (0, ""))
        wrapped = vars(function).get("__wrapped__")
        if isinstance(wrapped, FunctionType):
            to.function(wrapped, self._owner)

    def _defaults(self) -> Iterator[tuple[str, object]]:
        """Yield default values that do not stand in the code as they are."""
        function, tree = self._found.function, self._found.code.tree
        held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        shown: list[ast.expr | None] = [None] * len(held)
        if tree is not None:
            there = [*tree.args.defaults, *filter(None, tree.args.kw_defaults)]
            shown = [*there] if len(there) == len(held) else shown
        for number, (value, node) in enumerate(zip(held, shown, strict=True)):
            if not isinstance(node, ast.Constant):
                yield f"default {number + 1}", value

    def _self(self, root: str | None) -> bool:
        parameters = self._found.names.parameters
        return self._owner is not None and bool(parameters) and root == parameters[0]

    def _root(self, root: str) -> object:
        if root in self._values:
            return self._values[root]
        if root in self._found.names.local:
            return MISSING
        return self._found.function.__globals__.get(root, MISSING)

    def _resolve(self, chain: Chain) -> None:
        self._resolve_known(self._with_keys(chain))

    def _with_keys(self, chain: Chain) -> Chain:
        """Put the keys of items into a chain that are values of settings: `TABLE[self.kind]`."""
        steps = list(chain.steps)
        for number, step in enumerate(steps):
            key = MISSING if step.key is None else self._setting(step.key)
            if type(key) in (str, int):
                steps[number] = Step(key, item=True)  # type: ignore[arg-type]
                self._to.keyed.append((self, chain, step.key))
        return chain._replace(steps=tuple(steps))

    def _setting(self, chain: Chain) -> object:
        """Return what a chain leads to; `MISSING` if that is not known, or code writes it."""
        if chain.root is None or self.is_written(chain):
            return MISSING
        value = self._to.extractor if self._is_extractor(chain.root) else self._root(chain.root)
        for step in chain.steps:
            value = step_into(value, step)
        return value

    def _is_extractor(self, root: str) -> bool:
        mine = self._self(root) and self._owner in type(self._to.extractor).__mro__
        return mine or (self._to.extractor is not None and self._root(root) is self._to.extractor)

    def is_written(self, chain: Chain) -> bool:
        """Tell whether followed code stores into what a chain leads to."""
        root = str(chain.root)
        if self._is_extractor(root):
            names = self._to.written_of(type(self._to.extractor))
            return any(step.name in names for step in chain.steps)
        return self._holder(root) in self._to.written_globals

    def without_keys(self, chain: Chain) -> None:
        """Note what a chain leads to, whatever the keys are."""
        self._resolve_known(chain)

    def _resolve_known(self, chain: Chain) -> None:
        to = self._to
        if self._self(chain.root):
            if self._owner in type(to.extractor).__mro__:
                to.of_extractor[chain] = None
            elif self._owner is not None:
                mine = to.own.setdefault(self._owner, set())
                mine.update(str(step.name) for step in chain.steps[:1] if step.name is not None)
                self._mention(chain.steps[1:])
                if chain.steps and chain.steps[0].like is not None:
                    to.like.add(chain.steps[0].like)
            return
        value = MISSING if chain.root is None else self._root(chain.root)
        if value is MISSING:
            self._mention(chain.steps)
        elif value is to.extractor and value is not None:
            to.of_extractor[Chain("self", chain.steps, chain.whole)] = None
        else:
            self._walk(str(chain.root), value, chain)

    def _walk(self, text: str, value: object, chain: Chain) -> None:
        """Go along a chain as far as it leads to values, and note the last one."""
        steps, holder = list(chain.steps), self._holder(text)
        while steps:
            if isinstance(value, type):
                self._to.named(value)
            inner = step_into(value, steps[0])
            if inner is MISSING:
                break
            if isinstance(value, type) and isinstance(inner, classmethod | staticmethod):
                for function in functions_in(inner):
                    self._to.function(function, value)
                self._mention(steps)
                return
            if is_method(value, steps[0].name, inner):
                for function in functions_in(inner):
                    self._to.function(function, type(value))
                self._mention(steps[:1])
                break
            step = steps.pop(0)
            holder = (id(vars(value)) if isinstance(value, ModuleType) else 0, str(step.name))
            text += str(Chain("", (step,)))
            library = isinstance(value, ModuleType) and not is_users_module(value)
            if library and not isinstance(inner, ModuleType | FunctionType | type):
                return
            value = inner
        self._mention(steps)
        self._value(text, value, holder)

    def _value(self, text: str, value: object, holder: tuple[int, str]) -> None:
        if not isinstance(value, ModuleType) and getattr(builtins, text, MISSING) is not value:
            self._to.note(self._found.label, text, value, holder)

    def _holder(self, name: str) -> tuple[int, str]:
        return self._cells.get(name, id(self._found.function.__globals__)), name

    def _mention(self, steps: Any) -> None:
        for step in steps:
            if isinstance(step.name, str):
                (self._to.text if step.item else self._to.free).add(step.name)
            elif step.like is not None and not step.item:
                self._to.like.add(step.like)

    def _note_stored(self, chain: Chain) -> None:
        """Note that code writes an attribute or a global variable: it is no setting."""
        to, function = self._to, self._found.function
        if self._self(chain.root):
            for name in written_attributes(Names(stored=[chain], parameters=[str(chain.root)])):
                if function.__name__ not in MAKING:
                    to.written.setdefault(self._owner, set()).add(name)
            return
        if chain.root is None:
            return
        if chain.root in self._found.names.local:
            first = chain.steps[0].name if chain.steps else None
            if chain.root in self._found.names.parameters and isinstance(first, str):
                to.written.setdefault(None, set()).add(first)
            return
        holder, value = self._holder(chain.root), self._root(chain.root)
        for step in chain.steps:
            if not isinstance(value, ModuleType):
                break
            holder, value = (id(vars(value)), str(step.name)), step_into(value, step)
        to.written_globals.add(holder)


def is_method(value: object, name: object, found: object) -> bool:
    """Tell whether an attribute of an object is code of its class."""
    if isinstance(value, ModuleType | type) or name in getattr(value, "__dict__", {}):
        return False
    if inspect.getattr_static(type(value), str(name), MISSING) is not found:
        return False  # a module of a module
    if is_descriptor(found):
        return False
    return any(True for _ in functions_in(found)) or callable(found) or hasattr(found, "__get__")


def is_descriptor(value: object) -> bool:
    """Tell whether a value of a class's body is an object of the user's that stands for others."""
    return hasattr(type(value), "__get__") and not callable(value) and is_users(type(value))


def step_into(value: Any, step: Step) -> Any:
    """Return what a step of a chain leads to, or `MISSING`; runs no code of properties."""
    if step.name is None or value is MISSING:
        return MISSING
    if step.item:
        return _item(value, step.name)
    if isinstance(value, ModuleType):
        return getattr(value, str(step.name), MISSING)
    held = getattr(value, "__dict__", {})
    if step.name in held:
        return held[step.name]
    for part in ("_modules", "_parameters", "_buffers"):
        if isinstance(value, torch.nn.Module) and step.name in held.get(part, {}):
            return held[part][step.name]
    return inspect.getattr_static(value, str(step.name), MISSING)


def _item(value: Any, key: str | int) -> Any:
    if isinstance(value, torch.nn.ModuleDict):
        value = value._modules  # noqa: SLF001
    if isinstance(value, torch.nn.Sequential | torch.nn.ModuleList):
        value = [*value]
    if type(value) is dict:
        return value.get(key, MISSING)
    if type(value) in (list, tuple) and type(key) is int and -len(value) <= key < len(value):
        return value[key]
    return MISSING

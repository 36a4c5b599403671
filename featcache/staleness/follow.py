"""Following of code: the functions, classes and values that a function reaches by name.

All code of the user's is followed, in whatever file; that of libraries is not. A method of a
class counts if an object of the class is reached, and code that is followed mentions its name.
"""

from __future__ import annotations

import builtins
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from featcache.staleness.modules import Described, describe_module
from featcache.staleness.names import Chain, Names, Step, names_of
from featcache.staleness.source import Code, code_of, is_users, is_users_module
from featcache.staleness.values import Values
from featcache.staleness.writes import written_attributes

MISSING = object()
# called without being named
_IMPLICIT = (
    "forward",
    "__call__",
    "__getitem__",
    "__iter__",
    "__len__",
    "__getattr__",
    "__enter__",
)
_MAKING = ("__init__", "__new__", "__post_init__")
# bases of users' classes whose code reads no attribute but its own
_NEUTRAL = (
    "object",
    "Module",
    "Generic",
    "Protocol",
    "ABC",
    "SimpleNamespace",
    "FeatureCacheMixin",
    "Brain",
)


@dataclass
class Function:
    """A function that was followed."""

    function: FunctionType
    label: str
    code: Code
    names: Names
    owner: type | None  # the class that it is a method of


class Named(NamedTuple):
    """A value that code names, and what holds it by which name: a namespace, a closure's cell."""

    value: object
    holder: tuple[int, str]


@dataclass
class Follower:
    """Follows code from a function; see the module's docstring.

    `functions` are those that were found; `values` by the label of the function that names them,
    and the name there.
    """

    extractor: object = None
    functions: dict[FunctionType, Function] = field(default_factory=dict)
    values: dict[str, dict[str, Named]] = field(default_factory=dict)
    own: dict[type, set[str]] = field(default_factory=dict)  # names behind `self`, by class
    free: set[str] = field(default_factory=set)  # names behind anything else
    like: set[str] = field(default_factory=set)  # patterns of names
    text: set[str] = field(default_factory=set)
    of_extractor: dict[Chain, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.classes: dict[type, bool] = {}  # those reached; True: named, and so perhaps made
        self.written: dict[type | None, set[str]] = {}
        self.written_globals: set[tuple[int, str]] = set()
        self._labels: dict[str, int] = {}
        self._pending: list[tuple[FunctionType, type | None]] = []

    # what `Values` asks

    def function(self, function: FunctionType, owner: type | None = None) -> str | None:
        """Take a function to be followed; returns its label, None if it is a library's."""
        if not is_users(function):
            return None
        if function not in self.functions:
            self._add(function, owner)
        return self.functions[function].label

    def named(self, cls: type) -> None:
        """Take a class that code names."""
        if any(is_users(base) for base in cls.__mro__):
            self.classes[cls] = True

    def attributes(self, value: object) -> Mapping[str, object] | None:
        """Return the attributes of an object that code mentions; None: all its state counts."""
        cls = type(value)
        if not isinstance(value, SimpleNamespace):
            if not any(is_users(base) for base in cls.__mro__):
                return self._patched(value)
            self.classes.setdefault(cls, False)
        if any(base.__name__ not in _NEUTRAL and not is_users(base) for base in cls.__mro__):
            return None
        held = dict(vars(value)) if hasattr(value, "__dict__") else {}
        for base in cls.__mro__:
            for name in _slots(base):
                if hasattr(value, name):
                    held[name] = getattr(value, name)
        names, written = self.names_of(cls), self.written_of(cls)
        return {k: v for k, v in held.items() if self.mentions(k, names) and k not in written}

    def module(self, module: torch.nn.Module, values: Values) -> Described:
        """Describe a torch module."""
        return describe_module(module, values)

    def _patched(self, value: object) -> None:
        """Take what a user put in place of methods of a library's class."""
        for base in type(value).__mro__:
            for name, inner in vars(base).items():
                if isinstance(inner, FunctionType) and is_users(inner):
                    self.function(inner, base)
                    self.text.add(name)

    # names

    def names_of(self, cls: type) -> set[str]:
        """Return the names that code mentions of objects of a class."""
        return self.free.union(*(self.own.get(base, ()) for base in cls.__mro__))

    def written_of(self, cls: type) -> set[str]:
        """Return the attributes that followed code stores into, of objects of a class."""
        found: set[str] = set(self.written.get(None, ()))
        return found.union(*(self.written.get(base, ()) for base in cls.__mro__))

    def mentions(self, name: str, names: set[str]) -> bool:
        """Tell whether code mentions a name, as it is or by a pattern."""
        if name in names:
            return True
        return name[:2] != "__" and any(re.fullmatch(like, name) for like in self.like)

    # following

    def follow(self) -> bool:
        """Follow what was taken, and methods that are mentioned; False if there was nothing."""
        before = self.size
        while self._pending:
            function, owner = self._pending.pop(0)
            _Reading(self, self.functions[function], owner).read()
        for cls, named in list(self.classes.items()):
            names = self.names_of(cls) | {*_IMPLICIT, *(_MAKING if named else ())}
            for base in filter(is_users, cls.__mro__):
                for name, value in list(vars(base).items()):
                    if self.mentions(name, names):
                        self._take(base, name, value)
        return bool(self._pending) or self.size != before

    @property
    def size(self) -> tuple[int, ...]:
        """How much was found."""
        own = sum(map(len, self.own.values()))
        rest = (self.functions, self.classes, self.free, self.like, self.text, self.of_extractor)
        return own, *map(len, rest), sum(map(len, self.values.values()))

    def _take(self, base: type, name: str, value: object) -> None:
        """Take a method or a value of a class's body."""
        methods = list(functions_in(value))
        for function in methods:
            self.function(function, base)
        if not methods and not hasattr(value, "__get__") and name[:2] != "__":
            self.note(base.__qualname__, name, value, (id(base), name))

    def note(self, label: str, name: str, value: object, holder: tuple[int, str]) -> None:
        """Note a value that code names."""
        self.values.setdefault(label, {})[name] = Named(value, holder)

    def _add(self, function: FunctionType, owner: type | None) -> None:
        name = function.__qualname__.replace(".<locals>", "")
        number = self._labels[name] = self._labels.get(name, 0) + 1
        label = name if number == 1 else f"{name} ({number})"
        code = code_of(function)
        if code.tree is None:
            names = Names(parameters=[*function.__code__.co_varnames])
            names.read = [Chain(each) for each in function.__code__.co_names]
            self.free.update(function.__code__.co_names)
            names.text = {each for each in function.__code__.co_consts if isinstance(each, str)}
        else:
            names = names_of(code.tree)
        self.functions[function] = Function(function, label, code, names, owner)
        self._pending.append((function, owner))


def functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that an attribute of a class is made of: methods, properties."""
    parts = [value]
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    for part in parts:
        for attribute in ("func", "__func__"):  # cached_property, partialmethod; staticmethod
            part = getattr(part, attribute, part)
        if isinstance(part, FunctionType) and is_users(part):
            yield part
        elif isinstance(inner := _unwrapped(part), FunctionType) and is_users(inner):
            yield inner


def _unwrapped(value: Any) -> Any:
    try:
        return inspect.unwrap(value)
    except ValueError:  # wraps itself
        return value


def _slots(base: type) -> tuple[str, ...]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class _Reading:
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
        to, names = self._to, self._found.names
        to.text |= names.text
        function = self._found.function
        for chain in names.stored:
            self._note_stored(chain)
        for chain in names.read:
            self._resolve(chain)
        for default in [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]:
            if not isinstance(default, bool | int | float | str | None):
                self._value("default", default, (0, ""))
        wrapped = vars(function).get("__wrapped__")
        if isinstance(wrapped, FunctionType):
            to.function(wrapped, self._owner)

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
            if is_method(value, steps[0].name, inner):
                for function in functions_in(inner):
                    self._to.function(function, type(value))
                self._mention(steps[:1])
                break
            step = steps.pop(0)
            holder = (id(vars(value)) if isinstance(value, ModuleType) else 0, str(step.name))
            text += str(Chain("", (step,)))
            if isinstance(value, ModuleType) and not is_users_module(value):
                if not isinstance(inner, ModuleType | FunctionType | type):
                    return  # of a library
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
                if function.__name__ not in _MAKING:
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
    return any(True for _ in functions_in(found)) or callable(found) or hasattr(found, "__get__")


def step_into(value: Any, step: Step) -> Any:
    """Return what a step of a chain leads to, or `MISSING`; runs no code of properties."""
    if step.name is None or value is MISSING:
        return MISSING
    if step.item:
        if isinstance(value, torch.nn.ModuleDict):
            value = value._modules  # noqa: SLF001
        if isinstance(value, torch.nn.Sequential | torch.nn.ModuleList) and type(step.name) is int:
            return list(value)[step.name] if -len(value) <= step.name < len(value) else MISSING
        if type(value) is dict and step.name in value:
            return value[step.name]
        if type(value) in (list, tuple) and type(step.name) is int and step.name < len(value):
            return value[step.name] if step.name >= -len(value) else MISSING
        return MISSING
    if isinstance(value, ModuleType):
        return getattr(value, str(step.name), MISSING)
    held = getattr(value, "__dict__", {})
    if step.name in held:
        return held[step.name]
    for part in ("_modules", "_parameters", "_buffers"):
        if isinstance(value, torch.nn.Module) and step.name in held.get(part, {}):
            return held[part][step.name]
    return inspect.getattr_static(value, str(step.name), MISSING)

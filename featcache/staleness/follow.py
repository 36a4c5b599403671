"""Following of code: the functions, classes and values that a function reaches by name.

All code of the user's is followed, in whatever file; that of libraries is not. A method of a
class counts if an object of the class is reached, and code that is followed mentions its name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import torch

from featcache.staleness.chains import MAKING, FunctionReading, Place
from featcache.staleness.implicit import IMPLICIT, NAMELESS, NEUTRAL, OPERATORS
from featcache.staleness.members import (
    defaults_of_fields,
    first_bases,
    functions_in,
    is_descriptor,
    within,
)
from featcache.staleness.modules import Described, describe_module
from featcache.staleness.names import Names, names_of
from featcache.staleness.source import Code, code_of, is_users
from featcache.staleness.steps import Chain
from featcache.staleness.values import Values


@dataclass
class Function:
    """A function that was followed."""

    function: FunctionType
    label: str
    name: str  # as it is shown: a function inside of another one has a name that does not count
    code: Code
    names: Names
    owner: type | None  # the class that it is a method of


class Named(NamedTuple):
    """A value that code names, and what holds it by which name: a namespace, a closure's cell."""

    value: object
    holder: Place


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
        # where code writes; True: an attribute, which `written` names
        self.written_places: dict[Place, bool] = {}
        # chains with keys that are taken as they are now, by where they stand
        self.keyed: list[tuple[FunctionReading, Chain, Chain]] = []
        self._operators: set[str] = set()  # methods that operators call
        self._labels: dict[str, int] = {}
        self._kinds: dict[type, bool] = {}  # classes of objects; True: the user's
        self._pending: list[tuple[FunctionType, type | None]] = []

    # what `Values` asks

    def function(
        self, function: FunctionType, owner: type | None = None, held: str = ""
    ) -> str | None:
        """Take a function to be followed; returns its label, None if it is a library's.

        `held` says what holds it, which is how one without a name of its own is shown.
        """
        if not is_users(function):
            return None
        if function not in self.functions:
            self._add(function, owner, held if function.__name__ in NAMELESS else "")
        return self.functions[function].label

    def wrapper(self, wrapper: object) -> None:
        """Take the functions of the user's that a library's function wraps."""
        for function in within(wrapper):
            self.function(function, held=getattr(wrapper, "__name__", ""))

    def named(self, cls: type) -> None:
        """Take a class that code names."""
        if any(is_users(base) for base in cls.__mro__):
            self.classes[cls] = True

    def attributes(self, value: object) -> Mapping[str, object] | None:
        """Return the attributes of an object that code mentions; None: all its state counts."""
        cls = type(value)
        if cls not in self._kinds:
            self._kinds[cls] = any(map(is_users, cls.__mro__))
            self._take_patches(cls)
        if self._kinds[cls]:
            self.classes.setdefault(cls, False)
        elif not isinstance(value, SimpleNamespace):
            return None
        if any(base.__name__ not in NEUTRAL and not is_users(base) for base in cls.__mro__):
            return None
        held = dict(vars(value)) if hasattr(value, "__dict__") else {}
        for base in cls.__mro__:
            for name in _slots(base):
                if hasattr(value, name):
                    held[name] = getattr(value, name)
        names, written = self.names_of(cls) | IMPLICIT, self.written_of(cls)
        return {k: v for k, v in held.items() if self.mentions(k, names) and k not in written}

    def reads(self, value: object, name: str) -> bool:
        """Tell whether followed code mentions an attribute of an object."""
        return name in self.names_of(type(value))  # as it is: patterns are of their own objects

    def module(self, module: torch.nn.Module, values: Values) -> Described:
        """Describe a torch module."""
        return describe_module(module, values)

    def _take_patches(self, cls: type) -> None:
        """Take what a user put in place of methods of a library's class."""
        for base in cls.__mro__:
            for inner in vars(base).values() if not is_users(base) else ():
                if isinstance(inner, FunctionType) and is_users(inner):
                    self.function(inner, base)

    # names

    def names_of(self, cls: type) -> set[str]:
        """Return the names that code mentions of objects of a class."""
        return self.free.union(*(self.own.get(base, ()) for base in cls.__mro__))

    def written_of(self, cls: type) -> set[str]:
        """Return the attributes that followed code stores into, of objects of a class."""
        found: set[str] = set(self.written.get(None, ()))
        return found.union(*(self.written.get(base, ()) for base in cls.__mro__))

    def is_written(self, place: Place) -> bool:
        """Tell whether followed code writes what lies at a place, around it or in it."""
        for written, by_class in self.written_places.items():
            around = place[: len(written)] == written
            within = written[: len(place)] == place and not by_class
            if place and (around or within):
                return True
        return False

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
            FunctionReading(self, self.functions[function], owner).read()
        self._follow_classes()
        for reading, chain, key in list(self.keyed):
            if reading.is_written(key):  # by code that was found later
                self.keyed.remove((reading, chain, key))
                reading.without_keys(chain)
        return bool(self._pending) or self.size != before

    def _follow_classes(self) -> None:
        """Take what is mentioned of the classes that were reached."""
        for cls, named in list(self.classes.items()):
            names = self.names_of(cls) | IMPLICIT | self._operators | {*(MAKING if named else ())}
            for base in filter(is_users, cls.__mro__):
                for name, value in list(vars(base).items()):
                    if self.mentions(name, names):
                        self._take(base, name, value)
                for name, value in defaults_of_fields(base) if named else ():
                    if self.mentions(name, names):
                        self.note(base.__qualname__, name, value, (id(base), name))
        own = {str(chain.steps[0].name) for chain in self.of_extractor if chain.steps}
        for cls in (*self.classes, type(self.extractor)):
            names = own if cls is type(self.extractor) else self.names_of(cls)
            if order := first_bases(cls, names | IMPLICIT | {*MAKING}):
                self.note(cls.__qualname__, "order of bases", order, (id(cls),))

    @property
    def size(self) -> tuple[int, ...]:
        """Numbers of all that was found, to see whether it grows."""
        own = sum(map(len, self.own.values()))
        rest = (
            self.functions,
            self.classes,
            self._operators,
            self.free,
            self.like,
            self.text,
            self.of_extractor,
        )
        return own, *(len(each) for each in rest), sum(map(len, self.values.values()))

    def _take(self, base: type, name: str, value: object) -> None:
        """Take a method or a value of a class's body."""
        methods = list(functions_in(value))
        for function in methods:
            self.function(function, base, f"{base.__qualname__}.{name}")
        is_value = not methods and (is_descriptor(value) or not hasattr(value, "__get__"))
        if (is_value and name[:2] != "__") or isinstance(value, functools.partialmethod):
            self.note(base.__qualname__, name, value, (id(base), name))

    def note(self, label: str, name: str, value: object, holder: Place) -> None:
        """Note a value that code names."""
        self.values.setdefault(label, {})[name] = Named(value, holder)

    def _add(self, function: FunctionType, owner: type | None, held: str) -> None:
        name = function.__qualname__.replace(".<locals>", "")
        inside = function.__qualname__.rpartition(".")[0].endswith("<locals>")
        inside = inside and function.__name__.isidentifier()  # no lambda
        label = f"{name.rpartition('.')[0]}.<inner>" if inside else name
        number = self._labels[label] = self._labels.get(label, 0) + 1
        if number > 1:
            label, name = f"{label} ({number})", f"{name} ({number})"
        name += f" ({held})" if held else ""
        code = code_of(function)
        if code.tree is None:
            names = Names(parameters=[*function.__code__.co_varnames])
            names.read = [Chain(each) for each in function.__code__.co_names]
            self.free.update(function.__code__.co_names)
            names.text = {each for each in function.__code__.co_consts if isinstance(each, str)}
        else:
            names = names_of(code.tree)
        for each in names.operators & OPERATORS.keys():
            self._operators.update(f"__{kind}{OPERATORS[each]}__" for kind in ("", "r", "i"))
        self.functions[function] = Function(function, label, name, code, names, owner)
        self._pending.append((function, owner))


def _slots(base: type) -> tuple[str, ...]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)

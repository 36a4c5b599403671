"""Members of objects: what an attribute, an item or an import is, without running properties."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Collection, Iterator
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch

from featcache.staleness.code import is_users, is_users_place
from featcache.staleness.names import Step, words
from featcache.staleness.values import MISSING, is_configuration, proxied

# Names that code calls without naming them, and names that tell nothing: tables.

# called without being named
IMPLICIT = words(
    "forward __abs__ __array__ __array_function__ __array_ufunc__ __bool__ __call__ "
    "__contains__ __enter__ __eq__ __exit__ __float__ __ge__ __get__ __getattr__ "
    "__getattribute__ __getitem__ __gt__ __index__ __int__ __iter__ __le__ __len__ __lt__ "
    "__missing__ __ne__ __next__ __reversed__ __round__ __setitem__ __torch_dispatch__ "
    "__torch_function__"
)
NAMELESS = ("<lambda>", "_")
# parts of the names of methods, by operators of Python's syntax tree
OPERATORS = dict(
    pair.split(":")
    for pair in words(
        "Add:add Sub:sub Mult:mul MatMult:matmul Div:truediv FloorDiv:floordiv Mod:mod "
        "Pow:pow LShift:lshift RShift:rshift BitOr:or BitXor:xor BitAnd:and USub:neg "
        "UAdd:pos Invert:invert"
    )
)
# bases of users' classes whose code reads no attribute but its own
NEUTRAL = words(
    "builtins.object torch.nn.modules.module.Module typing.Generic typing.Protocol abc.ABC "
    "types.SimpleNamespace featcache.brain.FeatureCacheMixin speechbrain.core.Brain"
)


# Members of objects: what an attribute or an item is, without running code of properties.

# names that Python itself gives to modules, classes, functions and objects
_OF_MODULES = words("__builtins__ __cached__ __file__ __loader__ __package__ __path__ __spec__")
_OF_PYTHON = frozenset(
    name for name in (*_OF_MODULES, *dir(type), *dir(FunctionType)) if name[:2] == "__"
)
# files of code that `dataclass`, `namedtuple` and `attrs` make
_GENERATED = ("<string>", "<attrs generated")


def is_pythons(name: str) -> bool:
    """Whether a name is one that Python itself gives: `__doc__`, not `__gain` of a user's."""
    return name in _OF_PYTHON


def is_method(value: object, name: object, found: object) -> bool:
    """Whether an attribute of an object is code of its class."""
    if isinstance(value, ModuleType | type) or name in getattr(value, "__dict__", {}):
        return False
    if inspect.getattr_static(type(value), str(name), MISSING) is not found:
        return False  # a module of a module
    if is_descriptor(found):
        return False
    return any(True for _ in functions_in(found)) or callable(found) or hasattr(found, "__get__")


def is_descriptor(value: object) -> bool:
    """Whether a value of a class's body is an object of the user's that stands for others."""
    return hasattr(type(value), "__get__") and not callable(value) and is_users(type(value))


def step_into(value: object, step: Step) -> object:
    """Return what a step of a chain leads to, or `MISSING`; runs no code of properties."""
    value = proxied(value)
    if step.name is None or value is MISSING:
        return MISSING
    if is_configuration(value):
        return configured(value, step.name)
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


def _item(value: Any, key: str | int) -> object:
    if isinstance(value, torch.nn.ModuleDict):
        value = value._modules  # noqa: SLF001
    if isinstance(value, torch.nn.Sequential | torch.nn.ModuleList):
        value = [*value]
    if type(value) is dict:
        return value.get(key, MISSING)
    if type(value) in (list, tuple) and type(key) is int and -len(value) <= key < len(value):
        return value[key]
    return MISSING


def defaults_of_fields(cls: type) -> Iterator[tuple[str, object]]:
    """Yield defaults of fields that are no attributes of their class: factories, NamedTuple's."""
    fields: dict[str, Any] = vars(cls).get("__dataclass_fields__", {})
    for name, each in fields.items():
        if each.default_factory is not dataclasses.MISSING:
            yield name, each.default_factory
    yield from vars(cls).get("_field_defaults", {}).items()
    yield from ((each.name, each.default) for each in vars(cls).get("__attrs_attrs__", ()))


def first_bases(cls: type, names: Collection[str]) -> list[str]:
    """Return which of two bases that define a name, neither from the other, comes first."""
    bases = [base for base in cls.__mro__ if base is not object]
    return [
        f"{one.__qualname__} before {other.__qualname__}"
        for one, other in itertools.combinations(bases, 2)
        if (is_users(one) or is_users(other))
        and not issubclass(one, other)
        and any(name in vars(other) for name in vars(one) if name in names)
    ]


def functions_in(value: object) -> Iterator[FunctionType]:
    """Yield the functions that an attribute of a class is made of: methods, properties."""
    parts = [value]
    if isinstance(value, functools.singledispatchmethod):
        yield from within(value.dispatcher)
    if isinstance(value, property):
        parts = [value.fget]  # the setter runs where the value is set, which then counts
    for part in parts:
        for attribute in ("func", "__func__"):  # cached_property, partialmethod; staticmethod
            part = getattr(part, attribute, part)
        if isinstance(part, FunctionType) and part.__code__.co_filename.startswith(_GENERATED):
            file = getattr(sys.modules.get(part.__module__), "__file__", None)
            if file is not None or str(part.__module__).startswith("namedtuple_"):
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


def _unwrapped(value: Any) -> object:
    try:
        return inspect.unwrap(value)
    except ValueError:  # wraps itself
        return value


# Imports inside of functions: what they bind, which may not be loaded yet.


def imported_by(function: FunctionType, module: str, attribute: str | None) -> object:
    """Return what a function imports, or `MISSING`; `module` begins with a dot where relative.

    A module of the user's is imported now: the function would do it, and a second call in the same
    process would find it loaded.
    """
    package = function.__globals__.get("__package__")
    try:
        name = importlib.util.resolve_name(module, package)
    except ImportError:
        return MISSING
    loaded = _loaded(name)
    if attribute is None:
        return loaded
    found = step_into(loaded, Step(attribute))
    return _loaded(f"{name}.{attribute}") if found is MISSING and loaded is not MISSING else found


def _loaded(name: str) -> object:
    if name not in sys.modules and _is_users(name.partition(".")[0]):
        with contextlib.suppress(Exception):  # whoever computes is told
            importlib.import_module(name)
    return sys.modules.get(name, MISSING)


def _is_users(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location else spec.submodule_search_locations or ()
    return any(place is not None and is_users_place(package, place) for place in places)


def configured(value: Any, name: str | int) -> Any:
    """Return an item of a configuration; its method, or `MISSING`, where it has no such item."""
    with contextlib.suppress(LookupError, TypeError, ValueError):  # nothing to interpolate, say
        if isinstance(name, int) or name in value:
            return value[name]
    return getattr(type(value), str(name), MISSING)

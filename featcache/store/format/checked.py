"""Values out of JSON, checked: numbers, text, paths, and dataclasses made of objects.

Each function returns the value, or raises an error of `NOT_AS_WRITTEN` for one of another kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

OPTIONAL = {"optional": True}  # metadata of a field whose key may be absent
NOT_AS_WRITTEN = (LookupError, TypeError, AttributeError, ValueError, OverflowError)
Value = TypeVar("Value")


def within(path: object, depth: int = 100) -> str:
    """Return a path; raises `ValueError` if it leads out of the directory it is relative to."""
    steps = path.split("/") if isinstance(path, str) else [""]
    if len(steps) > depth or "\0" in str(path) or any(step in ("", ".", "..") for step in steps):
        raise ValueError(f"{path!r} does not lead to a file of the cache")
    return cast(str, path)


def natural(number: object, most: int = (1 << 63) - 1) -> int:
    """Return a number; raises `ValueError` unless it is a natural number."""
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError(f"{number!r} is not a natural number")
    return number


# types of fields, for `read_as`
Name = Annotated[str, partial(within, depth=1)]  # can be that of a file
FilePath = Annotated[str, within]
Counter = Annotated[int, partial(natural, most=10**12)]  # can be counted up


def read_as(kind: type[Value], value: object) -> Value:
    """Return what `dataclasses.asdict` and JSON made of a value of a type, as that type again.

    A type is a dataclass, `Mapping[..., ...]`, `tuple[..., ...]` of one type, `int` (from 0 on),
    `str`, `bool`, `Any`, one of the annotated types above, or one of these `| None`. Keys that are
    no field of a dataclass are passed over; a field with `optional` in its metadata may be absent.

    >>> read_as(dict[Name, tuple[int, ...]], {"fbank": [80]})
    {'fbank': (80,)}
    """
    return cast(Value, _reader(cast(Any, kind))(value))


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return what `read_as` calls for a type: put together once, as many parts have an entry."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return cast(Callable[[Any], Any], arguments[1])
    inner = [_reader(each) for each in arguments if each not in (type(None), ...)]
    if type(None) in arguments:
        return lambda value: None if value is None else inner[0](value)
    if origin is tuple:
        return lambda value: tuple(map(inner[0], value))
    if inner:
        return lambda value: {inner[0](key): inner[1](item) for key, item in value.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        fields = {name: _reader(each) for name, each in hints.items()}
        optional = {each.name for each in dataclasses.fields(kind) if each.metadata.get("optional")}
        return lambda value: kind(
            **{
                name: read(value[name])
                for name, read in fields.items()
                if name not in optional or name in value
            }
        )
    return natural if kind is int else partial(_instance, object if kind is Any else kind)


def _instance(kind: type, value: object) -> object:
    if not isinstance(value, kind):
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return value

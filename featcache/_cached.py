"""`cached_property`: a property that is computed once for each object, without any lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

Owner = TypeVar("Owner")
Value = TypeVar("Value")


class cached_property(Generic[Owner, Value]):  # noqa: N801  # as the standard library calls it
    """A property whose value is computed at its first use, and is an attribute then.

    As that of `functools` is from Python 3.12 on. That of Python 3.11 holds a lock, one for all
    objects of a class, while it computes: a process that is forked meanwhile, from another thread,
    waits for it forever. Two threads may compute the value at once; the later one is kept.
    """

    def __init__(self, func: Callable[[Owner], Value]) -> None:
        self.func = func
        self.__doc__ = func.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: Owner, owner: type) -> Value: ...
    def __get__(self, instance: Any, owner: type) -> Self | Value:
        if instance is None:
            return self
        value = self.func(instance)
        instance.__dict__[self.name] = value
        return value

"""Names of a package that are loaded when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NoReturn

from featcache.errors import MissingDependencyError


def load(package: str, homes: Mapping[str, str], name: str) -> object:
    """Return what a package calls `name`, from the module that `homes` has for it.

    Where a library is not installed, this is a function that says so when it is called: `help()`
    and others look at all names.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        return getattr(import_module(homes[name]), name)
    except MissingDependencyError as error:
        return _raising(name, str(error))
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _raising(name, str(without_torch(f"{package}.{name}")))


def without_torch(what: str) -> MissingDependencyError:
    """Return the error of what needs torch, which is not installed."""
    return MissingDependencyError(f"{what!r} needs 'torch'; try: pip install 'featcache[torch]'")


def _raising(name: str, message: str) -> Callable[..., NoReturn]:
    def stand_in(*args: object, **kwargs: object) -> NoReturn:
        raise MissingDependencyError(message)

    stand_in.__name__ = stand_in.__qualname__ = name
    stand_in.__doc__ = f"Not usable here: {message}."
    return stand_in

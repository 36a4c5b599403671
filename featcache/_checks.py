"""Checks of arguments, once for all: settings by name, ids, whole numbers, directories."""

from __future__ import annotations

import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from featcache.errors import (
    ConfigError,
    KeyNotFoundError,
    StateError,
    UnknownNameError,
    nearest,
)

P = ParamSpec("P")
R = TypeVar("R")
NOWHERE: Mapping[str, str] = MappingProxyType({})


def named_settings(
    what: str, elsewhere: Mapping[str, str] = NOWHERE
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate an `__init__` or a function: unknown and missing settings of `what` are an error.

    A `ConfigError` names the setting. Python's own `TypeError` does not say which setting was
    meant, and HyperPyYAML hides it behind one that names the class alone. The signature stays
    visible. `elsewhere` says of settings that are not among them where they belong.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        known = [name for name in signature.parameters if name != "self"]

        @functools.wraps(function)
        def checked(*args: P.args, **settings: P.kwargs) -> R:
            for name in settings:
                if name not in known:
                    hint = elsewhere.get(name) or nearest(name, known)
                    raise UnknownNameError(f"{what} has no setting {name!r}; {hint}")
            try:
                signature.bind(*args, **settings)
            except TypeError as error:
                settings_text = ", ".join(map(repr, known))
                raise ConfigError(f"{what}: {error}; its settings are {settings_text}") from None
            return function(*args, **settings)

        return checked

    return decorate


@contextmanager
def errors_about(what: str) -> Iterator[None]:
    """Begin the message of a `ConfigError` with what it is about."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{what}: {error}") from error.__cause__


def are_listed(ids: object) -> bool:
    """Whether something can be a list of ids, and not one of them, or nothing of the kind."""
    return isinstance(ids, Iterable) and not isinstance(ids, str)


def listed_ids(ids: Iterable[str]) -> list[str]:
    """Return utterance ids as a list; raises `KeyNotFoundError` for what is no list of strings."""
    if not are_listed(ids):
        one = "the one string " * isinstance(ids, str)
        raise KeyNotFoundError(f"ids are a list of strings, not {one}{ids!r}")
    listed = list(ids)
    for id in listed:
        if not isinstance(id, str):
            raise KeyNotFoundError(not_an_id(id))
    return listed


def not_an_id(id: object) -> str:
    """Return the error that something is no utterance id."""
    return (
        f"utterance ids are strings, not {id!r}; rows by number are what featcache.FeatureDataset "
        "gives"
    )


def directory(path: str | PathLike[str], what: str) -> Path:
    """Return the path of a directory, with the home directory for a leading `~`.

    Raises `ConfigError`, which begins with `what` it is of, for what is no path.

    >>> directory("features", "root").as_posix()
    'features'
    """
    text = os.fspath(path) if isinstance(path, str | PathLike) else path
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{what} is given as the path of a directory, not {path!r}")
    if "://" in text:
        raise ConfigError(
            f"{what} is given here as the path of a directory, not as a URL; a cache in an object "
            "store is edited where it was made, and pushed again; to read it, give what "
            "featcache.open(url) returns"
        )
    expanded = os.path.expanduser(text)  # noqa: PTH111  # pathlib would expand './~', too
    if expanded.startswith("~"):
        raise ConfigError(
            f"{what} {text!r}: there is no such home directory; "
            f"a directory of that name is './{text}'"
        )
    found = Path(expanded)
    return found.absolute() if str(found).startswith("~") else found  # './~' has lost its './'


def whole_number(name: str, value: object, least: int) -> int:
    """Return an integer argument of any integer type.

    Raises `ConfigError` below `least` or for what is none.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer of at least {least}, not {value!r}")
    return number


def number_in_state(name: str, state: Mapping[str, object], least: int = 0) -> int:
    """Return a number that a sampler's or loader's state holds; else a `StateError`."""
    try:
        return whole_number(name, state[name], least)
    except ConfigError as error:
        raise StateError(f"this is no state: {error}") from None

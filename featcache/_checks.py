"""Checks that declarations share: settings by name, errors that name what they are about."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

from featcache.errors import ConfigError, UnknownNameError, nearest

P = ParamSpec("P")


def named_settings(what: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate an `__init__`: unknown and missing settings of `what` are a `ConfigError` by name.

    Python's own `TypeError` does not say which setting was meant, and HyperPyYAML hides it behind
    one that names the class alone. The signature stays visible.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(init)
        known = list(signature.parameters)[1:]

        @functools.wraps(init)
        def checked(*args: P.args, **settings: P.kwargs) -> None:
            for name in settings:
                if name not in known:
                    raise UnknownNameError(
                        f"{what} has no setting {name!r}; {nearest(name, known)}"
                    )
            try:
                signature.bind(*args, **settings)
            except TypeError as error:
                settings_text = ", ".join(map(repr, known))
                raise ConfigError(f"{what}: {error}; its settings are {settings_text}") from None
            init(*args, **settings)

        return checked

    return decorate


@contextmanager
def errors_about(what: str) -> Iterator[None]:
    """Begin the message of a `ConfigError` with what it is about."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{what}: {error}") from error.__cause__

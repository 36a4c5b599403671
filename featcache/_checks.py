"""Checks that declarations and readers share: settings by name, caches that are complete."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

from featcache.errors import ConfigError, IncompleteError, UnknownNameError, nearest

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


def check_complete(cache: object, *, allow_incomplete: bool) -> None:
    """Raise `IncompleteError` for a cache, or a table of caches, that lacks utterances.

    What does not say whether it is complete passes.
    """
    if not allow_incomplete and not getattr(cache, "complete", True):
        raise IncompleteError(
            f"{cache!r} lacks utterances; let its extraction come to the end (the same call of "
            "cache_features or extract goes on), or read what is there with allow_incomplete=True"
        )

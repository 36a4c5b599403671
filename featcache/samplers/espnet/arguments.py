"""Checks of single arguments of ESPnet's builders."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from featcache.errors import ConfigError, nearest


def count(argument: str, value: float | None) -> int:
    """Return an integer from 1 on; also from a float without a fraction, as YAML reads 1e6."""
    if value is None:
        raise ConfigError(f"{argument} is needed for this type of sampler")
    number = isinstance(value, int | float | np.integer) and not isinstance(value, bool)
    if not (number and value >= 1 and value % 1 == 0):
        raise ConfigError(f"{argument} is an integer from 1 on, not {value!r}")
    return int(value)


def require_factor(argument: str, value: float, least: float = 0) -> None:
    """Raise `ConfigError` for all but a finite number from `least` on."""
    if not isinstance(value, int | float) or not least <= value < math.inf:
        raise ConfigError(f"{argument} is a number from {least} on, not {value!r}")


def epoch_seed(epoch: int) -> int:
    """Return an epoch that can seed a generator."""
    if not isinstance(epoch, int | np.integer) or not 0 <= epoch < 2**32:
        raise ConfigError(f"epoch is an integer from 0 to 2**32 - 1, not {epoch!r}")
    return int(epoch)


def require_type(type: str, known: Iterable[str], other: str, others: Iterable[str]) -> None:
    """Raise `ConfigError` for a type that is not known here, naming the builder that knows it."""
    if type in others:
        raise ConfigError(f"batches of type {type!r} are made by {other}")
    if type not in known:
        raise ConfigError(
            f"no batch sampler {type!r}; {nearest(type, known)}; {other} makes {', '.join(others)}"
        )


def require_either(argument: str, value: object, other: str, labels: object) -> None:
    """Raise `ConfigError` unless one of two arguments is given."""
    if (value is None) == (labels is None):
        found = "not both" if labels is not None else "none is given"
        raise ConfigError(f"give either {argument} or {other}, {found}")

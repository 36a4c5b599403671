"""Configurations of OmegaConf, which look like dicts and objects and are neither."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

MISSING = object()


def is_configuration(value: object) -> bool:
    """Tell whether a value is one, or a list of one."""
    loaded = sys.modules.get("omegaconf")
    return loaded is not None and isinstance(value, loaded.DictConfig | loaded.ListConfig)


def configured(value: Any, name: str | int) -> Any:
    """Return an item of a configuration; its method, or `MISSING`, where it has no such item."""
    with contextlib.suppress(LookupError, TypeError, ValueError):  # nothing to interpolate, say
        if isinstance(name, int) or name in value:
            return value[name]
    return getattr(type(value), str(name), MISSING)


def plain_configuration(value: Any) -> Any:
    """Return a configuration as dicts and lists, interpolated if that is possible."""
    plain = sys.modules["omegaconf"].OmegaConf.to_container
    try:
        return plain(value, resolve=True)
    except ValueError:
        return plain(value, resolve=False)

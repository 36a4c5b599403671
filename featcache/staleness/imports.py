"""Imports inside of functions: what they bind, which may not be loaded yet."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from types import FunctionType

from featcache.staleness.configurations import MISSING
from featcache.staleness.members import step_into
from featcache.staleness.source import is_users_place
from featcache.staleness.steps import Step


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

"""Values that computing changes: memos, counters, tables that are filled. They count as before.

What a library keeps on its objects while they compute is no setting, but nothing tells that from
their code. So settings are described again after each run, and those that are others now are shown
as they were, as long as nobody else changes them: the next split has the same fingerprint as in a
new process.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from featcache.errors import ConfigError

if TYPE_CHECKING:
    from featcache.staleness.provenance import Provenance

_ABSENT = object()
Path = tuple[str, ...]
# by the object that computes: what is at a path now, and what was there
_CHANGED: weakref.WeakKeyDictionary[Any, dict[Path, tuple[object, object]]]
_CHANGED = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def noting_changes(made_with: Provenance, again: Callable[[], Provenance]) -> Iterator[None]:
    """Note what changes, within the context, of the settings that features are computed with."""
    before = made_with.settings()
    try:
        yield
    finally:
        with contextlib.suppress(ConfigError):  # code was edited meanwhile: told by the next run
            _note(made_with.extractor, before, again().settings())


def as_before(extractor: object, shown: dict[str, Any]) -> None:
    """Put the values of before in place of those that computing has left."""
    known = _known(extractor)
    for path in sorted(known, key=len, reverse=True):  # what is inside comes first
        now, was = known[path]
        held: Any = shown
        for key in path[:-1]:
            held = held.get(key) if isinstance(held, dict) else None
        if isinstance(held, dict) and held.get(path[-1], _ABSENT) == now:
            if was is _ABSENT:
                held.pop(path[-1], None)
            else:
                held[path[-1]] = was


def _note(extractor: object, before: object, after: object) -> None:
    known = dict(_known(extractor))
    for path, was, now in _changes(before, after, ()):
        noted = known.get(path)
        known[path] = (now, noted[1] if noted is not None and noted[0] == was else was)
    if known:
        with contextlib.suppress(TypeError):  # an object that has no hash, or no weak references
            _CHANGED[extractor] = known


def _known(extractor: object) -> dict[Path, tuple[object, object]]:
    try:
        return _CHANGED.get(extractor, {})
    except TypeError:
        return {}


def _changes(before: object, after: object, path: Path) -> Iterator[tuple[Path, object, object]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            inner = before.get(key, _ABSENT), after.get(key, _ABSENT)
            yield from _changes(*inner, (*path, key))
    elif before is _ABSENT or after is _ABSENT or before != after:
        yield path, before, after

"""Parameters whose names count, since something gives arguments by these names.

A call that gives `b` to `f(a, b)` computes something else once the two have changed their names.
"""

from __future__ import annotations

from collections.abc import Collection, Set

from featcache.staleness.follow import Function


class KeptParameters:
    """Names of parameters that count, by the functions that have them.

    Args:
        functions: all that were followed.
        text: of their code and values, which may be keys that a call spreads with `**`.
    """

    def __init__(self, functions: Collection[Function], text: Set[str]) -> None:
        self._given = set[tuple[str | None, str]]().union(*(each.names.given for each in functions))
        self._known = {each.function.__code__.co_name for each in functions}
        self._text = text if any(each.names.spread for each in functions) else set[str]()

    def of(self, function: str) -> set[str]:
        """Return those of functions of a name: given to them, or to what is not known by name."""
        mine = (arg for to, arg in self._given if to == function or to not in self._known)
        return {*mine, *self._text}

"""Tables of what is refused: a line a case, `name | expression | error | words of the message ...`.

`path` in an expression is an empty directory; the other names are featcache's, and those of the
test's module.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import featcache


def refusals(table: Path) -> pytest.MarkDecorator:
    """Parametrise a test with the lines of a table as `mistake`."""
    rows = [line.split(" | ") for line in table.read_text().splitlines()]
    cases = [pytest.param(rest, id=name) for name, *rest in rows]
    return pytest.mark.parametrize("mistake", cases)


def check_refused(mistake: list[str], path: Path, names: Mapping[str, Any]) -> None:
    """Evaluate a mistake: it raises exactly this error, whose message has all the words."""
    expression, kind, *words = mistake
    known = {name: getattr(featcache, name) for name in featcache.__all__}
    with pytest.raises(featcache.FeatcacheError) as caught:
        eval(expression, {**known, **names, "path": path})  # noqa: S307
    message = str(caught.value)
    assert type(caught.value) is getattr(featcache.errors, kind), message
    assert [word for word in words if word not in message] == [], message

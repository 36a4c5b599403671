"""Paths as the user gives them: those that begin with `~` lead to a home directory."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path

from featcache.errors import ConfigError


def directory(path: str | PathLike[str], what: str) -> Path:
    """Return the path of a directory, with the home directory for a leading `~`.

    Raises `ConfigError`, which begins with `what` it is of, for what is no path.

    >>> directory("features", "root").as_posix()
    'features'
    """
    text = os.fspath(path) if isinstance(path, str | PathLike) else path
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{what} is given as the path of a directory, not {path!r}")
    expanded = os.path.expanduser(text)  # noqa: PTH111  # pathlib would expand './~', too
    if expanded.startswith("~"):
        raise ConfigError(
            f"{what} {text!r}: there is no such home directory; "
            f"a directory of that name is './{text}'"
        )
    found = Path(expanded)
    return found.absolute() if str(found).startswith("~") else found  # './~' has lost its './'

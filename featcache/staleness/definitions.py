"""Definitions in the user's files: digests of functions and constants, needed or not.

Recorded to explain what changed while objects were made.
"""

from __future__ import annotations

import ast
import re
import sys
import time
from collections.abc import Iterator
from importlib.util import decode_source
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from featcache.staleness.source import is_users_module, parsed
from featcache.store.format.files import digest

MOST_S = 0.08  # a tree of hundreds of files is not waited for
_QUOTED = re.compile(r"""(["'])([A-Za-z_]\w*)\1""")


class Definitions(NamedTuple):
    """Digests by file and qualified name; and the names that stand in quotes in any file."""

    digests: dict[str, dict[str, str]]
    quoted: frozenset[str]


def definitions() -> Definitions:
    """Return those of the user's files that are loaded, the smallest first while time lasts.

    Time limits the digests alone: names in quotes are those of all files, so that two records of
    the same files have the same.
    """
    begun = time.thread_time()
    found: dict[str, dict[str, str]] = {}
    quoted: set[str] = set()
    for path in sorted(_files(), key=_size):
        try:
            text = decode_source(path.read_bytes())
            quoted.update(name for _, name in _QUOTED.findall(text))
            if time.thread_time() - begun > MOST_S:
                continue
            tree = parsed(text)
        except (OSError, SyntaxError, ValueError):
            continue
        name = path.name if path.name not in found else f"{path.parent.name}/{path.name}"
        found[name] = dict(_defined(tree.body, text.splitlines()))
    return Definitions(found, frozenset(quoted))


def _files() -> set[Path]:
    modules = [each for each in list(sys.modules.values()) if isinstance(each, ModuleType)]
    files = (vars(each).get("__file__") for each in modules if is_users_module(each))
    return {Path(each) for each in files if isinstance(each, str) and each.endswith(".py")}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _defined(body: list[ast.stmt], lines: list[str], prefix: str = "") -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body, lines, f"{prefix}{node.name}.")
            continue
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for each in targets if isinstance(each, ast.Name)]
        if names:
            text = digest(_code(lines[node.lineno - 1 : node.end_lineno]))
            yield from ((prefix + name, text) for name in names)


def _code(lines: list[str]) -> bytes:
    """Return lines without layout and comments of their own."""
    stripped = (line.strip() for line in lines)
    kept = (line for line in stripped if line and not line.startswith("#"))
    return "\n".join(kept).encode("utf-8", "surrogatepass")

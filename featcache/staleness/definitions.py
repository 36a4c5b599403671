"""Definitions in the user's files: digests of functions and constants, whether features need them
or not. Recorded to explain a change that came about while objects were made."""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from featcache.staleness.normal_form import tree_digest
from featcache.staleness.source import is_users_module, tree_of_file
from featcache.store.format.files import digest

MOST_S = 0.05  # a tree of hundreds of files is not waited for


class Definitions(NamedTuple):
    """Digests by file and qualified name; and the text of the files."""

    digests: dict[str, dict[str, str]]
    text: str


def definitions() -> Definitions:
    """Return those of the user's files that are loaded, the smallest first while time lasts."""
    begun = time.perf_counter()
    found = Definitions({}, "")
    texts = []
    for path in sorted(_files(), key=_size):
        if time.perf_counter() - begun > MOST_S:
            break
        tree, text = tree_of_file(str(path))
        if tree is not None:
            name = (
                path.name if path.name not in found.digests else f"{path.parent.name}/{path.name}"
            )
            found.digests[name] = dict(_defined(tree.body))
            texts.append(text)
    return found._replace(text="\n".join(texts))


def _files() -> set[Path]:
    modules = [each for each in list(sys.modules.values()) if isinstance(each, ModuleType)]
    files = (vars(each).get("__file__") for each in modules if is_users_module(each))
    return {Path(each) for each in files if isinstance(each, str) and each.endswith(".py")}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _defined(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, tree_digest(node, ())
        elif isinstance(node, ast.ClassDef):
            yield from _defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = digest(ast.dump(node.value).encode("utf-8", "surrogatepass"))
            yield from ((prefix + each.id, value) for each in targets if isinstance(each, ast.Name))

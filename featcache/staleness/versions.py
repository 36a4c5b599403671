"""Versions of local variables: `x = f(x)` makes another one of the same name.

Told apart only where each way through a function passes: by assignments that stand in its body
itself. A variable that an inner function names has one version. Those of a comprehension are its
own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

_INNER = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ClassDef,
    ast.GeneratorExp,  # runs later
)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FIRST_OF_COMPREHENSIONS = 1 << 20


def versions_of(tree: ast.AST) -> dict[int, int]:
    """Return the version of each name in a function, by the id of its node; 0 where left out."""
    body = getattr(tree, "body", None)
    found = _in_body(body) if isinstance(body, list) else {}
    comprehensions = [node for node in ast.walk(tree) if isinstance(node, _COMPREHENSIONS)]
    for number, node in enumerate(comprehensions):  # those inside of others come later
        bound = {each.id for part in node.generators for each in _names(part.target)}
        bound -= _parameters(node)
        outside = {id(each) for each in ast.walk(node.generators[0].iter)}
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id in bound and id(each) not in outside:
                found[id(each)] = _FIRST_OF_COMPREHENSIONS + number
    return {node: version for node, version in found.items() if version}


def _parameters(tree: ast.AST) -> set[str]:
    return {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def _in_body(body: list[ast.stmt]) -> dict[int, int]:
    fixed = _fixed(body)
    current: dict[str, int] = {}
    found: dict[int, int] = {}
    for statement in body:
        targets = _targets(statement)
        assigned = {id(each) for each in targets}
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and id(node) not in assigned:
                found[id(node)] = current.get(node.id, 0)
        for target in targets:
            if target.id not in fixed:
                current[target.id] = current.get(target.id, 0) + 1
                found[id(target)] = current[target.id]
    return found


def _fixed(body: list[ast.stmt]) -> set[str]:
    """Return names that code elsewhere may read or write, or that a statement deletes."""
    found: set[str] = set()
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Global | ast.Nonlocal):
                found.update(node.names)
            elif isinstance(node, _INNER):
                found.update(each.id for each in ast.walk(node) if isinstance(each, ast.Name))
                found.add(str(getattr(node, "name", "")))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
                found.add(node.id)
            elif isinstance(node, ast.alias):
                found.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
                found.add(node.name)
            elif isinstance(node, ast.MatchMapping) and node.rest:
                found.add(node.rest)
    return found


def _targets(statement: ast.stmt) -> list[ast.Name]:
    """Return the variables that a statement assigns anew."""
    match statement:
        case ast.Assign(targets=targets):
            return [name for target in targets for name in _names(target)]
        case ast.AnnAssign(target=ast.Name() as name, value=value) if value is not None:
            return [name]
    return []


def _names(target: ast.expr) -> Iterator[ast.Name]:
    if isinstance(target, ast.Name):
        yield target
    elif isinstance(target, ast.Tuple | ast.List | ast.Starred):
        inner = [target.value] if isinstance(target, ast.Starred) else target.elts
        for each in inner:
            yield from _names(each)

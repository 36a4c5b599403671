"""Digest of a function's tree: the same for code that computes the same, in any Python.

The fields of the tree are walked. Left out: docstrings, annotations, assertions, prints and log
lines; variables are numbered. Parameters too, unless something gives them by name.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from types import CodeType
from typing import Any

from featcache.staleness.source import FunctionNode
from featcache.staleness.versions import versions_of
from featcache.store.format.files import digest

_LEFT_OUT = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "simple"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NAMING = (ast.ExceptHandler, ast.MatchStar, ast.MatchAs)
_NOTES = ("final", "override", "overload", "no_type_check", "abstractmethod")  # of decorators
_LOGGERS = ("log", "_log", "logger", "_logger", "logging", "warnings", "LOGGER", "LOG")
_DOES = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def tree_digest(tree: FunctionNode, given_by_name: Collection[str]) -> str:
    """Return the xxh3-64 of a function; `given_by_name`: parameters whose names count."""
    names = _Names(tree, given_by_name)
    return digest("".join(_form(tree, names, top=True)).encode("utf-8", "surrogatepass"))


class _Names:
    """Numbers of the local variables of a function, each time that it is assigned anew apart."""

    def __init__(self, tree: FunctionNode, kept: Collection[str]) -> None:
        self._versions = versions_of(tree)
        self._local = _variables(tree, kept)
        self._numbers: dict[tuple[str, int], int] = {}

    def of(self, node: ast.AST, name: object) -> object:
        """Return the number of a variable, or its name if it is not local."""
        version = self._versions.get(id(node), 0)
        if not isinstance(name, str) or (version == 0 and name not in self._local):
            return name
        return self._numbers.setdefault((name, version), len(self._numbers))


def code_digest(code: CodeType) -> str:
    """Return the xxh3-64 of code whose source is not kept; another Python's is another."""
    return digest(repr(_values(code)).encode("utf-8", "surrogatepass"))


def _values(item: object) -> object:
    """Return what code does, as values whose `repr` is the same in every process."""
    if isinstance(item, frozenset):
        return sorted(map(repr, item))
    if not isinstance(item, CodeType):
        return item
    constants = [_values(constant) for constant in item.co_consts]
    return (item.co_code, constants, item.co_names, item.co_varnames)


def _variables(tree: ast.AST, kept: Collection[str]) -> dict[str, None]:
    """Return the names of local variables, in the order of the walk."""
    found: dict[str, None] = {}
    others: set[str] = set()  # global, or of a class's body
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            if node.arg not in kept:
                found[node.arg] = None
            else:
                others.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found[node.id] = None
        elif isinstance(node, (*_NAMING, ast.FunctionDef, ast.ClassDef)) and node is not tree:
            found[str(node.name)] = None
        elif isinstance(node, ast.Global | ast.Nonlocal):
            others.update(node.names)
        if isinstance(node, ast.ClassDef):
            others.update(name for each in node.body for name in _bound(each))
    return {name: None for name in found if name not in others}


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (each.id for each in targets if isinstance(each, ast.Name))


def _form(node: Any, names: _Names, *, top: bool = False) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield f"{type(node.value).__name__}:{_constant(node.value)};"
        return
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign(targets=[node.target], value=node.value)
    if isinstance(node, ast.Raise):
        node = _without_message(node)
    if isinstance(node, ast.JoinedStr):
        node = ast.JoinedStr(values=_joined(node.values))
    yield f"{type(node).__name__}("
    for name in sorted(node._fields):
        value = getattr(node, name, None)
        if value is None or name in _LEFT_OUT or (top and name == "name"):
            continue
        yield f"{name}="
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                noted = name == "decorator_list" and _last_name(each) in _NOTES
                if not noted and not _says_nothing(each):
                    yield from _form(each, names)
            else:
                yield f"{names.of(node, each)!r}," if _is_name(node, name) else f"{each!r},"
        yield ";"
    yield ")"


def _is_name(node: ast.AST, field: str) -> bool:
    """Tell whether a field names a variable."""
    named: dict[str, tuple[type, ...]] = {
        "id": (ast.Name,),
        "arg": (ast.arg,),
        "name": (ast.ExceptHandler, ast.MatchAs, *_SCOPES),
    }
    return isinstance(node, named.get(field, ()))


def _constant(value: object) -> str:
    return f"{value:x}" if type(value) is int else repr(value)  # of any length


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string; Python 3.12.0 has empty ones, too."""
    return [each for each in values if not (isinstance(each, ast.Constant) and each.value == "")]


def _says_nothing(node: ast.AST) -> bool:
    """Tell whether a statement changes no value: a docstring, an assertion, a log line."""
    if isinstance(node, ast.Pass | ast.Assert):
        return True
    if isinstance(node, ast.AnnAssign):
        return node.value is None
    if not isinstance(node, ast.Expr):
        return False
    call = node.value
    if isinstance(call, ast.Constant):
        return True
    if not isinstance(call, ast.Call) or any(isinstance(each, _DOES) for each in ast.walk(call)):
        return False
    return is_message(call.func)


def _without_message(node: ast.Raise) -> ast.Raise:
    """Return a statement without the text that it raises an error with."""
    error = node.exc
    if not isinstance(error, ast.Call) or error.keywords:
        return node
    texts = (isinstance(each, ast.JoinedStr) or _is_text(each) for each in error.args)
    if not all(texts) or any(isinstance(each, _DOES) for each in ast.walk(error)):
        return node
    return ast.Raise(exc=ast.Call(func=error.func, args=[], keywords=[]), cause=node.cause)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _last_name(node: ast.AST) -> object:
    return getattr(node, "attr", getattr(node, "id", None))


def is_message(called: ast.AST) -> bool:
    """Tell whether what is called prints or logs."""
    if isinstance(called, ast.Name):
        return called.id == "print"
    owner = called.value if isinstance(called, ast.Attribute) else None
    if isinstance(owner, ast.Call):  # logging.getLogger(...).info
        return isinstance(owner.func, ast.Attribute) and owner.func.attr == "getLogger"
    return owner is not None and _last_name(owner) in _LOGGERS

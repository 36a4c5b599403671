"""Chains of names in a tree, `self.hparams["gain"]`, and their steps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One step of a chain: an attribute, or an item if `item`; None: of any name like `like`.

    `key` is the chain that an item's name is the value of.
    """

    name: str | int | None
    item: bool = False
    like: str | None = None  # a pattern, where part of the name is known
    key: Any = None


class Chain(NamedTuple):
    """Names that lead from a variable to a value: `root.a["b"]`; root None: an expression."""

    root: str | None
    steps: tuple[Step, ...] = ()
    whole: bool = False  # all of it is read: by a loop, `vars`, `**`

    def __str__(self) -> str:
        names = [f".{s.name}" if not s.item else f"[{s.name!r}]" for s in self.steps]
        return (self.root or "") + "".join(names)


def step_of(node: ast.AST) -> tuple[Step | None, ast.expr | None]:
    """Return the last step of a chain, and the expression before it."""
    match node:
        case ast.Subscript(
            slice=ast.Constant(value=str(name)),
            value=ast.Call(func=ast.Name(id="vars"), args=[inner])
            | ast.Attribute(attr="__dict__", value=inner),
        ):
            return Step(name), inner
        case ast.Attribute(attr=name, value=inner):
            return Step(name), inner
        case ast.Subscript(slice=ast.Constant(value=str() | int() as name), value=inner):
            return Step(name, item=True), inner
        case ast.Subscript(slice=index, value=inner):
            return Step(None, item=True, like=_pattern(index)), inner
        case ast.Call(func=ast.Name(id="getattr"), args=[inner, ast.Constant(value=str(name)), *_]):
            return Step(name), inner
        case ast.Call(func=ast.Name(id="getattr"), args=[inner, computed, *_]):
            return Step(None, like=_pattern(computed)), inner
    return None, None


def parts_beside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions that stand beside a chain's step."""
    parts: list[ast.expr] = []
    if isinstance(node, ast.Call):
        parts = node.args
    elif isinstance(node, ast.Subscript):
        parts = [node.value, node.slice]
    # a name that stands there is in the chain
    yield from (each for each in parts if not isinstance(each, ast.Constant))


def _pattern(node: ast.AST) -> str | None:
    """Return a pattern of the text that an expression makes, if part of it is known."""
    match node:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=values):
            parts = [_pattern(each) for each in values]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_pattern(left), _pattern(right)]
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod()):
            parts = [re.escape(text[: text.find("%")]), None]
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            parts = [re.escape(text[: text.find("{")]), None]
        case _:
            return None
    known = any(part for part in parts)
    return "".join(".*" if part is None else part for part in parts) if known else None


def asks_training(test: ast.expr, methods: frozenset[str]) -> bool:
    """Tell whether a test holds in training only."""
    both = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
    for each in test.values if both and isinstance(test, ast.BoolOp) else [test]:
        if isinstance(each, ast.Call):
            each = each.func
            if isinstance(each, ast.Attribute) and each.attr in methods:
                return True
        elif isinstance(each, ast.Attribute) and each.attr == "training":
            return True
    return False

"""Names in the code of one function: chains like `self.hparams.gain`, stores, and text."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from featcache.staleness.normal_form import is_message
from featcache.staleness.source import FunctionNode

# methods of lists, dicts, sets and their like that change them
_CHANGING = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "popleft",
        "push",
        "put",
        "remove",
        "setdefault",
        "sort",
        "update",
    ]
)
# functions that read all of a container
_READING = frozenset(
    [
        "all",
        "any",
        "asdict",
        "dict",
        "enumerate",
        "iter",
        "len",
        "list",
        "map",
        "max",
        "min",
        "reversed",
        "set",
        "sorted",
        "sum",
        "tuple",
        "vars",
        "zip",
    ]
)
_LONGEST_NAME = 64


class Step(NamedTuple):
    """One step of a chain: an attribute, or an item if `item`; None: of any name like `like`."""

    name: str | int | None
    item: bool = False
    like: str | None = None  # a pattern, where part of the name is known


class Chain(NamedTuple):
    """Names that lead from a variable to a value: `root.a["b"]`; root None: an expression."""

    root: str | None
    steps: tuple[Step, ...] = ()
    whole: bool = False  # all of it is read: by a loop, `vars`, `**`

    def __str__(self) -> str:
        names = [f".{s.name}" if not s.item else f"[{s.name!r}]" for s in self.steps]
        return (self.root or "") + "".join(names)


@dataclass
class Names:
    """Names that the code of a function mentions."""

    read: list[Chain] = field(default_factory=list)
    stored: list[Chain] = field(default_factory=list)
    given: set[str] = field(default_factory=set)  # arguments given by name
    text: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)
    parameters: list[str] = field(default_factory=list)
    imported: list[tuple[str, str, str | None]] = field(default_factory=list)  # inside of it


def names_of(tree: FunctionNode, training: frozenset[str] = frozenset()) -> Names:
    """Return the names in a function; `training`: methods that tell whether it is trained."""
    reader = _Reader(tree, training)
    for node in [*tree.body] if isinstance(tree.body, list) else [tree.body]:
        reader.visit(node)
    for default in [*tree.args.defaults, *filter(None, tree.args.kw_defaults)]:
        reader.visit(default)
    for decorator in getattr(tree, "decorator_list", ()):
        reader.visit(decorator)
    return reader.found


class _Reader(ast.NodeVisitor):
    def __init__(self, tree: FunctionNode, training: frozenset[str]) -> None:
        self.found = Names()
        self._training = training
        arguments = tree.args
        ordered = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self.found.parameters = [each.arg for each in ordered]
        stores: Counter[str] = Counter()
        declared: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                stores[node.id] += 1
            elif isinstance(node, ast.arg):
                stores[node.arg] += 2
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node is not tree:
                stores[node.name] += 2
            elif isinstance(node, ast.Global | ast.Nonlocal):
                declared.update(node.names)
        self.found.local = {*stores} - declared
        self._aliases: dict[str, Chain] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target, chain = node.targets[0], self._chain(node.value)
                if isinstance(target, ast.Name) and chain is not None and chain.root is not None:
                    if stores[target.id] == 1 and target.id in self.found.local:
                        self._aliases[target.id] = chain

    def _chain(self, node: ast.AST) -> Chain | None:
        """Return the chain that an expression is; None if it is none."""
        if isinstance(node, ast.Name):
            alias = self._aliases.get(node.id)
            return alias if alias is not None else Chain(node.id)
        step, inner = _step(node)
        if step is None or inner is None:
            return None
        chain = self._chain(inner) or Chain(None)
        return Chain(chain.root, (*chain.steps, step))

    def visit(self, node: ast.AST, whole: bool = False) -> None:
        chain = self._chain(node)
        if chain is not None:
            self._note(node, chain._replace(whole=whole))
            return
        handler = getattr(self, f"_{type(node).__name__.lower()}", None)
        if handler is None or handler(node):
            for child in ast.iter_child_nodes(node):
                self.visit(child)

    def _note(self, node: ast.AST, chain: Chain) -> None:
        stores = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        (self.found.stored if stores else self.found.read).append(chain)
        while True:  # what is beside the chain: arguments, indices, the expression it begins with
            step, inner = _step(node)
            if step is None or inner is None:
                break
            beside = [each for each in _parts(node) if each is not inner]
            for each in beside:
                self.visit(each)
            node = inner
        if not isinstance(node, ast.Name):
            self.visit(node)

    def _constant(self, node: ast.Constant) -> bool:
        if isinstance(node.value, str) and len(node.value) <= _LONGEST_NAME:
            self.found.text.add(node.value)
        return False

    def _expr(self, node: ast.Expr) -> bool:
        return not isinstance(node.value, ast.Constant)  # a docstring

    def _keyword(self, node: ast.keyword) -> bool:
        if node.arg is None:
            self.visit(node.value, whole=True)
            return False
        self.found.given.add(node.arg)
        return True

    def _call(self, node: ast.Call) -> bool:
        if is_message(node.func):
            return False
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
            changed = self._chain(node.func.value)
            if changed is not None:
                self.found.stored.append(changed)
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        self.visit(node.func)
        for each in node.args:
            self.visit(each, whole=name in _READING)
        for keyword in node.keywords:
            self.visit(keyword)
        return False

    def _for(self, node: ast.For) -> bool:
        self.visit(node.iter, whole=True)
        for each in (node.target, *node.body, *node.orelse):
            self.visit(each)
        return False

    def _comprehension(self, node: ast.comprehension) -> bool:
        self.visit(node.iter, whole=True)
        for each in (node.target, *node.ifs):
            self.visit(each)
        return False

    def _starred(self, node: ast.Starred) -> bool:
        self.visit(node.value, whole=True)
        return False

    def _augassign(self, node: ast.AugAssign) -> bool:
        chain = self._chain(node.target)
        if chain is not None:
            self.found.read.append(chain)
        return True

    def _assign(self, node: ast.Assign) -> bool:
        target = node.targets[0]
        named = isinstance(target, ast.Name) and target.id in self._aliases
        return not named  # it is noted where it is used

    def _arguments(self, node: ast.arguments) -> bool:
        for each in [*node.defaults, *filter(None, node.kw_defaults)]:  # no annotations
            self.visit(each)
        return False

    def _annassign(self, node: ast.AnnAssign) -> bool:
        for each in (node.target, node.value):
            if each is not None:
                self.visit(each)
        return False

    def _functiondef(self, node: ast.FunctionDef) -> bool:
        for each in (*node.decorator_list, node.args, *node.body):
            self.visit(each)
        return False

    def _if(self, node: ast.If) -> bool:
        """Pass over what is done in training only."""
        self.visit(node.test)
        trains = _asks_training(node.test, self._training)
        for each in node.orelse if trains else (*node.body, *node.orelse):
            self.visit(each)
        return False

    def _importfrom(self, node: ast.ImportFrom) -> bool:
        if node.module and not node.level:
            for each in node.names:
                self.found.imported.append((each.asname or each.name, node.module, each.name))
        return False

    def _import(self, node: ast.Import) -> bool:
        for each in node.names:
            name = each.name if each.asname else each.name.partition(".")[0]
            self.found.imported.append((each.asname or name, name, None))
        return False


def _step(node: ast.AST) -> tuple[Step | None, ast.expr | None]:
    """Return the last step of a chain, and the expression before it."""
    match node:
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


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the expressions that stand beside a chain's step."""
    if isinstance(node, ast.Call):
        yield from node.args
    elif isinstance(node, ast.Subscript):
        yield from (node.value, node.slice)


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


def _asks_training(test: ast.expr, methods: frozenset[str]) -> bool:
    """Tell whether a test holds in training only."""
    asked = [test.values[0], *test.values[1:]] if _is_and(test) else [test]
    for each in asked:
        if isinstance(each, ast.Call):
            each = each.func
            if isinstance(each, ast.Attribute) and each.attr in methods:
                return True
        elif isinstance(each, ast.Attribute) and each.attr == "training":
            return True
    return False


def _is_and(test: ast.expr) -> bool:
    return isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)

"""Names in the code of one function: chains like `self.hparams.gain`, stores, and text."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from featcache.staleness.normal_form import is_message
from featcache.staleness.source import FunctionNode
from featcache.staleness.steps import Chain, asks_training, parts_beside, step_of

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


@dataclass
class Names:
    """Names that the code of a function mentions."""

    read: list[Chain] = field(default_factory=list)
    stored: list[Chain] = field(default_factory=list)
    # arguments given by name, with the name of what is called
    given: set[tuple[str | None, str]] = field(default_factory=set)
    spread: bool = False  # whether any are given by `**`
    text: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)
    parameters: list[str] = field(default_factory=list)
    imported: list[tuple[str, str, str | None]] = field(default_factory=list)  # inside of it
    operators: set[str] = field(default_factory=set)  # of Python's syntax tree: Add


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
        stores = self._read_scope(tree)
        self._aliases: dict[str, Chain] = {}
        self._find_aliases(tree, stores)

    def _find_aliases(self, tree: FunctionNode, stores: Mapping[str, int]) -> None:
        """Note the names that stand for a chain from their one assignment on."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target, chain = node.targets[0], self._chain(node.value)
                if not isinstance(target, ast.Name) or chain is None or chain.root is None:
                    continue
                if stores[target.id] == 1 and target.id in self.found.local:
                    self._aliases[target.id] = chain

    def _read_scope(self, tree: FunctionNode) -> Counter[str]:
        """Note local variables and operators; returns how often each variable is stored into."""
        stores: Counter[str] = Counter()
        declared: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.operator | ast.unaryop):
                self.found.operators.add(type(node).__name__)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                stores[node.id] += 1
            elif isinstance(node, ast.arg):
                stores[node.arg] += 2
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and node is not tree:
                stores[node.name] += 2
            elif isinstance(node, ast.Global | ast.Nonlocal):
                declared.update(node.names)
        self.found.local = {*stores} - declared
        return stores

    def _chain(self, node: ast.AST) -> Chain | None:
        """Return the chain that an expression is; None if it is none."""
        if isinstance(node, ast.Name):
            alias = self._aliases.get(node.id)
            return alias if alias is not None else Chain(node.id)
        if (by_name := self._named_by_text(node)) is not None:
            return by_name
        step, inner = step_of(node)
        if step is None or inner is None:
            return None
        chain = self._chain(inner) or Chain(None)
        if step.name is None and isinstance(node, ast.Subscript | ast.Call):
            key = node.slice if isinstance(node, ast.Subscript) else node.args[1]
            step = step._replace(key=self._chain(key))
        return Chain(chain.root, (*chain.steps, step))

    def _named_by_text(self, node: ast.AST) -> Chain | None:
        """Return the chain of `globals()["name"]` and `import_module("name")`."""
        match node:
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="globals"), args=[]),
                slice=ast.Constant(value=str(name)),
            ):
                return Chain(name)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(name))],
            ):
                self.found.imported.append((f"<{name}>", name, None))
                return Chain(f"<{name}>")
        return None

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
        first = self._visit_beside(node)
        if not isinstance(first, ast.Name):
            self.visit(first)

    def _visit_beside(self, node: ast.AST) -> ast.AST:
        """Visit arguments and indices of a chain; returns the expression that it begins with."""
        while True:
            step, inner = step_of(node)
            if step is None or inner is None:
                return node
            for each in parts_beside(node):
                if each is not inner:
                    self.visit(each)
            node = inner

    def _constant(self, node: ast.Constant) -> bool:
        if isinstance(node.value, str) and len(node.value) <= _LONGEST_NAME:
            self.found.text.add(node.value)
        return False

    def _expr(self, node: ast.Expr) -> bool:
        return not isinstance(node.value, ast.Constant)  # a docstring

    def _keyword(self, node: ast.keyword) -> bool:
        if node.arg is None:
            self.found.spread = True
            self.visit(node.value, whole=True)
            return False
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
            if keyword.arg is not None:
                self.found.given.add((name, keyword.arg))
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
        if not isinstance(target, ast.Name) or target.id not in self._aliases:
            return True
        self._visit_beside(node.value)  # the chain is noted where it is used
        return False

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
        trains = asks_training(node.test, self._training)
        for each in node.orelse if trains else (*node.body, *node.orelse):
            self.visit(each)
        return False

    def _importfrom(self, node: ast.ImportFrom) -> bool:
        module = "." * node.level + (node.module or "")
        for each in node.names:
            self.found.imported.append((each.asname or each.name, module, each.name))
        return False

    def _import(self, node: ast.Import) -> bool:
        for each in node.names:
            name = each.name if each.asname else each.name.partition(".")[0]
            self.found.imported.append((f"<{each.name}>", each.name, None))  # all of its parents
            self.found.imported.append((each.asname or name, name, None))
        return False

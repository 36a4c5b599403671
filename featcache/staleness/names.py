"""Names in the code of one function: chains like `self.hparams.gain`, stores, text."""

from __future__ import annotations

import ast
import copy
import dis
import enum
import functools
import inspect
import re
import textwrap
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from featcache.staleness.code import FunctionNode, is_users, nested, says_nothing

# Chains of names in a tree, `self.hparams["gain"]`, and their steps.


class Step(NamedTuple):
    """One step of a chain: an attribute, or an item if `item`; None: of any name like `like`.

    `key` is the chain that an item's name is the value of.
    """

    name: str | int | None
    item: bool = False
    like: str | None = None  # a pattern, where part of the name is known
    key: Any = None


class Way(enum.IntEnum):
    """The way in which code changes what a chain leads to."""

    CALLED = 0  # perhaps: by `x.add(y)` whose result is used
    TOLD = 1  # by a method that is called for nothing else, or takes an item out
    STORED = 2  # by an assignment


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


def asks_training(test: ast.expr, methods: frozenset[str]) -> ast.expr | None:
    """Return what a test that holds in training only asks: `x.training`, or one of the methods."""
    both = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)
    for each in test.values if both and isinstance(test, ast.BoolOp) else [test]:
        if isinstance(each, ast.Call):
            each = each.func
            if isinstance(each, ast.Attribute) and each.attr in methods:
                return each
        elif isinstance(each, ast.Attribute) and each.attr == "training":
            return each
    return None


# Names in the code of one function: chains like `self.hparams.gain`, stores, and text.


def words(text: str) -> frozenset[str]:
    """Return names that stand in a text, apart by spaces."""
    return frozenset(text.split())


# methods of lists, dicts, sets and their like that change them, and those that also return an item
_CHANGING = words("add append appendleft clear discard extend insert push put remove sort update")
_TAKING = frozenset(["pop", "popitem", "popleft", "setdefault"])
# functions that read all of a container
_READING = words(
    "all any asdict dict enumerate iter len list map max min reversed set sorted sum tuple vars zip"
)
_READING_ATTRIBUTES = frozenset(["asdict", "astuple", "fields", "vars"])  # all of an object
_LONGEST_NAME = 64
_NAME_FIELDS = ("id", "attr", "arg", "name")  # of nodes that name a variable or an attribute


@dataclass
class MentionedNames:
    """Names that the code of a function mentions."""

    read: list[Chain] = field(default_factory=list)
    written: list[tuple[Chain, Way]] = field(default_factory=list)
    passed: list[Chain] = field(default_factory=list)  # to what is called
    with_all: list[Chain] = field(default_factory=list)  # whose attributes are all read
    # what is done where `x.training` holds
    in_training: list[tuple[Chain, MentionedNames]] = field(default_factory=list)
    # arguments given by name, with the name of what is called
    given: set[tuple[str | None, str]] = field(default_factory=set)
    spread: bool = False  # whether any are given by `**`
    text: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)
    parameters: list[str] = field(default_factory=list)
    imported: list[tuple[str, str, str | None]] = field(default_factory=list)  # inside of it
    operators: set[str] = field(default_factory=set)  # of Python's syntax tree: Add

    def with_inner(self) -> Iterator[MentionedNames]:
        """Yield the names of a function, and those of what it does in training only."""
        yield self
        for _, inner in self.in_training:
            yield from inner.with_inner()


def names_of(
    tree: FunctionNode, qualname: str, training: frozenset[str] = frozenset()
) -> MentionedNames:
    """Return the names in a function; `training`: methods that tell whether it is trained.

    `qualname` is its qualified name: in a class `self.__gain` stands for `self._Class__gain`.
    """
    tree = _with_private_names(tree, qualname)
    reader = _Reader(tree, training)
    for node in [*tree.body] if isinstance(tree.body, list) else [tree.body]:
        reader.visit(node)
    for default in [*tree.args.defaults, *filter(None, tree.args.kw_defaults)]:
        reader.visit(default)
    for decorator in getattr(tree, "decorator_list", ()):
        reader.visit(decorator)
    reader.read_wholes(tree)
    return reader.found


def _with_private_names(tree: FunctionNode, qualname: str) -> FunctionNode:
    """Return a tree whose private names are as Python has them while it runs."""
    parts = qualname.split(".")[:-1]
    while parts and parts[-1] == "<locals>":
        parts = parts[:-2]  # the function that it is defined in
    private = any(_is_private(name) for node in ast.walk(tree) for name in _own_names(node))
    if not private:
        return tree
    found: FunctionNode = _Mangler(parts[-1] if parts else "").visit(copy.deepcopy(tree))
    return found


def _own_names(node: ast.AST) -> Iterator[str]:
    names = (getattr(node, key, None) for key in _NAME_FIELDS)
    yield from (name for name in names if isinstance(name, str))


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


class _Mangler(ast.NodeTransformer):
    def __init__(self, owner: str) -> None:
        self._owner = owner.lstrip("_")

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        inner = _Mangler(node.name)
        node.body = [inner.visit(each) for each in node.body]
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        named = self._owner and not isinstance(node, ast.keyword)
        for key in _NAME_FIELDS if named else ():
            name = getattr(node, key, None)
            if isinstance(name, str) and _is_private(name):
                setattr(node, key, f"_{self._owner}{name}")
        return super().generic_visit(node)


class _Reader(ast.NodeVisitor):
    def __init__(self, tree: FunctionNode, training: frozenset[str]) -> None:
        self.found = MentionedNames()
        self._training = training
        self._alone: ast.expr | None = None  # what a statement consists of
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

    def read_wholes(self, tree: ast.AST) -> None:
        """Note objects of which code reads all attributes: `asdict(x)`, `vars(x)`, `x.__dict__`."""
        for node in ast.walk(tree):
            parts: list[ast.expr] = []
            if isinstance(node, ast.Attribute) and node.attr == "__dict__":
                parts = [node.value]
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                parts = [*node.args] if name in _READING_ATTRIBUTES else []
            self.found.with_all += filter(None, map(self._chain, parts))

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
        if stores:
            self.found.written.append((chain, Way.STORED))
        else:
            self.found.read.append(chain)
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
        if says_nothing(node):  # a docstring, a log line
            return False
        self._alone = node.value
        return True

    def _keyword(self, node: ast.keyword) -> bool:
        if node.arg is None:
            self.found.spread = True
            self.visit(node.value, whole=True)
            return False
        return True

    def _call(self, node: ast.Call) -> bool:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING | _TAKING:
            changed = self._chain(node.func.value)
            if changed is not None:
                told = node is self._alone or node.func.attr in _TAKING
                self.found.written.append((changed, Way.TOLD if told else Way.CALLED))
        self._note_buffer(node)
        given = [*node.args, *(each.value for each in node.keywords)]
        self.found.passed += filter(None, map(self._chain, given))
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        self.visit(node.func)
        for each in node.args:
            self.visit(each, whole=name in _READING)
        for keyword in node.keywords:
            if keyword.arg is not None:
                self.found.given.add((name, keyword.arg))
            self.visit(keyword)
        return False

    def _note_buffer(self, node: ast.Call) -> None:
        """Note what `self.register_buffer("name", ...)` sets."""
        match node:
            case ast.Call(
                func=ast.Attribute(attr="register_buffer", value=inner),
                args=[ast.Constant(value=str(name)), *_],
            ):
                chain = self._chain(inner)
                if chain is not None:
                    steps = (*chain.steps, Step(name))
                    self.found.written.append((Chain(chain.root, steps), Way.STORED))

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
        """Keep apart what is done in training only."""
        asked = asks_training(node.test, self._training)
        if asked is None:
            return True
        self.visit(node.test)
        outer, self.found = self.found, MentionedNames(local=self.found.local)
        for each in node.body:
            self.visit(each)
        outer.in_training += [(chain, self.found)] if (chain := self._chain(asked)) else []
        self.found = outer
        for each in node.orelse:
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


# Attributes that objects of library classes write while they compute: caches and counters.

_STORES = {dis.opmap[name] for name in ("STORE_ATTR", "STORE_SUBSCR")}
_ENTRIES = ("forward", "__call__")
# ways to set attributes whose names do not stand there
_BY_OTHER_NAMES = frozenset(["setattr", "__setattr__", "__dict__", "vars"])
_MAKING = ("__init__", "__new__", "__post_init__", "__setstate__")
_BASES = (object, torch.nn.Module)


def first_written(chain: Chain, way: Way) -> tuple[str, Way] | None:
    """Return the attribute of its root that a chain goes through, and how that is written."""
    first = chain.steps[0] if chain.steps else None
    if first is None or first.item or not isinstance(first.name, str):
        return None
    inside = len(chain.steps) > 1 and way is Way.TOLD  # of what the attribute holds
    return first.name, Way.STORED if inside else way


def is_changed(way: Way | None, value: object) -> bool:
    """Whether code that writes in a way changes a value; None: it does not write.

    Tensors have an `add` that changes nothing, and methods of users' classes code of their own.
    """
    if way is None or way is Way.STORED:
        return way is not None
    if isinstance(value, MutableMapping | MutableSequence | MutableSet | deque):
        return True
    is_librarys = not isinstance(value, torch.Tensor) and not is_users(type(value))
    return way is Way.TOLD and is_librarys


@functools.lru_cache(4096)
def written_by(cls: type) -> Mapping[str, Way]:
    """Return the attributes that calling an object of `cls` writes, in evaluation mode.

    The methods that `forward` or `__call__` names are followed, and those that these name.
    """
    methods = _methods(cls)
    if not any(_stores(each.__code__) for name, each in methods.items() if name != "__init__"):
        return {}
    asking = frozenset(
        name for name, each in methods.items() if "training" in each.__code__.co_names
    )
    found: dict[str, Way] = {}
    pending, seen = [name for name in _ENTRIES if name in methods], set[str]()
    while pending:
        name = pending.pop()
        if name in seen or name not in methods:
            continue
        seen.add(name)
        names = _names(methods[name], asking)
        if names is not None:
            for chain, way in names.written:
                first = first_written(chain, way)
                if first is not None and chain.root == next(iter(names.parameters), None):
                    found[first[0]] = max(first[1], found.get(*first))
            pending += [str(chain.steps[0].name) for chain in names.read if chain.steps]
    return found


@functools.lru_cache(4096)
def texts_of_makers(cls: type) -> frozenset[str]:
    """Return all texts in the constructors of a class, and of its bases, that are the user's."""
    makers = (vars(base).get(name) for base in cls.__mro__ if is_users(base) for name in _MAKING)
    codes = (code for each in _functions(makers) for code in nested(each.__code__))
    return frozenset(text for code in codes for text in code.co_consts if isinstance(text, str))


@functools.lru_cache(4096)
def names_in_code(cls: type) -> frozenset[str] | None:
    """Return all names and texts in the code of a class; None if it makes others while it runs."""
    found: set[str] = set()
    for base in cls.__mro__:
        if base not in _BASES:
            found.update(vars(base))  # methods that are replaced
            for function in _functions(vars(base).values()):
                for code in nested(function.__code__):
                    found.update(code.co_names)
                    found.update(each for each in code.co_consts if isinstance(each, str))
                    if code.co_name in _MAKING and not _BY_OTHER_NAMES.isdisjoint(code.co_names):
                        return None
    return frozenset(found)


def _functions(values: Iterable[object]) -> Iterator[FunctionType]:
    for value in values:
        parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for part in parts:
            for attribute in ("func", "__func__"):  # cached_property; staticmethod
                part = getattr(part, attribute, part)
            whole: Any = part
            if isinstance(inner := inspect.unwrap(whole), FunctionType):
                yield inner  # not what wraps it: `torch.amp.custom_fwd` takes notes on the object


def _methods(cls: type) -> dict[str, FunctionType]:
    found: dict[str, FunctionType] = {}
    for base in reversed(cls.__mro__):
        if base not in _BASES:
            for name, value in vars(base).items():
                if isinstance(unwrapped := inspect.unwrap(value), FunctionType):
                    found[name] = unwrapped
    return found


def _names(function: FunctionType, asking: frozenset[str]) -> MentionedNames | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    qualname = function.__code__.co_qualname
    return names_of(tree, qualname, asking) if isinstance(tree, ast.FunctionDef) else None


def _stores(code: CodeType) -> bool:
    return not _STORES.isdisjoint(code.co_code[::2]) or "register_buffer" in code.co_names

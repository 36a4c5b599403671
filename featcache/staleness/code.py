"""Code of functions: its text, whose it is, and a digest of what it does in any Python version."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import linecache
import os
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

from featcache.errors import ConfigError
from featcache.format import digest

# Versions of local variables: `x = f(x)` makes another one of the same name.
#
# Told apart only where each way through a function passes: by assignments that stand in its body
# itself. A variable that an inner function names has one version. Those of a comprehension are
# its own.

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


# Source of functions as it was loaded, and a digest of it that neither layout nor version
# changes.
#
# The file of a function is compiled again, and the function's own code looked for in it: what is
# found has just moved, and what is not found was edited since it was loaded.

# ast may fail in two threads at once: https://github.com/python/cpython/issues/106905.
# The lock keeps our own threads apart; other libraries parse, too (numpy the header of each .npy
# file), so an attempt that fails is repeated.
_PARSING = threading.Lock()


def _part_from_parent() -> None:
    """Take another lock in a child: a thread that the child lacks may hold that of its parent."""
    global _PARSING
    _PARSING = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_part_from_parent)

PARSE_TRIES = 100
# not followed wherever they lie; SpeechBrain is often installed from a clone
_LIBRARIES = ("featcache", "featcache_backends", "speechbrain", "torch", "torchaudio")
_PLACES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_PACKAGES = ("site-packages", "dist-packages")
_HAS_DOCSTRING = 0x4000000  # a flag of code, from Python 3.13
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Code(NamedTuple):
    """Code of a function: its tree, None where no source is kept, its text and its file."""

    tree: FunctionNode | None
    text: str
    file: str


@dataclass
class _File:
    """A file of source, parsed and compiled."""

    lines: list[str]  # with their ends
    compiled: dict[str, list[CodeType]] = field(default_factory=dict)  # by qualified name
    nodes: dict[int, list[FunctionNode]] = field(default_factory=dict)  # by first line

    @classmethod
    def of(cls, text: str, name: str) -> _File:
        found = cls(list(io.StringIO(text, newline="")))  # as Python splits it
        try:
            with warnings.catch_warnings():  # of source, told when it was imported
                warnings.simplefilter("ignore")
                tree = parsed(text)
                code = compile(text, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return found
        for each in nested(code):
            found.compiled.setdefault(each.co_qualname, []).append(each)
        for node in ast.walk(tree):
            if isinstance(node, _DEFINED):
                found.nodes.setdefault(_first_line(node), []).append(node)
        return found

    def text_of(self, node: FunctionNode) -> str:
        """Return `ast.get_source_segment`, which splits the whole file each time."""
        lines = [line.encode() for line in self.lines[node.lineno - 1 : node.end_lineno]]
        lines[-1] = lines[-1][: node.end_col_offset]  # in bytes
        lines[0] = lines[0][node.col_offset :]
        return b"".join(lines).decode()

    def find(self, code: CodeType) -> FunctionNode | None:
        for other in self.compiled.get(code.co_qualname, ()):
            if _same(code, other):
                return self.node(other)
        return None

    def node(self, code: CodeType) -> FunctionNode | None:
        there = [(line, col) for line, _, col, _ in code.co_positions() if line and col]
        for node in self.nodes.get(code.co_firstlineno, ()):
            end = (node.end_lineno or 0, node.end_col_offset or 0)
            named = code.co_name == getattr(node, "name", "<lambda>")
            if named and all(_start(node) <= position <= end for position in there):
                return node
        return None


def code_of(function: FunctionType) -> Code:
    """Return the code of a function as it was loaded.

    Raises `ConfigError`, naming the file, if the function was edited there since it was loaded.
    """
    code = function.__code__
    file = _file(code.co_filename, function)
    if file is None:
        return Code(None, "", code.co_filename)
    node = file.find(code)
    if node is None and Path(code.co_filename).exists():
        if _is_plainly_loaded(function):
            raise ConfigError(
                f"{code.co_filename} was edited since it was loaded: "
                f"{code.co_qualname} there is not the one that runs; start this process again"
            )
        node = file.node(code)  # loaded by pytest or the like, which change what they load
    if node is None:
        return Code(None, "", code.co_filename)
    return Code(node, file.text_of(node), code.co_filename)


def is_users(item: FunctionType | type) -> bool:
    """Whether code is the user's: outside of the standard library and installed packages."""
    # code that was executed without a `__name__` has no module
    module = str(item.__module__ or "")
    if module.partition(".")[0] in _LIBRARIES:
        return False
    if isinstance(item, FunctionType) and not item.__code__.co_filename.startswith("<"):
        return _is_users_file(item.__code__.co_filename)
    if isinstance(item, FunctionType) and item.__name__ == "<lambda>":
        return True  # text of the user's that a library has evaluated
    return module not in sys.modules or is_users_module(sys.modules[module])


def patches_of(cls: type) -> Iterator[tuple[FunctionType, type]]:
    """Yield what a user put in place of methods of a library's class, and the class."""
    for base in cls.__mro__:
        for inner in vars(base).values() if not is_users(base) else ():
            if isinstance(inner, FunctionType) and is_users(inner):
                yield inner, base


@functools.lru_cache(4096)
def is_users_module(module: ModuleType) -> bool:
    """Whether a module is the user's."""
    if module.__name__.partition(".")[0] in _LIBRARIES:
        return False
    file = vars(module).get("__file__")  # without running code of the module
    if file is None:  # typed in, or built in
        return module.__name__ not in sys.builtin_module_names and not _is_frozen(module)
    return _is_users_file(file)


def is_users_place(package: str, place: str) -> bool:
    """Whether a package that lies in a file or folder is the user's."""
    return package not in _LIBRARIES and _is_users_file(place)


@functools.lru_cache(4096)
def _is_users_file(name: str) -> bool:
    installed = any(part in _PACKAGES for part in Path(name).parts)
    return not installed and not name.startswith(("<frozen", *_PLACES))


def _is_frozen(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.origin in ("frozen", "built-in")


def _is_plainly_loaded(function: FunctionType) -> bool:
    spec = function.__globals__.get("__spec__")
    loader = function.__globals__.get("__loader__") if spec is None else spec.loader
    return type(loader) is SourceFileLoader


def _file(name: str, function: FunctionType) -> _File | None:
    try:
        stat = Path(name).stat()
    except (OSError, ValueError):
        lines = linecache.getlines(name, function.__globals__)  # cells of notebooks, doctests
        return _typed_in("".join(lines), name) if lines else None
    return _on_disk(name, (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@functools.lru_cache(256)
def _on_disk(name: str, version: tuple[int, ...]) -> _File | None:
    try:
        return _File.of(decode_source(Path(name).read_bytes()), name)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


@functools.lru_cache(256)
def _typed_in(text: str, name: str) -> _File:
    return _File.of(text, name)


def parsed(text: str) -> ast.Module:
    """Parse source; again if another thread was parsing meanwhile."""
    tries = 0
    while True:
        try:
            with _PARSING:
                return ast.parse(text)
        except SystemError as error:
            tries += 1
            if tries == PARSE_TRIES or "recursion depth mismatch" not in str(error):
                raise
        time.sleep(0.001)


def nested(code: CodeType) -> Iterator[CodeType]:
    """Yield code and all code inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested(constant)


def _same(one: CodeType, other: CodeType) -> bool:
    """Whether two codes do the same, wherever they stand."""
    if one.co_code != other.co_code or one.co_names != other.co_names:
        return False
    if one.co_varnames != other.co_varnames or one.co_freevars != other.co_freevars:
        return False
    pairs = zip(_constants(one), _constants(other), strict=False)
    return len(_constants(one)) == len(_constants(other)) and all(
        _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else _equal(a, b)
        for a, b in pairs
    )


def _equal(one: object, other: object) -> bool:
    return type(one) is type(other) and (one == other or repr(one) == repr(other))  # nan


def _constants(code: CodeType) -> tuple[object, ...]:
    """Return the constants of code, without its docstring."""
    flagged = sys.version_info < (3, 13) or code.co_flags & _HAS_DOCSTRING
    in_function = flagged and code.co_flags & inspect.CO_OPTIMIZED
    documented = in_function and isinstance(next(iter(code.co_consts), None), str)
    return code.co_consts[1:] if documented else code.co_consts


def _first_line(node: FunctionNode) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _start(node: FunctionNode) -> tuple[int, int]:
    return (_first_line(node), 0) if hasattr(node, "name") else (node.lineno, node.col_offset)


# Digest of a function's tree: the same for code that computes the same, in any Python.
#
# The fields of the tree are walked. Left out: docstrings, annotations, assertions, prints and log
# lines; variables are numbered. Parameters too, unless something gives them by name.

_LEFT_OUT = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "simple"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_NAMING = (ast.ExceptHandler, ast.MatchStar, ast.MatchAs)
_NOTES = ("final", "override", "overload", "no_type_check", "abstractmethod")  # of decorators
_LOGGERS = ("log", "_log", "logger", "_logger", "logging", "warnings", "LOGGER", "LOG")
_LOGS = ("debug", "info", "warning", "warn", "error", "critical", "exception", "log")
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


def _form(node: ast.AST, names: _Names, *, top: bool = False) -> Iterator[str]:
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
                if not noted and not says_nothing(each):
                    yield from _form(each, names)
            else:
                yield f"{names.of(node, each)!r}," if _is_name(node, name) else f"{each!r},"
        yield ";"
    yield ")"


def _is_name(node: ast.AST, field: str) -> bool:
    """Whether a field names a variable."""
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


def says_nothing(node: ast.AST) -> bool:
    """Whether a statement changes no value: a docstring, an assertion, a log line."""
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
    return _is_message(call.func)


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


def _is_message(called: ast.AST) -> bool:
    """Whether what is called prints or logs."""
    if isinstance(called, ast.Name):
        return called.id == "print"
    if not isinstance(called, ast.Attribute) or called.attr not in _LOGS:
        return False
    owner = called.value
    if isinstance(owner, ast.Call):  # logging.getLogger(...).info
        return _last_name(owner.func) == "getLogger"
    return _last_name(owner) in _LOGGERS

"""Source of functions as it was loaded, and a digest of it that neither layout nor version changes.

The file of a function is compiled again, and the function's own code looked for in it: what is
found has just moved, and what is not found was edited since it was loaded.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import decode_source
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple

from featcache.errors import ConfigError

# ast may fail in two threads at once: https://github.com/python/cpython/issues/106905.
# The lock keeps our own threads apart; other libraries parse, too (numpy the header of each .npy
# file), so an attempt that fails is repeated.
_PARSING = threading.Lock()
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

    text: str
    compiled: dict[str, list[CodeType]] = field(default_factory=dict)  # by qualified name
    nodes: dict[int, list[FunctionNode]] = field(default_factory=dict)  # by first line

    @classmethod
    def of(cls, text: str, name: str) -> _File:
        try:
            with warnings.catch_warnings():  # of source, told when it was imported
                warnings.simplefilter("ignore")
                tree = parsed(text)
                code = compile(text, name, "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return cls(text)
        found = cls(text)
        for each in nested(code):
            found.compiled.setdefault(each.co_qualname, []).append(each)
        for node in ast.walk(tree):
            if isinstance(node, _DEFINED):
                found.nodes.setdefault(_first_line(node), []).append(node)
        return found

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
    return Code(node, ast.get_source_segment(file.text, node) or "", code.co_filename)


def is_users(item: FunctionType | type) -> bool:
    """Tell whether code is the user's: outside of the standard library and installed packages."""
    # code that was executed without a `__name__` has no module
    module = str(item.__module__ or "")
    if module.partition(".")[0] in _LIBRARIES:
        return False
    if isinstance(item, FunctionType) and not item.__code__.co_filename.startswith("<"):
        return _is_users_file(item.__code__.co_filename)
    if isinstance(item, FunctionType) and item.__name__ == "<lambda>":
        return True  # text of the user's that a library has evaluated
    return module not in sys.modules or is_users_module(sys.modules[module])


@functools.lru_cache(4096)
def is_users_module(module: ModuleType) -> bool:
    """Tell whether a module is the user's."""
    if module.__name__.partition(".")[0] in _LIBRARIES:
        return False
    file = vars(module).get("__file__")  # without running code of the module
    if file is None:  # typed in, or built in
        return module.__name__ not in sys.builtin_module_names and not _is_frozen(module)
    return _is_users_file(file)


def is_users_place(package: str, place: str) -> bool:
    """Tell whether a package that lies in a file or folder is the user's."""
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
    """Tell whether two codes do the same, wherever they stand."""
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

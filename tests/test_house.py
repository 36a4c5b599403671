"""The house stays a house: files of one idea, short functions, one name for one thing."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lowest_versions import lowest_versions, pinned_versions
from places import ROOT

HOUSE = ROOT / "featcache"
MODULES = sorted([*HOUSE.rglob("*.py"), *(ROOT / "backends").rglob("*.py")])
LONG = {
    "FeatureCacheMixin.cache_features",
    "extract",
    "FeatureLoader.__init__",
}  # what users give, passed on


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            yield from functions(node, inner)


def code_lines(function: ast.FunctionDef) -> int:
    """Count the lines of a function without its docstring."""
    begin, end = function.lineno, function.end_lineno or 0
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        begin += first.end_lineno - first.lineno + 1
    return end - begin + 1


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    assert lines(path) <= 700
    long = {
        name
        for name, function in functions(ast.parse(path.read_text()))
        if code_lines(function) > 40
    }
    assert long <= LONG


def test_the_root_holds_what_a_user_names() -> None:
    assert len(list(HOUSE.glob("[a-z]*.py"))) <= 13


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_docstring_begins_with_the_thing(path: Path) -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    first = {(ast.get_docstring(node) or " ").partition(" ")[0].strip(",:;") for node in nodes}
    translated = {"Tell", "Tells", "Say", "Says", "Have", "Let", "True", "False"}
    assert not first & {"What", "Who", "How", "Which", "From", *translated}


def calls_behind_constructors(tree: ast.AST) -> Iterator[str]:
    """Yield what makes or fills an object elsewhere than in its own constructor."""
    own = {"__init__", "__post_init__", "__setstate__"}
    for name, function in functions(tree):
        for node in ast.walk(function) if name.rpartition(".")[2] not in own else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                text = ast.unparse(node.func)
                if re.search(r"__new__$|__setattr__$|(^vars\(.*\)|__dict__)\.update$", text):
                    yield f"{name}: {text}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_object_is_whole_when_its_constructor_returns(path: Path) -> None:
    assert [*calls_behind_constructors(ast.parse(path.read_text()))] == []


# of an array; of the result that a visitor of a tree fills; of an object's own record
WRITTEN_WITHIN = {"self.values.flags", "self.found", "self.counts"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_object_writes_no_fields_of_those_that_it_holds(path: Path) -> None:
    stored = [
        ast.unparse(node.value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    ]
    assert {each for each in stored if each.startswith("self.")} <= WRITTEN_WITHIN


def test_each_direct_dependency_is_pinned() -> None:
    """Without a pin `make setup` installs what is newest that day, and `make floor` nothing."""
    pinned = {name.lower().replace("_", "-") for name in pinned_versions()}
    assert {name.lower().replace("_", "-") for name in lowest_versions()} <= pinned


def test_no_two_classes_have_one_name() -> None:
    classes = [
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in classes if classes.count(name) > 1} == set()


@pytest.mark.parametrize("package", ["format", "reading", "tables"])
def test_a_face_gives_what_others_use_and_no_more(package: str) -> None:
    given = importlib.import_module(f"featcache.{package}").__all__
    assert len(set(given)) == len(given)
    files = {path.stem for path in (HOUSE / package).glob("[a-z]*.py")}
    used = set[str]()
    for folder in ("featcache", "backends", "tests", "benchmarks", "recipes"):
        for path in (ROOT / folder).rglob("*.py"):
            if (HOUSE / package) not in path.parents:
                used |= {
                    alias.name
                    for node in ast.walk(ast.parse(path.read_text()))
                    if isinstance(node, ast.ImportFrom) and node.module == f"featcache.{package}"
                    for alias in node.names
                }
    assert used - files == set(given)


def test_each_helper_at_the_root_of_the_tests_is_on_their_map() -> None:
    tests = ROOT / "tests"
    page = (tests / "README.md").read_text()
    helpers = {path.name for path in tests.glob("*.py")} - {"conftest.py"}
    missing = {name for name in helpers if not name.startswith("test_") and name not in page}
    assert not missing
    named = {word.strip("`") for word in page.split() if word.endswith(".py`") and "/" not in word}
    assert named <= helpers

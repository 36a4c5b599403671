"""The house stays a house: files of one idea, short functions, one name for one thing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
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


def public_names(tree: ast.Module) -> set[str]:
    """Return the names without a `_` that a file gives to what it makes."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            inner = (each for target in targets for each in ast.walk(target))
            names |= {each.id for each in inner if isinstance(each, ast.Name)}
    return {name for name in names if not name.startswith("_")}


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
    first = {(ast.get_docstring(node) or " ").partition(" ")[0] for node in nodes}
    assert not first & {"What", "Who", "How", "Which", "From", "Tell", "Say", "Have", "Let"}


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
def test_a_name_of_a_face_is_one_thing(package: str) -> None:
    """A face that is all public names of its files would hide one of two, or a file.

    A file also gives the names that it imports, which may be others of the same name.
    """
    files = sorted((HOUSE / package).glob("[a-z]*.py"))
    given = [(path, name) for path in files for name in public_names(ast.parse(path.read_text()))]
    names = [*(name for _, name in given), *(path.stem for path in files)]
    assert {name for name in names if names.count(name) > 1} == set()
    found = import_module(f"featcache.{package}")
    for path, name in given:
        file = import_module(f"featcache.{package}.{path.stem}")
        assert getattr(found, name) is getattr(file, name), f"{path.stem}.{name}"
    face = ast.parse((HOUSE / package / "__init__.py").read_text())
    taken = {node.module for node in face.body if isinstance(node, ast.ImportFrom)}
    assert taken == {f"featcache.{package}.{path.stem}" for path in files}


def test_each_helper_at_the_root_of_the_tests_is_on_their_map() -> None:
    tests = ROOT / "tests"
    page = (tests / "README.md").read_text()
    helpers = {path.name for path in tests.glob("*.py")} - {"conftest.py"}
    missing = {name for name in helpers if not name.startswith("test_") and name not in page}
    assert not missing
    named = {word.strip("`") for word in page.split() if word.endswith(".py`") and "/" not in word}
    assert named <= helpers

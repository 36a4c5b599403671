"""The digest of code: the same in each Python, and for code that does the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from featcache.format import digest
from featcache.staleness.code import tree_digest

# by Python 3.11, 3.12, 3.13 and 3.14
OF_ALL_KINDS = "10c236cf4aac2f8c"


def digest_of(code: str) -> str:
    (tree,) = ast.parse(code).body
    assert isinstance(tree, ast.FunctionDef)
    return tree_digest(tree, ())


def test_code_has_the_same_digest_in_every_python() -> None:
    tree = ast.parse(Path(__file__).with_name("code_of_all_kinds.txt").read_text("utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    found = [tree_digest(node, ()) for node in ast.walk(tree) if isinstance(node, kinds)]
    assert len(found) == 41
    assert digest(" ".join(found).encode()) == OF_ALL_KINDS


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(x):\n y = x\n return y", "def f(wave):\n z = wave\n return z"),
        (
            "def f(x):\n y = g(x)\n y = h(y)\n return y",
            "def f(x):\n y = g(x)\n z = h(y)\n return z",
        ),
        ("def f(x):\n x = g(x)\n return x", "def f(x):\n y = g(x)\n return y"),
        (
            "def f(x):\n y = g(x)\n if x:\n  y = 2\n return y",
            "def f(x):\n z = g(x)\n if x:\n  z = 2\n return z",
        ),
        (
            "def f(x):\n for n in x: g(n)\n return [n for n in x]",
            "def f(x):\n for n in x: g(n)\n return [m for m in x]",
        ),
        ("def f(x):\n return x  # so it is", 'def f(x):\n """Say x."""\n return x'),
        ("def f(x):\n return x", "def f(x: int) -> int:\n assert x\n print(x)\n return x"),
    ],
)
def test_code_that_does_the_same_has_the_same_digest(one: str, other: str) -> None:
    assert digest_of(one) == digest_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # one variable or two, on some ways through the function
        (
            "def f(x):\n y = 1\n if x:\n  y = 2\n return y",
            "def f(x):\n z = 1\n if x:\n  y = 2\n return y",
        ),
        (
            "def f(x):\n y = 0\n for n in x:\n  y = y + n\n return y",
            "def f(x):\n z = 0\n for n in x:\n  y = z + n\n return y",
        ),
        (
            "def f(x):\n y = 1\n g = lambda: y\n y = 2\n return g()",
            "def f(x):\n y = 1\n g = lambda: y\n z = 2\n return g()",
        ),
        (
            "def f(x):\n y = 1\n def g():\n  nonlocal y\n  y = 3\n g()\n y = y + 1\n return y",
            "def f(x):\n y = 1\n def g():\n  nonlocal y\n  y = 3\n g()\n z = y + 1\n return y",
        ),
        (
            "def f(x):\n y = g(x)\n z = h(x)\n return y",
            "def f(x):\n y = g(x)\n z = h(x)\n return z",
        ),
        ("def f(x):\n y = x\n y = y\n return x", "def f(x):\n y = x\n y = y\n return y"),
        (
            "def f(x, n):\n return [n for m in x]",
            "def f(x, n):\n return [m for m in x]",
        ),
        (
            "def f(x):\n return [[n for n in m] for m in x]",
            "def f(x):\n return [[m for n in m] for m in x]",
        ),
        ("def f(x):\n return x.a", "def f(x):\n return x.b"),
        ("def f(x, y):\n return x - y", "def f(x, y):\n return y - x"),
    ],
)
def test_code_that_does_something_else_has_another_digest(one: str, other: str) -> None:
    assert digest_of(one) != digest_of(other)

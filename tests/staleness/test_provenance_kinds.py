"""Kinds of code and values that features are computed with: a change of each counts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from featcache.errors import ConfigError
from featcache.inspect import provenance

TOOLS = """
import contextlib, enum, functools, re
from collections import namedtuple

import numpy as np

BANDS = {"low": 0.5, "high": 0.25}
POINT = namedtuple("Point", "x y")(1, 2.5)
PATTERN = re.compile("a+b")
STEPS = {"plain": lambda x: x, "twice": lambda x: 2 * x}

class Mode(enum.Enum):
    FAST = 20
    SLOW = 90

class Fixed:
    def __init__(self, value): self.value = value
    def __get__(self, held, kind=None): return self.value

class Base:
    layer = "low"
    fixed = Fixed(4.0)
    LIMIT = 5
    def __init__(self, n): self.n = n
    def __add__(self, other): return self.n + other
    def __sub__(self, other): return self.n - other
    @classmethod
    def limited(cls, x): return min(x, cls.LIMIT)
    @property
    def half(self): return self.n / 2
    def band(self):
        weight = BANDS[self.layer]
        return weight * self.n

class Child(Base):
    def band(self): return super().band() + self.fixed + self.half

@contextlib.contextmanager
def scaled(x): yield x * 5

@functools.singledispatch
def bent(x): return 0

@bent.register
def _(x: int): return 11

def tracked(x, low=Mode.FAST.value): return x + low

def made(scale):
    def inner(x): return x * scale
    return inner

def unused(x): return x * 99
"""

RECIPE = """
import numpy as np
import tools
from tools import scaled as louder, Mode

class Extractor:
    kind = "low"
    def __init__(self):
        self.hparams = {"step": "plain", "mode": Mode.SLOW, "lr": 0.1}
        self.modules = {}
        self.child = tools.Child(3)
        self.scaler = {"mean": np.arange(3.0)}
        self.made = tools.made(4)
        self.noise = np.random.default_rng(3)
        self.calls = 0

    def compute_features(self, batch, stage):
        self.calls += 1
        x = self.child + batch["sig"]
        x = tools.STEPS[self.hparams["step"]](x) + tools.BANDS[self.kind]
        with louder(x) as x:
            x = x + tools.bent(3) + tools.tracked(x) + tools.POINT.y + tools.Child.limited(x)
        if tools.PATTERN.match("aab"):
            x = x + self.scaler["mean"] + self.child.band() + self.noise.random()
        x = self.made(x)
        return x if self.hparams["mode"] is Mode.SLOW else -x
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in ("tools", "recipe"):
        sys.modules.pop(name, None)


def fingerprint(folder: Path, *change: str) -> dict[str, Any]:
    """Write the recipe, with one change, and load it anew."""
    for name, text in (("tools", TOOLS), ("recipe", RECIPE)):
        if change:
            text = text.replace(change[0], change[1])
        (folder / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    extractor = importlib.import_module("recipe").Extractor()
    return provenance(extractor.compute_features).fingerprint({})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"low": 0.5', '"low": 0.6'),
        ('layer = "low"', 'layer = "high"'),
        ("(1, 2.5)", "(1, 3.5)"),
        ('"a+b"', '"a*b"'),
        ('"plain": lambda x: x,', '"plain": lambda x: x + 1,'),
        ('"step": "plain"', '"step": "twice"'),
        ("FAST = 20", "FAST = 50"),
        ('Mode.SLOW, "lr"', 'Mode.FAST, "lr"'),
        ("Fixed(4.0)", "Fixed(5.0)"),
        ("return self.value", "return self.value + 1"),
        ("return self.n + other", "return self.n + 2 * other"),
        ("LIMIT = 5", "LIMIT = 6"),
        ("min(x, cls.LIMIT)", "max(x, cls.LIMIT)"),
        ("self.n / 2", "self.n / 3"),
        ("weight * self.n", "weight / self.n"),
        ("yield x * 5", "yield x * 6"),
        ("return 11", "return 12"),
        ("return x + low", "return x - low"),
        ("return x * scale", "return x / scale"),
        ("tools.made(4)", "tools.made(5)"),
        ("Child(3)", "Child(4)"),
        ("np.arange(3.0)", "np.arange(4.0)"),
        ("made(4)", "made(np.longdouble(4) / 3)"),
        ("default_rng(3)", "default_rng(4)"),
        ('kind = "low"', 'kind = "high"'),
    ],
)
def test_what_features_are_computed_with_counts(folder: Path, old: str, new: str) -> None:
    assert (old in TOOLS) + (old in RECIPE) == 1
    assert fingerprint(folder) != fingerprint(folder, old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * 99", "x * 98"),
        ("return self.n - other", "return 0"),  # an operator that no code uses
        ('"twice": lambda x: 2 * x', '"twice": lambda x: 3 * x'),  # another entry of a table
        ('"lr": 0.1', '"lr": 0.2'),
        (
            "tracked(x, low=Mode.FAST.value): return x + low",
            "tracked(y, low=Mode.FAST.value): return y + low",
        ),
        ("calls = 0", "calls = 5"),
        (
            "def inner(x): return x * scale\n    return inner",
            "def g(x): return x * scale\n    return g",
        ),
        ("class Mode(enum.Enum):", "class Mode(enum.Enum):  # of speed"),
    ],
)
def test_what_features_do_not_need_counts_for_nothing(folder: Path, old: str, new: str) -> None:
    assert (old in TOOLS) + (old in RECIPE) == 1
    assert fingerprint(folder) == fingerprint(folder, old, new)


def test_a_table_counts_whole_where_its_key_changes_while_computing(folder: Path) -> None:
    writes = ("self.calls += 1", "self.kind = 'high' if stage else 'low'")
    before = fingerprint(folder, *writes)
    table = before["constants"]["Extractor.compute_features"]["tools.BANDS"]
    assert table == {"low": 0.5, "high": 0.25}


def test_code_that_was_edited_since_it_was_loaded_is_refused(folder: Path) -> None:
    fingerprint(folder)
    extractor = sys.modules["recipe"].Extractor()
    tools = folder / "tools.py"
    tools.write_text(TOOLS + "\n# a comment\n")
    provenance(extractor.compute_features)  # the code is still the same
    tools.write_text("\n\n" + TOOLS)
    provenance(extractor.compute_features)
    tools.write_text(TOOLS.replace("yield x * 5", "yield x * 6"))
    with pytest.raises(ConfigError, match=r"tools\.py was edited since it was loaded: scaled"):
        provenance(extractor.compute_features)
    tools.write_text(TOOLS)
    provenance(extractor.compute_features)

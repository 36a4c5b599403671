"""Classes that features are computed with: fields, bases, decorators; and text that was run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from featcache.inspect import provenance
from featcache.staleness.witnesses import changes, witnesses

TOOLS = """
import abc, attrs, typing
from dataclasses import dataclass, field

@dataclass
class Settings:
    bands: list = field(default_factory=lambda: [20, 40])
    epochs: list = field(default_factory=lambda: [3])

class Window(typing.NamedTuple):
    shift: int = 160
    note: str = "narrow"

@attrs.define
class Kept:
    gain: float = 0.5
    rate: float = 0.1

class Louder:
    def after(self, x): return 2 * x

class Lower:
    def after(self, x): return x - 1

class Silent:
    def before(self, x): return x

class Both(Louder, Lower): pass

class Guarded:
    def __enter__(self): return 3
    def __exit__(self, *error): self.ended = 4
    def shown(self): return 5

def by_name(name): return getattr(sys.modules[__name__], name)

import sys
KIND = "first"
def first(x): return 6 * x
def second(x): return 7 * x
"""
CODE = """
import tools
from tools import Both, Guarded, Kept, Settings, Window

def compute(batch):
    with Guarded() as x:
        x = x * Settings().bands[0] + Window().shift
    from later import late
    if x is None:
        raise ValueError(f"nothing in {batch}")
    x = late(x) * Kept().gain
    return Both().after(getattr(tools, tools.KIND)(x)) + Guarded().shown()
"""
LATER = """
def late(x):
    from . import deeper
    return deeper.deep(x)
"""
DEEPER = "def deep(x): return x ** 2"
CHANGES = (
    ("x ** 2", "x ** 3"),
    ("gain: float = 0.5", "gain: float = 0.7"),
    ("[20, 40]", "[20, 41]"),
    ("shift: int = 160", "shift: int = 100"),
    ("Both(Louder, Lower)", "Both(Lower, Louder)"),
    ("self.ended = 4", "self.ended = 5"),
    ('KIND = "first"', 'KIND = "second"'),
    ("return 6 * x", "return 66 * x"),
)
ALIKE = (
    ("nothing in {batch}", "nothing at all in {batch}"),
    ("rate: float = 0.1", "rate: float = 0.2"),
    ("lambda: [3]", "lambda: [9]"),
    ('"narrow"', '"wide"'),
    ("Both(Louder, Lower)", "Both(Louder, Lower, Silent)"),
    ("    def shown", "    @typing.final\n    def shown"),
    (
        "    def after(self, x): return 2",
        "    @abc.abstractmethod\n    def after(self, x): return 2",
    ),
    ("return 7 * x", "return 77 * x"),
)


FILES = {"tools": TOOLS, "steps": CODE, "later/__init__": LATER, "later/deeper": DEEPER}


@pytest.fixture
def described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Describe `compute` of files that are loaded anew, some text of them replaced."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "later").mkdir()

    def describe(was: str = "", now: str = "") -> dict[str, object]:
        assert not was or any(was in text for text in FILES.values())
        forget()
        for name, text in FILES.items():
            (tmp_path / f"{name}.py").write_text(text.replace(was, now) if was else text)
        importlib.invalidate_caches()
        compute = importlib.import_module("steps").compute
        found = provenance(compute).sections({})
        compute(1)
        assert provenance(compute).sections({}) == found
        return found

    def forget() -> None:
        for name in ("tools", "steps", "later", "later.deeper"):
            sys.modules.pop(name, None)

    yield describe
    forget()


@pytest.mark.parametrize(("was", "now"), CHANGES)
def test_what_classes_are_made_of_counts(described: Any, was: str, now: str) -> None:
    before = described()
    assert described() == before
    assert described(was, now) != before


@pytest.mark.parametrize(("was", "now"), ALIKE)
def test_what_the_code_does_not_name_and_notes_on_methods_do_not_count(
    described: Any, was: str, now: str
) -> None:
    before = described()
    assert described(was, now) == before


def test_the_order_of_an_extractors_bases_counts() -> None:
    class Louder:
        def after(self, x: float) -> float:
            return 2 * x

    class Lower:
        def after(self, x: float) -> float:
            return x - 1

    def called(self: Any, batch: float) -> float:
        return float(self.after(batch))

    one, other = (
        type("Both", bases, {"__call__": called})() for bases in ((Louder, Lower), (Lower, Louder))
    )
    assert provenance(one).sections({}) != provenance(other).sections({})


def test_text_that_a_library_evaluates_counts() -> None:
    def evaluated(text: str) -> Any:
        return eval(text, {"__name__": "hyperpyyaml.core"})  # noqa: S307  # as a library does

    one, same, other = (
        provenance(lambda x: x, named={"act": evaluated(f"lambda x: x * {number}")}).sections({})
        for number in (2, 2, 3)
    )
    assert one == same
    assert one != other


def test_of_a_configuration_what_the_code_names_counts() -> None:
    def described(**changed: Any) -> dict[str, object]:
        plain = {"n": 20, "lr": 0.1, "front": {"dims": [3, 4], "bins": "${n}"}, "out": "/a/b"}
        settings = OmegaConf.create({**plain, **changed})

        def compute(batch: Any) -> Any:
            return batch * settings.front.bins, dict(**settings["front"])

        return provenance(compute).sections({})

    before = described()
    assert described(lr=0.2, out="/c/d") == before
    assert described(n=30) != before
    assert described(front={"dims": [3, 5], "bins": 20}) != before


def test_what_the_code_itself_writes_explains_nothing() -> None:
    class Counting:
        def __init__(self, gain: float) -> None:
            self.gain, self.calls, self.seen = gain, 0, [0]

        def compute(self, batch: float) -> float:
            self.calls += 1
            self.seen.append(self.calls)
            return batch * self.gain

    def recorded(extractor: Counting) -> dict[str, object]:
        return witnesses(provenance(extractor.compute), extractor)

    one, other = Counting(1.0), Counting(2.0)
    other.compute(torch.pi)
    told = [line for line in changes(recorded(one), recorded(other)) if "attributes" in line]
    assert told == ["attributes gain: 1.0 -> 2.0"]

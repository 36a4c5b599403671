"""Changes of code that compute the same: shown with the error, accepted by a word, recorded."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import featcache
from featcache.errors import StaleCacheError

CODE = """
import numpy as np

GAIN = {gain}


def compute(items):
    return [{{"id": item["id"], "x": item["x"] * {factor}}} for item in items]
"""


class Provider(featcache.EnvironmentProvider):
    def __init__(self, module: ModuleType) -> None:
        self.compute = module.compute

    def build_env_local(self) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        items = [{"id": f"u{n}", "x": rng.normal(size=(5 + n, 3))} for n in range(9)]
        ids = [item["id"] for item in items]
        return {"dataset": items, "ids": ids, "compute_features": self.compute}


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the module of the features, and extract with it as a new process would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    name, count = "accepted_features", iter(range(99))

    def extract(factor: str, **settings: Any) -> featcache.Cache:
        (tmp_path / f"{name}.py").write_text(CODE.format(gain=next(count), factor=factor))
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        provider = Provider(importlib.import_module(name))
        declared = [featcache.FeatureStorageConfig("x", frame_s=settings.pop("frame_s", None))]
        path = tmp_path / "cache"
        return featcache.open(
            featcache.extract(provider, path, declared, progressbar=False, **settings).path
        )

    yield extract
    sys.modules.pop(name, None)


def test_a_change_that_computes_the_same_is_shown_and_can_be_accepted(written: Any) -> None:
    first = written("2.0")
    with pytest.raises(StaleCacheError, match="accept=True keeps the cache") as told:
        written("(1.0 + 1.0)")
    assert '-    return [{"id": item["id"], "x": item["x"] * 2.0} for item in items]' in str(
        told.value
    )
    assert "changed since: accepted_features.py: compute" in str(told.value)
    assert "4 utterances computed again: all the same to the bit" in str(told.value)
    accepted = written("(1.0 + 1.0)", accept=True)
    assert accepted.complete
    assert len(accepted) == len(first)
    assert written("(1.0 + 1.0)").complete
    with pytest.raises(StaleCacheError):
        written("2.0")


def test_where_there_is_no_cache_yet_there_is_nothing_to_accept(written: Any) -> None:
    assert len(written("2.0", accept=True, check="all")) == 9


def test_times_of_frames_that_are_declared_later_can_be_accepted(written: Any) -> None:
    written("2.0")
    with pytest.raises(StaleCacheError, match=r"features.x.frame_s: was \(absent\), now 0.02"):
        written("2.0", frame_s=0.02)
    cache = written("2.0", frame_s=0.02, accept=True)
    assert cache.table.segments({"a": ("u3", 0.04, 0.1)}).lengths("x").tolist() == [3]


def test_what_was_accepted_is_recorded(written: Any) -> None:
    written("2.0")
    written("(1.0 + 1.0)", accept=True)
    cache = written("(0.5 + 1.5)", accept=True)
    recorded: Any = featcache.inspect.made_from(cache.path)["recorded"]
    assert [len(each["changes"]) for each in recorded["accepted"]] == [1, 1]
    assert "(0.5 + 1.5)" in "".join(recorded["sources"].values())
    assert featcache.open(cache.path, verify="arrays").complete


@pytest.mark.parametrize("accept", [False, True])
def test_a_change_of_the_features_cannot_be_accepted(written: Any, accept: bool) -> None:
    written("2.0")
    with pytest.raises(StaleCacheError, match="made from something else") as told:
        written("2.5", accept=accept)
    assert "accept=True keeps" not in str(told.value)
    assert len(written("2.0")) == 9


def test_what_the_user_names_cannot_be_accepted(written: Any) -> None:
    written("2.0", fingerprint={"data": 1})
    with pytest.raises(StaleCacheError, match="cannot be accepted"):
        written("2.0", fingerprint={"data": 2}, accept=True)


def test_nothing_is_accepted_without_a_probe(written: Any) -> None:
    written("2.0")
    with pytest.raises(StaleCacheError, match="cannot be accepted"):
        written("(1.0 + 1.0)", accept=True, check=None)


def test_a_new_cache_accepts_nothing(written: Any) -> None:
    recorded: Any = featcache.inspect.made_from(written("2.0", accept=True).path)["recorded"]
    assert recorded["sources"]
    assert "accepted" not in recorded


def test_changes_are_accepted_once_all_that_is_checked_was_compared(written: Any) -> None:
    first = written("2.0")
    but_one = '(2.0 if item["id"] != "u4" else 3.0)'  # which is not of the probe
    with pytest.raises(StaleCacheError, match="1 of 9 utterances is stored otherwise"):
        written(but_one, accept=True, check="all")
    assert featcache.inspect.made_from(first.path)["fingerprint"] == first.fingerprint
    assert written("(1.0 + 1.0)", accept=True, check="all").complete
    assert written("(1.0 + 1.0)").complete

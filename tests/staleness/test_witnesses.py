"""Witnesses: what is recorded with a cache, and what changed between two records."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import pytest
import torch

from featcache.inspect import provenance
from featcache.staleness import witnesses as module
from featcache.staleness.witnesses import changes, witnesses


def compute(items: list[object]) -> list[object]:
    return items


def test_versions_of_loaded_libraries_are_told_when_they_change() -> None:
    recorded = witnesses(provenance(compute))
    versions = recorded["versions"]
    assert isinstance(versions, dict)
    assert versions["torch"] == torch.__version__
    older = {**recorded, "versions": {**versions, "torch": "1.0"}}
    assert changes(older, recorded) == [f"torch: 1.0 -> {torch.__version__}"]


def test_a_library_that_warns_of_its_version_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def warn(name: str) -> str:
        warnings.warn(f"{name} is deprecated", DeprecationWarning, stacklevel=2)
        return "1.0"

    library = ModuleType("warning_library")
    library.__getattr__ = warn  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "warning_library", library)
    assert "warning_library" not in str(witnesses(provenance(compute))["versions"])


def test_environment_variables_do_not_come_and_go_with_the_time_there_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WITNESSED", "1")
    recorded = witnesses(provenance(compute))["environment"]
    assert isinstance(recorded, dict)
    assert recorded["WITNESSED"] == "1"  # this file names it
    monkeypatch.setattr(module, "MOST_S", -1)
    assert witnesses(provenance(compute))["environment"] == recorded


def test_a_commit_that_git_did_not_tell_in_time_is_no_change() -> None:
    told = {"git": {"commit": "a1", "changed": False}}
    assert changes({"git": {}}, told) == changes(told, {"git": {}}) == []
    assert changes(told, {"git": {"commit": "b2", "changed": False}}) == ["git commit: a1 -> b2"]

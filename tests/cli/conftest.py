"""Caches that the tests of the command share."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_runs import make


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that no test changes."""
    return make(tmp_path_factory.mktemp("stored") / "train")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache that a test may change."""
    return make(tmp_path / "train")

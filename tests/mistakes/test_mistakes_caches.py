"""Mistakes of first users with caches: paths, ids, frames, writers, damage.

The numbers are those of a list of 135 mistakes that were tried on an early version.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featcache
from featcache import CacheWriter, FeatureReader, GlobalMVN
from featcache import FeatureStorageConfig as Feature
from featcache.errors import ConfigError

OPENS: list[Callable[[Any], object]] = [
    featcache.open,
    lambda path: CacheWriter(path, [Feature("f")]),
    lambda path: FeatureReader(path, "f"),
    lambda path: GlobalMVN.from_cache(path, "f"),
]


@pytest.mark.parametrize("opens", OPENS, ids=["open", "writer", "reader", "mvn"])
@pytest.mark.parametrize("path", [None, 5, ""])
def test_61_what_is_no_path_is_refused(opens: Callable[[Any], object], path: object) -> None:
    with pytest.raises(ConfigError, match="path of a directory, not"):
        opens(path)


def test_28_a_tilde_is_the_home_directory_wherever_a_cache_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with CacheWriter("~/cache", [Feature("f")]) as writer:
        writer.write("u", {"f": np.ones((3, 2))})
    assert writer.path == tmp_path / "cache"
    assert featcache.open("~/cache").path == FeatureReader("~/cache", "f").path == writer.path
    with pytest.raises(ConfigError, match=r"no such home directory.*'\./~nobody-here/cache'"):
        CacheWriter("~nobody-here/cache", [Feature("f")])
    monkeypatch.chdir(tmp_path)
    with CacheWriter("./~/cache", [Feature("f")]) as writer:
        pass
    assert writer.path == tmp_path / "~" / "cache"

"""Caches that were written on since they were opened: errors say so, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featcache
from featcache.errors import CacheLockedError, KeyNotFoundError

Feature: Any = featcache.FeatureStorageConfig


def made(path: Path, *ids: str, feature: str = "f", **settings: Any) -> featcache.Cache:
    with featcache.CacheWriter(path, [Feature(feature, **settings)]) as writer:
        for id in ids:
            writer.write(id, {feature: np.ones((5, 3), np.float32)})
    return featcache.open(path)


SINCE = "the cache was written on since it was opened: "
LACKING: list[Callable[[featcache.Cache], object]] = [
    lambda cache: cache.annotation("gender"),
    lambda cache: cache.table.annotation("gender"),
    lambda cache: cache.table.filter(gender="f"),
    lambda cache: cache.read("later", "f"),
    lambda cache: cache.table.read("later", "f"),
    lambda cache: cache.read("u", "g"),
    lambda cache: cache.table.read("u", "g"),
]


@pytest.mark.parametrize("ask", LACKING)
def test_what_came_since_a_cache_was_opened_is_said_to_be_there_after_a_refresh(
    tmp_path: Path, ask: Callable[[featcache.Cache], object]
) -> None:
    cache = made(tmp_path, "u")
    with pytest.raises(KeyNotFoundError) as before:
        ask(cache)
    assert SINCE not in str(before.value)
    made(tmp_path, "later")
    featcache.open(tmp_path).annotate({"u": {"gender": "f"}})
    made(tmp_path, "u", "later", feature="g")
    with pytest.raises(KeyNotFoundError) as caught:
        ask(cache)
    assert SINCE in str(caught.value)
    if "refresh() it, or open it again" in str(caught.value):
        cache.refresh()
        ask(cache)
    assert "open it again" in str(caught.value)
    ask(featcache.open(tmp_path))


def test_a_version_is_not_told_to_refresh(tmp_path: Path) -> None:
    made(tmp_path, "u").tag("v1")
    made(tmp_path, "later")
    with pytest.raises(KeyNotFoundError) as caught:
        featcache.open(tmp_path, version="v1").read("later", "f")
    assert SINCE not in str(caught.value)


def test_a_cache_that_is_being_written_says_so(tmp_path: Path) -> None:
    with featcache.CacheWriter(tmp_path, [Feature("f")]):
        cache = featcache.open(tmp_path)
        assert ": 0 utterances; f " in repr(cache)
        assert "; incomplete, being written by process " in repr(cache)
        with pytest.raises(KeyNotFoundError, match="it is incomplete, being written by process"):
            cache.read("u", "f")
    assert "incomplete" not in repr(featcache.open(tmp_path))


def test_an_edit_under_a_function_that_reads_through_says_close(tmp_path: Path) -> None:
    with featcache.through(tmp_path, lambda id: torch.ones(5, 3)) as read:
        read("a")
        read.publish()
        read("b")
        with pytest.raises(
            CacheLockedError, match=r"close\(\) of it, or of the function that reads"
        ):
            featcache.open(tmp_path).delete(["a"])
    featcache.open(tmp_path).delete(["a"])

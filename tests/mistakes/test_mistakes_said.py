"""Mistakes whose answers say what to do: settings in the wrong place, caches that changed since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featcache
from featcache.errors import (
    CacheLockedError,
    ConfigError,
    FeatcacheError,
    KeyNotFoundError,
    UnknownNameError,
)

Feature: Any = featcache.FeatureStorageConfig
convert: Any = featcache.convert
adopt: Any = featcache.adopt


def made(path: Path, *ids: str, feature: str = "f", **settings: Any) -> featcache.Cache:
    with featcache.CacheWriter(path, [Feature(feature, **settings)]) as writer:
        for id in ids:
            writer.write(id, {feature: np.ones((5, 3), np.float32)})
    return featcache.open(path)


def dumped(path: Path) -> str:
    path.mkdir()
    np.save(path / "u.npy", np.ones((5, 3), np.float32))
    return str(path)


MISTAKES: list[tuple[Callable[[Path], object], type[FeatcacheError], list[str]]] = [
    (
        lambda path: convert(made(path / "a", "u"), path / "b", backend="hdf5"),
        UnknownNameError,
        ["convert has no setting 'backend'", "features=[featcache.FeatureStorageConfig("],
    ),
    (
        lambda path: convert(made(path / "a", "u"), path / "b", dtype="float16"),
        UnknownNameError,
        ["convert has no setting 'dtype'", "say it of a feature"],
    ),
    (
        lambda path: convert(made(path / "a", "u"), path / "b", feature=["f"]),
        UnknownNameError,
        ["did you mean 'features'"],
    ),
    (lambda path: convert(made(path / "a", "u")), ConfigError, ["missing", "'dst'"]),
    (
        lambda path: adopt([dumped(path / "x"), dumped(path / "y")], path / "c"),
        ConfigError,
        ["one source is adopted at a time", "featcache.concat"],
    ),
    (
        lambda path: adopt(dumped(path / "x"), path / "c", features="f"),
        UnknownNameError,
        ["adopt has no setting 'features'", "'feature'"],
    ),
    (
        lambda path: featcache.inspect.estimate(made(path)),
        ConfigError,
        ["0 utterances", "holds no utterances, so there is nothing to read"],
    ),
    (
        lambda path: featcache.join(made(path / "a", "u"), made(path / "b", "u")),
        ConfigError,
        ["feature 'f' is in", "leave one of them out, or use concat"],
    ),
]


@pytest.mark.parametrize(("mistake", "kind", "words"), MISTAKES)
def test_a_mistake_is_answered_with_what_to_do(
    tmp_path: Path, mistake: Callable[[Path], object], kind: type[FeatcacheError], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        mistake(tmp_path)
    assert type(caught.value) is kind
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


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
        assert "0 utterances of f, incomplete, being written by process " in repr(cache)
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

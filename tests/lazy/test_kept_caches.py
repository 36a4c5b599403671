"""Caches of another function, or of another tool, which the user wants to keep."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from speechbrain.integrations.hdf5.cached_item import CachedHDF5DynamicItem
from speechbrain.utils.data_pipeline import CachedDynamicItem, DynamicItem

import featcache

SCALE: float = 2.0


def scaled(id: str) -> torch.Tensor:
    return torch.full((len(id), 2), float(SCALE))


@pytest.fixture
def stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of a function that is another one now, and computes the same."""
    with featcache.through(tmp_path / "cache", scaled) as read:
        read("a"), read("bb")
    monkeypatch.setitem(globals(), "SCALE", 2)
    return tmp_path / "cache"


def test_a_change_that_computes_the_same_is_accepted_and_kept(stale: Path) -> None:
    with (
        featcache.through(stale, scaled) as read,
        pytest.raises(featcache.StaleCacheError, match=r"SCALE: .*\n.*accept=True keeps"),
    ):
        read("a")
    with featcache.through(stale, scaled, accept=True) as read:
        assert torch.equal(result(read("a")), scaled("a"))
        assert torch.equal(result(read("ccc")), scaled("ccc"))
    with featcache.through(stale, scaled) as read:  # from now on it is the one of now
        read("bb")
    assert sorted(featcache.open(stale, verify="arrays").ids) == ["a", "bb", "ccc"]


def test_what_was_accepted_is_recorded(stale: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for scale in (2, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        for _ in range(2):  # the second one has nothing to accept
            featcache.through(stale, scaled, accept=True)("a")
    recorded: Any = featcache.inspect.made_from(stale)["recorded"]
    assert [each["changes"] for each in recorded["accepted"]] == [
        ["constants.scaled.SCALE: was 2.0, now 2"],
        ["constants.scaled.SCALE: was 2, now 2.0"],
    ]
    assert "scaled" in "".join(recorded["sources"].values())
    assert len(featcache.open(stale, verify="arrays")) == 2


def test_workers_that_accept_at_once_record_one_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [f"u{number}" for number in range(8)]
    path = tmp_path / "cache"
    loader = functools.partial(
        torch.utils.data.DataLoader,
        num_workers=2,
        collate_fn=list,
        multiprocessing_context="fork",  # of a process whose constant is another
    )
    for scale in (2.0, 2):
        monkeypatch.setitem(globals(), "SCALE", scale)
        items = Items(featcache.cache(path, accept=True)(scaled), ids)
        assert len([*loader(items, batch_size=2)]) == 4
    recorded: Any = featcache.inspect.made_from(path)["recorded"]
    assert len(recorded["accepted"]) == 1


class Items(torch.utils.data.Dataset[object]):
    def __init__(self, read: Any, ids: list[str]) -> None:
        self._read, self._ids = read, ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: int) -> object:
        return self._read(self._ids[number])


def test_a_change_that_computes_something_else_is_refused(
    stale: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    with (
        featcache.through(stale, scaled, accept=True) as read,
        pytest.raises(featcache.StaleCacheError, match="'a', feature 'scaled': computed now"),
    ):
        read("a")


def test_what_is_not_stored_cannot_be_compared(stale: Path) -> None:
    with featcache.through(stale, scaled, accept=True) as read:
        with pytest.raises(featcache.StaleCacheError, match="'ccc' is not stored; read 'a' first"):
            read("ccc")
        read("a"), read("ccc")


def test_what_the_user_says_or_declares_is_not_accepted(stale: Path) -> None:
    half = [featcache.FeatureStorageConfig("scaled", "float16")]
    others: list[dict[str, Any]] = [{"fingerprint": {"corpus": 2}}, {"features": half}]
    for other in others:
        with (
            featcache.through(stale, scaled, accept=True, **other) as read,
            pytest.raises(featcache.StaleCacheError, match="for code and settings alone"),
        ):
            read("a")


def test_a_cache_that_is_not_stale_is_read_and_a_new_one_is_made(tmp_path: Path) -> None:
    for _ in range(2):
        with featcache.through(tmp_path / "cache", scaled, accept=True) as read:
            assert torch.equal(cast(torch.Tensor, read("a")), scaled("a"))
    assert featcache.open(tmp_path / "cache").ids == ["a"]


@pytest.mark.parametrize("theirs", [CachedDynamicItem, CachedHDF5DynamicItem])
def test_what_speechbrain_cached_is_adopted_and_completed(tmp_path: Path, theirs: Any) -> None:
    item = DynamicItem(["id"], scaled, ["feats"])
    cached = theirs.cache(tmp_path / "old")(item)
    cached("a"), cached("bb")
    if theirs is CachedHDF5DynamicItem:
        cached.hdf5file.close()
    with pytest.raises(featcache.errors.NotACacheError, match=r"featcache\.adopt\(") as told:
        featcache.cache(tmp_path / "old")(item)("a")
    exec(str(told.value).rpartition(": ")[2])  # as the error says
    ours = featcache.cache(tmp_path / "old-cache", accept=True)(item)
    for id in ("bb", "ccc", "a"):
        assert torch.equal(ours(id), scaled(id))
    ours.func.close()
    cache = featcache.open(tmp_path / "old-cache")
    assert sorted(cache.ids) == ["a", "bb", "ccc"]
    with (
        featcache.through(tmp_path / "old-cache", lambda id: torch.ones(1)) as read,
        pytest.raises(featcache.StaleCacheError),
    ):
        read("a")


def result(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value

"""Map-style data sets with a cache before them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import featcache


class Waves(Dataset[Any]):
    """Waves and labels; `count` counts items that are computed in this process."""

    def __init__(self, size: int, gain: float = 1.0) -> None:
        self.files = [f"file-{number}.wav" for number in range(size)]
        self.gain = gain
        self.count = 0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        self.count += 1
        return torch.full((number + 2, 2), self.gain), number % 3


def test_items_are_the_same_from_the_cache_which_is_complete_in_the_end(tmp_path: Path) -> None:
    waves = Waves(10)
    with featcache.through(tmp_path / "cache", waves) as cached:
        items: Any = cached
        first = [items[number] for number in range(len(cached))]
        second = [items[number] for number in range(len(cached))]
    assert waves.count == 11  # the first one twice
    for (wave, label), (again, label_again) in zip(first, second, strict=True):
        assert torch.equal(wave, again)
        assert label == label_again
        assert type(label_again) is int
    cache = featcache.open(tmp_path / "cache")
    assert cache.complete
    assert sorted(cache.ids) == [f"file-{number}.wav" for number in range(10)]


def test_it_says_what_the_cache_holds(tmp_path: Path) -> None:
    cached = featcache.through(tmp_path / "cache", Waves(10))
    path = repr(str(tmp_path / "cache"))
    assert repr(cached) == f"<ReadThroughDataset of Waves, 10 items, {path}: no cache yet>"
    cached[3], cached[4]
    recently = "last published less than a minute ago>"
    assert repr(cached).endswith(f"{path}: 0 stored, 2 computed here, {recently}")
    cached.close()
    assert repr(cached).endswith(f"{path}: 2 stored, 0 computed here, {recently}")
    function = featcache.through(tmp_path / "cache", len)
    assert repr(function).startswith(f"<ReadThrough of len into {path}: 2 stored")
    assert "<b>2 stored</b>" in function._repr_html_()
    (tmp_path / "cache" / "featcache.json").write_text("no manifest")
    assert repr(cached).endswith(f"{path}: which cannot be read (CorruptCacheError)>")


def test_a_part_of_the_items_is_no_complete_cache(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", Waves(10)) as cached:
        cached[3]
    assert not featcache.open(tmp_path / "cache").complete


def test_workers_fill_it(tmp_path: Path) -> None:
    cached = featcache.through(tmp_path / "cache", Waves(50))
    loader: Any = DataLoader(cached, batch_size=None, num_workers=2)
    assert sum(len(wave) for wave, _ in loader) == sum(range(2, 52))
    assert featcache.open(tmp_path / "cache").complete


def test_given_ids_name_the_items_in_any_order(tmp_path: Path) -> None:
    ids = [f"utt-{number}" for number in range(5)]
    with featcache.through(tmp_path / "cache", Waves(5), ids=ids) as cached:
        assert len(cached[-1][0]) == 6  # type: ignore[index]
        with pytest.raises(IndexError, match="5 items, and none at 5"):
            cached[5]
    assert featcache.open(tmp_path / "cache").ids == ["utt-4"]


@pytest.mark.parametrize("ids", [["a"], ["a"] * 5])
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, ids: list[str]) -> None:
    with pytest.raises(featcache.errors.ConfigError, match="an id of its own"):
        featcache.through(tmp_path / "cache", Waves(5), ids=ids)


def test_a_setting_counts_and_the_list_of_files_does_not(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", Waves(5)) as cached:
        cached[0]
    with featcache.through(tmp_path / "cache", Waves(7)) as cached:
        cached[6]
    with (
        featcache.through(tmp_path / "cache", Waves(5, gain=math.pi)) as cached,
        pytest.raises(featcache.StaleCacheError, match="gain"),
    ):
        cached[0]

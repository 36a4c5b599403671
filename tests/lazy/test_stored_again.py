"""Stored results that are computed again: a change that no code shows is noticed when one reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_loaders import read_all

import featcache
from featcache.errors import StaleCacheError

IDS = [f"u{number}" for number in range(8)]


class Computing:
    """Computes features with what stands in a file, which no code shows; notes each call there."""

    def __init__(self, folder: Path) -> None:
        self._gain, self._calls = folder / "gain", folder / "calls"
        self.set(1.0)

    def set(self, gain: float) -> None:
        self._gain.write_text(str(gain))
        self._calls.write_text("")

    def calls(self) -> list[str]:
        return self._calls.read_text().split()

    def of(self, id: str, scale: float = 1.0) -> np.ndarray[Any, Any]:
        with self._calls.open("a") as file:
            file.write(f"{id}\n")
        frames = np.random.default_rng(sum(map(ord, id))).normal(size=(20, 4))
        return (frames * scale * float(self._gain.read_text())).astype(np.float32)


@pytest.fixture
def computing(tmp_path: Path) -> Computing:
    return Computing(tmp_path)


Way = Callable[[Computing, Path], Callable[[str], object]]


def through(computing: Computing, path: Path, **more: Any) -> Callable[[str], object]:
    return featcache.through(path, computing.of, **more)


def decorated(computing: Computing, path: Path, **more: Any) -> Callable[[str], object]:
    @featcache.cache(path, **more)
    def features(id: str, scale: float = 1.0) -> object:
        return computing.of(id, scale)

    return lambda id: features(id, 2.0)


class Items(torch.utils.data.Dataset[Any]):
    ids = IDS

    def __init__(self, computing: Computing) -> None:
        self._computing = computing

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, number: int) -> object:
        return self._computing.of(IDS[number])


def data_set(computing: Computing, path: Path, **more: Any) -> Callable[[str], object]:
    items = featcache.through(path, Items(computing), **more)
    return lambda id: items[IDS.index(id)]


WAYS = [through, decorated, data_set]


def fill(way: Any, computing: Computing, path: Path) -> None:
    read = way(computing, path)
    for id in IDS:
        read(id)
    closing(read)


def closing(read: Any) -> None:
    held = read if hasattr(read, "close") else read.__closure__
    for each in [held] if hasattr(held, "close") else [cell.cell_contents for cell in held]:
        if hasattr(each, "close"):
            each.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_change_that_no_code_shows_is_refused(
    way: Any, computing: Computing, tmp_path: Path
) -> None:
    fill(way, computing, tmp_path / "cache")
    computing.set(1.01)
    read = way(computing, tmp_path / "cache")
    for _ in range(2):  # and stays refused
        with pytest.raises(StaleCacheError, match=r"computed again, '\w+' of 'u\d' differs by"):
            read("u3")
    with pytest.raises(StaleCacheError, match="remove it to compute everything again"):
        read("u5")
    assert computing.calls() == ["u3"]


@pytest.mark.parametrize("way", WAYS)
def test_four_results_are_computed_again(way: Any, computing: Computing, tmp_path: Path) -> None:
    fill(way, computing, tmp_path / "cache")
    computing.set(1.0)
    read = way(computing, tmp_path / "cache")
    for id in IDS * 2:
        read(id)
    assert computing.calls() == IDS[:4]


def test_of_results_that_take_long_one_is_computed_again(
    computing: Computing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("featcache.lazy.live_cache.PROBE_S", 0.0)
    fill(through, computing, tmp_path / "cache")
    computing.set(1.0)
    read = through(computing, tmp_path / "cache")
    for id in IDS:
        read(id)
    assert computing.calls() == IDS[:1]


@pytest.mark.parametrize("more", [{"check": None}, {"file_mode": "r"}])
def test_nothing_is_computed_again_where_that_is_not_wanted(
    more: dict[str, Any], computing: Computing, tmp_path: Path
) -> None:
    fill(decorated, computing, tmp_path / "cache")
    computing.set(2.0)
    read = decorated(computing, tmp_path / "cache", **more)
    for id in IDS:
        read(id)
    assert computing.calls() == []


def test_what_this_process_has_just_made_is_not_computed_again(
    computing: Computing, tmp_path: Path
) -> None:
    with featcache.through(tmp_path / "cache", computing.of) as read:
        read("u0")
        read.publish()
        count = len(computing.calls())
        read("u0")
        assert len(computing.calls()) == count


def test_a_cache_outlives_its_recordings(
    computing: Computing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(through, computing, tmp_path / "cache")
    (tmp_path / "gain").unlink()
    read = through(computing, tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        for id in IDS:
            read(id)
    (told,) = [each for each in caplog.messages if "cannot be computed again" in each]
    assert "utterance 'u0'" in told


def test_the_random_state_stays_as_it_is(computing: Computing, tmp_path: Path) -> None:
    def seeded(id: str) -> torch.Tensor:
        torch.manual_seed(len(id))
        return torch.rand(3, 2)

    path = tmp_path / "cache"
    with featcache.through(path, seeded) as read:
        read("u0")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with featcache.through(path, seeded) as read:
        read("u0")
    assert torch.equal(torch.get_rng_state(), before)


class ReadItems(Items):
    def __init__(self, computing: Computing, path: Path) -> None:
        super().__init__(computing)
        self._read = featcache.through(path, computing.of)

    def __getitem__(self, number: int) -> object:
        return torch.as_tensor(self._read(IDS[number]))


def test_of_the_workers_of_a_loader_the_first_computes_again(
    computing: Computing, tmp_path: Path
) -> None:
    fill(through, computing, tmp_path / "cache")
    computing.set(1.0)
    items = ReadItems(computing, tmp_path / "cache")
    assert len(list(torch.utils.data.DataLoader(items, batch_size=1, num_workers=2))) == len(IDS)
    assert computing.calls() == IDS[::2]


def test_lossy_results_are_compared_by_what_the_codec_loses(tmp_path: Path) -> None:
    features = [featcache.FeatureStorageConfig("x", backend="hdf5", codec="lilcom")]
    halves = [featcache.FeatureStorageConfig("x", dtype="float16")]

    def smooth(id: str) -> torch.Tensor:
        return torch.linspace(-3, 50 + len(id), 800).reshape(100, 8).cumsum(0)

    for name, declared in (("lossy", features), ("half", halves)):
        with featcache.through(tmp_path / name, smooth, features=declared) as read:
            read("u0")
        with featcache.through(tmp_path / name, smooth, features=declared) as read:
            read("u0")


def test_a_refusal_shows_the_code_that_changed_and_what_else_did(tmp_path: Path) -> None:
    path = tmp_path / "cache"

    def features(id: str) -> torch.Tensor:
        return torch.ones(5, 2) * 2.0

    with featcache.through(path, features) as read:
        read("u0")
    assert featcache.inspect.made_from(path)["recorded"]

    def changed(id: str) -> torch.Tensor:
        return torch.ones(5, 2) * 3.0

    changed.__qualname__ = features.__qualname__
    changed.__name__ = features.__name__
    with (
        pytest.raises(StaleCacheError, match=r"(?s)changed since: .*accept=True keeps the cache"),
        featcache.through(path, changed) as read,
    ):
        read("u0")


class Files(torch.utils.data.Dataset[Any]):
    """Items that are read from files, which the data set names."""

    def __init__(self, folder: Path) -> None:
        self.paths = [str(folder / f"{id}.npy") for id in IDS]
        self.read: list[str] = []

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> object:
        self.read.append(IDS[number])
        return np.load(self.paths[number])


class Loud(torch.utils.data.Dataset[Any]):
    """Another data set, louder."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> object:
        return 2 * self.files[number]  # type: ignore[operator]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, id in enumerate(IDS):
        np.save(tmp_path / f"{id}.npy", np.ones((3, 4), np.float32) + number)
    return tmp_path


def items_of(folder: Path, within: bool) -> tuple[Files, Any]:
    files = Files(folder)
    dataset = Loud(files) if within else files
    return files, featcache.through(folder / "cache", dataset, ids=IDS)


@pytest.mark.parametrize("within", [False, True])
def test_an_item_whose_file_has_changed_is_computed_again(folder: Path, within: bool) -> None:
    with items_of(folder, within)[1] as items:
        was = [items[number] for number in range(8)]
    np.save(folder / "u6.npy", np.zeros((3, 4), np.float32))
    files, items = items_of(folder, within)
    with items:
        assert all(np.array_equal(items[number], was[number]) for number in range(6))
        for number in (6, 7, 0):  # refused for good
            with pytest.raises(
                StaleCacheError,
                match=r"of 'u6' differs.*its entry .*or a file of 'u6', has changed",
            ):
                items[number]
    assert files.read == ["u0", "u1", "u2", "u3", "u6"]


def test_items_whose_files_were_touched_are_computed_again_and_kept(folder: Path) -> None:
    with items_of(folder, within=False)[1] as items:
        was = [items[number] for number in range(8)]
    for id in IDS:
        np.save(folder / f"{id}.npy", np.load(folder / f"{id}.npy"))
        os.utime(folder / f"{id}.npy", ns=(1, 1))
    files, items = items_of(folder, within=False)
    with items:
        assert all(np.array_equal(items[number], was[number]) for number in range(8))
    assert files.read == ["u0", "u1", "u2", "u3"]


def test_a_changed_file_is_noticed_in_workers(folder: Path) -> None:
    with items_of(folder, within=True)[1] as items:
        list(map(items.__getitem__, range(8)))
    np.save(folder / "u6.npy", np.zeros((3, 4), np.float32))
    with items_of(folder, within=True)[1] as items, pytest.raises(StaleCacheError, match="'u6'"):
        read_all(torch.utils.data.DataLoader(items, num_workers=2, batch_size=2, collate_fn=list))

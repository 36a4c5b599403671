"""Functions that come out another way each time, or that ask for themselves: refused at once."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import featcache

own = np.random.default_rng(0)
dropout = torch.nn.Dropout(0.5)
state = {"mean": 0.0}


def learns(id: str) -> Any:
    state["mean"] = 0.9 * state["mean"] + 1
    return torch.arange(4) - state["mean"]


def sometimes(id: str) -> Any:
    return torch.arange(60.0).reshape(20, 3) * (2.0 if random.random() < 0.5 else 1.0)


RANDOM: dict[str, tuple[Callable[[str], Any], str]] = {
    "dropout": (lambda id: dropout(torch.ones(3, 20)), "global random generators.*eval"),
    "torch": (lambda id: torch.randn(4), "global random generators"),
    "numpy": (lambda id: np.random.normal(size=4), "global random generators"),
    "python": (lambda id: [random.random()], "global random generators"),
    "whole numbers": (lambda id: torch.randint(0, 99, (9,)), "global random generators"),
    "another length": (lambda id: torch.ones(random.randrange(1, 10**6)), "frames instead of"),
    "a generator of its own": (lambda id: own.normal(size=4), "a random generator of its own"),
    "a function that learns": (learns, "running statistics"),
    "several": (lambda id: (torch.ones(2), torch.rand(3)), "_1' differs"),
}


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.mark.parametrize("kind", RANDOM)
def test_results_that_are_others_each_time_are_refused(tmp_path: Path, kind: str) -> None:
    function, match = RANDOM[kind]
    seed()
    function("utt-1")
    expected = drawn()
    seed()
    with (
        featcache.through(tmp_path / "cache", function) as read,
        pytest.raises(featcache.errors.FeatureError, match=match),
    ):
        read("utt-1")
    assert drawn() == expected
    assert not (tmp_path / "cache" / "featcache.json").exists()


def test_what_is_random_now_and_then_is_found_among_the_first(tmp_path: Path) -> None:
    refused = 0
    with featcache.through(tmp_path / "cache", sometimes) as read:
        for number in range(8):
            random.seed(number)
            try:
                read(f"utt-{number}")
            except featcache.errors.FeatureError:
                refused += 1
    assert refused


def test_a_later_process_finds_it_too(tmp_path: Path) -> None:
    scale = torch.nn.Dropout(0.5).eval()
    for training in (False, True):
        scale.train(training)
        with featcache.through(tmp_path / "cache", lambda id: scale(torch.ones(3, 20))) as read:
            if not training:
                read("utt-1")
                continue
            with pytest.raises((featcache.errors.FeatureError, featcache.StaleCacheError)):
                read("utt-2")


def test_random_data_sets_are_refused(tmp_path: Path) -> None:
    class Cropped(Dataset[Any]):
        def __init__(self) -> None:
            self.ids = ["a", "b"]

        def __len__(self) -> int:
            return 2

        def __getitem__(self, number: int) -> Any:
            start = int(torch.randint(0, 1000, ()))
            return torch.arange(2000)[start : start + 100]

    with (
        featcache.through(tmp_path / "cache", Cropped()) as cached,
        pytest.raises(
            featcache.errors.FeatureError, match="leave augmentation to what comes behind"
        ),
    ):
        cached[0]


def seeded(id: str) -> Any:
    torch.manual_seed(zlib.crc32(id.encode()))
    return torch.randn(5)


def in_place(id: str, wave: Any) -> Any:
    wave *= 2
    return wave


buffer = torch.zeros(5)


def same_memory(id: str) -> Any:
    return buffer.fill_(len(id))


def almost(id: str) -> Any:
    return torch.ones(100, 4) + 1e-7 * torch.randn(100, 4)


def draws_in_vain(id: str) -> Any:
    torch.nn.Linear(3, 3)
    return torch.ones(2)


STEADY: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "seeded by the id": (seeded, ()),
    "in place": (in_place, (torch.ones(5),)),
    "the same memory": (same_memory, ()),
    "last bits": (almost, ()),
    "draws in vain": (draws_in_vain, ()),
}


@pytest.mark.parametrize("kind", STEADY)
def test_what_comes_out_the_same_is_kept(tmp_path: Path, kind: str) -> None:
    function, args = STEADY[kind]
    with featcache.through(tmp_path / "cache", function) as read:
        first = read("utt-1", *args).clone()  # type: ignore[attr-defined]
        assert torch.equal(first, read("utt-1", *args))  # type: ignore[arg-type]


def test_the_random_state_is_that_of_one_computing(tmp_path: Path) -> None:
    seed()
    draws_in_vain("utt-1")
    expected = drawn()
    seed()
    with featcache.through(tmp_path / "cache", draws_in_vain) as read:
        read("utt-1")
        assert drawn() == expected


def test_only_the_first_result_is_computed_twice(tmp_path: Path) -> None:
    computed: list[str] = []

    def compute(id: str) -> list[int]:
        computed[:] = [*computed, id]
        return [len(id)]

    with featcache.through(tmp_path / "cache", compute) as read:
        for number in range(5):
            read(f"utt-{number}")
    assert computed == ["utt-0", *(f"utt-{number}" for number in range(5))]


def test_a_function_that_asks_for_its_own_result_is_refused(tmp_path: Path) -> None:
    readers: dict[str, Any] = {}

    def itself(id: str) -> Any:
        return readers["itself"](id)

    def other(id: str) -> Any:
        return readers["another"](id)

    def countdown(id: str) -> Any:
        return [0] if id == "0" else [readers["countdown"](str(int(id) - 1))[0] + 1]

    for name, function in (("itself", itself), ("another", other), ("countdown", countdown)):
        readers[name] = featcache.through(tmp_path / name, function)
    readers["another"] = featcache.through(tmp_path / "another", other)  # not the same reader
    for name in ("itself", "another"):
        with pytest.raises(featcache.errors.ComputeError, match=r"'u' .* asks for its own result"):
            readers[name]("u")
    for name in ("itself", "another"):  # once more: nothing is left of the first time
        with pytest.raises(featcache.errors.ComputeError, match="asks for its own result"):
            readers[name]("u")
    assert readers["countdown"]("5") == [5]
    for each in readers.values():
        each.close()


def test_threads_wait_for_each_other_all_the_same(tmp_path: Path) -> None:
    begun, computed = threading.Event(), list[str]()

    def slow(id: str) -> list[int]:
        computed[:] = [*computed, id]
        begun.wait(1)
        return [3]

    found: list[Any] = []
    with featcache.through(tmp_path / "cache", slow) as read:
        threads = [threading.Thread(target=lambda: found.append(read("u"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        begun.set()
        for thread in threads:
            thread.join()
    assert found == [[3]] * 4
    assert computed == ["u"] * 2  # the first one twice

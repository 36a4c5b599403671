"""Arguments behind the id of a cached function: another one is refused, wherever the result is."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featcache
from featcache.lazy.arguments import Arguments


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclasses.dataclass
class Settings:
    bins: int
    names: tuple[str, ...] = ("a",)


def settings(id: str, *, bins: Any = 80, log: bool = True) -> list[int]:
    return [3]


def inputs(id: str, value: Any, *more: Any, **named: Any) -> list[int]:
    return [3]


# (args, kwargs) that are the same, and some that are not
Args = tuple[tuple[Any, ...], dict[str, Any]]
CASES: dict[str, tuple[Callable[..., object], list[Args], list[Args]]] = {
    "defaults": (
        settings,
        [((), {}), ((), {"bins": 80}), ((), {"log": True, "bins": 80})],
        [((), {"bins": 40}), ((), {"bins": 80.0}), ((), {"log": False}), ((), {"log": 1})],
    ),
    "a setting": (
        settings,
        [((), {"bins": 40}), ((), {"log": True, "bins": np.int64(40)}), ((), {"bins": 40})],
        [((), {}), ((), {"bins": 80}), ((), {"bins": "40"}), ((), {"bins": 40, "log": False})],
    ),
    "by place or by name": (
        inputs,
        [((5,), {}), ((), {"value": 5})],
        [((6,), {}), ((5, 5), {}), ((5,), {"extra": 5}), ((None,), {})],
    ),
    "texts": (
        inputs,
        [(("yes/no",), {}), ((np.str_("yes/no"),), {})],
        [(("no/no",), {}), (("yes",), {}), ((b"yes/no",), {}), (("",), {})],
    ),
    "more": (
        inputs,
        [((1, 2, 3), {"a": 4, "b": 5}), ((1, 2, 3), {"b": 5, "a": 4})],
        [((1, 3, 2), {"a": 4, "b": 5}), ((1, 2, 3), {"a": 5, "b": 4}), ((1, 2), {"a": 4, "b": 5})],
    ),
    "collections": (
        inputs,
        [(({"a": [1, 2], "b": {3, 4}},), {}), (({"b": {4, 3}, "a": (1, 2)},), {})],
        [(({"a": [2, 1], "b": {3, 4}},), {}), (({"a": [1, 2], "b": {3, 5}},), {}), (({},), {})],
    ),
    "objects": (
        inputs,
        [((Settings(3), Kind.ONE, torch.float32), {})],
        [
            ((Settings(4), Kind.ONE, torch.float32), {}),
            ((Settings(3, ("b",)), Kind.ONE, torch.float32), {}),
            ((Settings(3), Kind.TWO, torch.float32), {}),
            ((Settings(3), Kind.ONE, torch.float16), {}),
        ],
    ),
    "tokens": (
        inputs,
        [((torch.tensor([1, 2]),), {})],
        [((torch.tensor([2, 1]),), {}), ((torch.tensor([1]),), {}), ((torch.ones(2),), {})],
    ),
    "a number of an array": (
        inputs,
        [((torch.tensor(0.5, dtype=torch.float64),), {}), ((np.float64(0.5),), {}), ((0.5,), {})],
        [((torch.tensor(0.25),), {}), ((np.float64(0.75),), {})],
    ),
    "signals": (  # which may differ in their last bits
        inputs,
        [((torch.ones(4000),), {}), ((torch.ones(4000) * (1 + 1e-7),), {})],
        [((torch.ones(3600),), {}), ((torch.ones(4000, dtype=torch.float64),), {})],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_id_has_the_result_of_one_set_of_arguments(tmp_path: Path, case: str) -> None:
    function, alike, others = CASES[case]
    read = featcache.through(tmp_path / "cache", function)

    def check(reader: Any) -> None:
        for args, kwargs in alike:
            assert reader("utt-1", *args, **kwargs) == [3]
        for args, kwargs in others:
            with pytest.raises(featcache.StaleCacheError, match=r"'utt-1' .* with other arguments"):
                reader("utt-1", *args, **kwargs)

    check(read)  # not yet durable
    with featcache.through(tmp_path / "cache", function) as other:
        check(other)  # in a part that is being written
    read.close()
    with featcache.through(tmp_path / "cache", function) as other:
        check(other)  # published
    cache = featcache.open(tmp_path / "cache")
    cache.delete(["utt-1"])
    cache.compact()
    args, kwargs = others[0]
    with featcache.through(tmp_path / "cache", function) as other:
        assert other("utt-1", *args, **kwargs) == [3]  # as the message says


def test_a_setting_may_be_bound_for_a_directory(tmp_path: Path) -> None:
    for bins in (40, 20):
        bound = functools.partial(settings, bins=bins)
        with featcache.through(tmp_path / str(bins), bound) as read:
            assert read("utt-1") == [3]
    with (
        featcache.through(tmp_path / "40", functools.partial(settings, bins=20)) as read,
        pytest.raises(featcache.StaleCacheError, match="bins"),
    ):
        read("utt-1")


@pytest.mark.parametrize("value", [object(), len, torch.nn.Linear(2, 2), iter([1])])
def test_objects_that_nothing_tells_apart_are_refused(tmp_path: Path, value: Any) -> None:
    with (
        featcache.through(tmp_path / "cache", inputs) as read,
        pytest.raises(
            featcache.errors.FeatureError, match=r"the argument 'value'.*functools.partial"
        ),
    ):
        read("utt-1", value)


@pytest.mark.parametrize("as_path", [str, pathlib.Path])
def test_recordings_may_move_and_be_no_others(tmp_path: Path, as_path: Any) -> None:
    clean, moved, noisy = (tmp_path / name for name in ("clean", "moved", "noisy"))
    for folder, content in ((clean, b"clean"), (moved, b"clean"), (noisy, b"noisy")):
        folder.mkdir()
        (folder / "utt-1.wav").write_bytes(content)
        (folder / "utt-2.wav").write_bytes(b"other")
    with featcache.through(tmp_path / "cache", inputs) as read:
        read("utt-1", as_path(clean / "utt-1.wav"), "yes/no")
    with featcache.through(tmp_path / "cache", inputs) as read:
        gone = tmp_path / "gone" / "utt-1.wav"  # and nothing could be computed from it
        for path in (clean / "utt-1.wav", moved / "utt-1.wav", gone):
            assert read("utt-1", as_path(path), "yes/no") == [3]
        for path in (noisy / "utt-1.wav", clean / "utt-2.wav"):
            with pytest.raises(featcache.StaleCacheError, match="with other arguments"):
                read("utt-1", as_path(path), "yes/no")
        with pytest.raises(featcache.StaleCacheError, match="with other arguments"):
            read("utt-1", as_path(moved / "utt-1.wav"), "no")


def test_caches_of_before_and_of_others_say_nothing_of_arguments(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "made", settings) as read:
        read("utt-1")
    made = featcache.open(tmp_path / "made")
    features = [featcache.FeatureStorageConfig("settings", "int64")]
    made_from = {key: each for key, each in made.fingerprint.items() if key != "features"}
    with featcache.CacheWriter(tmp_path / "cache", features, made_from) as writer:
        writer.write("utt-1", {"settings": np.array([3])})
    with featcache.through(tmp_path / "cache", settings) as read:
        assert read("utt-1", bins=40) == [3]


def taking(id: str, *args: object, rate: object = None) -> None: ...


VALUES = [
    *(0, 1, True, False, 0.0, -0.0, 1.0, 1j, 0j, complex(0.0, -0.0), "", "1", b"1", None),
    *([1], [True], [1.0], (1,), [0.0], [-0.0], ["1"], [b"1"], [None], [[1]], [], ()),
    *(np.zeros(3), np.zeros(3, np.float32), np.zeros((3, 1)), np.arange(3), np.array(1.0)),
    *(torch.zeros(3), torch.zeros(3, dtype=torch.float64), torch.zeros(1, 3), torch.arange(3)),
    *(torch.tensor([1, 2, 3]), torch.tensor(1.0), torch.tensor(True), torch.zeros(3).half()),
]


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_remembered_of_arguments_never_takes_one_for_another(size: int) -> None:
    remembering = Arguments(taking)
    for values in itertools.product(VALUES, repeat=size):
        *args, rate = values
        for given in ((values, {}), (tuple(args), {"rate": rate})):
            assert remembering.entry(*given) == Arguments(taking).entry(*given), given
            assert remembering.entry(*given) == Arguments(taking).entry(*given), given

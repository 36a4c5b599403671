"""`through` and `cache` in one process: results, declarations, refusals."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store_helpers import make_cache, two_features

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ConfigError, FeatureError


def same(one: Any, other: Any) -> bool:
    """Compare type, dtype, shape and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


RESULTS: dict[str, Any] = {
    "tensor": torch.randn(5, 3),
    "half": torch.randn(5, 3).half(),
    "bfloat16": torch.randn(5, 3).bfloat16(),
    "tokens": torch.tensor([3, 1, 2]),
    "scalar tensor": torch.tensor(2.5),
    "array": np.random.default_rng(0).standard_normal((4, 2)),
    "bytes": np.arange(6, dtype=np.uint8),
    "big-endian": np.arange(6, dtype="<i4"),
    "list": [5, 3, 8],
    "lists": [[1, 2], [3, 4], [5, 6]],
    "floats": [0.1, 0.2],
    "empty list": [],
    "integer": 7,
    "number": 0.1,
    "bool": True,
    "tuple": (torch.ones(3, 2), [1, 2, 3]),
    "dict": {"wave": np.ones(7, np.float32), "label": 3},
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_comes_back_as_it_was_the_first_time(tmp_path: Path, kind: str) -> None:
    def compute(id: str) -> object:
        return copy.deepcopy(RESULTS[kind])

    with featcache.through(tmp_path / "cache", compute) as read:
        first, again = read("utt-1"), read("utt-1")  # computed; from what is being written
    with featcache.through(tmp_path / "cache", never) as read:
        assert raises_stale(read)
    with featcache.through(tmp_path / "cache", compute) as read:
        published = read("utt-1")
    assert same(first, RESULTS[kind])
    assert same(again, first)
    assert same(published, first)


def never(id: str) -> object:
    raise AssertionError("this is computed already")


def raises_stale(read: Callable[[str], object]) -> bool:
    with pytest.raises(featcache.StaleCacheError, match="was made from something else"):
        read("utt-1")
    return True


@pytest.mark.parametrize(
    "feature",
    [
        FeatureStorageConfig("fbank", "float16"),
        FeatureStorageConfig("fbank", "bfloat16"),
        FeatureStorageConfig("fbank", backend="lilcom"),
        FeatureStorageConfig("fbank", codec="int8"),
        FeatureStorageConfig("fbank", backend="hdf5", codec="lilcom"),
        FeatureStorageConfig("fbank", backend="zarr", codec="zstd"),
        FeatureStorageConfig("fbank", backend="webdataset"),
    ],
    ids=lambda feature: f"{feature.backend}-{feature.codec}-{feature.dtype}",
)
def test_a_declared_result_is_the_stored_one_from_the_first_time_on(
    tmp_path: Path, feature: FeatureStorageConfig
) -> None:
    frames = torch.randn(1203, 80) * 7

    def compute(id: str) -> torch.Tensor:
        return frames

    with featcache.through(tmp_path / "cache", compute, features=[feature]) as read:
        first, again = read("utt-1"), read("utt-1")
    with featcache.through(tmp_path / "cache", compute, features=[feature]) as read:
        published = read("utt-1")
    assert isinstance(first, torch.Tensor)
    assert first.dtype == getattr(torch, feature.dtype)
    assert same(first, again)
    assert same(first, published)
    torch.testing.assert_close(first.float(), frames, atol=0.2, rtol=0.01)


def test_what_is_returned_may_be_changed(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", lambda id: torch.ones(3, 2)) as read:
        for _ in range(3):
            result: Any = read("utt-1")
            result += 1
        read.publish()
        result = read("utt-1")
        result += 1
        assert same(read("utt-1"), torch.ones(3, 2))


def test_gradients_are_not_kept(tmp_path: Path) -> None:
    weight = torch.ones(2, requires_grad=True)
    with featcache.through(tmp_path / "cache", lambda id: weight * torch.ones(3, 2)) as read:
        first: Any = read("utt-1")
        assert not first.requires_grad


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "None is no feature"),
        (["a", 1], "is no feature"),
        ({"id": "utt-1", "n": 1}, "annotation 'id'"),
        ("\ud800", "surrogates not allowed"),
        ([[1], [1, 2]], "the list is no array"),
        (torch.tensor([1j]), "complex"),
        (torch.tensor([[float("nan")]]), "is not finite"),
        ({}, "at least one feature"),
        ((), "0 values"),
        ({"a": 1, "A": 2}, "same name but for upper case"),
        ({"with space": 1}, "name 'with space' is not usable"),
    ],
)
def test_a_first_result_that_cannot_be_stored_leaves_no_cache(
    tmp_path: Path, result: object, says: str
) -> None:
    results = [result]
    with featcache.through(tmp_path / "cache", lambda id: results[0]) as read:
        with pytest.raises(
            (featcache.errors.FeatureError, featcache.errors.ConfigError), match=says
        ):
            read("utt-1")
        assert not (tmp_path / "cache" / "featcache.json").exists()
        results[0] = np.ones((2, 3))
        assert same(read("utt-1"), results[0])


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (torch.ones(3, 5), r"'utt-2', feature 'compute': frames have shape \(5,\)"),
        (torch.ones(3, 2).double() * 1e300, "'utt-2', feature 'compute'.*does not fit float32"),
        ("text", "'utt-2'.*no feature"),
        ({"compute": torch.ones(3, 2)}, "'utt-2'"),
    ],
)
def test_a_later_result_that_cannot_be_stored_is_refused_by_name(
    tmp_path: Path, result: object, says: str
) -> None:
    torch.save(torch.ones(3, 2), tmp_path / "utt-1")
    torch.save(result, tmp_path / "utt-2")

    def compute(id: str) -> object:
        return torch.load(tmp_path / id)

    with featcache.through(tmp_path / "cache", compute) as read:
        read("utt-1")
        with pytest.raises(featcache.errors.FeatureError, match=says):
            read("utt-2")
        torch.save(torch.zeros(3, 2), tmp_path / "utt-2")
        assert same(read("utt-2"), torch.zeros(3, 2))
    assert len(featcache.open(tmp_path / "cache")) == 2


def test_an_error_of_the_function_is_its_own_and_the_next_call_tries_again(tmp_path: Path) -> None:
    calls = []

    def compute(id: str) -> list[int]:
        calls.append(id)
        if len(calls) == 1:
            raise ZeroDivisionError("no frames")
        return [1, 2]

    with featcache.through(tmp_path / "cache", compute) as read:
        with pytest.raises(ZeroDivisionError, match="no frames"):
            read("utt-1")
        assert read("utt-1") == [1, 2]


@pytest.mark.parametrize("id", [7, np.int64(7), torch.tensor(7)])
def test_whole_numbers_are_ids_as_text(tmp_path: Path, id: Any) -> None:
    with featcache.through(tmp_path / "cache", lambda id: [len(id)]) as read:
        assert read(id) == [1]
    assert featcache.open(tmp_path / "cache").ids == ["7"]


@pytest.mark.parametrize("id", ["", "a\0b", None, 1.5, b"utt"])
def test_unusable_ids_are_refused(tmp_path: Path, id: Any) -> None:
    with (
        featcache.through(tmp_path / "cache", lambda id: [1]) as read,
        pytest.raises(featcache.errors.FeatureError, match="is not usable"),
    ):
        read(id)


def test_ids_of_all_kinds_are_stored(tmp_path: Path) -> None:
    ids = ["a", "a/b", "../x", "ä" * 300, "a.pt", "%2F", "\n"]
    with featcache.through(tmp_path / "cache", lambda id: [len(id)]) as read:
        assert [read(id) for id in ids * 2] == [[len(id)] for id in ids * 2]
    assert sorted(featcache.open(tmp_path / "cache").ids) == sorted(ids)


SCALE = 2.0


def scaled(id: str) -> torch.Tensor:
    return torch.ones(3, 2) * SCALE


def test_a_changed_constant_is_told_and_nothing_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with featcache.through(tmp_path / "cache", scaled) as read:
        read("utt-1")
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    with featcache.through(tmp_path / "cache", scaled) as read:
        with pytest.raises(featcache.StaleCacheError, match=r"SCALE: was 2\.0, now 3\.0"):
            read("utt-1")
        with pytest.raises(featcache.StaleCacheError, match="remove it"):
            read("utt-2")


def test_what_the_user_says_counts_in_the_fingerprint(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", scaled, fingerprint={"corpus": 1}) as read:
        read("utt-1")
    with (
        featcache.through(tmp_path / "cache", scaled, fingerprint={"corpus": 2}) as read,
        pytest.raises(featcache.StaleCacheError, match="corpus: was 1, now 2"),
    ):
        read("utt-1")


def test_other_declarations_are_told(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", scaled) as read:
        read("utt-1")
    half = [FeatureStorageConfig("scaled", "float16")]
    with (
        featcache.through(tmp_path / "cache", scaled, features=half) as read,
        pytest.raises(featcache.StaleCacheError, match='dtype: was "float32", now "float16"'),
    ):
        read("utt-1")


def test_a_cache_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = make_cache(tmp_path / "cache", range(3))
    with (
        featcache.through(path, scaled) as read,
        pytest.raises(featcache.StaleCacheError, match=r"model: was .wavlm., now \(absent\)"),
    ):
        read("utt-1")
    assert len(featcache.open(path)) == 3


def test_an_empty_cache_of_something_else_is_begun_anew(tmp_path: Path) -> None:
    CacheWriter(tmp_path / "cache", two_features()).close()
    with featcache.through(tmp_path / "cache", scaled) as read:
        read("utt-1")
    assert list(featcache.open(tmp_path / "cache").features) == ["scaled"]


def test_a_directory_of_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "utt-1.pt").write_bytes(b"a torch file")
    with (
        featcache.through(tmp_path, scaled) as read,
        pytest.raises(featcache.errors.NotACacheError, match=r"holds other files \('utt-1.pt'\)"),
    ):
        read("utt-1")


def test_copies_are_the_same_and_a_pickled_one_reads_on(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", scaled) as read:
        read("utt-1")
        assert copy.deepcopy(read) is read is copy.copy(read)
        with pickle.loads(pickle.dumps(read)) as other:  # noqa: S301
            assert same(other("utt-1"), read("utt-1"))


def test_the_function_may_be_a_partial_a_method_or_an_object(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, id: str) -> torch.Tensor:
            return torch.ones(2, 2)

        def embed(self, id: str) -> torch.Tensor:
            return torch.ones(2, 2)

    model = Model()
    computes: list[Any] = [partial(scaled), model, model.embed]
    for number, compute in enumerate(computes):
        with featcache.through(tmp_path / f"cache-{number}", compute) as read:
            assert same(read("utt-1"), compute("utt-1"))
            assert same(read("utt-1"), compute("utt-1"))


def test_what_is_written_is_published_by_itself_when_nobody_holds_the_function(
    tmp_path: Path,
) -> None:
    read = featcache.through(tmp_path / "cache", scaled)
    read("utt-1")
    del read
    assert len(featcache.open(tmp_path / "cache")) == 1


def test_complete_is_what_the_user_says(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", scaled) as read:
        read("utt-1")
    with pytest.raises(featcache.errors.IncompleteError):
        featcache.FeatureDataset(tmp_path / "cache")
    read.publish(complete=True)
    assert len(featcache.FeatureDataset(tmp_path / "cache")) == 1
    with read:
        read("utt-2")
    assert featcache.open(tmp_path / "cache").complete
    assert len(featcache.open(tmp_path / "cache")) == 2


def test_an_ordinary_writer_is_told_who_writes(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", scaled) as read:
        read("utt-1")
        with pytest.raises(featcache.errors.CacheLockedError, match=f"by process {os.getpid()} "):
            featcache.open(tmp_path / "cache").compact()
    featcache.open(tmp_path / "cache").compact()


def test_a_function_never_begins_the_cache_of_another_anew(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", scaled) as read:
        read("utt-1")
        with (
            featcache.through(tmp_path / "cache", lambda id: [1]) as other,
            pytest.raises(featcache.StaleCacheError, match="was made from something else"),
        ):
            other("utt-1")
    assert len(featcache.open(tmp_path / "cache")) == 1


def test_many_short_runs_leave_few_parts(tmp_path: Path) -> None:
    for number in range(12):
        with featcache.through(tmp_path / "cache", scaled) as read:
            read(f"utt-{number}")
    opened = featcache.open(tmp_path / "cache", verify="arrays")
    assert len(opened) == 12
    assert len(opened.opened.manifest.parts) < 8
    assert opened.stats("scaled").count == 36


def test_threads_share_a_function_and_compute_none_anew(tmp_path: Path) -> None:
    computed = []
    ids = [f"utt-{number}" for number in range(40)]

    def compute(id: str) -> list[int]:
        time.sleep(0.001)
        computed.append(id)
        return [int(id[4:])] * 3

    with featcache.through(tmp_path / "cache", compute) as read, ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = [*pool.map(read, [id for id in ids for _ in range(4)])]
            assert found == [[number] * 3 for number in range(40) for _ in range(4)]
            read.publish()
    assert {*computed} == {*ids}
    assert len(computed) == len(ids) + 1  # the first one twice


def test_a_deleted_utterance_is_computed_again(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", scaled) as read:
        read("utt-1"), read("utt-2")
    featcache.open(tmp_path / "cache").delete(["utt-1"])
    with featcache.through(tmp_path / "cache", scaled) as read:
        read("utt-1")
    assert featcache.open(tmp_path / "cache").ids == ["utt-1", "utt-2"]


def test_no_function_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(featcache.errors.ConfigError, match="a function of an utterance id"):
        featcache.through(tmp_path, 7)  # type: ignore[call-overload]
    with pytest.raises(featcache.errors.ConfigError, match="fingerprint is a dict"):
        featcache.through(tmp_path, scaled, fingerprint=3)  # type: ignore[call-overload]


FIRST_AND_OTHER: dict[str, tuple[Any, Any, Any]] = {  # the first result, another that fits, one not
    "float32": (torch.zeros(3), torch.tensor([1, 2, 3]), torch.tensor([2**40 + 1, 1, 1])),
    "narrow": (np.zeros(3, np.float32), np.array([0.5, 1, 2]), np.array([0.1, 1, 2])),
    "bfloat16": (torch.zeros(3).bfloat16(), torch.ones(3), torch.full((3,), 1.001)),
    "number": (0.5, 7, 2**53 + 1),
    "empty": ([], [3], [0.5]),
    "longdouble": (np.zeros(3), np.ones(3, np.longdouble), np.full(3, np.longdouble(1) / 3)),
}


@pytest.mark.parametrize("name", FIRST_AND_OTHER)
def test_a_result_that_the_first_ones_dtype_would_round_is_refused(
    tmp_path: Path, name: str
) -> None:
    first, fits, rounded = FIRST_AND_OTHER[name]
    results = {"a": first, "b": fits, "c": rounded}
    with featcache.through(tmp_path / "c", results.__getitem__) as read:
        read("a")
        for _ in range(2):
            assert np.array_equal(np.asarray(_plain(read("b"))), np.asarray(_plain(fits)))
        with pytest.raises(FeatureError, match=r"'c', .*; the first result was \w+: return one"):
            read("c")


OTHER_TYPES: dict[str, tuple[Any, Any, str]] = {
    "array": (
        torch.ones(3),
        np.ones(3, np.float32),
        "an array of float32, and comes back as a ten",
    ),
    "wider": (
        np.ones(3, np.float32),
        np.ones(3),
        "of float64, and comes back as an array of float",
    ),
    "list": (np.ones(3), [1.0, 2.0, 3.0], "a list of float64, and comes back as an array"),
    "number": (0.5, np.ones(()), "an array of float64, and comes back as a number"),
    "both": (
        torch.ones(3, 2),
        np.ones((3, 2)),
        "of float64, and comes back as a tensor of float32",
    ),
}


@pytest.mark.parametrize("name", OTHER_TYPES)
def test_a_result_that_comes_back_as_another_type_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    first, other, words = OTHER_TYPES[name]
    results = {"a": first, "b": other, "c": other, "d": first}
    with featcache.through(tmp_path / "c", results.__getitem__) as read:
        read("a")
        assert not caplog.messages
        for id in ("b", "c", "d", "b"):
            assert type(read(id)) is type(first)
        told = [each for each in caplog.messages if "as the first one was" in each]
        assert len(told) == 1
        assert told[0].startswith("utterance 'b', feature")
        assert words in told[0]


def test_a_declared_dtype_is_no_surprise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    declared = [FeatureStorageConfig("f", "float16")]
    with featcache.through(tmp_path, lambda id: torch.ones(3), features=declared) as read:
        read("a")
        read("b")
    assert not [each for each in caplog.messages if "comes back as" in each]


def test_a_declared_result_is_rounded_as_the_declaration_says(tmp_path: Path) -> None:
    declared = [FeatureStorageConfig("f", "float16")]
    with featcache.through(tmp_path, lambda id: torch.full((3,), 0.1), features=declared) as read:
        assert np.array_equal(np.asarray(read("a")), np.full(3, 0.1, np.float16))


def _plain(value: Any) -> Any:
    return value.double().numpy() if isinstance(value, torch.Tensor) else value


def test_a_directory_and_a_function_that_were_swapped_are_told_apart(tmp_path: Path) -> None:
    swapped: Any
    for swapped in ((torch.zeros, tmp_path), (str(tmp_path), "other")):
        with pytest.raises(ConfigError, match="the directory of the cache comes first"):
            featcache.through(*swapped)
    with pytest.raises(ConfigError, match=r"@featcache\.cache\('features'\), not"):
        featcache.cache(lambda id: torch.zeros(3))  # type: ignore[arg-type]


def test_a_script_that_ends_by_an_error_says_that_error_alone(tmp_path: Path) -> None:
    """The traceback holds what reads through until the interpreter has taken `os` away."""
    script = """
import sys, numpy, featcache
results = iter([numpy.ones(3), numpy.ones(3)])
read = featcache.through(sys.argv[1], lambda id: next(results))
read("a")
read("b")
"""
    command = [sys.executable, "-c", script, str(tmp_path / "cache")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 1
    assert "StopIteration" in ended.stderr
    assert "Exception ignored" not in ended.stderr


def lengths(id: str) -> Any:
    return np.array([len(id)])


def test_a_cache_whose_overwrite_was_given_up_says_why_nothing_new_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with featcache.through(tmp_path, lengths) as read:
        read("one")
    cache = featcache.open(tmp_path)
    declared = [FeatureStorageConfig("lengths", dtype="int64")]
    made_from = {key: each for key, each in cache.fingerprint.items() if key != "features"}
    if (child := os.fork()) == 0:
        writer = CacheWriter(tmp_path, declared, made_from, overwrite=True)
        writer.write("two", {"lengths": np.zeros(1, np.int64)})
        writer.commit()
        os._exit(0)
    os.waitpid(child, 0)
    caplog.clear()
    with featcache.through(tmp_path, lengths) as read:
        assert read("three") == [5]
    assert "is being overwritten, or that was given up halfway" in caplog.text


def test_an_id_that_is_no_text_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", lengths) as read:
        read("one")
        with pytest.raises(FeatureError, match="udcff"):
            read("\udcff")
        assert read("three") == [5]
    assert not (tmp_path / "cache" / "work-through").exists()

"""`extract`: the same cache on any number of workers; what fails; what is refused."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parallel_helpers import FEATURES, LOCAL, Numbers, Provider, assert_holds, calls, extract

import featcache
from featcache.errors import (
    CacheLockedError,
    ComputeError,
    ConfigError,
    DuplicateIdError,
    FeatureError,
    StaleCacheError,
)
from featcache.extraction.job import ProgressBar, TaskProgress
from featcache.workers import get_client, worker_env
from featcache.workers.environments import _BUILT, WorkerEnv

SERIAL: dict[str, Any] = {"parallel": None}


def ids(*numbers: int) -> list[str]:
    return [Numbers(100).ids[number] for number in numbers]


def failures(folder: Path) -> list[dict[str, Any]]:
    path = folder / "cache" / "work-failures.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# The same cache


@pytest.mark.parametrize("workers", [None, 3])
def test_the_cache_is_the_same_on_any_number_of_workers(
    tmp_path: Path, workers: int | None
) -> None:
    parallel = workers and {"env": "local", "n_workers": workers}
    cache = extract(Provider(tmp_path), parallel=parallel, batch_size=3)
    assert_holds(cache, range(40))
    assert len(calls(tmp_path)) == 40
    # without any worker
    assert extract(Provider(tmp_path), parallel={"env": "local", "n_workers": 99}).complete
    assert len(calls(tmp_path)) == 40


class Single(Provider):
    """Gives its items one by one."""

    def build_env_local(self) -> dict[str, object]:
        env = super().build_env_local()
        compute: Any = env["compute_features"]
        kwargs = {"batch_size": None, "collate_fn": as_it_is}
        return {
            **env,
            "compute_features": lambda item: compute([item]),
            "loader_kwargs": kwargs,
        }


def as_it_is(item: int) -> int:
    return item


@pytest.mark.parametrize("parallel", [None, LOCAL])
def test_single_items_are_all_computed_whatever_the_size_of_a_batch(
    tmp_path: Path, parallel: Any
) -> None:
    assert_holds(extract(Single(tmp_path), parallel=parallel, batch_size=4), range(40))


def test_several_caches_are_computed_by_the_workers_of_one_client(tmp_path: Path) -> None:
    with get_client({"env": "local", "n_workers": 2}, lambda: {"mine": 1}) as client:
        assert_holds(extract(Provider(tmp_path / "a", fails_once=[3]), parallel=client), range(40))
        with pytest.raises(ComputeError, match="cannot compute 7"):
            extract(Provider(tmp_path / "b", fails=[7]), parallel=client, retries=0)
        assert_holds(extract(Provider(tmp_path / "b", kills_once=[9]), parallel=client), range(40))
        (left,) = set(client.run(environments).values())
        assert left == ("env",)  # a run's own, which may be large, does not stay
        assert client.submit(worker_env).result() == {"mine": 1}


def environments(dask_worker: Any) -> tuple[str, ...]:
    assert len(_BUILT[dask_worker]) == 1
    return tuple(
        name for name, plugin in dask_worker.plugins.items() if isinstance(plugin, WorkerEnv)
    )


def test_the_longest_are_computed_first(tmp_path: Path) -> None:
    extract(Provider(tmp_path, 60), **SERIAL)
    assert calls(tmp_path)[:3] == ids(49, 48, 47)


def test_readers_see_what_is_there_before_the_end(tmp_path: Path) -> None:
    seen = []

    def look(items: list[int]) -> Any:
        seen.append(len(featcache.open(tmp_path / "cache")))
        return compute(items)

    provider = Provider(tmp_path)
    env = provider.build_env_local()
    compute: Any = env["compute_features"]
    provider.build_env_local = lambda: {**env, "compute_features": look}  # type: ignore[method-assign]
    assert_holds(extract(provider, publish_every_s=1e-6, **SERIAL), range(40))
    assert 0 < seen[-1] < 40
    extract(provider, publish_every_s=1e-6, overwrite=True, **SERIAL)
    assert set(seen[40:]) == {40}  # the old cache stays until the new one is whole


def test_the_next_run_computes_what_is_missing_and_one_bar_counts_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extract(Provider(tmp_path, 10), progressbar=True, **SERIAL)
    capsys.readouterr()
    extract(Provider(tmp_path, 40, fails=[30]), progressbar=True, on_error="skip", retries=0)
    shown = capsys.readouterr().err
    assert "caching cache:  25%" in shown  # it begins with what was there
    assert "40/40" in shown
    assert "MB/s, 1 failed" in shown
    assert max(Counter(calls(tmp_path)).values()) == 1
    assert_holds(featcache.open(tmp_path / "cache"), set(range(40)) - {30})


def test_a_task_whose_worker_died_no_longer_counts() -> None:
    bar = ProgressBar("", 100, 10, [], shown=True)
    bar.update(TaskProgress(1, 20, 5000, 1))
    bar.update(TaskProgress(2, 5, 1000, 0))
    assert bar.bar.n == 35
    bar.drop(1)
    assert bar.bar.n == 15
    bar.end(TaskProgress(2, 7, 2000, 0))
    bar.end(TaskProgress(3, 3, 1000, 1))
    assert bar.bar.n == 20
    bar.bar.close()


# Failures


@pytest.mark.parametrize("parallel", [None, LOCAL])
def test_what_fails_is_tried_again_then_set_aside(tmp_path: Path, parallel: object) -> None:
    provider = Provider(tmp_path, fails=[5, 17], fails_once=[8, 9])
    cache = extract(provider, parallel=parallel, on_error="skip", batch_size=4)
    assert_holds(cache, set(range(40)) - {5, 17})
    tried = Counter(calls(tmp_path))
    assert {id: tried[id] for id in ids(5, 17)} == dict.fromkeys(ids(5, 17), 4)  # with its batch
    assert sorted(line["id"] for line in failures(tmp_path)) == sorted(ids(5, 17))
    assert {line["type"] for line in failures(tmp_path)} == {"ComputingError"}
    assert "cannot compute" in failures(tmp_path)[0]["traceback"]
    cache = extract(Provider(tmp_path), **SERIAL)  # the next call tries it again
    assert_holds(cache, range(40))
    assert not failures(tmp_path)


@pytest.mark.parametrize("parallel", [None, LOCAL])
def test_a_failure_ends_the_run_which_keeps_what_it_has(tmp_path: Path, parallel: object) -> None:
    with pytest.raises(
        ComputeError, match="'spk2/utt-5' failed with ComputingError: cannot compute 5"
    ) as caught:
        extract(Provider(tmp_path, fails=[5]), parallel=parallel, batch_size=4, retries=1)
    cache = featcache.open(tmp_path / "cache")
    assert not cache.complete
    assert f"{len(cache)} of 40 utterances are in cache" in caught.value.__notes__[-1]
    assert len(cache) > 0
    before = calls(tmp_path)
    assert_holds(extract(Provider(tmp_path), **SERIAL), range(40))
    assert not set(cache) & set(calls(tmp_path)[len(before) :])


def test_arrays_that_cannot_be_stored_end_the_run(tmp_path: Path) -> None:
    class Wrong(Provider):
        def build_env_local(self) -> dict[str, object]:
            compute: Any = lambda items: [{"id": f"spk0/utt-{items[0]}", "fbank": np.zeros((1, 2))}]  # noqa: E731
            return {
                "dataset": [0, 3],
                "ids": ["spk0/utt-0", "spk0/utt-3"],
                "compute_features": compute,
            }

    with pytest.raises(FeatureError, match="'units'"):
        extract(Wrong(tmp_path), **SERIAL)


def test_an_old_cache_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    extract(Provider(tmp_path, 10), **SERIAL)
    with pytest.raises(ComputeError) as caught:
        extract(Provider(tmp_path, 10, fails=[2]), overwrite=True, retries=0, **SERIAL)
    assert "is as it was" in caught.value.__notes__[0]
    assert_holds(featcache.open(tmp_path / "cache"), range(10))
    before = len(calls(tmp_path))
    assert_holds(extract(Provider(tmp_path, 10), overwrite=True, **SERIAL), range(10))
    assert len(calls(tmp_path)) - before == 10 - 7  # 9 to 3 were computed before 2 failed


def test_resume_false_computes_an_incomplete_cache_from_the_start(tmp_path: Path) -> None:
    with pytest.raises(ComputeError):
        extract(Provider(tmp_path, 10, fails=[2]), retries=0, **SERIAL)
    before = len(calls(tmp_path))
    assert_holds(extract(Provider(tmp_path, 10), resume=False, **SERIAL), range(10))
    assert len(calls(tmp_path)) - before == 10


# What it is given


class Env(Provider):
    """A provider of a given environment."""

    def __init__(self, folder: Path, **env: Any) -> None:
        super().__init__(folder)
        self.env = env

    def build_env_local(self) -> Any:
        return {
            key: value
            for key, value in {**super().build_env_local(), **self.env}.items()
            if value != "left out"
        }


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"dataset": "left out"}, "the environment needs 'dataset'; it has 'compute_features'"),
        (
            {"compute_features": "left out"},
            "the environment needs 'compute_features'; it has 'dataset'",
        ),
        ({"compute_features": 3}, "'compute_features' is a function of a batch, not 3"),
        (
            {"dataset": iter([1])},
            "'dataset' needs a length and items by number, not 'list_iterator'",
        ),
        (
            {"dataset": [1, 2]},
            "ids of 'list' are not known.*put 'ids' into the environment: 2 strings",
        ),
        ({"ids": ["a"]}, r"there are 1 'ids' \('a'\) for the 40 items of the dataset \('Numb"),
        (
            {"ids": ["a", "b", "c", "d", "e"] * 9},
            r"45 'ids' \('a', 'b', 'c' and 42 more\) for the 40",
        ),
        ({"ids": []}, r"there are 0 'ids' \(\) for the 40 items"),
        ({"ids": "ab"}, "'ids' are a list of strings, one for each utterance, not 'ab'"),
        (
            {"lengths": [1, 2]},
            r"lengths are 40 numbers, one for each utterance, not an array of \(2,\)",
        ),
    ],
)
def test_an_environment_that_cannot_work_is_refused(
    tmp_path: Path, env: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        extract(Env(tmp_path, **env))
    assert calls(tmp_path) == []


def test_ids_lengths_and_collate_fn_may_be_given(tmp_path: Path) -> None:
    def compute(batch: torch.Tensor) -> Any:
        assert isinstance(batch, torch.Tensor)
        numbers.extend(batch.tolist())
        return [
            {"id": f"u{n}", "fbank": np.zeros((n, 4)), "units": np.zeros(n, np.int16)}
            for n in batch.tolist()
        ]

    numbers: list[int] = []
    env: dict[str, Any] = {"dataset": [1, 2, 3], "ids": ["u1", "u2", "u3"], "lengths": [5, 7, 6]}
    provider = Env(tmp_path, **env, compute_features=compute, collate_fn=torch.tensor)
    assert len(extract(provider, batch_size=2, **SERIAL)) == 3
    assert numbers == [2, 3, 1]


def test_two_utterances_of_one_id_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DuplicateIdError, match="2 utterances of the id 'a'"):
        extract(Env(tmp_path, dataset=[1, 2], ids=["a", "a"]))


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    class Holding(Provider):
        def build_worker_setup_fn(self) -> Callable[[], Any]:
            return partial(dict, lock=threading.Lock())

    with pytest.raises(
        ConfigError, match=r"cannot be sent build_worker_setup_fn.*: cannot pickle '_thread.lock'"
    ):
        extract(Holding(tmp_path))


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"on_error": "ignore"}, "'raise' or 'skip', not 'ignore'"),
        (
            {"publish_every_s": "5"},
            "publish_every_s is a number of seconds, above 0, or None, not '5'",
        ),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, not 0"),
        ({"retries": -1}, "retries must be an integer of at least 0, not -1"),
        ({"parallel": {"env": "local", "workers": 2}}, "no setting 'workers'"),
    ]
    for settings, message in refused:
        with pytest.raises(ConfigError, match=message) as caught:
            extract(Provider(tmp_path), **settings)
        # of how to go on: the same call would end in the same way
        assert not hasattr(caught.value, "__notes__")


def test_ids_and_lengths_that_are_none_are_refused_before_anything_is_computed(
    tmp_path: Path,
) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"ids": [1.5, 2]}, r"strings or whole numbers, not 1\.5; give str\(id\)"),
        ({"ids": ["a", "b\0"]}, r"utterance id 'b\\x00' is not usable"),
        ({"ids": {"a", "b"}}, "put 'ids' into the environment: 2 strings, one for each utterance"),
        ({"ids": ["a", "b"], "lengths": [1, float("nan")]}, "number 1 is nan"),
    ]
    for given, message in refused:
        with pytest.raises((ConfigError, FeatureError), match=message):
            extract(Env(tmp_path, dataset=[1, 2], **given), **SERIAL)


def test_a_cache_that_is_being_written_is_refused_naming_who_writes(tmp_path: Path) -> None:
    with (
        featcache.CacheWriter(tmp_path / "cache", FEATURES),
        pytest.raises(CacheLockedError, match=r"being written by process \d+ on .* since"),
    ):
        extract(Provider(tmp_path))


# The fingerprint


def test_other_weights_or_code_make_a_cache_stale(tmp_path: Path) -> None:
    def compute(model: torch.nn.Module, items: list[int]) -> Any:
        ones = model(torch.ones(1, 2))
        return [{"id": str(n), "fbank": ones, "units": np.zeros(1, np.int16)} for n in items]

    def other(model: torch.nn.Module, items: list[int]) -> Any:
        return compute(model, [*items])

    model = torch.nn.Linear(2, 4)
    env: dict[str, Any] = {
        "dataset": [0, 1],
        "ids": ["0", "1"],
        "compute_features": partial(compute, model),
    }
    made = extract(Env(tmp_path, **env), **SERIAL).fingerprint
    assert made["model"] == "numbers"
    assert "weights" in made["modules"]["argument 0"]
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(StaleCacheError, match=r"modules\.argument 0\.weights"):
        extract(Env(tmp_path, **env), **SERIAL)
    with torch.no_grad():
        model.weight.sub_(1)
    with pytest.raises(StaleCacheError, match="source"):
        extract(Env(tmp_path, **{**env, "compute_features": partial(other, model)}), **SERIAL)

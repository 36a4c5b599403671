"""Plans of extractions: every utterance in one task, tasks of about the same length, the longest
first.
"""

from __future__ import annotations

import gc
import pickle
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from parallel_helpers import FEATURES, Numbers, Provider
from store_helpers import FINGERPRINT, arrays_of, id_of, make_cache, two_features

import featcache
from featcache import CacheWriter
from featcache.errors import (
    CacheLockedError,
    ComputeError,
    ConfigError,
    CorruptCacheError,
    DuplicateIdError,
)
from featcache.extraction import fill
from featcache.extraction.computation import wanted_batches
from featcache.extraction.datasets import IdNumbers
from featcache.extraction.on_workers import RunSettings, TaskRunner, _some_of
from featcache.extraction.run import check_lengths, cut, digest_of, longest_first
from featcache.format import COLUMNS, PARTS, Journal, part, read_journal
from featcache.interface import Ints
from featcache.samplers import Batches
from featcache.writing import part_writer

pytestmark = pytest.mark.usefixtures("quick_workers")

lengths_lists = st.lists(st.integers(0, 1000) | st.floats(0, 1e6), max_size=200)


def planned(missing: Ints, lengths: NDArray[np.float64] | None, batch_size: int) -> Batches:
    order = longest_first(missing, lengths)
    return wanted_batches(order, len(order), {"batch_size": batch_size})


@given(lengths_lists, st.integers(1, 8), st.integers(1, 100), st.booleans())
def test_every_utterance_is_in_one_task_and_no_task_is_too_long(
    values: list[float], batch_size: int, tasks: int, known: bool
) -> None:
    lengths = np.array(values, float) if known else None
    weights = np.array(values, float) if known else np.ones(len(values))
    missing = np.flatnonzero(np.arange(len(values)) % 3 != 1)
    batches = planned(missing, lengths, batch_size)
    cuts = cut(batches, lengths, tasks)
    assert sorted(batches.items.tolist()) == missing.tolist()
    assert [batch for task in cuts for batch in task] == list(batches)
    assert len(cuts) <= tasks
    assert all(0 < len(batch) <= batch_size for batch in batches)
    share = weights[missing].sum() / tasks
    for task in cuts:
        heavy = [weights[np.array(batch)].sum() for batch in task]
        last = max([number for number, weight in enumerate(heavy) if weight], default=0)
        assert sum(heavy[:last]) <= share * (1 + 1e-9) + 1e-9


@given(lengths_lists.filter(len))
def test_the_longest_come_first_and_equals_in_their_order(values: list[float]) -> None:
    lengths = np.array(values, float)
    order = planned(np.arange(len(values)), lengths, 2).items
    assert order.tolist() == sorted(range(len(values)), key=lambda index: -values[index])
    assert planned(np.arange(len(values)), None, 2).items.tolist() == list(range(len(values)))


def test_nothing_missing_is_no_task() -> None:
    assert cut(planned(np.arange(0), None, 4), None, 10) == []


@given(st.lists(st.lists(st.integers(0, 99), max_size=4).filter(len), max_size=10), st.data())
def test_batches_less_some_utterances_keep_their_order(
    lists: list[list[int]], data: st.DataObject
) -> None:
    batches = Batches.of(lists)
    size = len(batches.items)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), bool)
    left, flags = [], iter(wanted)
    for batch in lists:
        if kept := [index for index in batch if next(flags)]:
            left.append(kept)
    assert list(_some_of(batches, wanted)) == left


def test_a_task_is_sent_as_its_own_utterances_alone() -> None:
    first, *_ = cut(planned(np.arange(100_000), None, 4), None, 100)
    sent = pickle.dumps(first)
    assert len(sent) < 20_000
    assert list(pickle.loads(sent)) == list(first)  # noqa: S301


def write(writer: part_writer.PartWriter, numbers: range) -> None:
    for number in numbers:
        writer.write(id_of(number), arrays_of(number))


def test_what_is_committed_is_not_missing_in_whatever_part_it_is(tmp_path: Path) -> None:
    numbers = IdNumbers([id_of(number) for number in range(40)])
    make_cache(tmp_path, range(10))
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        sealed, dead, alive = (
            part_writer.PartWriter(tmp_path, two_features(), FINGERPRINT) for _ in range(3)
        )
        write(sealed, range(10, 20))
        sealed.close()
        write(dead, range(20, 25))
        dead.commit()
        dead._thread.stop(False)
        for part in dead._under_way.unsealed:
            part.release()  # its lock is free now, as after its process's end
        write(alive, range(30, 35))
        alive.commit()
        assert np.flatnonzero(~numbers.committed(tmp_path)).tolist() == [
            *range(25, 30),
            *range(35, 40),
        ]
        with pytest.raises(CacheLockedError, match=r"is still being written by process \d+ on "):
            writer.recover()
        alive.close()
        writer.recover()
        assert np.flatnonzero(~numbers.committed(tmp_path)).tolist() == [
            *range(25, 30),
            *range(35, 40),
        ]
    with CacheWriter(tmp_path, two_features(), FINGERPRINT, overwrite=True) as writer:
        assert not numbers.committed(tmp_path).any()


def test_what_a_lost_worker_committed_is_read_in_its_own_part_alone(tmp_path: Path) -> None:
    # with ten million utterances stored, a death must not cost reading all of them
    numbers = IdNumbers([id_of(number) for number in range(20)])
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        parts = []
        for start in (0, 10):
            part = part_writer.PartWriter(tmp_path, two_features(), FINGERPRINT)
            write(part, range(start, start + 5))
            assert part.part is not None
            parts.append(part.part)
            part.close()
        columns = tmp_path / PARTS / parts[0] / COLUMNS
        held = columns.read_bytes()
        columns.write_bytes(b"damaged")
        with pytest.raises(CorruptCacheError):
            numbers.committed(tmp_path)
        assert np.flatnonzero(numbers.committed(tmp_path, parts[1:])).tolist() == [*range(10, 15)]
        columns.write_bytes(held)
        writer.recover()


def test_a_part_that_is_sealed_while_it_is_looked_at_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT):
        writer = part_writer.PartWriter(tmp_path, two_features(), FINGERPRINT)
        write(writer, range(3))

        def seal_just_before(cache: Path, directory: str) -> Journal | None:
            writer.close()
            return read_journal(cache, directory)

        monkeypatch.setattr(part, "read_journal", seal_just_before)
        stored = IdNumbers([id_of(number) for number in range(5)]).committed(tmp_path)
        assert stored.tolist() == [True, True, True, False, False]


def test_an_id_that_comes_twice_is_an_error() -> None:
    for ids in ([], ["a"], ["a", "b"]):
        IdNumbers(ids)
    with pytest.raises(DuplicateIdError, match="2 utterances of the id 'b'"):
        IdNumbers(["a", "b", "c", "b"])


@pytest.mark.parametrize("lengths", [[1.0], [1.0, float("nan")], ["a", "b"], [[1], [2]]])
def test_lengths_are_one_number_for_each_utterance(lengths: object) -> None:
    with pytest.raises(ConfigError, match=r"lengths are .*numbers, one for each utterance"):
        check_lengths(lengths, 2)


def test_what_a_failing_task_stored_is_committed_before_the_task_can_be_taken_back(
    tmp_path: Path,
) -> None:
    env: dict[str, Any] = Provider(tmp_path, 5, fails=[3]).build_env_local()
    path, directory = tmp_path / "cache", tmp_path / "cache" / "extraction-0"
    with CacheWriter(path, FEATURES):
        directory.mkdir()
        declared = {feature.name: feature for feature in FEATURES}
        ids = digest_of(Numbers(5).ids)
        open_part = partial(part_writer.PartWriter, path, declared, {})
        settings = RunSettings(
            path, open_part, directory, ids, skip_failures=False, retries=0, seal_every_s=None
        )
        runner = TaskRunner(settings, lambda: (env, None))
        with pytest.raises(ComputeError, match="cannot compute 3"):
            runner.run(0, planned(np.arange(5), None, 1), lambda progress: None)
        assert sorted(part.committed(path)) == sorted(Numbers(5).ids[:3])
        runner.part.finish()
        shutil.rmtree(directory)


class Encoding(featcache.EnvironmentProvider):
    """An environment with a model, which nothing else holds."""

    def __init__(self) -> None:
        self.built: list[weakref.ref[torch.nn.Module]] = []

    def build_env_local(self) -> dict[str, object]:
        model = torch.nn.Linear(2, 2).eval()
        self.built.append(weakref.ref(model))

        def compute(items: list[int]) -> list[dict[str, object]]:
            return [{"id": str(item), "x": model(torch.ones(3, 2))} for item in items]

        return {"dataset": range(9), "ids": [*"012345678"], "compute_features": compute}

    def build_worker_setup_fn(self) -> Callable[[], dict[str, object]]:
        return dict


@pytest.mark.parametrize("check", ["probe", None])
def test_the_driver_has_let_go_of_its_model_when_workers_compute(
    tmp_path: Path, check: Literal["probe"] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = Encoding()

    def computing(*args: object) -> None:
        gc.collect()
        assert [each() for each in provider.built] == [None]
        raise KeyboardInterrupt

    monkeypatch.setattr(fill, "compute_on_workers", computing)
    declared = [featcache.FeatureStorageConfig("x")]
    with pytest.raises(KeyboardInterrupt):
        featcache.extract(
            provider, tmp_path / "x", declared, parallel={"n_workers": 1}, check=check
        )

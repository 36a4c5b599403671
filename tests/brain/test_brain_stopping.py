"""A caching run that is stopped or fails keeps what it has, and the next one goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import speechbrain as sb
import torch
from brain_helpers import (
    Audio,
    Recipe,
    assert_holds,
    expected,
    failed,
    failures,
    make_brain,
    make_dataset,
)

from featcache import FeatureCacheMixin, FeatureStorage
from featcache.errors import ComputeError, FeatureError

# Stopping and going on


def test_a_run_that_fails_keeps_what_it_has_and_the_next_one_goes_on(
    storage: FeatureStorage,
) -> None:
    brain, dataset = make_brain(storage), make_dataset()
    brain.bad = frozenset(["spk/utt-5"])
    with pytest.raises(
        ComputeError, match=r"'spk/utt-5' failed with ValueError: cannot compute spk/utt-5"
    ) as caught:
        brain.cache_features(dataset, loader_kwargs={"batch_size": 2}, check=None)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "5 of 10 utterances are in cache" in caught.value.__notes__[0]
    cache = storage.cache("train")
    assert (len(cache), cache.complete) == (5, False)
    brain.bad = frozenset()
    brain.calls.clear()
    cache = brain.cache_features(dataset, loader_kwargs={"batch_size": 2}, check=None)
    assert [id for batch in brain.calls for id in batch] == [
        f"spk/utt-{number}" for number in range(5, 10)
    ]
    assert cache.complete
    assert_holds(cache, expected(brain, dataset))


def test_ctrl_c_keeps_what_was_written_and_says_how_to_go_on(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupted(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            if batch.id == ["spk/utt-3"]:
                raise KeyboardInterrupt
            return super().compute_features(batch, stage)

    brain = make_brain(storage, Interrupted)
    with caplog.at_level(logging.WARNING, "featcache"), pytest.raises(KeyboardInterrupt):
        brain.cache_features(make_dataset())
    assert "stopped: 3 of 10 utterances are in cache" in caplog.text
    assert "goes on from there" in caplog.text
    cache = storage.cache("train")
    assert (len(cache), cache.complete) == (3, False)


def test_resume_false_computes_an_incomplete_cache_from_the_start(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.bad = frozenset(["spk/utt-5"])
    with pytest.raises(ComputeError):
        brain.cache_features(make_dataset(), check=None)
    brain.bad = frozenset()
    brain.calls.clear()
    cache = brain.cache_features(make_dataset(), resume=False, check=None)
    assert len(brain.calls) == 10
    assert cache.complete
    brain.cache_features(make_dataset(), resume=False, check=None)
    assert len(brain.calls) == 10
    other = make_brain(storage, seed=1)
    assert other.cache_features(make_dataset(), resume=False, overwrite=True, check=None).complete


def test_the_old_cache_stays_until_an_overwrite_is_through(storage: FeatureStorage) -> None:
    old, new = make_brain(storage), make_brain(storage, seed=1)
    dataset = make_dataset()
    old.cache_features(dataset, check=None)
    new.bad = frozenset(["spk/utt-5"])
    with pytest.raises(ComputeError) as caught:
        new.cache_features(dataset, overwrite=True, check=None)
    assert "is as it was" in caught.value.__notes__[0]
    assert storage.cache("train").complete
    assert_holds(storage.cache("train"), expected(old, dataset))
    new.bad = frozenset()
    new.calls.clear()
    assert_holds(new.cache_features(dataset, overwrite=True, check=None), expected(new, dataset))
    assert len(new.calls) == 5


def test_a_debug_run_caches_a_few_batches_as_incomplete(storage: FeatureStorage) -> None:
    brain = make_brain(storage, debug=True, debug_batches=2)
    brain.step = 1
    cache = brain.cache_features(make_dataset(), loader_kwargs={"batch_size": 3})
    assert (len(cache), cache.complete) == (6, False)
    assert make_brain(storage).cache_features(make_dataset(6)).complete
    cache = make_brain(storage).cache_features(make_dataset())
    assert (len(cache), cache.complete) == (10, True)
    brain.cache_features(make_dataset(), overwrite=True)
    assert storage.cache("train").complete


# Failures


@pytest.mark.parametrize("workers", [0, 2])
def test_failing_utterances_are_skipped_recorded_and_tried_again(
    storage: FeatureStorage, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    audio = Audio()
    brain, dataset = make_brain(storage), make_dataset(10, audio)
    brain.bad = frozenset(["spk/utt-2"])
    audio.missing = {"spk/utt-7"}
    loader_kwargs = {"batch_size": 4, "num_workers": workers}
    cache = brain.cache_features(dataset, loader_kwargs=loader_kwargs, on_error="skip")
    assert (len(cache), cache.complete) == (8, True)
    assert "2 utterances failed, see" in caplog.text
    assert [(line["id"], line["type"], line["error"]) for line in failures(storage)] == [
        ("spk/utt-2", "ValueError", "cannot compute spk/utt-2"),
        ("spk/utt-7", "FileNotFoundError", "no audio of spk/utt-7"),
    ]
    assert "compute_features" in failures(storage)[0]["traceback"]
    brain.bad = frozenset()
    with pytest.raises(ComputeError, match="spk/utt-7"):
        brain.cache_features(dataset, loader_kwargs=loader_kwargs)
    assert [line["id"] for line in failures(storage)] == ["spk/utt-7"]
    audio.missing = set()
    cache = brain.cache_features(dataset, loader_kwargs=loader_kwargs)
    assert cache.complete
    assert not (cache.path / "work-failures.jsonl").exists()
    assert_holds(cache, expected(brain, dataset))


def test_what_failed_is_left_out_from_then_on_and_that_is_told(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    brain = make_brain(storage)
    brain.bad = frozenset(["spk/utt-2"])
    cache = brain.cache_features(make_dataset(5), on_error="skip", check=None)
    assert (failed(cache), cache.complete) == (["spk/utt-2"], True)
    brain.calls.clear()
    caplog.clear()
    brain.cache_features(make_dataset(5), on_error="skip", check=None)
    (text,) = [record.getMessage() for record in caplog.records if record.name == "featcache"]
    assert "1 utterance failed earlier and is left out: 'spk/utt-2', see" in text
    assert "on_error='raise' tries again" in text
    brain.bad = frozenset(["spk/utt-7"])
    # others are computed, and it is left out again
    cache = brain.cache_features(make_dataset(), on_error="skip", check=None)
    assert sorted({id for batch in brain.calls for id in batch}) == [
        f"spk/utt-{number}" for number in range(5, 10)
    ]
    assert (failed(cache), cache.complete) == (["spk/utt-2", "spk/utt-7"], True)
    assert sorted(line["id"] for line in failures(storage)) == ["spk/utt-2", "spk/utt-7"]
    brain.bad = frozenset()
    cache = brain.cache_features(make_dataset(), check=None)
    assert (failed(cache), len(cache), cache.complete) == ([], 10, True)


def test_an_error_names_the_first_ten_of_a_batch(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.bad = frozenset(["spk/utt-3"])
    with pytest.raises(
        ComputeError,
        match=r"'spk/utt-9' and 2 more failed with ValueError: cannot compute spk/utt-3",
    ):
        brain.cache_features(make_dataset(12), loader_kwargs={"batch_size": 12}, retries=0)


@pytest.mark.parametrize(
    ("retries", "named"), [(0, "'spk/utt-2', 'spk/utt-3'"), (1, "features of 'spk/utt-3'")]
)
def test_a_loading_error_names_the_batch_or_what_failed_again(
    storage: FeatureStorage, retries: int, named: str
) -> None:
    audio = Audio()
    audio.missing = {"spk/utt-3"}
    with pytest.raises(ComputeError, match=f"{named} failed with FileNotFoundError: no audio"):
        make_brain(storage).cache_features(
            make_dataset(10, audio), loader_kwargs={"batch_size": 2}, retries=retries
        )


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_utterance_that_fails_is_tried_again(storage: FeatureStorage, batch_size: int) -> None:
    class FailsTwice(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            tries.append("spk/utt-5" in batch.id)
            if tries[-1] and sum(tries) <= 2:
                raise ValueError("the file server is busy")
            return super().compute_features(batch, stage)

    tries: list[bool] = []
    brain, dataset = make_brain(storage, FailsTwice), make_dataset()
    cache = brain.cache_features(dataset, loader_kwargs={"batch_size": batch_size}, retries=2)
    assert_holds(cache, expected(brain, dataset))
    assert cache.complete


def test_readers_see_what_is_there_before_the_end_on_request(storage: FeatureStorage) -> None:
    class Looking(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            seen.append((len(storage.cache("train")), storage.cache("train").complete))
            return super().compute_features(batch, stage)

    seen: list[tuple[int, bool]] = []
    make_brain(storage, Looking).cache_features(make_dataset(), publish_every_s=1e-6)
    assert seen == [(number, False) for number in range(10)]
    assert storage.cache("train").complete
    seen.clear()
    make_brain(storage, Looking).cache_features(
        make_dataset(), publish_every_s=1e-6, overwrite=True
    )
    assert set(seen) == {(10, True)}  # the old cache stays until the new one is whole


def test_arrays_that_cannot_be_stored_are_an_error_or_a_recorded_failure(
    storage: FeatureStorage,
) -> None:
    class Broken(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            utterances = super().compute_features(batch, stage)
            for utterance in utterances:
                if utterance["id"] == "spk/utt-1":
                    utterance["ssl"] = utterance["ssl"] / 0
            return utterances

    brain = make_brain(storage, Broken)
    with pytest.raises(FeatureError, match=r"utterance 'spk/utt-1', feature 'ssl'.*not finite"):
        brain.cache_features(make_dataset())
    cache = brain.cache_features(make_dataset(), loader_kwargs={"batch_size": 4}, on_error="skip")
    assert len(cache) == 9
    assert [line["id"] for line in failures(storage)] == ["spk/utt-1"]


def test_when_every_utterance_fails_it_is_an_error_also_when_failures_are_skipped(
    storage: FeatureStorage,
) -> None:
    class Misspelt(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            return [{"id": id, "sll": torch.zeros(1), "units": torch.zeros(1)} for id in batch.id]

    with pytest.raises(FeatureError, match=r"'sll' is not declared; did you mean 'ssl'\?"):
        make_brain(storage, Misspelt).cache_features(make_dataset())
    says = r"all 10 utterances failed, see .*work-failures.*'spk/utt-0' with FeatureError: .*'sll'"
    for _ in range(2):
        with pytest.raises(ComputeError, match=says):
            make_brain(storage, Misspelt).cache_features(make_dataset(), on_error="skip")
    assert len(failures(storage)) == 10


def test_compute_features_may_be_a_generator(storage: FeatureStorage) -> None:
    class Lazy(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            for utterance in super().compute_features(batch, stage):
                assert not torch.is_grad_enabled()
                yield utterance

    assert len(make_brain(storage, Lazy).cache_features(make_dataset())) == 10


def test_a_class_without_compute_features_says_so(storage: FeatureStorage) -> None:
    class Empty(FeatureCacheMixin, sb.Brain):  # type: ignore[misc]
        pass

    with pytest.raises(ComputeError, match=r"Empty has to define compute_features\(batch, stage\)"):
        make_brain(storage, Empty).cache_features(make_dataset())

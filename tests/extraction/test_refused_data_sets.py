"""Data sets and results that do not fit are refused, or done rightly, and the words say why."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import speechbrain as sb
import torch
from brain_helpers import (
    COLLATED,
    Audio,
    Hidden,
    Recipe,
    Stream,
    assert_holds,
    expected,
    make_brain,
    make_dataset,
)
from parallel_helpers import FEATURES, Numbers, Provider, calls
from parallel_helpers import extract as extract_numbers
from speechbrain.dataio.dataset import DynamicItemDataset
from torch.utils.data import DataLoader

import featcache
from featcache import FeatureStorage, unpad
from featcache.errors import (
    CacheError,
    CacheLockedError,
    ConfigError,
    CorruptCacheError,
    FeatcacheError,
)

TRAIN, VALID, TEST = sb.Stage.TRAIN, sb.Stage.VALID, sb.Stage.TEST


def numbered(start: int, stop: int, audio: Audio | None = None) -> Any:
    """A data set of the utterances from `start` to before `stop`."""
    made = make_dataset(stop, audio)
    return made.filtered_sorted(key_test={"id": lambda id: int(id.rsplit("-", 1)[1]) >= start})


# What is given


def says(*parts: str) -> Callable[[BaseException], None]:
    def check(error: BaseException) -> None:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        for part in parts:
            assert part in text

    return check


GIVEN: list[tuple[str, Any, dict[str, Any], type[FeatcacheError], tuple[str, ...]]] = [
    (
        "a filter that leaves nothing",
        numbered(3, 3),
        {},
        ConfigError,
        ("data set", "is empty", "what filters it"),
    ),
    ("an empty list", [], {}, ConfigError, ("'list'", "is empty")),
    (
        "a loader of nothing",
        DataLoader(numbered(3, 3), sampler=[]),
        {},
        ConfigError,
        ("is empty",),
    ),
    (
        "an empty stream",
        Stream([]),
        COLLATED,
        ConfigError,
        ("data set is empty", "not one utterance"),
    ),
    (
        "a generator",
        (item for item in [1]),
        {},
        ConfigError,
        ("'generator'", "only once", "__getitem__", "a list"),
    ),
    ("an iterator", iter([1]), {}, ConfigError, ("'list_iterator'", "only once")),
    ("a file name", "train.csv", {}, ConfigError, ("not 'str'", "items by number")),
    ("a path", Path("train.csv"), {}, ConfigError, ("not 'PosixPath'", "items by number")),
    ("a dict", {"utt-1": 1}, {}, ConfigError, ("not 'dict'", "items by number")),
    ("nothing", None, {}, ConfigError, ("not 'NoneType'", "items by number")),
    (
        "a misspelt argument",
        make_dataset(2),
        {"batchsize": 4},
        ConfigError,
        ("'batchsize'", "'batch_size'"),
    ),
]


@pytest.mark.parametrize(
    ("source", "loader_kwargs", "kind", "parts"),
    [row[1:] for row in GIVEN],
    ids=[row[0] for row in GIVEN],
)
def test_what_is_no_data_set_or_empty_is_refused(
    storage: FeatureStorage,
    source: Any,
    loader_kwargs: dict[str, Any],
    kind: type[FeatcacheError],
    parts: tuple[str, ...],
) -> None:
    with pytest.raises(kind) as caught:
        make_brain(storage).cache_features(source, loader_kwargs=loader_kwargs)
    says(*parts)(caught.value)
    assert (
        not (storage.path("train") / "featcache.json").exists()
        or not storage.cache("train").complete
    )


def test_a_stream_that_gives_nothing_any_more_is_refused(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(3))
    with pytest.raises(ConfigError, match="data set is empty: not one utterance came of it"):
        brain.cache_features(Stream([]), loader_kwargs=COLLATED)
    assert (len(storage.cache("train")), storage.cache("train").complete) == (3, True)


def test_an_empty_data_set_of_extract_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\('Numbers'\) is empty; look at what filters it"):
        extract_numbers(Provider(tmp_path, 0), parallel=None)
    assert not (tmp_path / "cache").exists()


def test_hparams_without_a_storage_say_what_they_have(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.hparams.feature_storage = {"root": "features", "features": []}  # `!new:` was forgotten
    with pytest.raises(
        ConfigError,
        match=r"'feature_storage' is a plain dict: in YAML write feature_storage: !new:f",
    ):
        brain.cache_features(make_dataset(1))
    del brain.hparams.feature_storage
    with pytest.raises(ConfigError, match=r"give storage=, .* they have none, only 'sample_rate'"):
        brain.cache_features(make_dataset(1))
    del brain.hparams
    with pytest.raises(ConfigError, match=r"give storage=, .*; there are no hparams"):
        brain.cache_features(make_dataset(1))


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"on_error": "ignore"}, ("on_error is 'raise' or 'skip', not 'ignore'",)),
        ({"retries": -1}, ("retries",)),
        ({"publish_every_s": 0}, ("publish_every_s",)),
        ({"parallel": {"env": "slrum"}}, ("'slrum'", "did you mean 'slurm'")),
        ({"parallel": {"env": "local", "n_worker": 2}}, ("'n_worker'", "n_workers")),
        ({"parallel": {"env": "local", "n_workers": 0}}, ("n_workers", "not 0")),
        ({"parallel": {"env": "local", "n_workers": "2"}}, ("n_workers", "not '2'")),
        ({"parallel": "local"}, ("'local'",)),
    ],
)
def test_settings_that_cannot_work_are_named(
    storage: FeatureStorage, settings: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_brain(storage).cache_features(make_dataset(1), **settings)
    says(*parts)(caught.value)


def test_a_job_queue_that_is_not_here_is_named(
    storage: FeatureStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dask_jobqueue")
    monkeypatch.setenv("PATH", str(storage.root))
    slurm = {"env": "slurm", "n_workers": 1, "options": {"cores": 1, "memory": "1GB"}}
    with pytest.raises(
        ConfigError,
        match=r"no command 'sbatch' here; run this on a machine of the cluster, or .*'loc",
    ):
        make_brain(storage).cache_features(make_dataset(1), parallel=slurm)


# Another data set than the cache's


def test_a_validation_set_whose_stage_was_forgotten_stays_out_of_the_training_cache(
    storage: FeatureStorage,
) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(6))
    brain.calls.clear()
    with pytest.raises(ConfigError) as caught:
        brain.cache_features(numbered(6, 9), check=None)
    says(
        "/train'", "is complete", "'spk/utt-6', 'spk/utt-7'", "'spk/utt-0'", "stage=", "append=True"
    )(caught.value)
    assert brain.calls == []
    assert_holds(storage.cache("train"), expected(brain, make_dataset(6)))
    view = brain.cache_features(numbered(6, 9), append=True)
    assert view.complete
    assert_holds(view, expected(brain, numbered(6, 9)))
    assert_holds(featcache.open(view.path), expected(brain, make_dataset(9)))


def test_two_test_sets_of_one_stage_are_told_apart(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(3), TEST)
    with pytest.raises(
        ConfigError, match=r"/test'.*another split than 'test'\? Give its stage= or split="
    ):
        brain.cache_features(numbered(3, 6), TEST)
    brain.cache_features(numbered(3, 6), TEST, split="test-other")
    assert len(storage.cache("test-other")) == 3


def test_utterances_of_another_split_are_told_by_its_name(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    brain = make_brain(storage)
    # the validation set, its stage forgotten, before there was a training cache
    brain.cache_features(numbered(3, 6), check=None)
    assert "split 'valid'" not in caplog.text
    assert len(brain.cache_features(numbered(4, 9), VALID, check=None)) == 5
    told = "split 'valid' gets utterances that "
    assert caplog.text.count(told) == 1
    assert "/train' has, too (2 of 5): 'spk/utt-4', 'spk/utt-5'; " in caplog.text
    brain.calls.clear()
    assert len(brain.cache_features(numbered(4, 9), VALID, check=None)) == 5
    assert (brain.calls, caplog.text.count(told)) == ([], 1)  # nothing is added


def test_a_storage_with_other_features_below_the_same_root_is_no_split(
    storage: FeatureStorage,
) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(3))
    (storage.root / "broken").mkdir()
    (storage.root / "broken" / "featcache.json").write_text("{")
    one = FeatureStorage(storage.root, [storage.features["ssl"]])

    class One(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            return [
                {key: part[key] for key in ("id", "ssl")}
                for part in super().compute_features(batch, stage)
            ]

    assert make_brain(one, One).cache_features(make_dataset(3), split="ssl-alone").complete


@pytest.mark.parametrize("hide", [Hidden, Stream])
def test_a_data_set_without_ids_is_compared_by_what_is_in_it(
    storage: FeatureStorage, hide: Any
) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(4))
    with pytest.raises(
        ConfigError, match=r"shares no utterance with cache .*/train'.*'spk/utt-4'.*append=True"
    ):
        brain.cache_features(hide(numbered(4, 8)), loader_kwargs=COLLATED)
    brain.calls.clear()
    # as many, two of them new
    view = brain.cache_features(hide(numbered(2, 6)), loader_kwargs=COLLATED)
    assert sorted({id for batch in brain.calls for id in batch}) == ["spk/utt-4", "spk/utt-5"]
    assert_holds(view, expected(brain, numbered(2, 6)))
    assert_holds(featcache.open(view.path), expected(brain, make_dataset(6)))


def test_an_iterable_that_has_grown_is_read_to_its_end(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    brain = make_brain(storage)
    brain.cache_features(Stream(make_dataset(5)), loader_kwargs=COLLATED)
    assert "shows no ids" not in caplog.text  # nothing to compare them with
    brain.calls.clear()
    assert brain.cache_features(Stream(make_dataset(5)), loader_kwargs=COLLATED).complete
    assert brain.calls == []
    assert "the data set shows no ids: all of it is loaded" in caplog.text
    assert "give it an attribute `ids`" in caplog.text
    cache = brain.cache_features(Stream(make_dataset(8)), loader_kwargs=COLLATED)
    assert cache.complete
    assert_holds(cache, expected(brain, make_dataset(8)))


class Unnamed(Recipe):
    """Knows the utterances by what is in them: neither data set nor batches name them."""

    def compute_features(self, batch: Any, stage: Any) -> Any:
        ids = [f"utt-{int(number)}" for number in batch]
        self.calls = [*getattr(self, "calls", []), ids]
        return [{"id": id, "ssl": torch.zeros(1, 4), "units": torch.zeros(1).long()} for id in ids]


def test_batches_without_ids_add_nothing_to_a_complete_cache_unasked(
    storage: FeatureStorage,
) -> None:
    brain = make_brain(storage, Unnamed)
    assert brain.cache_features([0, 1, 2]).complete
    assert brain.cache_features(
        [2, 1, 0]
    ).complete  # computed again, as there is no other way to see what they are
    assert len(brain.calls) == 6
    with pytest.raises(ConfigError) as caught:
        brain.cache_features([0, 1, 2, 3])
    says("/train'", "is complete without 'utt-3'", "an attribute `ids`", "append=True")(
        caught.value
    )
    assert (len(storage.cache("train")), storage.cache("train").complete) == (3, True)
    assert sorted(brain.cache_features([0, 1, 2, 3], append=True)) == [
        "utt-0",
        "utt-1",
        "utt-2",
        "utt-3",
    ]


def test_utterances_that_are_not_in_the_data_set_are_told(
    storage: FeatureStorage, caplog: pytest.LogCaptureFixture
) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(7))
    brain.cache_features(make_dataset(7))
    assert "holds 7" not in caplog.text
    view = brain.cache_features(make_dataset(6))
    assert "/train' holds 7 utterances, 1 of them not in this data set: 'spk/utt-6'" in caplog.text
    assert (len(view), len(featcache.open(view.path))) == (6, 7)
    assert "spk/utt-6" not in view


# Ids


class Arrow(list[dict[str, Any]]):
    """Rows by number, as a `datasets.Dataset` has them."""


@pytest.mark.parametrize("batch_size", [1, 3])
def test_whole_numbers_are_ids(storage: FeatureStorage, batch_size: int) -> None:
    rows = Arrow({"frames": 3 + number} for number in range(5))
    dataset = DynamicItemDataset.from_arrow_dataset(rows, output_keys=["id", "frames"])

    class Numbered(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            self.calls = [*getattr(self, "calls", []), batch.id]
            frames = batch.frames.tolist()
            ssl, units = torch.ones(len(frames), 9, 4), torch.ones(len(frames), 9).long()
            return unpad(batch.id, frames, {"ssl": ssl, "units": units})

    brain = make_brain(storage, Numbered)
    cache = brain.cache_features(dataset, loader_kwargs={"batch_size": batch_size}, check=None)
    assert (sorted(cache), cache.complete) == (["0", "1", "2", "3", "4"], True)
    assert cache.lengths("ssl", ids=["4", "0"]).tolist() == [7, 3]
    brain.calls.clear()
    brain.cache_features(dataset, check=None)
    assert brain.calls == []
    assert len(brain.cache_features(Hidden(dataset), loader_kwargs=COLLATED, check=None)) == 5


def test_whole_numbers_are_ids_of_extract_too(tmp_path: Path) -> None:
    class Counted(Provider):
        def build_env_local(self) -> dict[str, object]:
            env = super().build_env_local()
            dataset, compute = env["dataset"], env["compute_features"]
            assert isinstance(dataset, Numbers)
            assert callable(compute)
            numbers = {id: number for number, id in enumerate(dataset.ids)}

            def counted(items: list[int]) -> Any:
                return [{**part, "id": np.int64(numbers[part["id"]])} for part in compute(items)]

            size = len(dataset)
            return {
                "dataset": list(range(size)),
                "ids": torch.arange(size),
                "compute_features": counted,
            }

    cache = extract_numbers(Counted(tmp_path, 12), parallel=None)
    assert sorted(cache, key=int) == [str(number) for number in range(12)]


# What compute_features returns


@pytest.mark.parametrize(
    ("result", "parts"),
    [
        (lambda batch: None, ("a list of dicts, one per utterance, not None",)),
        (lambda batch: {"ssl": batch.sig.data}, ("dicts with the key 'id'",)),
        (lambda batch: [batch.sig.data], ("dicts with the key 'id', not of 'Tensor'",)),
        (lambda batch: [], ("0 dicts for 'spk/utt-0' instead of one",)),
        (
            lambda batch: [{"id": "other"}],
            ("'other', which is not in the batch", "'spk/utt-0'"),
        ),
        (
            lambda batch: [{"id": "spk/utt-0"}] * 2,
            ("2 dicts for 'spk/utt-0' instead of one",),
        ),
        (
            lambda batch: [{"id": "spk/utt-0", "ssl": torch.zeros(1, 4)}],
            ("'spk/utt-0'", "'units' is missing"),
        ),
        (
            lambda batch: [
                {"id": "spk/utt-0", "ssk": torch.zeros(1, 4), "units": torch.zeros(1).long()}
            ],
            ("'spk/utt-0'", "'ssk' is not declared", "'ssl'"),
        ),
        (
            lambda batch: unpad(batch.id, torch.ones(1), {"ssl": torch.zeros(1, 3, 4)}),
            ("must be frames", "relative"),
        ),
    ],
)
def test_a_result_that_does_not_fit_is_explained(
    storage: FeatureStorage, result: Any, parts: tuple[str, ...]
) -> None:
    class Wrong(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            return result(batch)

    with pytest.raises(FeatcacheError) as caught:
        make_brain(storage, Wrong).cache_features(make_dataset(2))
    says(*parts)(caught.value)


def test_padding_that_was_left_in_is_warned_of(storage: FeatureStorage) -> None:
    class Uncut(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            ssl, units = batch.sig.data.unfold(1, 10, 10)[:, :, :4], torch.zeros(3).long()
            return [{"id": id, "ssl": ssl[row], "units": units} for row, id in enumerate(batch.id)]

    brain, batches = make_brain(storage, Uncut), {"batch_size": 4}
    with pytest.warns(UserWarning, match=r"'spk/utt-0' have \d+ frames of feature 'ssl'.*unpad"):
        brain.cache_features(make_dataset(8), loader_kwargs=batches, check=None)
    brain.cache_features(make_dataset(8), VALID, check=None)  # one by one there is no padding
    cut = make_brain(storage)
    cut.cache_features(make_dataset(8), TEST, loader_kwargs=batches, check=None)


# Runs that fail or are stopped


def test_a_batch_too_large_for_the_memory_is_taken_one_by_one(storage: FeatureStorage) -> None:
    class SmallMemory(Recipe):
        def compute_features(self, batch: Any, stage: Any) -> Any:
            if len(batch.id) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().compute_features(batch, stage)

    brain = make_brain(storage, SmallMemory)
    cache = brain.cache_features(make_dataset(4), loader_kwargs={"batch_size": 4})
    assert cache.complete
    assert_holds(cache, expected(brain, make_dataset(4)))


def test_another_writer_is_named(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    with (
        storage.writer("train"),
        pytest.raises(CacheLockedError, match=r"being written by process \d+"),
    ):
        brain.cache_features(make_dataset(2))


def test_a_cache_that_has_lost_a_file_is_not_taken_for_complete(storage: FeatureStorage) -> None:
    brain = make_brain(storage)
    brain.cache_features(make_dataset(2))
    container = next(
        path for path in storage.path("train").glob("parts/*/*") if path.name.startswith("ssl")
    )
    container.unlink()
    with pytest.raises(CorruptCacheError, match=container.name):
        brain.cache_features(make_dataset(2))


# Caches that cannot be written to


@pytest.fixture
def read_only(storage: FeatureStorage, small_disk: Path) -> FeatureStorage:
    """A storage with a cache of four utterances, which nobody can write to."""
    make_brain(storage).cache_features(make_dataset(4))
    shutil.copytree(storage.root, small_disk, dirs_exist_ok=True)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    return FeatureStorage(small_disk, storage.features)


def test_a_read_only_cache_is_used_and_says_what_it_lacks(read_only: FeatureStorage) -> None:
    brain = make_brain(read_only)
    assert len(brain.cache_features(make_dataset(4))) == 4
    view = brain.cache_features(make_dataset(3))
    assert (len(view), len(featcache.open(view.path))) == (3, 4)
    assert len(brain.cache_features(Hidden(make_dataset(4)), loader_kwargs=COLLATED)) == 4
    with pytest.raises(CacheError) as caught:
        brain.cache_features(make_dataset(5))
    says("/train'", "lacks 'spk/utt-4'", "cannot be written to", "copy it", "what it lacks out of")(
        caught.value
    )
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(CacheError, match=r"/valid' cannot be made; give another directory"):
        brain.cache_features(numbered(4, 6), VALID)


# extract, which has a path and no splits


def numbers_only(provider: Provider, path: Path, **settings: Any) -> Any:
    return featcache.extract(
        provider, path, FEATURES, progressbar=False, **{"check": None, **settings}
    )


def test_extract_refuses_another_data_set_but_knows_no_splits(tmp_path: Path) -> None:
    class Others(Provider):
        def build_env_local(self) -> dict[str, object]:
            env = super().build_env_local()
            env["dataset"] = others = Numbers(self.size)
            others.ids = [f"other-{id}" for id in others.ids]
            env["compute_features"].ids = others.ids  # type: ignore[attr-defined]
            return env

    one, other = Provider(tmp_path / "one", 4), Others(tmp_path / "other", 4)
    assert len(numbers_only(one, tmp_path / "layer-6")) == 4
    assert len(numbers_only(one, tmp_path / "layer-9")) == 4  # the same utterances, beside it
    with pytest.raises(
        ConfigError,
        match=r"shares no utterance with cache .*/layer-6'.*'other-spk0/utt-0'.*append=T",
    ):
        numbers_only(other, tmp_path / "layer-6")
    assert calls(tmp_path / "other") == []
    view = numbers_only(other, tmp_path / "layer-6", append=True)
    assert (len(view), len(featcache.open(view.path))) == (4, 8)


def test_extract_leaves_out_what_failed_and_tries_it_again_when_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Provider(tmp_path, 6, fails=[2])
    cache = numbers_only(failing, tmp_path / "cache", on_error="skip", retries=0)
    assert (len(cache), cache.complete, featcache.open(cache.path).failed) == (
        5,
        True,
        ("spk2/utt-2",),
    )
    before = len(calls(tmp_path))
    grown = numbers_only(
        Provider(tmp_path, 8, fails=[2]), tmp_path / "cache", on_error="skip", retries=0
    )
    assert (len(grown), grown.complete, featcache.open(grown.path).failed) == (
        7,
        True,
        ("spk2/utt-2",),
    )
    assert len(calls(tmp_path)) - before == 2
    assert "1 utterance failed earlier and is left out: 'spk2/utt-2', see" in caplog.text
    again = numbers_only(Provider(tmp_path, 8), tmp_path / "cache")
    assert (len(again), again.complete, featcache.open(again.path).failed) == (8, True, ())
    assert not (tmp_path / "cache" / "work-failures.jsonl").exists()

"""`featcache.cache` in the place of SpeechBrain's decorators: the same calls, the same results."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.integrations.hdf5.cached_item import CachedHDF5DynamicItem
from speechbrain.utils.data_pipeline import CachedDynamicItem, DynamicItem
from speechbrain.utils.data_pipeline import provides as _provides
from speechbrain.utils.data_pipeline import takes as _takes

import featcache
from featcache import FeatureStorageConfig
from featcache.errors import ReadOnlyError

Decorate = Callable[..., Callable[[Callable[..., Any]], Any]]
takes: Decorate = _takes
provides: Decorate = _provides
calls: list[str] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def item(result: Callable[[int], object]) -> Any:
    """A dynamic item of an id and a number, which notes when it is computed."""

    @takes("id", "number")
    @provides("feats")
    def compute(id: str, number: int) -> object:
        note(id)
        return result(number)

    return compute


def note(id: str) -> None:
    calls[:] = [*calls, id]


def dataset_of(*items: Any) -> Any:
    dataset = DynamicItemDataset({f"utt-{n}": {"number": n, "text": "ab" * n} for n in range(1, 5)})
    for each in items:
        dataset.add_dynamic_item(each)
    dataset.set_output_keys([key for each in items for key in each.provides])
    return dataset


SAME_CALLS: list[Any] = [
    (CachedDynamicItem.cache, {}, lambda number: torch.full((number, 3), 0.1)),
    (CachedDynamicItem.cache, {}, lambda number: list(range(number))),
    (CachedDynamicItem.cache, {}, lambda number: 1.5 * number),
    (CachedHDF5DynamicItem.cache, {}, lambda number: np.ones((number, 3))),
    (CachedHDF5DynamicItem.cache, {"compression": "gzip"}, lambda number: np.ones((number, 3))),
    (CachedHDF5DynamicItem.cache, {"compression": 9}, lambda number: np.ones((number, 3))),
    (CachedHDF5DynamicItem.cache, {"file_mode": "a"}, lambda number: np.arange(number)),
    (CachedHDF5DynamicItem.cache, {"cache_filename": "a.hdf5"}, lambda number: np.arange(number)),
]


@pytest.mark.parametrize(("theirs", "settings", "result"), SAME_CALLS)
def test_the_same_call_gives_the_same_items(
    tmp_path: Path, theirs: Any, settings: dict[str, Any], result: Callable[[int], object]
) -> None:
    expected = dataset_of(theirs(tmp_path / "theirs", **settings)(item(result)))
    ours = dataset_of(featcache.cache(tmp_path / "ours", **settings)(item(result)))
    for _ in range(2):
        for number in range(4):
            one, other = expected[number]["feats"], ours[number]["feats"]
            assert type(one) is type(other)
            np.testing.assert_array_equal(one, other)
    assert len(calls) == 9  # four of theirs, four of ours, of which the first one twice


def test_speechbrains_own_example_runs(tmp_path: Path) -> None:
    @featcache.cache(tmp_path)
    @takes("id", "text")
    @provides("tokenized")
    def count_to(id: str, limit: int) -> Any:
        return np.arange(limit)

    assert count_to("utt_id", 5).tolist() == [0, 1, 2, 3, 4]
    assert count_to("utt_id", 5).tolist() == [0, 1, 2, 3, 4]
    assert isinstance(count_to, DynamicItem)


def test_it_may_stand_below_takes_and_provides(tmp_path: Path) -> None:
    @takes("id", "number")
    @provides("feats")
    @featcache.cache(tmp_path / "cache")
    def ones(id: str, number: int) -> torch.Tensor:
        note(id)
        return torch.ones(number, 2)

    dataset = dataset_of(ones)
    assert [len(each["feats"]) for each in dataset] == [1, 2, 3, 4]
    assert [len(each["feats"]) for each in dataset] == [1, 2, 3, 4]
    assert len(calls) == 5  # the first one twice


def test_an_item_of_several_keys_gives_them_in_its_order(tmp_path: Path) -> None:
    @featcache.cache(tmp_path / "cache")
    @takes("id", "number")
    @provides("wave", "codes")
    def both(id: str, number: int) -> tuple[torch.Tensor, list[int]]:
        note(id)
        return torch.ones(number), [number] * 2

    dataset = dataset_of(both)
    for _ in range(2):
        for number in range(1, 5):
            found = dataset[number - 1]
            assert torch.equal(found["wave"], torch.ones(number))
            assert found["codes"] == [number] * 2
    assert len(calls) == 5  # the first one twice
    both.func.close()
    assert sorted(featcache.open(tmp_path / "cache").features) == ["codes", "wave"]


def test_declared_features_say_how_an_item_is_stored(tmp_path: Path) -> None:
    features = [FeatureStorageConfig("fbank", "float16", backend="hdf5", dims=[3])]
    cached = featcache.cache(tmp_path / "cache", features=features)(
        item(lambda number: torch.ones(number, 3))
    )
    assert [each["feats"].dtype for each in dataset_of(cached)] == [torch.float16] * 4
    cached.func.close()
    (file,) = (tmp_path / "cache").glob("parts/*/fbank.h5")
    with h5py.File(file) as stored:
        assert sorted(stored["fbank"]) == ["utt-1", "utt-2", "utt-3", "utt-4"]


def test_the_filtered_data_set_reads_what_the_whole_one_computed(tmp_path: Path) -> None:
    cached = featcache.cache(tmp_path / "cache")(item(lambda number: torch.ones(number, 2)))
    dataset = dataset_of(cached)
    dataset.iterate_once(progressbar=False)
    short = dataset.filtered_sorted(key_max_value={"number": 2})
    assert [len(each["feats"]) for each in short] == [1, 2]
    assert len(calls) == 5  # the first one twice
    assert len(dataset[3]["feats"]) == 4  # the whole one goes on


def test_read_only_items_name_what_is_missing(tmp_path: Path) -> None:
    compute = item(lambda number: torch.ones(number, 2))
    reading = featcache.cache(tmp_path / "cache", "r")(compute)
    with pytest.raises(ReadOnlyError, match="no utterance 'utt-1' in cache"):
        reading("utt-1", 1)
    assert not (tmp_path / "cache").exists()
    writing = featcache.cache(tmp_path / "cache")(compute)
    writing("utt-1", 1)
    writing.func.publish()  # before that, it may take a moment until others see it
    assert len(reading("utt-1", 1)) == 1
    for caught in (featcache.KeyNotFoundError, OSError):  # as SpeechBrain's items, by h5py
        with pytest.raises(caught, match="no utterance 'utt-2'"):
            reading("utt-2", 2)
    assert calls == ["utt-1"] * 2


def test_an_item_that_has_filled_its_cache_goes_on_reading_alone(tmp_path: Path) -> None:
    ones = featcache.cache(tmp_path / "cache")(item(lambda number: torch.ones(number, 2)))
    dataset = dataset_of(ones)
    dataset.iterate_once(output_keys=["feats"], progressbar=False)
    cached: Any = ones
    cached.change_file_mode("r")
    assert len(featcache.open(tmp_path / "cache")) == 4
    view = dataset.filtered_sorted(sort_key="number", reverse=True)
    assert [len(each["feats"]) for each in view] == [4, 3, 2, 1]
    with pytest.raises(featcache.KeyNotFoundError, match="no utterance 'utt-9'"):
        ones("utt-9", 1)
    assert len(calls) == 5  # the first one twice
    cached.change_file_mode("a")
    assert len(ones("utt-9", 1)) == 1


def test_two_items_in_one_directory_are_told_apart_by_file_name(tmp_path: Path) -> None:
    ones, zeros = (
        featcache.cache(tmp_path, cache_filename=name)(item(result))
        for name, result in (("ones.h5", torch.ones), ("zeros.h5", torch.zeros))
    )
    for _ in range(2):
        assert float(ones("utt-1", 2).sum()) == 2
        assert float(zeros("utt-1", 2).sum()) == 0


def test_what_cannot_work_is_said_when_it_is_declared(tmp_path: Path) -> None:
    @takes("id")
    @provides("a", "b")
    def generator(id: str) -> Any:
        yield 1
        yield 2

    with pytest.raises(featcache.errors.ConfigError, match="as a generator"):
        featcache.cache(tmp_path)(generator)
    with pytest.raises(
        featcache.errors.ConfigError, match="first key that a cached item takes is 'id'"
    ):
        featcache.cache(tmp_path)(DynamicItem(["wav"], len, ["n"]))
    with pytest.raises(featcache.errors.ConfigError, match="takes 'self' first"):

        class Model:
            @featcache.cache(tmp_path)
            def embed(self, utterance: str) -> list[int]:
                return [1]

    with pytest.raises(featcache.errors.ConfigError, match="takes 'number' first"):
        featcache.cache(tmp_path)(lambda number, id: [1])
    with pytest.raises(featcache.errors.ConfigError, match="file_mode is 'a' or 'r', not 'w'"):
        featcache.cache(tmp_path, "w")  # type: ignore[arg-type]
    with pytest.raises(featcache.errors.ConfigError, match=r"compression is .gzip.*lzf"):
        featcache.cache(tmp_path, compression="lzf")
    with pytest.raises(featcache.errors.ConfigError, match="not both"):
        featcache.cache(tmp_path, compression=1, features=[FeatureStorageConfig("a")])


def test_a_changed_function_is_refused(tmp_path: Path) -> None:
    for number, body in enumerate(("torch.ones(number, 2)", "torch.zeros(number, 2)")):
        file = tmp_path / f"pipeline_{number}.py"
        file.write_text(
            "import torch\nimport featcache\n"
            "from speechbrain.utils.data_pipeline import provides, takes\n"
            f"@featcache.cache({str(tmp_path / 'cache')!r})\n"
            '@takes("id", "number")\n@provides("feats")\n'
            f"def feats(id, number):\n    return {body}\n"
        )
    first = imported(tmp_path, "pipeline_0")
    first.feats("utt-1", 2)
    first.feats.func.close()
    with pytest.raises(featcache.StaleCacheError, match="source"):
        imported(tmp_path, "pipeline_1").feats("utt-1", 2)


def imported(folder: Path, name: str) -> ModuleType:
    sys.path.insert(0, str(folder))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(folder))

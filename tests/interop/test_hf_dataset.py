"""HuggingFace data sets of caches, whose rows name arrays; and caches of data sets with arrays."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featcache
from featcache import FeatureStorageConfig
from featcache.errors import ConfigError, FeatureError

datasets: Any = pytest.importorskip("datasets")
from featcache.interop.hf_dataset import CachedArray, from_hf_dataset  # noqa: E402

COUNT = 16


@pytest.fixture
def cache(tmp_path: Path) -> featcache.Cache:
    rng = np.random.default_rng(0)
    declared = [
        FeatureStorageConfig("fbank", frame_s=0.01),
        FeatureStorageConfig("units", dtype="int64", frame_s=0.005),
        FeatureStorageConfig("xvector", time_axis=None),
    ]
    with featcache.CacheWriter(tmp_path / "cache", declared) as writer:
        for number in range(COUNT):
            frames = 3 + number * 7 % 11
            arrays = {
                "fbank": rng.normal(size=(frames, 4)),
                "units": rng.integers(0, 9, frames * 2),
                "xvector": rng.normal(size=6),
            }
            told = {"text": f"say {number}", "label": number % 3}
            writer.write(f"u{number:02}", arrays, annotations=told)
    return featcache.open(tmp_path / "cache")


def assert_rows(dataset: Any, cache: featcache.Cache) -> None:
    for row in dataset:
        for name in {*cache.features}.intersection(row):
            np.testing.assert_array_equal(row[name], cache.read(row["id"], name))


def test_rows_have_ids_annotations_lengths_and_features(cache: featcache.Cache) -> None:
    dataset = cache.to_hf_dataset()
    assert dataset.column_names == ["id", "label", "text", "length", *cache.features]
    assert list(dataset["id"]) == list(cache)
    assert list(dataset["length"]) == cache.lengths("fbank").tolist()
    assert list(dataset["text"]) == list(cache.annotation("text"))
    assert_rows(dataset, cache)
    assert list(cache.to_hf_dataset("units")["length"]) == cache.lengths("units").tolist()
    assert "length" not in cache.to_hf_dataset(["xvector"]).column_names


def test_formats_views_and_changes_read_the_arrays_of_their_rows(
    cache: featcache.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = cache.filter(lambda row: row["label"] == 1).to_hf_dataset()
    assert list(dataset["label"]) == [1] * len(dataset)
    assert_rows(dataset.shuffle(seed=1).select(range(3)), cache)
    rows = dataset.with_format("torch")[:2]
    torch.testing.assert_close(rows["xvector"][1], torch.from_numpy(cache.read("u04", "xvector")))
    assert dataset.with_format("numpy")[0]["fbank"].shape == cache.read("u01", "fbank").shape
    longer = dataset.map(lambda length: {"twice": 2 * length}, input_columns="length")
    assert longer.features["fbank"] == CachedArray("fbank")
    assert_rows(longer, cache)
    means = dataset.map(lambda row: {"mean": row["fbank"].mean()}, remove_columns="fbank")
    assert means[0]["mean"] == pytest.approx(cache.read("u01", "fbank").mean())
    read = []
    monkeypatch.setattr(featcache.Cache, "read", lambda *given: read.append(given))
    dataset.filter(lambda length: length > 5, input_columns="length")
    assert not read


def test_workers_pickles_and_saved_data_sets_name_the_arrays(
    cache: featcache.Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = cache.to_hf_dataset(["fbank", "units"])
    assert_rows(pickle.loads(pickle.dumps(dataset)), cache)  # noqa: S301
    dataset.save_to_disk(tmp_path / "saved")
    size = sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*"))
    assert size < 20_000  # no array is in it
    assert "'fbank' of the data set: saved are the paths" in caplog.text
    loaded = datasets.load_from_disk(tmp_path / "saved")
    loader = torch.utils.data.DataLoader(
        loaded.with_format("torch"), num_workers=1, batch_size=None, multiprocessing_context="fork"
    )
    seen = [row["id"] for row in loader if len(row["fbank"]) == row["length"]]
    assert seen == list(cache)


def test_joined_and_concatenated_tables_name_the_cache_of_each_row(tmp_path: Path) -> None:
    tables = []
    for number in range(2):
        with featcache.CacheWriter(tmp_path / str(number), [FeatureStorageConfig("f")]) as writer:
            writer.write(f"u{number}", {"f": np.full((2, 3), number)})
        tables.append(featcache.open(tmp_path / str(number)))
    dataset = featcache.concat(*tables).to_hf_dataset()
    assert [row["f"].max() for row in dataset] == [0, 1]
    again = datasets.concatenate_datasets([dataset, dataset])
    assert [row["f"].max() for row in again] == [0, 1, 0, 1]


def test_what_a_data_set_of_names_cannot_do_is_refused(cache: featcache.Cache) -> None:
    with pytest.raises(ConfigError, match="names arrays of a cache, and holds none"):
        datasets.Dataset.from_dict(
            {"fbank": [[1.0]]}, datasets.Features({"fbank": CachedArray("fbank")})
        )
    with pytest.raises(ConfigError, match="no utterance of"):
        cache.segments(featcache.Windows(0.02, hop_s=0.02)).to_hf_dataset()
    cache.annotate({"u00": {"length": 3}})
    with pytest.raises(ConfigError, match="annotation 'length'"):
        cache.to_hf_dataset()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.lengths: list[list[int]] = []

    def forward(
        self, fbank: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        self.lengths.append(lengths.tolist())
        pooled = self.layer(fbank).sum(1) / lengths[:, None]
        return {"loss": torch.nn.functional.cross_entropy(pooled, labels), "logits": pooled}


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    fbank = [torch.as_tensor(row["fbank"]) for row in rows]
    return {
        "fbank": torch.nn.utils.rnn.pad_sequence(fbank, batch_first=True),
        "lengths": torch.tensor([row["length"] for row in rows]),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_groups_by_length(cache: featcache.Cache, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"),
        num_train_epochs=1,
        per_device_train_batch_size=4,
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model, dataset = Model(), cache.to_hf_dataset("fbank")
    transformers.Trainer(
        model,
        arguments,
        train_dataset=datasets.concatenate_datasets([dataset] * 4),
        data_collator=collate,
    ).train()
    seen = [length for lengths in model.lengths for length in lengths]
    assert sorted(seen) == sorted([*cache.lengths("fbank")] * 4)
    spread = np.mean([max(lengths) - min(lengths) for lengths in model.lengths])
    assert spread < 4  # of 3 to 13 frames: of four at random it is 6


def test_a_data_set_with_arrays_becomes_a_cache_and_back(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    types = datasets.Features(
        {
            "key": datasets.Value("string"),
            "fbank": datasets.List(datasets.List(datasets.Value("float32"))),
            "fixed": datasets.Array2D((2, 3), "float64"),
            "units": datasets.List(datasets.Value("int16")),
            "label": datasets.Value("int64"),
        }
    )
    rows = {
        "key": list(cache),
        "fbank": [cache.read(id, "fbank").tolist() for id in cache],
        "fixed": [np.full((2, 3), number, float) for number in range(COUNT)],
        "units": [cache.read(id, "units").tolist() for id in cache],
        "label": list(cache.annotation("label")),
    }
    dataset = datasets.Dataset.from_dict(rows, features=types)
    declared = [
        FeatureStorageConfig("fbank"),
        FeatureStorageConfig("fixed", dtype="float64"),
        FeatureStorageConfig("units", dtype="int16"),
    ]
    assert (
        len(from_hf_dataset(dataset.select(range(3)), tmp_path / "made", declared, id="key")) == 3
    )
    made = from_hf_dataset(dataset, tmp_path / "made", declared, id="key")  # the others
    assert list(made) == list(cache)
    assert list(made.annotation("label")) == list(cache.annotation("label"))
    for number, id in enumerate(cache):
        np.testing.assert_array_equal(made.read(id, "fbank"), cache.read(id, "fbank"))
        np.testing.assert_array_equal(made.read(id, "units"), cache.read(id, "units"))
        assert made.read(id, "fixed").tolist() == [[number] * 3] * 2
    assert_rows(made.to_hf_dataset(), made)


@pytest.mark.parametrize(
    ("column", "error", "says"),
    [
        ([[[1.0], [1.0, 2.0]]], FeatureError, "'f' of '0' has frames of the sizes"),
        ([[[1.0, None]]], FeatureError, "'f' of '0' has nulls"),
        (["text"], ConfigError, "column 'f' is of string, not of arrays"),
    ],
)
def test_columns_that_are_no_arrays_are_refused(
    column: Any, error: type[Exception], says: str, tmp_path: Path
) -> None:
    dataset = datasets.Dataset.from_dict({"f": column})
    with pytest.raises(error, match=says):
        from_hf_dataset(dataset, tmp_path, [FeatureStorageConfig("f")])


def test_data_sets_that_hold_no_arrays_of_a_split_get_the_way_to_store_them(
    cache: featcache.Cache, tmp_path: Path
) -> None:
    declared = [FeatureStorageConfig("fbank")]
    named = cache.to_hf_dataset().select(range(3))
    with pytest.raises(
        ConfigError, match=r"convert\(featcache.open\(...\).select\(dataset\['id'\]"
    ):
        from_hf_dataset(named, tmp_path / "named", declared)
    view = featcache.open(cache.path).select(named["id"])
    assert len(featcache.convert(view, tmp_path / "stored", progressbar=False)) == 3
    rows = {"id": ["a"], "fbank": [[[1.0, 2.0]]]}
    stream = datasets.Dataset.from_dict(rows).to_iterable_dataset()
    with pytest.raises(ConfigError, match="not a IterableDataset, whose rows come one") as refused:
        from_hf_dataset(stream, tmp_path / "streamed", declared)
    line = str(refused.value).partition("one by one: ")[2]
    names = {"featcache": featcache, "np": np, "path": tmp_path / "streamed", "features": declared}
    exec(line, {**names, "dataset": stream})  # as it is typed
    assert featcache.open(tmp_path / "streamed").read("a", "fbank").tolist() == [[1, 2]]


def test_splits_and_columns_that_are_not_there_are_refused(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict({"fbank": [[[1.0]]]})
    with pytest.raises(ConfigError, match=r"one split is stored.*DatasetDict; give .*dataset\['"):
        from_hf_dataset(datasets.DatasetDict(train=dataset), tmp_path, [FeatureStorageConfig("f")])
    with pytest.raises(ConfigError, match=r"no column 'fbnk'.*'fbank'"):
        from_hf_dataset(dataset, tmp_path, [FeatureStorageConfig("fbnk")])


def test_a_mix_is_given_without_its_plan_which_the_log_tells(
    cache: featcache.Cache, caplog: pytest.LogCaptureFixture
) -> None:
    parts = cache.split({"a": 0.5, "b": 0.5}, seed=1)
    mixed = featcache.mix(parts, weights={"a": 3, "b": 1}, epoch_size=16)
    dataset = mixed.to_hf_dataset("fbank")
    assert len(dataset) == len(mixed)
    (told,) = (record.getMessage() for record in caplog.records)
    assert "each row of a mix once, without its plan" in told
    assert "dataset.select(table.epoch_rows(0)[:])" in told
    epoch = dataset.select(mixed.epoch_rows(0)[:])
    assert sorted(epoch["source"]) == ["a"] * 12 + ["b"] * 4
    assert_rows(epoch, cache)

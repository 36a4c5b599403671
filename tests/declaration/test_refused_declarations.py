"""Declarations that cannot work are answered by name, with what to do; those that can are taken."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml
from refusals import check_refused, refusals

import featcache
from featcache import CacheWriter, FeatureStorage, GlobalMVN
from featcache import FeatureStorageConfig as Feature
from featcache.errors import FeatureError, KeyNotFoundError

DIMS = Feature("fbank", dims=[80])
UNSAID = Feature("fbank")


def written(path: Path, *ids: str, complete: bool = True) -> Path:
    """Write a cache of one feature `f`, of 3 frames of 2 numbers each."""
    try:
        with CacheWriter(path, [Feature("f")]) as writer:
            for id in ids:
                writer.write(id, {"f": np.ones((3, 2))})
            if not complete:
                raise InterruptedError
    except InterruptedError:
        pass
    return path


def storage(root: Path, *ids: str, complete: bool = True) -> FeatureStorage:
    """Write the split `train` of a storage."""
    written(root / "train", *ids, complete=complete)
    return FeatureStorage(root, [Feature("f")])


class Dataset:
    """As much of SpeechBrain's `DynamicItemDataset` as `attach` needs."""

    def __init__(self, *ids: str) -> None:
        self.data_ids = list(ids)
        self.functions: dict[object, Any] = {}

    def add_dynamic_item(self, func: object, takes: object = None, provides: object = None) -> None:
        self.functions[provides] = func


def dynamic_item_dataset(*ids: str) -> Any:
    from speechbrain.dataio.dataset import DynamicItemDataset

    return DynamicItemDataset({id: {"duration": 1.0} for id in ids})


def attached_twice(root: Path) -> None:
    train, dataset = storage(root, "u"), dynamic_item_dataset("u")
    train.attach(dataset, "train")
    train.attach(dataset, "train")


def yaml(text: str) -> object:
    return load_hyperpyyaml(text)


STORAGE = "storage: !new:featcache.FeatureStorage\n"


def endless() -> dict[str, object]:
    loop: dict[str, object] = {}
    loop["again"] = loop
    return loop


@refusals(Path(__file__).with_name("refused.txt"))
def test_it_is_refused_by_name_with_what_to_do(tmp_path: Path, mistake: list[str]) -> None:
    check_refused(mistake, tmp_path, globals())


def test_a_whole_number_as_yaml_writes_it_is_an_integer() -> None:
    text = """
feature: !new:featcache.FeatureStorageConfig
    name: f
    backend: webdataset
    options: {shard_bytes: 1.0e+9}
"""
    options = load_hyperpyyaml(text)["feature"].options
    assert options == {"shard_bytes": 1_000_000_000}
    assert type(options["shard_bytes"]) is int
    default = Feature("f", backend="webdataset", options={"shard_bytes": float(1 << 30)})
    assert default == Feature("f", backend="webdataset", options={"shard_bytes": 1 << 30})
    assert default.to_json()["options"] == {}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("half", "float16"),
        ("double", "float64"),
        ("<f4", "float32"),
        ("|u1", "uint8"),
        (np.dtype(">f8"), "float64"),
        (np.longlong, "int64"),
        (torch.half, "float16"),
        (np.float32, "float32"),
        (np.dtype("int16"), "int16"),
        (np.bool_, "bool"),
        (bool, "bool"),
        (torch.bfloat16, "bfloat16"),
        (torch.uint8, "uint8"),
    ],
)
def test_names_of_one_dtype_alone_are_accepted(dtype: object, name: str) -> None:
    assert Feature("f", dtype).dtype == name


def test_signatures_are_there_to_be_looked_at() -> None:
    names = list(inspect.signature(Feature).parameters)
    assert names[:2] == ["name", "dtype"]
    assert {"dims", "frame_s", "offset_s"} <= set(names)
    assert list(inspect.signature(FeatureStorage).parameters) == ["root", "features"]


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FeatureStorage("~/features", [Feature("f")]).path("train") == tmp_path / "features/train"
    assert FeatureStorage(Path("~"), [Feature("f")]).root == tmp_path
    assert FeatureStorage("./~/features", [Feature("f")]).root == Path("~/features").absolute()
    assert FeatureStorage("a/~", [Feature("f")]).root == Path("a") / "~"


def test_numbers_as_keys_are_text_as_in_json(tmp_path: Path) -> None:
    with CacheWriter(
        tmp_path, [Feature("f")], {"layers": {2: "b", 10: "c", "x": "a", None: 1}}
    ) as w:
        w.write("u", {"f": np.ones((1, 1))})
    with CacheWriter(
        tmp_path, [Feature("f")], {"layers": {"2": "b", "10": "c", "x": "a", "null": 1}}
    ) as same:  # or it would be stale
        assert "u" in same


@pytest.mark.parametrize(
    ("feature", "shape"),
    [
        (Feature("f"), (700, 80)),
        (Feature("f"), (1, 80)),  # an utterance of one frame
        (Feature("f"), (7, 12, 80)),
        (Feature("f"), (1, 0, 80)),
        (Feature("f", dims=[700, 80]), (1, 700, 80)),
        (Feature("f", time_axis=None), (1, 12, 80)),
    ],
)
def test_shapes_that_may_be_right_look_right(feature: Feature, shape: tuple[int, ...]) -> None:
    assert feature.looks_wrong(shape) is None


@pytest.mark.parametrize("shape", [(1, 700, 80), (1, 700, 12, 80)])
def test_one_frame_of_two_axes_looks_like_a_batch_of_one(shape: tuple[int, ...]) -> None:
    sentence = Feature("f").looks_wrong(shape) or ""
    for word in (str(shape), "batch axis", "array[0]", f"dims: {list(shape[1:])}"):
        assert word in sentence
    Feature("f", dims=shape[1:]).check_dims("u", shape[1:], rows=1)  # the advice helps


def test_a_second_batch_of_one_is_refused_until_one_looks_right(tmp_path: Path) -> None:
    features = [Feature("f"), Feature("other", dims=[2, 3])]

    def write(id: str, shape: tuple[int, ...]) -> None:
        arrays = {"f": np.zeros(shape, np.float32), "other": np.zeros((1, 2, 3), np.float32)}
        writer.write(id, arrays)

    with CacheWriter(tmp_path, features) as writer:
        with pytest.warns(UserWarning, match="utterance 'u1', feature 'f': .*batch axis"):
            write("u1", (1, 7, 8))
        for id in ("u2", "u3"):
            with pytest.raises(FeatureError, match=f"utterance '{id}', feature 'f': .*batch axis"):
                write(id, (1, 7, 8))
        write("u4", (7, 7, 8))
        write("u5", (1, 7, 8))  # an utterance of one frame


def test_one_frame_after_others_is_one_frame(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [Feature("f")]) as writer:
        for number, frames in enumerate((2, 1, 1)):
            writer.write(str(number), {"f": np.zeros((frames, 7, 8), np.float32)})
    assert featcache.open(tmp_path).lengths("f").tolist() == [2, 1, 1]


def test_the_docstring_tells_how_to_declare_an_embedding() -> None:
    assert "embedding of shape (192,)" in (Feature.__doc__ or "")


def test_one_feature_may_be_attached_by_its_name(tmp_path: Path) -> None:
    two = FeatureStorage(tmp_path, [Feature("energy"), Feature("pitch")])
    with two.writer("train") as writer:
        writer.write("u", {"energy": np.ones(3), "pitch": np.ones(3)})
    dataset = Dataset("u")
    two.attach(dataset, "train", features="energy")
    assert list(dataset.functions) == ["energy"]
    assert dataset.functions["energy"]("u").shape == (3,)


def test_a_dataset_may_lack_utterances_that_the_cache_has(tmp_path: Path) -> None:
    dataset = dynamic_item_dataset("u2")
    storage(tmp_path, "u1", "u2", "u3").attach(dataset, "train")
    dataset.set_output_keys(["f"])
    assert dataset[0]["f"].shape == (3, 2)


def test_ids_whose_features_could_not_be_computed_are_told_apart(tmp_path: Path) -> None:
    one = FeatureStorage(tmp_path, [Feature("f")])
    with one.writer("train") as writer:
        writer.expect(["u1", "u2", "u3"])
        writer.write("u1", {"f": np.ones((3, 2))})
        writer.fail("u2")
        writer.fail("u3")
    one.attach(Dataset("u1"), "train")
    with pytest.raises(
        KeyNotFoundError, match=r"2 of the dataset's 3 ids .*2 of them because .* failed"
    ):
        one.attach(Dataset("u1", "u2", "u3"), "train")


def test_an_incomplete_cache_may_be_allowed_for_ids_that_are_there(tmp_path: Path) -> None:
    partial = storage(tmp_path, "u", complete=False)
    partial.attach(Dataset("u"), "train", allow_incomplete=True)
    with pytest.raises(KeyNotFoundError, match="1 of the dataset's 2 ids"):
        partial.attach(Dataset("u", "v"), "train", allow_incomplete=True)
    mvn = GlobalMVN.from_cache(partial.cache("train"), "f", allow_incomplete=True)
    assert mvn.mean.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", [str, Path])
def test_statistics_are_taken_from_the_cache_at_a_path(
    tmp_path: Path, kind: Callable[[Path], str | os.PathLike[str]]
) -> None:
    mvn = GlobalMVN.from_cache(kind(written(tmp_path, "u")), "f")
    assert mvn.mean.tolist() == [1.0, 1.0]

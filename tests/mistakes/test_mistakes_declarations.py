"""Mistakes of first users in declarations and around them: each is answered by name, with what to
do.

The numbers are those of a list of 135 mistakes that were tried on an early version.
"""

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

from featcache import CacheWriter, FeatureStorage, GlobalMVN, unpad
from featcache import FeatureStorageConfig as Feature
from featcache.errors import (
    ConfigError,
    FeatcacheError,
    FeatureError,
    IncompleteError,
    KeyNotFoundError,
    NotACacheError,
    UnknownNameError,
)

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

MISTAKES: list[tuple[str, Callable[[Path], object], type[FeatcacheError], list[str]]] = [
    (
        "02-backend-in-upper-case",
        lambda path: Feature("f", backend="HDF5"),
        UnknownNameError,
        ["feature 'f'", "no backend 'HDF5'", "did you mean 'hdf5'?"],
    ),
    (
        "02-dtype-in-upper-case",
        lambda path: Feature("f", "Float32"),
        UnknownNameError,
        ["feature 'f'", "dtype 'Float32'", "did you mean 'float32'"],
    ),
    (
        "09-a-fraction-of-a-byte",
        lambda path: Feature("f", backend="webdataset", options={"shard_bytes": 1.5}),
        ConfigError,
        ["feature 'f'", "shard_bytes", "1.5"],
    ),
    (
        "10-an-option-of-a-codec-that-was-not-chosen",
        lambda path: Feature("f", backend="hdf5", options={"level": 4}),
        UnknownNameError,
        ["feature 'f'", "backend 'hdf5' has no option 'level'", "codec 'gzip'", "codec: gzip"],
    ),
    (
        "10-an-option-of-another-codec",
        lambda path: Feature("f", backend="zarr", codec="blosc", options={"level": 4}),
        UnknownNameError,
        ["backend 'zarr' with codec 'blosc' has no option 'level'", "codec: zstd"],
    ),
    (
        "12-dtype-float",
        lambda path: Feature("f", float),
        UnknownNameError,
        ["feature 'f'", "did you mean", "'float32'", "'float64'"],
    ),
    (
        "12-dtype-f4",
        lambda path: Feature("f", "f4"),
        UnknownNameError,
        ["feature 'f'", "dtype 'f4'", "did you mean 'float32'?"],
    ),
    (
        "17-a-feature-called-id",
        lambda path: Feature("id"),
        ConfigError,
        ["feature name 'id'", "rename it"],
    ),
    (
        "17-a-feature-called-as-lengths",
        lambda path: FeatureStorage(path, [Feature("f_lengths"), Feature("f")]),
        ConfigError,
        ["'f'", "'f_lengths'", "rename"],
    ),
    (
        "18-two-of-one-name",
        lambda path: FeatureStorage(path, [Feature("f"), Feature("f")]),
        ConfigError,
        ["two features are called 'f'", "a name of its own"],
    ),
    (
        "19-a-wrong-keyword",
        lambda path: Feature("f", dtyp="int16"),  # type: ignore[call-arg]
        UnknownNameError,
        ["no setting 'dtyp'", "did you mean 'dtype'"],
    ),
    ("20-no-name", lambda path: Feature(), ConfigError, ["missing", "'name'"]),  # type: ignore[call-arg]
    (
        "20-no-name-in-yaml",
        lambda path: yaml("f: !new:featcache.FeatureStorageConfig\n    dtype: int16\n"),
        ConfigError,
        ["missing", "'name'"],
    ),
    (
        "27-no-root",
        lambda path: yaml(STORAGE + "    features: []\n"),
        ConfigError,
        ["missing", "'root'"],
    ),
    (
        "27-root-null",
        lambda path: yaml(STORAGE + "    root: null\n    features: []\n"),
        ConfigError,
        ["root is given as the path of a directory, not None"],
    ),
    (
        "28-the-home-of-nobody",
        lambda path: FeatureStorage("~nobody-of-that-name/features", [Feature("f")]),
        ConfigError,
        ["'~nobody-of-that-name/features'", "home directory", "'./~nobody"],
    ),
    (
        "29-a-module-in-the-fingerprint",
        lambda path: CacheWriter(path, [Feature("f")], {"a": {"b": [1, torch.nn.Linear(1, 1)]}}),
        ConfigError,
        ["fingerprint must be made of JSON values", "a.b[1]", "Linear", "give what identifies it"],
    ),
    (
        "29-nan-in-the-fingerprint",
        lambda path: CacheWriter(path, [Feature("f")], {"model": {"gain": float("nan")}}),
        ConfigError,
        ["model.gain is nan", "finite numbers"],
    ),
    (
        "29-a-path-in-the-fingerprint",
        lambda path: CacheWriter(path, [Feature("f")], {"model": path}),
        ConfigError,
        ["model is of type PosixPath", "text"],
    ),
    (
        "29-an-endless-fingerprint",
        lambda path: CacheWriter(path, [Feature("f")], endless()),
        ConfigError,
        ["fingerprint", "without end"],
    ),
    (
        "30-one-key-as-text-and-number",
        lambda path: CacheWriter(path, [Feature("f")], {"layers": {1: "a", "1": "b"}}),
        ConfigError,
        ["layers has the key '1' twice", "as text and as a number"],
    ),
    (
        "30-a-key-that-json-has-not",
        lambda path: CacheWriter(path, [Feature("f")], {"layers": {(1, 2): "a"}}),
        ConfigError,
        ["layers has the key (1, 2)", "keys are text"],
    ),
    (
        "40-a-batch-axis-left-in",
        lambda path: UNSAID.check_dims("u", (9, 80), before=(5, 80), rows=1),
        FeatureError,
        ["'u'", "'fbank'", "(9, 80)", "(5, 80)", "batch axis", "array[0]", "overwrite"],
    ),
    (
        "41-a-batch-axis-left-in-of-a-declared-shape",
        lambda path: DIMS.check_dims("u", (9, 80), rows=1),
        FeatureError,
        ["'u'", "'fbank'", "(9, 80)", "declared is (80,)", "batch axis", "array[0]"],
    ),
    (
        "42-transposed",
        lambda path: UNSAID.check_dims("u", (5,), before=(3,), rows=80),
        FeatureError,
        ["'u'", "'fbank'", "(5,)", "(3,)", "transposed?", "overwrite"],
    ),
    (
        "42-transposed-of-a-declared-shape",
        lambda path: DIMS.check_dims("u", (700,), rows=80),
        FeatureError,
        ["'u'", "'fbank'", "(700,)", "(80,)", "transposed?"],
    ),
    (
        "43-an-embedding-of-a-declared-shape",
        lambda path: Feature("xvector", dims=[192]).check_dims("u", (), rows=192),
        FeatureError,
        ["'u'", "'xvector'", "(192,)", "without a time axis", "time_axis: null"],
    ),
    (
        "44-other-dims-than-declared",
        lambda path: DIMS.check_dims("u", (40,), rows=700),
        FeatureError,
        ["'u'", "'fbank'", "(40,)", "(80,)", "mend the array, or dims"],
    ),
    (
        "60-a-split-that-is-not-cached-yet",
        lambda path: storage(path, "u").cache("valid"),
        NotACacheError,
        ["valid' does not exist", "splits there: 'train'", "cache_features(", "split='valid'"],
    ),
    (
        "60-attach-before-caching",
        lambda path: FeatureStorage(path, [Feature("f")]).attach(Dataset("u"), "valid"),
        NotACacheError,
        ["valid' does not exist", "cache_features(", "split='valid'"],
    ),
    (
        "71-attached-twice",
        attached_twice,
        ConfigError,
        ["feature 'f' is attached to the dataset already", "train"],
    ),
    (
        "72-ids-that-the-cache-lacks",
        lambda path: storage(path, "u2").attach(Dataset("u1", "u2", "u3", "u4", "u5"), "train"),
        KeyNotFoundError,
        ["4 of the dataset's 5 ids", "train'", "'u1', 'u3', 'u4', ...", "cache_features"],
    ),
    (
        "72-integer-ids",
        lambda path: storage(path, "1").attach(Dataset(*[1]), "train"),  # type: ignore[arg-type]
        KeyNotFoundError,
        ["1 of the dataset's 1 ids", ": 1;"],
    ),
    (
        "79-attach-to-an-incomplete-cache",
        lambda path: storage(path, "u", complete=False).attach(Dataset("u"), "train"),
        IncompleteError,
        ["train'", "incomplete", "allow_incomplete=True"],
    ),
    (
        "79-statistics-of-an-incomplete-cache",
        lambda path: GlobalMVN.from_cache(written(path, "u", complete=False), "f"),
        IncompleteError,
        ["incomplete", "allow_incomplete=True"],
    ),
    (
        "97-unpad-with-one-number",
        lambda path: unpad(["a"], 5, {"f": np.ones((1, 5))}),  # type: ignore[arg-type]
        FeatureError,
        ["feature 'f'", "one number of frames for each utterance", "[5, 3]", "not 5"],
    ),
    (
        "97-unpad-with-a-tensor-of-one-number",
        lambda path: unpad(["a"], {"f": torch.tensor(5)}, {"f": np.ones((1, 5))}),
        FeatureError,
        ["feature 'f'", "one number of frames for each utterance", "not 5"],
    ),
    (
        "dims-as-a-number",
        lambda path: Feature("f", dims=80),  # type: ignore[arg-type]
        ConfigError,
        ["feature 'f'", "dims", "such as [80], not 80"],
    ),
    (
        "dims-with-minus-one",
        lambda path: Feature("f", dims=[-1, 80]),
        ConfigError,
        ["feature 'f'", "dims", "[-1, 80]"],
    ),
    (
        "frame_s-in-text",
        lambda path: Feature("f", frame_s="10ms"),  # type: ignore[arg-type]
        ConfigError,
        ["feature 'f'", "frame_s is a number of seconds", "'10ms'"],
    ),
    (
        "frame_s-of-an-embedding",
        lambda path: Feature("f", time_axis=None, frame_s=0.01),
        ConfigError,
        ["feature 'f'", "without a time axis", "leave frame_s"],
    ),
]


def endless() -> dict[str, object]:
    loop: dict[str, object] = {}
    loop["again"] = loop
    return loop


@pytest.mark.parametrize(
    ("mistake", "kind", "words"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES]
)
def test_a_mistake_is_answered_by_name_with_what_to_do(
    tmp_path: Path, mistake: Callable[[Path], object], kind: type[FeatcacheError], words: list[str]
) -> None:
    with pytest.raises(kind) as caught:
        mistake(tmp_path)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message


def test_09_a_whole_number_as_yaml_writes_it_is_an_integer() -> None:
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
    ],
)
def test_12_names_of_one_dtype_alone_are_accepted(dtype: object, name: str) -> None:
    assert Feature("f", dtype).dtype == name


def test_20_signatures_are_there_to_be_looked_at() -> None:
    names = list(inspect.signature(Feature).parameters)
    assert names[:2] == ["name", "dtype"]
    assert {"dims", "frame_s", "offset_s"} <= set(names)
    assert list(inspect.signature(FeatureStorage).parameters) == ["root", "features"]


def test_28_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FeatureStorage("~/features", [Feature("f")]).path("train") == tmp_path / "features/train"
    assert FeatureStorage(Path("~"), [Feature("f")]).root == tmp_path
    assert FeatureStorage("./~/features", [Feature("f")]).root == Path("~/features").absolute()
    assert FeatureStorage("a/~", [Feature("f")]).root == Path("a") / "~"


def test_30_numbers_as_keys_are_text_as_in_json(tmp_path: Path) -> None:
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
def test_41_shapes_that_may_be_right_look_right(feature: Feature, shape: tuple[int, ...]) -> None:
    assert feature.looks_wrong(shape) is None


@pytest.mark.parametrize("shape", [(1, 700, 80), (1, 700, 12, 80)])
def test_41_one_frame_of_two_axes_looks_like_a_batch_of_one(shape: tuple[int, ...]) -> None:
    sentence = Feature("f").looks_wrong(shape) or ""
    for word in (str(shape), "batch axis", "array[0]", f"dims: {list(shape[1:])}"):
        assert word in sentence
    Feature("f", dims=shape[1:]).check_dims("u", shape[1:], rows=1)  # the advice helps


def test_41_a_second_batch_of_one_is_refused_until_one_looks_right(tmp_path: Path) -> None:
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


def test_41_one_frame_after_others_is_one_frame(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [Feature("f")]) as writer:
        for number, frames in enumerate((2, 1, 1)):
            writer.write(str(number), {"f": np.zeros((frames, 7, 8), np.float32)})


def test_43_the_docstring_tells_how_to_declare_an_embedding() -> None:
    assert "embedding of shape (192,)" in (Feature.__doc__ or "")


def test_70_one_feature_may_be_attached_by_its_name(tmp_path: Path) -> None:
    two = FeatureStorage(tmp_path, [Feature("energy"), Feature("pitch")])
    with two.writer("train") as writer:
        writer.write("u", {"energy": np.ones(3), "pitch": np.ones(3)})
    dataset = Dataset("u")
    two.attach(dataset, "train", features="energy")
    assert list(dataset.functions) == ["energy"]
    assert dataset.functions["energy"]("u").shape == (3,)


def test_72_a_dataset_may_lack_utterances_that_the_cache_has(tmp_path: Path) -> None:
    dataset = dynamic_item_dataset("u2")
    storage(tmp_path, "u1", "u2", "u3").attach(dataset, "train")
    dataset.set_output_keys(["f"])
    assert dataset[0]["f"].shape == (3, 2)


def test_72_ids_whose_features_could_not_be_computed_are_told_apart(tmp_path: Path) -> None:
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


def test_79_an_incomplete_cache_may_be_allowed_for_ids_that_are_there(tmp_path: Path) -> None:
    partial = storage(tmp_path, "u", complete=False)
    partial.attach(Dataset("u"), "train", allow_incomplete=True)
    with pytest.raises(KeyNotFoundError, match="1 of the dataset's 2 ids"):
        partial.attach(Dataset("u", "v"), "train", allow_incomplete=True)
    mvn = GlobalMVN.from_cache(partial.cache("train"), "f", allow_incomplete=True)
    assert mvn.mean.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", [str, Path])
def test_133_statistics_are_taken_from_the_cache_at_a_path(
    tmp_path: Path, kind: Callable[[Path], str | os.PathLike[str]]
) -> None:
    mvn = GlobalMVN.from_cache(kind(written(tmp_path, "u")), "f")
    assert mvn.mean.tolist() == [1.0, 1.0]

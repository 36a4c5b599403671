"""Declarations of features, in Python and in HyperPyYAML."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml

from featcache import FeatureStorage, FeatureStorageConfig
from featcache.errors import ConfigError, UnknownNameError

YAML = """
output_folder: {root}
units_backend: webdataset
storage: !new:featcache.FeatureStorage
    root: !ref <output_folder>/features
    features:
        - !new:featcache.FeatureStorageConfig
            name: fbank
            dtype: float16
            backend: hdf5
            codec: gzip
            options: {{level: 7}}
        - !new:featcache.FeatureStorageConfig
            name: units
            dtype: int16
            backend: !ref <units_backend>
"""


def test_yaml_blocks_declare_a_storage_and_touch_no_disk(tmp_path: Path) -> None:
    storage = load_hyperpyyaml(YAML.format(root=tmp_path / "out"))["storage"]
    assert list(storage.features) == ["fbank", "units"]
    assert storage.features["fbank"] == FeatureStorageConfig("fbank", "float16", "hdf5", "gzip", {"level": 7})
    assert storage.path("train") == tmp_path / "out" / "features" / "train"
    assert list(tmp_path.iterdir()) == []


def test_values_of_the_yaml_can_be_overridden(tmp_path: Path) -> None:
    storage = load_hyperpyyaml(YAML.format(root=tmp_path), {"units_backend": "memmap"})["storage"]
    assert storage.features["units"].backend == "memmap"


def test_one_storage_writes_and_reads_all_splits(tmp_path: Path) -> None:
    storage = load_hyperpyyaml(YAML.format(root=tmp_path))["storage"]
    for split in ("train", "valid"):
        with storage.writer(split) as writer:
            writer.write(f"{split}-1", {"fbank": np.ones((3, 4)), "units": np.arange(3)})
        assert list(storage.cache(split)) == [f"{split}-1"]
        assert storage.reader(split, "units")(f"{split}-1").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("codec: gzip", "codecs: gzip", r"no setting 'codecs'; did you mean 'codec'\?"),
        ("dtype: float16", "dtpye: float16", r"no setting 'dtpye'; did you mean 'dtype'\?"),
        ("backend: hdf5", "backend: hdf", r"no backend 'hdf' is installed; did you mean 'hdf5'\?"),
        ("codec: gzip", "codec: gzp", r"backend 'hdf5' has no codec 'gzp'; did you mean 'gzip'\?"),
        ("{level: 7}", "{levle: 7}", r"backend 'hdf5' with codec 'gzip' has no option 'levle'; did you mean 'level'\?"),
        ("{level: 7}", "{level: 12}", "level must be an integer from 0 to 9, not 12"),
        ("dtype: float16", "dtype: flaot16", r"'flaot16' cannot be stored; did you mean 'float16'"),
        ("name: fbank", "name: f/bank", "feature name 'f/bank' is not usable"),
        ("name: fbank", "nmae: fbank", r"no setting 'nmae'; did you mean 'name'\?"),
        ("    root:", "    rot:", "no setting 'rot'; it has 'root' and 'features'"),
    ],
)
def test_what_is_misspelt_in_yaml_is_named_with_the_nearest(
    tmp_path: Path, right: str, wrong: str, message: str
) -> None:
    text = YAML.format(root=tmp_path)
    assert right in text
    with pytest.raises(ConfigError, match=message):
        load_hyperpyyaml(text.replace(right, wrong))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time_axis": 1}, "time_axis 1 is not supported"),
        ({"nonfinite": "ignore"}, "nonfinite is 'error' or 'keep', not 'ignore'"),
        ({"nonfinite": "keep", "stats": True}, "no statistics of NaN and infinity"),
        ({"backend": "lilcom", "dtype": "int16"}, "codec 'lilcom' cannot hold 'int16'; it holds float32"),
        ({"backend": "memmap", "codec": "gzip"}, "backend 'memmap' has no codec 'gzip'; known: 'raw'"),
        ({"backend": "memmap", "options": {"level": 3}}, "backend 'memmap' has no option 'level'"),
        ({"dtype": "complex64"}, "dtype 'complex64' cannot be stored"),
        ({"dtype": float}, "cannot be stored"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FeatureStorageConfig("fbank", **arguments)


@pytest.mark.parametrize("name", ["", "1st", "a b", "a.b", "é", "x" * 65, "a/b", None])
def test_names_that_files_could_not_carry_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="is not usable"):
        FeatureStorageConfig(name)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float32, "float32"),
        (np.dtype("int16"), "int16"),
        (np.bool_, "bool"),
        (bool, "bool"),
        (torch.bfloat16, "bfloat16"),
        (torch.uint8, "uint8"),
        ("float64", "float64"),
    ],
)
def test_dtypes_of_numpy_and_torch_are_understood(dtype: object, name: str) -> None:
    assert FeatureStorageConfig("fbank", dtype).dtype == name


def test_floats_get_statistics_and_integers_do_not_unless_told() -> None:
    assert FeatureStorageConfig("fbank").stats
    assert FeatureStorageConfig("fbank", "bfloat16").stats
    assert not FeatureStorageConfig("units", "int16").stats
    assert FeatureStorageConfig("pitch", "int16", stats=True).stats
    assert not FeatureStorageConfig("pitch", nonfinite="keep").stats


def test_options_at_their_default_make_no_other_declaration() -> None:
    plain = FeatureStorageConfig("fbank", backend="hdf5", codec="gzip")
    spelt = FeatureStorageConfig("fbank", backend="hdf5", codec="gzip", options={"level": 4})
    other = FeatureStorageConfig("fbank", backend="hdf5", codec="gzip", options={"level": 5})
    assert plain.to_json() == spelt.to_json() != other.to_json()


def test_declarations_are_values(tmp_path: Path) -> None:
    config = FeatureStorageConfig("fbank", backend="zarr", codec="zstd", options={"level": 9})
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)  # noqa: S301
    assert hash(config) == hash(copy.copy(config))
    with pytest.raises(AttributeError):
        config.dtype = "float16"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(FeatureStorage(tmp_path, [config]))).features == {"fbank": config}  # noqa: S301


def test_a_storage_refuses_names_that_do_not_fit(tmp_path: Path) -> None:
    fbank = FeatureStorageConfig("fbank")
    assert list(FeatureStorage(tmp_path, {"fbank": fbank}).features) == ["fbank"]
    with pytest.raises(ConfigError, match="'fbank' is listed as 'mel'"):
        FeatureStorage(tmp_path, {"mel": fbank})
    with pytest.raises(ConfigError, match="same name but for upper case"):
        FeatureStorage(tmp_path, [fbank, FeatureStorageConfig("FBank")])
    with pytest.raises(ConfigError, match="at least one feature"):
        FeatureStorage(tmp_path, [])
    for split in ("", "a/b", "..", "."):
        with pytest.raises(ConfigError, match="not usable as the name of a directory"):
            FeatureStorage(tmp_path, [fbank]).path(split)
    with pytest.raises(UnknownNameError, match=r"'fbnk' is not declared; did you mean 'fbank'\?"):
        FeatureStorage(tmp_path, [fbank]).reader("train", "fbnk")

"""Declarations of features, in Python and in HyperPyYAML."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hyperpyyaml import load_hyperpyyaml

from featcache import FeatureStorage, FeatureStorageConfig, declaration
from featcache import declaration as option_rules
from featcache.errors import ConfigError, FeatureError, UnknownNameError
from featcache.registry import get_backend, get_codec

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
    assert storage.features["fbank"] == FeatureStorageConfig(
        "fbank", "float16", backend="hdf5", codec="gzip", options={"level": 7}
    )
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
        (
            "{level: 7}",
            "{levle: 7}",
            r"backend 'hdf5' with codec 'gzip' has no option 'levle'; did you mean 'level'\?",
        ),
        ("{level: 7}", "{level: 12}", "level must be an integer from 0 to 9, not 12"),
        ("dtype: float16", "dtype: flaot16", r"'flaot16' cannot be used; did you mean 'float16'"),
        ("name: fbank", "name: f/bank", "feature name 'f/bank' is not usable"),
        ("name: fbank", "nmae: fbank", r"no setting 'nmae'; did you mean 'name'\?"),
        ("    root:", "    rot:", r"no setting 'rot'; did you mean 'root'\?"),
    ],
)
def test_what_is_misspelt_in_yaml_is_named_with_the_nearest(
    tmp_path: Path, right: str, wrong: str, message: str
) -> None:
    text = YAML.format(root=tmp_path)
    assert right in text
    with pytest.raises(ConfigError, match=message):
        load_hyperpyyaml(text.replace(right, wrong))


@pytest.mark.parametrize("name", ["", "1st", "a b", "a.b", "é", "x" * 65, "a/b", None])
def test_names_that_files_could_not_carry_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="is not usable"):
        FeatureStorageConfig(name)


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
    storage = FeatureStorage(tmp_path, [config])
    assert pickle.loads(pickle.dumps(storage)).features == {"fbank": config}  # noqa: S301


def test_a_storage_refuses_names_that_do_not_fit(tmp_path: Path) -> None:
    fbank = FeatureStorageConfig("fbank")
    assert list(FeatureStorage(tmp_path, {"fbank": fbank}).features) == ["fbank"]
    with pytest.raises(ConfigError, match="'fbank' is listed as 'mel'"):
        FeatureStorage(tmp_path, {"mel": fbank})
    with pytest.raises(ConfigError, match="same name but for upper case"):
        FeatureStorage(tmp_path, [fbank, FeatureStorageConfig("FBank")])
    with pytest.raises(ConfigError, match="at least one feature"):
        FeatureStorage(tmp_path, [])
    with pytest.raises(UnknownNameError, match=r"'fbnk' is not declared; did you mean 'fbank'\?"):
        FeatureStorage(tmp_path, [fbank]).reader("train", "fbnk")


@dataclass(frozen=True)
class Shelf:
    """A format with options of all kinds."""

    codecs: ClassVar[tuple[str, ...]] = ("raw", "squeeze", "broken")
    width: int = 3
    depths: list[int] = dataclasses.field(default_factory=lambda: [1])

    def open_writer(self) -> None: ...

    def blocks(self) -> None: ...


@dataclass(frozen=True)
class Squeeze:
    """A codec that cannot do without one option, and shares a name with the format if told to."""

    name: ClassVar[str] = "squeeze"
    lossless: ClassVar[bool] = True
    dtypes: ClassVar[None] = None
    force: int


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_codec(name: str) -> type:
        if name == "squeeze":
            return Squeeze
        raise ConfigError("codec 'broken' does not load")

    for module in (option_rules, declaration):
        monkeypatch.setattr(module, "get_backend", lambda name: Shelf)
        monkeypatch.setattr(module, "get_codec", get_codec)


@pytest.mark.usefixtures("shelf")
def test_an_option_belongs_to_the_format_or_to_the_codec() -> None:
    options = {"force": 2.0, "width": 3, "depths": [1]}
    config = FeatureStorageConfig("f", codec="squeeze", options=options)
    assert option_rules.split_options("shelf", "squeeze", options) == (
        {"width": 3, "depths": [1]},
        {"force": 2},
    )
    assert config.to_json()["codec_options"] == {"force": 2}
    assert config.to_json()["options"] == {}  # those of the format are at their defaults
    with pytest.raises(ConfigError, match="feature 'f': codec 'squeeze' needs an option 'force'"):
        FeatureStorageConfig("f", codec="squeeze")
    with pytest.raises(UnknownNameError, match="no option 'force'; codec 'squeeze' has it"):
        FeatureStorageConfig("f", options={"force": 2})
    with pytest.raises(UnknownNameError, match="no option 'weight'; did you mean 'width'"):
        FeatureStorageConfig("f", options={"weight": 2})


@pytest.mark.usefixtures("shelf")
def test_an_option_that_format_and_codec_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Wide(Squeeze):
        force: int = 1
        width: int = 5

    monkeypatch.setattr(option_rules, "get_codec", lambda name: Wide)
    with pytest.raises(ConfigError, match=r"'shelf' and codec 'squeeze' both .*'width'.*rename"):
        FeatureStorageConfig("f", backend="shelf", codec="squeeze")


@pytest.mark.parametrize(
    ("dims", "frames"),
    [((80,), (80,)), ([], ()), (np.array([3, 4]), (3, 4)), (torch.Size([2]), (2,))],
)
def test_declared_dims_are_what_frames_must_have(dims: Any, frames: tuple[int, ...]) -> None:
    config = FeatureStorageConfig("f", dims=dims)
    assert config.dims == frames
    config.check_dims("u", frames, rows=7)
    with pytest.raises(FeatureError, match="utterance 'u', feature 'f': frames have shape"):
        config.check_dims("u", (*frames, 1), rows=7)


def test_the_shape_of_earlier_frames_holds_where_none_is_declared() -> None:
    config = FeatureStorageConfig("f", time_axis=None)
    config.check_dims("u", (3,))
    config.check_dims("u", (3,), before=(3,))
    with pytest.raises(
        FeatureError, match=r"arrays have shape \(4,\), those before have \(3,\); over"
    ):
        config.check_dims("u", (4,), before=(3,))
    with pytest.raises(FeatureError, match="batch axis left in"):
        config.check_dims("u", (1, 3), before=(3,))


def test_what_a_declaration_does_not_say_of_frames_is_not_in_its_json() -> None:
    plain = FeatureStorageConfig("f")
    assert not {"dims", "frame_s", "offset_s"} & plain.to_json().keys()
    assert FeatureStorageConfig("f", offset_s=0, frame_s=None, dims=None) == plain
    said = FeatureStorageConfig("f", dims=[], frame_s=0.01, offset_s=-0.0125)
    assert said.to_json() == {
        **plain.to_json(),
        "dims": [],
        "frame_s": 0.01,
        "offset_s": -0.0125,
    }
    assert FeatureStorageConfig.from_json(json.loads(json.dumps(said.to_json()))) == said
    assert dataclasses.replace(said, dtype="float16").dims == ()
    assert pickle.loads(pickle.dumps(said)) == said  # noqa: S301


def test_a_codec_that_is_a_list_is_a_typed_error() -> None:
    wrong: Any = ["gzip"]
    for get in (get_backend, get_codec):
        with pytest.raises(UnknownNameError, match=r"\['gzip'\] is installed"):
            get(wrong)
    with pytest.raises(UnknownNameError, match=r"has no codec \['gzip'\]"):
        FeatureStorageConfig("f", codec=wrong)

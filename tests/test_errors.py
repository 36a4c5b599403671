"""Errors of what is installed and declared: what is missing, and what to do about it."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hyperpyyaml import load_hyperpyyaml
from store_helpers import arrays_of, id_of, make_cache, two_features

import featcache
from featcache import CacheWriter, FeatureStorage, FeatureStorageConfig
from featcache.errors import (
    ConfigError,
    FeatcacheError,
    StaleCacheError,
    UnknownNameError,
    nearest,
)

WITHOUT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[2]:
            raise ImportError(f"No module named {name!r}")
sys.meta_path.insert(0, Blocker())
import numpy as np
import featcache
from featcache.errors import MissingDependencyError
feature = featcache.FeatureStorageConfig("fbank", backend=sys.argv[3], codec=sys.argv[4])
with featcache.CacheWriter(sys.argv[1], [feature]) as writer:
    for attempt in range(2):
        try:
            writer.write("utt-1", {"fbank": np.zeros((3, 4), np.float32)})
        except MissingDependencyError as error:
            print(error)
cache = featcache.open(sys.argv[1], verify="arrays")
print(len(cache), cache.complete)
"""


@pytest.mark.parametrize(
    ("library", "backend", "codec"),
    [("h5py", "hdf5", "raw"), ("h5py", "hdf5", "gzip"), ("lilcom", "lilcom", "lilcom")],
)
def test_a_missing_library_is_an_error_of_the_first_write(
    tmp_path: Path, library: str, backend: str, codec: str
) -> None:
    command = [
        sys.executable,
        "-W",
        "error",
        "-c",
        WITHOUT,
        str(tmp_path / "cache"),
        library,
        backend,
        codec,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    first, second, last = done.stdout.splitlines()
    assert first == second
    assert first.endswith(
        f" {backend!r} needs {library!r}; try: pip install 'featcache[{backend}]'"
    )
    assert last == "0 True"
    assert list((tmp_path / "cache" / "parts").iterdir()) == []


@pytest.mark.parametrize("backend", ["memmap", "webdataset", "hdf5", "zarr"])
def test_raw_arrays_are_read_without_the_library_of_their_format(
    tmp_path: Path, backend: str
) -> None:
    make_cache(tmp_path, range(9), two_features(backend, backend))
    program = """
import sys
for name in ("h5py", "zarr", "numcodecs", "webdataset", "lilcom", "torch"):
    sys.modules[name] = None
import featcache
cache = featcache.open(sys.argv[1], verify="arrays")
print(sum(len(cache.read(id, "fbank")) for id in cache))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) == sum(len(arrays_of(number)["fbank"]) for number in range(9))


def test_the_root_of_all_errors_prints_the_message_alone() -> None:
    for name, kind in vars(featcache.errors).items():
        if isinstance(kind, type) and issubclass(kind, FeatcacheError):
            assert str(kind("no 'x'; try y")) == "no 'x'; try y", name
            assert str(kind()) == ""
            assert issubclass(kind, FeatcacheError)


@pytest.mark.parametrize(
    ("name", "known", "message"),
    [
        ("hdf", ["hdf5", "zarr"], "did you mean 'hdf5'?"),
        ("units1", ["units2", "units3"], "did you mean 'units3' or 'units2'?"),
        ("x", ["b", "a"], "known: 'a', 'b'"),
        ("x", [], "known: none"),
        (None, ["a"], "known: 'a'"),
        (7, ["77"], "did you mean '77'?"),
    ],
)
def test_the_nearest_names_are_told(name: object, known: list[str], message: str) -> None:
    assert nearest(name, known) == message


@pytest.mark.parametrize(
    "features",
    [
        {"fbank": {"dtype": "float16"}},
        [{"name": "fbank"}],
        ["fbank"],
        FeatureStorageConfig("fbank"),
        None,
        5,
    ],
)
def test_features_that_are_no_declarations_are_refused(tmp_path: Path, features: Any) -> None:
    for make in (
        lambda: FeatureStorage(tmp_path / "a", features),
        lambda: CacheWriter(tmp_path / "b", features),
    ):
        with pytest.raises(ConfigError, match="FeatureStorageConfig"):
            make()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("split", [None, 5, Path("train"), "a\0b", "", ".", "..", "a/b"])
def test_a_split_that_is_no_name_is_refused(tmp_path: Path, split: Any) -> None:
    with pytest.raises(ConfigError, match="is not usable as the name of a directory"):
        FeatureStorage(tmp_path, [FeatureStorageConfig("fbank")]).path(split)


YAML = """
features: !new:featcache.FeatureStorageConfig
    name: fbank
    backend: memmap
storage: !new:featcache.FeatureStorage
    root: {root}
    features:
        fbank: !ref <features>
        units: !new:featcache.FeatureStorageConfig
            name: units
            dtype: int16
"""


def test_nested_settings_can_be_overridden_from_the_command_line(tmp_path: Path) -> None:
    overrides = "features:\n    backend: webdataset\n    options: {shard_bytes: 1000}"
    storage = cast(
        FeatureStorage, load_hyperpyyaml(YAML.format(root=tmp_path), overrides)["storage"]
    )
    assert storage.features["fbank"].backend == "webdataset"
    assert storage.features["fbank"].options == {"shard_bytes": 1000}
    with storage.writer("train") as writer:
        writer.write("u", {"fbank": np.zeros((2, 3)), "units": np.zeros(1, np.int16)})
    assert list(storage.cache("train")) == ["u"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("features:\n    bakend: zarr", r"no setting 'bakend'; did you mean 'backend'\?"),
        ("features:\n    backend: zar", r"no backend 'zar' is installed; did you mean 'zarr'\?"),
        (
            "features:\n    options: {shard_byte: 1}",
            "backend 'memmap' has no option 'shard_byte'; known: none",
        ),
    ],
)
def test_a_misspelt_override_is_named(tmp_path: Path, overrides: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        load_hyperpyyaml(YAML.format(root=tmp_path / "features"), overrides)
    assert list(tmp_path.iterdir()) == []


class Dataset:
    """What `attach` needs of SpeechBrain's `DynamicItemDataset`."""

    def __init__(self, **data: dict[str, object]) -> None:
        self.data = data
        self.items: dict[object, Any] = {}

    def add_dynamic_item(self, func: object, takes: object = None, provides: object = None) -> None:
        assert takes == "id"
        self.items[provides] = func


def test_attached_readers_provide_features_by_id_and_clashes_are_refused(tmp_path: Path) -> None:
    make_cache(tmp_path / "train", range(5))
    storage = FeatureStorage(tmp_path, two_features())
    dataset = Dataset(a={"wav": "a.wav"})
    with pytest.raises(featcache.errors.CacheError, match="valid"):
        storage.attach(dataset, "valid")
    with pytest.raises(UnknownNameError, match=r"'fbnak' is not declared; did you mean 'fbank'"):
        storage.attach(dataset, "train", ["fbnak"])
    with pytest.raises(ConfigError, match="has a key 'units' already"):
        storage.attach(Dataset(a={"wav": "a.wav"}, b={"units": 3}), "train")
    assert dataset.items == {}
    storage.attach(dataset, "train")
    assert sorted(dataset.items, key=str) == ["fbank", "units"]
    assert dataset.items["fbank"](id_of(3)).tolist() == arrays_of(3)["fbank"].tolist()


def test_the_libraries_that_are_blocked_here_are_installed() -> None:
    assert all(importlib.util.find_spec(name) for name in ("h5py", "lilcom"))


def test_a_stale_cache_tells_what_differs_and_what_to_do_apart(tmp_path: Path) -> None:
    make_cache(tmp_path, range(1))
    with pytest.raises(StaleCacheError) as told:
        CacheWriter(tmp_path, two_features(), {"model": "another"})
    again = pickle.loads(pickle.dumps(told.value))  # noqa: S301
    for error in (told.value, again):
        assert str(error) == f"{error.message}\n{error.cure}"
        assert "model" in error.message
        assert "overwrite=True" in error.cure
    assert StaleCacheError("it is").cure == ""

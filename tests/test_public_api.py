"""What `import featcache` gives, and what it does not bring in."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import featcache
import featcache.errors

HEAVY = {
    "torch",
    "dask",
    "h5py",
    "zarr",
    "numcodecs",
    "lilcom",
    "webdataset",
    "lhotse",
    "speechbrain",
    "numpy",
}

PUBLIC = [
    "AdoptionError",
    "Cache",
    "CacheError",
    "CacheLockedError",
    "CacheWriter",
    "ClosedError",
    "CollectStatsRunner",
    "CommonCollateFn",
    "ComputeError",
    "ConfigError",
    "CorruptCacheError",
    "DuplicateIdError",
    "EnvironmentProvider",
    "Estimate",
    "FeatcacheError",
    "FeatureCacheMixin",
    "FeatureDataset",
    "FeatureError",
    "FeatureLoader",
    "FeatureReader",
    "FeatureStats",
    "FeatureStorage",
    "FeatureStorageConfig",
    "FeatureTable",
    "FormatVersionError",
    "GlobalMVN",
    "IncompleteError",
    "KeyNotFoundError",
    "MissingDependencyError",
    "NotACacheError",
    "PaddedFeatures",
    "ParallelConfig",
    "ReadThrough",
    "ReadThroughDataset",
    "RowError",
    "Seconds",
    "StaleCacheError",
    "StateError",
    "StorageFullError",
    "UnknownNameError",
    "WindowError",
    "Windows",
    "adopt",
    "backend_names",
    "cache",
    "codec_names",
    "concat",
    "convert",
    "diff",
    "errors",
    "estimate",
    "extract",
    "get_backend",
    "get_client",
    "get_codec",
    "iterators",
    "join",
    "made_from",
    "open",
    "provenance",
    "samplers",
    "through",
    "unpad",
    "utterances",
    "with_worker_env",
    "worker_env",
]


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_importing_featcache_brings_in_neither_torch_nor_dask_nor_a_format() -> None:
    assert not loaded_after("import featcache") & HEAVY


def test_declaring_features_of_all_formats_brings_in_neither_torch_nor_a_format() -> None:
    declare = (
        "for name in featcache.backend_names(): featcache.FeatureStorageConfig('fbank', "
        "backend=name)"
    )
    assert loaded_after(f"import featcache\n{declare}") & HEAVY <= {"numpy"}


def test_opening_and_reading_a_cache_brings_in_no_bar_and_no_torch(tmp_path: Path) -> None:
    with featcache.CacheWriter(tmp_path, [featcache.FeatureStorageConfig("f")]) as writer:
        writer.write("u", {"f": np.ones((3, 2))})
    code = f"import featcache; featcache.open({str(tmp_path)!r}).read('u', 'f')"
    assert not loaded_after(code) & (HEAVY - {"numpy"} | {"tqdm"})


@pytest.mark.parametrize("name", featcache.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    assert getattr(featcache, name).__doc__
    assert name in dir(featcache)


def test_every_error_can_be_caught_by_its_name_in_the_package() -> None:
    code = "import featcache; featcache.errors.nearest; featcache.StaleCacheError"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    errors = {
        name: value
        for name, value in vars(featcache.errors).items()
        if isinstance(value, type) and issubclass(value, featcache.FeatcacheError)
    }
    assert errors.keys() <= set(featcache.__all__)
    assert all(getattr(featcache, name) is value for name, value in errors.items())


def test_type_checkers_know_the_same_names() -> None:
    tree = ast.parse(Path(featcache.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    homes = {
        alias.asname or alias.name: node.module
        for node in ast.walk(typed)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("featcache")
        for alias in node.names
    }
    modules = dict.fromkeys(featcache._MODULES, "featcache")
    assert homes == featcache._HOMES | modules
    assert list(featcache._HOMES) == sorted(featcache._HOMES)


def test_the_public_names_are_these() -> None:
    """A name that comes or goes is a decision; see also the change log."""
    assert featcache.__all__ == PUBLIC


def test_no_module_hides_a_public_function() -> None:
    # `import featcache.x` would put the module in the function's place
    modules = {module.name for module in pkgutil.iter_modules(featcache.__path__)}
    assert modules & set(PUBLIC) == {*featcache._MODULES, "errors"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FeatureStore'"):
        _ = featcache.FeatureStore


def test_the_version_is_that_of_the_package() -> None:
    assert featcache.__version__ == importlib.metadata.version("featcache")


def test_every_error_is_drawn_in_the_tree_with_the_builtin_that_it_is() -> None:
    tree = (featcache.errors.__doc__ or "").splitlines()
    for name, error in vars(featcache.errors).items():
        if isinstance(error, type) and issubclass(error, featcache.FeatcacheError):
            (line,) = (line for line in tree if f" {name} " in f" {line.strip('│├└─ ')} ")
            for base in error.__bases__:
                if base.__module__ == "builtins" and base is not Exception:
                    assert f"({base.__name__})" in line

"""What `import featcache` gives, and what it does not bring in."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from places import ROOT

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
    "Cache",
    "CacheWriter",
    "EnvironmentProvider",
    "FeatcacheError",
    "FeatureCacheMixin",
    "FeatureDataset",
    "FeatureLoader",
    "FeatureReader",
    "FeatureStats",
    "FeatureStorage",
    "FeatureStorageConfig",
    "FeatureTable",
    "GlobalMVN",
    "KeyNotFoundError",
    "ParallelConfig",
    "Seconds",
    "StaleCacheError",
    "Windows",
    "adopt",
    "cache",
    "concat",
    "convert",
    "errors",
    "extract",
    "join",
    "mix",
    "open",
    "samplers",
    "taps",
    "through",
    "unpad",
    "utterances",
]
MODULES = {
    "errors",
    "espnet",
    "inspect",
    "registry",
    "samplers",
    "testing",
    "transfer",
    "workers",
}


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
        "for name in featcache.registry.backend_names(): featcache.FeatureStorageConfig('fbank', "
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


def test_errors_are_caught_by_their_names_in_a_module_of_their_own() -> None:
    code = "import featcache; featcache.errors.nearest; featcache.StaleCacheError"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for name in ("FeatcacheError", "KeyNotFoundError", "StaleCacheError"):
        assert getattr(featcache, name) is getattr(featcache.errors, name)


def test_a_look_shows_the_public_names_and_the_modules_beside_them() -> None:
    assert set(dir(featcache)) - {"__all__", "__version__"} == set(PUBLIC) | MODULES
    code = """if True:
        import os, sys
        import featcache
        for name in sys.argv[1:]:  # each as the first of its process
            if os.fork() == 0:
                getattr(featcache, name)
                os._exit(0)
            assert os.wait()[1] == 0, name
    """
    subprocess.run([sys.executable, "-c", code, *MODULES], check=True)


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


STABLE = (ROOT / "docs" / "stability.md").read_text("utf-8")


def stable_names() -> dict[str, list[str]]:
    """The names that the page on what stays tells one by one, by module."""
    rows = re.findall(r"^\| `(featcache[.\w]*)` \| (`.*`) \|$", STABLE, re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def test_the_page_on_what_stays_has_the_public_names() -> None:
    told = stable_names()
    assert told.pop("featcache") == PUBLIC
    for module, names in told.items():
        there = importlib.import_module(module)
        assert all(getattr(there, name).__doc__ for name in names), module


def test_what_pages_and_recipes_import_is_on_the_page_on_what_stays() -> None:
    told = stable_names()
    packages = re.search(r"^\| (.*) \| all that the package itself has", STABLE, re.MULTILINE)
    assert packages is not None
    whole = set(re.findall(r"`([\w.]+)`", packages[1]))
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.py")]
    found = [
        (module, name)
        for page in pages
        if page.name != "decisions.md"
        for module, names in re.findall(
            r"from (featcache\.[\w.]+) import ([\w, ]+)", page.read_text("utf-8")
        )
        for name in re.findall(r"\w+", names)
        if module not in whole
    ]
    assert len(found) > 5
    assert [each for each in found if each[1] not in told.get(each[0], ())] == []


def test_no_module_hides_a_public_function() -> None:
    # `import featcache.x` would put the module in the function's place
    modules = {module.name for module in pkgutil.iter_modules(featcache.__path__)}
    assert modules & set(PUBLIC) == {"errors", "samplers"}
    assert modules >= MODULES


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

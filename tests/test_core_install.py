"""A core install: looking at the package never fails; what is missing is said when it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import featcache
from featcache.errors import MissingDependencyError
"""
EXTRAS = (
    "distributed,dask,dask_jobqueue,cloudpickle,h5py,zarr,numcodecs,lilcom,webdataset,lhotse,"
    "datasets,speechbrain"
)


def run_without(libraries: str, program: str) -> str:
    command = [sys.executable, "-W", "error", "-c", WITHOUT + program, libraries]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOOKS = (
    "assert 'get_client' in dir(featcache.workers)",
    "import inspect; inspect.signature(featcache.workers.get_client)",
    "import inspect; assert dict(inspect.getmembers(featcache.workers))['get_client'].__doc__",
    "import rlcompleter; completer = rlcompleter.Completer(globals()); "
    "assert completer.complete('featcache.workers.get_cl', 0)",
    "import pydoc; assert 'get_client' in pydoc.plain(pydoc.render_doc(featcache.workers))",
    "assert all(hasattr(featcache, name) for name in featcache.__all__)",
    "from featcache import *",
    "import pydoc; assert 'workers' in pydoc.render_doc(featcache)",
    "import unittest.mock; unittest.mock.create_autospec(featcache)",
)


def test_a_look_at_the_package_does_not_fail() -> None:
    # one process for all: it imports torch, which takes most of the time
    program = f"""
for look in {LOOKS!r}:
    exec(look, dict(globals()))
    print(look)
"""
    assert run_without(EXTRAS, program).splitlines() == list(LOOKS)


def test_a_missing_library_is_an_error_of_use_and_says_what_to_install() -> None:
    program = """
try:
    featcache.workers.get_client({"env": "local"})
except MissingDependencyError as error:
    print(error)
print(featcache.workers.get_client.__name__, featcache.workers.get_client.__doc__)
"""
    said, looked = run_without(EXTRAS, program).splitlines()
    assert "pip install 'featcache[dask]'" in said
    assert looked.startswith("get_client ")
    assert "pip install 'featcache[dask]'" in looked


@pytest.mark.parametrize("library", ["pytest", "hypothesis"])
def test_the_tests_for_backends_say_what_they_need(library: str) -> None:
    program = """
try:
    import featcache.testing
except MissingDependencyError as error:
    print(error)
"""
    said = run_without(library, program)
    assert f"needs {library!r}" in said
    assert "pip install 'featcache[testing]'" in said


def test_what_other_toolkits_need_is_said_by_name() -> None:
    program = """
for name in ("speechbrain", "huggingface"):
    try:
        __import__(f"featcache.interop.{name}")
    except MissingDependencyError as error:
        print(error)
"""
    speechbrain, huggingface = run_without(EXTRAS, program).splitlines()
    assert "needs 'speechbrain'" in speechbrain
    assert "pip install 'featcache[speechbrain]'" in speechbrain
    assert "pip install 'featcache[huggingface]'" in huggingface


def test_a_report_says_what_would_tell_more(tmp_path: Path) -> None:
    program = f"""
import numpy as np
path = {str(tmp_path / "cache")!r}
with featcache.CacheWriter(path, [featcache.FeatureStorageConfig("fbank")]) as writer:
    writer.write("a", {{"fbank": np.arange(40.0).reshape(10, 4)}})
featcache.inspect.report(path, {str(tmp_path / "report.html")!r})
"""
    run_without(EXTRAS, program)
    page = (tmp_path / "report.html").read_text()
    assert "pip install &#x27;featcache[zarr]&#x27;" in page
    assert "float16 bytes of fbank" in page
    assert "zstd of fbank" not in page


@pytest.mark.parametrize(
    ("declared", "library", "extra"),
    [
        ('backend="hdf5"', "h5py", "hdf5"),
        ('backend="zarr", codec="zstd"', "zarr,numcodecs", "zarr"),
        ('backend="lilcom"', "lilcom", "lilcom"),
    ],
)
def test_a_format_without_its_library_says_what_to_install(
    tmp_path: Path, declared: str, library: str, extra: str
) -> None:
    program = f"""
import numpy
try:
    feature = featcache.FeatureStorageConfig("f", {declared})
    with featcache.CacheWriter({str(tmp_path / "cache")!r}, [feature]) as writer:
        writer.write("u", {{"f": numpy.ones((3, 2))}})
except MissingDependencyError as error:
    print(error)
"""
    said = run_without(library, program)
    assert f"pip install 'featcache[{extra}]'" in said


def test_a_table_that_goes_to_a_toolkit_says_what_to_install(tmp_path: Path) -> None:
    program = f"""
import numpy as np
with featcache.CacheWriter({str(tmp_path)!r}, [featcache.FeatureStorageConfig("f")]) as writer:
    writer.write("a", {{"f": np.ones((1, 1))}})
cache = featcache.open({str(tmp_path)!r})
for call in ("to_cuts(sample_rate_hz=1)", "to_features(sample_rate_hz=1)", "to_hf_dataset()"):
    try:
        eval(f"cache.{{call}}")
    except MissingDependencyError as error:
        print(error)
"""
    said = run_without("datasets,lhotse", program).splitlines()
    assert len(said) == 3
    for extra, line in zip(("lhotse", "lhotse", "huggingface"), said, strict=True):
        assert f"pip install 'featcache[{extra}]'" in line

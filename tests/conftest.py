from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
from hypothesis import settings

from featcache import FeatureStorage, FeatureStorageConfig

# the same examples every time; `pytest --hypothesis-profile explore` tries new ones
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("steady")

# Python 3.14 starts workers from a fork server: with torch loaded they start as fast as forks
PRELOADED = ["torch", "speechbrain", "distributed"]
multiprocessing.set_forkserver_preload(PRELOADED)

# Beside a busy program two threads of torch spin until they meet, at each operation: one takes a
# fraction of their time. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts tests in the background has them ignore Ctrl-C, and their children with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every cache is made durable several times over: 0.3 s on an ordinary disk, a tenth of that on one
# in memory, which is cleaned up at once. Set TMPDIR to have the files on disk, and to look at those
# of failed tests.
MEMORY_DISK = Path("/dev/shm")
if (
    "TMPDIR" not in os.environ
    and os.access(MEMORY_DISK, os.W_OK)
    and shutil.disk_usage(MEMORY_DISK).free > 4 << 30
):
    in_memory = tempfile.mkdtemp(prefix="featcache-tests-", dir=MEMORY_DISK)
    os.environ["TMPDIR"] = tempfile.tempdir = in_memory
    # after multiprocessing has removed its own directory, which it does at -100
    Finalize(None, shutil.rmtree, [in_memory], {"ignore_errors": True}, exitpriority=-200)


@pytest.fixture
def storage(tmp_path: Path) -> FeatureStorage:
    """Two features, as the Brains of the tests compute them."""
    features = [FeatureStorageConfig("ssl"), FeatureStorageConfig("units", dtype="int16")]
    return FeatureStorage(tmp_path / "features", features)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems() -> None:
    leave_lazy_modules_alone()


def pytest_collection_finish() -> None:
    # eight thousand tests are a large heap, and each collection of it takes half a second
    # (from 3.14 on hypothesis does not find out any more who refers to a frozen object)
    if sys.version_info < (3, 14):
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    leave_lazy_modules_alone()


def leave_lazy_modules_alone() -> None:
    # Hypothesis asks every imported module for its `__file__`, and speechbrain's lazy ones then
    # import what need not be installed: https://github.com/speechbrain/speechbrain/issues/2995
    lazy = sys.modules.get("speechbrain.utils.importutils")
    if lazy is not None:
        lazy.LazyModule.__file__ = None


@pytest.fixture
def quick_workers() -> Iterator[None]:
    """Dask's local workers come from the fork server; they have the environment of its start."""
    import dask
    from distributed.utils import get_mp_context

    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        get_mp_context()  # type: ignore[no-untyped-call]  # preloads what it needs alone
        multiprocessing.set_forkserver_preload(PRELOADED)
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with four megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    gc.collect()
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    # dask_jobqueue 0.9.0, which other tests import, makes Ctrl-C a silent end
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

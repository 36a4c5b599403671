"""A real SLURM of one node on this machine, for all tests of this directory; `start.sh install`
installs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

START = Path(__file__).with_name("start.sh")
DAEMONS = ("munged", "slurmctld", "slurmd")


@pytest.fixture(scope="package", autouse=True)
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start a SLURM for the tests, and stop it after them."""
    pytest.importorskip("dask_jobqueue")
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    missing = [daemon for daemon in DAEMONS if shutil.which(daemon, path=path) is None]
    if missing:
        pytest.skip(f"no SLURM here ({', '.join(missing)} missing); try, as root: {START} install")
    if os.geteuid() != 0:
        pytest.skip("only root can start SLURM")
    directory = tmp_path_factory.mktemp("slurm")
    started = subprocess.run(
        [START, "start", directory], capture_output=True, text=True, timeout=60
    )
    try:
        if started.returncode != 0:
            pytest.fail(f"SLURM does not start: {started.stderr}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(directory / "slurm.conf"))
            yield
    finally:
        subprocess.run([START, "stop", directory], check=True, timeout=60)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    """Of jobs that share the node."""
    return {
        "cores": 1,
        "processes": 1,
        "memory": "1GB",
        "interface": "lo",
        "log_directory": str(tmp_path / "logs"),
    }

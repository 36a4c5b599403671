"""Workers compute with the code and constants that the driver has, or the run is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = """
COEF = 2.0

def scaled(x):
    return x * COEF

class Adapter:
    def __call__(self, x):
        return x + 1
"""
MAIN = """
import sys
import numpy as np
import featcache
import helpers

class Tones(featcache.EnvironmentProvider):
    def build_env_local(self):
        return {"dataset": [3, 4], "ids": ["a", "b"], "compute_features": self.compute}

    def compute(self, items):
        adapter = helpers.Adapter()
        tones = [adapter(helpers.scaled(np.ones((n, 2), np.float32))) for n in items]
        return [{"id": "ab"[n - 3], "tone": tone} for n, tone in zip(items, tones)]

def louder(self, x):
    return x + 2

if __name__ == "__main__":
    CHANGE
    declared = [featcache.FeatureStorageConfig("tone")]
    parallel = {"env": "local", "n_workers": 1}
    cache = featcache.extract(
        Tones(), sys.argv[1], declared, parallel=parallel, progressbar=False, retries=0
    )
    print("computed", cache["a"]["tone"].max())
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("pass", "computed 3.0"),
        ("helpers.COEF = 3.0", "scaled.COEF: was 3.0, now 2.0"),
        ("helpers.Adapter.__call__ = louder", "Adapter.__call__: was (absent), now "),
    ],
)
def test_what_the_driver_changed_elsewhere_does_not_go_unnoticed(
    tmp_path: Path, change: str, told: str
) -> None:
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "main.py").write_text(MAIN.replace("CHANGE", change))
    done = subprocess.run(
        [sys.executable, "main.py", str(tmp_path / "tones")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert told in done.stdout + done.stderr
    assert (done.returncode == 0) == (change == "pass")

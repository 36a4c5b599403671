"""Scripts that use the store in a process of their own, as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
HEAD = """
import os, sys
from pathlib import Path
import numpy as np
import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.writing.part_writer import PartWriter
from store_helpers import FINGERPRINT, arrays_of, check_cache, id_of, make_cache
from store_helpers import two_features, write
path = Path(sys.argv[1])
"""


def run_script(
    source: str, *arguments: object, options: tuple[str, ...] = (), timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a script of which `HEAD` is the beginning; its path is the first of the arguments."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *options, "-c", HEAD + source, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )

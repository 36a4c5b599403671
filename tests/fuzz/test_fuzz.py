"""Mutations of our bytes, for every reader of them: typed errors alone, in time, in little memory.

`make fuzz` runs it; FEATCACHE_FUZZ multiplies the inputs, FEATCACHE_FUZZ_SEED chooses others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_caches import make_caches
from fuzz_children import run_inputs
from fuzz_format import map_everything
from fuzz_report import TIMES, report
from fuzz_targets import Targets

INPUTS = {"readers": 7_000, "journals": 6_000, "codecs": 6_000, "writers": 1_000}

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    map_everything()
    make_caches(path)
    (path / "outside").mkdir()
    (path / "outside" / "journal.jsonl").write_bytes(b"not ours")
    return path


@pytest.mark.parametrize("target", INPUTS)
def test_no_input_does_harm(root: Path, target: str) -> None:
    count = round(INPUTS[target] * TIMES)
    report(target, run_inputs(getattr(Targets(root), target), range(count), root / "work" / target))

"""Mutations of our bytes, for every reader of them: typed errors alone, in time, in little memory.

`make fuzz` runs it; FEATCACHE_FUZZ multiplies the inputs, FEATCACHE_FUZZ_SEED chooses others.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
from fuzz_caches import make_caches
from fuzz_children import Outcome, run_inputs
from fuzz_format import map_everything
from fuzz_targets import Targets

TIMES = float(os.environ.get("FEATCACHE_FUZZ", "1"))
INPUTS = {"readers": 7_000, "journals": 6_000, "codecs": 6_000, "writers": 1_000}
SHOWN = 40

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


def report(name: str, outcomes: Iterable[Outcome]) -> None:
    """Print a total and all kinds of harm; fail if there is any."""
    kinds: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    total = 0
    for outcome in outcomes:
        total += 1
        if outcome.what is not None:
            text = re.sub(r"'[^']*'|[0-9]+", "*", outcome.what.split(";")[0])
            kinds[(outcome.where, text)].append(outcome)
    harmful = sum(map(len, kinds.values()))
    print(f"\nfuzz, {name}: {total:,} inputs: {harmful} did harm, in {len(kinds)} ways")
    for (where, _), alike in sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:SHOWN]:
        first = min(alike, key=lambda outcome: outcome.number)
        print(
            f"  {len(alike)} times, first of input {first.number}: {first.what}\n      at {where}"
        )
    assert not harmful

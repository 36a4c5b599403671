"""Hundreds of changes of two recipes: those that matter are noticed, the others cost nothing.

`make rightness` runs them. For each change the recipe is run, changed, and run again in a new
process; the changed recipe in an empty directory tells whether the change matters. All changes are
tried on the recipe's own way into a cache (the mixin, or `extract`), some on all ways, which
`brain_ways.py` and `plain_ways.py` hold. Environment variables, prefixed with FEATCACHE_RIGHTNESS:

- none behind it: the share that must be noticed, in percent;
- _ONLY: a pattern of the changes that are tried, "kind: name";
- _WAYS: the further ways, apart by commas;
- _SHARE: the share of the changes that are tried on these, in percent; 100 tries all;
- _JSON: a file for all outcomes.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import changes_code
import changes_data
import changes_dynamic
import changes_held
import changes_known
import changes_libraries
import changes_modules
import changes_names
import changes_objects
import changes_plain
import changes_values
import harmless_code
import harmless_data
import harmless_held
import harmless_layout
import harmless_settings
import harmless_unused
import pytest
from rightness_changes import Change
from rightness_corpus import make_corpus
from rightness_report import Tally, named
from rightness_stage import Outcome, Stage

LISTS = (
    changes_code,
    changes_plain,
    changes_objects,
    changes_held,
    changes_known,
    changes_values,
    changes_dynamic,
    changes_modules,
    changes_names,
    changes_data,
    changes_libraries,
    harmless_code,
    harmless_layout,
    harmless_unused,
    harmless_settings,
    harmless_held,
    harmless_data,
)
CHANGES: list[Change] = [change for each in LISTS for change in each.CHANGES]
OWN = {"brain": "mixin", "plain": "extract"}  # a recipe's own way
WAYS = ("mixin", "extract", "data set", "function", "decorator", "workers", "dask")
PROCESSES = 2
NOTICED = float(os.environ.get("FEATCACHE_RIGHTNESS", "97")) / 100
NAMED = NOTICED * 93 / 97
ONLY = os.environ.get("FEATCACHE_RIGHTNESS_ONLY", "")
SHARE = float(os.environ.get("FEATCACHE_RIGHTNESS_SHARE", "10")) / 100
FURTHER = os.environ.get("FEATCACHE_RIGHTNESS_WAYS", ",".join(WAYS)).split(",")
SEED = 24
# kinds and names of changes that a way may see otherwise; what-is-checked.md says why
OF_MIXIN = {"precision of evaluation", "precision of evaluation, set too late"}
OF_SETTINGS = {"the batch size"}  # an argparse.Namespace that an object holds counts as a whole
OF_HELD = (
    OF_MIXIN | OF_SETTINGS | {"an identifier of the run", "an entry of a table that is not used"}
)
OF_ARGUMENTS = {"data", "harmless data", "harmless libraries"}
OTHERWISE = {
    "mixin": OF_SETTINGS,
    "extract": OF_MIXIN,
    "data set": OF_HELD | {"moved, and one recording changed"},
    **dict.fromkeys(("function", "decorator", "workers"), OF_HELD | OF_ARGUMENTS),
}


def test_the_list_has_no_change_twice() -> None:
    names = [(change.recipe, change.kind, change.name) for change in CHANGES]
    assert sorted(names) == sorted(set(names))


@pytest.fixture(scope="module")
def tallies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tally]:
    root = tmp_path_factory.mktemp("rightness")
    make_corpus(root / "corpus")
    chosen = [each for each in CHANGES if re.search(ONLY, f"{each.kind}: {each.name}")]
    on_all = set(random.Random(SEED).sample(chosen, round(SHARE * len(chosen))))
    with ThreadPoolExecutor(PROCESSES) as pool:
        shares = [chosen[first::PROCESSES] for first in range(PROCESSES)]
        tried = [pool.submit(_try, share, on_all, root, at) for at, share in enumerate(shares)]
        outcomes = [outcome for each in tried for outcome in each.result()]
    found = {way: Tally(way, (each for each in outcomes if each.way == way)) for way in WAYS}
    found["own"] = Tally("own", (each for each in outcomes if each.way == OWN[each.change.recipe]))
    found["own"].print()
    for way in FURTHER:
        found[way].print_otherwise(found["own"])
    if "FEATCACHE_RIGHTNESS_JSON" in os.environ:
        _write(outcomes, Path(os.environ["FEATCACHE_RIGHTNESS_JSON"]))
    return found


@pytest.fixture(scope="module")
def tally(tallies: dict[str, Tally]) -> Tally:
    return tallies["own"]


def _try(
    changes: Sequence[Change], on_all: Collection[Change], root: Path, number: int
) -> list[Outcome]:
    stage = Stage(root / f"stage-{number}", root / "corpus")
    found: list[Outcome] = []
    try:
        for change in changes:
            further = FURTHER if change in on_all else []
            found += stage.attempt(change, [*dict.fromkeys((OWN[change.recipe], *further))])
    finally:
        stage.close()
    return found


def _write(outcomes: Sequence[Outcome], path: Path) -> None:
    rows = [
        {
            "name": outcome.change.name,
            "kind": outcome.change.kind,
            "recipe": outcome.change.recipe,
            "way": outcome.way,
            "expected": outcome.change.expected,
            "matters": outcome.matters,
            "how": outcome.how,
            "worst": outcome.worst,
            "named": named(outcome),
            "message": outcome.message,
            "log": outcome.log,
        }
        for outcome in outcomes
    ]
    path.write_text(json.dumps(rows, indent=1))


@pytest.mark.timeout(21600)  # 20 minutes, many times that on a busy machine
def test_all_changes_can_be_judged(tally: Tally) -> None:
    assert [outcome.change.name for outcome in tally.broken] == []
    if not ONLY:
        assert len(tally.matter) >= 150
        assert len(tally.rest) >= 100


def test_changes_that_matter_are_noticed(tally: Tally) -> None:
    missed, matter = len(tally.missed), len(tally.matter)
    assert missed <= (1 - NOTICED) * matter


def test_messages_name_the_cause(tally: Tally) -> None:
    unnamed, refused = len(tally.unnamed), len(tally.refused)
    assert unnamed <= (1 - NAMED) * refused


def test_no_clear_change_is_refused(tally: Tally) -> None:
    refused = [outcome.change.name for outcome in tally.false_clear]
    assert len(refused) <= 1


@pytest.mark.parametrize("way", WAYS)
def test_a_further_way_has_the_same_verdicts(way: str, tallies: dict[str, Tally]) -> None:
    tally = tallies[way]
    others = [each.change for each in tally.otherwise(tallies["own"])]
    may_be = OTHERWISE.get(way, set())
    assert [each.name for each in others if may_be.isdisjoint((each.kind, each.name))] == []
    assert [outcome.change.name for outcome in tally.broken] == []
    assert len(tally.unnamed) <= 1 + (1 - NAMED) * len(tally.refused)  # of few

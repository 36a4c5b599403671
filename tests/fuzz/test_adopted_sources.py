"""Mutations of others' files, for every kind that is adopted: typed errors, in time and memory.

What is adopted all the same is read, collected, and opened again. `make fuzz` tries 20,000;
FEATCACHE_FUZZ_SOURCES=0.1 a tenth of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
from fuzz_children import Fine, run_inputs, typed
from fuzz_report import TIMES, report
from fuzz_sources import MADE, mutated
from fuzz_targets import SEED

import featcache
from featcache import Cache
from featcache.errors import FeatcacheError

INPUTS = 20_000
TIMES_SOURCES = float(os.environ.get("FEATCACHE_FUZZ_SOURCES", "1"))
CONVERTED = ("hdf5", "pt", "kaldi")  # kinds that are converted now and then, too

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(7200),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources")
    for name, (_, make) in MADE.items():
        (path / name).mkdir()
        named = make(path / name)
        (path / f"{name}.named").write_text(named)
    return path


def test_every_source_is_adopted_as_it_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (kind, _) in MADE.items():
        monkeypatch.chdir(root / name)
        source = root / name / (root / f"{name}.named").read_text()
        with featcache.adopt(source, root / "caches" / name) as cache:
            cache.collect()
            assert len(cache) >= 4
            assert cache.fingerprint["adopted"] == kind


def test_no_mutation_of_a_source_does_harm(root: Path) -> None:
    count = round(INPUTS * TIMES * TIMES_SOURCES)
    report("sources", run_inputs(partial(_input, root), range(count), root / "work"))


def _input(root: Path, number: int, directory: Path) -> Fine:
    chance = Random(f"{SEED} sources {number}")
    name = [*MADE][number % len(MADE)]
    kind, _ = MADE[name]
    place = directory / str(os.getpid()) / str(number)
    folder = shutil.copytree(root / name, place / "source")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for _ in range(chance.choice((1, 1, 1, 2))):
        file = chance.choice(files)
        file.write_bytes(mutated(file, chance.choice(files).read_bytes(), chance))
    source = folder / (root / f"{name}.named").read_text()
    os.chdir(folder)  # relative paths of lhotse's manifests are from there
    try:
        if kind in CONVERTED and chance.random() < 0.1:
            typed(partial(featcache.convert, source, place / "converted"))
        return Fine(f"{kind}: {_adopted(source, place / 'cache', chance.choice((kind, None)))}")
    finally:
        os.chdir(root)
        shutil.rmtree(place)


def _adopted(source: Path, path: Path, kind: str | None) -> str:
    try:
        cache = featcache.adopt(source, path, kind=kind)
    except FeatcacheError as error:
        return f"refused by {type(error).__name__}"
    with cache:
        first = _read(cache)
        typed(cache.collect)
    again: list[Cache] = []
    typed(lambda: again.append(featcache.open(path, check_reads=True, mapped=False)))
    for opened in again:
        with opened:
            _read(opened)
    return f"adopted, {first}"


def _read(cache: Cache) -> str:
    """Read all that there is, whole and in windows."""
    refused = 0
    for name in cache.features:
        typed(partial(cache.stats, name), partial(cache.lengths, name))
        calls: list[Callable[[], object]] = []
        for id in cache.ids:
            calls += [partial(cache.read, id, name), partial(cache.read, id, name, 1, 3)]
        for call in calls:
            try:
                call()
            except FeatcacheError:
                refused += 1
        typed(partial(cache.read_batch, list(cache.ids), name))
    return "not all is read" if refused else "all is read"

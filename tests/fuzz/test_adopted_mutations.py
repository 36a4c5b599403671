"""Mutations of caches that adopted a source, for readers and writers: the source never changes."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from fuzz_caches import picture
from fuzz_children import run_inputs, typed
from fuzz_format import map_everything
from fuzz_report import TIMES, report
from fuzz_targets import SEED, _mutate

import featcache
from featcache import Cache, FeatureStorageConfig
from featcache.adoptable import Found, FoundFeature
from featcache.adoption.adopt import Source, publish_adopted
from featcache.errors import FeatcacheError

INPUTS = 2_000
IDS = [f"utt-{number}" for number in range(6)]
KEY = "source"
HOW: list[dict[str, Any]] = [
    *({}, {}, {"mapped": False}, {"verify": "columns"}),
    *({"verify": "arrays"}, {"check_reads": True}),
]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(3600),
]


def adopt_files(path: Path, source: Path) -> Cache:
    for number, id in enumerate(IDS):
        np.save(source / f"{id}.npy", np.full((number, 3), number, np.float32))
    return featcache.adopt(source, path)


def adopt_blocks(path: Path, source: Path) -> Cache:
    """Adopt blocks of four rows, of which one is left out at the front."""
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    block = zlib.compress(rows[:4].tobytes())
    (source / "blocks").write_bytes(block * 2 * len(IDS))
    count, sizes = len(IDS), np.full(2 * len(IDS), len(block))
    feature = FoundFeature(
        dtype="float32",
        dims=(3,),
        has_frames=True,
        rows=np.full(count, 6),
        first=np.arange(0, 2 * count + 1, 2),
        container=np.zeros(2 * count, np.int32),
        offset=np.cumsum(sizes) - sizes,
        nbytes=sizes,
        codec="gzip",
        options={"shuffle": False},
        block_rows=np.full(count, 4),
        skip=np.full(count, 1),
    )
    declared = FeatureStorageConfig(
        "feats", backend="hdf5", codec="gzip", options={"shuffle": False}
    )
    status = (source / "blocks").stat()
    files = Source("blocks", source, ["blocks"], [status.st_size], [status.st_mtime_ns])
    found = Found(["blocks"], IDS, {"feats": feature}, {"speaker": list("abcdef")})
    publish_adopted(path, {"feats": declared}, found, files, overwrite=False)
    return featcache.open(path)


MADE: dict[str, Callable[[Path, Path], Cache]] = {"files": adopt_files, "blocks": adopt_blocks}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    map_everything()
    for name, make in MADE.items():
        (path / name / KEY).mkdir(parents=True)
        make(path / name / "fresh", path / name / KEY).delete(IDS[:1])
        shutil.copytree(path / name / "fresh", path / name / "collected")
        featcache.open(path / name / "collected").collect()
    return path


def test_no_mutation_does_harm(root: Path) -> None:
    count = round(INPUTS * TIMES)
    report("adopted", run_inputs(partial(_input, root), range(count), root / "work"))


def _input(root: Path, number: int, directory: Path) -> str | None:
    chance = Random(f"{SEED} adopted {number}")
    home = root / chance.choice([*MADE])
    source = picture(home / KEY)
    place = directory / str(os.getpid()) / str(number)
    path = shutil.copytree(home / chance.choice(("fresh", "collected")), place)
    files = sorted(each for each in path.rglob("*") if each.is_file() and each.suffix != ".lock")
    file = chance.choice(files)
    try:
        _mutate(path, file, chance.choice(files).read_bytes(), chance)
        _read_all(path, chance.choice(HOW))
        if chance.random() < 0.3:
            _edit(path)
            _read_all(path, {})
    finally:
        shutil.rmtree(place)
    return None if picture(home / KEY) == source else "source: a file was changed"


def _read_all(path: Path, how: dict[str, Any]) -> None:
    try:
        opened = featcache.open(path, **how)
    except FeatcacheError:
        return
    ids: list[str] = []
    typed(lambda: ids.extend(opened), lambda: opened.stats("feats"))
    typed(lambda: opened.read_batch(ids, "feats"), lambda: opened.lengths("feats"))
    for id in ids:
        typed(partial(opened.read, id, "feats"), partial(opened.read, id, "feats", 1, 2))


def _edit(path: Path) -> None:
    try:
        opened = featcache.open(path)
    except FeatcacheError:
        return
    typed(lambda: opened.delete(IDS[1:2]), opened.compact, opened.collect)

"""Damage in any byte of a cache, and files cut, lost, exchanged: `verify="arrays"` finds all of it.

FEATCACHE_FUZZ multiplies how many bytes are tried; from 6 on, every byte of files below 4 KiB.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from eight_layouts import open_writer, write
from feature_set_helpers import add
from file_names import sort_of
from fuzz_caches import KINDS, OF_SETS, decide, picture, sealed_files
from fuzz_children import Outcome, run_inputs
from fuzz_report import TIMES, report
from fuzz_targets import SEED

import featcache
from featcache.errors import CacheError

FLIPS = 24_000  # tried at all
SMALL, SAMPLED = 4096, 400  # each byte of files below, else so many
CUTS = 3  # lengths that a file is cut to

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(3600),
]


@dataclass(frozen=True)
class Damage:
    """What is done to a file, or a directory, of a cache."""

    layout: str
    kind: str
    file: str
    at: int = 0
    other: str = ""

    def apply(self, path: Path, foreign: Path) -> None:
        file, other = path / self.file, path / self.other
        data = file.read_bytes() if file.is_file() else b""
        match self.kind:
            case "flip":
                flipped = data[self.at // 8] ^ 1 << self.at % 8
                file.write_bytes(data[: self.at // 8] + bytes([flipped]) + data[self.at // 8 + 1 :])
            case "cut":
                file.write_bytes(data[: self.at])
            case "zeros at the end":
                file.write_bytes(data + bytes(self.at))
            case "lost":
                file.unlink()
            case "swapped":
                file.write_bytes(other.read_bytes())
                other.write_bytes(data)
            case "of another cache" if file.is_dir():
                shutil.rmtree(file)
                shutil.copytree(foreign / self.other, file)
            case "of another cache":
                shutil.copyfile(foreign / self.other, file)

    def undo(self, path: Path, base: Path) -> None:
        for name in (self.file, self.other if self.kind == "swapped" else self.file):
            if (base / name).is_dir():
                shutil.rmtree(path / name)
                shutil.copytree(base / name, path / name)
            else:
                shutil.copyfile(base / name, path / name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of two parts with several containers, and others of the same size and shape."""
    path = tmp_path_factory.mktemp("flips")
    for kind in KINDS:
        for name, build in (("cache", 0), ("foreign", 1)):
            for numbers in ((1, 2, 3), (4, 8)):
                with open_writer(path / name / kind, OF_SETS.get(kind, kind)) as writer:
                    write(writer, numbers, build)
            if kind in OF_SETS:
                add(path / name / kind, [each + build for each in (1, 2, 3, 7)])
            if kind == "sets and next":
                decide(path / name / kind)
    return path


def test_verification_finds_all_damage(root: Path) -> None:
    damages = [damage for layout in KINDS for damage in _all(root, layout)]

    def verify(number: int, place: Path) -> str | None:
        damage = damages[number]
        base = root / "cache" / damage.layout
        path = place / str(os.getpid()) / damage.layout
        if not path.exists():
            shutil.copytree(base, path)
        damage.apply(path, root / "foreign" / damage.layout)
        try:
            featcache.open(path, verify="arrays")
        except CacheError:
            return None
        finally:
            damage.undo(path, base)
        return f"not found: {damage.kind}"

    outcomes = run_inputs(verify, range(len(damages)), root / "work")
    report("flips and cuts", (_told(outcome, damages) for outcome in outcomes))


def _told(outcome: Outcome, damages: list[Damage]) -> Outcome:
    damage = damages[outcome.number]
    if outcome.what is None:
        return outcome
    said = f"{outcome.what}; {damage.layout}: {damage.file} {damage.other} at {damage.at}"
    return Outcome(outcome.number, said, f"{sort_of(damage.file)} {outcome.where}")


def _all(root: Path, layout: str) -> list[Damage]:
    base, chance = root / "cache" / layout, Random(f"{SEED} {layout}")
    flips = list(_flips(base, layout, chance))
    count = min(round(FLIPS * TIMES / len(KINDS)), len(flips))
    return [*_others(base, root / "foreign" / layout, layout, chance), *chance.sample(flips, count)]


def _flips(base: Path, layout: str, chance: Random) -> Iterator[Damage]:
    for file in sealed_files(base):
        size = file.stat().st_size
        for byte in range(size) if size < SMALL else chance.sample(range(size), SAMPLED):
            yield Damage(
                layout, "flip", str(file.relative_to(base)), byte * 8 + chance.randrange(8)
            )


def _others(base: Path, foreign: Path, layout: str, chance: Random) -> Iterator[Damage]:
    files = sealed_files(base)
    for file in files:
        name, size = str(file.relative_to(base)), file.stat().st_size
        for length in {0, size - 1, *(chance.randrange(size) for _ in range(CUTS))} if size else ():
            yield Damage(layout, "cut", name, length)
        for more in (1, 4096):
            yield Damage(layout, "zeros at the end", name, more)
        yield Damage(layout, "lost", name)
    for one, other in combinations(files, 2):
        if one.stat().st_size == other.stat().st_size and one.read_bytes() != other.read_bytes():
            names = (str(each.relative_to(base)) for each in (one, other))
            yield Damage(layout, "swapped", next(names), other=next(names))
    yield from _foreign(base, foreign, layout)


def _foreign(base: Path, foreign: Path, layout: str) -> Iterator[Damage]:
    """Each file and directory replaced by that of the same name, but for numbers, elsewhere."""
    there = {_place(foreign, path): path for path in _walk(foreign)}
    for mine in _walk(base):
        other = there.get(_place(base, mine))
        if other and not _is_whole_set(base, mine) and _content(mine) != _content(other):
            found = str(mine.relative_to(base)), str(other.relative_to(foreign))
            yield Damage(layout, "of another cache", found[0], other=found[1])


def _is_whole_set(base: Path, path: Path) -> bool:
    """Tell whether a path is a set, or several, or what names them: each is a cache of its own."""
    sets = base / "sets"
    return sets.is_dir() and (path in (sets, sets / "featcache.json") or path.parent == sets)


def _content(path: Path) -> object:
    return picture(path) if path.is_dir() else path.read_bytes()


def _place(base: Path, path: Path) -> tuple[bool, str]:
    return path.is_dir(), re.sub(
        r"[0-9]{8}T[0-9]{6}|[0-9a-f]{6,}", "*", str(path.relative_to(base))
    )


@cache
def _walk(base: Path) -> list[Path]:
    """All files and directories, but what nothing seals."""
    files = sealed_files(base)
    return sorted(
        {*files, *(path for file in files for path in file.parents if base in path.parents)}
    )

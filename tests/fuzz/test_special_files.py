"""Pipes, links and directories in place of files: nothing waits, nothing leaves the cache."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest
from fuzz_caches import HOW, KINDS, make_caches, picture, read_all, sealed_files, write_more
from fuzz_children import run_inputs, typed
from fuzz_format import PART
from fuzz_report import TIMES, report
from fuzz_targets import SEED

import featcache
from featcache.errors import FeatcacheError

READS, WRITES = 1_200, 600

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.timeout(3600),
]


def pipe(file: Path, outside: Path) -> None:
    os.mkfifo(file)


def bound_socket(file: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, suppress(OSError):  # a path that is too long
        made.bind(os.path.relpath(file))


def directory(file: Path, outside: Path) -> None:
    file.mkdir()


def link_outside(file: Path, outside: Path) -> None:
    file.symlink_to(outside / "same")


def link_to_directory(file: Path, outside: Path) -> None:
    file.symlink_to(outside)


def link_to_zeros(file: Path, outside: Path) -> None:
    file.symlink_to("/dev/zero")


def link_to_itself(file: Path, outside: Path) -> None:
    file.symlink_to(file.name)


def link_to_nothing(file: Path, outside: Path) -> None:
    file.symlink_to(outside / "not there")


SPECIAL: list[Callable[[Path, Path], None]] = [
    *(
        pipe,
        bound_socket,
        directory,
        link_outside,
        link_to_directory,
        link_to_zeros,
        link_to_itself,
        link_to_nothing,
    )
]


class Planted:
    """A copy of a cache in which one file, or one directory, is something else."""

    def __init__(self, base: Path, place: Path, chance: Random) -> None:
        self.path = shutil.copytree(base, place / "train")
        self._outside = place / "outside"
        self._outside.mkdir()
        self.special = chance.choice(SPECIAL)
        directories = [each for each in self.path.rglob("*") if each.is_dir()]
        self.file = chance.choice(directories if chance.random() < 0.2 else sealed_files(self.path))
        moved = self._outside / "same"
        shutil.move(self.file, moved)
        for name in ("journal.jsonl", "part.json", "writer.json", "featcache.json", "features.h5"):
            (self._outside / name).write_bytes(b"not ours")
        self.special(self.file, self._outside)
        if chance.random() < 0.3:
            with suppress(OSError):  # the directory of all parts may be something else now
                (self.path / PART).symlink_to(self._outside)
        self._before = picture(self._outside)

    def said(self) -> str:
        return f"{self.special.__name__} at {self.file.relative_to(self.path)}"

    def harm_outside(self) -> str | None:
        after = picture(self._outside)
        if after == self._before:
            return None
        names = sorted(
            name for name in {*after, *self._before} if after.get(name) != self._before.get(name)
        )
        return f"something outside changes; {', '.join(names)}; {self.said()}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("special")
    make_caches(path)
    return path


def test_no_special_file_does_harm_to_readers(root: Path) -> None:
    def read(number: int, place: Path) -> str | None:
        chance, layout = Random(f"{SEED} reads {number}"), KINDS[number % len(KINDS)]
        planted = Planted(root / "sealed" / layout, place / str(number), chance)
        for how in HOW:
            read_all(planted.path, how)
        linked = planted.special is link_outside
        return planted.harm_outside() or (_verified(planted) if linked else None)

    report("special files, readers", run_inputs(read, range(round(READS * TIMES)), root / "reads"))


def _verified(planted: Planted) -> str | None:
    """A link out of the cache is damage, though what it leads to is right."""
    with suppress(FeatcacheError):
        featcache.open(planted.path, verify="arrays")
        return f"a link is followed; {planted.said()}"
    return None


def test_no_special_file_does_harm_to_writers(root: Path) -> None:
    def write(number: int, place: Path) -> str | None:
        chance, layout = Random(f"{SEED} writes {number}"), KINDS[number % len(KINDS)]
        planted = Planted(root / "dead" / layout, place / str(number), chance)
        for overwrite in (False, True):
            typed(partial(write_more, planted.path, layout, overwrite))
        read_all(planted.path, {})
        return planted.harm_outside()

    report(
        "special files, writers", run_inputs(write, range(round(WRITES * TIMES)), root / "writes")
    )

"""Killed writers leave files that nothing names; after the next writer there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from feature_set_helpers import ENERGY, add, energy_of
from sharing_helpers import ROUNDS
from store_disk import Disk
from store_helpers import FINGERPRINT, id_of, make_cache, two_features, write

import featcache
from featcache import CacheWriter
from featcache.errors import NotACacheError
from featcache.format import (
    Stamps,
    index_file,
    list_parts,
    manifest_file,
    read_manifest,
    set_directories,
    set_names,
)

FEW = range(6)


def unnamed(cache: Path) -> set[str]:
    """Files in a cache, or in one of sets, that nothing in it names."""
    sets = cache / "sets"  # which are made before anything is added
    named = {sets, sets / "featcache.json", sets / "writer.lock"}
    for directory in set_directories(cache, set_names(cache) or ()).values():
        named |= {directory / name for name in ("featcache.json", "writer.lock", "README.txt")}
        named |= {directory / each for each in named_in(directory)}
    files = {path for path in cache.rglob("*") if not path.is_dir() or not any(path.iterdir())}
    return {path.relative_to(cache).as_posix() for path in files - named}


def named_in(directory: Path) -> Iterator[str]:
    """What the manifests of a plain cache name that must be kept."""
    manifest = read_manifest(directory)
    kept = {manifest.previous, *manifest.tags.values()} - {None, ""}
    all_ = [manifest, *(read_manifest(directory, manifest_file(name)) for name in kept if name)]
    for each in all_:
        yield from (manifest_file(each.name), index_file(each.name))
        yield from (*each.files, *each.building_files)
    parts = {part.name for each in all_ for part in (*each.parts, *each.building_parts)}
    for name, sealed in list_parts(directory):
        if sealed is None or not (name in parts or sealed.header.build >= manifest.building):
            continue
        yield from (f"parts/{name}/part.json", f"parts/{name}/index.columns")
        yield from (
            f"{sealed.directory}/{path}" for path in sealed.index(directory, []).containers.paths
        )
        for each in all_:
            for part in (*each.parts, *each.building_parts):
                if part.name == name:
                    yield from (f"parts/{name}/{each.file}" for each in part.beside)


def fill(cache: Path) -> None:
    with CacheWriter(cache, two_features(), FINGERPRINT) as writer:
        writer.keep_file("probe", b"one")
        write(writer, FEW)
        writer.publish()
        writer.keep_file("probe", b"two")
        writer.restamp({id_of(1): Stamps(1, 2)})
        writer.delete([id_of(2)])
        write(writer, [2])


def overwrite(cache: Path) -> None:
    make_cache(cache, FEW, overwrite=True)


def edit(cache: Path) -> None:
    opened = featcache.open(cache)
    opened.tag("paper")
    opened.annotate({id_of(number): {"speaker": str(number)} for number in FEW})
    opened = featcache.open(cache)
    opened.delete([id_of(3)])
    opened.untag("paper")
    opened.compact()


def nothing(cache: Path) -> None:
    pass


def made(cache: Path) -> None:
    make_cache(cache, FEW)


def of_sets(cache: Path) -> None:
    made(cache)
    add(cache, FEW)


def add_energy(cache: Path) -> None:
    add(cache, FEW)


@pytest.mark.parametrize(
    ("before", "work"),
    [(nothing, fill), (made, overwrite), (made, edit), (made, add_energy), (of_sets, edit)],
)
def test_the_next_writer_removes_all_that_a_killed_one_left(
    tmp_path: Path, before: Callable[[Path], None], work: Callable[[Path], None]
) -> None:
    path = tmp_path / "disk" / "train"
    path.parent.mkdir()
    before(path)
    disk = Disk(path.parent)
    with disk.watching():
        work(path)
    killed = [crash for crash in disk.crashes if crash.step.startswith("killed")]
    litter = 0
    for number, crash in enumerate(Random(0).sample(killed, min(len(killed), 2 * ROUNDS))):
        root = tmp_path / str(number)
        crash.restore(root)
        cache = root / "train"
        try:
            litter += bool(unnamed(cache))
        except NotACacheError:
            litter += 1
        # what is committed of an overwrite stays until that is gone on with
        again = work is overwrite
        with CacheWriter(cache, two_features(), FINGERPRINT, overwrite=again) as writer:
            write(writer, [30])
        if set_names(cache) is not None:
            with CacheWriter(cache, [ENERGY], FINGERPRINT) as writer:
                writer.write(id_of(30), energy_of(30))
        assert not unnamed(cache), crash.step
    assert litter

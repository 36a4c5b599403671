"""Small caches to be damaged, and all that readers and writers can do with them."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from eight_layouts import LAYOUTS, open_writer, write, write_missing
from feature_set_helpers import ENERGY, add, energy_of
from fuzz_children import typed
from fuzz_format import UNSEALED
from store_helpers import FINGERPRINT, id_of

import featcache
from featcache import CacheWriter
from featcache.errors import FeatcacheError
from featcache.format import (
    NEXT,
    Stamps,
    read_building_file,
    set_name,
    stored_sets,
    write_manifest,
    write_outer,
)

BOTH = range(8)  # published, in two parts
KNOWN = "spk1/utt-1"
GONE = 2  # published, and deleted then
TAG = "v1"  # of the generation with the first part alone
DEAD = range(8, 11)  # committed by a writer that died
OF_SETS = {"sets": "memmap", "sets and next": "memmap"}  # kinds of feature sets, with a layout
KINDS = [*LAYOUTS, *OF_SETS]
HOW: list[dict[str, Any]] = [
    *({}, {}, {"mapped": False}, {"verify": "columns"}, {"verify": "arrays"}),
    *({"version": TAG}, {"version": TAG, "verify": "arrays"}),
    *(
        [{"check_reads": True}]
        if "check_reads" in inspect.signature(featcache.open).parameters
        else []
    ),
]


def make_caches(root: Path) -> None:
    """Make `sealed/<kind>` and, with a part that was never sealed, `dead/<kind>`."""
    for layout in KINDS:
        for numbers in (BOTH[:5], BOTH[5:]):
            with open_writer(root / "sealed" / layout, OF_SETS.get(layout, layout)) as writer:
                change(writer)
                write(writer, numbers)
            if numbers[0] == BOTH[0]:
                featcache.open(root / "sealed" / layout).tag(TAG)
        annotate(root / "sealed" / layout)
        if layout in OF_SETS:
            add(root / "sealed" / layout, BOTH[1:], annotations={"given": "with it"})
            featcache.open(root / "sealed" / layout).tag("v3")
        shutil.copytree(root / "sealed" / layout, root / "dead" / layout)
        _write_and_die(root / "dead" / layout, layout)
        if layout == "sets and next":
            decide(root / "sealed" / layout)
            decide(root / "dead" / layout)


def decide(path: Path) -> None:
    """Edit all sets of a cache, and stop where the edit counts, before it is in place."""
    pairs = {}
    for directory, manifest in stored_sets(path):
        after = replace(manifest, tags={**manifest.tags, "v4": manifest.name})
        after = write_manifest(directory, after, file=NEXT)
        pairs[set_name(path, directory)] = (manifest.write_id, after.write_id)
    write_outer(path, next=pairs)


def change(writer: CacheWriter) -> None:
    """Leave tombstones, other stamps, and a file of a role in what is stored by now."""
    writer.keep_file("probe", b"a probe")
    if id_of(GONE) in writer:
        writer.restamp({KNOWN: Stamps(1, 2)})
        writer.delete([id_of(GONE)])


def annotate(path: Path) -> None:
    """Give some utterances annotations, of which the later writers carry."""
    given = {id_of(number): {"given": f"to {number}", "n": number} for number in (1, 4)}
    featcache.open(path).annotate(given, unknown="skip")


def _write_and_die(path: Path, layout: str) -> None:
    child = os.fork()
    if child == 0:
        try:
            writer = open_writer(path, OF_SETS.get(layout, layout))
            writer.keep_file("made-from", b"{}")
            for number in DEAD:
                write(writer, [number])
                writer.commit()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def sealed_files(path: Path) -> list[Path]:
    """All files of a cache that a digest covers."""
    found = [file for file in sorted(path.rglob("*")) if file.is_file() or file.is_symlink()]
    return [file for file in found if not UNSEALED.search(str(file.relative_to(path)))]


def is_container(file: Path) -> bool:
    return (
        file.suffix in (".h5", ".tar", ".lca")
        or ".zarr" in str(file)
        or file.name in ("fbank.npy", "units.npy", "energy.npy")
    )


def read_all(path: Path, how: dict[str, Any]) -> None:
    """Read all there is, in every way; each way may raise a `FeatcacheError`."""
    try:
        opened = featcache.open(path, **how)
    except FeatcacheError:
        return
    ids: list[str] = []
    typed(lambda: ids.extend(opened), lambda: opened.lengths("fbank"))
    for name in ("fbank", "units", "energy")[: 3 if ENERGY.name in opened.features else 2]:
        typed(partial(opened.missing, name))
        typed(partial(opened.read_batch, ids, name), partial(opened.lengths, name, ids=ids))
        typed(*(partial(opened.read, id, name) for id in ids))
        typed(*(partial(opened.read, id, name, 1, 2) for id in ids))
    typed(lambda: opened.opened.file("probe"), lambda: read_building_file(path, "made-from"))
    for name in opened.annotations:
        typed(lambda name=name: list(opened.annotation(name)))  # type: ignore[misc]
        typed(lambda name=name: opened.annotation(name).codes())  # type: ignore[misc]
        typed(lambda name=name: opened.annotation(name).is_in(["s1"]))  # type: ignore[misc]
    typed(lambda: opened.stats("fbank"), lambda: KNOWN in opened, lambda: opened[KNOWN])


def write_more(path: Path, layout: str, overwrite: bool) -> None:
    """Recover, write and publish."""
    with open_writer(path, OF_SETS.get(layout, layout), overwrite=overwrite) as writer:
        change(writer)
        write_missing(writer, (1, 30))
    if layout in OF_SETS:
        with CacheWriter(path, [ENERGY], FINGERPRINT, overwrite=overwrite) as writer:
            for number in (1, 30):
                if id_of(number) not in writer:
                    writer.write(id_of(number), energy_of(number))
    annotate(path)


def edit(path: Path) -> None:
    """Delete, tag and compact; each may raise a `FeatcacheError`."""
    try:
        opened = featcache.open(path)
    except FeatcacheError:
        return
    typed(lambda: opened.delete([KNOWN]), lambda: opened.tag("v2"), opened.refresh)
    typed(opened.compact, lambda: opened.untag(TAG), lambda: opened.compact(drop_tags=True))


def picture(path: Path) -> dict[str, object]:
    """All that is in a directory, to see whether anything changed."""
    return {
        str(file.relative_to(path)): file.read_bytes() if file.is_file() else file.is_dir()
        for file in sorted(path.rglob("*"))
    }


@cache
def names(base: Path) -> tuple[list[str], list[str]]:
    """Names of the files of a cache that a digest covers: containers, and others."""
    files = sealed_files(base)
    containers = {file for file in files if is_container(file)}
    named = [[file for file in files if (file in containers) == which] for which in (True, False)]
    first, second = ([str(file.relative_to(base)) for file in each] for each in named)
    return first, second


def pick(base: Path, chance: Random) -> str:
    """Name a file of a cache, seldom a container."""
    containers, others = names(base)
    return chance.choice(containers if chance.random() < 0.15 else others)

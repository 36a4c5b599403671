"""Stories of writers that a fault may meet: the cache before, the work, the promises."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from eight_layouts import open_writer, write, write_missing
from store_helpers import id_of

import featcache
from featcache import CacheWriter, FeatureStorageConfig

BEFORE = range(4)  # stored and published before the story, but in "fresh"
EVERYTHING = range(13)


@dataclass
class Promise:
    """Utterances that must not be lost: by number."""

    committed: set[int] = field(default_factory=set)
    published: set[int] = field(default_factory=set)
    given: bool = False  # to all that were there before, an annotation


Begin = Callable[[], None]  # faults happen from here on


def fresh(path: Path, layout: str, promise: Promise, begin: Begin) -> None:
    begin()
    with open_writer(path, layout) as writer:
        write(writer, range(3))
        writer.commit()
        promise.committed |= {*range(3)}
        write(writer, range(3, 5))
        writer.publish()
        promise.committed |= {*range(5)}
        promise.published |= {*range(5)}
        write(writer, range(5, 8))
        writer.commit()
        promise.committed |= {*range(8)}
        write(writer, range(8, 13))
    promise.committed |= {*EVERYTHING}
    promise.published |= {*EVERYTHING}


def append(path: Path, layout: str, promise: Promise, begin: Begin) -> None:
    begin()
    with open_writer(path, layout) as writer:
        for numbers in (range(4, 7), range(7, 10)):
            write_missing(writer, numbers)
            writer.commit()
            promise.committed |= {*numbers}
        write_missing(writer, range(10, 13))
    promise.committed |= {*EVERYTHING}
    promise.published |= {*EVERYTHING}


def overwrite(path: Path, layout: str, promise: Promise, begin: Begin) -> None:
    begin()
    with open_writer(path, layout, overwrite=True) as writer:
        write(writer, range(6), build=1)
        writer.commit()
        promise.committed |= {*range(6)}
        write(writer, range(6, 13), build=1)
    promise.committed |= {*EVERYTHING}


def close(path: Path, layout: str, promise: Promise, begin: Begin) -> None:
    with open_writer(path, layout) as writer:
        write(writer, range(4, 9))
        writer.commit()
        promise.committed |= {*range(4, 9)}
        write(writer, range(9, 13))
        begin()
    promise.committed |= {*EVERYTHING}
    promise.published |= {*EVERYTHING}


def annotate(path: Path, layout: str, promise: Promise, begin: Begin) -> None:
    cache = featcache.open(path)
    begin()
    cache.annotate({id_of(number): {"given": number} for number in BEFORE})
    promise.given = True


def edit(path: Path, layout: str, promise: Promise, begin: Begin) -> None:
    cache = featcache.open(path)
    begin()
    promise.committed -= {1}
    promise.published -= {1}
    cache.delete([id_of(1)])
    cache.refresh()
    cache.tag("v1")
    cache.untag("v1")
    cache.compact()
    with open_writer(path, layout) as writer:
        write_missing(writer, EVERYTHING)
    promise.committed |= {*EVERYTHING}
    promise.published |= {*EVERYTHING}


def merge(path: Path, layout: str, promise: Promise, begin: Begin) -> None:
    begin()
    with open_writer(path, layout) as writer:
        write_missing(writer, EVERYTHING)
        writer.commit()
        promise.committed |= {*EVERYTHING}
    promise.published |= {*EVERYTHING}


def add_a_feature(path: Path, layout: str, promise: Promise, begin: Begin) -> None:
    begin()
    add_energies(path)
    append(path, layout, promise, begin=lambda: None)


def add_energies(path: Path) -> None:
    """Add a feature of what was stored before, or what of it is missing."""
    with CacheWriter(path, [FeatureStorageConfig("energy")], {"layer": 1}) as writer:
        for number in BEFORE:
            if id_of(number) not in writer:
                writer.write(id_of(number), {"energy": np.ones((number, 1), np.float32)})


STORIES: dict[str, Callable[[Path, str, Promise, Begin], None]] = {
    "fresh": fresh,
    "append": append,
    "overwrite": overwrite,
    "recover": append,
    "close": close,
    "annotate": annotate,
    "edit": edit,
    "merge": merge,
    "add-a-feature": add_a_feature,
}
RECOVERED = range(4, 9)  # committed by the writer that died before "recover"


def promised_before(story: str) -> Promise:
    """What holds before a story begins."""
    if story == "fresh":
        return Promise()
    committed = {*BEFORE, *(RECOVERED if story == "recover" else ())}
    return Promise(set() if story == "overwrite" else committed, {*BEFORE})


def prepare(path: Path, story: str, layout: str) -> None:
    """Make the cache that a story begins with."""
    if story == "fresh":
        return
    with open_writer(path, layout) as writer:
        write(writer, BEFORE)
    for number in range(4, 10) if story == "merge" else ():  # small parts, one short of too many
        with open_writer(path, layout) as writer:
            write(writer, [number])
    if story == "recover":
        child = os.fork()
        if child == 0:
            _die_after_a_commit(path, layout)
        os.waitpid(child, 0)


def _die_after_a_commit(path: Path, layout: str) -> None:
    try:
        writer = open_writer(path, layout)
        write(writer, RECOVERED)
        writer.commit()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)

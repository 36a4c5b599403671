"""Scenarios: what the cache is at first, and what a writer then does, telling what it promises."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from crash_promises import tell
from crash_trace import LONGEST_S
from crash_writers import (
    ALL,
    add_energy,
    annotate,
    close,
    commit,
    compact,
    delete,
    delete_from,
    keep_file,
    open_part_writer,
    open_writer,
    publish,
    restamp,
    tag,
    write,
)

import featcache
from featcache import CacheWriter
from featcache.writing.session import publish_sealed

Work = Callable[[Path, str], None]  # in a cache directory, in a layout


@dataclass(frozen=True)
class Story:
    """A scenario: `before` is done, its process killed, all made durable; then comes `work`."""

    work: Work
    before: Work | None = None


def fresh(path: Path, layout: str) -> None:
    """Make a cache, with a publication in between."""
    write_from(0, open_writer(path, layout))


def begun(path: Path, layout: str) -> None:
    """Publish ten utterances."""
    writer = open_writer(path, layout)
    write(writer, range(10))
    close(writer, range(10))


def append(path: Path, layout: str) -> None:
    """Add to a cache."""
    write_from(10, open_writer(path, layout))


def begun_by_the_old_model(path: Path, layout: str) -> None:
    """Publish ten utterances that are to be overwritten."""
    writer = open_writer(path, layout, "old")
    write(writer, range(10), "old")
    close(writer, range(10), "old")


def overwrite(path: Path, layout: str) -> None:
    """Overwrite a cache."""
    write_from(0, open_writer(path, layout, overwrite=True))


def killed(path: Path, layout: str) -> None:
    """Publish, commit, and end in the middle."""
    writer = open_writer(path, layout)
    commit(writer, range(5))
    publish(writer, range(5))
    commit(writer, range(5, 11))
    commit(writer, range(11, 16))
    write(writer, range(16, 18))
    os._exit(0)  # a writer that is dropped would be closed


def recover(path: Path, layout: str) -> None:
    """Bring back what a killed writer had committed, and go on."""
    write_from(16, open_writer(path, layout))


def killed_overwrite(path: Path, layout: str) -> None:
    """Commit utterances of the new model, and end in the middle."""
    begun_by_the_old_model(path, layout)
    writer = open_writer(path, layout, overwrite=True)
    commit(writer, range(6))
    write(writer, range(6, 8))
    os._exit(0)


def overwrite_on(path: Path, layout: str) -> None:
    """Go on with an overwrite that was killed."""
    write_from(6, open_writer(path, layout, overwrite=True))


def part_writers(path: Path, layout: str) -> None:
    """Let two processes write parts, several each, while a third publishes."""
    waiting, starting = os.pipe()
    shares = (range(2, 14), range(14, 26))
    write_share = partial(_write_parts, path, layout, waiting)
    children = [_in_child(partial(write_share, share)) for share in shares]
    writer = open_writer(path, layout)
    commit(writer, range(2))
    os.write(starting, b"!" * len(shares))
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    publish(writer, range(26))
    commit(writer, range(26, 28))
    write(writer, range(28, 30))
    close(writer, ALL)


def abort(path: Path, layout: str) -> None:
    """Give up what was written since the last publication."""
    writer = open_writer(path, layout)
    commit(writer, range(10, 14))
    publish(writer, range(14))
    commit(writer, range(14, 18))
    write(writer, range(18, 20))
    tell("aborting", range(14))
    writer.abort()


def change(path: Path, layout: str) -> None:
    """Give utterances other stamps, delete some, compute these again; keep probes."""
    writer = open_writer(path, layout)
    keep_file(writer, "first")
    restamp(writer, dict.fromkeys(range(5), 2))
    entries = {number: 2 if number < 5 else 1 for number in range(10)}
    publish(writer, range(10), entries)
    keep_file(writer, "second")
    gone = (0, 3, 4, 8)
    restamp(writer, {9: 7, 3: 5})
    delete(writer, gone, {each: entries[each] for each in entries if each not in gone} | {9: 7})
    tell("again", gone)
    commit(writer, gone[:2])
    write(writer, gone[2:])
    keep_file(writer, "third")
    write_from(10, writer)


def change_aside(path: Path, layout: str) -> None:
    """Overwrite a cache, and delete utterances of the new one before it is published."""
    writer = open_writer(path, layout, overwrite=True)
    keep_file(writer, "new")
    commit(writer, range(6))
    delete(writer, (1, 2))
    delete(writer, (3,))
    tell("again", (1,))
    commit(writer, (1,))
    delete(writer, (4,))
    tell("again", (2, 3, 4))
    write(writer, (2, 3, 4))
    write(writer, range(6, len(ALL)))
    close(writer, ALL)


def annotate_all(path: Path, layout: str) -> None:
    """Give the utterances that are there an annotation, another one, and go on."""
    annotate(path, range(10), "first")
    annotate(path, range(10), "second")
    write_from(10, open_writer(path, layout))


def edit(path: Path, layout: str) -> None:
    """Delete utterances without a writer, tag what is left, append, delete more, and compact."""
    cache, gone = featcache.open(path), (3, 5, 8)
    left = [number for number in range(10) if number not in gone]
    delete_from(cache, gone[:2], dict.fromkeys([*left, 8], 1))
    tag(cache)
    writer = open_writer(path, layout)
    commit(writer, range(10, 13))
    close(writer, [*left, 8, *range(10, 13)])
    cache.refresh()
    delete_from(cache, gone[2:], dict.fromkeys([*left, *range(10, 13)], 1))
    compact(cache, gone)
    tag(featcache.open(path))
    writer = open_writer(path, layout)
    commit(writer, range(13, 15))
    close(writer, [*left, *range(10, 15)])


def begun_in_parts(path: Path, layout: str) -> None:
    """Publish seven utterances, each in a part of its own."""
    for number in range(7):
        writer = open_writer(path, layout)
        write(writer, [number])
        close(writer, range(number + 1))


def merge(path: Path, layout: str) -> None:
    """Append so often that small parts become one, and go on."""
    for end in (8, 9, 10):
        writer = open_writer(path, layout)
        commit(writer, [end - 1])
        close(writer, range(end))


def add_a_feature(path: Path, layout: str) -> None:
    """Add a feature to a cache, which becomes a set of its own; then let the other one grow."""
    add_energy(path, "first")
    append(path, layout)


def begun_in_sets(path: Path, layout: str) -> None:
    """Publish ten utterances, and a feature that is added."""
    begun(path, layout)
    add_energy(path, "first")
    annotate(path, range(10), "first")


def edit_sets(path: Path, layout: str) -> None:
    """Annotate, tag, delete and compact feature sets, and let one of them grow."""
    gone = (3, 5, 8)
    left = [number for number in range(10) if number not in gone]
    cache = featcache.open(path)
    annotate(path, range(10), "second")
    tag(cache)
    delete_from(cache, gone[:2], dict.fromkeys([*left, 8], 1))
    delete_from(cache, gone[2:], dict.fromkeys(left, 1))
    compact(cache, gone)
    tag(featcache.open(path))
    writer = open_writer(path, layout)
    commit(writer, range(10, 13))
    close(writer, [*left, *range(10, 13)])


def fill_by_reading(path: Path, layout: str) -> None:
    """Add to a cache without holding its lock, each utterance shown to others before it counts."""
    for first, end in ((10, 17), (17, 23)):
        writer = open_part_writer(path, layout)
        for number in range(first, end):
            write(writer, [number])
            writer.show()
            if number == first + 1:
                commit(writer, [])
                tell("committed", range(first, end)[:2])
        writer.close()
        tell("committed", range(first, end))
        tell("publishing", range(end))
        assert publish_sealed(path)
        tell("published", range(end))


STORIES = {
    "fresh": Story(fresh),
    "append": Story(append, begun),
    "overwrite": Story(overwrite, begun_by_the_old_model),
    "recover": Story(recover, killed),
    "overwrite-on": Story(overwrite_on, killed_overwrite),
    "part-writers": Story(part_writers),
    "abort": Story(abort, begun),
    "change": Story(change, begun),
    "add-a-feature": Story(add_a_feature, begun),
    "annotate": Story(annotate_all, begun),
    "change-aside": Story(change_aside, begun_by_the_old_model),
    "edit": Story(edit, begun),
    "edit-sets": Story(edit_sets, begun_in_sets),
    "fill-by-reading": Story(fill_by_reading, begun),
    "merge": Story(merge, begun_in_parts),
}


def write_from(first: int, writer: CacheWriter) -> None:
    """Write the rest in several commits, with a publication in between."""
    commit(writer, range(first, first + 5))
    commit(writer, range(first + 5, first + 8))
    publish(writer, range(first + 8))
    commit(writer, range(first + 8, first + 12))
    write(writer, range(first + 12, len(ALL)))
    close(writer, ALL)


def _write_parts(path: Path, layout: str, waiting: int, share: Sequence[int]) -> None:
    os.read(waiting, 1)
    with open_part_writer(path, layout) as writer:
        commit(writer, share[:5])  # the first four fill a part
        commit(writer, share[5:9])
        write(writer, share[9:])
    tell("committed", share[9:])


def _in_child(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        signal.alarm(LONGEST_S)
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child

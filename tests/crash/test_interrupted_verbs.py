"""Ctrl-C at any line of what ends in a publication: nothing is lost, and the cache goes on."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from interrupts import STORE, Interrupt, interrupted
from sharing_helpers import ROUNDS

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import ClosedError, KeyNotFoundError
from featcache.format import Stamps

FEATURES = [FeatureStorageConfig("fbank")]
Verb = Callable[[CacheWriter], object]


def write(writer: CacheWriter, *numbers: int) -> None:
    for number in numbers:
        writer.write(f"utt-{number}", {"fbank": np.full((3, 2), number, np.float32)})


def stored(path: Path) -> set[int]:
    cache = featcache.open(path, verify="arrays")
    for id in cache:
        assert (cache.read(id, "fbank") == int(id.split("-")[1])).all()
    return {int(id.split("-")[1]) for id in cache}


def publish_and_recover(writer: CacheWriter) -> None:
    writer.publish()
    writer.recover()


VERBS: dict[str, Verb] = {
    "publish": lambda writer: writer.publish(),
    "commit": lambda writer: writer.commit(),
    "delete": lambda writer: writer.delete(["utt-0"]),
    "keep_file": lambda writer: writer.keep_file("probe", b"probe"),
    "recover": publish_and_recover,
    "close": lambda writer: writer.close(),
    "abort": lambda writer: writer.abort(),
}


THEN = ("again", "close", "abort", "drop")


def begun(path: Path) -> CacheWriter:
    writer = CacheWriter(path, FEATURES)
    write(writer, 0, 1)
    writer.publish()
    writer.restamp({"utt-1": Stamps(1, 2)})
    write(writer, 2)
    writer.commit()
    write(writer, 3)
    return writer


def run(
    verb: Verb, writer: CacheWriter, interrupt: Interrupt, kept: list[BaseException]
) -> Interrupt:
    try:
        with interrupted(interrupt):
            verb(writer)
    except KeyboardInterrupt as error:
        kept.append(error)  # as a notebook does, with all that it refers to
    return interrupt


@pytest.mark.filterwarnings("ignore:the writer of")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a file that was just opened
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupt_at_any_line_leaves_a_cache_that_goes_on(tmp_path: Path, verb: str) -> None:
    """The verb is called again, or the writer is closed, given up or dropped."""
    writer = begun(tmp_path / "whole")
    random = Random(0)
    passed = [*run(VERBS[verb], writer, Interrupt(0, *STORE), []).passed.items()]
    writer.close()
    for place, lines in random.sample(passed, min(len(passed), 3 * ROUNDS)):
        time = random.randrange(len(lines)) + 1
        then = random.choice(THEN)
        path = tmp_path / str(lines[time - 1])
        writers = [begun(path)]
        kept: list[BaseException] = []
        run(VERBS[verb], writers[0], Interrupt(time, *STORE, at=place), kept)
        try:
            if then == "drop":
                kept.clear()
            end(writers.pop(), verb, then)
            gc.collect()
            check(path, verb, then)
        except BaseException as error:
            error.add_note(f"{verb} interrupted when {place} ran the {time}th time, then {then}")
            raise


def end(writer: CacheWriter, verb: str, then: str) -> None:
    if then == "again":
        with contextlib.suppress(KeyNotFoundError, ClosedError):  # it was done, but for telling so
            VERBS[verb](writer)
    if then == "abort":
        writer.abort()
    elif then != "drop":
        writer.close()


def check(path: Path, verb: str, then: str) -> None:
    shown = stored(path)
    with CacheWriter(path, FEATURES) as writer:
        after = {number for number in range(4) if f"utt-{number}" in writer}
        write(writer, 9)
    assert stored(path) == after | {9}
    assert shown <= after
    assert {1} <= after
    assert verb == "delete" or 0 in after
    if "abort" not in (verb, then):
        assert 2 in after  # it was committed
        assert 3 in after or verb == "close"

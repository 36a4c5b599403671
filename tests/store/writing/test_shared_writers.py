"""Threads that share a writer: each of its methods at once with each other."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sharing_helpers import INTERVALS_S, ROUNDS, at_once, switching

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CacheLockedError, ClosedError
from featcache.format import Stamps

FEATURES = [FeatureStorageConfig("fbank")]
Verb = Callable[[CacheWriter], object]


def write_some(writer: CacheWriter, first: int, count: int = 4) -> None:
    for number in range(first, first + count):
        writer.write(f"utt-{number}", {"fbank": np.full((3, 2), number, np.float32)})


def fail_some(writer: CacheWriter) -> None:
    for number in range(30):
        writer.fail(f"failed-{number}")


def stored(path: Path) -> set[int]:
    """Numbers of the utterances of a cache, each of which is what was written."""
    cache = featcache.open(path, verify="arrays")
    for id in cache:
        assert (cache.read(id, "fbank") == int(id.split("-")[1])).all()
    return {int(id.split("-")[1]) for id in cache}


@pytest.mark.parametrize("interval_s", INTERVALS_S)
def test_what_threads_write_and_publish_is_stored(tmp_path: Path, interval_s: float) -> None:
    def job(writer: CacheWriter, first: int) -> None:
        for number in range(first, first + 3):
            write_some(writer, number, 1)
            writer.publish()

    with switching(interval_s):
        for number in range(ROUNDS):
            path = tmp_path / str(number)
            with CacheWriter(path, FEATURES) as writer:
                at_once([partial(job, writer, first) for first in range(0, 40, 10)])
            assert stored(path) == {first + n for first in range(0, 40, 10) for n in range(3)}
            CacheWriter(path, FEATURES).close()


VERBS: dict[str, Verb] = {
    "publish": lambda writer: writer.publish(),
    "commit": lambda writer: writer.commit(),
    "write": lambda writer: write_some(writer, 20),
    "delete": lambda writer: writer.delete(["utt-0", "utt-1"]),
    "restamp": lambda writer: writer.restamp({"utt-2": Stamps(1, 2)}),
    "keep_file": lambda writer: writer.keep_file("probe", b"probe"),
    "fail": fail_some,
    "expect": lambda writer: writer.expect([f"utt-{number}" for number in range(8)]),
    "recover": lambda writer: writer.recover(),
    "close": lambda writer: writer.close(),
    "abort": lambda writer: writer.abort(),
}


PAIRS = [*itertools.combinations_with_replacement(VERBS, 2)]


@pytest.mark.parametrize("verbs", PAIRS, ids="-".join)
def test_any_two_methods_of_a_writer_at_once_leave_a_cache_that_goes_on(
    tmp_path: Path, verbs: tuple[str, str]
) -> None:
    once = {verb for verb in ("write", "delete") if verbs == (verb, verb)}
    # whoever comes behind a close is told so; `recover` wants all to be sealed
    allowed: tuple[type[BaseException], ...] = (CacheLockedError,) if "recover" in verbs else ()
    allowed += (ClosedError,) if {"close", "abort"} & {*verbs} else ()
    allowed += (ValueError, LookupError) if once else ()
    for number, interval_s in itertools.product(range(max(ROUNDS // 20, 1)), INTERVALS_S):
        path = tmp_path / f"{number}-{interval_s}"
        writer = CacheWriter(path, FEATURES)
        write_some(writer, 0, 6)
        writer.publish()
        write_some(writer, 6, 2)
        with switching(interval_s):
            errors = at_once([partial(VERBS[verb], writer) for verb in verbs], allowed)
        writer.close()
        told = {type(error) for error in errors}
        assert not once or len(errors) == 1
        expected = {*range(8)} - (
            {0, 1} if "delete" in verbs and ClosedError not in told else set()
        )
        if "write" in verbs and ClosedError not in told:
            expected |= {*range(20, 24)}
        if "abort" in verbs:
            assert {*range(2, 6)} <= stored(path) <= {*range(8), *range(20, 24)}
        elif ClosedError in told:
            assert {*range(2, 8)} <= stored(path) <= {*range(8), *range(20, 24)}
        else:
            assert stored(path) == expected
        with CacheWriter(path, FEATURES) as again:
            write_some(again, 30)
        assert {*range(30, 34)} <= stored(path)


def test_a_child_that_is_forked_while_a_writer_is_at_work_is_refused_and_waits_for_nobody(
    tmp_path: Path,
) -> None:
    writer = CacheWriter(tmp_path, FEATURES)

    def use() -> None:
        for verb in VERBS.values():
            with pytest.raises(ClosedError, match="forked"):
                verb(writer)

    with writer, writer._parts.lock:  # as another thread may hold it
        child = multiprocessing.get_context("fork").Process(target=use)
        child.start()
        child.join(30)
        code = child.exitcode
        child.kill()
    assert code == 0

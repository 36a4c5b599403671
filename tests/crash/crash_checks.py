"""The check of what a crash left: what readers see, and that the next writer finishes the work."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from crash_promises import TAG, Content, Model, Promise
from crash_writers import (
    ALL,
    ENERGY,
    energy_of,
    go_on,
    model_in,
    numbers_in,
    stamps_of,
    text_of,
    utterance,
)
from store_helpers import Arrays, id_of

import featcache
from featcache.errors import FeatcacheError, NotACacheError
from featcache.format import list_parts, read_building_file
from featcache.store import open_features
from featcache.testing.contract import traces_in

LONGEST_S = 20.0
GIVEN = frozenset(range(10))  # the utterances that the stories annotate
WRONGS = ("lost", "undone", "unopenable", "stuck", "wrong", "half", "untyped")
Oracle = dict[Model, dict[int, Arrays]]


class Stuck(BaseException):
    """A check takes too long."""


def check(path: Path, layout: str, promise: Promise, oracle: Oracle) -> dict[str, str]:
    """Return what is wrong with a cache, by kind; nothing if all is as promised."""
    wrongs: dict[str, str] = {}
    with _noting(wrongs):
        see_added(path, promise, wrongs)
    with _noting(wrongs):
        see(path, promise, oracle, wrongs)
    with _noting(wrongs):
        if None not in promise.visible:
            see_file(path, promise, wrongs)
            see_given(path, promise, wrongs, GIVEN - promise.again)
        see_tag(path, promise, wrongs)
        see_nothing_of(path, promise, wrongs)
        there = go_on(path, layout)
        lost = promise.committed - there
        if lost:
            wrongs["lost"] = f"{sorted(lost)} were committed"
        if there & promise.gone:
            wrongs["undone"] = f"{sorted(there & promise.gone)} were deleted"
        see_file(path, promise, wrongs)
        see_given(path, promise, wrongs, (GIVEN & there) - promise.again)
        whole = Content("new", frozenset(ALL))
        finished = see(path, Promise(whole.numbers, (whole,)), oracle, wrongs)
        if finished.opened.file("probe") != read_building_file(path, "probe"):
            wrongs["half"] = "the probe was not published"
        if not finished.complete:
            wrongs["half"] = "the finished cache is not complete"
    return wrongs


def see_added(path: Path, promise: Promise, wrongs: dict[str, str]) -> None:
    """Compare what readers see of the feature that is added: nothing, or all of it.

    Edits are seen in all sets, or in none.
    """
    try:
        cache = featcache.open(path, verify="arrays")
    except NotACacheError:
        raise _NothingThere from None
    if ENERGY.name not in cache.features:
        return
    energy, others = (open_features(path, [name]) for name in (ENERGY.name, "fbank"))
    there, other = numbers_in(energy), numbers_in(others) & GIVEN
    if there - other or other - there - promise.again:
        wrongs["half"] = f"{sorted(there)} have an energy, {sorted(other)} the rest"
    if {*energy.tags} != {*others.tags}:
        wrongs["half"] = f"the tags are {energy.tags} and {others.tags}"
    given = {*others.annotation("given")} - {None} if "given" in others.annotations else set()
    if given and {*energy.annotation("quality")} != given:
        wrongs["half"] = f"{given} was given to one set, not to the other"
    for number in numbers_in(cache):
        if not np.array_equal(cache.read(id_of(number), "energy"), energy_of(number)["energy"]):
            wrongs["wrong"] = f"the energy of {id_of(number)}"


def see(path: Path, promise: Promise, oracle: Oracle, wrongs: dict[str, str]) -> featcache.Cache:
    """Read everything and compare it with what readers may see."""
    try:
        featcache.open(path, verify="arrays")
        cache = open_features(path, ["fbank"])
    except NotACacheError:
        if None in promise.visible:
            raise _NothingThere from None
        raise
    model = model_in(cache)
    entries = frozenset(entry_stamps(cache, model, wrongs))
    content = Content(model, frozenset(numbers_in(cache)), entries)
    if not promise.allows(content):
        wrongs["half"] = f"{content} is visible, not {' or '.join(map(str, promise.visible))}"
    for number in content.numbers:
        for name, array in oracle[model][number].items():
            if not np.array_equal(cache.read(id_of(number), name), array):
                wrongs["wrong"] = f"{name} of {id_of(number)}"
        row = cache.opened.row(id_of(number))
        if cache.annotation("text")[row] != text_of(number, model):
            wrongs["wrong"] = f"the annotation of {id_of(number)}"
    if not _has_stats_of(cache, content):
        wrongs["wrong"] = "the statistics of fbank"
    return cache


def entry_stamps(
    cache: featcache.Cache, model: Model, wrongs: dict[str, str]
) -> Iterator[tuple[int, int]]:
    """Give numbers and entry stamps, and see that the input stamps are those of the numbers."""
    stamps = cache.opened.index.stamps
    for number in numbers_in(cache):
        if stamps is None:
            wrongs["wrong"] = "there are no stamps"
            return
        row = cache.opened.row(id_of(number))
        if int(stamps.input[row]) != stamps_of(number, model).input:
            wrongs["wrong"] = f"the input stamp of {id_of(number)}"
        yield number, int(stamps.entry[row])


def see_file(path: Path, promise: Promise, wrongs: dict[str, str]) -> None:
    """Compare the probe of the build with what was kept."""
    data = read_building_file(path, "probe")
    if (None if data is None else data.decode()) not in promise.files:
        wrongs["lost"] = f"the probe is {data!r}, not {' or '.join(map(str, promise.files))}"


def see_given(
    path: Path, promise: Promise, wrongs: dict[str, str], numbers: frozenset[int]
) -> None:
    """Compare the annotation that some utterances were given, all at once."""
    cache = open_features(path, ["fbank"])
    found: set[object] = {None}
    if "given" in cache.annotations:
        there = numbers_in(cache) & numbers
        rows = cache.opened.rows(map(id_of, sorted(there)))
        found = {*cache.annotation("given").take(rows)}
    if len(found) > 1:
        wrongs["half"] = f"some of the utterances were given something: {found}"
    elif not found <= {*promise.given}:
        wrongs["lost"] = f"given was {found}, not {' or '.join(map(str, promise.given))}"


def see_tag(path: Path, promise: Promise, wrongs: dict[str, str]) -> None:
    """Read the generation that has a tag."""
    if promise.tagged is not None:
        found = numbers_in(featcache.open(path, version=TAG, verify="arrays"))
        if found != promise.tagged:
            wrongs["lost"] = f"tag {TAG!r} holds {sorted(found)}, not {sorted(promise.tagged)}"


def see_nothing_of(path: Path, promise: Promise, wrongs: dict[str, str]) -> None:
    """Look for the bytes of what is erased, in all files."""
    arrays = {number: utterance(number, "new").values() for number in promise.erased}
    traces = {
        number: [id_of(number).encode(), *(each.tobytes() for each in found if each.size > 4)]
        for number, found in arrays.items()
    }
    left = {number for number, each in traces.items() if traces_in(path, each)}
    if left:
        wrongs["undone"] = f"bytes of {sorted(left)} are there, which were erased"


def _has_stats_of(cache: featcache.Cache, content: Content) -> bool:
    arrays = [utterance(number, content.model)["fbank"] for number in content.numbers]
    frames = np.concatenate([np.zeros((0, 4)), *arrays], dtype=np.float64)
    stats = cache.stats("fbank")
    if not len(frames):
        return stats.count == 0
    # those beside tombstones, and of what was rewritten since, are of what a lossy codec gives back
    manifest = cache.opened.manifest
    lossy = manifest.features["fbank"]["codec"] == "lilcom"
    edited = any(part.tombstones for part in manifest.parts) or any(
        part is not None and part.header.replaces for _, part in list_parts(cache.path)
    )
    near = 0.05 if lossy and edited else 0
    mean = frames.mean(axis=0)
    return stats.count == len(frames) and np.allclose(stats.mean, mean, rtol=1e-12, atol=near)


class _NothingThere(Exception):  # noqa: N818
    """There is no cache, as it may be."""


@contextlib.contextmanager
def _noting(wrongs: dict[str, str]) -> Iterator[None]:
    """Note errors by their kind."""
    previous = signal.signal(signal.SIGALRM, _raise_stuck)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    except _NothingThere:
        pass
    except FeatcacheError as error:
        wrongs["unopenable"] = f"{type(error).__name__}: {error}"
    except Stuck:
        wrongs["stuck"] = f"longer than {LONGEST_S:g} s"
    except Exception as error:
        wrongs["untyped"] = repr(error)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _raise_stuck(*_: object) -> None:
    raise Stuck

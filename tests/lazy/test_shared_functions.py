"""Threads, forks and interrupts in read-through functions that they share."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sharing_helpers import INTERVALS_S, PATIENCE_S, ROUNDS, at_once, switching

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.container_files.lock import WriterLock
from featcache.errors import CacheLockedError, KeyNotFoundError, NotACacheError
from featcache.format import read_manifest
from featcache.lazy import share
from featcache.lazy.share import Share
from featcache.lazy.through import ReadThrough, ReadThroughDataset
from featcache.staleness import code
from featcache.store import open_features

COUNT = 24  # utterances
THREADS = 8


def value_of(id: str) -> NDArray[np.float32]:
    return np.full((3, 2), int(id), np.float32)


@dataclass(frozen=True)
class Noted:
    """Computes values, and notes in a file which."""

    file: Path

    def __call__(self, id: str) -> NDArray[np.float32]:
        descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(descriptor, f"{id}\n".encode())
        os.close(descriptor)
        return value_of(id)

    def ids(self) -> Counter[str]:
        return Counter(self.file.read_text().split())


def read_some(read: ReadThrough, first: int, step: int = THREADS) -> None:
    for number in range(first, COUNT, step):
        assert (read(str(number)) == value_of(str(number))).all()


def assert_holds_all(path: Path, *, complete: bool) -> None:
    cache = featcache.open(path, verify="arrays")
    assert sorted(cache.ids, key=int) == [str(number) for number in range(COUNT)]
    for id in cache.ids:
        assert np.array_equal(cache.read(id, cache.features[0]), value_of(id))
    assert cache.complete == complete


@pytest.mark.parametrize("interval_s", INTERVALS_S)
def test_threads_whose_first_calls_come_at_once_lose_nothing_and_compute_nothing_twice(
    tmp_path: Path, interval_s: float
) -> None:
    for number, publishes in itertools.product(range(ROUNDS), (False, True)):
        path = tmp_path / f"{number}-{publishes}"
        noted = Noted(tmp_path / "computed")
        read = featcache.through(path, noted)
        with switching(interval_s):
            at_once([partial(read_some, read, first % 4, 4) for first in range(THREADS)])
            if publishes:
                read.publish(complete=True)
            read.close()
        assert_holds_all(path, complete=publishes)
        assert {*noted.ids()} == {*map(str, range(COUNT))}
        assert sum(noted.ids().values()) == COUNT + 1  # the first one of all twice
        shutil.rmtree(path)
        noted.file.unlink()


class Items:
    """A data set of such values."""

    def __init__(self) -> None:
        self.ids = [str(number) for number in range(COUNT)]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> NDArray[np.float32]:
        return value_of(str(number))


Shared = ReadThrough | ReadThroughDataset


def a_function(path: Path) -> Shared:
    return featcache.through(path, value_of)


def a_data_set(path: Path) -> Shared:
    return featcache.through(path, Items())


CLASSES: list[Callable[[Path], Shared]] = [a_function, a_data_set]


def read_all(read: Shared, first: int = 0) -> None:
    """Read each utterance, and see that it is the right one."""
    for number in [*range(first, COUNT), *range(first)]:
        found = read(str(number)) if isinstance(read, ReadThrough) else read[number]
        assert np.array_equal(np.asarray(found), value_of(str(number)))


def in_a_child(work: Callable[[], object]) -> None:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(PATIENCE_S)
    code = child.exitcode
    child.kill()
    assert code == 0


def closes(read: Shared) -> None:
    read.close()
    read_all(read, 5)


def publishes(read: Shared) -> None:
    for _ in range(3):
        read.publish()


def forks(read: Shared) -> None:
    in_a_child(partial(read_all, read, 7))


def is_pickled(read: Shared) -> None:
    with pickle.loads(pickle.dumps(read)) as other:  # noqa: S301
        read_all(other, 3)


def is_killed(read: Shared) -> None:
    child = multiprocessing.get_context("fork").Process(target=partial(read_all, read, 11))
    child.start()
    child.join(0.02)
    child.kill()
    child.join()


def adds_a_feature(read: Shared) -> None:
    for _ in range(20):  # refused while anything is being written
        with suppress(featcache.errors.CacheError), CacheWriter(path_of(read), [OTHER]) as writer:
            writer.write("0", {"other": np.ones(1, np.float32)})
            return


def deletes(read: Shared) -> None:
    for number in range(4):
        with suppress(CacheLockedError, NotACacheError, KeyNotFoundError):
            featcache.open(path_of(read)).delete([str(number)])


def compacts(read: Shared) -> None:
    for _ in range(4):
        with suppress(CacheLockedError, NotACacheError):
            featcache.open(path_of(read)).compact()


def overwrites(read: Shared) -> None:
    with suppress(CacheLockedError, NotACacheError):
        manifest = featcache.open(path_of(read)).opened.manifest
        made_from = {key: each for key, each in manifest.fingerprint.items() if key != "features"}
        features = [FeatureStorageConfig.from_json(each) for each in manifest.features.values()]
        with CacheWriter(path_of(read), features, made_from, overwrite=True) as writer:
            if "1" not in writer:  # of one that was refused in the middle of it
                writer.write("1", {features[0].name: value_of("1")})


def path_of(read: Shared) -> Path:
    return read.path if isinstance(read, ReadThrough) else read.read.path


OTHER = FeatureStorageConfig("other")
LOSE = (deletes, overwrites)
MEANWHILE = (closes, publishes, forks, is_pickled, is_killed, adds_a_feature, compacts, *LOSE)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("interval_s", INTERVALS_S)
@pytest.mark.parametrize("make", CLASSES)
def test_threads_read_what_is_right_whatever_another_one_does_meanwhile(
    tmp_path: Path, make: Callable[[Path], Shared], interval_s: float
) -> None:
    for number in range(ROUNDS):
        path, what = tmp_path / str(number), MEANWHILE[number % len(MEANWHILE)]
        read = make(path)
        if number % 2 or what is adds_a_feature:  # which would have the directory to itself
            for known in range(8):
                one(read, known)
            read.publish()
        jobs = [partial(read_all, read, 0), partial(read_all, read, 6), partial(what, read)]
        with switching(interval_s):
            at_once(jobs)
        read_all(read)
        read.close()
        if what is overwrites:  # it may have been refused in the middle of it: then it goes on
            overwrites(read)
        if what in LOSE:  # who reads goes on with what there was, until something is missing
            with make(path) as another:
                read_all(another)
        holds_all(path)
        shutil.rmtree(path)


def holds_all(path: Path) -> None:
    """See that all is in a cache, be there added features or not, and nothing of others is left."""
    featcache.open(path, verify="arrays")
    cache = open_features(path, read_manifest(path).features)
    assert sorted(cache.ids, key=int) == [str(number) for number in range(COUNT)]
    for id in cache.ids:
        assert np.array_equal(cache.read(id, cache.features[0]), value_of(id))
    assert not (path / "work-through").exists()
    cache.compact()


@pytest.mark.parametrize("make", CLASSES)
def test_a_feature_that_another_run_adds_stops_no_reading(
    tmp_path: Path, make: Callable[[Path], Shared]
) -> None:
    path = tmp_path / "cache"
    read = make(path)
    for number in (0, 1):
        one(read, number)
    read.publish()
    with CacheWriter(path, [OTHER]) as writer:
        writer.write("0", {"other": np.ones(1, np.float32)})
    read_all(read)
    read.publish()
    with CacheWriter(path, [OTHER]) as writer:  # into its set
        writer.write("1", {"other": np.ones(1, np.float32)})
    read.close()
    holds_all(path)
    assert sorted(featcache.open(path).ids) == ["0", "1"]


def one(read: Shared, number: int) -> None:
    found = read(str(number)) if isinstance(read, ReadThrough) else read[number]
    assert np.array_equal(np.asarray(found), value_of(str(number)))


def open_share(read: Shared) -> Share:
    function = read if isinstance(read, ReadThrough) else read.read
    return function._begun()


@pytest.mark.parametrize("make", CLASSES)
def test_a_child_forked_under_every_lock_of_its_parent_reads_on(
    tmp_path: Path, make: Callable[[Path], Shared]
) -> None:
    read = make(tmp_path / "cache")
    one(read, 0)
    function = read if isinstance(read, ReadThrough) else read.read
    with function._here().lock, open_share(read)._lock:
        in_a_child(partial(read_all, read))
    read_all(read)
    read.close()
    holds_all(tmp_path / "cache")


class SlowInParent(dict[str, object]):
    """A fingerprint that takes as long as a child takes, and in the child no time."""

    def __init__(self) -> None:
        super().__init__(values=1)
        self.pid, self.begun, self.goes_on = os.getpid(), threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[str]:
        if os.getpid() == self.pid:
            self.begun.set()
            assert self.goes_on.wait(PATIENCE_S)
        return super().__iter__()

    def keys(self) -> Any:
        return list(self)


@pytest.mark.parametrize("compute", [value_of, Items()], ids=["function", "data set"])
def test_a_child_forked_while_a_thread_finds_the_fingerprint_reads_on(
    tmp_path: Path, compute: Any
) -> None:
    with featcache.through(tmp_path, compute, fingerprint={"values": 1}) as made:
        one(made, 0)
    given = SlowInParent()
    read = featcache.through(tmp_path, compute, fingerprint=given)
    first = threading.Thread(target=one, args=(read, 0))
    first.start()
    assert given.begun.wait(PATIENCE_S)
    in_a_child(partial(read_all, read))
    given.goes_on.set()
    first.join()
    read_all(read)
    read.close()
    holds_all(tmp_path)


def test_a_child_forked_while_a_thread_parses_code_parses_it() -> None:
    with code._PARSING:
        in_a_child(partial(code.parsed, "value = 1"))


def test_a_call_that_is_under_way_when_the_function_is_closed_publishes_its_result(
    tmp_path: Path,
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    class Waiting:
        def __call__(self, id: str) -> NDArray[np.float32]:
            begun.set()
            assert goes_on.wait(PATIENCE_S)
            return value_of(id)

    read = featcache.through(tmp_path, Waiting(), fingerprint={"values": 1})
    call = threading.Thread(target=read, args=("1",))
    call.start()
    assert begun.wait(PATIENCE_S)
    read.close()
    goes_on.set()
    call.join()
    assert featcache.open(tmp_path).ids == ["1"]
    assert not (tmp_path / "work-through").exists()


def test_publish_says_that_another_one_writes_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "PATIENCE_S", 0.1)
    with featcache.through(tmp_path, value_of) as read:
        read("1")
        lock = WriterLock(tmp_path)
        with pytest.raises(CacheLockedError, match=r"could not be published.*try again"):
            read.publish(complete=True)
        lock.release()
        read.publish(complete=True)
        assert featcache.open(tmp_path).complete


def test_what_is_deleted_while_the_one_that_computed_it_lives_is_computed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share, "PATIENCE_S", 1e9)
    with featcache.through(tmp_path, value_of) as read, featcache.through(tmp_path, value_of) as b:
        read_all(read)
        read.publish()
        featcache.open(tmp_path).delete(["1", "2"])
        at_once([partial(read_all, b)])


def test_what_a_killed_one_left_goes_with_one_that_only_read(tmp_path: Path) -> None:
    with featcache.through(tmp_path, value_of) as read:
        read_all(read)
    (tmp_path / "work-through" / f"{2:016x}").mkdir(parents=True)  # as a killed one leaves
    (tmp_path / "work-through" / "claims").write_bytes(bytes(16))
    with featcache.through(tmp_path, value_of) as read:
        read_all(read)
    assert not (tmp_path / "work-through").exists()


def test_threads_that_read_see_each_newer_generation(tmp_path: Path) -> None:
    """Small parts become one, whose files take the place of those that are being read."""
    read = featcache.through(tmp_path, value_of)
    read_all(read)
    read.publish()

    def changes() -> None:
        for _ in range(10):
            featcache.open(tmp_path).delete(["0"])
            featcache.open(tmp_path).compact()
            with featcache.through(tmp_path, value_of) as other:
                one(other, 0)

    with switching(1e-6):
        at_once([changes, *(partial(read_some, read, first, 4) for first in (1, 2, 3, 1, 2))])
    read.close()
    holds_all(tmp_path)

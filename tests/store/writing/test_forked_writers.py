"""A writer belongs to its process: in a forked child it refuses at once, and its own goes on."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_helpers import FINGERPRINT, arrays_of, check_cache, id_of, two_features, write

import featcache
from featcache import CacheWriter
from featcache.errors import CacheLockedError, ClosedError, ConfigError
from featcache.writing.part_writer import PartWriter

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
Writer = CacheWriter | PartWriter


def leave_block(writer: Writer) -> None:
    with writer:
        pass


CALLS: dict[str, Callable[[Any], object]] = {
    "write": lambda writer: writer.write(id_of(8), arrays_of(8)),
    "commit": lambda writer: writer.commit(),
    "close": lambda writer: writer.close(),
    "abort": lambda writer: writer.abort(),
    "leave": leave_block,
    "expect_more": lambda writer: writer.expect_more(3),
}
CALLS_OF_CACHE_WRITERS: dict[str, Callable[[CacheWriter], object]] = {
    "publish": lambda writer: writer.publish(),
    "recover": lambda writer: writer.recover(),
    "expect": lambda writer: writer.expect([id_of(8)]),
    "fail": lambda writer: writer.fail(id_of(8)),
}


def in_child(job: Callable[[], object], seconds: int = 20) -> str:
    """Return what `job` raises in a forked child, which is given some time."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)  # a child that hangs is killed
        try:
            job()
            told = "nothing"
        except ClosedError as error:
            told = str(error)
        except BaseException as error:
            told = repr(error)
        os.write(sending, told.encode())
        os._exit(0)
    os.close(sending)
    with open(receiving, "rb") as file:  # noqa: PTH123 (a descriptor)
        told = file.read().decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return told.replace(str(child), "CHILD")


def refusal(path: Path) -> str:
    return (
        f"the writer of {str(path)!r} belongs to process {os.getpid()}, and this is CHILD, forked "
        "from it"
    )


@pytest.mark.parametrize("call", [*CALLS, *CALLS_OF_CACHE_WRITERS])
def test_a_cache_writer_refuses_in_a_forked_child_and_goes_on_in_its_own_process(
    tmp_path: Path, call: str
) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        write(writer, range(3))
        job = (CALLS | CALLS_OF_CACHE_WRITERS)[call]
        assert in_child(lambda: job(writer)).startswith(refusal(tmp_path))
        with pytest.raises(CacheLockedError):
            CacheWriter(tmp_path, two_features(), FINGERPRINT)
        write(writer, range(3, 6))
        assert writer.commit() == 6
    check_cache(tmp_path, range(6))
    assert featcache.open(tmp_path).failed == ()


@pytest.mark.parametrize("call", CALLS)
def test_a_part_writer_refuses_in_a_forked_child(tmp_path: Path, call: str) -> None:
    with (
        CacheWriter(tmp_path, two_features(), FINGERPRINT),
        PartWriter(tmp_path, two_features(), FINGERPRINT) as part,
    ):
        part.write(id_of(1), arrays_of(1))
        assert in_child(lambda: CALLS[call](part)).startswith(refusal(tmp_path))
        part.write(id_of(2), arrays_of(2))
    check_cache(tmp_path, [1, 2])


@pytest.mark.parametrize("before", [0, 3])
def test_an_error_in_a_childs_block_is_the_one_that_is_raised(tmp_path: Path, before: int) -> None:
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    write(writer, range(before))

    def fail() -> None:
        with writer:
            raise ZeroDivisionError

    assert in_child(fail) == "ZeroDivisionError()"
    writer.close()
    check_cache(tmp_path, range(before))


def test_a_child_may_drop_the_writer_and_make_one_of_its_own(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "a", two_features(), FINGERPRINT) as writer:
        write(writer, range(3))

        def write_another() -> None:
            nonlocal writer
            del writer
            with CacheWriter(tmp_path / "b", two_features(), FINGERPRINT) as other:
                write(other, range(4))

        assert in_child(write_another) == "nothing"
        with pytest.raises(CacheLockedError):
            CacheWriter(tmp_path / "a", two_features(), FINGERPRINT)
    check_cache(tmp_path / "a", range(3))
    check_cache(tmp_path / "b", range(4))


WRITER: CacheWriter | None = None


def write_four(job: int) -> int:
    assert WRITER is not None
    write(WRITER, range(100 + 4 * job, 104 + 4 * job))
    return job


def test_a_pool_of_forked_children_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        monkeypatch.setitem(globals(), "WRITER", writer)
        write(writer, [0])
        with (
            multiprocessing.get_context("fork").Pool(2) as pool,
            pytest.raises(ClosedError, match=f"belongs to process {os.getpid()}, and this is"),
        ):
            pool.map_async(write_four, range(4)).get(timeout=60)
        write(writer, [1])
    check_cache(tmp_path, [0, 1])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_writer_is_not_handed_to_other_processes(tmp_path: Path, method: str) -> None:
    why = r"cannot be sent to another process|cannot be pickled: it belongs to its process"
    refused = (TypeError, ConfigError)
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        part = PartWriter(tmp_path, two_features(), FINGERPRINT)
        for each in (writer, part):
            for hand_over in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(refused, match=why):
                    hand_over(each)
            with (
                multiprocessing.get_context(method).Pool(1) as pool,
                pytest.raises(refused, match=why),
            ):
                pool.apply_async(repr, (each,)).get(timeout=60)
        with pytest.raises(TypeError, match=rf"{tmp_path}.*extract\(parallel=\.\.\.\)"):
            pickle.dumps(writer)
        if method == "spawn":
            process = multiprocessing.get_context("spawn").Process(target=repr, args=(writer,))
            with pytest.raises(refused, match=why):
                process.start()
        part.close()
        write(writer, range(3))
    check_cache(tmp_path, range(3))

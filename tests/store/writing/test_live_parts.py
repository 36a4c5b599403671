"""Recovery beside living writers: nothing that lives is removed, and nobody is refused for being
looked at.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    check_cache,
    id_of,
    make_cache,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter
from featcache.container_files.lock import WriterLock, is_locked
from featcache.errors import CacheLockedError
from featcache.format import NAME
from featcache.writing import open_part, part_writer, recover
from featcache.writing.part_writer import PartWriter


def slowed(monkeypatch: pytest.MonkeyPatch, module: object, name: str, seed: int) -> None:
    """Let others run after a call, for up to some milliseconds."""
    call = getattr(module, name)
    random = np.random.default_rng(seed)

    def slow(*args: Any, **settings: Any) -> Any:
        time.sleep(random.random() * 0.004)
        result = call(*args, **settings)
        time.sleep(random.random() * 0.004)
        return result

    monkeypatch.setattr(module, name, slow)


def test_a_part_that_is_just_being_opened_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, (module, name) in enumerate(
        [
            (open_part, "make_directory"),
            (open_part, "WriterLock"),
            (open_part, "JournalWriter"),
            (recover, "WriterLock"),
            (recover, "read_journal"),
            (recover, "remove_part"),
        ]
    ):
        slowed(monkeypatch, module, name, seed)
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    ended = threading.Event()
    errors: list[BaseException] = []
    looked = 0

    def recover_on() -> None:
        nonlocal looked
        try:
            while not ended.is_set():
                with contextlib.suppress(CacheLockedError):
                    writer.recover()
                looked += 1
                time.sleep(0.005)
        except BaseException as error:
            errors.append(error)

    recovering = threading.Thread(target=recover_on)
    recovering.start()
    try:
        for number in range(40):
            part = PartWriter(tmp_path, two_features(), FINGERPRINT)
            part.write(id_of(number), arrays_of(number))
            assert part.commit() == 1
            part.close()
    finally:
        ended.set()
        recovering.join()
    assert errors == []
    writer.close()
    check_cache(tmp_path, range(40))
    assert looked > 5


POLL = """
import sys
from pathlib import Path
from featcache.container_files.lock import is_locked
for number in range(10**9):
    is_locked(Path(sys.argv[1]))
    if number == 10:
        print("ready", flush=True)
"""


def test_no_lone_writer_is_refused_because_somebody_looks_at_its_lock_all_the_time(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", POLL, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            for _ in range(60):
                held = WriterLock(tmp_path)
                assert is_locked(tmp_path)
                held.release()
        finally:
            process.kill()


def driver_died(path: Path) -> Path:
    """A cache with two sealed parts that nobody published, and an open one."""
    with CacheWriter(path / "live", two_features(), FINGERPRINT) as writer:
        write(writer, range(2))
        writer.publish()
        for first in (2, 5):
            with PartWriter(path / "live", two_features(), FINGERPRINT) as part:
                for number in range(first, first + 3):
                    part.write(id_of(number), arrays_of(number))
        write(writer, range(8, 10))
        writer.commit()
        shutil.copytree(path / "live", path / "died")
    return path / "died"


def test_what_is_recovered_is_published_when_a_writer_opens(tmp_path: Path) -> None:
    died = driver_died(tmp_path)
    check_cache(died, range(2), complete=False)
    writer = CacheWriter(died, two_features(), FINGERPRINT)
    check_cache(died, range(10), complete=False)
    with PartWriter(died, two_features(), FINGERPRINT) as part:
        # the published index, mapped; no part's ids in memory of its own
        assert part._known.count == 1
        assert all(id_of(number) in part for number in range(10))
    writer.close()
    check_cache(died, range(10))


def test_what_is_recovered_of_an_overwrite_waits_for_its_end(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        CacheWriter(tmp_path, two_features(), FINGERPRINT, overwrite=True) as writer,
    ):
        write(writer, range(5, 8))
        raise KeyboardInterrupt
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT, overwrite=True)
    check_cache(tmp_path, range(3))
    writer.abort()
    check_cache(tmp_path, range(3))


def test_opening_a_writer_that_has_nothing_to_recover_publishes_nothing(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    before = featcache.open(tmp_path).generation
    make_cache(tmp_path, [])
    assert featcache.open(tmp_path).generation == before
    assert featcache.open(tmp_path).complete


def test_a_writer_keeps_no_ids_of_sealed_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "PART_ROWS", 4)
    with CacheWriter(tmp_path, two_features(), FINGERPRINT) as writer:
        for numbers in (range(12), range(12, 23)):
            write(writer, numbers)
            writer.commit()
            assert len(writer._parts._known._numbers) < 4
            assert all(id_of(number) in writer for number in numbers)
        writer.publish()
        assert writer._parts._known._numbers == {}
        with pytest.raises(featcache.FeatcacheError, match=r"is stored in .* already; skip it"):
            write(writer, [1])
    check_cache(tmp_path, range(23))


def test_a_lock_that_another_holds_is_refused(tmp_path: Path) -> None:
    held = WriterLock(tmp_path)
    with pytest.raises(CacheLockedError):
        WriterLock(tmp_path)
    held.release()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_cache_is_not_begun_anew_while_a_part_of_it_is_written(
    tmp_path: Path, overwrite: bool
) -> None:
    make_cache(tmp_path, range(2) if overwrite else [])
    before = (tmp_path / NAME).read_bytes()
    with PartWriter(tmp_path, two_features(), FINGERPRINT) as part:
        part.write(id_of(5), arrays_of(5))  # nothing of it is durable
        with pytest.raises(CacheLockedError, match="is still being written by process"):
            CacheWriter(tmp_path, two_features(), {"made": "otherwise"}, overwrite=overwrite)
        assert (tmp_path / NAME).read_bytes() == before
    make_cache(tmp_path, [])
    check_cache(tmp_path, [*range(2), 5] if overwrite else [5])

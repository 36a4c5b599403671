"""Writers that nobody closes: what they took is stored, published as incomplete, with a warning."""

from __future__ import annotations

import gc
import logging
import threading
import time
import warnings
from pathlib import Path

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
from store_scripts import HEAD, run_script

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CacheLockedError
from featcache.writing import background
from featcache.writing.part_writer import PartWriter

TOLD = "was not closed: what it had taken is stored now; close it, or use it in a `with` block"
ENDS = {
    "the end": ("", 0),
    "an early return": ("sys.exit()", 0),
    "an exit code": ("sys.exit(3)", 3),
    "an error": ("raise ZeroDivisionError", 1),
}


def without_lengths(text: str) -> str:
    """What a process said, but for utterances that have no frames."""
    return "".join(line for line in text.splitlines(True) if "have no frames" not in line)


@pytest.mark.parametrize("backend", featcache.registry.backend_names())
def test_a_script_that_forgets_to_close_has_stored_everything(tmp_path: Path, backend: str) -> None:
    script = """
features = [FeatureStorageConfig("fbank", backend=sys.argv[2])]
writer = CacheWriter(path, features)
for number in range(20):
    writer.write(f"{number:02}", {"fbank": np.full((3, 2), number)})
"""
    done = run_script(script, tmp_path, backend)
    assert done.returncode == 0
    assert done.stderr == f"the writer of {str(tmp_path)!r} {TOLD}\n"
    cache = featcache.open(tmp_path, verify="arrays")
    assert not cache.complete
    assert [int(cache.read(id, "fbank")[2, 1]) for id in cache] == list(range(20))


@pytest.mark.parametrize("end", ENDS)
def test_however_a_script_ends_what_its_writer_took_is_stored(tmp_path: Path, end: str) -> None:
    statement, code = ENDS[end]
    done = run_script(
        "writer = CacheWriter(path, two_features(), FINGERPRINT)\nwrite(writer, "
        f"range(5))\n{statement}",
        tmp_path,
        options=("-W", "always::ResourceWarning"),
    )
    assert done.returncode == code
    # a line of the log, a warning
    assert done.stderr.count(f"the writer of {str(tmp_path)!r} {TOLD}") == 2
    assert done.stderr.count("ResourceWarning: the writer") == 1
    assert ("Traceback" in done.stderr) == (end == "an error")
    check_cache(tmp_path, range(5), complete=False)
    make_cache(tmp_path, range(5, 7))
    check_cache(tmp_path, range(7))


def test_a_closed_writer_and_an_aborted_one_are_not_told_of(tmp_path: Path) -> None:
    script = """
closed = CacheWriter(path / "closed", two_features(), FINGERPRINT)
write(closed, range(3))
closed.close()
aborted = CacheWriter(path / "aborted", two_features(), FINGERPRINT)
write(aborted, range(3))
aborted.abort()
left = CacheWriter(path / "left", two_features(), FINGERPRINT)
with left:
    write(left, range(3))
part_of = CacheWriter(path / "part", two_features(), FINGERPRINT)
part = PartWriter(path / "part", two_features(), FINGERPRINT)
part.write(id_of(1), arrays_of(1))
part.abort()
part_of.close()
"""
    done = run_script(script, tmp_path, options=("-W", "always::ResourceWarning"))
    assert (done.returncode, without_lengths(done.stderr)) == (0, "")
    check_cache(tmp_path / "closed", range(3))
    check_cache(tmp_path / "left", range(3))
    check_cache(tmp_path / "aborted", [], complete=False)
    check_cache(tmp_path / "part", [])


def test_a_forgotten_part_writer_is_closed_before_its_cache_writer(tmp_path: Path) -> None:
    script = """
writer = CacheWriter(path, two_features(), FINGERPRINT)
part = PartWriter(path, two_features(), FINGERPRINT)
part.write(id_of(1), arrays_of(1))
write(writer, [2])
"""
    done = run_script(script, tmp_path)
    assert done.returncode == 0
    assert done.stderr.count(f"the part writer of {str(tmp_path)!r} {TOLD}") == 1
    assert done.stderr.count(f"the writer of {str(tmp_path)!r} {TOLD}") == 1
    check_cache(tmp_path, [1, 2], complete=False)


def test_an_overwrite_that_nobody_closes_leaves_the_old_cache_and_is_taken_up_again(
    tmp_path: Path,
) -> None:
    make_cache(tmp_path, range(3))
    script = """
writer = CacheWriter(path, two_features(), FINGERPRINT, overwrite=True)
write(writer, range(5, 9))
"""
    done = run_script(script, tmp_path)
    assert (done.returncode, done.stderr.count(TOLD)) == (0, 1)
    check_cache(tmp_path, range(3))
    with CacheWriter(tmp_path, two_features(), FINGERPRINT, overwrite=True) as writer:
        assert [number for number in range(10) if id_of(number) in writer] == [5, 6, 7, 8]
    check_cache(tmp_path, range(5, 9))


def test_a_forked_child_that_leaves_closes_its_own_writers_only(tmp_path: Path) -> None:
    script = """
writer = CacheWriter(path / "parent", two_features(), FINGERPRINT)
write(writer, range(3))
child = os.fork()
if child == 0:
    own = CacheWriter(path / "child", two_features(), FINGERPRINT)
    write(own, range(4))
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
write(writer, range(3, 5))
writer.close()
"""
    done = run_script(script, tmp_path, options=("-W", "ignore::DeprecationWarning"))
    assert done.returncode == 0, done.stderr
    assert without_lengths(done.stderr) == f"the writer of {str(tmp_path / 'child')!r} {TOLD}\n"
    check_cache(tmp_path / "parent", range(5))
    check_cache(tmp_path / "child", range(4), complete=False)


WORKERS = """
import torch, torch.utils.data
import multiprocessing

class Utterances(torch.utils.data.Dataset):
    def __init__(self, path):
        self.path, self.writer = path, None
    def __len__(self):
        return 6
    def __getitem__(self, number):
        if self.writer is None:
            self.writer = CacheWriter(self.path, two_features(), FINGERPRINT)
        write(self.writer, [number])
        return number

if __name__ == "__main__":
    import warnings
    loader = torch.utils.data.DataLoader(
        Utterances(path), batch_size=2, num_workers=1, multiprocessing_context=sys.argv[2])
    for batch in loader:
        pass
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_of_a_data_loader_that_forgets_to_close_has_stored_everything(
    tmp_path: Path, method: str
) -> None:
    script = tmp_path / "script.py"  # spawn imports it again
    script.write_text(HEAD + WORKERS)
    done = run_script(
        "import runpy; sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        if method == "fork"
        else "import subprocess; sys.exit(subprocess.call([sys.executable, *sys.argv[2:]]))",
        "",
        script,
        tmp_path / "cache",
        method,
        timeout_s=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(TOLD) == 1
    check_cache(tmp_path / "cache", range(6), complete=False)


def test_a_writer_that_is_dropped_lets_the_next_one_open_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = threading.active_count()
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    write(writer, range(3))
    with pytest.warns(ResourceWarning, match=f"writer of {str(tmp_path)!r} was not closed") as told:
        del writer
    assert len(told) == caplog.text.count(TOLD) == 1
    assert threading.active_count() == threads
    check_cache(tmp_path, range(3), complete=False)
    make_cache(tmp_path, range(3, 5))
    check_cache(tmp_path, range(5))


def test_a_part_writer_that_is_dropped_but_runs_on_is_said_to_be_of_this_process(
    tmp_path: Path,
) -> None:
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    part = PartWriter(tmp_path, two_features(), FINGERPRINT)
    part.write(id_of(1), arrays_of(1))
    writer.close()
    message = (
        r"part .* is still being written by process \d+ on .*, which is this one: "
        "close the other writer"
    )
    with pytest.raises(CacheLockedError, match=message):
        CacheWriter(tmp_path, two_features(), FINGERPRINT)
    part.close()
    make_cache(tmp_path, [2])
    check_cache(tmp_path, [1, 2])


def test_a_writer_in_a_cycle_may_be_collected_by_its_own_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from featcache.writing.open_part import OpenPart

    append = OpenPart.append
    dropped = threading.Event()

    def collect(*args: object) -> None:
        dropped.wait(10)
        gc.collect()
        append(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(OpenPart, "append", collect)
    gc.collect()
    gc.disable()
    try:
        cycle: list[object] = [CacheWriter(tmp_path, two_features(), FINGERPRINT)]
        cycle.append(cycle)
        writer = cycle[0]
        assert isinstance(writer, CacheWriter)
        thread = writer._parts._thread._background._thread
        write(writer, [1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            del cycle, writer
            dropped.set()
            wait_until(lambda: TOLD in caplog.text)
    finally:
        gc.enable()
    wait_until(lambda: not thread.is_alive())
    check_cache(tmp_path, [1], complete=False)


def test_a_writer_may_be_collected_by_who_holds_the_lock_that_closing_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from h5py._hl.base import phil  # held while any of its calls runs

    monkeypatch.setattr(background, "PATIENCE_S", 0.2)
    writer = CacheWriter(tmp_path, [FeatureStorageConfig("fbank", backend="hdf5")])
    writer.write("utt-1", {"fbank": np.ones((3, 2))})
    with phil:
        del writer
        assert TOLD not in caplog.text
    wait_until(lambda: TOLD in caplog.text)
    assert len(featcache.open(tmp_path)) == 1


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 20
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_writer_that_cannot_be_closed_any_more_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = CacheWriter(tmp_path, two_features(), FINGERPRINT)
    write(writer, range(3))
    writer.commit()
    error = OSError(5, "Input/output error")
    writer._parts._thread._background.put(lambda: (_ for _ in ()).throw(error), 0, 0)
    with pytest.warns(ResourceWarning, match="closing it now failed: .*Input/output error"):
        del writer
    assert caplog.records[-1].levelno == logging.WARNING
    make_cache(tmp_path, range(3, 5))
    check_cache(tmp_path, range(5))

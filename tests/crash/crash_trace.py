"""Work done in a process of its own while `strace` watches it: the steps it takes a disk."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from crash_calls import MARK, Steps
from crash_disk import Disk, read_tree
from crash_log import TRACED, calls
from crash_steps import Step

LONGEST = 1 << 26  # bytes of one write that the log holds
LONGEST_S = 60  # of some work, which is killed then
PR_SET_PTRACER, ANY = 0x59616D61, ctypes.c_ulong(-1)


class WorkFailedError(AssertionError):
    """The work in the child process has not come to its end."""


def can_trace() -> bool:
    """Say whether `strace` is installed, and may be used here."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-o", os.devnull, "true"], check=False).returncode == 0


def mark(text: str) -> None:
    """Leave a mark between the system calls."""
    os.access(f"{MARK}{text}", os.F_OK)  # no such file, but the log shows the question


def traced(disk: Disk, root: Path, work: Callable[[], object]) -> list[Step]:
    """Do some work in a child process and return its steps; the real `root` is as `disk` is.

    Raises `WorkFailedError` if the work ends with an error, and `AssertionError` unless these steps
    lead the disk to where the real directory then is.
    """
    log = root.with_suffix(".strace")
    with _forked(work) as (child, start):
        command = ["strace", "-f", "-y", "-xx", "-s", str(LONGEST), "-o", str(log)]
        command += ["-e", f"trace={','.join(f'?{name}' for name in TRACED)}", "-p", str(child)]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as strace:
            assert strace.stderr is not None
            said = strace.stderr.readline()
            assert b"attached" in said, said.decode()
            start()
            strace.communicate()
    after = disk.copy()
    with log.open(encoding="ascii") as lines:
        steps = Steps(after, str(root)).follow(calls(lines))
    log.unlink()
    assert after.tree() == read_tree(root), "the log does not tell all"
    return steps


@contextlib.contextmanager
def _forked(work: Callable[[], object]) -> Iterator[tuple[int, Callable[[], object]]]:
    """Fork a child that waits for `start` to be called, and see at the end that it did its work."""
    waiting, starting = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        os.close(starting)
        try:
            ctypes.CDLL(None).prctl(PR_SET_PTRACER, ANY)  # strace is no ancestor of this process
            if os.read(waiting, 1):
                signal.alarm(LONGEST_S)
                work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        yield child, lambda: os.write(starting, b"!")
    finally:
        os.close(starting)
        os.close(waiting)
        _, status = os.waitpid(child, 0)
    if status:
        raise WorkFailedError(f"a writer ended with status {status}; its error stands above")

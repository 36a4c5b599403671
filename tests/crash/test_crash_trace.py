"""The log of system calls, read: files are rebuilt as they are, whoever writes them and however."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from crash_calls import Steps
from crash_disk import Disk, Tree
from crash_log import calls
from crash_trace import can_trace, mark, traced

pytestmark = pytest.mark.skipif(not can_trace(), reason="strace is not installed, or may not trace")
NEW = os.O_RDWR | os.O_CREAT


def rebuilt(tmp_path: Path, work: Callable[[Path], object]) -> Disk:
    """Watch some work, which `traced` compares with what is really there then."""
    root, disk = tmp_path / "disk", Disk()
    root.mkdir()
    for step in traced(disk, root, lambda: work(root)):
        step(disk)
    return disk


def test_places_in_files_are_followed(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        file = os.open(root / "a", NEW)
        os.write(file, b"0123456789")
        os.lseek(file, 2, os.SEEK_SET)
        os.read(file, 2)
        again = os.dup(file)
        os.write(again, b"x")
        os.writev(file, [b"y", b"z"])
        os.pwrite(file, b"p", 0)
        os.ftruncate(file, 9)
        end = os.open(root / "a", os.O_WRONLY | os.O_APPEND)
        os.write(end, b"!")

    assert rebuilt(tmp_path, work).tree() == {"a": b"p123xyz78!"}


def test_names_are_followed(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        (root / "d" / "e").mkdir(parents=True)
        (root / "d" / "one").write_bytes(b"1")
        (root / "d" / "two").write_bytes(b"2")
        (root / "d" / "one").replace(root / "d" / "two")
        os.link(root / "d" / "two", root / "linked")
        directory = os.open(root / "d", os.O_DIRECTORY)
        os.unlink("two", dir_fd=directory)
        os.mkdir("f", dir_fd=directory)
        shutil.rmtree(root / "d" / "e")

    assert rebuilt(tmp_path, work).tree() == {"d": {"f": {}}, "linked": b"1"}


def test_threads_and_processes_are_told_apart(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        for number in range(50):
            with path.open("ab", buffering=0) as file:
                file.write(b"%d," % number)
                os.fsync(file.fileno())

    def work(root: Path) -> None:
        shared = os.open(root / "shared", NEW)
        os.write(shared, b"parent ")
        child = os.fork()
        paths = [root / f"{child == 0}-{number}" for number in range(3)]
        threads = [threading.Thread(target=write, args=[path]) for path in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if child == 0:
            os.write(shared, b"child")
            os._exit(0)
        os.waitpid(child, 0)

    tree = rebuilt(tmp_path, work).tree()
    assert len(tree) == 7
    assert tree["shared"] == b"parent child"


def test_a_descriptor_is_free_before_its_close_returns(tmp_path: Path) -> None:
    def text(path: str) -> str:
        return '"' + "".join(f"\\x{octet:02x}" for octet in path.encode()) + '"'

    log = f"""
71 openat(AT_FDCWD<\\x2f>, {text("/disk/a")}, O_RDWR|O_CREAT, 0666) = 4<\\x2f>
71 clone3({{flags=CLONE_FILES|CLONE_THREAD}}, 88) = 72
71 close(4<\\x2f> <unfinished ...>
72 openat(AT_FDCWD<\\x2f>, {text("/disk/b")}, O_RDWR|O_CREAT, 0666) = 4<\\x2f>
71 <... close resumed>) = 0
72 write(4<\\x2f>, {text("here")}, 4) = 4
72 close(4<\\x2f>) = 0
72 write(4<\\x70>, {text("to a pipe")}, 9) = 9
"""
    disk = Disk()
    Steps(disk, "/disk").follow(calls(log.strip().splitlines()))
    expected: Tree = {"a": b"", "b": b"here"}
    assert disk.tree() == expected


def test_marks_stand_between_the_calls(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        mark("one")
        (root / "a").touch()
        mark("two")

    assert rebuilt(tmp_path, work).marks == ["one", "two"]


def test_what_is_not_modelled_is_refused(tmp_path: Path) -> None:
    def work(root: Path) -> None:
        with (root / "a").open("wb") as one, (root / "a").open("rb") as other:
            one.write(b"data")
            one.flush()
            os.sendfile(one.fileno(), other.fileno(), 0, 4)

    with pytest.raises(AssertionError, match="not modelled: sendfile"):
        rebuilt(tmp_path, work)

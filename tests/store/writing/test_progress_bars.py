"""Long work shows how far it is: a bar in a terminal, a line a minute elsewhere."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_helpers import make_cache

import featcache
from featcache._progress import bar


class Terminal(io.StringIO):
    """An output that is a terminal."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def shown(output: io.StringIO, *, delay_s: float = 0.0) -> Iterator[None]:
    """Show bars in an output; within the test, as pytest sets `sys.stderr` before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", output)
        patch.setattr(bar, "__kwdefaults__", {**(bar.__kwdefaults__ or {}), "delay_s": delay_s})
        yield


def test_verify_repair_and_compact_show_their_bytes(tmp_path: Path) -> None:
    cache = featcache.open(make_cache(tmp_path / "cache", range(60)))
    terminal, ids = Terminal(), list(cache)
    with shown(terminal):
        featcache.open(tmp_path / "cache", verify="arrays")
        cache.repair(dry_run=True)
        cache.delete(ids[:5])
        cache.compact()
    assert "verify cache: 100%" in terminal.getvalue()
    assert "look at cache: " in terminal.getvalue()
    assert "compact cache: 100%" in terminal.getvalue()


def test_adopt_and_collect_show_their_files_and_bytes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(5):
        np.save(source / f"utt-{number}.npy", np.ones((3, 2), np.float32))
    terminal = Terminal()
    with shown(terminal):
        featcache.adopt(source, tmp_path / "cache").collect()
    assert "adopt source: 5 files" in terminal.getvalue()
    assert "collect: " in terminal.getvalue()


def test_short_work_shows_nothing(tmp_path: Path) -> None:
    output = Terminal()
    with shown(output, delay_s=5.0):
        featcache.open(make_cache(tmp_path / "cache", range(5)), verify="arrays")
    assert output.getvalue() == ""


def test_without_a_terminal_there_is_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    output, now = io.StringIO(), [0.0]
    with shown(output), bar("work", 600) as progress:
        monkeypatch.setattr(progress, "_time", lambda: now[0])
        progress.start_t = progress.last_print_t = 0.0
        for _ in range(600):
            now[0] += 1
            progress.update(1)
    lines = [line for line in output.getvalue().replace("\r", "").split("\n") if line]
    assert 10 <= len(lines) <= 13
    assert "10%" in lines[1]
    assert "100%" in lines[-1]


@pytest.mark.parametrize("shown", [True, False])
def test_no_thread_of_a_bar_stays(shown: bool) -> None:
    program = (
        "import threading; from featcache._progress import bar\n"
        f"with bar('work', 3, shown={shown}, delay_s=0.0) as progress: progress.update(2)\n"
        "assert threading.active_count() == 1, threading.enumerate()"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()

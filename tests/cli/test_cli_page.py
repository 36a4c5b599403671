"""The commands of the page on looking at a cache run as they are printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_runs import make, run

import featcache

PAGE = (Path(__file__).parents[2] / "docs/guides/looking.md").read_text()
(SECTION,) = re.findall(r"^## From a shell\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^\$ featcache (.*)$", SECTION, re.MULTILINE)


def test_each_command_of_the_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "features" / "train")
    monkeypatch.chdir(tmp_path)
    told = {}
    for command in COMMANDS:
        words = shlex.split(command, comments=True)
        told[words[0]] = run(*words)
        expected = 1 if words[0] == "diff" else 0  # the dtype and the backend differ
        assert told[words[0]].code == expected, (command, told[words[0]])
    assert len(told) == len(COMMANDS) == 9
    assert "largest difference" not in told["diff"].out
    assert "5 shown" in told["ls"].err
    assert told["verify"].out.startswith("whole")
    assert told["repair"].out.startswith("whole")
    assert Path("report.html").stat().st_size > 10_000
    assert len(featcache.open("features/train")) < 30

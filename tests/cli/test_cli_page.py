"""The commands of the page on looking at a cache run as they are printed, on README's cache."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from command_runs import run
from places import ROOT

import featcache

PAGE = (ROOT / "docs/guides/looking.md").read_text()
(SECTION,) = re.findall(r"^## From a shell\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^\$ featcache (.*)$", SECTION, re.MULTILINE)
(CODE,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_each_command_of_the_page_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written, loader, _ = CODE.partition("\nloader = ")
    assert loader
    exec(written.replace("range(2000)", "range(200)"), {})
    told = {}
    for command in COMMANDS:
        words = shlex.split(command, comments=True)
        told[words[0]] = run(*words)
        expected = 1 if words[0] == "diff" else 0  # the backend differs
        assert told[words[0]].code == expected, (command, told[words[0]])
    assert len(told) == len(COMMANDS) == 9
    assert "the values of fbank" in told["diff"].out
    assert "2 shown, 2 match, of 200" in told["ls"].err
    assert told["verify"].out.startswith("whole")
    assert told["repair"].out.startswith("whole")
    assert Path("report.html").stat().st_size > 10_000
    assert len(featcache.open("features/train")) == 199

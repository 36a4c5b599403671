"""README: its lines train and print what it says, its figures are those of the benchmarks."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from places import ROOT

TEXT = (ROOT / "README.md").read_text()
PICTURE = ROOT / "docs" / "pictures" / "from-features-to-batches.svg"


def run_the_lines(folder: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    script = folder / "train.py"
    script.write_text(code)
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stderr == ""
    return done.stdout


def test_its_lines_train_and_print_what_it_says_and_store_nothing_twice(tmp_path: Path) -> None:
    (printed,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    assert run_the_lines(tmp_path) == printed
    parts = {path: path.stat().st_mtime_ns for path in tmp_path.glob("features/train/parts/*/*")}
    assert parts
    assert run_the_lines(tmp_path) == printed
    again = {path: path.stat().st_mtime_ns for path in tmp_path.glob("features/train/parts/*/*")}
    assert again == parts


def test_it_is_read_in_one_sitting() -> None:
    assert len(TEXT.splitlines()) < 200


@pytest.mark.parametrize(
    ("name", "warm", "cold"),
    [tuple(row) for row in re.findall(r"^\| \**(.*?)\** \| ([\d.]+) \| ([\d.]*) \|$", TEXT, re.M)],
)
def test_its_speeds_are_those_of_the_results(name: str, warm: str, cold: str) -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    (batches,) = re.findall(r"^## How fast do padded batches .*?(?=^## )", results, re.M | re.S)
    measured = re.findall(rf"^{re.escape(name)} +([\d.]+) ", batches, re.M)
    assert measured == [warm, cold] if cold else measured == [warm]


def test_its_picture_is_for_light_and_dark_and_asks_nobody() -> None:
    drawn = ET.parse(PICTURE).getroot()
    assert (drawn.get("width"), drawn.get("height")) == ("720", "180")
    text = PICTURE.read_text()
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href|url\(|@import|<script", text)

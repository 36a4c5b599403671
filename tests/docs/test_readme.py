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
PICTURES = sorted(ROOT.glob("docs/pictures/*.svg"))


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


def test_figures_of_the_page_on_speed_are_those_of_the_results() -> None:
    page = (ROOT / "docs" / "explanation" / "speed.md").read_text()
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    (batches,) = re.findall(r"^## How fast do padded batches .*?(?=^## )", results, re.M | re.S)
    warm, cold = batches.split("\ncold: ")
    told = [re.findall(r"^\| (.*?) \| ([\d.]+) \|$", each, re.M)
            for each in page.split("## When the files are not in memory")]  # fmt: skip
    assert [len(each) for each in told] == [7, 5]
    for rows, measured in zip(told, (warm, cold), strict=True):
        for name, figure in rows:
            assert re.search(rf"^{re.escape(name)} +{re.escape(figure)} ", measured, re.M), name


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_its_pictures_are_for_light_and_dark_and_ask_nobody(picture: Path) -> None:
    drawn = ET.parse(picture).getroot()
    assert float(drawn.get("width") or 0) <= 1100
    text = picture.read_text()
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href|url\(|@import|<script", text)


def test_all_pictures_are_there_in_light_and_dark_and_small() -> None:
    shown = re.findall(r"docs/pictures/[\w.-]+", TEXT)
    assert {*shown} == {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/pictures/*")}
    for path in shown:
        assert (ROOT / path).stat().st_size < 150_000
        assert path.replace("-light.png", "-dark.png") in shown

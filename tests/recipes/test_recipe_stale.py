"""`make stale`: its output is what `docs/explanation/what-is-checked.md` prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from places import ROOT

PAGE = ROOT / "docs" / "explanation" / "what-is-checked.md"
(PRINTED,) = re.findall(r"```text\n(1\. .*?)```", PAGE.read_text(), re.DOTALL)
PUBLISHED = r"(\d+) recordings were published when it was killed\n"


def without_numbers_of_the_kill(text: str) -> str:
    """Return the text without how much was done when the writer was killed: chance decides."""
    before, last = text.split("4. ")
    return before + re.sub(r"\d+ recordings were|computed \d+", "#", last)


def test_its_output_is_that_of_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "stale"
    command = [sys.executable, str(ROOT / "recipes" / "digits" / "stale.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    told = done.stdout.replace(f"{folder}/", "")
    assert without_numbers_of_the_kill(told) == without_numbers_of_the_kill(PRINTED)
    published, computed = (
        int(found[-1])
        for found in (re.findall(PUBLISHED, told), re.findall(r"computed (\d+)", told))
    )
    assert 133 <= published < 400
    assert 0 < computed <= 400 - published + 4  # and the four that are compared

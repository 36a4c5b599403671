"""The map of the packages in CONTRIBUTING.md, made of the layer contract and the docstrings.

`python tests/docs/house_map.py` writes it anew.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- map: make map -->\n", "<!-- end of the map -->\n"


def layers() -> list[list[str]]:
    """Return the names on each storey, the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (house,) = (each for each in contracts if each["name"] == "imports point one way")
    return [
        [name.removeprefix("featcache.") for name in layer.split(" | ") if "backends" not in name]
        for layer in house["layers"]
    ]


def sentence(name: str) -> str:
    """Return the first sentence of a package or module."""
    package = ROOT / "featcache" / name / "__init__.py"
    path = package if package.exists() else ROOT / "featcache" / f"{name}.py"
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.split(r"(?<=\.)\s", text.replace("\n", " "), maxsplit=1)[0]


def house_map() -> str:
    """Return the picture and the table."""
    return "".join([*_picture(), "\n", *_table()])


def _picture() -> Iterator[str]:
    yield "```mermaid\nflowchart TD\n"
    previous = ""
    for number, names in enumerate(layers()):
        here = f"storey{number}"
        yield f'  {here}["{" · ".join(names)}"]\n'
        if previous:
            yield f"  {previous} --> {here}\n"
        previous = here
    yield "```\n"


def _table() -> Iterator[str]:
    yield "| where | what |\n|---|---|\n"
    for names in layers():
        for name in names:
            folder = (ROOT / "featcache" / name).is_dir()
            yield f"| `{name}{'/' if folder else '.py'}` | {sentence(name)} |\n"


def page_with(text: str) -> str:
    """Return CONTRIBUTING.md with the map replaced."""
    page = PAGE.read_text()
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return page[:begin] + text + page[end:]


if __name__ == "__main__":
    PAGE.write_text(page_with(house_map()))
    sys.stdout.write(f"{PAGE}\n")

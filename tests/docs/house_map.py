"""The maps of the house, made of the layer contract and the docstrings.

That of the packages stands in CONTRIBUTING.md, that of all files in docs/files.md.
`python tests/docs/house_map.py` writes both anew.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE, FILES = ROOT / "CONTRIBUTING.md", ROOT / "docs/files.md"
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
    return sentence_of(package if package.exists() else ROOT / "featcache" / f"{name}.py")


def sentence_of(path: Path) -> str:
    """Return the first sentence of a file."""
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


def files_page() -> str:
    """Return the page of all files: those of each package, from the highest to the lowest."""
    return "".join(_files())


def _files() -> Iterator[str]:
    yield "# The files\n\nWhat each file is, in its own first words; `make map` writes this page.\n"
    yield "The packages, and what may import what: [CONTRIBUTING.md](../CONTRIBUTING.md).\n"
    house = ROOT / "featcache"
    folders = [house / name for names in layers() for name in names if (house / name).is_dir()]
    folders += [house / "testing", ROOT / "backends/featcache_backends"]
    yield from _rows("featcache", sorted(house.glob("*.py")))
    for folder in folders:
        yield from _rows(str(folder.relative_to(ROOT)), sorted(folder.rglob("*.py")))


def _rows(title: str, paths: list[Path]) -> Iterator[str]:
    yield f"\n## {title}\n\n"
    if title != "featcache":
        yield f"{sentence_of(ROOT / title / '__init__.py')}\n\n"
    yield "| file | what |\n|---|---|\n"
    for path in paths:
        if path.name != "__init__.py":
            yield f"| `{path.relative_to(ROOT / title)}` | {sentence_of(path)} |\n"


def page_with(text: str) -> str:
    """Return CONTRIBUTING.md with the map replaced."""
    page = PAGE.read_text()
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return page[:begin] + text + page[end:]


if __name__ == "__main__":
    PAGE.write_text(page_with(house_map()))
    FILES.write_text(files_page())
    sys.stdout.write(f"{PAGE}\n")

"""Links, pages, words of make and names that the pages mention exist; their Python is Python."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from places import ROOT

FOLDERS = ("docs", "recipes", "benchmarks", "tests")
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *(page for each in FOLDERS for page in (ROOT / each).rglob("*.md")),
    ]
    if "results" not in path.parts
)
SOURCES = [
    path
    for each in ("featcache", "backends", "recipes", "tests")
    for path in (ROOT / each).rglob("*.py")
]
GUIDES = [
    path
    for path in PAGES
    if path == ROOT / "README.md" or path.parent.name in ("guides", "explanation")
]


def names_of(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> Iterator[str]:
    """Yield the anchors of the headings of a page, as GitHub and MyST make them."""
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE):
        shown = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).strip().replace(" ", "-")
        count = seen[anchor] = seen.get(anchor, -1) + 1
        yield f"{anchor}-{count}" if count else anchor


def links_of(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text()))
    found: list[str] = re.findall(r"\]\(\s*([^)\s]+)\s*\)", text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def leads_nowhere(page: Path, link: str) -> bool:
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_relative_to(ROOT) or not target.exists():
        return True
    return bool(anchor) and anchor not in set(anchors_of(target))


@pytest.mark.parametrize("page", PAGES, ids=names_of(PAGES))
def test_each_link_leads_somewhere(page: Path) -> None:
    assert [link for link in links_of(page) if leads_nowhere(page, link)] == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "stability.md"
    assert leads_nowhere(page, "no-such-page.md")
    assert leads_nowhere(page, "format.md#no-such-heading")
    assert leads_nowhere(page, "../../../etc/passwd")
    assert not leads_nowhere(page, "format.md#featcachejson")
    assert not leads_nowhere(page, "#names")
    page = tmp_path / "page.md"
    page.write_text("[a `b`](c.md) `d`\n```\n[no](link.md)\n```\n[a\nb](d.md#e) `[no](x.md)`\n")
    assert links_of(page) == ["c.md", "d.md#e"]


def test_each_page_of_docs_is_found_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links_of(page)}
        waiting += [path for path in targets if path.suffix == ".md" and path not in reached]
    assert set(ROOT.glob("docs/**/*.md")) <= reached


def test_decisions_are_told_by_theme() -> None:
    text = without_code((ROOT / "docs" / "decisions.md").read_text())
    themes = re.findall(r"^## (.*)$", text, re.MULTILINE)
    told = re.search(r"^Themes: (.*?)\.\n\n", text, re.MULTILINE | re.DOTALL)
    assert told is not None
    assert re.findall(r"\[(.*?)\]", told[1]) == themes
    # and each decision says something
    assert not re.findall(r"^### .*\n\n#+ .*$", text, re.MULTILINE)
    assert not re.findall(r"^## .*\n\n(?!###).*$", text, re.MULTILINE)


def test_pages_that_are_named_exist() -> None:
    for path in [*PAGES, *SOURCES]:
        if path.name == "CHANGELOG.md":  # it tells of the past
            continue
        named = set(re.findall(r"\bdocs/[\w/.-]+\.md\b", path.read_text()))
        assert not [page for page in named if not (ROOT / page).exists()], path


@pytest.mark.parametrize("page", PAGES, ids=names_of(PAGES))
def test_words_of_make_exist(page: Path) -> None:
    words = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    told = re.findall(r"`make (?:\w+=\S+ )*([a-z ]+)`", page.read_text())
    assert {word for each in told for word in each.split()} <= set(words)


def test_blocks_of_python_are_python() -> None:
    """Those with prompts are run by doctest, most others by tests of their page."""
    seen = 0
    for page in PAGES:
        for block in re.findall(r"^```python\n([^>].*?)^```", page.read_text(), re.M | re.S):
            ast.parse(block, str(page))
            seen += 1
    assert seen > 10


@pytest.mark.parametrize("page", GUIDES, ids=names_of(GUIDES))
def test_names_of_the_library_exist(page: Path) -> None:
    told = set(re.findall(r"\bfeatcache(?:\.[A-Za-z_]\w*)+", page.read_text()))
    assert [name for name in sorted(told - {"featcache.json"}) if not exists(name)] == []


def exists(name: str) -> bool:
    found: object = importlib.import_module("featcache")
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{getattr(found, '__name__', '')}.{part}")
            except ImportError:
                return False
        found = getattr(found, part)
    return True

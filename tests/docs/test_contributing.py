"""CONTRIBUTING.md: the map is that of the layer contract, and each folder says what it is."""

from __future__ import annotations

import pytest
from house_map import FILES, PAGE, ROOT, files_page, house_map, layers, page_with, sentence


def test_the_map_is_made_of_the_contract() -> None:
    assert PAGE.read_text() == page_with(house_map()), "python tests/docs/house_map.py writes it"
    assert FILES.read_text() == files_page(), "python tests/docs/house_map.py writes it"


def test_the_contract_has_all_that_is_in_the_house() -> None:
    folders = {path.parent.name for path in (ROOT / "featcache").glob("*/__init__.py")}
    files = {path.stem for path in (ROOT / "featcache").glob("*.py")}
    named = [name for names in layers() for name in names]
    assert sorted(named) == sorted((folders | files) - {"__init__", "__main__", "testing"})


@pytest.mark.parametrize("name", [name for names in layers() for name in names])
def test_a_package_says_what_it_is_in_a_sentence(name: str) -> None:
    first = sentence(name).split()[0]
    assert first not in {"What", "Who", "How", "Which", "From"}
    assert 3 < len(sentence(name).split()) < 40

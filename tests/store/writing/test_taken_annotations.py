"""Annotations that no row has any more, while parts still have values of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from annotation_helpers import found_in, open_writer
from store_helpers import arrays_of, check_cache, id_of

import featcache
from featcache.errors import FeatureError


def write(path: Path, given: dict[int, dict[str, Any]]) -> None:
    with open_writer(path) as writer:
        for number, values in given.items():
            writer.write(id_of(number), arrays_of(number), annotations=values)


@pytest.mark.parametrize("last", ["taken away", "deleted"])
@pytest.mark.parametrize("texts", [["anna", "ben"], ["anna"] * 2, [1, 2], [[1], [0.5]]])
def test_values_that_were_taken_away_do_not_come_back(
    tmp_path: Path, texts: list[Any], last: str
) -> None:
    write(tmp_path, {number: {"said": texts[number % 2]} for number in range(8)})
    cache = featcache.open(tmp_path)
    cache.annotate({id_of(number): {"said": None} for number in range(7 + (last == "taken away"))})
    if last == "deleted":
        cache.delete([id_of(7)])
    for number in (8, 9):
        write(tmp_path, {number: {}})
        assert not any(values.get("said") for values in found_in(tmp_path).values())
    cache.refresh()
    cache.delete([id_of(8)])
    cache.compact()
    assert not any(values.get("said") for values in found_in(tmp_path).values())
    check_cache(tmp_path, [*range(7 + (last == "taken away")), 9])


def test_an_annotation_that_was_taken_away_keeps_its_kind(tmp_path: Path) -> None:
    write(tmp_path, {1: {"said": 3}})
    cache = featcache.open(tmp_path)
    cache.annotate({id_of(1): {"said": None}})
    with pytest.raises(FeatureError, match="but int"):
        cache.annotate({id_of(1): {"said": "three"}})
    write(tmp_path, {2: {"said": 4}})
    assert [*featcache.open(tmp_path).annotation("said")] == [None, 4]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_kind_of_deleted_utterances_does_not_hinder_another(
    tmp_path: Path, compacted: bool
) -> None:
    write(tmp_path, {0: {"said": 3}, 1: {}})
    featcache.open(tmp_path).delete([id_of(0)])
    featcache.open(tmp_path).annotate({id_of(1): {"said": "one"}})
    for number in range(2, 10):  # small parts are merged, too
        write(tmp_path, {number: {"said": "more"}})
    if compacted:
        featcache.open(tmp_path).compact()
    found = found_in(tmp_path)
    assert found == {id_of(1): {"said": "one"}} | {id_of(n): {"said": "more"} for n in range(2, 10)}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("sealed", [False, True])
def test_kinds_that_a_dead_writer_committed_are_known(
    tmp_path: Path, sealed: bool, overwrite: bool
) -> None:
    write(tmp_path / "living", {1: {}})
    writer = open_writer(tmp_path / "living", overwrite=overwrite)
    writer.write(id_of(2), arrays_of(2), annotations={"said": 2})
    writer.commit()
    if sealed:
        writer._parts.seal()
    shutil.copytree(tmp_path / "living", path := tmp_path / "dead")
    writer.abort()
    with pytest.raises(FeatureError, match="but int"):
        featcache.open(path).annotate({id_of(1): {"said": "one"}})
    featcache.open(path).annotate({id_of(1): {"said": 1, "more": True}})
    with open_writer(path, overwrite=overwrite):
        pass
    expected = {id_of(2): {"said": 2}} | (
        {} if overwrite else {id_of(1): {"said": 1, "more": True}}
    )
    assert found_in(path) == expected

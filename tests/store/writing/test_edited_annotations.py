"""Annotations of a cache that is edited: parts that are merged or compacted keep them or lose them.

What was written with an utterance goes with it; what was given to the cache later stays, too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from annotation_helpers import expected, found_in, make_annotated, open_writer, write
from hypothesis import given, settings
from store_helpers import arrays_of, check_cache, id_of

import featcache
from featcache.format import PARTS, ContainerColumns, Index, Strings, read_manifest
from featcache.format import index as indexes
from featcache.testing.contract import traces_in
from featcache.writing import compact as compacting
from featcache.writing import publish
from featcache.writing.copies import FANOUT

GIVEN: dict[str, dict[str, Any]] = {
    id_of(0): {"text": None, "speaker": None},
    id_of(1): {"speaker": "given", "later": 3},
    id_of(2): {"later": 0.5, "channel": None},
}


def append(path: Path, numbers: Iterable[int]) -> None:
    with open_writer(path) as writer:
        write(writer, numbers)


def annotate(path: Path) -> None:
    featcache.open(path).annotate(GIVEN)


def make_parts(path: Path) -> list[int]:
    """Write one part less than are merged, of one utterance each."""
    for number in range(FANOUT - 1):
        append(path, [number])
    return list(range(FANOUT - 1))


def merge(path: Path) -> list[int]:
    append(path, [100])
    assert len(read_manifest(path).parts) == 1
    return [100]


def compact(path: Path) -> list[int]:
    append(path, [100])
    featcache.open(path).delete([id_of(100)])
    featcache.open(path).compact()
    assert len(read_manifest(path).parts) == 1
    return []


@pytest.mark.parametrize("rewrite", [merge, compact])
def test_a_part_made_of_others_has_their_annotations(
    tmp_path: Path, rewrite: Callable[[Path], list[int]]
) -> None:
    numbers = [*make_parts(tmp_path), *rewrite(tmp_path)]
    assert found_in(tmp_path) == expected(numbers)
    (part,) = read_manifest(tmp_path).parts
    (tmp_path / "featcache.json").unlink()
    with open_writer(tmp_path):
        pass  # all that is known now is in the part
    assert found_in(tmp_path) == expected(numbers)
    assert [each.name for each in read_manifest(tmp_path).parts] == [part.name]


@pytest.mark.parametrize("rewrite", [merge, compact])
def test_given_values_stay_when_parts_become_one(
    tmp_path: Path, rewrite: Callable[[Path], list[int]]
) -> None:
    """Those that were taken away, too: what the part itself says of them does not come back."""
    numbers = make_parts(tmp_path)
    annotate(tmp_path)
    numbers += rewrite(tmp_path)
    assert found_in(tmp_path) == expected(numbers, **GIVEN)
    append(tmp_path, [200])
    assert found_in(tmp_path) == expected([*numbers, 200], **GIVEN)


def test_ints_and_floats_and_gaps_of_parts_become_one_column(tmp_path: Path) -> None:
    values: list[dict[str, Any]] = [
        {"n": 1, "list": [1, 2], "text": "größe"},
        {"n": 0.5},
        {"list": [0.25]},
        {"text": None, "flag": False},
        {},
        {"n": -(2**53), "list": []},
        {"text": "größe"},
        {"flag": True},
    ]
    for number, each in enumerate(values):
        with open_writer(tmp_path) as writer:
            writer.write(id_of(number), arrays_of(number), annotations=each)
    assert len(read_manifest(tmp_path).parts) == 1
    found = found_in(tmp_path)
    assert found == {
        id_of(number): {name: value for name, value in each.items() if value is not None}
        for number, each in enumerate(values)
    }
    kinds = {"n": "float", "list": "floats", "text": "str", "flag": "bool"}
    assert {name: entry.kind for name, entry in read_manifest(tmp_path).annotations.items()} == (
        kinds
    )
    check_cache(tmp_path, range(len(values)))


def test_a_kind_and_a_name_that_no_one_has_any_more_go(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        values: list[dict[str, Any]] = [{"n": 1}, {"n": 0.5}, {"only": "here"}]
        for number, each in enumerate(values):
            writer.write(id_of(number), arrays_of(number), annotations=each)
    featcache.open(tmp_path).delete([id_of(1), id_of(2)])
    featcache.open(tmp_path).compact()
    assert found_in(tmp_path) == {id_of(0): {"n": 1}}
    assert not traces_in(tmp_path, [b'"only"', b"annotations/only", b"here"])


@pytest.mark.parametrize("publish", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_an_utterance_written_again_has_its_new_annotations_alone(
    tmp_path: Path, publish: bool, given: bool
) -> None:
    make_annotated(tmp_path, range(4))
    if given:
        annotate(tmp_path)
    with open_writer(tmp_path) as writer:
        writer.delete([id_of(1), id_of(2)])
        writer.write(id_of(1), arrays_of(1), annotations={"speaker": "new"})
        if publish:
            writer.publish()
        writer.write(id_of(2), arrays_of(2))
    later: dict[str, Any] = {id_of(0): GIVEN[id_of(0)]} if given else {}
    wanted = expected([0, 3], **later) | {id_of(1): {"speaker": "new"}, id_of(2): {}}
    assert found_in(tmp_path) == wanted
    featcache.open(tmp_path).compact()
    assert found_in(tmp_path) == wanted


def test_no_file_has_a_word_of_a_deleted_utterance_after_compacting(tmp_path: Path) -> None:
    secrets = {
        "text": "a written secret",
        "speaker": "secret speaker",
        "words": "secret given later",
        "overwritten": "a secret that was changed",
    }
    path, id = tmp_path, "secret/utterance"
    make_annotated(path, range(5))
    with open_writer(path) as writer:
        writer.keep_file("probe", json.dumps({id: 1}).encode())
        writer.keep_file("made-from", b"{}")
        told = {name: secrets[name] for name in ("text", "speaker", "overwritten")}
        writer.write(id, arrays_of(1), annotations=told)
    make_annotated(path, range(10, 14))
    cache = featcache.open(path)
    cache.annotate({id: {"words": secrets["words"], "overwritten": "another secret"}})
    traces = [word.encode() for word in (*secrets.values(), "another secret", id)]
    assert {trace for _, trace in traces_in(path, traces)} == {trace[:32] for trace in traces}
    cache.delete([id])
    assert not traces_in_readable(path, traces)
    cache.compact()
    assert not traces_in(path, traces)
    assert found_in(path) == expected([*range(5), *range(10, 14)])


def traces_in_readable(path: Path, traces: list[bytes]) -> list[object]:
    """Look into what a new reader reads: the index of the current generation."""
    data = (path / read_manifest(path).index).read_bytes()
    return [trace for trace in traces if trace in data]


def test_words_of_a_writer_that_died_are_gone_once_they_are_deleted(tmp_path: Path) -> None:
    """The journal and the part that was brought back had them."""
    make_annotated(tmp_path / "a", range(5))
    writer = open_writer(tmp_path / "a")
    writer.write("x", arrays_of(3), annotations={"text": "a committed secret"})
    writer.commit()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    writer.abort()
    path = tmp_path / "b"
    assert traces_in(path, [b"a committed secret"])
    with open_writer(path) as writer:
        writer.delete(["x"])
    featcache.open(path).compact()
    assert not traces_in(path, [b"a committed secret"])
    assert found_in(path) == expected(range(5))


class Killed(BaseException):
    """A process ends here."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", ["rewrite", "publish"])
def test_given_values_survive_a_compaction_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    make_annotated(tmp_path / "a", range(12))
    annotate(tmp_path / "a")
    featcache.open(tmp_path / "a").delete([id_of(5)])
    original: Callable[..., object] = getattr(compacting, step)

    def killed(*args: object, **kwargs: object) -> object:
        if after:
            original(*args, **kwargs)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(compacting, step, killed)
        with pytest.raises(Killed):
            featcache.open(tmp_path / "a").compact()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    left = [number for number in range(12) if number != 5]
    for path in (tmp_path / "a", tmp_path / "b"):
        assert found_in(path) == expected(left, **GIVEN)
        append(path, [30])
        assert found_in(path) == expected([*left, 30], **GIVEN)
        featcache.open(path).compact()
        assert found_in(path) == expected([*left, 30], **GIVEN)
        assert len([*(path / PARTS).iterdir()]) == 1


@settings(deadline=None)
@given(
    known=st.sets(st.text("abcdé", min_size=1, max_size=4)),
    asked=st.lists(st.text("abcdé", min_size=1, max_size=4)),
    hashes=st.sampled_from([1, 3, 1 << 64]),
    at_once=st.sampled_from([1, 3, 65536]),
)
def test_rows_are_found_by_ids_where_hashes_are_alike(
    known: set[str], asked: list[str], hashes: int, at_once: int
) -> None:
    """Each look-up of all ids at once finds what one by one finds."""

    original = indexes.hash_of

    def hash_of(id: bytes) -> int:
        return original(id) % hashes

    ids = sorted(known, key=str.encode)
    of_known = np.array([hash_of(id.encode()) for id in ids], np.uint64)
    order = np.argsort(of_known, kind="stable")
    nothing = ContainerColumns(
        Strings.of([]), np.empty(0, np.int64), np.empty(0, np.uint8), np.empty(0, np.int32)
    )
    index = Index(of_known[order], order, Strings.of(ids), {}, nothing, {})
    of_asked = np.array([hash_of(id.encode()) for id in asked], np.uint64)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(publish, "_AT_ONCE", at_once)
        patched.setattr(indexes, "hash_of", hash_of)
        rows = publish.rows_in(index, Strings.of(asked), of_asked).tolist()
    assert rows == [ids.index(id) if id in known else -1 for id in asked]

"""Shape files and category files as they are found in the wild."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from featcache.errors import ConfigError
from featcache.espnet.categories import read_members
from featcache.espnet.shapes import PackedStrings, read_shapes

KEYS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=30)


def written(folder: Path, text: str | bytes, name: str = "shape") -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


@given(
    shapes=st.dictionaries(
        KEYS, st.lists(st.integers(0, 10**12), min_size=1, max_size=4), min_size=1, max_size=20
    ),
    alike=st.booleans(),
)
def test_any_keys_and_shapes_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]], alike: bool
) -> None:
    if alike:
        shapes = {key: [shape[0] % 10**8, 80] for key, shape in shapes.items()}
    lines = "".join(f"{key} {','.join(map(str, shape))}\n" for key, shape in shapes.items())
    keys, read = read_shapes(written(tmp_path_factory.mktemp("shapes"), lines))
    assert list(keys) == list(shapes)
    assert read.lengths.tolist() == [shape[0] for shape in shapes.values()]
    dims = np.resize(read.dims, (len(shapes), read.dims.shape[1])).tolist()
    assert [[dim for dim in row if dim >= 0] for row in dims] == [
        shape[1:] for shape in shapes.values()
    ]


@pytest.mark.parametrize(
    "text",
    [
        "a 5,80\nbc 12,80",
        "a  5,80\nbc\t12,80 \n",
        "a 5,80\r\nbc 12,80\r\n",
        "  a 5, 80\nbc 12,80\n",
        "a +5,80\nbc 012,80\n",
        "a\u30005,80\nbc\xa012,80\n",
        "a\x0b5,80\nbc 12,80\x1c\n",
        "a 5,80\rbc\u200312,80",
    ],
)
def test_white_space_is_what_python_takes_for_it(tmp_path: Path, text: str) -> None:
    keys, shapes = read_shapes(written(tmp_path, text))
    assert list(keys) == ["a", "bc"]
    assert (shapes.lengths.tolist(), np.unique(shapes.dims).tolist()) == ([5, 12], [80])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"'.*shape' has no lines"),
        ("a 5\n\nb 6\n", r"shape', line 2: a blank line"),
        ("\na 5\n", r"shape', line 1: a blank line"),
        ("a 5\n   \n", r"shape', line 2: a blank line"),
        ("a 5\nb 6\na 7\n", r"shape', line 3: 'a' is there twice, first on line 1"),
        ("a 5\nb\n", r"shape', line 2: '' after 'b'"),
        (
            "a 5\nb x\n",
            r"shape', line 2: 'x' after 'b'; lengths and shapes are integers from 0 on, as in 575 "
            r"or 575,80",
        ),
        ("a 5.0\n", r"shape', line 1: '5.0' after 'a'"),
        ("a 5\nb -6\n", r"shape', line 2: '-6' after 'b'"),
        ("a 5,\n", r"shape', line 1: '5,' after 'a'"),
        ("a 5 6\n", r"shape', line 1: '5 6' after 'a'"),
        ("a 5/\nb 5:\n", r"shape', line 1: '5/' after 'a'"),
        (b"a 5\nb\xff 6\n", r"shape', line 2: byte 0xff is not UTF-8"),
        ("a 5\nb\x00 6\n", r"shape', line 2: control character '\\x00'"),
    ],
)
def test_a_bad_shape_file_is_refused_with_its_line(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_shapes(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot read 'nowhere/shape'"):
        read_shapes("nowhere/shape")


def test_utterances_of_categories_may_stand_apart_by_several_spaces(tmp_path: Path) -> None:
    ids, members = read_members(written(tmp_path, "c1 u1  u2\nc0 u3\tu1 \n"))
    assert list(ids) == ["u1", "u2", "u3", "u1"]
    assert members.ends.tolist() == [0, 2, 4]


def test_a_category_without_utterances_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"shape', line 2: 'c1' has no utterances; remove the line"
    ):
        read_members(written(tmp_path, "c0 u1\nc1 \n"))


@given(
    mine=st.lists(KEYS, unique=True, max_size=20),
    theirs=st.lists(KEYS, max_size=20),
    data=st.data(),
)
def test_keys_are_matched_as_strings_are(
    mine: list[str], theirs: list[str], data: st.DataObject
) -> None:
    theirs += data.draw(st.lists(st.sampled_from(mine), max_size=20)) if mine else []
    rows = PackedStrings.of(mine).match(PackedStrings.of(theirs))
    assert rows.tolist() == [mine.index(key) if key in mine else -1 for key in theirs]


@given(keys=st.lists(st.text("ab", max_size=9), max_size=20))
def test_the_first_duplicate_is_found(keys: list[str]) -> None:
    seen = [(keys.index(key), row) for row, key in enumerate(keys) if key in keys[:row]]
    assert PackedStrings.of(keys).duplicate() == (seen[0] if seen else None)


def test_keys_are_a_sequence_of_strings() -> None:
    keys = PackedStrings.of(["ä", "bcd", "e" * 40])
    assert (keys[0], keys[-1], keys[1:], "bcd" in keys, len(keys)) == (
        "ä",
        "e" * 40,
        ["bcd", "e" * 40],
        True,
        3,
    )
    with pytest.raises(IndexError):
        keys[3]

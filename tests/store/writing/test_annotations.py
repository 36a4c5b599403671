"""Annotations: written with an utterance, and kept through all that happens to a cache."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from annotation_helpers import (
    KINDS,
    annotations_of,
    expected,
    found_in,
    make_annotated,
    open_writer,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from store_helpers import FINGERPRINT, arrays_of, check_cache, id_of, make_cache, two_features

import featcache
from featcache import FeatureStorageConfig
from featcache.errors import FeatureError, FormatVersionError
from featcache.format import MOST_OF_ONE, journal, read_manifest
from featcache.writing.part_writer import PartWriter


def test_annotations_are_read_in_the_order_of_rows(tmp_path: Path) -> None:
    make_annotated(tmp_path, range(40))
    assert found_in(tmp_path) == expected(range(40))
    assert found_in(tmp_path, mapped=False, check_reads=True) == expected(range(40))
    check_cache(tmp_path, range(40))
    cache = featcache.open(tmp_path)
    assert {name: cache.annotation(name).kind for name in cache.annotations} == KINDS
    assert read_manifest(tmp_path).requires_to_write == ("annotations",)


def test_a_cache_without_annotations_says_nothing_of_them(tmp_path: Path) -> None:
    make_cache(tmp_path, range(4))
    assert featcache.open(tmp_path).annotations == ()
    assert read_manifest(tmp_path).requires_to_write == ()
    assert not [path for path in tmp_path.rglob("*.*") if b"annotations" in path.read_bytes()]


def test_lines_without_annotations_are_not_longer(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write(id_of(1), arrays_of(1))
        writer.commit()
        (file,) = tmp_path.glob("parts/*/journal.jsonl")
        assert file.read_bytes().splitlines()[1].endswith(b"}]]}]")


def test_annotations_that_are_all_missing_are_none(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write(id_of(1), arrays_of(1), annotations={"text": None, "speaker": "anna"})
    assert featcache.open(tmp_path).annotations == ("speaker",)


def test_parts_may_have_different_annotations(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write(id_of(0), arrays_of(0))
        writer.publish()
        write(writer, [1, 2])
        writer.publish()
        writer.write(id_of(3), arrays_of(3), annotations={"channel": 7, "more": True})
    of_three = {id_of(3): {"channel": 7, "more": True}}
    assert found_in(tmp_path) == expected([1, 2]) | {id_of(0): {}} | of_three
    with open_writer(tmp_path) as writer:
        writer.delete([id_of(3)])
    assert "more" not in featcache.open(tmp_path).annotations


def test_integers_and_floats_of_one_name_are_floats(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write("a", arrays_of(0), annotations={"snr": 3, "peaks": [1, 2]})
        writer.publish()
        writer.write("b", arrays_of(1), annotations={"snr": 2.5, "peaks": [0.5]})
    cache = featcache.open(tmp_path)
    assert [repr(value) for value in cache.annotation("snr")] == ["3.0", "2.5"]
    assert [repr(value) for value in cache.annotation("peaks")] == ["[1.0, 2.0]", "[0.5]"]


def test_values_of_numpy_and_torch_are_plain_ones(tmp_path: Path) -> None:
    import torch

    with open_writer(tmp_path) as writer:
        values = {
            "text": np.str_("a"),
            "n": np.int32(3),
            "m": torch.tensor(4),
            "x": np.float32(0.5),
            "ok": np.bool_(True),
            "list": np.arange(3),
            "of": torch.tensor([0.25]),
        }
        writer.write("a", arrays_of(0), annotations=values)
    cache = featcache.open(tmp_path)
    found = {name: cache.annotation(name)[0] for name in cache.annotations}
    assert found == {
        **{"text": "a", "n": 3, "m": 4, "x": 0.5, "ok": True},
        **{"list": [0, 1, 2], "of": [0.25]},
    }
    assert {type(value) for value in found.values()} == {str, int, float, bool, list}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", 3),
        ("channel", "left"),
        ("channel", True),
        ("clean", 1),
        ("channel", 2**63),
        ("duration", float("nan")),
        ("duration", float("inf")),
        ("units_of", 3),
        ("units_of", ["a"]),
        ("units_of", [True]),
        ("units_of", [[1]]),
        ("units_of", [2**63]),
        ("peaks", np.zeros((2, 2))),
        ("peaks", [float("nan")]),
        ("text", b"bytes"),
        ("text", "\ud800"),
        ("text", {"a": 1}),
        ("text", "x" * MOST_OF_ONE),
        ("fbank", 1),
        ("id", "a"),
        ("a/b", 1),
        ("", 1),
        ("..", 1),
        (3, 1),
    ],
)
def test_a_bad_value_is_refused_by_name_and_nothing_is_stored(
    tmp_path: Path, name: Any, value: Any
) -> None:
    with open_writer(tmp_path) as writer:
        write(writer, range(5))
        with pytest.raises(FeatureError, match="utterance 'bad'") as caught:
            writer.write("bad", arrays_of(1), annotations={name: value})
        assert name == "" or "x" * 99 in str(value) or repr(name) in str(caught.value)
        assert len(str(caught.value)) < 400
        assert "bad" not in writer
        write(writer, [5])
    assert found_in(tmp_path) == expected(range(6))


def test_what_is_no_mapping_is_refused(tmp_path: Path) -> None:
    wrong: Any = ["text"]
    with open_writer(tmp_path) as writer, pytest.raises(FeatureError, match="are a mapping"):
        writer.write("bad", arrays_of(1), annotations=wrong)


def test_another_kind_is_refused_by_a_later_writer_too(tmp_path: Path) -> None:
    make_annotated(tmp_path, range(5))
    with open_writer(tmp_path) as writer, PartWriter(tmp_path, two_features(), FINGERPRINT) as part:
        for each in (writer, part):
            with pytest.raises(FeatureError, match=r"annotation 'speaker'.*'bad'.*7, int, but str"):
                each.write("bad", arrays_of(1), annotations={"speaker": 7})
    with open_writer(tmp_path, overwrite=True) as writer:
        writer.write("good", arrays_of(1), annotations={"speaker": 7})
    assert found_in(tmp_path) == {"good": {"speaker": 7}}


def test_parts_of_different_kinds_are_not_published(tmp_path: Path) -> None:
    """Of writers at the same time; the error says what to remove, and that mends it."""
    with pytest.raises(FeatureError, match=r"annotation 'tag' is (str|int) in part") as raised:
        _write_two_kinds(tmp_path)
    check_cache(tmp_path, range(2))
    wrong = Path(str(raised.value).split("remove '")[1].split("', and its 1 utterances")[0])
    assert wrong.parent == tmp_path / "parts"
    shutil.rmtree(wrong)
    with open_writer(tmp_path):
        pass
    assert len(featcache.open(tmp_path).ids) == 3


def _write_two_kinds(path: Path) -> None:
    make_cache(path, range(2))
    with open_writer(path) as writer:
        parts = [PartWriter(path, two_features(), FINGERPRINT) for _ in range(2)]
        for number, (part, value) in enumerate(zip(parts, ("a", 1), strict=True), 5):
            part.write(id_of(number), arrays_of(number), annotations={"tag": value})
            part.close()
        writer.publish()


@pytest.mark.parametrize("backend", featcache.registry.backend_names())
def test_annotations_outlive_a_writer_that_died(tmp_path: Path, backend: str) -> None:
    """Of formats whose files are finished where they lie, and of those that are copied."""
    features = [
        FeatureStorageConfig("fbank", backend=backend),
        FeatureStorageConfig("units", dtype="int16"),
    ]
    writer = featcache.CacheWriter(tmp_path / "a", features, FINGERPRINT)
    write(writer, range(70))
    writer.commit()
    copy = tmp_path / "b"
    shutil.copytree(tmp_path / "a", copy)
    writer.abort()
    with featcache.CacheWriter(copy, features, FINGERPRINT):
        pass
    assert found_in(copy) == expected(range(70))


def test_a_damaged_line_costs_the_annotations_of_its_utterances_alone(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "a")
    for number in range(200):
        write(writer, [number])
    writer.commit()
    copy = tmp_path / "b"
    shutil.copytree(tmp_path / "a", copy)
    writer.abort()
    (file,) = copy.glob("parts/*/" + journal.JOURNAL)
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"utterance", b"Utterance", 1)
    file.write_bytes(b"".join(lines))
    with open_writer(copy) as writer:
        lost = [number for number in range(200) if id_of(number) not in writer]
    assert len(lost) == 64
    assert found_in(copy) == expected(number for number in range(200) if number not in lost)


def test_long_annotations_fit_lines(tmp_path: Path) -> None:
    text = "ü" * (MOST_OF_ONE // 7)
    with open_writer(tmp_path) as writer:
        for number in range(70):
            writer.write(id_of(number), arrays_of(number), annotations={"text": text})
    assert {*featcache.open(tmp_path).annotation("text")} == {text}


def test_deleted_texts_are_not_in_the_next_index(tmp_path: Path) -> None:
    """Of text that is stored as codes, too."""
    with open_writer(tmp_path) as writer:
        for number in range(40):
            speaker = "SECRET" if number < 10 else f"spk{number % 3}"
            told = {"speaker": speaker, "text": f"SECRET {number}" if number < 10 else str(number)}
            writer.write(id_of(number), arrays_of(number), annotations=told)
    with open_writer(tmp_path) as writer:
        writer.delete(map(id_of, range(10)))
    index = tmp_path / read_manifest(tmp_path).index
    assert b"SECRET" not in index.read_bytes()
    assert {*featcache.open(tmp_path).annotation("speaker")} == {"spk0", "spk1", "spk2"}


def test_an_utterance_that_is_written_again_has_its_new_annotations(tmp_path: Path) -> None:
    make_annotated(tmp_path, range(5))
    with open_writer(tmp_path) as writer:
        writer.delete([id_of(1), id_of(2)])
        writer.write(id_of(1), arrays_of(1), annotations={"speaker": "new"})
        writer.write(id_of(2), arrays_of(2))
    rest = expected([0, 3, 4])
    assert found_in(tmp_path) == rest | {id_of(1): {"speaker": "new"}, id_of(2): {}}


def test_older_writers_refuse_an_annotated_cache(tmp_path: Path, monkeypatch: Any) -> None:
    make_annotated(tmp_path, range(3))
    monkeypatch.setattr("featcache.writing.held.KNOWN", frozenset({"stamps"}))
    assert len(featcache.open(tmp_path)) == 3
    with pytest.raises(FormatVersionError, match=r"to write it .* knows 'annotations'"):
        open_writer(tmp_path)


NAMES = st.sampled_from(["a", "b b", "größe", "x.y"])
VALUES = {
    "a": st.text(st.characters(exclude_categories=["Cs"])) | st.none(),
    "b b": st.integers(-(2**63), 2**63 - 1) | st.none(),
    "größe": st.lists(st.floats(allow_nan=False, allow_infinity=False)) | st.none(),
    "x.y": st.sampled_from(["few", "values", None]),
}
UTTERANCES = st.lists(st.fixed_dictionaries({}, optional=VALUES), max_size=12)


@settings(max_examples=60, deadline=None)
@given(UTTERANCES, UTTERANCES)
def test_any_values_come_back(first: list[Any], second: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        written: dict[str, Any] = {}
        for part, utterances in enumerate((first, second)):
            with open_writer(path) as writer:
                for number, values in enumerate(utterances):
                    written[f"{part}-{number}"] = values
                    writer.write(f"{part}-{number}", arrays_of(1), annotations=values)
        found = found_in(path)
    assert found == {
        id: {name: each for name, each in values.items() if each is not None}
        for id, values in written.items()
    }


def test_the_values_of_the_helper_are_of_all_kinds() -> None:
    assert annotations_of(1).keys() == KINDS.keys()

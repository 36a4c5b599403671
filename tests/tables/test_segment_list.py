"""Lists of segments, as a CSV file or a dict: what is read, and what is refused by its place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from featcache.errors import ConfigError, DuplicateIdError
from featcache.tables import SegmentList

HEADER = "id,recording,start_s,stop_s\n"


def csv_of(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_dict_and_a_file_list_the_same_segments_in_their_order(tmp_path: Path) -> None:
    of_dict = SegmentList.of({"b": ("rec", 1, 2.5), "a": ("other rec", 0.0, 0.25)})
    text = '\ufeffID,stop_s,speaker,recording,start_s\nb,2.5,x,rec,1\na,0.25,y,"other rec",0\n'
    for listed in (of_dict, SegmentList.of(csv_of(tmp_path / "s.csv", text))):
        assert (listed.ids, listed.recordings) == (["b", "a"], ["rec", "other rec"])
        assert (listed.start_s.tolist(), listed.stop_s.tolist()) == ([1.0, 0.0], [2.5, 0.25])


def test_an_empty_list_has_no_segments_and_an_empty_file_is_a_mistake(tmp_path: Path) -> None:
    assert SegmentList.of({}).ids == []
    with pytest.raises(ConfigError, match=r"s\.csv': the file lists none"):
        SegmentList.of(csv_of(tmp_path / "s.csv", HEADER))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"one column of ids is needed, 'id' or 'ID'"),
        (
            "id,wav,start,stop\na,b,0,1\n",
            r"the column 'recording' lacks.*names id, wav, start, stop",
        ),
        (HEADER + "a,rec,0\n", r"line 2: 3 cells below a header of 4"),
        (HEADER + "a,rec,0,1,2\n", r"line 2: 5 cells below a header of 4"),
        (HEADER + "a,rec,0,1\nb,rec,0,1s\n", r"segment 'b': '0' to '1s' are not seconds"),
        (HEADER + "a,rec,-1,1\n", "segment 'a': '-1' to '1'"),
        (HEADER + "a,rec,1,1\n", "segment 'a': '1' to '1'"),
        (HEADER + "a,rec,0,inf\n", "segment 'a'"),
        (HEADER + "a,rec,nan,1\n", "segment 'a'"),
        (HEADER + "a,,0,1\n", "segment 'a': its recording is None"),
        (HEADER + "a,rec,0,\n", "segment 'a': '0' to None are not seconds"),
        (HEADER + ",rec,0,1\n", "utterance id '' is not usable"),
        (HEADER + '"a,rec,0,1\n', "line 2: unexpected end of data"),
        (HEADER.replace("recording", "recording,fbank") + "a,rec,,0,1\n", "'fbank'.*a feature"),
        (HEADER.replace("recording", "recording,n") + "a,rec,x,0,1\n", "line 2.*'n' is int"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_line(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s)s.csv'.*{told}"):
        SegmentList.of(csv_of(tmp_path / "s.csv", text), ["fbank"], {"n": "int"})


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"a": ("rec", 0.0)}, r"segment 'a': \(recording, start_s, stop_s\) is needed"),
        ({"a": "rec"}, "segment 'a'.*not 'rec'"),
        ({"a": 3}, "segment 'a'.*not 3"),
        ({"a": {"recording": "rec", "start_s": 0, "stop_s": 1}}, "segment 'a'.*is needed.*not {"),
        ({"a": (3, 0.0, 1.0)}, "segment 'a'.*is needed"),
        ({"a": ("rec", True, 2.0)}, "segment 'a': True to 2.0 are not seconds"),
        ({"a": ("rec", None, 2.0)}, "segment 'a': None to 2.0"),
        ({7: ("rec", 0.0, 2.0)}, "utterance id 7 is not usable"),
        ({"a": ("rec", 0.0, 2.0, "text")}, r"segment 'a'.*and a dict of annotations"),
        ({"a": ("rec", 0.0, 2.0, {}, {})}, r"segment 'a'.*and a dict of annotations"),
        ({"a": ("rec", 0.0, 2.0, {"text": {}})}, "annotation 'text' of utterance 'a' is {}"),
        ({"a": ("rec", 0.0, 2.0, {"id": "b"})}, "annotation 'id' of utterance 'a'"),
        (
            {"a": ("rec", 0.0, 2.0, {"n": 1}), "b": ("rec", 0.0, 2.0, {"n": "x"})},
            "annotation 'n' of utterance 'b' is 'x', str, but int",
        ),
    ],
)
def test_a_dict_that_cannot_be_used_is_refused_by_segment(
    source: Mapping[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        SegmentList.of(source)


def test_no_file_and_no_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: there is no such file"):
        SegmentList.of(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match=r"\{id: \(recording, start_s, stop_s\)\}.*not \[\]"):
        SegmentList.of([])  # type: ignore[arg-type]
    (tmp_path / "latin.csv").write_bytes(HEADER.encode() + b"\xe9,rec,0,1\n")
    with pytest.raises(ConfigError, match=r"line \d: .*utf-8"):
        SegmentList.of(tmp_path / "latin.csv")


def test_an_id_that_comes_twice_is_refused(tmp_path: Path) -> None:
    text = HEADER + "a,rec,0,1\na,rec,1,2\n"
    with pytest.raises(DuplicateIdError, match="segment 'a' is listed twice"):
        SegmentList.of(csv_of(tmp_path / "s.csv", text))


def test_what_else_a_source_says_are_annotations(tmp_path: Path) -> None:
    text = (
        "ID,recording,text,n,start_s,stop_s,code,nothing\n"
        'a,rec,"hello, you",1,0,1,007,\nb,rec,,2.5,1,2,8,\n'
    )
    lines = (
        '{"id": "a", "recording": "rec", "start_s": 0, "stop_s": 1, "text": "hello, you", "n": 1, '
        '"code": "007", "nothing": null}\n'
        '{"id": "b", "recording": "rec", "start_s": 1, "stop_s": 2, "n": 2.5, "code": "8"}\n'
    )
    of_dict = {
        "a": ("rec", 0.0, 1.0, {"text": "hello, you", "n": 1, "code": "007", "nothing": None}),
        "b": ("rec", 1.0, 2.0, {"n": 2.5, "code": "8"}),
    }
    sources = (of_dict, csv_of(tmp_path / "s.csv", text), csv_of(tmp_path / "s.jsonl", lines))
    for source in sources:
        found = SegmentList.of(source, ["fbank"], {"nothing": "bool", "other": "int"})
        values = {name: list(column) for name, column in found.annotations.items()}
        assert values == {
            "text": ["hello, you", None],
            "n": [1.0, 2.5],
            "code": ["007", "8"],
            "nothing": [None, None],
        }
        assert found.annotations["nothing"].kind == "bool"
        assert "nothing" not in SegmentList.of(source).annotations  # no value tells its kind

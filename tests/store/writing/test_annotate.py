"""`Cache.annotate`: annotations given to a cache, and carried on by all who write it later."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from annotation_helpers import (
    expected,
    found_in,
    make_annotated,
    open_writer,
    without_none,
    write,
)
from store_helpers import FINGERPRINT, arrays_of, check_cache, id_of, make_cache, two_features

import featcache
from featcache.errors import (
    CacheLockedError,
    ConfigError,
    CorruptCacheError,
    DuplicateIdError,
    FeatureError,
    KeyNotFoundError,
)
from featcache.format import ColumnFile, read_manifest
from featcache.writing.part_writer import PartWriter


def annotate(path: Path, source: Any, **settings: Any) -> None:
    featcache.open(path).annotate(source, **settings)


def table(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_annotations_are_given_in_a_new_generation(tmp_path: Path) -> None:
    make_cache(tmp_path, range(9))
    cache = featcache.open(tmp_path)
    before, first = cache.table, cache.generation
    cache.annotate({id_of(3): {"speaker": "anna", "snr": 3}, id_of(5): {"snr": 0.5}})
    assert before.annotations == ()
    assert cache.annotations == ("snr", "speaker")
    after = featcache.open(tmp_path)
    assert after.generation == cache.generation == first + 1
    assert after.complete
    check_cache(tmp_path, range(9))
    given = {id_of(3): {"speaker": "anna", "snr": 3.0}, id_of(5): {"snr": 0.5}}
    assert found_in(tmp_path) == {id_of(n): {} for n in range(9)} | given
    assert read_manifest(tmp_path).requires_to_write == ("annotations",)


def test_what_the_source_does_not_name_stays(tmp_path: Path) -> None:
    make_annotated(tmp_path, range(9))
    given: dict[str, dict[str, Any]] = {
        id_of(1): {"speaker": "anna"},
        id_of(2): {"speaker": None, "text": None, "more": [1]},
        id_of(4): {},
    }
    annotate(tmp_path, given)
    assert found_in(tmp_path) == expected(range(9), **given)


def test_a_source_that_says_nothing_makes_no_generation(tmp_path: Path) -> None:
    make_annotated(tmp_path, range(3))
    generation = featcache.open(tmp_path).generation
    annotate(tmp_path, {})
    annotate(tmp_path, {id_of(1): {}, id_of(2): {"other": None}})
    assert featcache.open(tmp_path).generation == generation


def append(path: Path) -> None:
    with open_writer(path) as writer:
        write(writer, [20])


def append_twice(path: Path) -> None:
    append(path)
    with open_writer(path) as writer:
        write(writer, [21])
        writer.publish()
        write(writer, [22])


@pytest.mark.parametrize("later", [append, append_twice])
def test_given_values_survive_appends(tmp_path: Path, later: Callable[[Path], None]) -> None:
    make_annotated(tmp_path, range(9))
    given: dict[str, dict[str, Any]] = {
        id_of(1): {"speaker": "anna", "more": True},
        id_of(2): {"text": None},
    }
    annotate(tmp_path, given)
    later(tmp_path)
    more = [20, 21, 22] if later is append_twice else [20]
    assert found_in(tmp_path) == expected([*range(9), *more], **given)


def test_given_values_survive_an_overwrite_of_the_same_ids(tmp_path: Path) -> None:
    """What the new build says itself counts before what was given before."""
    make_annotated(tmp_path, range(9))
    annotate(tmp_path, {id_of(n): {"speaker": "given", "more": n} for n in range(6)})
    with open_writer(tmp_path, overwrite=True) as writer:
        writer.write(id_of(1), arrays_of(1), annotations={"speaker": "new"})
        writer.write(id_of(2), arrays_of(2))
        writer.write(id_of(8), arrays_of(8))
    assert found_in(tmp_path) == {
        id_of(1): {"speaker": "new", "more": 1},
        id_of(2): {"speaker": "given", "more": 2},
        # `speaker` is given to the cache since then, all of it
        id_of(8): {"speaker": "spk3"},
    }


def test_a_deleted_utterance_loses_what_was_given_to_it(tmp_path: Path) -> None:
    make_cache(tmp_path, range(5))
    annotate(tmp_path, {id_of(n): {"speaker": f"given {n}"} for n in (1, 2)})
    with open_writer(tmp_path) as writer:
        writer.delete([id_of(1)])
        write(writer, [1])
    found = found_in(tmp_path)
    assert found[id_of(1)] == expected([1])[id_of(1)]
    assert found[id_of(2)] == {"speaker": "given 2"}


def test_given_values_survive_the_recovery_of_a_part(tmp_path: Path) -> None:
    make_annotated(tmp_path / "a", range(5))
    annotate(tmp_path / "a", {id_of(1): {"speaker": "anna"}})
    writer = open_writer(tmp_path / "a")
    write(writer, [7])
    writer.commit()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    writer.abort()
    with open_writer(tmp_path / "b"):
        pass
    assert found_in(tmp_path / "b") == expected([*range(5), 7], **{id_of(1): {"speaker": "anna"}})


def test_an_overwrite_under_way_does_not_hinder(tmp_path: Path) -> None:
    make_annotated(tmp_path, range(5))
    writer = open_writer(tmp_path, overwrite=True)
    write(writer, [1])
    writer._work.keep()
    annotate(tmp_path, {id_of(1): {"more": 1}})
    assert found_in(tmp_path) == expected(range(5), **{id_of(1): {"more": 1}})
    with open_writer(tmp_path, overwrite=True) as writer:
        assert id_of(1) in writer
    assert found_in(tmp_path) == expected([1], **{id_of(1): {"more": 1}})


def test_failed_and_expected_ids_and_stamps_stay(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.expect([id_of(1), "failed", "to come"])
        writer.fail("failed")
        writer.write(id_of(1), arrays_of(1), stamps=featcache_stamps())
    annotate(tmp_path, {id_of(1): {"speaker": "anna"}})
    cache = featcache.open(tmp_path, verify="arrays")
    assert (cache.failed, cache.expected, cache.complete) == (("failed",), 3, False)
    assert cache.opened.index.stamps is not None
    assert cache.opened.index.stamps.input.tolist() == [5]
    assert read_manifest(tmp_path).requires_to_write == ("annotations", "stamps")


def featcache_stamps() -> Any:
    from featcache.format import Stamps

    return Stamps(5, 6)


# Sources


def test_a_table_of_text_becomes_numbers_where_all_of_a_column_are(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", range(4))
    rows = [
        '\ufeffID, words,speaker,"n",snr,code,long,empty',
        f'{id_of(0)},"said, ""so""",1089,3,1,007,1234567890123456781,',
        f"{id_of(1)}, größe ,61,-4,2.5e1,1,1234567890123456782,",
        "",
        f"{id_of(2)},,,,,,,",
    ]
    annotate(tmp_path / "cache", table(tmp_path / "a.csv", "\r\n".join(rows)))
    first = {"words": 'said, "so"', "speaker": 1089, "n": 3, "snr": 1.0, "code": "007"}
    second = {"words": "größe ", "speaker": 61, "n": -4, "snr": 25.0, "code": "1"}
    assert found_in(tmp_path / "cache") == {
        id_of(0): first | {"long": "1234567890123456781"},  # a float would hold neither
        id_of(1): second | {"long": "1234567890123456782"},
        id_of(2): {},
        id_of(3): {},
    }


@pytest.mark.parametrize("nan", ["nan", "NaN", "NAN", ""])
@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_nan_among_numbers_is_missing(
    tmp_path: Path, nan: str, suffix: str, delimiter: str
) -> None:
    path = tmp_path / "cache"
    make_cache(path, range(3))
    featcache.open(path).annotate({id_of(0): {"known": 0.5, "name": "eva"}})
    rows = [
        ["id", "snr", "n", "known", "name", "words", "alone"],
        [id_of(0), nan, "3", nan, "nan", "nan", "nan"],
        [id_of(1), "1.5", nan, "2", "nan", "anna", "NaN"],
        [id_of(2), "3", "4", "3", "nan", "7", ""],
    ]
    text = "".join(delimiter.join(row) + "\n" for row in rows)
    annotate(path, table(tmp_path / f"a.{suffix}", text))
    text_of = {"name": "nan"}  # what is text stays text
    assert found_in(path) == {
        id_of(0): text_of | {"n": 3, "words": "nan", "alone": "nan"},
        id_of(1): text_of | {"snr": 1.5, "known": 2.0, "words": "anna", "alone": "NaN"},
        id_of(2): text_of | {"snr": 3.0, "n": 4, "known": 3.0, "words": "7"},
    }
    assert {*featcache.open(path).table.filter(snr=(1, 2))} == {id_of(1)}


def test_a_column_that_the_cache_has_keeps_its_kind(tmp_path: Path) -> None:
    with open_writer(tmp_path / "cache") as writer:
        told = {"speaker": "1", "snr": 0.5, "n": 1, "ok": True}
        writer.write("a", arrays_of(0), annotations=told)
        writer.write("b", arrays_of(0))
    rows = "id\tspeaker\tsnr\tn\tok\nb\t1089\t7\t8\tFalse\n"
    annotate(tmp_path / "cache", table(tmp_path / "a.tsv", rows))
    of_b = {"speaker": "1089", "snr": 7.0, "n": 8, "ok": False}
    assert found_in(tmp_path / "cache") == {"a": told, "b": of_b}
    bad = table(tmp_path / "a.tsv", "id\tn\nb\t7\na\tmany\n")
    with pytest.raises(FeatureError, match=r"a\.tsv', line 3, utterance 'a'.*'n' is int.*'many'"):
        annotate(tmp_path / "cache", bad)


def test_lines_of_json_keep_their_types(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", range(3))
    given: dict[str, dict[str, Any]] = {
        id_of(0): {"text": "a\n", "n": 3, "x": 0.5, "ok": True, "list": [1, 2], "none": None},
        id_of(2): {"n": 4},
    }
    lines = [json.dumps({"id": id, **values}) for id, values in given.items()]
    annotate(tmp_path / "cache", table(tmp_path / "a.jsonl", "\n".join([*lines, ""])))
    assert found_in(tmp_path / "cache") == without_none(given) | {id_of(1): {}}


def test_an_arrow_table_is_a_source(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    make_cache(tmp_path, range(3))
    arrow = pyarrow.table({"id": [id_of(1), id_of(2)], "n": [1, None], "list": [[0.5], []]})
    annotate(tmp_path, arrow)
    assert found_in(tmp_path) == {
        id_of(0): {},
        id_of(1): {"n": 1, "list": [0.5]},
        id_of(2): {"list": []},
    }


def test_unknown_ids_are_told_all_at_once(tmp_path: Path) -> None:
    make_annotated(tmp_path, range(3))
    given = {id_of(1): {"more": 1}, "x": {"more": 2}, "y": {"more": 3}}
    with pytest.raises(KeyNotFoundError, match=r"2 utterances .*'x', 'y'.*unknown='skip'"):
        annotate(tmp_path, given)
    assert found_in(tmp_path) == expected(range(3))
    annotate(tmp_path, given, unknown="skip")
    assert found_in(tmp_path) == expected(range(3), **{id_of(1): {"more": 1}})
    with pytest.raises(ConfigError, match="unknown is 'raise' or 'skip', not 'keep'"):
        annotate(tmp_path, given, unknown="keep")


@pytest.mark.parametrize(
    ("source", "error", "match"),
    [
        (7, ConfigError, r"a mapping of ids.* a \.jsonl file.*not out of int"),
        ("a.txt", ConfigError, r"'a\.txt'.*\.csv"),
        ("none.csv", ConfigError, r"'none\.csv' cannot be read: No such file"),
        ({"spk1/utt-1": "anna"}, FeatureError, "'spk1/utt-1'.*a mapping of ids to mappings"),
        ({"spk1/utt-1": {"speaker": 7}}, FeatureError, "'speaker' of utterance 'spk1/utt-1' is 7"),
        ({"spk1/utt-1": {"fbank": 7}}, FeatureError, "'fbank'.* the name of a feature"),
        ({7: {"a": 1}}, KeyNotFoundError, "'7'"),
        ({None: {"a": 1}}, FeatureError, "id None is not usable"),
    ],
)
def test_what_cannot_be_given_is_refused_and_nothing_is_changed(
    tmp_path: Path, source: Any, error: type[Exception], match: str
) -> None:
    make_annotated(tmp_path, range(3))
    before = read_manifest(tmp_path)
    with pytest.raises(error, match=match):
        annotate(tmp_path, source)
    assert read_manifest(tmp_path) == before
    assert found_in(tmp_path) == expected(range(3))


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.csv", "name,n\na,1\n", r"a\.csv', line 1: one column of ids is needed.*'name', 'n'"),
        ("a.csv", "id,ID\na,1\n", "line 1: one column of ids"),
        ("a.csv", "", "line 1: one column of ids"),
        ("a.csv", "id,n,n\na,1,2\n", "line 1: there are two columns 'n'"),
        ("a.csv", "id,n\nspk1/utt-1,1\nx\n", "line 3: 1 cells below a header of 2"),
        ("a.csv", 'id,n\nspk1/utt-1,"1\n', "line 2: unexpected end"),
        ("a.jsonl", '{"id": "spk1/utt-1"}\n\n{"id"', "line 3: Expecting"),
        ("a.jsonl", '["id"]', "line 1: each line is an object"),
        ("a.jsonl", '{"n": 1}', "line 1: one column of ids"),
        ("a.jsonl", '{"id": ""}', "line 1: utterance id ''"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_line(
    tmp_path: Path, name: str, text: str, match: str
) -> None:
    make_cache(tmp_path / "cache", range(3))
    with pytest.raises(FeatureError, match=match):
        annotate(tmp_path / "cache", table(tmp_path / name, text))
    assert featcache.open(tmp_path / "cache").annotations == ()


def test_bytes_that_are_no_text_are_refused_with_the_line(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", range(3))
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / name).write_bytes(b"id,n\n\xff\n")
        with pytest.raises(FeatureError, match=f"{name}', line"):
            annotate(tmp_path / "cache", tmp_path / name)


def test_a_file_has_fractions_where_a_part_that_waits_has_whole_numbers(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache", range(3))
    annotate(cache, {id_of(0): {"n": 0.5}})
    with PartWriter(cache, two_features(), FINGERPRINT) as writer:
        writer.write(id_of(7), arrays_of(7), annotations={"n": 1})
    annotate(cache, table(tmp_path / "a.csv", f"id,n\n{id_of(1)},0.25\n"))
    assert found_in(cache)[id_of(1)] == {"n": 0.25}


class Text(str):
    """Text of another type."""


PLAIN: dict[str, Any] = {"text": "hello", "n": 1, "x": 0.5, "ok": True}


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"n": None},
        {"n": None, "only": None},
        {"x": 3},
        {"n": 0.5},
        {"text": Text("word")},
        {"n": np.int64(7), "x": np.float32(0.5), "ok": np.bool_(False)},
        {"tags": [1, 2]},
        {"n": -(1 << 63)},
    ],
)
def test_values_of_every_type_are_given_among_plain_ones(
    tmp_path: Path, odd: dict[str, Any]
) -> None:
    make_cache(tmp_path, range(9))
    source = {id_of(number): dict(PLAIN) for number in range(5)}
    source[id_of(3)] |= odd
    annotate(tmp_path, source)
    found = found_in(tmp_path)
    for id, values in source.items():
        assert found[id] == {name: each for name, each in values.items() if each is not None}
    assert all(found[id_of(number)] == {} for number in range(5, 9))


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": 1},
        {"ok": 1},
        {"n": 1 << 63},
        {"x": float("nan")},
        {"text": "\ud800"},
        {"text": "x" * (1 << 20)},
        {"fbank": 1},
        {"a/b": 1},
        {"n": object()},
    ],
)
def test_a_wrong_value_among_plain_ones_is_named_and_nothing_is_changed(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    make_cache(tmp_path, range(9))
    source = {id_of(number): dict(PLAIN) for number in range(5)}
    source[id_of(3)] |= wrong
    with pytest.raises(FeatureError, match=f"utterance '{id_of(3)}'"):
        annotate(tmp_path, source)
    assert featcache.open(tmp_path).annotations == ()


def test_an_id_that_comes_twice_is_refused(tmp_path: Path) -> None:
    make_cache(tmp_path / "cache", range(3))
    source = table(tmp_path / "a.csv", f"id,n\n{id_of(1)},1\n{id_of(1)},2\n")
    with pytest.raises(DuplicateIdError, match=f"'{id_of(1)}' is annotated twice"):
        annotate(tmp_path / "cache", source)


# Others at work


def test_a_cache_that_is_written_is_locked(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    with open_writer(tmp_path), pytest.raises(CacheLockedError):
        annotate(tmp_path, {id_of(1): {"n": 1}})
    annotate(tmp_path, {id_of(1): {"n": 1}})


def test_readers_keep_what_they_opened_while_others_annotate(tmp_path: Path) -> None:
    make_annotated(tmp_path, range(300))
    caches = [featcache.open(tmp_path, mapped=mapped) for mapped in (True, False)]
    for number in range(3):
        annotate(tmp_path, {id_of(1): {"text": f"changed {number}"}})
    for cache in caches:
        assert not (tmp_path / cache.opened.manifest.index).exists()
        (text,) = [cache.annotation("text")[row] for row, id in enumerate(cache) if id == id_of(1)]
        assert text == expected([1])[id_of(1)]["text"]


def test_threads_read_while_a_cache_is_annotated(tmp_path: Path) -> None:
    make_annotated(tmp_path, range(50))
    wrong: list[object] = []

    def read() -> None:
        for _ in range(30):
            found = featcache.open(tmp_path)
            numbers = (
                found.annotation("n").take(np.arange(2)) if "n" in found.annotations else [0, 0]
            )
            wrong.extend(numbers if numbers[0] != numbers[1] else [])

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(20):
        annotate(tmp_path, {id: {"n": number} for id in featcache.open(tmp_path)})
    for reader in readers:
        reader.join()
    assert not wrong


# Damage


@pytest.mark.parametrize("what", ["bytes", "ends", "null", "values", "codes"])
def test_damaged_columns_are_not_carried_on(tmp_path: Path, what: str) -> None:
    make_cache(tmp_path, range(20))
    given = {id_of(n): {"speaker": f"s{n % 3}", "text": f"t {n}", "n": n} for n in range(19)}
    annotate(tmp_path, given)
    manifest = read_manifest(tmp_path)
    with ColumnFile(tmp_path, manifest.index) as file:
        names = [name for name in file._columns if name.endswith(f"/{what}")]
        offset = file._columns[names[0]][2]
    data = bytearray((tmp_path / manifest.index).read_bytes())
    data[offset] ^= 1
    (tmp_path / manifest.index).write_bytes(data)
    for attempt in (
        lambda: annotate(tmp_path, {id_of(1): {"n": 5}}),
        lambda: append(tmp_path),
        lambda: featcache.open(tmp_path, verify="columns"),
        lambda: featcache.open(tmp_path, check_reads=True),
    ):
        with pytest.raises(CorruptCacheError, match="checksum of column 'annotations/"):
            attempt()


def test_damaged_columns_of_a_part_are_not_published(tmp_path: Path) -> None:
    make_annotated(tmp_path, range(20))
    (file,) = tmp_path.glob("parts/*/index.columns")
    data = file.read_bytes()
    assert data.count(b"spk3") >= 1
    file.write_bytes(data.replace(b"spk3", b"spk9"))
    with pytest.raises(CorruptCacheError, match="checksum of column 'annotations/speaker/"):
        append(tmp_path)
    with pytest.raises(CorruptCacheError, match="checksum of column 'annotations/speaker/"):
        featcache.open(tmp_path, verify="columns")

"""`featcache ls`, `show`, `stats`, `made-from`: the numbers are those of the cache."""

from __future__ import annotations

import csv
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_runs import FINGERPRINT, SPEAKERS, fbank_of, id_of, make, run
from command_runs import cache as cache
from command_runs import stored as stored
from hypothesis import given, settings
from hypothesis import strategies as st

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.cli.where import matching

ROWS: dict[str, dict[str, Any]] = {
    id_of(number): {
        "fbank": len(fbank_of(number)),
        "seconds": len(fbank_of(number)) * 0.01,
        "speaker": SPEAKERS[number % 3],
        "snr": None if number % 7 == 0 else number / 2,
        "text": f"hello {number} world",
    }
    for number in range(30)
}


def ids_of(cache: Path, *words: str) -> list[str]:
    found = run("ls", cache, "--json", *words)
    return [json.loads(line)["id"] for line in found.out.splitlines()]


@pytest.mark.parametrize(
    ("expression", "holds"),
    [
        ("fbank>20", lambda row: row["fbank"] > 20),
        ("fbank >= 24", lambda row: row["fbank"] >= 24),
        ("fbank<20", lambda row: row["fbank"] < 20),
        ("fbank<=24", lambda row: row["fbank"] <= 24),
        ("fbank=24", lambda row: row["fbank"] == 24),
        ("fbank=24|31", lambda row: row["fbank"] in (24, 31)),
        ("seconds>0.245", lambda row: row["seconds"] > 0.245),
        ("speaker=anna", lambda row: row["speaker"] == "anna"),
        ("speaker=anna|ben", lambda row: row["speaker"] in ("anna", "ben")),
        ("speaker!=anna", lambda row: row["speaker"] != "anna"),
        ("speaker~nn", lambda row: "nn" in row["speaker"]),
        ("text~o 1", lambda row: "o 1" in row["text"]),
        ("text=hello 3 world", lambda row: row["text"] == "hello 3 world"),
        ("snr=", lambda row: row["snr"] is None),
        ("snr!=", lambda row: row["snr"] is not None),
        ("snr>2.5", lambda row: row["snr"] is not None and row["snr"] > 2.5),
        ("snr=1.5|", lambda row: row["snr"] in (1.5, None)),
    ],
)
def test_one_comparison_finds_what_holds(stored: Path, expression: str, holds: object) -> None:
    assert callable(holds)
    found = set(ids_of(stored, "--where", expression))
    assert found == {id for id, row in ROWS.items() if holds(row)}
    assert found


def test_ids_are_a_column_and_comparisons_hold_together(stored: Path) -> None:
    assert ids_of(stored, "--where", "id=ben-4") == ["ben-4"]
    assert set(ids_of(stored, "--where", "id~a-1", "--where", "fbank>20")) == {
        id
        for id, row in ROWS.items()
        if "a-1" in id and len(fbank_of(int(id[-2:].strip("-")))) > 20
    }


@pytest.mark.parametrize(
    "expression",
    ["fbank", "__import__('os')", "sped=1", "fbank>x", "text>1", "snr~1", "=3", "text=a and b"],
)
def test_what_is_no_comparison_is_refused_or_finds_nothing(stored: Path, expression: str) -> None:
    found = run("ls", stored, "--where", expression)
    assert found.code == (1 if expression.startswith("text=") else 2)
    assert found.out.count("\n") <= 1


@settings(max_examples=30)
@given(
    st.lists(st.text("abé安", max_size=5), min_size=1, max_size=40),
    st.text("abé安", min_size=1, max_size=3),
)
def test_contains_is_what_python_says(texts: list[str], part: str) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        with CacheWriter(folder, [FeatureStorageConfig("f")]) as writer:
            for number, text in enumerate(texts):
                array = np.zeros((1, 1), np.float32)
                writer.write(f"{text}{number}", {"f": array}, annotations={"text": text})
        table = featcache.open(folder)
        by_text = set(matching(table, [f"text~{part}"]))
        by_id = set(matching(table, [f"id~{part}"]))
    named = {f"{text}{number}": text for number, text in enumerate(texts)}
    assert by_text == {id for id, text in named.items() if part in text}
    assert by_id == {id for id in named if part in id}


def test_rows_are_sorted_and_cut_and_counted(stored: Path) -> None:
    found = run("ls", stored, "--where", "speaker=ella", "--sort", "-fbank", "-n", "3")
    longest = sorted(row["fbank"] for row in ROWS.values() if row["speaker"] == "ella")[-3:]
    lines = [line.split()[1] for line in found.out.splitlines()[1:]]
    assert lines == [str(each) for each in longest[::-1]]
    assert found.err == "3 shown, 10 match, of 30\n"
    by_seconds = run(
        "ls", stored, "--sort", "-seconds", "-n", "1", "--columns", "seconds", "--json"
    )
    most = max(row["seconds"] for row in ROWS.values())
    assert by_seconds.json["seconds"] == pytest.approx(most)


def test_no_row_is_exit_code_1(stored: Path) -> None:
    assert run("ls", stored, "--where", "fbank>9999").code == 1
    assert run("ls", stored, "--where", "fbank>9999", "--json").out == ""


def test_csv_jsonl_and_parquet_hold_the_columns(stored: Path, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("ls", stored, "--format", "csv").out)))
    assert {row["id"]: int(row["fbank"]) for row in rows} == {
        id: row["fbank"] for id, row in ROWS.items()
    }
    assert {row["snr"] for row in rows if int(row["id"].split("-")[1]) % 7 == 0} == {""}
    lines = [json.loads(line) for line in run("ls", stored, "--json").out.splitlines()]
    assert {line["id"]: line["snr"] for line in lines} == {
        id: row["snr"] for id, row in ROWS.items()
    }
    file = tmp_path / "rows.parquet"
    assert run("ls", stored, "--format", "parquet").code == 2
    assert run("ls", stored, "--format", "parquet", "-o", file).code == 0
    parquet = pytest.importorskip("pyarrow.parquet")
    assert parquet.read_table(file).column("id").to_pylist() == list(featcache.open(stored))
    assert run("ls", stored, "--columns", "text", "-o", tmp_path / "a.csv").out == ""
    assert (tmp_path / "a.csv").read_text().splitlines()[0] == "id,text"


def test_an_utterance_is_described_by_its_values(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
    array[7:10] = array[7]
    array[3, 2] = np.nan
    odd = FeatureStorageConfig("fbank", nonfinite="keep", stats=False)
    with CacheWriter(tmp_path, [odd]) as writer:
        writer.write("a", {"fbank": array}, annotations={"speaker": "anna"})
    found = run("show", tmp_path, "a", "--json").json
    finite = array[np.isfinite(array)].astype(np.float64)
    assert found == {
        "featcache": featcache.__version__,
        "verb": "show",
        "id": "a",
        "features": {
            "fbank": {
                "shape": [20, 6],
                "dtype": "float32",
                "mean": pytest.approx(finite.mean()),
                "std": pytest.approx(finite.std()),
                "min": finite.min(),
                "max": finite.max(),
                "not_finite": 1,
                "constant_frames": [[7, 10]],
            }
        },
        "annotations": {"speaker": "anna"},
    }
    several = run("show", tmp_path, "a", "a", "--json").json["utterances"]
    assert several == [{k: v for k, v in found.items() if k not in ("featcache", "verb")}] * 2
    words = run("show", tmp_path, "a").out
    assert "fbank (20, 6) float32" in words
    assert "equal frames 7-9" in words
    assert "1 values are not finite" in words
    part = run("show", tmp_path, "a", "--frames", "5:9", "--json").json["features"]["fbank"]
    assert part["shape"] == [4, 6]


@pytest.mark.parametrize(
    "words",
    [["nobody"], ["anna-0", "--frames", "5"], ["anna-0", "--frames", "0:999"],
     ["anna-0", "--feature", "nothing"], ["anna-0", "-o", "a.npy"]],
)  # fmt: skip
def test_what_is_not_there_is_not_shown(stored: Path, words: list[str]) -> None:
    found = run("show", stored, *words)
    assert (found.code, found.out) == (2, "")


def test_an_array_is_written_to_a_file(stored: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    assert run("show", stored, "ben-1", "--feature", "fbank", "-o", file).code == 0
    np.testing.assert_array_equal(np.load(file), fbank_of(1))
    picture = tmp_path / "a.png"
    assert run("show", stored, "ben-1", "--feature", "fbank", "-o", picture).code == 0
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == fbank_of(1).shape
    assert run("show", stored, "ben-1", "--feature", "fbank", "-o", tmp_path / "a.gif").code == 2


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_picture_fits_the_terminal(tmp_path: Path, width: int, encoding: str) -> None:
    ramp = np.arange(500, dtype=np.float32)[:, None] + np.arange(40, dtype=np.float32)
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        writer.write("a", {"fbank": ramp})
    found = run("show", tmp_path, "a", "--color", "never", width=width, encoding=encoding)
    lines = found.out.splitlines()[2:]
    assert len(lines) == 10
    assert max(map(len, lines)) <= width
    assert lines[0].strip().startswith("high")
    assert lines[0].rstrip()[-1] == ("█" if encoding == "utf-8" else "#")


def test_statistics_are_those_of_the_frames(stored: Path, tmp_path: Path) -> None:
    frames = np.concatenate([fbank_of(number) for number in range(30)]).astype(np.float64)
    found = run("stats", stored, "--json").json
    assert set(found) == {"featcache", "verb", "utterances", "features"}
    fbank = found["features"]["fbank"]
    assert fbank["count"] == len(frames)
    np.testing.assert_allclose(fbank["mean"], frames.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(fbank["std"], frames.std(axis=0), atol=1e-12)
    file = tmp_path / "stats.npz"
    view = run("stats", stored, "--where", "speaker=anna", "--npz", file, "--json").json
    of_anna = np.concatenate([fbank_of(number) for number in range(0, 30, 3)]).astype(np.float64)
    np.testing.assert_allclose(view["features"]["fbank"]["mean"], of_anna.mean(axis=0), atol=1e-12)
    with np.load(file) as kept:
        assert int(kept["count"]) == len(of_anna)
        np.testing.assert_allclose(kept["sum_square"], (of_anna**2).sum(axis=0))
    assert "units: no statistics" in run("stats", stored).err
    assert run("stats", stored, "--feature", "units").code == 2
    none = run("stats", stored, "--where", "speaker=nobody").out.splitlines()[1].split()
    assert none == ["fbank", "0", "8", *"----", "0"]


def test_what_it_was_made_from_is_told_whole_or_by_key(stored: Path) -> None:
    words = run("made-from", stored).out
    assert "  model: wavlm" in words
    assert "features.fbank: backend memmap, " in words
    assert run("made-from", stored, "layer").out == "compared\n  layer: 9\n"
    assert run("made-from", stored, "modell").code == 2
    found = run("made-from", stored, "--json").json
    assert found["fingerprint"]["layer"] == 9
    assert set(found) == {
        "featcache", "verb", "path", "generation", "utterances", "complete", "made", "by",
        "fingerprint", "recorded",
    }  # fmt: skip


def test_many_entries_of_a_record_are_counted_unless_asked_for(tmp_path: Path) -> None:
    cache, versions = make(tmp_path / "train"), {f"library{n}": f"{n}.0" for n in range(9)}
    record = {"when": "2026-11-25T10:00:00+00:00", "versions": versions}
    features = [*featcache.open(cache).opened.manifest.declared.values()]
    with CacheWriter(cache, features, FINGERPRINT) as writer:
        writer.keep_file("made-from", json.dumps(record).encode())
    words = run("made-from", cache).out
    assert "versions: 9 entries" in words
    assert "library7" not in words
    assert "versions.library7: 7.0" in run("made-from", cache, "recorded.versions").out


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    with CacheWriter(tmp_path / "hostile\x1b[31m", [FeatureStorageConfig("f")]) as writer:
        for id in HOSTILE:
            writer.write(
                id, {"f": np.ones((3, 2), np.float32)}, annotations={"t\x1bt": f"\x07{id}"}
            )
    return Path(writer.path)


HOSTILE = ("a\x1b[2Jb", "x\ny", "\x9bc", "\u202egnp", "<b>", "安娜", "é", "x" * 300, "q\r")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [80, None])
def test_control_characters_are_shown_and_not_sent(
    hostile: Path, encoding: str, width: int | None
) -> None:
    for words in (
        ["info"], ["ls"], ["ls", "--json"], ["show", HOSTILE[0]], ["show", "--json", *HOSTILE],
        ["stats"], ["made-from"], ["verify"], ["verify", "--json"], ["ls", "--where", "\x1b=1"],
        ["show", "no\x1body"], ["tag"], ["tag", "\x1b"],
    ):  # fmt: skip
        found = run(
            words[0], hostile, *words[1:], "--color", "never", width=width, encoding=encoding
        )
        for text in (found.out, found.err):
            assert not {*text} & {"\x1b", "\x07", "\x9b", "\u202e", "\r"}, words
    assert "a\\x1b[2Jb" in run("ls", hostile).out
    ids = [json.loads(line)["id"] for line in run("ls", hostile, "--json").out.splitlines()]
    assert set(ids) == set(HOSTILE)


def test_csv_in_a_pipe_holds_the_ids_as_they_are(hostile: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("ls", hostile, "--format", "csv").out, newline="")))
    assert {row["id"] for row in rows} == set(HOSTILE)
    assert "\x1b" not in run("ls", hostile, "--format", "csv", width=80).out


def test_long_ids_are_cut_in_the_middle(tmp_path: Path) -> None:
    make(tmp_path, 2)
    with CacheWriter(tmp_path / "long", [FeatureStorageConfig("f")]) as writer:
        writer.write("front" + "x" * 300 + "end", {"f": np.ones((3, 2), np.float32)})
    line = run("ls", tmp_path / "long", "--color", "never", width=60).out.splitlines()[1]
    assert len(line) <= 60
    assert line.startswith("front")
    assert "end " in line

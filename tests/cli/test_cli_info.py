"""`featcache info`: of one cache, several, one that is being written, a damaged one, none."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from command_runs import FINGERPRINT, make, run
from command_runs import cache as cache
from command_runs import stored as stored

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.format import program


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CacheWriter]:
    """A writer that is at work on a cache: two utterances published, one not."""
    found = CacheWriter(tmp_path / "written", [FeatureStorageConfig("fbank", dims=[4])])
    found.expect(["a", "b", "c", "d"])
    for id in "ab":
        found.write(id, {"fbank": np.ones((5, 4), np.float32)})
    found.publish()
    found.write("c", {"fbank": np.ones((5, 4), np.float32)})
    found.commit()
    yield found
    found.abort()


def test_a_cache_is_one_row_a_feature(stored: Path) -> None:
    found = run("info", stored)
    head, fbank, units = found.out.splitlines()
    assert found.code == 0
    assert found.err == ""
    assert re.split(r"  +", head) == [
        *("cache", "state", "utterances", "hours", "feature", "frames", "dims", "dtype"),
        *("backend", "bytes", "made"),
    ]
    frames = int(featcache.open(stored).lengths("fbank").sum())
    assert re.split(r"  +", fbank)[:10] == [
        *(str(stored), "complete", "30", f"{frames / 360000:.2g}", "fbank", str(frames), "8"),
        *("float32", "memmap", f"{frames * 32 / 1000:.1f} kB"),
    ]
    assert re.split(r"  +", units.strip())[:4] == ["units", str(frames), "-", "uint8"]


def test_json_of_a_cache_has_the_keys_that_are_promised(stored: Path) -> None:
    found = run("info", stored, "--json").json
    assert (found["featcache"], found["verb"]) == (featcache.__version__, "info")
    (told,) = found["caches"]
    opened = featcache.open(stored)
    frames = int(opened.lengths("fbank").sum())
    made = datetime.fromisoformat(told["made"].pop("when"))
    assert made.utcoffset() is not None
    assert made.utcoffset() == datetime.fromisoformat("2026-01-01T00:00:00+00:00").utcoffset()
    assert told == {
        "path": str(stored),
        "kind": "cache",
        "state": "complete",
        "error": None,
        "utterances": 30,
        "expected": None,
        "failed": 0,
        "hours": pytest.approx(frames * 0.01 / 3600),
        "bytes": opened.nbytes,
        "generation": 1,
        "tags": {},
        "made": {"by": program()},
        "writer": None,
        "unpublished": 0,
        "features": [
            {
                "name": "fbank", "frames": frames, "dims": [8], "dtype": "float32",
                "backend": "memmap", "codec": "raw", "bytes": frames * 32, "frame_s": 0.01,
                "hours": pytest.approx(frames * 0.01 / 3600),
            },
            {
                "name": "units", "frames": frames, "dims": [], "dtype": "uint8",
                "backend": "memmap", "codec": "raw", "bytes": frames, "frame_s": None,
                "hours": None,
            },
        ],
        "annotations": {"snr": "float", "speaker": "str", "text": "str"},
        "adopted": {},
    }  # fmt: skip


def test_the_program_that_began_a_cache_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, features = tmp_path / "cache", [FeatureStorageConfig("fbank")]
    programs = {"exp/train.py": "train.py", "-c": "python -c", "": "Python", "a/m/__main__.py": "m"}
    for first, name in programs.items():
        monkeypatch.setattr("sys.argv", [first])
        with CacheWriter(path, features, overwrite=True) as writer:
            for id in "ab":
                writer.write(id, {"fbank": np.ones((5, 4), np.float32)})
        monkeypatch.setattr("sys.argv", ["edit.py"])
        CacheWriter(path, features, overwrite=True).abort()
        CacheWriter(path, features).close()  # which gives the overwrite up
        featcache.open(path).delete(["a"])
        (told,) = run("info", path, "--json").json["caches"]
        assert told["made"]["by"] == featcache.inspect.made_from(path)["by"] == name
        assert re.search(rf"made \S+ by {name}, generation", run("made-from", path).out)


def test_a_folder_stands_for_the_caches_below_it(tmp_path: Path) -> None:
    make(tmp_path / "features" / "train", 5)
    make(tmp_path / "features" / "valid", 3)
    (tmp_path / "empty").mkdir()
    found = run("info", tmp_path)
    assert found.out.startswith("2 caches, 8 utterances, ")
    assert re.findall(r"^(train|valid) ", found.out, re.MULTILINE) == ["train", "valid"]
    assert [Path(each["path"]).name for each in run("info", tmp_path, "--json").json["caches"]] == [
        "train",
        "valid",
    ]
    assert run("info", tmp_path / "empty").code == 2


def test_a_tag_names_a_generation(cache: Path) -> None:
    featcache.open(cache).tag("v1")
    featcache.open(cache).delete(["anna-0"])
    assert run("info", f"{cache}@v1", "--json").json["caches"][0]["utterances"] == 30
    assert run("info", cache, "--json").json["caches"][0]["utterances"] == 29
    assert run("info", f"{cache}@v2").code == 2
    assert "tags v1 (generation 1)" in run("info", cache).out


def test_a_cache_that_is_written_says_how_far_and_by_whom(writer: CacheWriter) -> None:
    (told,) = run("info", writer.path, "--json").json["caches"]
    assert told["state"] == "being written"
    assert (told["utterances"], told["expected"]) == (2, 4)
    assert told["writer"].pop("since").endswith("+00:00")
    assert told["writer"] == {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "utterances": 1,
    }
    listed = run("ls", writer.path).err
    assert re.search(r"1 utterance more, being written by \S+, process \d+$", listed, re.M)
    ascii = run("info", writer.path, encoding="ascii").out
    assert re.search(r"^written: being written   #+\.+   3 of 4 ", ascii, re.M)
    words = run("info", writer.path).out
    assert re.search(r"^written: being written .* 3 of 4   by \S+, process \d+, since", words, re.M)


def test_watching_ends_with_the_writer(
    writer: CacheWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) < 2:
            for id in "defg":  # more than are expected
                writer.write(id, {"fbank": np.ones((5, 4), np.float32)})
            writer.commit()
        else:
            writer.close()

    monkeypatch.setattr("featcache.cli.info.time.sleep", sleep)
    found = run("info", writer.path, "--watch")
    assert slept == [1, 1]
    assert "3 of 4" in found.out.splitlines()[0]
    assert re.search(r" 7 of 4   [\d,]+/s   by ", found.out.splitlines()[1])
    assert "complete" in found.out.splitlines()[-1]


def test_requirements_answer_by_exit_code(writer: CacheWriter, stored: Path) -> None:
    assert run("info", stored, "--require", "complete").code == 0
    assert run("info", stored, writer.path, "--require", "complete").code == 1


def test_fresh_is_what_was_made_from_a_fingerprint(stored: Path, tmp_path: Path) -> None:
    file = tmp_path / "made-from.json"
    file.write_text(json.dumps(FINGERPRINT))
    required = "--require", "complete,fresh", "--fingerprint", file
    assert run("info", stored, *required).code == 0
    file.write_text(json.dumps({**FINGERPRINT, "layer": 10}))
    found = run("info", stored, *required)
    assert found.code == 1
    assert "layer: was 9, now 10" in found.err
    assert run("info", stored, "--require", "fresh").code == 2
    assert run("info", stored, "--require", "freshly").code == 2


def test_a_damaged_cache_is_told_beside_whole_ones(tmp_path: Path) -> None:
    make(tmp_path / "a", 3)
    broken = make(tmp_path / "b", 3)
    (broken / "featcache.json").write_bytes(b"{}")
    found = run("info", tmp_path)
    assert found.code == 2
    assert re.search(r"^a .* complete ", found.out, re.MULTILINE)
    assert re.search(r"^b .* damaged ", found.out, re.MULTILINE)
    assert str(broken) in found.err
    (_, told) = run("info", tmp_path, "--json").json["caches"]
    assert (told["state"], told["utterances"], told["features"]) == ("damaged", None, [])


def test_there_is_no_cache(tmp_path: Path) -> None:
    found = run("info", tmp_path / "nothing")
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith("featcache info: ")
    assert "nothing" in found.err
    told = run("info", tmp_path / "nothing", "--json").json
    assert told["error"]["type"] == "NotACacheError"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_narrow_terminals_drop_columns_and_say_which(stored: Path, width: int) -> None:
    found = run("info", stored, width=width)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", found.out)
    assert max(map(len, plain.splitlines())) <= width
    assert all(plain.splitlines())
    assert "utterances" in plain.splitlines()[0]
    if width < 120:
        assert "too narrow for: " in found.err
        assert "made" in found.err
    assert "state" in plain.splitlines()[0]


def test_adopted_caches_and_feature_sets_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    np.save(tmp_path / "mine" / "a.npy", np.ones((5, 4), np.float32))
    featcache.adopt(tmp_path / "mine", tmp_path / "adopted", feature="fbank")
    (told,) = run("info", tmp_path / "adopted", "--json").json["caches"]
    assert (told["kind"], told["utterances"]) == ("adopted", 1)
    assert [*told["adopted"].values()] == [str(tmp_path / "mine")]
    words = run("info", tmp_path / "adopted").out
    assert re.search(rf"adopted, the bytes of '\w+' stay in {tmp_path / 'mine'}$", words, re.M)
    (tmp_path / "mine").rename(tmp_path / "elsewhere")
    assert "mine, which is not there; adopted.json" in run("info", tmp_path / "adopted").out
    two = make(tmp_path / "two", 3)
    with CacheWriter(two, [FeatureStorageConfig("energy")]) as writer:
        for id in list(featcache.open(two)):
            writer.write(id, {"energy": np.ones((5,), np.float32)})
    (told,) = run("info", two, "--json").json["caches"]
    assert told["kind"] == "sets"
    assert [each["name"] for each in told["features"]] == ["fbank", "units", "energy"]
    shutil.rmtree(two)

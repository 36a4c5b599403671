"""The verbs that edit, and those that make another cache, do what Python's do."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from command_runs import FINGERPRINT, damage, fbank_of, id_of, make, run
from command_runs import cache as cache

import featcache
from featcache import CacheWriter


def test_deleting_asks(cache: Path) -> None:
    assert run("delete", cache, "anna-0", answer="n\n").code == 1
    assert run("delete", cache, "anna-0", answer="").code == 2
    assert len(featcache.open(cache)) == 30
    found = run("delete", cache, "anna-0", answer="y\n")
    assert found.out == "deleted 1 utterance, 29 are left\n"
    assert "delete 1 of 30 utterances ('anna-0')?" in found.err
    assert "anna-0" not in featcache.open(cache)


def test_ids_come_from_words_a_file_or_a_comparison(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("anna-0\nben-1\n")
    assert run("delete", cache, "--ids", tmp_path / "ids", "-y", "--json").json["left"] == 28
    assert run("delete", cache, "--where", "speaker=ella", "-y", "--json").json["deleted"] == 10
    assert run("delete", cache, "--where", "speaker=ella", "-y").code == 1
    assert run("delete", cache, "-y").code == 2
    assert run("delete", cache, "anna-3", "--where", "fbank>1", "-y").code == 2
    assert run("delete", cache, "nobody", "-y").code == 2
    assert len(featcache.open(cache)) == 18


def test_compacting_frees_what_was_deleted(cache: Path) -> None:
    featcache.open(cache).delete([id_of(number) for number in range(10)])
    before = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    dry = run("compact", cache, "--dry-run", "--json").json
    assert dry["deleted"] == 10
    assert sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) == before
    featcache.open(cache).tag("v1")
    assert run("compact", cache, "--json").json["freed_bytes"] == pytest.approx(
        dry["freed_bytes"], rel=0.1
    )
    assert run("verify", cache).code == 0


def test_a_tag_that_holds_what_was_deleted_keeps_it(cache: Path) -> None:
    assert run("tag", cache, "v1").out == "tag v1: generation 1\n"
    assert run("tag", cache, "v 1").code == 2
    featcache.open(cache).delete(["anna-0"])
    found = run("compact", cache)
    assert found.code == 2
    assert "--drop-tags" in found.err
    assert run("tag", cache, "--json").json["tags"] == {"v1": 1}
    assert run("tag", cache, "v1", "--delete").code == 0
    assert run("tag", cache).out == "tag  generation\n"
    assert run("compact", cache).code == 0
    assert run("tag", cache, "--delete").code == 2


def test_annotations_come_from_a_file(cache: Path, tmp_path: Path) -> None:
    table = tmp_path / "ages.csv"
    table.write_text("id,age\nanna-0,30\nnobody,40\n")
    found = run("annotate", cache, table)
    assert found.code == 2
    assert "--unknown skip" in found.err
    found = run("annotate", cache, table, "--unknown", "skip", "--json")
    assert found.json["annotations"]["age"] == "int"
    assert run("ls", cache, "--where", "age=30", "--columns", "age").out.split() == [
        *("id", "age", "anna-0", "30")
    ]


def test_a_fingerprint_is_accepted_after_it_is_shown(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "now.json"
    file.write_text(json.dumps({**FINGERPRINT, "layer": 10}))
    found = run("accept", cache, "--fingerprint", file, answer="n\n")
    assert found.code == 1
    assert "layer: was 9, now 10" in found.err
    assert featcache.open(cache).fingerprint["layer"] == 9
    assert run("accept", cache, "--fingerprint", file, "--yes").code == 0
    assert featcache.open(cache, expect=json.loads(file.read_text())).fingerprint["layer"] == 10
    assert run("accept", cache, "--fingerprint", file).out.endswith("nothing differs\n")
    for text, told in (("[]", "is a JSON object"), ("id,lang", f"{str(file)!r} is no JSON: ")):
        file.write_text(text)
        refused = run("accept", cache, "--fingerprint", file)
        assert (refused.code, told in refused.err) == (2, True)


def test_converting_changes_what_is_asked_for(cache: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    found = run("convert", cache, half, "-b", "hdf5", "-d", "float16", "--json")
    assert found.code == 0
    told = {each["name"]: each for each in found.json["cache"]["features"]}
    assert {name: (each["backend"], each["dtype"]) for name, each in told.items()} == {
        "fbank": ("hdf5", "float16"),
        "units": ("hdf5", "uint8"),
    }
    assert "units stays uint8" in found.err
    for number in range(30):
        stored = featcache.open(half).read(id_of(number), "fbank")
        np.testing.assert_array_equal(stored, fbank_of(number).astype(np.float16))
    assert run("convert", cache, tmp_path / "one", "-f", "units", "-q") == (0, "", "")
    assert featcache.open(tmp_path / "one").features == ("units",)
    assert run("convert", cache, tmp_path / "two", "-f", "unit").code == 2
    assert run("convert", cache, tmp_path / "two", "-b", "hdf6").code == 2


def test_stores_of_others_are_adopted_converted_and_estimated(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    arrays = {f"u{number}": fbank_of(number) for number in range(6)}
    for id, array in arrays.items():
        np.save(mine / f"{id}_mel.npy", array)
    found = run(
        "adopt", mine, tmp_path / "a", "--pattern", "{id}_mel", "--feature", "mel", "--collect"
    )
    assert found.code == 0, found.err
    adopted = featcache.open(tmp_path / "a", verify="arrays")
    for id, array in arrays.items():
        np.testing.assert_array_equal(adopted.read(id, "mel"), array)
    assert run("adopt", mine, tmp_path / "a", "--feature", "mel").code == 2
    assert run("convert", mine, tmp_path / "b", "-d", "float16").code == 0
    assert len(featcache.open(tmp_path / "b")) == 6
    told = run("estimate", mine, "--json").json
    assert told["utterances"] == 6
    (declared,) = (each for each in told["ways"] if each["declared"])
    assert declared["bytes"] == pytest.approx(
        sum(a.nbytes for a in arrays.values()), rel=0.2, abs=5e4
    )
    assert {"largest_error", "rms_error", "rms_of_std", "cosine", "read_gb_s"} <= {*declared}
    assert "feats as float" in told["advice"]
    shown = run("estimate", tmp_path / "b").out
    assert "as declared" in shown
    assert "cosine" in shown


def test_a_cache_that_is_written_is_to_be_tried_later(cache: Path) -> None:
    features = list(featcache.open(cache).opened.manifest.declared.values())
    with CacheWriter(cache, features, FINGERPRINT):
        for verb, more in (("recover", []), ("delete", ["anna-0", "-y"]), ("compact", [])):
            found = run(verb, cache, *more)
            assert found.code == 75
            assert str(os.getpid()) in found.err
        told = run("delete", cache, "anna-0", "-y", "--json").json
    assert told["error"]["type"] == "CacheLockedError"


def test_an_overwrite_under_way_is_not_given_up(cache: Path) -> None:
    features = list(featcache.open(cache).opened.manifest.declared.values())
    writer = CacheWriter(cache, features, {"layer": 10}, overwrite=True)
    writer.write("new", {"fbank": fbank_of(0), "units": np.zeros(10, np.uint8)})
    with pytest.raises(KeyError), writer:
        raise KeyError
    found = run("recover", cache)
    assert found.code == 2
    assert "overwritten" in found.err


def test_a_second_cache_is_made_beside(tmp_path: Path) -> None:
    make(tmp_path / "a", 3)
    assert run("convert", tmp_path / "a", tmp_path / "a").code == 2


def test_what_is_intact_is_saved_and_what_is_lost_is_listed(cache: Path, tmp_path: Path) -> None:
    damage(cache, "fbank", id_of(3))
    lost = tmp_path / "lost"
    assert run("repair", cache, "--dry-run", "--list", lost).code == 1
    assert lost.read_text() == f"{id_of(3)}\n"
    assert run("verify", cache).code == 1
    found = run("repair", cache, "--json")
    assert found.code == 1
    told = found.json
    assert (told["done"], told["saved"], told["unnamed"]) == (True, 29, 0)
    assert [(each["id"], each["feature"]) for each in told["lost"]] == [(id_of(3), "fbank")]
    assert {"elsewhere", "rebuilt", "annotations", "set_aside", "left"} < set(told)
    assert run("verify", cache).code == 0
    assert run("repair", cache).out == "whole: 29 utterances, nothing to repair\n"
    assert run("repair", tmp_path / "nothing").code == 2


def test_a_report_is_a_page(cache: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    other = make(tmp_path / "other")
    found = run("report", cache, other, "-o", page, "--json").json
    assert found["path"] == str(page)
    assert found["bytes"] == page.stat().st_size
    assert (found["sampled"], found["of"]) == (60, 60)
    assert all(set(each) == {"cache", "kind", "count", "ids"} for each in found["findings"])
    assert {each["cache"] for each in found["findings"]} == {str(cache), str(other)}
    lines = run("report", cache, other, "-o", page).out.splitlines()
    assert [line for line in lines if line.startswith("  /")] == [f"  {cache}", f"  {other}"]
    words = run("report", cache, "-o", page, "--sample", "10").out
    assert words.startswith(f"{page}  ")
    assert re.search(r"values of (9|10) of 30 utterances", words)
    assert run("report", cache).code == 2
    assert run("report", cache, "-o", page, "--sample", "few").code == 2

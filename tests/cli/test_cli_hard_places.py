"""The command where things are wrong: what is read is damaged, what is written to is full or gone.

Each answer is one sentence and an exit code; what can be answered beside it is answered.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from command_runs import COMMAND, damage, id_of, make, run
from command_runs import cache as cache
from command_runs import stored as stored

import featcache
from featcache import CacheWriter, FeatureStorageConfig, _progress
from featcache.cli.make import adopt
from featcache.cli.verb import in_words

posix = pytest.mark.skipif(os.name == "nt", reason="descriptors and rights of POSIX")


def flip(file: Path, at: int) -> None:
    """Change a byte of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.write_bytes(data)


def adopted_from(folder: Path) -> Path:
    """A cache that was adopted, of which nothing has read all bytes."""
    (folder / "mine").mkdir()
    np.save(folder / "mine" / "a.npy", np.ones((5, 4), np.float32))
    featcache.adopt(folder / "mine", folder / "adopted", feature="fbank")
    return folder / "adopted"


# What cannot be printed.


@posix
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("words", [["ls", "--json"], ["info"], ["--help"], ["ls", "--help"]])
def test_an_answer_that_does_not_fit_is_exit_code_2(stored: Path, words: list[str]) -> None:
    paths = [] if "--help" in words else [str(stored)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *words, *paths], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert re.fullmatch(r"featcache( \w+)?: no space left on device\n", done.stderr)


@posix
def test_closed_descriptors_are_no_error_of_ours(stored: Path) -> None:
    command = f"{sys.executable} -m featcache"
    for rest, code in ((f"info {stored} >&-", 0), (f"delete {stored} anna-0 <&-", 2)):
        done = subprocess.run(
            f"{command} {rest}", shell=True, stderr=subprocess.PIPE, text=True, check=False
        )
        assert done.returncode == code
        assert "error of featcache's own" not in done.stderr
    assert len(featcache.open(stored)) == 30


def test_a_page_that_cannot_be_written_is_named(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, data: bytes) -> int:  # root may write anywhere
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_bytes", refused)
    page = tmp_path / "page.html"
    told = run("report", stored, "-o", page, "--pictures", "0")
    assert (told.code, told.err) == (2, f"featcache report: {str(page)!r}: permission denied\n")


def test_a_file_that_cannot_be_written_is_named(stored: Path) -> None:
    found = run("ls", stored, "--format", "csv", "-o", stored / "no" / "a.csv")
    assert found.code == 2
    assert found.err == f"featcache ls: '{stored / 'no' / 'a.csv'}': no such file or directory\n"


# What is damaged.


def test_lengths_that_no_array_has_are_damage(cache: Path) -> None:
    (index,) = cache.glob("index-*.columns")
    rows = featcache.open(cache).opened.index.features["units"].rows
    index.write_bytes(index.read_bytes().replace(rows.tobytes(), (-rows).tobytes()))
    found = run("info", cache, "--json")
    assert found.code == 2
    assert found.json["caches"][0]["state"] == "damaged"
    assert "featcache verify tells all damage" in run("info", cache).err


def test_lost_files_are_not_counted_as_no_damage(cache: Path) -> None:
    container = next(cache.glob("parts/*/fbank*"))
    os.truncate(container, container.stat().st_size // 2)
    found = run("verify", cache)
    assert found.out.splitlines()[0] == f"DAMAGED  {cache}"  # not: 0 of 30 utterances
    assert "see: featcache repair" in found.err


def test_no_repair_is_offered_that_would_be_refused(cache: Path) -> None:
    (cache / "featcache.json").write_bytes(b"")
    found = run("verify", cache)
    assert found.code == 1
    assert "put a good copy of it back" in found.out
    assert found.err == ""
    assert run("repair", cache, "--dry-run").code == 2


def test_a_damaged_manifest_is_repaired_from_its_copy(cache: Path) -> None:
    flip(cache / "featcache.json", 40)
    found = run("verify", cache)
    assert found.code == 1
    assert "featcache repair restores it" in found.out
    assert "featcache.json" in run("repair", cache, "--dry-run").out
    assert run("verify", cache).code == 1  # that only looked
    assert run("repair", cache).code == 0
    assert run("verify", cache).code == 0


def test_one_cache_that_cannot_be_verified_keeps_no_other_from_it(tmp_path: Path) -> None:
    adopted_from(tmp_path)
    damage(make(tmp_path / "broken"), "fbank", id_of(3))
    make(tmp_path / "whole", 3)
    found = run("verify", tmp_path, "--json")
    assert found.code == 2
    told = {Path(each["path"]).name: len(each["damaged"]) for each in found.json["caches"]}
    assert told == {"broken": 1, "whole": 0}
    assert "run featcache collect on it once" in found.err


def test_of_what_nothing_has_read_nothing_is_claimed(tmp_path: Path) -> None:
    adopted = adopted_from(tmp_path)
    assert f"stay in {tmp_path / 'mine'}" in run("info", adopted).out
    assert "run featcache collect on it once" in run("stats", adopted).err
    assert "run featcache collect on it once" in run("repair", adopted, "--dry-run").err
    assert run("collect", adopted).code == 0
    assert run("repair", adopted, "--dry-run").err == ""


def test_what_is_pending_may_be_hidden(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> object:
        raise PermissionError(13, "Permission denied", str(stored / "parts"))

    monkeypatch.setattr("featcache.reading.pending_of", refused)
    found = run("ls", stored)
    assert (found.code, len(found.out.splitlines())) == (0, 31)
    assert f"{str(stored / 'parts')!r}: permission denied" in found.err
    assert run("verify", stored, "--json").json["caches"][0]["unpublished"] is None


def test_a_source_that_was_moved_is_found_as_the_message_says(tmp_path: Path) -> None:
    cache = adopted_from(tmp_path)
    moved = (tmp_path / "mine").rename(tmp_path / "elsewhere")
    told = run("show", cache, "a").err
    (key,) = re.findall(r"write its place into adopted.json in the cache: \{'(\w+)'", told)
    (cache / "adopted.json").write_text(json.dumps({key: str(moved)}))
    assert run("show", cache, "a").code == 0


def test_a_sample_says_how_large_it_is(stored: Path) -> None:
    assert run("verify", stored, "--sample", "7").out.startswith(f"whole  {stored}: 7 of 30 utt")
    (told,) = run("verify", stored, "--sample", "99", "--json").json["caches"]
    assert (told["utterances"], told["utterances_checked"]) == (30, 30)


# Who may not, and what is left behind.

KILLED = """
import os, sys, numpy as np, featcache
writer = featcache.CacheWriter(sys.argv[1], [featcache.FeatureStorageConfig("fbank")])
for number in range(3):
    writer.write(f"utt-{number}", {"fbank": np.ones((5, 4), np.float32)})
writer._parts.seal()
os.kill(os.getpid(), 9)
"""


@posix
def test_what_a_killed_writer_left_is_told_and_published(tmp_path: Path) -> None:
    script = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(script, check=False).returncode == -9
    (told,) = run("info", tmp_path, "--json").json["caches"]
    assert (told["utterances"], told["unpublished"], told["writer"]) == (0, 3, None)
    see = f"featcache recover {tmp_path}"
    assert f"3 utterances left by a killed writer; see: {see}" in run("info", tmp_path).out
    for words in (["verify"], ["ls"], ["ls", "--json"], ["repair", "--dry-run"]):
        told = run(words[0], tmp_path, *words[1:]).err
        assert f"3 utterances left by a killed writer, not counted here; see: {see}" in told
    assert run("verify", tmp_path, "--json").json["caches"][0]["unpublished"] == 3
    assert run("repair", tmp_path, "--dry-run", "--json").json["unpublished"] == 3
    assert run("recover", tmp_path, "--json").json["utterances"] == 3
    assert len(featcache.open(tmp_path)) == 3
    assert "by a killed writer" not in run("info", tmp_path).out


@posix
def test_a_folder_that_may_not_be_read_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a", 3)
    make(tmp_path / "b", 3)
    exists = Path.exists

    def refused(path: Path) -> bool:  # root may read all there is
        if path.parent.name == "b" and path.name == "featcache.json":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refused)
    found = run("info", tmp_path)
    assert (found.code, "3" in found.out) == (2, True)
    assert run("verify", tmp_path).code == 2
    assert f"'{tmp_path / 'b' / 'featcache.json'}': permission denied" in found.err


@posix
def test_verbs_that_look_write_nothing(tmp_path: Path) -> None:
    cache, page = make(tmp_path / "train"), tmp_path / "page.html"
    damage(cache, "fbank", id_of(3))

    def state() -> list[tuple[str, int, int]]:
        stats = [(str(file), file.lstat()) for file in sorted(cache.rglob("*"))]
        return [(name, each.st_mtime_ns, each.st_ctime_ns) for name, each in stats]

    before = state()
    for verb, *more in (
        ["info"], ["ls"], ["show", "anna-0"], ["stats"], ["made-from"], ["verify"], ["tag"],
        ["verify", "--columns"], ["verify", "--sample", "3"], ["repair", "--dry-run"],
        ["compact", "--dry-run"], ["diff", str(cache)], ["estimate"], ["report", "-o", str(page)],
    ):  # fmt: skip
        run(verb, cache, *more)
        assert state() == before, verb


# Quiet, and narrow.


def test_quiet_verbs_show_no_bar(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("featcache._progress.DELAY_S", 0.0)
    monkeypatch.setattr("featcache._progress.bar.__kwdefaults__", {**_KWDEFAULTS, "delay_s": 0.0})
    featcache.open(cache).delete(["anna-0"])
    assert "compact" in run("compact", cache, width=80).err
    featcache.open(cache).delete(["ben-1"])
    assert run("compact", cache, "-q", width=80) == (0, "", "")
    assert "verify" in run("verify", cache, width=80).err
    assert run("verify", cache, "-q", width=80) == (0, "", "")


_KWDEFAULTS = dict(_progress.bar.__kwdefaults__ or {})


@pytest.mark.parametrize("colours", ["", "truecolor"])
def test_a_picture_in_colour_has_two_values_a_character(tmp_path: Path, colours: str) -> None:
    frames = np.zeros((6, 3), np.float32)
    frames[:, 0], frames[:, 2] = -1, 1
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        writer.write("a", {"fbank": frames})
    found = run("show", tmp_path, "a", width=80, environment={"COLORTERM": colours}).out
    *_, upper, lower = found.splitlines()
    assert upper.count("▀") == lower.count("▀") == 6
    kind = "2;243;245;134" if colours else "5;228"  # the last one of the report's ramp
    assert f"\x1b[38;{kind}m" in upper
    assert "\x1b[48;" not in lower  # there is no fourth dimension
    assert "▀" not in run("show", tmp_path, "a", "--color", "never", width=80).out


def test_columns_that_are_named_twice_are_there_once(stored: Path) -> None:
    found = run("ls", stored, "--columns", "id,fbank,fbank", "-n", "1")
    assert found.out.split()[:3] == ["id", "fbank", "anna-0"]
    line = json.loads(run("ls", stored, "--columns", "fbank,fbank", "-n", "1", "--json").out)
    assert set(line) == {"id", "fbank"}


def test_a_feature_that_one_cache_lacks_is_one_line(stored: Path, tmp_path: Path) -> None:
    assert run("convert", stored, tmp_path / "one", "-f", "fbank", "-q").code == 0
    found = run("diff", stored, tmp_path / "one")
    assert re.search(r"^differs +units: only in the first$", found.out, re.MULTILINE)


def test_warnings_are_in_the_words_of_the_verb(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for name, frames in (("u1", 5), ("u2", 0)):
        np.save(tmp_path / f"all/{name}.npy", np.ones((frames, 4), np.float32))
    np.save(tmp_path / "all/mean.npy", np.ones((1, 4), np.float32))
    for verb in ("adopt", "convert"):
        told = run(verb, tmp_path / "all", tmp_path / verb, "--pattern", "{id}").err
        assert told.count("delete them from the cache (featcache delete; ") == 2
    np.save(tmp_path / "all/u1.npy", np.ones((5, 60, 4), np.float32))
    np.save(tmp_path / "all/u2.npy", np.ones((3, 60, 4), np.float32))
    (tmp_path / "all/mean.npy").unlink()
    told = run("adopt", tmp_path / "all", tmp_path / "batches").err
    assert "or give --time-axis 0 if the first axis is the frames" in told


def test_advice_is_in_the_words_of_the_verb(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.xyz").write_bytes(b"")
    assert "give --kind, one of" in run("adopt", source, tmp_path / "other").err
    (source / "a.xyz").unlink()
    np.save(source / "a.npy", np.ones((5, 4), np.float32))
    assert "or --overwrite to replace it" in run("adopt", source, cache, "--feature", "fbank").err
    featcache.open(cache).tag("v1")
    assert "name it without @TAG to" in run("delete", f"{cache}@v1", "anna-0", "--yes").err
    CacheWriter(cache, featcache.open(cache).opened.manifest.declared, {}, overwrite=True).abort()
    assert "finish that (overwrite=True, " in run("repair", cache).err  # it has no such option
    with click.Context(adopt):
        told = in_words("pattern='{feature}/{id}', kind='npy', time_axis=-1, features=['x']")
        call = in_words("featcache.adopt('a/*.npy', 'features', feature='f0', pattern='{id}.f0')")
    assert told == "--pattern '{feature}/{id}', --kind npy, --time-axis -1, features=['x']"
    assert call == "featcache adopt 'a/*.npy' features --feature f0 --pattern '{id}.f0'"

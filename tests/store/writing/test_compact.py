"""Compacting: deleted bytes are gone from all files, small parts are few, killed anywhere."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    assert_holds,
    check_cache,
    id_of,
    make_cache,
    oracle,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter
from featcache.container_files import sync_directory
from featcache.container_files.lock import WriterLock
from featcache.errors import CacheError, CacheLockedError, CorruptCacheError, StorageFullError
from featcache.format import PARTS, Stamps, read_manifest
from featcache.testing.contract import traces_in
from featcache.writing import compact, edit, part_writer, publish
from featcache.writing import compact as compacting
from featcache.writing.open_part import OpenPart
from featcache.writing.part_writer import PartWriter
from featcache.writing.session import publish_sealed

ALL = range(20)
GONE = (3, 8, 17)
LEFT = [number for number in ALL if number not in GONE]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A complete cache of four parts, with stamps."""
    for first in range(0, 20, 5):
        append(tmp_path / "cache", range(first, first + 5))
    return tmp_path / "cache"


def append(path: Path, numbers: Iterable[int], shift: int = 0) -> None:
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        for number in numbers:
            stamps = Stamps(number + 1, shift)
            writer.write(id_of(number), arrays_of(number + shift), stamps=stamps)


def parts_of(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / PARTS).iterdir())


def traces_of(numbers: Iterable[int], shift: int = 0) -> list[bytes]:
    arrays = [arrays_of(number + shift)["fbank"] for number in numbers]
    return [array.tobytes() for array in arrays if array.size]


def deleted(path: Path) -> featcache.Cache:
    cache = featcache.open(path)
    cache.delete(map(id_of, GONE))
    return cache


def test_deleted_bytes_are_gone_and_the_rest_is_as_it_was(path: Path) -> None:
    cache = deleted(path)
    assert traces_in(path, traces_of(GONE))
    cache.compact()
    assert not traces_in(path, [*traces_of(GONE), *(id_of(n).encode() for n in (8, 17))])
    check_cache(path, LEFT)
    stamps = featcache.open(path).opened.index.stamps
    assert stamps is not None
    ids = [int(each.rpartition("-")[2]) + 1 for each in featcache.open(path)]
    assert stamps.input.tolist() == ids
    assert len(parts_of(path)) == 1
    assert len([*path.glob("index-*")]) == len([*path.glob("manifests/*")]) == 1


def test_compacting_twice_changes_nothing(path: Path) -> None:
    deleted(path).compact()
    parts, generation = parts_of(path), featcache.open(path).generation
    featcache.open(path).compact()
    assert (parts_of(path), featcache.open(path).generation) == (parts, generation)


def test_a_part_that_is_large_and_whole_is_not_copied(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "PART_ROWS", 20)
    before = parts_of(path)
    featcache.open(path).delete([id_of(3)])
    featcache.open(path).compact()
    assert len({*before} & {*parts_of(path)}) == 3
    check_cache(path, [number for number in ALL if number != 3])


def test_a_cache_without_parts_has_nothing_to_compact(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, two_features(), FINGERPRINT):
        pass
    featcache.open(tmp_path).compact()
    check_cache(tmp_path, [])


def test_parts_of_deleted_utterances_alone_go(path: Path) -> None:
    cache = featcache.open(path)
    cache.delete(map(id_of, range(5)))
    cache.compact()
    check_cache(path, ALL[5:])
    assert not traces_in(path, traces_of(range(5)))
    cache.delete(map(id_of, ALL[5:]))
    cache.compact()
    check_cache(path, [])
    assert parts_of(path) == []
    append(path, ALL)
    check_cache(path, ALL)


def test_compacting_keeps_what_is_expected_failed_and_kept(path: Path) -> None:
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        writer.expect([*map(id_of, ALL), "bad", "to come"])
        writer.fail("bad")
        writer.keep_file("probe", b"probe")
        writer.delete([id_of(0)])
    featcache.open(path).compact()
    cache = featcache.open(path, verify="arrays")
    assert (cache.complete, cache.expected, cache.failed) == (False, 22, ("bad",))
    assert cache.opened.file("probe") == b"probe"


def test_replaced_bytes_go_too(path: Path) -> None:
    deleted(path)
    append(path, GONE, shift=1000)
    featcache.open(path).compact()
    assert not traces_in(path, traces_of(GONE))
    expected = oracle(ALL) | {id_of(number): arrays_of(number + 1000) for number in GONE}
    assert_holds(featcache.open(path, verify="arrays"), expected)


def test_a_tag_that_holds_deleted_utterances_is_in_the_way(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    featcache.open(path).tag("v1")
    cache = deleted(path)
    before = parts_of(path)
    with pytest.raises(CacheError, match=r"'v1': 3 utterances.*drop_tags=True"):
        cache.compact()
    assert parts_of(path) == before
    assert_holds(featcache.open(path, version="v1", verify="arrays"), oracle(ALL))
    cache.compact(drop_tags=True)
    assert [message for message in caplog.messages if "'v1': 3 utterances" in message]
    assert cache.tags == {}
    assert not traces_in(path, traces_of(GONE))
    check_cache(path, LEFT)


def test_a_tag_that_was_made_after_the_deletion_stays(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    featcache.open(path).tag("v1")
    deleted(path)
    cache = featcache.open(path)
    cache.annotate({id_of(LEFT[0]): {"speaker": "anna"}})
    cache.refresh()
    cache.tag("v2")  # of the same parts
    with pytest.raises(CacheError) as caught:
        cache.compact()
    assert "'v1'" in str(caught.value)
    assert "'v2'" not in str(caught.value)
    cache.compact(drop_tags=True)
    assert not any("'v2'" in message for message in caplog.messages)
    assert [*cache.tags] == ["v2"]
    assert not traces_in(path, traces_of(GONE))
    old = featcache.open(path, version="v2", verify="arrays")
    assert old.annotation("speaker")[list(old).index(id_of(LEFT[0]))] == "anna"
    assert_holds(old, oracle(LEFT))
    append(path, range(30, 32))
    assert_holds(featcache.open(path, version="v2", verify="arrays"), oracle(LEFT))
    check_cache(path, [*LEFT, 30, 31])
    featcache.open(path).compact()  # nothing is in the way
    assert [*featcache.open(path).tags] == ["v2"]


def test_a_tag_whose_files_have_deleted_bytes_says_so(path: Path) -> None:
    deleted(path)
    featcache.open(path).tag("v1")
    append(path, range(30, 32))
    with pytest.raises(CacheError, match="'v1': none of them, but its files have their bytes"):
        featcache.open(path).compact()


def test_a_tag_that_holds_nothing_deleted_survives(path: Path) -> None:
    featcache.open(path).tag("v1")
    append(path, range(20, 23))
    featcache.open(path).compact()
    assert_holds(featcache.open(path, version="v1", verify="arrays"), oracle(ALL))
    check_cache(path, range(23))
    # its parts are still there, and what is deleted now is in them
    featcache.open(path).delete([id_of(1)])
    with pytest.raises(CacheError, match="'v1'"):
        featcache.open(path).compact()
    featcache.open(path).compact(drop_tags=True)
    assert not traces_in(path, traces_of([1]))
    check_cache(path, [number for number in range(23) if number != 1])


def test_a_tag_that_holds_replaced_bytes_is_in_the_way(path: Path) -> None:
    featcache.open(path).tag("v1")
    featcache.open(path).compact()  # now the tag has parts of its own
    deleted(path)
    append(path, GONE, shift=1000)
    with pytest.raises(CacheError, match="'v1': 3 utterances"):
        featcache.open(path).compact()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_tag_of_an_overwritten_cache_is_in_the_way_of_what_was_replaced(
    path: Path, when: str
) -> None:
    """Its bytes of an utterance that was deleted and written again are not those of now."""
    featcache.open(path).tag("old")
    if when == "before":
        deleted(path)
    with CacheWriter(path, two_features(), {"model": "other"}, overwrite=True) as writer:
        write(writer, LEFT)
        for number in GONE:
            writer.write(id_of(number), arrays_of(number + 1000 * (when == "before")))
    if when == "after":
        featcache.open(path).compact()  # it has the same bytes
        deleted(path)
        with CacheWriter(path, two_features(), {"model": "other"}) as writer:
            for number in GONE:
                writer.write(id_of(number), arrays_of(number + 1000))
    with pytest.raises(CacheError, match="'old': 3 utterances"):
        featcache.open(path).compact()
    featcache.open(path).compact(drop_tags=True)
    assert not traces_in(path, traces_of(GONE))
    expected = oracle(ALL) | {id_of(number): arrays_of(number + 1000) for number in GONE}
    assert_holds(featcache.open(path, verify="arrays"), expected)


def test_what_was_set_aside_is_told_of(path: Path) -> None:
    shutil.copytree(path / PARTS / parts_of(path)[0], path / PARTS / "20200101T000000-0.damaged")
    cache = deleted(path)
    with pytest.raises(CacheError, match=r"is compacted, but .*-0\.damaged'; remove them"):
        cache.compact()
    check_cache(path, LEFT)


@pytest.mark.parametrize("content", [None, "array.bin"])
@pytest.mark.parametrize("locked", [False, True])
def test_a_part_that_is_begun_meanwhile_is_in_nobodys_way(
    path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, locked: bool
) -> None:
    """By another thread or process, at any moment: nothing that was deleted can lie in it."""
    part, locks = path / PARTS / "20300101T000000-00000000", ExitStack()
    synced = sync_directory

    def begin_a_part(directory: Path) -> None:
        if not part.exists():
            part.mkdir()
            if locked:
                locks.enter_context(WriterLock(part))
            if content is not None:
                (part / content).touch()
        synced(directory)

    cache = deleted(path)
    monkeypatch.setattr(compacting, "sync_directory", begin_a_part)
    with locks:
        cache.compact()
        assert part.is_dir()
    assert not traces_in(path, traces_of(GONE))
    check_cache(path, LEFT)


def test_nothing_is_compacted_while_a_part_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was begun between the recovery and the compaction is told of before anything."""
    part, locks = path / PARTS / "20300101T000000-00000000", ExitStack()
    compacts = compacting.compact

    def begin_a_part_first(*given: Any) -> None:
        part.mkdir()
        locks.enter_context(WriterLock(part))
        (part / "array.bin").touch()
        compacts(*given)

    cache = deleted(path)
    before = parts_of(path)
    monkeypatch.setattr(edit, "compact_parts", begin_a_part_first)
    with locks, pytest.raises(CacheLockedError, match="still being written"):
        cache.compact()
    assert [name for name in parts_of(path) if name != part.name] == before


def test_parts_of_an_overwrite_that_was_given_up_go(path: Path) -> None:
    writer = CacheWriter(path, two_features(), {"model": "new"}, overwrite=True)
    write(writer, GONE)
    writer._work.keep()
    with CacheWriter(path, two_features(), FINGERPRINT):
        pass  # gives it up
    deleted(path).compact()
    assert not traces_in(path, traces_of(GONE))
    check_cache(path, LEFT)


def test_damaged_arrays_are_refused_by_name_and_nothing_changes(path: Path) -> None:
    index = featcache.open(path).opened.index
    row = featcache.open(path).opened.row(id_of(4))
    columns = index.features["fbank"]
    first = int(columns.first[row])
    container = path / index.containers.path(int(columns.container[first]))
    cache = deleted(path)
    data = bytearray(container.read_bytes())
    data[int(columns.offset[first])] ^= 1
    container.write_bytes(data)
    before = parts_of(path)
    with pytest.raises(CorruptCacheError, match="utterance 'spk4/utt-4', feature 'fbank'"):
        cache.compact()
    assert parts_of(path) == before
    assert sorted(featcache.open(path)) == sorted(map(id_of, LEFT))


def test_a_disk_without_room_is_refused_before_anything_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = deleted(path)
    before = parts_of(path)
    usage = shutil.disk_usage(path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(StorageFullError, match=r"1,000 bytes are free .* nothing was changed"):
        cache.compact()
    assert parts_of(path) == before
    monkeypatch.undo()
    check_cache(path, LEFT)


class Killed(BaseException):
    """A process ends here."""


def kill_in(module: object, name: str, monkeypatch: pytest.MonkeyPatch, *, after: bool) -> None:
    original: Callable[..., object] = getattr(module, name)

    def killed(*args: object, **kwargs: object) -> object:
        if after:
            original(*args, **kwargs)
        raise Killed

    monkeypatch.setattr(module, name, killed)


def compact_until_killed(path: Path, copy: Path) -> None:
    """Compact, and copy what is on disk at the moment of the kill, before anything is undone."""
    with pytest.raises(Killed):
        featcache.open(path).compact()
    shutil.copytree(path, copy)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", ["rewrite", "publish"])
def test_compacting_goes_on_where_it_was_killed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    """A part that is sealed counts in place of the others, published or not."""
    deleted(path)
    with monkeypatch.context() as patched:
        kill_in(compacting, step, patched, after=after)
        compact_until_killed(path, tmp_path / "killed")
    for copy in (path, tmp_path / "killed"):
        check_cache(copy, LEFT)
        append(copy, range(30, 32))  # writes what is deleted by none
        check_cache(copy, [*LEFT, 30, 31])
        featcache.open(copy).delete([id_of(30)])
        featcache.open(copy).compact()
        check_cache(copy, [*LEFT, 31])
        assert not traces_in(copy, traces_of([*GONE, 30]))


def test_an_unfinished_copy_counts_for_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted(path)
    with monkeypatch.context() as patched:
        kill_in(OpenPart, "seal", patched, after=False)
        patched.setattr(OpenPart, "discard", lambda part: (part.commit(), part.release()))
        compact_until_killed(path, tmp_path / "killed")
    check_cache(tmp_path / "killed", LEFT)
    assert len(parts_of(tmp_path / "killed")) == 5
    append(tmp_path / "killed", [30])
    check_cache(tmp_path / "killed", [*LEFT, 30])
    assert len(parts_of(tmp_path / "killed")) == 5


def test_old_parts_that_a_killed_publish_left_do_not_come_back(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deleted(path)
    with monkeypatch.context() as patched:
        kill_in(publish, "remove_superseded", patched, after=False)
        compact_until_killed(path, tmp_path / "killed")
    killed = tmp_path / "killed"
    assert len(parts_of(killed)) == 5
    check_cache(killed, LEFT)
    caplog.set_level(logging.WARNING)
    append(killed, [30])
    check_cache(killed, [*LEFT, 30])
    assert len(parts_of(killed)) == 2
    assert "twice" not in caplog.text


def test_a_lost_manifest_brings_nothing_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a part and those that it replaced, the part counts."""
    deleted(path)
    with monkeypatch.context() as patched:
        kill_in(publish, "remove_superseded", patched, after=False)
        with pytest.raises(Killed):
            featcache.open(path).compact()
    (path / "featcache.json").unlink()
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        assert sorted(map(id_of, LEFT)) == sorted(id for id in map(id_of, ALL) if id in writer)
    check_cache(path, LEFT)


def test_a_damaged_copy_that_is_removed_does_not_bring_back_what_a_tag_kept(path: Path) -> None:
    featcache.open(path).tag("v1")
    featcache.open(path).compact()
    (copy,) = read_manifest(path).parts
    shutil.rmtree(path / PARTS / copy.name)
    with CacheWriter(path, two_features(), FINGERPRINT) as writer:
        assert not any(id in writer for id in map(id_of, ALL))
    assert_holds(featcache.open(path, version="v1", verify="arrays"), oracle(ALL))


def test_many_appends_leave_few_parts_and_copy_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    original = compact.rewrite

    def counted(*args: object) -> None:
        copied.append(sum(part.entry.rows for part in args[3]))  # type: ignore[attr-defined]
        original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(compacting, "rewrite", counted)
    for number in range(200):
        append(tmp_path, [number])
    assert len(parts_of(tmp_path)) <= 3 * 7 + 8
    assert len(read_manifest(tmp_path).parts) <= 3 * 7
    assert sum(copied) <= 3 * 200
    check_cache(tmp_path, range(200))


def test_small_parts_of_others_are_merged_as_they_are_published(tmp_path: Path) -> None:
    make_cache(tmp_path, [])
    for number in range(8):
        with PartWriter(tmp_path, two_features(), FINGERPRINT) as writer:
            write(writer, [number])
        assert publish_sealed(tmp_path)
    assert len(read_manifest(tmp_path).parts) == 1
    check_cache(tmp_path, range(8))


def test_a_reader_of_the_generation_before_still_finds_the_merged_parts(tmp_path: Path) -> None:
    for number in range(7):
        append(tmp_path, [number])
    cache = featcache.open(tmp_path)
    append(tmp_path, [7])
    assert len(read_manifest(tmp_path).parts) == 1
    assert len(parts_of(tmp_path)) >= 8
    assert_holds(cache, oracle(range(7)))
    append(tmp_path, [8])
    append(tmp_path, [9])
    assert len(parts_of(tmp_path)) == 3


def test_small_parts_that_cannot_be_copied_stay_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for number in range(7):
        append(tmp_path, [number])
    monkeypatch.setattr(
        compacting, "check_space", lambda *_: (_ for _ in ()).throw(StorageFullError("no room"))
    )
    append(tmp_path, [7])
    assert "stay as they are: no room" in caplog.text
    monkeypatch.undo()
    assert len(read_manifest(tmp_path).parts) == 8
    append(tmp_path, [8])
    assert len(read_manifest(tmp_path).parts) == 1
    check_cache(tmp_path, range(9))


def test_statistics_of_merged_parts_are_those_of_all_frames(tmp_path: Path) -> None:
    for number in range(17):
        append(tmp_path, [number])
    frames = np.concatenate([arrays_of(number)["fbank"] for number in range(17)], dtype=np.float64)
    np.testing.assert_allclose(
        featcache.open(tmp_path).stats("fbank").mean, frames.mean(axis=0), rtol=1e-12
    )

"""Files kept with a build: found by their role, through kills and overwrites, never another's."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
from store_helpers import FINGERPRINT, check_cache, id_of, make_cache, two_features, write

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CacheError, ClosedError, ConfigError, CorruptCacheError
from featcache.format import (
    KEPT_FILE,
    MANIFESTS,
    NAME,
    manifest_file,
    read_building_file,
    read_manifest,
    write_manifest,
)
from featcache.format import manifest as manifests
from featcache.writing.part_writer import PartWriter

OLD, NEW = b"an old probe", b"a new probe \0 of any bytes"


def open_writer(
    path: Path, fingerprint: dict[str, object] = FINGERPRINT, *, overwrite: bool = False
) -> CacheWriter:
    return CacheWriter(path, two_features(), fingerprint, overwrite=overwrite)


def file_in(path: Path, role: str = "probe") -> bytes | None:
    """What readers see of a role; all files are verified."""
    return featcache.open(path, verify="columns").opened.file(role)


def on_disk(path: Path) -> set[bytes]:
    """The content of all files of roles that lie in a cache."""
    return {file.read_bytes() for file in path.iterdir() if KEPT_FILE.fullmatch(file.name)}


def die(writer: CacheWriter) -> None:
    """Let go of all locks, as the end of the process would; nothing is published."""
    writer._parts.commit()
    writer._work.close(False, publish=False)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with a probe."""
    with open_writer(tmp_path) as writer:
        writer.keep_file("probe", OLD)
        write(writer, range(3))
    return tmp_path


def test_a_file_is_read_by_its_role(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.keep_file("probe", NEW)
        writer.keep_file("made-from", b"{}")
        write(writer, [1])
    assert (file_in(tmp_path), file_in(tmp_path, "made-from")) == (NEW, b"{}")
    names = sorted(path.name for path in tmp_path.iterdir() if KEPT_FILE.fullmatch(path.name))
    assert [name.partition("-")[0] for name in names] == ["made", "probe"]
    assert [name.rpartition(".")[2] for name in names] == ["json", "bin"]
    assert sorted(read_manifest(tmp_path).files) == names


def test_a_cache_without_files_has_none(tmp_path: Path) -> None:
    make_cache(tmp_path, range(2))
    assert (file_in(tmp_path), read_building_file(tmp_path, "probe")) == (None, None)
    assert b"building_files" not in (tmp_path / NAME).read_bytes()


def test_it_is_the_builds_from_the_moment_it_is_kept(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    writer.keep_file("probe", NEW)
    assert read_building_file(tmp_path, "probe") == NEW
    assert file_in(tmp_path) is None
    write(writer, [1])
    die(writer)
    with open_writer(tmp_path):
        assert read_building_file(tmp_path, "probe") == NEW
    assert file_in(tmp_path) == read_building_file(tmp_path, "probe") == NEW
    check_cache(tmp_path, [1])


def test_a_file_alone_is_published_too(cache: Path) -> None:
    with open_writer(cache) as writer:
        writer.keep_file("made-from", b"1")
    assert (file_in(cache), file_in(cache, "made-from")) == (OLD, b"1")


def test_a_file_takes_the_place_of_the_one_of_its_role(cache: Path) -> None:
    with open_writer(cache) as writer:
        for data in (b"1", b"2", NEW):
            writer.keep_file("probe", data)
            assert read_building_file(cache, "probe") == data
        assert on_disk(cache) == {OLD, NEW}
        assert file_in(cache) == OLD
    assert file_in(cache) == NEW
    assert on_disk(cache) == {OLD, NEW}  # for readers of the generation before
    with open_writer(cache) as writer:
        write(writer, [7])
    assert on_disk(cache) == {NEW}
    assert file_in(cache) == NEW


def test_the_same_file_is_not_kept_twice(cache: Path) -> None:
    before = (cache / NAME).read_bytes()
    with open_writer(cache) as writer:
        writer.keep_file("probe", OLD)
        assert (cache / NAME).read_bytes() == before


def test_readers_of_the_generation_before_read_its_file(cache: Path) -> None:
    opened = featcache.open(cache).opened
    with open_writer(cache) as writer:
        writer.keep_file("probe", NEW)
    assert (opened.file("probe"), file_in(cache)) == (OLD, NEW)


def test_what_a_tag_names_keeps_its_files(cache: Path) -> None:
    manifest = read_manifest(cache)
    tagged = manifest.name
    write_manifest(cache, dataclasses.replace(manifest, tags={"paper": tagged}))
    for number in range(3):
        with open_writer(cache, overwrite=True) as writer:
            writer.keep_file("probe", NEW)
            write(writer, [number])
    paper = read_manifest(cache, manifest_file(tagged))
    assert manifests.read_kept(cache, paper.files, "probe") == OLD
    assert (file_in(cache), on_disk(cache)) == (NEW, {OLD, NEW})


# Overwriting


def test_an_overwrite_does_not_take_the_old_files_along(cache: Path) -> None:
    with open_writer(cache, overwrite=True) as writer:
        assert read_building_file(cache, "probe") is None
        write(writer, [5])
    assert file_in(cache) is None
    assert on_disk(cache) == {OLD}  # for readers of the generation before
    with open_writer(cache) as writer:
        write(writer, [6])
    assert on_disk(cache) == set()


def test_an_overwrite_that_was_killed_has_its_file_still(cache: Path) -> None:
    writer = open_writer(cache, {"model": "other"}, overwrite=True)
    writer.keep_file("probe", NEW)
    write(writer, [5])
    die(writer)
    assert (file_in(cache), read_building_file(cache, "probe")) == (OLD, NEW)
    with open_writer(cache, {"model": "other"}, overwrite=True) as writer:
        assert read_building_file(cache, "probe") == NEW
        assert id_of(5) in writer
        assert file_in(cache) == OLD
    assert file_in(cache) == NEW


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_file_of_an_overwrite_that_is_given_up_is_removed(cache: Path, overwrite: bool) -> None:
    """For the cache that stands, or for another overwrite."""
    writer = open_writer(cache, {"model": "other"}, overwrite=True)
    writer.keep_file("probe", NEW)
    write(writer, [5])
    die(writer)
    fingerprint: dict[str, object] = {"model": "third"} if overwrite else FINGERPRINT
    with open_writer(cache, fingerprint, overwrite=overwrite):
        assert read_building_file(cache, "probe") == (None if overwrite else OLD)
        assert on_disk(cache) == {OLD}
    assert file_in(cache) == (None if overwrite else OLD)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize(
    ("fingerprint", "overwrite"), [({"model": "other"}, False), (FINGERPRINT, True)]
)
def test_the_file_of_an_empty_cache_does_not_outlive_it(
    tmp_path: Path, fingerprint: dict[str, object], overwrite: bool, published: bool
) -> None:
    """A cache in which nothing is stored is begun anew under another fingerprint, or on demand."""
    writer = open_writer(tmp_path)
    writer.keep_file("probe", OLD)
    if published:
        writer.publish()
    die(writer)
    with open_writer(tmp_path, fingerprint, overwrite=overwrite):
        assert read_building_file(tmp_path, "probe") is None
    assert file_in(tmp_path) is None


def test_the_file_of_an_empty_cache_does_not_outlive_its_declarations(tmp_path: Path) -> None:
    with CacheWriter(tmp_path, [FeatureStorageConfig("fbank")]) as writer:
        writer.keep_file("probe", OLD)
    with CacheWriter(tmp_path, [FeatureStorageConfig("units")]):
        assert read_building_file(tmp_path, "probe") is None
    assert file_in(tmp_path) is None


def test_what_is_committed_keeps_its_file_when_it_is_overwritten(tmp_path: Path) -> None:
    """For the overwrite of a cache that was never published goes on with what was committed."""
    writer = open_writer(tmp_path)
    writer.keep_file("probe", OLD)
    write(writer, [1])
    die(writer)
    with open_writer(tmp_path, overwrite=True) as writer:
        assert id_of(1) in writer
        assert read_building_file(tmp_path, "probe") == OLD


# Writers that give up or die


def test_what_a_writer_kept_goes_when_it_gives_up(cache: Path) -> None:
    writer = open_writer(cache)
    writer.keep_file("probe", NEW)
    writer.abort()
    assert (file_in(cache), read_building_file(cache, "probe")) == (OLD, OLD)
    assert on_disk(cache) == {OLD}
    writer.abort()
    writer = open_writer(cache)
    writer.keep_file("probe", NEW)
    writer.publish()
    writer.abort()
    assert file_in(cache) == NEW


def test_a_file_stays_with_the_parts_of_others_when_its_writer_gives_up(cache: Path) -> None:
    writer = open_writer(cache, overwrite=True)
    writer.keep_file("probe", NEW)
    with PartWriter(cache, two_features(), FINGERPRINT) as part:
        write(part, [7])
    writer.abort()
    assert (file_in(cache), read_building_file(cache, "probe")) == (OLD, NEW)


def test_a_stray_file_of_a_killed_writer_is_removed(cache: Path) -> None:
    stray = cache / "probe-0123abcd.bin"
    stray.write_bytes(b"half")
    others = [cache / name for name in ("probe-xyz.bin", "probe-0123abcd.json", "made-from.json")]
    for other in others:
        other.write_bytes(b"not ours")
    with open_writer(cache):
        assert not stray.exists()
    assert all(other.exists() for other in others)
    assert file_in(cache) == OLD


def test_a_directory_in_which_only_files_of_roles_lie_is_taken(tmp_path: Path) -> None:
    (tmp_path / "made-from-0123abcd.json").write_bytes(b"{}")
    make_cache(tmp_path, [1])
    assert on_disk(tmp_path) == set()


def test_while_a_manifest_cannot_be_read_no_file_is_removed(cache: Path) -> None:
    with open_writer(cache) as writer:
        writer.keep_file("probe", NEW)
    previous = cache / manifest_file(str(read_manifest(cache).previous))
    data = previous.read_bytes()
    previous.write_bytes(data[:-2])
    with open_writer(cache) as writer:
        assert on_disk(cache) == {OLD, NEW}
        previous.write_bytes(data)
        write(writer, [4])
    assert on_disk(cache) == {NEW}
    assert len(list((cache / MANIFESTS).iterdir())) == 2


# Damage


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "lost"])
def test_a_file_that_is_not_what_was_kept_is_refused(cache: Path, damage: str) -> None:
    (path,) = (file for file in cache.iterdir() if KEPT_FILE.fullmatch(file.name))
    spoil(path, damage)
    opened = featcache.open(cache).opened
    for read in (opened.file, partial(read_building_file, cache)):
        with pytest.raises(CorruptCacheError, match=rf"{path.name}.*put it back"):
            read("probe")
    with pytest.raises(CorruptCacheError, match=path.name):
        featcache.open(cache, verify="columns")
    check_ids(cache)


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "lost"])
def test_damage_of_a_file_that_waits_to_be_published_is_found(cache: Path, damage: str) -> None:
    writer = open_writer(cache, overwrite=True)
    writer.keep_file("probe", NEW)
    die(writer)
    (name,) = read_manifest(cache).building_files
    spoil(cache / name, damage)
    with pytest.raises(CorruptCacheError, match=name):
        featcache.open(cache, verify="columns")
    with pytest.raises(CorruptCacheError, match=name):
        read_building_file(cache, "probe")
    assert featcache.open(cache).opened.file("probe") == OLD


def spoil(path: Path, damage: str) -> None:
    data = path.read_bytes()
    match damage:
        case "flipped":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "cut":
            path.write_bytes(data[:-1])
        case "longer":
            path.write_bytes(data + b"\0")
        case "lost":
            path.unlink()


def check_ids(cache: Path) -> None:
    assert sorted(featcache.open(cache)) == sorted(map(id_of, range(3)))


# Misuse


def test_another_role_is_refused(cache: Path) -> None:
    with open_writer(cache) as writer:
        with pytest.raises(ConfigError, match=r"no role of a file is 'prob'.*'probe'"):
            writer.keep_file("prob", b"")
        with pytest.raises(ConfigError, match=r"no role of a file is '\.\./x'"):
            writer.keep_file("../x", b"")
    with pytest.raises(ConfigError, match="no role of a file is 'prob'"):
        featcache.open(cache).opened.file("prob")


def test_a_file_that_is_too_large_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = "featcache.writing.cache_writer.MOST_BYTES"
    monkeypatch.setattr(writing, 10)
    with open_writer(cache) as writer:
        writer.keep_file("probe", bytes(10))
        with pytest.raises(ConfigError, match="has 10 bytes at most, not 11"):
            writer.keep_file("probe", bytes(11))
    monkeypatch.setattr(manifests, "MOST_BYTES", 9)
    with pytest.raises(CorruptCacheError, match="probe-"):
        featcache.open(cache).opened.file("probe")


def test_a_closed_writer_keeps_nothing(cache: Path) -> None:
    with open_writer(cache) as writer:
        pass
    with pytest.raises(ClosedError):
        writer.keep_file("probe", NEW)
    assert on_disk(cache) == {OLD}


def test_without_a_cache_there_is_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="is not a cache"):
        read_building_file(tmp_path, "probe")

"""A path that holds no cache, or one of a newer format, is never read as one and never written
into.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from store_helpers import check_cache, make_cache, two_features

import featcache
from featcache import CacheWriter
from featcache.errors import CorruptCacheError, NotACacheError
from featcache.format import pack_json, unpack_json


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        NotACacheError, match=rf"'{re.escape(str(tmp_path))}/exp/train' does not exist"
    ):
        featcache.open(tmp_path / "exp" / "train")


def test_a_file_is_no_cache(tmp_path: Path) -> None:
    file = tmp_path / "train"
    file.write_text("mine")
    with pytest.raises(NotACacheError, match=r"train' is a file"):
        featcache.open(file)
    with pytest.raises(NotACacheError, match=r"train' is a file; a cache is a directory"):
        CacheWriter(file, two_features())
    with pytest.raises(
        NotACacheError, match=r"train/valid' cannot be made a directory: .*Not a directory"
    ):
        CacheWriter(file / "valid", two_features())
    assert file.read_text() == "mine"


def test_a_directory_of_others_is_no_cache_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(NotACacheError, match=r"is not a cache: it holds no featcache.json"):
        featcache.open(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(
            NotACacheError,
            match=r"holds other files \('thesis.tex'\); give a new or empty directory",
        ):
            CacheWriter(tmp_path, two_features(), overwrite=overwrite)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_empty_directory_becomes_a_cache(tmp_path: Path) -> None:
    make_cache(tmp_path, range(3))
    check_cache(tmp_path, range(3))


def test_a_link_to_nowhere_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(NotACacheError, match="link"):
        CacheWriter(tmp_path / "link", two_features())


def test_a_cache_behind_a_link_and_a_relative_path_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache(tmp_path / "far" / "train", range(3))
    (tmp_path / "link").symlink_to(tmp_path / "far")
    monkeypatch.chdir(tmp_path)
    make_cache(Path("link/train"), range(3, 5))
    check_cache(Path("far/train"), range(5))


def test_a_cache_may_be_moved_and_copied(tmp_path: Path) -> None:
    make_cache(tmp_path / "here", range(3))
    (tmp_path / "here").rename(tmp_path / "there")
    check_cache(tmp_path / "there", range(3))
    make_cache(tmp_path / "there", range(3, 5))
    check_cache(tmp_path / "there", range(5))
    text = b"".join(path.read_bytes() for path in (tmp_path / "there").rglob("*.json*"))
    assert str(tmp_path).encode() not in text  # no absolute paths


def rewrite(path: Path, **changes: object) -> None:
    manifest = path / "featcache.json"
    content = unpack_json(manifest.read_bytes(), "manifest")
    assert isinstance(content, dict)
    manifest.write_bytes(pack_json(content | changes))


@pytest.mark.parametrize("version", ["1", None, [], -1, True, 1.5])
def test_a_version_that_is_no_version_is_damage(tmp_path: Path, version: object) -> None:
    make_cache(tmp_path, range(3))
    rewrite(tmp_path, version=version)
    with pytest.raises(CorruptCacheError, match=r"featcache.json' is damaged"):
        featcache.open(tmp_path)


@pytest.mark.parametrize("content", [{}, {"format": "zarr"}, [], None, "featcache", 7])
def test_a_manifest_of_others_is_none(tmp_path: Path, content: object) -> None:
    (tmp_path / "featcache.json").write_bytes(pack_json(content))
    with pytest.raises(NotACacheError, match="is not featcache's"):
        featcache.open(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"null", json.dumps({"format": "featcache", "version": 1}).encode()]
)
def test_a_manifest_without_its_checksum_is_damaged(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "featcache.json").write_bytes(data)
    with pytest.raises(CorruptCacheError, match="checksum does not match"):
        featcache.open(tmp_path)
    with pytest.raises(CorruptCacheError, match="checksum does not match"):
        CacheWriter(tmp_path, two_features())

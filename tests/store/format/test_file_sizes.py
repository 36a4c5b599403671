"""Sizes in the manifest: each file that a generation leads to has its own, after whatever edit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from feature_set_helpers import add
from golden_caches import CHANGED_FEATURES, FINGERPRINT, FIRST, GOLDEN, make_changed

import featcache
from featcache import CacheWriter
from featcache.errors import CorruptCacheError
from featcache.format import (
    FileSize,
    files_of,
    kept_manifests,
    manifest_file,
    read_manifest,
    size_of,
    write_manifest,
)


def tells_all(cache: Path, file: str = "featcache.json") -> None:
    """See that a manifest tells the size of each file that it leads to, and of nothing else."""
    manifest = read_manifest(cache, file)
    assert manifest.sizes.keys() == {path for path, _ in files_of(manifest)}
    for path, size in manifest.sizes.items():
        assert size.nbytes == (cache / path).stat().st_size
        assert size == size_of(cache, path)
        assert (size.footer_bytes > 0) == path.endswith(".columns")


def continued(cache: Path) -> None:
    with CacheWriter(cache, CHANGED_FEATURES, FINGERPRINT) as writer:
        writer.delete([FIRST[1]])


def written_over(cache: Path) -> None:
    with CacheWriter(cache, CHANGED_FEATURES, {"model": "new"}, overwrite=True) as writer:
        writer.keep_file("probe", b"new")


def repaired(cache: Path) -> None:
    featcache.open(cache).tag("before")
    continued(cache)
    for damaged in cache.glob("parts/*/fbank.npy"):
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    featcache.store.repair(cache)
    assert "before" in read_manifest(cache).tags


EDITS: dict[str, Callable[[Path], object]] = {
    "written": lambda cache: None,
    "continued": continued,
    "annotated": lambda cache: featcache.open(cache).annotate({"a": {"speaker": "ben"}}),
    "tagged": lambda cache: featcache.open(cache).tag("paper"),
    "compacted": lambda cache: featcache.open(cache).compact(),
    "written over": written_over,
    "repaired": repaired,
}


@pytest.mark.parametrize("edit", EDITS)
def test_each_file_has_its_size_after(edit: str, tmp_path: Path) -> None:
    cache = make_changed(tmp_path / "cache")
    EDITS[edit](cache)
    tells_all(cache)
    for name in kept_manifests(cache):
        if edit != "written over" or name == read_manifest(cache).name:  # those parts are gone
            tells_all(cache, manifest_file(name))


def test_the_sizes_of_each_feature_set_are_told(tmp_path: Path) -> None:
    cache = make_changed(tmp_path / "cache")
    add(cache, range(3))
    for directory in (cache, *(cache / "sets").glob("*/")):
        tells_all(directory)


@pytest.mark.parametrize(
    "name", ["index-", "probe-", "part.json", "index.columns", "tombstones-", "stamps-"]
)
def test_a_file_of_another_size_than_is_told_is_damaged(name: str, tmp_path: Path) -> None:
    cache = shutil.copytree(GOLDEN / "changed", tmp_path / "cache")
    manifest = read_manifest(cache)
    path, size = next(each for each in manifest.sizes.items() if name in each[0])
    told = f"{path}' is damaged: it has {size.nbytes:,} bytes"
    for wrong in (size._replace(nbytes=size.nbytes + 1), FileSize(size.nbytes, 1)):
        write_manifest(cache, replace(manifest, sizes={**manifest.sizes, path: wrong}), keep=True)
        with pytest.raises(CorruptCacheError, match=told):
            featcache.open(cache, verify="columns")


def test_a_cache_of_before_without_sizes_is_read_and_gets_them(tmp_path: Path) -> None:
    cache = shutil.copytree(GOLDEN / "changed", tmp_path / "cache")
    write_manifest(cache, replace(read_manifest(cache), sizes={}), keep=True)
    featcache.open(cache, verify="arrays")
    assert b'"sizes"' not in (cache / "featcache.json").read_bytes()
    featcache.open(cache).tag("paper")
    tells_all(cache)

"""Sources that no kind recognises, or that the arguments do not fit: what is said, and when."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from npy_folders import check_arrays, save_all, some_arrays

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import AdoptionError, ConfigError, CorruptCacheError, StaleCacheError
from featcache.registry import kind_names

ARRAYS = some_arrays()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_all(tmp_path / "fbank", ARRAYS)


@pytest.mark.parametrize("name", ["README", "readme.md", ".DS_Store", "spk1/notes.TXT"])
def test_a_readme_beside_the_arrays_is_no_other_kind(
    tmp_path: Path, folder: Path, name: str
) -> None:
    (folder / name).write_text("of whom these are")
    check_arrays(featcache.adopt(folder, tmp_path / "cache"), ARRAYS)


def test_a_readme_beside_files_of_hdf5_is_no_other_kind(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    with h5py.File(tmp_path / "all/feats.h5", "w") as file:
        file["utt-1"] = np.ones((3, 5), np.float32)
    (tmp_path / "all/README.md").write_text("of whom these are")
    assert list(featcache.adopt(tmp_path / "all", tmp_path / "cache")) == ["utt-1"]


def test_what_an_unknown_folder_holds_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    with pytest.raises(AdoptionError, match="no file is there"):
        featcache.adopt(folder, tmp_path / "cache")
    for number in range(9):
        (folder / f"{number}.xyz").touch()
    with pytest.raises(AdoptionError, match=r"such as '0\.xyz', .*\.\.\.; .* give kind=, one of"):
        featcache.adopt(folder, tmp_path / "cache")


def test_a_link_is_the_reason_that_is_told(tmp_path: Path, folder: Path) -> None:
    (folder / "spk0").mkdir(exist_ok=True)
    (folder / "spk0/other.npy").symlink_to(folder / "utt-4.npy")
    with pytest.raises(AdoptionError, match=r"spk0/other\.npy' is a link"):
        featcache.adopt(folder, tmp_path / "cache")


def test_links_are_copied_as_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """As HuggingFace's cache and annexes have them."""
    (tmp_path / "links").mkdir()
    for path in folder.glob("*.npy"):
        (tmp_path / "links" / path.name).symlink_to(path)
    with pytest.raises(AdoptionError, match=r"is a link; .*: (shutil\.copytree\(.*\))$") as told:
        featcache.adopt(tmp_path / "links", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    exec(str(told.value).rpartition(": ")[2], {"shutil": shutil})
    cache = featcache.adopt(tmp_path / "copy", tmp_path / "cache")
    assert set(cache) == {path.stem for path in folder.glob("*.npy")}
    (tmp_path / "links/none.npy").symlink_to(tmp_path / "nowhere")
    (tmp_path / "links/a.npy").symlink_to(tmp_path / "nowhere")
    with pytest.raises(AdoptionError, match=r"a\.npy' is a link that leads nowhere; remove it"):
        featcache.adopt(tmp_path / "links", tmp_path / "cache-2")


def test_other_arrays_behind_the_first_files_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_all(tmp_path / "all", {f"u{n:03}": np.ones((3, 2), np.float32) for n in range(100)})
    for number in range(9):
        np.savez(tmp_path / f"all/z{number}.npz", feats=np.ones((3, 2), np.float32))
    cache = featcache.adopt(tmp_path / "all", tmp_path / "cache")
    assert len(cache) == 100
    assert "9 files of arrays that are not called .npy are left out" in caplog.text
    assert "the first is 'z0.npz'" in caplog.text


@pytest.mark.parametrize("end", [".npy", ".pt"])
def test_files_of_one_id_are_both_named(tmp_path: Path, end: str) -> None:
    other = {".npy": ".NPY", ".pt": ".pth"}[end]
    (tmp_path / "all").mkdir()
    for path in (tmp_path / f"all/u1{end}", tmp_path / f"all/u1{other}"):
        with path.open("wb") as file:
            np.save(file, np.ones((3, 2), "f4"))
    told = " and ".join(map(repr, sorted((f"u1{end}", f"u1{other}"))))
    with pytest.raises(AdoptionError, match=f"utterance 'u1', feature 'feats' twice: {told}"):
        featcache.adopt(tmp_path / "all", tmp_path / "cache", kind=end[1:])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="who may read all")
@pytest.mark.parametrize("door", [featcache.adopt, featcache.convert])
@pytest.mark.parametrize("name", ["all.pkl", "all.npz", "all.parquet", "all.h5", "all/u1.npy", ""])
def test_what_may_not_be_read_is_named(tmp_path: Path, door: Any, name: str) -> None:
    (tmp_path / "all").mkdir()
    path = tmp_path / (name or "all")
    if name:
        path.write_bytes(b"x")
    path.chmod(0)
    try:
        with pytest.raises(AdoptionError, match=rf"{path.name}[/']* cannot be read: Permission"):
            door(path if path.parent == tmp_path else path.parent, tmp_path / "cache")
    finally:
        path.chmod(0o700)


@pytest.mark.parametrize("backend", ["memmap", "hdf5", "webdataset", "zarr"])
def test_a_cache_is_opened_not_adopted_nor_are_its_files(tmp_path: Path, backend: str) -> None:
    own = tmp_path / "all" / "own"
    with CacheWriter(own, [FeatureStorageConfig("feats", backend=backend)]) as writer:
        for id in ("utt-1", "utt-2"):
            writer.write(id, {"feats": np.ones((3, 5), np.float32)})
    featcache.open(own).delete(["utt-1"])
    (part,) = (own / "parts").iterdir()
    containers = [
        path for path in part.iterdir() if path.suffix in (".h5", ".tar", ".zarr", ".npy")
    ]
    for source in (own, own / "parts", part, *containers, own.parent, part / "*"):
        for kind in (None, *kind_names()):
            with pytest.raises(AdoptionError) as told:
                featcache.adopt(source, tmp_path / "cache", kind=kind)
            assert "cache of featcache" in str(told.value) or source == own.parent
        if source not in (own, own.parent):
            with pytest.raises(AdoptionError, match=r"which featcache\.open reads"):
                featcache.convert(source, tmp_path / "cache", progressbar=False)
    (own / "featcache.json").unlink()  # as one that was never published
    with pytest.raises(AdoptionError, match="cache of featcache"):
        featcache.adopt(own, tmp_path / "cache")


def test_braces_are_no_pattern(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(AdoptionError, match=r"does not exist; '\*' stands for"):
        featcache.adopt(folder / "{000..009}.tar", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["kaldi", "webdataset", "espnet", "fairseq", "lhotse", "pt"])
def test_the_wrong_kind_is_refused_with_the_source(tmp_path: Path, folder: Path, kind: str) -> None:
    with pytest.raises(AdoptionError, match=str(folder)):
        featcache.adopt(folder, tmp_path / "cache", kind=kind)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "wrong",
    [{"time_axis": 0.5}, {"time_axis": "no"}, {"pattern": 3}, {"pattern": "{id}/{id}"},
     {"feature": "a/b"}, {"feature": 3}, {"nonfinite": "no"}],
)  # fmt: skip
def test_wrong_arguments_are_told_before_files_are_read(
    tmp_path: Path, folder: Path, wrong: dict[str, Any]
) -> None:
    (folder / "bad.npy").write_bytes(b"no array")
    with pytest.raises(ConfigError):
        featcache.adopt(folder, tmp_path / "cache", **wrong)


@pytest.mark.parametrize("suffix", [".npy", ".pt"])
def test_a_file_without_a_name_is_no_utterance(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "all/spk1").mkdir(parents=True)
    (tmp_path / f"all/spk1/{suffix}").touch()
    with pytest.raises(AdoptionError, match=f"'spk1/{suffix}' has no name"):
        featcache.adopt(tmp_path / "all", tmp_path / "cache", kind=suffix[1:])


def test_an_array_that_became_a_link_is_told(tmp_path: Path, folder: Path) -> None:
    cache = featcache.adopt(folder, tmp_path / "cache")
    (folder / "utt-4.npy").rename(folder / "aside")
    (folder / "utt-4.npy").symlink_to(folder / "aside")
    with pytest.raises(CorruptCacheError, match=r"utt-4\.npy' is another one now.*adopt"):
        cache.read("utt-4", "feats")


def test_an_append_without_the_fingerprint_says_which_one(tmp_path: Path, folder: Path) -> None:
    cache = featcache.adopt(folder, tmp_path / "cache")
    with pytest.raises(StaleCacheError, match=r"give the fingerprint {'adopted': 'npy'} to append"):
        CacheWriter(cache.path, [FeatureStorageConfig("feats")])

"""Frames in one array with lengths beside it, as fairseq's scripts write them, are a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_stores import adopted, assert_holds, contents, random_arrays

from featcache.errors import AdoptionError


def dump(folder: Path, name: str, arrays: dict[str, Any], end: str = ".len") -> None:
    folder.mkdir(exist_ok=True)
    np.save(folder / f"{name}.npy", np.concatenate(list(arrays.values())))
    lengths = "".join(f"{len(array)}\n" for array in arrays.values())
    (folder / f"{name}{end}").write_text(lengths)


def write_tsv(folder: Path, name: str, ids: list[str]) -> None:
    lines = "".join(f"{id}.flac\t16000\n" for id in ids)
    (folder / f"{name}.tsv").write_text(f"/data/audio\n{lines}")


def test_shards_follow_one_another_and_the_tsv_has_the_ids(tmp_path: Path) -> None:
    arrays = {f"spk/{id}": array for id, array in random_arrays(1).items()}
    ids = list(arrays)
    source = tmp_path / "x"
    for rank in range(11):
        part = ids[len(ids) * rank // 11 : len(ids) * (rank + 1) // 11]
        dump(source, f"train_{rank}_11", {id: arrays[id] for id in part})
    write_tsv(source, "train", ids)
    before = contents(source)
    with adopted(source, tmp_path) as cache:
        assert_holds(cache, "feats", arrays)
    assert contents(source) == before


def test_one_array_without_a_tsv_has_numbers_as_ids(tmp_path: Path) -> None:
    arrays = {f"{n:08d}": np.arange(n * 3, dtype=np.int64) for n in range(4)}
    dump(tmp_path / "x", "units", arrays, ".lengths")
    with adopted(tmp_path / "x" / "units.npy", tmp_path, feature="units") as cache:
        assert_holds(cache, "units", arrays)


def test_two_splits_are_two_caches(tmp_path: Path) -> None:
    train, valid = random_arrays(2), random_arrays(3)
    source = tmp_path / "x"
    for name, arrays in (("train", train), ("valid", valid)):
        dump(source, f"{name}_0_1", arrays)
        write_tsv(source, name, list(arrays))
    with pytest.raises(AdoptionError, match="several splits"):
        adopted(source, tmp_path, kind="fairseq")
    with adopted(source / "valid_*.npy", tmp_path) as cache:
        assert_holds(cache, "feats", valid)


@pytest.mark.parametrize("lengths", ["", "3\n", "4\n-1\n", "x\n", "1e0\n", f"{1 << 70}\n"])
def test_lengths_that_do_not_fit_are_refused(tmp_path: Path, lengths: str) -> None:
    dump(tmp_path / "x", "train", {"a": np.ones((4, 2), np.float32)})
    (tmp_path / "x" / "train.len").write_text(lengths)
    with pytest.raises(AdoptionError, match="train"):
        adopted(tmp_path / "x", tmp_path)


def test_a_shard_that_is_missing_is_told(tmp_path: Path) -> None:
    for rank in (0, 2):
        dump(tmp_path / "x", f"train_{rank}_3", random_arrays(rank))
    with pytest.raises(AdoptionError, match="shard 1"):
        adopted(tmp_path / "x", tmp_path)


def test_a_tsv_of_other_utterances_is_refused(tmp_path: Path) -> None:
    dump(tmp_path / "x", "train", random_arrays(4))
    write_tsv(tmp_path / "x", "train", ["a", "b"])
    with pytest.raises(AdoptionError, match=r"train\.tsv"):
        adopted(tmp_path / "x", tmp_path)


def test_big_endian_frames_are_cut_too_and_fortran_order_is_refused(tmp_path: Path) -> None:
    arrays = {f"{n:08d}": array for n, array in enumerate(random_arrays(4).values())}
    dump(tmp_path / "x", "train", {id: array.astype(">f4") for id, array in arrays.items()})
    with adopted(tmp_path / "x", tmp_path) as cache:
        assert_holds(cache, "feats", arrays)
    whole = np.concatenate([*arrays.values()])
    np.save(tmp_path / "x" / "train.npy", np.asfortranarray(whole))
    with pytest.raises(AdoptionError, match=r"train\.npy'.* has not frame after frame"):
        adopted(tmp_path / "x", tmp_path / "new")

"""An id that two files have, in each kind of files: both are named."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import featcache
from featcache.errors import AdoptionError

Arrays = Mapping[str, NDArray[Any]]
FRAMES = np.ones((3, 2), "f4")


def npz(path: Path, arrays: Arrays) -> None:
    np.savez(path, **arrays)  # type: ignore[arg-type]


def batch(path: Path, arrays: Arrays) -> None:
    np.savez(path, feats=np.concatenate([*arrays.values()]), ids=[*arrays],
             lengths=[len(array) for array in arrays.values()])  # fmt: skip


def safetensors(path: Path, arrays: Arrays) -> None:
    pytest.importorskip("safetensors.numpy").save_file(dict(arrays), path)


def hdf5(path: Path, arrays: Arrays, **options: Any) -> None:
    with h5py.File(path, "w") as file:
        for id, array in arrays.items():
            file.create_dataset(id, data=array, **options)


def hdf5_to_copy(path: Path, arrays: Arrays) -> None:
    hdf5(path, arrays, dtype=">f4")


def parquet(path: Path, arrays: Arrays) -> None:
    pa = pytest.importorskip("pyarrow")
    columns = {"id": [*arrays], "feats": [array.tolist() for array in arrays.values()]}
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), path)


def archive(path: Path, arrays: Arrays) -> None:
    pytest.importorskip("kaldiio").save_ark(str(path), dict(arrays))


def shard(path: Path, arrays: Arrays, end: str = "feats.npy") -> None:
    with tarfile.open(path, "w") as file:
        for id, array in arrays.items():
            data = io.BytesIO()
            np.save(data, array) if end[-3:] == "npy" else torch.save(torch.from_numpy(array), data)
            info = tarfile.TarInfo(f"{id}.{end}")
            info.size = len(data.getvalue())
            file.addfile(info, io.BytesIO(data.getvalue()))


def shard_of_tensors(path: Path, arrays: Arrays) -> None:
    shard(path, arrays, "feats.pth")


KINDS: dict[str, tuple[str, Callable[[Path, Arrays], None]]] = {
    "npz": (".npz", npz),
    "batches in npz": (".npz", batch),
    "safetensors": (".safetensors", safetensors),
    "HDF5": (".h5", hdf5),
    "HDF5 to copy": (".h5", hdf5_to_copy),
    "Parquet": (".parquet", parquet),
    "Kaldi": (".ark", archive),
    "shards": (".tar", shard),
    "shards of tensors": (".tar", shard_of_tensors),
}


@pytest.mark.parametrize("what", KINDS)
def test_both_files_of_an_id_are_named(tmp_path: Path, what: str) -> None:
    end, save = KINDS[what]
    (tmp_path / "all").mkdir()
    save(tmp_path / f"all/part1{end}", {"u1": FRAMES, "u2": FRAMES[1:]})
    save(tmp_path / f"all/part2{end}", {"u3": FRAMES, "u2": FRAMES})
    in_groups = end == ".h5" or what in ("npz", "safetensors")
    settings: dict[str, object] = {"pattern": "*/{id}"} if in_groups else {}
    named = rf"'u2'.* twice.*part1\{end}' and in '.*part2\{end}'"
    with pytest.raises(AdoptionError, match=named):
        featcache.convert(
            tmp_path / "all", tmp_path / "cache", adopting=settings, progressbar=False
        )


def test_files_of_one_name_are_told_apart_by_their_suffix(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for end in ("npz", "NPZ"):
        with (tmp_path / f"all/u1.{end}").open("wb") as file:
            np.savez(file, mel=FRAMES)
    with pytest.raises(AdoptionError, match=r"twice: in 'u1\.NPZ' and in 'u1\.npz'; take one away"):
        featcache.convert(tmp_path / "all", tmp_path / "cache", progressbar=False)

"""Folders of `.pt` files, written by `torch.save`, are caches where they lie."""

from __future__ import annotations

import itertools
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_stores import adopted, annotation, assert_holds, contents, random_arrays

from featcache.adoptable import Options
from featcache.adoption.checks import check_found
from featcache.adoption.place import LocalPlace
from featcache.adoption.pt import KIND, saved
from featcache.errors import AdoptionError


def save(folder: Path, content: dict[str, Any]) -> Path:
    for id, value in content.items():
        (folder / f"{id}.pt").parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, folder / f"{id}.pt")
    return folder


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]
)
def test_tensors_are_read_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    arrays = {f"a/{id}": (array * 9).astype(dtype) for id, array in random_arrays(1).items()}
    source = save(tmp_path / "x", {id: torch.from_numpy(array) for id, array in arrays.items()})
    before = contents(source)
    with adopted(source, tmp_path) as cache:
        assert_holds(cache, "feats", arrays)
    assert contents(source) == before


def test_bfloat16_is_kept(tmp_path: Path) -> None:
    tensors = {id: torch.from_numpy(a).bfloat16() for id, a in random_arrays(2).items()}
    with adopted(save(tmp_path / "x", tensors), tmp_path) as cache:
        assert_holds(cache, "feats", {id: t.float().numpy() for id, t in tensors.items()})


def test_a_dict_has_features_and_annotations(tmp_path: Path) -> None:
    arrays = random_arrays(3)
    content = {
        id: {"fbank": torch.from_numpy(a), "units": torch.arange(len(a)), "text": f"ü {id}", "n": 3}
        for id, a in arrays.items()
    }
    with adopted(save(tmp_path / "x", content), tmp_path) as cache:
        assert_holds(cache, "fbank", arrays)
        assert_holds(cache, "units", {id: np.arange(len(a)) for id, a in arrays.items()})
        assert annotation(cache, "text") == {id: f"ü {id}" for id in arrays}
        assert annotation(cache, "n") == dict.fromkeys(arrays, 3)


def test_a_slice_of_a_larger_tensor_is_read_from_where_it_lies(tmp_path: Path) -> None:
    whole = torch.arange(40.0).reshape(10, 4)
    content = {"a": whole[2:5], "b": whole[7:], "c": whole[:0], "d": whole[3:4, :].requires_grad_()}
    with adopted(save(tmp_path / "x", content), tmp_path) as cache:
        assert_holds(cache, "feats", {id: t.detach().numpy() for id, t in content.items()})


class Anything:
    pass


REFUSED = {
    "a part of a tensor": torch.ones(3, 4)[:, 1:],
    "a conjugated tensor": torch.ones(2, 2, dtype=torch.complex64).conj(),
    "a parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "a sparse tensor": torch.ones(2, 2).to_sparse(),
    "a dtype that is not declared": torch.ones(2, 2, dtype=torch.uint16),
    "an array": np.ones((2, 2)),
    "an object": Anything(),
    "a list": [torch.ones(2, 2)],
    "no tensor": {"a": 1},
    "keys that are no names": {1: torch.ones(2, 2)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_but_plain_tensors_is_refused_by_id(tmp_path: Path, case: str) -> None:
    source = save(tmp_path / "x", {"utt1": REFUSED[case]})
    with pytest.raises(AdoptionError, match=r"utt1|holds no tensors"):
        adopted(source, tmp_path, kind="pt")
    assert not (tmp_path / "cache").exists()


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_in_a_pickle_runs(tmp_path: Path) -> None:
    source = save(tmp_path / "x", {"utt1": {"a": Runs(tmp_path / "ran")}})
    with pytest.raises(AdoptionError, match="utt1"):
        adopted(source, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_files_of_before_the_zip_format_are_refused_by_id(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    torch.save(torch.ones(2), tmp_path / "x" / "utt1.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "x" / "utt2.pt").write_bytes(pickle.dumps([1]))
    with pytest.raises(AdoptionError, match="utt1"):
        adopted(tmp_path / "x", tmp_path)


def test_a_file_cut_or_changed_anywhere_is_refused_or_read(tmp_path: Path) -> None:
    source = save(tmp_path / "x", {"utt1": torch.ones(2, 3)})
    data = bytearray((source / "utt1.pt").read_bytes())
    for end in range(0, len(data), 13):
        (source / "utt1.pt").write_bytes(data[:end])
        with pytest.raises(AdoptionError, match="utt1"):
            adopted(source, tmp_path)
    for place, value in itertools.product(range(len(data)), (0, 0x7F, 0xFF)):
        changed = data.copy()
        changed[place] = value
        (source / "utt1.pt").write_bytes(changed)
        try:
            found = KIND.index(LocalPlace(source), "", Options())
        except AdoptionError:
            continue
        check_found(found, [len(changed)])


def test_a_pickle_with_other_bytes_anywhere_is_refused_without_a_warning(tmp_path: Path) -> None:
    torch.save({"fbank": torch.ones(2, 3), "text": "yes"}, tmp_path / "utt1.pt")
    with zipfile.ZipFile(tmp_path / "utt1.pt") as file:
        data = file.read("utt1/data.pkl")
    saved(data)
    refused = 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for place in range(len(data) - 1):
            for other in (b"\\\x95", b"\\x", b"''", b"\n\n", b"\xff\xff"):
                try:
                    saved(data[:place] + other + data[place + 2 :])
                except ValueError:
                    refused += 1
    assert refused > len(data)
    assert not told

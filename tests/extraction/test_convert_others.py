"""`featcache.convert` of what people have: the arrays that the real reader gives, or a way out."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import pathlib
import pickle
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import kaldiio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.numpy
import safetensors.torch
import scipy.io
import torch
from numpy.typing import NDArray

import featcache
from featcache import Cache, FeatureStorageConfig
from featcache.adoption.libraries import lmdb_store
from featcache.errors import AdoptionError, CorruptCacheError, FeatureError
from featcache.extraction import foreign_rows as unpacking
from featcache.extraction.foreign_rows import LibraryRows, opened_source
from featcache.workers.pickling import pack, unpack

Arrays = Mapping[str, NDArray[Any]]
Held = Mapping[str, Arrays]  # by feature
RANDOM = np.random.default_rng(0)
MEL: Arrays = {f"spk-u{n}": RANDOM.standard_normal((n * 3 % 7, 4), np.float32) for n in range(1, 8)}
PITCH: Arrays = {id: array[:, 0].copy() for id, array in MEL.items()}
BOTH: Held = {"mel": MEL, "pitch": PITCH}
ONE: Held = {"feats": MEL}


def savez(path: Path, arrays: Mapping[str, Any]) -> None:
    np.savez(path, **dict(arrays))


def tensors(arrays: Arrays = MEL) -> dict[str, torch.Tensor]:
    return {id: torch.from_numpy(array) for id, array in arrays.items()}


def each(folder: Path, suffix: str, write: Callable[[Path, dict[str, Any]], object]) -> Path:
    """Write a file an utterance, which holds both features."""
    folder.mkdir()
    for id in MEL:
        write(folder / f"{id}{suffix}", {"mel": MEL[id], "pitch": PITCH[id]})
    return folder


def table(mel: pa.DataType, arrays: Arrays = MEL, ids: pa.Array | None = None) -> pa.Table:
    ids = pa.array(list(arrays)) if ids is None else ids
    values = pa.array([array.tolist() for array in arrays.values()], mel)
    return pa.table({"id": ids, "mel": values, "text": [f"of {id}" for id in arrays]})


MATRIX = pa.list_(pa.list_(pa.float32()))
Made = tuple[Any, dict[str, Any], Held]


def npz_of_ids(at: Path) -> Made:
    savez(at / "all.npz", MEL)
    return at / "all.npz", {}, ONE


def npz_each_compressed(at: Path) -> Made:
    return each(at / "all", ".npz", lambda p, a: np.savez_compressed(p, **a)), {}, BOTH


def npz_each_of_one(at: Path) -> Made:
    folder = each(at / "all", "_mel.npz", lambda p, a: np.savez(p, a["mel"]))
    return folder, {"pattern": "{id}_mel"}, ONE


def npz_shards(at: Path) -> Made:
    (at / "all").mkdir()
    ids = list(MEL)
    savez(at / "all/0.npz", {id: MEL[id] for id in ids[:3]})
    savez(at / "all/1.npz", {id: MEL[id] for id in ids[3:]})
    return at / "all", {}, ONE


def npz_of_two_dtypes_and_orders(at: Path) -> Made:
    found: dict[str, NDArray[Any]] = {id: array.astype(">f8") for id, array in MEL.items()}
    found["spk-u1"], found["spk-u2"] = MEL["spk-u1"], np.asfortranarray(MEL["spk-u2"])
    savez(at / "all.npz", found)
    return at / "all.npz", {}, {"feats": {id: a.astype("<f8") for id, a in found.items()}}


def npz_transposed(at: Path) -> Made:
    savez(at / "all.npz", {id: array.T for id, array in MEL.items()})
    return at / "all.npz", {"time_axis": 1}, ONE


def npz_of_bools(at: Path) -> Made:
    found = {id: array > 0 for id, array in MEL.items()}
    savez(at / "all.npz", found)
    return at / "all.npz", {}, {"feats": found}


def npz_of_numbers(at: Path) -> Made:
    found = {f"u{n}": np.array(n, np.int16) for n in range(3)}
    savez(at / "all.npz", found)
    return at / "all.npz", {}, {"feats": found}


def safetensors_of_ids(at: Path) -> Made:
    safetensors.torch.save_file(tensors(), at / "all.safetensors", metadata={"a": "b"})
    return at / "all.safetensors", {}, ONE


def safetensors_each(at: Path) -> Made:
    folder = each(at / "all", ".safetensors", lambda p, a: safetensors.numpy.save_file(a, p))
    return folder, {}, BOTH


def safetensors_bfloat16_and_float32(at: Path) -> Made:
    found = {id: each.bfloat16() for id, each in tensors().items()}
    found["spk-u1"] = tensors()["spk-u1"]
    safetensors.torch.save_file(found, at / "all.safetensors")
    read = safetensors.torch.load_file(at / "all.safetensors")
    return at / "all.safetensors", {}, {"feats": {id: a.float().numpy() for id, a in read.items()}}


def torch_of_ids(at: Path) -> Made:
    torch.save(tensors(), at / "all.pth")
    return at / "all.pth", {}, ONE


def torch_legacy(at: Path) -> Made:
    folder = each(at / "all", ".pt", lambda p, a: torch.save(
        torch.from_numpy(a["mel"]), p, _use_new_zipfile_serialization=False))  # fmt: skip
    return folder, {}, ONE


def torch_checkpoint(at: Path) -> Made:
    torch.save({"epoch": 3, "state": {"mel": tensors(), "n": 1}}, at / "all.ckpt")
    return at / "all.ckpt", {"pattern": "state/mel/{id}"}, ONE


def torch_features_of_ids(at: Path) -> Made:
    torch.save({"mel": tensors(), "pitch": tensors(PITCH)}, at / "all.pt")
    return at / "all.pt", {"pattern": "{feature}/{id}"}, BOTH


def torch_with_numpy_inside(at: Path) -> Made:
    return each(at / "all", ".pt", torch_save), {}, BOTH


def torch_save(path: Path, arrays: dict[str, Any]) -> None:
    torch.save(arrays, path)


def parquet_of_row_groups_and_coded_ids(at: Path) -> Made:
    ids = pa.array(list(MEL)).dictionary_encode()
    pq.write_table(table(MATRIX, ids=ids), at / "all.parquet", row_group_size=3)
    return at / "all.parquet", {}, {"mel": MEL}


def parquet_of_fixed_frames(at: Path) -> Made:
    pq.write_table(table(pa.large_list(pa.list_(pa.float32(), 4))), at / "all.parquet")
    return at / "all.parquet", {}, {"mel": MEL}


def parquet_nested_in_a_struct(at: Path) -> Made:
    rows = [{"mel": MEL[id].tolist(), "pitch": PITCH[id].tolist()} for id in MEL]
    kind = pa.struct({"mel": MATRIX, "pitch": pa.list_(pa.float32())})
    whole = pa.table({"utt_id": list(MEL), "features": pa.array(rows, kind)})
    (at / "all").mkdir()
    pq.write_table(whole.slice(0, 3), at / "all/0.parquet")
    pq.write_table(whole.slice(3), at / "all/1.parquet")
    return at / "all", {}, BOTH


def parquet_transposed(at: Path) -> Made:
    some = {id: array.T for id, array in MEL.items() if len(array)}
    pq.write_table(table(MATRIX, some), at / "all.parquet")
    return at / "all.parquet", {"time_axis": -1}, {"mel": {id: a.T for id, a in some.items()}}


def arrow_tensors(at: Path) -> Made:
    found = RANDOM.standard_normal((6, 3, 4))
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(found)
    whole = pa.table({"id": [f"u{n}" for n in range(6)], "feats": column})
    with pa.ipc.new_file(str(at / "all.arrow"), whole.schema) as writer:
        writer.write_table(whole, max_chunksize=4)
    return at / "all.arrow", {}, {"feats": {f"u{n}": found[n] for n in range(6)}}


def huggingface_on_disk(at: Path) -> Made:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    columns = {
        "id": datasets.Value("string"),
        "mel": datasets.Array2D((None, 4), "float32"),
        "pitch": datasets.Sequence(datasets.Value("float32")),
    }
    held = {"id": list(MEL), "mel": list(MEL.values()), "pitch": list(PITCH.values())}
    made = datasets.Dataset.from_dict(held, features=datasets.Features(columns))
    made.save_to_disk(at / "all", num_shards=2)
    (at / "all/cache-1.arrow").write_bytes(b"of a map of theirs")
    return at / "all", {}, BOTH


def lmdb_of(at: Path, values: Mapping[str, bytes]) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(at / "all"), map_size=1 << 22) as made, made.begin(write=True) as writing:
        for id, value in {**values, "__len__": b"7"}.items():
            writing.put(id.encode(), value)
    return at / "all"


def lmdb_of_npy(at: Path) -> Made:
    return lmdb_of(at, {id: as_bytes(np.save, array) for id, array in MEL.items()}), {}, ONE


def lmdb_of_torch(at: Path) -> Made:
    def save(file: io.BytesIO, each: torch.Tensor) -> None:
        torch.save(each, file, _use_new_zipfile_serialization=each.numel() > 8)

    return lmdb_of(at, {id: as_bytes(save, each) for id, each in tensors().items()}), {}, ONE


def lmdb_of_npz(at: Path) -> Made:
    def save(file: io.BytesIO, arrays: dict[str, Any]) -> None:
        np.savez(file, **dict(arrays))

    held = {id: as_bytes(save, {"mel": MEL[id], "pitch": PITCH[id]}) for id in MEL}
    return lmdb_of(at, held), {}, BOTH


def test_two_packed_files_that_unpack_to_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    data = as_bytes(np.save, np.zeros((3, 2), np.float32))
    (tmp_path / "all/u.npy.gz").write_bytes(gzip.compress(data))
    (tmp_path / "all/u.npy.bz2").write_bytes(bz2.compress(data))
    with pytest.raises(AdoptionError, match=r"'u.npy.bz2' and 'u.npy.gz'.*both unpack to 'u.npy'"):
        converted(tmp_path / "all", tmp_path / "cache")


def test_what_was_unpacked_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []
    there = tmp_path / "folder" / "u.npy"

    def note(name: str) -> Callable[[object], None]:
        return lambda _: seen.append((name, there.exists()))

    for name in ("sync_file", "sync_directory"):
        monkeypatch.setattr(unpacking, name, note(name))
    (tmp_path / "u.npy.gz").write_bytes(gzip.compress(as_bytes(np.save, np.zeros(3))))
    unpacking._unpack(tmp_path / "u.npy.gz", there)
    assert seen == [("sync_file", False), ("sync_directory", False), ("sync_directory", True)]
    assert [each.name for each in there.parent.iterdir()] == ["u.npy"]


def as_bytes(save: Callable[[Any, Any], object], array: object) -> bytes:
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def ark_gz(at: Path) -> Made:
    kaldiio.save_ark(str(at / "all.ark"), dict(MEL))
    (at / "gz").mkdir()
    (at / "gz/all.ark.gz").write_bytes(gzip.compress((at / "all.ark").read_bytes()))
    return at / "gz/all.ark.gz", {}, ONE


def tars(at: Path) -> Made:
    (at / "all").mkdir()
    for number, id in enumerate(MEL):
        with tarfile.open(at / f"all/{number}.tar.gz", "w:gz") as file:
            data = as_bytes(np.save, MEL[id])
            about = tarfile.TarInfo(f"{id}.mel.npy")
            about.size = len(data)
            file.addfile(about, io.BytesIO(data))
    return at / "all", {}, {"mel": MEL}


def shards_of_npz_and_pth(at: Path) -> Made:
    (at / "all").mkdir()
    for number, id in enumerate(MEL):
        fields = {
            "mel.pth": as_bytes(lambda file, each: torch.save(each, file), tensors()[id]),
            "npz": as_bytes(lambda file, each: np.savez(file, pitch=each), PITCH[id]),
            "txt": id.encode(),
        }
        with tarfile.open(at / f"all/{number % 2}.tar", "a") as file:
            for name, data in fields.items():
                about = tarfile.TarInfo(f"{id}.{name}")
                about.size = len(data)
                file.addfile(about, io.BytesIO(data))
    return at / "all", {}, BOTH


def npy_bz2(at: Path) -> Made:
    (at / "all/spk").mkdir(parents=True)
    for id, array in MEL.items():
        data = as_bytes(np.save, array)
        (at / f"all/spk/{id}.npy.bz2").write_bytes(bz2.compress(data))
    return at / "all", {}, {"feats": {f"spk/{id}": array for id, array in MEL.items()}}


def hdf5_in_chunks_of_columns(at: Path) -> Made:
    with h5py.File(at / "all.h5", "w") as file:
        for id, array in MEL.items():
            file.create_dataset(f"spk/{id}", data=array, chunks=(1, 2) if len(array) else None)
    return at / "all.h5", {"pattern": "spk/{id}"}, ONE


def in_memory(at: Path) -> Made:
    return dict(MEL), {}, ONE


def in_memory_by_feature(at: Path) -> Made:
    return {"mel": tensors(), "pitch": PITCH}, {"pattern": "{feature}/{id}"}, BOTH


def in_memory_of_one(at: Path) -> Made:
    one = {"spk-u1": {feature: arrays["spk-u1"] for feature, arrays in BOTH.items()}}
    held = {feature: {"spk-u1": arrays["spk-u1"]} for feature, arrays in BOTH.items()}
    return one, {}, held


TAKEN: list[Callable[[Path], Made]] = [
    npz_of_ids, npz_each_compressed, npz_each_of_one, npz_shards, npz_of_two_dtypes_and_orders,
    npz_transposed, npz_of_bools, npz_of_numbers, safetensors_of_ids, safetensors_each,
    safetensors_bfloat16_and_float32, torch_of_ids, torch_legacy, torch_checkpoint,
    torch_features_of_ids, torch_with_numpy_inside, parquet_of_row_groups_and_coded_ids,
    parquet_of_fixed_frames, parquet_nested_in_a_struct, parquet_transposed, arrow_tensors,
    huggingface_on_disk, lmdb_of_npy, lmdb_of_torch, lmdb_of_npz, ark_gz, tars, npy_bz2,
    shards_of_npz_and_pth, hdf5_in_chunks_of_columns, in_memory, in_memory_by_feature,
    in_memory_of_one,
]  # fmt: skip


def converted(source: object, into: Path, **settings: Any) -> Cache:
    return featcache.convert(source, into, progressbar=False, **settings)  # type: ignore[arg-type]


def assert_holds(cache: Cache, held: Held) -> None:
    """Compare all arrays to the bit, and see that nothing is left beside them."""
    assert sorted(cache.features) == sorted(held)
    assert cache.complete
    for feature, arrays in held.items():
        assert set(cache.ids) == set(arrays)
        for id, array in arrays.items():
            found = cache.read(id, feature)
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes()
    assert not [path.name for path in cache.path.iterdir() if path.name.startswith("work-")]


@pytest.mark.parametrize("make", TAKEN)
def test_what_people_have_comes_out_equal(tmp_path: Path, make: Callable[[Path], Made]) -> None:
    source, adopting, held = make(tmp_path)
    cache = converted(source, tmp_path / "cache", adopting=adopting)
    assert_holds(cache, held)
    some = next(iter(held))
    if cache.dtype(some).startswith("float"):
        whole = np.concatenate([array.reshape(-1) for array in held[some].values()])
        assert cache.stats(some).mean.mean() == pytest.approx(whole.mean(dtype="f8"), abs=1e-6)


def test_texts_and_numbers_beside_arrays_are_annotations(tmp_path: Path) -> None:
    pq.write_table(table(MATRIX), tmp_path / "all.parquet")
    by_table = converted(tmp_path / "all.parquet", tmp_path / "a")
    assert by_table.annotation("text")[0] == f"of {by_table.ids[0]}"
    held = {id: {"mel": array, "text": id, "seconds": 1.5} for id, array in MEL.items()}
    in_memory = converted(held, tmp_path / "b")
    assert list(in_memory.annotation("text")) == list(in_memory.ids)
    assert in_memory.annotation("seconds")[0] == 1.5


def test_bfloat16_is_stored_as_bfloat16_and_safetensors_lie_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    safetensors.torch.save_file({id: a.bfloat16() for id, a in tensors().items()}, path)
    adopted = featcache.adopt(path, tmp_path / "adopted")
    cache = converted(path, tmp_path / "cache")
    read = safetensors.torch.load_file(path)
    for id, tensor in read.items():
        for each in (adopted, cache):
            assert each.dtype("feats") == "bfloat16"
            assert each.read(id, "feats").tobytes() == tensor.float().numpy().tobytes()


def refused(source: object, at: Path, match: str, **settings: Any) -> str:
    with pytest.raises((AdoptionError, FeatureError), match=match) as told:
        converted(source, at / "cache", **settings)
    if (at / "cache/featcache.json").exists():  # told by an array's numbers
        assert not featcache.open(at / "cache").complete
    return str(told.value)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (pickle.dumps(MEL["spk-u1"]), "'u1'.*is a pickle, which may run code"),
        (MEL["spk-u1"].tobytes(), "'u1'.*do not say their shape and dtype"),
        (as_bytes(np.save, MEL["spk-u1"])[:-1], "'u1'.*damaged"),
        (as_bytes(lambda file, held: torch.save(held, file), Counter("a")), "'u1'.*"),
    ],
)
def test_values_of_lmdb_that_say_too_little_are_refused(
    tmp_path: Path, value: bytes, match: str
) -> None:
    source = lmdb_of(tmp_path, {"u1": value})
    message = refused(source, tmp_path, match)
    assert "as by featcache.convert([(k.decode(), " in message or "damaged" in message


@pytest.mark.parametrize("door", ["adopt", "convert"])
@pytest.mark.parametrize("make", [lmdb_of_npy, lmdb_of_npz, lmdb_of_torch])
@pytest.mark.parametrize("size", [5000, 4096 * 3, -4096, -100])
def test_lmdb_that_is_cut_short_is_refused(
    tmp_path: Path, make: Callable[[Path], Made], size: int, door: str
) -> None:
    source, *_ = make(tmp_path)
    whole = (source / "data.mdb").stat().st_size
    with (source / "data.mdb").open("r+b") as file:
        file.truncate(size % whole)
    with pytest.raises(AdoptionError, match=r"all' (is cut short: it has|cannot be read)"):
        getattr(featcache, door)(source, tmp_path / "cache")


def test_lmdb_that_is_cut_short_is_refused_in_a_folder_with_modules_of_known_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, *_ = lmdb_of_npy(tmp_path)
    os.truncate(source / "data.mdb", (source / "data.mdb").stat().st_size - 4096)
    (tmp_path / "queue.py").write_text("raise ImportError('of the user')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    with pytest.raises(AdoptionError, match="is cut short: it has"):
        featcache.convert(source, tmp_path / "cache")


def test_lmdb_whose_last_pages_were_never_written_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a transaction deletes what it has put: the library writes no page of that."""
    lmdb = pytest.importorskip("lmdb")
    source, array = tmp_path / "all", np.ones((90, 8), np.float32)
    with lmdb.open(str(source), map_size=1 << 26) as made:
        for _ in range(3):
            with made.begin(write=True) as writing:
                writing.put(b"z", bytes(9000))
                writing.put(b"y", bytes(40000))
                writing.put(b"a", as_bytes(np.save, array))
                writing.delete(b"z")
                writing.delete(b"y")
        assert (source / "data.mdb").stat().st_size < 4096 * (made.info()["last_pgno"] + 1)
    assert_holds(converted(source, tmp_path / "cache"), {"feats": {"a": array}})
    with monkeypatch.context() as patched:
        patched.setattr(lmdb_store, "TRIAL_S", 0.001)
        with pytest.raises(AdoptionError, match=r"may be cut short: .* after 0 s; `mdb_copy -c"):
            converted(source, tmp_path / "none")
    with lmdb.open(str(source), readonly=True, lock=False) as made:  # as mdb_copy -c does
        (tmp_path / "copy").mkdir()
        made.copy(str(tmp_path / "copy"), compact=True)
    monkeypatch.setattr(lmdb_store, "TRIAL_S", 0.001)
    assert_holds(converted(tmp_path / "copy", tmp_path / "cache-2"), {"feats": {"a": array}})


def test_ids_called_like_statistics_in_named_databases_of_lmdb_are_taken_by_the_pattern_told(
    tmp_path: Path,
) -> None:
    lmdb = pytest.importorskip("lmdb")
    held = {name: {"mean": MEL["spk-u1"], "u1": MEL["spk-u2"]} for name in ("mel", "slow")}
    with lmdb.open(str(tmp_path / "all"), map_size=1 << 26, max_dbs=2) as made:
        for name, arrays in held.items():
            database = made.open_db(name.encode())
            with made.begin(write=True, db=database) as writing:
                for id, array in arrays.items():
                    writing.put(id.encode(), as_bytes(np.save, array))
    with pytest.raises(AdoptionError, match="'mean' among 2 arrays") as refused:
        converted(tmp_path / "all", tmp_path / "cache")
    (pattern,) = {*re.findall("pattern='(.+?)'", str(refused.value))}
    given = {"pattern": pattern}
    assert_holds(converted(tmp_path / "all", tmp_path / "cache", adopting=given), held)


def test_lmdb_says_to_adopt_what_convert_takes(tmp_path: Path) -> None:
    for number, make in enumerate((lmdb_of_npy, lmdb_of_npz)):
        (tmp_path / str(number)).mkdir()
        source, *_ = make(tmp_path / str(number))
        with pytest.raises(AdoptionError, match=r"lies; featcache\.convert makes a cache of it"):
            featcache.adopt(source, tmp_path / "cache")


@pytest.mark.parametrize(
    ("mel", "match"),
    [
        ([[[1.0, 2.0], [3.0]], [[1.0, 2.0]]], "'u0'.*column 'mel', is ragged"),
        ([[[1.0, 2.0]], [[1.0, 2.0, 3.0]]], "'u0' has shape of a frame .2,., 'u1' has .3,."),
        ([[[1.0, 2.0]], None], "'u1'.*column 'mel', is null"),
        ([[[1.0, 2.0]], [[1.0, None]]], "'u1'.*column 'mel', is null, or holds a null"),
        ([["text"], ["text"]], "no column of numbers in lists"),
    ],
)
def test_rows_of_parquet_that_are_no_arrays_are_refused(
    tmp_path: Path, mel: list[Any], match: str
) -> None:
    pq.write_table(pa.table({"id": ["u0", "u1"], "mel": mel}), tmp_path / "all.parquet")
    refused(tmp_path / "all.parquet", tmp_path, match)


def test_ids_of_tables_are_one_column_each_once(tmp_path: Path) -> None:
    path = tmp_path / "all.parquet"
    pq.write_table(pa.table({"name": ["a", "b"], "mel": [[1.0], [2.0]]}), path)
    refused(path, tmp_path, "no column of ids, as 'id' would be, among 'name', 'mel'")
    pq.write_table(pq.read_table(path).rename_columns(["id", "mel"]), path)
    assert list(converted(path, tmp_path / "named")) == ["a", "b"]
    pq.write_table(pa.table({"id": ["a", "a"], "mel": [[1.0], [2.0]]}), path)
    refused(path, tmp_path, "has utterance 'a' twice")
    pq.write_table(pa.table({"id": ["a", None], "mel": [[1.0], [2.0]]}), path)
    refused(path, tmp_path, "row 1: its id is None")
    path.write_bytes(path.read_bytes()[:60])
    refused(path, tmp_path, r"all\.parquet' cannot be read")


def test_files_whose_names_mean_two_things_are_refused(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    np.savez(tmp_path / "all/a.npz", mel=MEL["spk-u1"], pitch=PITCH["spk-u1"])
    message = refused(tmp_path / "all", tmp_path, "'a' alone holds 2 arrays")
    assert "pattern='{id}'" in message
    cache = converted(tmp_path / "all", tmp_path / "b", adopting={"pattern": "{id}"})
    assert (list(cache), sorted(cache.features)) == (["a"], ["mel", "pitch"])
    np.savez(tmp_path / "all/b.npz", mel=MEL["spk-u2"])
    message = refused(tmp_path / "all", tmp_path, "'a' holds 'mel', 'pitch', 'b' 'mel'")
    assert "pattern='{id}/mel'" in message
    cache = converted(tmp_path / "all", tmp_path / "c", adopting={"pattern": "{id}/mel"})
    assert list(cache) == ["a", "b"]


def test_names_that_look_like_features_say_the_pattern(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    named = {f"{id}_{name}": held[id] for name, held in BOTH.items() for id in MEL}
    for label in named:
        np.savez(tmp_path / "all" / f"{label}.npz", MEL[label.rpartition("_")[0]])
    pattern = {"pattern": "{id}_{feature}"}
    message = refused(tmp_path / "all", tmp_path, "are the features 'mel', 'pitch'")
    assert "give pattern='{id}_{feature}'" in message
    same = {"mel": MEL, "pitch": MEL}
    assert_holds(converted(tmp_path / "all", tmp_path / "b", adopting=pattern), same)
    source = lmdb_of(tmp_path / "all", {label: as_bytes(np.save, a) for label, a in named.items()})
    refused(source, tmp_path, "are the features 'mel', 'pitch'")
    assert_holds(converted(source, tmp_path / "c", adopting=pattern), BOTH)


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.ones(3, complex), "complex128, which no cache holds; real and imaginary"),
        (np.ones(3, np.longdouble), "which no cache holds"),
        (np.array(["a"]), "which no cache holds"),
        ([1.0, 2.0], "holds no array"),
        (np.array([1.0, np.nan]), "is not finite; mend it, or declare nonfinite"),
        (torch.ones(3).to_sparse(), "torch.sparse_coo, which no cache holds"),
        (torch.ones(3).to(torch.float8_e4m3fn), "float8_e4m3fn, which no cache holds"),
    ],
)
def test_arrays_that_no_cache_holds_are_refused(tmp_path: Path, array: Any, match: str) -> None:
    refused({"u1": array, "u2": array}, tmp_path, match)


def test_files_of_objects_are_refused_and_damaged_ones_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", u1=np.array([{}], object))
    refused(tmp_path / "objects.npz", tmp_path, r"objects\.npz', array 'u1'.*never run here")
    torch.save({"u1": Counter("a")}, tmp_path / "objects.pth")
    message = refused(tmp_path / "objects.pth", tmp_path, r"objects\.pth'")
    assert "featcache.convert({id: array, ...}" in message
    for name in ("a.npz", "a.pth", "a.safetensors", "a.arrow", "a.ark.gz"):
        for data in (b"", b"\0" * 64):
            (tmp_path / name).write_bytes(data)
            refused(tmp_path / name, tmp_path, re.escape(str(tmp_path / name.removesuffix(".gz"))))


class RunsCode:
    """Makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_no_pickle_is_run(tmp_path: Path) -> None:
    bad = {"u1": torch.ones(3, 4), "u2": RunsCode(tmp_path / "ran")}
    torch.save(bad, tmp_path / "new.pth")
    torch.save(bad, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    np.savez(tmp_path / "all.npz", u1=np.array([bad["u2"]], object))
    dump(tmp_path / "all.pkl", bad["u2"])
    legacy = (tmp_path / "old.pt").read_bytes()
    values = [pickle.dumps(bad["u2"]), legacy, (tmp_path / "new.pth").read_bytes()]
    sources = [tmp_path / name for name in ("new.pth", "old.pt", "all.npz", "all.pkl")]
    for number, value in enumerate(values):
        (tmp_path / str(number)).mkdir()
        sources.append(lmdb_of(tmp_path / str(number), {"u1": value}))
    for source in sources:
        refused(source, tmp_path, "load it")
        assert not (tmp_path / "ran").exists()


def save_each(folder: Path, suffix: str, save: Callable[[Path, NDArray[Any]], object]) -> Path:
    folder.mkdir()
    for id, array in MEL.items():
        if len(array):
            save(folder / f"{id}{suffix}", array)
    return folder


def dump(path: Path, held: object) -> Path:
    path.write_bytes(pickle.dumps(held))
    return path


def mat(at: Path) -> Path:
    named = {id.replace("-", "_"): array for id, array in MEL.items() if len(array)}
    scipy.io.savemat(at / "all.mat", named)
    return at / "all.mat"


def save_npy(path: Path, held: object) -> Path:
    np.save(path, np.array(held, object), allow_pickle=True)
    return path


def json_of_ids(at: Path) -> Path:
    (at / "all.json").write_text(json.dumps({id: a.tolist() for id, a in MEL.items() if len(a)}))
    return at / "all.json"


LOADED: dict[str, Callable[[Path], Path]] = {
    "pickle": lambda at: dump(at / "all.pkl", {id: a for id, a in MEL.items() if len(a)}),
    "pickles": lambda at: save_each(at / "all", ".pkl", dump),
    "csv": lambda at: save_each(at / "all", ".csv", lambda p, a: np.savetxt(p, a, delimiter=",")),
    "txt": lambda at: save_each(at / "all", ".txt", np.savetxt),
    "mat": mat,
    "json": json_of_ids,
    "npy": lambda at: save_npy(at / "all.npy", {id: a for id, a in MEL.items() if len(a)}),
}


@pytest.mark.parametrize("what", LOADED)
def test_the_line_that_a_refusal_names_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    source = LOADED[what](tmp_path)
    message = refused(source, tmp_path, re.escape(str(source)))
    found = re.search(r"as by (featcache\.convert\(.*, 'features')\)", message)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    known = {"featcache": featcache, "json": json, "numpy": np, "pickle": pickle, "scipy": scipy}
    line = f"{found[1]}, progressbar=False)"
    exec(line, {**known, "pathlib": pathlib})
    with featcache.open(tmp_path / "features") as cache:
        for id, array in MEL.items():
            if len(array):
                found_array = cache.read(id.replace("-", "_") if what == "mat" else id, "feats")
                np.testing.assert_array_equal(found_array.astype(np.float32), array)


def test_a_conversion_that_was_stopped_goes_on_and_tells_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from featcache.adoption.libraries.payloads import NpzFile

    source, _, held = npz_each_compressed(tmp_path)
    read, count = NpzFile.read, 0

    def stopping(self: NpzFile, key: str) -> NDArray[Any]:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return read(self, key)

    monkeypatch.setattr(NpzFile, "read", stopping)
    with pytest.raises(KeyboardInterrupt):
        converted(source, tmp_path / "cache")
    assert_holds(converted(source, tmp_path / "cache"), held)
    assert count == 2 * 2 * len(MEL) + 2  # each array is stored and compared; one was lost
    np.savez(source / "spk-u1.npz", mel=MEL["spk-u1"] + 1, pitch=PITCH["spk-u1"])
    with pytest.raises(CorruptCacheError, match=r"'spk-u1', feature 'mel'.*overwrite=True"):
        converted(source, tmp_path / "cache")
    np.savez(source / "spk-u1.npz", mel=MEL["spk-u1"], pitch=PITCH["spk-u1"])
    np.savez(source / "spk-new.npz", mel=MEL["spk-u1"], pitch=PITCH["spk-u1"])
    assert "spk-new" in converted(source, tmp_path / "cache")


@pytest.mark.parametrize("make", [npz_each_compressed, parquet_nested_in_a_struct, lmdb_of_npy,
                                  hdf5_in_chunks_of_columns, in_memory])  # fmt: skip
def test_workers_open_the_source_themselves(tmp_path: Path, make: Callable[[Path], Made]) -> None:
    source, adopting, held = make(tmp_path)
    with opened_source(source, tmp_path / "cache", adopting) as rows:
        assert isinstance(rows, LibraryRows)
        sent = pack({"rows": rows.only(tuple(held))})
    there: LibraryRows = unpack(sent)["rows"]
    for row in there.read(np.arange(len(there.ids))):
        for feature, arrays in held.items():
            assert row.arrays[feature].tobytes() == arrays[row.id].tobytes()
    there.close()


def test_workers_tell_of_a_source_that_changed(tmp_path: Path) -> None:
    source, adopting, _ = npz_of_ids(tmp_path)
    with opened_source(source, tmp_path / "cache", adopting) as rows:
        assert isinstance(rows, LibraryRows)
        sent = pack({"rows": rows})
    savez(source, {id: MEL[id] for id in list(MEL)[1:]})
    with pytest.raises(AdoptionError, match="has changed since the conversion began"):
        _ = unpack(sent)["rows"].ids


def test_what_a_library_reads_is_estimated(tmp_path: Path) -> None:
    source, _, _ = npz_of_ids(tmp_path)
    told = featcache.inspect.estimate(source)
    assert (told.utterances, told.frames) == (len(MEL), {"feats": sum(map(len, MEL.values()))})


def test_declarations_apply_to_what_a_library_reads(tmp_path: Path) -> None:
    source, _, _ = npz_each_compressed(tmp_path)
    half = FeatureStorageConfig("mel", "float16", backend="hdf5")
    cache = converted(source, tmp_path / "cache", features=[half])
    assert list(cache.features) == ["mel"]
    for id, array in MEL.items():
        assert cache.read(id, "mel").tobytes() == array.astype(np.float16).tobytes()
    made: Any = featcache.inspect.made_from(cache.path)
    assert made["fingerprint"]["adopted"] == "npz"
    assert made["recorded"]["converted"][0]["largest_error"]["mel"] > 0

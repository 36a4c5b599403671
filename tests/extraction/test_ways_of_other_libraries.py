"""Stores of other libraries: what both doors say of them gives them, when it is done."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import logging
import pathlib
import pickle
import re
import struct
import tarfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from numpy.typing import NDArray
from test_ways_to_convert import EMBEDDINGS, F0, MEL, TOKENS, csv_of, each, lines, words

import featcache
from featcache.errors import AdoptionError

Arrays = Mapping[str, NDArray[Any]]
Made = tuple[Path, Arrays]
MELS: Arrays = {f"{n:08d}": array for n, array in enumerate(MEL.values())}
BATCH: Arrays = {f"{n:08d}": RANDOM for n, RANDOM in enumerate(np.ones((3, 5, 8), "f4"))}


def npy_of(array: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def objects_of(arrays: Arrays) -> NDArray[Any]:
    found = np.empty(len(arrays), object)
    found[:] = list(arrays.values())
    return found


def saved(path: Path, save: Callable[[Path], object]) -> Path:
    save(path)
    return path


def zarr_array(at: Path, array: NDArray[Any], zarr_format: int) -> Path:
    zarr = pytest.importorskip("zarr")
    zarr.save_array(str(at / "all.zarr"), array, zarr_format=zarr_format)
    return at / "all.zarr"


def zarr_in_a_zip(at: Path) -> Made:
    zarr = pytest.importorskip("zarr")
    with zarr.storage.ZipStore(str(at / "all.zarr.zip"), mode="w") as store:
        group = zarr.open_group(store, mode="w")
        for id, array in MEL.items():
            group.create_array(id, data=array)
    return at / "all.zarr.zip", MEL


def folder_of_zarr(at: Path) -> Made:
    zarr = pytest.importorskip("zarr")
    return each(at / "all", ".zarr", lambda p, a: zarr.save_array(str(p), a)), MEL


def netcdf(at: Path) -> Made:
    with scipy.io.netcdf_file(str(at / "all.nc"), "w") as file:
        file.createDimension("mel", 80)
        for id, array in MEL.items():
            file.createDimension(f"frames_{id}", len(array))
            file.createVariable(id, "f4", (f"frames_{id}", "mel"))[:] = array
    return at / "all.nc", MEL


def netcdf_4(at: Path) -> Made:
    """As netCDF's library writes a dimension that has no variable."""
    with h5py.File(at / "all.nc", "w") as file:
        file.create_dataset("mel", (80,), "f4").make_scale("This is a netCDF dimension")
        for id, array in MEL.items():
            file[id] = array
            file[id].dims[1].attach_scale(file["mel"])
    return at / "all.nc", MEL


def arff(path: Path, array: NDArray[Any], name: str = "unknown") -> None:
    """As openSMILE writes it."""
    head = ["@relation openSMILE", "", "@attribute name string"]
    head += [f"@attribute c{n} numeric" for n in range(array.shape[-1])]
    rows = [",".join([f"'{name}'", *map(str, row.tolist())]) for row in np.atleast_2d(array)]
    path.write_text("\n".join([*head, "", "@data", "", *rows]) + "\n")


def functionals(at: Path) -> Made:
    each(at / "one", ".arff", lambda p, a: arff(p, a, p.stem), EMBEDDINGS)
    first, *others = (path.read_text() for path in sorted((at / "one").iterdir()))
    rows = [text.rstrip().rpartition("\n")[2] for text in others]
    (at / "all.arff").write_text("\n".join([first.rstrip(), *rows]) + "\n")
    return at / "all.arff", EMBEDDINGS


def text_grids(at: Path) -> Made:
    head = 'File type = "ooTextFile"\nObject class = "TextGrid"\n\nxmin = 0\nxmax = 1\n'
    tier = (
        "tiers? <exists>\nsize = 1\nitem []:\n    item [1]:\n"
        '        class = "IntervalTier"\n        name = "phones"\n        xmin = 0\n'
        "        xmax = 1\n        intervals: size = 1\n        intervals [1]:\n"
        '            xmin = 0\n            xmax = 1\n            text = "AH"\n'
    )
    each(at / "all", ".TextGrid", lambda p, _: p.write_text(head + tier))
    return at / "all", dict.fromkeys(MEL, np.array([[0.0, 1.0]]))


def of_msgpack(at: Path) -> Made:
    msgpack = pytest.importorskip("msgpack")
    held = {id: array.tolist() for id, array in TOKENS.items()}
    (at / "all.msgpack").write_bytes(msgpack.packb(held))
    return at / "all.msgpack", TOKENS


def tar(path: Path, members: Callable[[str], Mapping[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as file:
        for id in MEL:
            for end, data in members(id).items():
                info = tarfile.TarInfo(f"{id}.{end}")
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return path


def folder_of_shards(at: Path) -> Made:
    (at / "all").mkdir()
    tar(at / "all/1.tar", lambda id: {"mel.pyd": pickle.dumps(MEL[id])})
    return at / "all", MEL


def lmdb_of(at: Path, value: Callable[[NDArray[Any]], bytes], arrays: Arrays = F0) -> Path:
    lmdb = pytest.importorskip("lmdb")
    with lmdb.open(str(at / "all"), map_size=1 << 22) as made, made.begin(write=True) as writing:
        for id, array in arrays.items():
            writing.put(id.encode(), value(array))
    return at / "all"


def lmdb_with_keys(at: Path) -> Made:
    lmdb = pytest.importorskip("lmdb")
    path = str(lmdb_of(at, pickle.dumps))
    with lmdb.open(path, map_size=1 << 22) as made, made.begin(write=True) as writing:
        writing.put(b"keys", pickle.dumps(list(F0)))
    return at / "all", F0


def lmdb_of_msgpack(at: Path) -> Made:
    msgpack = pytest.importorskip("msgpack")
    tokens = {id: np.arange(20 + n) for n, id in enumerate(F0)}
    return lmdb_of(at, lambda array: bytes(msgpack.packb(array.tolist())), tokens), tokens


def no_ids(at: Path) -> Made:
    pa = pytest.importorskip("pyarrow")
    columns = {
        "mel": pa.array([a.tolist() for a in MEL.values()], pa.list_(pa.list_(pa.float32())))
    }
    return table(at / "all.parquet", {**columns, "text": list(MEL)}), MELS


def bytes_and_shapes(at: Path) -> Made:
    columns = {"mel": [a.tobytes() for a in MEL.values()], "shape": [a.shape for a in MEL.values()]}
    return table(at / "all.parquet", {"id": list(MEL), **columns}), MEL


def table(path: Path, columns: Mapping[str, Any]) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), path)
    return path


def long_table(at: Path) -> Made:
    """A row a frame, as data frames of pandas often are."""
    ids = [id for id, array in F0.items() for _ in array]
    return table(at / "all.parquet", {"id": ids, "f0": np.concatenate(list(F0.values()))}), F0


def long_csv(at: Path) -> Made:
    rows = "".join(f"{id},{','.join(map(repr, r.tolist()))}\n" for id, a in MEL.items() for r in a)
    (at / "all.csv").write_text(rows)
    return at / "all.csv", MEL


def long_csv_by_frame(at: Path) -> Made:
    rows = [(n, id, r.tolist()) for id, a in MEL.items() for n, r in enumerate(a)]
    lines = (
        f"{id},{','.join(map(repr, r))}\n" for _, id, r in sorted(rows, key=lambda row: row[0])
    )
    (at / "all.csv").write_text("".join(lines))
    return at / "all.csv", MEL


def hdf5(at: Path, write: Callable[[h5py.File], object]) -> Path:
    with h5py.File(at / "all.h5", "w") as file:
        write(file)
    return at / "all.h5"


def of_variable_length(file: h5py.File) -> None:
    file["ids"] = list(TOKENS)
    dataset = file.create_dataset("tokens", (len(TOKENS),), h5py.vlen_dtype("i4"))
    for number, array in enumerate(TOKENS.values()):
        dataset[number] = array


def beside_text(file: h5py.File) -> None:
    file["about"] = "of whom these are"
    for id, array in MEL.items():
        file[id] = array


def in_other_files(at: Path) -> Made:
    for id, array in MEL.items():
        with h5py.File(at / f"{id}.hdf5", "w") as file:
            file["feats"] = array

    def write(file: h5py.File) -> None:
        for id in MEL:
            file[id] = h5py.ExternalLink(f"{id}.hdf5", "feats")

    return hdf5(at, write), MEL


def of_matlab(at: Path) -> Made:
    """As MATLAB's `save -v7.3`: transposed, behind a block of text."""
    with h5py.File(at / "all.mat", "w", userblock_size=512) as file:
        for id, array in MEL.items():
            file[id] = array.T
    with (at / "all.mat").open("r+b") as raw:
        raw.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(128))
    return at / "all.mat", MEL


def with_ids(path: Path) -> None:
    held = np.zeros(len(EMBEDDINGS), [("id", "U8"), ("emb", "f4", (80,))])
    held["id"], held["emb"] = list(EMBEDDINGS), list(EMBEDDINGS.values())
    np.save(path, held)


def tensors(at: Path, change: Callable[[torch.Tensor], object]) -> Path:
    return each(at / "all", ".pt", lambda p, a: torch.save(change(torch.from_numpy(a)), p))


def rows_of(arrays: Arrays) -> list[dict[str, Any]]:
    return [{"id": id, "mel": array} for id, array in arrays.items()]


def zipped(path: Path) -> Path:
    with gzip.open(path.with_name(f"{path.name}.gz"), "wb") as packed:
        packed.write(path.read_bytes())
    path.unlink()
    return path.with_name(f"{path.name}.gz")


def compressed_csv(at: Path) -> Made:
    folder = each(at / "all", ".csv", csv_of)
    for path in sorted(folder.iterdir()):
        zipped(path)
    return folder, MEL


def clusters(at: Path) -> Made:
    """As HuBERT's recipes of fairseq write them."""
    (at / "all").mkdir()
    lines(at / "all/train.km", lambda _, array: words(array))
    (at / "all/dict.km.txt").write_text("".join(f"{n} 1\n" for n in range(500)))
    names = "".join(f"spk/{id}.wav\t16000\n" for id in TOKENS)
    (at / "all/train.tsv").write_text(f"/data\n{names}")
    return at / "all", {f"spk/{id}": array for id, array in TOKENS.items()}


def record(feature: Mapping[str, tuple[int, bytes]]) -> bytes:
    """An example of TensorFlow."""

    def field(number: int, data: bytes) -> bytes:
        size, head = len(data), bytearray([number << 3 | 2])
        while size > 127:
            head.append(size & 127 | 128)
            size >>= 7
        return bytes([*head, size]) + data

    entries = b"".join(
        field(1, field(1, name.encode()) + field(2, field(kind, field(1, data))))
        for name, (kind, data) in feature.items()
    )
    return field(1, entries)


def records(at: Path) -> Made:
    pytest.importorskip("tfrecord")
    with (at / "all.tfrecord").open("wb") as file:
        for id, array in EMBEDDINGS.items():
            data = record({"id": (1, id.encode()), "feats": (2, array.tobytes())})
            file.write(struct.pack("<QI", len(data), 0) + data + bytes(4))
    return at / "all.tfrecord", EMBEDDINGS


POSTERIORS: Mapping[str, list[list[tuple[int, float]]]] = {
    "u1": [[(3, 0.5), (7, 0.5)], [], [(3, 1.0)]], "u2": [[(900, 0.25)]],
}  # fmt: skip
TRIPLES: Arrays = {
    id: np.array([[t, *pair] for t, some in enumerate(each) for pair in some])
    for id, each in POSTERIORS.items()
}


def kaldi(at: Path, name: str, held: Mapping[str, Any], end: str = "ark", mode: str = "") -> Path:
    """Written by Kaldi's own library."""
    library = pytest.importorskip("kaldi_native_io")
    with getattr(library, f"{name}Writer")(f"ark{mode},scp:{at}/all.ark,{at}/all.scp") as writer:
        for id, value in held.items():
            writer.write(id, value)
    return at / f"all.{end}"


def htk(path: Path, frames: NDArray[Any], kind: int) -> None:
    """As HTK writes parameters; bits of a kind say that they are compressed, or have a checksum."""
    data, count = frames.astype(">f4").tobytes(), len(frames)
    if kind & 0o2000:
        scale, bias = np.full(80, 1000, ">f4"), np.full(80, 10, ">f4")
        whole = (frames * 1000 - 10).round().astype(">i2")
        data, count = scale.tobytes() + bias.tobytes() + whole.tobytes(), len(frames) + 4
    head = struct.pack(">iihh", count, 100000, len(data) // count, kind)
    path.write_bytes(head + data + bytes(2 if kind & 0o10000 else 0))


THOUSANDTHS: Arrays = {
    id: (a * 1000).round().astype("f4") / np.float32(1000) for id, a in MEL.items()
}


def megatron(at: Path) -> Made:
    """As Megatron's and fairseq's `IndexedDataset` of mapped files."""
    (at / "all").mkdir()
    held = [array.astype("u2") for array in TOKENS.values()]
    (at / "all/text_document.bin").write_bytes(b"".join(each.tobytes() for each in held))
    sizes = np.array([len(each) for each in held], "<i4")
    pointers = np.cumsum([0, *2 * sizes[:-1]]).astype("<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(held), len(held) + 1)
    ends = np.arange(len(held) + 1, dtype="<i8")
    index = head + sizes.tobytes() + pointers.tobytes() + ends.tobytes()
    (at / "all/text_document.idx").write_bytes(index)
    return at / "all", {f"{n:08d}": each for n, each in enumerate(TOKENS.values())}


class Buffers(torch.nn.Module):
    """Tensors for C++, where there is no `torch.load`."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        for id, array in arrays.items():
            self.register_buffer(id, torch.from_numpy(array))


WAYS: dict[str, Callable[[Path], Made]] = {
    "posteriors of Kaldi": lambda at: (kaldi(at, "Posterior", POSTERIORS), TRIPLES),
    "posteriors of Kaldi by scp": lambda at: (kaldi(at, "Posterior", POSTERIORS, "scp"), TRIPLES),
    "posteriors of Kaldi as text": lambda at: (
        kaldi(at, "Posterior", POSTERIORS, mode=",t"), TRIPLES,
    ),
    "lists of lists of Kaldi": lambda at: (
        kaldi(at, "Int32VectorVector", {"u1": [[5, 6], [], [7]]}),
        {"u1": np.array([[0, 5], [0, 6], [2, 7]])},
    ),
    "pairs of Kaldi by scp": lambda at: (
        kaldi(at, "FloatPairVector", {"u1": [(0.5, 1.0), (2.0, 3.5)]}, "scp"),
        {"u1": np.array([[0.5, 1], [2, 3.5]], "f4")},
    ),
    "numbers of Kaldi": lambda at: (
        kaldi(at, "Float", {"u1": 1.5, "u2": 2.0}, "scp"),
        {"u1": np.array(1.5, "f4"), "u2": np.array(2, "f4")},
    ),
    "integers of Kaldi as text": lambda at: (
        kaldi(at, "Int32Vector", {id: a.tolist() for id, a in TOKENS.items()}, mode=",t"), TOKENS,
    ),
    "HTK": lambda at: (each(at / "all", ".mfc", lambda p, a: htk(p, a, 6)), MEL),
    "HTK with a checksum": lambda at: (
        each(at / "all", ".mfc", lambda p, a: htk(p, a, 6 | 0o10000)), MEL,
    ),
    "compressed HTK": lambda at: (
        each(at / "all", ".mfc", lambda p, a: htk(p, a, 6 | 0o12000)), THOUSANDTHS,
    ),
    "tokens of Megatron": megatron,
    "TorchScript": lambda at: (
        saved(at / "all.pt", lambda p: torch.jit.save(torch.jit.script(Buffers(MEL)), p)), MEL,
    ),
    "pairs of tensors": lambda at: (
        saved(at / "all.pt", lambda p: torch.save(
            [(id, torch.from_numpy(a)) for id, a in MEL.items()], p)), MEL,
    ),
    "pairs in a pickle": lambda at: (
        saved(at / "all.pkl", lambda p: p.write_bytes(pickle.dumps([*MEL.items()]))), MEL,
    ),
    "one array of Zarr": lambda at: (zarr_array(at, MEL["u1"], 3), {"all": MEL["u1"]}),
    "one array of Zarr 2": lambda at: (zarr_array(at, MEL["u1"], 2), {"all": MEL["u1"]}),
    "a batch in Zarr": lambda at: (zarr_array(at, np.ones((3, 5, 8), "f4"), 3), BATCH),
    "Zarr in a zip": zarr_in_a_zip,
    "folder of arrays of Zarr": folder_of_zarr,
    "a batch in .npy": lambda at: (
        saved(at / "all.npy", lambda p: np.save(p, np.ones((3, 5, 8), "f4"))), BATCH,
    ),
    "objects in .npy": lambda at: (
        saved(at / "all.npy", lambda p: np.save(p, objects_of(MEL), allow_pickle=True)), MELS,
    ),
    "objects in .npz": lambda at: (
        saved(at / "all.npz", lambda p: np.savez(p, feats=objects_of(MEL), ids=list(MEL))), MEL,
    ),
    "fields in .npy": lambda at: (saved(at / "all.npy", with_ids), EMBEDDINGS),
    "sparse arrays": lambda at: (
        each(at / "all", ".npz", lambda p, a: scipy.sparse.save_npz(p, scipy.sparse.csr_array(a))),
        MEL,
    ),
    "long doubles": lambda at: (
        each(at / "all", ".npy", lambda p, a: np.save(p, a.astype("g"))), MEL,
    ),
    "netCDF": netcdf,
    "netCDF 4": netcdf_4,
    "ARFF of frames": lambda at: (each(at / "all", ".arff", arff), MEL),
    "ARFF of functionals": functionals,
    "TextGrid": text_grids,
    "msgpack": of_msgpack,
    "TFRecord": records,
    "compressed members": lambda at: (
        tar(at / "all.tar", lambda id: {"npy.gz": gzip.compress(npy_of(MEL[id]))}), MEL,
    ),
    "lists in members": lambda at: (
        tar(at / "all.tar", lambda id: {"tokens.json": json.dumps(TOKENS[id].tolist()).encode()}),
        TOKENS,
    ),
    "pickled members": lambda at: (
        tar(at / "all.tar", lambda id: {"mel.pyd": pickle.dumps(MEL[id])}), MEL,
    ),
    "pickles beside their keys in LMDB": lmdb_with_keys,
    "msgpack in LMDB": lmdb_of_msgpack,
    "compressed numbers in LMDB": lambda at: (
        lmdb_of(at, lambda array: gzip.compress(array.tobytes())), F0,
    ),
    "no ids in Parquet": no_ids,
    "bytes and shapes in Parquet": bytes_and_shapes,
    "pickles in LMDB": lambda at: (lmdb_of(at, pickle.dumps), F0),
    "raw numbers in LMDB": lambda at: (lmdb_of(at, lambda array: array.tobytes()), F0),
    "bytes in Parquet": lambda at: (
        table(at / "all.parquet", {"id": list(MEL), "mel": [*map(npy_of, MEL.values())]}), MEL,
    ),
    "a row a frame in Parquet": long_table,
    "lists of whole numbers in torch": lambda at: (
        saved(at / "all.pt", lambda p: torch.save({k: a.tolist() for k, a in TOKENS.items()}, p)),
        TOKENS,
    ),
    "lists of numbers in torch": lambda at: (
        saved(at / "all.pt", lambda p: torch.save({k: a.tolist() for k, a in MEL.items()}, p)), MEL,
    ),
    "triples": lambda at: (
        saved(at / "all.pkl", lambda p: p.write_bytes(
            pickle.dumps([(id, a, "text") for id, a in MEL.items()]))), MEL,
    ),
    "folder of shards": folder_of_shards,
    "a row a frame in CSV": long_csv,
    "a row a frame in CSV, utterances mixed": long_csv_by_frame,
    "HDF5 of variable length": lambda at: (hdf5(at, of_variable_length), TOKENS),
    "HDF5 beside text": lambda at: (hdf5(at, beside_text), MEL),
    "HDF5 in other files": in_other_files,
    "MATLAB 7.3": of_matlab,
    "sparse tensors": lambda at: (tensors(at, torch.Tensor.to_sparse), MEL),
    "tensors beside objects": lambda at: (
        tensors(at, lambda t: {"feats": t, "made": pathlib.PurePosixPath("x")}), MEL,
    ),
    "rows of tensors": lambda at: (
        saved(at / "all.pt", lambda p: torch.save(
            [{"id": id, "mel": torch.from_numpy(a)} for id, a in MEL.items()], p)),
        MEL,
    ),
    "nested tensors": lambda at: (
        saved(at / "all.pt", lambda p: torch.save(
            torch.nested.nested_tensor([torch.from_numpy(a) for a in MEL.values()]), p)),
        MELS,
    ),
    "list in a pickle": lambda at: (
        saved(at / "all.pkl", lambda p: p.write_bytes(pickle.dumps(list(MEL.values())))), MELS,
    ),
    "rows in a pickle": lambda at: (
        saved(at / "all.pkl", lambda p: p.write_bytes(pickle.dumps(rows_of(MEL)))), MEL,
    ),
    "a pickle without a suffix": lambda at: (
        saved(at / "feats", lambda p: p.write_bytes(pickle.dumps(dict(MEL)))), MEL,
    ),
    "pickles in folders": lambda at: (
        each(at / "all", "", lambda p, a: each(p, ".pkl", lambda q, _: q.write_bytes(
            pickle.dumps(a)), {"mel": a})),
        {f"{id}/mel": array for id, array in MEL.items()},
    ),
    "a pickle that is compressed": lambda at: (
        zipped(saved(at / "all.pkl", lambda p: p.write_bytes(pickle.dumps(dict(MEL))))), MEL,
    ),
    "JSON lines that are compressed": lambda at: (
        zipped(lines(at / "all.jsonl", lambda id, a: json.dumps({"id": id, "u": a.tolist()}))),
        TOKENS,
    ),
    "CSV that are compressed": compressed_csv,
    "CSV of pandas": lambda at: (
        each(at / "all", ".csv", lambda p, a: p.write_text(",".join(["", *map(str, range(80))])
             + "\n" + "".join(f"{n},{','.join(map(repr, r.tolist()))}\n"
                              for n, r in enumerate(a)))), MEL,
    ),
    "lists in CSV": lambda at: (
        saved(at / "all.csv", lambda p: p.write_text("id,units\n" + "".join(
            f'{id},"{a.tolist()}"\n' for id, a in TOKENS.items()))), TOKENS,
    ),
    "units in TSV": lambda at: (
        saved(at / "all.tsv", lambda p: p.write_text("id\tn_frames\ttgt_text\n" + "".join(
            f"{id}\t9\t{words(a)}\n" for id, a in TOKENS.items()))), TOKENS,
    ),
    "frames in JSON lines": lambda at: (
        lines(at / "all.jsonl", lambda id, a: json.dumps({"utt_id": id, "mel": a.tolist()}), MEL),
        MEL,
    ),
    "clusters beside names": clusters,
    "a cluster an utterance": lambda at: (
        saved(at / "all.km", lambda p: p.write_text("7\n8\n9\n")),
        {f"{n:08d}": np.array([n + 7], "i4") for n in range(3)},
    ),
    "rows in JSON": lambda at: (
        saved(at / "all.json", lambda p: p.write_text(json.dumps(
            [{"id": id, "units": a.tolist()} for id, a in TOKENS.items()]))), TOKENS,
    ),
    "units of textless": lambda at: (
        lines(at / "all.txt", lambda id, a: str({"audio": f"{id}.wav", "hubert": words(a)})),
        TOKENS,
    ),
}  # fmt: skip


def follow(message: str, at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Type the line that a refusal names, with the modules that it names."""
    found = re.search(r"as by (featcache\.convert\(.*, 'features')\)", message)
    assert found is not None, message
    known: dict[str, Any] = {"featcache": featcache}
    for name in set(re.findall(r"\b([a-zA-Z]\w+)\.", found[1])) & MODULES:
        known[name] = pytest.importorskip(name)
    monkeypatch.chdir(at)
    exec(f"{found[1]}, progressbar=False)", known)


def refusal(door: str, source: Path, into: Path) -> str:
    with pytest.raises(AdoptionError) as told:
        getattr(featcache, door)(source, into)
    return str(told.value)


MODULES = {
    *("ast", "csv", "gzip", "h5py", "io", "itertools", "json", "kaldi_native_io", "kaldiio"),
    *("lmdb", "msgpack"),
    *("numpy", "pandas", "pathlib", "pickle", "pyarrow", "scipy", "textgrid", "tfrecord", "torch"),
    *("webdataset", "zarr"),
}


# lines leave files open
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", ["adopt", "convert"])
@pytest.mark.parametrize("what", WAYS)
def test_what_a_refusal_says_gives_the_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, door: str
) -> None:
    follow_refusal(tmp_path, monkeypatch, what, door)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", [2, 4, 5])  # 4 is Python's own up to 3.13, 5 from 3.14 on
@pytest.mark.parametrize("what", [*(what for what in WAYS if "pickle" in what), "triples"])
def test_what_a_refusal_of_a_pickle_says_holds_for_all_protocols(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, protocol: int
) -> None:
    monkeypatch.setattr(pickle, "dumps", partial(pickle.dumps, protocol=protocol))
    follow_refusal(tmp_path, monkeypatch, what, "convert")


def follow_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, door: str) -> None:
    (tmp_path / "into").mkdir()
    source, held = WAYS[what](tmp_path)
    message = refusal(door, source, tmp_path / "into" / "cache")
    if "featcache.convert makes a cache of it" in message:
        message = refusal("convert", source, tmp_path / "into" / "cache")
    follow(message, tmp_path / "into", monkeypatch)
    with featcache.open(tmp_path / "into" / "features") as cache:
        (feature,) = cache.features
        assert set(cache) == set(held)
        for id, array in held.items():
            read = cache.read(id, feature)
            assert np.array_equal(read.astype(array.dtype).reshape(array.shape), array), id


def described(at: Path, content: object) -> Path:
    (at / "all").mkdir()
    (at / "all/index.json").write_text(json.dumps(content))
    (at / "all/shard.00000.mds").write_bytes(b"x")
    return at / "all"


@pytest.mark.parametrize("door", ["adopt", "convert"])
def test_shards_of_streaming_libraries_are_loaded_by_these(tmp_path: Path, door: str) -> None:
    mds = {"column_names": ["feats", "id"], "column_encodings": ["ndarray", "str"]}
    spec = json.dumps([1, {"type": "builtins.dict", "context": json.dumps(["id", "feats"])}])
    chunks = {"data_format": ["str", "numpy"], "data_spec": spec}
    cases = {
        r"\[\(a\['id'\], a\['feats'\]\) for a in streaming\.LocalDataset": {"shards": [mds]},
        r"a\['feats'\]\) for a in litdata\.StreamingDataset": {"chunks": [], "config": chunks},
    }
    for number, (words_of, content) in enumerate(cases.items()):
        (tmp_path / str(number)).mkdir()
        source = described(tmp_path / str(number), content)
        with pytest.raises(AdoptionError, match=words_of):
            getattr(featcache, door)(source, tmp_path / "cache")


@pytest.mark.parametrize("door", ["adopt", "convert"])
def test_features_in_files_of_several_kinds_are_adopted_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    """As so-vits-svc leaves them: none is left out without a word."""
    (tmp_path / "all").mkdir()
    for id, array in MEL.items():
        torch.save(torch.from_numpy(array), tmp_path / f"all/{id}.spec.pt")
        torch.save(torch.from_numpy(array * 2), tmp_path / f"all/{id}.wav.soft.pt")
        np.save(tmp_path / f"all/{id}.wav.f0.npy", array[:, 0])
    with pytest.raises(AdoptionError, match=r"one by one: (featcache.*\))") as told:
        getattr(featcache, door)(tmp_path / "all", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"featcache\.adopt\([^)]*\)", str(told.value)):
        exec(line, {"featcache": featcache})
    with featcache.open(tmp_path / "features") as cache:
        assert set(cache.features) == {"spec", "soft", "f0"}
        for id, array in MEL.items():
            assert np.array_equal(cache.read(id, "spec"), array)
            assert np.array_equal(cache.read(id, "soft"), array * 2)
            assert np.array_equal(cache.read(id, "f0"), array[:, 0])


@pytest.mark.parametrize("door", ["adopt", "convert"])
def test_features_in_folders_of_speakers_are_adopted_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    for id, array in MEL.items():
        (tmp_path / "all" / id).mkdir(parents=True)
        torch.save(torch.from_numpy(array), tmp_path / f"all/{id}/{id}-01.soft.pt")
        np.save(tmp_path / f"all/{id}/{id}-01.f0.npy", array[:, 0])
    monkeypatch.chdir(tmp_path)
    message = refusal(door, tmp_path / "all", tmp_path / "cache")
    for line in re.findall(r"featcache\.adopt\([^)]*\)", message):
        exec(line, {"featcache": featcache})
    with featcache.open(tmp_path / "features") as cache:
        assert set(cache) == {f"{id}/{id}-01" for id in MEL}
        for id, array in MEL.items():
            assert np.array_equal(cache.read(f"{id}/{id}-01", "soft"), array)
            assert np.array_equal(cache.read(f"{id}/{id}-01", "f0"), array[:, 0])


@pytest.mark.parametrize("door", ["adopt", "convert"])
@pytest.mark.parametrize("name", ["all.json", "data.list", "all.csv", "by_id.json"])
def test_manifests_of_waveforms_are_no_tables_of_numbers(
    tmp_path: Path, name: str, door: str
) -> None:
    """As those of NeMo, WeNet and SpeechBrain."""
    rows = [{"wav": f"{id}.wav", "duration": 1.5, "text": "say", "snr": 2.5} for id in MEL]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if name == "all.csv":
        text = "ID,duration,wav,spk_id,wrd\n" + "".join(f"{id},1.5,{id}.wav,3,SAY\n" for id in MEL)
    elif name == "by_id.json":
        text = json.dumps(dict(zip(MEL, rows, strict=True)))
    (tmp_path / name).write_text(text)
    told = refusal(door, tmp_path / name, tmp_path / "cache")
    assert "these are waveforms; featcache.extract computes features of them" in told


def test_numbers_are_no_names_of_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the layers of an encoder."""
    for end in (".pt", ".npz"):
        (tmp_path / end).mkdir()
        for id, array in MEL.items():
            if end == ".pt":
                layers = {0: torch.from_numpy(array), 12: torch.from_numpy(array * 2)}
                torch.save(layers, tmp_path / end / f"{id}{end}")
            else:
                arrays: dict[str, Any] = {"0": array}
                np.savez(tmp_path / end / f"{id}{end}", array, array * 2, **arrays)
        told = refusal("convert", tmp_path / end, tmp_path / "cache")
        assert "feature name '0' is not usable" in told
    follow(refusal("convert", tmp_path / ".pt", tmp_path / "cache"), tmp_path, monkeypatch)
    with featcache.open(tmp_path / "features") as cache:
        for id, array in MEL.items():
            assert np.array_equal(cache.read(id, "item0"), array)
            assert np.array_equal(cache.read(id, "item12"), array * 2)


def test_lists_of_numbers_in_several_files_are_named_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for name, arrays in (("embedding", EMBEDDINGS), ("token", TOKENS)):
        held = {id: array.tolist() for id, array in arrays.items()}
        torch.save(held, tmp_path / f"all/utt2{name}.pt")
    told = refusal("convert", tmp_path / "all", tmp_path / "cache")
    assert f"name one of the files, as '{tmp_path}/all/utt2embedding.pt'" in told


@pytest.mark.parametrize("end", [".h5", ".npz"])
def test_arrays_beside_files_of_another_kind_are_told(tmp_path: Path, end: str) -> None:
    (tmp_path / "all").mkdir()
    for id, array in MEL.items():
        np.save(tmp_path / f"all/{id}.f0.npy", array[:, 0])
        if end == ".npz":
            np.savez(tmp_path / f"all/{id}.npz", mel=array)
        else:
            with h5py.File(tmp_path / f"all/{id}.h5", "w") as file:
                file["mel"] = array
    with pytest.raises(AdoptionError, match=r"one by one: (featcache.*\))") as told:
        featcache.adopt(tmp_path / "all", tmp_path / "cache")
    lines_of = re.findall(r"featcache\.\w+\([^)]*\)", str(told.value))
    assert len(lines_of) == 2
    caches = [
        eval(  # noqa: S307
            line.replace("'features'", "into").replace("'npz'", "into"),
             {"featcache": featcache, "into": tmp_path / f"cache-{number}"})
        for number, line in enumerate(lines_of)
    ]  # fmt: skip
    found = {name: cache for cache in caches for name in cache.features}
    assert np.array_equal(found["mel"].read("u1", "mel"), MEL["u1"])
    assert np.array_equal(found["f0"].read("u1", "f0"), F0["u1"])


def test_files_of_all_cases_of_a_suffix_are_taken(tmp_path: Path) -> None:
    each(tmp_path / "all", ".npy", np.save)
    (tmp_path / "all/u1.npy").rename(tmp_path / "all/u1.NPY")
    assert set(featcache.adopt(tmp_path / "all", tmp_path / "cache")) == set(MEL)
    each(tmp_path / "pt", ".PT", lambda p, a: torch.save(torch.from_numpy(a), p))
    assert set(featcache.adopt(tmp_path / "pt", tmp_path / "cache-2")) == set(MEL)


@pytest.mark.parametrize("name", ["Thumbs.db", "desktop.ini", "._u1.npz", ".DS_Store"])
@pytest.mark.parametrize("end", [".npy", ".npz"])
def test_files_of_file_managers_are_no_data(tmp_path: Path, name: str, end: str) -> None:
    each(tmp_path / "all", end, np.save if end == ".npy" else np.savez)
    (tmp_path / "all" / name).write_bytes(b"x")
    cache = featcache.convert(tmp_path / "all", tmp_path / "cache", progressbar=False)
    assert set(cache) == set(MEL)


def test_dicts_in_dicts_tell_the_pattern_that_reads_them(tmp_path: Path) -> None:
    held = {
        id: {"mel": torch.from_numpy(a), "f0": torch.from_numpy(F0[id])} for id, a in MEL.items()
    }
    turned = {
        "mel": {id: held[id]["mel"] for id in held},
        "f0": {id: held[id]["f0"] for id in held},
    }
    for pattern, content in (("{id}/{feature}", held), ("{feature}/{id}", turned)):
        torch.save(content, tmp_path / "all.pt")
        with pytest.raises(AdoptionError, match=re.escape(f"give pattern={pattern!r}")):
            featcache.convert(tmp_path / "all.pt", tmp_path / "none", progressbar=False)
        into = tmp_path / pattern[1:3]
        settings = {"pattern": pattern}
        cache = featcache.convert(tmp_path / "all.pt", into, adopting=settings, progressbar=False)
        assert np.array_equal(cache.read("u1", "f0"), F0["u1"])
        assert np.array_equal(cache.read("u3", "mel"), MEL["u3"])


def test_pickles_beside_arrays_in_shards_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tar(tmp_path / "a.tar", lambda id: {"npy": npy_of(MEL[id]), "f0.pyd": pickle.dumps(F0[id])})
    with caplog.at_level(logging.WARNING, "featcache"):
        featcache.adopt(tmp_path / "a.tar", tmp_path / "cache")
    assert "f0.pyd are left out" in caplog.text


def test_numbers_that_only_torch_has_are_converted_to_wider_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    held = {id: torch.from_numpy(a).to(torch.float8_e4m3fn) for id, a in MEL.items()}
    safetensors.save_file(held, tmp_path / "all.safetensors")
    with pytest.raises(AdoptionError, match=r"as by") as told:
        featcache.adopt(tmp_path / "all.safetensors", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    line = re.search(r"as by (featcache\.convert\(.*, 'features'\))", str(told.value))
    assert line is not None
    exec(line[1], {"featcache": featcache, "safetensors": importlib.import_module("safetensors")})
    with featcache.open(tmp_path / "features") as cache:
        assert np.array_equal(cache.read("u2", "feats"), held["u2"].float().numpy())


@pytest.mark.parametrize("door", ["adopt", "convert"])
def test_features_that_names_end_with_are_told_with_their_pattern(
    tmp_path: Path, door: str
) -> None:
    each(tmp_path / "all", ".mel.npy", np.save)
    each(tmp_path / "f0", ".f0.npy", np.save, F0)
    for path in (tmp_path / "f0").iterdir():
        path.rename(tmp_path / "all" / path.name)
    with pytest.raises(
        AdoptionError, match=r"features 'f0', 'mel' .*give pattern='{id}\.{feature}'"
    ):
        getattr(featcache, door)(tmp_path / "all", tmp_path / "cache")
    cache = featcache.adopt(tmp_path / "all", tmp_path / "cache", pattern="{id}.{feature}")
    assert np.array_equal(cache.read("u1", "f0"), F0["u1"])


def sounds(at: Path) -> Path:
    return each(at / "all", ".wav", lambda path, _: path.write_bytes(b"RIFF"))


def sounds_beside_texts(at: Path) -> Path:
    (at / "all").mkdir()
    (at / "all/wav").mkdir()
    each(at / "all/flac", ".flac", lambda path, _: path.write_bytes(b"fLaC"))
    (at / "all/trans.txt").write_text("u1 HELLO\n")
    return sounds(at / "all/wav").parent.parent


def sounds_in_a_tar(at: Path) -> Path:
    return tar(at / "all.tar", lambda id: {"flac": b"fLaC", "json": b'{"a": 1}', "txt": b"a"})


def sounds_of_kaldi(at: Path) -> Path:
    (at / "wav.scp").write_text("u1 flac -dc u1.flac |\n")
    return at / "wav.scp"


def data_of_kaldi(at: Path) -> Path:
    (at / "data").mkdir()
    (at / "data/text").write_text("u1 HELLO\n")
    sounds_of_kaldi(at / "data")
    return at / "data"


def sounds_in_parquet(at: Path) -> Path:
    """As HuggingFace's `Audio`."""
    held = [{"bytes": b"RIFF", "path": f"{id}.wav"} for id in MEL]
    return table(at / "all.parquet", {"id": list(MEL), "audio": held})


SOUNDS = [sounds, sounds_beside_texts, sounds_in_a_tar, sounds_of_kaldi, data_of_kaldi,
          sounds_in_parquet]  # fmt: skip


@pytest.mark.parametrize("door", ["adopt", "convert"])
@pytest.mark.parametrize("make", SOUNDS)
def test_waveforms_are_no_features(tmp_path: Path, make: Callable[[Path], Path], door: str) -> None:
    if make is sounds_in_parquet:
        door = "convert"  # as `adopt` says
    with pytest.raises(AdoptionError, match=r"; featcache\.extract computes features of them"):
        getattr(featcache, door)(make(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize("kind", ['{"type": "array", "items": "float"}', '["null", "bytes"]'])
def test_records_of_avro_are_loaded_by_their_schema(tmp_path: Path, kind: str) -> None:
    schema = (
        f'{{"fields": [{{"name": "utt_id", "type": "string"}}, {{"name": "x", "type": {kind}}}]}}'
    )
    size = len(schema) * 2  # both in zigzag, seven bits a byte
    head = b"Obj\1\4\x16avro.schema" + bytes([size & 127 | 128, size >> 7]) + schema.encode()
    (tmp_path / "all.avro").write_bytes(head + bytes(40))
    load = (
        r"numpy\.array\(a\['x'\]\)" if "array" in kind else r"numpy\.load\(io\.Bytes.*'float32'\)"
    )
    line = (
        rf"as by featcache\.convert\(\[\(a\['utt_id'\], {load}\) for a in fastavro\.reader\(open\("
    )
    with pytest.raises(AdoptionError, match=line):
        featcache.adopt(tmp_path / "all.avro", tmp_path / "cache")


def test_frames_of_pandas_are_loaded_by_pandas(tmp_path: Path) -> None:
    """Whose arrays are axes and blocks beside those of the numbers."""
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_group("u1").attrs["pandas_type"] = b"frame"
        for name in ("axis0", "axis1", "block0_items"):
            file[f"u1/{name}"] = np.arange(5)
        file["u1/block0_values"] = MEL["u1"]
    line = r"\(a frame an utterance.*convert\(\[\(k\[1:\], pandas\.read_hdf\('.*all\.h5', k\)\.to_n"
    for door in (featcache.adopt, featcache.convert):
        with pytest.raises(AdoptionError, match=line):
            door(tmp_path / "all.h5", tmp_path / "cache")


PICKLED: dict[str, Callable[[object, Path], object]] = {
    ".pt": torch.save,
    ".pkl": lambda held, path: path.write_bytes(pickle.dumps(held)),
}


@pytest.mark.parametrize("door", ["adopt", "convert"])
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("end", PICKLED)
def test_arrays_without_names_are_no_ids_unless_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, kind: type, door: str
) -> None:
    held = [torch.from_numpy(array) for array in MEL.values()]
    PICKLED[end](kind(held), tmp_path / f"all{end}")
    follow(refusal(door, tmp_path / f"all{end}", tmp_path / "a"), tmp_path, monkeypatch)
    with featcache.open(tmp_path / "features") as cache:
        for id, array in MELS.items():
            assert np.array_equal(cache.read(id, "feats"), array)


@pytest.mark.parametrize("door", ["adopt", "convert"])
@pytest.mark.parametrize("end", PICKLED)
def test_items_of_files_are_features_unless_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, door: str
) -> None:
    """As of data sets that were saved item by item."""
    each(
        tmp_path / "all", end,
        lambda p, a: PICKLED[end]((torch.from_numpy(a), p.stem, torch.from_numpy(a[:, 0])), p),
    )  # fmt: skip
    follow(refusal(door, tmp_path / "all", tmp_path / "a"), tmp_path, monkeypatch)
    with featcache.open(tmp_path / "features") as cache:
        assert sorted(cache.features) == ["item0", "item2"]
        assert list(cache.annotation("item1")) == list(cache.ids)
        for id, array in MEL.items():
            assert np.array_equal(cache.read(id, "item0"), array)
            assert np.array_equal(cache.read(id, "item2"), array[:, 0])


def test_lists_of_arrays_in_memory_have_no_names(tmp_path: Path) -> None:
    with pytest.raises(AdoptionError, match=r"'u1': it is a list of 2, whose arrays have no name"):
        featcache.convert({"u1": [*MEL.values()][:2]}, tmp_path / "cache", progressbar=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", [what for what in WAYS if "LMDB" not in what])
def test_damage_in_what_is_refused_is_no_error_of_another_kind(tmp_path: Path, what: str) -> None:
    source, _ = WAYS[what](tmp_path)
    files = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
    random = np.random.default_rng(len(what))
    for number in range(12):
        path = files[random.integers(len(files))]
        data = bytearray(path.read_bytes())
        for _ in range(3):
            data[random.integers(min(len(data), 512))] = random.integers(256)
        whole = path.read_bytes()
        path.write_bytes(data[: random.integers(len(data))] if number % 3 == 2 else data)
        with pytest.raises(AdoptionError):
            featcache.adopt(source, tmp_path / "into" / f"cache-{number}")
        path.write_bytes(whole)


def test_adopt_of_tensors_in_lmdb_says_that_convert_takes_them(tmp_path: Path) -> None:
    def tensor(array: NDArray[Any]) -> bytes:
        file = io.BytesIO()
        torch.save({"mel": torch.from_numpy(array)}, file)
        return file.getvalue()

    source = lmdb_of(tmp_path, tensor, MEL)
    assert "featcache.convert makes a cache of it" in refusal("adopt", source, tmp_path / "a")
    cache = featcache.convert(source, tmp_path / "cache", progressbar=False)
    assert np.array_equal(cache.read("u1", "mel"), MEL["u1"])

"""Files that featcache does not read, each by its own writer: the line of the refusal converts."""

from __future__ import annotations

import csv
import gc
import io
import json
import pathlib
import pickle
import re
import sqlite3
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]
import numpy as np
import pytest
import scipy.io
import torch
from numpy.typing import NDArray

import featcache
from featcache.errors import AdoptionError, ConfigError

Arrays = Mapping[str, NDArray[Any]]
RANDOM = np.random.default_rng(0)
MEL: Arrays = {f"u{n}": RANDOM.standard_normal((n + 1, 80)).astype("f4") for n in range(1, 4)}
F0: Arrays = {id: array[:, 0].copy() for id, array in MEL.items()}
TOKENS: Arrays = {id: RANDOM.integers(0, 500, len(a)).astype("i4") for id, a in MEL.items()}
NUMBERED: Arrays = {f"{n:08d}": array for n, array in enumerate(TOKENS.values())}
EMBEDDINGS: Arrays = {id: array[0] for id, array in MEL.items()}
Made = tuple[Path, Arrays]


def each(folder: Path, end: str, save: Callable[[Path, Any], object], arrays: Arrays = MEL) -> Path:
    folder.mkdir()
    for id, array in arrays.items():
        save(folder / f"{id}{end}", array)
    return folder


def lines(path: Path, made: Callable[[str, NDArray[Any]], str], arrays: Arrays = TOKENS) -> Path:
    path.write_text("".join(made(id, array) + "\n" for id, array in arrays.items()))
    return path


def words(array: NDArray[Any]) -> str:
    return " ".join(map(str, array.tolist()))


def listed(path: Path, line: Callable[[str, Path], str], head: str = "") -> Path:
    """A list of `.npy` files."""
    npy = each(path.with_name("npy"), ".npy", np.save)
    path.write_text(head + "".join(line(id, npy / f"{id}.npy") + "\n" for id in MEL))
    return path


def htk(path: Path, array: NDArray[Any]) -> None:
    """As HTK's HCopy writes parameters of its kind USER."""
    head = struct.pack(">iihh", len(array), 100_000, 4 * array.shape[1], 9)
    path.write_bytes(head + array.astype(">f4").tobytes())


def text_archive(at: Path) -> Made:
    kaldiio = pytest.importorskip("kaldiio")
    kaldiio.save_ark(str(at / "feats.txt"), dict(MEL), text=True)
    read = {id: np.array(array) for id, array in kaldiio.load_ark(str(at / "feats.txt"))}
    return at / "feats.txt", read


def database(at: Path) -> Made:
    with closing(sqlite3.connect(at / "all.db")) as db, db:
        db.execute("create table feats (utt text, dur real, data blob)")
        for id, array in MEL.items():
            file = io.BytesIO()
            np.save(file, array)
            db.execute("insert into feats values (?, 1.5, ?)", (id, file.getvalue()))
    db.close()
    return at / "all.db", MEL


def objects(at: Path) -> Made:
    """As descript-audio-codec saves codes."""

    def save(path: Path, array: NDArray[Any]) -> None:
        with path.open("wb") as file:
            np.save(file, {"codes": array}, allow_pickle=True)  # type: ignore[arg-type]

    return each(at / "all", ".dac", save, TOKENS), TOKENS


def members_of_a_zip(at: Path) -> Made:
    with zipfile.ZipFile(at / "fbank80.zip", "w") as file:
        for id, array in MEL.items():
            with file.open(f"{id}.npy", "w") as member:
                np.save(member, array)
    rows = "".join(f"{id}\tfbank80.zip:80:99\t{len(a)}\tsay {id}\n" for id, a in MEL.items())
    (at / "train.tsv").write_text("id\taudio\tn_frames\ttgt_text\n" + rows)
    return at / "train.tsv", MEL


COLUMNS = [f"c{n}" for n in range(80)]


def csv_of(path: Path, array: NDArray[Any], head: str = "", sign: str = ",") -> None:
    rows = "".join(sign.join(map(repr, row.tolist())) + "\n" for row in array)
    path.write_text(head + rows)


WAYS: dict[str, Callable[[Path], Made]] = {
    "km of HuBERT": lambda at: (lines(at / "train.km", lambda _, a: words(a)), NUMBERED),
    "tokens of Kaldi": lambda at: (lines(at / "tokens", lambda id, a: f"{id} {words(a)}"), TOKENS),
    "units after a bar": lambda at: (lines(at / "u.txt", lambda id, a: f"{id}|{words(a)}"), TOKENS),
    "f0 as text": lambda at: (each(at / "all", ".f0", np.savetxt, F0), F0),
    "tokens in JSON lines": lambda at: (
        lines(at / "all.jsonl", lambda id, a: json.dumps({"id": id, "units": a.tolist()})),
        TOKENS,
    ),
    "manifest of NeMo": lambda at: (
        listed(at / "all.json", lambda id, p: json.dumps({"seconds": 1.5, "feature": str(p)})),
        MEL,
    ),
    "manifest in TSV": lambda at: (
        listed(at / "all.tsv", lambda id, p: f"{id}\t{p}\tsay {id}", "id\taudio\ttext\n"),
        MEL,
    ),
    "manifest in CSV": lambda at: (
        listed(at / "all.csv", lambda id, p: f"{id},1.5,{p}", "ID,duration,feat\n"),
        MEL,
    ),
    "list of files and texts": lambda at: (
        listed(at / "all.txt", lambda id, p: f"{p}|say {id}"),
        MEL,
    ),
    "manifest of fairseq": members_of_a_zip,
    "tokens in YAML": lambda at: (
        lines(at / "all.yaml", lambda id, a: f"{id}: {a.tolist()}"),
        TOKENS,
    ),
    "CSV with a header": lambda at: (
        each(at / "all", ".csv", lambda p, a: csv_of(p, a, ",".join(COLUMNS) + "\n")),
        MEL,
    ),
    "CSV of openSMILE": lambda at: (
        each(at / "all", ".csv", lambda p, a: csv_of(p, a, ";".join(COLUMNS) + "\n", ";")),
        MEL,
    ),
    "CSV of embeddings": lambda at: (
        lines(at / "all.csv", lambda id, a: ",".join([id, *map(repr, a.tolist())]), EMBEDDINGS),
        EMBEDDINGS,
    ),
    "text archive": text_archive,
    "HTK": lambda at: (each(at / "all", ".fea", htk), MEL),
    "raw floats": lambda at: (each(at / "all", ".f32", lambda p, a: a.tofile(p)), MEL),
    "database": database,
    "pickles": lambda at: (
        each(at / "all", ".pk", lambda p, a: p.write_bytes(pickle.dumps(a))),
        MEL,
    ),
    "joblib": lambda at: (each(at / "all", ".joblib", lambda p, a: joblib.dump(a, p)), MEL),
    "MATLAB": lambda at: (
        each(at / "all", ".mat", lambda p, a: scipy.io.savemat(p, {"feats": a})),
        MEL,
    ),
    "objects": objects,
}  # fmt: skip


# Python 3.13 tells of connections that a line leaves open
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", WAYS)
def test_the_line_that_the_refusal_names_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    source, held = WAYS[what](tmp_path)
    with pytest.raises(AdoptionError, match=r"load it yourself, as by") as told:
        featcache.convert(source, tmp_path / "cache", progressbar=False)
    found = re.search(r"as by (featcache\.convert\(.*, 'features')\)", str(told.value))
    assert found is not None
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {
        "csv": csv, "featcache": featcache, "io": io, "joblib": joblib, "json": json, "numpy": np,
        "pathlib": pathlib, "pickle": pickle, "scipy": scipy, "sqlite3": sqlite3, "torch": torch,
        "yaml": pytest.importorskip("yaml") if "YAML" in what else None,
    }  # fmt: skip
    for name in ("kaldiio", "pandas"):
        if f"{name}." in found[1]:
            known[name] = pytest.importorskip(name)
    exec(f"{found[1]}, progressbar=False)", known)
    gc.collect()  # while the warnings are ignored, not within another test
    with featcache.open(tmp_path / "features") as cache:
        (feature,) = cache.features
        assert set(cache) == set(held)
        for id, array in held.items():
            read = cache.read(id, feature)
            assert np.array_equal(read.astype(array.dtype).reshape(array.shape), array), id


def lines_of_json(path: Path, ids: str) -> None:
    path.write_text("".join(json.dumps({"id": id, "units": [1, 2]}) + "\n" for id in ids))


def rows_of_csv(path: Path, ids: str) -> None:
    path.write_text("".join(f"{id},0.5,1.5\n" for id in ids))


def frames_of_csv(path: Path, ids: str) -> None:
    path.write_text("utt,frame,c0,c1\n" + "".join(f"{id},{n},.5,.5\n" for id in ids for n in "01"))


def archive_as_text(path: Path, ids: str) -> None:
    path.write_text("".join(f"{id}  [\n  1.0 2.0 ]\n" for id in ids))


REPEATING = [
    (lines_of_json, ".jsonl", ("abc", "da")),
    (lines_of_json, ".jsonl", ("abca",)),
    (rows_of_csv, ".csv", ("abc", "da")),  # in one file they are frames
    (frames_of_csv, ".csv", ("abc", "da")),
    (archive_as_text, ".ark", ("abc", "da")),
    (archive_as_text, ".ark", ("abca",)),
]


@pytest.mark.parametrize(("save", "end", "files"), REPEATING)
def test_a_line_refuses_an_id_that_comes_twice(
    tmp_path: Path, save: Callable[[Path, str], None], end: str, files: Sequence[str]
) -> None:
    source = tmp_path / "all"
    source.mkdir()
    for number, ids in enumerate(files):
        save(source / f"{number}{end}", ids)
    source = source if len(files) > 1 else source / f"0{end}"
    with pytest.raises(AdoptionError, match=r"load it yourself, as by") as told:
        featcache.convert(source, tmp_path / "cache", progressbar=False)
    found = re.search(r"as by featcache\.convert\((.*), 'features'\)", str(told.value))
    assert found is not None
    modules = ("csv", "itertools", "json", "kaldiio", "numpy", "pandas", "pathlib")
    known = {name: pytest.importorskip(name) for name in modules if f"{name}." in found[1]}
    pairs = eval(found[1], known)  # noqa: S307
    with pytest.raises(AdoptionError, match=r"have utterance 'a' twice: as number \d and as"):
        featcache.convert(pairs, tmp_path / "features", progressbar=False)
    assert not (tmp_path / "features").exists()


def test_pairs_are_taken_as_a_mapping_is(tmp_path: Path) -> None:
    given = {id: {"mel": array, "text": id} for id, array in MEL.items()}
    for pairs in ([*given.items()], iter(given.items())):
        cache = featcache.convert(pairs, tmp_path / "cache", overwrite=True, progressbar=False)
        for id, array in MEL.items():
            assert np.array_equal(cache.read(id, "mel"), array)
        assert list(cache.annotation("text")) == [*given]
    with pytest.raises(ConfigError, match="pairs of an id and its arrays; number 0 is ndarray"):
        featcache.convert(
            [*MEL.values()],  # type: ignore[list-item]
            tmp_path / "other",
            progressbar=False,
        )


def test_a_table_of_other_things_is_no_array(tmp_path: Path) -> None:
    (tmp_path / "all.tsv").write_text("audio\tduration\ttext\na.wav\t1.5\tone\nb.wav\t2.5\ttwo\n")
    with pytest.raises(AdoptionError, match=r"not recognised"):
        featcache.convert(tmp_path / "all.tsv", tmp_path / "cache", progressbar=False)


def test_a_zip_of_arrays_is_read_as_numpys(tmp_path: Path) -> None:
    """As fairseq packs features of speech to text."""
    with zipfile.ZipFile(tmp_path / "fbank80.zip", "w") as file:
        for id, array in MEL.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            file.writestr(f"{id}.npy", buffer.getvalue())
    cache = featcache.convert(tmp_path / "fbank80.zip", tmp_path / "cache", progressbar=False)
    for id, array in MEL.items():
        assert np.array_equal(cache.read(id, "feats"), array)


def test_texts_beside_arrays_in_npz_are_annotations(tmp_path: Path) -> None:
    each(
        tmp_path / "all", ".npz", lambda p, a: np.savez(p, mel=a, text=p.stem, words=["a", "b"][:1])
    )
    with pytest.raises(AdoptionError, match="'words' of 'u1' is a list of texts"):
        featcache.convert(tmp_path / "all", tmp_path / "a", progressbar=False)
    each(tmp_path / "2", ".npz", lambda p, a: np.savez(p, mel=a, text=f"say {p.stem}"))
    cache = featcache.convert(tmp_path / "2", tmp_path / "b", progressbar=False)
    assert cache.features == ("mel",)
    assert list(cache.annotation("text")) == ["say u1", "say u2", "say u3"]


def test_shapes_in_columns_beside_flat_arrays_are_refused(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    flat = [array.ravel().tolist() for array in MEL.values()]
    raw = [array.tobytes() for array in MEL.values()]
    shapes = [list(array.shape) for array in MEL.values()]
    cases: list[dict[str, Any]] = [
        {"mel": flat, "mel_shape": shapes},
        {"mel": raw, "shape": shapes},
    ]
    for number, columns in enumerate(cases):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"id": list(MEL), **columns}), path)
        with pytest.raises(AdoptionError, match=r"has the shapes of arrays that were laid flat"):
            featcache.convert(path, tmp_path / "cache", progressbar=False)


def test_named_databases_of_lmdb_are_features(tmp_path: Path) -> None:
    lmdb = pytest.importorskip("lmdb")

    def as_bytes(array: NDArray[Any]) -> bytes:
        file = io.BytesIO()
        np.save(file, array)
        return file.getvalue()

    with lmdb.open(str(tmp_path / "all"), map_size=1 << 22, max_dbs=2) as made:
        for name, arrays in (("mel", MEL), ("f0", F0)):
            database = made.open_db(name.encode())
            with made.begin(write=True, db=database) as writing:
                for id, array in arrays.items():
                    writing.put(id.encode(), as_bytes(array))
    cache = featcache.convert(tmp_path / "all", tmp_path / "a", progressbar=False)
    for id in MEL:
        assert np.array_equal(cache.read(id, "mel"), MEL[id])
        assert np.array_equal(cache.read(id, "f0"), F0[id])
    with lmdb.open(str(tmp_path / "all"), map_size=1 << 22) as made, made.begin(write=True) as more:
        more.put(b"u9", as_bytes(F0["u1"]))
    with pytest.raises(AdoptionError, match="has values beside named databases"):
        featcache.convert(tmp_path / "all", tmp_path / "b", progressbar=False)


def test_a_list_called_a_shape_beside_no_flat_array_is_a_feature(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    lips = [[0.5, 1.0], [2.0]]
    pq.write_table(pa.table({"id": ["a", "b"], "lip_shape": lips}), tmp_path / "all.parquet")
    cache = featcache.convert(tmp_path / "all.parquet", tmp_path / "cache", progressbar=False)
    assert [cache.read(id, "lip_shape").tolist() for id in cache] == lips


@pytest.mark.parametrize("text", ["\n\n1 2\n", "\n\n", "\x1c\n", "x.npy\x1c\r\n1.5,"])
def test_a_text_with_empty_lines_is_refused_as_any_other(tmp_path: Path, text: str) -> None:
    (tmp_path / "all.txt").write_bytes(text.encode())
    with pytest.raises(AdoptionError):
        featcache.convert(tmp_path / "all.txt", tmp_path / "cache", progressbar=False)

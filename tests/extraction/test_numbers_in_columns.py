"""Tables of numbers in columns, a row a frame or an utterance: the line of the refusal is right."""

from __future__ import annotations

import gzip
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import featcache
from featcache.errors import AdoptionError, FeatureError

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

Arrays = Mapping[str, NDArray[Any]]
RANDOM = np.random.default_rng(0)
# ids that pandas takes for numbers or for nothing unless it is told
FRAMES: Arrays = {
    id: RANDOM.normal(size=(5 + n, 4)).astype("f4") for n, id in enumerate(("007", "NA", "u 3"))
}
VECTORS: Arrays = {id: array[0] for id, array in FRAMES.items()}
TOKENS: Arrays = {id: RANDOM.integers(0, 500, (len(a), 2)) for id, a in FRAMES.items()}


def long(arrays: Arrays = FRAMES, id: str = "id", **columns: Callable[[int], object]) -> Any:
    """A row a frame."""
    return pandas.DataFrame([
        {id: key} | {name: make(n) for name, make in columns.items()}
        | {f"f{i}": value for i, value in enumerate(frame)}
        for key, array in arrays.items() for n, frame in enumerate(array)
    ])  # fmt: skip


def shuffled(table: Any) -> Any:
    return table.sample(frac=1, random_state=0).reset_index(drop=True)


def wide(**columns: str) -> Any:
    """A row an utterance."""
    table = pandas.DataFrame(np.stack([*VECTORS.values()]), index=[*VECTORS])
    for name, value in columns.items():
        table[name] = value
    return table


TABLES: dict[str, tuple[Callable[[], Any], Arrays]] = {
    "frames": (lambda: long(), FRAMES),
    "numbered frames": (lambda: shuffled(long(frame=lambda n: n)), FRAMES),
    "frames by seconds": (lambda: shuffled(long(start_s=lambda n: n / 100)), FRAMES),
    "numbers and seconds of frames": (
        lambda: shuffled(long(frame=lambda n: n, time=lambda n: n / 100, end=lambda n: n / 100)),
        FRAMES,
    ),
    "ids called otherwise": (lambda: long(id="utterance", t=lambda n: n), FRAMES),
    "ids called by no name": (lambda: long(id="who", t=lambda n: n), FRAMES),
    "beside speakers": (lambda: long(speaker=lambda n: "anna", phone=lambda n: n % 3), FRAMES),
    "tokens": (lambda: shuffled(long(TOKENS, frame=lambda n: n)), TOKENS),
    "of an index": (lambda: long(frame=lambda n: n).set_index(["id", "frame"]), FRAMES),
    "embeddings": (lambda: wide().rename_axis("id").add_prefix("c"), VECTORS),
    "embeddings beside texts": (
        lambda: wide(speaker="anna").rename_axis("utt").add_prefix("c"), VECTORS,
    ),
}  # fmt: skip


def csv(table: Any, path: Path, **options: Any) -> Path:
    table.to_csv(path, index=any(table.index.names), **options)
    return path


def json_lines(table: Any, path: Path) -> Path:
    table = table.reset_index() if any(table.index.names) else table
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_dict("records")))
    return path


def parquet(table: Any, path: Path) -> Path:
    table.to_parquet(path)
    return path


def feather(table: Any, path: Path) -> Path:
    (table.reset_index() if any(table.index.names) else table).to_feather(path)
    return path


def parts(table: Any, path: Path) -> Path:
    """A folder of two files."""
    path.mkdir()
    table[:7].to_parquet(path / "1.parquet")
    table[7:].to_parquet(path / "2.parquet")
    return path


FILES: dict[str, Callable[[Any, Path], Path]] = {
    ".csv": csv,
    ".tsv": lambda table, path: csv(table, path, sep="\t"),
    ".csv.gz": csv,
    ".jsonl": json_lines,
    ".parquet": parquet,
    ".feather": feather,
    "": parts,
}  # fmt: skip


def typed(
    source: Path, at: Path, monkeypatch: pytest.MonkeyPatch, said: str = ""
) -> featcache.Cache:
    """Type the line that the refusal names."""
    with pytest.raises(AdoptionError, match=f"{said}.*load it yourself, as by") as told:
        featcache.convert(source, at / "cache", progressbar=False)
    found = re.search(r"as by (featcache\.convert\(.*, 'features')\)", str(told.value))
    assert found is not None
    monkeypatch.chdir(at)
    known = {
        "featcache": featcache, "gzip": gzip, "json": json, "pandas": pandas, "pathlib": pathlib
    }  # fmt: skip
    exec(f"{found[1]}, progressbar=False)", known)
    return featcache.open(at / "features")


def compare(cache: featcache.Cache, arrays: Arrays) -> None:
    assert set(cache) == set(arrays)
    for id, array in arrays.items():
        read = cache.read(id, "feats")
        assert read.shape == array.shape
        assert np.array_equal(read, array)
        assert read.dtype == array.dtype


CASES = [(end, what) for end in (".csv", ".parquet") for what in TABLES]
CASES += [(end, what) for end in FILES for what in ("numbered frames", "embeddings")]


@pytest.mark.parametrize(("end", "what"), sorted({*CASES}))
def test_a_table_of_numbers_is_loaded_by_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, end: str
) -> None:
    make, arrays = TABLES[what]
    source = FILES[end](make(), tmp_path / f"all{end}")
    compare(typed(source, tmp_path, monkeypatch, "a row is"), arrays)


def test_missing_numbers_are_none_and_missing_ids_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = long(frame=lambda n: n)
    table.loc[2, "f1"], table.loc[3, "f2"] = np.nan, np.inf
    for end in (".csv", ".parquet"):
        source = FILES[end](table, tmp_path / f"all{end}")
        with pytest.raises(FeatureError, match=r"'007'.*nan at"):
            typed(source, tmp_path, monkeypatch)
        table_2 = table.copy()
        table_2.loc[:4, "id"] = None
        source = FILES[end](table_2, tmp_path / f"lacks{end}")
        with pytest.raises(AdoptionError, match="key nan; ids are text"):
            typed(source, tmp_path, monkeypatch)


def test_columns_that_are_left_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (csv(TABLES["beside speakers"][0](), tmp_path / "all.csv"),
                 parquet(TABLES["beside speakers"][0](), tmp_path / "all.parquet")):  # fmt: skip
        with pytest.raises(AdoptionError, match="utterance 'id'; without 'speaker', 'phone'"):
            featcache.convert(path, tmp_path / "cache", progressbar=False)


@pytest.mark.parametrize("save", ["to_csv", "to_parquet"])
def test_files_of_frames_without_ids_are_called_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: str
) -> None:
    """Columns that nobody named have numbers, which are no frame."""
    (tmp_path / "all").mkdir()
    for id, array in FRAMES.items():
        table = pandas.DataFrame(array)
        table = table if save == "to_csv" else table.add_prefix("c")
        getattr(table, save)(tmp_path / "all" / f"{id}.{save[3:]}", index=False)
    compare(typed(tmp_path / "all", tmp_path, monkeypatch), FRAMES)


def test_a_data_set_in_folders_of_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"u{n}": array for n, array in enumerate(FRAMES.values())}
    long(arrays, frame=lambda n: n).to_parquet(tmp_path / "all", partition_cols=["id"])
    compare(typed(tmp_path / "all", tmp_path, monkeypatch), arrays)


def test_descriptors_of_opensmile_have_times_and_no_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "all").mkdir()
    for id, array in FRAMES.items():
        table = long({"unknown": array}, id="name", frameTime=lambda n: n / 100)
        csv(table, tmp_path / "all" / f"{id}.csv", sep=";")
    compare(typed(tmp_path / "all", tmp_path, monkeypatch), FRAMES)

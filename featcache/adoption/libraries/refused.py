"""Ways out for files that featcache does not read: a line that loads them, and converts.

A line names the file, and calls libraries by their own names (`numpy`, `torch`, `kaldiio`, ...).
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

_FILES = 64  # of a folder
_MOST_LINE = 1 << 20  # bytes that are looked at
_RUNS_CODE = "pickles may run code when they are loaded"
_AS_TEXT = "numbers as text have no dtype"
_PATHS = "it lists files of arrays"
_READ = "pathlib.Path(PATH).read_bytes()"
_LINES = "pathlib.Path(PATH).read_text().splitlines()"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf)", re.IGNORECASE)
_MEMBER = re.compile(r"(.*\.zip):\d+:\d+")  # as fairseq names members
_IDS = ("id", "ID", "utt_id", "utt", "key", "name", "audio_id")


class _Loads(NamedTuple):
    """Expressions that load a file, which is called PATH in them."""

    why: str  # featcache does not read it
    whole: str = ""  # gives a mapping of ids; "": the file is one utterance
    each: str = ""  # gives the array of an utterance, or its features; "": it has no such file


_MAT = "{k: v for k, v in scipy.io.loadmat(PATH).items() if k[:2] != '__'}"
_BY_SUFFIX: dict[tuple[str, ...], _Loads] = {
    (".pkl", ".pickle", ".pk", ".p", ".pyd"): _Loads(
        _RUNS_CODE, f"pickle.loads({_READ})", f"pickle.loads({_READ})"
    ),
    (".joblib", ".jl"): _Loads(_RUNS_CODE, "joblib.load(PATH)", "joblib.load(PATH)"),
    (".mat",): _Loads("SciPy reads it", _MAT, _MAT),
    (".npy",): _Loads("one array is no data set", "", "numpy.load(PATH)"),
    (".f32", ".bin", ".raw", ".dat", ".cmp", ".mgc", ".bap", ".lf0", ".f0"): _Loads(
        "raw numbers do not say their dtype and shape (80 of float32 a frame, in this line)",
        "",
        "numpy.fromfile(PATH, 'float32').reshape(-1, 80)",
    ),
}


def way_out(source: Path) -> str:
    """Return why a source is not read, and a line that converts it; "" where none is known."""
    files = [source] if source.is_file() else sorted(source.glob("*"))[:_FILES]
    files = [path for path in files if path.is_file() and path.name[:1] != "."]
    suffixes = {path.suffix for path in files}
    if len(suffixes) != 1:
        return ""
    loads = _loads_of(files[0])
    if loads is None or not (loads.each or (source.is_file() and loads.whole)):
        return ""
    if source.is_file():
        path = repr(str(source))
        alone = f"{{pathlib.Path({path}).stem: {loads.each.replace('PATH', path)}}}"
        line = loads.whole.replace("PATH", path) or alone
    else:
        each = f"pathlib.Path({str(source)!r}).glob('*{suffixes.pop()}')"
        line = f"{{p.stem: {loads.each.replace('PATH', 'p')} for p in {each}}}"
    return f"{loads.why}; load it yourself, as by featcache.convert({line}, 'features')"


def _loads_of(path: Path) -> _Loads | None:
    """Return what loads a file, by its first bytes, or else its suffix."""
    with path.open("rb") as file:
        front = file.read(_MOST_LINE)
    if front[:6] == b"\x93NUMPY" and b"'|O'" in front[:128]:
        load = "numpy.load(PATH, allow_pickle=True).item()"
        return _Loads(_RUNS_CODE, load, load)
    if front[:16] == b"SQLite format 3\0":
        return _of_sqlite(path)
    if (found := _of_htk(front, path.stat().st_size)) is not None:
        return found
    with suppress(UnicodeDecodeError):
        text = front[: front.rfind(b"\n") + 1] or front
        lines = [line for line in text.decode().splitlines() if line.split()]
        if b"\0" not in text and lines:
            return _of_json(path, text) or _of_text(lines, path)
    suffix = path.suffix.lower()
    return next((each for suffixes, each in _BY_SUFFIX.items() if suffix in suffixes), None)


def _of_htk(front: bytes, size: int) -> _Loads | None:
    """Return what loads HTK's parameters: a big-endian header of 12 bytes, float32 after it."""
    frames, frame_bytes = int.from_bytes(front[:4], "big"), int.from_bytes(front[8:10], "big")
    is_plain = len(front) >= 12 and not front[10] & 0x14  # compressed, or with a checksum
    if not (is_plain and frames and frame_bytes % 4 == 0 and size == 12 + frames * frame_bytes):
        return None
    shape = f"reshape(-1, {frame_bytes // 4})"
    return _Loads(
        "HTK's files are not read", "", f"numpy.frombuffer({_READ}, '>f4', offset=12).{shape}"
    )


def _of_sqlite(path: Path) -> _Loads | None:
    """Return what loads the first table that has texts beside bytes."""
    with (
        suppress(sqlite3.Error),
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as db,
    ):
        for (table,) in db.execute(
            "select name from sqlite_master where type = 'table'"
        ).fetchall():
            found = db.execute(f'select * from "{table}"')
            row = dict(
                zip((each[0] for each in found.description), found.fetchone() or (), strict=False)
            )
            id = next((name for name, value in row.items() if isinstance(value, str)), None)
            data = next((name for name, value in row.items() if isinstance(value, bytes)), None)
            if id is not None and data is not None and not {"'", '"'} & {*f"{table}{id}{data}"}:
                is_npy = row[data][:6] == b"\x93NUMPY"
                load = "numpy.load(io.BytesIO(v))" if is_npy else "numpy.frombuffer(v, 'float32')"
                rows = (
                    f"""sqlite3.connect(PATH).execute('select "{id}", "{data}" from "{table}"')"""
                )
                return _Loads("databases are not read", f"{{k: {load} for k, v in {rows}}}")
    return None


def _of_json(path: Path, text: bytes) -> _Loads | None:
    """Return what loads JSON: a mapping or a list, or an object a line."""
    try:
        first = json.loads(text.splitlines()[0])
    except (ValueError, RecursionError):
        first = None
    if isinstance(first, Mapping) and (path.suffix == ".jsonl" or len(text.splitlines()) > 1):
        rows = f"map(json.loads, {_LINES})"
        arrays = [k for k, v in first.items() if isinstance(v, list) and v and _is_number(v[0])]
        if column := _of_paths(first):
            return _Loads(_PATHS, _loaded(column, first, rows))
        if not arrays:
            return None
        id = next((name for name in _IDS if name in first), None)
        key = f"r[{id!r}]" if id else "f'{n:08d}'"
        load = f"{{{key}: numpy.array(r[{arrays[0]!r}]) for n, r in enumerate({rows})}}"
        return _Loads(_AS_TEXT, load)
    if path.suffix == ".json":
        whole = f"{{k: numpy.array(v) for k, v in json.loads({_READ}).items()}}"
        return _Loads(_AS_TEXT, whole, f"numpy.array(json.loads({_READ}))")
    return None


def _of_text(lines: Sequence[str], path: Path) -> _Loads | None:
    """Return what loads lines of text, which begin with an id, or are a table."""
    if path.suffix in (".yaml", ".yml"):
        whole = f"{{k: numpy.array(v) for k, v in yaml.safe_load({_READ}).items()}}"
        return _Loads(_AS_TEXT, whole)
    if re.match(r"\S+\s+\[(\s|$)", lines[0]):
        return _Loads("Kaldi's text archives are not read", "dict(kaldiio.load_ark(PATH))")
    sign = next((each for each in "\t|;," if each in lines[0]), " ")
    rows = [line.split(sign) if sign != " " else line.split() for line in islice(lines, 64)]
    if sign == "|" and len(rows[0]) > 1 and len(words := rows[0][1].split()) > 0:
        if _is_path(rows[0][0]):
            columns = "(line.split('|')[0] for line in " + _LINES + ")"
            return _Loads(_PATHS, f"{{pathlib.Path(p).stem: numpy.load(p) for p in {columns}}}")
        if all(map(_is_number, words)):
            columns = f"(line.split('|')[:2] for line in {_LINES})"
            dtype = _dtype(words)
            return _Loads(
                _AS_TEXT, f"{{k: numpy.array(v.split(), {dtype!r}) for k, v in {columns}}}"
            )
    has_header = len(rows) > 1 and not any(map(_is_number, rows[0]))
    first = rows[1] if has_header else rows[0]
    if has_header and len(first) == len(rows[0]):
        named = dict(zip(rows[0], first, strict=True))
        if member := next(filter(None, map(_MEMBER.fullmatch, first)), None):
            return _Loads("it lists members of a zip", repr(str(path.parent / member[1])))
        if column := _of_paths(named):
            table = f"csv.DictReader({_LINES}, delimiter={sign!r})"
            return _Loads(_PATHS, _loaded(column, named, table))
    return _of_numbers(rows, first, sign, skip=int(has_header))


def _of_numbers(
    rows: Sequence[Sequence[str]], first: Sequence[str], sign: str, *, skip: int
) -> _Loads | None:
    """Return what loads rows of numbers, maybe with an id in front of each."""
    split = "map(str.split, LINES)" if sign == " " else f"csv.reader(LINES, delimiter={sign!r})"
    split = split.replace("LINES", _LINES)
    split = f"list({split})[1:]" if skip else split
    if not _is_number(first[0]) and len(first) > 1 and all(map(_is_number, first[1:])):
        dtype = _dtype([word for row in rows[skip:] for word in row[1:]])
        return _Loads(_AS_TEXT, f"{{r[0]: numpy.array(r[1:], {dtype!r}) for r in {split}}}")
    numbers = [number for number, word in enumerate(first) if _is_number(word)]
    if len(numbers) <= len(first) / 2:  # a table of other things, with some numbers
        return None
    if len({len(row) for row in rows}) > 1:
        dtype = _dtype([word for row in rows for word in row])
        load = f"{{f'{{n:08d}}': numpy.array(r, {dtype!r}) for n, r in enumerate({split})}}"
        return _Loads(_AS_TEXT, load)
    options = "" if sign == " " else f", delimiter={sign!r}"
    options += ", skiprows=1" if skip else ""
    options += f", usecols={numbers}" if len(numbers) < len(first) else ""
    return _Loads(_AS_TEXT, "", f"numpy.loadtxt(PATH{options}, ndmin=2)")


def _loaded(column: str, row: Mapping[str, object], rows: str) -> str:
    """Return what loads the files that a column of rows names."""
    id = next((name for name in _IDS if name in row), None)
    key = f"r[{id!r}]" if id else f"pathlib.Path(r[{column!r}]).stem"
    load = "numpy.load" if str(row[column]).endswith(".npy") else "torch.load"
    return f"{{{key}: {load}(r[{column!r}]) for r in {rows}}}"


def _of_paths(row: Mapping[str, object]) -> str | None:
    return next((name for name, value in row.items() if name and _is_path(value)), None)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.endswith((".npy", ".pt", ".pth"))


def _is_number(word: object) -> bool:
    return _NUMBER.fullmatch(str(word).strip()) is not None


def _dtype(words: Sequence[str]) -> str:
    return "int32" if all(word.strip().lstrip("+-").isdigit() for word in words) else "float32"

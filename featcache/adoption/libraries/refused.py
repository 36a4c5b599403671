"""Ways out for files that featcache does not read: a line that loads them, and converts.

A line names the file, and calls libraries by their own names (`numpy`, `torch`, `kaldiio`, ...).
"""

from __future__ import annotations

import ast
import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from featcache.adoption.libraries.kaldi_objects import loads_of_kaldi
from featcache.adoption.libraries.loads import (
    IDS,
    LISTS,
    MOST_BYTES,
    ONE_ARRAY,
    RUNS_CODE,
    SOUND,
    WAVEFORMS,
    Loads,
    loads_of_binary,
    loads_of_folder,
    numbered,
)
from featcache.adoption.libraries.number_columns import REAL, TEXT, WHOLE, loads_of_rows
from featcache.errors import AdoptionError, describe

_FILES = 64  # of a folder
_MOST_JSON = 1 << 26  # bytes of a file that is read whole
_AS_TEXT = "numbers as text have no dtype"
_PATHS = "it lists files of arrays"
_PARSES: dict[str, Callable[[str], Any]] = {
    "json.loads": json.loads,
    "ast.literal_eval": ast.literal_eval,
}
_UNNAMED = "Unnamed: 0"  # as pandas calls a column without a name
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf)", re.IGNORECASE)
_MEMBER = re.compile(r"(.*\.zip):\d+:\d+")  # as fairseq names members
_TEXT_MATRIX = re.compile(rb"\S+\s+\[(\s|$)")  # of Kaldi
_OPENS = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".xz": "lzma"}
_READS_FILES = ("loadtxt(", "read_csv(", "joblib.load(", "loadmat(", "numpy.load(", "load_ark(")
_ADOPTED = {
    ".npy": "npy", ".pt": "pt", ".pth": "pt", ".ckpt": "pt", ".h5": "hdf5", ".hdf5": "hdf5",
    ".safetensors": "safetensors",
}  # fmt: skip
_FILES_AS_GROUPS = (".h5", ".hdf5")
_COPIED = (".npz", ".parquet", ".arrow", ".feather", ".lmdb", ".tar", ".ark")
_BESIDE = (".md", ".rst", ".log", ".json", ".yaml", ".yml", ".ini")

_MAT = "{k: v for k, v in scipy.io.loadmat(<path>).items() if k[:2] != '__'}"
_INTERVALS = "[[a.minTime, a.maxTime] for a in textgrid.TextGrid.fromFile(str(<path>))[0]]"
_BY_SUFFIX: dict[tuple[str, ...], Loads] = {
    (".pkl", ".pickle", ".pk", ".p", ".pyd"): Loads(
        RUNS_CODE, "pickle.loads(<bytes>)", "pickle.loads(<bytes>)"
    ),
    (".joblib", ".jl", ".z"): Loads(RUNS_CODE, "joblib.load(<path>)", "joblib.load(<path>)"),
    (".mat",): Loads("SciPy reads it", _MAT, _MAT),
    (".npy",): Loads(ONE_ARRAY, "", "numpy.load(<path>)"),
    (".llc",): Loads("lilcom's files are not read alone", "", "lilcom.decompress(<bytes>)"),
    (".png",): Loads("pictures are not read", "", "numpy.asarray(PIL.Image.open(<path>))"),
    (".f32", ".bin", ".raw", ".dat", ".cmp", ".mgc", ".bap", ".lf0", ".f0"): Loads(
        "raw numbers do not say their dtype and shape (80 of float32 a frame, in this line)",
        "",
        "numpy.fromfile(<path>, 'float32').reshape(-1, 80)",
    ),
}


def way_out(source: Path, packed: Path | None = None) -> str:
    """Return why a source is not read, and a line that converts it; "" where none is known.

    Args:
        source: a file, a folder, or files by a pattern.
        packed: the compressed source that it was unpacked from.
    """
    if source.is_dir() and (loads := loads_of_folder(source)):
        return f"{loads.why}; {_as_by(_filled(_alone(loads, source), repr(str(source))))}"
    files = _files(source)
    suffixes = {path.suffix for path in files}
    if len(suffixes) != 1 or (suffixes == {""} and len(files) > 1):
        return _one_by_one(source, files)
    loads = Loads(WAVEFORMS) if suffixes <= {*SOUND} else _loads_of(files[0])
    return "" if loads is None else _told(loads, source, files, packed)


def known_way(source: Path) -> str:
    """Return a line for a source that a kind refuses for what is in it; "" where none is known."""
    if source.is_dir() and (loads := loads_of_folder(source)):
        return _as_by(_filled(_alone(loads, source), repr(str(source))))
    for path in (files := _files(source)):
        front = _front(path)
        loads = loads_of_binary(path, front)
        if path.suffix in (".ark", ".scp"):
            loads = loads_of_kaldi(path) or _of_kaldi(path, front)
        if loads is not None and loads.why != ONE_ARRAY:
            if loads.why == LISTS and len(files) > 1:
                return f"name one of the files, as {str(path)!r}"
            told = _told(loads, source, files, None)
            return told.partition("; ")[2] or told
    return ""


def _front(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES)
    except OSError as error:
        raise AdoptionError(f"{str(path)!r} cannot be read: {describe(error)}") from error


def _files(source: Path) -> list[Path]:
    """Return the first files of a source, without hidden ones and descriptions of the rest."""
    if source.is_file():
        return [source]
    found = source.rglob("*") if source.is_dir() else source.parent.glob(source.name)
    below = source if source.is_dir() else source.parent
    shown = (path for path in found if not any(p[:1] == "." for p in path.relative_to(below).parts))
    files = sorted(islice((path for path in shown if path.is_file()), _FILES))
    return [path for path in files if path.suffix.lower() not in _BESIDE] or files


def _as_by(line: str) -> str:
    return f"load it yourself, as by featcache.convert({line}, 'features')"


def _alone(loads: Loads, path: Path) -> str:
    """Return the expression for a source that is one file, or one folder."""
    return _pairs(loads.whole) if loads.whole else f"{{{path.stem!r}: {loads.each}}}"


def _told(loads: Loads, source: Path, files: Sequence[Path], packed: Path | None) -> str:
    if not loads.whole and not loads.each:
        return loads.why
    given = packed or source
    end = given.suffix if packed and given.is_file() else ""
    if packed and not end:
        end = next((path.suffix for path in _files(packed) if path.suffix in _OPENS), "")
    if source.is_file():
        line, name = _alone(loads, source), repr(str(given))
    else:
        line, name = _of_each(loads, given, f"{files[0].suffix}{end}", files, source), "p"
        if not end:  # else it is opened
            line = line.replace("load_ark(<path>)", "load_ark(str(<path>))")  # which takes no Path
    if end == ".gz":
        line = line.replace("(<path>, None)", f"({name}, None, compression_type='gzip')")
    if end and "<path>" in line and not any(each in line for each in _READS_FILES):
        return f"{loads.why}; unpack {str(given)!r}, and convert what is unpacked"
    return f"{loads.why}; {_as_by(_filled(line, name, _OPENS.get(end, '')))}"


def _of_each(loads: Loads, given: Path, end: str, files: Sequence[Path], source: Path) -> str:
    """Return the expression for a folder of files, or some of its files."""
    root = given if given.is_dir() else given.parent
    is_deep = any(path.parent != (source if source.is_dir() else source.parent) for path in files)
    which = f"[!.]*{end}" if given.is_dir() else given.name
    some = f"pathlib.Path({str(root)!r}).{'rglob' if is_deep else 'glob'}({which!r})"
    id = "p.stem" if end.count(".") < 2 else f"p.name[:-{len(end)}]"
    if is_deep:
        id = f"p.relative_to({str(root)!r}).as_posix()[:-{len(end)}]"
    if loads.each:
        return f"{{{id}: {loads.each} for p in {some}}}"
    key = f"{id} + '-' + k" if "{n:08d}" in loads.whole else "k"
    pairs = _pairs(loads.whole)
    rows = f"{pairs}.items()" if pairs == loads.whole else pairs
    return f"[({key}, v) for p in {some} for k, v in {rows}]"


def _pairs(whole: str) -> str:
    """Return an expression for pairs in place of a dict, which would keep the last of equal ids."""
    made = ast.parse(re.sub("<(path|bytes|lines)>", r"_\1_", whole), mode="eval").body
    if isinstance(made, ast.DictComp):
        key, value = (ast.get_source_segment(whole, each) for each in (made.key, made.value))
        behind = whole.encode()[made.value.end_col_offset : -1].decode()
        return f"[({key}, {value}){behind}]"
    if isinstance(made, ast.Call) and ast.unparse(made.func) == "dict":
        return f"[*{ast.get_source_segment(whole, made.args[0])}]"  # all, so that files are closed
    return whole


def _filled(expression: str, path: str, opens: str = "") -> str:
    """Fill in what names a file, maybe opened by a module for compressed ones."""
    file = path if path == "p" else f"pathlib.Path({path})"
    data, text = f"{file}.read_bytes()", f"{file}.read_text()"
    if opens:
        data, text = f"{opens}.open({path}).read()", f"{opens}.open({path}, 'rt').read()"
        path = f"{opens}.open({path})"
    filled = expression.replace("<bytes>", data).replace("<lines>", f"{text}.splitlines()")
    return filled.replace("<path>", path)


def _one_by_one(source: Path, files: Sequence[Path]) -> str:
    """Return how files of several kinds are taken, where each is known."""
    folder = source if source.is_dir() else source.parent
    ways, by_kind = [], _by_kind(files)
    count = sum(suffix.lower() in _ADOPTED for suffix, _ in by_kind)
    for suffix, paths in by_kind:
        if suffix.lower() in _ADOPTED:
            ways.append(_adopting(folder, suffix, paths, alone=count == 1))
        elif suffix.lower() in _COPIED:
            made = suffix.lstrip(".")
            ways.append(f"featcache.convert({f'{folder}/*{suffix}'!r}, {made!r})")
    if ways:
        return f"it holds files of several kinds; take them one by one: {', '.join(ways)}"
    if any(path.suffix.lower() in SOUND or path.name == "wav.scp" for path in files):
        return WAVEFORMS
    known = [path for path in files if _loads_of(path) is not None]
    if not known:
        return ""
    if clusters := next((path for path in known if path.suffix == ".km"), None):
        return way_out(clusters)
    if len({path.with_suffix("") for path in known}) == 1:  # one beside its index
        return way_out(known[0])
    suffix = max(known, key=lambda path: path.stat().st_size).suffix
    return f"it holds files of several kinds; name those of one, as {f'{folder}/*{suffix}'!r}"


def _adopting(folder: Path, suffix: str, paths: Sequence[Path], *, alone: bool) -> str:
    """Return the call that adopts files of one kind among others."""
    end = _common_end([path.name for path in paths]) or suffix
    more = end[: -len(suffix)]
    feature = re.sub(r"\W", "", re.split(r"[._-]", more)[-1]) or suffix[1:].lower()
    named = "" if alone and not more else f", feature={feature!r}"
    named += f", pattern={'{id}' + more!r}" if more else ""
    if suffix.lower() in _FILES_AS_GROUPS:
        named = ", pattern='{id}/{feature}'"
    below = {path.parent for path in paths}
    if len(below) > 1:  # folders of speakers, say
        kind = _ADOPTED[suffix.lower()]
        return f"featcache.adopt({str(folder)!r}, 'features'{named}, kind={kind!r})"
    return f"featcache.adopt({f'{below.pop()}/*{end}'!r}, 'features'{named})"


def _by_kind(files: Sequence[Path]) -> list[tuple[str, list[Path]]]:
    """Return suffixes and files, apart where few words before the suffix part them."""
    found: dict[tuple[str, str], list[Path]] = {}
    for suffix in sorted({path.suffix for path in files}):
        paths = [path for path in files if path.suffix == suffix]
        words = [re.split(r"[._-]", path.name.removesuffix(suffix))[-1] for path in paths]
        are_features = 2 * len({*words}) <= len(paths)
        for path, word in zip(paths, words, strict=True):
            found.setdefault((suffix, word if are_features else ""), []).append(path)
    return [(suffix, paths) for (suffix, _), paths in found.items()]


def _common_end(names: Sequence[str]) -> str:
    """Return what all names end with, from a sign on that parts names."""
    signs = takewhile(lambda each: len({*each}) == 1, zip(*(n[::-1] for n in names), strict=False))
    common = "".join(each[0] for each in signs)[::-1]
    # of "-0001.wav.f0.npy" and "-0001_mel.npy" what begins with a number is of the ids
    found = re.search(r"\.(?=.*\.)", common) or re.search(r"[._-](?!\d+[._-])", common)
    return common[found.start() :] if found and len(names) > 1 else ""


def _loads_of(path: Path) -> Loads | None:
    """Return what loads a file, by its first bytes, or else its suffix."""
    front = _front(path)
    if (found := loads_of_binary(path, front)) is not None:
        return found
    with suppress(UnicodeDecodeError):
        text = front[: front.rfind(b"\n") + 1] or front
        lines = [line for line in text.decode().splitlines() if line.split()]
        if b"\0" not in text and lines:
            return (
                _of_json(path, text) if text.lstrip()[:1] in (b"{", b"[") else _of_text(lines, path)
            )
    suffix = path.suffix.lower()
    return next((each for suffixes, each in _BY_SUFFIX.items() if suffix in suffixes), None)


def _of_kaldi(path: Path, front: bytes) -> Loads | None:
    """Return what loads archives as text, and what an scp has by commands and ranges."""
    if path.suffix == ".ark":
        return _loads_of(path)
    is_plain = all(line.rstrip()[-1:] not in (b"|", b"]") for line in front.splitlines())
    return None if is_plain else Loads("Kaldi's library reads it", "kaldiio.load_scp(<path>)")


def _of_text_archive() -> Loads:
    return Loads("Kaldi's text archives are not read", "dict(kaldiio.load_ark(<path>))")


def _of_json(path: Path, text: bytes) -> Loads | None:
    """Return what loads JSON: a mapping or a list, or an object a line."""
    lines = text.splitlines()
    for name, parse in _PARSES.items():
        first: object = None
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            first = parse(lines[0].decode())
        if isinstance(first, Mapping) and (path.suffix == ".jsonl" or len(lines) > 1):
            rows = f"map({name}, <lines>)"
            if column := _of_paths(first):
                return Loads(_PATHS, _loaded(column, first, rows))
            found = _of_columns(first, rows) or _of_records(lines, name, rows)
            return found or (Loads(WAVEFORMS) if _names_sounds(first) else None)
    if path.suffix != ".json" or path.stat().st_size > _MOST_JSON:
        return None
    with suppress(ValueError, RecursionError):
        return _of_whole_json(json.loads(path.read_bytes()))
    return None


def _of_records(lines: Sequence[bytes], parse: str, rows: str) -> Loads | None:
    """Return what loads an object a line of text and single numbers."""
    columns: dict[str, list[str]] = {}
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        for line in lines:
            for name, value in dict(_PARSES[parse](line.decode())).items():
                columns.setdefault(name, []).append(str(value))
    kinds = {name: _kind_of(values) for name, values in columns.items()}
    frame = f"pandas.DataFrame({rows})"
    return loads_of_rows(kinds, lambda _: frame, lambda name: _repeats(columns[name]), "float32")


def _of_whole_json(held: object) -> Loads | None:
    """Return what loads a file of one mapping, or one list."""
    load = "json.loads(<bytes>)"
    if isinstance(held, list) and held and isinstance(held[0], Mapping):
        return _of_columns(held[0], load)
    each = f"numpy.array({load})" if _is_array(held) else ""
    if not isinstance(held, Mapping) or not held:
        return Loads(_AS_TEXT, numbered(load, "numpy.array(a)"), each) if each else None
    first = next(iter(held.values()))
    if isinstance(first, Mapping) and not any(isinstance(each, list) for each in first.values()):
        return Loads(WAVEFORMS) if _names_sounds(first) else None
    arrays = "{n: numpy.array(a) for n, a in v.items() if isinstance(a, list)}"
    value = arrays if isinstance(first, Mapping) else "numpy.array(v)"
    whole = f"{{k: {value} for k, v in {load}.items()}}"
    of_file = f"{{k: numpy.array(v) for k, v in {load}.items() if isinstance(v, list)}}"
    return Loads(_AS_TEXT, whole, of_file)


def _of_columns(row: Mapping[str, object], rows: str) -> Loads | None:
    """Return what loads rows by name, of which some are lists, or texts, of numbers."""
    loads = {}
    for name, value in row.items():
        if _is_array(value):
            loads[name] = f"numpy.array(r[{name!r}])"
        elif isinstance(value, str) and value[:1] == "[" and _is_array(_evaluated(value)):
            loads[name] = f"numpy.array(json.loads(r[{name!r}]))"
        elif isinstance(value, str) and _is_numbers(words := value.split()):
            loads[name] = f"numpy.array(r[{name!r}].split(), {_dtype(words)!r})"
    if not loads:
        return None
    id = next((name for name in IDS if name in row), None)
    stem = next((k for k, v in row.items() if isinstance(v, str) and v.endswith(SOUND)), None)
    key = f"r[{id!r}]" if id else f"pathlib.Path(r[{stem!r}]).stem" if stem else "f'{n:08d}'"
    pairs = ", ".join(f"{name!r}: {load}" for name, load in loads.items())
    value_of = next(iter(loads.values())) if len(loads) == 1 else f"{{{pairs}}}"
    return Loads(_AS_TEXT, f"{{{key}: {value_of} for n, r in enumerate({rows})}}")


def _names_sounds(row: Mapping[str, object]) -> bool:
    return any(isinstance(each, str) and each.lower().endswith(SOUND) for each in row.values())


def _is_numbers(words: Sequence[str]) -> bool:
    return len(words) > 1 and all(map(_is_number, words))


def _evaluated(text: str) -> object:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def _is_array(value: object) -> bool:
    """Whether this is a list of numbers, or of such lists."""
    if not isinstance(value, list):
        return False
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float)


def _of_marked(lines: Sequence[str], path: Path) -> Loads | None:
    """Return what loads text whose name, or first line, says what it is."""
    if path.suffix == ".km":
        return _of_clusters(path)
    if path.suffix in (".yaml", ".yml"):
        whole = "{k: numpy.array(v) for k, v in yaml.safe_load(<bytes>).items()}"
        return Loads(_AS_TEXT, whole)
    if _TEXT_MATRIX.match(lines[0].encode()):
        return _of_text_archive()
    if "ooTextFile" in lines[0]:
        why = "it holds labels of times (featcache.Cache.annotate takes texts), as intervals"
        return Loads(why, "", f"numpy.array({_INTERVALS})")
    if lines[0].lstrip().lower().startswith(("@relation", "%")):
        return _of_arff(lines)
    return None


def _of_text(lines: Sequence[str], path: Path) -> Loads | None:
    """Return what loads lines of text, which begin with an id, or are a table."""
    if (marked := _of_marked(lines, path)) is not None:
        return marked
    sign = next((each for each in "\t|;," if each in lines[0]), " ")
    some = lines[:64]
    rows = [*csv.reader(some, delimiter=sign)] if sign != " " else [*map(str.split, some)]
    if sign == "|" and (barred := _of_bars(rows)) is not None:
        return barred
    has_header = len(rows) > 1 and _is_header(rows[0])
    first = rows[1] if has_header else rows[0]
    if has_header and len(first) == len(rows[0]):
        named = dict(zip(rows[0], first, strict=True))
        if member := next(filter(None, map(_MEMBER.fullmatch, first)), None):
            return Loads("it lists members of a zip", repr(str(path.parent / member[1])))
        table = f"csv.DictReader(<lines>, delimiter={sign!r})"
        if column := _of_paths(named):
            return Loads(_PATHS, _loaded(column, named, table))
        if found := _of_columns(named, table) or _of_named_numbers(lines, path, sign):
            return found
        if _names_sounds(named):
            return Loads(WAVEFORMS)
    return _of_numbers(rows, first, sign, skip=int(has_header))


def _is_header(words: Sequence[str]) -> bool:
    """Whether a row names columns; pandas numbers those that nobody named."""
    numbers = [word for word in words if _is_number(word)]
    return numbers == [*map(str, range(len(numbers)))] and len(numbers) != 1


def _of_named_numbers(lines: Sequence[str], path: Path, sign: str) -> Loads | None:
    """Return what loads a table of numbers in columns by name, an index of pandas in front."""
    names, *table = csv.reader(lines, delimiter=sign) if sign != " " else map(str.split, lines)
    if {len(names)} != {*map(len, table)} or len({*names}) < len(names):
        return None
    columns = dict(zip(names, map(list, zip(*table, strict=True)), strict=True))
    if "" in names and _kind_of(unnamed := columns.pop("")) == TEXT:
        columns = {_UNNAMED: unnamed} | columns
    kinds = {name: _kind_of(words) for name, words in columns.items()}
    signs = {" ": r", sep='\s+'", ",": ""}.get(sign, f", sep={sign!r}")

    def read(id: str | None) -> str:
        text = ""
        if id is not None:  # which may be 007, or NA
            text = f", dtype={{{id!r}: str}}, keep_default_na=False, na_values=['', 'nan', 'NaN']"
        return f"pandas.read_csv(<path>{signs}{text})"

    if {*columns.get("name", ())} == {"unknown"}:  # of openSMILE, which was told no name
        del kinds["name"]
    found = loads_of_rows(kinds, read, lambda name: _repeats(columns[name]), "float32")
    return found and found._replace(why=f"{_AS_TEXT}; {found.why}")


def _repeats(values: Sequence[str]) -> bool:
    return len({*values}) < len(values)


def _kind_of(words: Sequence[str]) -> str:
    """Return what a column of words holds; missing numbers are reals."""
    if not all(_is_number(word) or not word for word in words):
        return TEXT
    return WHOLE if all(word.lstrip("+-").isdigit() for word in words) else REAL


def _of_clusters(path: Path) -> Loads:
    """Return what loads the clusters of HuBERT: a line an utterance, as in the `.tsv` beside it."""
    array = "numpy.array(r.split(), 'int32')"
    table = path.with_suffix(".tsv")
    if not table.is_file():
        return Loads(_AS_TEXT, f"{{f'{{n:08d}}': {array} for n, r in enumerate(<lines>)}}")
    id = "pathlib.PurePath(t.split('\\t')[0]).with_suffix('').as_posix()"
    ids = f"pathlib.Path({str(table)!r}).read_text().splitlines()[1:]"
    return Loads(_AS_TEXT, f"{{{id}: {array} for t, r in zip({ids}, <lines>, strict=True)}}")


def _of_bars(rows: Sequence[Sequence[str]]) -> Loads | None:
    """Return what loads names of files, or ids, before a bar."""
    if len(rows[0]) > 1 and len(words := rows[0][1].split()) > 0:
        if _is_path(rows[0][0]):
            columns = "(line.split('|')[0] for line in <lines>)"
            return Loads(_PATHS, f"{{pathlib.Path(p).stem: numpy.load(p) for p in {columns}}}")
        if all(map(_is_number, words)):
            columns = "(line.split('|')[:2] for line in <lines>)"
            dtype = _dtype(words)
            return Loads(
                _AS_TEXT, f"{{k: numpy.array(v.split(), {dtype!r}) for k, v in {columns}}}"
            )
    return None


def _of_arff(lines: Sequence[str]) -> Loads | None:
    """Return what loads ARFF, as of openSMILE: rows of numbers, maybe with an id in front."""
    begin = next((n for n, line in enumerate(lines) if line.strip().lower() == "@data"), None)
    rows = [line.split(",") for line in lines[begin + 1 :]] if begin is not None else []
    if not rows:
        return None
    numbers = [number for number, word in enumerate(rows[0]) if _is_number(word)]
    table = "csv.reader(<lines>, quotechar=\"'\") if r and r[0][:1] not in ('@', '%')"
    array = f"[r[n] for n in {_range(numbers)}]"
    ids = [row[0] for row in rows]
    if 0 not in numbers and (len(ids) == 1 or len({*ids}) == len(ids)):
        return Loads(_AS_TEXT, f"{{r[0]: numpy.array({array}, 'float32') for r in {table}}}")
    return Loads(_AS_TEXT, "", f"numpy.array([{array} for r in {table}], 'float32')")


def _range(numbers: Sequence[int]) -> str:
    first, end = numbers[0], numbers[-1] + 1
    whole = list(numbers) == list(range(first, end))
    return f"range({first}, {end})" if whole else repr(list(numbers))


def _of_numbers(
    rows: Sequence[Sequence[str]], first: Sequence[str], sign: str, *, skip: int
) -> Loads | None:
    """Return what loads rows of numbers, maybe with an id in front of each."""
    split = "map(str.split, LINES)" if sign == " " else f"csv.reader(LINES, delimiter={sign!r})"
    split = split.replace("LINES", "<lines>")
    split = f"list({split})[1:]" if skip else split
    if not _is_number(first[0]) and len(first) > 1 and all(map(_is_number, first[1:])):
        dtype = _dtype([word for row in rows[skip:] for word in row[1:]])
        if len({row[0] for row in rows}) < len(rows):  # rows are frames
            array = f"numpy.array([r[1:] for r in g], {dtype!r})"
            id = "key=lambda r: r[0]"
            by_id = f"itertools.groupby(sorted({split}, {id}), {id})"
            return Loads(_AS_TEXT, f"{{k: {array} for k, g in {by_id}}}")
        return Loads(_AS_TEXT, f"{{r[0]: numpy.array(r[1:], {dtype!r}) for r in {split}}}")
    numbers = [number for number, word in enumerate(first) if _is_number(word)]
    if len(numbers) <= len(first) / 2:  # a table of other things, with some numbers
        return None
    if len({len(row) for row in rows}) > 1:
        dtype = _dtype([word for row in rows for word in row])
        load = f"{{f'{{n:08d}}': numpy.array(r, {dtype!r}) for n, r in enumerate({split})}}"
        return Loads(_AS_TEXT, load)
    options = "" if sign == " " else f", delimiter={sign!r}"
    options += ", skiprows=1" if skip else ""
    options += f", usecols={numbers}" if len(numbers) < len(first) else ""
    return Loads(_AS_TEXT, "", f"numpy.loadtxt(<path>{options}, ndmin=2)")


def _loaded(column: str, row: Mapping[str, object], rows: str) -> str:
    """Return what loads the files that a column of rows names."""
    id = next((name for name in IDS if name in row), None)
    key = f"r[{id!r}]" if id else f"pathlib.Path(r[{column!r}]).stem"
    load = "numpy.load" if str(row[column]).endswith(".npy") else "torch.load"
    return f"{{{key}: {load}(r[{column!r}]) for r in {rows}}}"


def _of_paths(row: Mapping[str, object]) -> str | None:
    return next((name for name, value in row.items() if name and _is_path(value)), None)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.endswith((".npy", ".pt", ".pth"))


def _is_number(word: object) -> bool:
    return _NUMBER.fullmatch(str(word).strip()) is not None


def _dtype(words: Iterable[str]) -> str:
    return "int32" if all(word.strip().lstrip("+-").isdigit() for word in words) else "float32"

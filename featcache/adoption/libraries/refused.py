"""Ways out for files that featcache does not read: a line that loads them, and converts."""

from __future__ import annotations

from pathlib import Path

_RUNS_CODE = "pickles may run code when they are loaded"
_AS_TEXT = "numbers as text have no dtype"
_READ = "pathlib.Path({path}).read_bytes()"
# by suffix: why it is not read, what reads one file, and what reads each file of a folder, whose
# name is then the id; {path} is an expression
_LOADS: dict[tuple[str, ...], tuple[str, str, str]] = {
    (".pkl", ".pickle", ".p"): (_RUNS_CODE, f"pickle.loads({_READ})", f"pickle.loads({_READ})"),
    (".joblib", ".jl"): (_RUNS_CODE, "joblib.load({path})", "joblib.load({path})"),
    (".mat",): (
        "SciPy reads it",
        "{{k: v for k, v in scipy.io.loadmat({path}).items() if k[:2] != '__'}}",
        "{{k: v for k, v in scipy.io.loadmat({path}).items() if k[:2] != '__'}}",
    ),
    (".csv",): (_AS_TEXT, "", "numpy.loadtxt({path}, delimiter=',', ndmin=2)"),
    (".txt", ".tsv"): (_AS_TEXT, "", "numpy.loadtxt({path}, ndmin=2)"),
    (".npy",): ("one array is no data set", "", "numpy.load({path})"),
    (".json",): (
        _AS_TEXT,
        f"{{{{k: numpy.array(v) for k, v in json.loads({_READ}).items()}}}}",
        f"numpy.array(json.loads({_READ}))",
    ),
}
_FILES = 64  # of a folder


def way_out(source: Path) -> str:
    """Return why a source of a known suffix is not read, and how it is converted; "" for others."""
    files = [source] if source.is_file() else sorted(source.glob("*"))[:_FILES]
    files = [path for path in files if path.is_file()]
    for suffixes, (why, of_file, of_each) in _LOADS.items():
        if not files or not all(path.suffix.lower() in suffixes for path in files):
            continue
        if source.is_file():
            path = repr(str(source))
            if _holds_objects(source):
                why, of_file = _RUNS_CODE, "numpy.load({path}, allow_pickle=True).item()"
            alone = f"{{pathlib.Path({path}).stem: {of_each.format(path=path)}}}"
            line = of_file.format(path=path) or alone
        else:
            each = f"pathlib.Path({str(source)!r}).glob('*{files[0].suffix}')"
            line = f"{{p.stem: {of_each.format(path='p')} for p in {each}}}"
        return f"{why}; load it yourself, as by featcache.convert({line}, 'features')"
    return ""


def _holds_objects(path: Path) -> bool:
    """Whether a `.npy` file is a pickle."""
    with path.open("rb") as file:
        front = file.read(128)
    return front[:6] == b"\x93NUMPY" and b"'|O'" in front

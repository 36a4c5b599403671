"""Witnesses: what a cache was made from, in words, so that a difference can be shown."""

from __future__ import annotations

import ast
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import decode_source
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from featcache.format import digest
from featcache.staleness.code import is_users_module, parsed
from featcache.staleness.follow import Follower
from featcache.staleness.provenance import Provenance, hparams_of
from featcache.staleness.torch_modules import ModuleDescription
from featcache.staleness.values import NOTHING, Values, settled

# Definitions in the user's files: digests of functions and constants, needed or not.
#
# Recorded to explain what changed while objects were made.

MOST_S = 0.08  # a tree of hundreds of files is not waited for
_QUOTED = re.compile(r"""(["'])([A-Za-z_]\w*)\1""")


class Definitions(NamedTuple):
    """Digests by file and qualified name; and the names that stand in quotes in any file."""

    digests: dict[str, dict[str, str]]
    quoted: frozenset[str]


def definitions() -> Definitions:
    """Return those of the user's files that are loaded, the smallest first while time lasts.

    Time limits the digests alone: names in quotes are those of all files, so that two records of
    the same files have the same.
    """
    begun = time.thread_time()
    found: dict[str, dict[str, str]] = {}
    quoted: set[str] = set()
    for path in sorted(_files(), key=_size):
        try:
            text = decode_source(path.read_bytes())
            quoted.update(name for _, name in _QUOTED.findall(text))
            if time.thread_time() - begun > MOST_S:
                continue
            tree = parsed(text)
        except (OSError, SyntaxError, ValueError):
            continue
        name = path.name if path.name not in found else f"{path.parent.name}/{path.name}"
        found[name] = dict(_defined(tree.body, text.splitlines()))
    return Definitions(found, frozenset(quoted))


def _files() -> set[Path]:
    modules = [each for each in list(sys.modules.values()) if isinstance(each, ModuleType)]
    files = (vars(each).get("__file__") for each in modules if is_users_module(each))
    return {Path(each) for each in files if isinstance(each, str) and each.endswith(".py")}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _defined(body: list[ast.stmt], lines: list[str], prefix: str = "") -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body, lines, f"{prefix}{node.name}.")
            continue
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for each in targets if isinstance(each, ast.Name)]
        if names:
            text = digest(_code(lines[node.lineno - 1 : node.end_lineno]))
            yield from ((prefix + name, text) for name in names)


def _code(lines: list[str]) -> bytes:
    """Return lines without layout and comments of their own."""
    stripped = (line.strip() for line in lines)
    kept = (line for line in stripped if line and not line.startswith("#"))
    return "\n".join(kept).encode("utf-8", "surrogatepass")


# Witnesses: a record of what a cache was made with, which explains and never refuses.

MOST_TEXT = 20_000  # characters of one function's source
MOST_LINE = 72  # characters of a line that is shown
MOST_TENSORS = 3  # that are named of a module
GIT_S = 0.03  # a slow file system is not waited for: the record has no git section then
# by how telling a difference is
_SECTIONS = (
    "functions",
    "hparams",
    "attributes",
    "weights",
    "data set",
    "environment",
    "definitions",
    "torch",
    "versions",
    "command",
    "git",
)


def witnesses(
    provenance: Provenance, extractor: object = None, data: object = None
) -> dict[str, object]:
    """Return a record of what features are made with, as plain JSON.

    Holds when and by which command, the user's functions with their source, hparams and attributes
    of the extractor, weights by name, plain attributes of the data set, what else is defined in the
    user's files, versions of libraries, environment variables that these files name, the git
    commit, settings of torch.
    """
    values, defined = Values(Follower(extractor)), definitions()
    held = vars(extractor) if hasattr(extractor, "__dict__") else {}
    held = {name: value for name, value in held.items() if name not in provenance.written}
    return {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [],
        "functions": {provenance.names[name]: each for name, each in provenance.source.items()},
        "sources": {name: text[:MOST_TEXT] for name, text in provenance.sources.items()},
        "hparams": _plain(hparams_of(extractor), values),
        "attributes": _plain(held, values),
        "weights": _weights(provenance),
        "data set": _plain(vars(data) if hasattr(data, "__dict__") else {}, values),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name in provenance.mentioned or name in defined.quoted
        },
        "definitions": defined.digests,
        "torch": {
            **provenance.found.get("torch", {}),
            "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "versions": _versions(),
        "git": _git(provenance),
    }


def changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return what differs between two records, the most telling first.

    >>> changes({"versions": {"torch": "2.12"}}, {"versions": {"torch": "2.13"}})
    ['torch: 2.12 -> 2.13']
    """
    lines: list[str] = []
    for section in _SECTIONS:
        was, now = old.get(section, {}), new.get(section, {})
        if not isinstance(was, Mapping) or not isinstance(now, Mapping):
            if was != now:
                lines.append(f"{section}: {_short(was)} -> {_short(now)}")
            continue
        if section == "git" and not (was and now):  # not in time, or in no repository: unknown
            continue
        for name in sorted({*was, *now}):
            if was.get(name) != now.get(name):
                found = _lines(section, name, was.get(name), now.get(name))
                lines += [line for line in found if line not in lines]
    sources = [each.get("sources", {}) for each in (old, new)]
    return [_with_change(line, *sources) for line in lines]


def _lines(section: str, name: str, was: object, now: object) -> Iterator[str]:
    if section not in ("weights", "definitions"):
        yield _line(section, name, was, now)
    elif isinstance(was, Mapping) and isinstance(now, Mapping):
        unlike = [each for each in sorted({*was, *now}) if was.get(each) != now.get(each)]
        if section == "definitions":
            yield from (f"{name}: {each}" for each in unlike)
            return
        more = f" and {len(unlike) - MOST_TENSORS} more" if len(unlike) > MOST_TENSORS else ""
        yield f"weights of {name}: {', '.join(unlike[:MOST_TENSORS])}{more}"


def _line(section: str, name: str, was: object, now: object) -> str:
    if section == "functions":
        file, _, function = name.partition(":")
        state = " (new)" if was is None else " (gone)" if now is None else ""
        return f"{file}: {function}{state}"
    shown = name if section == "versions" else f"{section} {name}"
    return f"{shown}: {_short(was)} -> {_short(now)}"


def _with_change(line: str, was: object, now: object) -> str:
    """Add to the name of a function the first of its lines that has changed, if it is short."""
    name = line.replace(": ", ":", 1)
    if not (
        isinstance(was, Mapping) and isinstance(now, Mapping) and {name} <= was.keys() & now.keys()
    ):
        return line
    pairs = zip_longest(str(was[name]).splitlines(), str(now[name]).splitlines(), fillvalue="")
    one, other = next(
        ((a.strip(), b.strip()) for a, b in pairs if a.strip() != b.strip()), ("", "")
    )
    short = 0 < len(one) <= MOST_LINE and 0 < len(other) <= MOST_LINE
    return f"{line} ({one} -> {other})" if short else line


def _weights(provenance: Provenance) -> dict[str, dict[str, str]]:
    """Return digests of the tensors of each module, also of one that an object holds."""
    found: dict[str, dict[str, str]] = {}
    parts: dict[str, object] = {**provenance.described}
    for path, each in _modules_in({**provenance.found, **parts}, ()):
        if not each.weights.digests:
            each.weights.digest()
        if each.weights.digests:
            name = path[-1]
            if found.setdefault(name, each.weights.digests) != each.weights.digests:
                found[".".join(path)] = each.weights.digests
    return found


def _modules_in(tree: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, ModuleDescription):
        yield path, tree
    elif isinstance(tree, dict):
        for name, inner in tree.items():
            yield from _modules_in(inner, (*path, name))
    elif isinstance(tree, list):
        for inner in tree:
            yield from _modules_in(inner, path)


def _short(value: object) -> str:
    text = "(absent)" if value is None else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(held: Mapping[str, object], values: Values) -> dict[str, object]:
    """Describe what is quickly described: no modules, no data."""
    found: dict[str, object] = {}
    for name, value in held.items():
        if value is None or isinstance(value, bool | int | float | str | list | tuple | dict):
            if isinstance(value, list | tuple | dict) and len(value) > 64:
                continue
            tree = values.describe(_scalars(value), name)
            if tree is not NOTHING:
                found[name] = settled(tree)
    return found


def _scalars(value: object) -> object:
    """Return a list or dict without what is no plain value."""
    plain = (bool, int, float, str, type(None))
    if isinstance(value, dict):
        return {key: inner for key, inner in value.items() if isinstance(inner, plain)}
    if isinstance(value, list | tuple):
        return [inner for inner in value if isinstance(inner, plain)]
    return value


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that are loaded."""
    loaded = {name.partition(".")[0] for name in sys.modules}
    found = {"python": platform.python_version()}
    for name in sorted(loaded):
        # without running code: some libraries warn of whoever asks
        version = getattr(sys.modules.get(name), "__dict__", {}).get("__version__")
        if isinstance(version, str) and not name.startswith("_"):
            found[name] = version
    try:
        found["featcache"] = importlib.metadata.version("featcache")
    except importlib.metadata.PackageNotFoundError:  # run from its sources
        found.pop("featcache", None)
    return found


def _git(provenance: Provenance) -> dict[str, object]:
    """Return commit and state of the user's repository; nothing where there is none."""
    if provenance.folder is None or not _is_in_repository(Path(provenance.folder)):
        return {}
    call = ["git", "-C", provenance.folder]
    try:
        commit = _output([*call, "rev-parse", "HEAD"])
        changed = _output([*call, "status", "--porcelain", "--untracked-files=no", "."])
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit, "changed": bool(changed)}


def _is_in_repository(folder: Path) -> bool:
    return any((parent / ".git").exists() for parent in (folder, *folder.parents))


def _output(call: list[str]) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(
        call, capture_output=True, text=True, check=True, timeout=GIT_S, env=environment
    )
    return done.stdout.strip()

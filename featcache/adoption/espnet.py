"""ESPnet's collected features: `<key>.scp` in `collect_feats`, one `.npy` file an utterance.

The folder to name is that of a split, `<stats_dir>/train`, or `collect_feats` in it; each scp there
is a feature. Or one scp. A key that has the lengths of another one is left out: the arrays have
them. Features that ESPnet dumped with `feats_type=fbank` are archives of Kaldi.
"""

from __future__ import annotations

import re
from collections.abc import Container

from featcache.adoptable import CONVERT, Found, Options, Place
from featcache.adoption.npy_files import npy_feature
from featcache.adoption.place import is_pattern
from featcache.adoption.scp import Scp, first_line, read_annotations, read_scp, read_table
from featcache.errors import AdoptionError

FOLDERS = ("collect_feats/", "")
_ARRAYS = re.compile(rb"\.npy$|\.ark(:\d+)?$")  # ends of lines


class EspnetKind:
    """Features that ESPnet collected."""

    name = "espnet"

    def recognises(self, place: Place, what: str) -> bool:
        """Whether this is an scp of `.npy` files, or a folder with some."""
        lines = [first_line(place, what)] if what else [*_scps(place).values()]
        return (not what or what.endswith(".scp")) and any(map(_names_npy, lines))

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Read the headers of all files that the scps name."""
        scps = [what] if what else _features(place)
        if not scps:
            raise AdoptionError(f"{place.name!r} has no scp of '.npy' files; name one")
        read = {_key(path): read_scp(place, path) for path in scps}
        ids = next(iter(read.values())).ids
        containers: dict[str, int] = {}
        features = {}
        for name, scp in read.items():
            paths = _paths(place, name, scp, ids)
            numbers = [containers.setdefault(path, len(containers)) for path in paths]
            features[name] = npy_feature(place, name, ids, paths, numbers, options.time_axis)
        return Found(list(containers), ids, features, read_annotations(place, scps[0], ids))


KIND = EspnetKind()


def _features(place: Place) -> list[str]:
    """Return the scps of a folder, but those of lengths.

    Raises `AdoptionError` for one that would be passed over: `stats_keys` names it, and it is not
    there, or it names archives.
    """
    lines = _scps(place)
    scps = {_key(path): path for path in lines}
    lacks = [key for key in read_table(place, "stats_keys") if key not in scps]
    for key in [*lacks, *(key for key, path in scps.items() if not _names_npy(lines[path]))]:
        if not _is_length(key, {*scps, *lacks}):
            why = "names archives" if key in scps else "is named by stats_keys, and is not there"
            raise AdoptionError(
                f"{place.name!r}: '{key}.scp' {why}; adopt the others one by one, each by its scp"
            )
    return [path for key, path in scps.items() if not _is_length(key, scps)]


def _scps(place: Place) -> dict[str, bytes]:
    """Return the scps of arrays in a folder, each with its first line: not those of audio."""
    if is_pattern(place.name):
        return {}
    for folder in FOLDERS:
        paths = [f"{folder}{name}" for name in place.names(folder) if name.endswith(".scp")]
        lines = {path: first_line(place, path) for path in paths}
        found = {path: line for path, line in lines.items() if _ARRAYS.search(line)}
        if found:
            return found
    return {}


def _names_npy(line: bytes) -> bool:
    return line.endswith(b".npy")


def _is_length(key: str, keys: Container[str]) -> bool:
    return key.endswith("_lengths") and key.removesuffix("_lengths") in keys


def _key(scp: str) -> str:
    return scp.rpartition("/")[2].removesuffix(".scp")


def _paths(place: Place, name: str, scp: Scp, ids: list[str]) -> list[str]:
    """Return the files of a feature in the order of `ids`."""
    numbers = scp.file.tolist()
    if scp.ids != ids:
        rows = dict(zip(scp.ids, numbers, strict=True))
        for first, second in ((ids, rows), (scp.ids, set(ids))):
            lacks = next((id for id in first if id not in second), None)
            if lacks is not None:
                raise AdoptionError(
                    f"{place.name!r}: utterance {lacks!r} is not in the scp of every feature, such "
                    f"as {name!r}; adopt them one by one, or {CONVERT}"
                )
        numbers = [rows[id] for id in ids]
    if scp.ranges or scp.offset.any():
        raise AdoptionError(f"{place.name!r}: {name}.scp names parts of '.npy' files; {CONVERT}")
    return [scp.files[number] for number in numbers]

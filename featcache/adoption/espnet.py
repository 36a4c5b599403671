"""ESPnet's collected features: `<key>.scp` in `collect_feats`, one `.npy` file an utterance.

The folder to name is that of a split, `<stats_dir>/train`, whose `stats_keys` has the keys, or
`collect_feats` in it, or one scp. Each key is a feature. A key that has the lengths of another one
is left out: the arrays have them. Features that ESPnet dumped with `feats_type=fbank` are archives
of Kaldi.
"""

from __future__ import annotations

from featcache.adoptable import CONVERT, Found, Options, Place
from featcache.adoption.npy_files import npy_feature
from featcache.adoption.place import is_pattern
from featcache.adoption.scp import Scp, read_annotations, read_scp, read_table
from featcache.errors import AdoptionError

FOLDERS = ("collect_feats/", "")
LINE_BYTES = 4096


class EspnetKind:
    """Features that ESPnet collected."""

    name = "espnet"

    def recognises(self, place: Place, what: str) -> bool:
        """Tell whether this is an scp of `.npy` files, or a folder with some."""
        try:
            scps = [what] if what else _scps(place)
        except AdoptionError:
            return False
        lines = [_first_line(place, path) for path in scps if path.endswith(".scp")]
        return bool(lines) and all(line.endswith(b".npy") for line in lines)

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Read the headers of all files that the scps name."""
        scps = [what] if what else _scps(place)
        if not scps:
            raise AdoptionError(
                f"{place.name!r} has no stats_keys, nor feats.scp; name one scp of collect_feats"
            )
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


def _scps(place: Place) -> list[str]:
    """Return the scps of a folder, those of `stats_keys` where there is one."""
    if is_pattern(place.name):
        return []
    keys = list(read_table(place, "stats_keys")) or ["feats"]
    for folder in FOLDERS:
        paths = [
            f"{folder}{key}.scp"
            for key in keys
            if not (key.endswith("_lengths") and key.removesuffix("_lengths") in keys)
        ]
        there = [path for path in paths if _first_line(place, path)]
        if there:
            return there
    return []


def _first_line(place: Place, path: str) -> bytes:
    try:
        with place.open(path) as source:
            return source.read(0, min(source.size, LINE_BYTES)).partition(b"\n")[0].rstrip()
    except AdoptionError:
        return b""


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

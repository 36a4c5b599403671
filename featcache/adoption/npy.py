"""A folder of `.npy` files of one array each, as `numpy.save` writes them; folders may nest.

Ids are the paths below the folder without `.npy`: `speaker/utt-1.npy` is `speaker/utt-1`. A pattern
may say that these are names of features, too: `{feature}/{id}`, `{id}_{feature}`.
"""

from __future__ import annotations

from collections.abc import Sequence

from featcache.adoptable import Found, FoundFeature, Options, Place, data_files
from featcache.adoptable.names import Names, refuse_features
from featcache.adoption import espnet, fairseq
from featcache.adoption.npy_files import npy_feature
from featcache.adoption.place import ids_of
from featcache.errors import AdoptionError

SUFFIX = ".npy"
MORE_PARTICULAR = (espnet.KIND, fairseq.KIND)  # kinds of folders of such files, and others
_LOOK_AT = 64  # files, to recognise a folder


class NpyFolder:
    """A folder of `.npy` files."""

    name = "npy"
    takes_pattern = True

    def recognises(self, place: Place, what: str) -> bool:
        """Whether the first files of a folder are `.npy` files, with nothing to say more."""
        if what:
            return False
        first = data_files(place, _LOOK_AT)
        arrays = bool(first) and all(path.endswith(SUFFIX) for path in first)
        return arrays and not any(kind.recognises(place, what) for kind in MORE_PARTICULAR)

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Read the header of each file."""
        paths = [path for path in place.files() if path.endswith(SUFFIX)]
        if not paths:
            raise AdoptionError(f"there is no {SUFFIX} file in {place.name!r}")
        names = ids_of(paths, SUFFIX)
        if options.pattern is None:
            features = {options.feature: _feature(place, names, paths, options)}
            return Found(paths, names, features)
        found = Names(options).by_feature(names, place.name)
        ids = list(next(iter(found.values())))
        containers: list[str] = []
        features = {}
        for name, places in found.items():
            numbers = range(len(containers), len(containers) + len(ids))
            containers += (mine := [paths[places[id]] for id in ids])
            features[name] = npy_feature(place, name, ids, mine, numbers, options.time_axis)
        return Found(containers, ids, features)


def _feature(
    place: Place, ids: Sequence[str], paths: Sequence[str], options: Options
) -> FoundFeature:
    """Return the feature of files that are an utterance each; refuses those of several features."""
    numbers = range(len(paths))
    try:
        found = npy_feature(place, options.feature, ids, paths, numbers, options.time_axis)
    except AdoptionError:
        refuse_features(place.name, ids, None)
        raise
    refuse_features(place.name, ids, found.rows)
    return found


KIND = NpyFolder()

"""A folder of `.npy` files of one array each, as `numpy.save` writes them; folders may nest.

Ids are the paths below the folder without `.npy`: `speaker/utt-1.npy` is `speaker/utt-1`.
"""

from __future__ import annotations

from featcache.adoptable import Found, Options, Place, data_files
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

    def recognises(self, place: Place, what: str) -> bool:
        """Tell whether the first files of a folder are `.npy` files, with nothing to say more."""
        if what:
            return False
        try:
            first = data_files(place, _LOOK_AT)
        except AdoptionError:
            return False
        arrays = bool(first) and all(path.endswith(SUFFIX) for path in first)
        return arrays and not any(kind.recognises(place, what) for kind in MORE_PARTICULAR)

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Read the header of each file."""
        paths = [path for path in place.files() if path.endswith(SUFFIX)]
        if not paths:
            raise AdoptionError(f"there is no {SUFFIX} file in {place.name!r}")
        ids = ids_of(paths, SUFFIX)
        numbers = range(len(paths))
        feature = npy_feature(place, options.feature, ids, paths, numbers, options.time_axis)
        return Found(paths, ids, {options.feature: feature})


KIND = NpyFolder()

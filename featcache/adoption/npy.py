"""A folder of `.npy` files of one array each, as `numpy.save` writes them; folders may nest.

Ids are the paths below the folder without `.npy`: `speaker/utt-1.npy` is `speaker/utt-1`. A pattern
may say that these are names of features, too: `{feature}/{id}`, `{id}_{feature}`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from featcache.adoptable import (
    Found,
    FoundFeature,
    Options,
    Place,
    Readable,
    SourceFile,
    Stored,
    copied_as,
    data_files,
    files_called,
    frames_first,
)
from featcache.adoptable.names import Names, refuse_features
from featcache.adoption import espnet, fairseq, flat_npy
from featcache.adoption.npy_files import npy_feature, npy_headers
from featcache.adoption.place import ids_of
from featcache.errors import AdoptionError
from featcache.interface import Array

SUFFIX = ".npy"
MORE_PARTICULAR = (espnet.KIND, fairseq.KIND, flat_npy.KIND)  # of folders of such files, and others
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
        arrays = bool(first) and all(path.lower().endswith(SUFFIX) for path in first)
        return arrays and not any(kind.recognises(place, what) for kind in MORE_PARTICULAR)

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Read the header of each file."""
        paths, found = _named(place, options)
        ids = list(next(iter(found.values())))
        containers: list[str] = []
        features = {}
        for name, places in found.items():
            numbers = range(len(containers), len(containers) + len(ids))
            containers += (mine := [paths[places[id]] for id in ids])
            features[name] = _feature(place, name, ids, mine, numbers, options)
        return Found(containers, ids, features)

    @contextmanager
    def readable(self, place: Place, what: str, options: Options) -> Iterator[Readable]:
        """Read arrays by NumPy: what one feature holds in several dtypes, or orders of axes."""
        paths, found = _named(place, options)
        ids = list(next(iter(found.values())))
        features = {
            name: _stored(place, name, ids, [paths[places[id]] for id in ids], options)
            for name, places in found.items()
        }

        def read(number: int) -> Mapping[str, Array]:
            arrays = {}
            for name, places in found.items():
                with place.open(paths[places[ids[number]]]) as source:
                    file = io.BufferedReader(SourceFile(source))
                    array = np.load(file, allow_pickle=False)
                arrays[name] = array.transpose(frames_first(array.shape, options.time_axis))
            return arrays

        yield Readable(paths, ids, features, read)


KIND = NpyFolder()


def _named(place: Place, options: Options) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Return the files of a folder, and their places by feature and id."""
    paths = files_called(place, (SUFFIX,))
    if not paths:
        raise AdoptionError(f"there is no {SUFFIX} file in {place.name!r}")
    return paths, Names(options).by_feature(ids_of(paths, SUFFIX), place.name, paths)


def _stored(
    place: Place, name: str, ids: Sequence[str], paths: Sequence[str], options: Options
) -> Stored:
    try:
        headers = npy_headers(place, ids, paths)
        shapes, dtypes = [each.shape for each in headers], [each.dtype for each in headers]
        stored = copied_as(name, ids, shapes, dtypes, options.time_axis)
    except AdoptionError:
        if options.pattern is None:
            refuse_features(place.name, ids, None)
        raise
    if options.pattern is None:
        refuse_features(place.name, ids, stored.rows)
    return stored


def _feature(
    place: Place,
    name: str,
    ids: Sequence[str],
    paths: Sequence[str],
    numbers: Sequence[int],
    options: Options,
) -> FoundFeature:
    """Return a feature; refuses files that are those of several ones, if no pattern says so."""
    try:
        found = npy_feature(place, name, ids, paths, numbers, options.time_axis, copies=True)
    except AdoptionError:
        if options.pattern is None:
            refuse_features(place.name, ids, None)
        raise
    if options.pattern is None:
        refuse_features(place.name, ids, found.rows)
    return found

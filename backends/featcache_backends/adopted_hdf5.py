"""HDF5 files of others, adopted where they lie: the bytes of each array as an extent, or in chunks.

One dataset an array. Understood are contiguous datasets, and chunked ones whose chunks hold whole
frames, with no filter or with deflate, maybe with shuffle before it. Names tell id and feature by a
pattern: `{id}` (which may hold `/`) and `{feature}` stand for parts of the path below the root,
other text for itself; datasets of other names are left out. Without a pattern every dataset must
lie in the root, and its name is the id, as in lhotse's `numpy_hdf5` and SpeechBrain's
`CachedHDF5DynamicItem`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.adoptable import Found, Options, Place, Readable, data_files, stored_as
from featcache.adoptable.names import Names, refuse_features
from featcache.adoptable.placed_arrays import ArrayColumns
from featcache.errors import AdoptionError, FeatcacheError
from featcache_backends._hdf5_datasets import Hdf5Datasets

SIGNATURE = b"\x89HDF\r\n\x1a\n"
USER_BLOCKS = (0, 512, 1024, 2048)  # the signature is behind a block of the user's
SUFFIXES = (".h5", ".hdf5", ".hdf")
LOOK_AT = 64  # files of a folder


class AdoptedHdf5:
    """HDF5 files with one dataset an array."""

    name = "hdf5"
    takes_pattern = True

    def recognises(self, place: Place, what: str) -> bool:
        """Whether it is an HDF5 file, or the first files are called so and the first is."""
        try:
            paths = [what] if what else data_files(place, LOOK_AT)
            named = bool(what) or all(path.endswith(SUFFIXES) for path in paths)
            return bool(paths) and named and _is_hdf5(place, paths[0])
        except (FeatcacheError, OSError):
            return False

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Find the datasets of all files whose names the pattern matches."""
        containers = [what] if what else _named_so(place)
        names = Names(options)
        features: dict[str, ArrayColumns] = {}
        for number, path in enumerate(containers):
            with closing(self.open(place, path)) as file:
                for name, placed in file.all():
                    matched = _match(names, name, place.name)
                    if matched is None:
                        continue
                    feature, id = matched
                    if feature not in features:
                        features[feature] = ArrayColumns(feature, options.time_axis)
                    features[feature].add(id, number, placed())
        if not features:
            raise AdoptionError(f"{place.name!r} has no dataset called like {names.pattern!r}")
        ids = next(iter(features.values())).ids
        found = {name: array.found(ids) for name, array in features.items()}
        if not names.is_given:
            refuse_features(place.name, ids, next(iter(found.values())).rows)
        return Found(containers, ids, found)

    @contextmanager
    def readable(self, place: Place, what: str, options: Options) -> Iterator[Readable]:
        """Read datasets by HDF5, in whatever chunks, filters and byte order."""
        paths = [what] if what else _named_so(place)
        names = Names(options)
        found: dict[str, dict[str, _Named]] = {}  # by feature, then by id
        with ExitStack() as opened:
            for path in paths:
                file = opened.enter_context(closing(self.open(place, path)))
                for name, shape, dtype in file.readable():
                    if (matched := _match(names, name, place.name)) is not None:
                        feature, id = matched
                        known = found.setdefault(feature, {})
                        if id in known:
                            raise AdoptionError(f"utterance {id!r} is there twice, in {path!r} too")
                        known[id] = _Named(file, name, shape, dtype)
            if not found:
                raise AdoptionError(f"{place.name!r} has no dataset called like {names.pattern!r}")
            ids = list(next(iter(found.values())))
            for feature, known in found.items():
                for id in {*ids} ^ known.keys():
                    raise AdoptionError(f"utterance {id!r} has not all features, as {feature!r}")
            if not names.is_given:
                lengths = [(*known.shape, 0)[0] for known in next(iter(found.values())).values()]
                refuse_features(place.name, ids, np.array(lengths, np.int64))
            features = {
                feature: stored_as(
                    feature,
                    ids,
                    [known[id].shape for id in ids],
                    [known[id].dtype for id in ids],
                    options.time_axis,
                )
                for feature, known in found.items()
            }

            def read(number: int) -> dict[str, NDArray[Any]]:
                each = {feature: known[ids[number]] for feature, known in found.items()}
                return {feature: named.file.read(named.name) for feature, named in each.items()}

            yield Readable(paths, ids, features, read)

    def open(self, place: Place, path: str) -> Hdf5Datasets:
        """Open a file whose datasets can be placed by name."""
        return Hdf5Datasets(place.local(path))


KIND = AdoptedHdf5()


class _Named(NamedTuple):
    """A dataset."""

    file: Hdf5Datasets
    name: str
    shape: tuple[int, ...]
    dtype: str


def _match(names: Names, name: str, source: str) -> tuple[str, str] | None:
    """Return the feature and the id of a dataset's name, None if the pattern is another."""
    if not names.is_given and "/" in name:
        raise AdoptionError(
            f"{source!r}: dataset {name!r} lies in a group; say what names mean, such as "
            "pattern='{feature}/{id}', or pattern='{id}' where ids have slashes"
        )
    return names.match(name)


def _named_so(place: Place) -> list[str]:
    """Return the files of a folder that are called like HDF5 files; all, where none is."""
    paths = list(place.files())
    return [path for path in paths if path.endswith(SUFFIXES)] or paths


def _is_hdf5(place: Place, path: str) -> bool:
    with place.open(path) as file:
        return any(
            file.read(begin, len(SIGNATURE)) == SIGNATURE
            for begin in USER_BLOCKS
            if begin + len(SIGNATURE) <= file.size
        )

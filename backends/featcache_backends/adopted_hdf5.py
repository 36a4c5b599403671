"""HDF5 files of others, adopted where they lie: the bytes of each array as an extent, or in chunks.

One dataset an array. Understood are contiguous datasets, and chunked ones whose chunks hold whole
frames, with no filter or with deflate, maybe with shuffle before it. Names tell id and feature by a
pattern: `{id}` (which may hold `/`) and `{feature}` stand for parts of the path below the root,
other text for itself; datasets of other names are left out. Without a pattern every dataset must
lie in the root, and its name is the id, as in lhotse's `numpy_hdf5` and SpeechBrain's
`CachedHDF5DynamicItem`.

Where the pattern is that of no dataset, files of a folder count as groups, `<file>/<dataset>`, such
as `utt-1/feats` of `utt-1.h5`; if each has one dataset, called alike in all of them, the file's own
name is the array's. A file with a dataset `offsets`, `lengths` or `ids` in its root beside others
has arrays of all utterances, as `featcache.adoptable.flat_arrays` cuts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from featcache.adoptable import (
    CONVERT,
    Found,
    Options,
    Place,
    Readable,
    Stored,
    TimeAxis,
    copied_as,
    data_files,
    files_called,
    frames_first,
)
from featcache.adoptable.flat_arrays import Cut, FlatNames, cuts, flat_names
from featcache.adoptable.names import EACH, Names, match_in_groups, refuse_features
from featcache.adoptable.placed_arrays import ArrayColumns, found_features
from featcache.errors import AdoptionError, FeatcacheError
from featcache_backends._hdf5_datasets import Hdf5Datasets

if TYPE_CHECKING:
    import h5py

SIGNATURE = b"\x89HDF\r\n\x1a\n"
USER_BLOCKS = (0, 512, 1024, 2048)  # the signature is behind a block of the user's
MATLAB, PANDAS = b"MATLAB 7.3", b"pandas_type"
LOOK_BYTES = 4096  # in which the first group lies
SUFFIXES = (".h5", ".hdf5", ".hdf")
LOOK_AT = 64  # files of a folder
OPEN_FILES = 64


class AdoptedHdf5:
    """HDF5 files with one dataset an array."""

    name = "hdf5"
    takes_pattern = True

    def recognises(self, place: Place, what: str) -> bool:
        """Whether it is an HDF5 file, or the first files are called so and the first is."""
        try:
            paths = [what] if what else data_files(place, LOOK_AT)
            named = bool(what) or all(path.lower().endswith(SUFFIXES) for path in paths)
            found = bool(paths) and named and _is_hdf5(place, paths[0])
            return found and not _is_of_others(place, paths[0])
        except (FeatcacheError, OSError):
            return False

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Find the datasets of all files whose names the pattern matches."""
        containers = [what] if what else _named_so(place)
        features: dict[str, ArrayColumns] = {}
        for number, file, array in self._arrays(place, containers, options, what):
            if array.feature not in features:
                axis = options.time_axis if array.cut is None else array.cut.time_axis
                features[array.feature] = ArrayColumns(array.feature, axis, copies=True)
            placed, window = file.place(array.dataset, array.opened), None
            if array.cut is not None:
                placed, window = placed.cut(array.cut.row), array.cut.window
            features[array.feature].add(array.id, number, placed, window)
        ids = next(iter(features.values())).ids
        given = options.pattern is not None
        found = found_features(place.name, features, ids, is_named=given, files=containers)
        return Found(containers, ids, found, pattern=None if array.cut else EACH)

    @contextmanager
    def readable(self, place: Place, what: str, options: Options) -> Iterator[Readable]:
        """Read datasets by HDF5, in whatever chunks, filters and byte order."""
        paths = [what] if what else _named_so(place)
        found: dict[str, dict[str, _Readable]] = {}  # by feature, then by id
        for number, file, array in self._arrays(place, paths, options, what):
            known = found.setdefault(array.feature, {})
            if array.id in known:
                both = dict.fromkeys((paths[known[array.id].file], paths[number]))
                where = " and in ".join(map(repr, both))
                raise AdoptionError(f"utterance {array.id!r} is there twice, in {where}")
            shape, dtype = file.readable(array.dataset, array.opened)
            if array.cut is not None:
                shape = array.cut.shape(shape)
            known[array.id] = _Readable(number, array._replace(opened=None), shape, dtype)
        ids = list(next(iter(found.values())))
        for feature, each in found.items():
            for id in {*ids} ^ each.keys():
                raise AdoptionError(f"utterance {id!r} has not all features, as {feature!r}")
        features = {
            feature: _stored(feature, ids, [each[id] for id in ids], options)
            for feature, each in found.items()
        }
        if options.pattern is None:
            refuse_features(place.name, ids, next(iter(features.values())).rows)
        with _OpenFiles(lambda number: self.open(place, paths[number])) as opened:

            def read(number: int) -> dict[str, NDArray[Any]]:
                arrays = {}
                for feature, each in found.items():
                    file, array, shape, _ = each[ids[number]]
                    if array.cut is not None:
                        some = opened.file(file).read(array.dataset, array.cut.rows)
                        arrays[feature] = array.cut.taken(some)
                    else:
                        whole = opened.file(file).read(array.dataset)
                        arrays[feature] = whole.transpose(frames_first(shape, options.time_axis))
                return arrays

            yield Readable(paths, ids, features, read, pattern=None if array.cut else EACH)

    def open(self, place: Place, path: str) -> Hdf5Datasets:
        """Open a file whose datasets can be placed by name."""
        return Hdf5Datasets(place, path)

    def _arrays(
        self, place: Place, paths: Sequence[str], options: Options, what: str
    ) -> Iterator[tuple[int, Hdf5Datasets, _Array]]:
        """Yield all arrays whose names the pattern matches, each with its file, which is open."""
        names = Names(options)
        place.expect(paths)
        if not names.is_given and len(paths) > 1:
            with (
                closing(self.open(place, paths[0])) as one,
                closing(self.open(place, paths[1])) as other,
            ):
                _refuse_alike(place.name, one, other)
        for way in self._ways(place, paths, is_by_file=names.is_given and not what):
            some = False
            for number, path in enumerate(paths):
                with closing(self.open(place, path)) as file:
                    named = partial(way, path)
                    for array in _in_file(file, names, named, place.name, options.time_axis):
                        some = True
                        yield number, file, array
            if some:
                return
        raise AdoptionError(f"{place.name!r} has no dataset called like {names.pattern!r}")

    def _ways(
        self, place: Place, paths: Sequence[str], *, is_by_file: bool
    ) -> Iterator[Callable[[str, str], str]]:
        """Yield the ways to name an array by its file and dataset, the next where one has none."""
        yield lambda path, dataset: dataset
        if is_by_file:
            datasets = set()
            for path in paths:
                with closing(self.open(place, path)) as file:
                    datasets.add(tuple(name for name, _ in file.all()))
            if len(datasets) == 1 and len(datasets.pop()) == 1:
                yield lambda path, dataset: _stem(path)
            yield lambda path, dataset: f"{_stem(path)}/{dataset}"


KIND = AdoptedHdf5()


class _Array(NamedTuple):
    """A dataset that holds an array, or a part of a dataset that holds all of them."""

    feature: str
    id: str
    dataset: str
    opened: h5py.h5d.DatasetID | None = None  # where it is at hand
    cut: Cut | None = None


class _Readable(NamedTuple):
    """An array, the number of its file, and what is read."""

    file: int
    array: _Array
    shape: tuple[int, ...]
    dtype: str


class _OpenFiles:
    """The last files that arrays were read from; close with `with`."""

    def __init__(self, open: Callable[[int], Hdf5Datasets]) -> None:
        self._open = open
        self._files: dict[int, Hdf5Datasets] = {}

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *args: object) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def file(self, number: int) -> Hdf5Datasets:
        """Return a file by its number, open until others are asked for."""
        if number not in self._files:
            if len(self._files) >= OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[number] = self._open(number)
        return self._files[number]


def _in_file(
    file: Hdf5Datasets,
    names: Names,
    name_of: Callable[[str], str],
    source: str,
    time_axis: TimeAxis,
) -> Iterator[_Array]:
    """Yield the arrays of a file that the pattern names."""
    flat = None if names.is_given else flat_names(file.in_root())
    if flat is not None:
        yield from _in_flat(file, flat, names, source, time_axis)
        return
    for dataset, opened in file.all():
        matched = match_in_groups(names, name_of(dataset), source)
        if matched is not None:
            yield _Array(*matched, dataset, opened)


def _in_flat(
    file: Hdf5Datasets, flat: FlatNames, names: Names, source: str, time_axis: TimeAxis
) -> Iterator[_Array]:
    """Yield the utterances that arrays of a file, which hold all of them, are cut into."""
    shapes = {name: file.readable(name)[0] for name in flat.frames}
    cut = cuts(source, shapes, flat, file.read, file.texts, time_axis)
    for dataset in flat.frames:
        feature = names.feature if len(flat.frames) == 1 else dataset
        for each in cut.each():
            yield _Array(feature, each.id, dataset, None, each)


def _refuse_alike(source: str, one: Hdf5Datasets, other: Hdf5Datasets) -> None:
    """Raise `AdoptionError` for files with datasets of the same names, which no ids can have."""
    datasets = sorted(one.in_root())
    if datasets != sorted(other.in_root()) or flat_names(datasets):
        return
    if [*datasets] == sorted(name for name, _ in one.all()):
        pattern = "{id}/{feature}" if len(datasets) > 1 else f"{{id}}/{datasets[0]}"
        raise AdoptionError(
            f"{source!r}: each file has the datasets {', '.join(map(repr, datasets[:4]))}; if each "
            f"file is an utterance, give pattern={pattern!r}; else {CONVERT}"
        )


def _stored(
    feature: str, ids: Sequence[str], arrays: Sequence[_Readable], options: Options
) -> Stored:
    """Return what arrays are as a feature."""
    shapes, dtypes = [each.shape for each in arrays], [each.dtype for each in arrays]
    cut = arrays[0].array.cut
    axis = options.time_axis if cut is None else cut.turned_axis
    return copied_as(feature, ids, shapes, dtypes, axis)


def _stem(path: str) -> str:
    return str(PurePosixPath(path).with_suffix("")) if path.endswith(SUFFIXES) else path


def _named_so(place: Place) -> list[str]:
    """Return the files of a folder that are called like HDF5 files; all, where none is."""
    return files_called(place, SUFFIXES) or list(place.files())


def _is_of_others(place: Place, path: str) -> bool:
    """Whether MATLAB wrote a file, whose arrays lie transposed there, or pandas."""
    with place.open(path) as file:
        front = file.read(0, min(file.size, LOOK_BYTES))
    return front.startswith(MATLAB) or PANDAS in front


def _is_hdf5(place: Place, path: str) -> bool:
    # a tar whose first member is such a file begins so, too
    begins = USER_BLOCKS if not path.endswith(".tar") else USER_BLOCKS[:1]
    with place.open(path) as file:
        return any(
            file.read(begin, len(SIGNATURE)) == SIGNATURE
            for begin in begins
            if begin + len(SIGNATURE) <= file.size
        )

"""Arrays by name, in files or in memory, as utterances and features; and files that hold them.

A name is the file's path without its suffix, and the key of the array in it. `Arranged` says which
of the two is an id and which a feature; `FilesOfArrays` is a kind of such files, given the way in
which a library opens one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from featcache.adoptable import (
    CONVERT,
    COPY,
    Found,
    Options,
    Place,
    Readable,
    Stored,
    TimeAxis,
    Value,
    common_dtype,
    data_files,
    files_called,
    frames_first,
    stored_as,
)
from featcache.adoptable.flat_arrays import (
    IDS,
    LENGTHS,
    OFFSETS,
    Cut,
    CutArrays,
    FlatNames,
    cuts,
    flat_names,
    ids_in,
)
from featcache.adoptable.names import EACH, Names, refuse_features
from featcache.adoptable.placed_arrays import ArrayColumns, PlacedArray
from featcache.adoption.place import GatheredValues
from featcache.errors import AdoptionError
from featcache.interface import Array

UNNAMED = frozenset({"", "arr_0"})  # keys of the only array of a file, which no one chose
LOOK_AT = 64  # files, to recognise a folder
OPEN_FILES = 8
NO_COLUMNS: Mapping[str, Array] = {}


class ArrayInfo(NamedTuple):
    """Shape and dtype of an array, as declared: "float32", "bfloat16", ..."""

    shape: tuple[int, ...]
    dtype: str


class OpenedArrays(Protocol):
    """An open file that holds arrays by key; raises `AdoptionError` for what is not to be read."""

    def arrays(self) -> Mapping[str, ArrayInfo]:
        """Return what arrays there are; the key of one without a name is ""."""

    def values(self) -> Mapping[str, object]:
        """Return what else there is: text and numbers by key."""

    def read(self, key: str) -> Array:
        """Read an array; bfloat16 is the float32 of the same value."""

    def placed(self, key: str) -> PlacedArray | None:
        """Return where an array's bytes lie; None where they cannot be read without the library."""

    def close(self) -> None:
        """Close the file."""


def is_list_of_texts(value: object) -> bool:
    """Whether a value is a list of texts, such as ids."""
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_text, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# `Arranged`: arrays by utterance and feature.


class Content(NamedTuple):
    """Arrays of a file, and what else it holds."""

    stem: str
    path: str  # of the file, for messages
    arrays: Mapping[str, ArrayInfo]
    values: Mapping[str, object]
    # those that may say how the others are cut into utterances, by `flat_arrays`
    columns: Mapping[str, Array] = NO_COLUMNS

    @classmethod
    def of(cls, path: str, file: OpenedArrays) -> Content:
        """Read what a file holds, and lists of offsets, lengths and ids."""
        stem = str(PurePosixPath(path).with_suffix(""))
        arrays, values = file.arrays(), file.values()
        columns = {
            key: file.read(key)
            for key, info in arrays.items()
            if key.lower() in OFFSETS | LENGTHS | IDS and len(info.shape) == 1
        }
        texts = {key: value for key, value in values.items() if is_list_of_texts(value)}
        columns |= {key: np.array(value) for key, value in texts.items() if key.lower() in IDS}
        return cls(stem, path, arrays, values, columns)

    def cuts(self, source: str, time_axis: TimeAxis) -> tuple[FlatNames, CutArrays] | None:
        """Return how arrays are cut into utterances; None where no array says so.

        Raises `AdoptionError` where the arrays that say so do not cut the others.
        """
        names = flat_names({**self.arrays, **self.columns})
        if names is None or not all(name in self.columns for name in names[1:] if name):
            return None
        shapes = {name: self.arrays[name].shape for name in names.frames}
        where = f"{source}, {self.stem}"
        read, columns = self.columns.__getitem__, self.columns
        return names, cuts(
            where, shapes, names, read, lambda key: ids_in(where, key, columns[key]), time_axis
        )


class ArrayPlace(NamedTuple):
    """An array: the number of its file, its key there, shape and dtype."""

    file: int
    key: str
    info: ArrayInfo
    cut: Cut | None = None  # where the array holds all utterances

    def shape(self, time_axis: TimeAxis) -> tuple[int, ...]:
        """Return the shape of the utterance, the frames first."""
        if self.cut is not None:
            return self.cut.shape(self.info.shape)
        return tuple(self.info.shape[axis] for axis in frames_first(self.info.shape, time_axis))

    def taken(self, array: Array, time_axis: TimeAxis) -> Array:
        """Return the utterance, the frames first."""
        if self.cut is not None:
            return self.cut.taken(array[self.cut.rows])
        return array.transpose(frames_first(array.shape, time_axis))


@dataclass(frozen=True)
class Arranged:
    """Arrays of a source by feature, each in the order of `ids`; and annotations of these."""

    ids: Sequence[str]
    features: Mapping[str, Sequence[ArrayPlace]]
    annotations: Mapping[str, Sequence[Value]]
    pattern: str | None = EACH  # as of `Found`

    @classmethod
    def of(cls, source: str, files: Sequence[Content], options: Options, *, one: bool) -> Arranged:
        """Arrange the arrays of files.

        Args:
            source: its name, for messages.
            files: what they hold.
            options: with a pattern, or none: then keys that all files have are features, and keys
                that one file has are ids.
            one: whether one file was named, in which keys are ids.

        Raises `AdoptionError` where the names can mean either, or an array lacks.
        """
        if not any(each.arrays for each in files):
            raise AdoptionError(f"{source!r} holds no array; {CONVERT}")
        if options.pattern is None and (cut := _cut_arrays(source, files, options, one)):
            return cut
        _refuse_texts(source, files)
        labels = _labels(source, files, options, one)
        names = Names(options if options.pattern else Options(options.feature, "{id}"))
        found: dict[str, dict[str, ArrayPlace]] = {}
        for (number, key), (id, feature) in labels.items():
            known = found.setdefault(feature, {})
            if id in known:
                raise _twice(source, f"{id!r}, feature {feature!r}", files, known[id].file, number)
            known[id] = ArrayPlace(number, key, files[number].arrays[key])
        if not found:
            raise AdoptionError(f"{source!r} has no array called like {names.pattern!r}")
        ids = list(next(iter(found.values())))
        for feature, known in found.items():
            for id in known.keys() ^ set(ids):
                raise AdoptionError(
                    f"{source!r}: utterance {id!r} has not all features, as {feature!r}; leave "
                    "it out, or give pattern= of one feature"
                )
        features = {name: [known[id] for id in ids] for name, known in sorted(found.items())}
        given = options.pattern is not None
        found_here = cls(ids, features, _annotations(source, files, ids, features, given=given))
        if not given:
            found_here.refuse_features(source)
        return found_here

    def refuse_features(self, source: str) -> None:
        """Raise `AdoptionError` for ids that look like several features of the same utterances."""
        places = next(iter(self.features.values()))
        rows = [(*each.info.shape, 0)[0] for each in places]
        refuse_features(source, self.ids, np.array(rows, np.int64))

    def stored(self, options: Options) -> dict[str, Stored]:
        """Return the features, in a dtype that holds the numbers of each array as they are."""
        found = {}
        for name, places in self.features.items():
            dtypes = [each.info.dtype for each in places]
            widest = common_dtype(dtypes)
            shapes = [_turned(id, each, options) for id, each in zip(self.ids, places, strict=True)]
            dtypes = dtypes if widest is None else [widest] * len(dtypes)
            cut = places[0].cut
            axis = options.time_axis if cut is None else cut.turned_axis
            found[name] = stored_as(name, self.ids, shapes, dtypes, axis)
        return found


def _refuse_texts(source: str, files: Sequence[Content]) -> None:
    """Raise `AdoptionError` for lists of texts, which no array goes with."""
    for each in files:
        for key in (key for key, value in each.values.items() if is_list_of_texts(value)):
            raise AdoptionError(
                f"{source!r}: {key!r} of {each.stem!r} is a list of texts, which is no annotation "
                f"and no list of ids of the arrays beside it; {CONVERT}"
            )


def _turned(id: str, place: ArrayPlace, options: Options) -> tuple[int, ...]:
    try:
        return place.shape(options.time_axis)
    except AdoptionError as error:
        raise AdoptionError(f"utterance {id!r} {error}") from error


def _cut_arrays(
    source: str, files: Sequence[Content], options: Options, one: bool
) -> Arranged | None:
    """Arrange files of arrays that hold all utterances, or some of them; None: they do not.

    Raises `AdoptionError` where several files may be batches or utterances, for all that they tell.
    """
    first = files[0]
    if not one and not _tells_ids(first.columns):
        try:
            cut = first.cuts(source, options.time_axis)
        except AdoptionError:  # what is called so says something else
            return None
        if cut is not None and len(cut[1].ids) > 1:
            by = cut[0].lengths or cut[0].offsets or cut[0].ids
            raise AdoptionError(
                f"{source!r}: {first.stem!r} may be a batch of {len(cut[1].ids)} utterances, cut "
                f"by {by!r}; if each file is an utterance, give "
                f"pattern={EACH!r}; if they are batches, {CONVERT}"
            )
        return None
    found: dict[str, list[ArrayPlace]] = {}
    ids: list[str] = []
    for number, each in enumerate(files):
        cut = each.cuts(source, options.time_axis)
        if cut is None:
            return None
        names, arrays = cut
        for name in names.frames:
            feature = options.feature if len(names.frames) == 1 else name
            places = (ArrayPlace(number, name, each.arrays[name], cut) for cut in arrays.each())
            found.setdefault(feature, []).extend(places)
        ids += arrays.ids
    if twice := [id for id, count in Counter(ids).items() if count > 1]:
        of_one = zip(ids, next(iter(found.values())), strict=False)
        owners = [each.file for id, each in of_one if id == twice[0]]
        raise _twice(source, repr(twice[0]), files, *owners[:2])
    for feature, all_places in found.items():
        if len(all_places) != len(ids):
            raise AdoptionError(f"{source!r}: not all files have {feature!r}; {CONVERT}")
    return Arranged(ids, found, {}, pattern=None)


def _twice(source: str, what: str, files: Sequence[Content], one: int, other: int) -> AdoptionError:
    """Return the error of an utterance that two files have, or one file twice."""
    named = dict.fromkeys(files[number].path for number in (one, other))
    return AdoptionError(
        f"{source!r} has utterance {what} twice: in {' and in '.join(map(repr, named))}; take one "
        "away"
    )


def _tells_ids(columns: Mapping[str, Array]) -> bool:
    """Whether a batch has ids; numbers alone may be those of an utterance's tokens."""
    cuts_too = any(key.lower() in OFFSETS | LENGTHS for key in columns)
    ids = (each for key, each in columns.items() if key.lower() in IDS)
    return any(cuts_too or each.dtype.kind not in "iu" for each in ids)


Labels = dict[tuple[int, str], tuple[str, str]]  # by file and key: id and feature


def _labels(source: str, files: Sequence[Content], options: Options, one: bool) -> Labels:
    if options.pattern is None:
        return _without_pattern(source, files, options, one)
    names = Names(options)
    for way in (_by_key,) if one else (_by_stem, _by_both, _by_key):
        labels = way(files, names)
        if labels:
            return labels
    return {}


def _without_pattern(source: str, files: Sequence[Content], options: Options, one: bool) -> Labels:
    if one:
        (content,) = files
        if len(content.arrays) == 1 and UNNAMED.issuperset(content.arrays):
            return {(0, key): (content.stem, options.feature) for key in content.arrays}
        return {(0, key): (key, options.feature) for key in content.arrays}
    keys = [each.arrays.keys() for each in files]
    if all(each == keys[0] for each in keys):
        if len(files) == 1 and len(keys[0]) > 1:
            raise AdoptionError(
                f"{source!r}: {files[0].stem!r} alone holds {len(keys[0])} arrays, such as "
                f"{next(iter(keys[0]))!r}; name the file itself if these are utterances, and give "
                f"pattern={EACH!r} if they are features of one"
            )
        return _by_stem(files, Names(Options(options.feature, EACH)))
    if len(set().union(*keys)) == sum(map(len, keys)):
        return {
            (number, key): (key, options.feature)
            for number, each in enumerate(files)
            for key in each.arrays
        }
    odd = next(each for each in files if each.arrays.keys() != keys[0])
    raise AdoptionError(
        f"{source!r}: {files[0].stem!r} holds {_some(keys[0])}, {odd.stem!r} {_some(odd.arrays)}: "
        "if these are features, each file has all of them; leave out what has not, or say what "
        "names mean, such as pattern='{id}/mel' for one of them"
    )


def _some(keys: Mapping[str, object] | Any) -> str:
    shown = [*map(repr, keys)]
    return ", ".join(shown[:3]) + ", ..." * (len(shown) > 3)


def _by_stem(files: Sequence[Content], names: Names) -> Labels:
    """Each file is an utterance, and keys are features; files of one array may be either."""
    labels: Labels = {}
    named = "{feature}" in names.pattern
    single = all(len(each.arrays) == 1 for each in files)
    if named and not single:
        return {}
    for number, each in enumerate(files):
        matched = names.match(each.stem)
        if matched is not None:
            for key in each.arrays:
                feature = matched[0] if named or key in UNNAMED else key
                labels[number, key] = matched[1], feature
    return labels


def _by_both(files: Sequence[Content], names: Names) -> Labels:
    """Match names such as `file/key`."""
    return {
        (number, key): (matched[1], matched[0])
        for number, each in enumerate(files)
        for key in each.arrays
        if (matched := names.match(f"{each.stem}/{key}" if key else each.stem)) is not None
    }


def _by_key(files: Sequence[Content], names: Names) -> Labels:
    """Match keys, whichever file has them."""
    return {
        (number, key): (matched[1], matched[0])
        for number, each in enumerate(files)
        for key in each.arrays
        if (matched := names.match(key)) is not None
    }


def _annotations(
    source: str,
    files: Sequence[Content],
    ids: Sequence[str],
    features: Mapping[str, Sequence[ArrayPlace]],
    *,
    given: bool,
) -> dict[str, list[Value]]:
    """Return text and numbers of files that are an utterance each.

    Those of others are left out where a pattern is `given`, as whatever is called otherwise.
    """
    owners = [place.file for place in next(iter(features.values()))]
    if not any(each.values for each in files):
        return {}
    if len({*owners}) < len(owners):
        if given:
            return {}
        other = next(key for each in files for key in each.values)
        lasts = {id.rpartition("/")[2] for id in ids}
        such = f", such as pattern={'{id}/' + lasts.pop()!r}" if len(lasts) == 1 else ""
        raise AdoptionError(
            f"{source!r} holds more than arrays by id, such as {other!r}; take the rest out, or "
            f"give a pattern that the arrays alone match{such}"
        )
    gathered = GatheredValues()
    for number, owner in enumerate(owners):
        gathered.add(number, files[owner].values)
    return gathered.columns(len(ids), without=features)


# `FilesOfArrays`: a kind of files that a library opens, of one utterance each or of many.


@dataclass(frozen=True)
class FilesOfArrays:
    """Files that hold arrays by key.

    Args:
        name: of the kind.
        suffixes: of the files.
        open: opens one.
        in_place: whether `OpenedArrays.placed` tells of plain arrays.
    """

    name: str
    suffixes: tuple[str, ...]
    open: Callable[[Path], OpenedArrays]
    in_place: bool = False
    takes_pattern: ClassVar[bool] = True

    def recognises(self, place: Place, what: str) -> bool:
        """Whether it is such a file, or the first files of a folder are."""
        paths = [what] if what else data_files(place, LOOK_AT)
        return bool(paths) and all(path.lower().endswith(self.suffixes) for path in paths)

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Find the arrays of files that lie there as they are; `AdoptionError` for all others."""
        if not self.in_place:
            raise AdoptionError(f"{place.name!r} is not read where it lies; {COPY}")
        paths, arranged = self._arranged(place, what, options)
        with _OpenFiles(partial(self._opened, place, paths)) as opened:
            features = {}
            for name, places in arranged.features.items():
                cut = places[0].cut
                axis = options.time_axis if cut is None else cut.time_axis
                columns = ArrayColumns(name, axis, copies=True)
                for id, each in zip(arranged.ids, places, strict=True):
                    placed = opened.file(each.file).placed(each.key)
                    if placed is None:
                        raise AdoptionError(
                            f"utterance {id!r}, {paths[each.file]!r}, is compressed; {COPY}"
                        )
                    row, window = each.cut[1:3] if each.cut else (None, None)
                    columns.add(id, each.file, placed.cut(row), window)
                features[name] = columns.found(arranged.ids)
        return Found(paths, arranged.ids, features, arranged.annotations, pattern=arranged.pattern)

    @contextmanager
    def readable(self, place: Place, what: str, options: Options) -> Iterator[Readable]:
        """Read arrays by the library."""
        paths, arranged = self._arranged(place, what, options)
        with _OpenFiles(partial(self._opened, place, paths)) as opened:

            def read(number: int) -> dict[str, Array]:
                found = {}
                for name, places in arranged.features.items():
                    each = places[number]
                    array = opened.array(each.file, each.key, keep=each.cut is not None)
                    found[name] = each.taken(array, options.time_axis)
                return found

            features = _stored(place.name, arranged, options)
            annotations, pattern = arranged.annotations, arranged.pattern
            yield Readable(paths, arranged.ids, features, read, annotations, pattern)

    def _arranged(self, place: Place, what: str, options: Options) -> tuple[list[str], Arranged]:
        paths = [what] if what else files_called(place, self.suffixes)
        if not paths:
            raise AdoptionError(f"there is no {self.suffixes[0]} file in {place.name!r}")
        contents = []
        for number, path in enumerate(paths):
            file = self._opened(place, paths, number)
            try:
                contents.append(Content.of(path, file))
            finally:
                file.close()
        return paths, Arranged.of(place.name, contents, options, one=bool(what))

    def _opened(self, place: Place, paths: Sequence[str], number: int) -> OpenedArrays:
        return self.open(place.local(paths[number]))


def _stored(source: str, arranged: Arranged, options: Options) -> dict[str, Stored]:
    """Return the features; refuses names that look like several ones, where no pattern is given."""
    try:
        return arranged.stored(options)
    except AdoptionError:
        if options.pattern is None:
            refuse_features(source, arranged.ids, None)
        raise


class _OpenFiles:
    """The files that were read last, open."""

    def __init__(self, opens: Callable[[int], OpenedArrays]) -> None:
        self._opens = opens
        self._files: OrderedDict[int, OpenedArrays] = OrderedDict()
        self._kept: dict[tuple[int, str], Array] = {}  # arrays of one file

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def file(self, number: int) -> OpenedArrays:
        """Return a file, open."""
        found = self._files.get(number)
        if found is None:
            found = self._files[number] = self._opens(number)
            if len(self._files) > OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(number)
        return found

    def array(self, number: int, key: str, *, keep: bool) -> Array:
        """Read an array; one that holds many utterances is kept until another file is asked for."""
        found = self._kept.get((number, key))
        if found is None:
            found = self.file(number).read(key)
            if keep:
                others = {each: array for each, array in self._kept.items() if each[0] == number}
                self._kept = {**others, (number, key): found}
        return found

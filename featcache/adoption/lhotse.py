"""lhotse's manifests, adopted with what they name: features, other arrays, texts and speakers.

`adopt("cuts.jsonl.gz", ...)`: the ids are those of the cuts (of the recordings, where it is a
manifest of features), never storage keys. The array that lhotse calls `features` is called as the
user says; arrays in `custom` keep their names. Annotations are `duration` (seconds), `text` of all
supervisions of a cut in their order, `speaker`, `language` and `gender` where the supervisions
agree, `recording` where it is not the id, and what `custom` has of texts, numbers and lists of
numbers, each name of one kind.

A folder of Shar (`cuts.000000.jsonl.gz` beside `features.000000.tar` and others) is adopted as a
whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from featcache.adoptable import Found, Options, Place
from featcache.adoptable.placed_arrays import ArrayColumns
from featcache.adoption.gathered_values import GatheredValues
from featcache.adoption.lhotse_manifest import Item, StoredArray, is_manifest, manifest_items
from featcache.adoption.lhotse_storage import SHAR, LhotseStorage
from featcache.errors import AdoptionError, FeatcacheError

SUFFIXES = (".jsonl", ".jsonl.gz")
SHARD = re.compile(r"((?:.*/)?)cuts\.(\d+)\.jsonl(?:\.gz)?")


class AdoptedLhotse:
    """Manifests of cuts or features."""

    name = "lhotse"

    def recognises(self, place: Place, what: str) -> bool:
        """Tell whether the first line is a cut, or features, or it is a folder of Shar."""
        try:
            paths = [what] if what else _shards(place)
            if not paths or not paths[0].endswith(SUFFIXES):
                return False
            with place.open(paths[0]) as source:
                return is_manifest(source)
        except FeatcacheError:
            return False

    def index(self, place: Place, what: str, options: Options) -> Found:
        """Find the arrays of all cuts."""
        with LhotseStorage(place) as storage:
            collected = _Collected(options, storage)
            for path in [what] if what else _shards(place):
                with place.open(path) as source:
                    for item in manifest_items(source):
                        collected.add(item if what else _in_shard(item, path))
        return collected.found(place.name)


KIND = AdoptedLhotse()


def _shards(place: Place) -> list[str]:
    """Return the manifests of the cuts of a folder of Shar."""
    return [path for path in place.files() if SHARD.fullmatch(path)]


def _in_shard(item: Item, path: str) -> Item:
    """Return an item whose arrays lie in the tar files beside the manifest of a shard."""
    if (shard := SHARD.fullmatch(path)) is None:
        raise AdoptionError(f"{path!r} is no shard of cuts")
    folder, number = shard.groups()

    def stored(name: str, array: StoredArray) -> StoredArray:
        if array.storage != SHAR:
            return array
        return array._replace(path=f"{folder}{name}.{number}.tar", key=item.id)

    features = item.features and stored("features", item.features)
    others = {name: stored(name, array) for name, array in item.others.items()}
    return item._replace(features=features, others=others)


class _Collected:
    def __init__(self, options: Options, storage: LhotseStorage) -> None:
        self._options = options
        self._storage = storage
        self._ids: list[str] = []
        self._containers: dict[str, int] = {}
        self._features: dict[str, ArrayColumns] = {}
        self._frame_s: dict[str, set[float | None]] = {}
        self._said = GatheredValues()

    def add(self, item: Item) -> None:
        for name, stored in self._arrays(item):
            try:
                self._add_array(item.id, name, stored)
            except AdoptionError as error:
                raise AdoptionError(f"cut {item.id!r}, array {name!r}: {error}") from error
        self._said.add(len(self._ids), item.annotations)
        self._ids.append(item.id)

    def found(self, source: str) -> Found:
        if not self._features:
            raise AdoptionError(f"{source!r} names no features, nor other arrays")
        features = {}
        for name, columns in self._features.items():
            shifts = self._frame_s[name]
            features[name] = columns.found(self._ids, shifts.pop() if len(shifts) == 1 else None)
        annotations = self._said.columns(len(self._ids), without=features)
        return Found(list(self._containers), self._ids, features, annotations)

    def _arrays(self, item: Item) -> Iterator[tuple[str, StoredArray]]:
        if item.features is not None:
            if self._options.feature in item.others:
                raise AdoptionError(
                    f"cut {item.id!r} has an array {self._options.feature!r} beside its features; "
                    "give these another name, feature='...'"
                )
            yield self._options.feature, item.features
        yield from item.others.items()

    def _add_array(self, id: str, name: str, stored: StoredArray) -> None:
        path, placed = self._storage.place(stored)
        if name not in self._features:
            axis = 0 if stored.has_time or placed.codec == "lilcom" else self._options.time_axis
            self._features[name] = ArrayColumns(name, axis)
            self._frame_s[name] = set()
        window = None
        if stored.most is not None and placed.shape:
            first = min(stored.first, placed.shape[0])
            window = first, min(first + max(stored.most, 0), placed.shape[0])
        number = self._containers.setdefault(path, len(self._containers))
        self._features[name].add(id, number, placed, window)
        self._frame_s[name].add(stored.frame_s)

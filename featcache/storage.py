"""`FeatureStorage`: the one declaration of where and how features are stored, for all splits."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from featcache._checks import directory, named_settings
from featcache.declaration import Features, FeatureStorageConfig, by_name
from featcache.errors import (
    ConfigError,
    KeyNotFoundError,
    NotACacheError,
    StaleCacheError,
    UnknownNameError,
    indented,
    nearest,
)
from featcache.format import differences
from featcache.reading import Expectation, check_complete
from featcache.store import Cache, FeatureReader, open_features
from featcache.writing.cache_writer import CacheWriter

if TYPE_CHECKING:
    from speechbrain.dataio.dataset import DynamicItemDataset

MISSING = ("raise", "skip")
_log = logging.getLogger("featcache")


class TakesDynamicItems(Protocol):
    """A dataset as `attach` needs it: SpeechBrain's `DynamicItemDataset` is one."""

    def add_dynamic_item(self, func: object, takes: object = None, provides: object = None) -> None:
        """Add a callable that provides a key."""
        ...


class FeatureStorage:
    """Where and how the features of all splits are stored: a cache a split, at `root/split`.

    Touches no disk when made. Usable from Python and as a HyperPyYAML `!new:` block. Threads, forks
    and pickles may share it.

    Args:
        root: the directory of all caches; a leading `~` is the home directory.
        features: `FeatureStorageConfig`s, as a list or by name.

    >>> from featcache import FeatureStorageConfig
    >>> storage = FeatureStorage("features", [FeatureStorageConfig("fbank", backend="hdf5")])
    >>> storage.path("train").as_posix()
    'features/train'
    """

    @named_settings("a feature storage")
    def __init__(self, root: str | PathLike[str], features: Features) -> None:
        self.root = directory(root, "root")
        self.features = by_name(features)

    def path(self, split: str) -> Path:
        """Return the cache directory of a split."""
        if not isinstance(split, str) or split in ("", ".", "..") or "/" in split or "\0" in split:
            raise ConfigError(f"split {split!r} is not usable as the name of a directory")
        return self.root / split

    def writer(
        self,
        split: str,
        fingerprint: Mapping[str, object] | None = None,
        *,
        overwrite: bool = False,
    ) -> CacheWriter:
        """Open the cache of a split for writing; see `CacheWriter`."""
        return CacheWriter(self.path(split), self.features, fingerprint, overwrite=overwrite)

    def cache(self, split: str, *, expect: Mapping[str, object] | None = None) -> Cache:
        """Open the cache of a split for reading; `expect` is that of `featcache.open`.

        Of features that were added to a cache as sets, the declared ones alone are opened. Raises
        `StaleCacheError` if its features were declared in another way or made from something else
        than is expected, `NotACacheError` if the split is not cached yet.
        """
        return self._cache(split, expect)

    def _cache(
        self,
        split: str,
        expect: Mapping[str, object] | None,
        wanted: Collection[str] | None = None,
    ) -> Cache:
        try:
            return declared_cache(self.path(split), self.features, expect, wanted)
        except NotACacheError as error:
            raise NotACacheError(f"{error}; {self._missing(split)}") from error

    def reader(
        self,
        split: str,
        feature: str,
        *,
        dtype: object = None,
        expect: Mapping[str, object] | None = None,
    ) -> FeatureReader:
        """Return a reader of one feature of a split; opens the cache at its first call.

        `dtype` is that of its tensors; None: as declared. The first call raises `StaleCacheError`
        if the feature was declared in another way, or the cache made from something else than is
        expected.
        """
        self._check_declared(feature)
        declared = {"features": {feature: self.features[feature].to_json()}}
        demanded = Expectation.of(expect).keys
        expected = {**declared, **demanded}
        return FeatureReader(self.path(split), feature, dtype=dtype, expect=expected)

    def attach(
        self,
        dataset: TakesDynamicItems,
        split: str,
        features: str | Iterable[str] | None = None,
        *,
        use: bool | str | Iterable[str] = True,
        dtypes: Mapping[str, object] | None = None,
        missing: Literal["raise", "skip"] = "raise",
        allow_incomplete: bool = False,
        expect: Mapping[str, object] | None = None,
    ) -> None:
        """Make a SpeechBrain `DynamicItemDataset` provide features (all, if None) by `id`.

        Args:
            dataset: the data set.
            split: names the cache, which must be complete.
            features: names of features; None: all that are declared.
            use: whether these come from the cache, or which of them: a switch for the YAML. False
                leaves the data set as it is, and opens nothing.
            dtypes: dtypes of their tensors, e.g. {"fbank": "float32"}; else as declared.
            missing: of the ids that the data set shows (`data_ids`) and the cache lacks, "raise"
                names them in an error, so that none is missing in the middle of an epoch; "skip"
                takes them out of the data set, with a warning.
            allow_incomplete: also take a cache that its writer has not finished.
            expect: as `featcache.open` takes it: what `brain.expectation()` returns.

        Raises `StaleCacheError` as `cache` does; `ConfigError` if the dataset has a key of that
        name already, which SpeechBrain would prefer without a word; `IncompleteError`;
        `KeyNotFoundError`, which names the missing ids.
        """
        if missing not in MISSING:
            raise UnknownNameError(f"missing has no {missing!r}; {nearest(missing, MISSING)}")
        asked = self._names_of(dataset, self.features if features is None else features)
        switched = asked if use is True else self._names_of(dataset, [] if use is False else use)
        for argument, given in (("dtypes", dtypes or {}), ("use", switched)):
            if unknown := [name for name in given if name not in asked]:
                raise ConfigError(
                    f"{argument} names a feature {unknown[0]!r} that is not attached; "
                    f"{nearest(unknown[0], asked)}"
                )
        names = [name for name in asked if name in switched]
        if asked and not names:
            return
        _require_free(dataset, names)
        # a missing or stale cache is an error here, not in a worker
        cache = self._cache(split, expect, names)
        check_complete(cache.opened, allow_incomplete=allow_incomplete)
        readers = {name: cache.reader(name, dtype=(dtypes or {}).get(name)) for name in names}
        _keep_stored(dataset, cache, names, skip=missing == "skip")
        for name, reader in readers.items():
            dataset.add_dynamic_item(reader, takes="id", provides=name)

    def _names_of(self, dataset: object, features: str | Iterable[str]) -> list[str]:
        """Return names of declared features; raises `ConfigError` for no dataset of SpeechBrain."""
        if not hasattr(dataset, "add_dynamic_item"):
            raise ConfigError(
                "attach needs a DynamicItemDataset of SpeechBrain, not "
                f"{type(dataset).__name__!r}; featcache.FeatureDataset and FeatureLoader need none"
            )
        if not isinstance(features, Iterable):
            known = ", ".join(map(repr, self.features))
            raise ConfigError(f"features are names, not {features!r}; known: {known}")
        names = [features] if isinstance(features, str) else list(features)
        for name in names:
            self._check_declared(name)
        return names

    def _check_declared(self, feature: str) -> None:
        if feature not in self.features:
            known = nearest(feature, self.features)
            raise UnknownNameError(f"feature {feature!r} is not declared; {known}")

    def _missing(self, split: str) -> str:
        others = sorted(path.parent.name for path in self.root.glob("*/featcache.json"))
        there = f"splits there: {', '.join(map(repr, others))}; " if others else ""
        return (
            f"{there}call cache_features(dataset, stage, split={split!r}) first, "
            f"or write it with writer({split!r})"
        )


def declared_cache(
    path: Path,
    features: Mapping[str, FeatureStorageConfig],
    expect: Mapping[str, object] | None = None,
    wanted: Collection[str] | None = None,
) -> Cache:
    """Open the feature sets of a cache that hold some features; see `FeatureStorage.cache`.

    `wanted` are those of `features` that are needed; None: all.
    """
    needed = features.keys() if wanted is None else wanted
    cache = open_features(path, needed, expect)
    # stale features are left out: whoever reads them is told
    named = {*needed, *features.keys() & cache.features} - cache.opened.refused.keys()
    declared = {name: each.to_json() for name, each in features.items() if name in named}
    if changed := differences(cache.fingerprint["features"], declared, ("features",)):
        added = not features.keys() <= {*cache.features} and {*cache.features} <= features.keys()
        more = ", or have what is absent computed by cache_features, or extract" if added else ""
        raise StaleCacheError(
            f"cache {str(cache.path)!r} was declared in another way:{indented(changed)}\n"
            f"declare it as it was, or compute it again with overwrite=True{more}"
        )
    return cache


def _keep_stored(
    dataset: DynamicItemDataset, cache: Cache, features: Sequence[str], *, skip: bool
) -> None:
    """Compare the ids of a data set with a cache; take out those that it lacks, or raise."""
    ids: Sequence[str] | None = getattr(dataset, "data_ids", None)
    if ids is None or not features:
        return
    try:
        cache.lengths(features[0], ids=ids)  # all at once, a second for ten million
        return
    except KeyNotFoundError:
        there = [id for id in ids if id in cache]
    missing = sorted({*ids}.difference(there))
    failed = len({*missing}.intersection(cache.failed))
    shown = ", ".join(map(repr, missing[:3])) + (", ..." if len(missing) > 3 else "")
    why = f", {failed} of them because computing them failed" if failed else ""
    told = f"{len(missing)} of the dataset's {len(ids)} ids are not in cache {str(cache.path)!r}"
    if not skip or not there:
        raise KeyNotFoundError(
            f"{told}{why}: {shown}; cache them with cache_features, or attach to a dataset without "
            'them (missing="skip" takes them out)'
        )
    dataset.data_ids = there
    _log.warning("%s%s, and are taken out of it: %s", told, why, shown)


def _require_free(dataset: object, names: Iterable[str]) -> None:
    """Raise `ConfigError` if a data set has a key of one of these names already."""
    keys = _keys(dataset)
    for name in names:
        if isinstance(keys.get(name), FeatureReader):
            raise ConfigError(
                f"feature {name!r} is attached to the dataset already, as {keys[name]!r}; "
                "once is enough"
            )
        if name in keys:
            raise ConfigError(
                f"the dataset has a key {name!r} already, which would hide the cached feature; "
                "rename one of them, or leave it as it is (use=False)"
            )


def _keys(dataset: object) -> dict[str, object]:
    """Return the keys of a SpeechBrain dataset, with the function of each dynamic one."""
    pipeline = getattr(dataset, "pipeline", None)
    keys: dict[str, object] = dict.fromkeys(getattr(pipeline, "key_to_node", ()))
    for item in getattr(pipeline, "dynamic_items", ()):
        keys |= dict.fromkeys(getattr(item, "provides", ()), getattr(item, "func", None))
    data = getattr(dataset, "data", None)
    for item in data.values() if isinstance(data, Mapping) else ():
        keys |= dict.fromkeys(item)
    return keys

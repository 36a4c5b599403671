"""`FeatureStorage`: the one declaration of where and how features are stored, for all splits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Protocol, Self

from featcache.errors import ConfigError, StaleCacheError, UnknownNameError, nearest
from featcache.feature import FeatureStorageConfig
from featcache.store.cache import Cache
from featcache.store.fingerprint import differences
from featcache.store.part_writer import by_name
from featcache.store.reader import FeatureReader
from featcache.store.writer import CacheWriter


class TakesDynamicItems(Protocol):
    """What `attach` needs of a dataset: SpeechBrain's `DynamicItemDataset` has it."""

    def add_dynamic_item(self, func: object, takes: object = None, provides: object = None) -> None:
        """Add a callable that provides a key."""
        ...


class FeatureStorage:
    """Declare where the features of all splits are stored, and how; one cache a split at `root/split`.

    Touches no disk when made. Usable from Python and as a HyperPyYAML `!new:` block.

    Args:
        root: the directory of all caches.
        features: `FeatureStorageConfig`s, as a list or by name.

    >>> storage = FeatureStorage("features", [FeatureStorageConfig("fbank", backend="hdf5")])
    >>> storage.path("train").as_posix()
    'features/train'
    """

    def __new__(cls, *args: object, **settings: object) -> Self:
        """Refuse unknown settings: `__init__` would not say which one was meant, or that another is missing for it."""
        for key in settings:
            if key not in ("root", "features"):
                raise UnknownNameError(f"a feature storage has no setting {key!r}; it has 'root' and 'features'")
        return super().__new__(cls)

    def __init__(
        self,
        root: str | PathLike[str],
        features: Mapping[str, FeatureStorageConfig] | Iterable[FeatureStorageConfig],
    ) -> None:
        self.root = Path(root)
        self.features = by_name(features)

    def path(self, split: str) -> Path:
        """Return the cache directory of a split."""
        if not isinstance(split, str) or split in ("", ".", "..") or "/" in split or "\0" in split:
            raise ConfigError(f"split {split!r} is not usable as the name of a directory")
        return self.root / split

    def writer(
        self, split: str, fingerprint: Mapping[str, object] | None = None, *, overwrite: bool = False
    ) -> CacheWriter:
        """Open the cache of a split for writing; see `CacheWriter`."""
        return CacheWriter(self.path(split), self.features, fingerprint, overwrite=overwrite)

    def cache(self, split: str) -> Cache:
        """Open the cache of a split for reading.

        Raises `StaleCacheError` if its features were declared in another way.
        """
        cache = Cache(self.path(split))
        declared = {name: feature.to_json() for name, feature in self.features.items()}
        changed = differences(cache.fingerprint["features"], declared, "features")
        if changed:
            lines = "".join(f"\n  {line}" for line in changed)
            raise StaleCacheError(
                f"cache {str(cache.path)!r} was declared in another way:{lines}\n"
                "declare it as it was, or compute it again with overwrite=True"
            )
        return cache

    def reader(self, split: str, feature: str) -> FeatureReader:
        """Return a reader of one feature of a split; opens the cache at its first call."""
        if feature not in self.features:
            raise UnknownNameError(f"feature {feature!r} is not declared; {nearest(feature, self.features)}")
        return FeatureReader(self.path(split), feature)

    def attach(self, dataset: TakesDynamicItems, split: str, features: Iterable[str] | None = None) -> None:
        """Let a SpeechBrain `DynamicItemDataset` provide features (all, if None) by `id`.

        Raises `ConfigError` if the dataset has a key of that name already, since SpeechBrain would silently prefer it.
        """
        names = list(self.features if features is None else features)
        readers = {name: self.reader(split, name) for name in names}
        taken = _keys(dataset)
        for name in names:
            if name in taken:
                raise ConfigError(
                    f"the dataset has a key {name!r} already, which would hide the cached feature; rename one of them"
                )
        self.cache(split)  # a missing or stale cache is an error here, not in a worker
        for name, reader in readers.items():
            dataset.add_dynamic_item(reader, takes="id", provides=name)


def _keys(dataset: object) -> set[str]:
    """Return the static and dynamic keys of a SpeechBrain dataset."""
    keys = set(getattr(getattr(dataset, "pipeline", None), "key_to_node", ()))
    data = getattr(dataset, "data", None)
    for item in data.values() if isinstance(data, Mapping) else ():
        keys.update(item)
    return keys

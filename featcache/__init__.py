"""featcache: compute speech features once, store them in any format, feed them to training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from featcache import errors as errors
from featcache.errors import AdoptionError as AdoptionError
from featcache.errors import CacheError as CacheError
from featcache.errors import CacheLockedError as CacheLockedError
from featcache.errors import ClosedError as ClosedError
from featcache.errors import ComputeError as ComputeError
from featcache.errors import ConfigError as ConfigError
from featcache.errors import CorruptCacheError as CorruptCacheError
from featcache.errors import DuplicateIdError as DuplicateIdError
from featcache.errors import FeatcacheError as FeatcacheError
from featcache.errors import FeatureError as FeatureError
from featcache.errors import FormatVersionError as FormatVersionError
from featcache.errors import IncompleteError as IncompleteError
from featcache.errors import KeyNotFoundError as KeyNotFoundError
from featcache.errors import MissingDependencyError as MissingDependencyError
from featcache.errors import NotACacheError as NotACacheError
from featcache.errors import RowError as RowError
from featcache.errors import StaleCacheError as StaleCacheError
from featcache.errors import StateError as StateError
from featcache.errors import StorageFullError as StorageFullError
from featcache.errors import UnknownNameError as UnknownNameError
from featcache.errors import WindowError as WindowError

if TYPE_CHECKING:
    from collections.abc import Callable

    from featcache import iterators as iterators
    from featcache import samplers as samplers
    from featcache.adoption.adopt import adopt as adopt
    from featcache.brain import FeatureCacheMixin as FeatureCacheMixin
    from featcache.cluster.client import get_client as get_client
    from featcache.cluster.config import ParallelConfig as ParallelConfig
    from featcache.cluster.worker_env import with_worker_env as with_worker_env
    from featcache.cluster.worker_env import worker_env as worker_env
    from featcache.collect_stats.runner import CollectStatsRunner as CollectStatsRunner
    from featcache.declaration import FeatureStorageConfig as FeatureStorageConfig
    from featcache.extraction.converting.convert import convert as convert
    from featcache.extraction.environment import EnvironmentProvider as EnvironmentProvider
    from featcache.extraction.estimating.estimate import Estimate as Estimate
    from featcache.extraction.estimating.estimate import estimate as estimate
    from featcache.extraction.extract import extract as extract
    from featcache.extraction.unpad import unpad as unpad
    from featcache.interop.utterances import utterances as utterances
    from featcache.lazy.decorator import cache as cache
    from featcache.lazy.through import ReadThrough as ReadThrough
    from featcache.lazy.through import ReadThroughDataset as ReadThroughDataset
    from featcache.lazy.through import through as through
    from featcache.loading.dataset import FeatureDataset as FeatureDataset
    from featcache.loading.loader import FeatureLoader as FeatureLoader
    from featcache.loading.padding import CommonCollateFn as CommonCollateFn
    from featcache.making import diff as diff
    from featcache.making import made_from as made_from
    from featcache.mvn import GlobalMVN as GlobalMVN
    from featcache.registry import backend_names as backend_names
    from featcache.registry import codec_names as codec_names
    from featcache.registry import get_backend as get_backend
    from featcache.registry import get_codec as get_codec
    from featcache.staleness.provenance import provenance as provenance
    from featcache.stats import FeatureStats as FeatureStats
    from featcache.storage import FeatureStorage as FeatureStorage
    from featcache.store.cache import Cache as Cache
    from featcache.store.opening import open as open
    from featcache.store.reading.generation import PaddedFeatures as PaddedFeatures
    from featcache.store.reading.reader import FeatureReader as FeatureReader
    from featcache.store.writing.cache_writer import CacheWriter as CacheWriter
    from featcache.tables.combine import concat as concat
    from featcache.tables.combine import join as join
    from featcache.tables.segments import Windows as Windows
    from featcache.tables.table import FeatureTable as FeatureTable
    from featcache.tables.times import Seconds as Seconds

# loaded when first used: `import featcache` brings in neither torch nor any format's library
_HOMES = {
    "Cache": "featcache.store.cache",
    "CacheWriter": "featcache.store.writing.cache_writer",
    "CollectStatsRunner": "featcache.collect_stats.runner",
    "CommonCollateFn": "featcache.loading.padding",
    "EnvironmentProvider": "featcache.extraction.environment",
    "Estimate": "featcache.extraction.estimating.estimate",
    "FeatureCacheMixin": "featcache.brain",
    "FeatureDataset": "featcache.loading.dataset",
    "FeatureLoader": "featcache.loading.loader",
    "FeatureReader": "featcache.store.reading.reader",
    "FeatureStats": "featcache.stats",
    "FeatureStorage": "featcache.storage",
    "FeatureStorageConfig": "featcache.declaration",
    "FeatureTable": "featcache.tables.table",
    "GlobalMVN": "featcache.mvn",
    "PaddedFeatures": "featcache.store.reading.generation",
    "ParallelConfig": "featcache.cluster.config",
    "ReadThrough": "featcache.lazy.through",
    "ReadThroughDataset": "featcache.lazy.through",
    "Seconds": "featcache.tables.times",
    "Windows": "featcache.tables.segments",
    "adopt": "featcache.adoption.adopt",
    "backend_names": "featcache.registry",
    "cache": "featcache.lazy.decorator",
    "codec_names": "featcache.registry",
    "concat": "featcache.tables.combine",
    "convert": "featcache.extraction.converting.convert",
    "diff": "featcache.making",
    "estimate": "featcache.extraction.estimating.estimate",
    "extract": "featcache.extraction.extract",
    "get_backend": "featcache.registry",
    "get_client": "featcache.cluster.client",
    "get_codec": "featcache.registry",
    "join": "featcache.tables.combine",
    "made_from": "featcache.making",
    "open": "featcache.store.opening",
    "provenance": "featcache.staleness.provenance",
    "through": "featcache.lazy.through",
    "unpad": "featcache.extraction.unpad",
    "utterances": "featcache.interop.utterances",
    "with_worker_env": "featcache.cluster.worker_env",
    "worker_env": "featcache.cluster.worker_env",
}
_MODULES = ("iterators", "samplers")
_ERRORS = [name for name in vars(errors) if name.endswith("Error")]

__all__ = sorted([*_HOMES, *_MODULES, *_ERRORS, "errors"])
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"featcache.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'featcache' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except MissingDependencyError as error:  # of use, not of a look: help() and autodoc look at all
        return _raising(name, str(error))
    globals()[name] = value
    return value


def _raising(name: str, message: str) -> Callable[..., NoReturn]:
    """Stand in for a function whose library is not installed."""

    def stand_in(*args: object, **kwargs: object) -> NoReturn:
        raise MissingDependencyError(message)

    stand_in.__name__ = stand_in.__qualname__ = name
    stand_in.__doc__ = f"Not usable here: {message}."
    return stand_in


def __dir__() -> list[str]:
    return [*globals(), *_HOMES, *_MODULES]

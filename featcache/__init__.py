"""featcache: compute speech features once, store them in any format, feed them to training."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from featcache import errors as errors
from featcache._loading import load
from featcache.errors import FeatcacheError as FeatcacheError
from featcache.errors import KeyNotFoundError as KeyNotFoundError
from featcache.errors import StaleCacheError as StaleCacheError

if TYPE_CHECKING:
    from featcache import espnet as espnet
    from featcache import inspect as inspect
    from featcache import registry as registry
    from featcache import samplers as samplers
    from featcache import testing as testing
    from featcache import transfer as transfer
    from featcache import workers as workers
    from featcache.adoption.adopt import adopt as adopt
    from featcache.brain import FeatureCacheMixin as FeatureCacheMixin
    from featcache.declaration import FeatureStorageConfig as FeatureStorageConfig
    from featcache.extraction.convert import convert as convert
    from featcache.extraction.extract import EnvironmentProvider as EnvironmentProvider
    from featcache.extraction.extract import extract as extract
    from featcache.extraction.unpad import unpad as unpad
    from featcache.interop.utterances import utterances as utterances
    from featcache.lazy.through import cache as cache
    from featcache.lazy.through import through as through
    from featcache.loading.dataset import FeatureDataset as FeatureDataset
    from featcache.loading.loader import FeatureLoader as FeatureLoader
    from featcache.mvn import GlobalMVN as GlobalMVN
    from featcache.stats import FeatureStats as FeatureStats
    from featcache.storage import FeatureStorage as FeatureStorage
    from featcache.store import Cache as Cache
    from featcache.store import FeatureReader as FeatureReader
    from featcache.store import open as open
    from featcache.tables import FeatureTable as FeatureTable
    from featcache.tables import Seconds as Seconds
    from featcache.tables import Windows as Windows
    from featcache.tables import concat as concat
    from featcache.tables import join as join
    from featcache.tables import mix as mix
    from featcache.tapped_model import taps as taps
    from featcache.workers.config import ParallelConfig as ParallelConfig
    from featcache.writing.cache_writer import CacheWriter as CacheWriter

# loaded when first used: `import featcache` brings in neither torch nor any format's library
_HOMES = {
    "Cache": "featcache.store",
    "CacheWriter": "featcache.writing.cache_writer",
    "EnvironmentProvider": "featcache.extraction.extract",
    "FeatureCacheMixin": "featcache.brain",
    "FeatureDataset": "featcache.loading.dataset",
    "FeatureLoader": "featcache.loading.loader",
    "FeatureReader": "featcache.store",
    "FeatureStats": "featcache.stats",
    "FeatureStorage": "featcache.storage",
    "FeatureStorageConfig": "featcache.declaration",
    "FeatureTable": "featcache.tables",
    "GlobalMVN": "featcache.mvn",
    "ParallelConfig": "featcache.workers.config",
    "Seconds": "featcache.tables",
    "Windows": "featcache.tables",
    "adopt": "featcache.adoption.adopt",
    "cache": "featcache.lazy.through",
    "concat": "featcache.tables",
    "convert": "featcache.extraction.convert",
    "extract": "featcache.extraction.extract",
    "join": "featcache.tables",
    "mix": "featcache.tables",
    "open": "featcache.store",
    "taps": "featcache.tapped_model",
    "through": "featcache.lazy.through",
    "unpad": "featcache.extraction.unpad",
    "utterances": "featcache.interop.utterances",
}
_MODULES = ("espnet", "inspect", "registry", "samplers", "testing", "transfer", "workers")

_ERRORS = ("FeatcacheError", "KeyNotFoundError", "StaleCacheError")

__all__ = sorted([*_HOMES, *_ERRORS, "errors", "samplers"])
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"featcache.{name}")
    value = globals()[name] = load("featcache", _HOMES, name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__all__", "__version__"})

"""Checks that caches fit together: features and fingerprints, not ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import TYPE_CHECKING

from featcache.errors import ConfigError
from featcache.store.cache import Cache
from featcache.store.format.fingerprint import differences
from featcache.store.reading.feature_arrays import FeatureArrays
from featcache.tables.block import Block

if TYPE_CHECKING:
    from featcache.tables.table import FeatureTable

# keys of fingerprints that may differ: the features of all splits are made from the same, and
# what matters of the declarations is compared feature by feature
_APART = ("stage", "features")


def check_same_features(first: Block, other: Block) -> None:
    """Raise `ConfigError` if features differ in name, dtype, time axis or shape of a frame."""
    paths = f"{str(first.caches[0].path)!r} and {str(other.caches[0].path)!r}"
    if first.features.keys() != other.features.keys():
        raise ConfigError(
            f"caches {paths} have different features: {', '.join(first.features)} and "
            f"{', '.join(other.features)}"
        )
    for name in first.features:
        # the shape of a frame is not known of an empty cache
        either_empty = not all(len(block.features[name].opened.index) for block in (first, other))
        kinds = [_kind(block.arrays(name), either_empty) for block in (first, other)]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"feature {name!r} of caches {paths} differs: {kinds[0]} and {kinds[1]}"
            )


def _kind(arrays: FeatureArrays, any_dims: bool) -> str:
    dims = ["..."] if any_dims else list(map(str, arrays.dims))
    return f"{arrays.declared_dtype} ({', '.join([*['frames'] * arrays.has_frames, *dims])})"


def check_unlike(unlike: object) -> None:
    """Raise `ConfigError` for a choice that there is not."""
    if unlike not in ("raise", "keep"):
        raise ConfigError(f"unlike is 'raise' or 'keep', not {unlike!r}")


def check_made_from_the_same(first: Block, other: Block) -> None:
    """Raise `ConfigError` if a feature of two blocks was made from something else in each."""
    pairs = {(first.features[name].cache, other.features[name].cache) for name in first.features}
    for one, two in pairs:
        _refuse(one, two, differences(_made_from(one), _made_from(two)))


def check_nothing_contradicts(first: FeatureTable, other: FeatureTable) -> None:
    """Raise `ConfigError` if a key that two fingerprints have has another value in each."""
    for cache, its in product(_caches(first), _caches(other)):
        one, two = _made_from(cache), _made_from(its)
        _refuse(cache, its, differences(_shared(one, two), _shared(two, one)))


def _caches(table: FeatureTable) -> Iterable[Cache]:
    return dict.fromkeys(cache for block in table.caches for cache in block)


def _refuse(first: Cache, other: Cache, unlike: list[str]) -> None:
    if unlike:
        lines = "".join(f"\n  {line}" for line in unlike)
        raise ConfigError(
            f"the features of {str(first.path)!r} and {str(other.path)!r} were made from something "
            f"else ('was': the first, 'now': the second):{lines}\n"
            "compute one of them again, or give unlike='keep' if they go together as they are"
        )


def _made_from(cache: Cache) -> dict[str, object]:
    made_from = cache.opened.manifest.fingerprint
    return {key: value for key, value in made_from.items() if key not in _APART}


def _shared(content: object, other: object) -> object:
    """Return what `content` says under keys that `other` has, too."""
    if not isinstance(content, Mapping) or not isinstance(other, Mapping):
        return content
    return {key: _shared(content[key], other[key]) for key in content if key in other}

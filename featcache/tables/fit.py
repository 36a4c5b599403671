"""Checks that caches fit together: side by side with the same ids, or one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from featcache.errors import ConfigError
from featcache.store.cache import Cache
from featcache.store.format.fingerprint import differences
from featcache.store.reading.feature_arrays import FeatureArrays

# keys of fingerprints that may differ: the features of all splits are made from the same, and
# what matters of the declarations is compared feature by feature
_APART = ("stage", "features")


def features_of(block: Sequence[Cache]) -> dict[str, FeatureArrays]:
    """Return the arrays of all features of joined caches, by name."""
    return {name: cache.opened.arrays(name) for cache in block for name in cache.features}


def check_same_features(first: Sequence[Cache], other: Sequence[Cache]) -> None:
    """Raise `ConfigError` if features differ in name, dtype, time axis or shape of a frame."""
    features, others = features_of(first), features_of(other)
    paths = f"{str(first[0].path)!r} and {str(other[0].path)!r}"
    if features.keys() != others.keys():
        raise ConfigError(
            f"caches {paths} have different features: {', '.join(features)} and {', '.join(others)}"
        )
    either_empty = not len(first[0]) or not len(other[0])  # then the shape of a frame is not known
    for name, arrays in features.items():
        kinds = [_kind(arrays, either_empty), _kind(others[name], either_empty)]
        if kinds[0] != kinds[1]:
            raise ConfigError(
                f"feature {name!r} of caches {paths} differs: {kinds[0]} and {kinds[1]}"
            )


def _kind(arrays: FeatureArrays, any_dims: bool) -> str:
    dims = ["..."] if any_dims else list(map(str, arrays.dims))
    return f"{arrays.declared_dtype} ({', '.join([*['frames'] * arrays.has_frames, *dims])})"


def check_same_ids(first: Cache, other: Cache) -> None:
    """Raise `ConfigError` if an id is in one of two caches alone."""
    a, b = first.opened.index, other.opened.index
    if np.array_equal(a.ids.ends, b.ids.ends) and np.array_equal(a.ids.data, b.ids.data):
        return
    for one, two in ((first, other), (other, first)):
        alone = next((id for id in one if id not in two), None)
        if alone is not None:
            raise ConfigError(
                f"joined caches need the same ids, but {alone!r} is in {str(one.path)!r} "
                f"({len(one)} utterances) and not in {str(two.path)!r} ({len(two)})"
            )


def check_no_shared_id(first: Cache, other: Cache) -> None:
    """Raise `ConfigError` if an id is in both of two caches."""
    few, many = sorted((first.opened.index, other.opened.index), key=len)
    if len(few):
        places = np.minimum(many.hashes.searchsorted(few.hashes), len(many) - 1)
        for place in np.flatnonzero(many.hashes[places] == few.hashes).tolist():
            id = few.id(int(few.hash_rows[place]))
            if many.find(id) >= 0:
                raise ConfigError(
                    f"utterance {id!r} is in {str(first.path)!r} and in {str(other.path)!r}"
                )


def check_unlike(unlike: object) -> None:
    """Raise `ConfigError` for a choice that there is not."""
    if unlike not in ("raise", "keep"):
        raise ConfigError(f"unlike is 'raise' or 'keep', not {unlike!r}")


def check_made_from_the_same(first: Sequence[Cache], other: Sequence[Cache]) -> None:
    """Raise `ConfigError` if a feature of two blocks was made from something else in each."""
    owners = [
        {name: cache for cache in block for name in cache.features} for block in (first, other)
    ]
    pairs = {(owners[0][name], owners[1][name]) for name in owners[0]}
    for one, two in pairs:
        _refuse(one, two, differences(_made_from(one), _made_from(two)))


def check_nothing_contradicts(first: Cache, other: Cache) -> None:
    """Raise `ConfigError` if a key that two fingerprints have has another value in each."""
    one, two = _made_from(first), _made_from(other)
    _refuse(first, other, differences(_shared(one, two), _shared(two, one)))


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

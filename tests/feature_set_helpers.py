"""A feature that is added to the cache of `make_cache`, as a set of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from store_helpers import FINGERPRINT, Arrays, arrays_of, id_of

from featcache import CacheWriter, FeatureStorageConfig

ENERGY = FeatureStorageConfig("energy")
ALL = range(9)


def energy_of(number: int) -> Arrays:
    """The added feature of an utterance."""
    return {"energy": arrays_of(number)["fbank"].sum(axis=1, keepdims=True)}


def both(numbers: Iterable[int]) -> dict[str, Arrays]:
    """What a cache of the two sets must hold."""
    return {id_of(number): arrays_of(number) | energy_of(number) for number in numbers}


def add(
    path: Path,
    numbers: Iterable[int] = ALL,
    feature: FeatureStorageConfig = ENERGY,
    made_from: Mapping[str, object] = FINGERPRINT,
    *,
    overwrite: bool = False,
    annotations: Mapping[str, object] | None = None,
) -> Path:
    """Add a feature to a cache; returns the directory of its set."""
    with CacheWriter(path, [feature], made_from, overwrite=overwrite) as writer:
        for number in numbers:
            arrays = {feature.name: energy_of(number)["energy"]}
            writer.write(id_of(number), arrays, annotations=annotations)
    return writer.path

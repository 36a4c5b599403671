"""Feature sets of a cache as one generation: the utterances that all of them have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from featcache.interface import Ints
from featcache.store.format.fingerprint import canonical
from featcache.store.format.index import ContainerColumns, Index
from featcache.store.format.index_rows import common_rows, have_same_ids, rows_of_ids, some_rows
from featcache.store.format.manifest import SETS, Manifest
from featcache.store.format.manifest_entries import Expected
from featcache.store.format.strings import Strings
from featcache.store.reading.checksums import Checks
from featcache.store.reading.feature_arrays import FeatureArrays
from featcache.store.reading.generation import Generation, Joined
from featcache.store.reading.verify import all_damage

FEATURES = "features"


def join_sets(sets: Mapping[str, Generation]) -> Joined:
    """Put the feature sets of a cache side by side, row by row.

    Columns are copied only where the sets have not the same utterances.
    """
    opened = list(sets.values())
    rows = common_rows([each.index for each in opened])
    pairs = zip(opened, rows, strict=True)
    indexes = [each.index if some is None else some_rows(each.index, some) for each, some in pairs]
    features: dict[str, FeatureArrays] = {}
    for each, index, some in zip(opened, indexes, rows, strict=True):
        features |= each.features if some is None else _arrays(each, index)
    index = replace(
        indexes[0],
        features={name: columns for each in indexes for name, columns in each.features.items()},
        containers=_no_containers(),
        stats={name: stats for each in indexes for name, stats in each.stats.items()},
        stamps=None,
        annotations={},  # which are those of the sets
    )
    failed = sorted({id for each in opened for id in each.failed}, key=str.encode)
    set_rows = dict(zip(sets, rows, strict=True))
    return Joined(_manifest(sets, len(index)), index, Strings.of(failed), features, set_rows)


def missing_from(opened: Generation, feature: str) -> list[str]:
    """Return the ids of other sets that the set of a feature lacks, in order."""
    mine = opened.of_feature(feature)
    return _missing(mine, opened.sets)


def joined_mapping(mappings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join objects of several sets: keys that are alike in all as they are, others by set.

    >>> joined_mapping({"a": {"gain": 1, "rate": 8}, "b": {"gain": 2, "rate": 8}})
    {'rate': 8, 'sets': {'a': {'gain': 1}, 'b': {'gain': 2}}}
    """
    first = next(iter(mappings.values()), {})
    alike = {
        key: value
        for key, value in first.items()
        if all(key in each and canonical({key: each[key]}) == canonical({key: value})
               for each in mappings.values())
    }  # fmt: skip
    apart = {
        name: {key: value for key, value in each.items() if key not in alike}
        for name, each in mappings.items()
    }
    return {**alike, SETS: apart} if any(apart.values()) else alike


def damage_of(opened: Generation, *, arrays: bool, alone: bool = False) -> Iterator[str]:
    """Compare all files of a cache, of each of its sets, with what their parents say of them.

    With `alone`, those of the generation that is open, and of no other one.
    """
    for each in opened.sets.values() or (opened,):
        manifest = replace(each.manifest, previous=None, tags={}) if alone else each.manifest
        yield from all_damage(each.path, manifest, each.index, arrays=arrays, roots=each.roots)


def _manifest(sets: Mapping[str, Generation], rows: int) -> Manifest:
    """Say of several sets what a manifest says of one."""
    all_ = {name: each.manifest for name, each in sets.items()}
    manifests = list(all_.values())
    declared = {name: each for one in manifests for name, each in one.features.items()}
    made_from = {
        name: {key: value for key, value in one.fingerprint.items() if key != FEATURES}
        for name, one in all_.items()
    }
    expected = [one.expected.count for one in manifests if one.expected is not None]
    whole = all(one.complete for one in manifests)
    return Manifest(
        {**joined_mapping(made_from), FEATURES: declared},
        generation=sum(one.generation for one in manifests),
        write_id="".join(one.write_id for one in manifests),
        complete=whole and not any(_lacks_any(each, sets) for each in sets.values()),
        expected=Expected(max(expected), "") if len(expected) == len(manifests) else None,
        rows=rows,
        dims={name: dims for one in manifests for name, dims in one.dims.items()},
        # the first set that has an annotation counts
        annotations={
            name: each for one in manifests[::-1] for name, each in one.annotations.items()
        },
    )


def _lacks_any(opened: Generation, sets: Mapping[str, Generation]) -> bool:
    """Tell whether other sets have utterances that a set neither has nor says have failed."""
    return not {*_missing(opened, sets)} <= {*opened.failed}


def _missing(opened: Generation, sets: Mapping[str, Generation]) -> list[str]:
    found: set[str] = set()
    for each in sets.values():
        if each is not opened and not have_same_ids(each.index, opened.index):
            lacking: Ints = np.flatnonzero(rows_of_ids(opened.index, each.index) < 0)
            found.update(each.index.id(row) for row in lacking.tolist())
    return sorted(found, key=str.encode)


def _arrays(opened: Generation, index: Index) -> dict[str, FeatureArrays]:
    """Return what reads the features of some rows of a set."""
    manifest, containers = opened.manifest, opened.containers
    checks = None
    if opened.check_reads:
        checks = Checks(opened.path, manifest, index.containers, containers)
    return {
        name: FeatureArrays(manifest, name, index, containers, checks) for name in manifest.features
    }


def _no_containers() -> ContainerColumns:
    nothing = np.empty(0, np.int64)
    parts = np.empty(0, np.int32)
    return ContainerColumns(Strings.of([]), nothing, np.empty(0, np.uint8), parts)

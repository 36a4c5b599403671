"""Declarations, fingerprint and record that a conversion carries from its source."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np

from featcache.declaration.feature_config import Features, FeatureStorageConfig, by_name
from featcache.errors import ConfigError, KeyNotFoundError
from featcache.extraction.table_rows import TableRows, is_adopted
from featcache.registry import RAW, get_codec
from featcache.store.format.fingerprint import fingerprint_digest
from featcache.store.reading.generation import Generation
from featcache.store.reading.joined_sets import joined_mapping
from featcache.store.reading.origin import ROLE, witnesses
from featcache.store.writing.cache_writer import CacheWriter
from featcache.store.writing.copied_parts import keeps_its_bytes
from featcache.tables.table import FeatureTable

CONVERTED = "converted"  # key of fingerprints and of records
PROBE = "probe"
_FEATURES = "features"
_MANTISSA_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
_OF_FRAMES = ("frame_s", "offset_s", "dims")

Declared = dict[str, FeatureStorageConfig]


def declared_as(
    table: FeatureTable, features: Features | Iterable[str | FeatureStorageConfig] | None
) -> Declared:
    """Return the declarations that a converted cache is to have, by name.

    Names stand for features as they are; what a declaration leaves out about frames is that of the
    source. Raises `KeyNotFoundError` for a feature that the source has not, `ConfigError` for a
    time axis that is another one.
    """
    asked: Iterable[object] = table.features if features is None else features
    if isinstance(features, str | FeatureStorageConfig):
        asked = [features]
    elif isinstance(features, Mapping):
        asked = by_name(features).values()
    found: list[FeatureStorageConfig] = []
    for each in asked:
        name = each.name if isinstance(each, FeatureStorageConfig) else each
        if not isinstance(name, str):
            raise ConfigError(
                f"features are names, or declarations by FeatureStorageConfig, not {each!r}"
            )
        if name not in table.features:
            there = ", ".join(map(repr, table.features))
            raise KeyNotFoundError(f"the source has no feature {name!r}; it has {there}")
        source = declaration_of(table, name)
        found.append(_filled(each, source) if isinstance(each, FeatureStorageConfig) else source)
    return by_name(found)


def declaration_of(table: FeatureTable, feature: str) -> FeatureStorageConfig:
    """Return the declaration of a feature; of other tools' files one that holds the same values."""
    member = table.selection.blocks.blocks[0].features[feature]
    declared: Mapping[str, Any] = member.opened.manifest.features[feature]
    if not is_adopted(member.opened.of_feature(feature)):
        return FeatureStorageConfig.from_json(declared)
    kept = {key: declared[key] for key in ("dtype", "time_axis", "nonfinite", *_OF_FRAMES)
            if key in declared}  # fmt: skip
    return FeatureStorageConfig(feature, **kept)


def _filled(given: FeatureStorageConfig, source: FeatureStorageConfig) -> FeatureStorageConfig:
    if given.time_axis != source.time_axis:
        text = "a time axis" if source.time_axis == 0 else "no time axis"
        raise ConfigError(
            f"feature {given.name!r} has {text}: declare it with time_axis={source.time_axis}"
        )
    content = given.to_json()
    if given.frame_s is None:
        content |= {"frame_s": source.frame_s, "offset_s": source.offset_s}
    if given.dims is None:
        content["dims"] = source.dims
    return FeatureStorageConfig.from_json(content)


def holds(dtype: str, other: str) -> bool:
    """Tell whether a dtype holds every value of another one.

    >>> holds("float32", "bfloat16"), holds("float16", "bfloat16"), holds("float32", "int32")
    (True, False, False)
    """
    if dtype == other or other == "bool":
        return True
    bits = _MANTISSA_BITS.get(dtype)
    if bits is None:
        return other not in _MANTISSA_BITS and np.can_cast(other, dtype)
    if other in _MANTISSA_BITS:
        # of the floats, float16 alone has a smaller range than one of fewer bits
        return bits >= _MANTISSA_BITS[other] and (dtype, other) != ("float16", "bfloat16")
    info = np.iinfo(other)
    return dtype != "float16" and info.bits - (info.min < 0) <= bits


def is_exact(source: FeatureStorageConfig, feature: FeatureStorageConfig) -> bool:
    """Tell whether each array reads back from `feature` as it is read from the source."""
    codec = feature.make_codec()
    return (codec is None or codec.lossless) and holds(feature.dtype, source.dtype)


def carried_fingerprint(rows: TableRows, features: Declared) -> dict[str, object]:
    """Return what converted features are made from: what the source's are.

    The key "converted" has the declarations that numbers were rounded by on their way, where those
    computed anew would not have been: they are not the same features.
    """
    opened = _generations(rows)
    made: dict[str, Any] = joined_mapping(
        {str(number): _without(each.manifest.fingerprint) for number, each in enumerate(opened)}
    )
    rounded = {name: [*each] for name, each in dict(made.pop(CONVERTED, {})).items()}
    for name, feature in features.items():
        member = rows.table.selection.blocks.blocks[0].features[name]
        was = member.opened.manifest.features[name]
        copied = (plain := rows.plain()) is not None and keeps_its_bytes(plain, feature)
        if not copied and _rounds(was, feature):
            kept = {key: was[key] for key in ("dtype", "codec", "options")}
            rounded.setdefault(name, []).append(kept)
    rounded = {name: each for name, each in rounded.items() if name in features}
    return {**made, CONVERTED: rounded} if rounded else made


def _rounds(was: Mapping[str, Any], feature: FeatureStorageConfig) -> bool:
    """Tell whether a stored feature is less exact than one computed as `feature` declares it."""
    if was["codec"] != RAW and not get_codec(was["codec"]).lossless:
        return True
    floats = was["dtype"] in _MANTISSA_BITS and feature.dtype in _MANTISSA_BITS
    return floats and not holds(was["dtype"], feature.dtype)


def _without(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fingerprint.items() if key != _FEATURES}


def _generations(rows: TableRows) -> list[Generation]:
    """Return the generations, or feature sets, that have any of the features; of equal ones one."""
    found: dict[str, Generation] = {}
    for block in rows.table.selection.blocks.blocks:
        for name in rows.features:
            opened = block.features[name].opened.of_feature(name)
            found.setdefault(fingerprint_digest(_without(opened.manifest.fingerprint)), opened)
    return list(found.values())


def keep_record(
    writer: CacheWriter, rows: TableRows, errors: Mapping[str, float], stored: int
) -> None:
    """Keep the source's record with a converted cache, and what this conversion did.

    Also the source's probe, where the cache holds all that it is about.
    """
    opened = _generations(rows)
    record = joined_mapping({str(number): witnesses(each) for number, each in enumerate(opened)})
    declared = {name: declaration_of(rows.table, name).to_json() for name in rows.features}
    entry = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "utterances": stored,
        "was": declared,
        "source": rows.table.digest,
        "generations": [each.manifest.name for each in opened],
        "largest_error": dict(errors),
    }
    history = [*record.pop(CONVERTED, []), entry]
    writer.keep_file(ROLE, json.dumps({**record, CONVERTED: history}, indent=1).encode())
    source = rows.plain()
    whole = source is not None and len(rows.table) == len(source.index)
    if source is not None and whole and {*source.manifest.features} == {*rows.features}:
        probe = source.file(PROBE)
        if probe is not None:
            writer.keep_file(PROBE, probe)

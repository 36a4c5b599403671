"""The source of a conversion: its rows, what is carried along, and what it is compared with."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from featcache.declaration import DeclaredFeature, Features, FeatureStorageConfig, by_name
from featcache.errors import ConfigError, FeatureError, KeyNotFoundError
from featcache.format import (
    ADOPTED,
    UNKNOWN,
    Stamps,
    Value,
    Values,
    fingerprint_digest,
    from_storage,
    wider_kind,
)
from featcache.interface import Array, Ints, storage_dtype
from featcache.reading import (
    ROLE,
    CachePath,
    Generation,
    joined_mapping,
    located,
    open_again,
    open_generation,
    witnesses,
)
from featcache.registry import is_lossless
from featcache.remote import DEFAULT, RemoteOptions
from featcache.store import Cache
from featcache.store import open as open_cache
from featcache.tables import Block, BlockMember, FeatureTable, Selection, TableBlocks
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.copies import keeps_its_bytes

# `ConversionSource`: rows with arrays, whoever reads them. `TableRows`: those of a table.

_LOOKED_UP = 1024  # rows whose annotations and spans are looked up together


class TableRow(NamedTuple):
    """One row of a source."""

    id: str
    arrays: dict[str, Array]
    annotations: Values
    stamps: Stamps


class ConversionSource(Protocol):
    """Rows to be stored in a cache. Cheap to pickle."""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that are read."""

    @property
    def ids(self) -> Sequence[str]:
        """Id of each row."""

    @property
    def digest(self) -> str:
        """A digest of the ids, and of how they came about."""

    @property
    def complete(self) -> bool:
        """Whether these are all rows that there are to be."""

    def find(self, ids: Sequence[str]) -> Ints:
        """Return the rows of ids; -1 for those that are not there."""

    def stored(self, feature: str) -> DeclaredFeature:
        """Return the declaration by which a feature is stored in the source."""

    def declaration(self, feature: str) -> FeatureStorageConfig:
        """Return a declaration that holds the values of a feature."""

    def dims(self, feature: str) -> tuple[int, ...]:
        """Return the shape of a frame, or of an array without a time axis."""

    def lengths(self, feature: str) -> Ints:
        """Return the frames of each row; 1 without a time axis."""

    def read(self, rows: Ints) -> Iterator[TableRow]:
        """Read rows, in this order."""

    def array(self, row: int, feature: str) -> Array:
        """Read one array; bfloat16 is the float32 of the same value."""

    def in_order_of_bytes(self, rows: Ints) -> Ints:
        """Sort rows by where their bytes lie, as far as one look tells."""

    def plain(self) -> Generation | None:
        """Return the generation whose bytes can be copied as they are; None if there is none."""

    def rows_below(self, rows: Ints) -> Ints:
        """Return the rows of the one cache below; only where `plain` is not None."""

    def annotations(self) -> list[str]:
        """Return the names of the annotations that rows have beside the features."""

    def values(self, annotation: str, rows: Ints) -> Sequence[Value | None]:
        """Return an annotation of some rows."""

    def kind(self, annotation: str) -> str:
        """Return the kind of an annotation's values."""

    def fingerprint(self) -> dict[str, object]:
        """Return what the features are made from."""

    def made_by(self) -> tuple[dict[str, object], list[str]]:
        """Return the record of the run that made them, and the names of their generations."""

    def failed(self) -> list[str]:
        """Return ids that failed; none of a part of a cache."""


def arrays_nbytes(source: ConversionSource, rows: Ints) -> Ints:
    """Return the bytes of the arrays of rows, before any codec."""
    total = np.zeros(len(rows), np.int64)
    for name in source.features:
        dtype = storage_dtype(source.declaration(name).dtype)
        total += source.lengths(name)[rows] * dtype.itemsize * math.prod(source.dims(name))
    return total


@dataclass(frozen=True)
class TableRows:
    """Reads rows of a table; whatever is read is compared with its checksum, where it has one.

    Cheap to pickle.

    Args:
        table: the table.
        features: names of the features that are read.
    """

    table: FeatureTable
    features: tuple[str, ...]

    @property
    def ids(self) -> Sequence[str]:
        """Id of each row."""
        return self.table.ids

    @property
    def digest(self) -> str:
        """A digest of the ids, and of how they came about."""
        return self.table.digest

    @property
    def complete(self) -> bool:
        """Whether the caches below are complete."""
        return self.table.complete

    def find(self, ids: Sequence[str]) -> Ints:
        """Return the rows of ids; -1 for those that are not there."""
        return self.table.find(ids)

    def stored(self, feature: str) -> DeclaredFeature:
        """Return the declaration by which a feature is stored."""
        member = self.table.selection.blocks.blocks[0].features[feature]
        return member.opened.manifest.features[feature]

    def declaration(self, feature: str) -> FeatureStorageConfig:
        """Return a declaration that holds the values of a feature."""
        return declaration_of(self.table, feature)

    def dims(self, feature: str) -> tuple[int, ...]:
        """Return the shape of a frame, or of an array without a time axis."""
        return self.table.dims(feature)

    def lengths(self, feature: str) -> Ints:
        """Return the frames of each row; 1 without a time axis."""
        return self.table.lengths(feature)

    def read(self, rows: Ints) -> Iterator[TableRow]:
        """Read rows, in this order."""
        selection = self.table.selection
        for begin in range(0, len(rows), _LOOKED_UP):
            some = rows[begin : begin + _LOOKED_UP]
            spans = {name: selection.span(name, some) for name in self.features}
            values = {name: self.table.annotation(name).take(some) for name in self.annotations()}
            for place, row in enumerate(some.tolist()):
                yield TableRow(
                    selection.id(row),
                    {name: self._array(row, name, spans[name], place) for name in self.features},
                    {
                        name: value
                        for name, each in values.items()
                        if (value := each[place]) is not None
                    },
                    self._stamps(row),
                )

    def array(self, row: int, feature: str) -> Array:
        """Read one array; bfloat16 is the float32 of the same value."""
        span = self.table.selection.span(feature, np.array([row]))
        return self._array(row, feature, span, 0)

    def in_order_of_bytes(self, rows: Ints) -> Ints:
        """Sort rows by where their bytes lie, as far as one look tells."""
        keys = np.zeros((3, len(rows)), np.int64)
        for number, (block, places, inner) in enumerate(
            self.table.selection.blocks.split(self.table.selection.below(rows))
        ):
            member = block.features[self.features[0]]
            columns = member.opened.index.features[self.features[0]]
            keys[2, places] = number
            keys[1, places], keys[0, places] = columns.places(member.inner(inner))
        return rows[np.lexsort(keys)]

    def plain(self) -> Generation | None:
        """Return the generation whose bytes can be copied as they are.

        None where there are several, rows are segments, or containers are other tools' files.
        """
        selection = self.table.selection
        if selection.cuts is not None or len(selection.blocks.generations) != 1:
            return None
        opened = selection.blocks.generations[0]
        return None if opened.sets or is_adopted(opened) else opened

    def rows_below(self, rows: Ints) -> Ints:
        """Return the rows of the one cache below; only where `plain` is not None."""
        selection = self.table.selection
        return selection.blocks.blocks[0].members[0].inner(selection.below(rows))

    def annotations(self) -> list[str]:
        """Return the names of the annotations that rows have beside the features."""
        return [name for name in self.table.annotations if name not in self.features]

    def values(self, annotation: str, rows: Ints) -> Sequence[Value | None]:
        """Return an annotation of some rows."""
        return self.table.annotation(annotation).take(rows)

    def kind(self, annotation: str) -> str:
        """Return the kind of an annotation's values."""
        return self.table.annotation(annotation).kind

    def fingerprint(self) -> dict[str, object]:
        """Return what the features are made from, of several generations joined."""
        each = enumerate(self._generations())
        return joined_mapping({str(n): _without(one.manifest.fingerprint) for n, one in each})

    def made_by(self) -> tuple[dict[str, object], list[str]]:
        """Return the record of the run that made them, and the names of their generations."""
        opened = self._generations()
        record = joined_mapping({str(n): witnesses(each) for n, each in enumerate(opened)})
        return record, [each.manifest.name for each in opened]

    def failed(self) -> list[str]:
        """Return the ids that failed in caches that are read whole."""
        selection = self.table.selection
        if selection.row_map is not None or selection.cuts is not None:
            return []
        failed = {id for opened in selection.blocks.generations for id in opened.failed}
        return sorted(failed.difference(self.table.ids))

    def _generations(self) -> list[Generation]:
        """Return generations, or feature sets, that have any of the features; of equal ones one."""
        found: dict[str, Generation] = {}
        for block in self.table.selection.blocks.blocks:
            for name in self.features:
                opened = block.features[name].opened.of_feature(name)
                found.setdefault(fingerprint_digest(_without(opened.manifest.fingerprint)), opened)
        return list(found.values())

    def _array(self, row: int, feature: str, span: tuple[Ints, Ints] | None, place: int) -> Array:
        block, inner = self.table.selection.place(row)
        member, arrays = block.features[feature], block.arrays(feature)
        inner = inner if member.rows is None else int(member.rows.below[inner])
        if span is None:
            found = arrays.read(inner)
        else:
            start, frames = int(span[0][place]), int(span[1][place])
            found = arrays.read(inner, start, start + frames)
        return from_storage(found, arrays.declared_dtype)

    def _stamps(self, row: int) -> Stamps:
        """Return the stamps of a whole utterance; those of a recording are no segment's."""
        if self.table.selection.cuts is not None:
            return UNKNOWN
        block, inner = self.table.selection.place(row)
        member = block.members[0]
        known = member.opened.index.stamps
        if known is None:
            return UNKNOWN
        inner = inner if member.rows is None else int(member.rows.below[inner])
        return Stamps(*(int(column[inner]) for column in known))


def table_of(source: FeatureTable | CachePath, remote: RemoteOptions = DEFAULT) -> FeatureTable:
    """Return the table of a source, which checks what it reads; nothing is expected of a cache.

    Raises `ConfigError` for what is no cache and no table.
    """
    if isinstance(source, FeatureTable):
        table = source.table
    else:
        path, settings = located(source, remote=remote)
        table = FeatureTable(Selection.of(open_generation(path, None, settings)))
    if not len(table):
        raise ConfigError(f"{table!r} holds no utterances, so there is nothing to read")
    blocks = [
        Block([_checking(member) for member in block.members])
        for block in table.selection.blocks.blocks
    ]
    return FeatureTable(
        Selection(TableBlocks(blocks), table.selection.row_map, table.selection.cuts)
    )


def is_adopted(opened: Generation) -> bool:
    """Whether any containers are other tools' files."""
    return any(ADOPTED in each.manifest.requires for each in (opened, *opened.sets.values()))


def _checking(member: BlockMember) -> BlockMember:
    """Return a member that compares what it reads with its checksums."""
    opened = member.opened
    if is_adopted(opened) or opened.settings.check_reads:
        return member
    return BlockMember(open_again(opened, check_reads=True), member.rows, member.names)


# Declarations, fingerprint, record and annotations that a conversion carries from its source.

CONVERTED = "converted"  # key of fingerprints and of records
PROBE = "probe"
_FEATURES = "features"
_MANTISSA_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
_OF_FRAMES = ("frame_s", "offset_s", "dims")
_AT_ONCE = 65536  # utterances whose annotations are compared together
_log = logging.getLogger("featcache")

Declared = dict[str, FeatureStorageConfig]


def declared_as(
    source: Declared, features: Features | Iterable[str | FeatureStorageConfig] | None
) -> Declared:
    """Return the declarations that a converted cache is to have, by name.

    Names stand for features as they are; what a declaration leaves out about frames is that of the
    source. Raises `KeyNotFoundError` for a feature that the source has not, `ConfigError` for a
    time axis that is another one.
    """
    asked: Iterable[object] = source if features is None else features
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
        if name not in source:
            there = ", ".join(map(repr, source))
            raise KeyNotFoundError(f"the source has no feature {name!r}; it has {there}")
        declared = _filled(each, source[name]) if isinstance(each, FeatureStorageConfig) else None
        found.append(declared or source[name])
    return by_name(found)


def declarations_of(table: FeatureTable) -> Declared:
    """Return the declarations of all features of a table."""
    return {name: declaration_of(table, name) for name in table.features}


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
    content: dict[str, object] = {**given.to_json()}
    if given.frame_s is None:
        content |= {"frame_s": source.frame_s, "offset_s": source.offset_s}
    if given.dims is None:
        content["dims"] = source.dims
    return FeatureStorageConfig.from_json(content)


def holds(dtype: str, other: str) -> bool:
    """Whether a dtype holds every value of another one.

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
    """Whether each array reads back from `feature` as it is read from the source."""
    return is_lossless(feature.codec) and holds(feature.dtype, source.dtype)


def carried_fingerprint(rows: ConversionSource, features: Declared) -> dict[str, object]:
    """Return what converted features are made from: what the source's are.

    The key "converted" has the declarations that numbers were rounded by on their way, where those
    computed anew would not have been: they are not the same features.
    """
    made = rows.fingerprint()
    before = cast(dict[str, list[object]], made.pop(CONVERTED, {}))
    rounded = {name: [*each] for name, each in before.items()}
    for name, feature in features.items():
        was = rows.stored(name)
        copied = (plain := rows.plain()) is not None and keeps_its_bytes(plain, feature)
        if not copied and _rounds(was, feature):
            kept = {key: was[key] for key in ("dtype", "codec", "codec_options")}
            rounded.setdefault(name, []).append(kept)
    rounded = {name: each for name, each in rounded.items() if name in features}
    return {**made, CONVERTED: rounded} if rounded else made


def _rounds(was: DeclaredFeature, feature: FeatureStorageConfig) -> bool:
    """Whether a stored feature is less exact than one computed as `feature` declares it."""
    if not is_lossless(was["codec"]):
        return True
    floats = was["dtype"] in _MANTISSA_BITS and feature.dtype in _MANTISSA_BITS
    return floats and not holds(was["dtype"], feature.dtype)


def _without(fingerprint: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in fingerprint.items() if key != _FEATURES}


def keep_record(writer: CacheWriter, rows: ConversionSource, errors: Mapping[str, float]) -> None:
    """Keep the source's record with a converted cache, and what this conversion did.

    Also the source's probe, where the cache holds all that it is about.
    """
    record, generations = rows.made_by()
    declared = {name: rows.declaration(name).to_json() for name in rows.features}
    entry = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "utterances": len(rows.ids),
        "was": declared,
        "source": rows.digest,
        "generations": generations,
        "largest_error": dict(errors),
    }
    history = [*cast(list[object], record.pop(CONVERTED, [])), entry]
    writer.keep_file(ROLE, json.dumps({**record, CONVERTED: history}, indent=1).encode())
    source = rows.plain()
    whole = source is not None and len(rows.ids) == len(source.index)
    if source is not None and whole and {*source.manifest.features} == {*rows.features}:
        probe = source.file(PROBE)
        if probe is not None:
            writer.keep_file(PROBE, probe)


def bring_annotations(rows: ConversionSource, path: Path) -> None:
    """Give the utterances of a converted cache the annotations that the source has now.

    Annotations that the source has not are those of whoever gave them to the converted cache.

    Raises `FeatureError` for an annotation that is of another kind now.
    """
    with open_cache(path) as cache:
        for name in {*rows.annotations()}.intersection(cache.annotations):
            was, now = cache.annotation(name).kind, rows.kind(name)
            if wider_kind(was, now) is None:
                raise FeatureError(
                    f"annotation {name!r} is {was} in {str(path)!r}, and {now} in its source now; "
                    "convert it anew (overwrite=True)"
                )
        changed: dict[str, dict[str, Value | None]] = {}
        for begin in range(0, len(cache), _AT_ONCE):
            ids = cache.ids[begin : begin + _AT_ONCE]
            places = rows.find(ids)
            for name in rows.annotations():
                theirs = rows.values(name, places)
                mine = _values(cache, name, begin, begin + len(ids))
                for id, wanted, there in zip(ids, theirs, mine, strict=True):
                    # True is 1 to Python
                    if wanted != there or isinstance(wanted, bool) != isinstance(there, bool):
                        changed.setdefault(id, {})[name] = wanted
        if changed:
            cache.annotate(changed)
            _log.info(
                "annotations of %d utterances of %r are not what the source has now: they are "
                "brought from there", len(changed), str(path),
            )  # fmt: skip


def _values(cache: Cache, name: str, begin: int, end: int) -> list[Value | None]:
    if name not in cache.annotations:
        return [None] * (end - begin)
    return cache.annotation(name)[begin:end]

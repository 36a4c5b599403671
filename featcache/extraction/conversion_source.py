"""The source of a conversion: its rows, what is carried along, and what it is compared with."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache._checks import directory
from featcache.declaration import DeclaredFeature, Features, FeatureStorageConfig, by_name
from featcache.errors import ConfigError, CorruptCacheError, FeatureError, KeyNotFoundError
from featcache.format.annotations import Value, Values, wider_kind
from featcache.format.files import from_storage
from featcache.format.fingerprint import fingerprint_digest
from featcache.format.index import UNKNOWN, FeatureColumns, Stamps
from featcache.format.manifest import ADOPTED, read_manifest
from featcache.format.part import SealedPart, checksum, sealed_in
from featcache.interface import Array, Ints
from featcache.reading.feature_arrays import OpenedPart, stored_blocks
from featcache.reading.generation import Generation
from featcache.reading.opening import (
    ROLE,
    CachePath,
    joined_mapping,
    open_again,
    open_generation,
    witnesses,
)
from featcache.registry import RAW, is_lossless
from featcache.store import Cache
from featcache.store import open as open_cache
from featcache.tables.blocks import Block, BlockMember, TableBlocks
from featcache.tables.selection import Selection
from featcache.tables.table import FeatureTable
from featcache.writing.arrays import to_storage
from featcache.writing.cache_writer import CacheWriter
from featcache.writing.copies import StoredArrays, keeps_its_bytes

# `TableRows`: what a table holds of each row, to be stored again.

_LOOKED_UP = 1024  # rows whose annotations and spans are looked up together


class TableRow(NamedTuple):
    """One row of a table."""

    id: str
    arrays: dict[str, NDArray[Any]]
    annotations: Values
    stamps: Stamps


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

    def array(self, row: int, feature: str) -> NDArray[Any]:
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

    def nbytes(self, rows: Ints) -> Ints:
        """Return the bytes of the arrays of rows, before any codec."""
        total = np.zeros(len(rows), np.int64)
        for name in self.features:
            arrays = self.table.selection.blocks.of_feature(name)[0]
            frame = arrays.dtype.itemsize * int(np.prod(self.table.dims(name), dtype=np.int64))
            total += self.table.lengths(name)[rows] * frame
        return total

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

    def _array(
        self, row: int, feature: str, span: tuple[Ints, Ints] | None, place: int
    ) -> NDArray[Any]:
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


def table_of(source: FeatureTable | CachePath) -> FeatureTable:
    """Return the table of a source, which checks what it reads; nothing is expected of a cache.

    Raises `ConfigError` for what is no cache and no table.
    """
    if isinstance(source, FeatureTable):
        table = source.table
    else:
        path = directory(source, "a cache").absolute()
        table = FeatureTable(Selection.of(open_generation(path, None)))
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
    return BlockMember(open_again(opened, check_reads=True), member.rows)


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


def bring_annotations(rows: TableRows, path: Path) -> None:
    """Give the utterances of a converted cache the annotations that the source has now.

    Annotations that the source has not are those of whoever gave them to the converted cache.

    Raises `FeatureError` for an annotation that is of another kind now.
    """
    with open_cache(path) as cache:
        for name in {*rows.annotations()}.intersection(cache.annotations):
            was, now = cache.annotation(name).kind, rows.table.annotation(name).kind
            if wider_kind(was, now) is None:
                raise FeatureError(
                    f"annotation {name!r} is {was} in {str(path)!r}, and {now} in its source now; "
                    "convert it anew (overwrite=True)"
                )
        changed: dict[str, dict[str, Value | None]] = {}
        for begin in range(0, len(cache), _AT_ONCE):
            ids = cache.ids[begin : begin + _AT_ONCE]
            places = rows.table.find(ids)
            for name in rows.annotations():
                theirs = rows.table.annotation(name).take(places)
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


# `ReadBack`: sealed parts compared with the rows of the table that they were converted from.

SAMPLED = 64  # of so many arrays one is read, where digests tell of the bytes


@dataclass
class ReadBack:
    """Reads what is sealed, and compares it with the source.

    Args:
        rows: the source.
        cache: the directory of the cache that is written.
        features: the declarations there.

    Attributes:
        errors: the largest difference of a number from the source's, by feature that is not
            exact.
        compared: names of the parts that are compared.
    """

    rows: TableRows
    cache: Path
    features: Mapping[str, FeatureStorageConfig]
    errors: dict[str, float] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        was = {name: declaration_of(self.rows.table, name) for name in self.features}
        self._exact = {name: is_exact(was[name], each) for name, each in self.features.items()}
        self._same = {name: _same_bytes(was[name], each) for name, each in self.features.items()}
        self._declared = {name: feature.to_json() for name, feature in self.features.items()}
        self.errors |= {name: 0.0 for name, exact in self._exact.items() if not exact}

    def merge(self, errors: Mapping[str, float], compared: Collection[str]) -> None:
        """Take over what was compared elsewhere."""
        self.compared |= {*compared}
        for name, error in errors.items():
            self.errors[name] = max(error, self.errors[name])

    def sealed(self) -> list[SealedPart]:
        """List the sealed parts of the cache, with their tombstones."""
        manifest = read_manifest(self.cache)
        return sealed_in(self.cache, manifest)

    def rest(self) -> int:
        """Compare all parts that were not compared yet; return how many rows there are in all."""
        parts = self.sealed()
        self.parts(part for part in parts if part.entry.name not in self.compared)
        return sum(part.entry.rows - len(part.tombstones(self.cache)) for part in parts)

    def copied(self, sealed: SealedPart, hashed: Collection[str]) -> None:
        """Compare a part with the arrays that were copied into it just now.

        These were compared with their checksums on the way. Files in `hashed` have the digests of
        the very bytes that were written then, so only some of their arrays are read, to see
        that they lie where the index says; of other files all.

        Raises what `parts` raises.
        """
        index = sealed.index(self.cache, [*self.features])
        rows = self.find([*index.ids])
        every = np.arange(len(index))
        for name, columns in index.features.items():
            if not self._has_the_bytes(columns, every, name, rows):
                self.parts([sealed])
                return
        arrays = StoredArrays(self.cache, sealed.directory, index, self.features)
        in_order = arrays.in_order_of_bytes(every)
        read = np.zeros(len(index), bool)
        read[in_order[::SAMPLED]] = read[in_order[-1]] = True
        paths = index.containers.paths
        told = np.array([path in hashed for path in paths], bool)
        for columns in index.features.values():
            extents = np.flatnonzero(~told[columns.container])
            read[columns.first.searchsorted(extents, "right") - 1] = True
        arrays.check(in_order[read[in_order]])
        self.compared.add(sealed.entry.name)

    def parts(self, parts: Iterable[SealedPart]) -> None:
        """Compare parts.

        Raises `CorruptCacheError` for an array that is not what the source has,
        `KeyNotFoundError` for an utterance that it has not.
        """
        for sealed in parts:
            index = sealed.index(self.cache, [*self.features])
            inner = np.setdiff1d(np.arange(sealed.entry.rows), sealed.tombstones(self.cache))
            rows = self.find([*index.ids.take(inner)])
            same = {
                name: feature
                for name, feature in self.features.items()
                if self._has_the_bytes(index.features[name], inner, name, rows)
            }
            if same:
                arrays = StoredArrays(self.cache, sealed.directory, index, same)
                arrays.check(arrays.in_order_of_bytes(inner))
            part = OpenedPart.of(self.cache, sealed, self._declared, index)
            for name in self.features.keys() - same.keys():
                for row, place in zip(rows.tolist(), inner.tolist(), strict=True):
                    self._compare(sealed, part, place, row, name)
            part.containers.close()
            self.compared.add(sealed.entry.name)

    def _has_the_bytes(self, columns: FeatureColumns, inner: Ints, name: str, rows: Ints) -> bool:
        """Whether arrays are to have the very bytes that rows of the source have."""
        source = self.rows.plain()
        if source is None or not self._same[name]:
            return False
        theirs, below = source.index.features[name], self.rows.rows_below(rows)
        return np.array_equal(columns.rows[inner], theirs.rows[below]) and np.array_equal(
            columns.checksum[inner], theirs.checksum[below]
        )

    def find(self, ids: list[str]) -> Ints:
        """Return the rows of ids; raises `KeyNotFoundError` for those that the source has not."""
        found = self.rows.table.find(ids)
        if missing := [ids[place] for place in np.flatnonzero(found < 0)]:
            shown = ", ".join(map(repr, missing[:3])) + ", ..." * (len(missing) > 3)
            raise KeyNotFoundError(
                f"cache {str(self.cache)!r} holds {len(missing)} utterances that the source has "
                f"not ({shown}); give another directory, or overwrite it (overwrite=True)"
            )
        return found

    def _compare(
        self, sealed: SealedPart, part: OpenedPart, place: int, row: int, name: str
    ) -> None:
        """Compare an array with the source's, and its bytes with their checksum."""
        columns, id = part.index.features[name], part.index.id(place)
        blocks = stored_blocks(columns, place, part.containers)
        if checksum(blocks.blocks) != int(columns.checksum[place]):
            raise self._unlike(sealed, id, name, "its bytes are not what was written")
        source = self.rows.array(row, name)
        stored = part.arrays[name].read(place)
        wanted = to_storage(id, source, self.features[name])
        if self.features[name].time_axis is None:
            wanted = wanted[0]
        if stored.shape != wanted.shape:
            raise self._unlike(sealed, id, name, f"its shape is {stored.shape}, not {wanted.shape}")
        if is_lossless(self.features[name].codec) and not _same_bits(stored, wanted):
            raise self._unlike(sealed, id, name, "it is another array")
        if not self._exact[name]:
            found = from_storage(stored, self.features[name].dtype)
            self.errors[name] = max(self.errors[name], _largest_difference(found, source))

    def _unlike(self, part: SealedPart, id: str, name: str, why: str) -> CorruptCacheError:
        return CorruptCacheError(
            f"utterance {id!r}, feature {name!r}, in part {part.entry.name!r} of "
            f"{str(self.cache)!r} is not what the source has: {why}; if the source has changed "
            "since, convert it anew (overwrite=True), else see to the disk"
        )


def _same_bytes(was: FeatureStorageConfig, now: FeatureStorageConfig) -> bool:
    """Whether equal checksums of stored bytes tell of equal arrays."""
    same = (was.dtype, was.codec) == (now.dtype, now.codec)
    return same and (now.codec == RAW or was.make_codec() == now.make_codec())


def _same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _largest_difference(a: Array, b: Array) -> float:
    """Return the largest difference of two arrays' finite numbers."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return float(apart.max(initial=0.0, where=np.isfinite(apart)))

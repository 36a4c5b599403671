"""Arrays on their way in: checked, cast to what is stored, packed, encoded.

Shapes that look like mistakes are told, or refused.
"""

from __future__ import annotations

import itertools
import logging
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, get_args

import numpy as np

from featcache._recycled import RecycledMemory
from featcache._tensors import ArrayLike, Lengths, as_numpy, to_bfloat16
from featcache.container_files import EncodedArrays
from featcache.declaration import MANY_FRAMES, FeatureStorageConfig, FrameTimes, first_contradiction
from featcache.errors import ConfigError, FeatureError, nearest
from featcache.format.annotations import Values
from featcache.format.files import check_id, from_bfloat16, from_storage
from featcache.format.index import Stamps
from featcache.format.part import checksums
from featcache.interface import Array, Blocks, EncodedArray, FeatureSpec, storage_dtype
from featcache.registry import RAW
from featcache.stats import FeatureStats

# `CheckedUtterances`: on their way from the caller to the thread that stores, one or many alike.
#
# They go together, since to hand over each short one costs more than to store it.


class PackedArrays(NamedTuple):
    """The arrays of a feature, (rows, *dims), one behind the other, C order, storage dtype."""

    array: Array
    lengths: Sequence[int]  # rows of each utterance
    stats: FeatureStats | None = None  # of all; None where they are not taken, or not yet
    checksums: Sequence[int] | None = None  # of their stored bytes; None where they are not known

    def each(self) -> list[Array]:
        """Return the array of each utterance."""
        ends = itertools.accumulate(self.lengths, initial=0)
        return [self.array[begin:end] for begin, end in itertools.pairwise(ends)]


# one for all: each object that is kept costs the garbage collector time
NOTHING: Mapping[str, Any] = MappingProxyType({})


class CheckedUtterances:
    """Utterances that were checked and cast, in the order in which they were given.

    Args:
        ids: theirs.
        arrays: by feature.
        stamps: of those of which they are known, by id.
        annotations: of those that have any, by id.
        encoded: the arrays of lossy codecs as bytes, by feature, as `OpenPart.prepare` makes them.

    Attributes:
        nbytes: of their arrays, before any codec.
    """

    __slots__ = ("annotations", "arrays", "encoded", "ids", "nbytes", "stamps")

    def __init__(
        self,
        ids: Sequence[str],
        arrays: Mapping[str, PackedArrays],
        stamps: Mapping[str, Stamps],
        annotations: Mapping[str, Values],
        encoded: Mapping[str, Sequence[EncodedArray]] = NOTHING,
    ) -> None:
        self.ids = ids
        self.arrays = arrays
        self.stamps = stamps
        self.annotations = annotations
        self.encoded = encoded
        self.nbytes = 0
        for packed in arrays.values():
            self.nbytes += packed.array.nbytes

    def __len__(self) -> int:
        return len(self.ids)


# Arrays of the user as they are stored: checked, cast and copied.

MAX_RANK = 4
_MEND = "mend it, or declare a dtype that holds it"


def check_features(
    id: str, arrays: Mapping[str, ArrayLike], declared: Mapping[str, FeatureStorageConfig]
) -> None:
    """Raise `FeatureError` unless `arrays` has exactly the declared features."""
    if type(arrays) is not dict and not isinstance(arrays, Mapping):  # which takes longer
        raise FeatureError(
            f"utterance {id!r}: a dict of arrays by feature is needed, not {type(arrays).__name__}"
        )
    if arrays.keys() == declared.keys():
        return
    for name in arrays:
        if name not in declared:
            raise FeatureError(
                f"utterance {id!r}: feature {name!r} is not declared; {nearest(name, declared)}"
            )
    for name in declared:
        if name not in arrays:
            there = ", ".join(arrays) or "none"
            raise FeatureError(f"utterance {id!r}: feature {name!r} is missing; given: {there}")


def to_storage(
    id: str, value: ArrayLike, feature: FeatureStorageConfig, *, check_finite: bool = True
) -> Array:
    """Return `value` as it is stored, maybe itself: shape (rows, *dims), C order, little-endian.

    Raises `FeatureError`, naming id, feature and value, for what the declared dtype cannot hold.
    """
    try:
        array, is_bfloat16 = as_numpy(value)
        least = 1 if feature.time_axis == 0 else 0
        if not least <= array.ndim <= MAX_RANK:
            rank = f"has rank {array.ndim}, but must have {least} to {MAX_RANK}"
            raise FeatureError(f"shape {array.shape} {rank}")
        stored = converted(array, is_bfloat16, feature, check_finite=check_finite)
    except FeatureError as error:
        raise _of_utterance(id, feature, error) from error.__cause__
    return stored if feature.time_axis == 0 else stored[np.newaxis]


def check_one(
    id: str,
    arrays: Mapping[str, ArrayLike],
    stamps: Mapping[str, Stamps],
    annotations: Mapping[str, Values],
    features: Mapping[str, FeatureStorageConfig],
    *,
    counted: bool = False,
) -> CheckedUtterances:
    """Return an utterance as it is stored, maybe with arrays of the caller's.

    Statistics are taken if it is to be `counted`. Raises `FeatureError`, as `to_storage` does.
    """
    check_features(id, arrays, features)
    packed = {}
    for name, feature in features.items():
        count = counted and feature.stats
        array = to_storage(id, arrays[name], feature, check_finite=not count)
        stats = FeatureStats.of(from_storage(array, feature.dtype)) if count else None
        if stats is not None and not stats.is_finite:
            array = to_storage(id, arrays[name], feature)  # which raises, unless such are stored
        packed[name] = PackedArrays(array, (len(array),), stats)
    return CheckedUtterances((id,), packed, stamps, annotations)


def _of_utterance(id: str, feature: FeatureStorageConfig, error: FeatureError) -> FeatureError:
    return FeatureError(f"utterance {id!r}, feature {feature.name!r}: {error}")


def converted(
    array: Array, is_bfloat16: bool, feature: FeatureStorageConfig, *, check_finite: bool = True
) -> Array:
    """Return an array in the declared dtype and C order, maybe itself.

    Raises `FeatureError` for what the dtype cannot hold.
    """
    if array.dtype.kind not in "fiub":
        raise FeatureError(
            f"arrays of {array.dtype} cannot be stored; give floats, integers or bool"
        )
    numbers = from_bfloat16(array) if is_bfloat16 else array
    if check_finite and numbers.dtype.kind == "f":
        _check_finite(numbers, feature)
    if is_bfloat16 and feature.dtype == "bfloat16":
        return np.asarray(array, order="C")
    if feature.dtype == "bfloat16":
        return _to_bfloat16(numbers)
    dtype = storage_dtype(feature.dtype)
    if numbers.dtype != dtype:
        return _cast(numbers, dtype)
    return np.asarray(numbers, order="C")


def _check_finite(array: Array, feature: FeatureStorageConfig) -> None:
    if feature.nonfinite == "raise":
        finite = np.isfinite(array)
        if not finite.all():
            hint = "mend it, or declare nonfinite: keep to store it as it is"
            _refuse(array, ~finite, f"is not finite; {hint}")


def _cast(array: Array, dtype: np.dtype[np.generic]) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        cast = np.array(array, dtype, order="C")  # casts and copies at once
    source, target = array.dtype.kind, dtype.kind
    if source == "f" and target != "f":
        raise FeatureError(
            f"{array.dtype} does not fit {dtype}; round and convert it before it is written"
        )
    if target == "f":
        _check_overflow(array, cast, dtype.name)
    elif not np.can_cast(array.dtype, dtype):
        # int64 and uint64 wrap into each other and compare equal through float64, so the sign must
        # agree too
        wrong = (cast.astype(array.dtype) != array) | (np.less(cast, 0) != np.less(array, 0))
        if wrong.any():
            _refuse(array, wrong, f"does not fit {dtype.name}; {_MEND}")
    return cast


def _to_bfloat16(array: Array) -> Array:
    with np.errstate(over="ignore"):
        single = np.array(array, np.float32, order="C")
    stored = to_bfloat16(single)
    _check_overflow(array, from_bfloat16(stored), "bfloat16")
    return stored


def _check_overflow(array: Array, stored: Array, dtype: str) -> None:
    infinite = np.isinf(stored)
    if infinite.any() and (overflowed := infinite & np.isfinite(array)).any():
        _refuse(array, overflowed, f"does not fit {dtype}; {_MEND}")


def _refuse(array: Array, wrong: Array, why: str) -> NoReturn:
    """Raise `FeatureError`, naming the first of the numbers that are wrong."""
    bad = tuple(map(int, np.argwhere(wrong)[0]))
    raise FeatureError(f"{array[bad]} at {bad} {why}")


# A batch of a feature as it is stored: checked, cast and copied once, not once an utterance.

T = TypeVar("T")
LengthsByFeature = Lengths | Mapping[str, Lengths | None] | None
BatchLayout = Literal["padded", "packed"]
PIECE_ROWS = 4096  # utterances that are handed over together


def lengths_of(
    ids: Sequence[str], lengths: LengthsByFeature, features: Mapping[str, FeatureStorageConfig]
) -> dict[str, list[int]]:
    """Return the rows of each utterance, by feature; 1 for features without a time axis.

    Raises `FeatureError` for what are no lengths of these utterances.
    """
    given = lengths if isinstance(lengths, Mapping) else dict.fromkeys(features, lengths)
    for name in given:
        if name not in features:
            known = nearest(name, features)
            raise FeatureError(f"lengths are given for {name!r}, which is not declared; {known}")
    found = {}
    for name, feature in features.items():
        of_feature = given.get(name)
        if feature.time_axis is None:
            found[name] = [1] * len(ids)
            continue
        if of_feature is None:
            raise FeatureError(
                f"feature {name!r} has no lengths; give the frames of each utterance"
            )
        found[name] = integers(f"feature {name!r}", of_feature)
        if len(found[name]) != len(ids):
            raise FeatureError(
                f"feature {name!r}: {len(found[name])} lengths do not fit {len(ids)} ids"
            )
    return found


def integers(feature: str, lengths: Lengths) -> list[int]:
    """Return lengths as integers; raises `FeatureError` for what are none."""
    listed = lengths.tolist() if hasattr(lengths, "tolist") else lengths
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise FeatureError(
            f"{feature}: lengths are one number of frames for each utterance, such as [5, 3], not "
            f"{listed!r}"
        )
    try:
        return [operator.index(length) for length in listed]
    except TypeError:
        raise FeatureError(
            f"{feature}: lengths must be frames, integers, not {listed!r}; relative lengths do not "
            "carry over from one axis to another (round(length * frames) is often off by one)"
        ) from None


def check_batch(
    ids: Sequence[str],
    arrays: Mapping[str, ArrayLike],
    lengths: LengthsByFeature,
    layout: BatchLayout,
    annotations: Mapping[str, Values],
    stamps: Mapping[str, Stamps],
    features: Mapping[str, FeatureStorageConfig],
    memory: RecycledMemory,
) -> list[CheckedUtterances]:
    """Return a batch of the declared features as it is stored, `PIECE_ROWS` utterances together.

    Raises `FeatureError` for what cannot be stored, naming the utterance where it can.
    """
    listed = _checked_ids(ids, annotations, stamps)
    check_features(listed[0] if listed else "", arrays, features)
    rows = lengths_of(listed, lengths, features)
    packed = {
        name: _pack(listed, arrays[name], rows[name], layout, feature, memory)
        for name, feature in features.items()
    }
    return [
        CheckedUtterances(
            some,
            {name: pieces[number] for name, pieces in packed.items()},
            {id: stamps[id] for id in some if id in stamps},
            {id: annotations[id] for id in some if id in annotations},
        )
        for number, some in enumerate(_pieces(listed))
    ]


def _checked_ids(ids: Sequence[str], *by_id: Mapping[str, object]) -> list[str]:
    """Return the ids of a batch; raises `FeatureError` for one twice, and for what is by others."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise FeatureError(f"ids are a list of strings, not {ids!r}")
    listed = list(ids)
    for id in listed:
        check_id(id)
    known = set(listed)
    if len(known) < len(listed):
        twice = next(id for id in listed if listed.count(id) > 1)
        raise FeatureError(f"utterance {twice!r} is in the batch twice")
    for given in by_id:
        for id in given:
            if id not in known:
                raise FeatureError(
                    f"annotations or stamps are given for {id!r}, which is not in the batch; "
                    f"{nearest(str(id), listed)}"
                )
    return listed


def _pieces(of_each: Sequence[T]) -> list[Sequence[T]]:
    return [of_each[start : start + PIECE_ROWS] for start in range(0, len(of_each), PIECE_ROWS)]


def _pack(
    ids: Sequence[str],
    value: ArrayLike,
    lengths: list[int],
    layout: BatchLayout,
    feature: FeatureStorageConfig,
    memory: RecycledMemory,
) -> list[PackedArrays]:
    """Return a copy of a padded or packed batch as it is stored, `PIECE_ROWS` utterances together.

    Raises `FeatureError`, naming the utterance where it can, for what cannot be stored as declared.
    """
    if layout not in get_args(BatchLayout):
        raise ConfigError(f"layout is 'padded' or 'packed', not {layout!r}")
    try:
        array, is_bfloat16 = as_numpy(value)
    except FeatureError as error:
        what = f"a batch of feature {feature.name!r}: {error}"
        raise FeatureError(what) from error.__cause__
    if feature.time_axis is None:
        layout = "packed"  # of a row each
    _check_shape(ids, array.shape, lengths, layout, feature)
    rows = array if layout == "packed" else _without_padding(array, lengths)
    given = PackedArrays(rows, lengths)
    try:
        # the statistics tell whether all numbers are finite
        stored = converted(rows, is_bfloat16, feature, check_finite=not feature.stats)
    except FeatureError as error:
        _refuse_one(ids, given, is_bfloat16, feature)
        raise FeatureError(f"feature {feature.name!r}: {error}") from error.__cause__
    if np.may_share_memory(stored, array):
        stored = memory.copy(stored)
    pieces: list[PackedArrays] = []
    for some in _pieces(lengths):
        piece, stored = stored[: sum(some)], stored[sum(some) :]
        stats = FeatureStats.of(from_storage(piece, feature.dtype)) if feature.stats else None
        if stats is not None and not stats.is_finite:
            _refuse_one(ids, given, is_bfloat16, feature)
        known = checksums(pieces_of(piece, some)) if feature.codec == RAW else None
        pieces.append(PackedArrays(piece, some, stats, known))
    return pieces


def _check_shape(
    ids: Sequence[str],
    shape: tuple[int, ...],
    lengths: list[int],
    layout: BatchLayout,
    feature: FeatureStorageConfig,
) -> None:
    where = f"a batch of feature {feature.name!r}, shape {shape}"
    axes = len(shape) - (layout == "padded")
    if not 1 <= axes <= MAX_RANK + (feature.time_axis is None):
        raise FeatureError(f"{where}, has {len(shape)} axes, which is no {layout} batch")
    if layout == "packed":
        if min(lengths, default=0) < 0 or sum(lengths) != shape[0]:
            raise FeatureError(f"{where}: has {shape[0]} rows, but lengths of {sum(lengths)}")
        return
    if shape[0] != len(ids):
        raise FeatureError(f"{where}, does not have a row for each of {len(ids)} ids")
    for id, length in zip(ids, lengths, strict=True):
        if not 0 <= length <= shape[1]:
            raise FeatureError(
                f"utterance {id!r}, feature {feature.name!r}: length {length} is not within 0 to "
                f"{shape[1]}"
            )


def _without_padding(array: Array, lengths: list[int]) -> Array:
    """Return the frames that count: a view where all do, else a copy, which has no base."""
    if min(lengths, default=0) == array.shape[1]:
        return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    pieces = [row[:length] for row, length in zip(array, lengths, strict=True)]
    return np.concatenate(pieces) if pieces else array[:, :0].reshape(0, *array.shape[2:])


def _refuse_one(
    ids: Sequence[str], packed: PackedArrays, is_bfloat16: bool, feature: FeatureStorageConfig
) -> None:
    """Raise the error of the first utterance that cannot be stored."""
    for id, array in zip(ids, packed.each(), strict=True):
        try:
            converted(array if feature.time_axis == 0 else array[0], is_bfloat16, feature)
        except FeatureError as error:
            raise _of_utterance(id, feature, error) from error.__cause__


# Arrays as the bytes that containers store: in blocks, encoded where there is a codec.


def encoded(id: str, array: Array, feature: FeatureSpec, blocks: Blocks) -> EncodedArray:
    """Return an array (rows, *dims), storage dtype, as it is stored with a codec.

    Raises `FeatureError`, naming utterance and feature, for numbers that a codec cannot hold.
    """
    rows = len(array)
    if feature.codec is None or array.size == 0:
        return EncodedArray(rows, ())
    size = blocks.rows or rows
    if blocks.padded and rows % size:
        filling = np.zeros((size - rows % size, *feature.dims), array.dtype)
        array = np.concatenate([array, filling])
    cut = (array[start : start + size] for start in range(0, len(array), size))
    try:
        return EncodedArray(rows, tuple(map(feature.codec.encode, cut)))
    except FeatureError as error:
        raise FeatureError(f"utterance {id!r}, feature {feature.name!r}: {error}") from error


def pieces_of(packed: Array, lengths: Sequence[int]) -> EncodedArrays:
    """Return arrays that lie one behind the other, (rows, *dims), as they are without a codec."""
    rows = np.array(lengths, np.int64)
    nbytes = rows * (packed.nbytes // max(len(packed), 1))
    blocks = (nbytes > 0).astype(np.int64)
    return EncodedArrays(rows, blocks, nbytes[nbytes > 0], [packed.reshape(-1).view(np.uint8).data])


# Shapes that look like mistakes: a batch axis left in, vectors as frames, no frames at all.
#
# Lengths that contradict `frame_s` are such, too.

_ALIKE = 5  # utterances of one length that are no chance
_log = logging.getLogger("featcache")


class FirstShapes:
    """Refuses batches of one at a writer's first utterances, where no dims are declared.

    The first that looks like one is only warned of, since a single frame looks the same; if the
    next does, too, it is refused, and so are all until one looks right. Utterances without frames
    are stored, since cutting away silence leaves some, but told.

    Args:
        features: the declarations.
    """

    def __init__(self, features: Mapping[str, FeatureStorageConfig]) -> None:
        self._is_trusting = False
        self._features = features
        self._times = {
            name: FrameTimes(each.frame_s, each.offset_s)
            for name, each in features.items()
            if each.frame_s is not None and each.time_axis is not None
        }
        frames_s = [each.frame_s for each in self._times.values()]
        self._many_s = MANY_FRAMES * max(frames_s, default=0.0)
        self._settled: set[str] = set()  # features of which only empty arrays are noted any more
        self._warned: dict[str, bool] = {}  # per feature; False: one has looked right
        self._single: dict[str, tuple[int, int]] = {}  # per feature: a length, and how many had it
        self._empty: dict[str, tuple[int, str]] = {}  # per feature: how many, and the first

    def trust(self) -> None:
        """Take all shapes from now on: those of arrays that were stored before."""
        self._is_trusting = True

    def check(self, utterances: CheckedUtterances) -> None:
        """Note the shapes of arrays.

        Raises `FeatureError` for a second batch of one, and for an utterance whose features cannot
        all end where they do.
        """
        if self._is_trusting:
            return
        for name, packed in utterances.arrays.items():
            if name not in self._settled or 0 in packed.lengths:
                dims = packed.array.shape[1:]
                for id, length in zip(utterances.ids, packed.lengths, strict=True):
                    self._note(id, self._features[name], (length, *dims))
        if len(self._times) > 1:
            self._check_times(utterances)

    def _check_times(self, utterances: CheckedUtterances) -> None:
        times = self._times.values()
        lengths = {name: utterances.arrays[name].lengths for name in self._times}
        for of_each in zip(*lengths.values(), strict=True):
            ends = [
                each.offset_s + n * each.frame_s for each, n in zip(times, of_each, strict=True)
            ]
            if max(ends) - min(ends) > self._many_s:
                break
        else:  # as nearly always, and known in a twentieth of the time
            return
        columns = {name: np.array(each, np.int64) for name, each in lengths.items()}
        found = first_contradiction(self._times, columns)
        if found is not None:
            raise FeatureError(
                f"utterance {utterances.ids[found[0]]!r}: {found[1]}, which cannot both be right; "
                "declare the right frame_s and offset_s, see whether both are of the same audio "
                "and without padding, or leave out the frame_s of one"
            )

    def _note(self, id: str, feature: FeatureStorageConfig, shape: tuple[int, ...]) -> None:
        """Note an array (frames, *dims); raises `FeatureError` for a second batch of one."""
        name = feature.name
        if shape[0] == 0:
            count, first = self._empty.get(name, (0, id))
            self._empty[name] = count + 1, first
        if name in self._settled:
            return
        watched = self._note_vectors(id, feature, shape)
        warned = self._warned.get(name)
        sentence = None if warned is False else feature.looks_wrong(shape)
        self._warned[name] = sentence is not None
        if sentence is None:
            if not watched:
                self._settled.add(name)
            return
        message = f"utterance {id!r}, feature {name!r}: {sentence}"
        if warned:
            raise FeatureError(message)
        warnings.warn(message, stacklevel=2)

    def _note_vectors(self, id: str, feature: FeatureStorageConfig, shape: tuple[int, ...]) -> bool:
        """Warn where the first utterances all have as many frames, each of a single number.

        Returns whether more are to be noted.
        """
        length, count = self._single.get(feature.name, (shape[0], 0))
        may_be = len(shape) == 1 and "float" in feature.dtype and feature.dims is None
        if not may_be or feature.time_axis is None or count < 0:
            return False
        if shape[0] <= 1:
            return True
        same = shape[0] == length
        self._single[feature.name] = length, count + 1 if same and count + 1 < _ALIKE else -1
        if same and count + 1 == _ALIKE:
            warnings.warn(
                f"utterance {id!r}, feature {feature.name!r}: it has {length} frames of a single "
                f"number, as the {count} before; is it one vector an utterance? declare "
                "time_axis: null, or dims: [] if it is right",
                stacklevel=2,
            )
        return same and count + 1 < _ALIKE

    def tell(self, path: Path) -> None:
        """Log how many utterances of each feature had no frames, or were vectors all alike."""
        for name, (length, count) in self._single.items():
            if count > 1:  # fewer than it takes to warn of them while they are written
                _log.warning(
                    "the %d utterances written to %r all have %d frames of a single number of "
                    "feature %r; is it one vector an utterance? declare time_axis: null, or "
                    "dims: [] if it is right",
                    count,
                    str(path),
                    length,
                    name,
                )
        for name, (count, first) in self._empty.items():
            _log.warning(
                "%d of the utterances written to %r have no frames of feature %r, the first is %r; "
                "see why, or leave them out",
                count,
                str(path),
                name,
                first,
            )

"""Declarations of features, checked when made: name, dtype, format, codec; times of frames.

With them comes what tells shapes that look like mistakes.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

from featcache._checks import errors_about, named_settings
from featcache.errors import ConfigError, FeatureError, UnknownNameError, nearest
from featcache.interface import Backend, Blocks, Codec, FeatureSpec, Ints, SupportsBlocks
from featcache.registry import RAW, get_backend, get_codec, only_reads

# The dtypes that features can have, and the names under which NumPy and torch know them.

DTYPES = (
    *("float16", "float32", "float64", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    "bool",
)
_CODES = {np.dtype(name).str[1:]: name for name in DTYPES if name != "bfloat16"}  # "f4"
# of any byte order: on disk all are little-endian
_ALIASES = {f"{order}{code}": name for code, name in _CODES.items() for order in "<>=|"}
_ALIASES |= {"half": "float16", "single": "float32", "double": "float64"}


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype that features can have.

    Understands names, NumPy's codes with a byte order ("<f4"), and dtypes of NumPy and torch.
    "float" and "int" are refused: they have 64 bits in NumPy and 32 in torch.

    >>> dtype_name("half"), dtype_name(np.int16), dtype_name(np.dtype("<f4"))
    ('float16', 'int16', 'float32')
    """
    name = _name(dtype)
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        hint = f"did you mean {_CODES[name]!r}?" if name in _CODES else nearest(name, DTYPES)
        raise UnknownNameError(f"dtype {dtype!r} cannot be used; {hint}")
    return name


def _name(dtype: object) -> str:
    if isinstance(dtype, type):
        return np.dtype(dtype).name if issubclass(dtype, np.generic) else dtype.__name__
    if isinstance(dtype, np.dtype):
        return dtype.name
    return str(dtype).removeprefix("torch.")


# Options of a declaration: one dict, each option owned by the storage format or by the codec.

Options = dict[str, object]


def split_options(
    backend: str, codec: str, options: Mapping[str, object]
) -> tuple[Options, Options]:
    """Return the options of the backend and those of the codec, checked by name.

    A whole number that was given as a float (YAML reads `1e9` as one) becomes an integer where an
    option is one. Raises `UnknownNameError` for an option that neither has, `ConfigError` for one
    that both have, or that has to be given and is not.
    """
    of_backend = _fields(get_backend(backend))
    of_codec = _fields_of_codec(codec)
    for name in of_backend.keys() & of_codec.keys():
        raise ConfigError(
            f"backend {backend!r} and codec {codec!r} both have an option {name!r}, so a "
            "declaration cannot say whose it means; one of the two packages has to rename it"
        )
    for name in options:
        if name not in of_backend and name not in of_codec:
            raise _unknown(name, backend, codec, [*of_backend, *of_codec])
    return _values(of_backend, options, f"backend {backend!r}"), _values(
        of_codec, options, f"codec {codec!r}"
    )


def without_defaults(
    backend: str, codec: str, options: Mapping[str, object]
) -> tuple[Options, Options]:
    """Return the options of the backend and of the codec, sorted, that are not their defaults."""
    of_backend, of_codec = (
        {name: options[name] for name in sorted(fields.keys() & options.keys())
         if options[name] != _default(fields[name])}
        for fields in (_fields(get_backend(backend)), _fields_of_codec(codec))
    )  # fmt: skip
    return of_backend, of_codec


def _values(
    fields: Mapping[str, dataclasses.Field[object]], options: Mapping[str, object], owner: str
) -> Options:
    for name, field in fields.items():
        if name not in options and _default(field) is dataclasses.MISSING:
            raise ConfigError(f"{owner} needs an option {name!r}; give it in options")
    return {name: _whole(fields[name], value) for name, value in options.items() if name in fields}


def _unknown(name: object, backend: str, codec: str, known: list[str]) -> UnknownNameError:
    owner = f"backend {backend!r}" + (f" with codec {codec!r}" if codec != RAW else "")
    hint = nearest(name, known)
    for other in get_backend(backend).codecs:
        with suppress(ConfigError):  # a codec that does not load is no help
            if other != codec and name in _fields_of_codec(other):
                hint = f"codec {other!r} has it: declare codec: {other}"
                break
    return UnknownNameError(f"{owner} has no option {name!r}; {hint}")


def _fields_of_codec(codec: str) -> dict[str, dataclasses.Field[object]]:
    return {} if codec == RAW else _fields(get_codec(codec))


def _fields(owner: type) -> dict[str, dataclasses.Field[object]]:
    """Options are the fields of a frozen dataclass."""
    return {field.name: field for field in dataclasses.fields(owner) if field.init}


def _default(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _whole(field: dataclasses.Field[object], value: object) -> object:
    declared_int = field.type in (int, "int")
    return int(value) if declared_int and isinstance(value, float) and value.is_integer() else value


# Guesses at what is wrong with the shape of an array: a batch axis, transposed axes.

Shape = tuple[int, ...]


def guess(dims: Shape, expected: Shape, rows: int | None, *, declared: bool) -> str:
    """Return why frames have shape `dims`, not `expected`, and what to do, as the end of a message.

    Args:
        dims: shape of a frame, or of the array where there is no time axis.
        expected: the shape that it should have.
        rows: number of frames; None without a time axis.
        declared: whether `expected` was declared, or is what earlier utterances have.

    >>> guess((700, 80), (80,), rows=1, declared=True)
    'was a batch axis left in? write array[0]'
    """
    remedy = "" if declared else "; overwrite the cache if those are wrong"
    batched = rows == 1 and dims[1:] in (expected, expected[1:])
    if batched or (rows is None and dims == (1, *expected)):
        return f"was a batch axis left in? write array[0]{remedy}"
    if declared and dims == () and (rows,) == expected:
        return "is it one array an utterance, without a time axis? declare time_axis: null"
    unsure = not declared and rows is not None
    if len(dims) == len(expected) == 1 and (unsure or (rows,) == expected):
        return f"is the array transposed? its first axis is the frames{remedy}"
    return "mend the array, or dims" if declared else "overwrite the cache if those are wrong"


def looks_batched(shape: Shape) -> str | None:
    """Return a hint if an array (frames, *dims) looks like a batch of one; nothing is certain.

    >>> looks_batched((700, 80)), looks_batched((1, 700, 80)) is None
    (None, False)
    """
    if len(shape) < 3 or shape[0] != 1 or 0 in shape:
        return None
    return (
        f"shape {shape} is one frame of shape {shape[1:]}; was a batch axis left in? "
        f"write array[0], or declare dims: {list(shape[1:])} if it is right"
    )


# `FrameTimes`: from seconds to the frames of a feature, by one rule for all that cuts in seconds.
#
# Frame k stands for the time from `offset_s + k * frame_s` to `offset_s + (k + 1) * frame_s`. A cut
# at a time goes between two frames, at the boundary nearest to it; half-way it goes to the later
# one:
#
#     boundary(t) = max(0, floor((t - offset_s) / frame_s + 1 / 2)), and boundary(0) = 0
#
# A segment from s to e holds frames boundary(s) to before boundary(e). So
#
# - neighbours neither share a frame nor leave one out: both have the same boundary between them,
#   and boundaries never descend, as t grows;
# - each cut but those at 0 is at most half a frame off its time, however far into a recording, so
#   that features of any two rates stay aligned to half a frame of each; where a time is a multiple
#   of the frames of both, to the same instant;
# - a segment from 0 leaves no frame out, also where the first one begins before 0;
# - lhotse has the same numbers (`compute_num_frames`: to the nearest, a half goes up).
#
# In float64 a half may look like a little less (1.005 / 0.01 is 100.49999999999999). What lacks at
# most a millionth of a frame counts as half. The quotient is off by 4 roundings, each 2**-53 of
# it at most: less than a millionth as long as there are fewer than 2e9 frames (35 hours at 16 kHz).
# Subtraction, division, addition and floor keep the order of their operands in float64, too.

Seconds64 = NDArray[np.float64]
_HALF = 0.5 + 1e-6  # see above
FEW_FRAMES = 2  # by so many of the longest frames ends of features may differ, if none is said
MANY_FRAMES = 20  # more than so many, and than this share of an utterance, no padding explains
_LARGE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """The times of a feature's frames: seconds from one to the next, and at which the first begins.

    >>> times = FrameTimes(frame_s=0.01)
    >>> times.boundaries(np.array([0.0, 1.004, 1.005])).tolist()
    [0, 100, 101]
    """

    frame_s: float
    offset_s: float = 0.0

    @classmethod
    def declared(cls, feature: Mapping[str, Any]) -> FrameTimes | None:
        """Return those of a declaration, as a manifest has it; None where it does not say.

        Raises `ValueError` for what `FeatureStorageConfig` would have refused.
        """
        frame_s, offset_s = feature.get("frame_s"), feature.get("offset_s", 0.0)
        if feature["time_axis"] is None or frame_s is None:
            return None
        numbers = all(type(number) in (int, float) for number in (frame_s, offset_s))
        if not (numbers and 0 < frame_s < math.inf and -math.inf < offset_s < math.inf):
            raise ValueError(f"frame_s {frame_s!r} and offset_s {offset_s!r} are not seconds")
        return cls(float(frame_s), float(offset_s))

    def boundaries(self, seconds: Seconds64) -> Ints:
        """Return the frame that begins at the boundary nearest to each time; never below 0."""
        frames = np.floor((seconds - self.offset_s) / self.frame_s + _HALF)
        return np.where(seconds <= 0, 0, np.maximum(frames, 0)).astype(np.int64)

    def ends_s(self, lengths: Ints) -> Seconds64:
        """Return the time at which the last of so many frames ends."""
        return np.asarray(self.offset_s + lengths * self.frame_s, np.float64)


def first_contradiction(
    times: Mapping[str, FrameTimes],
    lengths: Mapping[str, Ints],
    most_frames: int = MANY_FRAMES,
) -> tuple[int, str] | None:
    """Find the first utterance whose features end so far apart that their times cannot be right.

    More than `most_frames` of the longest frames apart, and more than a tenth of the utterance: one
    of the declarations is wrong, or the features are of different recordings. Where a feature has
    no frames, nothing is compared.

    Args:
        times: those of the features that have some, by name.
        lengths: frames of each utterance, by feature.
        most_frames: none less than `MANY_FRAMES` counts.

    Returns its place and what is wrong; None if there is none.

    >>> times = {"a": FrameTimes(0.01), "b": FrameTimes(0.01)}
    >>> first_contradiction(times, {"a": np.array([98, 100]), "b": np.array([100, 50])})
    (1, "by frame_s and lengths feature 'a' ends at 1 s and 'b' at 0.5 s")
    """
    if len(times) < 2:
        return None
    ends = {name: each.ends_s(lengths[name]) for name, each in times.items()}
    first, last = np.min([*ends.values()], axis=0), np.max([*ends.values()], axis=0)
    many_s = max(most_frames, MANY_FRAMES) * max(each.frame_s for each in times.values())
    some = np.min([lengths[name] for name in times], axis=0) > 0
    wrong = some & (last - first > np.maximum(many_s, _LARGE_SHARE * last) * (1 + 1e-6))
    if not wrong.any():
        return None
    place = int(wrong.argmax())
    at = {name: float(each[place]) for name, each in ends.items()}
    told = sorted({max(at, key=at.__getitem__), min(at, key=at.__getitem__)}, key=[*at].index)
    one, other = told
    return place, (
        f"by frame_s and lengths feature {one!r} ends at {at[one]:.6g} s and {other!r} at "
        f"{at[other]:.6g} s"
    )


# `FeatureStorageConfig`: how one feature is stored, checked when it is declared.

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, init=False)
class FeatureStorageConfig:
    """Declare how one feature is stored.

    Args:
        name: a letter or `_`, then letters, digits, `_` and `-`; at most 64; not `id`.
        dtype: dtype on disk, one of float16/32/64, bfloat16, (u)int8/16/32/64, bool. Floats are
            rounded to it, tiny ones to 0; a value that is too large is an error when written.
        backend: the storage format, one of `featcache.registry.backend_names()`.
        codec: how arrays become bytes; None is the format's default.
        options: options of the format and of the codec, e.g. `{"tick_power": -6}`.
        stats: collect count, mean and variance while writing; None: for floats yes, for integers
            and bool no.
        time_axis: 0 if arrays are (frames, *dims), None for one array of a fixed shape an utterance
            (an embedding). Nothing tells an embedding of shape (192,) from 192 frames of one number
            each: say None, or declare `dims` to be told.
        nonfinite: "raise" refuses NaN and infinity, "keep" stores them (no statistics then).
        dims: shape of a frame, `[80]` for 80 mel bands, `[]` for one number; of the whole array
            without a time axis. Others are refused, from the first utterance on, which decides if
            this is None.
        frame_s: seconds from one frame to the next, by which segments and windows are cut: frame k
            stands for the time from `offset_s + k * frame_s` to `offset_s + (k + 1) * frame_s`.
        offset_s: seconds at which the first frame begins. A frame stands for the middle of what it
            was computed from: with windows of 25 ms every 10 ms, 0.0075 where the first one begins
            at 0, and -0.005 where it is centred there.

    Raises `ConfigError` if the declaration cannot work.

    >>> FeatureStorageConfig("fbank", dtype="float16", backend="hdf5", dims=[80]).codec
    'raw'
    """

    name: str
    dtype: str
    backend: str
    codec: str
    options: Mapping[str, object] = dataclasses.field(hash=False)
    stats: bool
    time_axis: int | None
    nonfinite: str
    dims: tuple[int, ...] | None
    frame_s: float | None
    offset_s: float

    @named_settings("a feature's storage")
    def __init__(
        self,
        name: str,
        dtype: object = "float32",
        *,
        backend: str = "memmap",
        codec: str | None = None,
        options: Mapping[str, object] | None = None,
        stats: bool | None = None,
        time_axis: int | None = 0,
        nonfinite: str = "raise",
        dims: Sequence[int] | None = None,
        frame_s: float | None = None,
        offset_s: float = 0.0,
    ) -> None:
        _check_name(name)
        with errors_about(f"feature {name!r}"):
            _check_kinds(options, stats)
            stored = dtype_name(dtype)
            if codec is None:
                codec = get_backend(backend).codecs[0]
            if stats is None:
                stats = "float" in stored and nonfinite != "keep"
            vars(self).update(  # it is frozen
                name=name,
                dtype=stored,
                backend=backend,
                codec=codec,
                options=dict(options or {}),
                stats=bool(stats),
                time_axis=time_axis,
                nonfinite=nonfinite,
                dims=_dims(dims),
                frame_s=None if frame_s is None else _seconds("frame_s", frame_s, above=0),
                offset_s=_seconds("offset_s", offset_s),
            )
            self._check_choices()
            self._check_options()

    def _check_choices(self) -> None:
        if self.time_axis not in (0, None) or self.time_axis is False:
            raise ConfigError(
                f"time_axis {self.time_axis!r} is not supported; use 0 and give arrays as "
                "(frames, ...), or None for one array of a fixed shape an utterance"
            )
        if self.nonfinite not in ("raise", "keep"):
            raise ConfigError(f"nonfinite is 'raise' or 'keep', not {self.nonfinite!r}")
        if self.nonfinite == "keep" and self.stats:
            raise ConfigError("no statistics of NaN and infinity; set stats: false")
        if self.time_axis is None and (self.frame_s is not None or self.offset_s):
            raise ConfigError(
                "without a time axis there are no frames; leave frame_s and offset_s out"
            )

    def _check_options(self) -> None:
        codecs = get_backend(self.backend).codecs
        of_others = only_reads(self.codec)
        if self.codec not in codecs and not of_others:
            raise UnknownNameError(
                f"backend {self.backend!r} has no codec {self.codec!r}; "
                f"{nearest(self.codec, codecs)}"
            )
        of_backend, of_codec = split_options(self.backend, self.codec, self.options)
        vars(self)["options"] = of_backend | of_codec
        codec, backend = self.make_codec(), self.make_backend()
        if codec is not None and codec.dtypes is not None and self.dtype not in codec.dtypes:
            raise ConfigError(
                f"codec {self.codec!r} cannot hold {self.dtype!r}; "
                f"it holds {', '.join(sorted(codec.dtypes))}"
            )
        if not (codec is None or of_others or isinstance(backend, SupportsBlocks)):
            raise ConfigError(
                f"backend {self.backend!r} lists codec {self.codec!r} "
                "but does not say how to cut blocks"
            )

    def make_backend(self) -> Backend:
        """Make the storage format with the declared options."""
        return get_backend(self.backend)(**split_options(self.backend, self.codec, self.options)[0])

    def make_codec(self) -> Codec | None:
        """Make the codec with the declared options; None for raw bytes."""
        if self.codec == RAW:
            return None
        return get_codec(self.codec)(**split_options(self.backend, self.codec, self.options)[1])

    def spec(self, dims: tuple[int, ...]) -> FeatureSpec:
        """Return what a backend must know, now that the shape of a frame is known."""
        return FeatureSpec(self.name, self.dtype, dims, self.time_axis == 0, self.make_codec())

    def blocks(self, dims: tuple[int, ...]) -> Blocks | None:
        """Return how arrays are cut for the codec; None for raw bytes."""
        if only_reads(self.codec):
            raise ConfigError(f"codec {self.codec!r} only reads: write {self.name!r} with another")
        backend = self.make_backend()
        if self.codec == RAW or not isinstance(backend, SupportsBlocks):
            return None
        return backend.blocks(self.spec(dims))

    def to_json(self) -> DeclaredFeature:
        """Return the declaration as JSON-able values.

        The options of the codec stand apart from those of the backend: who reads must know them.
        Options at their default are left out; so are `dims`, `frame_s` and `offset_s`.
        """
        content = dict(vars(self), offset_s=self.offset_s or None)
        of_backend, of_codec = without_defaults(self.backend, self.codec, self.options)
        content |= {"options": of_backend, "codec_options": of_codec}
        content["dims"] = None if self.dims is None else list(self.dims)
        unsaid = {key for key in ("dims", "frame_s", "offset_s") if content[key] is None}
        said = {key: value for key, value in content.items() if key not in unsaid}
        return cast(DeclaredFeature, said)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> FeatureStorageConfig:
        """Return the declaration that `to_json` gave."""
        settings = cast(dict[str, Any], dict(content))
        settings["options"] = settings["options"] | settings.pop("codec_options")
        return cls(**settings)

    def check_dims(
        self,
        id: str,
        dims: tuple[int, ...],
        before: tuple[int, ...] | None = None,
        rows: int | None = None,
    ) -> None:
        """Raise `FeatureError` unless frames have the declared shape, or that of earlier ones.

        Args:
            id: the utterance, for the message.
            dims: shape of its frames; of its array where the feature has no time axis.
            before: shape of the frames that are stored already, if there are any.
            rows: number of its frames, for a guess at what is wrong.
        """
        expected = before if self.dims is None else self.dims
        if expected is None or dims == expected:
            return
        axes = "arrays" if self.time_axis is None else "frames"
        those = "those before have" if self.dims is None else "declared is"
        rows = None if self.time_axis is None else rows
        raise FeatureError(
            f"utterance {id!r}, feature {self.name!r}: {axes} have shape {dims}, {those} "
            f"{expected}; {guess(dims, expected, rows, declared=self.dims is not None)}"
        )

    def looks_wrong(self, shape: tuple[int, ...]) -> str | None:
        """Return what looks wrong with an array (frames, *dims), if anything does.

        A single frame of two axes or more looks like a batch of one. Where `dims` are declared,
        nothing looks wrong: `check_dims` is sure.
        """
        return looks_batched(shape) if self.dims is None and self.time_axis == 0 else None


# of a declaration as JSON


class DeclaredFeature(TypedDict):
    """A declaration as `FeatureStorageConfig.to_json` gives it, and manifests have it."""

    name: str
    dtype: str
    time_axis: int | None
    backend: str
    options: Options
    codec: str
    codec_options: Options
    stats: bool
    nonfinite: str
    dims: NotRequired[list[int]]
    frame_s: NotRequired[float]
    offset_s: NotRequired[float]


KEYS = frozenset(
    {field.name for field in dataclasses.fields(FeatureStorageConfig)} | {"codec_options"}
)
Features = Mapping[str, FeatureStorageConfig] | Iterable[FeatureStorageConfig]


def by_name(features: Features) -> dict[str, FeatureStorageConfig]:
    """Return declarations by feature name; raises `ConfigError` for names that clash."""
    if not isinstance(features, Iterable) or isinstance(features, str):
        raise ConfigError(f"features are a list of FeatureStorageConfig, not {features!r}")
    named = (
        features.items()
        if isinstance(features, Mapping)
        else ((None, feature) for feature in features)
    )
    declared: dict[str, FeatureStorageConfig] = {}
    for name, feature in named:
        if not isinstance(feature, FeatureStorageConfig):
            raise ConfigError(
                f"a feature is declared by a FeatureStorageConfig, not by {feature!r}"
            )
        if name not in (None, feature.name):
            raise ConfigError(f"feature {feature.name!r} is listed as {name!r}; give it one name")
        for other in declared:
            _check_pair(other, feature.name)
        declared[feature.name] = feature
    if not declared:
        raise ConfigError("a cache needs at least one feature, declared by a FeatureStorageConfig")
    return declared


def _check_pair(one: str, other: str) -> None:
    if one == other:
        raise ConfigError(f"two features are called {one!r}; give each a name of its own")
    if one.lower() == other.lower():  # WebDataset and some file systems do not tell them apart
        raise ConfigError(
            f"features {one!r} and {other!r} have the same name but for upper case; rename one"
        )
    short, long = sorted((one, other), key=len)
    if long == f"{short}_lengths":
        raise ConfigError(
            f"features {short!r} and {long!r}: a batch has the lengths of {short!r} "
            f"under {long!r}; rename one"
        )


def _check_kinds(options: object, stats: object) -> None:
    if not isinstance(options or {}, Mapping):
        raise ConfigError(f"options are a dict by name, not {options!r}")
    if stats not in (None, True, False):
        raise ConfigError(f"stats is true, false or null, not {stats!r}")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"feature name {name!r} is not usable: a letter or '_', "
            "then letters, digits, '_' and '-', at most 64"
        )
    if name == "id":
        raise ConfigError(
            "feature name 'id' is not usable: an item has the utterance id there; rename it"
        )


def _dims(dims: Sequence[int] | None) -> tuple[int, ...] | None:
    if dims is None:
        return None
    try:
        numbers = (-1,) if isinstance(dims, str) else tuple(map(operator.index, dims))
    except TypeError:
        numbers = (-1,)
    if any(number < 0 for number in numbers):
        raise ConfigError(f"dims is the shape of a frame, such as [80], not {dims!r}")
    return numbers


def _seconds(setting: str, value: object, above: float = -math.inf) -> float:
    number = float(value) if isinstance(value, int | float) else math.nan
    if isinstance(value, bool) or not above < number < math.inf:
        what = "seconds" if above < 0 else "seconds, more than 0"
        raise ConfigError(f"{setting} is a number of {what}, not {value!r}")
    return number

"""`FeatureStorageConfig`: how one feature is stored, checked when it is declared."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from featcache._checks import errors_about, named_settings
from featcache.declaration.dtypes import DTYPES as DTYPES
from featcache.declaration.dtypes import dtype_name
from featcache.declaration.options import split_options, without_defaults
from featcache.declaration.shape_hints import guess, looks_batched
from featcache.errors import ConfigError, FeatureError, UnknownNameError, nearest
from featcache.interface import Backend, Blocks, Codec, FeatureSpec, SupportsBlocks
from featcache.registry import RAW, get_backend, get_codec, only_reads

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, init=False)
class FeatureStorageConfig:
    """Declare how one feature is stored.

    Args:
        name: a letter or `_`, then letters, digits, `_` and `-`; at most 64; not `id`.
        dtype: dtype on disk, one of float16/32/64, bfloat16, (u)int8/16/32/64, bool. Floats are
            rounded to it, tiny ones to 0; a value that is too large is an error when written.
        backend: the storage format, one of `featcache.backend_names()`.
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
        """Say how arrays are cut for the codec; None for raw bytes."""
        if only_reads(self.codec):
            raise ConfigError(f"codec {self.codec!r} only reads: write {self.name!r} with another")
        backend = self.make_backend()
        if self.codec == RAW or not isinstance(backend, SupportsBlocks):
            return None
        return backend.blocks(self.spec(dims))

    def to_json(self) -> dict[str, object]:
        """Return the declaration as JSON-able values.

        Options at their default are left out; so are `dims`, `frame_s` and `offset_s`.
        """
        content = dict(vars(self), offset_s=self.offset_s or None)
        content["options"] = without_defaults(self.backend, self.codec, self.options)
        content["dims"] = None if self.dims is None else list(self.dims)
        unsaid = {key for key in ("dims", "frame_s", "offset_s") if content[key] is None}
        return {key: value for key, value in content.items() if key not in unsaid}

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> FeatureStorageConfig:
        """Return the declaration that `to_json` gave."""
        return cls(**cast(dict[str, Any], content))

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
        """Say what looks wrong with an array (frames, *dims), if anything does.

        A single frame of two axes or more looks like a batch of one. Where `dims` are declared,
        nothing looks wrong: `check_dims` is sure.
        """
        return looks_batched(shape) if self.dims is None and self.time_axis == 0 else None


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

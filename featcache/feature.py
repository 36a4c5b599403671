"""How one feature is stored: the declaration, checked when it is made."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from featcache.errors import ConfigError, UnknownNameError, nearest
from featcache.interface import Backend, Blocks, Codec, FeatureSpec, SupportsBlocks
from featcache.registry import RAW, get_backend, get_codec

DTYPES = (
    *("float16", "float32", "float64", "bfloat16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    "bool",
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_FIELDS = ("name", "dtype", "backend", "codec", "options", "stats", "time_axis", "nonfinite")


@dataclass(frozen=True, init=False)
class FeatureStorageConfig:
    """Declare how one feature is stored.

    Args:
        name: a letter or `_`, then letters, digits, `_` and `-`; at most 64.
        dtype: dtype on disk, one of float16/32/64, bfloat16, (u)int8/16/32/64, bool. Floats are rounded to it;
            a value that it cannot hold is an error when written.
        backend: the storage format, one of `featcache.backend_names()`.
        codec: how arrays become bytes; None is the format's default.
        options: options of the format and of the codec, e.g. `{"tick_power": -6}`.
        stats: collect count, mean and variance while writing; None: for floats yes, for integers and bool no.
        time_axis: 0 if arrays are (frames, *dims), None for one array of a fixed shape an utterance (an embedding).
        nonfinite: "error" refuses NaN and infinity, "keep" stores them (no statistics then).

    Raises `ConfigError` if the declaration cannot work.

    >>> FeatureStorageConfig("fbank", dtype="float16", backend="hdf5").codec
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

    def __new__(cls, *args: object, **settings: object) -> Self:
        """Refuse unknown settings: `__init__` would not say which one was meant, or that another is missing for it."""
        for key in settings:
            if key not in _FIELDS:
                raise UnknownNameError(f"a feature's storage has no setting {key!r}; {nearest(key, _FIELDS)}")
        return super().__new__(cls)

    def __init__(
        self,
        name: str,
        dtype: object = "float32",
        backend: str = "memmap",
        codec: str | None = None,
        options: Mapping[str, object] | None = None,
        stats: bool | None = None,
        time_axis: int | None = 0,
        nonfinite: str = "error",
    ) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"feature name {name!r} is not usable: a letter or '_', then letters, digits, '_' and '-', at most 64"
            )
        if not isinstance(options or {}, Mapping):
            raise ConfigError(f"feature {name!r}: options are a dict by name, not {options!r}")
        if stats not in (None, True, False):
            raise ConfigError(f"feature {name!r}: stats is true, false or null, not {stats!r}")
        dtype_name = _dtype_name(name, dtype)
        if codec is None:
            codec = get_backend(backend).codecs[0]
        if stats is None:
            stats = "float" in dtype_name and nonfinite != "keep"
        for field, value in (
            ("name", name),
            ("dtype", dtype_name),
            ("backend", backend),
            ("codec", codec),
            ("options", dict(options or {})),
            ("stats", bool(stats)),
            ("time_axis", time_axis),
            ("nonfinite", nonfinite),
        ):
            object.__setattr__(self, field, value)
        self._check()

    def _check(self) -> None:
        if self.time_axis not in (0, None) or self.time_axis is False:
            raise ConfigError(
                f"feature {self.name!r}: time_axis {self.time_axis!r} is not supported; use 0 and give arrays as "
                "(frames, ...), or None for one array of a fixed shape an utterance"
            )
        if self.nonfinite not in ("error", "keep"):
            raise ConfigError(f"feature {self.name!r}: nonfinite is 'error' or 'keep', not {self.nonfinite!r}")
        if self.nonfinite == "keep" and self.stats:
            raise ConfigError(f"feature {self.name!r}: no statistics of NaN and infinity; set stats: false")
        backend = get_backend(self.backend)
        if self.codec not in backend.codecs:
            raise UnknownNameError(
                f"feature {self.name!r}: backend {self.backend!r} has no codec {self.codec!r}; "
                f"{nearest(self.codec, backend.codecs)}"
            )
        codec = self.make_codec()
        if codec is not None and codec.dtypes is not None and self.dtype not in codec.dtypes:
            raise ConfigError(
                f"feature {self.name!r}: codec {self.codec!r} cannot hold {self.dtype!r}; "
                f"it holds {', '.join(sorted(codec.dtypes))}"
            )
        made = self.make_backend()
        if codec is not None and not isinstance(made, SupportsBlocks):
            raise ConfigError(f"backend {self.backend!r} lists codec {self.codec!r} but does not say how to cut blocks")

    def make_backend(self) -> Backend:
        """Make the storage format with the declared options."""
        return get_backend(self.backend)(**self._options_of(get_backend(self.backend)))

    def make_codec(self) -> Codec | None:
        """Make the codec with the declared options; None for raw bytes."""
        if self.codec == RAW:
            return None
        return get_codec(self.codec)(**self._options_of(get_codec(self.codec)))

    def spec(self, dims: tuple[int, ...]) -> FeatureSpec:
        """Return what a backend must know, now that the shape of a frame is known."""
        return FeatureSpec(self.name, self.dtype, dims, self.time_axis == 0, self.make_codec())

    def blocks(self, dims: tuple[int, ...]) -> Blocks | None:
        """Say how arrays are cut for the codec; None for raw bytes."""
        backend = self.make_backend()
        return backend.blocks(self.spec(dims)) if self.codec != RAW and isinstance(backend, SupportsBlocks) else None

    def to_json(self) -> dict[str, object]:
        """Return the declaration as JSON-able values; options at their default are left out."""
        known = _defaults(get_backend(self.backend)) | self._codec_defaults()
        options = {key: value for key, value in sorted(self.options.items()) if known.get(key, self) != value}
        return {field: getattr(self, field) for field in _FIELDS} | {"options": options}

    def _options_of(self, owner: type) -> dict[str, object]:
        known = _defaults(get_backend(self.backend)) | self._codec_defaults()
        for key in self.options:
            if key not in known:
                what = f"backend {self.backend!r}" + (f" with codec {self.codec!r}" if self.codec != RAW else "")
                raise UnknownNameError(f"feature {self.name!r}: {what} has no option {key!r}; {nearest(key, known)}")
        return {key: value for key, value in self.options.items() if key in _defaults(owner)}

    def _codec_defaults(self) -> dict[str, object]:
        return {} if self.codec == RAW else _defaults(get_codec(self.codec))


def _defaults(options: type) -> dict[str, object]:
    """Options are the fields of a frozen dataclass."""
    return {field.name: field.default for field in dataclasses.fields(options)}


def _dtype_name(feature: str, dtype: object) -> str:
    """Take 'float32', numpy.float32, numpy.dtype('float32') or torch.float32."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or getattr(dtype, "name", str(dtype))
    name = str(name).removeprefix("torch.").removesuffix("_")  # numpy.bool_
    if name not in DTYPES:
        raise UnknownNameError(f"feature {feature!r}: dtype {dtype!r} cannot be stored; {nearest(name, DTYPES)}")
    return name

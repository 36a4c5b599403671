"""Results of a function as arrays to store, and arrays as the results that they were.

A result is one value, a tuple of values, or a dict of them by feature. A value is a torch tensor, a
NumPy array, a list (of numbers, or of such lists), a number, a text or a list of texts. The first
result says which; all others come back in that form and these types, and so does the first, whether
computed or read. Texts go as their UTF-8 bytes here, and are kept as annotations.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from featcache._tensors import ArrayLike, is_tensor
from featcache.declaration import FeatureStorageConfig, dtype_name
from featcache.errors import CacheError, ConfigError, FeatureError
from featcache.format import from_storage
from featcache.interface import Array
from featcache.reading import joined
from featcache.registry import RAW, is_lossless
from featcache.writing.arrays import encoded, to_storage

ONE, TUPLE, DICT = "one", "tuple", "dict"
TORCH, NUMPY, LIST, NUMBER = "torch", "numpy", "list", "number"
TEXT, TEXTS = "text", "texts"

_SAID = {TORCH: "a tensor", NUMPY: "an array", LIST: "a list", NUMBER: "a number"}
_SAID |= {TEXT: "a text", TEXTS: "a list of texts"}
_log = logging.getLogger("featcache")

Features = Mapping[str, FeatureStorageConfig]
Converter = Callable[[Array], object]


@dataclass(frozen=True, slots=True)
class Results:
    """The form of a function's results, and by feature the type of a value.

    What comes in another type than the first one's is told in the log, once for each feature.
    """

    form: str
    types: Mapping[str, str]
    _told: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def of(cls, id: str, value: object, names: Sequence[str]) -> Results:
        """Return the form of a first result; `names` are those of features, or of the function.

        Raises `FeatureError`, naming the utterance, for what can be no features.
        """
        if isinstance(value, Mapping):
            form, values = DICT, dict(value)
            if not all(isinstance(name, str) for name in values):
                raise FeatureError(f"utterance {id!r}: keys of a result are names of features")
        elif isinstance(value, tuple) or (isinstance(value, list) and len(names) > 1):
            if len(names) == 1:
                names = [f"{names[0]}_{number}" for number in range(len(value))]
            if len(value) != len(names) or not value:
                raise FeatureError(
                    f"utterance {id!r}: a result of {len(value)} values needs as many names of "
                    "features; declare them (features=), let the item provide as many keys, or "
                    "return a dict"
                )
            form, values = TUPLE, dict(zip(names, value, strict=True))
        else:
            form, values = ONE, {names[0]: value}
        return cls(form, {name: _type_of(id, name, each) for name, each in values.items()})

    @classmethod
    def from_json(cls, content: object, features: Sequence[str]) -> Results:
        """Return what `to_json` gave; of a cache that others filled, tensors."""
        if content is None:
            return cls(ONE if len(features) == 1 else DICT, dict.fromkeys(features, TORCH))
        try:
            found = cast(Mapping[str, Any], content)
            form, types = found["form"], dict(found["types"])
            made = cls(form, types)
            right = form in (ONE, TUPLE, DICT) and made.features == {*features} and len(types) > 0
            if not right or not {*types.values()} <= {*_SAID}:
                raise ValueError(content)
        except (TypeError, ValueError, LookupError) as error:
            raise CacheError(
                f"the cache's fingerprint has results {content!r:.100}, which this featcache does "
                "not know; upgrade featcache, or compute it again in another directory"
            ) from error
        return made

    @property
    def texts(self) -> list[str]:
        """The names of the values that are texts, and kept as annotations."""
        return [name for name, kind in self.types.items() if kind in (TEXT, TEXTS)]

    @property
    def features(self) -> set[str]:
        """The names of the features: of all other values, or, if all are texts, of their size."""
        return {*self.types}.difference(self.texts) or {f"{next(iter(self.types))}_size"}

    def parted(
        self, arrays: Mapping[str, ArrayLike]
    ) -> tuple[dict[str, ArrayLike], dict[str, str]]:
        """Return what `arrays` gave as features and texts.

        A cache has one feature at least: where all values are texts, their size in bytes.
        """
        texts = {name: cast(Array, arrays[name]).tobytes().decode() for name in self.texts}
        features = {name: array for name, array in arrays.items() if name not in texts}
        if texts and not features:
            size = np.int64(sum(len(cast(Array, array)) for array in arrays.values()))
            return dict.fromkeys(self.features, cast(ArrayLike, size)), texts
        return features, texts

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values, for the fingerprint, whose dicts lose their order."""
        return {"form": self.form, "types": [list(pair) for pair in self.types.items()]}

    def arrays(
        self, id: str, value: object, features: Features | None = None
    ) -> dict[str, ArrayLike]:
        """Return a result as arrays by feature; raises `FeatureError` for one of another form.

        `features` are those that the first result declared, where another dtype is to be told.
        """
        if self.form == DICT:
            if not isinstance(value, Mapping):
                raise _other_form(id, "a dict by feature", value)
            values = dict(value)
            if missing := sorted({*self.texts} - values.keys()):
                raise FeatureError(
                    f"utterance {id!r}: {missing[0]!r} is missing, a text of the first result"
                )
        elif self.form == TUPLE:
            if not isinstance(value, tuple | list) or len(value) != len(self.types):
                raise _other_form(id, f"{len(self.types)} values", value)
            values = dict(zip(self.types, value, strict=True))
        else:
            values = {next(iter(self.types)): value}
        arrays = {name: self._array(id, name, each) for name, each in values.items()}
        for name in (arrays.keys() & self.types.keys() - self._told).difference(self.texts):
            kind, dtype = _kind_of(values[name]), _dtype_of(arrays[name])
            stored = dtype if features is None or name not in features else features[name].dtype
            if (kind, dtype) != (self.types[name], stored):
                self._told.add(name)
                _log.warning(
                    "utterance %r, feature %r: the result is %s of %s, and comes back as %s of %s, "
                    "as the first one was; return one type, or convert what comes back",
                    id, name, _SAID[kind], dtype, _SAID[self.types[name]], stored,
                )  # fmt: skip
        return arrays

    def _array(self, id: str, name: str, value: object) -> ArrayLike:
        kind = self.types.get(name, NUMBER)
        if kind not in (TEXT, TEXTS):
            return as_array(id, name, value)
        no_texts = isinstance(value, list) and not value
        if _kind_of(value) != kind and not (kind == TEXTS and no_texts):
            raise FeatureError(
                f"utterance {id!r}, {name!r}: the first result was {_SAID[kind]}, this one is "
                f"{value!r:.60}, no feature beside texts"
            )
        return text_bytes(id, name, value if kind == TEXT else json.dumps(value))

    def converters(self, features: Features) -> list[tuple[str, Converter]]:
        """Return by feature, in the order of a tuple, what makes a value of a stored array."""
        return [
            (name, _TEXT_OF[kind] if kind in _TEXT_OF else _converter(features[name].dtype, kind))
            for name, kind in self.types.items()
        ]

    def of_values(self, values: Sequence[object]) -> object:
        """Return values, in the order of `converters`, as a result."""
        if self.form == ONE:
            return values[0]
        return tuple(values) if self.form == TUPLE else dict(zip(self.types, values, strict=True))


def declared_for(
    id: str, results: Results, value: object, storage: Mapping[str, object]
) -> dict[str, FeatureStorageConfig]:
    """Declare features as a first result has them: its dtype, and a time axis unless a number.

    `storage` are other settings of all of them: backend, codec, options.
    """
    features: dict[str, FeatureStorageConfig] = {}
    for name, array in results.parted(results.arrays(id, value))[0].items():
        axis = None if array.ndim == 0 else 0
        try:
            settings = cast(Mapping[str, Any], storage)
            features[name] = FeatureStorageConfig(name, array.dtype, time_axis=axis, **settings)
        except ConfigError as error:
            raise FeatureError(
                f"utterance {id!r}: its result cannot be declared by itself: {error}; declare "
                "what is stored (features=)"
            ) from error
    return features


def as_read_back(id: str, value: ArrayLike, feature: FeatureStorageConfig) -> Array:
    """Return a value as it will be read: in the declared dtype, after a lossy codec."""
    stored = to_storage(id, value, feature)
    if not is_lossless(feature.codec):
        spec, blocks = feature.spec(stored.shape[1:]), feature.blocks(stored.shape[1:])
        if blocks is not None:
            stored = joined(spec, encoded(id, stored, spec, blocks), blocks.rows or 0)
    return stored if feature.time_axis == 0 else stored[0, ...]


def exactly_read_back(id: str, value: ArrayLike, feature: FeatureStorageConfig) -> Array:
    """Return a value as it will be read, of a lossless feature that a first result declared.

    Raises `FeatureError` if it comes back as something else than it is, which only values of
    another dtype than the first one's do.
    """
    try:
        read = as_read_back(id, value, feature)
        if not _is_exact(id, value, read, feature):
            raise FeatureError(
                f"utterance {id!r}, feature {feature.name!r}: its numbers are {value.dtype} and do "
                f"not fit {feature.dtype} without rounding"
            )
    except FeatureError as error:
        if _dtype_of(value) == feature.dtype:
            raise
        raise FeatureError(
            f"{error}; the first result was {feature.dtype}: return one dtype, or declare what is "
            "stored (features=), in a new directory"
        ) from error
    return read


def _is_exact(id: str, value: ArrayLike, read: Array, feature: FeatureStorageConfig) -> bool:
    try:
        own = dtype_name(value.dtype)
    except ConfigError:  # such as longdouble, which is stored as another one
        back: Any = from_storage(read, feature.dtype)
        return np.array_equal(back, cast(Array, value))
    if own == feature.dtype:
        return True
    alone = replace(feature, dtype=own, backend="memmap", codec=RAW, options={}, stats=False)
    given = from_storage(to_storage(id, value, alone), own)
    with np.errstate(all="ignore"):
        back = from_storage(read, feature.dtype).astype(given.dtype)
    return np.array_equal(back, given if feature.time_axis == 0 else given[0, ...])


def text_bytes(id: str, name: str, value: object) -> Array:
    """Return a text as its UTF-8 bytes; raises `FeatureError` for what has none."""
    try:
        return np.frombuffer(str(value).encode(), np.uint8)
    except UnicodeEncodeError as error:
        raise FeatureError(f"utterance {id!r}, {name!r}: {error}") from error


def as_array(id: str, name: str, value: object) -> ArrayLike:
    """Return a value as something to store: an array or a tensor as it is."""
    if isinstance(value, np.ndarray | np.generic) or is_tensor(value):
        return cast(ArrayLike, value)
    try:
        # no list of numbers is empty floats
        array = np.asarray(value, np.int64 if isinstance(value, list) and not value else None)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise FeatureError(
            f"utterance {id!r}, feature {name!r}: the list is no array: {error}"
        ) from error
    if array.dtype.kind not in "iufb":
        raise FeatureError(
            f"utterance {id!r}, feature {name!r}: {value!r:.60} is no feature; return numbers (a "
            "tensor, an array, a list or a number), or texts, and of each utterance the same"
        )
    return array


def _type_of(id: str, name: str, value: object) -> str:
    kind = _kind_of(value)
    if kind not in (TEXT, TEXTS):
        as_array(id, name, value)
    return kind


def _kind_of(value: object) -> str:
    if is_tensor(value):
        return TORCH
    if isinstance(value, list):
        return TEXTS if value and all(isinstance(each, str) for each in value) else LIST
    if isinstance(value, str):
        return TEXT
    return NUMPY if isinstance(value, np.ndarray) else NUMBER


def _dtype_of(value: ArrayLike) -> str:
    return str(value.dtype).removeprefix("torch.")


_TEXT_OF: Mapping[str, Converter] = {
    TEXT: lambda array: array.tobytes().decode(),
    TEXTS: lambda array: json.loads(array.tobytes()),
}


def _converter(dtype: str, kind: str) -> Converter:
    """Return what makes a value of an array as it is stored, in the user's shape."""
    if kind == TORCH:
        import torch

        if dtype != "bfloat16":
            return torch.from_numpy
        return lambda array: torch.from_numpy(array).view(torch.bfloat16)
    if kind == NUMPY:
        return lambda array: from_storage(array, dtype)
    if kind == LIST:
        return lambda array: from_storage(array, dtype).tolist()
    return lambda array: from_storage(array, dtype).item()


def _other_form(id: str, form: str, value: object) -> FeatureError:
    return FeatureError(
        f"utterance {id!r}: the first result was {form}, this one is {type(value).__name__}"
    )

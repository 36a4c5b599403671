"""Annotations: values of an utterance that are no features; which kind a name has, and checks."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import cast

from featcache.errors import ConfigError, FeatureError
from featcache.format.files import within

# Annotations: values of an utterance that are no features. Their kinds, and checks of both.
#
# An annotation is text ("str"), a number ("int", of 64 bits, or "float"), "bool", or a list of
# numbers ("ints", "floats"); all utterances of a cache have one kind of it, or none of it. The
# columns that they become are in `value_columns`.

Value = str | int | float | bool | list[int] | list[float]
Values = Mapping[str, Value]  # of one utterance, by name; those that are missing are not there
NONE: Values = MappingProxyType({})
KINDS = ("str", "int", "float", "bool", "ints", "floats")
MOST_OF_ONE = 4 << 20  # of the annotations of one utterance, as `nbytes_of` counts them
_WIDER = {("int", "float"): "float", ("ints", "floats"): "floats"}
_NEEDED = (
    "text, a finite number (integers of 64 bits), a bool or a list of numbers is needed, and None "
    "where it is missing"
)


def check_annotations(
    id: str, annotations: Mapping[str, object], features: Container[str] = ()
) -> dict[str, Value]:
    """Return the annotations of an utterance as plain Python values, without those that are None.

    Raises `FeatureError`, which names the utterance and the annotation, for what is none.

    >>> check_annotations("utt-1", {"text": "hello", "tags": (1, 2.5), "speaker": None})
    {'text': 'hello', 'tags': [1.0, 2.5]}
    """
    if not isinstance(annotations, Mapping):
        raise FeatureError(
            f"the annotations of utterance {id!r} are a mapping of names to values, not "
            f"{annotations!r}"
        )
    found: dict[str, Value] = {}
    for name, given in annotations.items():
        check_name(name, features, f" of utterance {id!r}")
        if given is None:
            continue
        try:
            found[name] = _plain(given)
        except (TypeError, ValueError, OverflowError) as error:
            raise FeatureError(
                f"annotation {name!r} of utterance {id!r} is {_shown(given)}, of type "
                f"{type(given).__name__}: {_NEEDED}"
            ) from error
    if nbytes_of(found) > MOST_OF_ONE:
        raise FeatureError(
            f"the annotations of utterance {id!r} have more than {MOST_OF_ONE:,} bytes; store what "
            "is as large as that as a feature"
        )
    return found


def check_name(name: object, features: Container[str] = (), of: str = "") -> None:
    """Raise `FeatureError` for what cannot be the name of an annotation beside these features."""
    try:
        _check_text(name)
    except (TypeError, ValueError) as error:
        raise FeatureError(
            f"annotation {name!r}{of}: a name is text without '/' and NUL, and not '.' or '..'"
        ) from error
    if name == "id" or name in features:
        raise FeatureError(f"annotation {name!r}{of}: this is the name of a feature, or of the ids")


@lru_cache(1024)  # a million utterances have the same few names
def _check_text(name: object) -> None:
    within(name, 1).encode()


def kind_of(value: Value) -> str:
    """Return the kind of a value that `check_annotations` gave.

    >>> kind_of("a"), kind_of(True), kind_of([1, 2]), kind_of([])
    ('str', 'bool', 'ints', 'ints')
    """
    if isinstance(value, list):
        return "floats" if value and type(value[0]) is float else "ints"
    return type(value).__name__


def kind_of_plain(values: Sequence[object]) -> str | None:
    """Return the kind that plain values have in common, "" where all of them are missing.

    None where it takes more to tell, or to refuse them: `check_annotations`.

    >>> [kind_of_plain(values) for values in (["a", None], [1, 2], [1, 2.5], [None])]
    ['str', 'int', None, '']
    """
    there = [value for value in values if value is not None]
    types = {*map(type, there)}
    try:
        if types == {str}:
            "".join(cast(list[str], there)).encode()
            return "str"
        if types == {int}:
            _number(min(cast(list[int], there)))
            _number(max(cast(list[int], there)))
            return "int"
    except (UnicodeEncodeError, OverflowError):
        return None
    if types == {float}:
        return "float" if all(map(math.isfinite, cast(list[float], there))) else None
    return "bool" if types == {bool} else None if types else ""


def wider_kind(first: str | None, second: str | None) -> str | None:
    """Return the kind that holds the values of two, None if there is none: float holds int.

    >>> wider_kind("int", "float"), wider_kind(None, "str"), wider_kind("int", "str")
    ('float', 'str', None)
    """
    if first is None or second is None or first == second:
        return first or second
    return _WIDER.get((first, second)) or _WIDER.get((second, first))


def common_kind(name: str, kinds: Iterable[str], where: str) -> str | None:
    """Return the kind that holds the values of all, None if there are none.

    Raises `ConfigError` where an annotation is of two kinds, each in another cache or table.
    """
    common: str | None = None
    for kind in kinds:
        wider = wider_kind(common, kind)
        if wider is None:
            raise ConfigError(f"annotation {name!r} is {common} in a {where} and {kind} in another")
        common = wider
    return common


def with_kinds(id: str, values: Values, known: Mapping[str, str]) -> dict[str, str]:
    """Return the kinds of annotations once those of an utterance are among them.

    Raises `FeatureError` for a value of another kind than those before.
    """
    kinds = dict(known)
    for name, value in values.items():
        kind = wider_kind(known.get(name), kind_of(value))
        if kind is None:
            raise FeatureError(
                f"annotation {name!r} of utterance {id!r} is {_shown(value)}, {kind_of(value)}, "
                f"but {known[name]} with the utterances before; give all of them one kind"
            )
        kinds[name] = kind
    return kinds


def kinds_of(utterances: Iterable[tuple[str, Values]]) -> dict[str, str]:
    """Return the kind of each annotation of utterances, given as pairs of id and values."""
    kinds: dict[str, str] = {}
    for id, values in utterances:
        if values:
            kinds = with_kinds(id, values, kinds)
    return kinds


def nbytes_of(values: Values) -> int:
    """Return about how many bytes values take as JSON, and never fewer."""
    return sum(
        len(name) * 4 + (6 * len(each) if isinstance(each, str) else _list_size(each))
        for name, each in values.items()
    )


def most_bytes(name: object, values: Sequence[object]) -> int:
    """Return a bound of `nbytes_of` one of these plain values of an annotation."""
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    return 4 * len(str(name)) + max(26, 6 * longest)


def _list_size(value: object) -> int:
    return 26 * (len(value) + 1) if isinstance(value, list) else 26


def _plain(value: object) -> Value:
    """Return a value as plain Python has it; raises an error for what is no annotation."""
    if isinstance(value, str):
        value.encode()
        return str(value)
    if isinstance(value, bool | int | float):
        return _number(value)
    if not isinstance(value, list | tuple) and hasattr(value, "tolist"):
        inner = value.tolist()  # of NumPy and torch: scalars, and arrays
        if not isinstance(inner, bool | int | float | str | list):
            raise TypeError
        return _plain(inner)
    if not isinstance(value, list | tuple):
        raise TypeError
    return _numbers(value)


def _numbers(value: Sequence[object]) -> list[int] | list[float]:
    if not {*map(type, value)} <= {int, float}:
        if any(isinstance(each, list | tuple) for each in value):  # however deep
            raise TypeError
        value = [_plain(each) for each in value]
        if not {*map(type, value)} <= {int, float}:
            raise TypeError
    numbers = cast(list[float], value)
    if any(type(each) is float for each in numbers):
        numbers = [float(each) for each in numbers]
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    elif numbers:
        _number(min(numbers))
        _number(max(numbers))
    return list(numbers)


def _number(value: float) -> bool | int | float:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise OverflowError
        return int(value)
    if not math.isfinite(value):
        raise ValueError
    return float(value)


def _shown(value: object) -> str:
    try:
        text = repr(value[:60] if isinstance(value, str | list | tuple) else value)
    except RecursionError:
        text = "deeply nested"
    return text if len(text) <= 60 else f"{text[:60]}..."

"""Fingerprints: what a cache was made from, and the differences of two."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from featcache.declaration import FeatureStorageConfig
from featcache.errors import (
    ConfigError,
)
from featcache.format.files import (
    digest,
)

ABSENT = object()
# key of a fingerprint: version of the rules by which code and values are described in it
RULES = "fingerprint_rules"
_NOT_JSON = "the fingerprint must be made of JSON values"


def cache_fingerprint(
    features: Mapping[str, FeatureStorageConfig], fingerprint: Mapping[str, object] | None
) -> dict[str, object]:
    """Join the declared features and what the user says into the fingerprint of a cache."""
    if not isinstance(fingerprint or {}, Mapping):
        raise ConfigError(
            f"the fingerprint is a dict of what the features are made from, not {fingerprint!r}"
        )
    if fingerprint and "features" in fingerprint:
        raise ConfigError(
            "the fingerprint cannot have a key 'features', the name of the declarations; rename it"
        )
    declared = {name: feature.to_json() for name, feature in features.items()}
    return canonical({**(fingerprint or {}), "features": declared})


def canonical(fingerprint: Mapping[str, object]) -> dict[str, object]:
    """Return a fingerprint as it reads back from JSON: numbers as keys become text, tuples lists.

    Raises `ConfigError`, naming the key, for what does not fit JSON.
    """
    try:
        jsonable = _jsonable(fingerprint, "")
        text = json.dumps(jsonable, sort_keys=True, allow_nan=False, ensure_ascii=False)
    except RecursionError:
        raise ConfigError(f"{_NOT_JSON}, not nested without end") from None
    except ConfigError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(f"{_NOT_JSON}: {error}") from error
    return cast(dict[str, object], json.loads(text))


def _jsonable(value: object, key: str) -> object:
    """Return `value`, the one at `key` of a fingerprint, with text as the keys of all dicts."""
    if isinstance(value, Mapping):
        items: dict[str, object] = {}
        for name, inner in value.items():
            text = _text_key(name, key)
            if text in items:
                twice = f"{key or 'it'} has the key {text!r} twice, as text and as a number"
                raise ConfigError(f"{_NOT_JSON}: {twice}")
            items[text] = _jsonable(inner, f"{key}.{text}" if key else text)
        return items
    if isinstance(value, list | tuple):
        return [_jsonable(inner, f"{key}[{number}]") for number, inner in enumerate(value)]
    if isinstance(value, str):
        return _unicode(value, key)
    if isinstance(value, int | None) or (isinstance(value, float) and math.isfinite(value)):
        return value
    what = repr(value) if isinstance(value, float) else f"of type {type(value).__name__}"
    raise ConfigError(
        f"{_NOT_JSON}: {key} is {what}; give what identifies it, as text, finite numbers, true, "
        "false, null, or lists and dicts of them"
    )


def _text_key(name: object, key: str) -> str:
    if isinstance(name, str):
        return _unicode(name, key)
    if name is None or isinstance(name, bool | int | float):
        return json.dumps(name)  # as JSON writes them
    raise ConfigError(f"{_NOT_JSON}: {key or 'it'} has the key {name!r}; keys are text")


def _unicode(text: str, key: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = key or "a key"
        raise ConfigError(f"{_NOT_JSON}: {where} is {text!r}, not valid Unicode") from error
    return text


def fingerprint_digest(fingerprint: Mapping[str, object]) -> str:
    """Return the xxh3-64 of a fingerprint in its canonical form.

    >>> fingerprint_digest({"a": 1, "b": 2}) == fingerprint_digest({"b": 2, "a": 1})
    True
    """
    return digest_of_canonical(canonical(fingerprint))


def digest_of_canonical(fingerprint: Mapping[str, object]) -> str:
    """Return the digest of a fingerprint that has been in canonical form, as that of a manifest."""
    text = json.dumps(fingerprint, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return digest(text.encode("utf-8", "surrogatepass"))  # a damaged manifest may hold any


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two fingerprints differ; `str` of it is a line of an error.

    Attributes:
        path: the keys that lead to it, the outermost first.
        was: the value there; `ABSENT` if there was none.
        now: the same, of the other one.
    """

    path: tuple[str, ...]
    was: object
    now: object

    @property
    def field(self) -> str:
        """The path as one text, which keys with dots make ambiguous."""
        return ".".join(self.path)

    def __str__(self) -> str:
        return f"{self.field}: was {_shortened(_text(self.was))}, now {_shortened(_text(self.now))}"


def are_by_other_rules(changed: Sequence[Difference]) -> bool:
    """Whether two fingerprints that differ so describe code and values by different rules.

    Then only computing again tells whether the features are others, too.
    """
    return any(each.path == (RULES,) for each in changed)


def are_rules_alone(changed: Sequence[Difference]) -> bool:
    """Whether two fingerprints differ in nothing but the version of the rules, if at all."""
    return all(each.path == (RULES,) for each in changed)


def differences(old: object, new: object, path: tuple[str, ...] = ()) -> list[Difference]:
    """Return field by field in what `new` differs from `old`; `path` leads to both.

    >>> [str(each) for each in differences({"model": {"layer": 9}}, {"model": {"layer": 12}})]
    ['model.layer: was 9, now 12']
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            each
            for key in sorted({*old, *new})
            for each in differences(old.get(key, ABSENT), new.get(key, ABSENT), (*path, str(key)))
        ]
    # as text, like the digest: 1 and 1.0 and true are equal in Python, also within lists
    return [Difference(path, old, new)] if _text(old) != _text(new) else []


def _text(value: object) -> str:
    return "(absent)" if value is ABSENT else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."

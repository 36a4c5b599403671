"""What a cache was made from, and how to say in what two of these differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from featcache.errors import ConfigError
from featcache.feature import FeatureStorageConfig
from featcache.store.files import digest

ABSENT = object()


def cache_fingerprint(
    features: Mapping[str, FeatureStorageConfig], fingerprint: Mapping[str, object] | None
) -> dict[str, object]:
    """Join the declared features and what the user says into the fingerprint of a cache."""
    if not isinstance(fingerprint or {}, Mapping):
        raise ConfigError(f"the fingerprint is a dict of what the features are made from, not {fingerprint!r}")
    if fingerprint and "features" in fingerprint:
        raise ConfigError("the fingerprint cannot have a key 'features': the declarations have that name; rename it")
    declared = {name: feature.to_json() for name, feature in features.items()}
    return canonical({**(fingerprint or {}), "features": declared})


def canonical(fingerprint: Mapping[str, object]) -> dict[str, object]:
    """Return a fingerprint as it reads back from JSON; raises `ConfigError` if it does not fit JSON."""
    try:
        text = json.dumps(fingerprint, sort_keys=True, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the fingerprint must be made of JSON values: {error}") from error
    return cast(dict[str, object], json.loads(text))


def fingerprint_digest(fingerprint: Mapping[str, object]) -> str:
    """Return the xxh3-64 of a fingerprint in its canonical form.

    >>> fingerprint_digest({"a": 1, "b": 2}) == fingerprint_digest({"b": 2, "a": 1})
    True
    """
    text = json.dumps(canonical(fingerprint), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return digest(text.encode())


def differences(old: object, new: object, field: str = "") -> list[str]:
    """Say field by field in what `new` differs from `old`.

    >>> differences({"model": {"layer": 9}}, {"model": {"layer": 12}})
    ['model.layer: was 9, now 12']
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines = []
        for key in sorted({*old, *new}):
            lines += differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{field}.{key}" if field else str(key))
        return lines
    was, now = _text(old), _text(new)
    # as text, like the digest: 1 and 1.0 and true are equal in Python, also within lists
    return [f"{field}: was {_shortened(was)}, now {_shortened(now)}"] if was != now else []


def _text(value: object) -> str:
    return "(absent)" if value is ABSENT else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."

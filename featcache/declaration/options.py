"""Options of a declaration: one dict, each option owned by the storage format or by the codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from featcache.errors import ConfigError, UnknownNameError, nearest
from featcache.registry import RAW, get_backend, get_codec

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


def without_defaults(backend: str, codec: str, options: Mapping[str, object]) -> Options:
    """Return the options, sorted, that are not what their owner takes by default."""
    fields = _fields(get_backend(backend)) | _fields_of_codec(codec)
    return {
        name: options[name] for name in sorted(options) if options[name] != _default(fields[name])
    }


def _values(
    fields: Mapping[str, dataclasses.Field[Any]], options: Mapping[str, object], owner: str
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


def _fields_of_codec(codec: str) -> dict[str, dataclasses.Field[Any]]:
    return {} if codec == RAW else _fields(get_codec(codec))


def _fields(owner: type) -> dict[str, dataclasses.Field[Any]]:
    """Options are the fields of a frozen dataclass."""
    return {field.name: field for field in dataclasses.fields(owner) if field.init}


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _whole(field: dataclasses.Field[Any], value: object) -> object:
    declared_int = field.type in (int, "int")
    return int(value) if declared_int and isinstance(value, float) and value.is_integer() else value

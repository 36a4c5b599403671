"""The check that a worker computes with the code and constants that the driver has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from featcache.errors import ConfigError
from featcache.format.fingerprint import canonical, differences
from featcache.staleness.provenance import Provenance

MOST_SHOWN = 5
Section = Mapping[str, Any]


class DriverCode(NamedTuple):
    """Code and constants of the driver; hparams, attributes and modules are sent as they are."""

    source: Section
    constants: Section
    compiled: Section  # digests of byte code: of functions that come without their source


def code_of_driver(provenance: Provenance) -> DriverCode:
    """Return what workers are to find again."""
    left_out = dict.fromkeys(("modules", "hparams", "attributes", "given", "torch"))
    shown = canonical(provenance.sections(left_out))
    constants: Any = shown.get("constants", {})
    return DriverCode(provenance.source, constants, provenance.compiled)


def refuse_other_code(driver: DriverCode, here: Provenance) -> None:
    """Raise `ConfigError`, by name, if this worker computes with another code than the driver.

    Workers import the files of the user anew: what the driver has changed there since, a global
    that `main` sets or a method that it replaces, does not reach them.
    """
    found = code_of_driver(here)
    if here.without_source:  # of a notebook, say: what the code names is not known as well
        both = [*driver.compiled.keys() & found.compiled.keys()]
        unlike = differences(_some(driver.compiled, both), _some(found.compiled, both))
        for label in driver.constants.keys() & found.constants.keys():
            was, now = driver.constants[label], found.constants[label]
            both = [*was.keys() & now.keys()]
            unlike += differences(_some(was, both), _some(now, both), (label,))
    else:
        unlike = differences(driver.constants, found.constants)
        unlike += differences(driver.source, found.source)
    if unlike:
        rest = f" and {len(unlike) - MOST_SHOWN} more" if len(unlike) > MOST_SHOWN else ""
        raise ConfigError(
            "this worker would compute with something else than the driver (was: the driver's, "
            f"now: the worker's): {'; '.join(map(str, unlike[:MOST_SHOWN]))}{rest}. Workers import "
            "files anew: set such things where they are defined, or make them hparams, attributes "
            "or arguments"
        )


def _some(values: Section, names: list[str]) -> dict[str, object]:
    return {name: values[name] for name in sorted(names)}

"""Whether a cache is stale: the fingerprint that a reader demands, compared with that of the cache.

Also when and by what a cache was made, as far as that was recorded, for the words of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from featcache.errors import ConfigError, CorruptCacheError, StaleCacheError
from featcache.format import (
    ABSENT,
    ADOPTED,
    NAME,
    Difference,
    Manifest,
    are_by_other_rules,
    are_rules_alone,
    canonical,
    differences,
    digest_of_canonical,
    read_manifest,
)
from featcache.reading.generation import Generation

# Origin of a cache: when and by what it was made, as far as that was recorded.

ROLE = "made-from"  # of the file in a cache that holds its witnesses, JSON
WHEN, COMMAND = "when", "command"  # keys of the witnesses: a time as ISO 8601 has it; a list
_UNITS = {"day": 86400, "hour": 3600, "minute": 60}


def witnesses(opened: Generation) -> dict[str, object]:
    """Return what was recorded of the run that made a cache; empty where nothing was.

    Raises `CorruptCacheError` for a file that is not what was written.
    """
    data = opened.file(ROLE)
    if data is None:
        return {}
    try:
        return {**json.loads(data)}
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptCacheError(
            f"cache {str(opened.path)!r} is damaged: its witnesses ({ROLE!r}) are no JSON object; "
            "put a good copy of the cache back, or make it anew (overwrite=True)"
        ) from error


def made_at(opened: Generation, recorded: Mapping[str, object]) -> datetime:
    """Return when a cache was made; when it was last published where that was not recorded."""
    try:
        return datetime.fromisoformat(cast(str, recorded.get(WHEN))).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return datetime.fromtimestamp((opened.path / NAME).stat().st_mtime, UTC)


def origin(opened: Generation) -> str:
    """Return when and by what a cache was made: a part of a message, made as well as can be."""
    recorded: dict[str, object] = {}
    with contextlib.suppress(OSError):
        recorded = witnesses(opened)
    try:
        when = ago(time.time() - made_at(opened, recorded).timestamp())
    except (OSError, ValueError, OverflowError):
        when = "at a time that cannot be read"
    script = made_by(opened.manifest, recorded)
    return f"made {when}" + (f" by {script}" if script and script.isprintable() else "")


def made_by(manifest: Manifest, recorded: Mapping[str, object]) -> str | None:
    """Return the script that made a cache; None where none was recorded."""
    words = _words(recorded.get(COMMAND))
    name = next((word for word in words if word.endswith(".py")), "".join(words[:1]))
    return Path(name).name or manifest.by or None


def _words(command: object) -> list[str]:
    words = command.split() if isinstance(command, str) else command
    return [str(word) for word in words] if isinstance(words, list) else []


def ago(seconds: float) -> str:
    """Return how long ago something was, in whole units.

    >>> ago(3 * 86400 + 5), ago(60), ago(1)
    ('3 days ago', '1 minute ago', 'less than a minute ago')
    """
    for unit, length in _UNITS.items():
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "less than a minute ago"


# Expectations: the fingerprint that a reader demands of a cache, compared when it is opened.
#
# A cache that nothing compared in this process is told of once.

_log = logging.getLogger("featcache")
# caches that were compared in this process, and those that were told of: digest of the fingerprint
_compared: dict[Path, str] = {}
_told: dict[Path, str] = {}


@dataclass(frozen=True)
class Expectation:
    """The fingerprint that a reader demands.

    Args:
        keys: each is compared with that of the cache; of "features" those that it names.
        same: digest of the whole fingerprint of a cache that was open before.
        seen: digest of what was there before anything was opened; what this process compared since
            may take its place.
    """

    keys: Mapping[str, object] = field(default_factory=dict)
    same: str | None = None
    seen: str | None = None

    @classmethod
    def of(cls, expect: Mapping[str, object] | None) -> Expectation:
        """Return what a user demands; raises `ConfigError` for what is no fingerprint."""
        if not isinstance(expect, Mapping | None):
            raise ConfigError(
                "expect is a fingerprint, a dict such as brain.expectation() returns, not "
                f"{expect!r:.100}"
            )
        return cls(canonical(expect) if expect else {})

    @classmethod
    def of_opened(cls, opened: Generation) -> Expectation:
        """Demand the fingerprint of a cache that is open."""
        return cls(same=digest_of_canonical(opened.manifest.fingerprint))

    def with_what_is_there(self, path: Path) -> Expectation:
        """Demand also what is there now, if anything is."""
        with contextlib.suppress(OSError):  # told when the cache is opened
            return replace(self, seen=digest_of_canonical(read_manifest(path).fingerprint))
        return self

    def as_of_now(self, path: Path) -> Expectation:
        """Return what a copy, perhaps in another process, is to demand."""
        return replace(self, seen=_compared.get(path, self.seen)) if self.same is None else self

    def check(self, opened: Generation) -> None:
        """Raise `StaleCacheError`, with the differences, for a cache made from something else."""
        path, made_from = opened.path, opened.manifest.fingerprint
        changed = [each for key in self.keys for each in self._differences(made_from, key)]
        if changed and not are_rules_alone(changed):
            lines = "".join(f"\n  {line}" for line in changed)
            raise StaleCacheError(
                f"cache {str(path)!r}, {origin(opened)}, was made from something else than is "
                f"expected:{lines}\n"
                f"{_of_rules(changed)}compute it again (cache_features or extract with "
                "overwrite=True), or expect what it was made from: "
                "featcache.inspect.made_from(path) tells"
            )
        found = digest_of_canonical(made_from)
        changed_since_seen = self.seen not in (None, found) and _compared.get(path) != found
        if self.same not in (None, found) or changed_since_seen:
            raise StaleCacheError(
                f"cache {str(path)!r} was made anew from something else since it was opened or its "
                f"reader was made; the one there now was {origin(opened)}. Open it again to read "
                "that"
            )
        if self.keys.keys() - {"features"}:
            _compared[path] = found
        elif self.same is None:
            _tell(opened, found)

    def _differences(self, made_from: Mapping[str, object], key: str) -> list[Difference]:
        expected, found = self.keys[key], made_from.get(key, ABSENT)
        if key == "features" and isinstance(expected, Mapping) and isinstance(found, Mapping):
            found = {name: found[name] for name in expected if name in found}
        return differences(found, expected, (key,))


def _of_rules(changed: Sequence[Difference]) -> str:
    if not are_by_other_rules(changed):
        return ""
    return (
        "another version of featcache described the same code by other rules, which may be all: "
        "cache_features, extract and through compute utterances again, and keep the cache if these "
        "are the same; else "
    )


def note_compared(path: Path, manifest: Manifest) -> None:
    """Note that the fingerprint of a cache was compared with what its features are made from."""
    _compared[path.absolute()] = digest_of_canonical(manifest.fingerprint)


def _tell(opened: Generation, found: str) -> None:
    """Log once that nothing has compared a cache, if its fingerprint holds anything to compare.

    It is a warning where code that it was made by has changed since, and else for whoever reads
    all that is logged: nothing speaks against the cache.
    """
    path = opened.path
    if not opened.manifest.fingerprint.keys() - {"features", ADOPTED}:
        return
    if found not in (_compared.get(path), _told.get(path)):
        _told[path] = found
        files = changed_files(opened)
        doubt = f"{' and '.join(files)} {'has' if len(files) == 1 else 'have'} changed since, "
        _log.log(
            logging.WARNING if files else logging.INFO,
            "cache %r: %s, %snot checked: give expect= when you open it, brain.expectation() or "
            "the fingerprint that it should have",
            str(path),
            origin(opened),
            doubt if files else "",
        )


_CODE = ("functions", "sources", "definitions")  # keys of witnesses: names "file.py:function"
_LATER_S = 1.0  # a file written within the same second is that which ran


def changed_files(opened: Generation) -> list[str]:
    """Return names of files of code that a cache was made by, and that were written since.

    As far as this process can know: the files that it has loaded, and those beside its script.
    """
    recorded: dict[str, object] = {}
    with contextlib.suppress(OSError):  # told by who reads it
        recorded = witnesses(opened)
    parts = (recorded.get(key) for key in _CODE)
    keys = {str(key) for part in parts if isinstance(part, Mapping) for key in part}
    named = {name for key in keys if (name := key.partition(":")[0]).endswith(".py")}
    if not named:
        return []
    # not by attribute: modules that are loaded late would be loaded by it
    held = (getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()])
    loaded = [Path(place) for place in held if isinstance(place, str)]
    places = {place for place in loaded if place.name in named and not _is_installed(place)}
    places |= {Path(sys.path[0] if sys.path else "", name) for name in named}
    changed: set[str] = set()
    with contextlib.suppress(OSError, ValueError, OverflowError):
        made = made_at(opened, recorded).timestamp()
        for place in places:
            with contextlib.suppress(OSError):
                if place.stat().st_mtime > made + _LATER_S:
                    changed.add(place.name)
    return sorted(changed)


def _is_installed(place: Path) -> bool:
    """Whether a file is of Python or of a library: one may bear the name of a user's."""
    known = {"site-packages", "dist-packages"}
    return not known.isdisjoint(place.parts) or place.is_relative_to(
        Path(contextlib.__file__).parent
    )

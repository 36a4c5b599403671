"""Changes of code and settings that compute the same bits: a user may accept them for a cache."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping, Sequence

from featcache.errors import CacheError, StaleCacheError
from featcache.extraction.destination import Destination
from featcache.extraction.record import Record
from featcache.staleness.comparison import Comparison
from featcache.store.format.fingerprint import cache_fingerprint, differences
from featcache.store.format.manifest import read_manifest
from featcache.store.writing.accept import accept, says_when

# sections of a fingerprint that are code and settings; weights, declarations but for the times of
# frames, and what the user names by himself cannot be accepted
_SECTIONS = ("source", "constants", "hparams", "attributes", "given", "torch", "modules")
_CODE = ("source", "constants")
OFFER = "if the change cannot matter, accept=True keeps the cache"
_log = logging.getLogger("featcache")


def may_be_accepted(changed: Sequence[str], comparison: Comparison | None) -> bool:
    """Tell whether differences are ones of code and settings, and the probe computes the same."""
    compared = comparison is not None and len(comparison.ids) > 0 and comparison.same_bits
    return compared and are_code_or_settings(changed)


def are_code_or_settings(changed: Sequence[str]) -> bool:
    """Tell whether differences are ones of code and settings, and none of weights.

    >>> are_code_or_settings(["source.f: was 1, now 2", "torch: was (absent), now {}"])
    True
    >>> are_code_or_settings(["modules.hubert.weights: was 1, now 2"])
    False
    """
    fields = [line.partition(": was ")[0] for line in changed]
    return all(
        field.partition(".")[0] in _SECTIONS or says_when(line)
        for field, line in zip(fields, changed, strict=True)
    ) and not any(field.endswith(".weights") for field in fields)


def is_more_code(changed: Sequence[str]) -> bool:
    """Tell whether differences are ones of code, which may change where it computes one more thing.

    What it names besides may be new, but no setting that was there is another one.

    >>> is_more_code(["source.f: was 1, now 2", "hparams.floor: was (absent), now 0"])
    True
    >>> is_more_code(["hparams.layer: was 9, now 10"])
    False
    """
    return all(
        line.partition(".")[0] in _CODE or ": was (absent), now " in line or says_when(line)
        for line in changed
    )


def changed_fields(to: Destination, fingerprint: Mapping[str, object]) -> list[str]:
    """Return in what a fingerprint differs from that of a cache; nothing if there is none."""
    try:
        there = read_manifest(to.path).fingerprint
    except CacheError:  # the writer begins one, or says what is wrong
        return []
    return differences(there, cache_fingerprint(to.features, fingerprint))


def accept_changes(
    to: Destination,
    record: Record,
    fingerprint: Mapping[str, object],
    comparison: Comparison | None,
) -> None:
    """Take a fingerprint for that of a cache, and record since when and what has changed.

    Raises `StaleCacheError` if more than code and settings has changed, or the probe does not
    compute the same bits.
    """
    changed = changed_fields(to, fingerprint)
    if not changed:
        return
    if not may_be_accepted(changed, comparison):
        listed = "".join(f"\n  {line}" for line in changed)
        raise StaleCacheError(
            f"cache {str(to.path)!r} was made from something else than there is now, which cannot "
            f"be accepted:{listed}\naccept=True is for changes of code and settings alone, where "
            "utterances that are computed again are the same to the bit; overwrite it "
            "(overwrite=True), or give another directory"
        )
    complete = read_manifest(to.path).complete
    accept(to.path, to.features, fingerprint)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    writer = to.writer(fingerprint)
    try:
        if to.ids is not None:
            writer.expect(to.ids)
        record.keep(writer, {"when": now, "changes": changed})
    finally:
        writer.close(complete=complete)
    _log.warning("cache %r: accepted %s", str(to.path), "; ".join(changed))

"""The probe that a cache keeps: one for each build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from featcache.errors import CacheError
from featcache.extraction.destination import Destination
from featcache.staleness.probe import Probe
from featcache.store.format.committed import committed
from featcache.store.format.fingerprint import cache_fingerprint, fingerprint_digest
from featcache.store.format.kept_files import read_building_file
from featcache.store.format.manifest import read_manifest
from featcache.store.reading.generation import Generation
from featcache.store.writing.cache_writer import CacheWriter

ROLE = "probe"


def kept_probe(
    to: Destination,
    fingerprint: Mapping[str, object],
    seed: int,
    *,
    resume: bool,
    overwrite: bool,
) -> Probe | None:
    """Return the probe of what a run will go on with; None if it begins anew, or none was kept."""
    try:
        manifest = read_manifest(to.path)
    except CacheError:  # the writer begins a cache, or says what is wrong
        return None
    if overwrite:
        given = (fingerprint, {"seed": seed, **fingerprint})
        same = {fingerprint_digest(cache_fingerprint(to.features, each)) for each in given}
        left = manifest.building > manifest.build and manifest.building_fingerprint in same
        goes_on = left and any(True for _ in committed(to.path))
    else:
        goes_on = (resume or manifest.complete) and (
            manifest.rows > 0 or any(True for _ in committed(to.path))
        )
    return read_probe(to.path, building=overwrite) if goes_on else None


def keep_probe(writer: CacheWriter, probe: Probe) -> None:
    """Keep the probe of the build that is being written, in place of an earlier one."""
    writer.keep_file(ROLE, probe.to_bytes())


def read_probe(cache: Path, *, building: bool) -> Probe | None:
    """Return the probe of the cache that readers see, or of the build that is being written."""
    manifest = read_manifest(cache)
    if building or manifest.building == manifest.build:
        data = read_building_file(cache, ROLE)
    else:
        data = Generation(cache).file(ROLE)
    return None if data is None else Probe.from_bytes(data)

"""Manifests of several feature sets, which readers see all at once or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from featcache.store.format.feature_sets import name_following
from featcache.store.format.files import make_directory
from featcache.store.format.joint_edit import NEXT, settle
from featcache.store.format.manifest import MANIFESTS, NAME, Manifest, read_manifest, write_manifest
from featcache.store.writing.new_sets import locked_sets
from featcache.store.writing.superseded import remove_superseded


def write_together(cache: Path, after: Mapping[Path, Manifest]) -> None:
    """Let readers see other manifests of a cache's feature sets, or of a plain cache; durably.

    The caller holds the locks of all of them. Those that are superseded are removed.

    Args:
        cache: the outer directory.
        after: the manifests by directory; what they name is durable.
    """
    file = NEXT if len(after) > 1 else NAME
    pairs: dict[str, tuple[str, str]] = {}
    for directory, manifest in after.items():
        settle(directory)
        before = read_manifest(directory).write_id
        make_directory(directory / MANIFESTS)
        written = write_manifest(directory, manifest, keep=True, file=file)
        pairs[directory.name] = (before, written.write_id)
    if len(after) > 1:
        with locked_sets(cache):
            name_following(cache, pairs)
        for directory in after:
            settle(directory)
    for directory in after:
        remove_superseded(directory, read_manifest(directory))

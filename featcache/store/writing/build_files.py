"""`BuildFiles`: the files of roles that are kept with a build while it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from featcache.store.format.files import create_durably, digest
from featcache.store.format.kept_files import new_file, of_role, role_of
from featcache.store.format.manifest import Manifest, read_manifest, write_manifest
from featcache.store.writing.superseded import remove_unnamed


class BuildFiles:
    """Keeps files for the holder of a cache's lock; the manifest on disk always names them.

    Args:
        cache: the cache directory, in which a manifest lies.

    Attributes:
        waiting: True while files wait for the build to be published.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._kept: set[str] = set()  # by this writer, since the last publish
        self.waiting = bool(read_manifest(cache).building_files)

    def keep(self, role: str, data: bytes) -> None:
        """Keep a file of a role, unless it is there as it is."""
        before = read_manifest(self._cache)
        published = before.files if before.building == before.build else {}
        now = of_role(before.building_files, role) or of_role(published, role)
        if digest(data) in now.values():
            return
        name = new_file(role)
        create_durably(self._cache / name, data)
        self._kept.add(name)
        files = before.building_files.items()
        others = {path: each for path, each in files if role_of(path) != role}
        self._name(before, others | {name: digest(data)})

    def drop(self) -> None:
        """Remove those that were kept since the last publish."""
        if self._kept:
            before = read_manifest(self._cache)
            files = before.building_files.items()
            self._name(before, {path: each for path, each in files if path not in self._kept})

    def published(self) -> None:
        """Take note that all are published."""
        self._kept.clear()
        self.waiting = False

    def _name(self, before: Manifest, files: Mapping[str, str]) -> None:
        after = write_manifest(self._cache, replace(before, building_files=files))
        self.waiting = bool(files)
        remove_unnamed(self._cache, after)

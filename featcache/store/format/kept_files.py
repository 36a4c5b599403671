"""Files beside the features that belong to a build: its probe, and what it was made from.

A file is named `<role>-<8 random hexadecimal digits>` and the extension of its role; the manifest
names it, with its digest.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from featcache.errors import CorruptCacheError, UnknownNameError, nearest
from featcache.store.format.files import digest, open_there, remedy
from featcache.store.format.manifest import read_manifest

ROLES = {"probe": "bin", "made-from": "json"}  # and the extension of each
MOST_BYTES = 64 << 20
_NAMES = "|".join(rf"{role}-[0-9a-f]{{8}}\.{extension}" for role, extension in ROLES.items())
KEPT_FILE = re.compile(_NAMES)


def role_of(path: str) -> str | None:
    """Return the role of a file; None for one of a later version."""
    return path.rpartition("-")[0] if KEPT_FILE.fullmatch(path) else None


def check_role(role: str) -> None:
    """Raise `UnknownNameError` for what is no role."""
    if role not in ROLES:
        raise UnknownNameError(f"no role of a file is {role!r}; {nearest(role, ROLES)}")


def new_file(role: str) -> str:
    """Return a name for a file of a role, which no other has."""
    return f"{role}-{secrets.token_hex(4)}.{ROLES[role]}"


def of_role(files: Mapping[str, str], role: str) -> dict[str, str]:
    """Return those of some files that have a role, which is one at most."""
    return {path: each for path, each in files.items() if role_of(path) == role}


def read_kept(cache: Path, files: Mapping[str, str], role: str) -> bytes | None:
    """Read the file of a role; None if there is none.

    Raises `CorruptCacheError` if it is missing or is not what was written.
    """
    check_role(role)
    for path, expected in of_role(files, role).items():
        with open(open_there(cache, path), "rb") as file:  # noqa: PTH123 (a descriptor)
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES or digest(data) != expected:
            raise CorruptCacheError(
                f"{str(cache / path)!r} is damaged: its checksum does not match; "
                f"{remedy(cache, path)}"
            )
        return data
    return None


def read_building_file(cache: Path, role: str) -> bytes | None:
    """Read the file of a role that was kept for the build that is being written.

    None if there is none. Raises `CorruptCacheError` as `Generation.file` does.
    """
    manifest = read_manifest(cache)
    published = manifest.files if manifest.building == manifest.build else {}
    return read_kept(cache, of_role(manifest.building_files, role) or published, role)

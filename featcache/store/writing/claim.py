"""The directory of a cache: made, or seen to be a cache or empty, before a writer begins."""

from __future__ import annotations

import re
from pathlib import Path

from featcache.errors import NotACacheError
from featcache.store.format.files import check_own_directory, make_directory
from featcache.store.format.kept_files import KEPT_FILE
from featcache.store.format.manifest import INDEX, MANIFESTS, NAME, PARTS

OTHERS = "work-"  # names in a cache directory that begin so are those of whoever works there


def claim_directory(path: Path) -> None:
    """Make the directory, or see that it is a cache or empty."""
    if path.exists() and not path.is_dir():
        raise NotACacheError(f"{str(path)!r} is a file; a cache is a directory")
    try:
        make_directory(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotACacheError(f"{str(path)!r} cannot be made a directory: {error}") from error
    for directory in (PARTS, MANIFESTS):
        check_own_directory(path / directory)
    locks = r"writer\.(lock|lock\.soft|json)"
    files = rf"{NAME}(\.[0-9a-f]{{8}}\.tmp)?|{INDEX.pattern}|{PARTS}|{MANIFESTS}|{locks}"
    ours = re.compile(rf"{files}|{KEPT_FILE.pattern}|{OTHERS}.*")
    # once: another writer may be making the cache
    names = sorted(entry.name for entry in path.iterdir())
    foreign = [name for name in names if not ours.fullmatch(name)]
    if NAME not in names and foreign:
        raise NotACacheError(
            f"{str(path)!r} holds other files ({foreign[0]!r}); give a new or empty directory, or, "
            "if these are features, a cache that reads them where they lie: "
            f"featcache.adopt({str(path)!r}, {str(path) + '-cache'!r})"
        )

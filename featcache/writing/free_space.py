"""Room on the disk: for what is coming, and for sealing and publishing the cache after it."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from featcache.errors import StorageFullError
from featcache.format.files import FREE_SPACE, explained

MARGIN_BYTES = 1 << 20
# an utterance in an index, with its stamps, and each of its arrays in index and container
ROW_BYTES, FEATURE_BYTES = 144, 128
# asking takes microseconds on a local disk, milliseconds on a busy network file system
LOOK_INTERVAL_S = 1.0
WIDE = 16  # while this many times of what is coming and the margin are free, the interval holds
ESTIMATE_AFTER = 100  # utterances that tell what those to come will take


def margin(features: int, rows: int, spare: int = MARGIN_BYTES) -> int:
    """Return the bytes with which indexes of so many rows can be written, and some to spare."""
    return spare + (ROW_BYTES + FEATURE_BYTES * features) * rows


def check_free(cache: Path, needed: int, why: str) -> None:
    """Raise `StorageFullError`, which says why, unless so many bytes are free on the disk."""
    free = shutil.disk_usage(cache).free
    if needed > free:
        raise StorageFullError(f"{free:,} bytes are free on the disk of {str(cache)!r}; {why}")


class FreeSpace:
    """Refuses what the disk has no room for, before it is full.

    Args:
        path: the cache directory.
        features: how many there are.
        stored: utterances that are in the cache already.
    """

    def __init__(self, path: Path, features: int, stored: int) -> None:
        self._path = path
        self._features = features
        self._stored = stored
        self._taken = self._bytes = 0
        self._expected: int | None = None
        self._free = self._looked_at = 0.0

    def expect(self, utterances: int) -> None:
        """Set how many utterances are still to come."""
        self._expected = self._taken + utterances

    def take(self, nbytes: int, utterances: int = 1) -> None:
        """Count utterances that were taken; warns, once, if those to come will not fit."""
        self._taken += utterances
        self._bytes += nbytes
        if self._expected is not None and self._taken >= ESTIMATE_AFTER:
            needed = self._bytes * (self._expected - self._taken) // self._taken
            if needed > self._free:
                warnings.warn(
                    f"{str(self._path)!r} will need about {needed:,} more bytes, only "
                    f"{int(self._free):,} are free on its disk (a codec may make do with less)",
                    stacklevel=4,
                )
                self._expected = None

    def check(self, coming: int, kept: Callable[[], str]) -> None:
        """Raise `StorageFullError` unless `coming` bytes fit and the margin remains."""
        # for the columns of this writer's parts, and the next index
        needed = coming + margin(self._features, self._stored + 2 * self._taken)
        now = time.monotonic()
        if now - self._looked_at >= LOOK_INTERVAL_S or self._free < WIDE * needed:
            with explained(self._path, kept):
                self._free = shutil.disk_usage(self._path).free
            self._looked_at = now
        if needed > self._free:
            raise StorageFullError(
                f"{int(self._free):,} bytes are free on the disk of {str(self._path)!r}, too few "
                f"for the {coming:,} that are coming and the {needed - coming:,} to publish them; "
                f"{kept()}: {FREE_SPACE}"
            )

"""Shapes that look like mistakes: a batch axis left in, and utterances without frames."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

from featcache.errors import FeatureError
from featcache.feature import FeatureStorageConfig

_log = logging.getLogger("featcache")


class FirstShapes:
    """Refuses batches of one at a writer's first utterances, where no dims are declared.

    The first that looks like one is only warned of, since a single frame looks the same; if the
    next does, too, it is refused, and so are all until one looks right. Utterances without frames
    are stored, since cutting away silence leaves some, but told.
    """

    def __init__(self) -> None:
        self._warned: dict[str, bool] = {}  # per feature; False: one has looked right
        self._empty: dict[str, tuple[int, str]] = {}  # per feature: how many, and the first

    def check(self, id: str, feature: FeatureStorageConfig, shape: tuple[int, ...]) -> None:
        """Take note of an array (frames, *dims); raises `FeatureError` for a second batch of one."""
        if shape[0] == 0:
            count, first = self._empty.get(feature.name, (0, id))
            self._empty[feature.name] = count + 1, first
        warned = self._warned.get(feature.name)
        if warned is False:
            return
        sentence = feature.looks_wrong(shape)
        self._warned[feature.name] = sentence is not None
        if sentence is None:
            return
        message = f"utterance {id!r}, feature {feature.name!r}: {sentence}"
        if warned:
            raise FeatureError(message)
        warnings.warn(message, stacklevel=2)

    def tell(self, path: Path) -> None:
        """Log how many utterances of each feature had no frames."""
        for name, (count, first) in self._empty.items():
            _log.warning(
                "%d of the utterances written to %r have no frames of feature %r, the first is %r",
                count,
                str(path),
                name,
                first,
            )

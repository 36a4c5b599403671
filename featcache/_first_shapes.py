"""A batch axis left in, noticed at a writer's first utterances."""

from __future__ import annotations

import warnings

from featcache.errors import FeatureError
from featcache.feature import FeatureStorageConfig


class FirstShapes:
    """Refuses batches of one at a writer's first utterances, where no dims are declared.

    The first that looks like one is only warned of, since a single frame looks the same; if the
    next does, too, it is refused, and so are all until one looks right.
    """

    def __init__(self) -> None:
        self._warned: dict[str, bool] = {}  # per feature; False: one has looked right

    def check(self, id: str, feature: FeatureStorageConfig, shape: tuple[int, ...]) -> None:
        """Take note of an array (frames, *dims); raises `FeatureError` for a second batch of one."""
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

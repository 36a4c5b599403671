"""Shapes that look like mistakes: a batch axis left in, vectors as frames, no frames at all."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

from featcache.declaration.feature_config import FeatureStorageConfig
from featcache.errors import FeatureError

_ALIKE = 5  # utterances of one length that are no chance
_log = logging.getLogger("featcache")


class FirstShapes:
    """Refuses batches of one at a writer's first utterances, where no dims are declared.

    The first that looks like one is only warned of, since a single frame looks the same; if the
    next does, too, it is refused, and so are all until one looks right. Utterances without frames
    are stored, since cutting away silence leaves some, but told.

    Attributes:
        trusting: True takes all shapes: those of arrays that were stored before.
    """

    def __init__(self) -> None:
        self.trusting = False
        self._warned: dict[str, bool] = {}  # per feature; False: one has looked right
        self._single: dict[str, tuple[int, int]] = {}  # per feature: a length, and how many had it
        self._empty: dict[str, tuple[int, str]] = {}  # per feature: how many, and the first

    def check_many(
        self,
        ids: Sequence[str],
        feature: FeatureStorageConfig,
        lengths: Sequence[int],
        dims: tuple[int, ...],
    ) -> None:
        """Note arrays (length, *dims) of utterances, as `check` does."""
        if self.trusting:
            return
        for id, length in zip(ids, lengths, strict=True):
            if not length or not self._is_settled(feature, dims):
                self.check(id, feature, (length, *dims))

    def _is_settled(self, feature: FeatureStorageConfig, dims: tuple[int, ...]) -> bool:
        """Tell whether nothing is to be noted of more arrays of such frames, if they have any."""
        counted = feature.dims is None and feature.time_axis == 0 and not dims
        watches = counted and self._single.get(feature.name, (0, 0))[1] >= 0
        return self._warned.get(feature.name) is False and not watches

    def check(self, id: str, feature: FeatureStorageConfig, shape: tuple[int, ...]) -> None:
        """Note an array (frames, *dims); raises `FeatureError` for a second batch of one."""
        if self.trusting:
            return
        if shape[0] == 0:
            count, first = self._empty.get(feature.name, (0, id))
            self._empty[feature.name] = count + 1, first
        self._note_vectors(id, feature, shape)
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

    def _note_vectors(self, id: str, feature: FeatureStorageConfig, shape: tuple[int, ...]) -> None:
        """Warn where the first utterances all have as many frames, each of a single number."""
        vectors = len(shape) == 1 and shape[0] > 1 and "float" in feature.dtype
        length, count = self._single.get(feature.name, (shape[0], 0))
        if not vectors or feature.dims is not None or feature.time_axis is None or count < 0:
            return
        same = shape[0] == length
        self._single[feature.name] = length, count + 1 if same and count + 1 < _ALIKE else -1
        if same and count + 1 == _ALIKE:
            warnings.warn(
                f"utterance {id!r}, feature {feature.name!r}: it has {length} frames of a single "
                f"number, as the {count} before; is it one vector an utterance? declare "
                "time_axis: null, or dims: [] if it is right",
                stacklevel=2,
            )

    def tell(self, path: Path) -> None:
        """Log how many utterances of each feature had no frames."""
        for name, (count, first) in self._empty.items():
            _log.warning(
                "%d of the utterances written to %r have no frames of feature %r, the first is %r; "
                "see why, or leave them out",
                count,
                str(path),
                name,
                first,
            )

"""`Described`: what a cache says of itself, by the manifest and the columns of a generation."""

from __future__ import annotations

import copy
from abc import ABC
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from featcache.errors import KeyNotFoundError
from featcache.interface import Ints
from featcache.reading.annotation import Annotation
from featcache.reading.generation import Generation, Ids
from featcache.reading.opening import missing_from
from featcache.stats import FeatureStats


class Described(ABC):
    """Descriptions of a cache; it reads no array.

    Attributes:
        path: the cache directory.
        opened: the generation that is described.
    """

    path: Path
    opened: Generation

    @property
    def ids(self) -> Sequence[str]:
        """The utterance ids, in the order of rows; taken out of the index as they are asked for."""
        return Ids(self.opened.index)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as they are stored, as small as their codecs made them."""
        return sum(int(columns.nbytes.sum()) for columns in self.opened.index.features.values())

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return tuple(self.opened.manifest.features)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Fingerprint: what the cache was made from, its declarations under "features"."""
        return copy.deepcopy(dict(self.opened.manifest.fingerprint))

    @property
    def complete(self) -> bool:
        """True if each expected utterance is stored or has failed.

        What the writer said where none are expected.
        """
        return self.opened.manifest.complete

    @property
    def expected(self) -> int | None:
        """Number of utterances that the cache is to hold; None if its writer did not know."""
        return (
            None if self.opened.manifest.expected is None else self.opened.manifest.expected.count
        )

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the expected utterances that could not be computed.

        They are in the order of their UTF-8 bytes.
        """
        return tuple(self.opened.failed)

    def missing(self, feature: str) -> tuple[str, ...]:
        """Return the ids that lack a feature and have others, in the order of their UTF-8 bytes.

        None but in a cache of feature sets, whose rows are the utterances that all of them have.
        """
        self.opened.arrays(feature)
        return tuple(missing_from(self.opened, feature))

    @property
    def generation(self) -> int:
        """Number of this generation, counted up with each publish."""
        return self.opened.manifest.generation

    def dtype(self, feature: str) -> str:
        """Return the declared dtype of a feature."""
        return self.opened.arrays(feature).declared_dtype

    def dims(self, feature: str) -> tuple[int, ...]:
        """Return the shape of one frame, or of the whole array of a feature without a time axis.

        Empty as long as no utterance is stored.
        """
        return self.opened.arrays(feature).dims

    @property
    def annotations(self) -> tuple[str, ...]:
        """Names of the annotations."""
        return tuple(self.opened.manifest.annotations)

    def annotation(self, name: str) -> Annotation:
        """Return the values of an annotation in row order, None where an utterance has none.

        In a cache of feature sets, those of the first set that has it.

        Raises `KeyNotFoundError` for an unknown annotation.
        """
        rows = self.opened.annotation(name)
        return Annotation(name, self.opened.manifest.annotations[name].kind, [rows])

    def lengths(self, feature: str, *, ids: Iterable[str] | None = None) -> Ints:
        """Return the frames of all utterances in row order, or of those that `ids` lists.

        Ones for a feature without a time axis. Raises `KeyNotFoundError` for an unknown id or
        feature.
        """
        return self.opened.lengths(feature, ids=ids)

    def stats(self, feature: str) -> FeatureStats:
        """Return count, mean and variance over all frames of a feature.

        Of all utterances that have the feature, in a cache of feature sets, too, where rows are
        the utterances that have all features: `cache.table.stats(feature)` is of the rows. Raises
        `KeyNotFoundError` if none were collected.
        """
        self.opened.arrays(feature)
        declared = self.opened.manifest.features[feature]["stats"]
        if not declared or feature not in self.opened.index.stats:
            what = "declare it with stats: true" if not declared else "call collect() of it once"
            raise KeyNotFoundError(
                f"cache {str(self.path)!r} has no statistics of feature {feature!r}; {what}"
            )
        return self.opened.index.stats[feature]

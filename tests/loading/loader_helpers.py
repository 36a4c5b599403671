"""What the tests of `FeatureLoader` share: the utterances of a cache in batches of three."""

from __future__ import annotations

from typing import Any

from store_helpers import id_of

from featcache import FeatureLoader

NUMBERS = range(40)
BATCHES = [[id_of(n) for n in range(first, min(first + 3, 40))] for first in range(0, 40, 3)]


def ids_of(loader: FeatureLoader[dict[str, Any]]) -> list[str]:
    """The ids of an epoch, in order."""
    return [id for batch in loader for id in batch["id"]]

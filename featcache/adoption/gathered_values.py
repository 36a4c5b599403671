"""Values that a source has of its utterances, as columns of annotations."""

from __future__ import annotations

from collections.abc import Container, Mapping

from featcache.adoptable import Value
from featcache.errors import FeatureError
from featcache.store.format.annotations import check_annotations, kind_of, wider_kind

MOST_NAMES = 256  # each name costs a value of every utterance


class GatheredValues:
    """Values by name and utterance, from JSON or the like, which holds more than annotations can.

    What is none (objects, lists of text), and names whose values are of different kinds, are left
    out; of very many names, as JSON by word or by id has, all but those of the most utterances.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[int, Value]] = {}
        self._kinds: dict[str, str | None] = {}  # None: of several kinds

    def add(self, number: int, values: Mapping[str, object]) -> None:
        """Keep values of an utterance, by the utterance's number."""
        for name, value in values.items():
            try:
                checked = check_annotations("", {name: value})
            except FeatureError:
                continue
            for kept, plain in checked.items():
                kind = kind_of(plain)
                known = self._kinds.setdefault(kept, kind)
                self._kinds[kept] = None if known is None else wider_kind(known, kind)
                self._values.setdefault(kept, {})[number] = plain

    def columns(self, count: int, without: Container[str] = ()) -> dict[str, list[Value]]:
        """Return the values of `count` utterances, by name; names of features are left out."""
        found = {
            name: values
            for name, values in self._values.items()
            if self._kinds[name] is not None and name not in without
        }
        often = sorted(found, key=lambda name: len(found[name]), reverse=True)[:MOST_NAMES]
        return {name: [found[name].get(number) for number in range(count)] for name in often}

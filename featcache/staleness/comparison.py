"""Probes compared: which inputs and features of which utterance are others than before."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from featcache.staleness.probe import Probed, seen_frames
from featcache.staleness.unlike import Tolerance, Unlike, spread, unlike


@dataclass(frozen=True)
class Comparison:
    """Utterances that were computed twice.

    Attributes:
        ids: the utterances.
        inputs: the inputs that differ: the id, and the name of the input.
        features: the features that differ by more than the tolerance.
        same_bits: whether nothing differs in any bit.
    """

    ids: Sequence[str]
    inputs: Sequence[tuple[str, str]] = ()
    features: Sequence[Unlike] = ()
    same_bits: bool = False

    @property
    def alike(self) -> bool:
        """True if inputs and features are the same."""
        return not self.inputs and not self.features

    def without(self, ids: Container[str]) -> Comparison:
        """Return the comparison of the other utterances."""
        return replace(
            self,
            ids=[id for id in self.ids if id not in ids],
            inputs=[each for each in self.inputs if each[0] not in ids],
            features=[each for each in self.features if each.id not in ids],
        )

    def told(self) -> list[str]:
        """Return a sentence for each kind of difference, naming the worst of each feature."""
        lines = [
            f"input {name!r} of {id!r} is another: the data set, its pipeline or the audio has "
            "changed"
            for name, id in {name: id for id, name in reversed(self.inputs)}.items()
        ]
        for found in worst(self.features):
            of = sum(each.feature == found.feature for each in self.features)
            also = f" (and {of - 1} more of {len(self.ids)})" if of > 1 else ""
            lines.append(f"{found.feature} of {found.id!r}, computed again, {found.told()}{also}")
        if self.ids and self.same_bits:
            number = f"{len(self.ids)} utterance{'s' if len(self.ids) > 1 else ''}"
            lines.append(f"{number} computed again: all the same to the bit")
        return lines


def worst(features: Iterable[Unlike]) -> list[Unlike]:
    """Return of each feature the utterance that differs most."""
    found: dict[str, Unlike] = {}
    for each in features:
        if each.feature not in found or each.by > found[each.feature].by:
            found[each.feature] = each
    return list(found.values())


def compare(
    before: Mapping[str, Probed], now: Mapping[str, Probed], tolerance: Tolerance
) -> Comparison:
    """Compare utterances with the same ones computed again.

    Inputs are compared exactly, where both times had one of that name.
    """
    ids = [id for id in before if id in now]
    inputs = [
        (id, name)
        for id in ids
        for name, digest in before[id].inputs.items()
        if now[id].inputs.get(name, digest) != digest
    ]
    features, same_bits = [], not inputs
    for name in {name: None for id in ids for name in before[id].features}:
        of_spread = spread(seen_frames(before, name))
        for id in ids:
            one, other = before[id].features[name], now[id].features.get(name)
            if other is None:
                continue
            if found := unlike((id, name), one, other, of_spread, tolerance):
                features.append(found)
            same_bits &= unlike((id, name), one, other, of_spread, Tolerance(0, 0)) is None
    return Comparison(ids, inputs, features, same_bits)

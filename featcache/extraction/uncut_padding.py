"""Padding left in what `compute_features` returns: noticed by the lengths in its batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def uncut(
    data: object, utterances: Sequence[tuple[str, Mapping[str, Any]]], features: Iterable[str]
) -> str | None:
    """Return a warning if the utterances of a batch have equal frames though they differ in length.

    Args:
        data: the batch. Only one with relative lengths, as SpeechBrain's `PaddedBatch`, can tell,
            and only in the processor's memory.
        utterances: ids and arrays that were computed of it.
        features: names of the features with a time axis.
    """
    shortest = min(_relative_lengths(data), default=1.0)
    if len(utterances) < 2:
        return None
    for name in features:
        arrays: list[Any] = [computed.get(name) for _, computed in utterances]
        frames = {len(array) for array in arrays if getattr(array, "shape", ())}
        if len(frames) == 1 and (count := frames.pop()) - shortest * count > 2:  # rounding aside
            return (
                f"all utterances of the batch of {utterances[0][0]!r} have {count} frames of "
                f"feature {name!r}, though the shortest is {shortest:.0%} of the longest; is the "
                "padding still there? cut it with featcache.unpad, or declare time_axis: null if "
                "each utterance does have as many"
            )
    return None


def _relative_lengths(data: object) -> list[float]:
    """Return the lengths of a batch, relative to its longest utterance, as far as it shows any."""
    values = data.values() if isinstance(data, Mapping) else getattr(data, "__dict__", {}).values()
    padded: list[Any] = [getattr(part, "lengths", None) for part in values if hasattr(part, "data")]
    found = [float(length) for each in padded if _is_here(each) for length in each.tolist()]
    return found if all(0 < length <= 1 for length in found) else []


def _is_here(lengths: object) -> bool:
    """Say whether these are numbers in memory: on a GPU they would have to be waited for."""
    device = getattr(lengths, "device", None)
    return hasattr(lengths, "tolist") and getattr(device, "type", "cpu") == "cpu"

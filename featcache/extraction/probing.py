"""The utterances of a probe: which they are, what they are now, and whether they are random."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from featcache.errors import ComputeError, describe
from featcache.extraction.id_numbers import IdNumbers
from featcache.extraction.probe_source import Failed, ProbeSource
from featcache.staleness.comparison import Comparison, compare
from featcache.staleness.probe import Probe, Probed
from featcache.staleness.unlike import tolerance
from featcache.staleness.utterance_stamps import UNKNOWN

TRIES = 4  # utterances that are tried for each one of a new probe: some may not be computable
_log = logging.getLogger("featcache")


@dataclass(frozen=True)
class Computed:
    """A probe as it is computed now.

    Attributes:
        probe: its utterances, with all their rows.
        numbers: of the utterances in the data set.
        comparison: with the probe that was kept; None: none was, or they cannot be compared.
        twice: how the features differ that are random.
        other_entries: ids of those whose entry in the data set is another than that of the probe
            that was kept.
    """

    probe: Probe = field(default_factory=Probe)
    numbers: tuple[int, ...] = ()
    comparison: Comparison | None = None
    twice: Comparison | None = None
    other_entries: Sequence[str] = ()


def new_probe(source: ProbeSource, numbers: IdNumbers, count: int, seed: int) -> Computed:
    """Choose utterances that can be computed, and compute them: twice, to see what is random."""
    chosen: dict[str, Probed] = {}
    found: list[int] = []
    candidates = islice(choice(source, numbers), TRIES * count)
    while len(chosen) < count and (some := list(islice(candidates, count - len(chosen)))):
        for number, (id, probed) in zip(some, source.alone(some, seed), strict=True):
            if isinstance(probed, Probed):
                chosen[id] = probed
                found.append(number)
    computed = Computed(_described(source, chosen), tuple(found))
    return _seen_twice(source, computed, seed)


def again(source: ProbeSource, numbers: IdNumbers, kept: Probe, seed: int) -> Computed:
    """Compute the utterances of a probe again, and compare them.

    Raises `ComputeError` if one cannot be computed any more; one that cannot be loaded is logged.
    """
    there = [int(number) for number in numbers.find(kept.utterances)]
    chosen, failed = {}, []
    for number, (id, probed) in zip(there, source.alone(there, seed), strict=True):
        if isinstance(probed, Probed):
            chosen[id] = probed
        elif probed.loading:
            failed.append(number)
            _log.warning(
                "%r, an utterance by which the cache is checked, cannot be loaded any more: %s",
                id,
                describe(probed.error),
            )
        else:
            raise ComputeError(
                f"the features of {id!r} could be computed when the cache was begun, and now fail "
                f"with {describe(probed.error)}; check=None uses the cache unchecked"
            ) from probed.error
    left = tuple(number for number in there if number not in failed)
    computed = Computed(_described(source, chosen), left)
    if not kept.repeatable or kept.seed not in (None, seed):
        return replace(computed, probe=replace(computed.probe, repeatable=kept.repeatable))
    same_device = kept.device == computed.probe.device
    near = tolerance(computed.probe.precision, same_device=same_device)
    comparison = compare(kept.utterances, chosen, near)
    others = [id for id, now in chosen.items() if _entry_differs(kept.utterances[id], now)]
    computed = replace(computed, comparison=comparison, other_entries=others)
    if comparison.alike:
        return replace(computed, probe=replace(computed.probe, seed=kept.seed))
    return _seen_twice(source, computed, seed)


def choice(source: ProbeSource, numbers: IdNumbers) -> Iterator[int]:
    """Iterate over the data set: the shortest utterance, the median one, the others by their ids.

    Without lengths all are in the order of their ids' hashes, which is the same in any data set.
    """
    lengths = source.known_lengths()
    first: list[int] = []
    if lengths is not None and len(lengths) == source.size:
        order = np.argsort(np.asarray(lengths, np.float64), kind="stable")
        first = list(dict.fromkeys([int(order[0]), int(order[len(order) // 2])]))
    yield from first
    yield from (number for number in numbers.by_hash() if number not in first)


def _seen_twice(source: ProbeSource, computed: Computed, seed: int) -> Computed:
    """Say whether utterances are other ones from other generators, and even from the same."""
    probe = computed.probe
    near = tolerance(probe.precision, same_device=True)

    def compared_with(another: int) -> Comparison:
        return compare(probe.utterances, _good(source.alone(computed.numbers, another)), near)

    twice = compared_with(seed + 1)
    if twice.alike:
        return computed
    repeatable = not source.is_loader and compared_with(seed).alike
    probe = replace(probe, repeatable=repeatable, seed=seed if repeatable else None)
    return replace(computed, probe=probe, twice=twice)


def _entry_differs(before: Probed, now: Probed) -> bool:
    known = before.entry != UNKNOWN and now.entry != UNKNOWN
    return known and before.entry != now.entry


def _good(found: Iterable[tuple[str, Probed | Failed]]) -> dict[str, Probed]:
    return {id: probed for id, probed in found if isinstance(probed, Probed)}


def _described(source: ProbeSource, utterances: Mapping[str, Probed]) -> Probe:
    precision = source.used_precision(utterances.values())
    batched = source.batch_size > 1
    return Probe(utterances, source.device_name(), precision, batched=batched)

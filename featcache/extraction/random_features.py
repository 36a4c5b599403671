"""Random features: how a run says that they are, and what that means for them."""

from __future__ import annotations

import logging

from featcache.staleness.comparison import Comparison
from featcache.staleness.probe import Probe

_log = logging.getLogger("featcache")


def tell_random(probe: Probe, twice: Comparison | None) -> None:
    """Say that features are random, if computing utterances twice has shown it.

    Args:
        probe: the utterances.
        twice: how those computed twice differ; None: they do not.
    """
    if twice is None:
        return
    if twice.features:
        of = twice.features[0]
        what = f"{of.feature} of {of.id!r}, computed twice, {of.told()}"
    else:
        id, name = twice.inputs[0]
        what = f"input {name!r} of {id!r} is another each time"
    text = (
        "and even from the same seed (it keeps a state or a generator of its own, or the data "
        "come from a loader, which is used as it is): the cache cannot be checked by computing "
        "again"
    )
    if probe.seed is not None:
        text = (
            f"so each utterance is loaded and computed alone, under generators of the seed and "
            f"its id, and the seed, {probe.seed}, counts (torch.manual_seed sets it)"
        )
    _log.warning("features are random: %s; %s", what, text)

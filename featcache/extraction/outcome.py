"""`Outcome`: the end of an executor's work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    """The end of an executor's work: whether all was computed."""

    left_out: int = 0  # utterances that a given sampler did not ask for
    stopped: bool = True  # before all was computed
    seen: set[str] | None = None  # ids of all utterances, where the dataset does not show them

    @classmethod
    def of_all(cls, ranks: Sequence[Outcome]) -> Outcome:
        """Return the outcome of several ranks' work."""
        seen = [rank.seen for rank in ranks if rank.seen is not None]
        return cls(
            sum(rank.left_out for rank in ranks),
            any(rank.stopped for rank in ranks),
            set().union(*seen) if len(seen) == len(ranks) else None,
        )

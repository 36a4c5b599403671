"""The size of a run, and what is printed of it."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from fuzz_children import Outcome

TIMES = float(os.environ.get("FEATCACHE_FUZZ", "1"))  # multiplies the inputs
SHOWN = 40  # kinds of harm


def report(name: str, outcomes: Iterable[Outcome]) -> None:
    """Print a total and all kinds of harm; fail if there is any."""
    kinds: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    came: Counter[str] = Counter()
    total, slowest, largest = 0, 0.0, 0
    for outcome in outcomes:
        total += 1
        came[outcome.came] += 1
        slowest, largest = max(slowest, outcome.spent_s), max(largest, outcome.grown_bytes)
        if outcome.what is not None:
            text = re.sub(r"'[^']*'|[0-9]+", "*", outcome.what.split(";")[0])
            kinds[(outcome.where, text)].append(outcome)
    harmful = sum(map(len, kinds.values()))
    print(f"\nfuzz, {name}: {total:,} inputs: {harmful} did harm, in {len(kinds)} ways")
    print(f"  the slowest took {slowest:.2f} s, a process grew by {largest >> 20} MB at most")
    for what, times in sorted(came.items()):
        print(f"  {times:,} {what}" * bool(what))
    for (where, _), alike in sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:SHOWN]:
        first = min(alike, key=lambda outcome: outcome.number)
        print(
            f"  {len(alike)} times, first of input {first.number}: {first.what}\n      at {where}"
        )
    assert not harmful

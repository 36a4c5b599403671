"""Counts of what was noticed, and of what was refused for nothing."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from rightness_stage import Outcome

SHOWN = 110  # letters of a message


def named(outcome: Outcome) -> bool:
    """Tell whether a message has one of the words that name the cause."""
    return any(
        re.search(rf"\b{re.escape(word)}\b", outcome.message) for word in outcome.change.words
    )


def judged(outcome: Outcome) -> bool:
    return outcome.how in ("refused", "recomputed", "served")


class Tally:
    """All outcomes of a way in, sorted."""

    def __init__(self, way: str, outcomes: Iterable[Outcome]) -> None:
        self.way, self.outcomes = way, list(outcomes)
        sound = [outcome for outcome in self.outcomes if judged(outcome)]
        self.broken = [outcome for outcome in self.outcomes if not judged(outcome)]
        self.matter = [outcome for outcome in sound if outcome.matters]
        self.rest = [outcome for outcome in sound if not outcome.matters]
        self.clear = [each for each in self.rest if each.change.expected == "clear"]
        self.missed = [outcome for outcome in self.matter if not outcome.noticed]
        self.false = [outcome for outcome in self.rest if outcome.how == "refused"]
        self.false_clear = [each for each in self.false if each in self.clear]
        refused = [outcome for outcome in self.matter if outcome.how == "refused"]
        self.refused, self.unnamed = refused, [each for each in refused if not named(each)]

    def print(self) -> None:
        """Print counts, and by name all that is not as it should be."""
        matter, noticed = len(self.matter), len(self.matter) - len(self.missed)
        told = len(self.refused) - len(self.unnamed)
        print(f"\nrightness, {self.way}: {len(self.outcomes)} changes")
        print(f"  of {matter} that matter, {noticed} are noticed ({noticed / (matter or 1):.0%})")
        print(f"  of {len(self.refused)} refusals of these, {told} name the cause")
        print(
            f"  of {len(self.rest)} that do not matter, {len(self.false)} are refused; "
            f"of {len(self.clear)} clear ones, {len(self.false_clear)}"
        )
        self._print_kinds()
        self._print("missed", self.missed)
        self._print("noticed, the cause not named", self.unnamed)
        self._print("refused for nothing", self.false)
        self._print("cannot be judged", self.broken)
        wrong = [each for each in self.matter if each.change.expected != "matters"]
        wrong += [each for each in self.rest if each.change.expected == "matters"]
        self._print("otherwise than the list expects, by the truth", wrong)

    def _print_kinds(self) -> None:
        kinds: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in self.matter + self.rest:
            kinds[outcome.change.kind].append(outcome)
        for kind, outcomes in sorted(kinds.items()):
            matter = [outcome for outcome in outcomes if outcome.matters]
            rest = [outcome for outcome in outcomes if not outcome.matters]
            noticed, refused = (sum(each.noticed for each in some) for some in (matter, rest))
            print(
                f"  {kind:20} noticed {noticed:3} of {len(matter):3}, "
                f"refused for nothing {refused:3} of {len(rest):3}"
            )

    def _print(self, title: str, outcomes: list[Outcome]) -> None:
        if outcomes:
            print(f"{title} ({len(outcomes)}):")
        for outcome in outcomes:
            change = outcome.change
            kind = f"{change.kind}, {change.recipe}, {change.expected}"
            lines = outcome.message.strip().splitlines() or [""]
            text = lines[-1] if not judged(outcome) else " ".join(lines[1:2])
            print(f"  {change.name} [{kind}] {outcome.worst or outcome.how}: {text[:SHOWN]}")

    def otherwise(self, own: Tally) -> list[Outcome]:
        """Return the outcomes with another verdict than on the recipe's own way."""
        verdicts = {outcome.change: outcome.noticed for outcome in own.outcomes if judged(outcome)}
        return [
            outcome
            for outcome in self.matter + self.rest
            if verdicts.get(outcome.change, outcome.noticed) != outcome.noticed
        ]

    def print_otherwise(self, own: Tally) -> None:
        """Print these, and what cannot be judged."""
        told = len(self.refused) - len(self.unnamed)
        print(
            f"\nrightness, {self.way}: {len(self.outcomes)} changes; noticed "
            f"{len(self.matter) - len(self.missed)} of {len(self.matter)} that matter, the cause "
            f"named in {told} of {len(self.refused)} refusals; refused {len(self.false)} of "
            f"{len(self.rest)} that do not matter, {len(self.false_clear)} of {len(self.clear)} "
            "clear ones"
        )
        self._print("otherwise than on the recipe's own way", self.otherwise(own))
        self._print("noticed, the cause not named", self.unnamed)
        self._print("cannot be judged", self.broken)

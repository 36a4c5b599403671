"""Promises: what a writer has told its user at some moment, as marks between the system calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from crash_trace import mark

Model = Literal["old", "new"]


@dataclass(frozen=True)
class Content:
    """A generation: the utterances of one of two models."""

    model: Model
    numbers: frozenset[int]

    def __str__(self) -> str:
        return f"{self.model} {sorted(self.numbers)}"


@dataclass(frozen=True)
class Promise:
    """What must be true after a crash.

    Args:
        committed: utterances of the new model that no writer needs to compute again.
        visible: one of these generations is what readers see; None: that there is no cache.
        opening: a writer is starting, which may publish what it recovers: all that was committed,
            and what else there is; but it does not put that in the place of the old model's cache.
    """

    committed: frozenset[int] = frozenset()
    visible: tuple[Content | None, ...] = (None,)
    opening: bool = False

    def allows(self, content: Content) -> bool:
        """Say whether readers may see a generation."""
        aside = any(other is not None and other.model == "old" for other in self.visible)
        recovered = content.model == "new" and content.numbers >= self.committed
        return content in self.visible or (self.opening and recovered and not aside)

    def after(self, marks: Iterable[str]) -> Promise:
        """Return what is promised after some more marks."""
        promise = self
        for text in marks:
            what, model, numbers = json.loads(text)
            promise = promise._after(what, Content(model, frozenset(numbers)))
        return promise

    def _after(self, what: str, content: Content) -> Promise:
        new = content.numbers if content.model == "new" else frozenset()
        match what:
            case "opening":
                return replace(self, opening=True)
            case "opened":
                there = tuple(other for other in self.visible if other is not None)
                return Promise(self.committed, (*there, content))
            case "committed":
                return replace(self, committed=self.committed | new)
            case "publishing":
                return replace(self, visible=(*self.visible, content))
            case "published":
                return Promise(self.committed | new, (content,))
            case "aborting":
                return replace(self, committed=new)
        raise ValueError(what)


def tell(what: str, numbers: Iterable[int], model: Model = "new") -> None:
    """Leave a mark.

    Args:
        what: "opening", "opened" with what readers see then, "committed", "publishing", "published"
            or, with what stays, "aborting".
    """
    mark(json.dumps([what, model, sorted(numbers)], separators=(",", ":")))

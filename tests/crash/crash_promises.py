"""Promises: what a writer has told its user at some moment, as marks between the system calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from crash_trace import mark

Model = Literal["old", "new"]
TAG = "v1"


@dataclass(frozen=True)
class Content:
    """A generation: the utterances of one of two models."""

    model: Model
    numbers: frozenset[int]
    stamps: frozenset[tuple[int, int]] | None = None  # number and entry stamp; None: any

    def __str__(self) -> str:
        return f"{self.model} {sorted(self.numbers)} {sorted(self.stamps or ())}"

    def is_like(self, other: Content) -> bool:
        """Compare two generations, the stamps where both have any."""
        same = None in (self.stamps, other.stamps) or self.stamps == other.stamps
        return same and (self.model, self.numbers) == (other.model, other.numbers)


@dataclass(frozen=True)
class Promise:
    """What must be true after a crash.

    Args:
        committed: utterances of the new model that no writer needs to compute again.
        visible: one of these generations is what readers see; None: that there is no cache.
        opening: a writer is starting, which may publish what it recovers: all that was committed,
            and what else there is. One that overwrites puts nothing in the place of the old cache
            while it starts.
        gone: utterances of the new model that were deleted, which no writer may find.
        files: one of these is the probe of the build that is written.
        given: one of these is the annotation that the first utterances were given.
        tagged: utterances of the generation with the tag `TAG`; None: perhaps there is none.
        erased: utterances of which nothing lies on the disk.
        again: utterances that were deleted, and may have been written again.
    """

    committed: frozenset[int] = frozenset()
    visible: tuple[Content | None, ...] = (None,)
    opening: bool = False
    gone: frozenset[int] = frozenset()
    files: tuple[str | None, ...] = (None,)
    given: tuple[str | None, ...] = (None,)
    tagged: frozenset[int] | None = None
    erased: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()

    def allows(self, content: Content) -> bool:
        """Say whether readers may see a generation."""
        recovered = content.model == "new" and content.numbers >= self.committed
        seen = any(other is not None and content.is_like(other) for other in self.visible)
        return seen or (self.opening and recovered)

    def after(self, marks: Iterable[str]) -> Promise:
        """Return what is promised after some more marks."""
        promise = self
        for text in marks:
            what, model, numbers, stamps, file = json.loads(text)
            entries = None if stamps is None else frozenset((a, b) for a, b in stamps)
            content = Content(model, frozenset(numbers), entries)
            changed = promise._changed(what, content, file)
            promise = changed or promise._after(what, content)
        return promise

    def _changed(self, what: str, content: Content, file: str | None) -> Promise | None:
        """Return what is promised after a mark about what is stored already; None: it is not."""
        match what:
            case "deleting":
                return replace(self, committed=self.committed - content.numbers)
            case "deleted":
                return replace(self, gone=self.gone | content.numbers)
            case "again":
                gone, erased = self.gone - content.numbers, self.erased - content.numbers
                again = self.again | content.numbers
                return replace(self, gone=gone, erased=erased, again=again)
            case "erased":
                return replace(self, erased=content.numbers)
            case "tagged":
                return replace(self, tagged=content.numbers)
            case "untagging":
                return replace(self, tagged=None)
        return self._kept(what, file)

    def _kept(self, what: str, text: str | None) -> Promise | None:
        """Return what is promised after a mark about the probe or an annotation."""
        match what:
            case "keeping":
                return replace(self, files=(*self.files, text))
            case "kept":
                return replace(self, files=(text,))
            case "giving":
                return replace(self, given=(*self.given, text))
            case "given":
                return replace(self, given=(text,))
        return None

    def _after(self, what: str, content: Content) -> Promise:
        new = content.numbers if content.model == "new" else frozenset()
        match what:
            case "opening":
                return replace(self, opening=True)
            case "opened":
                there = tuple(other for other in self.visible if other is not None)
                return replace(self, visible=(*there, content), opening=False)
            case "committed":
                return replace(self, committed=self.committed | new)
            case "publishing":
                return replace(self, visible=(*self.visible, content))
            case "published":
                committed = self.committed | new
                return replace(self, committed=committed, visible=(content,), opening=False)
            case "aborting":
                return replace(self, committed=new)
        raise ValueError(what)


def tell(
    what: str,
    numbers: Iterable[int],
    model: Model = "new",
    stamps: Mapping[int, int] | None = None,
    file: str | None = None,
) -> None:
    """Leave a mark.

    Args:
        what: "opening", "opened" with what readers see then, "committed", "publishing", "published"
            or, with what stays, "aborting"; "deleting", "deleted", and "again" before some of these
            are written once more; "keeping" and "kept", with the probe; "giving" and "given", with
            an annotation in place of it; "tagged" and "untagging"; "erased".
        stamps: entry stamps of what is published, by number; None: any.
    """
    entries = None if stamps is None else sorted(stamps.items())
    mark(json.dumps([what, model, sorted(numbers), entries, file], separators=(",", ":")))

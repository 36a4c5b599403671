"""`LoopPace`: whether a loop takes results so quickly that its own thread had better make them."""

from __future__ import annotations

import math

HAND_OVER_S = 1e-4  # that a result takes from a thread to the loop, beside the work
QUICK = 8  # such results one after the other, from which on a loop has nothing else to do
TRIED, KEPT = 8, 256  # results that a loop takes in a way to try it, and then in the better one
# results that a loop makes itself, until it is seen again whether a thread gets ahead: first,
# and at most
ALONE, MOST_ALONE = 30, 480


class LoopPace:
    """The pace of a loop that takes results, and whether its own thread had better make them.

    For one with nothing else to do two threads copy more than one, and each waits for Python's
    lock: what is quicker depends on the machine and on the work. So both ways are tried, and the
    one that takes less time a byte is kept for a while. One that is busy may leave a thread no
    processor, or no lock: it makes some results itself, more of them each time that this is seen.
    What was seen outlives an iteration.

    Args:
        may_be_beside: whether jobs may run in the loop's thread and in another at once; functions
            of the user may not bear that.
    """

    def __init__(self, *, may_be_beside: bool = True) -> None:
        self._may_be_beside = may_be_beside
        self._at_once = 0  # requests, one after the other
        self._is_beside = False
        self._byte_s: dict[bool, float] = {}  # seconds a byte, of the last time in each way
        self._left_alone, self._alone = 0, ALONE  # results that it makes itself: now, next time
        self._is_left_alone = self._was_late = False
        self._begin(TRIED, is_trial=True)

    def _begin(self, results: int, *, is_trial: bool) -> None:
        self._left, self._is_trial = results, is_trial
        self._seconds, self._nbytes = 0.0, 0
        self._is_first = True

    @property
    def is_alone(self) -> bool:
        """Whether the loop does the work, and no other thread."""
        return self._is_left_alone or (self._at_once > QUICK and not self._is_beside)

    @property
    def is_beside(self) -> bool:
        """Whether the loop works beside the thread."""
        return self._at_once > QUICK and self._is_beside and not self._is_left_alone

    def asks(self, step_s: float) -> None:
        """Note for how long the loop did something else; infinitely before the first result."""
        if step_s < HAND_OVER_S:
            self._at_once += 1
        elif step_s < math.inf:
            self._at_once = 0
        else:  # another iteration may be another loop: it is seen at once
            self._left_alone = 0
        self._is_left_alone = self._left_alone > 0
        self._left_alone = max(self._left_alone - 1, 0)

    def sees_thread(self, *, is_ahead: bool) -> None:
        """Note whether a thread had a result by the time that it was asked for."""
        if is_ahead:
            self._alone, self._was_late = ALONE, False
        elif not self._was_late:  # once it may be for anything
            self._was_late = True
        else:
            self._left_alone = self._alone
            self._alone = min(2 * self._alone, MOST_ALONE)

    def got(self, seconds: float, nbytes: int) -> None:
        """Note how long a result took, from the one before it."""
        if not self._may_be_beside or self._at_once <= QUICK or seconds == math.inf:
            return
        if self._is_first:  # the thread may have been at one
            self._is_first = False
            return
        self._left, self._seconds = self._left - 1, self._seconds + seconds
        self._nbytes += nbytes
        if self._left:
            return
        self._byte_s[self._is_beside] = self._seconds / max(self._nbytes, 1)
        if self._is_trial and len(self._byte_s) == 2:
            self._is_beside = self._byte_s[True] < self._byte_s[False]
            self._begin(KEPT, is_trial=False)
        else:
            self._is_beside = not self._is_beside
            self._begin(TRIED, is_trial=True)

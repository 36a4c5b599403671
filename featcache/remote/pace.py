"""Pace of requests to a store: how many at a time, its rate, and what is late."""

from __future__ import annotations

import math
import time
from collections import deque

RECENT = 256  # answers, whose speed is that of now
NEAR_GETS_PER_S = 8000.0  # more than a process can take in
LEAST_ROOM = 8  # requests at a time, however soon a store answers
LOOK_EVERY = 32  # answers, after which it is looked how soon they come
KNOWN = 64  # latencies, from which on it is known that one is late
LATE = 3.0  # times the latency of the slowest hundredth, after which a request is made again
LEAST_LATE_S = 0.05
BURST_S = 0.5  # in which the requests at a time are halved once at most


class Pace:
    """Times of the last requests, and how many may be made at a time.

    A store that says it is asked too often is asked half as much at a time, at most twice a second;
    with each answer it is a little more again. One that answers soon is asked for no more at a time
    than comes to `NEAR_GETS_PER_S`: further answers would only wait for this process.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._allowed = self._useful = float(most)
        self._halved = 0.0
        self._begun = 0
        self._latencies: deque[float] = deque(maxlen=RECENT)
        self._ends: deque[tuple[float, int, int]] = deque()  # when, answers, bytes
        self._recent = 0  # answers of these

    @property
    def room(self) -> float:
        """Requests that may be made at a time."""
        return min(self._allowed, self._useful)

    def begun(self, latency_s: float) -> None:
        """Note how long it took until an answer began."""
        self._latencies.append(latency_s)
        self._begun += 1
        if not self._begun % LOOK_EVERY:
            # of those that waited for this process as little as can be
            useful = NEAR_GETS_PER_S * self.latency_s(0.1)
            self._useful = min(max(useful, LEAST_ROOM), float(self._most))

    def is_late(self) -> None:
        """Ask for as many at a time as may be, where some do not come: the others shall."""
        self._useful = float(self._most)

    def ended(self, answers: int, nbytes: int) -> None:
        """Note that answers are there."""
        self._ends.append((time.perf_counter(), answers, nbytes))
        self._recent += answers
        while self._recent - self._ends[0][1] >= RECENT:
            self._recent -= self._ends.popleft()[1]
        self._allowed = min(self._allowed + answers / self._allowed, self._most)

    def is_too_fast(self) -> None:
        """Halve the requests at a time, once for a burst of refusals."""
        now = time.perf_counter()
        if now - self._halved > BURST_S:
            self._allowed, self._halved = max(self.room / 2, 1.0), now

    def latency_s(self, share: float) -> float:
        """Return the latency that a share of the last answers did not exceed; 0 without any."""
        latencies = sorted(self._latencies)
        return latencies[int(share * (len(latencies) - 1))] if latencies else 0.0

    def bytes_per_s(self) -> float:
        """Return the rate of the last answers, all requests together."""
        ends = list(self._ends)
        if len(ends) < 2:
            return 0.0
        return sum(nbytes for _, _, nbytes in ends[1:]) / max(
            time.perf_counter() - ends[0][0], 1e-6
        )

    def late_s(self) -> float:
        """Return the seconds after which an answer is late; infinite while too few are known."""
        if len(self._latencies) < KNOWN:
            return math.inf
        return max(LATE * self.latency_s(0.99), LEAST_LATE_S)

"""Planning of range requests: which bytes of which files to ask for, in as few requests as pay."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Span = tuple[int, int]  # first byte, and the one after the last
Piece = tuple[int, int, int]  # file, first byte, bytes


class Request(NamedTuple):
    """Bytes of one file that one request asks for."""

    file: int
    begin: int
    end: int


class Spans:
    """Bytes of a file that are there: disjoint spans in order, those that touch made one.

    >>> spans = Spans()
    >>> spans.add(0, 4), spans.add(8, 12), spans.add(4, 6)
    (None, None, None)
    >>> spans.has(1, 6), spans.has(5, 9), spans.missing(2, 20)
    (True, False, [(6, 8), (12, 20)])
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[Span]:
        return zip(self._begins, self._ends, strict=True)

    def add(self, begin: int, end: int) -> None:
        """Note bytes that are there from now on."""
        if begin >= end:
            return
        first = bisect_left(self._ends, begin)
        last = bisect_right(self._begins, end)
        if first < last:
            begin = min(begin, self._begins[first])
            end = max(end, self._ends[last - 1])
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]

    def has(self, begin: int, end: int) -> bool:
        """Whether all bytes from `begin` to before `end` are there."""
        at = bisect_right(self._begins, begin) - 1
        return begin >= end or (at >= 0 and end <= self._ends[at])

    def missing(self, begin: int, end: int) -> list[Span]:
        """Return the spans between `begin` and `end` that are not there."""
        found = []
        at = bisect_right(self._ends, begin)
        while begin < end:
            there = self._begins[at] if at < len(self._begins) else end
            if begin < there:
                found.append((begin, min(there, end)))
            begin = self._ends[at] if at < len(self._ends) else end
            at += 1
        return found


def planned(
    wanted: Sequence[Piece], gap_bytes: int, most_bytes: int, extra: float
) -> list[Request]:
    """Return the requests for pieces (file, first byte, bytes), those first whose pieces are first.

    Pieces that overlap or touch come in one request. So do those with a gap of at most `gap_bytes`
    between them, the smallest gaps first, as long as all gaps together are at most `extra` of what
    is asked for. No request has more than `most_bytes`.

    >>> planned([(0, 152, 100), (0, 100, 50), (0, 0, 100)], 0, 1 << 20, 0.05)
    [Request(file=0, begin=152, end=252), Request(file=0, begin=0, end=150)]
    >>> planned([(0, 152, 100), (0, 100, 50), (0, 0, 100)], 8, 1 << 20, 0.05)
    [Request(file=0, begin=0, end=252)]
    """
    merged: list[Request] = []
    for file, begin, nbytes in sorted(wanted):
        end = begin + nbytes
        if nbytes <= 0:
            continue
        if merged and merged[-1].file == file and begin <= merged[-1].end:
            if end > merged[-1].end:
                merged[-1] = Request(file, merged[-1].begin, end)
        else:
            merged.append(Request(file, begin, end))
    bridged = _bridges(merged, gap_bytes, extra)
    found: list[Request] = []
    for number, request in enumerate(merged):
        if number in bridged and request.end - found[-1].begin <= most_bytes:
            found[-1] = Request(request.file, found[-1].begin, request.end)
        else:
            found.append(request)
    return _by_need([piece for each in found for piece in _split(each, most_bytes)], wanted)


def _by_need(requests: Sequence[Request], wanted: Sequence[Piece]) -> list[Request]:
    """Order requests, which are in the order of their places, by the first piece of each."""
    begins = [(each.file, each.begin) for each in requests]
    found: dict[Request, None] = {}
    for file, begin, nbytes in wanted:
        at = max(bisect_right(begins, (file, begin)) - 1, 0)
        while nbytes > 0 and at < len(requests) and begins[at] < (file, begin + nbytes):
            if requests[at].file == file:
                found[requests[at]] = None
            at += 1
    return list(found)


def _bridges(merged: Sequence[Request], gap_bytes: int, extra: float) -> set[int]:
    """Return the numbers of the requests that are joined to the one before, over a gap."""
    room = int(extra * sum(each.end - each.begin for each in merged))
    gaps = sorted(
        (merged[at].begin - merged[at - 1].end, at)
        for at in range(1, len(merged))
        if merged[at].file == merged[at - 1].file
    )
    bridged = set()
    for gap, at in gaps:
        room -= gap
        if gap > gap_bytes or room < 0:
            break
        bridged.add(at)
    return bridged


def _split(request: Request, most_bytes: int) -> list[Request]:
    """Cut a request that is too large into equal ones."""
    nbytes = request.end - request.begin
    if nbytes <= most_bytes:
        return [request]
    count = -(-nbytes // most_bytes)
    ends = [request.begin + nbytes * n // count for n in range(count + 1)]
    return [Request(request.file, *ends[n : n + 2]) for n in range(count)]

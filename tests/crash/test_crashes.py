"""Thousands of crashes of every scenario in every layout: nothing that was promised is ever lost.

`make crash` runs them. `FEATCACHE_CRASH_STATES` sets how many crashes are checked in all,
`FEATCACHE_CRASH_SEED` which.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from crash_checks import WRONGS
from crash_jobs import KINDS, Job, Report, crash
from crash_promises import Content, Promise
from crash_stories import STORIES
from crash_trace import can_trace
from crash_writers import LAYOUTS

STATES = int(os.environ.get("FEATCACHE_CRASH_STATES", "10000"))
SEED = int(os.environ.get("FEATCACHE_CRASH_SEED", "0"))
PROCESSES = 2
JOBS = [(story, layout) for story in STORIES for layout in LAYOUTS]

pytestmark = pytest.mark.skipif(not can_trace(), reason="strace is not installed, or may not trace")
Reports = dict[tuple[str, str], "Future[Report]"]


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Iterator[Reports]:
    """The jobs of all tests that are to run, at work."""
    context = multiprocessing.get_context("spawn")
    chosen = [item.name for item in request.session.items]
    jobs = [job for job in JOBS if any(f"[{'-'.join(job)}]" in name for name in chosen)]
    # what writers and readers log, of thousands of states, hides what the run tells
    pool = ProcessPoolExecutor(PROCESSES, context, logging.disable, (logging.WARNING,))
    yield {job: pool.submit(crash, *job, STATES // len(JOBS), SEED) for job in jobs}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("story", "layout"), JOBS)
def test_no_crash_costs_what_was_promised(reports: Reports, story: str, layout: str) -> None:
    report = reports[story, layout].result()
    print(f"\n{story:15} {layout:12} {summary([report])}", end="")
    assert not report.wrongs, "\n".join([summary([report]), *report.notes])


@pytest.mark.parametrize("story", ["recover", "overwrite-on"])
def test_what_a_writer_killed_at_its_seal_had_copied_is_not_lost(
    tmp_path: Path, story: str
) -> None:
    """The copy may not be durable when the next writer removes what it is of."""
    job = Job(Report(story, "hdf5"), 0, SEED, tmp_path)
    report = job.run_after("-recovered/part.json", cuts=200)
    assert report.states.total() > 100
    assert not report.wrongs, "\n".join(report.notes)


def test_only_a_writer_that_does_not_overwrite_may_publish_as_it_starts() -> None:
    """A rename that was not synced leaves both builds possible, whatever a later writer sees."""
    either = (Content("old", frozenset(range(10))), Content("new", frozenset(range(8))))
    recovered = Content("new", frozenset(range(19)))
    killed = Promise(frozenset(range(8)), either)
    assert not killed.allows(recovered)
    assert replace(killed, opening=True).allows(recovered)
    assert not replace(killed, opening=True).allows(Content("new", frozenset(range(7))))


def test_all_in_all(reports: Reports) -> None:
    done = [report.result() for report in reports.values()]
    print(f"\ncrash: {summary(done)}")
    assert all(not report.wrongs for report in done)


def summary(reports: list[Report]) -> str:
    """Return how many crashes were checked, of which kinds, and what was wrong."""
    states = sum((report.states for report in reports), Counter[str]())
    wrongs = sum((report.wrongs for report in reports), Counter[str]())
    kinds = ", ".join(f"{states[kind]:,} {kind}" for kind in KINDS)
    found = ", ".join(f"{wrongs[wrong]} {wrong}" for wrong in WRONGS)
    return f"{states.total():,} states ({kinds}): {found}"

"""`Job`: what to compute, from what, made with what; `RunOptions`: how; and what came of it."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, cast

import torch

from featcache._checks import whole_number
from featcache._progress import bar
from featcache.container_files import write_durably
from featcache.errors import ConfigError
from featcache.extraction.datasets import is_map_style, size_of
from featcache.staleness.watch import Watch
from featcache.workers.config import ParallelConfig

if TYPE_CHECKING:
    from distributed import Client

Environment = Mapping[str, Any]
# makes an environment, and what begins to compare what features are made with, if anything does
Build = Callable[[], tuple[Environment, Callable[[], Watch] | None]]
Check = int | Literal["probe", "all"] | None


class OnWorkers(NamedTuple):
    """The processes that compute in place of this one.

    Args:
        parallel: workers to be started, or a client, whose workers stay.
        builder: makes the function that builds the environment of a worker.
    """

    parallel: ParallelConfig | Client
    builder: Callable[[], Build]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Features to be computed: of what, by what, made with what.

    Args:
        source: a data set, or a loader, which is used as it is.
        ids: of all utterances; None: the data set shows none.
        compute: makes a list of dicts, "id" and arrays, of a batch's data, in this process.
        loader_kwargs: arguments of a DataLoader.
        fingerprint: what the features are made from.
        witnesses: makes the record of what they are made with.
        mentioned: keys of an item that count as its input.
        by: workers; or where this process computes, what compares meanwhile what features are made
            with.
        lengths: of all utterances: the longest come first; None keeps the data set's order.
        device: tells what device computes here.
        precision: of the computation; widened by what the processor is set to.
        copied: makes the data set that a probe is loaded from, where loading might leave traces in
            one that is still to be sent to workers.
        forget: called once this process computes no more: a model takes memory.
    """

    source: Any
    ids: Sequence[str] | None
    compute: Callable[[object], object]
    loader_kwargs: Mapping[str, Any]
    fingerprint: Mapping[str, object]
    witnesses: Callable[[], Mapping[str, object]]
    mentioned: frozenset[str]
    by: Watch | OnWorkers
    lengths: Sequence[float] | None = None
    device: Callable[[], torch.device | str | None] = lambda: None
    precision: str = "fp32"
    copied: Callable[[object], object] = lambda dataset: dataset
    forget: Callable[[], object] = lambda: None

    @property
    def by_number(self) -> bool:
        """Whether utterances of the data set can be picked by number."""
        return is_map_style(self.source)

    @property
    def size(self) -> int | None:
        """Number of utterances of the data set; None if unknown."""
        return size_of(self.source)

    @property
    def in_workers(self) -> bool:
        """Whether other processes compute."""
        return isinstance(self.by, OnWorkers)

    @property
    def same_device(self) -> bool:
        """Whether the cache is computed on a device like this process's, as far as is known."""
        if not isinstance(self.by, OnWorkers):
            return True
        parallel = self.by.parallel
        if not isinstance(parallel, ParallelConfig) or not parallel.env.startswith("local"):
            return False
        return not torch.cuda.is_available() or torch.device(self.device() or "cpu").type == "cuda"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run, as `featcache.extract` explains them; raises `ConfigError` for wrong ones.

    Args:
        colour: of the bar; None: the terminal's.
        most_batches: a run ends after these, as incomplete.
    """

    resume: bool = True
    overwrite: bool = False
    append: bool = False
    annotations: str | Sequence[str] = ()
    on_error: Literal["raise", "skip"] = "raise"
    on_changed: Literal["raise", "recompute"] = "raise"
    retries: int = 2
    publish_every_s: float | None = None
    check: Check = "probe"
    accept: bool = False
    progressbar: bool = True
    colour: str | None = None
    most_batches: int | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error is 'raise' or 'skip', not {self.on_error!r}")
        if self.on_changed not in ("raise", "recompute"):
            raise ConfigError(f"on_changed is 'raise' or 'recompute', not {self.on_changed!r}")
        whole_number("retries", self.retries, 0)
        every = self.publish_every_s
        if every is not None and not (isinstance(every, int | float) and every > 0):
            raise ConfigError(
                f"publish_every_s is a number of seconds, above 0, or None, not {every!r}"
            )
        if isinstance(self.check, str) and self.check not in ("probe", "all"):
            raise ConfigError(
                f"check is 'probe', 'all', a number of utterances or None, not {self.check!r}"
            )
        if not isinstance(self.check, str | None):
            whole_number("check", self.check, 1)

    @property
    def skips_failures(self) -> bool:
        """Whether a run goes on after an utterance that fails."""
        return self.on_error == "skip"


# `Outcome`: the end of an executor's work.


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


# Utterances that could not be computed: for people, a line each in `work-failures.jsonl`.

FAILURES = "work-failures.jsonl"


class Failure(TypedDict):
    """A line of the file: an utterance that could not be computed."""

    id: str | None  # None if the loader does not show it
    error: str
    type: str
    traceback: str


def failure_of(id: str | None, error: Exception) -> Failure:
    """Return the line for an utterance that ended in an error."""
    text = "".join(traceback.format_exception(error))
    return {"id": id, "error": str(error), "type": type(error).__name__, "traceback": text}


def read_failures(cache: Path) -> list[Failure]:
    """Return the lines of a cache's file that can be read; none if it has no file."""
    found: list[Failure] = []
    with contextlib.suppress(OSError):
        for line in (cache / FAILURES).read_text("utf-8", "replace").splitlines():
            with contextlib.suppress(ValueError):
                failure = json.loads(line)
                if isinstance(failure, dict) and "id" in failure:
                    found.append(cast(Failure, failure))
    return found


def write_failures(cache: Path, failures: Sequence[Failure]) -> None:
    """Replace the file; without failures there is none."""
    path = cache / FAILURES
    if not failures:
        path.unlink(missing_ok=True)
        return
    lines = [json.dumps(failure, ensure_ascii=False) + "\n" for failure in failures]
    write_durably(path, "".join(lines).encode("utf-8", "backslashreplace"))


# Progress of an extraction: one bar over the utterances of all workers, and the failures.


class TaskProgress(NamedTuple):
    """Counts of one task so far."""

    task: int
    utterances: int = 0  # written or failed
    nbytes: int = 0
    failed: int = 0


class ProgressBar:
    """One bar over the utterances of all tasks, those under way included.

    Args:
        description: the text of the bar.
        total: number of utterances of the dataset; None if unknown.
        known: number of utterances that the cache held before.
        failures: the list that reported failures are appended to.
        shown: whether there is a bar.
        colour: of the bar; None: the terminal's.
    """

    def __init__(
        self,
        description: str,
        total: int | None,
        known: int,
        failures: list[Failure],
        *,
        shown: bool,
        colour: str | None = None,
    ) -> None:
        self._failures = failures
        self._done = [0, 0, 0]  # utterances, bytes, failed ones
        self._running: dict[int, TaskProgress] = {}
        self._known, self._started = known, time.monotonic()
        how: dict[str, Any] = {"unit": "utt", "shown": shown, "delay_s": 0.0, "colour": colour}
        self.bar = bar(description, total, initial=known, **how)

    def begin(self) -> None:
        """Count time from now on: workers may have waited in a queue before."""
        self._started = time.monotonic()
        self.bar.unpause()

    def update(self, progress: TaskProgress) -> None:
        """Show the progress of a task."""
        self._running[progress.task] = progress
        self._show()

    def drop(self, task: int) -> None:
        """Forget the reports of a task whose worker died."""
        self._running.pop(task, None)
        self._show()

    def end(self, progress: TaskProgress, failures: Sequence[Failure] = ()) -> None:
        """Add a task that has ended."""
        self._running.pop(progress.task, None)
        self._done = [done + more for done, more in zip(self._done, progress[1:], strict=True)]
        self._failures += failures
        self._show()

    def add(self, utterances: int, failures: Sequence[Failure] = ()) -> None:
        """Add utterances that no task reported."""
        self.end(TaskProgress(-1, utterances + len(failures), failed=len(failures)), failures)

    def count(self, utterances: int, nbytes: int) -> None:
        """Add utterances that this process has stored."""
        self.end(TaskProgress(-1, utterances, nbytes))

    def _show(self) -> None:
        if self.bar.disable:
            return
        of_all = [self._done, *(progress[1:] for progress in self._running.values())]
        utterances, nbytes, failed = (sum(column) for column in zip(*of_all, strict=True))
        seconds = max(time.monotonic() - self._started, 1e-3)
        failures = f", {failed} failed" if failed else ""
        self.bar.set_postfix_str(f"{nbytes / 1e6 / seconds:.1f} MB/s{failures}", refresh=False)
        self.bar.update(self._known + utterances - self.bar.n)

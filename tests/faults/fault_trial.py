"""One trial: a story with one fault in it, then all that must hold after it."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from eight_layouts import open_writer, write_missing, wrong_ids
from fault_injector import READING, Injector, sites
from fault_stories import (
    BEFORE,
    EVERYTHING,
    STORIES,
    Promise,
    add_energies,
    promised_before,
)
from store_helpers import id_of
from tracebacks import places

import featcache
from featcache.errors import CacheLockedError, FeatcacheError, NotACacheError
from featcache.store import open_features

# what to do, in an error's text
REMEDY = re.compile(r"\bagain\b|free some space|\bremove\b|put it back|another directory")
HOLDER = "writer.json"


@dataclass(frozen=True)
class Trial:
    """One fault in one story."""

    layout: str
    story: str
    kind: str
    number: int
    code: int
    lasting: bool


@dataclass(frozen=True)
class Finding:
    """A promise that did not hold: `what` is one of `PROMISES`."""

    what: str
    detail: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


PROMISES = (
    "leaks",
    "destroyed",
    "lost",
    "untyped",
    "without path",
    "without remedy",
    "stuck",
    "crashed",
    "litter",
)


def run_trial(
    trial: Trial, before: Path, path: Path, injector: Injector
) -> tuple[bool, list[Finding]]:
    """Run a trial in this process; returns whether the fault came to pass, and broken promises."""
    # formats that failed to start close with a warning
    sys.unraisablehook = lambda unraisable: None
    if before.exists():
        shutil.copytree(before, path)
    holders = _holders(path)  # of a writer that died before
    held = _held()
    promise = promised_before(trial.story)
    error = _story(trial, path, injector, promise)
    findings = [] if error is None else _judged(error, path)
    del error
    if trial.kind not in READING and trial.lasting:  # readers go on while writers cannot
        findings += _published(trial, path, promise)
    injector.off()
    gc.collect()
    if _held() != held:
        findings.append(Finding("leaks", f"(descriptors, threads) {held} became {_held()}"))
    if trial.kind != "unlink" and (left := _holders(path) - holders):
        findings.append(Finding("leaks", f"{HOLDER} left: {sorted(left)}"))
    hit = injector.hits() > 0
    findings += _published(trial, path, promise)
    findings += _gone_on(trial, path, promise)
    return hit, findings


def watch_calls(
    trial: Trial, before: Path, path: Path, injector: Injector
) -> dict[str, dict[str, list[int]]]:
    """Run a story without a fault; returns its calls as `sites` does."""
    if before.exists():
        shutil.copytree(before, path)
    with tempfile.TemporaryFile() as log:
        injector.log(log.fileno())
        STORIES[trial.story](path, trial.layout, Promise(), lambda: injector.arm(path))
        injector.off()
        injector.log(-1)
        log.seek(0)
        return sites(log.read().decode(), path.resolve())


def names(path: Path) -> set[str]:
    """The names in a directory, with what is random or counted in them taken out."""
    found = (str(file.relative_to(path)) for file in path.rglob("*"))
    return {
        re.sub(r"(-recovered)+", "", re.sub(r"[0-9a-f]{6,}|[0-9]+", "*", name)) for name in found
    }


def _story(trial: Trial, path: Path, injector: Injector, promise: Promise) -> BaseException | None:
    def begin() -> None:
        injector.arm(path, trial.kind, trial.number, trial.code, trial.lasting)

    try:
        STORIES[trial.story](path, trial.layout, promise, begin)
    except BaseException as error:
        return error
    return None


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208


def _holders(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob(HOLDER)}


def _judged(error: BaseException, path: Path) -> list[Finding]:
    """Compare an error with what every error must be."""
    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    findings = []
    if not isinstance(error, FeatcacheError):
        findings.append(Finding("untyped", f"{places(error)}: {error!r}"))
    if str(path) not in text:
        findings.append(Finding("without path", f"{places(error)}: {type(error).__name__}: {text}"))
    if not REMEDY.search(text):
        findings.append(
            Finding("without remedy", f"{places(error)}: {type(error).__name__}: {text}")
        )
    return findings


def _published(trial: Trial, path: Path, promise: Promise) -> list[Finding]:
    """See that what was published can be read, or, of an overwrite, the one or the other."""
    try:
        featcache.open(path, verify="arrays")
        cache = open_features(path, ["fbank"])
    except NotACacheError as error:
        return [Finding("destroyed", f"{error!r}")] if promise.published else []
    except BaseException as error:
        return [Finding("destroyed", f"{places(error)}: {error!r}")]
    wrong = wrong_ids(cache, promise.published)
    if trial.story == "overwrite" and wrong:
        wrong = wrong_ids(cache, promise.committed or BEFORE, build=1)
    wrong = wrong or _not_given(cache, promise)
    return [Finding("lost", f"published, but not to be read: {wrong}")] if wrong else []


def _not_given(cache: featcache.Cache, promise: Promise) -> list[str]:
    """Return the ids that have not the annotation that all were given, or some of them."""
    if "given" not in cache.annotations:
        return ["all"] if promise.given else []
    of_all = zip(cache, cache.annotation("given"), strict=True)
    expected = {id_of(number): number for number in BEFORE}
    return [id for id, value in of_all if value != expected.get(id)]


def _gone_on(trial: Trial, path: Path, promise: Promise) -> list[Finding]:
    """Do what the error says, run the same again; then everything must be there."""
    again = trial.story == "overwrite" and not _is_new(path)
    build = 1 if trial.story == "overwrite" else 0
    findings = []
    try:
        if trial.story == "add-a-feature":
            add_energies(path)
        with open_writer(path, trial.layout, overwrite=again) as writer:
            lost = [number for number in promise.committed if id_of(number) not in writer]
            if lost:
                findings.append(
                    Finding("lost", f"committed, but not known to the next writer: {lost}")
                )
            write_missing(writer, EVERYTHING, build)
        if trial.story == "edit":
            featcache.open(path).compact(drop_tags=True)
        featcache.open(path, verify="arrays")
        cache = open_features(path, ["fbank"])
    except CacheLockedError as error:
        return [*findings, Finding("leaks", f"a lock: {error!r}")]
    except BaseException as error:
        return [*findings, Finding("destroyed", f"{places(error)}: {error!r}")]
    if (
        len(cache) != len(EVERYTHING)
        or not cache.complete
        or (wrong := wrong_ids(cache, EVERYTHING, build) or _not_given(cache, promise))
    ):
        findings.append(Finding("lost", f"{cache!r} in the end, wrong: {wrong}"))
    return findings


def _is_new(path: Path) -> bool:
    """Whether the overwrite was published before the fault."""
    try:
        cache = featcache.open(path)
    except FeatcacheError:
        return False
    return not wrong_ids(cache, BEFORE, build=1)

"""Runs trials, each in a forked child; the injector is preloaded, everything imported already.

One line of JSON in, a trial; one line of JSON out, the outcome.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c  # noqa: F401 - the libraries of all formats: once, not in each child
import h5py  # noqa: F401
import lilcom  # noqa: F401
import numcodecs.blosc
import numcodecs.zstd  # noqa: F401
from fault_injector import Injector
from fault_stories import prepare
from fault_trial import Finding, Trial, names, run_trial, watch_calls

LIMIT_S = 30
HARMLESS = re.compile(r"(^|/)(work-.*|writer\.(lock|json))$")  # of a lock that nobody holds


def main() -> None:
    """Serve until the end of the input; the argument is a directory to work in."""
    root, injector = Path(sys.argv[1]), Injector()
    logging.disable()  # thousands of trials warn of the same
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_served(request, root, injector)), flush=True)


def _served(request: dict[str, Any], root: Path, injector: Injector) -> object:
    trial = Trial(**request["trial"])
    before = root / f"{trial.story} {trial.layout}"
    if request["watch"]:
        return _in_child(lambda: _watched(trial, before, root, injector))
    path = root / "trial" / "cache"
    path.parent.mkdir()
    try:
        return _in_child(lambda: _tried(trial, before, path, injector))
    finally:
        shutil.rmtree(path.parent)


def _watched(trial: Trial, before: Path, root: Path, injector: Injector) -> object:
    prepare(before, trial.story, trial.layout)
    return watch_calls(trial, before, root / f"{before.name}, watched", injector)


def _tried(trial: Trial, before: Path, path: Path, injector: Injector) -> object:
    hit, findings = run_trial(trial, before, path, injector)
    left = names(path) - names(before.with_name(f"{before.name}, watched"))
    if litter := sorted(name for name in left if not HARMLESS.search(name)):
        findings.append(Finding("litter", f"left in the cache: {litter}"))
    return {"hit": hit, "findings": [finding.to_json() for finding in findings]}


def _in_child(work: Callable[[], object]) -> object:
    """Return what `work` returns in a child, or a finding on how the child ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            os.write(writing, json.dumps(work()).encode())
        except BaseException as error:
            os.write(
                writing,
                json.dumps({"hit": True, "findings": [_finding("crashed", repr(error))]}).encode(),
            )
        finally:
            os._exit(0)
    os.close(writing)
    data, hung = b"", False
    while not hung:
        hung = not select.select([reading], [], [], LIMIT_S)[0]
        piece = b"" if hung else os.read(reading, 1 << 16)
        data += piece
        if not piece:
            break
    os.close(reading)
    if hung:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if data and not hung:
        return json.loads(data)
    what = (
        _finding("stuck", f"over {LIMIT_S} s") if hung else _finding("crashed", f"status {status}")
    )
    return {"hit": True, "findings": [what]}


def _finding(what: str, detail: str) -> dict[str, str]:
    return Finding(what, detail).to_json()


if __name__ == "__main__":
    main()

"""Any system call of a writer may fail, once or from then on: nothing leaks, nothing is lost.

`make faults` runs it; FEATCACHE_FAULTS is how many faults, FEATCACHE_FAULT_SEED which of them.
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from eight_layouts import LAYOUTS
from fault_injector import ERRORS, LIBRARY, SHORT, compiled
from fault_stories import STORIES
from fault_trial import PROMISES, Trial

FAULTS = int(os.environ.get("FEATCACHE_FAULTS", "2112"))
SEED = int(os.environ.get("FEATCACHE_FAULT_SEED", "0"))
SERVERS = os.cpu_count() or 1
SHOWN = 15  # findings of a kind


class Server:
    """A process that runs trials, see `fault_server`."""

    def __init__(self, library: Path, root: Path) -> None:
        root.mkdir()
        settings = {"LD_PRELOAD": str(library), LIBRARY: str(library), "PYTHONWARNINGS": "ignore"}
        here = Path(__file__).parent
        settings["PYTHONPATH"] = os.pathsep.join(
            [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
        )
        command = [sys.executable, str(here / "fault_server.py"), str(root)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
        )

    def ask(self, trial: Trial, watch: bool) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"trial": asdict(trial), "watch": watch}),
            file=self._process.stdin,
            flush=True,
        )
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


class Servers:
    """Several of them, each at one story and layout at a time."""

    def __init__(self, library: Path, root: Path) -> None:
        self._servers = [Server(library, root / str(number)) for number in range(SERVERS)]
        self._free: SimpleQueue[Server] = SimpleQueue()
        for server in self._servers:
            self._free.put(server)

    def map(self, cells: list[tuple[str, str]], faults: int) -> Iterator[tuple[Trial, Any]]:
        """Try `faults` faults in each story and layout; gives each trial with its outcome."""
        with ThreadPoolExecutor(SERVERS) as pool:
            for outcomes in pool.map(lambda cell: self._try(cell[0], cell[1], faults), cells):
                yield from outcomes

    def _try(self, story: str, layout: str, faults: int) -> list[tuple[Trial, Any]]:
        server = self._free.get()
        try:
            watched = server.ask(Trial(layout, story, "write", 0, 0, False), watch=True)
            outcomes: list[tuple[Trial, Any]] = []
            for trial in _trials(story, layout, watched):
                outcome = server.ask(trial, watch=False)
                outcomes += [(trial, outcome)] if outcome["hit"] else []
                if len(outcomes) == faults:
                    break
            return outcomes
        finally:
            self._free.put(server)

    def close(self) -> None:
        for server in self._servers:
            server.close()


def _trials(story: str, layout: str, watched: dict[str, dict[str, list[int]]]) -> Iterator[Trial]:
    """Faults in a random order, as many at each kind of call on each sort of file, rarest first."""
    chance = random.Random(f"{SEED} {story} {layout}")
    sites = []
    for kind, numbers in (
        (kind, numbers) for kind, found in watched.items() for numbers in found.values()
    ):
        choices = [
            Trial(layout, story, kind, number, code, lasting)
            for number in numbers
            for code in ERRORS[kind]
            for lasting in (False, True)
        ]
        sites.append(chance.sample(choices, len(choices)))
    chance.shuffle(sites)
    sites.sort(key=len)
    turns = zip_longest(*sites)
    return (trial for turn in turns for trial in turn if trial is not None)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    library = compiled(tmp_path)
    if library is None:
        pytest.skip("faults at system calls need a C compiler (cc, gcc or clang)")
    found = Servers(library, tmp_path)
    yield found
    found.close()


@pytest.mark.timeout(3600)
def test_any_system_call_may_fail(servers: Servers) -> None:
    cells = [(story, layout) for layout in LAYOUTS for story in STORIES]
    faults, broken, examples = 0, Counter[str](), defaultdict(list)
    for trial, outcome in servers.map(cells, -(-FAULTS // len(cells))):
        faults += 1
        for what in {finding["what"] for finding in outcome["findings"]}:
            broken[what] += 1
        for finding in outcome["findings"]:
            examples[finding["what"]].append((finding["detail"], _said(trial)))
    print(
        f"\nfaults: {faults:,} faults: " + ", ".join(f"{broken[what]} {what}" for what in PROMISES)
    )
    _show(examples)
    assert faults >= FAULTS
    assert not broken


def _said(trial: Trial) -> str:
    code = "short" if trial.code == SHORT else errno.errorcode[trial.code]
    lasting = " from then on" * trial.lasting
    return f"{trial.layout}, {trial.story}: {trial.kind} #{trial.number} {code}{lasting}"


def _show(examples: dict[str, list[tuple[str, str]]]) -> None:
    """Print the findings grouped by their text, without what is random in it."""
    for what, found in examples.items():
        kinds: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for detail, said in found:
            kinds[re.sub(r"'[^']*'|[0-9a-f]*[0-9][0-9a-f]*", "*", detail)].append((detail, said))
        for alike in sorted(kinds.values(), key=len, reverse=True)[:SHOWN]:
            print(f"  {what}, {len(alike)} times: {alike[0][0][:600]}\n      such as {alike[0][1]}")

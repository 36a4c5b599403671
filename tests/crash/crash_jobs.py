"""One scenario in one layout: its crashes are drawn, made and checked.

A crash is of one of three kinds: the writer is killed; the power is cut; or there are two crashes,
the second of them a power cut. After the first, mostly a kill, another writer goes on where the
first one was, with what that one did not sync still at risk; it may be killed in turn while it
recovers.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random

from crash_checks import Oracle, check
from crash_disk import Disk, Tree, digest, restarted, write_tree
from crash_power import STYLES, PowerCut
from crash_promises import Promise
from crash_steps import Step, describe, is_change, moves_name
from crash_stories import STORIES
from crash_trace import WorkFailedError, traced
from crash_writers import PLACE, go_on, oracle

KILLED, POWER, TWICE = KINDS = ("killed", "power cut", "crashed twice")
CUTS = 7  # power cuts of the writer that goes on after a first crash
KILLED_TWICE = "killed twice"  # the second time while it recovers
FIRST = (KILLED, KILLED, KILLED_TWICE, POWER)
Draw = tuple[int, str]  # how many steps are done when all ends, and in which style


@dataclass
class Report:
    """What became of the crashes of one scenario in one layout."""

    story: str
    layout: str
    states: Counter[str] = field(default_factory=Counter)  # by kind
    wrongs: Counter[str] = field(default_factory=Counter)  # by what is wrong
    notes: list[str] = field(default_factory=list)


def crash(story: str, layout: str, states: int, seed: int) -> Report:
    """Check about so many crashes of one scenario in one layout."""
    with tempfile.TemporaryDirectory(prefix="featcache-crash-") as directory:
        return Job(Report(story, layout), states, seed, Path(directory)).run()


class Job:
    """Draws crashes of one scenario in one layout, and checks them."""

    def __init__(self, report: Report, states: int, seed: int, directory: Path) -> None:
        self.report = report
        self._states = states
        self._random = Random(f"{seed} {report.story} {report.layout}")
        self._root, self._left = directory / "disk", directory / "left"
        self._oracle = _oracle(report.layout)
        self._seen: set[bytes] = set()

    def run(self) -> Report:
        """Watch the writer, then crash it."""
        start, steps = self._watched()
        third = self._states // 3
        kills = [n for n, step in enumerate(steps) if is_change(step) or step.func is Disk.mark]
        torn = [n for n, step in enumerate(steps) if step.func is Disk.write]
        draws = [(n + 1, "killed") for n in kills] + [(n, "killed in a write") for n in torn]
        self._crash(start, steps, draws, KILLED, third)
        draws = [(n, style) for n in range(len(steps) + 1) for style in STYLES]
        self._crash(start, steps, draws, POWER, third)
        for number, draw in enumerate(self._first_crashes(start, steps, third // CUTS)):
            self._go_on(start, steps[:draw], FIRST[number % len(FIRST)])
        return self.report

    def run_after(self, what: str, cuts: int) -> Report:
        """Kill the writer after each step that renames to a path; cut the power of the next one."""
        start, steps = self._watched()
        disk = start.copy()
        for number, step in enumerate(steps, start=1):
            if moves_name(step) and describe(disk, step).endswith(what):
                self._go_on(start, steps[:number], KILLED, cuts=cuts)
            step(disk)
        return self.report

    def _watched(self) -> tuple[Disk, list[Step]]:
        """Let the writer of the story work; the disk of before, and what was done to it."""
        story, disk = STORIES[self.report.story], Disk()
        self._root.mkdir()
        for work in (story.before, story.work):
            if work is not None:
                disk.settle()
                start = disk.copy()
                steps = self._watch(disk, partial(work, self._root / PLACE, self.report.layout))
        return start, steps

    def _watch(self, disk: Disk, work: Callable[[], object]) -> list[Step]:
        """Let a writer work on the real directory, and take the disk along."""
        steps = traced(disk, self._root, work)
        for step in steps:
            step(disk)
        return steps

    def _first_crashes(self, disk: Disk, steps: Sequence[Step], count: int) -> list[int]:
        """Draw after how many steps a writer ends that another one is to follow.

        Most follow a name that was made or moved: it is not durable yet. The higher it is, the more
        goes with it, so the likelier it is drawn.
        """
        disk, weights = disk.copy(), [0.0] * (len(steps) + 1)
        for number, step in enumerate(steps):
            if moves_name(step):
                weights[number + 1] = 0.5 ** describe(disk, step).count("/")
            step(disk)
        drawn: set[int] = set()
        while len(drawn) < min(count, len(steps)):
            anywhere = self._random.random() < 1 / 3
            drawn |= set(self._random.choices(range(len(weights)), None if anywhere else weights))
        return self._random.sample(sorted(drawn), len(drawn))

    def _go_on(
        self, disk: Disk, steps: Sequence[Step], how: str, before: str = "", cuts: int = CUTS
    ) -> None:
        """End a writer after some steps, let another go on, and cut its power."""
        disk = disk.copy()
        for step in steps:
            step(disk)
        after = f"{before}{how} after {describe(disk, steps[-1]) if steps else 'nothing'}, then "
        if how == POWER:
            style = self._random.choice(STYLES)
            disk = restarted(PowerCut(disk, style, self._random).tree(), disk.marks)
        shutil.rmtree(self._root)
        write_tree(disk.tree(), self._root)
        start = disk.copy()
        try:
            more = self._watch(disk, partial(go_on, self._root / PLACE, self.report.layout))
        except WorkFailedError as error:
            self._note(f"{after}going on", {"unopenable": str(error)})
            return
        if how == KILLED_TWICE:
            opened = next(n for n, step in enumerate(more) if "committed" in str(step.keywords))
            self._go_on(start, more[: self._random.randint(0, opened)], KILLED, after)
        else:
            draws = [(n, style) for n in range(len(more) + 1) for style in STYLES]
            self._crash(start, more, draws, TWICE, cuts, after)

    def _crash(
        self,
        start: Disk,
        steps: Sequence[Step],
        draws: list[Draw],
        kind: str,
        count: int,
        after: str = "",
    ) -> None:
        """Check so many of the crashes that may be drawn; those that leave the same count once."""
        self._random.shuffle(draws)
        while draws and count > 0:
            now, draws = draws[:count], draws[count:]
            disk, done = start.copy(), 0
            for position, style in sorted(now):
                for step in steps[done:position]:
                    step(disk)
                done = position
                tree = self._left_by(disk, steps, position, style)
                coming = describe(disk, steps[position]) if position < len(steps) else "the end"
                where = f"{after}{style} at step {position}, before {coming}"
                count -= self._check(tree, disk, kind, where)

    def _left_by(self, disk: Disk, steps: Sequence[Step], position: int, style: str) -> Tree:
        if style == "killed":
            return disk.tree()
        if style != "killed in a write":
            return PowerCut(disk, style, self._random).tree()
        keywords = steps[position].keywords
        number, data = keywords["number"], keywords["data"]
        disk.write(number, keywords["offset"], data[: self._random.randrange(max(1, len(data)))])
        tree = disk.tree()
        disk.file(number).changes.pop()
        return tree

    def _check(self, tree: Tree, disk: Disk, kind: str, where: str) -> bool:
        """Check one crash, unless there was one like it."""
        promise = Promise().after(disk.marks)
        key = digest(tree) + repr(promise).encode()
        if key in self._seen:
            return False
        self._seen.add(key)
        write_tree(tree, self._left)
        wrongs = check(self._left / PLACE, self.report.layout, promise, self._oracle)
        shutil.rmtree(self._left)
        self.report.states[kind] += 1
        self._note(where, wrongs)
        return True

    def _note(self, where: str, wrongs: dict[str, str]) -> None:
        self.report.wrongs.update(list(wrongs))
        if wrongs:
            self.report.notes.append(f"{where}: {wrongs}")


@cache
def _oracle(layout: str) -> Oracle:
    with tempfile.TemporaryDirectory() as directory:
        return {
            "old": oracle(Path(directory, "old"), layout, "old"),
            "new": oracle(Path(directory, "new"), layout, "new"),
        }

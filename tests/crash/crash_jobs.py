"""One scenario in one layout: its crashes are drawn, made and checked.

A crash is of one of three kinds: the writer is killed; the power is cut; or the writer is killed,
another one goes on where it was, and then the power is cut, with what the first one did not sync
still at risk. The other writer may itself be killed while it recovers.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random

from crash_checks import Oracle, check
from crash_disk import Disk, Tree, write_tree
from crash_power import STYLES, PowerCut
from crash_promises import Promise
from crash_steps import Step, describe, is_change, moves_name
from crash_stories import STORIES
from crash_trace import traced
from crash_writers import PLACE, go_on, oracle

KILLED, POWER, BOTH = KINDS = ("killed", "power cut", "killed, then power cut")
CUTS = 6  # power cuts of the writer that goes on after a kill
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
        story, disk = STORIES[self.report.story], Disk()
        self._root.mkdir()
        for work in (story.before, story.work):
            if work is not None:
                disk.settle()
                start = disk.copy()
                steps = self._watch(disk, partial(work, self._root / PLACE, self.report.layout))
        half = self._states * 2 // 5
        kills = [n for n, step in enumerate(steps) if is_change(step) or step.func is Disk.mark]
        torn = [n for n, step in enumerate(steps) if step.func is Disk.write]
        draws = [(n + 1, "killed") for n in kills] + [(n, "killed in a write") for n in torn]
        self._crash(start, steps, draws, KILLED, half)
        draws = [(n, style) for n in range(len(steps) + 1) for style in STYLES]
        self._crash(start, steps, draws, POWER, half)
        for number, draw in enumerate(self._kills(start, steps, self._states // 5 // CUTS)):
            self._go_on(start, steps[:draw], number % 4 == 3)
        return self.report

    def _watch(self, disk: Disk, work: Callable[[], object]) -> list[Step]:
        """Let a writer work on the real directory, and take the disk along."""
        steps = traced(disk, self._root, work)
        for step in steps:
            step(disk)
        return steps

    def _kills(self, disk: Disk, steps: Sequence[Step], count: int) -> list[int]:
        """Draw where to kill a writer that another one is to follow.

        Most follow a name that was made or moved: it is not durable yet. The higher it is, the more
        goes with it, so the likelier it is drawn.
        """
        disk, weights = disk.copy(), [0.0] * (len(steps) + 1)
        for number, step in enumerate(steps):
            if moves_name(step):
                weights[number + 1] = 0.5 ** describe(disk, step).count("/")
            step(disk)
        named = self._random.choices(range(len(weights)), weights, k=count - count // 3)
        return sorted({*named, *self._random.choices(range(len(weights)), k=count // 3)})

    def _go_on(self, disk: Disk, steps: Sequence[Step], again: bool, before: str = "") -> None:
        """Kill a writer after some steps, let another go on, cut its power; or kill that too."""
        disk = disk.copy()
        for step in steps:
            step(disk)
        after = f"{before}killed after {describe(disk, steps[-1]) if steps else 'nothing'}, then "
        shutil.rmtree(self._root)
        write_tree(disk.tree(), self._root)
        start = disk.copy()
        more = self._watch(disk, partial(go_on, self._root / PLACE, self.report.layout))
        if again:
            opened = next(n for n, step in enumerate(more) if "committed" in str(step.keywords))
            self._go_on(start, more[: self._random.randint(0, opened)], False, after)
        else:
            draws = [(n, style) for n in range(len(more) + 1) for style in STYLES]
            self._crash(start, more, draws, BOTH, CUTS, after)

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
                next = describe(disk, steps[position]) if position < len(steps) else "the end"
                where = f"{after}{style} at step {position}, before {next}"
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
        key = hashlib.sha256(pickle.dumps((tree, repr(promise)))).digest()
        if key in self._seen:
            return False
        self._seen.add(key)
        write_tree(tree, self._left)
        wrongs = check(self._left / PLACE, self.report.layout, promise, self._oracle)
        shutil.rmtree(self._left)
        self.report.states[kind] += 1
        self.report.wrongs.update(list(wrongs))
        if wrongs:
            self.report.notes.append(f"{where}: {wrongs}")
        return True


@cache
def _oracle(layout: str) -> Oracle:
    with tempfile.TemporaryDirectory() as directory:
        return {
            "old": oracle(Path(directory, "old"), layout, "old"),
            "new": oracle(Path(directory, "new"), layout, "new"),
        }

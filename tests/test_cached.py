"""Properties that are computed once: no process that is forked meanwhile waits for their lock."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import featcache
from featcache._cached import cached_property

ROOT = Path(featcache.__file__).parent


class Slow:
    """Says when a thread computes, and lets it end when it is told to."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.calls = threading.Event(), threading.Event(), 0
        self.waits = True

    @cached_property
    def value(self) -> int:
        """The value."""
        self.calls += 1
        self.begun.set()
        if self.waits:
            self.may_end.wait(60)
        return 7


def test_a_value_is_computed_once_and_belongs_to_its_object() -> None:
    one, other = Slow(), Slow()
    one.waits = other.waits = False
    assert (one.value, one.value, one.calls) == (7, 7, 1)
    assert (other.value, other.calls) == (7, 1)
    assert Slow.value.__doc__ == "The value."


def test_a_child_that_is_forked_while_a_thread_computes_goes_on() -> None:
    slow = Slow()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert slow.begun.wait(60)
    slow.waits = False  # what the child computes
    child = multiprocessing.get_context("fork").Process(target=lambda: slow.value)
    child.start()
    child.join(20)
    code = child.exitcode
    child.kill()
    slow.may_end.set()
    thread.join()
    assert code == 0


def test_no_property_of_ours_holds_the_lock_of_python_3_11() -> None:
    with_it = [
        path.relative_to(ROOT).as_posix()
        for path in sorted(ROOT.rglob("*.py"))
        if "import cached_property" in (text := path.read_text())
        and "from featcache._cached import cached_property" not in text
    ]
    assert with_it == []

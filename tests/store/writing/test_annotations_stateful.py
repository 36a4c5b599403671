"""Any sequence of writing, annotating, deleting, merging, compacting, overwriting and dying leaves
what a dict says.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import hypothesis.strategies as st
import pytest
from annotation_helpers import found_in, open_writer
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_helpers import arrays_of

import featcache
from featcache import CacheWriter
from featcache.writing import compact
from featcache.writing import compact as compacting

Values = dict[str, str | None]
IDS = st.sampled_from("abcdef")
TEXTS = st.none() | st.sampled_from(["x", "y", "größe"])
VALUES = st.fixed_dictionaries({}, optional={"one": TEXTS, "two": TEXTS})
SOME = st.dictionaries(IDS, VALUES, max_size=4)


class Killed(BaseException):
    """A process ends here."""


def killed_there(*_: object) -> NoReturn:
    raise Killed


class AnnotatedCache(RuleBasedStateMachine):
    """A cache, and what each utterance has by the rules of `docs/format.md`."""

    @initialize()
    def make(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="featcache-"))
        self.path = self.root / "cache"
        self.own: dict[str, Values] = {}  # what was written with the utterance
        self.visible: dict[str, Values] = {}  # what readers see
        self.carried: set[str] = set()
        self.patches = pytest.MonkeyPatch()
        for module in (compact, compacting):
            self.patches.setattr(module, "FANOUT", 2)  # parts are merged at once
        with open_writer(self.path):
            pass

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)
            self.patches.undo()

    @rule(given=SOME)
    def append(self, given: dict[str, Values]) -> None:
        with open_writer(self.path) as writer:
            self.write(writer, given)

    @rule(given=SOME)
    def append_and_die(self, given: dict[str, Values]) -> None:
        writer = open_writer(self.path)
        self.write(writer, given, published=False)
        writer.commit()
        shutil.copytree(self.path, self.root / "dead")
        writer.abort()
        shutil.rmtree(self.path)
        (self.root / "dead").rename(self.path)
        with open_writer(self.path):
            self.publish({*given} - {*self.visible})

    @rule(ids=st.sets(IDS), again=SOME)
    def delete(self, ids: set[str], again: dict[str, Values]) -> None:
        with open_writer(self.path) as writer:
            gone = ids & {*self.visible}
            writer.delete(gone)
            for id in gone:
                del self.own[id]
            if gone:
                self.publish(set())
            self.write(writer, again)

    @rule(ids=st.sets(IDS), killed=st.booleans())
    def compact(self, ids: set[str], killed: bool) -> None:
        """What readers see stays, and is carried as before."""
        gone = ids & {*self.visible}
        featcache.open(self.path).delete(gone)
        for id in gone:
            del self.own[id]
        if gone:
            self.publish(set())
        if killed:
            with pytest.MonkeyPatch.context() as patched, suppress(Killed):
                patched.setattr(compacting, "publish", killed_there)
                featcache.open(self.path).compact()
        else:
            featcache.open(self.path).compact()

    @rule(given=SOME)
    def overwrite(self, given: dict[str, Values]) -> None:
        if not self.visible:
            return
        self.own = {}
        with open_writer(self.path, overwrite=True) as writer:
            for id, values in given.items():
                writer.write(id, arrays_of(1), annotations=values)
                self.own[id] = values
            self.publish({*given})

    @rule(given=SOME)
    def annotate(self, given: dict[str, Values]) -> None:
        featcache.open(self.path).annotate(given, unknown="skip")
        there = {id: values for id, values in given.items() if id in self.visible}
        known = {name for values in self.visible.values() for name, text in values.items() if text}
        new = {name for values in there.values() for name, text in values.items() if text}
        for id, values in there.items():
            self.visible[id] = self.visible[id] | values
        touched = {name for values in there.values() for name in values}
        self.carried |= touched & (known | new)
        self.forget()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "path"):
            expected = {
                id: {name: text for name, text in values.items() if text is not None}
                for id, values in self.visible.items()
            }
            assert found_in(self.path) == dict(sorted(expected.items()))

    def write(self, writer: CacheWriter, given: dict[str, Values], published: bool = True) -> None:
        new = {id: values for id, values in given.items() if id not in writer}
        for id, values in new.items():
            writer.write(id, arrays_of(1), annotations=values)
            self.own[id] = values
        if published and new:
            self.publish({*new})

    def publish(self, new: set[str]) -> None:
        """Make a generation of what was written; `new` are ids whose parts are new in it."""
        before, after = self.visible, {}
        for id, own in self.own.items():
            after[id] = {name: own.get(name) for name in ("one", "two")}
            for name in self.carried:
                said = own.get(name) is not None
                if id in before and not (id in new and said):
                    after[id][name] = before[id].get(name)
        self.visible = after
        self.forget()

    def forget(self) -> None:
        """An annotation that no row has is none, carried or not."""
        rows = self.visible.values()
        self.carried = {name for name in self.carried if any(row.get(name) for row in rows)}


TestAnnotatedCache = AnnotatedCache.TestCase
TestAnnotatedCache.settings = settings(
    max_examples=40,
    stateful_step_count=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

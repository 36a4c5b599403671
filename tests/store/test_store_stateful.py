"""Any sequence of writing, committing, publishing, crashing, overwriting, deleting, stamping,
tagging, compacting and reading agrees with a dict.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_helpers import Arrays, assert_holds, two_features

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CacheError, DuplicateIdError, FeatureError
from featcache.format import Stamps, read_building_file
from featcache.testing.contract import traces_in
from featcache.writing import part_writer, queue
from featcache.writing.part_writer import PartWriter

IDS = st.sampled_from(["a", "a/b", "b.c", "é", "😀", "x" * 300, "%2F", " ", "10", "9"]) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=5
)
FRAMES = st.integers(0, 9)


def arrays_for(frames: int, seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {
        "fbank": random.standard_normal((frames, 3)).astype(np.float32),
        "units": random.integers(-9, 9, frames // 2, np.int16),
    }


def stamps_of(arrays: Arrays, entry: int = 1) -> Stamps:
    """Stamps that tell whose they are."""
    data = b"".join(array.tobytes() for array in arrays.values())
    return Stamps(xxhash.xxh3_64_intdigest(data), entry)


class StoreMachine(RuleBasedStateMachine):
    """What is on disk at any time is `published`; what survives a crash is at least `safe`."""

    features: list[FeatureStorageConfig]

    @initialize(rows=st.sampled_from([2, 100]))
    def start(self, rows: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="featcache-"))
        self.path, self.crashes, self.model = self.folder / "0", 0, 0
        self.settings = part_writer.PART_ROWS, queue.COMMIT_INTERVAL_S
        part_writer.PART_ROWS, queue.COMMIT_INTERVAL_S = rows, 1e6
        self.writer: CacheWriter | None = None
        self.part: PartWriter | None = None
        self.overwriting = False
        self.published: dict[str, Arrays] | None = None  # what readers see
        self.safe: dict[str, Arrays] = {}  # committed in the build that is written
        self.risky: dict[str, Arrays] = {}  # written to it, may be lost
        self.of_part: dict[str, Arrays] = {}  # written by the part writer, which seals it
        # sealed by part writers, which an open writer does not know of
        self.of_others: set[str] = set()
        self.seed = 0
        self.deleted: set[str] = set()
        # of the build that is written, and what readers saw last; kept since the last publish?
        self.file: bytes | None = None
        self.seen: bytes | None = None
        self.is_new = False
        self.tags: dict[str, dict[str, Arrays]] = {}
        self.gone: list[Arrays] = []  # deleted, in any build

    def teardown(self) -> None:
        if self.writer is not None:
            if self.part is not None:
                self.part.abort()
            self.writer.abort()
        part_writer.PART_ROWS, queue.COMMIT_INTERVAL_S = self.settings
        shutil.rmtree(self.folder)

    def fingerprint(self) -> dict[str, object]:
        return {"model": self.model}

    @precondition(lambda self: self.writer is None)
    @rule()
    def open(self) -> None:
        self.writer = CacheWriter(
            self.path, self.features, self.fingerprint(), overwrite=self.overwriting
        )
        for id in self.safe:
            assert id in self.writer
        self.risky, self.of_others = {}, set()
        self.recovered_is_visible()

    @precondition(lambda self: self.writer is None and self.published and not self.overwriting)
    @rule(new_model=st.booleans())
    def begin_overwrite(self, new_model: bool) -> None:
        self.model += new_model
        self.overwriting = True
        self.safe = {}
        self.file = None
        self.open()

    @precondition(lambda self: self.writer is not None)
    @rule(id=IDS, frames=FRAMES)
    def write(self, id: str, frames: int) -> None:
        assert self.writer is not None
        if id in self.of_part or id in self.of_others:
            return  # which only shows when it is published
        self.seed += 1
        arrays = arrays_for(frames, self.seed)
        if id in self.writer:
            assert id in self.safe or id in self.risky
            with pytest.raises(DuplicateIdError):
                self.writer.write(id, arrays)
        else:
            assert id not in self.safe
            copies = {name: array.copy() for name, array in arrays.items()}
            self.writer.write(id, copies, stamps=stamps_of(arrays))
            self.risky[id] = arrays

    @precondition(lambda self: self.writer is not None)
    @rule(id=IDS)
    def write_something_wrong(self, id: str) -> None:
        assert self.writer is not None
        if id not in self.writer:
            with pytest.raises(FeatureError):
                self.writer.write(
                    id, {"fbank": np.full((2, 3), np.nan), "units": np.zeros(1, np.int16)}
                )

    @precondition(lambda self: self.writer is not None)
    @rule(data=st.data())
    def restamp(self, data: st.DataObject) -> None:
        assert self.writer is not None
        known = self.safe | self.risky
        for id in data.draw(st.lists(st.sampled_from(sorted(known)))) if known else ():
            if id in self.writer:
                self.seed += 1
                self.writer.restamp({id: stamps_of(known[id], self.seed)})

    @precondition(lambda self: self.writer is not None and self.part is None)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        assert self.writer is not None
        known = sorted(id for id in self.safe | self.risky if id in self.writer)
        if not known:
            return
        ids = data.draw(st.sets(st.sampled_from(known), min_size=1, max_size=3))
        self.writer.delete(ids)
        self.safe |= self.risky
        self.risky = {}
        for id in ids:
            assert id not in self.writer
            self.gone.append(self.safe.pop(id))
        self.deleted |= ids
        if not self.overwriting:
            self.became_visible()

    @precondition(lambda self: self.can_be_edited())
    @rule(data=st.data())
    def delete_without_a_writer(self, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.sampled_from(sorted(self.safe)), min_size=1, max_size=3))
        cache = featcache.open(self.path)
        cache.delete(ids)
        self.gone += [self.safe.pop(id) for id in ids]
        self.deleted |= ids
        self.became_visible()
        cache.refresh()
        assert len(cache) == len(self.safe)

    @precondition(lambda self: self.can_be_edited())
    @rule(name=st.sampled_from(["v1", "v2"]))
    def tag(self, name: str) -> None:
        cache = featcache.open(self.path)
        if name in self.tags:
            cache.untag(name)
        cache.tag(name)
        self.tags[name] = dict(self.published or {})

    @precondition(lambda self: self.can_be_edited())
    @rule(drop_tags=st.booleans())
    def compact(self, drop_tags: bool) -> None:
        cache = featcache.open(self.path)
        try:
            cache.compact(drop_tags=drop_tags)
        except CacheError:  # a tag holds what was deleted
            assert self.tags
            assert not drop_tags
            return
        left = cache.tags
        self.tags = {tag: each for tag, each in self.tags.items() if tag in left}
        self.became_visible()
        traces = [each["fbank"].tobytes() for each in self.gone if each["fbank"].size]
        assert not traces_in(self.path, traces)

    def can_be_edited(self) -> bool:
        return self.writer is None and bool(self.published) and not self.overwriting

    @precondition(lambda self: self.writer is not None)
    @rule(again=st.booleans())
    def keep_file(self, again: bool) -> None:
        assert self.writer is not None
        data = self.file if again and self.file is not None else b"%d" % self.seed
        self.is_new = self.is_new or data != self.file
        self.file = data
        self.writer.keep_file("probe", data)

    @precondition(lambda self: self.writer is not None)
    @rule()
    def commit(self) -> None:
        assert self.writer is not None
        self.writer.commit()
        self.safe |= self.risky
        self.risky = {}

    @precondition(
        lambda self: self.writer is not None and self.part is None and part_writer.PART_ROWS > 2
    )
    @rule()
    def open_part(self) -> None:  # of few rows, it would be sealed at times that are not known here
        self.part = PartWriter(self.path, self.features, self.fingerprint())

    @precondition(lambda self: self.part is not None)
    @rule(id=IDS, frames=FRAMES)
    def write_part(self, id: str, frames: int) -> None:
        assert self.part is not None
        if id not in self.safe and id not in self.risky and id not in self.of_part:
            self.seed += 1
            self.of_part[id] = arrays_for(frames, self.seed)
            self.part.write(id, self.of_part[id], stamps=stamps_of(self.of_part[id]))

    @precondition(lambda self: self.part is not None)
    @rule()
    def close_part(self) -> None:
        assert self.part is not None
        self.part.close()
        self.safe |= self.of_part
        self.of_others |= set(self.of_part)
        self.part, self.of_part = None, {}

    @precondition(lambda self: self.writer is not None)
    @rule(complete=st.booleans())
    def publish(self, complete: bool) -> None:
        assert self.writer is not None
        self.writer.publish(complete)
        self.became_visible()

    @precondition(lambda self: self.writer is not None and self.part is None)
    @rule()
    def close(self) -> None:
        assert self.writer is not None
        self.writer.close()
        self.became_visible()
        self.writer = None
        assert featcache.open(self.path).complete

    def became_visible(self) -> None:
        self.safe |= self.risky
        self.risky = {}
        self.published = dict(self.safe)
        self.overwriting = False
        self.seen, self.is_new = self.file, False

    @precondition(lambda self: self.writer is not None and self.part is None)
    @rule()
    def abort(self) -> None:
        assert self.writer is not None
        self.writer.abort()
        self.writer = None
        if self.is_new:
            self.file, self.is_new = None if self.overwriting else self.seen, False
        with CacheWriter(
            self.path, self.features, self.fingerprint(), overwrite=self.overwriting
        ) as writer:
            self.safe = {id: arrays for id, arrays in self.safe.items() if id in writer}
            writer.abort()
        if not self.overwriting:
            assert set(self.published or {}) <= set(self.safe)
            self.published = dict(self.safe)
        self.risky = {}

    @precondition(lambda self: self.writer is not None)
    @rule()
    def crash(self) -> None:
        """Go on with a copy of what is on disk now, as if all writers were killed."""
        assert self.writer is not None
        self.crashes += 1
        copy = self.folder / str(self.crashes)
        for writer in (self.writer._parts, self.part):
            if writer is not None:
                writer._thread.drain()  # a copy takes time, in which nothing may change
        shutil.copytree(self.path, copy)
        if self.part is not None:
            self.part.abort()
            self.part = None
        self.writer.abort()
        self.path, self.writer = (
            copy,
            CacheWriter(copy, self.features, self.fingerprint(), overwrite=self.overwriting),
        )
        self.is_new = False
        may_be_there = self.risky | self.of_part
        for id in self.deleted - self.safe.keys() - may_be_there.keys():
            assert id not in self.writer
        for id in self.safe:
            assert id in self.writer
        self.safe |= {id: arrays for id, arrays in may_be_there.items() if id in self.writer}
        self.risky, self.of_part, self.of_others = {}, {}, set()
        self.recovered_is_visible()

    def recovered_is_visible(self) -> None:
        """A writer publishes at once what it finds sealed or brings back."""
        self.published = (self.published or {}) if self.overwriting else dict(self.safe)

    @invariant()
    def readers_see_what_is_published(self) -> None:
        if self.published is not None:
            cache = featcache.open(self.path, verify="arrays")
            assert_holds(cache, self.published)
            stamps = cache.opened.index.stamps
            inputs = () if stamps is None else stamps.input.tolist()
            assert len(inputs) == len(cache)
            for id, stamp in zip(cache, inputs, strict=True):
                assert stamp == stamps_of(self.published[id]).input
            files = {self.seen} if self.overwriting else {self.seen, self.file}
            assert cache.opened.file("probe") in files

    @invariant()
    def tags_show_what_they_name(self) -> None:
        for tag, arrays in self.tags.items():
            assert_holds(featcache.open(self.path, version=tag), arrays)

    @invariant()
    def the_build_has_its_file(self) -> None:
        if self.writer is not None:
            assert read_building_file(self.path, "probe") == self.file


class MemmapStoreMachine(StoreMachine):
    features = two_features()


class MixedStoreMachine(StoreMachine):
    features = two_features("hdf5", "webdataset")


@pytest.mark.parametrize("machine", [MemmapStoreMachine, MixedStoreMachine])
def test_the_store_agrees_with_a_dict(machine: Any) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=30))

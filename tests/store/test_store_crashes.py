"""A crash at any step, killed or by a power cut, costs at most what was not committed, and needs no
repair.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from store_disk import Crash, Disk
from store_helpers import (
    FINGERPRINT,
    Arrays,
    arrays_of,
    assert_holds,
    id_of,
    make_cache,
    two_features,
)

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import NotACacheError
from featcache.format import index_file, read_manifest

OTHER: dict[str, object] = {"model": "hubert"}
ALL = range(9)
EVERY_CRASH = "FEATCACHE_EVERY_CRASH" in os.environ  # takes minutes; else a sample of


@dataclass(frozen=True)
class Content:
    """What a reader may see: utterances of one of two models; None for no cache."""

    numbers: frozenset[int]
    fingerprint: str = "wavlm"

    def oracle(self) -> dict[str, Arrays]:
        shift = 0 if self.fingerprint == "wavlm" else 1000
        return {id_of(number): arrays_of(number + shift) for number in self.numbers}


@dataclass(frozen=True)
class Promise:
    """The state allowed after a crash: these are committed, one of these contents is visible."""

    committed: frozenset[int]
    visible: tuple[Content | None, ...]


class Story:
    """One writer at work on a watched disk."""

    def __init__(
        self,
        tmp_path: Path,
        visible: Content | None,
        overwrite: bool = False,
        features: Sequence[FeatureStorageConfig] = tuple(two_features()),
    ) -> None:
        self.features = features
        self.disk = Disk(tmp_path / "disk")
        self.path = tmp_path / "disk" / "exp" / "train"
        self.overwrite = overwrite
        self.disk.promise = Promise(frozenset(), (visible,))

    def open(self) -> CacheWriter:
        if self.disk.promise.visible == (None,):
            self.visible(None, Content(frozenset()))
        self.writer = CacheWriter(
            self.path, self.features, self.fingerprint, overwrite=self.overwrite
        )
        self.visible(self.disk.promise.visible[-1])
        return self.writer

    @property
    def fingerprint(self) -> dict[str, object]:
        return OTHER if self.overwrite else FINGERPRINT

    def write(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.writer.write(id_of(number), arrays_of(number + (1000 if self.overwrite else 0)))

    def commit(self, numbers: Iterable[int]) -> None:
        self.write(numbers)
        self.writer.commit()
        self.committed(numbers)

    def publish(self, numbers: Iterable[int], call: Callable[[], None]) -> None:
        content = Content(frozenset(numbers), "hubert" if self.overwrite else "wavlm")
        self.visible(self.disk.promise.visible[-1], content)
        call()
        self.visible(content)
        self.committed(numbers)

    def visible(self, *contents: Content | None) -> None:
        self.disk.promise = replace(self.disk.promise, visible=contents)

    def committed(self, numbers: Iterable[int]) -> None:
        self.disk.promise = replace(
            self.disk.promise, committed=self.disk.promise.committed | frozenset(numbers)
        )


def check(story: Story, crash: Crash, root: Path) -> None:
    """Reopen what a crash left: for reading, and to finish the work."""
    crash.restore(root)
    path = root / "exp" / "train"
    promise: Promise = crash.promise
    cache = None
    try:
        cache = featcache.open(path, verify="arrays")
    except NotACacheError:
        assert None in promise.visible
    else:
        contents = [content for content in promise.visible if content is not None]
        found = [content for content in contents if _same(cache, content.oracle())]
        assert found, f"{cache} is none of {contents}"
    shift = 1000 if story.overwrite else 0
    overwrite = story.overwrite and cache is not None and cache.fingerprint["model"] != "hubert"
    with CacheWriter(path, story.features, story.fingerprint, overwrite=overwrite) as writer:
        lost = [number for number in promise.committed if id_of(number) not in writer]
        assert not lost
        for number in ALL:
            if id_of(number) not in writer:
                writer.write(id_of(number), arrays_of(number + shift))
    cache = featcache.open(path, verify="arrays")
    assert cache.complete
    assert_holds(cache, {id_of(number): arrays_of(number + shift) for number in ALL})
    assert_tidy(path, cache.generation)


def assert_tidy(path: Path, generation: int) -> None:
    """Nothing is left over: only sealed parts, and the columns of this generation and the one
    before.
    """
    manifest = read_manifest(path)
    assert manifest.generation == generation
    kept = {index_file(name) for name in (manifest.name, manifest.previous) if name}
    assert {entry.name for entry in path.iterdir()} - kept <= {
        "featcache.json",
        "writer.lock",
        "README.txt",
        "parts",
        "manifests",
    }
    assert {entry.stem for entry in (path / "manifests").iterdir()} == {
        manifest.name,
        manifest.previous,
    } - {None}
    for part in (path / "parts").iterdir():
        names = {entry.name for entry in part.iterdir()}
        assert names >= {"part.json", "index.columns"}
        containers = names - {"index.columns", "writer.json", "writer.lock"}
        # a power cut may bring back the name that part.json had before it was renamed
        assert all(
            name.startswith(("part.json", "fbank", "units", "shard-")) for name in containers
        )


def _same(cache: featcache.Cache, expected: dict[str, Arrays]) -> bool:
    return list(cache) == sorted(expected, key=str.encode) and all(
        np.array_equal(cache[id][name], array)
        for id, arrays in expected.items()
        for name, array in arrays.items()
    )


def check_all(story: Story, tmp_path: Path) -> None:
    crashes = story.disk.crashes
    if not EVERY_CRASH:
        crashes = Random(0).sample(crashes, min(len(crashes), 25))  # `make crash` tries thousands
    for number, crash in enumerate(crashes):
        try:
            check(story, crash, tmp_path / f"crash-{number}")
        except BaseException as error:
            error.add_note(f"after a crash: {crash.step}, {crash.promise}")
            raise


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk" / "exp" / "train"


@pytest.mark.parametrize(
    ("one", "other"), [("memmap", "memmap"), ("hdf5", "webdataset"), ("webdataset", "zarr")]
)
def test_while_a_cache_is_made(tmp_path: Path, root: Path, one: str, other: str) -> None:
    story = Story(tmp_path, None, features=two_features(one, other))
    with story.disk.watching():
        story.open()
        story.commit(range(3))
        story.commit(range(3, 5))
        story.publish(range(5), story.writer.publish)
        story.commit(range(5, 7))
        story.write([7])
        story.publish(range(8), story.writer.close)
    check_all(story, tmp_path)


def test_while_a_cache_grows(tmp_path: Path, root: Path) -> None:
    make_cache(root, range(4))
    story = Story(tmp_path, Content(frozenset(range(4))))
    story.committed(range(4))
    with story.disk.watching():
        story.open()
        story.commit(range(4, 6))
        story.write(range(6, 8))
        story.publish(range(8), story.writer.close)
    check_all(story, tmp_path)


def killed_writer(root: Path, overwrite: bool) -> None:
    """Leave what a writer that was killed leaves: an open part with commits."""
    first = Story(root.parents[2], None, overwrite)
    with first.disk.watching():
        first.open()
        first.commit(range(2, 4))
        first.commit(range(4, 6))
        first.write([6])
    first.writer.abort()
    (root.parents[1] / "exp").rename(root.parents[2] / "aborted")
    crash = next(crash for crash in reversed(first.disk.crashes) if crash.step.startswith("killed"))
    crash.restore(root.parents[2] / "killed")
    root.parents[1].rmdir()
    (root.parents[2] / "killed").rename(root.parents[1])


def test_while_the_part_of_a_killed_writer_is_recovered(tmp_path: Path, root: Path) -> None:
    killed_writer(root, overwrite=False)
    story = Story(tmp_path, Content(frozenset()))
    # what is recovered is published at once
    story.visible(Content(frozenset()), Content(frozenset(range(2, 6))))
    story.committed(range(2, 6))
    with story.disk.watching():
        story.open()
        story.commit([7])
        story.publish([*range(2, 6), 7], story.writer.close)
    check_all(story, tmp_path)


def test_while_a_cache_is_overwritten(tmp_path: Path, root: Path) -> None:
    make_cache(root, range(4))
    story = Story(tmp_path, Content(frozenset(range(4))), overwrite=True)
    with story.disk.watching():
        story.open()
        story.commit(range(2))
        story.write(range(2, 4))
        story.publish(range(4), story.writer.publish)
        story.write(range(4, 6))
        story.publish(range(6), story.writer.close)
    check_all(story, tmp_path)


def test_while_an_interrupted_overwrite_goes_on(tmp_path: Path, root: Path) -> None:
    make_cache(root, range(4))
    killed_overwrite(tmp_path, root)
    story = Story(tmp_path, Content(frozenset(range(4))), overwrite=True)
    story.committed(range(2))
    with story.disk.watching():
        story.open()
        story.write([2])
        story.publish(range(3), story.writer.close)
    check_all(story, tmp_path)


def killed_overwrite(tmp_path: Path, root: Path) -> None:
    first = Story(tmp_path, Content(frozenset(range(4))), overwrite=True)
    with first.disk.watching():
        first.open()
        first.commit(range(2))
    first.writer.abort()
    root.parents[1].rename(tmp_path / "aborted")
    crash = next(crash for crash in reversed(first.disk.crashes) if crash.step.startswith("killed"))
    crash.restore(tmp_path / "disk")


def test_while_a_writer_aborts(tmp_path: Path, root: Path) -> None:
    make_cache(root, range(4))
    story = Story(tmp_path, Content(frozenset(range(4))))
    with story.disk.watching():
        story.open()
        story.write(range(4, 6))
        story.writer._parts.seal()
        story.commit(range(6, 8))
        story.disk.promise = Promise(frozenset(range(4)), (Content(frozenset(range(4))),))
        story.writer.abort()
    check_all(story, tmp_path)

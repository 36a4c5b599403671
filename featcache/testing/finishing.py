"""Finishing: what a dead writer left becomes what a closed one leaves, `FinishesFiles`."""

# ruff: noqa: D102 (the name of a test says what it tests)

from __future__ import annotations

import io
import itertools
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import pytest

from featcache.errors import CorruptCacheError
from featcache.interface import Extent, FeatureSpec, FinishesFiles
from featcache.testing.backend_under_test import (
    DIMS,
    Storage,
    encode,
    some_features,
    some_utterances,
)
from featcache.testing.durability import Disk, files_of

FRAMES = {"none": 0, "a": 3, "a/b": 300, "é" * 60: 1, "nothing": 0, "b": 77, "c": 5, "last": 0}
COMMITTED = 6  # utterances of a writer that died after it had written all
MOST_INTERRUPTIONS = 60
TORN = bytes(range(1, 256)) * 3  # what a disk may hold behind the bytes that were synced

Written = list[tuple[str, dict[str, tuple[int, tuple[Extent, ...]]]]]
Dims = Mapping[str, tuple[int, ...]]
SHAPES: Sequence[Dims] = (DIMS, {"fbank": (4,)}, {"fbank": (0,), "energy": ()})


class Finishing:
    """A backend that has `finish` leaves the files as `close` would have."""

    @pytest.mark.parametrize("dims", SHAPES, ids=str)
    @pytest.mark.parametrize("end", ["abort", "close"])
    def test_finished_files_are_those_of_a_closed_writer(
        self, storage: Storage, tmp_path: Path, dims: Dims, end: str
    ) -> None:
        backend = finishing(storage)
        for count in range(len(FRAMES) + 1):
            closed = closed_files(storage, tmp_path / f"closed-{count}", dims, count)
            left = tmp_path / f"left-{count}"
            specs, written = leave(storage, left, dims, end)
            for _ in range(2):
                for path in files_of(left):
                    with (left / path).open("ab") as file:
                        file.write(TORN)
                backend.finish(left, specs, written[:count])
                assert_files(left, closed, count)

    def test_finishing_goes_on_wherever_it_was_interrupted(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        backend = finishing(storage)
        closed = closed_files(storage, tmp_path / "closed", DIMS, COMMITTED)
        specs, written = leave(storage, tmp_path / "left", DIMS)

        def finish(name: str) -> None:
            backend.finish(tmp_path / name, specs, written[:COMMITTED])

        shutil.copytree(tmp_path / "left", tmp_path / "whole")
        calls = interrupted(lambda: finish("whole"), 0)
        for number in range(1, calls + 1, -(-calls // MOST_INTERRUPTIONS)):
            shutil.copytree(tmp_path / "left", tmp_path / "again")
            with pytest.raises(Interruption):
                interrupted(lambda: finish("again"), number)
            for id, arrays in written[:COMMITTED]:
                for extent in itertools.chain(*(extents for _, extents in arrays.values())):
                    assert bytes_of(tmp_path / "again", extent) == bytes_of(
                        tmp_path / "left", extent
                    ), id
            finish("again")
            assert_files(tmp_path / "again", closed, number)
            shutil.rmtree(tmp_path / "again")

    def test_finished_files_survive_a_power_cut(
        self, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = finishing(storage)
        closed = closed_files(storage, tmp_path / "closed", DIMS, COMMITTED)
        disk = Disk(tmp_path / "disk", monkeypatch)
        specs, written = leave(storage, disk.directory, DIMS)
        backend.finish(disk.directory, specs, written[:COMMITTED])
        assert_files(disk.after_a_power_cut(tmp_path / "after"), closed)

    def test_finishing_changes_nothing_outside_of_its_directory(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        backend = finishing(storage)
        closed = closed_files(storage, tmp_path / "closed", DIMS, COMMITTED)
        specs, written = leave(storage, tmp_path / "left", DIMS)
        entries = itertools.product(entries_of(tmp_path / "left"), ("symbolic", "hard"))
        for number, (path, kind) in enumerate(entries):
            left, outside = tmp_path / f"{number}", tmp_path / f"outside-{number}"
            shutil.copytree(tmp_path / "left", left)
            if kind == "hard" and (left / path).is_dir():
                continue
            shutil.move(left / path, outside)
            if kind == "hard":
                (left / path).hardlink_to(outside)
            else:
                (left / path).symlink_to(outside)
            before = files_of(outside) if outside.is_dir() else outside.read_bytes()
            try:
                backend.finish(left, specs, written[:COMMITTED])
                assert_files(left, closed, path)
            except CorruptCacheError:
                pass
            assert before == (files_of(outside) if outside.is_dir() else outside.read_bytes())

    def test_files_that_are_not_those_of_the_writer_are_refused(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        backend = finishing(storage)
        specs, written = leave(storage, tmp_path / "left", DIMS)
        before = files_of(tmp_path / "left")
        id, arrays = written[2]
        rows, extents = arrays["fbank"]
        elsewhere = Extent(extents[0].container, extents[0].offset + 64, extents[0].nbytes)
        moved = arrays | {"fbank": (rows, (elsewhere, *extents[1:]))}
        with pytest.raises(CorruptCacheError):
            backend.finish(tmp_path / "left", specs, [*written[:2], (id, moved)])
        for path in {extent.container for extent in extents}:
            assert (tmp_path / "left" / path).read_bytes() == before[path]
        for path in sorted({extent.container for extent in extents})[:1]:
            (tmp_path / "left" / path).unlink()
        with pytest.raises(CorruptCacheError):
            backend.finish(tmp_path / "left", specs, written[:3])


class Interruption(BaseException):
    """Ends `finish` in the middle of its work."""


def finishing(storage: Storage) -> FinishesFiles:
    """Return the backend, or skip the test."""
    backend = storage.declare().make_backend()
    if not isinstance(backend, FinishesFiles):
        pytest.skip("what a dead writer left is copied")
    return backend


def leave(
    storage: Storage, directory: Path, dims: Dims, end: str = "abort"
) -> tuple[list[FeatureSpec], Written]:
    """Write all utterances, as a writer that is not closed, or is, but whose part is not sealed."""
    return _write(storage, directory, dims, len(FRAMES), end)


def closed_files(storage: Storage, directory: Path, dims: Dims, count: int) -> dict[str, bytes]:
    """Return the files of a writer that was closed after `count` utterances."""
    _write(storage, directory, dims, count, "close")
    return files_of(directory)


def _write(
    storage: Storage, directory: Path, dims: Dims, count: int, end: str
) -> tuple[list[FeatureSpec], Written]:
    directory.mkdir(exist_ok=True)
    features = [feature for feature in some_features(storage) if feature.name in dims]
    specs = [feature.spec(dims[feature.name]) for feature in features]
    writer = features[0].make_backend().open_writer(directory, specs)
    written: Written = []
    utterances = some_utterances(some_features(storage), FRAMES)
    for id, arrays in itertools.islice(utterances.items(), count):
        encoded = {}
        for feature, spec in zip(features, specs, strict=True):
            rows = arrays[feature.name] if spec.has_frames else arrays[feature.name][None]
            if spec.dims != DIMS[feature.name]:
                rows = rows[(slice(None), *(slice(dim) for dim in spec.dims))].copy()
            encoded[feature.name] = encode(spec, feature, rows)
        extents = writer.append(id, encoded)
        written.append((id, {name: (encoded[name].rows, extents[name]) for name in encoded}))
        if len(written) == COMMITTED:
            writer.flush()
    getattr(writer, end)()
    return specs, written


def assert_files(directory: Path, expected: dict[str, bytes], what: object = "") -> None:
    """Fail unless a directory has exactly these files."""
    found = files_of(directory)
    assert set(found) == set(expected), what
    for path, content in expected.items():
        assert found[path] == content, (what, path)


def entries_of(directory: Path) -> Iterable[str]:
    """Return the paths of all files and directories."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


def bytes_of(directory: Path, extent: Extent) -> bytes:
    """Return the bytes of an extent."""
    content = (directory / extent.container).read_bytes()
    return content[extent.offset : extent.offset + extent.nbytes]


def interrupted(run: Callable[[], None], number: int) -> int:
    """Raise `Interruption` at a call of the system or of a file's method.

    Returns how many there were.

    Args:
        run: makes the calls.
        number: of the call, the first is 1; 0 lets all happen.
    """
    calls = 0

    def profile(frame: FrameType, event: str, function: object) -> None:
        nonlocal calls
        # an interrupt within filelock is its own matter; on Python 3.14 it stops all forks after it
        in_lock = frame.f_globals.get("__name__", "").startswith("filelock")
        if event == "c_call" and _is_of_the_system(function) and not in_lock:
            calls += 1
            if calls == number:
                raise Interruption

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


def _is_of_the_system(function: object) -> bool:
    if getattr(function, "__name__", "") in ("fspath", "close", "__enter__", "__exit__"):
        return False
    if isinstance(getattr(function, "__self__", None), io.IOBase):
        return True
    return getattr(function, "__module__", "") in ("posix", "_io")

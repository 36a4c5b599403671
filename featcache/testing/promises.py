"""The promises of `featcache.interface`, asked of the backend itself.

Also of its `ContainerWriter` and its codec.
"""

# ruff: noqa: D102 (the name of a test says what it tests)

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import FrameType

import numpy as np
import pytest
import xxhash

from featcache.container_files import PAGE_BYTES, EncodedArrays, append_many
from featcache.declaration import DTYPES, FeatureStorageConfig
from featcache.errors import CorruptCacheError, FeatureError
from featcache.interface import (
    Array,
    Backend,
    ChecksArrays,
    Codec,
    ContainerWriter,
    EncodedArray,
    Extent,
    FeatureSpec,
    FinishesFiles,
    SupportsBlocks,
    SupportsPages,
    WritesOut,
)
from featcache.registry import RAW, get_codec
from featcache.testing.backend_under_test import (
    DIMS,
    Storage,
    Utterances,
    encode,
    random_numbers,
    some_features,
    some_utterances,
)
from featcache.testing.round_trips import IDS

FRAMES = {"a": 3, "a/b": 700, "none": 0, "a.b": 1}


class Seam:
    """Promises of a backend that the store relies on."""

    def test_a_backend_is_made_of_its_options(self, storage: Storage) -> None:
        feature = storage.declare()
        backend, same = feature.make_backend(), feature.make_backend()
        assert isinstance(backend, Backend)
        assert dataclasses.is_dataclass(backend)
        assert (backend, hash(backend)) == (same, hash(same)), (
            "features with equal options share containers"
        )
        assert len(set(backend.codecs)) == len(backend.codecs) > 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            backend.anything = 1

    def test_extents_hold_the_written_bytes(self, storage: Storage, tmp_path: Path) -> None:
        (tmp_path / "foreign").write_bytes(b"not ours")
        writer, written = append_all(storage, tmp_path)
        if isinstance(writer, WritesOut):
            writer.write_out()
            assert_hold(tmp_path, written)
        writer.flush()
        assert_hold(tmp_path, written)
        writer.close()
        assert_hold(tmp_path, written)
        assert (tmp_path / "foreign").read_bytes() == b"not ours"

    def test_extents_do_not_overlap(self, storage: Storage, tmp_path: Path) -> None:
        writer, written = append_all(storage, tmp_path)
        writer.close()
        extents = [extent for _, each in written for extent in each]
        end = {extent.container: 0 for extent in extents}
        for extent in sorted(extents, key=lambda extent: extent.offset):
            assert extent.offset >= end[extent.container]
            end[extent.container] = extent.offset + extent.nbytes

    @pytest.mark.parametrize("blocks_a_piece", [1, 2, 1 << 20])
    def test_many_at_once_are_written_as_one_by_one(
        self, storage: Storage, tmp_path: Path, blocks_a_piece: int
    ) -> None:
        one_by_one, many = tmp_path / "one", tmp_path / "many"
        one_by_one.mkdir()
        many.mkdir()
        writer, written = append_all(storage, one_by_one)
        writer.close()
        writer, specs = open_writer(storage, many)
        names = [spec.name for spec in specs]
        arrays = {
            name: EncodedArrays.of([array for array, _ in written[place :: len(names)]])
            for place, name in enumerate(names)
        }
        arrays = {name: in_pieces_of(blocks_a_piece, each) for name, each in arrays.items()}
        found = append_many(writer, list(FRAMES), arrays)
        writer.close()
        for place, name in enumerate(names):
            extents = [each for _, each in written[place :: len(names)]]
            assert [*found[name].each()] == extents
        files = [path.relative_to(one_by_one) for path in one_by_one.rglob("*") if path.is_file()]
        for file in files:
            assert (many / file).read_bytes() == (one_by_one / file).read_bytes(), file

    def test_pages_are_those_of_the_files(self, storage: Storage, tmp_path: Path) -> None:
        writer, _ = append_all(storage, tmp_path)
        writer.close()
        if not isinstance(writer, SupportsPages):
            pytest.skip("the store reads the files again")
        for path, pages in writer.pages().items():
            data = memoryview((tmp_path / path).read_bytes())
            starts = range(0, len(data), PAGE_BYTES)
            assert pages.dtype == np.uint64
            assert pages.tolist() == [
                xxhash.xxh3_64_intdigest(data[start : start + PAGE_BYTES]) for start in starts
            ], path
            assert PurePosixPath(path).as_posix() == path

    def test_an_aborted_writer_leaves_flushed_bytes_in_place(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        writer, written = append_all(storage, tmp_path)
        writer.flush()
        writer.abort()
        assert_hold(tmp_path, written)

    def test_a_writer_without_arrays_closes_and_aborts(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        for end in ("close", "abort"):
            (tmp_path / end).mkdir()
            getattr(open_writer(storage, tmp_path / end)[0], end)()

    def test_abort_never_raises(self, storage: Storage, tmp_path: Path) -> None:
        writer, _ = append_all(storage, tmp_path)
        writer.close()
        writer.abort()  # when sealing failed after this container was closed
        writer.abort()

    def test_a_codec_leaves_its_input_alone(self, storage: Storage) -> None:
        if storage.codec == RAW:
            pytest.skip("no codec")
        assert isinstance(storage.declare().make_backend(), SupportsBlocks)
        assert get_codec(storage.codec).name == storage.codec
        assert set(storage.dtypes) <= set(DTYPES)
        for dtype in storage.dtypes:
            codec = storage.declare(dtype=dtype).make_codec()
            assert codec is not None
            for shape in ((1,), (300,), (300, 5), (2, 3, 4), (2, 2, 2, 3)):
                block = random_numbers(dtype, shape)
                before = block.tobytes()
                block.flags.writeable = False
                data = codec.encode(block)
                assert block.tobytes() == before
                decoded = codec.decode(memoryview(data), block.dtype, shape[1:], shape[0])
                assert (decoded.dtype, decoded.shape) == (block.dtype, shape)
                if storage.lossless:
                    assert decoded.tobytes() == before

    def test_the_same_block_gives_the_same_bytes(self, storage: Storage) -> None:
        codec = storage.declare().make_codec()
        if codec is not None:
            block = random_numbers(storage.dtypes[0], (300, 5))
            assert codec.encode(block) == codec.encode(block.copy())


Written = list[tuple[EncodedArray, tuple[Extent, ...]]]


def open_writer(storage: Storage, directory: Path) -> tuple[ContainerWriter, list[FeatureSpec]]:
    """Start the files of `some_features`."""
    features = some_features(storage)
    specs = [feature.spec(DIMS[feature.name]) for feature in features]
    return features[0].make_backend().open_writer(directory, specs), specs


def append_all(storage: Storage, directory: Path) -> tuple[ContainerWriter, Written]:
    """Append some utterances; returns the open writer, and what lies where."""
    writer, specs = open_writer(storage, directory)
    features = some_features(storage)
    written: Written = []
    for id, arrays in some_utterances(features, FRAMES).items():
        encoded = {
            feature.name: encode(
                spec,
                feature,
                arrays[feature.name] if spec.has_frames else arrays[feature.name][None],
            )
            for feature, spec in zip(features, specs, strict=True)
        }
        extents = writer.append(id, encoded)
        assert extents.keys() == encoded.keys()
        written += [(encoded[name], extents[name]) for name in encoded]
    return writer, written


def in_pieces_of(blocks: int, arrays: EncodedArrays) -> EncodedArrays:
    """Put so many blocks of arrays into a piece."""
    pieces = (arrays.pieces[at : at + blocks] for at in range(0, len(arrays.pieces), blocks))
    return replace(arrays, pieces=[memoryview(b"".join(each)) for each in pieces])


def assert_hold(directory: Path, written: Written) -> None:
    """Fail unless all extents hold what was written."""
    for array, extents in written:
        pieces = []
        for extent in extents:
            path = PurePosixPath(extent.container)
            assert not path.is_absolute()
            assert ".." not in path.parts
            data = (directory / path).read_bytes()[extent.offset : extent.offset + extent.nbytes]
            assert len(data) == extent.nbytes > 0
            pieces.append(data)
        blocks = [bytes(block) for block in array.blocks]
        assert b"".join(pieces) == b"".join(blocks)
        assert len(blocks) <= 1 or pieces == blocks, "one extent a block"


# Decoding: of any bytes, a codec gives a block within its bounds or `CorruptCacheError`.

MANY_ROWS = 1 << 19  # of a block that is much larger than its bytes
MARGIN_BYTES = 1 << 18


class Decoding:
    """A codec neither trusts the bytes it decodes nor the sizes that they tell."""

    @pytest.fixture
    @classmethod
    def codec(cls, storage: Storage) -> Codec:
        codec = storage.declare().make_codec()
        if codec is None:
            pytest.skip("no codec")
        return codec

    def test_a_block_holds_up_to_the_rows_that_it_may(self, storage: Storage, codec: Codec) -> None:
        block = random_numbers(storage.dtypes[0], (300, 5))
        data = memoryview(codec.encode(block))
        for rows in (300, 301, 1 << 40):
            assert codec.decode(data, block.dtype, (5,), rows).shape == block.shape
        for rows in (299, 1, 0):
            with pytest.raises(CorruptCacheError):
                codec.decode(data, block.dtype, (5,), rows)

    def test_a_block_of_too_many_rows_takes_no_memory(self, storage: Storage, codec: Codec) -> None:
        dtype = np.zeros((), storage.declare().dtype).dtype
        data = memoryview(codec.encode(np.zeros((MANY_ROWS, 1), dtype)))
        tracemalloc.start()
        try:
            for rows in (0, 1, 100, MANY_ROWS - 1 if len(data) > MANY_ROWS else 100):
                with pytest.raises(CorruptCacheError):
                    codec.decode(data, dtype, (1,), rows)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert most < 4 * len(data) + MARGIN_BYTES

    def test_bytes_of_anything_else_are_refused(self, storage: Storage, codec: Codec) -> None:
        dtype = np.zeros((), storage.declare().dtype).dtype
        noise = np.random.default_rng(0).bytes(1000)
        for data in (b"", b"\0", bytes(100), noise, b"\x93NUMPY" + noise):
            with pytest.raises(CorruptCacheError):
                codec.decode(memoryview(data), dtype, (5,), 300)

    def test_a_damaged_block_is_refused_or_within_its_bounds(
        self, storage: Storage, codec: Codec
    ) -> None:
        for dtype in {storage.dtypes[0], storage.dtypes[-1]}:
            decode_damaged(storage.declare(dtype=dtype), count=1000)

    def test_no_option_is_one_of_the_backend_too(self, storage: Storage, codec: Codec) -> None:
        backend = storage.declare().make_backend()
        assert not options_of(backend) & options_of(codec), "both are given in one dict of options"


def options_of(owner: Backend | Codec) -> set[str]:
    """Return the names of the options of a backend or a codec: its fields."""
    assert dataclasses.is_dataclass(owner)
    return {field.name for field in dataclasses.fields(owner)}


def decode_damaged(feature: FeatureStorageConfig, count: int, seed: int = 0) -> None:
    """Fail unless a new process decodes or refuses damaged blocks, and lives."""
    job: Mapping[str, object] = {"feature": feature.to_json(), "count": count, "seed": seed}
    script = Path(__file__).with_name("damaged_blocks.py")
    ended = subprocess.run(
        [sys.executable, "-P", script, json.dumps(job)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, (job, ended.stderr[-2000:])


# Durability: what is on disk after a power cut, told by the syncs that a backend makes.


class Durability:
    """Durable bytes are there after a power cut."""

    def test_what_was_flushed_survives_a_power_cut(
        self, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Disk(tmp_path / "disk", monkeypatch)
        writer, written = append_all(storage, disk.directory)
        writer.flush()
        assert_hold(disk.after_a_power_cut(tmp_path / "flushed"), written)
        writer.abort()

    def test_what_was_closed_survives_a_power_cut(
        self, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        disk = Disk(tmp_path / "disk", monkeypatch)
        writer, written = append_all(storage, disk.directory)
        writer.close()
        after = disk.after_a_power_cut(tmp_path / "closed")
        assert_hold(after, written)
        assert contents_below(after) == contents_below(disk.directory), (
            "close leaves nothing that is not durable"
        )


class Disk:
    """A directory, and what of it was synced since: the content of files, the names in directories.

    Sees `os.fsync` and `os.fdatasync`; a library that syncs in C must be given one of these, too.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory.mkdir()
        self.directory = directory
        self._content: dict[int, bytes] = {}  # by inode, as of the last sync
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}  # inode, whether a directory
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                monkeypatch.setattr(os, name, self._recorded(getattr(os, name)))

    def after_a_power_cut(self, copy: Path) -> Path:
        """Make a copy of what is durable, and of nothing else."""
        self._copy(self.directory.stat().st_ino, True, copy)
        return copy

    def _recorded(self, sync: Callable[[int], None]) -> Callable[[int], None]:
        def recorded(file: int) -> None:
            sync(file)
            inode = os.fstat(file if isinstance(file, int) else file.fileno()).st_ino
            for path in (self.directory, *self.directory.rglob("*")):
                if path.stat().st_ino == inode:
                    if path.is_dir():
                        self._names[inode] = {
                            below.name: (below.stat().st_ino, below.is_dir())
                            for below in path.iterdir()
                        }
                    else:
                        self._content[inode] = path.read_bytes()

        return recorded

    def _copy(self, inode: int, is_directory: bool, copy: Path) -> None:
        if not is_directory:
            copy.write_bytes(self._content.get(inode, b""))
            return
        copy.mkdir()
        for name, below in self._names.get(inode, {}).items():  # also of what was removed since
            self._copy(*below, copy / name)


def contents_below(directory: Path) -> dict[str, bytes]:
    """Return the content of all files by path."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


# Finishing: what a dead writer left becomes what a closed one leaves, `FinishesFiles`.

FINISHED = {"none": 0, "a": 3, "a/b": 300, "é" * 60: 1, "nothing": 0, "b": 77, "c": 5, "last": 0}
COMMITTED = 6  # utterances of a writer that died after it had written all
MOST_INTERRUPTIONS = 60
TORN = bytes(range(1, 256)) * 3  # what a disk may hold behind the bytes that were synced

WrittenById = list[tuple[str, dict[str, tuple[int, tuple[Extent, ...]]]]]
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
        for count in range(len(FINISHED) + 1):
            closed = closed_files(storage, tmp_path / f"closed-{count}", dims, count)
            left = tmp_path / f"left-{count}"
            specs, written = leave(storage, left, dims, end)
            for _ in range(2):
                for path in contents_below(left):
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
            with suppress(Interruption):  # fewer calls where more syncs go in threads beside
                interrupted(lambda: finish("again"), number)
                assert number > calls // 2
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
        entries = itertools.product(paths_below(tmp_path / "left"), ("symbolic", "hard"))
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
            before = contents_below(outside) if outside.is_dir() else outside.read_bytes()
            try:
                backend.finish(left, specs, written[:COMMITTED])
                assert_files(left, closed, path)
            except CorruptCacheError:
                pass
            assert before == (contents_below(outside) if outside.is_dir() else outside.read_bytes())

    def test_files_that_are_not_those_of_the_writer_are_refused(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        backend = finishing(storage)
        specs, written = leave(storage, tmp_path / "left", DIMS)
        before = contents_below(tmp_path / "left")
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
) -> tuple[list[FeatureSpec], WrittenById]:
    """Write all utterances, as a writer that is not closed, or is, but whose part is not sealed."""
    return _write_some(storage, directory, dims, len(FINISHED), end)


def closed_files(storage: Storage, directory: Path, dims: Dims, count: int) -> dict[str, bytes]:
    """Return the files of a writer that was closed after `count` utterances."""
    _write_some(storage, directory, dims, count, "close")
    return contents_below(directory)


def _write_some(
    storage: Storage, directory: Path, dims: Dims, count: int, end: str
) -> tuple[list[FeatureSpec], WrittenById]:
    directory.mkdir(exist_ok=True)
    features = [feature for feature in some_features(storage) if feature.name in dims]
    specs = [feature.spec(dims[feature.name]) for feature in features]
    writer = features[0].make_backend().open_writer(directory, specs)
    written: WrittenById = []
    utterances = some_utterances(some_features(storage), FINISHED)
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
    found = contents_below(directory)
    assert set(found) == set(expected), what
    for path, content in expected.items():
        assert found[path] == content, (what, path)


def paths_below(directory: Path) -> Iterable[str]:
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


# Native files: what a backend wrote is what its own library reads.

LONG_IDS = [char * size for char in "x/é" for size in (5_000, 32_760, 65_519, 65_536, 300_000)]


class NativeFiles:
    """The format's own library reads what was written; what it cannot read is refused before."""

    def read_natively(
        self, directory: Path, feature: FeatureSpec, extents: Mapping[str, tuple[Extent, ...]]
    ) -> Mapping[str, Array] | None:
        """Read the arrays of a feature with the format's own library; override it.

        Args:
            directory: with the files of a closed `ContainerWriter`.
            feature: as that writer knows it.
            extents: what `append` returned for each id, for formats that do not store ids.

        Returns by id the arrays in the shape that the user sees, bfloat16 as the uint16 of its
        bits; None: the library is not asked.
        """
        return None

    def test_the_formats_own_library_reads_it(self, storage: Storage, tmp_path: Path) -> None:
        utterances, _ = self._write_and_read(storage, tmp_path, IDS)
        if not utterances:
            pytest.skip("read_natively is not overridden")
        assert set(utterances) == set(IDS)

    def test_an_id_that_the_format_cannot_hold_is_refused_before(
        self, storage: Storage, tmp_path: Path
    ) -> None:
        _, written = self._write_and_read(storage, tmp_path, ["before", *LONG_IDS, "after"])
        assert_hold(tmp_path, written)

    def _write_and_read(
        self, storage: Storage, directory: Path, ids: Iterable[str]
    ) -> tuple[Utterances, Written]:
        """Write all that is not refused and read it; returns what the format's library read."""
        writer, specs = open_writer(storage, directory)
        features = some_features(storage)
        utterances: dict[str, dict[str, Array]] = {}
        extents: dict[str, dict[str, tuple[Extent, ...]]] = {}
        written: Written = []
        for number, id in enumerate(ids):
            arrays = {spec.name: rows_numbered(spec, number) for spec in specs}
            if is_refused(writer, id, arrays):
                continue
            encoded = {
                feature.name: encode(spec, feature, arrays[feature.name])
                for feature, spec in zip(features, specs, strict=True)
            }
            utterances[id] = arrays
            extents[id] = writer.append(id, encoded)
            written += [(encoded[name], extents[id][name]) for name in encoded]
        writer.close()
        read: dict[str, dict[str, Array]] = {}
        for spec in specs:
            places = {id: each[spec.name] for id, each in extents.items()}
            arrays_read = self.read_natively(directory, spec, places)
            if arrays_read is None:
                return {}, written
            assert set(arrays_read) == set(utterances)
            for id, array in arrays_read.items():
                rows = utterances[id][spec.name]
                expected = rows.reshape(spec.shape(len(rows)))
                storage.assert_same(array, expected, spec.storage_dtype.name, (id, spec.name))
                read.setdefault(id, {})[spec.name] = array
        return read, written


def rows_numbered(spec: FeatureSpec, number: int) -> Array:
    """Make an array of shape (rows, *dims), without frames now and then."""
    rows = number % 4 if spec.has_frames else 1
    return random_numbers(spec.dtype, (rows, *spec.dims), seed=number)


def is_refused(writer: ContainerWriter, id: str, arrays: Mapping[str, Array]) -> bool:
    """Ask a writer, if it can be asked, whether it refuses arrays of shape (rows, *dims)."""
    if isinstance(writer, ChecksArrays):
        try:
            writer.check(id, {name: (len(array), array.nbytes) for name, array in arrays.items()})
        except FeatureError:
            return True
    return False

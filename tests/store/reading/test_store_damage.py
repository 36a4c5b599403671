"""Damage is found and named, and never crashes the process."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_helpers import FINGERPRINT, check_cache, make_cache, read_everything, two_features

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.container_files import PAGE_BYTES, Pages
from featcache.errors import CorruptCacheError, FeatcacheError
from featcache.format import ColumnFile, pages_of, read_index, read_manifest, save_columns
from featcache.reading import verify

EVERY_LAYOUT = {
    "memmap": two_features(),
    "webdataset": two_features("webdataset", "webdataset"),
    "hdf5 gzip": [FeatureStorageConfig("fbank", backend="hdf5", codec="gzip"), two_features()[1]],
}


@pytest.fixture(scope="module", params=EVERY_LAYOUT)
def original(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A cache of two parts; tests put back what they change."""
    path = tmp_path_factory.mktemp("damage") / "train"
    make_cache(path, range(12), EVERY_LAYOUT[request.param])
    make_cache(path, range(12, 20), EVERY_LAYOUT[request.param])
    yield path
    check_cache(path, range(20))


def files(path: Path) -> list[Path]:
    """All files of a cache that anybody reads: no locks, no page for people."""
    found = [file for file in sorted(path.rglob("*")) if file.is_file()]
    return [file for file in found if file.suffix not in (".lock", ".txt")]


def containers(path: Path) -> list[tuple[Path, list[tuple[int, int]]]]:
    """All containers with the places of stored bytes in them."""
    index = featcache.open(path).opened.index
    places: dict[str, list[tuple[int, int]]] = {name: [] for name in index.containers.paths}
    for columns in index.features.values():
        for container, offset, nbytes in zip(
            columns.container, columns.offset, columns.nbytes, strict=True
        ):
            places[index.containers.path(int(container))].append((int(offset), int(nbytes)))
    return [(path / name, place) for name, place in places.items() if place]


class Changed:
    """A file with other bytes, until the end of the block."""

    def __init__(self, file: Path, data: bytes | None) -> None:
        self._file, self._data = file, data

    def __enter__(self) -> None:
        self._before = self._file.read_bytes()
        if self._data is None:
            self._file.unlink()
        else:
            self._file.write_bytes(self._data)

    def __exit__(self, *error: object) -> None:
        self._file.write_bytes(self._before)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(data=st.data())
@settings(max_examples=250)
def test_every_bit_of_every_file_counts(original: Path, data: st.DataObject) -> None:
    file = data.draw(st.sampled_from(files(original)))
    content = file.read_bytes()
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    with (
        Changed(file, flipped(content, bit)),
        pytest.raises(CorruptCacheError, match=r"damaged|checksum"),
    ):
        featcache.open(original, verify="arrays")


@given(data=st.data())
@settings(max_examples=100)
def test_every_stored_bit_counts(original: Path, data: st.DataObject) -> None:
    file, places = data.draw(st.sampled_from(containers(original)))
    offset, nbytes = data.draw(st.sampled_from(places))
    bit = offset * 8 + data.draw(st.integers(0, nbytes * 8 - 1))
    with Changed(file, flipped(file.read_bytes(), bit)):
        featcache.open(original, verify="columns")
        with pytest.raises(
            CorruptCacheError, match=r"utterances that are not .* 1, 'spk./utt-\d+'"
        ):
            featcache.open(original, verify="arrays")
        with pytest.raises(
            CorruptCacheError, match=r"(utterance 'spk./utt-\d+'.*|container .*) is damaged"
        ):
            read_everything(original, check_reads=True)


def test_all_damage_is_told_at_once(original: Path) -> None:
    first, second = sorted((original / "parts").iterdir())
    data = [file for file in files(original) if file.suffix in (".npy", ".tar", ".h5")]
    changed = [first / "part.json", second / "index.columns", *data]
    with contextlib.ExitStack() as stack:
        for file in changed:
            stack.enter_context(Changed(file, flipped(file.read_bytes(), 999)))
        with pytest.raises(CorruptCacheError) as error:
            featcache.open(original, verify="arrays")
    assert len(changed) >= 4
    assert all(str(file) in str(error.value) for file in changed)


@given(data=st.data())
@settings(max_examples=150)
def test_a_file_that_was_cut_is_an_error_not_the_end_of_the_process(
    original: Path, data: st.DataObject
) -> None:
    file = data.draw(st.sampled_from(files(original)))
    content = file.read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    with Changed(file, content[:length]), pytest.raises(CorruptCacheError):
        read_everything(original, "columns")


@pytest.mark.parametrize("mapped", [True, False])
def test_a_container_of_another_length_or_none_is_never_mapped(
    original: Path, mapped: bool
) -> None:
    for file, _ in containers(original):
        content = file.read_bytes()
        for changed, message in (
            (
                content[:-1],
                rf"has {len(content) - 1} bytes, not the {len(content)} that were written",
            ),
            (content + b"x", "bytes, not the"),
            (b"", "has 0 bytes, not the"),
            (None, r"is missing; was the cache overwritten or moved"),
        ):
            with Changed(file, changed), pytest.raises(CorruptCacheError, match=message):
                read_everything(original, mapped=mapped)


def test_a_missing_file_is_named(original: Path) -> None:
    for file in files(original):
        if file.name == "featcache.json":
            continue
        with Changed(file, None), pytest.raises(featcache.errors.CacheError, match=file.name):
            read_everything(original, "columns")


@given(data=st.data())
@settings(max_examples=150)
def test_a_damaged_index_is_harmless_also_without_verification(
    original: Path, data: st.DataObject
) -> None:
    index = original / read_manifest(original).index
    with ColumnFile(original, index.name) as file:
        name = data.draw(
            st.sampled_from(sorted(name for name, column in file._columns.items() if column[1]))
        )
        kind, length, offset, *_ = file._columns[name]
    content = index.read_bytes()
    place = offset + np.dtype(kind).itemsize * data.draw(st.integers(0, length - 1))
    value = data.draw(st.binary(min_size=np.dtype(kind).itemsize, max_size=np.dtype(kind).itemsize))
    with Changed(index, content[:place] + value + content[place + len(value) :]):
        for mapped in (True, False):
            with contextlib.suppress(FeatcacheError):
                read_everything(original, mapped=mapped)
        if value != content[place : place + len(value)]:
            with pytest.raises(CorruptCacheError, match=f"checksum of column {name!r}"):
                featcache.open(original, check_reads=True)


def test_columns_that_do_not_fit_each_other_are_damage(tmp_path: Path) -> None:
    make_cache(tmp_path, range(6))
    with ColumnFile(tmp_path, read_manifest(tmp_path).index) as file:
        columns = {
            name: file.column(name, np.dtype(kind).type)
            for name, (kind, *_) in file._columns.items()
        }
    for name, column in columns.items():
        if not name.startswith("failed") and len(column):
            (tmp_path / "short").unlink(missing_ok=True)
            save_columns(tmp_path / "short", (columns | {name: column[:-1]}).items())
            message = r"fit each other|lengths"
            with (
                ColumnFile(tmp_path, "short") as file,
                pytest.raises(CorruptCacheError, match=message),
            ):
                read_index(file, ["fbank", "units"])


def test_an_array_that_was_damaged_before_recovery_is_named_and_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = CacheWriter(tmp_path / "live", two_features(), FINGERPRINT)
    for number in range(1, 4):
        writer.write(
            str(number), {"fbank": np.ones((number, 4), np.float32), "units": np.ones(1, np.int16)}
        )
    writer.commit()
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    writer.abort()
    (container,) = tmp_path.glob("killed/parts/*/fbank.npy")
    content = container.read_bytes()
    for number, changed in enumerate((flipped(content, len(content) * 8 - 1), content[:-1], None)):
        copy = tmp_path / str(number)
        shutil.copytree(tmp_path / "killed", copy)
        (container,) = copy.glob("parts/*/fbank.npy")
        container.unlink()
        if changed is not None:
            container.write_bytes(changed)
        kept = ["1", "2"] if changed is not None else []
        with CacheWriter(copy, two_features(), FINGERPRINT) as writer:
            assert [id for id in ("1", "2", "3") if id in writer] == kept
        assert "'3'" in caplog.text
        assert "set aside in" in caplog.text
        (aside,) = copy.glob("parts/*.damaged")
        assert (aside / "journal.jsonl").exists()
        cache = featcache.open(copy, verify="arrays")
        assert cache.stats("fbank").count == sum(map(int, kept))
        caplog.clear()


def killed_after_four_commits(tmp_path: Path) -> Path:
    writer = CacheWriter(tmp_path / "live", two_features(), FINGERPRINT)
    for number in range(4):
        writer.write(
            str(number), {"fbank": np.ones((2, 4), np.float32), "units": np.ones(1, np.int16)}
        )
        writer.commit()
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    writer.abort()
    return tmp_path / "killed"


@pytest.mark.parametrize("line", range(9))
def test_of_a_damaged_journal_every_line_that_checks_is_salvaged(
    tmp_path: Path, line: int, caplog: pytest.LogCaptureFixture
) -> None:
    killed = killed_after_four_commits(tmp_path)
    (journal,) = killed.glob("parts/*/journal.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 4
    journal.write_bytes(
        b"".join(lines[:line]) + flipped(lines[line], 333) + b"".join(lines[line + 1 :])
    )
    # that of an utterance; commits and the header stand elsewhere, too
    lost = {(line - 1) // 2} if line % 2 else set()
    with CacheWriter(killed, two_features(), FINGERPRINT) as writer:
        assert {number for number in range(4) if str(number) not in writer} == lost
    cache = featcache.open(killed, verify="arrays")
    assert cache.stats("fbank").count == 2 * len(cache)
    assert "lines of its journal do not check" in caplog.text
    (aside,) = killed.glob("parts/*.damaged")
    assert repr(str(aside)) in caplog.text


@given(bit=st.integers(0, 10**9))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_flipped_bit_of_a_journal_loses_more_than_its_line(tmp_path: Path, bit: int) -> None:
    original = tmp_path / "killed"
    if not original.exists():
        killed_after_four_commits(tmp_path)
    copy = Path(tempfile.mkdtemp(dir=tmp_path)) / "train"
    shutil.copytree(original, copy)
    (journal,) = copy.glob("parts/*/journal.jsonl")
    content = journal.read_bytes()
    journal.write_bytes(flipped(content, bit % (len(content) * 8)))
    with CacheWriter(copy, two_features(), FINGERPRINT) as writer:
        assert sum(str(number) in writer for number in range(4)) >= 3
    cache = featcache.open(copy, verify="arrays")
    assert cache.stats("fbank").count == 2 * len(cache)


def test_a_torn_end_is_not_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed = killed_after_four_commits(tmp_path)
    (journal,) = killed.glob("parts/*/journal.jsonl")
    content = journal.read_bytes()
    ends = (content[:-30], content + b'["0123', content + bytes(700), content[:-40] + bytes(40))
    for number, torn in enumerate(ends):
        copy = tmp_path / str(number)
        shutil.copytree(killed, copy)
        next(copy.glob("parts/*/journal.jsonl")).write_bytes(torn)
        make_cache(copy, [9])
        assert len(featcache.open(copy, verify="arrays")) in (4, 5)
        assert not list(copy.glob("parts/*.damaged"))
    assert not caplog.text


def test_a_journal_of_which_nothing_can_be_read_is_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed = killed_after_four_commits(tmp_path)
    (journal,) = killed.glob("parts/*/journal.jsonl")
    journal.write_bytes(
        b"".join(flipped(line, 99) for line in journal.read_bytes().splitlines(keepends=True))
    )
    make_cache(killed, [1])
    check_cache(killed, [1])
    assert "its journal cannot be read" in caplog.text
    assert len(list(killed.glob("parts/*.damaged/fbank.npy"))) == 1


@pytest.mark.parametrize("pages", [1, 2, 5, 13, 14])
def test_stretches_that_threads_compare_are_told_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    monkeypatch.setattr(verify, "_PAGES_AT_ONCE", pages)
    file, size = tmp_path / "file", 13 * PAGE_BYTES + 7
    file.write_bytes(np.random.default_rng(0).bytes(size))
    with file.open("rb") as opened:
        known, told = pages_of(opened.fileno()), list[int]()
        assert len(known) == 14
        assert verify.wrong_pages(opened.fileno(), known, told.append).tolist() == []
        assert sum(told) == size
        known[[0, 4, 5, 13]] += np.uint64(1)
        longer = np.append(known, np.uint64(1))  # the file lacks a page
        assert verify.wrong_pages(opened.fileno(), longer).tolist() == [0, 4, 5, 13, 14]

        def interrupted(nbytes: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            verify.wrong_pages(opened.fileno(), known, interrupted)

        def refused(*_: object) -> Pages:
            raise PermissionError("refused")

        monkeypatch.setattr(verify, "pages_of", refused)
        with pytest.raises(PermissionError):
            verify.wrong_pages(opened.fileno(), known)
    assert [each.name for each in threading.enumerate() if "ThreadPool" in each.name] == []

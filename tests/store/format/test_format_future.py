"""What later versions add to a cache: kept, ignored or refused today, as `docs/format.md` says."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import xxhash
from format_reader import Reader, unsealed
from numpy.typing import NDArray
from store_helpers import (
    FINGERPRINT,
    arrays_of,
    check_cache,
    id_of,
    make_cache,
    two_features,
    write,
)

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import CorruptCacheError, FormatVersionError
from featcache.format import (
    NAME,
    ColumnFile,
    manifest_file,
    pack_json,
    read_manifest,
    save_columns,
    write_manifest,
)
from featcache.reading import raise_damage

VERIFY: tuple[Literal["columns", "arrays"], ...] = ("columns", "arrays")
NOTES = {"from": "a later version", "numbers": [1, 2.5, None]}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "cache", range(5))


def change(cache: Path, **changes: object) -> None:
    """Set keys of the manifest, as another version of featcache would."""
    content = unsealed((cache / NAME).read_bytes()) | changes
    (cache / NAME).write_bytes(pack_json(content))


def append(cache: Path, *numbers: int) -> None:
    with CacheWriter(cache, two_features(), FINGERPRINT) as writer:
        write(writer, numbers)


def overwrite(cache: Path, *numbers: int) -> None:
    make_cache(cache, numbers, overwrite=True)


def tag(cache: Path, name: str) -> str:
    """Give the current generation a tag; returns the generation's name."""
    manifest = read_manifest(cache)
    write_manifest(
        cache, dataclasses.replace(manifest, tags={**manifest.tags, name: manifest.name})
    )
    return manifest.name


# Unknown keys


@pytest.mark.parametrize("step", [append, overwrite])
def test_unknown_keys_are_ignored_by_readers_and_kept_by_writers(
    cache: Path, step: Callable[..., None]
) -> None:
    change(cache, notes=NOTES, carried=["speaker"])
    check_cache(cache, range(5))
    step(cache, 7)
    step(cache, 8)
    manifest = unsealed((cache / NAME).read_bytes())
    assert (manifest["notes"], manifest["carried"]) == (NOTES, ["speaker"])
    kept = (cache / manifest_file(read_manifest(cache).name)).read_bytes()
    assert unsealed(kept)["notes"] == NOTES


def test_an_unknown_key_is_kept_when_an_overwrite_begins(cache: Path) -> None:
    change(cache, notes=NOTES)
    with CacheWriter(cache, two_features(), FINGERPRINT, overwrite=True) as writer:
        assert unsealed((cache / NAME).read_bytes())["building"] == 2
        assert unsealed((cache / NAME).read_bytes())["notes"] == NOTES
        write(writer, [0])


def test_what_was_set_while_a_writer_was_open_is_kept(cache: Path) -> None:
    with CacheWriter(cache, two_features(), FINGERPRINT) as writer:
        write(writer, [7])
        tagged = tag(cache, "paper")
        change(cache, notes=NOTES, files={}, requires_to_write=["later"])
    manifest = unsealed((cache / NAME).read_bytes())
    assert manifest["tags"] == {"paper": tagged}
    assert (manifest["notes"], manifest["requires_to_write"]) == (NOTES, ["later"])


def test_unknown_columns_of_an_index_are_ignored(cache: Path) -> None:
    assert "speaker" not in Reader(cache).columns
    add_column(cache, "speaker", np.arange(5))
    add_column(cache, "snr", np.arange(5, dtype=np.float32))
    add_column(cache, "noisy", np.arange(5) > 2)
    add_column(cache, "other.skip", np.zeros(5, np.int64))  # of no feature of this cache
    check_cache(cache, range(5))
    append(cache, 6)
    check_cache(cache, [*range(5), 6])


# Refusals


def test_what_a_reader_must_know_is_refused_by_readers_and_writers(cache: Path) -> None:
    change(cache, requires=["remote"])
    refused(cache, r"written by a newer featcache.*'remote'.*upgrade", reads=False)


def test_what_a_writer_must_know_is_refused_by_writers_alone(cache: Path) -> None:
    change(cache, requires_to_write=["carried", "remote"])
    check_cache(cache, range(5))
    assert Reader(cache).ids == list(featcache.open(cache))
    refused(cache, r"can be read, but to write.*'carried', 'remote'; upgrade", reads=True)


@pytest.mark.parametrize("kind", ["layers", "", 3])
def test_another_kind_is_refused(cache: Path, kind: object) -> None:
    change(cache, kind=kind)
    refused(cache, f"must know {kind!r}; upgrade", reads=False)


def test_a_cache_says_what_kind_it_is(cache: Path) -> None:
    change(cache, kind="cache")
    check_cache(cache, range(5))
    append(cache, 7)
    assert unsealed((cache / NAME).read_bytes())["kind"] == "cache"


def test_a_newer_version_is_refused(cache: Path) -> None:
    change(cache, version=2)
    refused(cache, "format version 2, newer than 1, .*upgrade", reads=False)
    (cache / NAME).write_bytes(pack_json({"format": "featcache", "version": 2}))
    refused(cache, "format version 2, newer than 1, .*upgrade", reads=False)


def test_a_cache_of_before_is_refused(cache: Path) -> None:
    """As featcache wrote it before its format was finished: version 1, and no `write_id`."""
    old = {"format": "featcache", "version": 1, "fingerprint": {"features": {}}, "generation": 3}
    old |= {"build": 1, "building": 1, "building_fingerprint": "0" * 16, "complete": True}
    old |= {"rows": 0, "dims": {}, "parts": [], "digests": {}}
    (cache / NAME).write_bytes(pack_json(old))
    refused(cache, "before its format was fixed; write it again", reads=False)


def declare(cache: Path, **changes: object) -> None:
    """Change the declaration of a feature, as another version of featcache would write it."""
    made_from = unsealed((cache / NAME).read_bytes())["fingerprint"]
    made_from["features"]["fbank"] |= changes
    change(cache, fingerprint=made_from)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"delta": 2}, "'delta'"),
        ({"dims_of": None, "unit": "dB"}, "'dims_of', 'unit'"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"time_axis": 1}, "time_axis 1"),
        ({"nonfinite": "mask"}, "nonfinite 'mask'"),
        ({"codec_options": {"delta": 1}}, "option 'delta' of codec 'raw'"),
    ],
    ids=str,
)
def test_a_declaration_that_a_reader_does_not_know_is_refused(
    cache: Path, changes: dict[str, object], named: str
) -> None:
    declare(cache, **changes)
    refused(cache, f"'fbank'.*newer featcache.* must know .*{named}; upgrade", reads=False)


def test_a_declaration_without_options_of_its_codec_is_of_before(cache: Path) -> None:
    made_from = unsealed((cache / NAME).read_bytes())["fingerprint"]
    del made_from["features"]["fbank"]["codec_options"]
    change(cache, fingerprint=made_from)
    refused(cache, "before its format was fixed; write it again", reads=False)


@pytest.mark.parametrize(
    ("backend", "codec"), [("hdf5", "gzip"), ("zarr", "zstd"), ("zarr", "blosc"), ("lilcom", None)]
)
def test_an_option_of_a_codec_that_a_reader_does_not_know_is_refused(
    tmp_path: Path, backend: str, codec: str | None
) -> None:
    """It may say how numbers are decoded: without it they would come out wrong."""
    declared = FeatureStorageConfig("fbank", backend=backend, codec=codec)
    cache = tmp_path / "cache"
    with CacheWriter(cache, [declared], FINGERPRINT) as writer:
        writer.write("a", {"fbank": np.ones((3, 4), np.float32)})
    featcache.open(cache).read("a", "fbank")
    options = {**declared.to_json()["codec_options"], "delta": True}
    declare(cache, codec_options=options)
    for read in (
        lambda: featcache.open(cache).read("a", "fbank"),
        lambda: featcache.open(cache).read_batch(["a"], "fbank"),
    ):
        with pytest.raises(FormatVersionError, match=r"'fbank'.*'delta'; upgrade featcache, or"):
            read()


def test_an_option_of_a_format_is_no_matter_of_readers(cache: Path) -> None:
    declare(cache, options={"later": 1})
    check_cache(cache, range(5))


@pytest.mark.parametrize(
    ("column", "values", "named"),
    [
        ("fbank.scale", np.ones(5), "column 'fbank.scale'"),
        ("fbank.rows2", np.ones(5, np.int64), "column 'fbank.rows2'"),
        ("annotations/when/dates", np.ones(5, np.int64), "column 'annotations/when/dates'"),
        ("annotations/when/values", np.ones(5, np.uint64), "column 'annotations/when/values'"),
        ("later", np.ones(5, np.complex64), "columns of '<c8' such as 'later'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kinds_of_columns_that_a_reader_does_not_know_are_refused(
    cache: Path, column: str, values: NDArray[Any], named: str
) -> None:
    add_column(cache, column, values)
    for verify in (None, *VERIFY):
        with pytest.raises(FormatVersionError, match=f"newer featcache.* must know .*{named}"):
            featcache.open(cache, verify=verify)
    with pytest.raises(FormatVersionError, match=f"newer featcache.* must know .*{named}"):
        append(cache, 6)


def test_a_kind_of_annotation_that_a_reader_does_not_know_is_refused(cache: Path) -> None:
    change(cache, annotations={"when": {"kind": "date", "carried": True}})
    refused(cache, "annotation 'when'.* must know the kind 'date'; upgrade", reads=False)


def add_column(cache: Path, name: str, values: NDArray[Any]) -> None:
    """Add a column to the index of a cache, as another version of featcache would."""
    manifest = read_manifest(cache)
    columns = {**Reader(cache).columns, name: values}
    (cache / manifest.index).unlink()
    digest = save_columns(cache / manifest.index, columns.items())
    after = dataclasses.replace(manifest, index_digest=digest, sizes={})
    write_manifest(cache, after, keep=True)


def refused(cache: Path, pattern: str, *, reads: bool) -> None:
    """See that all openings are refused with one sentence, and change nothing."""
    before = files_of(cache)
    attempts: list[Callable[[], object]] = [
        lambda: CacheWriter(cache, two_features(), FINGERPRINT),
        lambda: CacheWriter(cache, two_features(), FINGERPRINT, overwrite=True),
    ]
    if not reads:
        attempts += [lambda: featcache.open(cache), lambda: featcache.open(cache, verify="arrays")]
    for attempt in attempts:
        with pytest.raises(FormatVersionError, match=pattern) as caught:
            attempt()
        assert str(cache) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert files_of(cache) == before


def files_of(cache: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in cache.rglob("*")
        if path.is_file() and path.name != "writer.lock"
    }


# Tags


def test_what_a_tag_names_is_never_removed(cache: Path) -> None:
    tagged = tag(cache, "paper")
    wanted = files_of_generation(cache, manifest_file(tagged))
    for number in range(7, 10):
        append(cache, number)
        assert_paper(cache, tagged, wanted)
    for number in range(3):
        overwrite(cache, number)
        assert_paper(cache, tagged, wanted)
    check_cache(cache, [2])


def test_without_a_tag_it_is_removed(cache: Path) -> None:
    name = read_manifest(cache).name
    wanted = files_of_generation(cache, manifest_file(name))
    for number in range(3):
        overwrite(cache, number)
    assert not [path for path in wanted if Path(path).exists()]


def test_a_removed_tag_lets_go(cache: Path) -> None:
    tagged = tag(cache, "paper")
    wanted = files_of_generation(cache, manifest_file(tagged))
    overwrite(cache, 0)
    write_manifest(cache, dataclasses.replace(read_manifest(cache), tags={}))
    overwrite(cache, 1)
    overwrite(cache, 2)
    assert not [path for path in wanted if Path(path).exists()]


def test_what_a_tag_names_is_verified(cache: Path) -> None:
    tagged = tag(cache, "paper")
    for number in range(3):
        overwrite(cache, number)
    for path, data in files_of_generation(cache, manifest_file(tagged)).items():
        if Path(path).name.startswith("writer."):
            continue
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        Path(path).write_bytes(flipped)
        with pytest.raises(CorruptCacheError, match=Path(path).name):
            featcache.open(cache, verify="arrays")
        Path(path).unlink()
        with pytest.raises(CorruptCacheError, match=Path(path).name):
            featcache.open(cache, verify="columns")
        Path(path).write_bytes(data)
    featcache.open(cache, verify="arrays")


def test_while_the_manifest_of_a_tag_is_lost_no_part_is_removed(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tagged = tag(cache, "paper")
    wanted = files_of_generation(cache, manifest_file(tagged))
    overwrite(cache, 0)
    (cache / manifest_file(tagged)).unlink()
    overwrite(cache, 1)
    assert "what a tag names is lost" in caplog.text
    (cache / manifest_file(tagged)).write_bytes(wanted[str(cache / manifest_file(tagged))])
    overwrite(cache, 2)
    assert_paper(cache, tagged, wanted)


def files_of_generation(cache: Path, manifest: str) -> dict[str, bytes]:
    """All files that a manifest leads to."""
    reader = Reader(cache, manifest)
    parts = [cache / "parts" / entry["name"] for entry in reader.manifest["parts"]]
    paths = [cache / manifest, cache / reader.manifest["index"]]
    paths += [path for part in parts for path in part.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in paths}


def assert_paper(cache: Path, tagged: str, wanted: dict[str, bytes]) -> None:
    assert read_manifest(cache).tags == {"paper": tagged}
    assert files_of_generation(cache, manifest_file(tagged)) == wanted
    reader = Reader(cache, manifest_file(tagged))
    assert reader.ids == sorted(map(id_of, range(5)), key=str.encode)
    for number in range(5):
        for name, array in arrays_of(number).items():
            np.testing.assert_array_equal(reader.read(id_of(number), name), array, strict=True)
    featcache.open(cache, verify="arrays")


# Other files


@pytest.fixture
def with_files(cache: Path) -> Path:
    """A cache with a probe and what it was made from."""
    (cache / "work-probe").mkdir()
    contents = {"work-probe/probe.columns": bytes(range(256)) * 300, "work-made-from.json": b"{}"}
    for path, content in contents.items():
        (cache / path).write_bytes(content)
    change(cache, files={path: xxhash.xxh3_64_hexdigest(data) for path, data in contents.items()})
    return cache


def test_other_files_are_kept(with_files: Path) -> None:
    before = {path: (with_files / path).read_bytes() for path in read_manifest(with_files).files}
    append(with_files, 8)
    overwrite(with_files, 9)
    manifest = read_manifest(with_files)
    assert set(manifest.files) == set(before) == {"work-probe/probe.columns", "work-made-from.json"}
    assert {path: (with_files / path).read_bytes() for path in before} == before
    featcache.open(with_files, verify="columns")


@pytest.mark.parametrize("place", [0, 40_000, 76_799])
def test_a_flipped_byte_in_another_file_is_found(with_files: Path, place: int) -> None:
    path = with_files / "work-probe" / "probe.columns"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    for level in VERIFY:
        with pytest.raises(CorruptCacheError, match=r"probe.columns' is damaged"):
            featcache.open(with_files, verify=level)
    assert len(featcache.open(with_files)) == 5


def test_other_files_that_are_lost_are_told_with_all_other_damage(with_files: Path) -> None:
    for path in read_manifest(with_files).files:
        (with_files / path).unlink()
    with pytest.raises(CorruptCacheError) as caught:
        featcache.open(with_files, verify="columns")
    assert [name in str(caught.value) for name in ("probe.columns", "made-from")] == [True, True]


# Parts and column files


def test_pages_of_another_size_are_refused(cache: Path) -> None:
    (seal,) = cache.glob("parts/*/part.json")
    seal.write_bytes(pack_json(unsealed(seal.read_bytes()) | {"page_bytes": 4096}))
    with pytest.raises(FormatVersionError, match="pages of 4096 bytes"):
        CacheWriter(cache, two_features(), FINGERPRINT)


def test_unknown_keys_of_a_seal_are_ignored(cache: Path) -> None:
    (seal,) = cache.glob("parts/*/part.json")
    seal.write_bytes(pack_json(unsealed(seal.read_bytes()) | {"notes": NOTES}))
    change(cache, sizes={})
    change(
        cache,
        parts=[
            entry | {"digest": xxhash.xxh3_64_hexdigest(seal.read_bytes()), "notes": NOTES}
            for entry in Reader(cache).manifest["parts"]
        ],
    )
    check_cache(cache, range(5))
    append(cache, 6)
    check_cache(cache, [*range(5), 6])
    assert "notes" in unsealed(seal.read_bytes())


def test_each_byte_of_a_column_file_is_vouched_for(tmp_path: Path) -> None:
    columns = [("rows", np.arange(3)), ("pages", np.array([7], np.uint64)), ("none", np.empty(0))]
    digest = save_columns(tmp_path / "a.columns", columns)
    whole = (tmp_path / "a.columns").read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 16
        (tmp_path / "a.columns").write_bytes(data)
        with pytest.raises(CorruptCacheError):
            check_columns(tmp_path, "a.columns", digest)


def check_columns(directory: Path, name: str, digest: str) -> None:
    with ColumnFile(directory, name, expected=digest) as file:
        raise_damage(file.damage())


def test_json_is_sealed_as_documented() -> None:
    assert pack_json({"a": 1}) == b'["c5e3762ffc8453c6",{"a":1}]'
    assert unsealed(pack_json({"ü": [1, None]})) == json.loads('{"ü": [1, null]}')


def test_a_copy_is_the_same_cache(cache: Path, tmp_path: Path) -> None:
    """No path in a cache leads out of it, and nothing depends on where it lies."""
    copy = shutil.copytree(cache, tmp_path / "elsewhere" / "copy")
    shutil.rmtree(cache)
    check_cache(copy, range(5))
    append(copy, 5)
    check_cache(copy, range(6))

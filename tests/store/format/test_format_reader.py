"""`docs/format.md` is enough: `format_reader`, written from it alone, sees what featcache sees."""

from __future__ import annotations

import base64
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from format_reader import Reader, columns_of, set_paths, strings_of, unsealed
from golden_caches import (
    CHANGED_FEATURES,
    FAILED,
    FILES,
    FINGERPRINT,
    FIRST,
    FRAMES,
    LAYOUTS,
    SECOND,
    STAMPED,
    arrays_of,
    assert_array,
    make_changed,
    make_golden,
)
from places import ROOT

import featcache
from featcache import Cache, CacheWriter, FeatureStorageConfig
from featcache.format import Stamps

PAGE_BYTES = 65536
PAGE = (ROOT / "docs" / "format.md").read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reader_written_from_the_documentation_reads_what_featcache_reads(
    tmp_path: Path, layout: str
) -> None:
    cache = make_golden(tmp_path / "cache", LAYOUTS[layout])
    reader = Reader(cache)
    assert_the_same(reader, featcache.open(cache))
    for id in (*FIRST, *SECOND):
        for name in reader.features:
            assert_array(layout, id, name, reader.read(id, name))
    assert reader.failed == [FAILED]
    check_expected(reader)
    check_parts(reader)


def test_each_feature_set_reads_as_a_cache(tmp_path: Path) -> None:
    cache = make_golden(tmp_path / "cache", LAYOUTS["memmap"])
    before = featcache.open(cache)
    assert set_paths(cache) == [cache]
    with CacheWriter(cache, [FeatureStorageConfig("energy")]) as writer:
        for id in FIRST:
            writer.write(id, {"energy": np.full((3, 1), 7, np.float32)})
    first, added = (Reader(path) for path in set_paths(cache))
    assert_the_same(first, before)
    check_parts(first)
    assert added.ids == list(featcache.open(cache)) == sorted(FIRST, key=str.encode)
    assert added.read(FIRST[0], "energy").tolist() == [[7]] * 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_id_in_two_parts_is_a_tombstone_in_one(tmp_path: Path, layout: str) -> None:
    cache = make_golden(tmp_path / "cache", LAYOUTS[layout])
    reader = Reader(cache)
    first, second = reader.manifest["parts"]
    assert first["tombstones"] is None
    assert first["rows"] + second["rows"] == len(reader.ids) + 1
    stones = columns_of(
        (cache / "parts" / second["name"] / second["tombstones"]["file"]).read_bytes(),
        second["tombstones"]["digest"],
    )
    seal = unsealed((cache / "parts" / second["name"] / "part.json").read_bytes())
    part = columns_of(
        (cache / "parts" / second["name"] / "index.columns").read_bytes(), seal["columns"]
    )
    assert len(stones["rows"]) == second["tombstones"]["rows"]
    assert [strings_of(part, "id")[row] for row in stones["rows"]] == [FIRST[0]]
    assert stones["fbank.count"] == part["fbank.count"] - FRAMES[FIRST[0]]


def test_stamps_and_files_are_what_the_documentation_says(tmp_path: Path) -> None:
    cache = make_changed(tmp_path / "cache")
    reader = Reader(cache)
    assert_the_same(reader, featcache.open(cache))
    assert reader.stamps() == {id: STAMPED.get(id, (0, 0)) for id in reader.ids}
    assert {role: reader.file(role) for role in FILES} == FILES
    assert reader.manifest["requires_to_write"] == ["stamps"]
    assert not {"building_files", "building_parts"} & set(reader.manifest)
    entries = reader.manifest["parts"]
    assert sorted(entry["tombstones"] is not None for entry in entries) == [False, False, True]
    (entry,) = (entry for entry in entries if "stamps" in entry)
    directory = cache / "parts" / entry["name"]
    stamps = columns_of(
        (directory / entry["stamps"]["file"]).read_bytes(), entry["stamps"]["digest"]
    )
    seal = unsealed((directory / "part.json").read_bytes())
    part = columns_of((directory / "index.columns").read_bytes(), seal["columns"])
    row = strings_of(part, "id").index(FIRST[1])
    assert (part["input"][row], part["entry"][row]) == (STAMPED[FIRST[1]].input, 0)
    assert (stamps["input"][row], stamps["entry"][row]) == STAMPED[FIRST[1]]
    assert check_parts(reader) > 0


def test_what_waits_for_a_build_is_what_the_documentation_says(tmp_path: Path) -> None:
    cache = make_changed(tmp_path / "cache")
    with CacheWriter(cache, CHANGED_FEATURES, FINGERPRINT, overwrite=True) as writer:
        writer.keep_file("probe", b"new")
        for id in SECOND:
            writer.write(id, arrays_of(id, ["fbank", "tokens"]), stamps=Stamps(1, 2))
        assert writer.commit() == 2
        (journal,) = cache.glob("parts/*/journal.jsonl")
        _, line, *_ = journal.read_bytes().splitlines()
        for id, _, stamps in unsealed(line)["utterances"]:
            assert (id in SECOND, stamps) == (True, [f"{1:016x}", f"{2:016x}"])
        writer.delete([SECOND[0]])
        manifest = Reader(cache).manifest
        ((name, digest),) = manifest["building_files"].items()
        assert xxhash.xxh3_64_hexdigest((cache / name).read_bytes()) == digest
        (entry,) = manifest["building_parts"]
        stones = cache / "parts" / entry["name"] / entry["tombstones"]["file"]
        columns = columns_of(stones.read_bytes(), entry["tombstones"]["digest"])
        assert len(columns["rows"]) == 1
        assert Reader(cache).file("probe") == FILES["probe"]
    assert (Reader(cache).ids, Reader(cache).file("probe")) == ([SECOND[1]], b"new")


def test_the_digest_in_the_documentation_is_that_of_its_bytes() -> None:
    found = re.findall(r"four\s+bytes `([0-9a-f ]+)`, `([0-9a-f]{32})`", PAGE)
    assert found == [("61 00 62 00", xxhash.xxh3_128_hexdigest(b"a\0b\0"))]


def test_files_of_many_pages_and_blocks(tmp_path: Path) -> None:
    features = [
        FeatureStorageConfig("raw", dims=[80]),
        FeatureStorageConfig("gz", backend="hdf5", codec="gzip"),
        FeatureStorageConfig("archive", backend="lilcom"),
        FeatureStorageConfig("chunks", backend="zarr", codec="zstd", options={"level": 1}),
    ]
    frames = (np.arange(1100 * 80).reshape(1100, 80) % 997 / 32).astype(np.float32)
    with CacheWriter(tmp_path / "cache", features) as writer:
        for number in range(3):
            array = frames[: 1100 - 300 * number]
            writer.write(f"utt-{number}", {feature.name: array for feature in features})
    reader = Reader(tmp_path / "cache")
    assert_the_same(reader, featcache.open(tmp_path / "cache"))
    assert check_parts(reader) > 20
    assert reader.manifest["expected"] is None


def test_an_empty_cache(tmp_path: Path) -> None:
    with CacheWriter(tmp_path / "cache", LAYOUTS["memmap"]):
        pass
    reader = Reader(tmp_path / "cache")
    assert reader.ids == reader.containers == reader.failed == reader.manifest["parts"] == []
    assert reader.manifest["dims"] == {}


def test_a_journal_is_what_the_documentation_says(tmp_path: Path) -> None:
    features = [FeatureStorageConfig("fbank"), FeatureStorageConfig("ids", "int16", stats=False)]
    fbank = np.arange(80, dtype=np.float32).reshape(10, 8)
    with CacheWriter(tmp_path, features) as writer:
        for number in range(70):
            writer.write(f"utt-{number}", {"fbank": fbank, "ids": np.zeros(0, np.int16)})
        assert writer.commit() == 70
        (journal,) = tmp_path.glob("parts/*/journal.jsonl")
        lines = journal.read_bytes().splitlines(keepends=True)
        npy = (journal.parent / "fbank.npy").read_bytes()
    assert all(line.endswith(b"\n") for line in lines)
    first, *records, last = [unsealed(line.removesuffix(b"\n")) for line in lines]
    assert list(first) == ["header"]
    assert last["header"] == first["header"]
    assert first["header"]["dims"] == {"fbank": [8], "ids": []}
    assert first["header"]["build"] == 1
    utterances = [each for record in records for each in record.get("utterances", [])]
    assert max(len(record.get("utterances", [])) for record in records) <= 64
    assert [id for id, _ in utterances] == [f"utt-{number}" for number in range(70)]
    rows, checksum, [[container, offset, nbytes]] = utterances[1][1]["fbank"]
    assert (rows, container, nbytes) == (10, "fbank.npy", 320)
    assert npy[offset : offset + nbytes] == fbank.tobytes()
    assert checksum == xxhash.xxh3_64_hexdigest(fbank.tobytes())
    assert utterances[1][1]["ids"] == [0, xxhash.xxh3_64_hexdigest(b""), []]
    assert list(last["commit"]) == ["fbank"]
    stats = last["commit"]["fbank"]
    assert (stats["count"], stats["dims"]) == (700, [8])
    mean = np.frombuffer(base64.b64decode(stats["mean"]), "<f8")
    np.testing.assert_allclose(mean, fbank.mean(axis=0), rtol=1e-12)
    assert check_parts(Reader(tmp_path)) > 0


def assert_the_same(reader: Reader, cache: Cache) -> None:
    """Compare ids, arrays, lengths, statistics, failed and expected ids."""
    assert reader.ids == list(cache)
    assert tuple(reader.features) == cache.features
    assert reader.failed == list(cache.failed)
    assert reader.manifest["complete"] == cache.complete
    expected = reader.manifest["expected"]
    assert (expected and expected["count"]) == cache.expected
    for name, declared in reader.features.items():
        assert reader.lengths(name) == cache.lengths(name).tolist()
        for id in reader.ids:
            np.testing.assert_array_equal(reader.read(id, name), cache.read(id, name), strict=True)
        if declared["stats"]:
            count, mean, m2 = reader.stats(name)
            assert count == cache.stats(name).count
            np.testing.assert_array_equal(mean, cache.stats(name).mean, strict=True)
            np.testing.assert_array_equal(m2, cache.stats(name).m2, strict=True)


# What a reader need not know, but a checker of caches: as the documentation says, too.


def check_expected(reader: Reader) -> None:
    """Compare the digest of the expected ids, of a complete cache."""
    ids = sorted([*reader.ids, *reader.failed], key=str.encode)
    digest = xxhash.xxh3_128_hexdigest(b"".join(id.encode() + b"\0" for id in ids))
    assert reader.manifest["expected"] == {"count": len(ids), "digest": digest}


def check_parts(reader: Reader) -> int:
    """Compare every page of every container, and what parts say; returns the number of pages."""
    checked, pages = 0, 0
    for number, entry in enumerate(reader.manifest["parts"]):
        directory = reader.cache / "parts" / entry["name"]
        data = (directory / "part.json").read_bytes()
        assert xxhash.xxh3_64_hexdigest(data) == entry["digest"]
        seal = unsealed(data)
        assert seal["page_bytes"] == PAGE_BYTES
        assert seal["header"]["fingerprint"] == reader.manifest["building_fingerprint"]
        part = columns_of((directory / "index.columns").read_bytes(), seal["columns"])
        assert len(part["hashes"]) == seal["rows"] == entry["rows"]
        ends = part["page_ends"].tolist()
        for path, (start, end) in zip(
            strings_of(part, "container_path"), pairwise(ends), strict=True
        ):
            assert reader.containers[checked] == f"parts/{entry['name']}/{path}"
            assert reader.columns["container_part"][checked] == number
            check_container(reader, checked, part["pages"][start:end].tolist())
            checked += 1
        pages += len(part["pages"])
    assert checked == len(reader.containers)
    return pages


def check_container(reader: Reader, number: int, pages: list[int]) -> None:
    data = (reader.cache / reader.containers[number]).read_bytes()
    assert len(data) == reader.columns["container_size"][number]
    cut = [data[start : start + PAGE_BYTES] for start in range(0, len(data), PAGE_BYTES)]
    assert [xxhash.xxh3_64_intdigest(page) for page in cut] == pages
    words = b"".join(word.to_bytes(8, "little") for word in (*pages, len(data)))
    digest = reader.columns["container_digest"][16 * number : 16 * (number + 1)]
    assert xxhash.xxh3_128_digest(words) == digest.tobytes()

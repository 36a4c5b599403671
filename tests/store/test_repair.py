"""Repair: every utterance whose bytes are intact is saved, all others are named, nothing goes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.container_files import PAGE_BYTES, read_at
from featcache.errors import CacheError, CacheLockedError, CorruptCacheError
from featcache.format import ColumnFile, Stamps, manifest_file, read_manifest
from featcache.store import repair
from featcache.writing.part_writer import PartWriter

IDS = [f"utt-{number:03}" for number in range(160)]
Arrays = dict[str, NDArray[Any]]


def fbank(
    backend: str = "memmap", codec: str | None = None, **options: object
) -> FeatureStorageConfig:
    return FeatureStorageConfig("fbank", backend=backend, codec=codec, options=options)


def units(backend: str = "memmap") -> FeatureStorageConfig:
    return FeatureStorageConfig("units", dtype="int16", backend=backend, stats=False)


LAYOUTS = {
    "memmap": [fbank(), units()],
    "hdf5": [fbank("hdf5"), units("hdf5")],
    "hdf5-gzip": [fbank("hdf5", "gzip"), units("memmap")],
    "hdf5-lilcom": [fbank("hdf5", "lilcom"), units("hdf5")],
    "webdataset": [fbank("webdataset", shard_bytes=1 << 20), units("webdataset")],
    "zarr": [fbank("zarr", "raw", chunk_bytes=1 << 12, shard_bytes=1 << 16), units("zarr")],
    "zarr-zstd": [fbank("zarr", "zstd"), units("zarr")],
    "zarr-blosc": [fbank("zarr", "blosc"), units("zarr")],
    "lilcom": [fbank("lilcom"), units()],
}


def arrays_of(id: str) -> Arrays:
    number = IDS.index(id)
    random = np.random.default_rng(number)
    frames = 0 if number == 7 else 60 + number % 50
    return {
        "fbank": random.standard_normal((frames, 80)).astype(np.float32),
        "units": random.integers(0, 500, frames, np.int16),
    }


def make(
    path: Path, features: list[FeatureStorageConfig], parts: int = 2, ids: list[str] = IDS
) -> Path:
    """Write a cache of some parts, with stamps, annotations and an utterance that failed."""
    with CacheWriter(path, features, {"model": "wavlm"}) as writer:
        writer.expect([*ids, "broken"])
        writer.fail("broken")
        for some in np.array_split(np.array(ids), parts):
            for id in some.tolist():
                speaker = {"speaker": f"spk{IDS.index(id) % 5}"}
                writer.write(
                    id, {name: arrays_of(id)[name] for name in writer.features}, annotations=speaker
                )
            writer.publish()
    return path


def contents(path: Path) -> dict[str, Arrays]:
    """Read all arrays of a cache."""
    with featcache.open(path) as cache:
        return {id: {name: each.copy() for name, each in cache[id].items()} for id in cache}


def containers(path: Path) -> list[Path]:
    """List the containers of a cache."""
    own = ("part.json", "index.columns")
    return sorted(
        file
        for file in path.glob("parts/2*/**/*")
        if file.is_file() and file.name not in own and file.suffix != ".columns"
    )


def damage(path: Path, share: float, seed: int = 0) -> int:
    """Change some bytes of a share of the pages of all containers; return how many pages."""
    random = np.random.default_rng(seed)
    pages = [
        (file, page)
        for file in containers(path)
        for page in range(-(-file.stat().st_size // PAGE_BYTES))
    ]
    chosen = random.choice(len(pages), max(round(share * len(pages)), 3), replace=False)
    for file, page in (pages[at] for at in chosen):
        data = bytearray(file.read_bytes())
        end = min((page + 1) * PAGE_BYTES, len(data))
        begin = int(random.integers(page * PAGE_BYTES, end))
        for at in range(begin, min(begin + 900, end)):
            data[at] ^= 0x55
        file.write_bytes(data)
    return len(chosen)


def intact(path: Path, whole: Path, version: str | None = None) -> set[str]:
    """Return the ids of a cache whose bytes are the same as in its copy, by the copy's index."""
    same = set()
    opened = featcache.open(whole, version=version).opened
    for row, id in enumerate(opened.index.ids):
        good = True
        for columns in opened.index.features.values():
            for at in range(int(columns.first[row]), int(columns.first[row + 1])):
                file = opened.index.containers.path(int(columns.container[at]))
                some = slice(int(columns.offset[at]), int(columns.offset[at] + columns.nbytes[at]))
                there = (path / file).read_bytes() if (path / file).exists() else b""
                good &= there[some] == (whole / file).read_bytes()[some]
        if good:
            same.add(id)
    return same


def snapshot(path: Path) -> dict[str, bytes]:
    """Read all files of a cache."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def assert_same(found: dict[str, Arrays], expected: dict[str, Arrays]) -> None:
    assert sorted(found) == sorted(expected)
    for id, arrays in expected.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[id][name], array, strict=True)


def assert_repaired(path: Path, before: dict[str, Arrays], good: set[str]) -> featcache.Cache:
    """Compare a repaired cache with what it held before: that which is good, and nothing else."""
    cache = featcache.open(path, verify="arrays")
    assert {*cache} == good
    assert_same(contents(path), {id: before[id] for id in good})
    assert cache.failed == ("broken",)
    assert cache.complete == (good == before.keys())
    frames = np.concatenate([before[id]["fbank"] for id in cache]).astype(np.float64)
    stats = cache.stats("fbank")
    assert stats.count == len(frames)
    lossy = cache.fingerprint["features"]["fbank"]["codec"] == "lilcom"  # counted before it
    rtol, atol = (0.0, 2e-3) if lossy else (1e-10, 1e-12)
    np.testing.assert_allclose(stats.mean, frames.mean(axis=0), rtol=rtol, atol=atol)
    assert [*cache.annotation("speaker")] == [f"spk{IDS.index(id) % 5}" for id in cache]
    return cache


@pytest.fixture(scope="module", params=LAYOUTS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / str(request.param)
    return make(path, LAYOUTS[request.param])


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make(tmp_path / "cache", LAYOUTS["memmap"])


def test_every_intact_utterance_is_saved_and_every_other_is_named(
    whole: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(whole, tmp_path / "cache"))
    before, pages = contents(path), damage(path, 0.01)
    good = intact(path, whole)
    reader = featcache.open(path)
    kept = next(id for id in reader if id in good)
    untouched = snapshot(path)

    looked = reader.repair(dry_run=True)
    assert snapshot(path) == untouched
    assert not looked.done
    done = featcache.open(path).repair()
    assert done.done
    assert (done.saved, done.lost) == (looked.saved, looked.lost)
    assert (done.set_aside, done.elsewhere) == (looked.set_aside, looked.elsewhere)

    assert {*done.lost_ids} == before.keys() - good
    assert done.saved == len(good)
    assert_repaired(path, before, good)
    told = {(each.container, page) for each in done.lost for page in each.pages}
    told |= {(each.container, page) for each in done.elsewhere for page in each.pages or ()}
    assert len(told) == pages
    for aside in done.set_aside:
        old = aside.removesuffix(".damaged")
        assert (
            snapshot(path / aside).items()
            == {
                name.removeprefix(f"{old}/"): data
                for name, data in untouched.items()
                if name.startswith(f"{old}/")
            }.items()
        )
    np.testing.assert_array_equal(reader.read(kept, "fbank"), before[kept]["fbank"])

    again = featcache.open(path).repair()
    assert again.is_whole
    assert again.saved == len(good)
    with CacheWriter(path, LAYOUTS[whole.name], {"model": "wavlm"}) as writer:
        assert {id for id in IDS if id not in writer} == before.keys() - good
        for id in before.keys() - good:
            writer.write(id, arrays_of(id))
    assert {*featcache.open(path, verify="arrays")} == before.keys()


def test_a_whole_cache_is_left_as_it_is_and_said_to_be_whole(plain: Path) -> None:
    untouched = snapshot(plain)
    outcome = featcache.open(plain).repair()
    assert outcome.is_whole
    assert str(outcome) == f"whole: {len(IDS)} utterances, nothing to repair"
    after = snapshot(plain)
    assert {*after} - {"writer.lock"} == {*untouched} - {"writer.lock"}
    assert all(after[name] == data for name, data in untouched.items() if name != "writer.lock")


def make_rich(path: Path) -> Path:
    """Write a cache with all that a cache may have: tombstones, stamps, tags, files of roles."""
    ids = IDS[:40]
    make(path, LAYOUTS["memmap"], ids=ids)
    cache = featcache.open(path)
    cache.annotate({id: {"snr": float(IDS.index(id))} for id in ids})
    cache.tag("v1")
    cache.delete([*ids[10:14], *ids[30:33]])
    with CacheWriter(path, LAYOUTS["memmap"], {"model": "wavlm"}) as writer:
        writer.expect([*ids[:10], *ids[14:30], *ids[33:], "broken"])
        writer.keep_file("made-from", b'{"command": "train.py"}')
        writer.restamp({IDS[3]: Stamps(5, 6)})
    return path


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for at in range(len(data) // 2, min(len(data) // 2 + 3, len(data))):
        data[at] ^= 0xFF
    file.write_bytes(data)


def first_flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[0] ^= 0xFF
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


HARM: dict[str, Callable[[Path], object]] = {
    "flip": flip,
    "first": first_flipped,
    "cut": cut,
    "remove": Path.unlink,
}


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rich(tmp_path_factory.mktemp("rich") / "cache")


def versions(path: Path) -> dict[str | None, dict[str, Arrays]]:
    found: dict[str | None, dict[str, Arrays]] = {}
    for version in (None, "v1"):
        with featcache.open(path, version=version) as cache:
            found[version] = {id: cache[id] for id in cache}
    return found


@pytest.mark.parametrize("harm", HARM)
def test_damage_of_any_file_costs_what_lies_there_and_no_more(
    rich: Path, tmp_path: Path, harm: str
) -> None:
    before = versions(rich)
    tagged = manifest_file(read_manifest(rich).tags["v1"])
    files = [file for file in snapshot(rich) if Path(file).name not in NOT_HARMED]
    files.remove(tagged)
    assert len(files) > 12
    for number, file in enumerate(files):
        path = Path(shutil.copytree(rich, tmp_path / str(number)))
        HARM[harm](path / file)
        good = {version: intact(path, rich, version) for version in before}
        outcome = repair(path)
        assert not outcome.is_whole, file
        for version, held in before.items():
            with featcache.open(path, version=version, verify="arrays") as cache:
                assert {*cache} == good[version], (file, version)
                assert_same({id: cache[id] for id in cache}, {id: held[id] for id in cache})
                if not file.startswith("index"):  # which is all that has them
                    assert [*cache.annotation("snr")] == [IDS.index(id) for id in cache]
                assert [*cache.annotation("speaker")] == [f"spk{IDS.index(id) % 5}" for id in cache]
        assert featcache.open(path).repair().is_whole
        assert {*outcome.lost_ids} == before["v1"].keys() - good["v1"]
        shutil.rmtree(path)


NOT_HARMED = ("featcache.json", "writer.lock", "writer.json", "README.txt")


@pytest.mark.parametrize("harm", HARM)
def test_a_cache_whose_utterances_are_all_saved_stays_complete(
    rich: Path, tmp_path: Path, harm: str
) -> None:
    path = Path(shutil.copytree(rich, tmp_path / "rich"))  # the other index knows what failed
    plain = make(tmp_path / "plain", LAYOUTS["memmap"], ids=IDS[:20])  # so does the one before
    bare = tmp_path / "bare"  # nothing has failed
    with CacheWriter(bare, LAYOUTS["memmap"], {"model": "wavlm"}) as writer:
        writer.expect(IDS[:3])
        for id in IDS[:3]:
            writer.write(id, arrays_of(id))
    for each in (path, plain, bare):
        before = featcache.open(each)
        assert before.complete
        HARM[harm](each / before.opened.manifest.index)
        assert repair(each).lost == ()
        after = featcache.open(each, verify="arrays")
        assert after.complete
        assert (after.ids, after.failed, after.expected) == (
            before.ids,
            before.failed,
            before.expected,
        )


@pytest.mark.parametrize("harm", ["flip", "first", "cut"])
def test_a_damaged_manifest_is_restored_where_something_proves_its_copy(
    rich: Path, tmp_path: Path, harm: str
) -> None:
    path = Path(shutil.copytree(rich, tmp_path / "cache"))
    file, good = path / "featcache.json", (path / "featcache.json").read_bytes()
    HARM[harm](file)
    damaged, untouched = file.read_bytes(), snapshot(path)
    with pytest.raises(CorruptCacheError, match="repair"):
        featcache.open(path)
    looked = repair(path, dry_run=True)
    assert snapshot(path) == untouched
    outcome = repair(path)
    assert outcome == replace(looked, done=True)
    assert outcome.rebuilt == ("featcache.json",)
    assert (outcome.lost, outcome.saved) == ((), 33)
    assert [(path / each).read_bytes() for each in outcome.set_aside] == [damaged]
    assert file.read_bytes() == good
    assert repair(path).is_whole
    assert_same(contents(path), contents(rich))
    HARM[harm](file)  # another time nothing is lost, either: tags are those of the copy
    (path / manifest_file(read_manifest(rich).tags["v1"])).unlink()
    assert "v1" in repair(path).left[0]


def test_no_copy_is_guessed_for_a_manifest_that_was_another_one(
    plain: Path, tmp_path: Path
) -> None:
    CacheWriter(plain, LAYOUTS["memmap"], {"model": "other"}, overwrite=True).abort()
    empty = make(tmp_path / "empty", LAYOUTS["memmap"], ids=IDS[:4])
    (empty / "featcache.json").write_bytes(b"")
    flip(plain / "featcache.json")
    for path in (plain, empty):
        untouched = snapshot(path)
        for dry_run in (True, False):
            with pytest.raises(CorruptCacheError, match=r"put a good copy .*'manifests'"):
                repair(path, dry_run=dry_run)
        assert {**snapshot(path), "writer.lock": b""} == {**untouched, "writer.lock": b""}


def test_damaged_manifests_of_feature_sets_are_restored(plain: Path) -> None:
    energy = FeatureStorageConfig("energy", time_axis=None)
    with CacheWriter(plain, [energy], {"model": "none"}) as writer:
        for id in IDS:
            writer.write(id, {"energy": np.ones(3, np.float32)})
    before = contents(plain)
    for path in (plain, plain / "sets/energy"):
        flip(path / "featcache.json")
    outcome = repair(plain)
    assert outcome.rebuilt == ("featcache.json", "sets/energy/featcache.json")
    assert outcome.lost == ()
    assert_same(contents(plain), before)
    assert repair(plain).is_whole


@pytest.mark.parametrize("harm", [flip, Path.unlink], ids=["flipped", "lost"])
def test_names_of_feature_sets_are_made_anew(plain: Path, harm: Callable[[Path], object]) -> None:
    energy = FeatureStorageConfig("energy", time_axis=None)
    with CacheWriter(plain, [energy]) as writer:
        for id in IDS:
            writer.write(id, {"energy": np.ones(3, np.float32)})
    pitch = CacheWriter(plain, [FeatureStorageConfig("pitch", time_axis=None)])
    pitch.write(IDS[0], {"pitch": np.ones(1, np.float32)})
    pitch.close(complete=False)
    before, file = contents(plain), plain / "sets/featcache.json"
    harm(file)
    for following in (plain / "sets/energy/next.json", None):
        with pytest.raises(CorruptCacheError, match=r"featcache\.store\.repair\(path\)"):
            featcache.open(plain)
        if following is not None:  # an edit of several sets, which may count
            following.touch()
            with pytest.raises(CorruptCacheError, match="put it back"):
                repair(plain)
            following.unlink()
    untouched = snapshot(plain)
    looked = repair(plain, dry_run=True)
    assert snapshot(plain) == untouched
    outcome = repair(plain)
    assert outcome == replace(looked, done=True)
    assert outcome.rebuilt == ("sets/featcache.json",)
    assert len(outcome.set_aside) == (harm is flip)
    assert ["'pitch'" in each for each in outcome.left] == [True]
    assert_same(contents(plain), before)
    assert repair(plain).is_whole


def test_the_lost_manifest_of_a_tag_is_left_to_a_person_and_nothing_of_it_goes(
    rich: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(rich, tmp_path / "cache"))
    (path / manifest_file(read_manifest(path).tags["v1"])).unlink()
    untouched = snapshot(path)
    outcome = repair(path)
    assert len(outcome.left) == 1
    assert "v1" in outcome.left[0]
    assert {**snapshot(path), "writer.lock": b""} == {**untouched, "writer.lock": b""}


def test_what_damage_to_both_indexes_hides_is_told_by_the_bytes(tmp_path: Path) -> None:
    """An extent counts where its bytes have their checksum, whichever index names it."""
    path = make(tmp_path / "cache", LAYOUTS["memmap"], parts=1)
    before = contents(path)
    (part,) = (path / "parts").glob("2*")
    flip_column(part / "index.columns", "fbank.offset", row=20)
    flip_column(part / "index.columns", "id_bytes", row=9)
    flip_column(part / "index.columns", "annotations/speaker/codes", row=5)
    flip_column(path / read_manifest(path).index, "fbank.checksum", row=90)
    flip_column(path / read_manifest(path).index, "units.first", row=12)
    outcome = repair(path)
    assert not outcome.lost
    assert_repaired(path, before, {*before})


def flip_column(file: Path, name: str, row: int) -> None:
    with ColumnFile(file.parent, file.name) as columns:
        kind, _, begin, *_ = columns._columns[name]
    data = bytearray(file.read_bytes())
    data[begin + row * np.dtype(kind).itemsize] ^= 0x10
    file.write_bytes(data)


def test_a_lost_or_cut_part_costs_its_utterances_alone(plain: Path, tmp_path: Path) -> None:
    before, whole = contents(plain), Path(shutil.copytree(plain, tmp_path / "whole"))
    first, second = sorted((plain / "parts").glob("2*"))
    shutil.rmtree(first)
    cut(second / "fbank.npy")
    good = intact(plain, whole)
    assert good
    outcome = repair(plain)
    assert {*outcome.lost_ids} == before.keys() - good
    assert outcome.set_aside == (f"parts/{second.name}.damaged",)
    assert_repaired(plain, before, good)


def test_tags_of_the_damaged_generation_name_what_is_left_of_it(plain: Path) -> None:
    featcache.open(plain).tag("paper")
    featcache.open(plain).tag("again")
    damage(plain, 0.01)
    outcome = repair(plain)
    for tag in ("paper", "again"):
        with featcache.open(plain, version=tag, verify="arrays") as version:
            assert {*version} == {*IDS} - {*outcome.lost_ids}
    assert featcache.open(plain).tags.keys() == {"paper", "again"}


def test_the_outcome_as_text_can_be_put_into_a_log(plain: Path) -> None:
    damage(plain, 0.01)
    outcome = repair(plain)
    text = str(outcome)
    assert f"{len(IDS) - len(outcome.lost_ids)} utterances saved" in text
    assert f"{len(outcome.lost_ids)} lost" in text
    assert all(aside in text for aside in outcome.set_aside)


def test_a_cache_that_is_written_is_not_repaired(plain: Path) -> None:
    damage(plain, 0.01)
    with CacheWriter(plain, LAYOUTS["memmap"], {"model": "wavlm"}) as writer:
        with pytest.raises(CacheLockedError):
            repair(plain)
        assert repair(plain, dry_run=True).lost
        writer.write("new", arrays_of(IDS[0]))
    part = PartWriter(plain, LAYOUTS["memmap"], {"model": "wavlm"})
    part.write("newer", arrays_of(IDS[1]))
    untouched = snapshot(plain)
    with pytest.raises(CacheLockedError, match="still being written"):
        repair(plain)
    assert {*snapshot(plain)} - {*untouched} <= {"writer.lock"}
    part.close()
    repair(plain)
    assert {"new", "newer"} <= {*featcache.open(plain, verify="arrays")}


def test_an_overwrite_under_way_is_to_be_finished_first(plain: Path) -> None:
    damage(plain, 0.01)
    with CacheWriter(plain, LAYOUTS["memmap"], {"model": "hubert"}, overwrite=True) as writer:
        writer.write("new", arrays_of(IDS[0]))
        writer.abort()
    with pytest.raises(CacheError, match="being overwritten"):
        repair(plain)


def test_pages_that_the_disk_cannot_read_are_damaged_ones(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = next(file for file in containers(plain) if file.name == "fbank.npy")

    def failing(read: Callable[..., Any]) -> Callable[..., Any]:
        def reads(descriptor: int, *args: Any) -> Any:
            room, offset = args
            end = offset + (room if isinstance(room, int) else len(room))
            name = Path(f"/proc/self/fd/{descriptor}").readlink()
            if name == file and offset <= PAGE_BYTES * 5 < end:
                raise OSError(errno.EIO, "Input/output error", str(name))
            return read(descriptor, *args)

        return reads

    with monkeypatch.context() as patch:
        for module in ("format.index", "reading.containers"):
            patch.setattr(f"featcache.{module}.read_at", failing(read_at))
        outcome = repair(plain, dry_run=True)
    assert outcome.lost or outcome.elsewhere
    lost = {page for each in outcome.lost for page in each.pages}
    assert lost | {page for each in outcome.elsewhere for page in each.pages or ()} == {5}


def test_a_lack_of_rights_is_no_damage(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "fbank.npy")

    monkeypatch.setattr("featcache.reading.salvage.open_within", refused)
    untouched = snapshot(plain)
    with pytest.raises(CacheError, match="Permission denied"):
        repair(plain)
    assert {**snapshot(plain), "writer.lock": b""} == {**untouched, "writer.lock": b""}


def test_each_feature_set_is_repaired_and_all_at_once(plain: Path) -> None:
    energy = FeatureStorageConfig("energy", stats=False)
    with CacheWriter(plain, [energy], {"model": "wavlm"}) as writer:
        for id in IDS:
            writer.write(id, {"energy": arrays_of(id)["fbank"][:, :64]})
    (part,) = (plain / "sets" / "energy" / "parts").glob("2*")
    flip(part / "energy.npy")
    outcome = repair(plain)
    lost = {each.id for each in outcome.lost}
    assert {each.feature for each in outcome.lost} == {"energy"}
    assert all(each.container.startswith("sets/energy/parts/") for each in outcome.lost)
    assert all(aside.startswith("sets/energy/parts/") for aside in outcome.set_aside)
    cache = featcache.open(plain, verify="arrays")
    assert {*cache} == {*IDS} - lost
    assert {*cache.missing("energy")} == lost
    assert outcome.saved == len(cache)


def test_adopted_sources_are_never_written_and_rows_are_dropped(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for id in IDS[:20]:
        np.save(source / f"{id}.npy", arrays_of(id)["fbank"] + 1)
    path = tmp_path / "cache"
    featcache.adopt(source, path).collect()
    feature = next(iter(featcache.open(path).features))
    np.save(source / f"{IDS[3]}.npy", arrays_of(IDS[4])["fbank"])  # changed since
    (source / f"{IDS[5]}.npy").unlink()
    rotten = source / f"{IDS[8]}.npy"
    before = rotten.stat()
    flip(rotten)
    os.utime(rotten, ns=(before.st_atime_ns, before.st_mtime_ns))
    untouched = snapshot(source)

    outcome = repair(path)
    assert {*outcome.lost_ids} == {IDS[3], IDS[5], IDS[8]}
    assert snapshot(source) == untouched
    cache = featcache.open(path, verify="arrays")
    assert [*cache] == [id for id in IDS[:20] if id not in outcome.lost_ids]
    for id in cache:
        np.testing.assert_array_equal(cache.read(id, feature), arrays_of(id)["fbank"] + 1)
    frames = sum(len(arrays_of(id)["fbank"]) for id in cache)
    assert cache.stats(feature).count == frames
    assert cache.repair().is_whole

    source.rename(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="not there"):
        repair(path)
    assert repair(path, roots={"source": tmp_path / "elsewhere"}).is_whole


def test_a_part_that_was_sealed_since_is_repaired_too(plain: Path) -> None:
    with PartWriter(plain, LAYOUTS["memmap"], {"model": "wavlm"}) as part:
        for number in range(4):
            part.write(f"new-{number}", arrays_of(IDS[number]))
    known = {entry.name for entry in read_manifest(plain).parts}
    (new,) = (each for each in (plain / "parts").glob("2*") if each.name not in known)
    flip(new / "fbank.npy")
    outcome = repair(plain)
    (lost,) = outcome.lost_ids
    assert lost.startswith("new-")
    assert {*featcache.open(plain, verify="arrays")} == {*IDS, *(f"new-{n}" for n in range(4))} - {
        lost
    }

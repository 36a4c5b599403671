"""WebDataset shards, written by webdataset, are caches where they lie."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_stores import adopted, annotation, assert_holds, contents, random_arrays

from featcache import CacheWriter, FeatureStorageConfig
from featcache.adoptable import Options
from featcache.adoption.checks import check_found
from featcache.adoption.place import MOST_NAMES, LocalPlace
from featcache.adoption.webdataset import KIND
from featcache.errors import AdoptionError

wds = pytest.importorskip("webdataset")


def write_shards(folder: Path, samples: dict[str, dict[str, Any]], most: int = 8) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pattern = str(folder / "part-%06d.tar")
    with wds.ShardWriter(pattern, maxcount=most, verbose=0) as writer:
        for key, fields in samples.items():
            writer.write({"__key__": key, **fields})
    return folder


def write_tar(
    path: Path, members: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT
) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array), **options)
    return file.getvalue()


def test_several_fields_are_several_features(tmp_path: Path) -> None:
    fbank = random_arrays(1)
    units = {id: np.arange(len(array)).astype(np.int16) for id, array in fbank.items()}
    source = write_shards(
        tmp_path / "shards",
        {id: {"fbank.npy": fbank[id], "units.npy": units[id]} for id in fbank},
    )
    before = contents(source)
    with adopted(source, tmp_path) as cache:
        assert_holds(cache, "fbank", fbank)
        assert_holds(cache, "units", units)
    assert contents(source) == before


def test_a_field_without_a_name_is_the_feature_that_the_user_names(tmp_path: Path) -> None:
    arrays = random_arrays(2)
    source = write_shards(tmp_path / "s", {id: {"npy": array} for id, array in arrays.items()}, 99)
    with adopted(source / "part-000000.tar", tmp_path, feature="w2v") as cache:
        assert_holds(cache, "w2v", arrays)


def test_json_text_and_classes_are_annotations(tmp_path: Path) -> None:
    x = np.ones((2, 3), np.float32)
    first = {"npy": x, "json": {"speaker": "anna", "snr": 3, "a": {"b": 1}, "mixed": 1, "l": [1]}}
    second = {"npy": x, "json": {"snr": 2.5, "mixed": "x"}, "txt": "hellö", "lang.cls": 4}
    with adopted(write_shards(tmp_path / "s", {"u1": first, "u2": second}), tmp_path) as cache:
        assert annotation(cache, "speaker") == {"u1": "anna", "u2": None}
        assert annotation(cache, "snr") == {"u1": 3.0, "u2": 2.5}
        assert annotation(cache, "text") == {"u1": None, "u2": "hellö"}
        assert annotation(cache, "lang") == {"u1": None, "u2": 4}
        assert annotation(cache, "l") == {"u1": [1], "u2": None}
        assert set(cache.table.annotations) == {"speaker", "snr", "text", "lang", "l"}


# webdataset leaves closing its files to the collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_keys_are_cut_as_webdataset_cuts_them(tmp_path: Path) -> None:
    x = npy(np.ones((2, 3), np.float32))
    long = "d" * 90 + "/" + "ü" * 60
    names = ["spk.a/u1.feats.npy", "spk.a/U2.FEATS.NPY", f"{long}.feats.npy"]
    others = ["README", ".hidden.npy", "__meta__/x.feats.npy", "__index__"]
    for number, format in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        path = write_tar(tmp_path / f"{number}.tar", [(n, x) for n in names + others], format)
        found = [sample["__key__"] for sample in wds.WebDataset(str(path), shardshuffle=False)]
        with adopted(path, tmp_path / str(number)) as cache:
            assert sorted(cache.ids) == sorted(found) == sorted(["spk.a/u1", "spk.a/U2", long])


def test_our_own_shards_keep_their_ids(tmp_path: Path) -> None:
    arrays = {"a.b/c": np.ones((3, 2), np.float32), "plain": np.zeros((1, 2), np.float32)}
    config = FeatureStorageConfig("fbank", backend="webdataset")
    with CacheWriter(tmp_path / "ours", [config]) as writer:
        for id, array in arrays.items():
            writer.write(id, {"fbank": array})
    (shard,) = (tmp_path / "ours").rglob("*.tar")
    shard = shard.rename(tmp_path / "away.tar")
    with adopted(shard, tmp_path) as cache:
        assert_holds(cache, "fbank", arrays)


def test_a_header_longer_than_usual_is_read(tmp_path: Path) -> None:
    array = np.ones((2,) + (1,) * 60, np.float32)
    path = write_tar(tmp_path / "x.tar", [("u1.feats.npy", npy(array))])
    with adopted(path, tmp_path) as cache:
        assert cache.dims("feats") == (1,) * 60


GOOD = npy(np.ones((2, 3), np.float32))
REFUSED = {
    "an id with a dot": [("u.1.npy", GOOD), ("u.2.npy", GOOD)],
    "a sample without the field": [("u1.feats.npy", GOOD), ("u2.json", b"{}")],
    "a field twice": [("u1.feats.npy", GOOD), ("u1.feats.npy", GOOD)],
    "a sample in two pieces": [("u1.f.npy", GOOD), ("u2.f.npy", GOOD), ("u1.f.npy", GOOD)],
    "no arrays": [("u1.flac", b"fLaC")],
    "no samples": [],
    "an object array": [("u1.npy", npy(np.array([{}], object), allow_pickle=True))],
    "Fortran order": [
        ("u1.npy", npy(np.ones((3, 4), np.float32).T)),
        ("u2.npy", npy(np.ones((5, 3), np.float32))),
    ],
    "big-endian": [("u1.npy", GOOD), ("u2.npy", npy(np.ones((2, 3), ">f4")))],
    "an array cut short": [("u1.npy", GOOD[:-1])],
    "not an array": [("u1.npy", b"hello")],
    "nothing": [("u1.npy", b"")],
    "damaged JSON": [("u1.npy", GOOD), ("u1.json", b"{")],
    "deep JSON": [("u1.npy", GOOD), ("u1.json", b"[" * 100_000)],
    "a class that is no number": [("u1.npy", GOOD), ("u1.cls", b"x")],
    "text that is not UTF-8": [("u1.npy", GOOD), ("u1.txt", b"\xff")],
    "two dtypes": [("u1.npy", GOOD), ("u2.npy", npy(np.ones((2, 3))))],
}


@pytest.mark.parametrize("case", REFUSED)
def test_samples_that_are_no_utterances_are_refused(tmp_path: Path, case: str) -> None:
    path = write_tar(tmp_path / "x.tar", REFUSED[case])
    with pytest.raises(AdoptionError, match=r"u1|u2|'u'|holds? no"):
        adopted(path, tmp_path, kind="webdataset")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_is_no_array(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("u1.feats.npy")
    info.type, info.linkname = kind, "/etc/passwd"
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(info)
    with pytest.raises(AdoptionError, match=r"u1.*link"):
        adopted(tmp_path / "x.tar", tmp_path)


def test_a_shard_cut_anywhere_is_refused(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "s", {"u1": {"npy": np.ones((2, 3), np.float32)}, "u2": {
        "npy": np.ones((9, 3), np.float32)}})  # fmt: skip
    data = (source / "part-000000.tar").read_bytes().rstrip(b"\0")
    (tmp_path / "x.tar").touch()
    for end in [*range(0, len(data), 97), len(data)]:
        (tmp_path / "x.tar").write_bytes(data[:end])
        with pytest.raises(AdoptionError, match=r"x\.tar"):
            adopted(tmp_path / "x.tar", tmp_path)


def test_headers_that_lie_are_refused_or_hold_what_they_say(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "s", {"u1": {"npy": np.ones((2, 3), np.float32)}})
    data = bytearray((source / "part-000000.tar").read_bytes())
    for place, value in itertools.product(range(2048), (0, 0x39, 0xFF)):
        changed = data.copy()
        changed[place] = value
        (tmp_path / "x.tar").write_bytes(changed)
        try:
            found = KIND.index(LocalPlace(tmp_path, "x.tar"), "x.tar", Options())
        except AdoptionError:
            continue
        check_found(found, [len(changed)])


def test_names_and_shapes_that_no_cache_can_have_are_refused(tmp_path: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (0, %d, %d), }"
    header = (header % (10**17, 10**17)).ljust(117) + b"\n"
    huge = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    for number, (name, data) in enumerate([("u1.npy", huge), ("u1\0.npy", GOOD)]):
        path = write_tar(tmp_path / f"{number}.tar", [(name, data)])
        with pytest.raises(AdoptionError, match=r"u1|feats|of no sample"):
            adopted(path, tmp_path / str(number))


def test_names_of_single_samples_do_not_cost_a_column_each(tmp_path: Path) -> None:
    members = []
    for number in range(MOST_NAMES + 50):
        data = json.dumps({f"word-{number}": 1, "snr": number}).encode()
        members += [(f"utt-{number}.npy", npy(np.ones((2, 3)))), (f"utt-{number}.json", data)]
    with adopted(write_tar(tmp_path / "a.tar", members), tmp_path) as cache:
        assert annotation(cache, "snr") == {id: int(id[4:]) for id in cache}
        assert len(cache.opened.manifest.annotations) == MOST_NAMES

"""Kaldi's archives, written by kaldiio, are caches where they lie."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_stores import adopted, annotation, assert_holds, contents, random_arrays

import featcache
from featcache import CacheWriter, FeatureStorageConfig
from featcache.errors import AdoptionError, ConfigError

kaldiio = pytest.importorskip("kaldiio")


def kaldis_own(scp: Path) -> dict[str, Any]:
    """The matrices of an scp as Kaldi's own code decodes them."""
    native = pytest.importorskip("kaldi_native_io")
    with native.SequentialFloatMatrixReader(f"scp:{scp}") as reader:
        return {id: np.array(array) for id, array in reader}


def write_archive(folder: Path, arrays: dict[str, Any], **options: Any) -> Path:
    """Write feats.ark and feats.scp, with absolute paths; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    kaldiio.save_ark(str(folder / "feats.ark"), arrays, scp=str(folder / "feats.scp"), **options)
    return folder


@pytest.mark.parametrize("named", ["", "feats.scp", "feats.ark"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_matrices_are_read_bit_for_bit(tmp_path: Path, dtype: str, named: str) -> None:
    arrays = {id: array.astype(dtype) for id, array in random_arrays(1).items()}
    source = write_archive(tmp_path / "data", arrays)
    before = contents(source)
    with adopted(source / named, tmp_path) as cache:
        assert_holds(cache, "feats", arrays)
    assert contents(source) == before


def test_two_archives_of_one_scp_are_one_cache(tmp_path: Path) -> None:
    first, second = random_arrays(2), random_arrays(3)
    second = {f"other-{id}": array for id, array in second.items()}
    lines = [
        (write_archive(tmp_path / name, arrays) / "feats.scp").read_text()
        for name, arrays in (("a", first), ("b/c", second))
    ]
    (tmp_path / "all.scp").write_text("".join(lines))
    with adopted(tmp_path / "all.scp", tmp_path) as cache:
        assert_holds(cache, "feats", first | second)


def test_paths_are_relative_to_the_folder_in_which_a_recipe_ran(tmp_path: Path) -> None:
    arrays = random_arrays(4)
    write_archive(tmp_path / "fbank", arrays)
    data = tmp_path / "data" / "train"
    data.mkdir(parents=True)
    scp = (tmp_path / "fbank" / "feats.scp").read_text().replace(f"{tmp_path}/", "")
    (data / "feats.scp").write_text(scp)
    with adopted(data, tmp_path / "out") as cache:
        assert_holds(cache, "feats", arrays)


def test_equally_long_vectors_have_no_time_axis_unless_the_user_says_so(tmp_path: Path) -> None:
    arrays = {f"utt{n}": np.full(7, n, np.float32) for n in range(5)}
    source = write_archive(tmp_path / "x", arrays)
    with adopted(source, tmp_path, feature="xvector") as cache:
        assert cache.dims("xvector") == (7,)
        assert {id: cache.read(id, "xvector").tolist() for id in cache.ids} == {
            id: array.tolist() for id, array in arrays.items()
        }
    with adopted(source, tmp_path / "2", time_axis=0) as cache:
        assert_holds(cache, "feats", arrays)


@pytest.mark.parametrize("method", [None, 3])
def test_equal_matrices_have_no_time_axis_where_the_user_says_so(
    tmp_path: Path, method: int | None
) -> None:
    arrays = {f"utt{n}": np.full((2, 3), n, np.float32) for n in range(5)}
    source = write_archive(tmp_path / "x", arrays, compression_method=method)
    with adopted(source, tmp_path, time_axis=None) as cache:
        assert cache.dims("feats") == (2, 3)
        want = kaldiio.load_scp(str(source / "feats.scp"))["utt4"]
        assert np.array_equal(cache.read("utt4", "feats"), want)


def test_vectors_of_several_lengths_are_frames_of_one_number(tmp_path: Path) -> None:
    arrays = {f"utt{n}": np.arange(n, dtype=np.float32) for n in range(1, 6)}
    with adopted(write_archive(tmp_path / "x", arrays), tmp_path) as cache:
        assert_holds(cache, "feats", arrays)


def test_vectors_of_integers_are_read(tmp_path: Path) -> None:
    arrays = {f"utt{n}": np.arange(-n, n, dtype=np.int32) for n in range(6)}
    with adopted(write_archive(tmp_path / "x", arrays), tmp_path, feature="ali") as cache:
        assert_holds(cache, "ali", arrays)


@pytest.mark.parametrize("method", [1, 2, 3, 4, 5, 6, 7])
def test_compressed_matrices_are_what_kaldi_decodes(tmp_path: Path, method: int) -> None:
    arrays = {id: np.abs(array) % 1 for id, array in random_arrays(5).items()}
    arrays["long"] = np.random.default_rng(5).random((300, 5), np.float32)
    source = write_archive(tmp_path / "x", arrays, compression_method=method)
    decoded = kaldis_own(source / "feats.scp")
    with adopted(source, tmp_path) as cache:
        assert_holds(cache, "feats", decoded)


@pytest.mark.parametrize("method", [None, 2, 3])
def test_a_range_of_rows_is_an_utterance_of_its_own(tmp_path: Path, method: int | None) -> None:
    whole = random_arrays(6, count=3, dims=4)
    source = write_archive(tmp_path / "x", whole, compression_method=method)
    lines = dict(line.split() for line in (source / "feats.scp").read_text().splitlines())
    ranges = {"spk0-utt00": "0:0", "spk1-utt01": "2:5,0:3", "spk2-utt02": "4:14"}
    (source / "feats.scp").write_text(
        "".join(f"{id}-{n} {lines[id]}[{within}]\n" for n, (id, within) in
                enumerate([*ranges.items(), ("spk1-utt01", ":,0:3"), ("spk2-utt02", "5:16")]))
    )  # fmt: skip
    want = kaldis_own(source / "feats.scp")
    with adopted(source, tmp_path) as cache:
        assert_holds(cache, "feats", want)


def test_tables_beside_an_scp_are_annotations(tmp_path: Path) -> None:
    arrays = random_arrays(7, count=3)
    source = write_archive(tmp_path / "x", arrays)
    first, second, third = arrays
    (source / "text").write_text(f"{first} hello  wörld \n{third}\nunknown x\n")
    (source / "utt2spk").write_text("".join(f"{id} {id[:4]}\n" for id in arrays))
    (source / "utt2dur").write_text(f"{second}\t1.25\n")
    (source / "frame_shift").write_text("0.01\n")
    with adopted(source, tmp_path) as cache:
        assert annotation(cache, "text") == {first: "hello  wörld", second: None, third: ""}
        assert annotation(cache, "speaker") == {id: id[:4] for id in arrays}
        assert annotation(cache, "duration") == {first: None, second: 1.25, third: None}


TABLES_BESIDE = {
    "utt2dur": (
        b"spk0-utt00 inf\n",
        b"spk0-utt00 nan\n",
        b"spk0-utt00 long\n",
        b"spk0-utt00 \xff\n",
    ),
    "frame_shift": (b"0\n", b"-0.01\n", b"nan\n", b"1e400\n", b"none\n", b"\xff\n"),
    "text": (b"spk0-utt00 \xff\n", b"\0\n"),
    "feats.scp": (b"u \xff |\n", b"u \xff\n", b"u feats.ark:11[\xff]\n", b"u a\0b\n"),
}


@pytest.mark.parametrize("name", TABLES_BESIDE)
def test_tables_of_what_they_cannot_say_are_refused(tmp_path: Path, name: str) -> None:
    for number, content in enumerate(TABLES_BESIDE[name]):
        source = write_archive(tmp_path / str(number), random_arrays(7, count=3))
        (source / name).write_bytes(content)
        with pytest.raises(AdoptionError, match=name):
            adopted(source, tmp_path / "into", kind="kaldi")


def test_empty_matrices_are_utterances_without_frames(tmp_path: Path) -> None:
    arrays = random_arrays(8, count=3) | {"none": np.zeros((0, 0), np.float32)}
    source = write_archive(tmp_path / "x", arrays)
    with adopted(source, tmp_path) as cache:
        assert cache.read("none", "feats").shape == (0, 5)


REFUSED = {
    "a pipe": ("utt1 gunzip -c a.gz |\n", "utt1.*command"),
    "a file that is not there": ("utt1 nowhere.ark:5\n", "nowhere.ark"),
    "a byte behind the end": ("utt1 feats.ark:99999\n", "utt1.*ends before"),
    "a byte within numbers": ("utt1 feats.ark:30\n", "utt1.*byte 30"),
    "a line without a file": ("utt1\n", "line 1"),
    "a range of columns": ("spk0-utt00 feats.ark:11[0:0,1:2]\n", "spk0-utt00.*columns"),
    "a range behind the end": ("spk0-utt00 feats.ark:11[4:90]\n", "spk0-utt00.*1 rows"),
    "no range at all": ("spk0-utt00 feats.ark:11[a]\n", "spk0-utt00"),
    "an id twice": ("a feats.ark:11\na feats.ark:11\n", "'a'"),
    "no utterances": ("", "no utterances"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_lines_that_name_no_matrix_are_refused_by_id(tmp_path: Path, case: str) -> None:
    text, message = REFUSED[case]
    source = write_archive(tmp_path / "x", random_arrays(9, count=2))
    (source / "feats.scp").write_text(text)
    with pytest.raises(AdoptionError, match=message):
        adopted(source / "feats.scp", tmp_path, kind="kaldi")
    assert not (tmp_path / "cache").exists()


def head(kind: bytes, *numbers: int) -> bytes:
    return b"\0B" + kind + b"".join(struct.pack("<Bi", 4, number) for number in numbers)


OBJECTS = {
    "text": b" [ 1 2 ]\n",
    "audio": b"RIFF\x24\0\0\0WAVEfmt ",
    "a pickle": b"PKL\x80\x04",
    "matrix": head(b"FM ", 3, 1 << 30),
    "ends before": head(b"FM ", 2, 2) + bytes(15),
    "damaged": head(b"FM ", -2, -2),
    "within its head": b"\0BFM ",
    "no matrix or vector": b"\0BXM " + bytes(30),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_objects_that_are_no_matrix_are_refused_by_id(tmp_path: Path, case: str) -> None:
    (tmp_path / "feats.ark").write_bytes(b"utt1 " + OBJECTS[case])
    with pytest.raises(AdoptionError, match=f"utt1.*{case}" if case != "matrix" else "utt1"):
        adopted(tmp_path / "feats.ark", tmp_path)


def integers(*numbers: int) -> bytes:
    return b"".join(struct.pack("<Bi", 4, number) for number in numbers)


def floats(*numbers: float) -> bytes:
    return b"".join(struct.pack("<Bf", 4, number) for number in numbers)


# tables of Kaldi that are neither of matrices nor of vectors, each with objects of several lengths
TABLES: dict[str, list[bytes]] = {
    "posteriors": [
        integers(2, 1, 7) + floats(0.5) + integers(2, 8) + floats(0.25) * 2,
        integers(1, 1, 9) + floats(1.0),
        integers(3, 0, 0, 1, 2) + floats(0.333),
    ],
    "Gaussian posteriors": [integers(1, 1, 5) + b"FV " + integers(2) + struct.pack("<2f", 0.5, 1)],
    "vectors of vectors": [
        integers(2, 2, 1, 2, 1, 3),
        integers(1, 3, 4, 5, 6),
        integers(3, 0, 0, 4),
    ],
    "pairs of integers": [integers(1, 3, 4), integers(2, 3, 4, 5, 6)],
    "pairs of floats": [integers(1) + floats(3, 4), integers(2) + floats(3, 4, 5, 6)],
    "integers": [integers(1), integers(2), integers(13), integers(26)],
    "integers of zero": [integers(0)] * 3,
    "floats": [floats(1.5), floats(2.5), floats(0)],
    "doubles": [struct.pack("<Bd", 8, 1.5), struct.pack("<Bd", 8, 0)],
    "bools": [b"T", b"F"],
    "vectors of bytes": [integers(3) + b"\1\1\1\2\1\3", integers(1) + b"\1\4"],
    "blobs": [b'\x14\x11"' + struct.pack("<q", 3) + b"abc"],
}


@pytest.mark.parametrize("named", ["scp", "ark"])
@pytest.mark.parametrize("table", TABLES)
def test_tables_of_something_else_are_refused_wherever_they_lie(
    tmp_path: Path, table: str, named: str
) -> None:
    kinds = TABLES[table] * 40 if table == "integers" else TABLES[table]
    in_front = {"all alone": [], "behind a vector": [integers(2, 5, 6), integers(1, 5)]}
    for place, others in in_front.items():
        if others and table == "integers of zero":
            continue  # which are vectors of no number, to the bit
        folder = tmp_path / place
        folder.mkdir()
        lines, data = "", b""
        for number, content in enumerate([*others, *kinds]):
            data += f"utt-{number:03d} ".encode()
            lines += f"utt-{number:03d} {folder}/a.ark:{len(data)}\n"
            data += b"\0B" + content
        (folder / "a.ark").write_bytes(data)
        (folder / "a.scp").write_text(lines)
        with pytest.raises(AdoptionError, match="utt-"):
            adopted(folder / f"a.{named}", tmp_path / place / "into")


@pytest.mark.parametrize("kind", [b"FM ", b"DV ", b"CM "])
def test_an_object_that_another_does_not_follow_is_refused(tmp_path: Path, kind: bytes) -> None:
    data = b"utt-1 " + OBJECT[kind] + b"utt-2 " + OBJECT[kind]
    (tmp_path / "a.scp").write_text(f"utt-1 {tmp_path}/a.ark:6\n")
    for wrong in (b"", b"\0", b"u", b"\x04"):  # in place of the first byte of the second id
        (tmp_path / "a.ark").write_bytes(data.replace(b"utt-2", wrong + b"\0tt-2"))
        with pytest.raises(AdoptionError, match=r"utt-1.*no other object begins"):
            adopted(tmp_path / "a.scp", tmp_path)
    for right in (data, data[: len(OBJECT[kind]) + 6], data[: len(OBJECT[kind]) + 9]):
        (tmp_path / "a.ark").write_bytes(right)  # cut behind the first, as by a killed writer
        with adopted(tmp_path / "a.scp", tmp_path / str(len(right))) as cache:
            assert cache.read("utt-1", "feats").size == 2


OBJECT = {
    b"FM ": b"\0BFM " + integers(2, 1) + bytes(8),
    b"DV ": b"\0BDV " + integers(2) + bytes(16),
    b"CM ": b"\0BCM " + struct.pack("<ffii", 0, 1, 2, 1) + bytes(8 + 2),
}


def test_an_archive_cut_anywhere_is_refused_or_holds_fewer_utterances(tmp_path: Path) -> None:
    source = write_archive(tmp_path / "x", random_arrays(10, count=4, dims=2))
    data = (source / "feats.ark").read_bytes()
    whole = 0
    for end in range(1, len(data)):
        (tmp_path / "cut.ark").write_bytes(data[:end])
        try:
            with adopted(tmp_path / "cut.ark", tmp_path / str(end)) as cache:
                whole += len(cache.ids) < 4
        except AdoptionError:
            continue
    assert whole == 3


def test_matrices_of_two_widths_or_dtypes_are_refused_by_id(tmp_path: Path) -> None:
    for number, other in enumerate([np.ones((2, 6), np.float32), np.ones((2, 5), np.float64)]):
        source = write_archive(tmp_path / str(number), random_arrays(11) | {"other": other})
        with pytest.raises(AdoptionError, match="'other'"):
            adopted(source, tmp_path)


@pytest.mark.parametrize("method", [None, 2])
def test_statistics_and_checksums_are_collected_and_the_archive_stays(
    tmp_path: Path, method: int | None
) -> None:
    source = write_archive(tmp_path / "x", random_arrays(12), compression_method=method)
    first = sorted(random_arrays(12))[0]
    scp = source / "feats.scp"
    scp.write_text(scp.read_text() + f"more {scp.read_text().split()[9]}[1:2]\n")
    want = kaldis_own(scp)
    before = contents(source)
    with adopted(source, tmp_path) as cache:
        cache.collect()
        frames = np.concatenate(list(want.values()), dtype=np.float64)
        np.testing.assert_allclose(cache.stats("feats").mean, frames.mean(0), rtol=1e-12)
        cache.delete([first])
        cache.compact()
    del want[first]
    with featcache.open(tmp_path / "cache", verify="arrays", check_reads=True) as cache:
        assert_holds(cache, "feats", want)
    assert contents(source) == before


def test_archives_that_a_codec_reads_take_no_more_utterances(tmp_path: Path) -> None:
    source = write_archive(tmp_path / "x", random_arrays(13), compression_method=2)
    adopted(source, tmp_path).close()
    options = {"numbers": "kaldi"}
    config = FeatureStorageConfig("feats", backend="memmap", codec="kaldi", options=options)
    with (
        pytest.raises(ConfigError, match=r"only reads.*feats"),
        CacheWriter(tmp_path / "cache", [config], {"adopted": "kaldi"}) as writer,
    ):
        writer.write("new", {"feats": np.ones((3, 5), np.float32)})
    with featcache.open(tmp_path / "cache") as cache:
        assert len(cache) == 30


def test_other_scps_of_archives_in_a_folder_are_told_and_adopted_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "data"
    source.mkdir()
    arrays = random_arrays(3)
    for name in ("feats", "pitch"):
        with kaldiio.WriteHelper(f"ark,scp:{source}/{name}.ark,{source}/{name}.scp") as writer:
            for id, array in arrays.items():
                writer(id, array)
    (source / "wav.scp").write_text("utt-1 utt-1.flac\n")
    with caplog.at_level("WARNING", "featcache"):
        adopted(source, tmp_path)
    assert "feats.scp alone is adopted, not 'pitch.scp'; adopt these by their names" in caplog.text
    adopted(source / "pitch.scp", tmp_path, feature="pitch")
    with featcache.open(tmp_path / "cache") as cache:
        assert cache.features == ("feats", "pitch")

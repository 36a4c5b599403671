"""Stores as people have them, each written as its own tool writes it, adopted where they lie."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from foreign_stores import adopted, annotation, assert_holds, contents, random_arrays, write_h5
from npy_folders import save_all
from numpy.typing import NDArray

import featcache
from featcache import Cache
from featcache.adoption.reordered import ReorderedCodec
from featcache.errors import AdoptionError, ConfigError, CorruptCacheError
from featcache.interface import storage_dtype

Arrays = Mapping[str, NDArray[Any]]
FRAMES = {f"utt{n}": array for n, array in enumerate(random_arrays(1, count=5).values())}
MEL = {id: np.ascontiguousarray(array.T) for id, array in FRAMES.items()}  # as librosa gives it


def assert_all(cache: Cache, feature: str, arrays: Arrays) -> None:
    """Whole arrays, windows, batches; with all checks, unmapped, and as workers get a cache."""
    assert_holds(cache, feature, arrays)
    cache.collect()
    for opened in (
        featcache.open(cache.path, verify="arrays", check_reads=True),
        featcache.open(cache.path, mapped=False),
        pickle.loads(pickle.dumps(cache)),  # noqa: S301 (our own)
    ):
        assert_holds(opened, feature, arrays)
        batch = opened.read_batch(list(arrays), feature)
        for row, array in zip(batch.data, arrays.values(), strict=True):
            assert row[: len(array)].tobytes() == np.ascontiguousarray(array).tobytes()


def converted(source: Path, into: Path, **settings: Any) -> Cache:
    return featcache.convert(source, into / "cache", adopting=settings, progressbar=False)


OF_NPY: dict[str, tuple[Callable[[NDArray[Any]], NDArray[Any]], dict[str, Any]]] = {
    "np.save(mel.T)": (lambda mel: mel.T, {}),
    "np.save(mel)": (lambda mel: mel, {"time_axis": 1}),
    "np.save(mel), in Fortran order": (np.asfortranarray, {"time_axis": -1}),
    "big-endian": (lambda mel: np.ascontiguousarray(mel.T).astype(">f4"), {}),
    "big-endian, transposed": (lambda mel: mel.T.astype(">f4"), {}),
}


@pytest.mark.parametrize("case", OF_NPY)
def test_arrays_in_another_order_are_read_in_place(tmp_path: Path, case: str) -> None:
    store, settings = OF_NPY[case]
    source = save_all(tmp_path / "all", {id: store(mel) for id, mel in MEL.items()})
    before = contents(source)
    assert_all(adopted(source, tmp_path, **settings), "feats", FRAMES)
    assert contents(source) == before


@pytest.mark.parametrize("time_axis", [0, 1, 2, None])
def test_any_axis_may_be_the_frames_and_axes_of_one_are_kept(
    tmp_path: Path, time_axis: int | None
) -> None:
    each = np.arange(24, dtype=np.int16).reshape(2, 3, 1, 4)[:, :, 0]
    stored = {"a": np.asfortranarray(each), "b": np.asfortranarray(each + 100)}
    cache = adopted(save_all(tmp_path / "all", stored), tmp_path, time_axis=time_axis)
    axis = time_axis or 0
    for id, array in stored.items():
        assert np.array_equal(cache.read(id, "feats"), np.moveaxis(array, axis, 0))
    one = {id: np.asfortranarray(array[:, None]) for id, array in stored.items()}
    save_all(tmp_path / "one", one)
    cache = featcache.adopt(tmp_path / "one", tmp_path / "cache-1", time_axis=0)
    assert_all(cache, "feats", one)


def test_single_frames_lie_alike_in_any_order(tmp_path: Path) -> None:
    arrays: Arrays = {**FRAMES, "one": np.ones((1, 5), np.float32), "z": np.ones((0, 5), "f4")}
    stored = {id: np.asfortranarray(array) for id, array in arrays.items()}
    assert_all(adopted(save_all(tmp_path / "all", stored), tmp_path), "feats", arrays)
    with pytest.raises(AdoptionError, match=r"'one' has shape \(1, 5\), and no axis 3"):
        adopted(tmp_path / "all", tmp_path / "new", time_axis=3)


@pytest.mark.parametrize("end", [".npy", ".pt", ".h5"])
def test_arrays_of_two_dtypes_are_refused_and_converted(tmp_path: Path, end: str) -> None:
    arrays = {id: array.astype("f8" if id == "utt2" else "f4") for id, array in FRAMES.items()}
    source = write(tmp_path / "all", end, arrays)
    with pytest.raises(AdoptionError, match=r"'utt0' has dtype float32, 'utt2' .*convert makes"):
        adopted(source, tmp_path)
    wide = {id: array.astype("f8") for id, array in arrays.items()}
    assert_holds(converted(source, tmp_path), "feats", wide)


def write(folder: Path, end: str, arrays: Arrays) -> Path:
    """One file an array, but of HDF5 one for all."""
    if end == ".h5":
        return write_h5(folder.with_suffix(end), dict(arrays))
    for name, array in arrays.items():
        path = folder / f"{name}{end}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if end == ".npy":
            np.save(path, array)
        else:
            torch.save(torch.from_numpy(array), path)
    return folder


@pytest.mark.parametrize("end", [".pt", ".pth", ".ckpt"])
def test_tensors_that_were_transposed_are_read_in_place(tmp_path: Path, end: str) -> None:
    source = write(tmp_path / "all", end, {id: mel.T for id, mel in MEL.items()})
    assert_all(adopted(source, tmp_path), "feats", FRAMES)
    torch.save({id: torch.from_numpy(mel) for id, mel in MEL.items()}, tmp_path / f"one{end}")
    one = adopted(tmp_path / f"one{end}", tmp_path / "one", time_axis=1)
    assert_all(one, "feats", FRAMES)


def test_tensors_of_one_batch_are_utterances(tmp_path: Path) -> None:
    batch = torch.arange(60.0).reshape(3, 5, 4)
    torch.save({f"utt{n}": each for n, each in enumerate(batch)}, tmp_path / "all.pt")
    want = {f"utt{n}": each.numpy() for n, each in enumerate(batch)}
    assert_all(adopted(tmp_path / "all.pt", tmp_path), "feats", want)


def test_a_dict_of_more_tensors_than_a_page_has_is_read(tmp_path: Path) -> None:
    torch.save({f"utt{n:05d}": torch.full((2,), n) for n in range(3000)}, tmp_path / "all.pt")
    cache = adopted(tmp_path / "all.pt", tmp_path)
    assert len(cache) == 3000
    assert cache.read("utt02999", "feats").tolist() == [2999, 2999]


LOADED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a part": lambda tensor: torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]],
    "a parameter": torch.nn.Parameter,
    "bfloat16": lambda tensor: torch.nn.Parameter(tensor.bfloat16()),
    "a newer dtype": lambda tensor: tensor.to(torch.uint16),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("case", LOADED)
def test_tensors_that_torch_must_load_are_refused_and_converted(
    tmp_path: Path, case: str, legacy: bool
) -> None:
    if legacy and case == "a newer dtype":
        return  # torch's format of before has none
    tensors = {id: LOADED[case](torch.from_numpy(abs(a) * 9)) for id, a in FRAMES.items()}
    (tmp_path / "all").mkdir()
    for id, tensor in tensors.items():
        path = tmp_path / f"all/{id}.pth"
        torch.save(tensor, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(AdoptionError, match=r"'utt\d'.*featcache\.convert makes"):
        adopted(tmp_path / "all", tmp_path)
    cache = converted(tmp_path / "all", tmp_path)
    assert f"torch.{cache.dtype('feats')}" == str(tensors["utt0"].dtype)
    for id, tensor in tensors.items():
        widened = tensor.detach().float() if case == "bfloat16" else tensor.detach()
        assert np.array_equal(cache.read(id, "feats"), widened.numpy())
    everything = tmp_path / "one.ckpt"
    torch.save(tensors, everything, _use_new_zipfile_serialization=not legacy)
    assert len(converted(everything, tmp_path / "one")) == len(tensors)


PATTERNS = {
    "{feature}/{id}": "{feature}/{id}",
    "{id}_{feature}": "{id}_{feature}",
    "{feature}/*-{feature}-{id}": "{feature}/anna-{feature}-{id}",  # FastSpeech2's
}


@pytest.mark.parametrize("end", [".npy", ".pt", ".h5", "one .h5 each"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_features_in_files_of_their_own_are_taken_by_a_pattern(
    tmp_path: Path, end: str, pattern: str
) -> None:
    features: dict[str, Arrays] = {
        "mel": FRAMES,
        "pitch": {id: array[:, 0].copy() for id, array in FRAMES.items()},
    }
    arrays = {
        PATTERNS[pattern].format(id=id, feature=name): array
        for name, each in features.items()
        for id, array in each.items()
    }
    if end.startswith("one"):
        for name, array in arrays.items():
            write_h5(tmp_path / f"all/{name}.h5", {"data": array})
    else:
        write(tmp_path / "all", end, arrays)
    source = tmp_path / ("all.h5" if end == ".h5" else "all")
    if end in (".npy", ".pt"):
        with pytest.raises(AdoptionError, match=f"give pattern='{re.escape(pattern)}'"):
            adopted(source, tmp_path)
    cache = adopted(source, tmp_path, pattern=pattern)
    for name, each in features.items():
        assert_holds(cache, name, each)


def test_a_file_of_hdf5_an_utterance_is_taken_by_a_pattern(tmp_path: Path) -> None:
    """As ParallelWaveGAN dumps them."""
    waves = {id: np.repeat(array[:, 0], 3) for id, array in FRAMES.items()}
    for id, array in FRAMES.items():
        write_h5(tmp_path / f"dump/{id}.h5", {"feats": array, "wave": waves[id]})
    with pytest.raises(AdoptionError, match=r"'feats', 'wave'; .* pattern='{id}/{feature}'"):
        adopted(tmp_path / "dump", tmp_path)
    cache = adopted(tmp_path / "dump", tmp_path, pattern="{id}/{feature}")
    assert_all(cache, "feats", FRAMES)
    assert_holds(cache, "wave", waves)
    only = adopted(tmp_path / "dump", tmp_path / "1", pattern="{id}/wave", feature="audio")
    assert_holds(only, "audio", waves)
    both = converted(tmp_path / "dump", tmp_path / "2", pattern="{id}/{feature}")
    assert_holds(both, "wave", waves)


LENGTHS = np.array([len(array) for array in FRAMES.values()])
ENDS = np.cumsum(LENGTHS)
IDS = np.array([*FRAMES])
CUTS: dict[str, dict[str, NDArray[Any]]] = {
    "lengths": {"lengths": LENGTHS, "ids": IDS},
    "offsets and the end": {"offsets": np.append(0, ENDS), "utt_ids": IDS},
    "offsets": {"offsets": ENDS - LENGTHS, "ids": IDS},
    "ends": {"offsets": ENDS.astype(np.uint32), "ids": IDS},
    "both": {"offsets": ENDS - LENGTHS, "lengths": LENGTHS, "ids": IDS},
    "numbers": {"offsets": np.append(0, ENDS)},
}


def flat_npy(at: Path, data: NDArray[Any], columns: Mapping[str, NDArray[Any]]) -> Path:
    return save_all(at / "flat", {"data": data, **columns})


def test_lines_of_ids_may_end_as_on_windows(tmp_path: Path) -> None:
    flat = save_all(tmp_path / "flat", {"data": np.zeros((5, 2)), "lengths": np.array([2, 3])})
    (flat / "ids.txt").write_bytes(b"u1\r\nu 2\r\n")
    assert sorted(featcache.adopt(flat, tmp_path / "cache")) == ["u 2", "u1"]


def flat_hdf5(at: Path, data: NDArray[Any], columns: Mapping[str, NDArray[Any]]) -> Path:
    with h5py.File(at / "flat.h5", "w") as file:
        file.create_dataset("data", data=data, chunks=(7, 5), compression="gzip")
        for name, column in columns.items():
            file[name] = column.astype(object) if column.dtype.kind == "U" else column
    return at / "flat.h5"


def flat_zarr(at: Path, data: NDArray[Any], columns: Mapping[str, NDArray[Any]]) -> Path:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(at / "flat.zarr", mode="w", zarr_format=2)
    options = {"chunks": (7, 5), "compressors": None}
    group.create_array("data", shape=data.shape, dtype=data.dtype, **options)[...] = data
    for name, column in columns.items():
        dtype = str if column.dtype.kind == "U" else column.dtype
        group.create_array(name, shape=column.shape, dtype=dtype)[...] = column
    return at / "flat.zarr"


@pytest.mark.parametrize("store", [flat_npy, flat_hdf5, flat_zarr])
@pytest.mark.parametrize("case", CUTS)
def test_frames_in_one_array_are_cut_by_offsets_or_lengths(
    tmp_path: Path, case: str, store: Callable[..., Path]
) -> None:
    source = store(tmp_path, np.concatenate([*FRAMES.values()]), CUTS[case])
    want = FRAMES
    if case == "numbers":
        want = {f"{n:08d}": array for n, array in enumerate(FRAMES.values())}
    assert_all(adopted(source, tmp_path), "feats", want)


def test_offsets_that_do_not_say_which_utterance_is_empty_are_refused(tmp_path: Path) -> None:
    data = np.zeros((6, 2), np.float32)
    cases: list[dict[str, Any]] = [
        {"offsets": [0, 3, 6], "ids": ["a", "b", "c"]},  # begins or ends
        {"lengths": [3, 2]},
        {"lengths": [3, -1, 4]},
        {"offsets": [1, 3]},
        {"offsets": [0, 4, 2, 6]},
    ]
    for number, columns in enumerate(cases):
        folder = save_all(tmp_path / str(number), {n: np.array(c) for n, c in columns.items()})
        np.save(folder / "data.npy", data)
        with pytest.raises(AdoptionError, match="do not cut the 6 frames of 'data'"):
            adopted(folder, tmp_path)
    save_all(tmp_path / "said", {"data": data, "offsets": np.array([0, 3, 6])})
    np.save(tmp_path / "said/lengths.npy", [3, 3, 0])
    (tmp_path / "said/ids.txt").write_text("a\nb\nc\n")
    lengths = adopted(tmp_path / "said", tmp_path).lengths("feats")
    assert lengths.tolist() == [3, 3, 0]


@pytest.mark.parametrize("end", [".json", ".yaml", ".jsonl.gz", ".json.gz", ".yaml.gz"])
@pytest.mark.parametrize("writer", ["KaldiWriter", "NumpyFilesWriter"])
def test_cuts_in_each_format_and_of_kaldis_writer_give_what_lhotse_loads(
    tmp_path: Path, end: str, writer: str
) -> None:
    lhotse = pytest.importorskip("lhotse")
    if writer == "KaldiWriter":
        pytest.importorskip("kaldi_native_io")
    cuts = []
    with getattr(lhotse.features.io, writer)(tmp_path / "store") as stored:
        for id, array in FRAMES.items():
            array = np.repeat(array, 5, axis=0)
            seconds = len(array) * 0.01
            features = lhotse.Features(
                type="fbank", num_frames=len(array), num_features=5, frame_shift=0.01,
                sampling_rate=16000, start=0, duration=seconds, storage_type=stored.name,
                storage_path=str(stored.storage_path), storage_key=stored.write(id, array),
                recording_id=id, channels=0,
            )  # fmt: skip
            said = lhotse.SupervisionSegment(id, id, start=0, duration=seconds, text=f"ü: {id}")
            cut = lhotse.MonoCut(id, 0, seconds, 0, features=features, supervisions=[said])
            half = cut.truncate(offset=seconds / 5, duration=seconds / 5).with_id(f"{id}-part")
            cuts += [cut, half]
    lhotse.CutSet.from_cuts(cuts).to_file(tmp_path / f"cuts{end}")
    cache = adopted(tmp_path / f"cuts{end}", tmp_path)
    assert_all(cache, "feats", {cut.id: cut.load_features() for cut in cuts})
    assert annotation(cache, "text")["utt1"] == "ü: utt1"


def test_json_and_yaml_of_others_are_no_cuts(tmp_path: Path) -> None:
    for name, text in {
        "a.json": '[{"audio_filepath": "a.wav"}]', "b.yaml": "- a: 1\n",
        "c.json": "[", "d.yaml": "a: [",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
        with pytest.raises(AdoptionError, match="not recognised"):
            adopted(tmp_path / name, tmp_path)
        with pytest.raises(AdoptionError, match=name):
            adopted(tmp_path / name, tmp_path, kind="lhotse")


OF_ZARR: dict[str, tuple[dict[str, Any], bool]] = {
    "one chunk": ({"compressors": None}, True),
    "chunks": ({"compressors": None, "chunks": (3, 5)}, True),
    "Fortran order": ({"compressors": None, "order": "F"}, True),
    "compressed": ({}, False),
    "cut frames": ({"compressors": None, "chunks": (3, 2)}, False),
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("case", OF_ZARR)
def test_zarr_groups_are_adopted_or_converted(tmp_path: Path, case: str, version: int) -> None:
    zarr = pytest.importorskip("zarr")
    options, is_adopted = OF_ZARR[case]
    if "order" in options and version == 3:
        return
    group = zarr.open_group(tmp_path / "all.zarr", mode="w", zarr_format=version)
    for id, array in FRAMES.items():
        group.create_array(id, shape=array.shape, dtype=array.dtype, **options)[...] = array
    before = contents(tmp_path / "all.zarr")
    if is_adopted:
        assert_all(adopted(tmp_path / "all.zarr", tmp_path), "feats", FRAMES)
    else:
        with pytest.raises(AdoptionError, match=r"'utt\d'.*featcache\.convert makes"):
            adopted(tmp_path / "all.zarr", tmp_path)
        assert_holds(converted(tmp_path / "all.zarr", tmp_path), "feats", FRAMES)
    assert contents(tmp_path / "all.zarr") == before


@pytest.mark.parametrize("store", ["npy", "h5", "zarr"])
def test_complex_numbers_are_refused_with_what_to_do(tmp_path: Path, store: str) -> None:
    arrays = {"u": np.ones((3, 2), np.complex64)}
    if store == "npy":
        source = save_all(tmp_path / "all", arrays)
    elif store == "h5":
        source = write_h5(tmp_path / "all.h5", arrays)
    else:
        zarr = pytest.importorskip("zarr")
        source = tmp_path / "all.zarr"
        group = zarr.open_group(source, mode="w", zarr_format=2)
        group.create_array("u", shape=(3, 2), dtype="c8")[...] = arrays["u"]
    for door in (adopted, converted):
        with pytest.raises(AdoptionError, match=r"'u'.*store real and imaginary parts as two"):
            door(source, tmp_path)


def test_a_chunk_that_was_never_written_is_read_by_zarr_alone(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(tmp_path / "all.zarr", mode="w", zarr_format=2)
    array = group.create_array("u", shape=(6, 2), dtype="f4", chunks=(3, 2), compressors=None)
    array[:3] = 1
    with pytest.raises(AdoptionError, match=r"lacks the chunk 'u/1\.0'.*convert makes"):
        adopted(tmp_path / "all.zarr", tmp_path)
    want = np.repeat(np.array([1, 0], np.float32), 3)[:, None].repeat(2, 1)
    assert_holds(converted(tmp_path / "all.zarr", tmp_path), "feats", {"u": want})


@pytest.mark.parametrize("method", [2, 3, 5])
def test_caches_of_kaldis_matrices_of_before_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: int
) -> None:
    kaldiio = pytest.importorskip("kaldiio")
    arrays, scp = random_arrays(3), tmp_path / "feats.scp"
    kaldiio.save_ark(str(tmp_path / "feats.ark"), arrays, scp=str(scp), compression_method=method)
    monkeypatch.setattr("featcache.adoption.kaldi.OF_KALDI", {})
    want = {id: np.array(array) for id, array in kaldiio.load_scp(str(scp)).items()}
    assert_all(adopted(scp, tmp_path), "feats", want)


def test_another_order_is_checked_before_it_is_read() -> None:
    codec = ReorderedCodec
    dtype = storage_dtype("float32")
    data = memoryview(np.arange(6, dtype=">f4").tobytes())
    found = codec(axes=[1, 0], big_endian=True).decode(data, dtype, (2,), 3)
    assert found.tolist() == [[0, 3], [1, 4], [2, 5]]
    for axes, dims, rows in (([1, 0], (2,), 4), ([1, 0], (), 6), ([], (2,), 1 << 60)):
        with pytest.raises(CorruptCacheError, match="is no 24 bytes"):
            codec(axes=axes).decode(data, dtype, dims, rows)
    wrongs: list[Any] = [{"axes": [0, 0]}, {"axes": 1}, {"axes": ["a"]}, {"big_endian": 1}]
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            codec(**wrong)
    with pytest.raises(ConfigError, match="choose another"):
        codec().encode(np.ones((2, 2), np.float32))


def test_objects_in_files_are_never_loaded(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], object), allow_pickle=True)
    (tmp_path / "all").mkdir()
    (tmp_path / "all/u.npy").write_bytes(buffer.getvalue())
    for door in (adopted, converted):
        with pytest.raises(AdoptionError, match=r"'u'.*never run here; .*numpy\.load"):
            door(tmp_path / "all", tmp_path)


def test_yaml_that_repeats_itself_is_refused_at_once(tmp_path: Path) -> None:
    text = "- &a0 {type: MonoCut, id: a}\n"
    for n in range(30):
        text += f"- &a{n + 1} {{x: *a{n}, y: *a{n}}}\n"
    (tmp_path / "cuts.yaml").write_text(text)
    with pytest.raises(AdoptionError, match="aliases repeat"):
        adopted(tmp_path / "cuts.yaml", tmp_path)
    (tmp_path / "cuts.yaml").write_text("- &a {type: MonoCut, id: a, custom: *a}\n")
    with pytest.raises(AdoptionError, match=r"not recognised|aliases repeat"):
        adopted(tmp_path / "cuts.yaml", tmp_path)


def test_hidden_files_are_left_out_and_a_second_file_of_an_id_is_refused(tmp_path: Path) -> None:
    source = save_all(tmp_path / "all", {**FRAMES, ".checkpoints/utt0": FRAMES["utt0"]})
    (source / "._utt0.npy").write_bytes(b"\0\5\x16\7")
    assert_holds(adopted(source, tmp_path), "feats", FRAMES)
    for end in (".pt", ".pth"):
        write(tmp_path / "two", end, {"utt0": FRAMES["utt0"]})
    with pytest.raises(AdoptionError, match=r"'utt0', feature 'feats' twice.*take one away"):
        adopted(tmp_path / "two", tmp_path / "new")


def test_what_a_dict_holds_beside_tensors_and_is_left_out_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "all").mkdir()
    content = {"feats": torch.ones(3, 2), "meta": {"x": torch.ones(2)}, "text": "yes"}
    torch.save(content, tmp_path / "all/utt.pt")
    with adopted(tmp_path / "all", tmp_path) as cache:
        assert cache.features == ("feats",)
    assert "'meta', in files beside tensors" in caplog.text


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("all.pkl", "all.joblib"):
        (tmp_path / name).write_bytes(b"\x80\x04.")
        with pytest.raises(
            AdoptionError, match=r"not recognised: pickles may run code.*pickle\.loads"
        ):
            adopted(tmp_path / name, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [b"", b"[]", b"{", b"\xff", b'"shape": [-1, 4]', b'"shape": ["5", 4]', b'"chunks": [0, 4]',
     b'"chunks": [5]', b'"dtype": "|O"', b'"dtype": 3', b'"order": "K"', b'"shape": [9e9, 4]',
     b'"shape": [99999999999999, 4]', b'"dimension_separator": "../"'],
)  # fmt: skip
def test_damaged_descriptions_of_zarr_are_refused(tmp_path: Path, wrong: bytes) -> None:
    source = tmp_path / "all.zarr"
    (source / "u").mkdir(parents=True)
    (source / ".zgroup").write_text('{"zarr_format": 2}')
    good = (
        b'{"zarr_format": 2, "shape": [5, 4], "chunks": [5, 4], "dtype": "<f4", "order": "C", '
        b'"compressor": null, "filters": null, "fill_value": 0}'
    )
    (source / "u/0.0").write_bytes(np.ones((5, 4), "<f4").tobytes())
    (source / "u/.zarray").write_bytes(good)
    assert adopted(source, tmp_path).lengths("feats").tolist() == [5]
    changed = good[:-1] + b", " + wrong + b"}" if b":" in wrong else wrong  # the last one counts
    (source / "u/.zarray").write_bytes(changed)
    with pytest.raises(AdoptionError):
        adopted(source, tmp_path / "new")

"""`cutset_from_huggingface`: the cuts of a data set, on workers or here; where their audio is; what
is refused.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sound_helpers import RATE_HZ, huggingface, samples_of

import featcache
from featcache.errors import ComputeError, ConfigError

datasets = pytest.importorskip("datasets")
lhotse = pytest.importorskip("lhotse")
parquet = pytest.importorskip("pyarrow.parquet")
from featcache.interop.huggingface import cutset_from_huggingface  # noqa: E402
from featcache.interop.utterances import Clip  # noqa: E402

INFO: dict[str, Any] = {"audio": lambda row: row["audio"]["array"], "text": lambda row: row["text"]}


@pytest.fixture(scope="module", autouse=True)
def arrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where `load_dataset` keeps Arrow files, in the workers too."""
    folder = tmp_path_factory.mktemp("arrow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_CACHE", str(folder))
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        datasets.disable_progress_bars()
        yield folder
        datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def client(arrow: Path) -> Iterator[Any]:
    with featcache.workers.get_client({"env": "local", "n_workers": 2}) as client:
        yield client


def saved(folder: Path, made: Any) -> str:
    made.save_to_disk(folder)
    return str(folder)


def saved_beside_its_files(folder: Path, made: Any) -> str:
    """Save a data set as one for `load_dataset` whose audio stays in files; `datasets` itself would
    take it in.
    """
    folder.mkdir()
    parquet.write_table(made.with_format("arrow")[:], folder / "train.parquet")
    return str(folder)


def assert_holds(cuts: Any, numbers: list[int]) -> None:
    cuts = list(cuts)
    assert [cut.id for cut in cuts] == [str(row) for row in range(len(numbers))]
    for cut, number in zip(cuts, numbers, strict=True):
        np.testing.assert_array_equal(cut.load_audio()[0], samples_of(number))
        (supervision,) = cut.supervisions
        assert (supervision.text, supervision.id, supervision.recording_id) == (
            f"text {number}",
            cut.id,
            cut.id,
        )
        assert supervision.duration == cut.duration == len(samples_of(number)) / RATE_HZ


@pytest.mark.parametrize("files", [True, False])
def test_the_cuts_of_workers_are_in_order_and_reach_their_audio_again(
    tmp_path: Path, client: Any, files: bool
) -> None:
    numbers = list(range(20, 0, -1))
    if files:
        path = saved_beside_its_files(tmp_path / "set", huggingface(numbers, tmp_path / "wavs"))
    else:
        path = saved(tmp_path / "set", huggingface(numbers))
    split = "train" if files else None
    cuts = cutset_from_huggingface(
        data_info=INFO, dataset_length=20, dataset_id=path, split=split, client=client
    )
    lhotse.validate(cuts)
    cuts.to_file(tmp_path / "cuts.jsonl.gz")
    cuts = lhotse.CutSet.from_file(tmp_path / "cuts.jsonl.gz")
    assert_holds(cuts, numbers)
    assert list(cuts) == list(cutset_from_huggingface(INFO, 20, path, split))  # in this process
    folder = tmp_path / ("wavs" if files else "set/audio/000000")
    assert {Path(cut.recording.sources[0].source).parent for cut in cuts} == {folder}
    assert len(list(folder.iterdir())) == 20  # written once
    assert (tmp_path / "set" / "audio").exists() != files


def test_the_first_rows_and_one_split(tmp_path: Path) -> None:
    sets = {"train": huggingface([1, 2, 3]), "test": huggingface([4, 5, 6])}
    path = saved(tmp_path / "set", datasets.DatasetDict(sets))
    assert_holds(
        cutset_from_huggingface(INFO, 2, path, split="test", audio_folder=tmp_path / "here"), [4, 5]
    )
    assert len(list((tmp_path / "here").rglob("*.flac"))) == 2
    with pytest.raises(ConfigError, match="has several splits, give one: 'train', 'test'"):
        cutset_from_huggingface(INFO, 2, path)
    with pytest.raises(ConfigError, match=r"no split 'tset'.*did you mean 'test'"):
        cutset_from_huggingface(INFO, 2, path, split="tset")
    with pytest.raises(ConfigError, match="has 3 rows, not 4"):
        cutset_from_huggingface(INFO, 4, path, split="test")


def test_audio_within_parquet_files_goes_beside_the_arrow_files(
    tmp_path: Path, arrow: Path
) -> None:
    (tmp_path / "set").mkdir()
    huggingface([3, 4]).to_parquet(tmp_path / "set" / "train.parquet")
    cuts = cutset_from_huggingface(INFO, 2, tmp_path / "set", split="train")
    assert_holds(cuts, [3, 4])
    assert all(str(cut.recording.sources[0].source).startswith(str(arrow)) for cut in cuts)


def test_a_file_that_a_power_cut_has_emptied_is_written_again(tmp_path: Path) -> None:
    path = saved(tmp_path / "set", huggingface([3, 4]))
    for cut in cutset_from_huggingface(INFO, 2, path):
        os.truncate(cut.recording.sources[0].source, 0)
    assert_holds(cutset_from_huggingface(INFO, 2, path), [3, 4])


def test_a_file_for_which_there_is_no_space_leaves_nothing_behind(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        Clip("loud.wav", bytes(5 << 20), RATE_HZ).written(small_disk, 7)
    assert not [path for path in small_disk.rglob("*") if path.is_file()]


def test_data_saved_anew_at_the_same_place_are_read_anew(tmp_path: Path, client: Any) -> None:
    for numbers in ([1, 2, 3], [4, 5, 6]):
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        path = saved(tmp_path / "set", huggingface(numbers))
        cuts = cutset_from_huggingface(
            INFO, 3, path, client=client, audio_folder=tmp_path / "audio"
        )
        assert_holds(cuts, numbers)


def test_each_clip_is_decoded_once_and_only_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        decoded.append(self.num_samples)
        return load(self, *args, **kwargs)

    load, decoded = lhotse.Recording.load_audio, list[int]()
    monkeypatch.setattr(lhotse.Recording, "load_audio", counted)
    path = saved(tmp_path / "set", huggingface([1, 2]))
    twice = {
        **INFO,
        "loudest": lambda row: row["audio"]["array"].max(),
        "first": lambda row: row["audio"]["array"][0],
    }
    cuts = cutset_from_huggingface(twice, 2, path)
    assert decoded == [len(samples_of(1)), len(samples_of(2))]
    assert [cut.supervisions[0].custom["loudest"] for cut in cuts] == [0.5, 0.5]
    cuts.to_file(tmp_path / "cuts.jsonl")
    cutset_from_huggingface({"text": INFO["text"]}, 2, path)
    assert len(decoded) == 2


def test_a_clip_may_be_named_without_its_samples(tmp_path: Path) -> None:
    path = saved(tmp_path / "set", huggingface([1, 2]))
    assert_holds(
        cutset_from_huggingface({**INFO, "audio": lambda row: row["audio"]}, 2, path), [1, 2]
    )


def test_rows_of_a_worker_that_dies_are_converted_again(tmp_path: Path, client: Any) -> None:
    path = saved(tmp_path / "set", huggingface(range(1, 21)))
    mark = tmp_path / "killed"

    def killing_once(row: Any) -> str:
        if row["text"] == "text 7" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return str(row["text"])

    assert_holds(
        cutset_from_huggingface({**INFO, "text": killing_once}, 20, path, client=client),
        list(range(1, 21)),
    )
    assert mark.exists()

    def killing(row: Any) -> None:
        if row["text"] == "text 2":
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ComputeError, match=r"3 workers died when they were at rows 0 to [12]:"):
        cutset_from_huggingface({"name": killing}, 20, path, client=client)


def test_samples_that_were_worked_on_are_kept_as_they_are(tmp_path: Path) -> None:
    path = saved(tmp_path / "set", huggingface([1, 2]))
    louder = {"audio": lambda row: row["audio"]["array"] * 3.3, "text": INFO["text"]}
    cuts = cutset_from_huggingface(louder, 2, path)
    assert_holds(cutset_from_huggingface(INFO, 2, path), [1, 2])
    for cut, number in zip(cuts, [1, 2], strict=True):
        np.testing.assert_array_equal(cut.load_audio()[0], samples_of(number) * np.float32(3.3))
        assert cut.sampling_rate == RATE_HZ


def test_audio_is_resampled_where_the_column_says_so(tmp_path: Path) -> None:
    made = huggingface([1]).cast_column("audio", datasets.Audio(sampling_rate=8000))
    rates = {"audio": INFO["audio"], "rate": lambda row: row["audio"]["sampling_rate"]}
    (cut,) = cutset_from_huggingface(rates, 1, saved(tmp_path / "set", made))
    assert (cut.sampling_rate, cut.supervisions[0].custom["rate"]) == (8000, 8000)
    assert cut.load_audio().shape == (1, len(samples_of(1)) // 2)


def test_a_column_is_named_where_there_are_several(tmp_path: Path) -> None:
    other = huggingface([8, 9]).rename_column("audio", "far").remove_columns("text")
    path = saved(
        tmp_path / "set", datasets.concatenate_datasets([huggingface([1, 2]), other], axis=1)
    )
    far = {"audio": lambda row: row["far"]["array"], "text": lambda row: row["text"]}
    near, distant = cutset_from_huggingface(INFO, 2, path), cutset_from_huggingface(far, 2, path)
    assert_holds(near, [1, 2])
    np.testing.assert_array_equal(next(iter(distant)).load_audio()[0], samples_of(8))
    with pytest.raises(
        ConfigError, match=r"row 0.*\['audio', 'far'\]; say by data_info\['audio'\]"
    ):
        cutset_from_huggingface({"text": INFO["text"]}, 2, path)


def test_what_cannot_be_a_cut_is_named(tmp_path: Path, client: Any) -> None:
    made = huggingface([1, 2, 3], tmp_path / "wavs", n=[1, 0, 2])
    path = saved_beside_its_files(tmp_path / "set", made)
    for info, error, message in [
        ({"id": INFO["text"]}, ConfigError, "data_info cannot give 'id'"),
        ({"wave": INFO["audio"]}, ConfigError, "gives 'ndarray' for 'wave'"),
        (
            {"tokens": lambda row: [np.int64(row["n"])]},
            ConfigError,
            "gives 'list' for 'tokens'.*int64",
        ),
        (
            {"audio": lambda row: row["audio"]["array"][None]},
            ConfigError,
            r"shape \(1, \d+\), not \(samples,\)",
        ),
        (
            {"share": lambda row: 1 / row["n"]},
            ComputeError,
            "row 1 of .*set' failed with ZeroDivisionError",
        ),
    ]:
        with pytest.raises(error, match=message):
            cutset_from_huggingface({**INFO, **info}, 3, path, "train", client=client)
    with pytest.raises(
        ConfigError, match=r"client is a Dask client .*with get_client\(config\) as client"
    ):
        cutset_from_huggingface(INFO, 3, path, client={"env": "local"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a number of rows, not -1"):
        cutset_from_huggingface(INFO, -1, path)
    (tmp_path / "wavs" / "2.flac").unlink()
    with pytest.raises(ConfigError, match=r"row 1 .*'.*2.flac' is no file here; download it"):
        cutset_from_huggingface(INFO, 3, path, "train")

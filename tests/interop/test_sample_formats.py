"""Audio of every sample format has the same scale, in files and in arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from sound_helpers import RATE_HZ

from featcache import utterances
from featcache.errors import FeatureError

pytest.importorskip("lhotse")

# a tone that fills half of the range, and its step in each format
TONE = (0.5 * np.sin(np.arange(RATE_HZ // 10) / 20)).astype(np.float32)
STEP = {
    "PCM_U8": 2**-7,
    "PCM_16": 2**-15,
    "PCM_24": 2**-23,
    "PCM_32": 2**-23,
    "FLOAT": 0,
    "DOUBLE": 0,
}


def samples_of(audio: Any) -> NDArray[np.float32]:
    item = utterances([{"id": "a", "audio": audio}])[0]
    assert item["sample_rate_hz"] == RATE_HZ
    assert item["samples"].dtype == np.float32
    return item["samples"]


@pytest.mark.parametrize("subtype", STEP)
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_wav_file_of_any_sample_format_has_the_same_scale(
    tmp_path: Path, subtype: str, in_memory: bool
) -> None:
    path = tmp_path / "tone.wav"
    soundfile.write(path, TONE, RATE_HZ, subtype=subtype)
    audio: Any = {"bytes": path.read_bytes()} if in_memory else path
    np.testing.assert_allclose(samples_of(audio), TONE, atol=1.01 * STEP[subtype])


@pytest.mark.parametrize(
    ("subtype", "dtype"), [("PCM_U8", np.uint8), ("PCM_16", np.int16), ("PCM_32", np.int32)]
)
def test_the_numbers_in_a_wav_file_mean_what_the_file_means(
    tmp_path: Path, subtype: str, dtype: type[Any]
) -> None:
    path = tmp_path / "tone.wav"
    soundfile.write(path, TONE, RATE_HZ, subtype=subtype)
    data = path.read_bytes()
    # as `wave` and scipy give them
    raw = np.frombuffer(data[data.index(b"data") + 8 :], dtype)[: len(TONE)]
    np.testing.assert_array_equal(
        samples_of({"array": raw, "sampling_rate": RATE_HZ}), samples_of(path)
    )


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32]
)
def test_integers_of_every_kind_fill_the_same_range(dtype: type[Any]) -> None:
    info = np.iinfo(dtype)
    middle = 0 if info.min else (info.max + 1) // 2
    ends = samples_of(
        {"array": np.array([info.min, middle, info.max], dtype), "sampling_rate": RATE_HZ}
    )
    np.testing.assert_allclose(ends, [-1, 0, 1], atol=0.01)
    assert ends[1] == 0


def test_floats_stay_as_they_are() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        loud = np.array([-2, 0.25, 3], dtype)
        assert samples_of({"array": loud, "sampling_rate": RATE_HZ}).tolist() == [-2, 0.25, 3]


@pytest.mark.parametrize("array", [np.array([True]), np.array([1j]), np.array(["a"])])
def test_what_are_no_samples_is_refused(array: Any) -> None:
    with pytest.raises(FeatureError, match="samples of audio are floats or integers, not"):
        samples_of({"array": array, "sampling_rate": RATE_HZ})


def test_samples_that_a_function_of_a_row_gives_have_that_scale_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from featcache.interop.huggingface import cutset_from_huggingface

    rows = {"samples": [[0, 128, 192]], "sampling_rate": [RATE_HZ]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "set")
    info = {"audio": lambda row: np.array(row["samples"], np.uint8)}
    (cut,) = cutset_from_huggingface(info, 1, tmp_path / "set")
    assert cut.load_audio().tolist() == [[-1.0, 0.0, 0.5]]

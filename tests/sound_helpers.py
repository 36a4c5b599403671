"""Recordings, and data sets of them on disk."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray

RATE_HZ = 16000


def samples_of(number: int, rate_hz: int = RATE_HZ) -> NDArray[np.float32]:
    """A tone of its own pitch and length, whose values 16 bits hold exactly."""
    time = np.arange(rate_hz // 10 + 100 * number) / rate_hz
    return ((np.sin(2 * np.pi * 100 * (number + 1) * time) * 16384).round() / 32768).astype(
        np.float32
    )


def encoded(samples: NDArray[Any], rate_hz: int = RATE_HZ) -> bytes:
    """The bytes of a FLAC file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="FLAC")
    return file.getvalue()


def huggingface(numbers: Sequence[int], folder: Path | None = None, **columns: Any) -> Any:
    """A data set with a column of audio: files in a folder, or bytes in the data set as most have
    them.
    """
    import datasets

    audio: list[dict[str, object]] = [
        {"path": f"{n}.flac", "bytes": encoded(samples_of(n))} for n in numbers
    ]
    if folder is not None:
        folder.mkdir(exist_ok=True)
        for clip in audio:
            path = folder / str(clip["path"])
            path.write_bytes(clip["bytes"])  # type: ignore[arg-type]
            clip |= {"path": str(path), "bytes": None}
    table = {"audio": audio, "text": [f"text {n}" for n in numbers], **columns}
    clip_kind = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    kinds = datasets.Dataset.from_dict(
        {key: table[key] for key in table if key != "audio"}
    ).features
    made = datasets.Dataset.from_dict(
        table, features=datasets.Features({"audio": clip_kind, **kinds})
    )
    # a column made as Audio would need torchcodec
    return made.cast_column("audio", datasets.Audio())

"""Cuts with stored features, as lhotse writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lhotse
import numpy as np
from lhotse.features import io
from numpy.typing import NDArray

HZ = 16_000
FRAME_S = 0.01
WRITERS = {
    "numpy_hdf5": io.NumpyHdf5Writer,
    "lilcom_hdf5": io.LilcomHdf5Writer,
    "chunked_lilcom_hdf5": io.ChunkedLilcomHdf5Writer,
    "lilcom_chunky": io.LilcomChunkyWriter,
    "numpy_files": io.NumpyFilesWriter,
    "lilcom_files": io.LilcomFilesWriter,
}


def whole_cuts(
    storage: str, folder: Path, *, count: int = 6, dims: int = 10, most: int = 1300
) -> list[Any]:
    """Cuts of whole recordings, with features, and other arrays in `custom`."""
    rng = np.random.default_rng(len(storage))
    folder.mkdir(parents=True, exist_ok=True)
    cuts = []
    with (
        WRITERS[storage](folder / "feats") as writer,
        io.NumpyHdf5Writer(folder / "others") as others,
    ):
        for number in range(count):
            frames = int(rng.integers(60, most))
            array = rng.standard_normal((frames, dims), np.float32)
            cut = cut_of(f"rec/{number}", writer, array)
            alignment, vector = np.arange(frames // 4), rng.standard_normal(16, np.float32)
            cut.custom = {
                "alignment": others.store_array(
                    f"a{number}", alignment, frame_shift=0.04, temporal_dim=0, start=0
                ),
                "xvector": others.store_array(f"x{number}", vector),
                "snr": 3.5 + number,
                "codes": [1, 2, number],
                "path": {"not": "plain"},
            }
            cuts.append(cut)
    return cuts


def cut_of(recording: str, writer: Any, array: NDArray[np.float32]) -> Any:
    seconds = len(array) * FRAME_S
    features = lhotse.Features(
        type="fbank",
        num_frames=len(array),
        num_features=array.shape[1],
        frame_shift=FRAME_S,
        sampling_rate=HZ,
        start=0,
        duration=seconds,
        storage_type=writer.name,
        storage_path=str(writer.storage_path),
        storage_key=writer.write(f"key-{recording.replace('/', '-')}", array.copy()),
        recording_id=recording,
        channels=0,
    )
    said = [
        lhotse.SupervisionSegment(f"{recording}-b", recording, 0.3, 0.1, text="world"),
        lhotse.SupervisionSegment(f"{recording}-a", recording, 0, 0.3, text="hello"),
    ]
    for segment in said:
        segment.speaker, segment.language, segment.gender = "anna", "en", "F"
    return lhotse.MonoCut(f"cut-{recording}", 0, seconds, 0, features=features, supervisions=said)


def with_pieces(cuts: list[Any]) -> Any:
    """The cuts, and pieces of them with odd boundaries."""
    rng = np.random.default_rng(1)
    pieces = []
    for cut in cuts:
        for _ in range(3):
            offset = round(float(rng.uniform(0, cut.duration / 2)), 4)
            duration = round(float(rng.uniform(0.05, cut.duration - offset)), 4)
            piece = cut.truncate(offset=offset, duration=duration)
            piece.id = f"{cut.id}-{offset}"
            pieces.append(piece)
    return lhotse.CutSet.from_cuts([*cuts, *pieces])


def loaded(cuts: Any) -> Mapping[str, dict[str, NDArray[Any]]]:
    """By feature and id, what lhotse itself loads."""
    return {
        "feats": {cut.id: cut.load_features() for cut in cuts},
        "alignment": {cut.id: cut.load_alignment() for cut in cuts},
        "xvector": {cut.id: cut.load_xvector() for cut in cuts},
    }

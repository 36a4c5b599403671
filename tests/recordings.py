"""Recordings on disk, a Brain that computes features of them, and what was loaded and computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import speechbrain as sb
import torch
from speechbrain.dataio.dataset import DynamicItemDataset

import featcache
from featcache import FeatureStorage, FeatureStorageConfig

RATE_HZ = 16000
HOP = 100


class Recordings:
    """A folder of short recordings, and the data sets that list them."""

    def __init__(self, folder: Path, utterances: int = 6) -> None:
        self.folder = folder
        self.loads = folder / "loads"
        self.listed: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True)
        for number in range(utterances):
            id = f"utt-{number}"
            self.listed[id] = {"wav": str(folder / f"{id}.wav"), "words": f"number {number}"}
            self.record(id, seed=number)

    def record(self, id: str, seed: int) -> None:
        """Write the file of an utterance, anew if it is there."""
        samples = 3000 + 500 * int(id[4:])
        sound = np.random.default_rng(seed).uniform(-0.5, 0.5, samples)
        soundfile.write(self.listed[id]["wav"], sound, RATE_HZ, subtype="PCM_16")

    def convert(self, id: str) -> None:
        """Make a FLAC file of an utterance's file, in its place."""
        before = Path(self.listed[id]["wav"])
        sound, rate = soundfile.read(before, dtype="int16")
        after = before.with_suffix(".flac")
        soundfile.write(after, sound, rate)
        before.unlink()
        self.listed[id]["wav"] = str(after)

    def load(self, wav: str) -> torch.Tensor:
        """Read samples, and note that they were."""
        with self.loads.open("a") as file:
            file.write(f"{Path(wav).stem}\n")
        return torch.from_numpy(soundfile.read(wav, dtype="float32")[0])

    def loaded(self) -> list[str]:
        """Return the ids that were loaded since the last call, in order."""
        found = sorted(self.loads.read_text().split()) if self.loads.exists() else []
        self.loads.unlink(missing_ok=True)
        return found

    def dataset(self) -> Any:
        """Return a data set of SpeechBrain."""
        items = [{"func": self.load, "takes": ["wav"], "provides": "sig"}]
        return DynamicItemDataset(self.listed, items, ["id", "sig"])

    def truth(self) -> dict[str, Any]:
        """Return the features of each utterance as its file is now."""
        sounds = {
            id: soundfile.read(listed["wav"], dtype="float32")[0]
            for id, listed in self.listed.items()
        }
        return {id: frames_of(torch.from_numpy(sound)).numpy() for id, sound in sounds.items()}


def frames_of(sound: torch.Tensor) -> torch.Tensor:
    return sound[: len(sound) // HOP * HOP].reshape(-1, HOP)[:, :4]


class Recorder(featcache.FeatureCacheMixin, sb.Brain):  # type: ignore[misc]
    """Stores some samples of each frame."""

    stops_at: str | None = None
    computed: list[str]

    def compute_features(self, batch: Any, stage: Any) -> Any:
        if self.stops_at in batch.id:
            self.stops_at = None  # once; what the code itself writes makes no cache stale
            raise KeyboardInterrupt
        self.computed = [*getattr(self, "computed", []), *batch.id]
        sounds, lengths = batch.sig
        samples = (lengths * sounds.shape[1]).round().long().tolist()
        return [
            {"id": id, "x": frames_of(sound[:length])}
            for id, sound, length in zip(batch.id, sounds, samples, strict=True)
        ]

    def computed_now(self) -> list[str]:
        """Return the ids that were computed since the last call."""
        found, self.computed = getattr(self, "computed", []), []
        return sorted(found)


def recorder(root: Path) -> Any:
    storage = FeatureStorage(root, [FeatureStorageConfig("x")])
    options = {"device": "cpu", "noprogressbar": True}
    torch.manual_seed(0)  # the same in every process
    scale = torch.nn.Linear(1, 1)
    return Recorder({"scale": scale}, hparams={"storage": storage}, run_opts=options)


def assert_holds(cache: Mapping[str, Any], truth: Mapping[str, Any]) -> None:
    assert sorted(cache) == sorted(truth)
    for id, array in truth.items():
        np.testing.assert_array_equal(cache[id]["x"], array, err_msg=id)

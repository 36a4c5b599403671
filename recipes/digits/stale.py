"""Shows what featcache says when a weight changes, a recording changes, and a writer is killed.

    python recipes/digits/stale.py [folder]

Caches the output of a small encoder for 400 spoken digits, in half a minute. Each step begins as a
training script does: a model, a data set, `cache_features`.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import soundfile
import speechbrain as sb
import torch
from speechbrain.dataio.dataset import DynamicItemDataset
from train import unpack

import featcache

RECORDINGS = 400


class Encoder(torch.nn.Module):
    """Stands for a large frozen model: frames of 10 ms, 64 numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = torch.nn.Conv1d(1, 64, kernel_size=200, stride=80)
        self.mix = torch.nn.Linear(64, 64)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        """Turn a signal, (samples,), into (frames, 64)."""
        return self.mix(torch.relu(self.frames(signal[None, None])[0].T))


class Embedder(featcache.FeatureCacheMixin, sb.Brain):  # type: ignore[misc]  # speechbrain has no types
    """Computes embeddings, and counts for how many recordings it did."""

    computed = 0
    seconds_each = 0.0  # a large model takes its time

    def compute_features(self, batch: Any, stage: Any) -> list[dict[str, Any]]:
        """Return the embedding of each recording, float32 (frames, 64)."""
        self.computed += len(batch.id)
        time.sleep(self.seconds_each * len(batch.id))
        encoder = self.modules.encoder
        return [
            {"id": id, "embedding": encoder(signal[:samples])}
            for id, signal, samples in zip(
                batch.id, batch.signal.data, batch.num_samples, strict=True
            )
        ]


def make_brain(folder: Path) -> Embedder:
    """Make the model as a script does, weights and all."""
    torch.manual_seed(1)
    storage = featcache.FeatureStorage(
        folder / "features", [featcache.FeatureStorageConfig("embedding", dtype="float16")]
    )
    return Embedder({"encoder": Encoder()}, hparams={"storage": storage})


def open_dataset(folder: Path) -> DynamicItemDataset:
    """Open the recordings as a script does, from the folder where they lie."""
    paths = sorted((folder / "corpus").iterdir())[:RECORDINGS]
    data = {
        path.stem: {"wav": str(path), "num_samples": soundfile.info(path).frames} for path in paths
    }
    read = {"func": sb.dataio.dataio.read_audio, "takes": ["wav"], "provides": "signal"}
    return DynamicItemDataset(data, [read], ["id", "signal", "num_samples"])


def cache(folder: Path, brain: Embedder, split: str = "train", **options: Any) -> None:
    """Cache what is missing, and say how much that was."""
    try:
        cache = brain.cache_features(
            open_dataset(folder), split=split, progressbar=False, **options
        )
    except featcache.StaleCacheError as error:
        print(f"StaleCacheError: {error}")
    else:
        print(
            f"{len(cache)} recordings, complete: {cache.complete}; computed now: {brain.computed}"
        )


def change_a_weight(brain: Embedder) -> None:
    """Add a little to one of the encoder's 17,000 weights."""
    with torch.no_grad():
        brain.modules.encoder.mix.weight[3, 5] += 0.01


def change_a_recording(folder: Path) -> None:
    """Make the end of one recording silent."""
    path = sorted((folder / "corpus").iterdir())[7]
    signal, rate = soundfile.read(path)
    signal[-400:] = 0
    soundfile.write(path, signal, rate)


def kill_a_writer(folder: Path) -> None:
    """Have another process cache the recordings anew, slowly, and kill it on the way."""
    command = [sys.executable, __file__, str(folder), "--slowly"]
    with subprocess.Popen(command) as writer:
        while committed(folder) < RECORDINGS // 3 and writer.poll() is None:
            time.sleep(0.1)
        writer.kill()  # SIGKILL: it can clean up nothing


def committed(folder: Path) -> int:
    """Return how many recordings a reader sees of those that are being cached."""
    try:
        with featcache.open(folder / "features" / "killed") as cache:
            return len(cache)
    except featcache.errors.NotACacheError:  # it has not begun
        return 0


def compute_slowly(folder: Path) -> None:
    """Cache the recordings as a large model would, in a process that is going to be killed."""
    brain = make_brain(folder)
    brain.seconds_each = 0.02
    cache(folder, brain, split="killed", shared=True, publish_every_s=0.5)


def show(folder: Path) -> None:
    """Show it all."""
    unpack(folder / "corpus")
    print("1. the first run computes, the second finds all there")
    cache(folder, make_brain(folder))
    cache(folder, make_brain(folder))

    print("\n2. one weight of 17,000 has changed")
    brain = make_brain(folder)
    change_a_weight(brain)
    cache(folder, brain)

    print("\n3. the end of one recording is silent now")
    change_a_recording(folder)
    cache(folder, make_brain(folder))
    cache(folder, make_brain(folder), on_changed="recompute")

    print("\n4. a process that caches is killed (SIGKILL), and another one goes on")
    kill_a_writer(folder)
    print(f"{committed(folder)} recordings were published when it was killed")
    cache(folder, make_brain(folder), split="killed", shared=True)


def main(arguments: list[str]) -> None:
    """Run in the given folder, or in one that is removed at the end."""
    if "--slowly" in arguments:
        compute_slowly(Path(arguments[0]))
    elif arguments:
        show(Path(arguments[0]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            show(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])

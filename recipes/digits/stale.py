"""Shows what featcache says when a weight changes, a recording changes, and a writer is killed.

    python recipes/digits/stale.py [folder]

Caches the output of a small encoder for 400 spoken digits, in half a minute. Each step begins as a
training script does: a model, a data set, `cache_features`. The folder must be a new one.
"""

import contextlib
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import soundfile
import speechbrain as sb
import torch
from speechbrain.dataio.dataset import DynamicItemDataset
from train import unpack

import featcache

RECORDINGS = 400
CORPUS, FEATURES, KILLED = Path("corpus"), Path("features"), Path("killed")  # in the folder
computed: set[str] = set()  # ids of the recordings that a call has computed


class Encoder(torch.nn.Module):
    """Stands for a large frozen model: frames of 10 ms, 64 numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = torch.nn.Conv1d(1, 64, kernel_size=200, stride=80)
        self.mix = torch.nn.Linear(64, 64)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        """Turn a signal, (samples,), into (frames, 64)."""
        mixed: torch.Tensor = self.mix(torch.relu(self.frames(signal[None, None])[0].T))
        return mixed


class Embedder(featcache.FeatureCacheMixin, sb.Brain):  # type: ignore[misc]  # speechbrain has no types
    """Computes embeddings, and notes of which recordings."""

    def compute_features(self, batch: Any, stage: Any) -> list[dict[str, Any]]:
        """Return the embedding of each recording, float32 (frames, 64)."""
        computed.update(batch.id)
        encoder = self.modules.encoder
        return [
            {"id": id, "embedding": encoder(signal[:samples])}
            for id, signal, samples in zip(
                batch.id, batch.signal.data, batch.num_samples, strict=True
            )
        ]


def make_brain(root: Path = FEATURES) -> Embedder:
    """Make the model as a script does, weights and all."""
    torch.manual_seed(1)
    features = [featcache.FeatureStorageConfig("embedding", dtype="float16")]
    storage = featcache.FeatureStorage(root, features)
    return Embedder({"encoder": Encoder()}, hparams={"storage": storage})


def open_dataset(
    read: Callable[[str], torch.Tensor] = sb.dataio.dataio.read_audio,
) -> DynamicItemDataset:
    """Open the recordings as a script does."""
    paths = sorted(CORPUS.iterdir())[:RECORDINGS]
    data = {
        path.stem: {"wav": str(path), "num_samples": soundfile.info(path).frames} for path in paths
    }
    item = {"func": read, "takes": ["wav"], "provides": "signal"}
    return DynamicItemDataset(data, [item], ["id", "signal", "num_samples"])


def cache(brain: Embedder, **options: Any) -> None:
    """Cache what is missing, and say how many recordings were computed."""
    computed.clear()
    try:
        view = brain.cache_features(open_dataset(), progressbar=False, **options)
    except featcache.StaleCacheError as error:
        print(f"StaleCacheError: {error}")
    else:
        whole = "complete" if view.complete else "not complete"
        print(f"{whole}: {len(view)} recordings are cached; this call computed {len(computed)}")


def change_a_weight(brain: Embedder) -> None:
    """Add a little to one of the encoder's 17,000 weights."""
    with torch.no_grad():
        brain.modules.encoder.mix.weight[3, 5] += 0.01


def change_a_recording() -> None:
    """Make the end of one recording silent."""
    path = sorted(CORPUS.iterdir())[7]
    signal, rate = soundfile.read(path)
    signal[-400:] = 0
    soundfile.write(path, signal, rate)


def kill_a_writer() -> None:
    """Have another process cache the recordings slowly, in another folder, and kill it."""
    command = [sys.executable, __file__, "--slowly"]
    with subprocess.Popen(command) as writer:
        while published() < RECORDINGS // 3 and writer.poll() is None:
            time.sleep(0.1)
        writer.kill()  # SIGKILL: it can clean up nothing


def published() -> int:
    """Return how many recordings a reader finds in the cache of that process."""
    try:
        return int(str(featcache.inspect.made_from(KILLED / "train")["utterances"]))
    except featcache.errors.NotACacheError:  # it has not begun
        return 0


def read_slowly(wav: str) -> torch.Tensor:
    """Read a recording as from a slow disk."""
    time.sleep(0.02)
    signal: torch.Tensor = sb.dataio.dataio.read_audio(wav)
    return signal


def cache_slowly() -> None:
    """Cache the recordings, in the process that is going to be killed."""
    dataset = open_dataset(read_slowly)
    make_brain(KILLED).cache_features(dataset, publish_every_s=0.5, progressbar=False)


def show() -> None:
    """Show it all."""
    unpack(CORPUS)
    print("1. The first call computes all recordings, the second one four, to compare them.")
    cache(make_brain())
    cache(make_brain())

    print("\n2. One weight of 17,000 has changed.")
    brain = make_brain()
    change_a_weight(brain)
    cache(brain)

    print("\n3. The end of one recording is silent now. The second call may compute it again.")
    change_a_recording()
    cache(make_brain())
    cache(make_brain(), on_changed="recompute")

    print("\n4. A process that caches is killed (SIGKILL). The next one computes what is missing.")
    kill_a_writer()
    print(f"{published()} recordings were published when it was killed")
    cache(make_brain(KILLED))


def main(arguments: list[str]) -> None:
    """Run in the given folder, or in one that is removed at the end."""
    logging.getLogger("featcache").addHandler(logging.StreamHandler(sys.stdout))
    if arguments == ["--slowly"]:
        cache_slowly()
        return
    with tempfile.TemporaryDirectory() as removed:
        folder = Path(*arguments) if arguments else Path(removed)
        folder.mkdir(parents=True, exist_ok=not arguments)
        with contextlib.chdir(folder):
            show()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Makes discrete tokens: k-means on SSL features that are computed once, into a cache.

    python recipes/quantization/quantize.py recipes/quantization/hparams.yaml [--use_cache False]

What SpeechBrain's recipes/*/quantization do, without running the encoder again in each epoch. Stop
it at any moment and run it again: what is in the caches is not computed again.
"""

import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import speechbrain as sb
import torch
from hyperpyyaml import load_hyperpyyaml
from sklearn.cluster import MiniBatchKMeans
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.data_pipeline import DynamicItem
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from transformers import AutoModel, HubertConfig, HubertModel

import featcache

CORPUS = Path(__file__).parents[1] / "digits" / "corpus.zip"
STAGES = {"train": sb.Stage.TRAIN, "test": sb.Stage.TEST}


# Data


def prepare(data_folder: str | None, output_folder: Path) -> dict[str, DynamicItemDataset]:
    """Find the recordings, and open them as two data sets: one in ten is for testing."""
    folder = output_folder / "corpus" if data_folder is None else Path(data_folder)
    if data_folder is None and not folder.exists():
        with zipfile.ZipFile(CORPUS) as corpus:
            corpus.extractall(folder.with_name("partial"))
        folder.with_name("partial").rename(folder)  # a run that is killed leaves no half of it
    found = sorted(path for path in folder.glob("*") if path.suffix in (".wav", ".flac"))
    if len(found) < 10:
        sys.exit(f"{len(found)} recordings *.wav and *.flac in {str(folder)!r}: ten are needed")
    read = {"func": sb.dataio.dataio.read_audio, "takes": ["wav"], "provides": "signal"}
    parts = {"train": [path for n, path in enumerate(found) if n % 10], "test": found[::10]}
    return {
        split: DynamicItemDataset({path.stem: {"wav": str(path)} for path in paths}, [read])
        for split, paths in parts.items()
    }


# Models


def encoder(name: str | None) -> torch.nn.Module:
    """Load an encoder of `transformers`, or make a small one of random weights."""
    if name is not None:
        return AutoModel.from_pretrained(name)  # type: ignore[no-any-return]
    config = HubertConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        conv_dim=(32, 32, 32, 32),
        conv_kernel=(10, 8, 8, 4),
        conv_stride=(5, 4, 4, 2),  # 20 ms of 8 kHz
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    return HubertModel(config)


class Tokens(torch.nn.Module):
    """Names each frame by its nearest centroid."""

    centroids: torch.Tensor

    def __init__(self, centroids: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("centroids", centroids)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Turn frames, (frames, dims), into tokens, (frames,), int64."""
        return torch.cdist(frames, self.centroids).argmin(dim=1)


class Quantization(featcache.FeatureCacheMixin, sb.Brain):  # type: ignore[misc]  # speechbrain has no types
    """Computes SSL features for the cache, and fits centroids to what comes from it."""

    def encode(self, signal: torch.Tensor) -> torch.Tensor:
        """Turn samples, (samples,), into frames, (frames, dims), float32."""
        self.modules.ssl.eval()  # `fit` sets the modules to training
        with torch.no_grad():
            _, features = self.modules.ssl(signal[None].to(self.device))
        return features["ssl"][0].cpu()  # type: ignore[no-any-return]

    def compute_features(self, batch: Any, stage: Any) -> list[dict[str, Any]]:
        """Compute of each recording "ssl", by itself: padding would change it."""
        ends = (batch.signal.lengths * batch.signal.data.shape[1]).round().long()
        signals = zip(batch.id, batch.signal.data, ends, strict=True)
        return [{"id": id, "ssl": self.encode(signal[:end])} for id, signal, end in signals]

    def on_stage_start(self, stage: Any, epoch: int | None = None) -> None:
        """Begin an epoch."""
        self.waiting = torch.empty(0)  # frames that are too few for a step

    def fit_batch(self, batch: Any) -> torch.Tensor:
        """Take the steps that there are frames for; returns how far the centroids have moved."""
        kmeans, size = self.hparams.kmeans, self.hparams.kmeans_batch_size
        self.waiting = torch.cat([self.waiting, *frames_of(batch)])
        moved = 0.0
        while len(self.waiting) >= size:
            before = np.copy(getattr(kmeans, "cluster_centers_", 0.0))  # it changes in place
            kmeans.partial_fit(self.waiting[:size].numpy())
            moved = float(np.linalg.norm(kmeans.cluster_centers_ - before))
            self.waiting = self.waiting[size:]
            self.optimizer_step += 1
        return torch.tensor(moved)

    def evaluate_batch(self, batch: Any, stage: Any) -> torch.Tensor:
        """Return the inertia: the mean square of the distance to the nearest centroid."""
        frames = torch.cat(frames_of(batch)).numpy()
        return torch.tensor(-self.hparams.kmeans.score(frames) / len(frames))

    def on_stage_end(self, stage: Any, stage_loss: float, epoch: int | None = None) -> None:
        """Print the loss."""
        names = {sb.Stage.TRAIN: f"epoch {epoch}: centroids moved by", sb.Stage.TEST: "inertia"}
        print(names[stage], f"{stage_loss:.4f}")


def frames_of(batch: Any) -> list[torch.Tensor]:
    """Return the frames of each utterance of a batch, without padding."""
    ends = (batch.ssl.lengths * batch.ssl.data.shape[1]).round().long().tolist()
    return [frames[:end] for frames, end in zip(batch.ssl.data, ends, strict=True)]


# The run


def write_tokens(
    dataset: DynamicItemDataset, tokens: Tokens, cache: Path | None, text: Path
) -> None:
    """Write the tokens of a split: into a cache, if any, and without repetitions as text.

    Other centroids are refused by the cache, which tells that they have changed.
    """

    def named(id: str, ssl: torch.Tensor) -> tuple[torch.Tensor, str]:
        found = tokens(ssl)
        return found, " ".join(map(str, found.unique_consecutive().tolist()))

    item = DynamicItem(["id", "ssl"], named, ["tokens", "units"])
    if cache is not None:
        item = featcache.cache(cache)(item)
    dataset.add_dynamic_item(item)
    with dataset.output_keys_as(["id", "units"]):
        lines = [f"{each['id']} {each['units']}\n" for each in dataset]
    text.write_text("".join(lines))
    if cache is not None:
        item.func.publish(complete=True)


def main(arguments: list[str]) -> None:
    """Run the recipe."""
    file, run_opts, overrides = sb.parse_arguments(arguments)
    hparams = load_hyperpyyaml(Path(file).read_text(), overrides)
    folder, use_cache = Path(hparams["output_folder"]), hparams["use_cache"]
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(hparams["threads"])
    hparams["kmeans"] = MiniBatchKMeans(hparams["clusters"], random_state=hparams["seed"], n_init=1)

    ssl = featcache.taps(encoder(hparams["model"]), {"ssl": hparams["layer"]})
    brain = Quantization({"ssl": ssl}, None, hparams, run_opts)
    datasets = prepare(hparams["data_folder"], folder)

    # 1. Features: computed once, and read from then on; or computed whenever they are needed.
    for split, dataset in datasets.items():
        if use_cache:
            dataset.set_output_keys(["id", "signal"])
            brain.cache_features(dataset, STAGES[split])
            hparams["storage"].attach(dataset, split)
        else:
            dataset.add_dynamic_item(brain.encode, takes="signal", provides="ssl")
        dataset.set_output_keys(["id", "ssl"])

    with threadpool_limits(hparams["threads"]):
        # 2. Centroids, of all frames of the training set in each epoch.
        brain.fit(hparams["epoch_counter"], datasets["train"], None, None, hparams["loader"])
        brain.evaluate(datasets["test"], test_loader_kwargs={"batch_size": 32})
    centroids = hparams["kmeans"].cluster_centers_.astype(np.float32)
    np.save(folder / "centroids.npy", centroids)

    # 3. Tokens, in caches of their own.
    tokens = Tokens(torch.from_numpy(centroids))
    for split, dataset in datasets.items():
        cache = folder / "tokens" / split if use_cache else None
        write_tokens(dataset, tokens, cache, folder / f"units.{split}.txt")


if __name__ == "__main__":
    main(sys.argv[1:])

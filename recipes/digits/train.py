"""Recognises spoken digits from cached features: prepare, cache, train from the cache, test.

    python recipes/digits/train.py recipes/digits/hparams.yaml [--data_folder folder]
    [--output_folder folder]

Stop it at any moment and run it again: what is in the cache is not computed again.
"""

import json
import re
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import speechbrain as sb
import torch
from hyperpyyaml import load_hyperpyyaml
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from speechbrain.dataio.dataloader import make_dataloader
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.distributed import ddp_init_group, run_on_main

import featcache
from featcache.interop.speechbrain import padded_batch, with_items
from featcache.samplers import BucketBatchSampler

CORPUS = Path(__file__).with_name("corpus.zip")
RECORDING = re.compile(r"(?P<digit>\d)_(?P<speaker>[^_/\\]+)_(?P<index>\d+)\.(wav|flac)")
STAGES = {"train": sb.Stage.TRAIN, "valid": sb.Stage.VALID, "test": sb.Stage.TEST}


# Data


def split_of(index: int) -> str:
    """Say where the recording of this number belongs; 0 to 4 are the Free Spoken Digit Dataset's
    test set.
    """
    return "test" if index < 5 else "valid" if index < 8 else "train"


def prepare(data_folder: str | None, output_folder: Path, sample_rate_hz: int) -> None:
    """Find the recordings, unpack the corpus if no folder is given, and write the manifest of each
    split.
    """
    folder = Path(data_folder) if data_folder else unpack(output_folder / "corpus")
    if not folder.is_dir():
        sys.exit(f"no folder {str(folder)!r}: data_folder names the folder of the recordings")
    manifests: dict[str, dict[str, dict[str, object]]] = {split: {} for split in STAGES}
    for path in sorted(folder.resolve().iterdir()):
        if name := RECORDING.fullmatch(path.name):
            audio = soundfile.info(path)
            if audio.samplerate != sample_rate_hz:
                sys.exit(
                    f"{str(path)!r} has {audio.samplerate} samples a second; the recipe needs "
                    f"{sample_rate_hz}"
                )
            entry = {"wav": str(path), "digit": int(name["digit"]), "num_samples": audio.frames}
            manifests[split_of(int(name["index"]))][path.stem] = entry
    for split, manifest in manifests.items():
        if not manifest:
            sys.exit(
                f"no recordings {{digit}}_{{speaker}}_{{index}}.wav for the {split} set in "
                f"{str(folder)!r}"
            )
        (output_folder / f"{split}.json").write_text(json.dumps(manifest, indent=1))


def unpack(folder: Path) -> Path:
    """Unpack the corpus that comes with the recipe."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(CORPUS) as corpus:
        for name in corpus.namelist():
            if not RECORDING.fullmatch(name):
                sys.exit(
                    f"{name!r} in {str(CORPUS)!r} is no recording; make the corpus anew with "
                    "make_corpus.py"
                )
            (folder / name).write_bytes(corpus.read(name))
    return folder


def open_dataset(manifest: Path) -> DynamicItemDataset:
    """Open a split for computing features."""
    items = [{"func": sb.dataio.dataio.read_audio, "takes": ["wav"], "provides": "signal"}]
    return DynamicItemDataset.from_json(
        manifest, dynamic_items=items, output_keys=["id", "signal", "num_samples"]
    )


# Features


class Units(torch.nn.Module):
    """Names each frame by its nearest k-means centroid."""

    centroids: torch.Tensor

    def __init__(self, centroids: NDArray[np.float32]) -> None:
        super().__init__()
        self.register_buffer("centroids", torch.from_numpy(centroids))

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Turn frames, (frames, dims), into units, (frames,), int64."""
        return torch.cdist(frames, self.centroids).argmin(dim=1)


def fit_units(
    path: Path, dataset: DynamicItemDataset, fbank: torch.nn.Module, number: int, seed: int
) -> None:
    """Fit the centroids on some training recordings, once: a run that goes on with a cache needs
    the same ones.
    """
    if path.exists():
        return
    ids = np.random.default_rng(seed).permutation(sorted(dataset.data_ids))[:300]
    signals = (sb.dataio.dataio.read_audio(dataset.data[id]["wav"]) for id in ids)
    frames = np.concatenate([fbank(signal[None])[0].numpy() for signal in signals])
    centroids, _ = kmeans2(frames, number, minit="++", seed=seed)
    aside = path.with_suffix(".partial")
    with aside.open("wb") as file:
        np.save(file, centroids)
    aside.replace(path)


class DigitsBrain(featcache.FeatureCacheMixin, sb.Brain):  # type: ignore[misc]  # speechbrain has no types
    """Computes features for the cache, and classifies recordings by what comes from it."""

    waited_s: list[float]  # for data, in each epoch of training

    def compute_features(self, batch: Any, stage: Any) -> list[dict[str, Any]]:
        """Compute of each recording log-mel energies in dB, float32 (frames, 80), and units, int64
        (frames,).

        One recording at a time, cut to its own number of samples. In a batch, padding adds frames,
        and matrix products may round differently with the size of the batch. This way a recording's
        features are the same bits whatever else is in its batch, and a cache made in two runs
        equals one made in a single run.
        """
        utterances = []
        for id, signal, num_samples in zip(
            batch.id, batch.signal.data, batch.num_samples, strict=True
        ):
            fbank = self.modules.fbank(signal[None, :num_samples])[0]
            utterances.append({"id": id, "fbank": fbank, "units": self.modules.units(fbank)})
        return utterances

    def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
        """Return log probabilities, (batch, 10)."""
        batch = batch.to(self.device)
        fbank, lengths = batch.fbank
        frames = torch.cat(
            [self.modules.mvn(fbank, lengths), self.modules.embedding(batch.units.data)], dim=2
        )
        return torch.log_softmax(self.modules.classifier(frames, lengths).squeeze(1), dim=1)

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Any) -> torch.Tensor:
        """Return the mean negative log likelihood and count what was right."""
        self.correct += int((predictions.argmax(dim=1) == batch.digit).sum())
        self.total += len(batch)
        return torch.nn.functional.nll_loss(predictions, batch.digit)

    def on_stage_start(self, stage: Any, epoch: int | None = None) -> None:
        """Begin to count anew."""
        self.correct = self.total = 0

    def on_stage_end(self, stage: Any, stage_loss: float, epoch: int | None = None) -> None:
        """Report, and keep the model that does best on the validation set."""
        self.accuracy = self.correct / max(self.total, 1)  # an epoch may go on at its end
        if stage == sb.Stage.TRAIN:
            self.train_loss = stage_loss
            # of the FeatureLoader that `fit` was given
            self.waited_s.append(self.train_sampler.waited_s)
        elif stage == sb.Stage.VALID:
            results = f"train loss {self.train_loss:.3f}, valid accuracy {self.accuracy:.3f}"
            print(f"epoch {epoch}: {results}, {self.waited_s[-1]:.3f} s waited for data")
            self.checkpointer.save_and_keep_only(
                meta={"accuracy": self.accuracy}, max_keys=["accuracy"]
            )


def open_loader(
    split: str,
    dataset: DynamicItemDataset,
    view: featcache.FeatureTable,
    max_frames: int,
    seed: int,
) -> featcache.FeatureLoader[Any]:
    """Open the features of a split: batches of recordings of similar length, with the digits to
    recognise.
    """
    # training: others in each epoch, shared by the ranks under torchrun; else the same, all of them
    # for every rank
    order: dict[str, Any] = (
        {} if split == "train" else {"shuffle": False, "rank": 0, "world_size": 1}
    )
    sampler = BucketBatchSampler(view, max_frames=max_frames, seed=seed, **order)
    return featcache.FeatureLoader(
        view,
        batch_sampler=sampler,
        dtypes={"units": "int64"},  # an embedding takes nothing smaller
        transform=with_items(dataset, ["digit"]),
        collate=padded_batch,
    )


def time_on_the_fly(
    brain: DigitsBrain, dataset: DynamicItemDataset, loader_options: Mapping[str, int]
) -> float:
    """Compute a data set's features without keeping them, and return the seconds that it took."""
    start = time.perf_counter()
    with torch.no_grad():
        for batch in make_dataloader(dataset, **loader_options):
            brain.compute_features(batch.to(brain.device), sb.Stage.TRAIN)
    return time.perf_counter() - start


# The run


def main(arguments: list[str]) -> None:
    """Run the recipe."""
    hparams_file, run_opts, overrides = sb.parse_arguments(arguments)
    ddp_init_group(run_opts)
    with Path(hparams_file).open() as file:
        hparams = load_hyperpyyaml(file, overrides)
    torch.set_num_threads(hparams["threads"])
    output_folder = Path(hparams["output_folder"])
    sb.create_experiment_directory(output_folder, hparams_file, overrides, save_env_desc=False)

    data_folder = hparams["data_folder"] and str(Path(hparams["data_folder"]).resolve())
    run_on_main(prepare, args=[data_folder, output_folder, hparams["sample_rate"]])
    datasets = {split: open_dataset(output_folder / f"{split}.json") for split in STAGES}
    centroids, modules = output_folder / "centroids.npy", hparams["modules"]
    run_on_main(
        fit_units,
        args=[
            centroids,
            datasets["train"],
            modules["fbank"],
            hparams["number_of_units"],
            hparams["seed"],
        ],
    )
    modules["units"] = Units(np.load(centroids))
    brain = DigitsBrain(modules, hparams["opt_class"], hparams, run_opts, hparams["checkpointer"])
    brain.waited_s = []

    # 1. Cache. What is named here is checked when a run goes on, beside what `compute_features`
    # itself makes use of.
    made_from = {"data_folder": data_folder}
    views, loaders = {}, {}  # of a cache: the recordings that the data set has
    for split, stage in STAGES.items():
        views[split] = brain.cache_features(
            datasets[split],
            stage,
            loader_kwargs=hparams["cache_loader"],
            fingerprint=made_from,
            parallel=hparams["parallel"] or None,
        )
        loaders[split] = open_loader(
            split, datasets[split], views[split], hparams["max_frames"], hparams["seed"]
        )

    # 2. Train from the cache: its statistics normalise the features, its lengths make the batches.
    modules["mvn"] = featcache.GlobalMVN.from_cache(
        views["train"], "fbank", allow_incomplete=brain.debug
    )
    brain.modules["mvn"] = modules["mvn"].to(brain.device)
    brain.fit(hparams["epoch_counter"], loaders["train"], loaders["valid"], progressbar=False)
    if brain.waited_s:  # nothing where no epoch was left
        waited_s = sum(brain.waited_s) / len(brain.waited_s)
        computed_s = time_on_the_fly(brain, datasets["train"], hparams["cache_loader"])
        compared = (
            f"{waited_s:.3f} waiting for the cache, {computed_s:.2f} computing features on the fly"
        )
        print(f"seconds per epoch: {compared} ({waited_s / computed_s:.2%})")

    # 3. Test.
    brain.evaluate(loaders["test"], max_key="accuracy", progressbar=False)
    print(f"test accuracy: {brain.accuracy:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])

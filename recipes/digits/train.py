"""Recognises spoken digits from cached features: prepare, cache, train from the cache, test.

    python recipes/digits/train.py recipes/digits/hparams.yaml [--data_folder folder] [--output_folder folder]

Stop it at any moment and run it again: what is in the cache is not computed again.
"""

import copy
import json
import re
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import speechbrain as sb
import torch
from hyperpyyaml import load_hyperpyyaml
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2  # type: ignore[import-untyped]
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.dataio.sampler import DynamicBatchSampler
from speechbrain.utils.distributed import ddp_init_group, run_on_main

import featcache

CORPUS = Path(__file__).with_name("corpus.zip")
RECORDING = re.compile(r"(?P<digit>\d)_(?P<speaker>[^_/\\]+)_(?P<index>\d+)\.(wav|flac)")
STAGES = {"train": sb.Stage.TRAIN, "valid": sb.Stage.VALID, "test": sb.Stage.TEST}
ON_THE_FLY = ["id", "digit", "signal", "num_samples"]  # what a batch holds to compute features from
FROM_CACHE = ["id", "digit", "fbank", "units"]  # what it holds when they come from the cache


# Data


def split_of(index: int) -> str:
    """Say where the recording of this number belongs; 0 to 4 are the Free Spoken Digit Dataset's test set."""
    return "test" if index < 5 else "valid" if index < 8 else "train"


def prepare(data_folder: str | None, output_folder: Path, sample_rate_hz: int) -> None:
    """Find the recordings, unpack the corpus if no folder is given, and write the manifest of each split."""
    folder = Path(data_folder) if data_folder else unpack(output_folder / "corpus")
    manifests: dict[str, dict[str, dict[str, object]]] = {split: {} for split in STAGES}
    for path in sorted(folder.resolve().iterdir()):
        if name := RECORDING.fullmatch(path.name):
            audio = soundfile.info(path)
            if audio.samplerate != sample_rate_hz:
                sys.exit(f"{str(path)!r} has {audio.samplerate} samples a second; the recipe needs {sample_rate_hz}")
            entry = {"wav": str(path), "digit": int(name["digit"]), "num_samples": audio.frames}
            manifests[split_of(int(name["index"]))][path.stem] = entry
    for split, manifest in manifests.items():
        if not manifest:
            sys.exit(f"no recordings {{digit}}_{{speaker}}_{{index}}.wav for the {split} set in {str(folder)!r}")
        (output_folder / f"{split}.json").write_text(json.dumps(manifest, indent=1))


def unpack(folder: Path) -> Path:
    """Unpack the corpus that comes with the recipe."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(CORPUS) as corpus:
        for name in corpus.namelist():
            if not RECORDING.fullmatch(name):
                sys.exit(f"{name!r} in {str(CORPUS)!r} is no recording; make the corpus anew with make_corpus.py")
            (folder / name).write_bytes(corpus.read(name))
    return folder


def open_dataset(manifest: Path) -> DynamicItemDataset:
    """Open a split for computing features."""
    items = [{"func": sb.dataio.dataio.read_audio, "takes": ["wav"], "provides": "signal"}]
    return DynamicItemDataset.from_json(manifest, dynamic_items=items, output_keys=ON_THE_FLY)


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


def fit_units(path: Path, dataset: DynamicItemDataset, fbank: torch.nn.Module, number: int, seed: int) -> None:
    """Fit the centroids on some training recordings, once: a run that goes on with a cache needs the same ones."""
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
    """Classifies recordings, by features that are computed on the fly or come from the cache."""

    def compute_features(self, batch: Any, stage: Any) -> list[dict[str, Any]]:
        """Compute of each recording log-mel energies in dB, float32 (frames, 80), and units, int64 (frames,).

        One recording at a time, cut to its own number of samples. In a batch, padding adds frames, and matrix products
        may round differently with the size of the batch. This way a recording's features are the same bits whatever
        else is in its batch, and a cache made in two runs equals one made in a single run.
        """
        utterances = []
        for id, signal, num_samples in zip(batch.id, batch.signal.data, batch.num_samples, strict=True):
            fbank = self.modules.fbank(signal[None, :num_samples])[0]
            utterances.append({"id": id, "fbank": fbank, "units": self.modules.units(fbank)})
        return utterances

    def compute_forward(self, batch: Any, stage: Any) -> torch.Tensor:
        """Return log probabilities, (batch, 10)."""
        if not hasattr(batch, "fbank"):
            batch = PaddedBatch(self.compute_features(batch.to(self.device), stage))
        batch = batch.to(self.device)
        fbank, lengths = batch.fbank
        units, _ = batch.units
        frames = torch.cat([self.modules.mvn(fbank, lengths), self.modules.embedding(units.long())], dim=2)
        return torch.log_softmax(self.modules.classifier(frames, lengths).squeeze(1), dim=1)

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Any) -> torch.Tensor:
        """Return the mean negative log likelihood and count what was right."""
        digits = batch.digit.to(self.device)
        self.correct += int((predictions.argmax(dim=1) == digits).sum())
        self.total += len(digits)
        return torch.nn.functional.nll_loss(predictions, digits)

    def on_stage_start(self, stage: Any, epoch: int | None = None) -> None:
        """Begin to count anew."""
        self.correct = self.total = 0

    def on_stage_end(self, stage: Any, stage_loss: float, epoch: int | None = None) -> None:
        """Report, and keep the model that does best on the validation set."""
        self.accuracy = self.correct / self.total
        if stage == sb.Stage.TRAIN:
            self.train_loss = stage_loss
        elif stage == sb.Stage.VALID:
            print(f"epoch {epoch}: train loss {self.train_loss:.3f}, valid accuracy {self.accuracy:.3f}")
            self.checkpointer.save_and_keep_only(meta={"accuracy": self.accuracy}, max_keys=["accuracy"])


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
        fit_units, args=[centroids, datasets["train"], modules["fbank"], hparams["number_of_units"], hparams["seed"]]
    )
    modules["units"] = Units(np.load(centroids))
    brain = DigitsBrain(modules, hparams["opt_class"], hparams, run_opts, hparams["checkpointer"])

    # 1. Cache. What is named here is checked when a run goes on, beside what `compute_features` itself makes use of.
    made_from = {"data_folder": data_folder}
    for split, stage in STAGES.items():
        brain.cache_features(datasets[split], stage, loader_kwargs=hparams["cache_loader"], fingerprint=made_from)
        hparams["storage"].attach(datasets[split], split)
        datasets[split].set_output_keys(FROM_CACHE)

    # 2. Train from the cache: its statistics normalise the features, its lengths make the batches.
    cache = hparams["storage"].cache("train")
    modules["mvn"] = featcache.GlobalMVN.from_cache(cache, "fbank")
    brain.modules["mvn"] = modules["mvn"].to(brain.device)
    lengths = cache.lengths("fbank", ids=datasets["train"].data_ids)
    sampler = DynamicBatchSampler(datasets["train"], lengths_list=lengths.tolist(), **hparams["batches"])
    brain.train_sampler = sampler  # so that Brain.fit tells it the epoch: other batches in each
    loader_options = {"batch_sampler": sampler}
    brain.fit(
        hparams["epoch_counter"],
        datasets["train"],
        datasets["valid"],
        progressbar=False,
        train_loader_kwargs=loader_options,
        valid_loader_kwargs={"batch_size": 64},
    )

    # What the cache saves: the same epoch twice, on a copy of the model.
    timed = DigitsBrain(copy.deepcopy(modules), hparams["opt_class"], hparams, run_opts)
    seconds = []
    for keys in (ON_THE_FLY, FROM_CACHE):
        datasets["train"].set_output_keys(keys)
        start = time.perf_counter()
        timed.fit([0], datasets["train"], progressbar=False, train_loader_kwargs=loader_options)
        seconds.append(time.perf_counter() - start)
    print(f"seconds per epoch: {seconds[0]:.2f} on the fly, {seconds[1]:.2f} from the cache")

    # 3. Test.
    brain.evaluate(datasets["test"], max_key="accuracy", progressbar=False, test_loader_kwargs={"batch_size": 64})
    print(f"test accuracy: {brain.accuracy:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])

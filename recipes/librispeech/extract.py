r"""Caches filterbanks or SSL features of LibriSpeech, or the like, and tokens, on many workers.

    python recipes/librispeech/extract.py recipes/librispeech/settings.yaml \
        --data_folder path/to/LibriSpeech

Stop it and run it again, on any number of workers: what is in a cache is not computed again.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hyperpyyaml import load_hyperpyyaml
from lhotse import CutSet, Recording, SupervisionSegment
from numpy.typing import NDArray
from sklearn.cluster import MiniBatchKMeans
from torchaudio.compliance import kaldi

import featcache

Settings = dict[str, Any]


# Data


def prepare(split: Path, cuts: Path, *, skip: bool) -> Path:
    """Return the lhotse cuts of a split; those of a directory are made once, into the file `cuts`.

    Recordings that cannot be opened are named, and left out if `skip` says so, or end the run.
    """
    if split.is_file():
        return split
    if not cuts.exists():
        if not (found := sorted(split.glob("*/*/*.flac"))):
            sys.exit(
                f"no <speaker>/<chapter>/*.flac in {str(split)!r}, which is no file of cuts either"
            )
        cuts.parent.mkdir(parents=True, exist_ok=True)
        aside = cuts.with_name(f"partial-{cuts.name}")
        unreadable: list[str] = []
        CutSet.from_cuts(cuts_of(found, unreadable)).to_file(aside)
        if unreadable:
            names = "\n".join(unreadable)
            what = f"{len(unreadable)} of {len(found)} recordings cannot be read:\n{names}\n"
            if not skip:
                sys.exit(f"{what}mend or remove them, or leave them out: --on_error skip")
            remedy = f"they are left out; mend them and remove {str(cuts)!r} to have them"
            print(what + remedy, file=sys.stderr)
        aside.replace(cuts)
    return cuts


def cuts_of(recordings: list[Path], unreadable: list[str]) -> Iterator[Any]:
    """Yield a cut for each recording, with text and speaker; list in `unreadable` what is none."""
    chapter, texts = Path(), dict[str, str]()
    for path in recordings:
        if path.parent != chapter:
            chapter, texts = path.parent, {}
            for transcript in chapter.glob("*.trans.txt"):
                lines = transcript.read_text(encoding="utf-8").splitlines()
                texts |= {id: text for id, _, text in (line.partition(" ") for line in lines)}
        try:
            cut = Recording.from_file(path.resolve()).to_cut()
        except Exception:  # lhotse's backends raise what their libraries do
            unreadable.append(str(path))
            continue
        whole = {
            "id": cut.id,
            "recording_id": cut.id,
            "start": 0,
            "duration": cut.duration,
            "channel": cut.channel,
        }
        cut.supervisions = [
            SupervisionSegment(**whole, text=texts.get(cut.id), speaker=path.parts[-3])
        ]
        yield cut


# Features. One recording at a time: padding would add frames, and change others of encoders.


class Fbank(torch.nn.Module):
    """Log-mel energies as Kaldi computes them, without dither: natural log, every 10 ms."""

    def __init__(self, mels: int) -> None:
        super().__init__()
        self.mels = mels

    def compute_features(self, batch: list[Any]) -> list[dict[str, Any]]:
        """Compute of each recording "fbank", float32 (frames, mels)."""
        return [
            {"id": item["id"], "fbank": self(item["samples"], item["sample_rate_hz"])}
            for item in batch
        ]

    def forward(self, samples: NDArray[np.float32], sample_rate_hz: int) -> torch.Tensor:
        """Turn samples within -1 to 1 into energies of 16-bit integers, as Kaldi takes them."""
        options = {"num_mel_bins": self.mels, "sample_frequency": sample_rate_hz, "dither": 0.0}
        frames: torch.Tensor = kaldi.fbank(torch.from_numpy(samples)[None] * 32768, **options)
        return frames


class Ssl(torch.nn.Module):
    """Layers of a self-supervised encoder of `transformers`, every 20 ms in most."""

    def __init__(self, model: str, layers: dict[str, str]) -> None:
        from transformers import AutoFeatureExtractor, AutoModel  # needed for this class only

        super().__init__()
        # refuses other sample rates than its own
        self.normalise = AutoFeatureExtractor.from_pretrained(model)  # type: ignore[no-untyped-call]
        # what comes after the last of the layers is not computed
        self.tapped = featcache.taps(AutoModel.from_pretrained(model).eval(), layers)

    def compute_features(self, batch: list[Any]) -> list[dict[str, Any]]:
        """Compute of each recording each layer, float32 (frames, dims)."""
        return [
            {"id": item["id"], **self(item["samples"], item["sample_rate_hz"])} for item in batch
        ]

    def forward(self, samples: NDArray[np.float32], sample_rate_hz: int) -> dict[str, torch.Tensor]:
        """Encode samples."""
        encoder = self.tapped.model
        inputs = self.normalise(samples, sampling_rate=sample_rate_hz, return_tensors="pt").to(
            encoder.device
        )
        _, features = self.tapped(inputs.pop(encoder.main_input_name), **inputs)
        return {name: frames[0] for name, frames in features.items()}


class Tokens(torch.nn.Module):
    """Names each frame by its nearest k-means centroid."""

    centroids: torch.Tensor

    def __init__(self, centroids: NDArray[np.float32], feature: str) -> None:
        super().__init__()
        self.feature = feature
        self.register_buffer("centroids", torch.from_numpy(centroids))

    def compute_features(self, batch: list[Any]) -> list[dict[str, Any]]:
        """Compute of each utterance "tokens", int64 (frames,)."""
        return [{"id": item["id"], "tokens": self(item[self.feature])} for item in batch]

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Turn frames, (frames, dims), into tokens, (frames,), int64."""
        return torch.cdist(frames.to(self.centroids), self.centroids).argmin(dim=1)


def fit_tokens(
    path: Path, view: featcache.FeatureTable, feature: str, clusters: int, frames: int, seed: int
) -> None:
    """Fit the centroids on frames of some utterances, once, for runs that go on with a cache."""
    if path.exists():
        if (found := len(np.load(path))) != clusters:
            sys.exit(
                f"{str(path)!r} holds {found} clusters, not {clusters}; give another output_folder"
            )
        return
    order = np.random.default_rng(seed).permutation(len(view))
    enough = np.searchsorted(np.cumsum(view.lengths(feature)[order]), frames) + 1
    ids = [view.id(row) for row in order[:enough].tolist()]
    taken = np.concatenate([np.asarray(view.read(id, feature), np.float32) for id in ids])
    if len(taken) < clusters:
        sys.exit(
            f"{len(taken)} frames cannot make {clusters} clusters; set tokens to fewer, or to null"
        )
    fitted = MiniBatchKMeans(clusters, batch_size=10000, random_state=seed, n_init=1).fit(taken)
    aside = path.with_suffix(".partial")
    with aside.open("wb") as file:
        np.save(file, fitted.cluster_centers_.astype(np.float32))
    aside.replace(path)


# What each worker builds for itself: of these objects only paths and settings are sent


class Encoding(featcache.EnvironmentProvider):
    """Computes features from the audio of cuts."""

    def __init__(self, cuts: Path, settings: Settings) -> None:
        self.cuts = cuts.resolve()
        self.feature, self.options = settings["feature"], settings[settings["feature"]]

    def build_env_local(self) -> dict[str, object]:
        """Open the cuts and load the encoder, onto the GPU if there is one."""
        encoder = Fbank(**self.options) if self.feature == "fbank" else Ssl(**self.options)
        encoder.to("cuda" if torch.cuda.is_available() else "cpu")
        dataset = featcache.utterances(CutSet.from_file(self.cuts))
        return {"dataset": dataset, "compute_features": encoder.compute_features}


class Naming(featcache.EnvironmentProvider):
    """Computes tokens from the features in a cache."""

    def __init__(self, view: featcache.FeatureTable, feature: str, centroids: Path) -> None:
        self.view, self.feature, self.centroids = view, feature, centroids

    def build_env_local(self) -> dict[str, object]:
        """Open the features and the centroids."""
        dataset = featcache.FeatureDataset(self.view, [self.feature])
        compute = Tokens(np.load(self.centroids), self.feature).compute_features
        found = {"ids": list(self.view), "lengths": self.view.lengths(self.feature)}
        return {"dataset": dataset, "compute_features": compute, **found}


# The run


def load_settings(file: str, *overrides: str) -> Settings:
    """Read the settings; `--name value` on the command line takes the place of one."""
    if len(overrides) % 2:
        sys.exit(f"settings are given as --name value; {overrides[-1]!r} has none")
    given = {
        name.removeprefix("--"): value
        for name, value in zip(overrides[::2], overrides[1::2], strict=True)
    }
    with Path(file).open() as stream:
        settings: Settings = load_hyperpyyaml(
            stream, "\n".join(f"{name}: {value}" for name, value in given.items())
        )
    if settings["feature"] not in ("fbank", "ssl"):
        sys.exit(f"feature is 'fbank' or 'ssl', not {settings['feature']!r}")
    if "ssl" not in settings["ssl"]["layers"]:
        sys.exit("ssl.layers names no layer for the feature 'ssl', which tokens are made of")
    settings["splits"] = {
        split: source for split, source in settings["splits"].items() if source is not None
    }
    if settings["tokens"] is not None and "train" not in settings["splits"]:
        sys.exit("tokens are fitted on the split 'train', which splits does not name")
    return settings


def main(arguments: list[str]) -> None:
    """Run the recipe."""
    settings = load_settings(*arguments)
    folder, feature, storage = (
        Path(settings["output_folder"]),
        settings["feature"],
        settings["storage"],
    )
    shared = {"batch_size": settings["batch_size"], "on_error": settings["on_error"]}

    names = settings["ssl"]["layers"] if feature == "ssl" else ["fbank"]

    # 1. Features, split by split, on the workers.
    features = {}
    for split, source in settings["splits"].items():
        recordings = Path(settings["data_folder"], source).resolve()
        cuts = prepare(
            recordings, folder / "cuts" / f"{split}.jsonl.gz", skip=settings["on_error"] == "skip"
        )
        features[split] = featcache.extract(
            Encoding(cuts, settings),
            folder / "features" / split,
            [replace(storage[feature], name=name) for name in names],
            parallel=settings["parallel"],
            annotations=["text", "speaker", "duration"],
            # besides code, settings and weights of the encoder
            fingerprint={"recordings": str(recordings)},
            **shared,
        )

    # 2. Tokens, from the cached features.
    made = {split: [view] for split, view in features.items()}
    if settings["tokens"] is not None:
        centroids = folder / "centroids.npy"
        fit_tokens(centroids, features["train"], feature, **settings["tokens"])
        for split, view in features.items():
            naming = Naming(view, feature, centroids)
            tokens = featcache.extract(
                naming,
                folder / "tokens" / split,
                [storage["tokens"]],
                fingerprint={feature: featcache.open(view.path).fingerprint},
                **shared,
            )
            made[split].append(tokens)

    # 3. Both side by side, as training gets them.
    for split, found in made.items():
        table = featcache.join(*found)
        print(
            f"{split}: {len(table)} utterances, {table.lengths(feature).sum()} frames of "
            f"{', '.join(table.features)}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])

"""Trains a model on a mix of two corpora, in packed batches; killed, it goes on to the bit.

    python recipes/mix/train_on_mix.py recipes/mix/settings.yaml [--output_folder folder]

Stop or kill it at any moment and run it again: the losses, in `losses.jsonl`, and the weights, in
`model.pt`, are those of a run that was never stopped.
"""

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hyperpyyaml import load_hyperpyyaml
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torchaudio.compliance import kaldi

import featcache
from featcache.samplers import PackedBatchSampler

RECORDING = re.compile(r"(?P<digit>\d)_(?P<speaker>[^_/\\]+)_(?P<index>\d+)\.(wav|flac)")
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEST_RECORDINGS = 5  # of each digit and speaker: the first ones

Item = dict[str, Any]


# Data


def find(path: Path, speakers: list[str] | None, unpacked: Path) -> list[Item]:
    """List the recordings of a corpus, with text and speaker; a zip file is unpacked first."""
    if path.suffix == ".zip":
        if not (whole := unpacked / path.stem).exists():
            with zipfile.ZipFile(path) as corpus:
                corpus.extractall(unpacked / "partial")
            (unpacked / "partial").rename(whole)  # a run that is killed leaves no half of it
        path = whole
    named = [(file, RECORDING.fullmatch(file.name)) for file in sorted(path.resolve().glob("*"))]
    found = [
        {
            "id": file.stem,
            "audio": str(file),
            "text": WORDS[int(name["digit"])],
            "speaker": name["speaker"],
            "split": "test" if int(name["index"]) < TEST_RECORDINGS else "train",
        }
        for file, name in named
        if name and (speakers is None or name["speaker"] in speakers)
    ]
    if not found:
        sys.exit(
            f"no recordings {{digit}}_{{speaker}}_{{index}}.wav of {speakers} in {str(path)!r}"
        )
    return found


class Fbanks(featcache.EnvironmentProvider):
    """Computes log-mel energies of recordings, one at a time."""

    def __init__(self, recordings: list[Item], mels: int) -> None:
        self.recordings, self.mels = recordings, mels

    def build_env_local(self) -> dict[str, object]:
        """Open the recordings."""
        dataset = featcache.utterances(self.recordings, audio="audio")
        return {"dataset": dataset, "compute_features": self.compute}

    def compute(self, batch: list[Item]) -> list[Item]:
        """Compute of each recording "fbank", float32 (frames, mels), natural log, every 10 ms."""
        computed = []
        for item in batch:
            samples = torch.from_numpy(item["samples"])[None] * 32768
            options = {"num_mel_bins": self.mels, "sample_frequency": item["sample_rate_hz"]}
            computed.append(
                {"id": item["id"], "fbank": kaldi.fbank(samples, dither=0.0, **options)}
            )
        return computed


class Augment:
    """Sets a span and a band of each utterance to the mean, and names its digit by number."""

    def __init__(self, mean: torch.Tensor, *, frames: int, mels: int) -> None:
        self.mean, self.most = mean, (frames, mels)

    def __call__(self, item: Item, rng: np.random.Generator) -> Item:
        """Change an item; `rng` depends on seed, epoch and row, so a resumed run draws the same."""
        fbank = item["fbank"]
        frames, mels = rng.integers(np.minimum(self.most, fbank.shape) + 1)
        frame, mel = rng.integers(np.array(fbank.shape) - (frames, mels) + 1)
        fbank[frame : frame + frames] = self.mean
        fbank[:, mel : mel + mels] = self.mean[mel : mel + mels]
        return labelled(item, rng)


def labelled(item: Item, rng: np.random.Generator) -> Item:
    """Add the digit of an item as a number."""
    return {**item, "digit": WORDS.index(item["text"])}


# Model


class Classifier(torch.nn.Module):
    """Attends within each utterance of a packed batch, and takes the mean of its frames."""

    def __init__(
        self, mvn: torch.nn.Module, mels: int, *, width: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.mvn, self.heads = mvn, heads
        self.frames = torch.nn.Sequential(
            torch.nn.Linear(mels, width), torch.nn.ReLU(), torch.nn.Dropout(dropout)
        )
        self.place = torch.nn.Embedding(1000, width)  # of a frame in its utterance
        self.qkv, self.mixed = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.norm, self.digits = torch.nn.LayerNorm(width), torch.nn.Linear(width, len(WORDS))

    def forward(self, fbank: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Turn frames, (sum of frames, mels), into scores, (utterances, digits)."""
        frame = torch.arange(len(fbank))
        utterance = torch.bucketize(frame, cu_seqlens[1:], right=True)
        x = self.frames(self.mvn(fbank)) + self.place(frame - cu_seqlens[utterance])
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        # docs/guides/batches.md has attention that skips what is masked
        same = utterance[:, None] == utterance
        attended = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        x = self.norm(x + self.mixed(attended.transpose(0, 1).flatten(1)))
        scores: torch.Tensor = self.digits(
            torch.segment_reduce(x, "mean", offsets=cu_seqlens.long())
        )
        return scores


# Training


class Run:
    """Model, optimiser and place in the data: what a run that is killed goes on with."""

    def __init__(
        self, model: Classifier, loader: featcache.FeatureLoader[Item], settings: Item
    ) -> None:
        self.model, self.loader, self.settings = model, loader, settings
        self.optimizer = torch.optim.AdamW(model.parameters(), settings["learning_rate"])
        self.folder = Path(settings["output_folder"])
        self.step = self.epoch = 0

    def load(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        if not (path := self.folder / "checkpoint.pt").exists():
            return
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["torch_rng"])  # of dropout
        self.step, self.epoch = state["step"], state["epoch"]
        print(f"goes on after step {self.step}")

    def save(self) -> None:
        """Save a checkpoint: written aside, then renamed, so that there always is a whole one."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "torch_rng": torch.get_rng_state(),
            "step": self.step,
            "epoch": self.epoch,
        }
        torch.save(state, self.folder / "checkpoint.partial")
        (self.folder / "checkpoint.partial").replace(self.folder / "checkpoint.pt")

    def train(self) -> None:
        """Train for the epochs of the settings, and note the loss of each step."""
        self.model.train()
        with (self.folder / "losses.jsonl").open("a", buffering=1) as losses:
            for epoch in range(self.epoch, self.settings["epochs"]):
                self.epoch = epoch
                for batch in self.loader:  # after `load` what was left of the epoch
                    note = {"epoch": self.epoch, "loss": self.update(batch), "ids": batch["id"]}
                    self.step += 1
                    losses.write(json.dumps({"step": self.step, **note}) + "\n")
                    if self.step % self.settings["checkpoint_steps"] == 0:
                        self.save()

    def update(self, batch: Item) -> float:
        """Take a step of the optimiser, and return the loss."""
        scores = self.model(batch["fbank"], batch["fbank_cu_seqlens"])
        loss = cross_entropy(scores, batch["digit"])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()


def accuracy(model: Classifier, table: featcache.FeatureTable, max_frames: int) -> float:
    """Share of the utterances whose digit the model finds."""
    model.eval()
    sampler = PackedBatchSampler(table, max_frames=max_frames, shuffle=False)
    loader = featcache.FeatureLoader(
        table, batch_sampler=sampler, annotations="text", transform=labelled
    )
    with torch.no_grad():
        found = sum(
            int(
                (model(batch["fbank"], batch["fbank_cu_seqlens"]).argmax(1) == batch["digit"]).sum()
            )
            for batch in loader
        )
    return found / len(table)


# The run


def load_settings(file: str, *overrides: str) -> Item:
    """Read the settings; `--name value` on the command line takes the place of one."""
    if len(overrides) % 2:
        sys.exit(f"settings are given as --name value; {overrides[-1]!r} has none")
    names = [name.removeprefix("--") for name in overrides[::2]]
    pairs = zip(names, overrides[1::2], strict=True)
    settings: Item = load_hyperpyyaml(Path(file).read_text())
    if unknown := sorted(set(names) - set(settings)):
        sys.exit(f"no settings {', '.join(unknown)}; there are {', '.join(settings)}")
    settings |= load_hyperpyyaml("\n".join(f"{name}: {value}" for name, value in pairs)) or {}
    return settings


def main(arguments: list[str]) -> None:
    """Run the recipe."""
    settings = load_settings(*arguments)
    folder, max_frames = Path(settings["output_folder"]), settings["max_frames"]
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])

    # 1. Cache each corpus; what is cached is not computed again.
    corpora = {}
    for name, corpus in settings["corpora"].items():
        found = find(Path(corpus["path"]), corpus["speakers"], folder / "corpora")
        corpora[name] = featcache.extract(
            Fbanks(found, settings["mels"]),
            folder / "features" / name,
            [featcache.FeatureStorageConfig("fbank", frame_s=0.01)],
            batch_size=16,
            annotations=["text", "speaker", "split"],
        )

    # 2. Train on the mix. The sampler takes the data set, which knows how long crops are.
    table = featcache.mix(
        {name: view.filter(split="train") for name, view in corpora.items()}, **settings["mix"]
    )
    mvn = featcache.GlobalMVN.from_cache(table, "fbank")
    dataset = featcache.FeatureDataset(
        table,
        annotations=["text"],
        random_crop_s=settings["random_crop_s"],
        transform=Augment(mvn.mean, **settings["masked"]),
        layout="packed",
    )
    sampler = PackedBatchSampler(dataset, max_frames=max_frames, seed=settings["seed"])
    model = Classifier(mvn, settings["mels"], **settings["model"])
    run = Run(model, featcache.FeatureLoader(dataset, batch_sampler=sampler), settings)
    print(f"{table.plan}; fill of batches {sampler.fill:.3f}")
    run.load()
    run.train()
    torch.save(model.state_dict(), folder / "model.pt")

    # 3. Test on each corpus.
    for name, view in corpora.items():
        share = accuracy(model, view.filter(split="test"), max_frames)
        print(f"accuracy on {name}: {share:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Caches features of a small corpus and trains on them.

python train.py hparams.yaml --data_folder data --output_folder results
"""

import json
import logging
import os
import sys
from pathlib import Path

import brain_ways
import helpers
import numpy as np
import rightness_ways
import speechbrain as sb
import torch
from helpers import emphasise
from hyperpyyaml import load_hyperpyyaml
from lobes.base import FeatureBrain
from lobes.frontend import Frontend, smooth, taper
from lobes.prosody import Prosody, pitch_track
from models import Adapter
from speechbrain.dataio.dataset import DynamicItemDataset

import featcache

logger = logging.getLogger(__name__)

GAIN = 2.0
MEL_OFFSET = {"low": 0.5, "high": 0.25}
STEPS = [smooth, taper]
SILENCE = np.linspace(0.0, 0.1, 20, dtype=np.float32)
REPORT_EVERY = 100


def make_limiter(limit):
    """Return a function that limits values softly."""

    def limiter(values):
        return limit * torch.tanh(values / limit)

    return limiter


def audio_pipeline(wav, start, stop):
    """Load the part of a recording that an entry names."""
    sig, rate = helpers.load(wav, int(start), int(stop))
    sig = helpers.remove_offset(sig)
    return sig


def text_pipeline(text):
    """Turn letters into numbers."""
    return torch.LongTensor([ord(letter) - 96 for letter in text])


class Recogniser(featcache.FeatureCacheMixin, FeatureBrain, sb.Brain):
    """Letters from features."""

    mel_scale = 0.5
    ladder = (1.0, 2.0, 4.0)

    def compute_features(self, batch, stage):
        """Compute the features of a batch, one utterance at a time."""
        utterances = []
        for id, sig, samples, speaker in zip(
            batch.id, batch.sig.data, batch.num_samples, batch.speaker
        ):
            wav = emphasise(sig[:samples], self.hparams.emphasis)
            wav = GAIN * wav
            utterance = {"id": id}
            utterance["fbank"] = self.mel_energies(wav)
            hidden = self.encode(wav)
            utterance["ssl"] = hidden
            utterance["units"] = self.hparams.quantiser(hidden)
            utterance["tokens"] = self.tokenise(utterance["fbank"])
            utterance["prosody"] = self.prosody(wav, speaker)
            utterances.append(utterance)
        return utterances

    def mel_energies(self, wav):
        """Log-mel energies, compressed and smoothed."""
        fbank = self.modules.fbank(wav[None])
        fbank = self.modules.normalize(fbank, torch.ones(1))[0]
        fbank = self.hparams.compress(fbank)
        fbank = helpers.TRANSFORMS[self.hparams.transform](fbank)
        for step in STEPS:
            fbank = step(fbank)
        fbank = self.limiter(fbank * self.mel_scale)
        if self.hparams.use_context:
            fbank = helpers.with_context(fbank, self.hparams.context)
        fbank = self.frontend(fbank)
        return fbank + MEL_OFFSET["low"] + torch.from_numpy(SILENCE)

    def encode(self, wav):
        """Hidden states of the frozen encoder, scaled."""
        inputs = self.hparams.processor(wav)
        hidden = self.modules.encoder(inputs[None])[0]
        hidden = self.modules.adapter(hidden)
        hidden = self.scale_layers(hidden)
        return self.bias + hidden

    def tokenise(self, fbank):
        """Nearest cluster of each frame."""
        frames = np.ascontiguousarray(fbank.cpu().numpy()[:, :20], dtype=np.float32)
        return self.hparams.kmeans.predict(frames).astype(np.int16)

    def compute_forward(self, batch, stage):
        """Return log probabilities of letters."""
        batch = batch.to(self.device)
        feats, lengths = batch.fbank
        feats = self.hparams.augment(feats)
        return self.modules.classifier(self.modules.dropout(feats))

    def compute_objectives(self, predictions, batch, stage):
        """Return the loss."""
        return predictions.logsumexp(dim=-1).mean()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        """Report the loss."""
        logger.info("epoch %s: loss %.3f", epoch, stage_loss)


def open_dataset(data_folder):
    """Open the corpus."""
    dataset = DynamicItemDataset.from_json(
        Path(data_folder) / "manifest.json", replacements={"data_root": str(data_folder)}
    )
    dataset.add_dynamic_item(audio_pipeline, takes=["wav", "start", "stop"], provides="sig")
    dataset.add_dynamic_item(len, takes="sig", provides="num_samples")
    dataset.add_dynamic_item(text_pipeline, takes="text", provides="letters")
    dataset.set_output_keys(["id", "sig", "num_samples", "speaker"])
    return dataset


def main(arguments):
    """Run the recipe."""
    hparams_file, run_opts, overrides = sb.parse_arguments(arguments)
    with Path(hparams_file).open() as file:
        hparams = load_hyperpyyaml(file, overrides)
    torch.manual_seed(hparams["seed"])
    Path(hparams["output_folder"]).mkdir(parents=True, exist_ok=True)
    hparams["pretrainer"].collect_files()
    hparams["pretrainer"].load_collected()
    hparams["modules"]["adapter"] = Adapter(hparams["encoder_dim"], rank=4)

    dataset = open_dataset(hparams["data_folder"])
    brain = Recogniser(hparams["modules"], hparams["opt_class"], hparams, run_opts)
    brain.limiter = make_limiter(hparams["limit"])
    brain.frontend = Frontend(width=3, weights=[0.25, 0.5, 0.25])
    speakers = json.loads((Path(hparams["data_folder"]) / "speakers.json").read_text())
    brain.prosody = Prosody(speakers, tracker=pitch_track, shift=hparams["prosody_shift"])
    brain.bias = torch.full((hparams["encoder_dim"],), 0.1)
    brain.note = "first try"
    if os.environ.get("HALF_SCALE"):
        brain.mel_scale = brain.mel_scale / 2
    logger.info("computing the features of %d utterances", len(dataset))
    rightness_ways.each(brain_ways.WAYS, brain, dataset, hparams)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Caches HuBERT layers, MFCCs, units and letters of a folder of recordings, without SpeechBrain.

python extract.py --data data --output results --layer 2
"""

import argparse
import logging
import operator
import sys
from functools import partial, reduce
from pathlib import Path

import features
import numpy as np
import plain_ways
import rightness_ways
import torch
from corpus import Recordings
from encoders import load_encoder
from features import clip, mfcc_of
from textual import letters_of

import featcache

CLIP_AT = 40.0
CHAIN = (partial(clip, limit=CLIP_AT), features.REGISTRY["lifter"], lambda frames: frames * 1.25)
DTYPE = torch.float32
log = logging.getLogger("extract")


class Extractor:
    """Everything that computes, built once in each worker."""

    window = "hann"

    def __init__(self, settings):
        self.settings = settings
        self.encoder, self.feature_extractor = load_encoder(settings.data / "hubert")
        self.scaler = features.load_pickled(settings.data / "scaler.joblib")
        self.pca = features.load_pickled(settings.data / "pca.joblib")
        self.clusters = features.load_pickled(settings.data / "clusters.joblib")
        self.letters = letters_of(settings.data / "vocab.json")
        self.post = features.compose(features.center, features.Scale(0.5))
        self.masks = {"mfcc": np.ones(13, dtype=np.float32)}
        self.history = []
        self.resampler = features.make_resampler(8000, settings.rate)

    def __call__(self, items):
        results = []
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.settings.half):
            for item in items:
                results.append(self.compute(item))
        self.history.append(len(results))
        return results

    def compute(self, item):
        """Compute all features of one recording."""
        wav = self.resampler(item["wav"])
        mfcc = reduce(lambda frames, step: step(frames), CHAIN, mfcc_of(wav, self.window))
        mfcc = mfcc * self.masks["mfcc"]
        mfcc = self.scaler.transform(mfcc).astype(np.float32)
        hidden = self.hidden(wav)
        units = self.clusters.predict(self.pca.transform(hidden.numpy()).astype(np.float32))
        pick = operator.itemgetter("text")
        return {
            "id": item["id"],
            "mfcc": mfcc,
            "hubert": self.post(hidden),
            "units": units.astype(np.int16),
            "letters": self.letters(pick(item)),
        }

    def hidden(self, wav):
        """One layer of HuBERT."""
        inputs = self.feature_extractor(wav, sampling_rate=16000, return_tensors="pt")
        outputs = self.encoder(inputs.input_values, output_hidden_states=True)
        return outputs.hidden_states[self.settings.layer][0].to(DTYPE)


class Environment(featcache.EnvironmentProvider):
    """Builds the data set and the extractor."""

    def __init__(self, settings):
        self.settings = settings

    def build_env_local(self):
        """Build what each worker needs."""
        dataset = Recordings(self.settings.data, trim=self.settings.trim)
        extractor = Extractor(self.settings)
        return {
            "dataset": dataset,
            "ids": dataset.ids,
            "compute_features": extractor,
        }


def parse(arguments):
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layer", type=int, default=2)
    parser.add_argument("--rate", type=int, default=8000)
    parser.add_argument("--trim", type=float, default=0.002)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quiet", action="store_true")
    return parser.parse_args(arguments)


def main(arguments):
    """Cache the features."""
    settings = parse(arguments)
    torch.manual_seed(settings.seed)
    rightness_ways.each(plain_ways.WAYS, Environment(settings), settings)
    log.info("cached %d recordings", len(Recordings(settings.data)))


if __name__ == "__main__":
    main(sys.argv[1:])

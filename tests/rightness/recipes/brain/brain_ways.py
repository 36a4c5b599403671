"""Ways into a cache of the features of the Brain."""

from functools import partial

import speechbrain as sb
import torch
from speechbrain.dataio.batch import PaddedBatch
from speechbrain.utils.data_pipeline import provides, takes
from torch.utils.data import DataLoader, Dataset

import featcache

KEYS = ("id", "sig", "num_samples", "speaker")
NAMES = ("fbank", "ssl", "units", "tokens", "prosody")


def by_mixin(brain, dataset, hparams, path, **more):
    """Let the Brain cache its features."""
    storage = featcache.FeatureStorage(path.parent, hparams["storage"].features)
    settings = {"storage": storage, "loader_kwargs": hparams["cache_loader"]}
    brain.cache_features(dataset, split=path.name, **settings, **more)


def on_dask(brain, dataset, hparams, path):
    """Let a worker of a cluster compute."""
    by_mixin(brain, dataset, hparams, path, parallel={"env": "local", "n_workers": 1})


class Environment(featcache.EnvironmentProvider):
    """Holds what computes."""

    def __init__(self, brain, dataset):
        self.brain, self.dataset = brain, dataset

    def build_env_local(self):
        """Name the parts."""
        compute = partial(self.brain.compute_features, stage=sb.Stage.TRAIN)
        return {"dataset": self.dataset, "compute_features": compute, "collate_fn": PaddedBatch}


def by_extract(brain, dataset, hparams, path):
    """Take the method of the Brain, without the mixin."""
    brain.modules.eval()
    size = hparams["cache_loader"].get("batch_size", 1)
    features = hparams["storage"].features
    featcache.extract(
        Environment(brain, dataset), path, features, batch_size=size, progressbar=False
    )


class Items(Dataset):
    """A data set of features."""

    def __init__(self, dataset, brain):
        self.dataset, self.brain = dataset, brain

    @property
    def ids(self):
        """The ids of the utterances."""
        return self.dataset.data_ids

    def __len__(self):
        return len(self.dataset)

    @torch.no_grad()
    def __getitem__(self, number):
        batch = PaddedBatch([self.dataset[number]])
        (utterance,) = self.brain.compute_features(batch, sb.Stage.TRAIN)
        return {name: utterance[name] for name in NAMES}


def by_data_set(brain, dataset, hparams, path):
    """Read a data set through a cache."""
    brain.modules.eval()
    items = Items(dataset, brain)
    with featcache.through(path, items, features=hparams["storage"].features) as read:
        for number in range(len(read)):
            read[number]


def by_function(brain, dataset, hparams, path):
    """Call a function through a cache, with what the data set loads."""
    brain.modules.eval()

    @torch.no_grad()
    def features(id, sig, num_samples, speaker):
        item = {"id": id, "sig": sig, "num_samples": num_samples, "speaker": speaker}
        (utterance,) = brain.compute_features(PaddedBatch([item]), sb.Stage.TRAIN)
        return {name: utterance[name] for name in NAMES}

    with featcache.through(path, features, features=hparams["storage"].features) as read:
        for item in dataset:
            read(*(item[key] for key in KEYS))
        read.publish(complete=True)


def by_decorator(brain, dataset, hparams, path, **loader):
    """Decorate a dynamic item, and go over the data set."""
    brain.modules.eval()

    @featcache.cache(path, features=hparams["storage"].features)
    @takes(*KEYS)
    @provides(*NAMES)
    @torch.no_grad()
    def features(id, sig, num_samples, speaker):
        item = {"id": id, "sig": sig, "num_samples": num_samples, "speaker": speaker}
        (utterance,) = brain.compute_features(PaddedBatch([item]), sb.Stage.TRAIN)
        return tuple(utterance[name] for name in NAMES)

    dataset.add_dynamic_item(features)
    dataset.set_output_keys(["id", *NAMES])
    for _ in DataLoader(dataset, batch_size=4, collate_fn=list, **loader):
        pass
    features.func.publish(complete=True)
    features.func.close()


def in_workers(brain, dataset, hparams, path):
    """Go over the data set in the workers of a loader."""
    by_decorator(brain, dataset, hparams, path, num_workers=2)


def truly(brain, dataset, hparams, path):
    """Compute the features as they are now."""
    by_mixin(brain, dataset, hparams, path, check=None)


WAYS = {
    "mixin": by_mixin,
    "extract": by_extract,
    "data set": by_data_set,
    "function": by_function,
    "decorator": by_decorator,
    "workers": in_workers,
    "dask": on_dask,
    "truth": truly,
}

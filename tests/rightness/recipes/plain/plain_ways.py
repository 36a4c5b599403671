"""Ways into a cache of the features of a folder of recordings."""

import torch
from torch.utils.data import DataLoader, Dataset

import featcache

DECLARED = [
    featcache.FeatureStorageConfig("mfcc"),
    featcache.FeatureStorageConfig("hubert"),
    featcache.FeatureStorageConfig("units", dtype="int16"),
    featcache.FeatureStorageConfig("letters", dtype="int16"),
]
NAMES = [feature.name for feature in DECLARED]


def by_extract(environment, settings, path, **more):
    """Compute what the environment describes."""
    size, bar = settings.batch_size, not settings.quiet
    featcache.extract(environment, path, DECLARED, batch_size=size, progressbar=bar, **more)


def on_dask(environment, settings, path):
    """Let a worker of a cluster compute."""
    by_extract(environment, settings, path, parallel={"env": "local", "n_workers": 1})


class Cached(featcache.FeatureCacheMixin):
    """An object that is no Brain, and caches its features."""

    def __init__(self, extractor):
        self.modules, self.device = {"encoder": extractor.encoder}, "cpu"
        self.extractor = extractor

    def compute_features(self, batch, stage):
        """Compute the features of a batch."""
        return self.extractor(batch)


def by_mixin(environment, settings, path):
    """Give an object the mixin."""
    env = environment.build_env_local()
    storage = featcache.FeatureStorage(path.parent, DECLARED)
    loader = {"batch_size": settings.batch_size, "collate_fn": list}
    Cached(env["compute_features"]).cache_features(
        env["dataset"], split=path.name, storage=storage, loader_kwargs=loader, progressbar=False
    )


class Items(Dataset):
    """A data set of features."""

    def __init__(self, recordings, extractor):
        self.recordings, self.extractor = recordings, extractor
        self.ids = recordings.ids

    def __len__(self):
        return len(self.ids)

    @torch.no_grad()
    def __getitem__(self, number):
        (result,) = self.extractor([self.recordings[number]])
        return {name: result[name] for name in NAMES}


def by_data_set(environment, settings, path):
    """Read a data set through a cache."""
    env = environment.build_env_local()
    items = Items(env["dataset"], env["compute_features"])
    with featcache.through(path, items, features=DECLARED) as read:
        for number in range(len(read)):
            read[number]


def by_function(environment, settings, path):
    """Call a function of the id through a cache."""
    env = environment.build_env_local()
    recordings, extractor = env["dataset"], env["compute_features"]

    @torch.no_grad()
    def features(id):
        (result,) = extractor([recordings[recordings.ids.index(id)]])
        return {name: result[name] for name in NAMES}

    with featcache.through(path, features, features=DECLARED) as read:
        for id in recordings.ids:
            read(id)
        read.publish(complete=True)


class Training(Dataset):
    """Recordings, and features of these."""

    def __init__(self, recordings, features):
        self.recordings, self.features = recordings, features

    def __len__(self):
        return len(self.recordings)

    def __getitem__(self, number):
        item = self.recordings[number]
        return self.features(item["id"], item["wav"], item["text"], item["note"])


def by_decorator(environment, settings, path, **loader):
    """Decorate a function that takes what is loaded."""
    env = environment.build_env_local()
    extractor = env["compute_features"]

    @featcache.cache(path, features=DECLARED)
    @torch.no_grad()
    def features(id, wav, text, note):
        (result,) = extractor([{"id": id, "wav": wav, "text": text, "note": note}])
        return {name: result[name] for name in NAMES}

    training = Training(env["dataset"], features)
    for _ in DataLoader(training, batch_size=4, collate_fn=list, **loader):
        pass
    features.publish(complete=True)
    features.close()


def in_workers(environment, settings, path):
    """Go over the data set in the workers of a loader."""
    by_decorator(environment, settings, path, num_workers=2)


def truly(environment, settings, path):
    """Compute the features as they are now."""
    by_extract(environment, settings, path, check=None)


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

"""Units by a codebook."""

import numpy as np
import torch


class Quantiser:
    """Names each frame by the nearest entry of a codebook."""

    def __init__(self, path, metric="euclidean"):
        self.path = path
        self.metric = metric
        self.codebook = np.load(path)
        self.skip = set()
        self.weights = np.ones(self.codebook.shape[1], dtype=np.float32)

    def __call__(self, frames):
        return self._distances(frames).argmin(dim=1)

    def _distances(self, frames):
        entries = torch.from_numpy(self.codebook)
        weights = torch.from_numpy(self.weights)
        if self.metric == "cosine":
            return -torch.nn.functional.normalize(frames) @ torch.nn.functional.normalize(entries).T
        distances = torch.cdist(frames * weights, entries * weights)
        for entry in self.skip:
            distances[:, entry] = torch.inf
        return distances

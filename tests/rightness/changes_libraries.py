"""Other versions of libraries, simulated: a function is patched, and the version is another."""

from __future__ import annotations

from rightness_changes import Change, Patch

VERSION = """
import importlib.metadata, {library} as library
library.__version__ = "99.1"
version = importlib.metadata.version
importlib.metadata.version = lambda name: "99.1" if name == {distribution!r} else version(name)
"""
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # others have the name of their module


def upgrade(library: str, code: str = "") -> Patch:
    """Load a library as if it had been upgraded to version 99.1."""
    distribution = DISTRIBUTIONS.get(library, library)
    return Patch(VERSION.format(library=library, distribution=distribution) + code)


def wrapped(library: str, place: str, function: str, result: str) -> Patch:
    """Upgrade a library, one of whose functions returns something else."""
    return upgrade(
        library,
        f"import {place.split(':')[0]} as place\n"
        + (f"place = place.{place.split(':')[1]}\n" if ":" in place else "")
        + f"old = place.{function}\n"
        + f"def {function}(*arguments, **options):\n"
        + "    result = old(*arguments, **options)\n"
        + f"    return {result}\n"
        + f"place.{function} = {function}\n",
    )


def library(name: str, words: str, patch: Patch, recipe: str = "brain") -> Change:
    """Upgrade a library."""
    return Change(name, "libraries", (patch,), tuple(words.split()), recipe=recipe)


READ = "speechbrain.dataio.dataio"
FEATURES = "speechbrain.processing.features"
CHANGES = [
    library(
        "speechbrain reads audio scaled",
        "speechbrain read_audio sig",
        wrapped("speechbrain", READ, "read_audio", "result * 0.5"),
    ),
    library(
        "speechbrain's STFT",
        "speechbrain STFT",
        wrapped("speechbrain", f"{FEATURES}:STFT", "forward", "result * 1.5 + 0.1"),
    ),
    library(
        "speechbrain's filters",
        "speechbrain Filterbank",
        wrapped("speechbrain", f"{FEATURES}:Filterbank", "_triangular_filters", "result ** 2"),
    ),
    library(
        "speechbrain's magnitudes",
        "speechbrain spectral_magnitude",
        wrapped("speechbrain", "speechbrain.lobes.features", "spectral_magnitude", "result ** 0.5"),
    ),
    library(
        "torch's leaky_relu",
        "torch leaky_relu",
        wrapped("torch", "torch.nn.functional", "leaky_relu", "result * 1.1"),
    ),
    library("torch's tanh", "torch tanh", wrapped("torch", "torch", "tanh", "result * 0.9")),
    library(
        "torch's cdist",
        "torch cdist",
        wrapped("torch", "torch", "cdist", "result * place.linspace(1, 2, result.shape[-1])"),
    ),
    library(
        "torch's convolution",
        "torch Conv1d",
        wrapped("torch", "torch.nn:Conv1d", "_conv_forward", "result + 0.1"),
    ),
    library(
        "scikit-learn's k-means",
        "sklearn scikit predict",
        wrapped("sklearn", "sklearn.cluster:MiniBatchKMeans", "predict", "result[::-1]"),
    ),
    library(
        "numpy's linspace",
        "numpy linspace SILENCE",
        wrapped("numpy", "numpy", "linspace", "result * 2"),
    ),
    library(
        "torchaudio's MFCC",
        "torchaudio MFCC",
        wrapped("torchaudio", "torchaudio.transforms:MFCC", "forward", "result - 1"),
        "plain",
    ),
    library(
        "transformers' normalisation",
        "transformers zero_mean_unit_var_norm",
        wrapped(
            "transformers",
            "transformers:Wav2Vec2FeatureExtractor",
            "__call__",
            "(setattr(result, 'data', {k: v * 2 for k, v in result.items()}), result)[1]",
        ),
        "plain",
    ),
    library(
        "transformers' HuBERT",
        "transformers HubertFeatureProjection HubertModel",
        wrapped(
            "transformers",
            "transformers.models.hubert.modeling_hubert:HubertFeatureProjection",
            "forward",
            "result * 1.5",
        ),
        "plain",
    ),
    library(
        "scipy's filter",
        "scipy lfilter",
        wrapped("scipy", "scipy.signal", "lfilter", "result ** 3"),
        "plain",
    ),
    library(
        "soundfile's read",
        "soundfile read wav",
        wrapped("soundfile", "soundfile", "read", "(result[0][::-1], result[1])"),
        "plain",
    ),
    library(
        "scikit-learn's PCA",
        "sklearn scikit PCA transform",
        wrapped("sklearn", "sklearn.decomposition:PCA", "transform", "-result"),
        "plain",
    ),
]

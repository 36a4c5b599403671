"""Changes of objects and attributes that matter, of whatever kind users keep beside modules."""

from __future__ import annotations

from changes_code import TRAIN
from changes_data import rewrite_array, rewrite_pickled
from rightness_changes import Change, Do, Edit, Replace

MADE = '    brain.note = "first try"\n'


def objects(name: str, words: str, *edits: Edit) -> Change:
    """Change an object of the recipe."""
    return Change(name, "objects", edits, tuple(words.split()))


def then(line: str) -> Replace:
    """Add a line after the Brain is made."""
    return Replace(TRAIN, MADE, f"{MADE}    {line}\n")


def yaml(old: str, new: str) -> Replace:
    """Change the YAML."""
    return Replace("hparams.yaml", old, new)


KMEANS = "kmeans cluster_centers_"
CHANGES = [
    objects(
        "an entry of the codebook",
        "codebook quantiser",
        Do(rewrite_array, ("codebook.npy", "it[17] += 1")),
    ),
    objects(
        "the codebook in the script",
        "codebook quantiser",
        then('hparams["quantiser"].codebook[7] -= 0.5'),
    ),
    objects(
        "another type of codebook",
        "codebook quantiser",
        Do(rewrite_array, ("codebook.npy", "it = it.round(0)")),
    ),
    objects("an entry is skipped", "skip quantiser", then('hparams["quantiser"].skip.add(17)')),
    objects(
        "a weight of the distance",
        "weights quantiser",
        then('hparams["quantiser"].weights[:8] = 0'),
    ),
    objects("the metric", "metric quantiser", yaml("metric: euclidean", "metric: cosine")),
    objects(
        "k-means centres moved",
        KMEANS,
        Do(rewrite_pickled, ("kmeans.joblib", "it.cluster_centers_[2:5] += 0.5")),
    ),
    objects(
        "k-means centres in another order",
        KMEANS,
        Do(
            rewrite_pickled,
            ("kmeans.joblib", "it.cluster_centers_ = it.cluster_centers_[::-1].copy()"),
        ),
    ),
    objects(
        "k-means fitted again",
        KMEANS,
        Do(
            rewrite_pickled,
            (
                "kmeans.joblib",
                "it.random_state = 1; it.fit(np.random.default_rng(1).normal(1, 1, (500, "
                "20)).astype('f4'))",
            ),
        ),
    ),
    objects(
        "k-means centres in the script",
        KMEANS,
        then('hparams["kmeans"].cluster_centers_ *= np.float32(0.8)'),
    ),
    objects(
        "the processor no longer normalises",
        "processor do_normalize",
        yaml("do_normalize: True", "do_normalize: False"),
    ),
    objects("the processor's mean", "processor mean", yaml("mean: [0.0]", "mean: [0.1]")),
    objects("the processor's deviation", "processor std", yaml("std: [0.5]", "std: [0.6]")),
    objects(
        "a nested option of the processor",
        "processor options epsilon",
        then('hparams["processor"].options["epsilon"] = 0.1'),
    ),
    objects(
        "an option two levels down",
        "processor options dither amount",
        then('hparams["processor"].options["dither"]["amount"] = 0.1'),
    ),
    objects(
        "a method of one object is replaced",
        "processor _dither",
        then('hparams["processor"]._dither = lambda wav: 0.1'),
    ),
    objects(
        "a method of a class is replaced",
        "Processor processor _dither",
        then('type(hparams["processor"])._dither = lambda self, wav: 0.2'),
    ),
    objects(
        "weights of the frontend",
        "frontend weights kernel",
        Replace(TRAIN, "[0.25, 0.5, 0.25]", "[0.2, 0.6, 0.2]"),
    ),
    objects("the frontend's gain", "frontend gain", then("brain.frontend.gain = 1.5")),
    objects(
        "the frontend's kernel", "frontend kernel", then("brain.frontend.kernel[0, 0, 1] = 0.7")
    ),
    objects("another order of columns", "prosody columns", then("brain.prosody.columns.reverse()")),
    objects(
        "a value in a table of the script", "speakers ada prosody", then('speakers["ada"] += 1')
    ),
    objects(
        "another tracker",
        "prosody tracker",
        then("brain.prosody.tracker = lambda frames: frames[:, 0]"),
    ),
    objects(
        "a partial for a closure",
        "limiter clamp",
        then("from functools import partial; brain.limiter = partial(torch.clamp, max=1.0)"),
    ),
    objects("a tensor attribute", "bias", then("brain.bias[3] = 2.0")),
    objects("an attribute over one of the class", "mel_scale", then("brain.mel_scale = 0.6")),
    objects(
        "an attribute of a base class", "layer_name", then('FeatureBrain.layer_name = "first"')
    ),
    objects(
        "a method of the Brain is replaced",
        "encode",
        then("brain.encode = lambda wav: torch.ones(5, 16) * wav.mean()"),
    ),
    objects("the partial in the YAML", "compress floor", yaml("floor: 0.01", "floor: 0.5")),
    objects(
        "another function in the YAML",
        "compress",
        yaml("!name:helpers.compress", "!name:helpers.weaken"),
        Replace(
            "helpers.py",
            "def _square(",
            "def weaken(values, power, floor):\n"
            "    return values.abs().log1p() * power\n\n\ndef _square(",
        ),
    ),
]

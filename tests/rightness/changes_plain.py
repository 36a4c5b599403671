"""Changes that matter of the recipe without SpeechBrain: code, settings and objects."""

from __future__ import annotations

from changes_data import rewrite_json, rewrite_pickled
from rightness_changes import Argument, Change, Do, Edit, Environ, Replace

EXTRACT, FEATURES, CORPUS = "extract.py", "features.py", "corpus.py"
ENCODERS, TEXTUAL = "encoders.py", "textual.py"


def code(file: str, old: str, new: str, *words: str) -> Change:
    """Replace a text."""
    name = f"{file}: {old.strip()[:40]} -> {new.strip()[:40]}"
    return Change(name, "code", (Replace(file, old, new),), words, recipe="plain")


def plain(kind: str, name: str, edit: Edit, *words: str) -> Change:
    """Make one edit."""
    return Change(name, kind, (edit,), words, recipe="plain")


CODE = [
    code(EXTRACT, "CLIP_AT = 40.0", "CLIP_AT = 8.0", "CLIP_AT", "CHAIN", "limit"),
    code(EXTRACT, 'REGISTRY["lifter"]', 'REGISTRY["flat"]', "CHAIN", "lifter", "flat"),
    code(EXTRACT, "frames * 1.25", "frames * 1.5", "CHAIN"),
    code(EXTRACT, "torch.float32", "torch.float16", "DTYPE"),
    code(EXTRACT, 'window = "hann"', 'window = "hamming"', "window"),
    code(EXTRACT, "mfcc = mfcc * self", "mfcc = mfcc - self", "compute", "Extractor"),
    code(EXTRACT, "features.Scale(0.5)", "features.Scale(0.6)", "Scale", "factor", "post"),
    code(EXTRACT, "features.center, ", "", "post", "compose", "center"),
    code(EXTRACT, "np.ones(13, dtype=np.float32)", "np.arange(13.0)", "masks"),
    code(EXTRACT, 'itemgetter("text")', 'itemgetter("note")', "compute", "itemgetter", "note"),
    code(EXTRACT, "[self.settings.layer]", "[self.settings.layer - 1]", "hidden", "layer"),
    code(EXTRACT, "trim=self.settings.trim", "trim=0.01", "trim"),
    code(FEATURES, "LIFTER = 22", "LIFTER = 24", "LIFTER"),
    code(FEATURES, '"hann": torch.hann_window', '"hann": torch.bartlett_window', "mfcc_of"),
    code(FEATURES, '"n_mels": 24', '"n_mels": 30', "mfcc_of", "n_mels"),
    code(FEATURES, "0.5 * values.mean", "0.6 * values.mean", "center"),
    code(FEATURES, "values * self.factor", "values / self.factor", "Scale"),
    code(FEATURES, "[1.0, -1.0], [", "[1.0, -0.9], [", "_dc_filter"),
    code(FEATURES, "np.clip(frames, -limit, limit)", "limit * np.tanh(frames / limit)", "clip"),
    code(
        FEATURES,
        "        REGISTRY[name] = function\n",
        "        REGISTRY[name] = lambda frames: 2 * function(frames)\n",
        "register",
        "lifter",
        "REGISTRY",
    ),
    code(
        FEATURES,
        "            values = function(values)",
        "            values = function(values) + 0.1",
        "composed",
        "compose",
    ),
    code(CORPUS, "PEAK = 0.9", "PEAK = 0.5", "PEAK", "wav"),
    code(CORPUS, "np.abs(wav).max()", "wav.std()", "normalise", "wav"),
    code(CORPUS, "wav[skipped : len(wav) - skipped]", "wav[skipped:]", "__getitem__", "wav"),
    code(CORPUS, "transform or normalise", "transform or np.sign", "transform", "wav"),
    code(ENCODERS, "torch.tanh(self", "torch.sin(self", "Weighted"),
    code(ENCODERS, "loudness=0.8", "loudness=0.5", "loudness", "Weighted"),
    code(TEXTUAL, '{"e": "i"}', '{"e": "o"}', "REPLACED"),
    code(TEXTUAL, "tokenizer(text).input_ids", "tokenizer(text[::-1]).input_ids", "letters"),
]

SETTINGS = [
    plain("settings", "--layer 1", Argument("--layer 1"), "layer"),
    plain("settings", "--rate 6000", Argument("--rate 6000"), "rate", "resampler"),
    plain("settings", "--trim 0.02", Argument("--trim 0.02"), "trim", "wav"),
    plain("settings", "--half", Argument("--half"), "half"),
    plain("settings", "DC_POLE in the environment", Environ("DC_POLE", "0.9"), "DC_POLE"),
]

OBJECTS = [
    plain(
        "objects",
        "the scaler's mean",
        Do(rewrite_pickled, ("scaler.joblib", "it.mean_ += 1")),
        "scaler",
        "mean_",
    ),
    plain(
        "objects",
        "the scaler without mean",
        Do(rewrite_pickled, ("scaler.joblib", "it.with_mean = False")),
        "scaler",
        "with_mean",
    ),
    plain(
        "objects",
        "the scale of one coefficient",
        Do(rewrite_pickled, ("scaler.joblib", "it.scale_[3] *= 1.5")),
        "scaler",
        "scale_",
    ),
    plain(
        "objects",
        "components of the PCA",
        Do(rewrite_pickled, ("pca.joblib", "it.components_[0] *= -1")),
        "pca",
        "components_",
    ),
    plain(
        "objects",
        "whitening of the PCA",
        Do(rewrite_pickled, ("pca.joblib", "it.whiten = True")),
        "pca",
        "whiten",
    ),
    plain(
        "objects",
        "the order of k-means clusters",
        Do(
            rewrite_pickled,
            ("clusters.joblib", "it.cluster_centers_ = it.cluster_centers_[::-1].copy()"),
        ),
        "clusters",
        "cluster_centers_",
    ),
    plain(
        "objects",
        "the vocabulary of the tokenizer",
        Do(rewrite_json, ("vocab.json", "it['a'], it['b'] = it['b'], it['a']")),
        "letters",
        "tokenizer",
        "vocab",
    ),
    plain(
        "objects",
        "an option of the tokenizer",
        Replace(
            TEXTUAL,
            "Wav2Vec2CTCTokenizer(str(path)",
            "Wav2Vec2CTCTokenizer(str(path), do_lower_case=True",
        ),
        "letters",
        "tokenizer",
        "do_lower_case",
    ),
    plain(
        "objects",
        "the feature extractor no longer normalises",
        Do(rewrite_json, ("hubert/preprocessor_config.json", "it['do_normalize'] = False")),
        "feature_extractor",
        "do_normalize",
    ),
    plain(
        "modules",
        "the activation in HuBERT's configuration",
        Do(rewrite_json, ("hubert/config.json", "it['hidden_act'] = 'relu'")),
        "encoder",
        "hidden_act",
        "activation",
    ),
    plain(
        "modules",
        "HuBERT's epsilon",
        Do(rewrite_json, ("hubert/config.json", "it['layer_norm_eps'] = 0.1")),
        "encoder",
        "eps",
        "layer_norm_eps",
    ),
    plain(
        "modules",
        "a layer of HuBERT left out",
        Replace(
            ENCODERS, "    model.eval()\n", "    model.eval()\n    del model.encoder.layers[0]\n"
        ),
        "encoder",
        "layers",
    ),
    plain(
        "modules",
        "a hook in HuBERT",
        Replace(
            ENCODERS,
            "    model.eval()\n",
            "    model.eval()\n    model.feature_projection.register_forward_hook(\n"
            "        lambda module, inputs, output: 2 * output\n    )\n",
        ),
        "encoder",
        "hook",
        "hooks",
        "feature_projection",
    ),
    plain(
        "modules",
        "a weight of HuBERT",
        Replace(
            ENCODERS,
            "        parameter.requires_grad = False\n",
            "        parameter.requires_grad = False\n"
            "    model.encoder.layers[1].feed_forward.output_dense.bias[3] = 2.0\n",
        ),
        "encoder",
        "output_dense",
    ),
]

CHANGES = CODE + SETTINGS + OBJECTS

"""Changes of torch modules, settings and surroundings that matter."""

from __future__ import annotations

from changes_code import MODELS, TRAIN
from changes_data import copy_file, rewrite_weights
from changes_objects import then, yaml
from rightness_changes import Append, Argument, Change, Do, Edit, Environ, Expected, Replace

WEIGHTS = "encoder.ckpt"


def module(name: str, words: str, *edits: Edit, setup: tuple[Edit, ...] = ()) -> Change:
    """Change a module."""
    return Change(name, "modules", edits, tuple(words.split()), setup=setup)


def weights(name: str, code: str, words: str) -> Change:
    """Change the checkpoint."""
    return module(name, f"encoder {words}", Do(rewrite_weights, (WEIGHTS, code)))


def encoder(name: str, line: str, words: str) -> Change:
    """Change the encoder after it has been loaded."""
    return module(name, words, then(f'net = hparams["encoder"]; {line}'))


MODULES = [
    weights("a weight", "it['blocks.0.conv.weight'] *= 1.2", "blocks"),
    weights("one number of a weight", "it['blocks.1.conv.weight'][2, 3, 1] += 0.5", "blocks"),
    weights("a bias", "it['blocks.2.conv.bias'][0] += 0.5", "blocks"),
    weights("a running mean", "it['blocks.1.norm.running_mean'] += 0.1", "running_mean"),
    weights("a running variance", "it['blocks.1.norm.running_var'] *= 2", "running_var"),
    weights("a persistent buffer", "it['shift'] += 0.3", "shift"),
    weights(
        "weights in 16 bits",
        "it = {k: v.to(torch.bfloat16).to(v.dtype) for k, v in it.items()}",
        "blocks",
    ),
    encoder("a buffer that is not persistent", "net.positions += 1", "positions"),
    encoder(
        "a residual that a setting turns on", "net.blocks[1].residual = True", "residual blocks"
    ),
    encoder("the epsilon of a norm", "net.blocks[0].norm.eps = 0.1", "eps"),
    encoder("the stride of a convolution", "net.blocks[2].conv.stride = (2,)", "stride"),
    encoder("the dilation of a convolution", "net.blocks[1].conv.dilation = (2,)", "dilation"),
    encoder("a norm replaced", "net.blocks[1].norm = torch.nn.Identity()", "norm Identity blocks"),
    encoder(
        "statistics of the utterance",
        "net.blocks[1].norm.track_running_stats = False; net.blocks[1].norm.running_mean = "
        "net.blocks[1].norm.running_var = None",
        "norm track_running_stats running_mean",
    ),
    encoder(
        "blocks in another order",
        "net.blocks[1], net.blocks[2] = net.blocks[2], net.blocks[1]",
        "encoder blocks",
    ),
    encoder("another slope", "net.blocks[0].slope = 0.5", "slope"),
    encoder(
        "a forward hook",
        "net.blocks[1].register_forward_hook(lambda m, i, o: o.clamp(max=1))",
        "hook hooks blocks",
    ),
    encoder(
        "a hook before forward",
        "net.register_forward_pre_hook(lambda m, i: (i[0] * 2,))",
        "hook hooks encoder",
    ),
    encoder(
        "forward of one module replaced",
        "old = net.forward; net.forward = lambda wavs: old(wavs) + 1",
        "forward encoder",
    ),
    encoder(
        "forward of a class replaced",
        "Block = type(net.blocks[0]); old = Block.forward; Block.forward = lambda self, "
        "values: old(self, values) * 1.1",
        "Block forward",
    ),
    encoder("a dropout replaced", "net.drop = torch.nn.Softsign()", "drop Softsign"),
    encoder(
        "a parametrisation",
        "from torch.nn.utils import parametrizations; "
        "parametrizations.orthogonal(hparams['modules']['adapter'].up)",
        "adapter up parametrizations orthogonal",
    ),
    encoder(
        "pruned weights",
        "from torch.nn.utils import prune; prune.l1_unstructured(net.blocks[1].conv, "
        "'weight', 0.5)",
        "encoder blocks",
    ),
    module("the layer", "layer", yaml("layer: 2", "layer: 1")),
    module("the slope in the YAML", "slope", yaml("slope: 0.1", "slope: 0.3")),
    module(
        "another activation of the adapter",
        "adapter activation",
        Replace(MODELS, "nn.ReLU()", "nn.GELU()"),
    ),
    module(
        "a negative slope in an activation",
        "adapter activation negative_slope",
        Replace(MODELS, "nn.LeakyReLU(0.1)", "nn.LeakyReLU(0.3)"),
        setup=(Replace(MODELS, "nn.ReLU()", "nn.LeakyReLU(0.1)"),),
    ),
    module("the rank of the adapter", "adapter rank down up", Replace(TRAIN, "rank=4", "rank=8")),
    module(
        "the window of the filterbank",
        "fbank window win_length",
        yaml("win_length: 25", "win_length: 20"),
    ),
    module("the upper bound of the filterbank", "fbank f_max", yaml("f_max: 3800", "f_max: 3000")),
    module("the lower bound of the filterbank", "fbank f_min", yaml("f_min: 60", "f_min: 0")),
    module("the hop", "fbank hop_length", yaml("hop_length: 10", "hop_length: 20")),
    module("the size of the transform", "fbank n_fft", yaml("n_fft: 256", "n_fft: 512")),
    module(
        "the shape of the filters",
        "fbank filter_shape",
        yaml("f_min: 60", "f_min: 60\n    filter_shape: gaussian"),
    ),
    module(
        "a limit of the filterbank",
        "fbank top_db",
        then('hparams["fbank"].compute_fbanks.top_db = 30'),
    ),
    module(
        "a constant of the filterbank",
        "fbank amin",
        then('hparams["fbank"].compute_fbanks.amin = 1e-3'),
    ),
    module(
        "the window's values",
        "fbank window compute_STFT",
        then('hparams["fbank"].compute_STFT.window = torch.ones(200)'),
    ),
    module(
        "deviations are normalised, too",
        "normalize std_norm",
        yaml("std_norm: False", "std_norm: True"),
    ),
    module(
        "global statistics of a normalisation",
        "normalize glob_mean glob_std norm_type",
        Replace(TRAIN, "glob_mean = torch.full((20,), 3.0)", "glob_mean = torch.full((20,), 9.0)"),
        setup=(
            yaml("norm_type: sentence", "norm_type: global\n    update_until_epoch: 0"),
            then('hparams["normalize"].glob_mean = torch.full((20,), 3.0)'),
        ),
    ),
    module(
        "a module replaced in the Brain",
        "normalize Halves",
        then('brain.modules["normalize"] = helpers.Halves()'),
        Append(
            "helpers.py",
            "\n\nclass Halves(torch.nn.Module):\n    def forward(self, values, lengths):\n"
            "        return values / 2\n",
        ),
    ),
]


def setting(name: str, words: str, *edits: Edit, expected: Expected = "matters") -> Change:
    """Change a setting."""
    return Change(name, "settings", edits, tuple(words.split()), expected)


SETTINGS = [
    setting("emphasis", "emphasis", yaml("emphasis: 0.9", "emphasis: 0.5")),
    setting("emphasis on the command line", "emphasis", Argument("--emphasis 0.7")),
    setting("transform", "transform", yaml("transform: square", "transform: root")),
    setting("use_context", "use_context", yaml("use_context: True", "use_context: False")),
    setting("context", "context", yaml("context: 1", "context: 2")),
    setting("limit", "limit limiter", yaml("limit: 4.0", "limit: 2.0")),
    setting("power", "power", yaml("power: 0.5", "power: 0.6")),
    setting(
        "prosody_shift", "prosody_shift shift", yaml("prosody_shift: 80", "prosody_shift: 100")
    ),
    setting("sample_rate", "sample_rate", yaml("sample_rate: 8000", "sample_rate: 8500")),
    setting(
        "two of them on the command line", "limit context", Argument("--limit 3.0 --context 3")
    ),
    setting("the seed of weights that nothing loads", "seed adapter", yaml("seed: 7", "seed: 8")),
    setting("the seed on the command line", "seed adapter", Argument("--seed 11")),
    setting("ENERGY_FLOOR, read when computing", "ENERGY_FLOOR", Environ("ENERGY_FLOOR", "0.1")),
    setting(
        "PROSODY_SMOOTHING, read on import",
        "PROSODY_SMOOTHING SMOOTHING",
        Environ("PROSODY_SMOOTHING", "0.9"),
    ),
    setting("HALF_SCALE, read by the script", "HALF_SCALE mel_scale", Environ("HALF_SCALE", "1")),
    setting(
        "precision of evaluation",
        "precision eval_precision dtype bf16",
        Argument("--eval_precision bf16"),
    ),
    setting(
        "precision of matrix products, where the processor has another one",
        "precision matmul_precision matmul",
        then('torch.set_float32_matmul_precision("medium")'),
        expected="arguable",
    ),
    setting(
        "features in float16", "dtype float16", yaml("{name: ssl}", "{name: ssl, dtype: float16}")
    ),
    setting(
        "a feature is stored that was not",
        "energy",
        yaml(
            "{name: prosody}",
            "{name: prosody}\n        - !new:featcache.FeatureStorageConfig {name: energy}",
        ),
        Replace(
            TRAIN,
            '            utterance["ssl"] = hidden\n',
            '            utterance["ssl"] = hidden\n'
            '            utterance["energy"] = hidden.norm(dim=1)\n',
        ),
    ),
    setting(
        "another checkpoint",
        "encoder other",
        yaml("encoder.ckpt", "other.ckpt"),
        Do(copy_file, (WEIGHTS, "other.ckpt")),
        Do(rewrite_weights, ("other.ckpt", "it['blocks.0.conv.weight'] *= -1")),
    ),
    setting(
        "no checkpoint",
        "encoder",
        Replace(TRAIN, '    hparams["pretrainer"].load_collected()\n', ""),
    ),
]

CHANGES = MODULES + SETTINGS

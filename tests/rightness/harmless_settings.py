"""Changes of settings and objects that do not matter to features."""

from __future__ import annotations

from changes_data import rewrite_json, rewrite_pickled, rewrite_weights
from changes_objects import then, yaml
from rightness_changes import Argument, Change, Do, Edit, Replace


def clear(name: str, *edits: Edit, recipe: str = "brain", kind: str = "settings") -> Change:
    """Make a change that must not be refused."""
    return Change(name, f"harmless {kind}", edits, (), "clear", recipe)


def arguable(name: str, *edits: Edit, recipe: str = "brain", kind: str = "settings") -> Change:
    """Make a change whose refusal a user could understand."""
    return Change(name, f"harmless {kind}", edits, (), "arguable", recipe)


def training(name: str, old: str, new: str) -> Change:
    """Change a line of the YAML that training alone reads."""
    return clear(name, yaml(old, new))


SETTINGS = [
    training("the dropout of the classifier", "p: 0.15", "p: 0.5"),
    training("the size of the classifier", "n_neurons: 27", "n_neurons: 40"),
    training("the inputs of the classifier", "input_size: 60", "input_size: 20"),
    training("the learning rate", "lr: 0.001", "lr: 0.01"),
    training("the weight decay", "weight_decay: 0.0", "weight_decay: 0.1"),
    training("another optimizer", "torch.optim.Adam\n", "torch.optim.AdamW\n"),
    training("the number of epochs", "number_of_epochs: 3", "number_of_epochs: 30"),
    training("the batch size of training", "batch_size: 8", "batch_size: 16"),
    training("the batch size of caching", "{batch_size: 4,", "{batch_size: 7,"),
    training(
        "caching one by one", "cache_loader: {batch_size: 4, num_workers: 0}", "cache_loader: {}"
    ),
    training("workers of the loader", "num_workers: 0}", "num_workers: 2}"),
    training("label smoothing", "label_smoothing: 0.1", "label_smoothing: 0.0"),
    training("augmentation", "drop_length_high: 5", "drop_length_high: 9"),
    training("a setting that nothing reads", "unused_scale: 3.0", "unused_scale: 4.0"),
    training("a name", "experiment: first", "experiment: second"),
    training("a note", "debug_notes: none", "debug_notes: tried mean, too"),
    training("a new setting that nothing reads", "experiment: first", "experiment: first\nfold: 3"),
    training("a setting removed that nothing read", "unused_scale: 3.0\n", ""),
    training("comments in the YAML", "# Signal", "# What happens to the signal"),
    training("a number written in another way", "emphasis: 0.9", "emphasis: 9.0e-1"),
    training(
        "another order in the YAML",
        "emphasis: 0.9\ntransform: square\n",
        "transform: square\nemphasis: 0.9\n",
    ),
    training("a setting by reference", "power: 0.5\n", "half: 0.5\npower: !ref <half>\n"),
    training(
        "a schedule of learning rates",
        "label_smoothing: 0.1",
        "label_smoothing: 0.1\nschedule: !new:speechbrain.nnet.schedulers.NewBobScheduler\n"
        "    initial_value: 0.1",
    ),
    training(
        "a loss in modules",
        "    dropout: !ref <dropout>\n",
        "    dropout: !ref <dropout>\n    loss: !new:torch.nn.CrossEntropyLoss\n",
    ),
    clear("the same value on the command line", Argument("--emphasis 0.9")),
    clear("unused settings on the command line", Argument("--unused_scale 9 --experiment x")),
    clear("no progress bar", Argument("--noprogressbar")),
    clear("no gradients clipped", Argument("--max_grad_norm 1.0")),
    clear("the batch size", Argument("--batch-size 9"), recipe="plain"),
    clear("a batch of all", Argument("--batch-size 32"), recipe="plain"),
    clear("no progress bar", Argument("--quiet"), recipe="plain"),
    clear("a seed that nothing draws from", Argument("--seed 5"), recipe="plain"),
    clear("the default layer, said", Argument("--layer 2"), recipe="plain"),
    arguable("another backend", yaml("{name: fbank}", "{name: fbank, backend: hdf5}")),
    arguable(
        "a codec that loses nothing",
        yaml("{name: fbank}", "{name: fbank, backend: hdf5, codec: gzip}"),
    ),
    arguable("wider tokens", yaml("{name: tokens, dtype: int16}", "{name: tokens, dtype: int32}")),
    arguable("precision of evaluation, set too late", then('brain.eval_precision = "bf16"')),
    arguable("deterministic algorithms", then("torch.use_deterministic_algorithms(True)")),
    clear("cuDNN's choice of algorithms", then("torch.backends.cudnn.benchmark = True")),
    clear("nothing at all"),
    clear("nothing at all", recipe="plain"),
    clear("threads", then("torch.set_num_threads(2)")),
    clear("anomaly detection", then("torch.autograd.set_detect_anomaly(False)")),
    clear("how tensors are printed", then("torch.set_printoptions(precision=8)")),
]


def kept(name: str, line: str) -> Change:
    """Change an object without a change of features."""
    return clear(name, then(line), kind="objects")


OBJECTS = [
    kept("modules in training mode", "brain.modules.train()"),
    kept(
        "gradients required", "[p.requires_grad_(True) for p in brain.modules.encoder.parameters()]"
    ),
    kept("gradients not required", "brain.modules.requires_grad_(False)"),
    kept(
        "a hook of gradients", "brain.modules.encoder.register_full_backward_hook(lambda *_: None)"
    ),
    kept("the momentum of a norm", 'hparams["encoder"].blocks[0].norm.momentum = 0.5'),
    kept("dropout in the encoder", 'hparams["encoder"].drop.p = 0.4'),
    kept("batches tracked by a norm", 'hparams["encoder"].blocks[0].norm.num_batches_tracked += 5'),
    kept(
        "gradients left in parameters",
        "next(brain.modules.encoder.parameters()).grad = torch.ones(16, 1, 11)",
    ),
    kept("weights of the classifier", "torch.nn.init.zeros_(brain.modules.classifier.w.weight)"),
    kept(
        "channels last",
        "hparams['encoder'].blocks[0].conv.weight.data = "
        "hparams['encoder'].blocks[0].conv.weight.data.clone()",
    ),
    kept("a title that nothing reads", 'brain.frontend.title = "other"'),
    kept("a counter of calls", "brain.frontend.seen = 50"),
    kept("an attribute of the Brain that nothing reads", "brain.started_by = 'me'"),
    kept("a list that grows", "brain.losses = [0.5, 0.4]"),
    kept("the optimizer is made", "brain.init_optimizers()"),
    kept("a table changed, and changed back", "speakers['eve'] = 1.0; del speakers['eve']"),
    kept("numbers drawn before", "torch.rand(3)"),
    kept("a cache of a helper is warm", "helpers.decay(2)"),
    arguable("a speaker whom nobody is", then("speakers['eve'] = 1.0"), kind="objects"),
    arguable(
        "the padding of a processor that pads nothing",
        yaml("padding_value: 0.0", "padding_value: 1.0"),
        kind="objects",
    ),
    arguable(
        "weights of pretraining alone",
        Do(rewrite_weights, ("encoder.ckpt", "it['head.weight'] *= 2")),
        kind="objects",
    ),
    arguable(
        "notes of k-means about its fitting",
        Do(rewrite_pickled, ("kmeans.joblib", "it.inertia_ = 1.0; it.n_iter_ = 7")),
        kind="objects",
    ),
    arguable(
        "the random state of k-means",
        Do(rewrite_pickled, ("kmeans.joblib", "it.random_state = 5")),
        kind="objects",
    ),
    arguable(
        "dropout of HuBERT",
        Do(
            rewrite_json,
            ("hubert/config.json", "it['hidden_dropout'] = it['activation_dropout'] = 0.5"),
        ),
        recipe="plain",
        kind="objects",
    ),
    arguable(
        "masking of HuBERT in training",
        Do(rewrite_json, ("hubert/config.json", "it['mask_time_prob'] = 0.2")),
        recipe="plain",
        kind="objects",
    ),
    arguable(
        "layers that HuBERT drops in training",
        Do(rewrite_json, ("hubert/config.json", "it['layerdrop'] = it['final_dropout'] = 0.3")),
        recipe="plain",
        kind="objects",
    ),
    arguable(
        "the padding side of the extractor",
        Do(rewrite_json, ("hubert/preprocessor_config.json", "it['padding_side'] = 'left'")),
        recipe="plain",
        kind="objects",
    ),
    clear(
        "a history that grows",
        Replace("extract.py", "self.history = []", "self.history = [1, 2]"),
        recipe="plain",
        kind="objects",
    ),
]

CHANGES = SETTINGS + OBJECTS

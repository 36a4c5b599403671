"""Changes of code that features do not use, of what it prints, and of code into equal code."""

from __future__ import annotations

from changes_code import BASE, HELPERS, LAYERS, MODELS, PROCESSING, PROSODY, TRAIN
from changes_objects import MADE
from changes_plain import EXTRACT, FEATURES
from harmless_code import arguable, clear, code
from rightness_changes import Append, Replace

UNUSED = [
    clear(
        "a helper that nothing calls",
        Append(HELPERS, "\n\ndef unused(values):\n    return values + 1\n"),
    ),
    clear("a class that nothing uses", Append(MODELS, "\n\nclass Decoder(nn.Module):\n    pass\n")),
    clear("a constant that nothing reads", Append(PROSODY, "\nUNUSED = 3\n")),
    clear(
        "a method of the Brain that nothing calls",
        Replace(
            TRAIN,
            "    def tokenise(",
            "    def unused(self):\n        return 1\n\n    def tokenise(",
        ),
    ),
    clear(
        "a method of a helper object that nothing calls",
        Append("lobes/processing.py", "\n    def load(self, path):\n        return path\n"),
    ),
    clear(
        "a constant of the script that nothing reads",
        Replace(TRAIN, "REPORT_EVERY = 100", "REPORT_EVERY = 50"),
    ),
    code(
        HELPERS,
        'describe(values):\n    """Return a line',
        'describe(values, more=False):\n    """Return a line',
        "an unused helper has another argument",
    ),
    code(
        HELPERS,
        "mean {values.mean():.3f}",
        "mean {values.mean():.1f}",
        "the body of an unused helper",
    ),
    code(
        BASE,
        "hidden / hidden.norm()",
        "hidden / (hidden.norm() + 1)",
        "the body of an unused method",
        "arguable",
    ),
    code(
        MODELS,
        "return self.head(hidden)",
        "return self.head(hidden).relu()",
        "a method of pretraining alone",
        "arguable",
    ),
    code(
        PROCESSING,
        "str(vars(self))",
        "repr(vars(self))",
        "the body of a method that saves",
        "arguable",
    ),
    code(
        TRAIN,
        "ladder = (1.0, 2.0, 4.0)",
        "ladder = (1.0, 2.0)",
        "a class attribute that nothing reads",
    ),
    code(
        HELPERS,
        "return torch.sign(values) * values.abs().sqrt()",
        "return values.sqrt()",
        "an entry of the table that is not chosen",
        "arguable",
    ),
    code(TRAIN, '"high": 0.25', '"high": 0.35', "a value of a table that is not read", "arguable"),
    code(LAYERS, '"last": 2.0', '"last": 3.0', "a value of another layer", "arguable"),
    code(
        HELPERS, "coefficient=0.97", "coefficient=0.9", "a default that is always given", "arguable"
    ),
    code(
        FEATURES,
        "    return frames\n",
        "    return frames.copy()\n",
        "a function that is not chosen",
        "arguable",
    ),
]

TALK = [
    code(
        TRAIN,
        "            wav = GAIN * wav\n",
        '            wav = GAIN * wav\n            logger.debug("computed %s", id)\n',
        "a log line in compute_features",
        "arguable",
    ),
    code(
        HELPERS,
        "    return sig, 8000\n",
        '    print("read", path)\n    return sig, 8000\n',
        "a print in the pipeline",
        "arguable",
    ),
    code(HELPERS, '"call %d of %s"', '"%d: %s"', "the text of a log line"),
    code(TRAIN, '"epoch %s: loss %.3f"', '"%s: %.2f"', "a log line of training"),
    code(TRAIN, "computing the features of %d", "features of %d", "a log line of the script"),
    code(EXTRACT, "cached %d recordings", "%d recordings", "a log line without SpeechBrain"),
    code(
        EXTRACT,
        '"--quiet", action="store_true"',
        '"--quiet", action="store_true", help="no bar"',
        "a help text",
    ),
    code(
        EXTRACT,
        '    parser.add_argument("--quiet"',
        '    parser.add_argument("--fold", default="a")\n    parser.add_argument("--quiet"',
        "an argument that nothing reads",
    ),
    code(
        TRAIN,
        "predictions.logsumexp(dim=-1).mean()",
        "predictions.logsumexp(dim=-1).sum()",
        "the loss",
    ),
    code(
        TRAIN,
        "self.modules.classifier(self.modules.dropout(feats))",
        "self.modules.classifier(feats)",
        "the classifier's forward",
    ),
    code(
        TRAIN,
        "ord(letter) - 96",
        "ord(letter) - 97",
        "the pipeline of the text, which is not asked for",
    ),
    code(
        TRAIN,
        '    brain.note = "first try"\n',
        '    brain.note = "second try"\n',
        "an attribute that nothing reads",
    ),
    code(
        TRAIN,
        "def on_stage_end(self, stage, stage_loss, epoch=None):\n",
        "def on_stage_start(self, stage, epoch=None):\n        pass\n\n"
        "    def on_stage_end(self, stage, stage_loss, epoch=None):\n",
        "a method of training",
    ),
    code(
        TRAIN,
        MADE,
        MADE + "    brain.started = __import__('time').time()\n",
        "the time of the start",
    ),
]

REFACTORED = [
    code(TRAIN, "wav = GAIN * wav", "wav = wav * GAIN", "operands in another order", "arguable"),
    code(
        HELPERS,
        "    return sig - sig.mean()\n",
        "    mean = sig.mean()\n    return sig - mean\n",
        "a new local",
        "arguable",
    ),
    code(
        TRAIN,
        "        for step in STEPS:\n            fbank = step(fbank)\n",
        "        fbank = taper(smooth(fbank))\n",
        "a loop written out",
        "arguable",
    ),
    code(
        HELPERS,
        "values * values.abs() + EPSILON",
        "torch.sign(values) * values**2 + EPSILON",
        "an equal formula",
        "arguable",
    ),
    code(
        FEATURES,
        "from math import gcd\n",
        "from math import gcd as gcd\n",
        "an import under its own name",
    ),
    arguable(
        "a part of a function in one of its own",
        Replace(
            TRAIN,
            "            wav = emphasise(sig[:samples], self.hparams.emphasis)\n"
            "            wav = GAIN * wav\n",
            "            wav = self.wave(sig, samples)\n",
        ),
        Replace(
            TRAIN,
            "    def tokenise(",
            "    def wave(self, sig, samples):\n"
            "        return GAIN * emphasise(sig[:samples], self.hparams.emphasis)\n\n"
            "    def tokenise(",
        ),
    ),
    arguable(
        "a helper imported by name",
        Replace(TRAIN, "import emphasise\n", "import emphasise, with_context\n"),
        Replace(TRAIN, "helpers.with_context(", "with_context("),
    ),
    arguable(
        "an assertion",
        Replace(HELPERS, "    previous = torch", "    assert wav.dim() == 1\n    previous = torch"),
    ),
]

CHANGES = UNUSED + TALK + REFACTORED

"""Changes of how code is written that do not matter: comments, names, annotations."""

from __future__ import annotations

from changes_code import FRONTEND, HELPERS, LAYERS, MODELS, PROSODY, TRAIN
from changes_plain import CORPUS, ENCODERS, EXTRACT, FEATURES, TEXTUAL
from rightness_changes import Change, Edit, Expected, Replace


def clear(name: str, *edits: Edit, recipe: str = "brain") -> Change:
    """Make a change that must not be refused."""
    return Change(name, "harmless code", edits, (), "clear", recipe)


def arguable(name: str, *edits: Edit, recipe: str = "brain") -> Change:
    """Make a change whose refusal a user could understand."""
    return Change(name, "harmless code", edits, (), "arguable", recipe)


def code(file: str, old: str, new: str, name: str = "", expected: Expected = "clear") -> Change:
    """Replace a text of either recipe."""
    recipe = "plain" if file in (EXTRACT, FEATURES, CORPUS, ENCODERS, TEXTUAL) else "brain"
    name = name or f"{file}: {old.strip()[:40]} -> {new.strip()[:40]}"
    return Change(name, "harmless code", (Replace(file, old, new),), (), expected, recipe)


COMMENTS = [
    code(
        TRAIN,
        "            wav = GAIN * wav\n",
        "            # louder\n            wav = GAIN * wav\n",
        "a comment in compute_features",
    ),
    code(
        TRAIN,
        "            wav = GAIN * wav\n",
        "            wav = GAIN * wav  # louder\n",
        "a comment at the end of a line",
    ),
    code(TRAIN, "GAIN = 2.0\n", "GAIN = 2.0  # was 3.0\n", "a comment at a constant"),
    code(HELPERS, "    # keeps the sign\n", "", "no comment in a helper"),
    code(
        MODELS,
        "        hidden = wavs[:, None]\n",
        "        # one channel\n        hidden = wavs[:, None]\n",
        "a comment in a module",
    ),
    code(
        LAYERS,
        "    return (1 - share)",
        "    # linear\n    return (1 - share)",
        "a comment in a package",
    ),
    code(TRAIN, "one utterance at a time.", "one by one.", "the docstring of compute_features"),
    code(
        HELPERS,
        '"""Emphasise high frequencies."""',
        '"""Emphasise.\n\n    As everybody does.\n    """',
        "the docstring of a helper",
    ),
    code(HELPERS, '    """Emphasise high frequencies."""\n', "", "no docstring any more"),
    code(MODELS, "One layer of the encoder.", "One layer, no more.", "the docstring of a module"),
    code(MODELS, "Map (batch, samples) to", "Take (batch, samples) to", "the docstring of forward"),
    code(FRONTEND, "Weighs neighbouring bands.", "Bands.", "the docstring of a dataclass"),
    code(HELPERS, "Small functions on waves", "Functions on waves", "the docstring of a file"),
    code(
        CORPUS, "Scale to a fixed peak.", "Set the peak.", "the docstring of a data set's function"
    ),
    code(TRAIN, "Load the part of a recording", "Load a part", "the docstring of the pipeline"),
]

NAMES = [
    clear(
        "a local renamed in compute_features",
        Replace(
            TRAIN,
            "            hidden = self.encode(wav)\n",
            "            states = self.encode(wav)\n",
        ),
        Replace(TRAIN, '["ssl"] = hidden\n', '["ssl"] = states\n'),
        Replace(TRAIN, "quantiser(hidden)", "quantiser(states)"),
    ),
    clear(
        "a local renamed in a helper",
        Replace(HELPERS, "    previous = torch", "    shifted = torch"),
        Replace(HELPERS, "coefficient * previous", "coefficient * shifted"),
    ),
    clear(
        "a local renamed in a module",
        Replace(
            MODELS,
            "        out = self.norm(self.conv(values))\n"
            "        out = nn.functional.leaky_relu(out, self.slope)\n",
            "        result = self.norm(self.conv(values))\n"
            "        out = nn.functional.leaky_relu(result, self.slope)\n",
        ),
    ),
    clear(
        "a local renamed in a method",
        Replace(
            TRAIN, "        frames = np.ascontiguousarray(", "        rows = np.ascontiguousarray("
        ),
        Replace(TRAIN, "predict(frames)", "predict(rows)"),
    ),
    clear(
        "a local renamed in the pipeline",
        Replace(TRAIN, "    sig, rate = helpers", "    sig, _rate = helpers"),
    ),
    clear(
        "a local renamed in a data set",
        Replace(CORPUS, "        skipped = int", "        left = int"),
        Replace(CORPUS, "wav[skipped : len(wav) - skipped]", "wav[left : len(wav) - left]"),
        recipe="plain",
    ),
    clear(
        "a variable of a closure renamed",
        Replace(
            TRAIN,
            "    def limiter(values):\n        return limit * torch.tanh(values / limit)\n",
            "    def limiter(frames):\n        return limit * torch.tanh(frames / limit)\n",
        ),
    ),
    clear(
        "an inner function renamed",
        Replace(FEATURES, "    def composed(values):", "    def chained(values):"),
        Replace(FEATURES, "    return composed", "    return chained"),
        recipe="plain",
    ),
    clear(
        "the variable of a loop renamed",
        Replace(
            TRAIN,
            "        for step in STEPS:\n            fbank = step(fbank)\n",
            "        for one in STEPS:\n            fbank = one(fbank)\n",
        ),
    ),
    arguable(
        "a helper renamed",
        Replace(TRAIN, "return fbank + MEL", "return fbank + MEL"),
        Replace(HELPERS, "def with_context(", "def add_context("),
        Replace(TRAIN, "helpers.with_context(", "helpers.add_context("),
    ),
    arguable(
        "a constant renamed",
        Replace(TRAIN, "GAIN = 2.0", "LOUDER = 2.0"),
        Replace(TRAIN, "wav = GAIN * wav", "wav = LOUDER * wav"),
    ),
    arguable(
        "a method renamed",
        Replace(TRAIN, "def tokenise(", "def cluster("),
        Replace(TRAIN, "self.tokenise(", "self.cluster("),
    ),
    arguable(
        "an attribute renamed",
        Replace(TRAIN, "self.frontend(fbank)", "self.front(fbank)"),
        Replace(TRAIN, "brain.frontend =", "brain.front ="),
    ),
    arguable(
        "a class renamed",
        Replace(PROSODY, "class Prosody:", "class Melody:"),
        Replace(TRAIN, "import Prosody,", "import Melody,"),
        Replace(TRAIN, "= Prosody(", "= Melody("),
    ),
    arguable(
        "the Brain renamed",
        Replace(TRAIN, "class Recogniser(", "class Speller("),
        Replace(TRAIN, "brain = Recogniser(", "brain = Speller("),
    ),
]

ANNOTATIONS = [
    code(
        TRAIN,
        "def mel_energies(self, wav):",
        "def mel_energies(self, wav: torch.Tensor) -> torch.Tensor:",
        "annotations of a method",
    ),
    code(
        HELPERS,
        "def emphasise(wav, coefficient=0.97):",
        "def emphasise(wav: torch.Tensor, coefficient: float = 0.97) -> torch.Tensor:",
        "annotations of a helper",
    ),
    code(
        MODELS,
        "def forward(self, wavs):",
        "def forward(self, wavs: torch.Tensor):",
        "annotations of forward",
    ),
    code(
        TRAIN,
        "        inputs = self.hparams.processor(wav)\n",
        "        inputs: torch.Tensor = self.hparams.processor(wav)\n",
        "annotation of a local",
    ),
    code(TRAIN, "GAIN = 2.0\n", "GAIN: float = 2.0\n", "annotation of a constant"),
    code(
        HELPERS,
        "import functools\n",
        "from __future__ import annotations\n\nimport functools\n",
        "an import from __future__",
    ),
    code(
        FEATURES,
        "def clip(frames, limit):",
        "def clip(frames: np.ndarray, limit: float) -> np.ndarray:",
        "annotations without SpeechBrain",
    ),
]


CHANGES = COMMENTS + NAMES + ANNOTATIONS

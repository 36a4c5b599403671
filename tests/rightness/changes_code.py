"""Changes of the user's code that matter: functions, constants, tables, closures, decorators."""

from __future__ import annotations

from rightness_changes import Append, Change, Edit, Expected, Replace

TRAIN, HELPERS, MODELS = "train.py", "helpers.py", "models.py"
BASE, LAYERS, FRONTEND = "lobes/base.py", "lobes/layers.py", "lobes/frontend.py"
PROSODY, QUANTISE, PROCESSING = "lobes/prosody.py", "lobes/quantise.py", "lobes/processing.py"
END = 'if __name__ == "__main__":'


def code(
    file: str, old: str, new: str, *words: str, name: str = "", expected: Expected = "matters"
) -> Change:
    """Replace a text of the recipe with SpeechBrain."""
    return Change(
        name or f"{file}: {old.strip()[:40]} -> {new.strip()[:40]}",
        "code",
        (Replace(file, old, new),),
        words,
        expected,
    )


def edits(name: str, words: str, *made: Edit, expected: Expected = "matters") -> Change:
    """Make several edits of the recipe with SpeechBrain."""
    return Change(name, "code", made, tuple(words.split()), expected)


TRAINING_SCRIPT = [
    code(TRAIN, "GAIN = 2.0", "GAIN = 3.0", "GAIN"),
    code(TRAIN, '{"low": 0.5, ', '{"low": 0.6, ', "MEL_OFFSET"),
    code(TRAIN, 'MEL_OFFSET["low"]', 'MEL_OFFSET["high"]', "mel_energies", "MEL_OFFSET"),
    code(TRAIN, "[smooth, taper]", "[taper, smooth]", "STEPS"),
    code(TRAIN, "[smooth, taper]", "[smooth]", "STEPS"),
    code(TRAIN, "[smooth, taper]", "[smooth, taper, torch.relu]", "STEPS"),
    code(TRAIN, "np.linspace(0.0, 0.1", "np.linspace(0.0, 0.2", "SILENCE"),
    code(
        TRAIN,
        "limit * torch.tanh(values / limit)",
        "values.clamp(-limit, limit)",
        "limiter",
        "make_limiter",
    ),
    code(TRAIN, 'make_limiter(hparams["limit"])', "make_limiter(1.5)", "limiter", "limit"),
    code(TRAIN, "    sig = helpers.remove_offset(sig)\n", "", "audio_pipeline", "sig"),
    code(TRAIN, "    return sig\n", "    return 0.5 * sig\n", "audio_pipeline", "sig"),
    code(TRAIN, "    return sig\n", "    return sig[40:]\n", "audio_pipeline", "sig"),
    code(TRAIN, "mel_scale = 0.5", "mel_scale = 0.7", "mel_scale"),
    code(TRAIN, "wav = GAIN * wav", "wav = GAIN * wav.clamp(-0.05, 0.05)", "compute_features"),
    code(TRAIN, "self.bias + hidden", "self.bias - hidden", "encode"),
    code(TRAIN, "[:, :20], dtype", "[:, ::-1], dtype", "tokenise"),
    code(TRAIN, "self.prosody(wav, speaker)", "self.prosody(wav**2, speaker)", "compute_features"),
    code(TRAIN, "len, takes", "lambda sig: len(sig) - 80, takes", "num_samples"),
    edits(
        "a method of the base class is overridden",
        "scale_layers",
        Replace(
            TRAIN,
            "    def tokenise(",
            "    def scale_layers(self, hidden):\n        return 1.2 * hidden\n\n    def tokenise(",
        ),
    ),
    edits(
        "another function under the old name",
        "emphasise emphasise_twice",
        Replace(TRAIN, "import emphasise\n", "import emphasise_twice as emphasise\n"),
        Append(
            HELPERS,
            "\n\ndef emphasise_twice(wav, coefficient):\n"
            "    return emphasise(emphasise(wav, coefficient), coefficient)\n",
        ),
    ),
    edits(
        "the script patches a helper",
        "decay",
        Replace(TRAIN, END, "helpers.decay = lambda step: 0.2 * step\n\n\n" + END),
    ),
    edits(
        "the script patches its own class",
        "encode",
        Replace(
            TRAIN,
            END,
            "_encode = Recogniser.encode\n"
            "Recogniser.encode = lambda self, wav: _encode(self, wav) ** 2\n\n\n" + END,
        ),
    ),
    edits(
        "a method gets a decorator",
        "mel_energies rescaled",
        Replace(
            TRAIN,
            "    def mel_energies(self, wav):",
            "    @helpers.method_of_squares\n    def mel_energies(self, wav):",
        ),
        Append(
            HELPERS,
            "\n\ndef method_of_squares(method):\n"
            "    return lambda self, wav: method(self, wav) ** 2\n",
        ),
    ),
    edits(
        "a subclass of a helper object",
        "prosody Louder _energy",
        Replace(
            TRAIN,
            "def open_dataset(",
            "class Louder(Prosody):\n    def _energy(self, wav):\n"
            "        return 1.1 * super()._energy(wav)\n\n\ndef open_dataset(",
        ),
        Replace(TRAIN, "brain.prosody = Prosody(", "brain.prosody = Louder("),
    ),
    edits(
        "a helper of a new file",
        "smooth special",
        Replace(TRAIN, "import Frontend, smooth, taper", "import Frontend, taper"),
        Replace(TRAIN, "from models", "from lobes.special import smooth\nfrom models"),
        Append("lobes/special.py", "def smooth(frames):\n    return 0.5 * frames\n"),
    ),
    edits(
        "lower precision around all",
        "compute_features mel_energies autocast",
        Replace(
            TRAIN,
            "        fbank = self.frontend(fbank)\n",
            '        with torch.autocast("cpu", torch.bfloat16):\n'
            "            fbank = self.frontend(fbank).float()\n",
        ),
    ),
    edits(
        "a condition on the speaker",
        "compute_features",
        Replace(
            TRAIN,
            "            wav = GAIN * wav\n",
            '            wav = (GAIN if speaker != "ben" else 1.0) * wav\n',
        ),
    ),
    edits(
        "a tracker in a lambda",
        "tracker pitch_track prosody",
        Replace(TRAIN, "tracker=pitch_track", "tracker=lambda frames: pitch_track(frames, low=40)"),
    ),
]

HELPER_FILE = [
    code(HELPERS, "EPSILON = 1e-3", "EPSILON = 1e-1", "EPSILON"),
    code(HELPERS, "20, 0.8)", "20, 0.7)", "BANDS"),
    code(HELPERS, "KNEE = 0.5", "KNEE = 0.9", "KNEE", "Curve"),
    code(HELPERS, "SLOPE = 2.0", "SLOPE = 1.5", "SLOPE", "Curve"),
    code(HELPERS, "sig - sig.mean()", "sig - 2 * sig.mean() + 0.01", "remove_offset", "sig"),
    code(HELPERS, '"start": start,', '"start": start + 80,', "load", "sig"),
    code(HELPERS, "coefficient * previous", "coefficient**2 * previous", "emphasise"),
    code(HELPERS, "@rescaled(0.2)", "@rescaled(0.3)", "rescaled", "compress", "factor"),
    code(HELPERS, "@rescaled(0.2)\n", "", "rescaled", "compress"),
    code(HELPERS, "factor * function(", "factor + function(", "rescaled", "compress"),
    code(HELPERS, "        return function(*arg", "        return 0.7 * function(*arg", "traced"),
    code(HELPERS, "] *= weight", "] /= weight", "compress"),
    code(HELPERS, "values * values.abs() + EPS", "values * values.abs() - 99 * EPS", "_square"),
    code(HELPERS, '"square": _square', '"square": _root', "TRANSFORMS", "_square", "_root"),
    code(HELPERS, '"square": _square', '"square": lambda x: x**3', "TRANSFORMS", "_square"),
    code(HELPERS, "torch.roll(frames, step", "torch.roll(frames, -step", "with_context"),
    code(HELPERS, "math.exp(-step)", "math.exp(-step / 2)", "decay"),
    code(HELPERS, "torch.log(frames", "torch.log10(frames", "frame_energy"),
    code(HELPERS, '"1e-4"', '"1e-2"', "frame_energy"),
]

PACKAGE = [
    code(LAYERS, '"middle": 1.5', '"middle": 1.6', "LAYER_SCALES"),
    code(LAYERS, "(1 - share) * values", "(1 + share) * values", "mix"),
    code(BASE, 'layer_name = "middle"', 'layer_name = "last"', "layer_name"),
    code(BASE, "return 0.2", "return 0.3", "share"),
    code(BASE, "hidden.mean(dim=0)", "hidden.amax(dim=0)", "scale_layers"),
    code(FRONTEND, "TAPER = 0.9", "TAPER = 0.8", "TAPER"),
    code(FRONTEND, "0.75 * frames + 0.25", "0.7 * frames + 0.3", "smooth"),
    code(FRONTEND, "    frames[-1] *= TAPER\n", "", "taper"),
    code(FRONTEND, ".view(1, 1, -1)", ".view(1, 1, -1) / 1.1", "kernel", "Frontend"),
    code(FRONTEND, "self.gain * padded[:, 0]", "padded[:, 0] ** 2", "Frontend"),
    code(FRONTEND, "gain: float = 1.0", "gain: float = 1.2", "gain", "Frontend"),
    code(PROSODY, 'SMOOTHING", "0.5"', 'SMOOTHING", "0.4"', "SMOOTHING"),
    code(PROSODY, "LOW = 20", "LOW = 50", "LOW", "Range"),
    code(PROSODY, "low=Range.LOW.value", "low=45", "pitch_track", "tracker"),
    code(PROSODY, "abs() ** 2", "abs()", "pitch_track", "tracker"),
    code(PROSODY, "pitch: float = 0.05", "pitch: float = 0.06", "Weights", "weights", "pitch"),
    code(PROSODY, "weights = Weights()", "weights = Weights(energy=2.0)", "weights", "energy"),
    code(
        PROSODY,
        "self._crossings, self._pitch]",
        "self._pitch, self._crossings]",
        "columns",
        "Prosody",
    ),
    code(PROSODY, "signs[:, 1:] != signs[:, :-1]", "signs[:, 2:] != signs[:, :-2]", "_crossings"),
    code(PROSODY, "torch.roll(track, 1)", "torch.roll(track, -1)", "_pitch"),
    code(PROSODY, "self.speakers[speaker]", "2 * self.speakers[speaker]", "Prosody", "__call__"),
    code(QUANTISE, "argmin", "argmax", "Quantiser"),
    code(
        QUANTISE,
        "cdist(frames * weights, entries * weights)",
        "cdist(frames, entries - 1)",
        "_distances",
        "Quantiser",
    ),
    code(PROCESSING, 'wav.std() + self.options["epsilon"]', "wav.abs().max()", "Processor"),
    code(MODELS, "leaky_relu(out, self.slope)", "elu(out, self.slope)", "Block"),
    code(MODELS, "0.1 * self.positions", "0.2 * self.positions", "Encoder"),
    code(MODELS, "torch.sin(", "torch.cos(", "positional", "positions"),
    code(MODELS, "self.scale * self.up", "self.scale + self.up", "Adapter"),
    code(MODELS, "scale=0.5", "scale=0.6", "scale", "Adapter"),
    edits(
        "a package changes a table when it is imported",
        "LAYER_SCALES",
        Append(
            "lobes/__init__.py", 'from . import layers\n\nlayers.LAYER_SCALES["middle"] = 1.7\n'
        ),
    ),
]

CHANGES = TRAINING_SCRIPT + HELPER_FILE + PACKAGE

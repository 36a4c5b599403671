"""Changes of values that are called as what training reads, or as places and devices are."""

from __future__ import annotations

from changes_code import MODELS, TRAIN
from changes_objects import then
from rightness_changes import Change, Edit, Replace


def called(name: str, change: str, *setup: Edit) -> Change:
    """Change a value of this name, which the setup gives it."""
    return Change(f"a value called {name}", "names", (then(change),), (name,), setup=setup)


def of_adapter(name: str, made: str, change: str) -> Change:
    """Change the scale of the adapter, a module of the user's."""
    return called(
        name,
        f"brain.modules.adapter.{change}",
        Replace(MODELS, "self.scale = scale", made),
        Replace(MODELS, "values + self.scale *", f"values + self.{name} *"),
    )


def setting(name: str) -> Change:
    """Change an attribute of the adapter."""
    return of_adapter(name, f"self.{name} = scale", f"{name} = 0.9")


def weights(name: str) -> Change:
    """Change a parameter of the adapter."""
    made = f"self.{name} = nn.Parameter(torch.tensor(scale))"
    return of_adapter(name, made, f"{name}.data.mul_(2)")


def buffer(name: str) -> Change:
    """Change a buffer of the adapter, which is not saved."""
    made = f'self.register_buffer("{name}", torch.tensor(scale), persistent=False)'
    return of_adapter(name, made, f"{name}.mul_(2)")


def of_brain(name: str) -> Change:
    """Change an attribute of the Brain, an array."""
    return called(
        name,
        f"brain.{name} = brain.{name} * 3",
        Replace(TRAIN, "brain.bias = torch.full", f"brain.{name} = torch.full"),
        Replace(TRAIN, "return self.bias + hidden", f"return self.{name} + hidden"),
    )


def constant(name: str) -> Change:
    """Change a global variable."""
    return called(
        name,
        f'globals()["{name}"] = 3.0',
        Replace(TRAIN, "GAIN = 2.0", f"{name} = 2.0"),
        Replace(TRAIN, "wav = GAIN * wav", f"wav = {name} * wav"),
    )


def hparam(name: str) -> Change:
    """Change a setting of the YAML after it was loaded."""
    return called(
        name,
        f"brain.hparams.{name} = 0.5",
        Replace("hparams.yaml", "emphasis: 0.9", f"{name}: 0.9"),
        Replace(TRAIN, "self.hparams.emphasis)", f"self.hparams.{name})"),
    )


def caller(name: str) -> Change:
    """Change an object of the Brain whose method is called by the name of a log's."""
    return called(
        name,
        f"brain.{name}.info.weights = brain.{name}.info.weights._replace(energy=3.0)",
        Replace(TRAIN, "brain.prosody = Prosody(", f"brain.{name} = helpers.Holder(info=Prosody("),
        Replace(TRAIN, 'shift=hparams["prosody_shift"])', 'shift=hparams["prosody_shift"]))'),
        Replace(TRAIN, "self.prosody(wav, speaker)", f"self.{name}.info(wav, speaker)"),
        Replace(
            "helpers.py",
            "EPSILON = 1e-3",
            "from types import SimpleNamespace as Holder\nEPSILON = 1e-3",
        ),
    )


CHANGES = [
    *map(setting, ("ctc_scale", "freeze_scale", "up_dropout", "mel_loss_weight", "init_scale")),
    of_adapter("__scale", "self.__scale = scale", "_Adapter__scale = 0.9"),
    *map(weights, ("ctc_weight", "layerdrop", "device_gain")),
    *map(buffer, ("num_batches_tracked", "drop_rate")),
    *map(of_brain, ("device_bias", "stage", "training", "scaler")),
    *map(constant, ("freeze_gain", "verbose")),
    *map(hparam, ("ctc_emphasis", "device", "predropout")),
    caller("log"),
]

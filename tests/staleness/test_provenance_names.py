"""Names decide nothing: a changed value is noticed whatever it is called, wherever it stands."""

from __future__ import annotations

import importlib.util
import keyword
import random
import string
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import featcache.staleness
from featcache.staleness.members import is_pythons
from featcache.staleness.provenance import CONTAINERS, provenance

transformers = pytest.importorskip("transformers")
NAMES = 2000  # drawn over all places
SEED = 23
# of the tables that once left out whatever is called so
OF_OLD = """
    dropout feat_dropout dropout_rate layerdrop layer_drop drop_prob drop_rate drop_path freeze
    freeze_scale unfreeze inplace gradient_checkpointing apply_spec_augment mask_time_prob
    mask_feature_gain initializer_range initializer_factor init_std init_method init_scale
    mel_loss_weight aux_loss_scale ctc_scale ctc_temperature ctc_weight update_until_epoch momentum
    num_batches_tracked version mel_version n_jobs n_threads num_threads verbose
    deprecation_warnings warnings_issued name_or_path commit_hash special_tokens_map_file
    tp_plan post_init_done labels_ inertia_ n_iter_ n_steps_ n_samples_seen_ tol max_iter n_init
    random_state counts device device_weights on_device stage step scaler debug profiler
    path out_dir folder file root dest source save output location log logger warnings training
    training stage device
"""
WORDS = """
    gain scale tau power offset slope knee bands window shift weight bias mean std floor ceiling
    alpha beta gamma table curve filter kernel stride hop frame rate pitch energy tone level depth
    width height colour house river stone winter summer apple bread candle dinner engine forest
    garden hammer island jacket kitchen ladder mirror needle orange pencil quarter ribbon silver
    ticket umbrella valley window yellow zebra update add sort pop append remove clear items keys
    values data config options name hook hooks _orig_mod stats state memo cache counter total
"""


class Place(NamedTuple):
    """A place of a value: code with `NAME`, whose `make` returns what computes, given the value."""

    code: str
    base: Any = None  # whose names are its own
    tensors: bool = False  # whether it holds nothing else


PLACES = {
    "attribute of an object": Place(
        """
        class Extractor:
            def __init__(self, value): self.NAME = value
            def compute_features(self, x): return x, self.NAME
        def make(value): return Extractor(value).compute_features
        """,
        object,
    ),
    "attribute of a part": Place(
        """
        class Part:
            def __init__(self, value): self.NAME = value
            def bend(self, x): return x, self.NAME
        class Extractor:
            def __init__(self, value): self.part = Part(value)
            def compute_features(self, x): return self.part.bend(x)
        def make(value): return Extractor(value).compute_features
        """,
        object,
    ),
    "attribute of a module": Place(
        """
        class Net(torch.nn.Module):
            def __init__(self, value):
                super().__init__()
                self.NAME = value
            def forward(self, x): return x, self.NAME
        def make(value):
            net = Net(value)
            def feats(x): return net(x)
            return feats
        """,
        torch.nn.Module,
    ),
    "attribute of a module that computes": Place(
        """
        class Net(torch.nn.Module):
            def __init__(self, value):
                super().__init__()
                self.NAME = value
            def compute_features(self, x): return x, self.NAME
        def make(value): return Net(value).compute_features
        """,
        torch.nn.Module,
    ),
    "attribute of a library's module's child class": Place(
        """
        class Net(torch.nn.Dropout):
            def __init__(self, value):
                super().__init__()
                self.NAME = value
            def forward(self, x): return x, self.NAME
        def make(value):
            net = Net(value)
            def feats(x): return net(x)
            return feats
        """,
        torch.nn.Dropout,
    ),
    "parameter": Place(
        """
        class Net(torch.nn.Module):
            def __init__(self, value):
                super().__init__()
                self.register_parameter("NAME", torch.nn.Parameter(value))
            def forward(self, x): return x, self.NAME
        def make(value):
            net = Net(value)
            def feats(x): return net(x)
            return feats
        """,
        torch.nn.Module,
        tensors=True,
    ),
    "parameter that another class reads": Place(
        """
        class Net(torch.nn.Module):
            def __init__(self, value):
                super().__init__()
                self.held = torch.nn.ParameterDict({"NAME": value})
            def forward(self, x): return x, self.held["NAME"]
        def make(value):
            net = Net(value)
            def feats(x): return net(x)
            return feats
        """,
        torch.nn.ParameterDict,
        tensors=True,
    ),
    "buffer": Place(
        """
        class Net(torch.nn.Module):
            def __init__(self, value):
                super().__init__()
                self.register_buffer("NAME", value)
            def forward(self, x): return x, self.NAME
        def make(value):
            net = Net(value)
            def feats(x): return net(x)
            return feats
        """,
        torch.nn.Module,
        tensors=True,
    ),
    "buffer that is not saved": Place(
        """
        class Net(torch.nn.Module):
            def __init__(self, value):
                super().__init__()
                self.register_buffer("NAME", value, persistent=False)
            def forward(self, x): return x, self.NAME.add(x)
        def make(value):
            net = Net(value)
            def feats(x): return net(x)
            return feats
        """,
        torch.nn.Module,
        tensors=True,
    ),
    "module inside": Place(
        """
        class Part(torch.nn.Module):
            def forward(self, x): return x
        class Net(torch.nn.Module):
            def __init__(self, value):
                super().__init__()
                self.add_module("NAME", Part())
                self.apart = value
            def forward(self, x): return self.NAME(x), self.apart
        def make(value):
            net = Net(value)
            def feats(x): return net(x)
            return feats
        """,
        torch.nn.Module,
    ),
    "key of a configuration": Place(
        """
        def make(value):
            config = {"NAME": value}
            def feats(x): return x, config["NAME"]
            return feats
        """
    ),
    "key of a configuration inside": Place(
        """
        class Extractor:
            def __init__(self, value): self.config = {"front": {"NAME": value}}
            def compute_features(self, x): return x, self.config["front"]["NAME"]
        def make(value): return Extractor(value).compute_features
        """
    ),
    "hparam": Place(
        """
        class Extractor:
            def __init__(self, value):
                self.modules, self.hparams = {}, types.SimpleNamespace(NAME=value)
            def compute_features(self, x): return x, self.hparams.NAME
        def make(value): return Extractor(value).compute_features
        """,
        object,
    ),
    "hparam by key": Place(
        """
        class Extractor:
            def __init__(self, value): self.modules, self.hparams = {}, {"NAME": value}
            def compute_features(self, x): return x, self.hparams["NAME"]
        def make(value): return Extractor(value).compute_features
        """
    ),
    "global": Place(
        """
        def feats(x): return x, NAME
        def make(value):
            globals()["NAME"] = value
            return feats
        """
    ),
    "closure": Place(
        """
        def make(value):
            NAME = value
            def feats(x): return x, NAME
            return feats
        """
    ),
    "default": Place(
        """
        def make(value):
            def feats(x, NAME=value): return x, NAME
            return feats
        """
    ),
    "argument of a partial": Place(
        """
        def feats(x, NAME): return x, NAME
        def make(value): return functools.partial(feats, NAME=value)
        """
    ),
    "field of a dataclass": Place(
        """
        @dataclasses.dataclass
        class Settings:
            NAME: object
        def make(value):
            settings = Settings(value)
            def feats(x): return x, settings.NAME
            return feats
        """,
        object,
    ),
    "field of a frozen dataclass that is an argument": Place(
        """
        @dataclasses.dataclass(frozen=True)
        class Settings:
            NAME: object
        def bend(x, settings): return x, settings.NAME
        def make(value):
            settings = Settings(value)
            def feats(x): return bend(x, settings)
            return feats
        """,
        object,
    ),
    "slot": Place(
        """
        class Settings:
            __slots__ = ("NAME",)
            def __init__(self, value): self.NAME = value
            def bend(self, x): return x, self.NAME
        def make(value):
            settings = Settings(value)
            def feats(x): return settings.bend(x)
            return feats
        """,
        object,
    ),
    "attribute of a class": Place(
        """
        class Settings:
            NAME = 0
        def make(value):
            Settings.NAME = value
            def feats(x): return x, Settings.NAME
            return feats
        """,
        type,
    ),
    "attribute of a function": Place(
        """
        def bend(x): return x, bend.NAME
        def make(value):
            bend.NAME = value
            def feats(x): return bend(x)
            return feats
        """,
        FunctionType,
    ),
    "object whose method is called": Place(
        """
        class Part:
            def __init__(self, value): self.value = value
            def bend(self, x): return x, self.value
        class Extractor:
            def __init__(self, value): self.NAME = Part(value)
            def compute_features(self, x): return self.NAME.bend(x)
        def make(value): return Extractor(value).compute_features
        """,
        object,
    ),
    "global object whose method is called": Place(
        """
        class Part:
            def __init__(self, value): self.value = value
            def bend(self, x): return x, self.value
        def feats(x): return NAME.bend(x)
        def make(value):
            globals()["NAME"] = Part(value)
            return feats
        """
    ),
    "method": Place(
        """
        class Part:
            def __init__(self, value): self.value = value
            def NAME(self, x): return x, self.value
        class Extractor:
            def __init__(self, value): self.part = Part(value)
            def compute_features(self, x): return self.part.NAME(x)
        def make(value): return Extractor(value).compute_features
        """,
        object,
    ),
    "method of a global object": Place(
        """
        class Part:
            def __init__(self, value): self.value = value
            def NAME(self, x): return x, self.value
        def feats(x): return part.NAME(x)
        def make(value):
            globals()["part"] = Part(value)
            return feats
        """,
        object,
    ),
    "argument of a method": Place(
        """
        class Part:
            def bend(self, x, gain): return x, gain
        class Extractor:
            def __init__(self, value): self.NAME, self.apart = Part(), value
            def compute_features(self, x): return self.NAME.bend(x, self.apart)
        def make(value): return Extractor(value).compute_features
        """,
        object,
    ),
    "argument of a method of that name": Place(
        """
        class Part:
            def NAME(self, x, gain): return x, gain
        def make(value):
            part = Part()
            def feats(x): return part.NAME(x, value)
            return feats
        """,
        object,
    ),
    "argument of a statement": Place(
        """
        def NAME(into, each): into.append(each)
        def make(value):
            def feats(x):
                found = [x]
                NAME(found, value)
                return found
            return feats
        """
    ),
    "list that is made": Place(
        """
        def make(value):
            def feats(x):
                NAME = [x]
                NAME.append(value)
                return NAME
            return feats
        """
    ),
    "flag": Place(
        """
        class Extractor:
            def __init__(self, value): self.NAME, self.apart = True, value
            def compute_features(self, x):
                if self.NAME:
                    return x, self.apart
                return x
        def make(value): return Extractor(value).compute_features
        """,
        object,
    ),
    "flag of a configuration": Place(
        """
        class Config: NAME = True
        def make(value):
            config = Config()
            def feats(x):
                if config.NAME:
                    return x, value
                return x
            return feats
        """,
        type,
    ),
    "attribute that a hook names": Place(
        """
        class Hook:
            name = "NAME"
            def __call__(self, module, inputs): return None
        class Net(torch.nn.Module):
            def __init__(self, value):
                super().__init__()
                self.NAME = value
                self.register_forward_pre_hook(Hook())
            def forward(self, x): return x, self.NAME
        def make(value):
            net = Net(value)
            def feats(x): return net(x)
            return feats
        """,
        torch.nn.Module,
    ),
    "attribute of that name elsewhere": Place(
        """
        class Batch: pass
        def moved(batch):
            batch.NAME = 1
            return batch
        class Extractor:
            def __init__(self, value): self.NAME = value
            def compute_features(self, x): return moved(Batch()), self.NAME
        def make(value): return Extractor(value).compute_features
        """,
        object,
    ),
    "attribute of a library's object": Place(
        """
        class Net:
            def __init__(self, value):
                self.config = transformers.HubertConfig()
                self.config.NAME = value
            def compute_features(self, x): return x, self.config.NAME
        def make(value): return Net(value).compute_features
        """,
        transformers.HubertConfig,
    ),
}
VALUES: dict[str, Callable[[int], object]] = {
    "number": lambda at: 1.5 + at,
    "text": lambda at: ("smooth", "rough")[at],
    "text with a slash": lambda at: ("mel/log", "mel/root")[at],
    "tensor": lambda at: torch.full((4,), 1.0 + at),
    "array": lambda at: np.full(4, 1.0 + at),
    "list": lambda at: [0.5, 1.0 + at],
    "object": lambda at: np.polynomial.Polynomial([1.0, 2.0 + at]),
    "dict": lambda at: {"low": 0.5, "high": 1.0 + at},
}
BARE = (object, type, FunctionType)
HEAD = """
import dataclasses, functools, types
import torch, transformers
"""


def names_of_tables() -> set[str]:
    """Return every identifier in the tables of the package, as it is now."""
    folder = Path(featcache.staleness.__file__).parent
    modules = [
        importlib.import_module(f"featcache.staleness.{p.stem}") for p in folder.glob("*.py")
    ]
    return {text for each in modules for value in vars(each).values() for text in _texts(value)}


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield from (each for each in value.split() if each.isidentifier())
    elif isinstance(value, list | tuple | set | frozenset | dict):
        for each in value:
            yield from _texts(each)


def names(rng: random.Random) -> Iterator[str]:
    """Yield names of all lists, English words, random ones; some of them private."""
    lists = [OF_OLD.split(), WORDS.split(), sorted(names_of_tables()), []]
    letters = string.ascii_letters + string.digits + "_"
    while True:
        listed = rng.choice(lists)
        any_letters = "".join(rng.choices(letters, k=rng.randrange(1, 12)))
        name = rng.choice(listed) if listed else rng.choice(string.ascii_letters) + any_letters
        if rng.random() < 0.1:
            name = rng.choice(("_", "__")) + name.strip("_")
        is_free = not keyword.iskeyword(name) and name != "__debug__"  # nothing can be called so
        if is_free and not is_pythons(name):
            yield name


def owned_by(place: str) -> frozenset[str]:
    """Return the names that belong to the base class, or to what computes as such."""
    base, code = PLACES[place].base, PLACES[place].code
    if base is None:  # a statement of `print` is known by its name
        return frozenset(["print"] if place == "argument of a statement" else [])
    # of an object that computes these hold others, by name
    containers = CONTAINERS if base is object and "compute_features" in code else ()
    return frozenset([*dir(base if base in BARE else base()), *containers])


def made(place: str, name: str, path: Path) -> Any:
    """Return `make` of a place with a name; None if such a program does not run."""
    path.write_text(HEAD + textwrap.dedent(PLACES[place].code).replace("NAME", name))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        module.make(torch.ones(2))(torch.ones(2))
    except (AttributeError, KeyError, NameError, RuntimeError, TypeError, ValueError):
        return None  # a name that the code around it has, or that is another one from outside
    return module.make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
def test_a_changed_value_is_noticed_whatever_it_is_called(place: str, tmp_path: Path) -> None:
    rng = random.Random(f"{SEED} {place}")
    kinds = ["tensor"] if PLACES[place].tensors else sorted(VALUES)
    owned, tried, hidden = owned_by(place), 0, list[tuple[str, str]]()
    for number, name in enumerate(names(rng)):
        if name in owned or (make := made(place, name, tmp_path / f"drawn_{number}.py")) is None:
            continue
        kind = rng.choice(kinds)
        first, again, changed = (
            provenance(make(VALUES[kind](at))).fingerprint({}) for at in (0, 0, 1)
        )
        assert first == again, (name, kind)
        if first == changed:
            hidden.append((name, kind))
        tried += 1
        if tried * len(PLACES) >= NAMES:
            break
    assert hidden == []

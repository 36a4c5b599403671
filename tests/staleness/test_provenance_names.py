"""Names decide nothing: a changed value is noticed whatever it is called, wherever it stands."""

from __future__ import annotations

import importlib.util
import keyword
import random
import re
import string
import sys
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


def places() -> Iterator[tuple[str, Place]]:
    """Read the places: a line `# name | class whose names are its own | tensors`, then code."""
    text = Path(__file__).with_name("places_of_values.txt").read_text()
    for head, code in re.findall(r"^# (.*)\n((?:[^#].*\n)+)", text, re.MULTILINE):
        name, base, tensors = [*head.split(" | "), "", ""][:3]
        if "def make(" not in code:
            code += MAKE_EXTRACTOR if "class Extractor" in code else MAKE_NET
        yield name, Place(code, eval(base or "None"), bool(tensors))  # noqa: S307


MAKE_EXTRACTOR = "def make(value): return Extractor(value).compute_features\n"
MAKE_NET = """
def make(value):
    net = Net(value)
    def feats(x): return net(x)
    return feats
"""
PLACES = dict(places())
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
    path.write_text(HEAD + PLACES[place].code.replace("NAME", name))
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

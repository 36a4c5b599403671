"""Signatures of public functions and classes: visible to tools, keyword-only after the start."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_origin

import pytest
from places import ROOT

import featcache
from featcache import espnet, samplers
from featcache.interop import kaldi, lhotse
from featcache.loading import Packed, Padded
from featcache.remote import RemoteOptions

MODULES = [*ROOT.glob("featcache/**/*.py"), *ROOT.glob("backends/**/*.py")]

POSITIONAL = 3
# names with more positional parameters, or none that is named, and why
EXCEPTIONS = {
    "espnet.CollectStatsRunner": "ESPnet3's class",
    "espnet.build_batch_sampler": "ESPnet's function",
    "espnet.build_category_batch_sampler": "ESPnet's function",
    "espnet.CategoryChunkIterFactory": "ESPnet's class",
    "espnet.CategoryIterFactory": "ESPnet's class",
    "espnet.ChunkIterFactory": "ESPnet's class",
    "espnet.IterFactory": "a protocol, which nobody makes",
    "espnet.SequenceIterFactory": "ESPnet's class",
}
METHODS = {
    "Cache.read": "start and stop follow the utterance and the feature, as in a slice",
    "FeatureStorageConfig.check_dims": "of the store, which gives all four",
    "FeatureTable.read": "as Cache.read",
    "FeatureTable.read_into": "of the loaders, which give all five",
}


def public() -> Iterator[tuple[str, Callable[..., object]]]:
    """All public functions and classes but errors, by name."""
    for prefix, home in (("", featcache), ("samplers.", samplers), ("espnet.", espnet)):
        names = getattr(home, "__all__", None) or [name for name in vars(home) if name[0] != "_"]
        for name in names:
            value = getattr(home, name)
            error = isinstance(value, type) and issubclass(value, Exception)
            if callable(value) and get_origin(value) is None and not error:
                yield prefix + name, value


def methods() -> Iterator[tuple[str, Callable[..., object]]]:
    """Public methods that public classes define themselves, by class and name."""
    for name, cls in public():
        for method, value in vars(cls).items() if isinstance(cls, type) else ():
            function = getattr(value, "__func__", value)
            if method[0] != "_" and inspect.isfunction(function):
                yield f"{name}.{method}", function


def positional(call: Callable[..., object]) -> list[str]:
    """Names of the parameters that can be given by position, without self and cls."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [
        name for name, each in inspect.signature(call).parameters.items() if each.kind in kinds
    ]
    return [name for name in found if name not in ("self", "cls")]


def named(call: Callable[..., object]) -> bool:
    """Whether a parameter has a name of its own, or there is none at all."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kinds = [each.kind for each in inspect.signature(call).parameters.values()]
    return not kinds or any(kind not in variadic for kind in kinds)


@pytest.mark.parametrize(("name", "call"), list(public()))
def test_the_signature_of_a_public_name_is_visible_and_short(
    name: str, call: Callable[..., object]
) -> None:
    fits = named(call) and len(positional(call)) <= POSITIONAL
    assert fits != (name in EXCEPTIONS), inspect.signature(call)


@pytest.mark.parametrize(("name", "call"), list(methods()))
def test_the_signature_of_a_public_method_is_visible_and_short(
    name: str, call: Callable[..., object]
) -> None:
    fits = named(call) and len(positional(call)) <= POSITIONAL
    assert fits != (name in METHODS), inspect.signature(call)


def test_any_stands_only_where_another_toolkit_gives_no_type() -> None:
    found = dict[Callable[..., object], list[str]]()
    for _, each in public():
        bases = each.__mro__ if isinstance(each, type) else ()
        ours = [base for base in bases if base.__module__.startswith("featcache.")]
        values = [value for base in ours for value in vars(base).values()] if ours else [each]
        for value in values:
            function = getattr(value, "fget", getattr(value, "__func__", value))
            private = function is None or re.match("_[^_]", getattr(function, "__name__", "_x"))
            if inspect.isfunction(function) and not private:
                notes = inspect.get_annotations(function).items()
                found[function] = [name for name, note in notes if re.search(r"\bAny\b", str(note))]
    assert len(found) > 100
    assert sum(map(len, found.values())) <= 22, [
        f"{f.__qualname__}: {names}" for f, names in found.items() if names
    ]


def test_a_declaration_shows_its_settings() -> None:
    assert positional(featcache.FeatureStorageConfig) == ["name", "dtype"]
    assert positional(featcache.ParallelConfig) == ["env", "n_workers", "options"]
    assert positional(featcache.FeatureLoader) == ["source", "features"]
    assert positional(featcache.open) == ["path"]


# a keyword with its "=", and an extra of pip, as messages advise them
ADVISED = re.compile(r"(?<![\w.{'<-])([a-z][a-z_]{2,})=(?=[A-Z\[{'\".,; )]|\d|$)(?!=)")
EXTRA = re.compile(r"pip install '?featcache\[(\w+)\]")
STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
# of lhotse, Lightning, NumPy, DataLoader
OF_OTHERS = {
    "preserve_id", "use_distributed_sampler", "allow_pickle", "delimiter", "ndmin", "skiprows",
    "offset", "usecols",
    "multiprocessing_context",
}  # fmt: skip
OTHERS_LINES = ("kaldi_objects.py", "loads.py", "number_columns.py", "refused.py")
OWN = {"snr", "steps"}  # an example; of a method that is inherited


def said(path: Path) -> list[str]:
    """The texts of a module that are no docstrings, without what is put in."""
    code = re.sub(r'"""(.|\n)*?"""', "", path.read_text()).replace("\\n", " ")
    return [re.sub(r"\{[^{}]*\}", "{}", text) for text in STRING.findall(code) if " " in text]


def test_what_messages_advise_exists() -> None:
    modules = (featcache.inspect, kaldi, lhotse)
    beside = [each for module in modules for each in vars(module).values()]
    functions: list[Callable[..., object]] = [Packed, Padded, RemoteOptions]
    functions += filter(inspect.isfunction, beside)
    functions += [call for _, call in (*public(), *methods())]
    known = {name for call in functions for name in inspect.signature(call).parameters}
    # lines of other libraries, each of which is typed by a test of its own
    modules_of_ours = (path for path in sorted(MODULES) if path.name not in OTHERS_LINES)
    texts = [text for path in modules_of_ours for text in said(path)]
    advised = {name for text in texts for name in ADVISED.findall(text)}
    assert len(advised) > 40
    assert advised - OF_OTHERS - OWN <= known
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name for text in texts for name in EXTRA.findall(text)}
    assert "torch" in extras
    assert extras <= project["optional-dependencies"].keys()

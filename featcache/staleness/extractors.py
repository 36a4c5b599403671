"""Parts of an extractor, a Brain or the like, that its code names: modules, hparams, attributes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch

from featcache.staleness.follow import Follower
from featcache.staleness.members import MISSING, functions_in, is_method, step_into
from featcache.staleness.modules import unwrapped
from featcache.staleness.source import is_users
from featcache.staleness.steps import Chain, Step

CONTAINERS = ("modules", "raw_modules", "hparams")
# what a Brain has for training and for its own work
_OF_A_BRAIN = frozenset(
    [
        "checkpointer",
        "optimizers_dict",
        "optimizer",
        "optimizer_step",
        "scaler",
        "train_loader",
        "train_sampler",
        "profiler",
        "step",
        "nonfinite_count",
        "avg_train_loss",
        "device",
        "progressbar",
        "noprogressbar",
        "debug",
        "evaluation_ctx",
        "training_ctx",
        "stage",
        "training",
    ]
)
_OF_ANY = frozenset(["device", "training"])
# ways through all of a container
_WAYS_THROUGH = frozenset(
    ["items", "values", "keys", "__dict__", "children", "modules", "parameters"]
)


@dataclass
class Reached:
    """Parts of an extractor that its code names, by name."""

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    hparams: dict[str, object] = field(default_factory=dict)
    attributes: dict[str, object] = field(default_factory=dict)

    def note(self, kind: str, name: str, value: object) -> None:
        """Note a part."""
        if isinstance(value, torch.nn.Module):
            other = self.modules.setdefault(name, value)
            if other is not value:
                self.modules[f"{kind}.{name}"] = value
        elif kind == "hparams":
            self.hparams[name] = value
        else:
            self.attributes[name] = value


def reached(follower: Follower) -> Reached:
    """Return the parts of the extractor that followed code names; methods are taken to follow."""
    found = Reached()
    if follower.extractor is None:
        return found
    for chain in list(follower.of_extractor):
        _resolve(follower, chain.steps, found, whole=chain.whole)
    for name in ("__getattr__", "__getattribute__"):  # called without being named
        _take_methods(follower, follower.extractor, name)
    cls, held = type(follower.extractor), getattr(follower.extractor, "__dict__", {})
    there = {*held, *held.get("_modules", {})}
    there.update(name for base in cls.__mro__ if is_users(base) for name in vars(base))
    names = {*there} & (follower.free | follower.names_of(cls))
    names |= {name for name in there if follower.mentions(name, set())}
    for name in sorted(names):
        _resolve(follower, (Step(name),), found)
    return found


def take_definitions(follower: Follower, function: FunctionType) -> None:
    """Take a method of the extractor and what its bases define by this name."""
    bases = type(follower.extractor).__mro__ if follower.extractor is not None else ()
    owners = [
        base for base in bases if function in [*functions_in(vars(base).get(function.__name__))]
    ]
    follower.function(function, owners[0] if owners else bases[0] if bases else None)
    for base in bases:
        for each in functions_in(vars(base).get(function.__name__)):
            follower.function(each, base)


def _resolve(
    follower: Follower, steps: tuple[Step, ...], found: Reached, *, whole: bool = False
) -> None:
    if not steps:  # handed on as a whole: what is mentioned elsewhere counts
        return
    first, extractor = steps[0], follower.extractor
    if first.name is None:
        names = {*getattr(extractor, "__dict__", {}), *dir(type(extractor))}
        for name in sorted(_matching(first, names, follower)):
            _resolve(follower, (Step(name), *steps[1:]), found)
        return
    name = str(first.name)
    if name in CONTAINERS and not isinstance(extractor, torch.nn.Module):
        kind = "hparams" if name == "hparams" else "modules"
        held = modules_of(extractor) if kind == "modules" else hparams_of(extractor)
        _resolve_in(follower, kind, held, Chain(None, steps[1:], whole), found)
    elif name not in _not_read(extractor) and name not in follower.written_of(type(extractor)):
        _walk(follower, extractor, "attributes", steps, found)


def _not_read(extractor: object) -> frozenset[str]:
    """Return attributes that are for training and for a Brain's own work, where it is one."""
    is_brain = any(base.__module__ == "speechbrain.core" for base in type(extractor).__mro__)
    return _OF_A_BRAIN if is_brain else _OF_ANY


def _resolve_in(
    follower: Follower, kind: str, held: Mapping[str, Any], chain: Chain, found: Reached
) -> None:
    """Note what a chain names of the modules or hparams."""
    steps = chain.steps
    first = steps[0] if steps else Step("")
    if first.name in held:
        _walk(follower, held, kind, (first._replace(item=True), *steps[1:]), found)
        return
    through = chain.whole or first.name in _WAYS_THROUGH
    if first.name is None:
        names = _matching(first, held, follower)
    else:
        names = {*held} if through else {*held} & (follower.free | follower.text)
    everything = kind == "modules" and not names
    for name in sorted(held if everything else names):
        if kind == "modules" or not through or _is_plain(held[name]):
            _walk(follower, held, kind, (Step(name, item=True), *steps[1:]), found)


def _matching(step: Step, names: Any, follower: Follower) -> set[str]:
    """Return the names that a computed name may be."""
    if step.like is not None:
        return {name for name in names if re.fullmatch(step.like, name) and name[:2] != "__"}
    return {name for name in names if name in follower.text}


def _walk(
    follower: Follower, value: Any, kind: str, steps: tuple[Step, ...], found: Reached
) -> None:
    """Go along a chain as far as it leads to values, and note the last one, or its module."""
    name, module = "", None
    for number, step in enumerate(steps):
        inner = step_into(value, step)
        if inner is MISSING:
            break
        if value is not None and not isinstance(value, dict) and is_method(value, step.name, inner):
            _take_methods(follower, value, str(step.name))
            steps = steps[number:]
            follower.free.update(str(each.name) for each in steps[1:] if each.name is not None)
            break
        value, name = inner, f"{name}.{step.name}" if name else str(step.name)
        if isinstance(value, torch.nn.Module):
            module = name, value
    else:
        steps = ()
    if isinstance(value, FunctionType | MethodType) and kind == "attributes":
        function: Any = getattr(value, "__func__", value)
        bound = isinstance(value, MethodType) and value.__self__ is follower.extractor
        follower.function(function, type(follower.extractor) if bound else None)
    follower.free.update(
        each.name
        for each in steps
        if isinstance(each.name, str) and value is not follower.extractor
    )
    if module is not None:
        found.note(kind, *module)
    elif name:
        found.note(kind, name, value)


def _take_methods(follower: Follower, value: object, name: str) -> None:
    for base in type(value).__mro__:
        held = vars(base).get(name)
        for function in functions_in(held):
            follower.function(function, base)
        if isinstance(held, functools.partialmethod):
            follower.note(base.__qualname__, name, held, (id(base), name))


def modules_of(extractor: object) -> dict[str, torch.nn.Module]:
    """Return the modules of a Brain or of anything like one."""
    if isinstance(extractor, torch.nn.Module):  # whose `modules` is a method
        return dict(extractor.named_children())
    modules = getattr(extractor, "modules", {})
    # wrapped as a whole
    if isinstance(modules, torch.nn.Module) and not isinstance(modules, torch.nn.ModuleDict):
        return dict(unwrapped(modules).named_children())
    return items_of(modules)


def roots_of(extractor: object) -> list[torch.nn.Module]:
    """Return the modules that hold all others of a Brain or of anything like one."""
    is_module = isinstance(extractor, torch.nn.Module)  # whose `modules` is a method
    whole = extractor if is_module else getattr(extractor, "modules", None)
    return [whole] if isinstance(whole, torch.nn.Module) else [*modules_of(extractor).values()]


def hparams_of(extractor: object) -> dict[str, Any]:
    """Return the hparams of a Brain or of anything like one."""
    return items_of(getattr(extractor, "hparams", {}))


def items_of(container: Any) -> dict[str, Any]:
    """Return the items of a mapping or the attributes of a namespace."""
    return dict(container.items() if hasattr(container, "items") else vars(container))


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple | dict)

"""Description of torch modules: weights, and the settings that computing in evaluation reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, TypeGuard

import torch

from featcache.staleness.arrays import digests_of_tensors
from featcache.staleness.left_out import is_for_training, is_left_out
from featcache.staleness.scripted import scripted_settings
from featcache.staleness.source import is_users
from featcache.staleness.values import NOTHING, Values, settled
from featcache.staleness.written import names_in_code, written_by
from featcache.store.format.files import digest

LARGE = 4
_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# machinery of torch, and what is described apart
_OF_TORCH = frozenset(vars(torch.nn.Module())) | {
    "_compiled_call_impl",
    "all_tied_weights_keys",
}


class Weights:
    """Weights of a module, which are to be read later."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.digests: dict[str, str] = {}  # of each, once they were read

    def digest(self) -> str:
        """Return the xxh3-64 of parameters and buffers, persistent or not."""
        self.digests = digests_of_tensors(dict(_tensors(self.module)))
        return digest(json.dumps(self.digests).encode())


class Described:
    """A module's description: its weights and its settings by path."""

    def __init__(self, module: torch.nn.Module, settings: Mapping[str, object]) -> None:
        self.weights, self.settings = Weights(module), settings

    def to_json(self) -> dict[str, object]:
        """Return the description as plain JSON; reads the weights."""
        return {"weights": self.weights.digest(), **self.settings_to_json()}

    def settings_to_json(self) -> dict[str, object]:
        """Return the settings as plain JSON."""
        shown: dict[str, object] = {}
        known: dict[str, str] = {}  # large settings, which many parts share: a configuration
        trees: dict[int, str] = {}
        for path, tree in sorted(self.settings.items()):
            if isinstance(tree, dict) and len(tree) > LARGE:
                if id(tree) not in trees:
                    value = settled(tree)
                    text = json.dumps(value, sort_keys=True)
                    trees[id(tree)] = known.setdefault(text, path)
                    if known[text] == path:
                        shown[path] = value
                        continue
                shown[path] = f"(as {trees[id(tree)]})"
            else:
                shown[path] = settled(tree)
        return {"settings": shown}


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of a parallel or compiled one."""
    while True:
        parts: Any = module._modules  # noqa: SLF001  # of TorchScript it is no dict
        inner = dict(parts.items()).get("_orig_mod")
        if inner is None and isinstance(module, _PARALLEL):
            inner = module.module
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def parts_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield all modules inside of one, itself first, by path; each once."""
    seen: set[int] = set()
    pending = [("", unwrapped(module))]
    while pending:
        path, part = pending.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        inner = [
            (f"{path}.{name}" if path else name, unwrapped(child))
            for name, child in _children(part)
        ]
        pending[:0] = inner


def _children(part: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in part._modules.items():  # noqa: SLF001  # named_children leaves out doubles
        if child is not None:
            yield name, child


def describe_module(module: torch.nn.Module, values: Values) -> Described:
    """Describe a module; `values` describes its attributes."""
    settings: dict[str, object] = {}
    for path, part in parts_of(module):
        settings[path or "class"] = _name_of(part)
        prefix = f"{path}." if path else ""
        held = scripted_settings(part) if _is_scripted(part) else _attributes(part, values)
        for name, value in [*held, *_saved(part), *_hooked(part)]:
            found = values.describe(value, f"{prefix}{name}")
            if found is not NOTHING:
                settings[prefix + name] = found
    return Described(unwrapped(module), settings)


def _is_scripted(part: torch.nn.Module) -> TypeGuard[torch.jit.ScriptModule]:
    return isinstance(part, torch.jit.ScriptModule)


def _name_of(part: torch.nn.Module) -> str:
    return str(part.original_name) if _is_scripted(part) else type(part).__qualname__


def _attributes(part: torch.nn.Module, values: Values) -> Iterator[tuple[str, object]]:
    attributes = values.code.attributes(part)
    attributes = vars(part) if attributes is None else attributes
    left_out = _OF_TORCH | written_by(_class(part)) | _made_by_hooks(part)
    known = names_in_code(_class(part))
    for name, value in attributes.items():
        if name in left_out or isinstance(value, torch.nn.Module):
            continue
        if known is not None and name not in known and not values.code.reads(part, name):
            continue  # a note of other libraries: `torch.amp.custom_fwd`, transformers' hooks
        library = not is_users(type(part))
        if not is_for_training(type(part), name) and not (library and is_left_out(name)):
            yield name, value


def _saved(part: Any) -> Iterator[tuple[str, object]]:
    """Yield what a module saves beside its weights: packed ones, whatever its class makes of it."""
    plain, cls = torch.nn.Module, _class(part)
    if cls.get_extra_state is not plain.get_extra_state and not _is_scripted(part):
        yield "extra state", part.get_extra_state()
    saves = cls._save_to_state_dict is not plain._save_to_state_dict  # noqa: SLF001
    if saves and not _is_scripted(part):
        saved: dict[str, object] = {}
        part._save_to_state_dict(saved, "", False)  # noqa: SLF001
        held = {*part._parameters, *part._buffers}  # noqa: SLF001
        yield "saved", {name: value for name, value in saved.items() if name not in held}


def _hooked(part: torch.nn.Module) -> Iterator[tuple[str, object]]:
    for name in _HOOKS:
        hooks = [hook for hook in vars(part).get(name, {}).values() if not _is_librarys(hook)]
        if hooks:
            yield name.strip("_"), hooks


def _is_librarys(hook: object) -> bool:
    """Tell whether a hook is a function of a library, which takes notes; objects may compute."""
    return isinstance(hook, FunctionType) and not is_users(hook)


def _made_by_hooks(part: torch.nn.Module) -> set[str]:
    """Return the attributes that torch's own hooks make of parameters: `weight_norm`, pruning."""
    hooks = vars(part).get("_forward_pre_hooks", {}).values()
    names = [getattr(hook, key, None) for hook in hooks for key in ("name", "_tensor_name")]
    return {name for name in names if isinstance(name, str)}


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in parts_of(module):
        prefix = f"{path}." if path else ""
        for kind in ("_parameters", "_buffers"):
            for name, value in getattr(part, kind).items():
                counts = name not in _caches(part) and not is_for_training(type(part), name)
                if value is not None and counts:
                    yield prefix + name, value


def _caches(part: Any) -> frozenset[str]:
    """Return the buffers that are no weights: not saved, and written while computing."""
    unsaved: set[str] = part._non_persistent_buffers_set  # noqa: SLF001
    return written_by(_class(part)) & unsaved


def _class(part: torch.nn.Module) -> Any:
    return type(part)

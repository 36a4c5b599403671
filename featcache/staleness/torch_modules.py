"""Description of torch modules: weights, and the settings that computing in evaluation reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from types import FunctionType
from typing import Any, TypeGuard

import torch

from featcache.errors import ConfigError
from featcache.format import digest
from featcache.staleness.code import is_users
from featcache.staleness.names import Way, is_changed, names_in_code, texts_of_makers, written_by
from featcache.staleness.values import NOTHING, Values, digests_of_tensors, left_out_of, settled

# Description of TorchScript modules: the code that they hold, and what it names of themselves.

# numbers that tell classes of one name apart, in the order in which they were made
_NUMBERED = re.compile(r"\.?_*torch_mangle_\d+")
_OWN = re.compile(r'\bself\.(\w+)|getattr\(self, "(\w+)"\)')


def scripted_settings(part: torch.jit.ScriptModule) -> Iterator[tuple[str, object]]:
    """Yield the code, and the attributes that it reads, of a module without those inside of it."""
    held: Any = part._c  # noqa: SLF001  # no public name
    kinds: Any = (part._parameters, part._buffers, part._modules)  # noqa: SLF001
    apart = {name for kind in kinds for name in kind.keys()}  # noqa: SIM118
    methods, named = sorted(held._method_names()), set[str]()  # noqa: SLF001
    for method in methods:
        code, constants = held._get_method(method).code_with_constants  # noqa: SLF001
        yield f"code of {method}", _NUMBERED.sub("", code).split("\n")
        if constants:
            yield f"constants of {method}", constants
        named.update(one or other for one, other in _OWN.findall(code))
    for name in sorted(named - apart - {*methods}):
        if held.hasattr(name):
            yield name, held.getattr(name)


# Description of torch modules: weights, and the settings that computing in evaluation reads.

LARGE = 4
_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# machinery of torch, and what is described apart
_OF_TORCH = frozenset([*vars(torch.nn.Module()), "_compiled_call_impl"])


class Weights:
    """Weights of a module, which are to be read later, but for some buffers by path."""

    def __init__(self, module: torch.nn.Module, left_out: Set[str]) -> None:
        self.module, self._left_out = module, left_out
        self.digests: dict[str, str] = {}  # of each, once they were read

    def digest(self) -> str:
        """Return the xxh3-64 of parameters and buffers, persistent or not.

        Raises `ConfigError` for those that are made by the first call.
        """
        tensors = {k: v for k, v in _tensors(self.module) if k not in self._left_out}
        lazy = [name for name, each in tensors.items() if torch.nn.parameter.is_lazy(each)]
        if lazy:
            raise ConfigError(
                f"{lazy[0]!r} of a {type(self.module).__name__!r} has no shape before the module "
                "is first called; call it once on an example, or load its weights, before its "
                "results are cached"
            )
        self.digests = digests_of_tensors(tensors)
        return digest(json.dumps(self.digests).encode())


class ModuleDescription:
    """A module's description: its weights and its settings by path."""

    def __init__(self, weights: Weights, settings: Mapping[str, object]) -> None:
        self.weights, self.settings = weights, settings

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
        inner: object = None
        if type(module).__module__.startswith("torch._dynamo."):  # torch.compile's
            inner = getattr(module, "_orig_mod", None)
        elif isinstance(module, _PARALLEL):
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
        pending[:0] = [
            (f"{path}.{name}" if path else name, unwrapped(child))
            for name, child in part._modules.items()  # noqa: SLF001  # with doubles
            if child is not None
        ]


def describe_module(module: torch.nn.Module, values: Values) -> ModuleDescription:
    """Describe a module; `values` describes its attributes."""
    settings: dict[str, object] = {}
    unread: set[str] = set()
    for path, part in parts_of(module):
        settings[path or "class"] = _name_of(part)
        prefix = f"{path}." if path else ""
        if (order := _order(part)) is not None:
            settings[f"{prefix}order of layers"] = order
        unread.update(prefix + name for name in _unread_buffers(part, values))
        held = scripted_settings(part) if _is_scripted(part) else _attributes(part, values)
        for name, value in [*held, *_saved(part), *_hooked(part)]:
            found = values.describe(value, f"{prefix}{name}")
            if found is not NOTHING:
                settings[prefix + name] = found
    return ModuleDescription(Weights(unwrapped(module), unread), settings)


def _order(part: torch.nn.Module) -> list[str] | None:
    """Return the names of layers that are called in their order; None where names tell it.

    The order of a plain `ModuleDict` is none: its modules are mostly asked for by name.
    """
    calls_all = isinstance(part, torch.nn.ModuleDict) and type(part) is not torch.nn.ModuleDict
    if not (isinstance(part, torch.nn.Sequential) or calls_all):
        return None
    names = [*part._modules]  # noqa: SLF001
    return None if names == [str(number) for number in range(len(names))] else names


def _is_scripted(part: torch.nn.Module) -> TypeGuard[torch.jit.ScriptModule]:
    return isinstance(part, torch.jit.ScriptModule)


def _name_of(part: torch.nn.Module) -> str:
    return str(part.original_name) if _is_scripted(part) else type(part).__qualname__


def _attributes(part: torch.nn.Module, values: Values) -> Iterator[tuple[str, object]]:
    attributes = values.code.attributes(part)
    attributes = vars(part) if attributes is None else attributes
    left_out, written = _OF_TORCH | _made_by_hooks(part), written_by(_class(part))
    known = names_in_code(_class(part))
    for name, value in attributes.items():
        if name in left_out or isinstance(value, torch.nn.Module):
            continue
        if is_changed(written.get(name), value):
            continue
        if known is not None and name not in known and not values.code.reads(part, name):
            continue  # a note of other libraries: `torch.amp.custom_fwd`, transformers' hooks
        if name not in left_out_of(_class(part)) or values.code.reads(part, name):
            yield name, value


def _saved(part: torch.nn.Module) -> Iterator[tuple[str, object]]:
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
        hooks = [
            hook
            for hook in vars(part).get(name, {}).values()
            # a function of a library takes notes; objects may compute
            if not isinstance(hook, FunctionType) or is_users(hook)
        ]
        if hooks:
            yield name.strip("_"), hooks


def _made_by_hooks(part: torch.nn.Module) -> set[str]:
    """Return the attributes that torch's own hooks make of parameters: `weight_norm`, pruning."""
    hooks = vars(part).get("_forward_pre_hooks", {}).values()
    torchs = [hook for hook in hooks if not is_users(type(hook))]
    names = [getattr(hook, key, None) for hook in torchs for key in ("name", "_tensor_name")]
    return {name for name in names if isinstance(name, str)}


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, part in parts_of(module):
        prefix = f"{path}." if path else ""
        for kind in ("_parameters", "_buffers"):
            for name, value in getattr(part, kind).items():
                if value is not None:
                    yield prefix + name, value


def _unread_buffers(part: torch.nn.Module, values: Values) -> Iterator[str]:
    """Yield the buffers that are no weights: caches of computing, counts of a library's class."""
    unsaved: set[str] = part._non_persistent_buffers_set  # noqa: SLF001
    written, left_out = written_by(_class(part)), left_out_of(_class(part))
    given = texts_of_makers(_class(part))  # what a constructor registers may be what it was given
    for name in part._buffers.keys():  # noqa: SLF001, SIM118  # of TorchScript it is no dict
        is_cache = name in unsaved and name not in given and written.get(name) is Way.STORED
        if is_cache or (name in left_out and not values.code.reads(part, name)):
            yield name


def _class(part: torch.nn.Module) -> Any:
    return type(part)

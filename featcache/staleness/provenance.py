"""Provenance of features: the code, modules and values that a function computes them with.

The code is followed: the function, then the functions, methods and classes of the user that it
names, in whatever file, then those that these name (`featcache.staleness.follow`). These count,
where the code names them:

- modules: `self.modules.X`, `self.hparams.X`, `self.X`, a global, an argument of a partial. Where
  the code goes through `self.modules` without a name (a loop, a variable as key), all of them.
- hparams: `self.hparams.X`, whatever it is. Where they are handed on as a whole, those that the
  code mentions.
- attributes of the object itself, and constants: values of files, classes, closures, defaults.
- source: the code, without comments, docstrings, annotations, messages and names of variables.
- torch: the settings of torch that change what it computes.

What the code itself writes (caches, counters) is none of these. Values are described as
`featcache.staleness.values` says, modules as `featcache.staleness.torch_modules`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch

from featcache.errors import ConfigError
from featcache.format import RULES
from featcache.staleness.code import code_digest, is_users, tree_digest
from featcache.staleness.follow import Follower, Function, Place
from featcache.staleness.members import functions_in, is_method, is_pythons, step_into
from featcache.staleness.names import Chain, Step
from featcache.staleness.torch_modules import unwrapped
from featcache.staleness.values import (
    MISSING,
    NOTHING,
    Values,
    is_configuration,
    left_out_of,
    settled,
    wrapped_by,
)

# Version of the rules by which this package describes code and values: raised with each change of
# them that gives the same code another fingerprint (`tests/staleness/test_rules.py` fails then).
# Fingerprints without one are of version 0. The digests of weights are the same in all versions.
VERSION = 2
CONTAINERS = ("modules", "raw_modules", "hparams")
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
    cls: Any = type(extractor)
    if first.name is None:
        names = {*getattr(extractor, "__dict__", {}), *dir(cls)}
        for name in sorted(_matching(first, names, follower)):
            _resolve(follower, (Step(name), *steps[1:]), found)
        return
    name = str(first.name)
    container = _container(extractor, name) if name in CONTAINERS else None
    if container is not None:
        kind = "hparams" if name == "hparams" else "modules"
        held = items_of(container) if kind == "hparams" else _parts_of(container)
        _resolve_in(follower, kind, held, Chain(None, steps[1:], whole), found)
    elif name not in left_out_of(cls) and not follower.writes(extractor, first):
        _walk(follower, extractor, "attributes", steps, found)


def _resolve_in(
    follower: Follower, kind: str, held: Mapping[str, object], chain: Chain, found: Reached
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


def _matching(step: Step, names: Iterable[str], follower: Follower) -> set[str]:
    """Return the names that a computed name may be."""
    if step.like is not None:
        return {name for name in names if re.fullmatch(step.like, name) and not is_pythons(name)}
    return {name for name in names if name in follower.text}


def _walk(
    follower: Follower, value: object, kind: str, steps: tuple[Step, ...], found: Reached
) -> None:
    """Go along a chain as far as it leads to values, and note the last one, or its module."""
    name, module = "", None
    for number, step in enumerate(steps):
        follower.note_passed(value)
        inner = step_into(value, step)
        if inner is MISSING:
            break
        if number and not step.item and is_users(type(value)) and follower.writes(value, step):
            if module is not None:
                found.note(kind, *module)
            return
        if value is not None and not isinstance(value, dict) and is_method(value, step.name, inner):
            _take_methods(follower, value, str(step.name))
            steps = steps[number:]
            follower.mention(str(each.name) for each in steps[1:] if each.name is not None)
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
    follower.mention(
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
    return _parts_of(getattr(extractor, "modules", {}))


def _parts_of(modules: object) -> dict[str, Any]:
    # wrapped as a whole
    if isinstance(modules, torch.nn.Module) and not isinstance(modules, torch.nn.ModuleDict):
        return dict(unwrapped(modules).named_children())
    return items_of(modules)


def roots_of(extractor: object) -> list[torch.nn.Module]:
    """Return the modules that hold all others of a Brain or of anything like one."""
    is_module = isinstance(extractor, torch.nn.Module)  # whose `modules` is a method
    whole = extractor if is_module else getattr(extractor, "modules", None)
    held = [whole] if isinstance(whole, torch.nn.Module) else modules_of(extractor).values()
    return [each for each in held if isinstance(each, torch.nn.Module)]


def hparams_of(extractor: object) -> dict[str, object]:
    """Return the hparams of a Brain or of anything like one."""
    return items_of(getattr(extractor, "hparams", {}))


def items_of(container: Any) -> dict[str, object]:
    """Return the items of a mapping or the attributes of a namespace; none of anything else."""
    if isinstance(container, Mapping | torch.nn.ModuleDict) or is_configuration(container):
        return dict(container.items())
    return dict(vars(container)) if _is_namespace(container) else {}


def _container(extractor: object, name: str) -> object:
    """Return an object's `modules` or `hparams`; None if they hold no others by name."""
    if isinstance(extractor, torch.nn.Module):  # whose `modules` is a method
        return None
    value = getattr(extractor, name, getattr(extractor, "modules", None))
    held = isinstance(value, Mapping | torch.nn.Module) or is_configuration(value)
    return value if held or _is_namespace(value) else None


def _is_namespace(value: object) -> bool:
    known = isinstance(value, SimpleNamespace | argparse.Namespace) or is_users(type(value))
    return known and hasattr(value, "__dict__")


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | tuple | dict)


# Parameters whose names count, since something gives arguments by these names.
#
# A call that gives `b` to `f(a, b)` computes something else once the two have changed their
# names.


class KeptParameters:
    """Names of parameters that count, by the functions that have them.

    Args:
        functions: all that were followed.
        text: of their code and values, which may be keys that a call spreads with `**`.
    """

    def __init__(self, functions: Collection[Function], text: Set[str]) -> None:
        names = [inner for each in functions for inner in each.names.with_inner()]
        self._given = set[tuple[str | None, str]]().union(*(each.given for each in names))
        self._known = {each.function.__code__.co_name for each in functions}
        self._text = text if any(each.spread for each in names) else set[str]()

    def of(self, function: str) -> set[str]:
        """Return those of functions of a name: given to them, or to what is not known by name."""
        mine = (arg for to, arg in self._given if to == function or to not in self._known)
        return {*mine, *self._text}


# Values that computing changes: memos, counters, tables that are filled. They count as before.
#
# What a library keeps on its objects while they compute is no setting, but nothing tells that
# from their code. So settings are described again after each run, and those that are others now
# are shown as they were, as long as nobody else changes them: the next split has the same
# fingerprint as in a new process.

_ABSENT = object()
FieldPath = tuple[str, ...]
# by the object that computes: what is at a path now, and what was there
_CHANGED: weakref.WeakKeyDictionary[Any, dict[FieldPath, tuple[object, object]]]
_CHANGED = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def noting_changes(made_with: Provenance, again: Callable[[], Provenance]) -> Iterator[None]:
    """Note what changes, within the context, of the settings that features are computed with."""
    before = made_with.settings()
    try:
        yield
    finally:
        with contextlib.suppress(ConfigError):  # code was edited meanwhile: told by the next run
            _note(made_with.extractor, before, again().settings())


def as_before(extractor: object, shown: dict[str, object]) -> None:
    """Put the values of before in place of those that computing has left."""
    known = _known(extractor)
    for path in sorted(known, key=len, reverse=True):  # what is inside comes first
        now, was = known[path]
        held: Any = shown
        for key in path[:-1]:
            held = held.get(key) if isinstance(held, dict) else None
        if isinstance(held, dict) and held.get(path[-1], _ABSENT) == now:
            if was is _ABSENT:
                held.pop(path[-1], None)
            else:
                held[path[-1]] = was


def _note(extractor: object, before: object, after: object) -> None:
    known = dict(_known(extractor))
    for path, was, now in _changes(before, after, ()):
        noted = known.get(path)
        known[path] = (now, noted[1] if noted is not None and noted[0] == was else was)
    if known:
        with contextlib.suppress(TypeError):  # an object that has no hash, or no weak references
            _CHANGED[extractor] = known


def _known(extractor: object) -> dict[FieldPath, tuple[object, object]]:
    try:
        return _CHANGED.get(extractor, {})
    except TypeError:
        return {}


def _changes(
    before: object, after: object, path: FieldPath
) -> Iterator[tuple[FieldPath, object, object]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            inner = before.get(key, _ABSENT), after.get(key, _ABSENT)
            yield from _changes(*inner, (*path, key))
    elif before is _ABSENT or after is _ABSENT or before != after:
        yield path, before, after


_log = logging.getLogger("featcache")
_told: set[str] = set()  # what nothing describes, by name


@dataclass(frozen=True)
class Provenance:
    """Code, modules and values that features are made with; see the module's docstring.

    Attributes:
        modules: those that count, by name.
        described: the modules, not yet read.
        found: other sections of the fingerprint, not yet read.
        source: digest of each function, by qualified name.
        mentioned: attribute names and text in the code: what it may read of a data set's items.
        opaque: what the code names and nothing can describe.
        sources: the text of each function, by file and qualified name.
        names: file and qualified name of each function in `source`.
        compiled: digest of the byte code of each function.
        without_source: functions whose source is not kept, and which count by their byte code.
        folder: that of the file of the first one.
        extractor: the object that computes, if there is one.
        written: attributes of it that the code writes.
        held: the functions, classes and objects in which all of this was found.
        of_libraries: names, in fields of the fingerprint, of objects of libraries among these.
    """

    modules: dict[str, torch.nn.Module] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=dict)  # the modules
    found: dict[str, dict[str, object]] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)
    mentioned: frozenset[str] = frozenset()
    opaque: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    compiled: dict[str, str] = field(default_factory=dict)
    without_source: tuple[str, ...] = ()
    folder: str | None = None
    extractor: object = None
    written: frozenset[str] = frozenset()
    held: tuple[object, ...] = ()
    of_libraries: frozenset[str] = frozenset()

    def fingerprint(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the fingerprint as JSON; what the user has given takes the place of the found.

        Logs once what nothing can describe.
        """
        untold = [name for name in self.opaque if name not in _told and not _is_given(name, given)]
        if untold:
            _told.update(untold)
            key = untold[0].partition(" ")[0].rpartition(".")[2]
            _log.warning(
                "nothing tells featcache what is in %s, which features are computed with: changes "
                "of it are not seen; name them: fingerprint={%r: a version, or a digest}",
                ", ".join(untold),
                key,
            )
        return self.sections(given)

    def settings(self) -> dict[str, object]:
        """Return what the fingerprint tells of values, without weights."""
        found: dict[str, object] = {
            section: {name: settled(value) for name, value in values.items()}
            for section, values in self.found.items()
        }
        modules = {name: each.settings_to_json() for name, each in self.described.items()}
        return {**found, "modules": modules}

    def sections(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the fingerprint, and log nothing."""
        sections: dict[str, Any] = {"source": self.source, "modules": self.described, **self.found}
        shown: dict[str, object] = {}
        for name, values in sections.items():
            if name not in given and (values or name in ("source", "modules")):
                # reading large weights takes a moment
                shown[name] = {key: settled(value) for key, value in sorted(values.items())}
        as_before(self.extractor, shown)
        return dict(sorted({**shown, RULES: VERSION, **given}.items()))


class TooDeepError(ConfigError):
    """Something that features are computed with is nested too deep to be described."""


def provenance(
    function: object,
    extractor: object = None,
    *,
    named: Mapping[str, object] | None = None,
    data: Sequence[object] = (),
) -> Provenance:
    """Return the provenance of what `function` computes.

    Args:
        function: a function or method, a partial of one, or an object that can be called.
        extractor: the object whose method it is; by default that of a bound method.
        named: other values that count, by name: a collate function, modules of an environment.
        data: a data set, its ids: these are no settings, though the code may name them.

    Raises `ConfigError` for code that was edited since it was loaded, and for what is nested too
    deep.
    """
    named, function, extractor = _taken_apart(function, extractor, dict(named or {}))
    follower = Follower(extractor)
    if isinstance(function, FunctionType):
        take_definitions(follower, function)
    if not (isinstance(function, FunctionType) and is_users(function)):
        named["compute_features"] = function  # as `torch.no_grad()` makes it of a user's function
    try:
        while True:
            size = follower.size
            while follower.follow():
                pass
            found = reached(follower)
            values = Values(follower, data)
            sections = _described(found, follower, values, named)
            if follower.size == size:
                break
        return _provenance(follower, found, sections, values)
    except RecursionError as error:
        raise TooDeepError(
            f"{getattr(function, '__qualname__', function)!r:.80} computes with something that "
            "is nested too deep to be described; keep it where the code does not name it, and say "
            "what it is: fingerprint={'tree': a version, or a digest}"
        ) from error


def _is_given(opaque: str, given: Mapping[str, object]) -> bool:
    """Whether the user names a part by any of the names on the way to it."""
    return not given.keys().isdisjoint(opaque.partition(" ")[0].split("."))


def _taken_apart(
    function: object, extractor: object, named: dict[str, object]
) -> tuple[dict[str, object], object, object]:
    """Return other values that count, a plain function, and the object whose method it is."""
    function = _unwrapped(function, named)
    if isinstance(function, MethodType):
        extractor = function.__self__ if extractor is None else extractor
        function = function.__func__
    elif isinstance(function, torch.nn.Module) and not any(map(is_users, type(function).__mro__)):
        pass  # of a library: all of it counts
    elif not isinstance(function, FunctionType) and not isinstance(function, type):
        method = "forward" if isinstance(function, torch.nn.Module) else "__call__"
        if isinstance(inner := getattr(type(function), method, None), FunctionType):
            extractor, function = function, inner
    return named, function, extractor


def _unwrapped(function: object, named: dict[str, object]) -> object:
    """Return what partials and functions of libraries call; what they call it with is `named`."""
    while True:
        inner, precisions = wrapped_by(function)
        if isinstance(function, functools.partial):
            named |= {f"argument {number}": value for number, value in enumerate(function.args)}
            named |= function.keywords
            inner = function.func
        elif isinstance(inner, torch.nn.Module) and not is_users(type(inner)):
            compiled = inner._modules.get("_orig_mod")  # noqa: SLF001  # by torch.compile
            inner = inner if compiled is None else compiled
        is_cache = not isinstance(function, FunctionType) and isinstance(inner, FunctionType)
        if inner is function or (is_cache and not isinstance(function, functools.partial)):
            return function
        if precisions:
            named["autocast"] = precisions
        function = inner


def _described(
    found: Reached, follower: Follower, values: Values, named: Mapping[str, object]
) -> dict[str, dict[str, object]]:
    """Describe all that counts, by section of the fingerprint."""
    modules, constants = dict(found.modules), dict[str, dict[str, object]]()
    for label, held in follower.values.items():
        described = dict(_constants(label, held, follower, values, modules))
        if described:
            constants[label] = described
    given: dict[str, object] = {}
    for name, value in named.items():
        if isinstance(value, torch.nn.Module):
            modules[name] = value
        elif not _is_code(described_value := values.describe(value, name)):
            given[name] = described_value
    sections: dict[str, dict[str, object]] = {"constants": dict(constants), "given": given}
    for section, items in (("hparams", found.hparams), ("attributes", found.attributes)):
        trees = {name: values.describe(value, name) for name, value in items.items()}
        sections[section] = {k: v for k, v in trees.items() if not _is_nothing(k, v)}
    found.modules.update(modules)
    sections["modules"] = {name: values.describe(part) for name, part in modules.items()}
    for section in ("constants", "given", "hparams", "attributes"):
        follower.mention(_texts(sections[section]), as_text=True)
    return sections


def _constants(
    label: str,
    held: Mapping[str, tuple[object, Place]],
    follower: Follower,
    values: Values,
    modules: dict[str, torch.nn.Module],
) -> Iterator[tuple[str, object]]:
    for name, (value, holder) in list(held.items()):
        if follower.is_written(holder) or is_pythons(name.rpartition(".")[2]):
            continue
        if isinstance(value, torch.nn.Module):
            modules.setdefault(name, value)
            if modules[name] is value:
                continue
        tree = values.describe(value, name)
        named_so = isinstance(value, FunctionType | type) and value.__name__ == name.split(".")[-1]
        if not (_is_nothing(name, tree) or (named_so and isinstance(tree, str))):
            yield name, tree


def _is_nothing(name: str, tree: object) -> bool:
    """Whether a description adds nothing: of a function or class by its own name."""
    if tree is NOTHING:
        return True
    kind, _, label = tree.partition(" ") if isinstance(tree, str) else ("", "", "")
    last = name.rpartition(".")[2]
    return kind in ("function", "class") and label.partition(" ")[0].rpartition(".")[2] == last


def _is_code(tree: object) -> bool:
    """Whether a description names code only, which is followed, or a library's."""
    return tree is NOTHING or (isinstance(tree, str) and tree.startswith(("function ", "class ")))


def _texts(tree: object) -> Iterator[str]:
    """Yield the texts in a description, which may be names."""
    if isinstance(tree, dict | list):
        for inner in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(inner)
    elif isinstance(tree, str) and tree.isidentifier():
        yield tree


def _provenance(
    follower: Follower, found: Reached, sections: dict[str, dict[str, object]], values: Values
) -> Provenance:
    functions = follower.functions.values()
    kept = KeptParameters(functions, follower.text)
    source, sources, names = dict[str, str](), dict[str, str](), dict[str, str]()
    for each in functions:
        tree = each.code.tree
        code = each.function.__code__
        source[each.label] = (
            code_digest(code) if tree is None else tree_digest(tree, kept.of(code.co_name))
        )
        names[each.label] = f"{Path(each.code.file).name}:{each.name}"
        sources[names[each.label]] = each.code.text
    described = sections.pop("modules")
    sections["torch"] = _torch_settings()
    return Provenance(
        modules={name: part for name, part in found.modules.items() if name in described},
        described=described,
        found=sections,
        source=source,
        mentioned=frozenset(follower.free | follower.text | _attributes(follower)),
        opaque=tuple(dict.fromkeys(values.opaque)),
        sources=sources,
        names=names,
        compiled={each.label: code_digest(each.function.__code__) for each in functions},
        without_source=tuple(each.label for each in functions if each.code.tree is None),
        extractor=follower.extractor,
        written=frozenset(follower.written_of(type(follower.extractor))),
        folder=next((str(Path(each.code.file).parent) for each in functions), None),
        held=(*follower.functions, *follower.classes, *follower.passed, *values.seen),
        of_libraries=frozenset(values.of_libraries - {""}),
    )


def _attributes(follower: Follower) -> set[str]:
    chains = [chain for each in follower.functions.values() for chain in each.names.read]
    return {step.name for chain in chains for step in chain.steps if isinstance(step.name, str)}


def _torch_settings() -> dict[str, object]:
    """Return the settings of torch that change what it computes.

    To import SpeechBrain sets the precision of products to "high", which means nothing on a CPU.
    """
    precision = torch.get_float32_matmul_precision()
    if precision == "high" and not torch.cuda.is_available():
        precision = "highest"
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": precision,
    }

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
`featcache.staleness.values` says, modules as `featcache.staleness.modules`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch

from featcache.staleness.before_computing import as_before
from featcache.staleness.extractors import Reached, reached, take_definitions
from featcache.staleness.follow import Follower
from featcache.staleness.kept_parameters import KeptParameters
from featcache.staleness.normal_form import code_digest, tree_digest
from featcache.staleness.values import NOTHING, Values, settled

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
        return dict(sorted({**shown, **given}.items()))


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

    Raises `ConfigError` for code that was edited since it was loaded.
    """
    named, function, extractor = _taken_apart(function, extractor, dict(named or {}))
    follower = Follower(extractor)
    if isinstance(function, FunctionType):
        take_definitions(follower, function)
    else:
        named["compute_features"] = function
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


def _is_given(opaque: str, given: Mapping[str, object]) -> bool:
    """Tell whether the user names a part by any of the names on the way to it."""
    return not given.keys().isdisjoint(opaque.partition(" ")[0].split("."))


def _taken_apart(
    function: Any, extractor: object, named: dict[str, object]
) -> tuple[dict[str, object], Any, object]:
    """Return other values that count, a plain function, and the object whose method it is."""
    while isinstance(function, functools.partial):
        named |= {f"argument {number}": value for number, value in enumerate(function.args)}
        named |= function.keywords
        function = function.func
    if isinstance(function, MethodType):
        extractor = function.__self__ if extractor is None else extractor
        function = function.__func__
    elif not isinstance(function, FunctionType) and not isinstance(function, type):
        method = "forward" if isinstance(function, torch.nn.Module) else "__call__"
        if isinstance(inner := getattr(type(function), method, None), FunctionType):
            extractor, function = function, inner
    return named, function, extractor


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
        follower.text.update(_texts(sections[section]))
    return sections


def _constants(
    label: str,
    held: Mapping[str, Any],
    follower: Follower,
    values: Values,
    modules: dict[str, torch.nn.Module],
) -> Iterator[tuple[str, object]]:
    for name, (value, holder) in list(held.items()):
        if follower.is_written(holder) or name.rpartition(".")[2][:2] == "__":
            continue
        if isinstance(value, torch.nn.Module):
            modules.setdefault(name, value)
            if modules[name] is value:
                continue
        if isinstance(value, FunctionType | type) and value.__name__ == name.rpartition(".")[2]:
            values.describe(value, name)
            continue
        tree = values.describe(value, name)
        if not _is_nothing(name, tree):
            yield name, tree


def _is_nothing(name: str, tree: object) -> bool:
    """Tell whether a description adds nothing: of a function or class by its own name."""
    if tree is NOTHING:
        return True
    kind, _, label = tree.partition(" ") if isinstance(tree, str) else ("", "", "")
    last = name.rpartition(".")[2]
    return kind in ("function", "class") and label.partition(" ")[0].rpartition(".")[2] == last


def _is_code(tree: object) -> bool:
    """Tell whether a description names code only, which is followed, or a library's."""
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

"""`Watch`: notices changes of the code, settings and weights that features are made with.

Two comparisons, both of what the walk of the fingerprint found (`featcache.staleness.provenance`):

- `is_same`, after each utterance, a microsecond for ten values: tensors by identity, version
  counter, address and, on a CPU, a few of their values; arrays by a few values; attributes, items
  of dicts and lists, global variables, closures and defaults by identity.
- `differences`, where that finds anything, and before anything is published: the whole fingerprint.

What `is_same` holds may count for nothing in the fingerprint (a counter, a table that a library
fills), and what it does not see (version counters know nothing of fused optimisers on a GPU, of
`.data` and of what NumPy writes) the fingerprint does. So the first never refuses by itself.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, deque
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
    Sized,
)
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from featcache.errors import ConfigError
from featcache.format import ABSENT, RULES, canonical, differences
from featcache.interface import Array
from featcache.staleness.code import is_users, is_users_module, nested
from featcache.staleness.provenance import VERSION, Provenance, TooDeepError
from featcache.staleness.torch_modules import ModuleDescription, parts_of

# `Watch`: notices changes of the code, settings and weights that features are made with.

MOST_ITEMS = 1000  # of a dict or list; longer ones are compared with the fingerprint alone
MOST_PLACES = 50_000
SAMPLES = 8  # values of a tensor that are compared
SAMPLES_OF_ARRAY = 64  # which has no version counter
MOST_FALSE = 2  # alarms of a place that counts for nothing
MOST_TENSORS = 3  # that an error names, of each module
Place = tuple[int, object]  # what holds a value, and by which name
_PLAIN = frozenset([bool, int, float, str, bytes, complex])
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_TORCH = frozenset(vars(torch.nn.Module()))
_CHANGING = (LookupError, ValueError, AttributeError, RuntimeError)  # gone, or changing now
_SAVED = "+"


class Differences(NamedTuple):
    """Differences of what features are made with, as lines of text.

    Attributes:
        lines: one for each module and each setting.
        learnt: whether parameters or saved buffers are among them.
        chosen: whether settings are that no library holds, other than what is added to a table.
        moved: whether tensors were written to, or modules have changed their mode, in between.
        fields: settings, and what is added to.
        places: where `is_same` saw them, each with what holds it.
    """

    lines: Sequence[str] = ()
    learnt: bool = False
    chosen: bool = False
    moved: bool = False
    fields: Set[str] = frozenset()
    places: Sequence[tuple[Place, object]] = ()


DATA_SETS = "data sets"  # key of the fingerprints of several, by number


def _of_several(fingerprints: Iterable[Mapping[str, object]]) -> dict[str, object]:
    alone = ({key: each[key] for key in each if key != RULES} for each in fingerprints)
    return {RULES: VERSION, DATA_SETS: {str(number): each for number, each in enumerate(alone)}}


class Watch:
    """Compares what features are made with, again and again, with what it was before.

    Args:
        made_with: what it is now; several, where data sets compute otherwise.
        again: finds it anew.
        given: what the user has given for the fingerprint, in place of the found.

    Attributes:
        fingerprint: of now.
    """

    def __init__(
        self,
        made_with: Sequence[Provenance],
        again: Callable[[], Sequence[Provenance]],
        given: Mapping[str, object],
    ) -> None:
        self._again, self._given = again, given
        self._false: Counter[Place] = Counter()  # alarms, by place
        self._kept: list[object] = []  # what holds these, so that no other object gets its id
        self._harmless: set[str] = set()  # fields that computing changes
        self._was: _Baseline
        found = [each.fingerprint(given) for each in made_with]
        different = {json.dumps(each, sort_keys=True, default=repr): each for each in found}
        self.fingerprint: Mapping[str, object] = found[0]
        if len(different) > 1:
            self.fingerprint = _of_several(different.values())
        self._begin(made_with, found)

    def is_same(self) -> bool:
        """Whether nothing has changed that is quickly compared; in any thread."""
        return self._was.seen.is_same()

    def differences(self) -> Differences:
        """Find what has changed since the last call; from now on that is how it was."""
        try:
            now = self._again()
        except TooDeepError:
            raise
        except ConfigError:  # a file of code was edited meanwhile, which the next process tells
            now = self._was.made_with
        shown = [each.sections(self._given) for each in now]
        places, moved = [*self._was.seen.changed()], self._was.seen.has_moved()
        found = self._found(now, shown)._replace(places=places, moved=moved)
        if not found.lines:
            self._count_false(found, 1)
        self._begin(now, shown)
        return found

    def forgive(self, found: Differences) -> None:
        """Ignore differences in these settings from now on: computing makes them."""
        self._harmless |= found.fields
        self._count_false(found, MOST_FALSE)
        self._begin(self._was.made_with, self._was.shown)

    @contextlib.contextmanager
    def deciding(self) -> Iterator[None]:
        """Compare with what was before the block again, if that fails or is interrupted."""
        was = self._was
        false, harmless = self._false.copy(), {*self._harmless}
        try:
            yield
        except BaseException:
            self._was = was
            self._false, self._harmless = false, harmless
            raise

    def _count_false(self, found: Differences, times: int) -> None:
        for place, holder in found.places:
            self._false[place] += times
            self._kept.append(holder)

    def _begin(
        self, made_with: Sequence[Provenance], shown: Sequence[Mapping[str, object]]
    ) -> None:
        noise = {place for place, times in self._false.items() if times >= MOST_FALSE}
        self._was = _Baseline(
            made_with,
            [canonical(each) for each in shown],
            [_digests(each, self._given) for each in made_with],
            _Seen(made_with, noise),
        )

    def _found(
        self, now: Sequence[Provenance], shown: Sequence[Mapping[str, object]]
    ) -> Differences:
        if len(now) != len(self._was.made_with):
            return Differences(["there are data sets more or less"], learnt=True)
        found = [
            self._found_of(*each)
            for each in zip(self._was.shown, self._was.weights, now, shown, strict=True)
        ]
        lines = dict.fromkeys(line for each in found for line in each.lines)
        fields = frozenset().union(*(each.fields for each in found))
        learnt, chosen = (any(each[place] for each in found) for place in (1, 2))
        return Differences([*lines], learnt, chosen, fields=fields)

    def _found_of(
        self,
        before: Mapping[str, object],
        weights_before: Mapping[str, Mapping[str, str]],
        made_with: Provenance,
        shown: Mapping[str, object],
    ) -> Differences:
        weights, settings, learnt, chosen = list[str](), list[str](), False, False
        tensors = _digests(made_with, self._given)
        both = weights_before.keys() & tensors.keys()
        for path in sorted(both):
            was, here = weights_before[path], tensors[path]
            unlike = [each for each in sorted({*was, *here}) if was.get(each) != here.get(each)]
            if unlike:
                more = len(unlike) - MOST_TENSORS
                rest = f" and {more} more" if more > 0 else ""
                name = path.partition(".")[2]
                weights.append(f"weights of {name}: {', '.join(unlike[:MOST_TENSORS])}{rest}")
                learnt = learnt or any(here.get(each, "")[:1] == _SAVED for each in unlike)
        fields = set[str]()
        for each in differences(before, canonical(shown)):
            field = each.field
            is_librarys = any(f".{name}." in f".{field}." for name in made_with.of_libraries)
            if is_added := each.was is ABSENT:  # to a table that is filled
                field = f"{_container(before, each.path)}: added"
            if field.removesuffix(".weights") not in both and field not in self._harmless:
                settings.append(str(each))
                fields.add(field)
                chosen = chosen or not (is_librarys or is_added)
        return Differences([*weights, *settings], learnt, chosen, fields=fields)


def _container(tree: object, path: Sequence[str]) -> str:
    """Return the field of what is there already of the way to a field."""
    found: list[str] = []
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            break
        found.append(key)
        tree = tree[key]
    return ".".join(found)


def _digests(made_with: Provenance, given: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Return by field the digests of the tensors of each module, which were read.

    Those that are saved with the module begin with "+".
    """
    found: dict[str, dict[str, str]] = {}
    sections = {"modules": made_with.described, **made_with.found}
    for path, each in _modules_in({k: v for k, v in sections.items() if k not in given}, ""):
        saved = _saved(each.weights.module)
        digests = each.weights.digests.items()
        found[path] = {name: (_SAVED if name in saved else "") + text for name, text in digests}
    return found


def _modules_in(tree: object, path: str) -> Iterator[tuple[str, ModuleDescription]]:
    if isinstance(tree, ModuleDescription):
        yield path, tree
        tree = tree.settings
    if isinstance(tree, Mapping | list):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for name, inner in items:
            yield from _modules_in(inner, f"{path}.{name}" if path else str(name))


def _saved(module: torch.nn.Module) -> set[str]:
    """Return the names of parameters, and of buffers that are saved with them."""
    found: set[str] = set()
    for path, part in parts_of(module):
        unsaved: set[str] = getattr(part, "_non_persistent_buffers_set", set())
        tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        names = {name for name, _ in tensors} - unsaved
        found.update(f"{path}.{name}" if path else name for name in names)
    return found


class _Baseline(NamedTuple):
    """The state that is compared with: provenances, their sections, digests of weights, objects."""

    made_with: Sequence[Provenance]
    shown: Sequence[Mapping[str, object]]
    weights: Sequence[Mapping[str, Mapping[str, str]]]
    seen: _Seen


class _Seen:
    """Objects that count, as they were seen: each as quickly compared as can be."""

    def __init__(self, all_made_with: Sequence[Provenance], noise: set[Place]) -> None:
        self._noise = noise
        self._places: list[tuple[Callable[[Any], object], Any]] = []  # how to get it, and its name
        self._holders: list[object] = []
        self._values: list[object] = []
        self._sized: list[Sized] = []
        self._lists: list[tuple[Collection[object], list[object]]] = []
        self._sets: list[tuple[Any, object]] = []
        self._samples: list[Array] = []
        tensors: dict[int, torch.Tensor] = {}
        seen: set[int] = set()
        for made_with in all_made_with:
            for value in (*made_with.held, *made_with.modules.values()):
                if id(value) not in seen and len(self._places) < MOST_PLACES:
                    seen.add(id(value))
                    with contextlib.suppress(*_CHANGING):  # the whole fingerprint sees it
                        self._add(value, made_with, tensors)
        self._lengths = [*map(len, self._sized)]
        # those of inference mode have no version counter, and some layouts no address
        self._counted = [each for each in tensors.values() if not each.is_inference()]
        self._placed = [each for each in tensors.values() if _is_plain(each)]
        self._samples += [each for one in self._placed for each in _sample(one)]
        self._were = self._of_tensors()

    def is_same(self) -> bool:
        """Whether all is as it was."""
        try:
            values = [get(name) for get, name in self._places]
            return (
                (all(map(is_, values, self._values)) or all(map(_is_same, values, self._values)))
                and [*map(len, self._sized)] == self._lengths
                and self._of_tensors() == self._were
                and (not self._lists or all(_same_items(*each) for each in self._lists))
                and (not self._sets or all(each == was for each, was in self._sets))
            )
        except _CHANGING:
            return False

    def has_moved(self) -> bool:
        """Whether tensors were written to, or modules have changed their mode."""
        try:
            modes = any(name == "training" for (_, name), _ in self.changed())
            return modes or self._of_tensors() != self._were
        except _CHANGING:
            return True

    def changed(self) -> Iterator[tuple[Place, object]]:
        """Iterate over the places that hold something else now, and what holds them."""
        places = zip(self._places, self._holders, self._values, strict=True)
        for (get, name), holder, was in places:
            with contextlib.suppress(*_CHANGING):
                if _is_same(get(name), was):
                    continue
            yield (id(holder), name), holder
        for each, length in zip(self._sized, self._lengths, strict=True):
            if len(each) != length:
                yield (id(each), None), each
        for each, items in self._lists:
            with contextlib.suppress(*_CHANGING):
                if _same_items(each, items):
                    continue
            yield (id(each), None), each
        for each, was in self._sets:
            if each != was:
                yield (id(each), None), each

    def _of_tensors(self) -> tuple[list[int], list[int], list[bytes]]:
        return (
            [each._version for each in self._counted],  # noqa: SLF001
            [each.data_ptr() for each in self._placed],
            [each.tobytes() for each in self._samples],
        )

    def _add(self, value: object, made_with: Provenance, tensors: dict[int, torch.Tensor]) -> None:
        if isinstance(value, torch.Tensor):
            tensors[id(value)] = value
        elif isinstance(value, np.ndarray):
            self._samples += _sample_of_array(value)
        elif isinstance(value, torch.nn.Module):
            self._add_module(value, made_with, tensors)
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, ModuleType | type):
            if is_users_module(value) if isinstance(value, ModuleType) else is_users(value):
                self._add_places(vars(value), made_with.mentioned & vars(value).keys(), value)
        elif isinstance(value, dict | list | deque | set):
            self._add_container(value)
        elif isinstance(held := getattr(value, "__dict__", None), dict):
            users = any(map(is_users, type(value).__mro__))
            self._add_places(held, made_with.mentioned & held.keys() if users else held.keys())

    def _add_container(self, value: Collection[object]) -> None:
        if len(value) > MOST_ITEMS or (id(value), None) in self._noise:
            return
        if isinstance(value, dict):
            self._add_places(value, value.keys())
            self._add_sized(value)
        elif isinstance(value, set):
            self._sets.append((value, frozenset(value)))
        else:
            self._lists.append((value, [*value]))

    def _add_module(
        self, module: torch.nn.Module, made_with: Provenance, tensors: dict[int, torch.Tensor]
    ) -> None:
        for _, part in parts_of(module):
            held = vars(part)
            if isinstance(part, torch.jit.ScriptModule):
                inside = (*part.parameters(recurse=False), *part.buffers(recurse=False))
                tensors.update((id(each), each) for each in inside)
                continue
            for name in _TABLES:
                self._add_places(held[name], held[name].keys())
                self._add_sized(held[name])
                found = held[name].values()
                tensors.update((id(e), e) for e in found if isinstance(e, torch.Tensor))
            for name in _HOOKS:
                self._add_sized(held[name])
            self._add_place(held.__getitem__, "training", held)
            own = {*held} - _OF_TORCH
            users = any(is_users(base) for base in type(part).__mro__)
            self._add_places(held, own & made_with.mentioned if users else own)

    def _add_function(self, function: FunctionType) -> None:
        whole = function.__getattribute__
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._add_place(whole, name, function)
        codes = [*nested(function.__code__)]
        names = {name for code in codes for name in code.co_names}
        held = function.__globals__
        self._add_places(held, names & held.keys())
        for name in names & held.keys():  # `settings.rate` of a file of the user's
            if isinstance(module := held[name], ModuleType) and is_users_module(module):
                self._add_places(vars(module), names & vars(module).keys())
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not bound yet
                self._add_place(cell.__getattribute__, "cell_contents", cell)

    def _add_places(
        self, held: Mapping[Any, object], names: Iterable[object], holder: object = None
    ) -> None:
        """Add items of a mapping; `holder` is what has it, where that is made anew each time."""
        for name in [*names]:
            self._add_place(held.__getitem__, name, held if holder is None else holder)

    def _add_place(self, get: Callable[[Any], object], name: object, holder: object) -> None:
        if (id(holder), name) not in self._noise:
            self._values.append(get(name))
            self._places.append((get, name))
            self._holders.append(holder)

    def _add_sized(self, value: Sized) -> None:
        if (id(value), None) not in self._noise:
            self._sized.append(value)


def _is_same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and one == other)


def _same_items(items: Collection[object], were: Sequence[object]) -> bool:
    return len(items) == len(were) and all(map(_is_same, items, were))


def _is_plain(value: torch.Tensor) -> bool:
    """Whether a tensor lies at one address."""
    if value.layout is not torch.strided or value.is_nested or value.device.type == "meta":
        return False
    try:
        return value.data_ptr() != 0
    except RuntimeError:  # of a class that holds others, or of a trace
        return False


def _sample(value: torch.Tensor) -> Iterator[Array]:
    """Yield a few values of a tensor on the CPU, as a view."""
    as_integers = _INTEGERS.get(value.element_size())
    dense = value.is_contiguous() and not (value.is_quantized or value.is_conj() or value.is_neg())
    if value.device.type == "cpu" and dense and as_integers is not None and value.numel():
        flat = value.detach().reshape(-1)
        yield flat[:: max(1, len(flat) // SAMPLES)].view(as_integers).numpy()


def _sample_of_array(value: Array) -> Iterator[Array]:
    """Yield a few values of an array, as a view."""
    if not value.dtype.hasobject and value.size and value.flags.c_contiguous:
        flat = value.reshape(-1)
        yield flat[:: max(1, len(flat) // SAMPLES_OF_ARRAY)]


# The check that a worker computes with the code and constants that the driver has.

MOST_SHOWN = 5
Section = Mapping[str, Any]


class DriverCode(NamedTuple):
    """Code and constants of the driver; hparams, attributes and modules are sent as they are."""

    source: Section
    constants: Section
    compiled: Section  # digests of byte code: of functions that come without their source


def code_of_driver(provenance: Provenance) -> DriverCode:
    """Return what workers are to find again."""
    left_out = dict.fromkeys(("modules", "hparams", "attributes", "given", "torch"))
    shown = canonical(provenance.sections(left_out))
    constants: Any = shown.get("constants", {})
    return DriverCode(provenance.source, constants, provenance.compiled)


def refuse_other_code(driver: DriverCode, here: Provenance) -> None:
    """Raise `ConfigError`, by name, if this worker computes with another code than the driver.

    Workers import the files of the user anew: what the driver has changed there since, a global
    that `main` sets or a method that it replaces, does not reach them.
    """
    found = code_of_driver(here)
    if here.without_source:  # of a notebook, say: what the code names is not known as well
        both = [*driver.compiled.keys() & found.compiled.keys()]
        unlike = differences(_some(driver.compiled, both), _some(found.compiled, both))
        for label in driver.constants.keys() & found.constants.keys():
            was, now = driver.constants[label], found.constants[label]
            both = [*was.keys() & now.keys()]
            unlike += differences(_some(was, both), _some(now, both), (label,))
    else:
        unlike = differences(driver.constants, found.constants)
        unlike += differences(driver.source, found.source)
    if unlike:
        rest = f" and {len(unlike) - MOST_SHOWN} more" if len(unlike) > MOST_SHOWN else ""
        raise ConfigError(
            "this worker would compute with something else than the driver (was: the driver's, "
            f"now: the worker's): {'; '.join(map(str, unlike[:MOST_SHOWN]))}{rest}. Workers import "
            "files anew: set such things where they are defined, or make them hparams, attributes "
            "or arguments"
        )


def _some(values: Section, names: list[str]) -> dict[str, object]:
    return {name: values[name] for name in sorted(names)}

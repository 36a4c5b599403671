"""Following of code: the functions, classes and values that a function reaches by name.

All code of the user's is followed, in whatever file; that of libraries is not. A method of a
class counts if an object of the class is reached, and code that is followed mentions its name.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from types import FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import NamedTuple, cast

import torch

from featcache.staleness.code import Code, code_of, is_users, is_users_module, patches_of
from featcache.staleness.members import (
    IMPLICIT,
    NAMELESS,
    NEUTRAL,
    OPERATORS,
    defaults_of_fields,
    first_bases,
    functions_in,
    imported_by,
    is_descriptor,
    is_method,
    is_pythons,
    step_into,
    within,
)
from featcache.staleness.names import (
    Chain,
    MentionedNames,
    Step,
    Way,
    first_written,
    is_changed,
    names_of,
)
from featcache.staleness.torch_modules import ModuleDescription, describe_module
from featcache.staleness.values import MISSING, Values, proxied

# Reading of one function: what the chains of names in it stand for.

Place = tuple[int | str, ...]  # a namespace or a cell, a name in it, and names on from there
_OF_CLASSES = (classmethod, staticmethod, property)  # the last of a metaclass
_OF_BRAINS = ("modules", "raw_modules")  # attributes that hold modules by name
# methods that make an object
MAKING = ("__init__", "__new__", "__post_init__")


class FunctionReading:
    """Reading of one function: what its chains stand for."""

    def __init__(self, follower: Follower, found: Function, owner: type | None) -> None:
        self._to, self._found, self._owner = follower, found, owner
        function = found.function
        self._values: dict[str, object] = {}
        self._cells: dict[str, int] = {}
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._cells[name] = id(cell)
            try:
                self._values[name] = cell.cell_contents
            except ValueError:  # not bound yet
                self._values[name] = MISSING
        for name, module, attribute in found.names.imported:
            self._values[name] = imported_by(function, module, attribute)

    def read(self) -> None:
        """Note what the function names, and take what is to be followed."""
        function = self._found.function
        self._read(self._found.names)
        for name, default in self._defaults():
            self._value(name, default, ())
        wrapped = vars(function).get("__wrapped__")
        if isinstance(wrapped, FunctionType):
            self._to.function(wrapped, self._owner)

    def _read(self, names: MentionedNames) -> None:
        self._to.mention(names.text, as_text=True)
        for chain, way in names.written:
            self._note_written(chain, way)
        for chain in names.passed:
            self._note_passed(chain)
        for chain in names.read:
            self.resolve(self._with_keys(chain))
        for chain in names.with_all:
            if (value := self._held(chain)) is not MISSING:
                self._to.note_read_whole(type(value))
        for asked, inner in names.in_training:
            if not self._may_be_trained(asked):
                self._read(inner)

    def _may_be_trained(self, asked: Chain) -> bool:
        """Whether the `training` that a chain leads to may be a module's."""
        if self._self(asked.root) and len(asked.steps) == 1:
            return self._owner is None or issubclass(self._owner, torch.nn.Module)
        value = self._held(Chain(asked.root, asked.steps[:-1]))
        return value is MISSING or isinstance(value, torch.nn.Module)

    def _defaults(self) -> Iterator[tuple[str, object]]:
        """Yield default values that do not stand in the code as they are."""
        function, tree = self._found.function, self._found.code.tree
        held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        shown: list[ast.expr | None] = [None] * len(held)
        if tree is not None:
            there = [*tree.args.defaults, *filter(None, tree.args.kw_defaults)]
            shown = [*there] if len(there) == len(held) else shown
        for number, (value, node) in enumerate(zip(held, shown, strict=True)):
            if not isinstance(node, ast.Constant):
                yield f"default {number + 1}", value

    def _self(self, root: str | None) -> bool:
        parameters = self._found.names.parameters
        return self._owner is not None and bool(parameters) and root == parameters[0]

    def _root(self, root: str) -> object:
        if root in self._values:
            return proxied(self._values[root])
        if root in self._found.names.local:
            return MISSING
        return proxied(self._found.function.__globals__.get(root, MISSING))

    def _with_keys(self, chain: Chain) -> Chain:
        """Put the keys of items into a chain that are values of settings: `TABLE[self.kind]`."""
        steps = list(chain.steps)
        for number, step in enumerate(steps):
            key = MISSING if step.key is None else self._setting(step.key)
            if type(key) in (str, int):
                steps[number] = Step(key, item=step.item)  # type: ignore[arg-type]
                self._to.note_keyed(self, chain, step.key)
        return chain._replace(steps=tuple(steps))

    def _setting(self, chain: Chain) -> object:
        """Return what a chain leads to; `MISSING` if that is not known, or code writes it."""
        if chain.root is None or self.is_written(chain):
            return MISSING
        return self._held(chain)

    def _held(self, chain: Chain) -> object:
        if chain.root is None:
            return MISSING
        value = self._to.extractor if self._is_extractor(chain.root) else self._root(chain.root)
        for step in chain.steps:
            value = step_into(value, step)
        return value

    def _note_passed(self, chain: Chain) -> None:
        value = self._held(chain)
        if self._self(chain.root) and not chain.steps and self._owner is not None:
            self._to.note_given(self._owner)
        elif value is not MISSING and is_users(type(value)):
            self._to.note_given(type(value))

    def _is_extractor(self, root: str) -> bool:
        mine = self._self(root) and self._owner in type(self._to.extractor).__mro__
        return mine or (self._to.extractor is not None and self._root(root) is self._to.extractor)

    def is_written(self, chain: Chain) -> bool:
        """Whether followed code stores into what a chain leads to."""
        root = str(chain.root)
        if self._is_extractor(root):
            names = self._to.written_of(type(self._to.extractor))
            return any(step.name in names for step in chain.steps)  # in any way
        named = takewhile(lambda name: name is not None, (step.name for step in chain.steps))
        return self._to.is_written((*self._holder(root), *cast(Iterator[str | int], named)))

    def resolve(self, chain: Chain) -> None:
        """Note what a chain leads to, whatever the keys are that it does not tell."""
        to = self._to
        if self._self(chain.root):
            if self._owner in type(to.extractor).__mro__:
                to.note_of_extractor(chain)
            elif self._owner is not None:
                first = [str(step.name) for step in chain.steps[:1] if step.name is not None]
                to.mention(first, of=self._owner)
                self._mention(chain.steps[1:])
                if chain.steps and chain.steps[0].like is not None:
                    to.mention_like(chain.steps[0].like)
            return
        value = MISSING if chain.root is None else self._root(chain.root)
        if value is MISSING:
            self._mention(chain.steps)
        elif value is to.extractor and value is not None:
            to.note_of_extractor(Chain("self", chain.steps, chain.whole))
        else:
            self._walk(str(chain.root), value, chain)

    def _walk(self, text: str, value: object, chain: Chain) -> None:
        """Go along a chain as far as it leads to values, and note the last one."""
        steps, holder = list(chain.steps), self._holder(text)
        while steps:
            self._to.note_passed(value)
            if isinstance(value, type):
                self._to.named(value)
            inner = step_into(value, steps[0])
            if inner is MISSING:
                break
            if isinstance(value, type) and isinstance(inner, _OF_CLASSES):
                for function in functions_in(inner):
                    self._to.function(function, value)
                self._mention(steps)
                return
            if is_method(value, steps[0].name, inner):
                for function in functions_in(inner):
                    self._to.function(function, type(value))
                self._mention(steps[:1])
                break
            step = steps.pop(0)
            name = str(step.name) if step.name is None else step.name
            holder = (id(vars(value)), name) if isinstance(value, ModuleType) else (*holder, name)
            text += str(Chain("", (step,)))
            library = isinstance(value, ModuleType) and not is_users_module(value)
            if library and not isinstance(inner, ModuleType | FunctionType | type):
                return
            value = inner
        self._mention(steps)
        self._value(text, value, holder)

    def _value(self, text: str, value: object, holder: Place) -> None:
        if not isinstance(value, ModuleType) and getattr(builtins, text, MISSING) is not value:
            self._to.note(self._found.label, text, value, holder)

    def _holder(self, name: str) -> Place:
        return self._cells.get(name, id(self._found.function.__globals__)), name

    def _mention(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if isinstance(step.name, str):
                self._to.mention([step.name], as_text=step.item)
            elif step.like is not None and not step.item:
                self._to.mention_like(step.like)

    def _note_written(self, chain: Chain, way: Way) -> None:
        """Note that code writes an attribute or a global variable: it is no setting."""
        to, first = self._to, first_written(chain, way)
        if self._self(chain.root):
            if first is not None and self._found.function.__name__ not in MAKING:
                owner = self._owner_inside(chain)
                to.note_written(*(owner or (self._owner, *first)))
        elif chain.root in self._found.names.local or chain.root is None:
            if chain.root in self._found.names.parameters and first is not None:
                to.note_written(None, *first)
        elif is_changed(way, self._held(chain)):
            self._note_written_place(str(chain.root), chain.steps)

    def _owner_inside(self, chain: Chain) -> tuple[type, str, Way] | None:
        """Return the user's class, inside of the extractor, whose attribute a chain stores into."""
        steps = [*chain.steps]
        while steps and steps[-1].item:
            steps.pop()
        if len(steps) < 2 or not isinstance(steps[-1].name, str):
            return None
        holder = type(self._held(Chain(chain.root, tuple(steps[:-1]))))
        return (holder, steps[-1].name, Way.STORED) if is_users(holder) else None

    def _note_written_place(self, root: str, steps: Sequence[Step]) -> None:
        """Note a place that code writes, from a global variable or one of a closure on."""
        to = self._to
        place, value, by_class = self._holder(root), self._root(root), False
        for number, step in enumerate(steps):
            if step.name is None:
                break
            if isinstance(value, ModuleType):
                place = (id(vars(value)), step.name)
            else:
                place = (*place, step.name)
                last = number == len(steps) - 1
                if last and not step.item and is_users(type(value)):
                    to.note_written(type(value), str(step.name), Way.STORED)
                    by_class = True
            value = step_into(value, step)
        to.note_written_place(place, by_class)


# Following of code: the functions, classes and values that a function reaches by name.


@dataclass
class Function:
    """A function that was followed."""

    function: FunctionType
    label: str
    name: str  # as it is shown: a function inside of another one has a name that does not count
    code: Code
    names: MentionedNames
    owner: type | None  # the class that it is a method of


class Named(NamedTuple):
    """A value that code names, and what holds it by which name: a namespace, a closure's cell."""

    value: object
    holder: Place


@dataclass
class Follower:
    """Follows code from a function; see the module's docstring.

    `functions` are those that were found; `values` by the label of the function that names them,
    and the name there.
    """

    extractor: object = None
    functions: dict[FunctionType, Function] = field(default_factory=dict)
    values: dict[str, dict[str, Named]] = field(default_factory=dict)
    own: dict[type, set[str]] = field(default_factory=dict)  # names behind `self`, by class
    free: set[str] = field(default_factory=set)  # names behind anything else
    like: set[str] = field(default_factory=set)  # patterns of names
    text: set[str] = field(default_factory=set)
    of_extractor: dict[Chain, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.classes: dict[type, bool] = {}  # those reached; True: named, and so perhaps made
        self._read_whole: set[type] = set()  # of whose objects code reads all attributes
        self.passed: list[object] = []  # on the way to values
        self._written: dict[type | None, dict[str, Way]] = {}  # None: of what is given
        self._given: set[type] = set()  # classes of objects that functions are given
        # where code writes; True: an attribute, which `written` names
        self._written_places: dict[Place, bool] = {}
        # chains with keys that are taken as they are now, by where they stand
        self._keyed: list[tuple[FunctionReading, Chain, Chain]] = []
        self._operators: set[str] = set()  # methods that operators call
        self._labels: dict[str, int] = {}
        self._kinds: dict[type, bool] = {}  # classes of objects; True: the user's
        self._pending: list[tuple[FunctionType, type | None]] = []

    # what `Values` asks

    def function(
        self, function: FunctionType, owner: type | None = None, held: str = ""
    ) -> str | None:
        """Take a function to be followed; returns its label, None if it is a library's.

        `held` says what holds it, which is how one without a name of its own is shown.
        """
        if not is_users(function):
            return None
        if function not in self.functions:
            self._add(function, owner, held if function.__name__ in NAMELESS else "")
        return self.functions[function].label

    def wrapper(self, wrapper: object) -> None:
        """Take the functions of the user's that a library's function wraps."""
        for function in within(wrapper):
            self.function(function, held=getattr(wrapper, "__name__", ""))

    def named(self, cls: type) -> None:
        """Take a class that code names."""
        if any(is_users(base) for base in cls.__mro__):
            self.classes[cls] = True

    def attributes(self, value: object) -> Mapping[str, object] | None:
        """Return the attributes of an object that code mentions; None: all its state counts."""
        cls = type(value)
        if cls not in self._kinds:
            self._kinds[cls] = any(map(is_users, cls.__mro__))
            for function, base in patches_of(cls):
                self.function(function, base)
        if self._kinds[cls]:
            self.classes.setdefault(cls, False)
        elif not isinstance(value, SimpleNamespace):
            return None
        libraries = [base for base in cls.__mro__ if not is_users(base)]
        if not {f"{base.__module__}.{base.__qualname__}" for base in libraries} <= NEUTRAL:
            return None
        held = dict(vars(value)) if hasattr(value, "__dict__") else {}
        for base in cls.__mro__:
            for name, each in vars(base).items():
                if isinstance(each, MemberDescriptorType) and hasattr(value, name):
                    held[name] = getattr(value, name)
        names, written = self.names_of(cls) | IMPLICIT, self.written_of(cls)
        all_of_it = not self._read_whole.isdisjoint(cls.__mro__)
        return {
            k: v if all_of_it else self._named_of(k, v)
            for k, v in held.items()
            if (all_of_it or self.mentions(k, names)) and not is_changed(written.get(k), v)
        }

    def _named_of(self, name: str, value: object) -> object:
        """Return what code names of the modules of a Brain; all where it may take any of them."""
        if name not in _OF_BRAINS or type(value) is not torch.nn.ModuleDict:
            return value
        named: set[str | int | None] = set()
        for each in self.functions.values():
            for chain in (chain for names in each.names.with_inner() for chain in names.read):
                # byte code shows no chains
                root = None if each.code.tree is not None else chain.root
                steps = (Step(root), *chain.steps, Step(None))
                pairs = itertools.pairwise(steps)
                named.update(inner.name for step, inner in pairs if step.name in _OF_BRAINS)
        return {n: value[n] for n in value if n in named} if named <= {*value} else value

    def reads(self, value: object, name: str) -> bool:
        """Whether followed code mentions an attribute of an object."""
        return name in self.names_of(type(value))  # as it is: patterns are of their own objects

    def module(self, module: torch.nn.Module, values: Values) -> ModuleDescription:
        """Describe a torch module."""
        return describe_module(module, values)

    # names

    def mention(
        self, names: Iterable[str], *, of: type | None = None, as_text: bool = False
    ) -> None:
        """Note names that code mentions, of a class or of anything; or text, which may be names."""
        known = self.text if as_text else self.free
        (known if of is None else self.own.setdefault(of, set())).update(names)

    def mention_like(self, pattern: str) -> None:
        """Note a pattern of names that code mentions."""
        self.like.add(pattern)

    def note_of_extractor(self, chain: Chain) -> None:
        """Note a chain of names that begins at the extractor."""
        self.of_extractor[chain] = None

    def note_keyed(self, reading: FunctionReading, chain: Chain, key: Chain) -> None:
        """Note a chain whose key was taken as it is now, and where it stands."""
        self._keyed.append((reading, chain, key))

    def note_read_whole(self, cls: type) -> None:
        """Note a class of whose objects code reads all attributes."""
        self._read_whole.add(cls)

    def note_given(self, cls: type) -> None:
        """Note a class of objects that functions are given."""
        self._given.add(cls)

    def note_passed(self, value: object) -> None:
        """Note an object on the way to a value."""
        self.passed.append(value)

    def names_of(self, cls: type) -> set[str]:
        """Return the names that code mentions of objects of a class."""
        return self.free.union(*(self.own.get(base, ()) for base in cls.__mro__))

    def written_of(self, cls: type) -> dict[str, Way]:
        """Return the attributes that followed code writes, of objects of a class."""
        found: dict[str, Way] = {}
        for owner in (*cls.__mro__, *([None] if self._given.intersection(cls.__mro__) else [])):
            for name, way in self._written.get(owner, {}).items():
                found[name] = max(way, found.get(name, way))
        return found

    def writes(self, value: object, step: Step) -> bool:
        """Whether followed code writes an attribute of an object."""
        way = self.written_of(type(value)).get(str(step.name))
        return way is not None and is_changed(way, step_into(value, step))

    def note_written(self, owner: type | None, name: str, way: Way) -> None:
        """Note that code writes an attribute; None: of any object that it is given."""
        mine = self._written.setdefault(owner, {})
        mine[name] = max(way, mine.get(name, way))

    def note_written_place(self, place: Place, by_class: bool) -> None:
        """Note where code writes; an attribute, which `note_written` is told of, is `by_class`."""
        self._written_places[place] = by_class

    def is_written(self, place: Place) -> bool:
        """Whether followed code writes what lies at a place, around it or in it."""
        for written, by_class in self._written_places.items():
            around = place[: len(written)] == written
            within = written[: len(place)] == place and not by_class
            if place and (around or within):
                return True
        return False

    def mentions(self, name: str, names: set[str]) -> bool:
        """Whether code mentions a name, as it is or by a pattern."""
        if name in names:
            return True
        return any(re.fullmatch(like, name) for like in self.like) and not is_pythons(name)

    # following

    def follow(self) -> bool:
        """Follow what was taken, and methods that are mentioned; False if there was nothing."""
        before = self.size
        while self._pending:
            function, owner = self._pending.pop(0)
            FunctionReading(self, self.functions[function], owner).read()
        self._follow_classes()
        for reading, chain, key in list(self._keyed):
            if reading.is_written(key):  # by code that was found later
                self._keyed.remove((reading, chain, key))
                reading.resolve(chain)
        return bool(self._pending) or self.size != before

    def _follow_classes(self) -> None:
        """Take what is mentioned of the classes that were reached."""
        for cls, named in list(self.classes.items()):
            names = self.names_of(cls) | IMPLICIT | self._operators | {*(MAKING if named else ())}
            for base in filter(is_users, cls.__mro__):
                for name, value in list(vars(base).items()):
                    if self.mentions(name, names):
                        self._take(base, name, value)
                for name, value in defaults_of_fields(base) if named else ():
                    if self.mentions(name, names):
                        self.note(base.__qualname__, name, value, (id(base), name))
        own = {str(chain.steps[0].name) for chain in self.of_extractor if chain.steps}
        for cls in (*self.classes, type(self.extractor)):
            names = own if cls is type(self.extractor) else self.names_of(cls)
            if order := first_bases(cls, names | IMPLICIT | {*MAKING}):
                self.note(cls.__qualname__, "order of bases", order, (id(cls),))

    @property
    def size(self) -> tuple[int, ...]:
        """Numbers of all that was found, to see whether it grows."""
        own = sum(map(len, self.own.values()))
        rest = (
            self.functions,
            self.classes,
            self._read_whole,
            self._operators,
            self.free,
            self.like,
            self.text,
            self.of_extractor,
        )
        return own, *(len(each) for each in rest), sum(map(len, self.values.values()))

    def _take(self, base: type, name: str, value: object) -> None:
        """Take a method or a value of a class's body."""
        methods = list(functions_in(value))
        for function in methods:
            self.function(function, base, f"{base.__qualname__}.{name}")
        is_value = not methods and (is_descriptor(value) or not hasattr(value, "__get__"))
        if (is_value and not is_pythons(name)) or isinstance(value, functools.partialmethod):
            self.note(base.__qualname__, name, value, (id(base), name))

    def note(self, label: str, name: str, value: object, holder: Place) -> None:
        """Note a value that code names."""
        self.values.setdefault(label, {})[name] = Named(value, holder)

    def _add(self, function: FunctionType, owner: type | None, held: str) -> None:
        name = function.__qualname__.replace(".<locals>", "")
        inside = function.__qualname__.rpartition(".")[0].endswith("<locals>")
        inside = inside and function.__name__.isidentifier()  # no lambda
        label = f"{name.rpartition('.')[0]}.<inner>" if inside else name
        number = self._labels[label] = self._labels.get(label, 0) + 1
        if number > 1:
            label, name = f"{label} ({number})", f"{name} ({number})"
        name += f" ({held})" if held else ""
        code = code_of(function)
        if code.tree is None:
            names = MentionedNames(parameters=[*function.__code__.co_varnames])
            names.read = [Chain(each) for each in function.__code__.co_names]
            self.free.update(function.__code__.co_names)
            names.text = {each for each in function.__code__.co_consts if isinstance(each, str)}
        else:
            names = names_of(code.tree, function.__code__.co_qualname)
        for each in names.operators & OPERATORS.keys():
            self._operators.update(f"__{kind}{OPERATORS[each]}__" for kind in ("", "r", "i"))
        self.functions[function] = Function(function, label, name, code, names, owner)
        self._pending.append((function, owner))

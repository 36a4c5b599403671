"""Reading of one function: what the chains of names in it stand for."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from featcache.staleness.imports import imported_by
from featcache.staleness.members import MISSING, functions_in, is_method, step_into
from featcache.staleness.names import Names
from featcache.staleness.source import is_users, is_users_module
from featcache.staleness.steps import Chain, Step
from featcache.staleness.written import written_attributes

if TYPE_CHECKING:
    from featcache.staleness.follow import Follower, Function

Place = tuple[int | str, ...]  # a namespace or a cell, a name in it, and names on from there
_OF_CLASSES = (classmethod, staticmethod, property)  # the last of a metaclass
# methods that make an object
MAKING = ("__init__", "__new__", "__post_init__")


def _names_of(steps: Iterable[Step]) -> Iterator[str | int]:
    for step in steps:
        if step.name is None:
            return
        yield step.name


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
        to, names = self._to, self._found.names
        to.text |= names.text
        function = self._found.function
        for chain in names.stored:
            self._note_stored(chain)
        for chain in names.read:
            self._resolve(chain)
        for name, default in self._defaults():
            self._value(name, default, ())
        wrapped = vars(function).get("__wrapped__")
        if isinstance(wrapped, FunctionType):
            to.function(wrapped, self._owner)

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
            return self._values[root]
        if root in self._found.names.local:
            return MISSING
        return self._found.function.__globals__.get(root, MISSING)

    def _resolve(self, chain: Chain) -> None:
        self._resolve_known(self._with_keys(chain))

    def _with_keys(self, chain: Chain) -> Chain:
        """Put the keys of items into a chain that are values of settings: `TABLE[self.kind]`."""
        steps = list(chain.steps)
        for number, step in enumerate(steps):
            key = MISSING if step.key is None else self._setting(step.key)
            if type(key) in (str, int):
                steps[number] = Step(key, item=step.item)  # type: ignore[arg-type]
                self._to.keyed.append((self, chain, step.key))
        return chain._replace(steps=tuple(steps))

    def _setting(self, chain: Chain) -> object:
        """Return what a chain leads to; `MISSING` if that is not known, or code writes it."""
        if chain.root is None or self.is_written(chain):
            return MISSING
        value = self._to.extractor if self._is_extractor(chain.root) else self._root(chain.root)
        for step in chain.steps:
            value = step_into(value, step)
        return value

    def _is_extractor(self, root: str) -> bool:
        mine = self._self(root) and self._owner in type(self._to.extractor).__mro__
        return mine or (self._to.extractor is not None and self._root(root) is self._to.extractor)

    def is_written(self, chain: Chain) -> bool:
        """Tell whether followed code stores into what a chain leads to."""
        root = str(chain.root)
        if self._is_extractor(root):
            names = self._to.written_of(type(self._to.extractor))
            return any(step.name in names for step in chain.steps)
        return self._to.is_written((*self._holder(root), *_names_of(chain.steps)))

    def without_keys(self, chain: Chain) -> None:
        """Note what a chain leads to, whatever the keys are."""
        self._resolve_known(chain)

    def _resolve_known(self, chain: Chain) -> None:
        to = self._to
        if self._self(chain.root):
            if self._owner in type(to.extractor).__mro__:
                to.of_extractor[chain] = None
            elif self._owner is not None:
                mine = to.own.setdefault(self._owner, set())
                mine.update(str(step.name) for step in chain.steps[:1] if step.name is not None)
                self._mention(chain.steps[1:])
                if chain.steps and chain.steps[0].like is not None:
                    to.like.add(chain.steps[0].like)
            return
        value = MISSING if chain.root is None else self._root(chain.root)
        if value is MISSING:
            self._mention(chain.steps)
        elif value is to.extractor and value is not None:
            to.of_extractor[Chain("self", chain.steps, chain.whole)] = None
        else:
            self._walk(str(chain.root), value, chain)

    def _walk(self, text: str, value: object, chain: Chain) -> None:
        """Go along a chain as far as it leads to values, and note the last one."""
        steps, holder = list(chain.steps), self._holder(text)
        while steps:
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

    def _mention(self, steps: Any) -> None:
        for step in steps:
            if isinstance(step.name, str):
                (self._to.text if step.item else self._to.free).add(step.name)
            elif step.like is not None and not step.item:
                self._to.like.add(step.like)

    def _note_stored(self, chain: Chain) -> None:
        """Note that code writes an attribute or a global variable: it is no setting."""
        to, function = self._to, self._found.function
        if self._self(chain.root):
            for name in written_attributes(Names(stored=[chain], parameters=[str(chain.root)])):
                if function.__name__ not in MAKING:
                    to.written.setdefault(self._owner, set()).add(name)
            return
        if chain.root is None:
            return
        if chain.root in self._found.names.local:
            first = chain.steps[0].name if chain.steps else None
            if chain.root in self._found.names.parameters and isinstance(first, str):
                to.written.setdefault(None, set()).add(first)
            return
        self._note_stored_place(str(chain.root), chain.steps)

    def _note_stored_place(self, root: str, steps: Sequence[Step]) -> None:
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
                    to.written.setdefault(type(value), set()).add(str(step.name))
                    by_class = True
            value = step_into(value, step)
        to.written_places[place] = by_class

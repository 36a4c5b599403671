"""Changes of a recipe: edits of its files, its data, its libraries and its surroundings."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Expected = Literal["matters", "clear", "arguable"]


@dataclass(frozen=True)
class Replace:
    """Replaces a text that occurs once in a file of the recipe."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Append:
    """Appends to a file of the recipe, which may be a new one."""

    file: str
    text: str


@dataclass(frozen=True)
class Move:
    """Moves a file or folder of the recipe."""

    source: str
    target: str


@dataclass(frozen=True)
class Patch:
    """Code that runs before the recipe, as another version of a library would."""

    code: str


@dataclass(frozen=True)
class Environ:
    """A variable of the environment."""

    name: str
    value: str


@dataclass(frozen=True)
class Argument:
    """Arguments at the end of the command line."""

    text: str


@dataclass(frozen=True)
class Do:
    """A function of the stage's folder, and arguments for it: changes data, or moves folders."""

    function: Callable[..., None]
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True)
class Run:
    """Another way to run the recipe: in a new interpreter, elsewhere, with other data."""

    new_interpreter: bool = False
    folder: str = "recipe"  # the working directory, seen from the stage
    data: str = "data"
    code: str = "recipe"


Edit = Replace | Append | Move | Patch | Environ | Argument | Do | Run


@dataclass(frozen=True)
class Change:
    """One change of a recipe that has been run.

    Args:
        name: says the change.
        kind: groups changes in the report.
        edits: made together.
        words: a message that has one of them names the cause.
        expected: "matters" to features; or does not, which is "clear" or "arguable": a user could
            understand a refusal. The truth decides; a wrong expectation is reported.
        recipe: the folder in `recipes`.
        setup: edits of the recipe before it is run for the first time.
    """

    name: str
    kind: str
    edits: tuple[Edit, ...]
    words: tuple[str, ...] = ()
    expected: Expected = "matters"
    recipe: str = "brain"
    setup: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        if self.expected == "matters" and not self.words:
            raise ValueError(f"no words for the cause of {self.name!r}")


@dataclass
class Call:
    """How a recipe is run."""

    arguments: list[str]
    environment: dict[str, str]
    patches: list[str]
    run: Run = Run()


def apply(edits: tuple[Edit, ...], stage: Path, call: Call) -> None:
    """Make edits in the stage and in the call."""
    for edit in edits:
        match edit:
            case Replace(file, old, new):
                _replace(stage / "recipe" / file, old, new)
            case Append(file, text):
                with (stage / "recipe" / file).open("a") as opened:
                    opened.write(text)
            case Move(source, target):
                (stage / "recipe" / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.move(stage / "recipe" / source, stage / "recipe" / target)
            case Patch(code):
                call.patches.append(code)
            case Environ(name, value):
                call.environment[name] = value
            case Argument(text):
                call.arguments.extend(text.split())
            case Do(function, arguments):
                function(stage, *arguments)
            case Run():
                call.run = edit


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if text.count(old) != 1:
        raise ValueError(f"{old!r} occurs {text.count(old)} times in {path.name!r}")
    path.write_text(text.replace(old, new))

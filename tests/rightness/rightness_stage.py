"""A stage: a recipe, its data and its results at one place, where a change is tried."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from places import ROOT
from rightness_changes import Call, Change, apply
from rightness_ways import TRUTH

import featcache
from featcache.errors import FeatcacheError

HERE = Path(__file__).parent
SCRIPTS = {"brain": "train.py", "plain": "extract.py"}
SPREAD = 1e-4  # a difference of so much of a feature's standard deviation matters
TOKENS = 0.01  # so many changed tokens do
NEVER = "refused at once"  # on a further way: random features, or a Brain that no pickle takes
_AT_ONCE = ("FeatureError", "ConfigError")
Features = dict[tuple[str, str], NDArray[Any]]
Answer = dict[str, Any]  # of a run


@dataclass(frozen=True)
class Outcome:
    """What came of one change."""

    change: Change
    way: str
    matters: bool  # the truth
    how: str  # "refused", "recomputed", "served", or what the harness could not judge
    message: str = ""
    log: list[str] = field(default_factory=list)
    worst: str = ""  # feature and difference

    @property
    def noticed(self) -> bool:
        return self.how in ("refused", "recomputed")


class Server:
    """A process that runs recipes in forks of itself."""

    def __init__(self) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "rightness_server.py")],
            env=os.environ | threads | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'backends'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answered()

    def run(self, call: dict[str, Any]) -> dict[str, Answer]:
        """Run one call to its end; returns the answer of each way."""
        for file in (call["answer"], *call["ways"].values()):
            Path(file).unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        self._answered()
        whole = _answer(call["answer"])
        if whole["error"] is not None:  # before any way was gone
            return dict.fromkeys(call["ways"], whole)
        return {way: _answer(file) for way, file in call["ways"].items()}

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate()

    def _answered(self) -> None:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline().strip()) not in ("ready", "done"):
            if not line:
                raise RuntimeError("the server of recipes has died")


def _answer(file: str) -> Answer:
    if not Path(file).exists():
        return {"error": "Died", "message": "", "refused": False, "log": []}
    loaded: Answer = json.loads(Path(file).read_text())
    return loaded


class Stage:
    """Tries changes, one after the other, at one path."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self._folder, self._corpus = folder, corpus
        self._server = Server()
        self._bases: dict[tuple[object, ...], tuple[Path, dict[str, Features | None]]] = {}

    def close(self) -> None:
        """Let the server end."""
        self._server.close()

    def attempt(self, change: Change, ways: Sequence[str]) -> list[Outcome]:
        """Run the recipe, change it, run it again on each way, and compare with the truth."""
        try:
            return self._attempt(change, tuple(ways))
        except (RuntimeError, ValueError, OSError) as error:  # of this harness
            told = f"{type(error).__name__}: {error}"
            return [Outcome(change, way, False, "cannot be tried", told) for way in ways]

    def _attempt(self, change: Change, ways: tuple[str, ...]) -> list[Outcome]:
        base, stored = self._base(change, ways)
        self._copy(base)
        call = Call([], {}, [])
        apply(change.edits, self._folder, call)
        answers = self._run(change.recipe, call, (*ways, TRUTH))
        truth = answers[TRUTH]
        if truth["error"] is not None:
            told = str(truth.get("traceback", truth["message"]))
            return [Outcome(change, way, False, "does not run", told) for way in ways]
        true = self._features(TRUTH)
        return [self._outcome(change, way, answers[way], stored[way], true) for way in ways]

    def _outcome(
        self, change: Change, way: str, answer: Answer, stored: Features | None, true: Features
    ) -> Outcome:
        if stored is None:
            return Outcome(change, way, False, NEVER)
        worst, log = difference(stored, true), answer["log"]
        matters = bool(worst)
        if answer["refused"]:
            told = self._without_paths(answer, way)
            return Outcome(change, way, matters, "refused", told, log, worst)
        if answer["error"] is not None:
            how = f"raises {answer['error']}"
            return Outcome(change, way, matters, how, answer.get("traceback", ""), log, worst)
        how = "recomputed" if matters and not difference(self._features(way), true) else "served"
        return Outcome(change, way, matters, how, "\n".join(log), log, worst)

    def _base(
        self, change: Change, ways: tuple[str, ...]
    ) -> tuple[Path, dict[str, Features | None]]:
        """Run the recipe as it is before changes, once on each way."""
        key = (change.recipe, change.setup, ways)
        if key not in self._bases:
            base = self._folder.with_name(f"{self._folder.name}-base-{len(self._bases)}")
            recipe = HERE / "recipes" / change.recipe
            shutil.rmtree(base, ignore_errors=True)  # of one that could not be made
            shutil.copytree(recipe, base / "recipe", ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copytree(self._corpus, base / "data")
            (base / "results").mkdir()
            self._copy(base)
            call = Call([], {}, [])
            apply(change.setup, self._folder, call)
            found: dict[str, Features | None] = {}
            for way, answer in self._run(change.recipe, call, ways).items():
                if answer["error"] not in (None, *(_AT_ONCE if found else ())):
                    raise RuntimeError(f"{change.recipe} {change.setup}, {way}: {answer}")
                found[way] = self._features(way) if answer["error"] is None else None
            shutil.rmtree(base)
            shutil.copytree(self._folder, base, symlinks=True)
            own = found[ways[0]]
            for way, features in found.items():
                if own and features and (worst := difference(own, features)):
                    raise RuntimeError(f"{way} computes otherwise than {ways[0]}: {worst}")
            self._bases[key] = base, found
        return self._bases[key]

    def _copy(self, base: Path) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(base, self._folder, symlinks=True)

    def _run(self, recipe: str, call: Call, ways: Sequence[str]) -> dict[str, Answer]:
        stage, script = self._folder, self._folder / call.run.code / SCRIPTS[recipe]
        data, results = str(stage / call.run.data), str(stage / "results")
        if recipe == "brain":
            arguments = [str(script.with_name("hparams.yaml")), "--data_folder", data]
            arguments += ["--output_folder", results, "--device", "cpu"]
        else:
            arguments = ["--data", data, "--output", results]
        return self._server.run(
            {
                "script": str(script),
                "folder": str(stage / call.run.folder),
                "arguments": arguments + call.arguments,
                "environment": call.environment,
                "patches": call.patches,
                "new_interpreter": call.run.new_interpreter,
                "ways": {way: f"{self._place(way)}.json" for way in ways},
                "answer": str(stage.with_name(stage.name + "-answer.json")),
            }
        )

    def _place(self, way: str) -> Path:
        return self._folder / "results" / f"features-{way.replace(' ', '-')}"

    def _features(self, way: str) -> Features:
        place = self._place(way) / "all"
        try:
            with featcache.open(place, mapped=False) as cache:
                return {
                    (id, feature): np.array(cache.read(id, feature))
                    for id in cache.ids
                    for feature in cache.features
                }
        except FeatcacheError as error:
            raise RuntimeError(f"the results in {place} cannot be read") from error

    def _without_paths(self, answer: Answer, way: str) -> str:
        # the names of folders, and tracebacks of a loader's workers, name no cause
        text = str(answer["message"]).rpartition(f"featcache.errors.{answer['error']}: ")[2]
        text = text.replace(str(self._folder), "...")
        return text.replace(f"{self._place(way).name}/all", "")


def difference(stored: Features, true: Features) -> str:
    """Name the feature that differs most, beyond the tolerances, among utterances of both."""
    found: list[tuple[float, str]] = []
    for feature in sorted({feature for _, feature in (*stored, *true)}):
        keys = [key for key in true if key[1] == feature and (key in stored or not stored)]
        if not keys or not all(key in stored for key in keys):
            return f"{feature}: stored no longer, or not yet"
        if any(stored[key].shape != true[key].shape for key in keys):
            return f"{feature}: another shape"
        if not keys:
            continue
        was = np.concatenate([stored[key].reshape(-1) for key in keys])
        now = np.concatenate([true[key].reshape(-1) for key in keys])
        if np.issubdtype(was.dtype, np.integer):
            share = float(np.mean(was != now))
            if share > TOKENS:
                found.append((share, f"{feature}: {share:.1%} of the tokens"))
            continue
        spread = float(np.std(was.astype(np.float64))) or 1.0
        far = float(np.max(np.abs(was.astype(np.float64) - now))) / spread
        if not far <= SPREAD:
            found.append((far, f"{feature}: {far:.2g} of the spread"))
    return max(found)[1] if found else ""

"""A stage: a recipe, its data and its results at one place, where a change is tried."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from places import ROOT
from rightness_changes import Call, Change, Edit, apply

import featcache
from featcache.errors import FeatcacheError

HERE = Path(__file__).parent
SCRIPTS = {"brain": "train.py", "plain": "extract.py"}
SPREAD = 1e-4  # a difference of so much of a feature's standard deviation matters
TOKENS = 0.01  # so many changed tokens do
Features = dict[tuple[str, str], NDArray[Any]]


@dataclass(frozen=True)
class Outcome:
    """What came of one change."""

    change: Change
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

    def run(self, call: dict[str, Any]) -> dict[str, Any]:
        """Run one call to its end."""
        answer = Path(call["answer"])
        answer.unlink(missing_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        self._answered()
        if not answer.exists():
            return {"error": "Died", "message": "", "refused": False, "log": []}
        loaded: dict[str, Any] = json.loads(answer.read_text())
        return loaded

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate()

    def _answered(self) -> None:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline().strip()) not in ("ready", "done"):
            if not line:
                raise RuntimeError("the server of recipes has died")


class Stage:
    """Tries changes, one after the other, at one path."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self._folder, self._corpus = folder, corpus
        self._server = Server()
        self._bases: dict[tuple[str, tuple[Edit, ...]], tuple[Path, Features]] = {}

    def close(self) -> None:
        """Let the server end."""
        self._server.close()

    def attempt(self, change: Change) -> Outcome:
        """Run the recipe, change it, run it again, and compare with the truth."""
        try:
            return self._attempt(change)
        except (RuntimeError, ValueError, OSError) as error:  # of this harness
            return Outcome(change, False, "cannot be tried", f"{type(error).__name__}: {error}")

    def _attempt(self, change: Change) -> Outcome:
        base, stored = self._base(change)
        self._copy(base)
        call = Call([], {}, [])
        apply(change.edits, self._folder, call)
        answer = self._run(change.recipe, call)
        results = self._folder / "results"
        served = self._features(results) if answer["error"] is None else {}
        results.rename(self._folder / "results.changed")
        truth = self._run(change.recipe, call)
        if truth["error"] is not None:
            return Outcome(change, False, "does not run", truth.get("traceback", truth["message"]))
        true = self._features(results)
        worst = difference(stored, true)
        matters, log = bool(worst), answer["log"]
        if answer["refused"]:
            return Outcome(change, matters, "refused", self._without_paths(answer), log, worst)
        if answer["error"] is not None:
            how = f"raises {answer['error']}"
            return Outcome(change, matters, how, answer.get("traceback", ""), log, worst)
        how = "recomputed" if matters and not difference(served, true) else "served"
        return Outcome(change, matters, how, "\n".join(log), log, worst)

    def _base(self, change: Change) -> tuple[Path, Features]:
        """Run the recipe as it is before changes, once."""
        key = (change.recipe, change.setup)
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
            answer = self._run(change.recipe, call)
            if answer["error"] is not None:
                raise RuntimeError(f"{change.recipe} {change.setup}: {answer}")
            shutil.rmtree(base)
            shutil.copytree(self._folder, base, symlinks=True)
            self._bases[key] = base, self._features(self._folder / "results")
        return self._bases[key]

    def _copy(self, base: Path) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(base, self._folder, symlinks=True)

    def _run(self, recipe: str, call: Call) -> dict[str, Any]:
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
                "answer": str(stage.with_name(stage.name + "-answer.json")),
            }
        )

    def _features(self, results: Path) -> Features:
        try:
            with featcache.open(results / "features" / "all", mapped=False) as cache:
                return {
                    (id, feature): np.array(cache.read(id, feature))
                    for id in cache.ids
                    for feature in cache.features
                }
        except FeatcacheError as error:
            raise RuntimeError(f"the results in {results} cannot be read") from error

    def _without_paths(self, answer: dict[str, Any]) -> str:
        # the names of folders are in every message, and name no cause
        return str(answer["message"]).replace(str(self._folder), "...").replace("features/all", "")


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

"""`docs/explanation/what-is-checked.md`: its tables, and each thing that is or is not noticed."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from places import ROOT

import featcache
from featcache.errors import ConfigError, StaleCacheError
from featcache.extraction.checking import PROBE
from featcache.staleness.probe import TOLERANCES

TEXT = (ROOT / "docs" / "explanation" / "what-is-checked.md").read_text()
RECIPE = """
import os
import numpy as np
import soundfile
from checked_helpers import emphasise

WINDOW = np.hanning(9)
UNUSED = 1


def compute(items):
    os.environ.get("CHECKED_TAG")
    found = []
    for item in items:
        signal = emphasise(soundfile.read(item["wav"])[0])  # a comment
        found.append({"id": item["id"], "x": np.convolve(signal, WINDOW)})
    return found
"""
HELPERS = """
import os


def emphasise(signal):
    result = signal[1:] - 0.97 * signal[:-1]
    return result * float(os.environ.get("CHECKED_GAIN", "1"))
"""
FILES = {"checked_recipe": RECIPE, "checked_helpers": HELPERS}


def table(first: str) -> list[list[str]]:
    """Return the rows of the table whose head begins so."""
    (rows,) = re.findall(rf"\| {re.escape(first)} \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()]


class Recordings(featcache.EnvironmentProvider):
    def __init__(self, folder: Path, compute: Any) -> None:
        self.folder, self.compute = folder, compute

    def build_env_local(self) -> dict[str, Any]:
        paths = sorted(self.folder.glob("*.wav"))
        items = [{"id": path.stem, "wav": str(path)} for path in paths]
        ids = [path.stem for path in paths]
        return {"dataset": items, "ids": ids, "compute_features": self.compute}


class Recipe:
    """A recipe of two files, and its recordings; each call is that of a new process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "cache"
        self.change("checked_recipe", "", "")
        self.change("checked_helpers", "", "")
        for number in range(12):
            self.record(number, number)

    def record(self, number: int, seed: int) -> Path:
        """Write the recording of this number anew."""
        path = self.folder / f"utt-{number}.wav"
        samples = np.random.default_rng(seed).uniform(-0.5, 0.5, 400 + 20 * number)
        soundfile.write(path, samples, 16000)
        return path

    def change(self, file: str, old: str, new: str) -> None:
        text = FILES[file]
        assert old in text
        (self.folder / f"{file}.py").write_text(text.replace(old, new) if old else text)

    def load(self) -> Recordings:
        for file in FILES:
            sys.modules.pop(file, None)
        importlib.invalidate_caches()
        return Recordings(self.folder, importlib.import_module("checked_recipe").compute)

    def extract(
        self, provider: Recordings | None = None, **settings: Any
    ) -> featcache.FeatureTable:
        declared = [featcache.FeatureStorageConfig("x")]
        provider = self.load() if provider is None else provider
        return featcache.extract(provider, self.cache, declared, progressbar=False, **settings)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recipe]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Recipe(tmp_path)
    made.extract()
    yield made
    for file in FILES:
        sys.modules.pop(file, None)


def test_the_tolerances_are_those_of_the_table() -> None:
    names = {
        "float32": "fp32",
        "float32 with TF32": "tf32",
        "float16": "fp16",
        "bfloat16": "bf16",
    }
    printed = {
        names[name]: tuple(
            (float(spread), float(share.removesuffix(" %")) / 100)
            for spread, share in (cell.split(", ") for cell in cells)
        )
        for name, *cells in table("computed in")
    }
    assert printed == TOLERANCES


def test_the_chances_are_those_of_the_formula() -> None:
    (head,) = re.findall(r"\| \| (p = .*) \|\n", TEXT)
    shares = [float(cell.removeprefix("p = ")) for cell in head.split(" | ")]
    (rows,) = re.findall(r"\| \| p = .*\n\|[-|]+\n((?:\|.*\n)+)", TEXT)
    counts = [
        int(found)
        for found in re.findall(r"k = (\d+)|check=(\d+)`", rows)
        for found in found
        if found
    ]
    assert counts[0] == PROBE
    for row, count in zip(rows.splitlines(), counts, strict=True):
        printed = [int(found) for found in re.findall(r"(\d+) %", row)]
        assert printed == [round(100 * (1 - (1 - share) ** count)) for share in shares]


def test_each_choice_is_an_argument() -> None:
    cache_features: Any = featcache.FeatureCacheMixin.cache_features
    for name in ("check", "on_changed", "accept", "overwrite"):
        assert f"`{name}=" in TEXT
        assert name in inspect.signature(cache_features).parameters
        assert name in inspect.signature(featcache.extract).parameters


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (
            "checked_recipe",
            "np.convolve(signal, WINDOW)",
            "np.convolve(WINDOW, signal[1:])",
            "compute",
        ),
        ("checked_recipe", "np.hanning(9)", "np.hamming(9)", "WINDOW"),
        ("checked_helpers", "0.97", "0.95", "emphasise"),
    ],
)
def test_code_and_values_of_any_file_count(
    recipe: Recipe, file: str, old: str, new: str, told: str
) -> None:
    recipe.change(file, old, new)
    with pytest.raises(StaleCacheError, match=told):
        recipe.extract(check=None)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("checked_recipe", "a comment", "another one"),
        ("checked_helpers", "result", "emphasised"),
        ("checked_recipe", "UNUSED = 1", "UNUSED = 2"),
    ],
)
def test_comments_and_names_of_variables_do_not(
    recipe: Recipe, file: str, old: str, new: str
) -> None:
    recipe.change(file, old, new)
    assert recipe.extract().complete


class Encoder(torch.nn.Module):
    """Stands for an encoder."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 3)
        self.dropout = torch.nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.layer = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dropout(self.linear(x)) * self.scale + self.layer
        return found


class Brain(featcache.FeatureCacheMixin):
    def __init__(self) -> None:
        self.modules = {"encoder": Encoder(), "classifier": torch.nn.Linear(3, 2)}
        self.device = "cpu"

    def compute_features(self, batch: Any, stage: Any) -> Any:
        return [{"id": id, "x": self.modules["encoder"](x)} for id, x in batch]


@torch.no_grad()
def one_weight(modules: Any) -> None:
    modules["encoder"].linear.weight[1, 2] += 1e-6


def a_buffer(modules: Any) -> None:
    modules["encoder"].scale[0] = 2


def a_setting(modules: Any) -> None:
    modules["encoder"].layer = 5


def a_hook(modules: Any) -> None:
    modules["encoder"].register_forward_hook(lambda module, given, found: found * 2)


def a_method(modules: Any) -> None:
    modules["encoder"].forward = lambda x: x


def precision(_: Any) -> None:
    torch.set_float32_matmul_precision("medium")


def dtype(_: Any) -> None:
    torch.set_default_dtype(torch.float64)


@torch.no_grad()
def another_module(modules: Any) -> None:
    modules["classifier"].weight += 1


def dropout(modules: Any) -> None:
    modules["encoder"].dropout.p = 0.5


@pytest.fixture
def settings_of_torch() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.set_default_dtype(before[1])


@pytest.mark.usefixtures("settings_of_torch")
@pytest.mark.parametrize(
    ("change", "counts"),
    [
        *((each, True) for each in (one_weight, a_buffer, a_setting, a_hook, a_method)),
        *((each, True) for each in (precision, dtype)),
        *((each, False) for each in (another_module, dropout)),
    ],
)
def test_modules_that_the_code_names_count_with_all_that_they_compute_with(
    change: Callable[[Any], None], counts: bool
) -> None:
    before, brain = Brain().expectation(), Brain()
    change(brain.modules)
    assert (brain.expectation() != before) is counts


def test_code_that_was_edited_since_it_was_loaded_is_refused(recipe: Recipe) -> None:
    provider = recipe.load()
    recipe.change("checked_helpers", "0.97", "0.95")
    with pytest.raises(ConfigError, match=r"checked_helpers\.py was edited since it was loaded"):
        recipe.extract(provider)


# What explains, and what cannot be known


def test_the_environment_explains_and_does_not_refuse(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKED_TAG", "two")
    assert recipe.extract().complete
    monkeypatch.setenv("CHECKED_GAIN", "2")
    with pytest.raises(StaleCacheError, match=r"changed since: environment CHECKED_GAIN: .* -> 2"):
        recipe.extract()
    assert recipe.extract(check=None).complete


def test_a_file_that_keeps_its_size_and_time_is_noticed_where_it_is_computed_again(
    recipe: Recipe,
) -> None:
    path = recipe.folder / "utt-7.wav"
    before = path.stat()
    recipe.record(7, seed=70)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert recipe.extract(check=None).complete
    with pytest.raises(StaleCacheError, match="'utt-7'"):
        recipe.extract(check="all")


def test_readers_compare_neither_recordings_nor_features(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = featcache.inspect.provenance(recipe.load().compute).fingerprint({})
    recipe.record(7, seed=70)
    monkeypatch.setenv("CHECKED_GAIN", "2")
    assert featcache.open(recipe.cache, expect=expected).complete
    recipe.change("checked_helpers", "0.97", "0.95")
    expected = featcache.inspect.provenance(recipe.load().compute).fingerprint({})
    with pytest.raises(StaleCacheError, match="emphasise"):
        featcache.open(recipe.cache, expect=expected)

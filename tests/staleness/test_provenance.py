"""What of a brain's code and modules makes a cache stale, and what does not."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from featcache.format import canonical, differences
from featcache.staleness.provenance import Provenance, provenance

SOURCE = '''
import functools
import torch
from featcache import FeatureCacheMixin

GAIN = 2
OTHER = 3
TABLE = {{"hop": 160, "windows": [25, 10]}}
ROOT = "/data/{name}"


@functools.lru_cache
def scaled(x):
    """Scales."""
    return x * GAIN


def unused(x):
    return x * OTHER


class Net(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.width = width

    def forward(self, x):
        return x.relu()


class Base:
    device = "cuda"
    HOP = 160
    WINDOW = 400
    WIDTH = 3

    def helper(self, x):
        return x


class Extractor(FeatureCacheMixin, Base):
    WINDOW = 800

    @torch.no_grad()
    def compute_features(self, batch, stage):
        # a comment
        x = self.helper(scaled(self.modules.encoder(batch.sig)))
        frame = self.HOP, Base.WINDOW, self.device
        norm = getattr(self.hparams, "norm")
        net = self.modules["net"]
        return [(x, self.hparams.layer, norm, TABLE, ROOT, __name__, self.rate, net)]

    def helper(self, x):
        return super(Extractor, self).helper(x) + 1

    @property
    def rate(self):
        return 8000

    def compute_forward(self, batch, stage):
        return self.modules.classifier(batch), unused(batch)
'''


def load(path: Path, source: str) -> Any:
    """Import a file as a user's recipe."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("recipe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    """Make an extractor from the source above, with some of it replaced."""
    number = 0

    def make(*changes: tuple[str, str]) -> Any:
        nonlocal number
        number += 1
        # the file's own path differs each time, as on another machine
        source = SOURCE.format(name=number)
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        module = load(tmp_path / f"recipe{number}.py", source)
        torch.manual_seed(0)
        extractor = module.Extractor()
        extractor.modules = torch.nn.ModuleDict(
            {
                "encoder": torch.nn.Linear(3, 4),
                "net": module.Net(),
                "classifier": torch.nn.Linear(4, 2),
            }
        )
        extractor.hparams = SimpleNamespace(layer=9, norm="l2", lr=0.1)
        return extractor

    return make


def found_in(extractor: Any) -> Provenance:
    return provenance(extractor.compute_features, extractor)


def fingerprint(extractor: Any) -> dict[str, Any]:
    return canonical(found_in(extractor).fingerprint({}))


def test_what_compute_features_names_counts(make: Callable[..., Any]) -> None:
    found = found_in(make())
    assert set(found.modules) == {"encoder", "net"}
    shown = found.fingerprint({})
    assert shown["hparams"] == {"layer": 9, "norm": "l2"}
    assert shown["attributes"] == {"HOP": 160}
    assert shown["constants"] == {
        "Extractor.compute_features": {
            "Base.WINDOW": 400,
            "TABLE": {"hop": 160, "windows": [25, 10]},
        },
        "scaled": {"GAIN": 2},
    }
    assert set(found.source) == {
        "Extractor.compute_features",
        "Extractor.helper",
        "Extractor.rate",
        "Base.helper",
        "scaled",
        "Net.forward",
    }


def test_the_same_code_has_the_same_fingerprint(make: Callable[..., Any]) -> None:
    assert differences(fingerprint(make()), fingerprint(make())) == []


@pytest.mark.parametrize(
    "change",
    [
        ("# a comment", "# another one"),
        ('"""Scales."""', '"""Multiplies."""'),
        ("x * GAIN", "(x  *  GAIN)"),
        ("OTHER = 3", "OTHER = 4"),
        ("WINDOW = 800", "WINDOW = 900"),
        ("WIDTH = 3", "WIDTH = 4"),
        ("return x * OTHER", "return x + OTHER"),
        ("self.modules.classifier(batch)", "self.modules.classifier(batch * 2)"),
    ],
)
def test_what_features_do_not_depend_on_does_not_count(
    make: Callable[..., Any], change: tuple[str, str]
) -> None:
    assert differences(fingerprint(make()), fingerprint(make(change))) == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("batch.sig)", "batch.sig * 2)"), "source.Extractor.compute_features"),
        (("(x) + 1", "(x) + 2"), "source.Extractor.helper"),
        (("        return x\n", "        return x * 2\n"), "source.Base.helper"),
        (("return 8000", "return 16000"), "source.Extractor.rate"),
        (("x * GAIN", "x / GAIN"), "source.scaled"),
        (("x.relu()", "x.tanh()"), "source.Net.forward"),
        (("GAIN = 2", "GAIN = 3"), "constants.scaled.GAIN"),
        (('"hop": 160', '"hop": 80'), "constants.Extractor.compute_features.TABLE.hop"),
        (("    HOP = 160", "    HOP = 80"), "attributes.HOP"),
    ],
)
def test_each_piece_of_code_that_features_depend_on_counts(
    make: Callable[..., Any], change: tuple[str, str], field: str
) -> None:
    (found,) = differences(fingerprint(make()), fingerprint(make(change)))
    assert found.field == field


def test_hyperparameters_weights_and_settings_count_by_name(make: Callable[..., Any]) -> None:
    old, new = fingerprint(make()), make()
    new.hparams.layer = 12
    new.hparams.lr = 0.2
    with torch.no_grad():
        new.modules["encoder"].weight += 1
        new.modules["classifier"].weight += 1
    setting, weights = differences(old, fingerprint(new))
    assert str(setting) == "hparams.layer: was 9, now 12"
    assert weights.path == ("modules", "encoder", "weights")


@pytest.mark.parametrize(
    "code",
    [
        "for module in self.modules.values(): pass",
        "self.modules[stage]",
        "modules = self.modules; modules[stage]",
        "getattr(self.modules, stage)",
        "self.modules.no_such_module",
    ],
)
def test_modules_reached_without_a_name_count_all(make: Callable[..., Any], code: str) -> None:
    extractor = make(("# a comment", code))
    assert set(found_in(extractor).modules) == {"encoder", "net", "classifier"}


def test_where_no_module_is_named_none_counts(make: Callable[..., Any]) -> None:
    extractor = make(("self.modules.encoder(batch.sig)", "batch.sig"), ('self.modules["net"]', "0"))
    assert set(found_in(extractor).modules) == set()


def test_modules_among_hparams_and_attributes_count(make: Callable[..., Any]) -> None:
    extractor = make(
        ("# a comment", "self.hparams.fbank(self.norm(self.raw_modules.classifier(batch)))")
    )
    extractor.hparams.fbank = torch.nn.Linear(1, 1)
    extractor.norm = torch.nn.BatchNorm1d(2)
    extractor.unnamed = torch.nn.BatchNorm1d(2)
    assert set(found_in(extractor).modules) == {
        "encoder",
        "net",
        "classifier",
        "fbank",
        "norm",
    }


def test_hparams_may_be_a_dict_or_absent(make: Callable[..., Any]) -> None:
    extractor = make()
    extractor.hparams = {"layer": 9, "lr": 1}
    assert fingerprint(extractor)["hparams"] == {"layer": 9}
    del extractor.hparams
    assert "hparams" not in fingerprint(extractor)

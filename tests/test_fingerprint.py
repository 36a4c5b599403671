"""What of a brain's code and modules makes a cache stale, and what does not."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from featcache.fingerprint import MAX_SETTINGS, Ingredients, describe_module, digest_weights, find_ingredients
from featcache.store.fingerprint import canonical, differences

SOURCE = '''
import functools
import torch
from featcache.brain import FeatureCacheMixin

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
        return [(x, self.hparams.layer, norm, TABLE, ROOT, __name__, self.rate, self.modules["net"])]

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
        source = SOURCE.format(name=number)  # the file's own path differs each time, as on another machine
        for old, new in changes:
            assert old in source
            source = source.replace(old, new)
        module = load(tmp_path / f"recipe{number}.py", source)
        torch.manual_seed(0)
        extractor = module.Extractor()
        extractor.modules = torch.nn.ModuleDict(
            {"encoder": torch.nn.Linear(3, 4), "net": module.Net(), "classifier": torch.nn.Linear(4, 2)}
        )
        extractor.hparams = SimpleNamespace(layer=9, norm="l2", lr=0.1)
        return extractor

    return make


def fingerprint(extractor: Any) -> dict[str, Any]:
    return canonical(find_ingredients(extractor).fingerprint({}))


def test_what_compute_features_names_counts(make: Callable[..., Any]) -> None:
    found = find_ingredients(make())
    assert set(found.modules) == {"encoder", "net"}
    assert found.hparams == {"layer": 9, "norm": "l2"}
    assert found.constants == {"GAIN": 2, "TABLE": {"hop": 160, "windows": [25, 10]}, "HOP": 160, "WINDOW": 800}
    assert set(found.source) == {
        "Extractor.compute_features",
        "Extractor.helper",
        "Extractor.rate",
        "Base.helper",
        "scaled",
        "Net",
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
        ("WIDTH = 3", "WIDTH = 4"),
        ("return x * OTHER", "return x + OTHER"),
        ("self.modules.classifier(batch)", "self.modules.classifier(batch * 2)"),
    ],
)
def test_what_features_do_not_depend_on_does_not_count(make: Callable[..., Any], change: tuple[str, str]) -> None:
    assert differences(fingerprint(make()), fingerprint(make(change))) == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("batch.sig)", "batch.sig * 2)"), "source.Extractor.compute_features"),
        (("(x) + 1", "(x) + 2"), "source.Extractor.helper"),
        (("        return x\n", "        return x * 2\n"), "source.Base.helper"),
        (("return 8000", "return 16000"), "source.Extractor.rate"),
        (("x * GAIN", "x / GAIN"), "source.scaled"),
        (("x.relu()", "x.tanh()"), "source.Net"),
        (("GAIN = 2", "GAIN = 3"), "constants.GAIN"),
        (('"hop": 160', '"hop": 80'), "constants.TABLE.hop"),
        (("    HOP = 160", "    HOP = 80"), "constants.HOP"),
    ],
)
def test_each_piece_of_code_that_features_depend_on_counts(
    make: Callable[..., Any], change: tuple[str, str], field: str
) -> None:
    (line,) = differences(fingerprint(make()), fingerprint(make(change)))
    assert line.startswith(f"{field}: was ")


def test_hyperparameters_weights_and_settings_count_by_name(make: Callable[..., Any]) -> None:
    old, new = fingerprint(make()), make()
    new.hparams.layer = 12
    new.hparams.lr = 0.2
    new.modules["net"].width = 5
    with torch.no_grad():
        new.modules["encoder"].weight += 1
        new.modules["classifier"].weight += 1
    lines = differences(old, fingerprint(new))
    assert lines[0] == "hparams.layer: was 9, now 12"
    assert lines[1].startswith("modules.encoder.weights: was ")
    assert lines[2] == "modules.net.settings.width: was 4, now 5"
    assert len(lines) == 3


@pytest.mark.parametrize(
    "code",
    [
        "for module in self.modules.values(): pass",
        "self.modules[stage]",
        "modules = self.modules",
        "getattr(self.modules, stage)",
        "self.modules.no_such_module",
    ],
)
def test_modules_reached_without_a_name_count_all(make: Callable[..., Any], code: str) -> None:
    extractor = make(("# a comment", code))
    assert set(find_ingredients(extractor).modules) == {"encoder", "net", "classifier"}


def test_where_no_module_is_named_all_count(make: Callable[..., Any]) -> None:
    extractor = make(("self.modules.encoder(batch.sig)", "batch.sig"), ('self.modules["net"]', "0"))
    assert set(find_ingredients(extractor).modules) == {"encoder", "net", "classifier"}


def test_modules_among_hparams_and_attributes_count(make: Callable[..., Any]) -> None:
    extractor = make(("# a comment", "self.hparams.fbank(self.norm(self.raw_modules.classifier(batch)))"))
    extractor.hparams.fbank = torch.nn.Linear(1, 1)
    extractor.norm = torch.nn.BatchNorm1d(2)
    extractor.unnamed = torch.nn.BatchNorm1d(2)
    assert set(find_ingredients(extractor).modules) == {"encoder", "net", "classifier", "fbank", "norm"}


def test_hparams_may_be_a_dict_or_absent(make: Callable[..., Any]) -> None:
    extractor = make()
    extractor.hparams = {"layer": 9, "lr": 1}
    assert find_ingredients(extractor).hparams == {"layer": 9}
    del extractor.hparams
    assert find_ingredients(extractor).hparams == {}


def typed_in(body: str) -> Any:
    """Make an extractor whose source is not kept."""
    scope: dict[str, Any] = {"__name__": "typed_in"}
    exec(f"class Extractor:\n def compute_features(self, batch, stage):\n  return {body}", scope)
    extractor = scope["Extractor"]()
    extractor.modules = {"encoder": torch.nn.ReLU(), "classifier": torch.nn.ReLU()}
    return extractor


def test_code_whose_source_is_not_kept_counts_by_its_bytecode() -> None:
    body = "[x + 1 for x in self.modules.encoder(batch) if x in {'a', 'b'}]"
    assert set(find_ingredients(typed_in(body)).modules) == {"encoder", "classifier"}
    assert differences(fingerprint(typed_in(body)), fingerprint(typed_in(body))) == []
    (line,) = differences(fingerprint(typed_in(body)), fingerprint(typed_in(body.replace("1", "2"))))
    assert line.startswith("source.Extractor.compute_features: was ")


def test_bytecode_counts_the_same_in_every_process() -> None:
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_fingerprint import fingerprint, typed_in
        print(fingerprint(typed_in("batch in {{'a', 'b', 'c', 'd', 'e'}}")))"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(printed) == 1


def test_code_without_source_may_reach_any_module() -> None:
    scope: dict[str, Any] = {"__name__": "typed_in"}
    exec("def helper(self, batch): return self.modules['b'](batch)", scope)

    class Extractor:
        def compute_features(self, batch: Any, stage: Any) -> Any:
            return self.modules["a"](self.helper(batch))

        helper = scope["helper"]

        def __init__(self) -> None:
            self.modules = {"a": torch.nn.ReLU(), "b": torch.nn.ReLU()}

    assert set(find_ingredients(Extractor()).modules) == {"a", "b"}


def test_modules_that_were_typed_in_count_by_their_bytecode() -> None:
    def make(body: str) -> Any:
        scope: dict[str, Any] = {"__name__": "typed_in"}
        code = "import torch\nclass Net(torch.nn.Module):\n def forward(self, x):\n  return " + body
        code += "\nclass Extractor:\n def compute_features(self, batch, stage): return self.modules['net'](batch)"
        exec(code, scope)
        extractor = scope["Extractor"]()
        extractor.modules = {"net": scope["Net"]()}
        return extractor

    (line,) = differences(fingerprint(make("x + 1")), fingerprint(make("x - 1")))
    assert line.startswith("source.Net.forward: was ")


def test_a_class_may_have_the_name_of_its_base() -> None:
    def doubled(self: Any, x: Any) -> Any:
        return x * 2

    def tripled(self: Any, x: Any) -> Any:
        return x * 3

    def helper(self: Any, x: Any) -> Any:
        return doubled(self, x)

    def compute_features(self: Any, batch: Any, stage: Any) -> Any:
        return self.helper(batch)

    def extractor(first: Any) -> Any:
        first.__qualname__ = helper.__qualname__ = "Extractor.helper"
        base = type("Extractor", (), {"helper": first})
        return type("Extractor", (base,), {"compute_features": compute_features, "helper": helper})()

    (line,) = differences(fingerprint(extractor(doubled)), fingerprint(extractor(tripled)))
    assert line.startswith("source.Extractor.helper: was ")


def test_local_functions_and_their_constants_are_followed() -> None:
    gain = 2

    def scaled(x: Any) -> Any:
        return x * gain

    class Extractor:
        def compute_features(self, batch: Any, stage: Any) -> Any:
            return scaled(batch)

    found = find_ingredients(Extractor())
    assert found.constants == {"gain": 2}
    assert sorted(name.rsplit(".", 1)[1] for name in found.source) == ["compute_features", "scaled"]


def test_methods_of_every_kind_are_followed() -> None:
    class Extractor:
        def compute_features(self, batch: Any, stage: Any) -> Any:
            """Nothing but names."""
            return self.static, self.of_class, self.cached, self.partial, self.empty

        @staticmethod
        def static() -> None: ...

        @classmethod
        def of_class(cls) -> None: ...

        @functools.cached_property
        def cached(self) -> int:
            return 1

        def empty(self) -> None:
            """Nothing at all."""

        partial = functools.partialmethod(empty)

        def unnamed(self) -> None: ...

    names = {name.rsplit(".", 1)[1] for name in find_ingredients(Extractor()).source}
    assert names == {"compute_features", "static", "of_class", "cached", "empty"}


def test_what_is_given_takes_the_place_of_what_is_found() -> None:
    class Unreadable(torch.nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("read without need")

    found = Ingredients(modules={"large": Unreadable()}, source={"f": "1"}, hparams={"a": 1}, constants={"B": 2})
    assert found.fingerprint({"modules": "v1", "hparams": None}) == {
        "constants": {"B": 2},
        "hparams": None,
        "modules": "v1",
        "source": {"f": "1"},
    }


# Modules


def test_the_digest_of_weights_is_that_of_their_values_and_names() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(2, 3)
    module = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(3))
    digest = digest_weights(module)
    assert digest_weights(torch.nn.DataParallel(module)) == digest
    assert digest_weights(torch.compile(module, backend="eager")) == digest  # type: ignore[arg-type]
    module.eval()
    assert digest_weights(module) == digest
    assert digest_weights(module.double()) != digest
    assert digest_weights(module.float()) == digest
    torch.nn.init.zeros_(linear.weight)
    assert digest_weights(module) != digest


def test_weights_of_any_dtype_and_shape_are_digested() -> None:
    def digest(*tensors: torch.Tensor) -> str:
        module = torch.nn.Module()
        for number, tensor in enumerate(tensors):
            module.register_buffer(f"t{number}", tensor)
        return digest_weights(module)

    dtypes = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64]
    tensors = [torch.ones(2, 3).to(dtype) for dtype in dtypes]
    assert len({digest(tensor) for tensor in tensors}) == len(tensors)
    assert digest(torch.ones(2, 3)) != digest(torch.ones(3, 2))
    assert digest(torch.arange(6.0).reshape(2, 3).T) == digest(torch.arange(6.0).reshape(2, 3).T.contiguous())
    one, other = torch.nn.Module(), torch.nn.Module()
    for module, names in ((one, "ab"), (other, "ba")):
        for name in names:
            module.register_buffer(name, torch.zeros(1))
    assert digest_weights(one) == digest_weights(other)
    assert digest(torch.tensor(1.0)) != digest(torch.empty(0))


def test_settings_are_what_constructors_were_given() -> None:
    features = pytest.importorskip("speechbrain.lobes.features")
    fbank = features.Fbank(n_mels=80)
    (line,) = differences(describe_module(fbank), describe_module(features.Fbank(n_mels=80, hop_length=20)))
    assert line == "settings.compute_STFT.hop_length: was 160, now 320"
    before = describe_module(fbank)
    fbank.train()(torch.zeros(1, 800))
    assert describe_module(fbank.eval()) == before


def test_paths_and_devices_are_no_settings() -> None:
    class Net(torch.nn.Module):
        def __init__(self, source: str, device: str, name: str) -> None:
            super().__init__()
            self.source, self.device, self.name = source, device, name
            self.not_an_argument = 3

    settings = describe_module(Net("org/model", "cuda:0", "base"))["settings"]
    assert settings == {"class": Net.__qualname__, "name": "base"}


def test_numbers_that_json_cannot_hold_are_no_settings() -> None:
    class Net(torch.nn.Module):
        def __init__(self, low: float, high: float) -> None:
            super().__init__()
            self.low, self.high = low, high

    assert describe_module(Net(0.5, float("inf")))["settings"] == {"class": Net.__qualname__, "low": 0.5}


def test_an_extractor_may_be_a_module_itself() -> None:
    class Extractor(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.ReLU()
            self.classifier = torch.nn.ReLU()

        def compute_features(self, batch: Any, stage: Any) -> Any:
            return self.encoder(batch)

    assert set(find_ingredients(Extractor()).modules) == {"encoder"}


def test_settings_of_large_modules_are_a_digest() -> None:
    def settings(number: int) -> Any:
        return describe_module(torch.nn.Sequential(*[torch.nn.ReLU() for _ in range(number)]))["settings"]

    assert isinstance(settings(3), dict)
    large = MAX_SETTINGS // 2 + 1
    assert isinstance(settings(large), str)
    assert settings(large) == settings(large) != settings(large + 1)

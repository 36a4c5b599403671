"""How code of every kind is followed, and what of modules is described."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from featcache.format import canonical, differences
from featcache.staleness import torch_modules as described
from featcache.staleness.code import code_of
from featcache.staleness.follow import Follower
from featcache.staleness.provenance import Provenance, provenance
from featcache.staleness.values import Values


def found_in(extractor: Any) -> Provenance:
    return provenance(extractor.compute_features, extractor)


def fingerprint(extractor: Any) -> dict[str, Any]:
    return canonical(found_in(extractor).fingerprint({}))


def constants(extractor: Any) -> Any:
    held = fingerprint(extractor).get("constants", {})
    return {name: value for values in held.values() for name, value in values.items()}


def describe_module(module: torch.nn.Module) -> dict[str, Any]:
    return described.describe_module(module, Values(Follower(like={".*"}))).to_json()


def digest_weights(module: torch.nn.Module) -> Any:
    return describe_module(module)["weights"]


def typed_in(body: str) -> Any:
    """Make an extractor whose source is not kept."""
    scope: dict[str, Any] = {"__name__": "typed_in"}
    exec(f"class Extractor:\n def compute_features(self, batch, stage):\n  return {body}", scope)
    extractor = scope["Extractor"]()
    extractor.modules = {"encoder": torch.nn.ReLU(), "classifier": torch.nn.ReLU()}
    return extractor


def test_code_whose_source_is_not_kept_counts_by_its_bytecode() -> None:
    body = "[x + 1 for x in self.modules.encoder(batch) if x in {'a', 'b'}]"
    assert set(found_in(typed_in(body)).modules) == {"encoder"}
    assert differences(fingerprint(typed_in(body)), fingerprint(typed_in(body))) == []
    (found,) = differences(
        fingerprint(typed_in(body)), fingerprint(typed_in(body.replace("1", "2")))
    )
    assert found.path == ("source", "Extractor.compute_features")


def test_code_of_no_module_counts_too() -> None:
    scope: dict[str, Any] = {}  # without a `__name__`
    exec("class Extractor:\n def compute_features(self, batch, stage):\n  return batch", scope)
    assert list(fingerprint(scope["Extractor"]())["source"]) == ["Extractor.compute_features"]


def test_a_variable_that_is_not_bound_yet_is_passed_over() -> None:
    class Extractor:
        def compute_features(self, batch: Any, stage: Any) -> Any:
            return [factor * later for _ in batch]

    factor = 2
    assert constants(Extractor()) == {"factor": 2}
    later = 3
    assert constants(Extractor()) == {"factor": 2, "later": 3}


def test_bytecode_counts_the_same_in_every_process() -> None:
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_provenance_code import fingerprint, typed_in
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

    assert set(found_in(Extractor()).modules) == {"a", "b"}


def test_modules_that_were_typed_in_count_by_their_bytecode() -> None:
    def make(body: str) -> Any:
        scope: dict[str, Any] = {"__name__": "typed_in"}
        code = "import torch\nclass Net(torch.nn.Module):\n def forward(self, x):\n  return " + body
        code += (
            "\nclass Extractor:\n"
            " def compute_features(self, batch, stage): return self.modules['net'](batch)"
        )
        exec(code, scope)
        extractor = scope["Extractor"]()
        extractor.modules = {"net": scope["Net"]()}
        return extractor

    (found,) = differences(fingerprint(make("x + 1")), fingerprint(make("x - 1")))
    assert found.path == ("source", "Net.forward")


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
        return type(
            "Extractor", (base,), {"compute_features": compute_features, "helper": helper}
        )()

    found = differences(fingerprint(extractor(doubled)), fingerprint(extractor(tripled)))
    assert any(each.field.startswith("source.Extractor.helper") for each in found)


def test_local_functions_and_their_constants_are_followed() -> None:
    gain = 2

    def scaled(x: Any) -> Any:
        return x * gain

    class Extractor:
        def compute_features(self, batch: Any, stage: Any) -> Any:
            return scaled(batch)

    found = found_in(Extractor())
    assert constants(Extractor()) == {"gain": 2}
    assert sorted(name.rsplit(".", 1)[1] for name in found.source) == [
        "<inner>",
        "compute_features",
    ]


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

    names = {name.rsplit(".", 1)[1] for name in found_in(Extractor()).source}
    assert names == {"compute_features", "static", "of_class", "cached", "empty"}


def test_what_is_given_takes_the_place_of_what_is_found() -> None:
    class Unreadable(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(3, device="meta"))

    class Extractor:
        modules = {"large": Unreadable()}  # noqa: RUF012
        b = 2

        def compute_features(self, batch: Any, stage: Any) -> Any:
            return self.modules["large"](batch) * self.b

    found = found_in(Extractor()).fingerprint({"modules": "v1", "source": None})
    assert found.pop("torch")
    assert found.pop("fingerprint_rules")
    assert found == {"attributes": {"b": 2}, "modules": "v1", "source": None}


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
    def digest(*tensors: torch.Tensor) -> Any:
        module = torch.nn.Module()
        for number, tensor in enumerate(tensors):
            module.register_buffer(f"t{number}", tensor)
        return digest_weights(module)

    dtypes = [
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.complex64,
    ]
    tensors = [torch.ones(2, 3).to(dtype) for dtype in dtypes]
    assert len({digest(tensor) for tensor in tensors}) == len(tensors)
    assert digest(torch.ones(2, 3)) != digest(torch.ones(3, 2))
    assert digest(torch.arange(6.0).reshape(2, 3).T) == digest(
        torch.arange(6.0).reshape(2, 3).T.contiguous()
    )
    one, other = torch.nn.Module(), torch.nn.Module()
    for module, names in ((one, "ab"), (other, "ba")):
        for name in names:
            module.register_buffer(name, torch.zeros(1))
    assert digest_weights(one) == digest_weights(other)
    assert digest(torch.tensor(1.0)) != digest(torch.empty(0))


def test_settings_are_what_constructors_were_given() -> None:
    features = pytest.importorskip("speechbrain.lobes.features")
    fbank = features.Fbank(n_mels=80)
    (found,) = differences(
        describe_module(fbank), describe_module(features.Fbank(n_mels=80, hop_length=20))
    )
    assert str(found) == "settings.compute_STFT.hop_length: was 160, now 320"
    before = describe_module(fbank)
    fbank.train()(torch.zeros(1, 800))
    assert describe_module(fbank.eval()) == before


def test_paths_and_devices_are_no_settings() -> None:
    class Net(torch.nn.Module):
        def __init__(self, source: str, device: object, name: str) -> None:
            super().__init__()
            self.source, self.device, self.name = source, device, name
            self.not_an_argument = 3

    for source, device in (("/models/base", "cuda:0"), ("models/base.pt", torch.device("cpu"))):
        settings = describe_module(Net(source, device, "org/base"))["settings"]
        assert settings == {"class": Net.__qualname__, "name": "org/base", "not_an_argument": 3}


def test_numbers_that_json_cannot_hold_are_settings_as_text() -> None:
    class Net(torch.nn.Module):
        def __init__(self, low: float, high: float) -> None:
            super().__init__()
            self.low, self.high = low, high

    assert describe_module(Net(0.5, float("inf")))["settings"] == {
        "class": Net.__qualname__,
        "low": 0.5,
        "high": "inf",
    }


def test_an_extractor_may_be_a_module_itself() -> None:
    class Extractor(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.ReLU()
            self.classifier = torch.nn.ReLU()

        def compute_features(self, batch: Any, stage: Any) -> Any:
            return self.encoder(batch)

    assert set(found_in(Extractor()).modules) == {"encoder"}


@dataclasses.dataclass
class Bank:
    mels: int = 40
    low_hz: float = 20.0


BANK = Bank()


class OfBank:
    def __init__(self) -> None:
        self.bank = Bank()

    def by_attribute(self, id: str) -> Any:
        return filters(**dataclasses.asdict(self.bank))


def filters(**settings: Any) -> Any:
    return settings


OF_BANK = OfBank()
WHOLES: dict[str, Callable[[str], Any]] = {
    "asdict, spread": lambda id: filters(**dataclasses.asdict(BANK)),
    "asdict, by key": lambda id: dataclasses.asdict(BANK)["me" + "ls"],
    "asdict, values": lambda id: [*dataclasses.asdict(BANK).values()],
    "astuple": lambda id: dataclasses.astuple(BANK),
    "fields": lambda id: [getattr(BANK, each.name) for each in dataclasses.fields(BANK)],
    "vars, spread": lambda id: filters(**vars(BANK)),
    "vars, values": lambda id: [*vars(BANK).values()],
    "vars, a loop": lambda id: [value for _, value in vars(BANK).items()],
    "__dict__, spread": lambda id: filters(**BANK.__dict__),
    "__dict__, values": lambda id: [*BANK.__dict__.values()],
    "an attribute": OF_BANK.by_attribute,
}


@pytest.mark.parametrize("kind", WHOLES)
def test_objects_that_are_read_as_a_whole_count_with_all_attributes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = provenance(WHOLES[kind]).fingerprint({})
    for bank in (BANK, OF_BANK.bank):
        monkeypatch.setattr(bank, "mels", 80)
    assert provenance(WHOLES[kind]).fingerprint({}) != before


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_text_of_a_function_is_what_stands_in_its_file(tmp_path: Path, end: str) -> None:
    source = (
        "# ä\n\fdef plain(a):  # ü\n    'ö'\n    return a\n"
        "é = 'é'; inline = lambda x: 'ß' + x; after = 1\n"
        "def outer():\n    text = '''\n  \x0b ç'''\n    return text, lambda: '\u2028'\n"
    )
    path = tmp_path / "texts_of_functions.py"
    path.write_bytes(source.replace("\n", end).encode())
    spec = importlib.util.spec_from_file_location("texts_of_functions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for function in (module.plain, module.inline, module.outer, module.outer()[1]):
        found = code_of(function)
        assert found.tree is not None
        assert found.text == ast.get_source_segment(source, found.tree)

"""Modules that are held, ordered, or made in unusual ways."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import featcache
from featcache.errors import ConfigError
from featcache.format import differences
from featcache.inspect import provenance
from featcache.staleness.witnesses import changes, witnesses

Feats = Callable[[str], Any]


def frames_of(id: str) -> torch.Tensor:
    return torch.full((3, 2), float(id))


def fingerprint(function: Feats) -> dict[str, Any]:
    return provenance(function).fingerprint({})


def one_after_the_other(names: list[str]) -> Feats:
    """Two layers that are called in the order of their names."""
    torch.manual_seed(0)
    layers = {"bend": torch.nn.Tanh(), "mix": torch.nn.Linear(2, 2)}
    net = torch.nn.Sequential(OrderedDict((name, layers[name]) for name in names))
    return lambda id: net(frames_of(id))


def in_a_loop(names: list[str]) -> Feats:
    torch.manual_seed(0)
    layers = {"bend": torch.nn.Tanh(), "mix": torch.nn.Linear(2, 2)}

    class Steps(torch.nn.ModuleDict):  # as SpeechBrain's `Sequential` is one
        def forward(self, frames: torch.Tensor) -> torch.Tensor:
            for step in self.values():
                frames = step(frames)
            return frames

    net = Steps({name: layers[name] for name in names})
    return lambda id: net(frames_of(id))


@pytest.mark.parametrize("make", [one_after_the_other, in_a_loop])
def test_layers_in_another_order_count(make: Callable[[list[str]], Feats]) -> None:
    first, second = make(["bend", "mix"]), make(["mix", "bend"])
    assert not torch.equal(first("1"), second("1"))
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first) == fingerprint(make(["bend", "mix"]))


def test_the_order_of_modules_that_are_asked_for_by_name_counts_for_nothing() -> None:
    def by_name(names: list[str]) -> Feats:
        torch.manual_seed(0)
        heads = {name: torch.nn.Linear(2, 2) for name in ("en", "fr")}
        net = torch.nn.ModuleDict({name: heads[name] for name in names})
        return lambda id: net["en" if id == "1" else "fr"](frames_of(id))

    assert fingerprint(by_name(["en", "fr"])) == fingerprint(by_name(["fr", "en"]))


def test_layers_called_order_hide_no_order() -> None:
    def called_order(names: list[str]) -> Feats:
        torch.manual_seed(0)
        layers = {"order": torch.nn.Linear(2, 2), "bend": torch.nn.Tanh()}
        net = torch.nn.Sequential(OrderedDict((name, layers[name]) for name in names))
        return lambda id: net(frames_of(id))

    assert fingerprint(called_order(["order", "bend"])) != fingerprint(
        called_order(["bend", "order"])
    )


def test_a_module_of_a_held_object_is_shown_whole_and_its_weights_by_name() -> None:
    was, now = Recogniser(1.0, 2.0), Recogniser(3.0, 2.0)
    for each in (was, now):
        each.kind = [*range(300)]  # type: ignore[assignment]
    now.modules.encoder.in_features = 4
    found = [provenance(held(each, "by_any_kind")) for each in (was, now)]
    told = [*map(str, differences(found[0].fingerprint({}), found[1].fingerprint({})))]
    assert [line.partition(":")[0].partition("recogniser.")[2] for line in told] == [
        "modules.encoder.settings.in_features",
        "modules.encoder.weights",
    ]
    assert "weights of encoder: weight" in changes(*map(witnesses, found))


class Recogniser:
    """As a Brain that a function or a data set holds."""

    def __init__(self, weight: float, of_classifier: float, kind: str = "encoder") -> None:
        parts = {"encoder": weight, "classifier": of_classifier}
        layers = {name: torch.nn.Linear(2, 2) for name in parts}
        for name, layer in layers.items():
            torch.nn.init.constant_(layer.weight, parts[name])
            torch.nn.init.zeros_(layer.bias)
        self.modules: Any = torch.nn.ModuleDict(layers)
        self.kind = kind

    def by_name(self, id: str) -> Any:
        return self.modules.encoder(frames_of(id))

    def by_item(self, id: str) -> Any:
        return self.modules["encoder"](frames_of(id))

    def by_any_kind(self, id: str) -> Any:
        return self.modules.encoder(frames_of(id)) + len(self.kind)

    def by_key(self, id: str) -> Any:
        return self.modules[self.kind](frames_of(id))

    def by_loop(self, id: str) -> Any:
        return sum(each(frames_of(id)) for each in self.modules.values())

    def by_variable(self, id: str) -> Any:
        parts = self.modules
        return parts[f"{self.kind}"](frames_of(id)) + parts.encoder(frames_of(id))

    def handed_on(self, id: str) -> Any:
        return by_any(self.modules, id) + self.modules.encoder(frames_of(id))

    def asked_for(self, id: str) -> Any:
        return getattr(self.modules, self.kind)(frames_of(id)) + self.by_name(id)


def by_any(parts: Any, id: str) -> Any:
    return parts.classifier(frames_of(id))


def held(recogniser: Recogniser, method: str) -> Feats:
    compute = getattr(Recogniser, method)
    return lambda id: compute(recogniser, id)


@pytest.mark.parametrize("method", [name for name in vars(Recogniser) if name[:1] != "_"])
def test_modules_of_a_held_object_count_where_code_may_take_them(method: str) -> None:
    by_default = fingerprint(held(Recogniser(1.0, 2.0), method))
    assert fingerprint(held(Recogniser(1.0, 2.0), method)) == by_default
    assert fingerprint(held(Recogniser(3.0, 2.0), method)) != by_default
    trained = fingerprint(held(Recogniser(1.0, 4.0), method))
    assert (trained == by_default) == (method in ("by_name", "by_item", "by_any_kind"))


def test_weights_behind_a_weak_proxy_count() -> None:
    def through_a_proxy(seed: int) -> tuple[Feats, object]:
        torch.manual_seed(seed)
        net = torch.nn.Linear(2, 2)
        proxy = weakref.proxy(net)
        return lambda id: proxy(frames_of(id)), net

    (first, _one), (second, _other), (same, _again) = map(through_a_proxy, (0, 1, 0))
    assert fingerprint(first) == fingerprint(same)
    assert fingerprint(first) != fingerprint(second)
    gone, net = through_a_proxy(0)
    del net
    assert fingerprint(gone)


class Rotated(torch.nn.Module):
    """Keeps positions that its first call makes."""

    positions: torch.Tensor

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "positions"):
            positions = torch.arange(2.0)
            self.register_buffer("positions", positions, persistent=False)
        return frames + self.positions


def check_begun_anew(path: Path, compute: Feats) -> None:
    for id in ("1", "2"):  # the second one begins with what the first has left
        with featcache.through(path, compute) as read:
            assert torch.equal(cast(torch.Tensor, read(id))[:, 0], frames_of(id)[:, 0])
    assert featcache.open(path).ids == ["1", "2"]


def test_a_buffer_that_computing_makes_and_nobody_saves_makes_no_cache_stale(
    tmp_path: Path,
) -> None:
    net = Rotated()
    check_begun_anew(tmp_path / "cache", lambda id: net(frames_of(id)))


class Framed(torch.nn.Module):
    """Has a window that it is given, and brings it to the type of its input."""

    window: torch.Tensor

    def __init__(self, window: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("window", window, persistent=False)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        self.window = self.window.to(frames)
        return frames * self.window


class Registered(Framed):
    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        self.register_buffer("window", self.window.to(frames), persistent=False)
        return frames * self.window


@pytest.mark.parametrize("module", [Framed, Registered])
def test_a_buffer_that_a_module_is_given_counts_though_computing_sets_it_anew(
    module: type[Framed],
) -> None:
    def framed(window: torch.Tensor) -> Feats:
        net = module(window)
        return lambda id: net(frames_of(id))

    first, second = framed(torch.tensor([1.0, 2.0])), framed(torch.tensor([3.0, 4.0]))
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first) == fingerprint(framed(torch.tensor([1.0, 2.0])))


def test_threads_that_compute_count_for_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor, ThreadPool(1) as pool:
        check_begun_anew(tmp_path / "a", lambda id: executor.submit(frames_of, id).result())
        check_begun_anew(tmp_path / "b", lambda id: pool.apply(frames_of, (id,)))


def test_weights_that_the_first_call_makes_are_refused_until_then(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.LazyLinear(4))

    def embed(id: str) -> Any:
        return net(frames_of(id))

    with pytest.raises(ConfigError, match=r"'0\.weight'.* call it once on an example"):
        featcache.through(tmp_path / "cache", embed)("1")
    net(frames_of("1"))
    with featcache.through(tmp_path / "cache", embed) as read:
        assert torch.equal(cast(torch.Tensor, read("1")), embed("1"))


def test_what_is_nested_too_deep_is_refused_by_name() -> None:
    tree: list[Any] = []
    for _ in range(5_000):
        tree = [tree]

    def embed(id: str) -> Any:
        return frames_of(id) * len(tree)

    with pytest.raises(ConfigError, match="embed' computes with something that is nested too deep"):
        provenance(embed)
    while tree:  # or its end would be as deep
        tree = tree.pop()

"""A function is followed whatever wraps it, and however it is given."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featcache
from featcache.inspect import provenance

Root = Callable[..., Any]


class Encoder:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(2, 2)
        self.gain = 1.0

    def features(self, id: str) -> Any:
        return self.linear(torch.full((3, 2), float(id))) * self.gain

    @torch.no_grad()
    def without_gradients(self, id: str) -> Any:
        return self.features(id)

    @torch.inference_mode()
    def __call__(self, id: str) -> Any:
        return self.features(id)

    @staticmethod
    @torch.no_grad()
    def of_class(id: str) -> Any:
        return ENCODER.features(id)

    @classmethod
    @torch.no_grad()
    def with_class(cls, id: str) -> Any:
        return ENCODER.features(id)


ENCODER = Encoder()


def features(id: str) -> Any:
    return ENCODER.features(id)


def traced(function: Root) -> Root:
    @functools.wraps(function)
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


ROOTS: dict[str, Root] = {
    "a function": features,
    "no_grad": torch.no_grad()(features),
    "inference_mode": torch.inference_mode()(features),
    "enable_grad": torch.enable_grad()(features),
    "set_grad_enabled": torch.set_grad_enabled(False)(features),
    "autocast": torch.autocast("cpu", torch.bfloat16)(features),
    "compile": torch.compile(features, backend="eager"),
    "vmap": torch.vmap(features),
    "two of them": torch.no_grad()(torch.autocast("cpu")(features)),
    "a user's": traced(features),
    "a user's around no_grad": traced(torch.no_grad()(features)),
    "no_grad around a user's": torch.no_grad()(traced(features)),
    "lru_cache": functools.lru_cache(features),
    "a partial": functools.partial(torch.no_grad()(features)),
    "a method": ENCODER.features,
    "a method without gradients": ENCODER.without_gradients,
    "an object": ENCODER,
    "a static method": Encoder.of_class,
    "a class method": Encoder.with_class,
    "a lambda": torch.no_grad()(lambda id: ENCODER.features(id)),
}


def fingerprint(root: Root) -> str:
    return json.dumps(provenance(root).fingerprint({}), sort_keys=True)


@pytest.mark.parametrize("kind", ROOTS)
def test_a_change_behind_whatever_wraps_a_function_is_noticed(kind: str) -> None:
    before = fingerprint(ROOTS[kind])
    assert fingerprint(ROOTS[kind]) == before
    with torch.no_grad():
        ENCODER.linear.weight[0, 0] += 1
    other_weight = fingerprint(ROOTS[kind])
    ENCODER.gain += 1
    assert len({before, other_weight, fingerprint(ROOTS[kind])}) == 3


WRAPPERS: dict[str, Callable[[Any], Root]] = {
    "no_grad": torch.no_grad(),
    "inference_mode": torch.inference_mode(),
    "enable_grad": torch.enable_grad(),
    "autocast": torch.autocast("cpu", torch.bfloat16),
    "compile": torch.compile(backend="eager"),
    "disable": torch.compiler.disable,
    "errstate": np.errstate(all="ignore"),
    "lru_cache": functools.lru_cache,
    "vmap": torch.vmap,
    "two of them": lambda target: torch.no_grad()(torch.compile(target, backend="eager")),
}
TARGETS: dict[str, Callable[[Net], Any]] = {
    "a module": lambda net: net,
    "its forward": lambda net: net.forward,
    "a method of it": lambda net: net.encode,
    "an object": lambda net: Caller(net),
    "a method": lambda net: Caller(net).call,
    "a partial of a method": lambda net: functools.partial(net.encode, scale=2),
    "a partial of a function": lambda net: functools.partial(encode_with, net),
    "a closure": lambda net: lambda id: net.encode(id),
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def encode(self, id: str, scale: int = 1) -> Any:
        return self.linear(torch.full((3, 2), float(id))) * scale

    def forward(self, id: str) -> Any:
        return self.encode(id)


class Caller:
    def __init__(self, net: Net) -> None:
        self.net = net

    def call(self, id: str) -> Any:
        return self.net.encode(id)

    def __call__(self, id: str) -> Any:
        return self.call(id)


def encode_with(net: Net, id: str) -> Any:
    return net.encode(id)


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_whatever_is_wrapped_counts(wrapper: str, target: str, is_named: bool) -> None:
    net = Net()
    wrapped = WRAPPERS[wrapper](TARGETS[target](net))
    root = (lambda id: wrapped(id)) if is_named else wrapped
    before = fingerprint(root)
    assert fingerprint(root) == before
    with torch.no_grad():
        net.linear.weight[0, 0] += 1
    assert fingerprint(root) != before


def test_gradients_count_for_nothing_and_the_precision_does() -> None:
    wrapped = [ROOTS[kind] for kind in ("a function", "no_grad", "inference_mode", "compile")]
    assert len({*map(fingerprint, wrapped)}) == 1
    precisions = [features, *(torch.autocast("cpu", each)(features) for each in HALVES)]
    assert len({*map(fingerprint, precisions)}) == 3
    off = torch.autocast("cpu", torch.bfloat16, enabled=False)(features)
    assert "bfloat16" not in fingerprint(off)


HALVES = (torch.bfloat16, torch.float16)


def test_a_function_under_no_grad_is_never_read_from_a_stale_cache(tmp_path: Path) -> None:
    with featcache.through(tmp_path / "cache", ROOTS["no_grad"]) as read:
        read("1")
    with torch.no_grad():
        ENCODER.linear.weight[1, 1] += 1
    with pytest.raises(featcache.StaleCacheError, match=r"linear.*weights"):
        featcache.through(tmp_path / "cache", ROOTS["no_grad"])("1")

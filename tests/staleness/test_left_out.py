"""What training alone reads of a library's class is no setting, unless the user's code reads it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from featcache.inspect import provenance
from featcache.staleness.values import TABLE, LeftOut, left_out_of

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONVOLUTIONS = {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,)}


def encoder() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.HubertConfig(**SIZES, **CONVOLUTIONS, intermediate_size=16)
    return transformers.HubertModel(config).eval()


def clusters() -> Any:
    cluster = pytest.importorskip("sklearn.cluster")
    return cluster.KMeans(2, n_init=1, random_state=0).fit([[0.0], [1.0], [5.0]])


def fingerprint(part: Any, read: Callable[[Any], object] = lambda part: part) -> object:
    def compute(x: Any) -> Any:
        return part(x), read(part)

    return provenance(compute).fingerprint({})


def setting(name: str, value: object) -> Callable[[Any], None]:
    return lambda part: setattr(part, name, value)


UNREAD: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (lambda: torch.nn.Dropout(0.1), setting("p", 0.5)),
    (lambda: torch.nn.BatchNorm1d(4), setting("momentum", 0.5)),
    (lambda: torch.nn.BatchNorm1d(4), lambda part: part.num_batches_tracked.add_(3)),
    (lambda: torch.nn.LSTM(4, 4, 2), setting("dropout", 0.5)),
    (lambda: torch.nn.MultiheadAttention(4, 2), setting("dropout", 0.5)),
    (encoder, lambda part: setting("hidden_dropout", 0.5)(part.config)),
    (encoder, lambda part: setting("mask_time_prob", 0.5)(part.config)),
    (encoder, lambda part: setting("layerdrop", 0.5)(part.config)),
    (encoder, lambda part: setting("dropout", 0.5)(part.encoder.layers[0].attention)),
    (clusters, setting("random_state", 5)),
    (clusters, setting("inertia_", 5.0)),
]


@pytest.mark.parametrize(("make", "change"), UNREAD)
def test_what_training_alone_reads_of_a_librarys_class_is_no_setting(
    make: Callable[[], Any], change: Callable[[Any], object]
) -> None:
    part = make()
    before = fingerprint(part)
    change(part)
    assert fingerprint(part) == before


READ: list[tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], object]]] = [
    (lambda: torch.nn.Dropout(0.1), setting("p", 0.5), lambda part: part.p),
    (lambda: torch.nn.BatchNorm1d(4), setting("momentum", 0.5), lambda part: part.momentum),
    (
        lambda: torch.nn.BatchNorm1d(4),
        lambda part: part.num_batches_tracked.add_(3),
        lambda part: part.num_batches_tracked,
    ),
    (
        encoder,
        lambda part: setting("mask_time_prob", 0.5)(part.config),
        lambda part: part.config.mask_time_prob,
    ),
    (clusters, setting("inertia_", 5.0), lambda part: part.inertia_),
]


@pytest.mark.parametrize(("make", "change", "read"), READ)
def test_it_counts_where_the_users_code_mentions_it(
    make: Callable[[], Any], change: Callable[[Any], object], read: Callable[[Any], object]
) -> None:
    part = make()
    before = fingerprint(part, read)
    change(part)
    assert fingerprint(part, read) != before


def test_what_only_sounds_like_training_counts() -> None:
    channels = pytest.importorskip("speechbrain.augment.time_domain").ChannelDrop(0.1)
    before = fingerprint(channels)
    channels.drop_rate = 0.9
    assert fingerprint(channels) != before
    activation = torch.nn.ReLU()
    before = fingerprint(activation)
    activation.inplace = True  # what it overwrites may be read again
    assert fingerprint(activation) != before


def test_a_users_class_derived_from_one_of_these_has_its_own_attributes() -> None:
    class Bends(torch.nn.Dropout):
        def __init__(self) -> None:
            super().__init__()
            self.dropout_gain = 1.0

        def forward(self, x: Any) -> Any:
            return super().forward(x) * self.dropout_gain

    part = Bends()
    before = fingerprint(part)
    part.p = 0.9
    assert fingerprint(part) == before
    part.dropout_gain = 2.0
    assert fingerprint(part) != before


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.classes.split()[0])
def test_each_row_names_classes_that_there_are(row: LeftOut) -> None:
    for pattern in row.classes.split():
        module, _, name = pattern.rpartition(".")
        pytest.importorskip(module.partition(".")[0])
        if name == "*":
            continue
        cls = getattr(importlib.import_module(module), name)
        assert left_out_of(cls) >= {*row.names.split()}
        assert row.reason


class Bent:
    """An object of the user's with values of all kinds."""

    def __init__(self) -> None:
        self.modules: Any = {}
        self.hparams: Any = None
        self.offset = torch.zeros(3)
        self.seen: list[int] = []
        self.state = Counting()
        self.device = "cpu"

    def compute_features(self, batch: Any, stage: Any) -> Any:
        self.seen.append(len(batch))
        self.state.calls += 1
        return self.offset.add(batch) * self.state.gain, self.hparams


class Counting:
    """Counts, and holds a setting."""

    def __init__(self) -> None:
        self.calls, self.gain = 0, 1.0


def of_object(bent: Bent) -> object:
    return provenance(bent.compute_features).fingerprint({})


def test_what_is_called_on_a_tensor_changes_nothing_of_it() -> None:
    bent = Bent()
    before = of_object(bent)
    bent.compute_features(torch.ones(3), None)
    assert of_object(bent) == before
    bent.offset = torch.ones(3)
    assert of_object(bent) != before


def test_a_counter_hides_nothing_beside_it() -> None:
    bent = Bent()
    before = of_object(bent)
    bent.state.gain = 2.0
    assert of_object(bent) != before


@pytest.mark.parametrize("hparams", [None, [0.5], torch.ones(2), 3])
def test_hparams_that_hold_nothing_by_name_are_a_value(hparams: object) -> None:
    bent = Bent()
    bent.hparams = {}
    before = of_object(bent)
    bent.hparams = hparams
    assert of_object(bent) != before


def test_a_buffer_that_is_not_saved_counts_where_a_call_leaves_it_as_it_is() -> None:
    class Net(torch.nn.Module):
        window: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.ones(3), persistent=False)
            self.frames = 0

        def forward(self, x: Any) -> Any:
            self.frames = len(x)
            return self.window.add(x)

    net = Net()
    before = fingerprint(net)
    net.window += 1
    assert fingerprint(net) != before

"""`featcache.taps`: outputs of modules inside a model, with lengths as each utterance alone has."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import featcache
from featcache.errors import ConfigError, FeatureError


class Subsampled(nn.Module):
    """Mel frames through two convolutions with stride 2 and a transformer, as in many recipes."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.subsampling = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, stride=2)
        )
        layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, mels: Tensor) -> Tensor:
        frames = self.subsampling(mels[:, None]).permute(0, 2, 1, 3).flatten(2)
        out: Tensor = self.encoder(frames if self.batch_first else frames.transpose(0, 1))
        return out


class Unfolded(nn.Module):
    """Waves in windows that overlap, padded to whole ones; positions are kept as they grow."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.zeros(0)
        self.norm = nn.LayerNorm(50)
        self.layer = nn.GRU(50, 6, batch_first=True)

    def forward(self, waves: Tensor) -> Tensor:
        windows = max(1, math.ceil((waves.shape[1] - 50) / 30) + 1)
        waves = nn.functional.pad(waves, (0, 50 + 30 * (windows - 1) - waves.shape[1]))
        frames = waves.unfold(1, 50, 30)
        if len(self.positions) < frames.shape[1]:
            self.positions = torch.arange(frames.shape[1], dtype=torch.float32)
        self.positions = self.positions.to(waves.device)
        normed = self.norm(frames) + self.positions[: frames.shape[1], None]
        out: Tensor = self.layer(normed)[0]
        return out


def hubert() -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.HubertConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8, 8),
        conv_stride=(5, 3, 2),
        conv_kernel=(10, 3, 2),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    )
    model: nn.Module = transformers.HubertModel(config)
    return model


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], dict[str, str], tuple[int, ...]]] = {
    "hubert": (
        hubert,
        {"conv": "feature_extractor.conv_layers.1", "layer": "encoder.layers.1"},
        (),
    ),
    "conformer-like": (
        Subsampled,
        {"conv": "subsampling.1", "layer": "encoder.layers.1"},
        (15,),
    ),
    "time first": (
        lambda: Subsampled(batch_first=False),
        {"conv": "subsampling.2", "layer": "encoder.layers.0"},
        (15,),
    ),
    "windows": (Unfolded, {"norm": "norm", "layer": "layer"}, ()),
}


def made(name: str) -> tuple[nn.Module, dict[str, str], tuple[int, ...]]:
    torch.manual_seed(0)
    make, names, dims = ARCHITECTURES[name]
    return make().eval(), names, dims


def alone(model: nn.Module, path: str, inputs: Tensor) -> Tensor:
    """The output of a module in a whole forward pass, by a hook of one's own."""
    found: list[Tensor] = []
    hook = model.get_submodule(path).register_forward_hook(
        lambda module, args, out: found.append((out if isinstance(out, Tensor) else out[0]).clone())
    )
    with torch.no_grad():
        model(inputs)
    hook.remove()
    return found[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_lengths_of_200_utterances_are_those_that_each_has_alone(name: str) -> None:
    model, names, dims = made(name)
    tapped = featcache.taps(model, names)
    rng = np.random.default_rng(0)
    time_axis = {"time first": {"layer": 0}}.get(name, {})
    for batch in rng.integers(60, 1200, (25, 8)).tolist():
        lengths, features = tapped(torch.randn(8, max(batch), *dims), batch)
        for feature, path in names.items():
            axis = time_axis.get(feature, 2 if feature == "conv" else 1)
            expected = [
                alone(model, path, torch.randn(1, length, *dims)).shape[axis] for length in batch
            ]
            assert lengths[feature] == expected
            assert features[feature].shape[:2] == (8, max(expected))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_are_those_of_a_whole_forward_pass(name: str) -> None:
    model, names, dims = made(name)
    inputs = torch.randn(3, 300, *dims)
    lengths, features = featcache.taps(model, names)(inputs)
    for feature, path in names.items():
        expected = alone(model, path, inputs)
        if feature == "conv":
            expected = expected.transpose(1, 2)
        elif name == "time first":
            expected = expected.transpose(0, 1)
        torch.testing.assert_close(features[feature], expected, rtol=0, atol=0)
        assert lengths[feature] == [expected.shape[1]] * 3
        assert not features[feature].requires_grad


def test_what_comes_after_the_last_module_is_not_computed() -> None:
    model, _, dims = made("conformer-like")
    ran: list[int] = []
    for number, layer in enumerate(model.get_submodule("encoder.layers").children()):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    tapped = featcache.taps(model, ["encoder.layers.1", "encoder.layers.0"])
    tapped(torch.randn(2, 100, *dims), [100, 90])
    ran.clear()  # the first time shapes were measured, too
    tapped(torch.randn(2, 100, *dims), [100, 90])
    assert ran == [0, 1]
    model(torch.randn(2, 100, *dims))
    assert ran == [0, 1, 0, 1, 2]  # no trace is left in the model


def test_what_later_modules_write_in_place_is_not_seen() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 1), nn.ReLU(inplace=True), nn.Conv1d(2, 2, 1))
    inputs = torch.randn(2, 1, 50)
    _, features = featcache.taps(model, ["0", "2"], axis=2)(inputs)
    expected = model[0](inputs).detach().transpose(1, 2)
    assert bool((expected < 0).any())
    torch.testing.assert_close(features["0"], expected)


def test_patterns_take_one_part_of_a_name_and_features_are_called_as_modules() -> None:
    model, _, _ = made("conformer-like")
    tapped = featcache.taps(model, ["encoder.layers.*", "subsampling.0"])
    assert tapped.names == {
        "encoder_layers_0": "encoder.layers.0",
        "encoder_layers_1": "encoder.layers.1",
        "encoder_layers_2": "encoder.layers.2",
        "subsampling_0": "subsampling.0",
    }


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        (["encoder.layer.1"], r"no module 'encoder.layer.1'; did you mean 'encoder.layers"),
        (["encoder.*.9"], "no module"),
        ({"a": "encoders"}, "no module 'encoders'"),
        ("encoder", "a list of names"),
        ([], "a list of names"),
        ([""], "no module ''"),
    ],
)
def test_modules_that_are_not_there_are_refused(modules: Any, says: str) -> None:
    model, _, _ = made("conformer-like")
    with pytest.raises(ConfigError, match=says):
        featcache.taps(model, modules)


class Twice(nn.Module):
    """One layer that is called twice, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, frames: Tensor) -> Tensor:
        out: Tensor = self.shared(self.shared(frames))
        return out


@pytest.mark.parametrize(("name", "times"), [("shared", 2), ("idle", 0)])
def test_a_module_that_does_not_run_just_once_is_refused(name: str, times: int) -> None:
    with pytest.raises(FeatureError, match=f"module '{name}' runs {times} times"):
        featcache.taps(Twice(), [name])(torch.zeros(2, 5, 4))


class Around(nn.Module):
    """A module between two functions."""

    def __init__(self, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.tap = before, nn.Identity()

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.tap(self.before(inputs))
        return out


def test_shapes_that_are_changed_in_place_are_measured_right() -> None:
    class Squeezing(Around):
        def __init__(self) -> None:
            super().__init__(lambda x: x)
            self.conv = nn.Conv1d(3, 5, 3)

        def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(self.conv(inputs).transpose_(1, 2))

    tapped = featcache.taps(Squeezing(), ["tap"], axis=2)
    for _ in range(2):
        lengths, features = tapped(torch.randn(2, 3, 30), [30, 17])
        assert lengths["tap"] == [28, 15]
        assert features["tap"].shape == (2, 28, 5)


def test_an_output_without_time_has_no_lengths() -> None:
    lengths, features = featcache.taps(Around(lambda x: x.mean(1)), ["tap"])(
        torch.ones(2, 9, 4), [9, 5]
    )
    assert lengths == {"tap": None}
    items = featcache.unpad(["a", "b"], lengths, features)
    assert items[1]["tap"].tolist() == [1.0] * 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (lambda x: x @ x.transpose(1, 2), "more than one axis of time"),
        (lambda x: x.flatten(0, 1), "no axis of utterances"),
        (lambda x: x.mean(0), "no axis of utterances"),
    ],
)
def test_outputs_that_are_no_features_are_refused(
    before: Callable[[Tensor], Tensor], says: str
) -> None:
    with pytest.raises(FeatureError, match=says):
        featcache.taps(Around(before), ["tap"])(torch.zeros(2, 9, 4))


def test_a_model_that_looks_at_values_is_measured_by_running_it() -> None:
    def thinned(x: Tensor) -> Tensor:
        return x[:, ::3] if float(x.abs().sum()) >= 0 else x

    lengths, _ = featcache.taps(Around(thinned), ["tap"])(torch.randn(3, 20, 4), [20, 16, 1])
    assert lengths["tap"] == [7, 6, 1]


def test_a_mask_is_cut_with_its_utterance() -> None:
    class Masked(Around):
        def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
            assert mask is not None
            return super().forward(inputs * mask[..., None])

    mask = torch.tensor([[1.0] * 9, [1.0] * 4 + [0.0] * 5])
    lengths, features = featcache.taps(Masked(lambda x: x[:, 1:]), ["tap"])(
        torch.ones(2, 9, 4), [9, 4], mask=mask
    )
    assert lengths["tap"] == [8, 3]
    assert features["tap"][1, :, 0].tolist() == [1.0] * 3 + [0.0] * 5


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([1.0, 0.5], "relative lengths"),
        ([100], "1 lengths do not fit 2"),
        ([101, 5], "length 101 is not within 1 to 100"),
        ([100, 3], "does not take an utterance of length 3 alone"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: Sequence[Any], says: str) -> None:
    model, names, dims = made("conformer-like")
    with pytest.raises(FeatureError, match=says):
        featcache.taps(model, names)(torch.randn(2, 100, *dims), lengths)


class Recurrent(nn.Module):
    """An LSTM over packed frames, as long as it is told; more are given as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, inputs: Tensor, lens: Any = None) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            inputs, torch.as_tensor(lens), batch_first=True, enforce_sorted=False
        )
        frames, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        out: Tensor = self.out(frames)
        return out


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list, tuple])
def test_lengths_that_a_model_is_given_follow_those_that_are_measured(kind: Any) -> None:
    tapped = featcache.taps(Recurrent(), ["out"])
    for given in ([100, 60], [30, 40]):
        lengths, features = tapped(torch.randn(2, max(given), 4), given, lens=kind(given))
        assert lengths == {"out": given}
        items = featcache.unpad(["a", "b"], lengths, features)
        assert [len(item["out"]) for item in items] == given  # type: ignore[arg-type]


def test_a_packed_output_is_padded() -> None:
    model, inputs = Recurrent(), torch.randn(3, 40, 4)
    for given in ([40, 30, 7], [25, 40, 1]):
        lengths, features = featcache.taps(model, ["out", "rnn"])(inputs, given, lens=given)
        assert lengths == {"out": given, "rnn": given}
        for row, length in enumerate(given):
            alone, _ = model.rnn(inputs[row : row + 1, :length])
            torch.testing.assert_close(features["rnn"][row, :length], alone[0])


def test_an_output_of_one_size_for_all_lengths_has_no_lengths() -> None:
    pooled = Around(lambda x: x[:, :2].mean(1, keepdim=True).expand(-1, 8, -1))
    lengths, features = featcache.taps(pooled, ["tap"])(torch.ones(2, 9, 4), [9, 5])
    assert lengths == {"tap": None}
    items = featcache.unpad(["a", "b"], lengths, features)
    assert [item["tap"].shape for item in items] == [(8, 4)] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("lengths", [None, [100, 80]])
def test_outputs_that_follow_other_numbers_than_the_lengths_are_refused(lengths: Any) -> None:
    tapped = featcache.taps(Recurrent(), ["out"])
    with pytest.raises(FeatureError, match=r"'out' is as long as .'lens': .100, 60.. says"):
        tapped(torch.randn(2, 100, 4), lengths, lens=torch.tensor([100, 60]))


def test_numbers_that_no_length_follows_are_left_alone() -> None:
    class Spoken(Around):
        def __init__(self) -> None:
            super().__init__(lambda x: x.mean(1))
            self.speakers = nn.Embedding(6, 4)

        def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
            assert mask is not None
            out: Tensor = super().forward(inputs) + self.speakers(mask)
            return out

    lengths, _ = featcache.taps(Spoken(), ["tap"])(
        torch.randn(2, 9, 4), [9, 7], mask=torch.tensor([5, 0])
    )
    assert lengths == {"tap": None}


class Asking(nn.Module):
    """Subsampled frames with a mask of the padding, `(xs_pad, ilens)` as in ESPnet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 6, 3, stride=2)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)

    def forward(self, xs_pad: Tensor, ilens: Tensor, prev: object = None) -> tuple[Tensor, Tensor]:
        frames, lengths = self.conv(xs_pad.transpose(1, 2)).transpose(1, 2), (ilens - 3) // 2 + 1
        padding = torch.arange(int(lengths.max())) >= lengths[:, None]
        out: Tensor = self.layer(frames, src_key_padding_mask=padding)
        return out, lengths


def test_models_that_ask_for_lengths_have_them() -> None:
    model, inputs = Asking().eval(), torch.randn(2, 100, 4)
    expected, _ = model(inputs, torch.tensor([100, 61]))
    tapped = featcache.taps(model, ["layer"])
    for more in ({}, {"ilens": torch.tensor([100, 61])}):
        lengths, features = tapped(inputs, [100, 61], **more)
        assert lengths == {"layer": [49, 30]}
        torch.testing.assert_close(features["layer"], expected)


def test_the_lengths_that_torchaudio_asks_for_are_given() -> None:
    models: Any = pytest.importorskip("torchaudio.models")
    model = models.Conformer(4, 2, 8, num_layers=2, depthwise_conv_kernel_size=5).eval()
    inputs = torch.randn(2, 30, 4)
    lengths, features = featcache.taps(model, {"last": "conformer_layers.1"})(inputs, [30, 17])
    assert lengths == {"last": [30, 17]}
    expected, _ = model(inputs, torch.tensor([30, 17]))
    torch.testing.assert_close(features["last"], expected)


class FixedLength(Around):
    """Frames of 300 steps alone, two of which make one, as in Whisper's encoder."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.first = nn.Conv1d(4, 6, 3, padding=1)
        self.second = nn.Conv1d(6, 6, 3, stride=2, padding=1)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        if inputs.shape[2] != 300:
            raise ValueError("300 steps are expected")
        return super().forward(self.second(self.first(inputs)).transpose(1, 2))


def whisper() -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        d_model=12,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=8,
        num_mel_bins=4,
        max_source_positions=150,
    )
    model: nn.Module = transformers.WhisperModel(config).eval().encoder
    return model


@pytest.mark.parametrize(
    ("make", "names"), [(FixedLength, {"f": "tap"}), (whisper, {"f": "layers.1"})]
)
def test_models_that_take_one_length_have_frames_by_stride(
    make: Callable[[], nn.Module], names: dict[str, str]
) -> None:
    model, inputs = make(), torch.randn(3, 4, 300)
    tapped = featcache.taps(model, names, axis=2, stride=2)
    lengths, features = tapped(inputs, [300, 201, 1])
    assert lengths == {"f": [150, 101, 1]}
    torch.testing.assert_close(features["f"], alone(model, names["f"], inputs))
    assert copy.deepcopy(tapped)(inputs)[0] == {"f": [150] * 3}
    for given in (None, [300, 201, 1]):
        with pytest.raises(FeatureError, match=r"no other length than 300 along axis 2.*stride=2"):
            featcache.taps(model, names, axis=2)(inputs, given)


def test_outputs_that_do_not_fit_the_stride_are_refused() -> None:
    tapped = featcache.taps(FixedLength(), ["first"], axis=2, stride=2)
    with pytest.raises(FeatureError, match=r"'first', .* has no axis of 150 frames"):
        tapped(torch.randn(2, 4, 300))
    with pytest.raises(ConfigError, match="stride must be an integer of at least 1"):
        featcache.taps(FixedLength(), ["first"], axis=2, stride=0)


def test_a_star_is_not_the_model_itself() -> None:
    assert featcache.taps(Twice(), ["*"]).names == {"shared": "shared", "idle": "idle"}
    assert featcache.taps(Twice(), {"all": ""}).names == {"all": ""}


class Halved(nn.Module):
    """Every other frame through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, frames: Tensor) -> Tensor:
        out: Tensor = self.layer(frames[:, ::2])
        return out


def test_a_compiled_model_is_measured() -> None:
    model: Any = torch.compile(Halved(), backend="eager")
    lengths, _ = featcache.taps(model, {"f": "_orig_mod.layer"})(torch.zeros(2, 9, 4), [9, 4])
    assert lengths == {"f": [5, 2]}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_models_of_torchscript_are_refused_by_name(inside: bool) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    trace: Any = torch.jit.trace
    traced = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.zeros(1, 5, 4))
    for model in (scripted, traced):
        path = "1.0" if inside else "0"
        around = nn.Sequential(nn.Linear(4, 4), model) if inside else model
        with pytest.raises(ConfigError, match=f"module '{path}' is one of TorchScript"):
            featcache.taps(around, [path])


def test_inputs_and_axes_that_are_none_are_refused_by_name() -> None:
    inputs: Any = np.zeros((2, 9, 4), np.float32)
    tapped = featcache.taps(Around(lambda x: x), ["tap"])
    with pytest.raises(FeatureError, match=r"not ndarray; torch\.as_tensor"):
        tapped(inputs)
    with pytest.raises(ConfigError, match=r"axis 0 .* is that of the utterances"):
        featcache.taps(Around(lambda x: x), ["tap"], axis=0)
    for axis in (3, -3):
        tapped = featcache.taps(Around(lambda x: x), ["tap"], axis=axis)
        with pytest.raises(FeatureError, match=rf"axis={axis} .*\(2, 9, 4\) have no such axis"):
            tapped(torch.zeros(2, 9, 4))
    lengths, features = featcache.taps(Around(lambda x: x), ["tap"], axis=-2)(
        torch.zeros(2, 9, 4), [9, 3]
    )
    assert lengths == {"tap": [9, 3]}
    assert features["tap"].shape == (2, 9, 4)


def test_copies_and_pickles_compute_the_same() -> None:
    model, names, _ = made("windows")
    tapped, inputs = featcache.taps(model, names), torch.randn(2, 300)
    expected = tapped(inputs, [300, 101])
    for other in (copy.deepcopy(tapped), pickle.loads(pickle.dumps(tapped))):  # noqa: S301
        found = other(inputs, [300, 101])
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1], expected[1])


class Layers(nn.Module):
    """Two layers of an encoder as features, as an extractor has them."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.tapped = featcache.taps(encoder, ["encoder.layers.0", "encoder.layers.1"])
        self.computed = 0

    def compute_features(self, items: list[tuple[str, Tensor]]) -> list[dict[str, object]]:
        waves = nn.utils.rnn.pad_sequence([item[1] for item in items], batch_first=True)
        tapped = self.tapped(waves, [len(item[1]) for item in items])
        return featcache.unpad([item[0] for item in items], *tapped)


class Encoding(featcache.EnvironmentProvider):
    def __init__(self, encoder: nn.Module) -> None:
        self.encoder = encoder

    def build_env_local(self) -> dict[str, object]:
        torch.manual_seed(1)
        dataset = [(f"u{length}", torch.randn(length, 15)) for length in (40, 90, 61)]
        compute = Layers(self.encoder).compute_features
        return {"dataset": dataset, "ids": [id for id, _ in dataset], "compute_features": compute}


def test_layers_are_cached_one_feature_each_and_other_weights_are_other_features(
    tmp_path: Path,
) -> None:
    model, _, _ = made("conformer-like")
    declared = [featcache.FeatureStorageConfig(f"encoder_layers_{number}") for number in (0, 1)]
    for _ in range(2):  # the second time all is there
        cache = featcache.extract(Encoding(model), tmp_path, declared, progressbar=False)
        assert cache.features == ("encoder_layers_0", "encoder_layers_1")
        lengths = {id: len(cache.read(id, "encoder_layers_1")) for id in cache}
        assert lengths == {"u40": 9, "u90": 21, "u61": 14}
    with torch.no_grad():
        model.get_parameter("encoder.layers.1.linear1.weight").add_(1)
    with pytest.raises(featcache.StaleCacheError, match=r"encoder\.layers\.1\.linear1"):
        featcache.extract(Encoding(model), tmp_path, declared, progressbar=False)

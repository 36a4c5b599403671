from __future__ import annotations

import copy
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from featcache import FeatureStats, GlobalMVN
from featcache.errors import FeatureError

FRAMES = (
    np.random.default_rng(0)
    .normal([-5, 0, 3, 40], [3, 1, 0.5, 7], size=(400, 4))
    .astype(np.float32)
)
STATS = FeatureStats.of(FRAMES)


def test_normalised_features_have_mean_0_and_variance_1() -> None:
    normalised = FeatureStats.of(GlobalMVN.from_stats(STATS)(torch.from_numpy(FRAMES)).numpy())
    np.testing.assert_allclose(normalised.mean, 0, atol=1e-5)
    np.testing.assert_allclose(normalised.var, 1, atol=1e-5)


@settings(deadline=None)
@given(
    dims=st.sampled_from([(), (1,), (5,), (2, 3)]),
    leading=st.sampled_from([(), (3,), (2, 7), (1, 0)]),
    norm_means=st.booleans(),
    norm_vars=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_forward_is_what_numpy_says_and_inverse_brings_it_back(
    dims: tuple[int, ...], leading: tuple[int, ...], norm_means: bool, norm_vars: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    stats = FeatureStats.of(random.normal(-4, 3, size=(50, *dims)))
    mvn = GlobalMVN.from_stats(stats, norm_means=norm_means, norm_vars=norm_vars)
    x = random.normal(-4, 3, size=(*leading, *dims)).astype(np.float32)
    y = mvn(torch.from_numpy(x))
    expected = (x - stats.mean * norm_means) / (stats.std if norm_vars else 1)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mvn.inverse(y).numpy(), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "lengths",
    [
        torch.tensor([5, 3, 0]),
        torch.tensor([5, 3, 0], dtype=torch.int32),
        [5, 3, 0],
        torch.tensor([1.0, 0.6, 0.0]),
        [1.0, 0.6, 0.0],
        torch.tensor([1.0, 0.6, 0.0], dtype=torch.bfloat16),
    ],
)
def test_what_lies_behind_an_utterances_length_comes_out_as_zeros(
    lengths: torch.Tensor | list[float],
) -> None:
    mvn = GlobalMVN.from_stats(STATS)
    x = torch.from_numpy(FRAMES[:15]).reshape(3, 5, 4)
    valid = (torch.arange(5) < torch.tensor([[5], [3], [0]])).unsqueeze(2)
    for function in (mvn, mvn.inverse):
        torch.testing.assert_close(function(x, lengths), torch.where(valid, function(x), 0))


def test_padding_of_features_of_any_frame_shape_is_masked() -> None:
    for dims in [(), (2, 3)]:
        mvn = GlobalMVN(np.ones(dims), np.ones(dims))
        y = mvn(torch.zeros(2, 4, *dims), torch.tensor([4, 1]))
        assert y.reshape(2, 4, -1)[..., 0].tolist() == [[-1, -1, -1, -1], [-1, 0, 0, 0]]


def test_relative_lengths_find_the_frame_they_were_made_from() -> None:
    frames = 1500
    lengths = torch.arange(1, frames + 1)
    mvn = GlobalMVN(1.0, 1.0)
    y = mvn(torch.zeros(frames, frames), lengths / frames)
    assert torch.equal((y != 0).sum(dim=1), lengths)
    # half of 1506 is 753, which bfloat16 rounds to 752
    half = torch.tensor([0.5], dtype=torch.bfloat16)
    assert (mvn(torch.zeros(1, 1506), half) != 0).sum() == 753


def test_nan_in_the_padding_reaches_neither_output_nor_gradient() -> None:
    x = torch.ones(1, 3, 4)
    x[0, 2] = torch.nan
    x.requires_grad_()
    y = GlobalMVN.from_stats(STATS)(x, torch.tensor([2]))
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0, 0], torch.from_numpy(1 / STATS.std).float())
    assert (x.grad[0, 2] == 0).all()


def test_it_agrees_with_speechbrains_input_normalization(tmp_path: Path) -> None:
    features = pytest.importorskip("speechbrain.processing.features")
    mvn = GlobalMVN.from_stats(STATS)
    state = {"count": STATS.count, "glob_mean": mvn.mean, "glob_std": mvn.std}
    torch.save(state, tmp_path / "normalizer.ckpt")
    norm = features.InputNormalization(norm_type="global", avoid_padding_norm=False).eval()
    norm._load(tmp_path / "normalizer.ckpt")
    x = torch.from_numpy(FRAMES[:30]).reshape(3, 10, 4)
    lengths = torch.tensor([1.0, 0.5, 0.8])
    theirs = norm(x, lengths)
    torch.testing.assert_close(mvn(x), theirs)
    valid = features.make_padding_mask(x, lengths)
    torch.testing.assert_close(mvn(x, lengths), theirs * valid)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_of_the_input_comes_back_computed_in_float32(dtype: torch.dtype) -> None:
    x = torch.full((1, 4), 1000.0, dtype=dtype)
    mvn = GlobalMVN([999.9] * 4, [0.1] * 4)  # 999.9 is 1000 in float16
    y = mvn(x)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), torch.ones(1, 4, dtype=torch.float64), rtol=2e-2, atol=0)
    assert mvn.inverse(y).dtype == dtype


def test_a_model_in_half_precision_does_not_overflow_in_between() -> None:
    mvn = GlobalMVN([-60000.0], [60000.0]).half()
    assert mvn(torch.tensor([[60000.0]], dtype=torch.float16)).item() == 2


def test_integers_become_float32() -> None:
    mvn = GlobalMVN([1.5], [1.0])
    for y in (mvn(torch.tensor([[2]])), mvn.inverse(torch.tensor([[-1]]))):
        assert y.dtype == torch.float32
        assert y.item() == 0.5


def test_statistics_are_saved_and_moved_with_the_model_and_never_trained() -> None:
    model = torch.nn.Sequential(GlobalMVN.from_stats(STATS))
    assert list(model.parameters()) == []
    other = torch.nn.Sequential(GlobalMVN(np.zeros(4), np.ones(4)))
    other.load_state_dict(model.state_dict())
    x = torch.from_numpy(FRAMES)
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
    assert copy.deepcopy(model).double()(x.double()).dtype == torch.float64
    mvn = model.to("meta")[0]
    assert mvn(x.reshape(4, 100, 4).to("meta"), [100, 50, 3, 2]).device.type == "meta"


def test_the_callers_arrays_stay_the_callers() -> None:
    mean, std = torch.zeros(2), torch.ones(2)
    mvn = GlobalMVN(mean, std)
    mean += 1
    assert mvn.mean.tolist() == [0, 0]


def test_an_element_that_never_changes_becomes_zero() -> None:
    mvn = GlobalMVN.from_stats(FeatureStats.of(np.full((1000, 1), 0.1, dtype=np.float32)))
    x = torch.full((1, 1), 0.1)
    assert mvn(x).item() == 0
    assert mvn.inverse(mvn(x)).item() == x.item()


def test_no_standard_deviation_is_below_the_floor() -> None:
    stats = FeatureStats(100, np.zeros(2), np.array([0.0, 400.0]))
    assert GlobalMVN.from_stats(stats, variance_floor=0.25).std.tolist() == [0.5, 2]
    with pytest.raises(FeatureError, match="not positive"):
        GlobalMVN.from_stats(stats, variance_floor=0)
    assert GlobalMVN.from_stats(stats, norm_vars=False, variance_floor=0)(
        torch.ones(2)
    ).tolist() == [1, 1]


def test_a_compiled_model_contains_it_whole() -> None:
    mvn = GlobalMVN.from_stats(STATS)
    x, lengths = torch.from_numpy(FRAMES[:20]).reshape(2, 10, 4), torch.tensor([10, 4])
    compiled = torch.compile(mvn, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, lengths), mvn(x, lengths))


def test_what_does_not_fit_is_refused() -> None:
    mvn = GlobalMVN.from_stats(STATS)
    with pytest.raises(FeatureError, match=r"\(4,\) do not fit an input of shape \(2, 3\)"):
        mvn(torch.zeros(2, 3))
    with pytest.raises(FeatureError, match=r"\(batch, frames, \.\.\.\), not \(2, 4\)"):
        mvn(torch.zeros(2, 4), torch.tensor([1, 1]))
    with pytest.raises(FeatureError, match="a batch of 2 needs as many lengths"):
        mvn(torch.zeros(2, 3, 4), torch.tensor([1]))
    with pytest.raises(FeatureError, match="do not match"):
        GlobalMVN(np.zeros(2), np.ones(3))
    with pytest.raises(FeatureError, match="no frames"):
        GlobalMVN.from_stats(FeatureStats.empty((2,)))


def test_it_shows_what_it_does() -> None:
    assert (
        repr(GlobalMVN.from_stats(STATS)) == "GlobalMVN(dims=(4,), norm_means=True, norm_vars=True)"
    )

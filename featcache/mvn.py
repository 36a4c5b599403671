"""Global mean and variance normalisation with the statistics of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike

from featcache.errors import FeatureError
from featcache.reading import CachePath
from featcache.stats import FeatureStats
from featcache.tables import FeatureTable

VARIANCE_FLOOR = 1e-10  # that of SpeechBrain's InputNormalization
Ends = torch.Tensor | Sequence[float]  # of utterances: frames, or shares of the padded length


class GlobalMVN(torch.nn.Module):
    """Normalises features to mean 0 and variance 1 over all frames of a cache, and back.

    `mean` and `std` have the shape of one frame; they become float32 buffers: saved with the model,
    moved with it, never trained. Computes in float32 or better whatever the input, and returns the
    dtype of the input. `norm_means` and `norm_vars` switch off one half each. Threads, forks and
    pickles may share it.

    >>> mvn = GlobalMVN(mean=[1.0, 2.0], std=[1.0, 4.0])
    >>> mvn(torch.tensor([[[2.0, 2.0], [0.0, 6.0]]]), lengths=torch.tensor([1]))
    tensor([[[1., 0.],
             [0., 0.]]])
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        mean: ArrayLike | torch.Tensor,
        std: ArrayLike | torch.Tensor,
        *,
        norm_means: bool = True,
        norm_vars: bool = True,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", _buffer(mean))
        self.register_buffer("std", _buffer(std))
        self.norm_means = norm_means
        self.norm_vars = norm_vars
        if self.mean.shape != self.std.shape:
            raise FeatureError(
                f"mean of shape {tuple(self.mean.shape)!r} and std of shape "
                f"{tuple(self.std.shape)!r} do not match"
            )
        if norm_vars and not bool((self.std > 0).all()):
            raise FeatureError(
                "cannot divide by a standard deviation that is not positive; see "
                "GlobalMVN.from_stats"
            )

    @classmethod
    def from_stats(
        cls,
        stats: FeatureStats,
        *,
        norm_means: bool = True,
        norm_vars: bool = True,
        variance_floor: float = VARIANCE_FLOOR,
    ) -> GlobalMVN:
        """Normalise with the mean and variance of `stats`, each variance at least `variance_floor`.

        Without a floor an element that never changes (an empty mel band, a constant) would divide
        by zero, and one that changes by rounding alone would become noise of full size. The default
        amplifies nothing more than 10^5 times.
        """
        if not stats.count:
            raise FeatureError("cannot normalise with the statistics of no frames")
        std = stats.var.clip(min=variance_floor) ** 0.5
        return cls(stats.mean, std, norm_means=norm_means, norm_vars=norm_vars)

    @classmethod
    def from_cache(
        cls,
        cache: FeatureTable | CachePath,
        feature: str,
        *,
        allow_incomplete: bool = False,
        norm_means: bool = True,
        norm_vars: bool = True,
        variance_floor: float = VARIANCE_FLOOR,
    ) -> GlobalMVN:
        """Normalise with the statistics of a feature of a cache or a table; see `from_stats`.

        Those of a mix count each utterance once, and know nothing of its plan.

        Raises `IncompleteError` for a cache that lacks utterances, unless `allow_incomplete`.
        """
        table = FeatureTable.of(cache)
        if not allow_incomplete:
            table.require_complete()
        return cls.from_stats(
            table.stats(feature),
            norm_means=norm_means,
            norm_vars=norm_vars,
            variance_floor=variance_floor,
        )

    def forward(self, x: torch.Tensor, lengths: Ends | None = None) -> torch.Tensor:
        """Return (x - mean) / std, of the shape and dtype of `x` (integers become float32).

        Without `lengths`, `x` is (..., *dims). With it, (batch, frames, *dims), and what lies
        behind an utterance's length comes out as zeros: integers are frames, floats are shares of
        the padded length, as in SpeechBrain. Packed frames, (frames, *dims), need none; a nested
        tensor comes out nested.
        """
        y = self._computed(x)
        if self.norm_means:
            y = y - self.mean
        if self.norm_vars:
            y = y / self.std
        return self._masked(y, lengths).to(x.dtype if x.is_floating_point() else y.dtype)

    def inverse(self, x: torch.Tensor, lengths: Ends | None = None) -> torch.Tensor:
        """Return x * std + mean: what `forward` was given, zeros behind `lengths`."""
        y = self._computed(x)
        if self.norm_vars:
            y = y * self.std
        if self.norm_means:
            y = y + self.mean
        return self._masked(y, lengths).to(x.dtype if x.is_floating_point() else y.dtype)

    def extra_repr(self) -> str:
        """Show the shape of a frame and what is switched on."""
        dims = tuple(self.mean.shape)
        return f"dims={dims}, norm_means={self.norm_means}, norm_vars={self.norm_vars}"

    def _computed(self, x: torch.Tensor) -> torch.Tensor:
        dims = tuple(self.mean.shape)
        if tuple(x.shape[x.dim() - len(dims) :]) != dims:
            raise FeatureError(
                f"statistics of frames of shape {dims!r} do not fit an input of shape "
                f"{tuple(x.shape)}"
            )
        # float16 has too few digits to subtract a mean in
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.mean.dtype), torch.float32)
        return x.to(dtype)

    def _masked(self, y: torch.Tensor, lengths: Ends | None) -> torch.Tensor:
        if lengths is None or y.is_nested:
            return y
        dims = self.mean.dim()
        if y.dim() != dims + 2:
            raise FeatureError(
                f"lengths need an input of shape (batch, frames, ...), not {tuple(y.shape)!r}; "
                "packed frames need none"
            )
        frames = y.shape[1]
        ends = torch.as_tensor(lengths, device=y.device)
        if tuple(ends.shape) != (y.shape[0],):
            raise FeatureError(
                f"a batch of {y.shape[0]} needs as many lengths, not shape {tuple(ends.shape)!r}"
            )
        if ends.is_floating_point():
            # truncating would lose a frame of many utterances, and bfloat16 products round to the
            # wrong one
            ends = torch.round(ends.to(torch.promote_types(ends.dtype, torch.float32)) * frames)
        padding = torch.arange(frames, device=y.device) >= ends.unsqueeze(1)
        return y.masked_fill(padding.reshape(*padding.shape, *[1] * dims), 0)


def _buffer(values: ArrayLike | torch.Tensor) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values.detach().to(torch.float32, copy=True)
    return torch.from_numpy(np.array(values, dtype=np.float32))

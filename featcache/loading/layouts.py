"""Layouts of a batch: how the utterances of a feature lie in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from featcache._checks import whole_number
from featcache.errors import ConfigError, MissingDependencyError, UnknownNameError, nearest
from featcache.format.columns import ends_of
from featcache.interface import Bytes, Ints
from featcache.loading.memory import Allocate, Shape
from featcache.samplers.batches import Needs
from featcache.samplers.bucket import PadTo, checked_pad_to, padded_length

Batch = dict[str, Any]


@runtime_checkable
class Layout(Protocol):
    """A rule by which the utterances of a batch lie in one contiguous tensor."""

    def ends(self, lengths: Ints) -> Ints:
        """Return where the places of utterances begin and end in the tensor, in frames.

        Utterance `i` begins at `ends[i]`; zeros fill its place up to `ends[i + 1]`.
        """
        ...

    def shape(self, ends: Ints, dims: Shape) -> Shape:
        """Return the shape of the tensor, which holds `ends[-1]` frames of shape `dims`."""
        ...

    def entries(self, name: str, values: torch.Tensor, lengths: Ints, allocate: Allocate) -> Batch:
        """Return what a batch holds of a feature, by key; `values` is the tensor, not copied."""
        ...


def ends_by(layout: Layout, feature: str, lengths: Ints, id_of: Callable[[int], object]) -> Ints:
    """Return `layout.ends`; a `ConfigError` names the feature, and the longest utterance."""
    try:
        return layout.ends(lengths)
    except ConfigError as error:
        id = id_of(int(lengths.argmax()))
        raise ConfigError(f"utterance {id!r}, feature {feature!r}: {error}") from None


@dataclass(frozen=True)
class Padded:
    """Padded batches: a tensor (utterances, longest, *dims), zeros behind the frames.

    Beside it `<feature>_lengths`, int64.

    Args:
        pad_to: lengths that the longest is rounded up to, of each feature on its own: a list of
            them, or a number whose multiples are meant. Few shapes are what torch.compile and CUDA
            graphs want; give `BucketBatchSampler` the same.
    """

    pad_to: PadTo | None = None

    def __post_init__(self) -> None:
        if self.pad_to is not None:
            object.__setattr__(self, "pad_to", checked_pad_to(self.pad_to))

    def ends(self, lengths: Ints) -> Ints:
        """Return multiples of the length that all are padded to."""
        return np.arange(len(lengths) + 1) * padded_length(int(lengths.max()), self.pad_to)

    def shape(self, ends: Ints, dims: Shape) -> Shape:
        """Return (utterances, longest, *dims)."""
        return len(ends) - 1, int(ends[1]), *dims

    def entries(self, name: str, values: torch.Tensor, lengths: Ints, allocate: Allocate) -> Batch:
        """Return the padded tensor and the lengths."""
        return {name: values, f"{name}_lengths": numbers(lengths, torch.int64, allocate)}


@dataclass(frozen=True)
class Packed:
    """Batches without padding: utterances one after the other in a tensor (sum of frames, *dims).

    Beside it `<feature>_cu_seqlens`, int32: utterance `i` has the frames `cu_seqlens[i]` to before
    `cu_seqlens[i + 1]`; `<feature>_max_seqlen`, the longest, a plain int; and `<feature>_lengths`,
    int64. Kernels of variable-length attention take the first two as they are.

    Args:
        multiple_of: rounds the sum of frames up to a multiple. The frames at the end that no
            utterance has are zeros, and `cu_seqlens` leaves them out.
        position_ids: adds `<feature>_position_ids`, int64: the number of each frame within its
            utterance, from 0.
    """

    multiple_of: int = 1
    position_ids: bool = False

    def __post_init__(self) -> None:
        whole_number("multiple_of", self.multiple_of, 1)

    def ends(self, lengths: Ints) -> Ints:
        """Return sums of the lengths; the last place reaches up to a multiple."""
        ends = ends_of(lengths)
        ends[-1] += -ends[-1] % self.multiple_of
        return ends

    def shape(self, ends: Ints, dims: Shape) -> Shape:
        """Return (frames of all, *dims)."""
        return int(ends[-1]), *dims

    def entries(self, name: str, values: torch.Tensor, lengths: Ints, allocate: Allocate) -> Batch:
        """Return the tensor, and where utterances begin in it."""
        begins = ends_of(lengths)
        found: Batch = {
            name: values,
            f"{name}_lengths": numbers(lengths, torch.int64, allocate),
            f"{name}_cu_seqlens": numbers(begins, torch.int32, allocate),
            f"{name}_max_seqlen": int(lengths.max(initial=0)),
        }
        if self.position_ids:
            sizes = np.append(lengths, len(values) - begins[-1])
            positions = np.arange(len(values)) - np.repeat(begins, sizes)
            found[f"{name}_position_ids"] = numbers(positions, torch.int64, allocate)
        return found


@dataclass(frozen=True)
class Jagged:
    """Batches as nested tensors of `torch.jagged` layout, (utterances, its frames, *dims).

    Beside it `<feature>_lengths`, int64. `tensor.values()` is that of a packed batch: no copy.

    Raises `MissingDependencyError` for torch before 2.5, whose nested tensors lack some of it.
    """

    def __post_init__(self) -> None:
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5):
            raise MissingDependencyError(
                f"layout 'jagged' needs torch 2.5 or later, and this is {torch.__version__}; "
                "layout='packed' is the same memory"
            )

    def ends(self, lengths: Ints) -> Ints:
        """Return sums of the lengths."""
        return ends_of(lengths)

    def shape(self, ends: Ints, dims: Shape) -> Shape:
        """Return (frames of all, *dims)."""
        return int(ends[-1]), *dims

    def entries(self, name: str, values: torch.Tensor, lengths: Ints, allocate: Allocate) -> Batch:
        """Return the nested tensor and the lengths."""
        nested = torch.nested.nested_tensor_from_jagged(
            values,
            numbers(ends_of(lengths), torch.int64, allocate),
            min_seqlen=int(lengths.min(initial=0)),
            max_seqlen=int(lengths.max(initial=0)),
        )
        return {name: nested, f"{name}_lengths": numbers(lengths, torch.int64, allocate)}


LAYOUTS: Mapping[str, Callable[[], Layout]] = MappingProxyType(
    {"padded": Padded, "packed": Packed, "jagged": Jagged}
)


def layout_of(layout: str | Layout) -> Layout:
    """Return a layout as it is, or that of a name; raises `ConfigError` for what is neither."""
    if isinstance(layout, str):
        if layout not in LAYOUTS:
            raise UnknownNameError(f"there is no layout {layout!r}; {nearest(layout, LAYOUTS)}")
        return LAYOUTS[layout]()
    if isinstance(layout, type) or not isinstance(layout, Layout):
        raise ConfigError(
            f"layout is one of {', '.join(map(repr, LAYOUTS))}, or an object of "
            f"featcache.loading such as Packed(multiple_of=8), not {layout!r}"
        )
    return layout


def layout_for(sampler: object) -> Layout:
    """Return the layout that a batch sampler counted; padded, to `pad_to`, for a foreign one."""
    needs = getattr(sampler, "needs", None)
    if isinstance(needs, Needs):
        return Packed() if needs.packed else Padded(needs.pad_to)
    return Padded(getattr(sampler, "pad_to", None))


def require_layout(layout: Layout, needs: Needs) -> None:
    """Raise `ConfigError` for a layout by which batches are above the limits of their sampler.

    And for one with other lengths than those few that it counted padding to.
    """
    if needs.packed and isinstance(layout, Padded):
        raise ConfigError(
            "the batch sampler makes batches to pack, and the FeatureDataset pads them; give it "
            "layout='packed', or take a BucketBatchSampler"
        )
    if needs.pad_to is not None and layout != Padded(needs.pad_to):
        pad_to = needs.pad_to if isinstance(needs.pad_to, int) else [*needs.pad_to]
        raise ConfigError(
            f"the batch sampler makes batches to pad to {pad_to!r}, and the layout is {layout!r}; "
            f"give the FeatureDataset layout=featcache.loading.Padded(pad_to={pad_to!r})"
        )


def numbers(values: Ints, dtype: torch.dtype, allocate: Allocate) -> torch.Tensor:
    """Return whole numbers as a tensor in memory that `allocate` makes."""
    made = allocate(values.shape, dtype)
    made.numpy()[:] = values
    return made


def places_of(values: torch.Tensor, ends: Ints) -> list[Bytes]:
    """Return the memory of each utterance's place in a contiguous tensor, as a row of bytes."""
    # numpy has no bfloat16
    bits = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    data = bits.view(-1).numpy().view(np.uint8)
    frame_bytes = len(data) // max(int(ends[-1]), 1)
    return [data[begin:end] for begin, end in pairwise((ends * frame_bytes).tolist())]

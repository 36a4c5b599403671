"""The probe: utterances that are computed again, and the comparison with what is stored."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import CorruptCacheError
from featcache.interface import Array

# `Probe`: utterances that were computed alone, to be computed again and compared.
#
# In bytes, all little-endian: the length of the JSON text that follows (8 bytes), the text, and
# the arrays one after another, in the order in which the text names them.

MOST_BYTES = 64 << 20  # of a probe that is kept
_HEADER_BYTES = 1 << 20  # set aside for the text: ids, names and digests


class ProbeRows(NamedTuple):
    """An array of a probe, or of a long one its first rows."""

    array: Array  # shape (rows, ...); one number has one row
    total: int  # rows of the whole array


@dataclass(frozen=True)
class Probed:
    """One utterance, loaded and computed alone.

    Attributes:
        inputs: xxh3-64 of what `compute_features` was given, by name.
        features: what it returned, by feature.
        entry: stamp of the utterance's entry in the data set; 0: unknown.
    """

    inputs: Mapping[str, str]
    features: Mapping[str, ProbeRows]
    entry: int = 0


@dataclass(frozen=True)
class Probe:
    """Utterances by id, and how they were computed.

    Attributes:
        utterances: the utterances, by id.
        device: name of the processor or GPU that computed them.
        precision: of the computation: "fp32", "tf32", "fp16" or "bf16".
        seed: of random features; None: they are not random.
        repeatable: False if they differ from one time to the next, whatever the seed.
        batched: whether the cache was begun with batches of several utterances.
    """

    utterances: Mapping[str, Probed] = field(default_factory=dict)
    device: str = ""
    precision: str = "fp32"
    seed: int | None = None
    repeatable: bool = True
    batched: bool = False

    def with_more(self, other: Probe) -> Probe:
        """Return this probe with the utterances of another one, too."""
        utterances = {**self.utterances, **other.utterances}
        # of several devices: compared as on another one
        device = self.device if self.device == other.device else ""
        return replace(self, utterances=utterances, device=device)

    def to_bytes(self) -> bytes:
        """Return the probe as bytes, at most 64 MiB: of long arrays only the first rows."""
        number = sum(len(probed.features) for probed in self.utterances.values())
        share = (MOST_BYTES - _HEADER_BYTES) // max(number, 1)
        arrays: list[bytes] = []
        utterances = {}
        for id, probed in self.utterances.items():
            described = {}
            for name, (array, total) in probed.features.items():
                kept = _first_rows(array, share)
                described[name] = [kept.dtype.str, list(kept.shape), total]
                arrays.append(kept.tobytes())
            inputs = dict(probed.inputs)
            utterances[id] = {"inputs": inputs, "features": described, "entry": probed.entry}
        settings = {name: getattr(self, name) for name in _SETTINGS}
        text = json.dumps(settings | {"utterances": utterances}).encode()
        return b"".join([len(text).to_bytes(8, "little"), text, *arrays])

    @classmethod
    def from_bytes(cls, data: bytes) -> Probe:
        """Return the probe of these bytes; raises `CorruptCacheError` for what is none."""
        try:
            start = 8 + int.from_bytes(data[:8], "little")
            text = json.loads(data[8:start])
            rest = _Arrays(memoryview(data)[start:])
            utterances = {
                id: Probed(
                    dict(each["inputs"]),
                    {name: rest.take(*described) for name, described in each["features"].items()},
                    int(each.get("entry", 0)),
                )
                for id, each in text.pop("utterances").items()
            }
            return cls(utterances, **{name: text[name] for name in _SETTINGS})
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise CorruptCacheError(f"this is no probe of a cache: {error!r}") from error


_SETTINGS = ("device", "precision", "seed", "repeatable", "batched")


def as_rows(value: object) -> ProbeRows:
    """Return what `compute_features` gives for a feature, in memory; bfloat16 as float32."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        value = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    array = np.atleast_1d(np.asarray(value))
    if array.dtype.kind not in "fiub":
        raise TypeError(f"no array of numbers: {array.dtype}")
    # a copy: whoever computed it may use its memory again
    copied = np.array(array, array.dtype.newbyteorder("<"), order="C")
    return ProbeRows(copied, len(copied))


def _first_rows(array: Array, nbytes: int) -> Array:
    row_bytes = max(array.itemsize * math.prod(array.shape[1:]), 1)
    return np.ascontiguousarray(array[: nbytes // row_bytes])


class _Arrays:
    """Arrays that lie one after another in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, dtype: str, shape: list[int], total: int) -> ProbeRows:
        kind = np.dtype(dtype)
        if kind.kind not in "fiub":
            raise ValueError(f"no dtype of a feature: {dtype!r}")
        nbytes = kind.itemsize * math.prod(shape)
        taken, self._data = self._data[:nbytes], self._data[nbytes:]
        return ProbeRows(np.frombuffer(taken, kind).reshape(shape), total)


def seen_frames(probe: Mapping[str, Probed], feature: str) -> Iterator[Array]:
    """Iterate over the arrays of a feature."""
    for probed in probe.values():
        if feature in probed.features:
            yield probed.features[feature].array


# Arrays of one feature computed twice: alike or not, within a tolerance of the spread.


class Tolerance(NamedTuple):
    """The distance that two computations may have and still be the same."""

    spread: float  # of the feature's spread, for real numbers
    share: float  # of the frames, for whole ones


# Another device adds in another order and has other approximations of exp and tanh; a batch of
# another size has other kernels. Half precision rounds each step to 11 bits, bfloat16 to 8.
TOLERANCES = {
    "fp32": (Tolerance(1e-4, 0.01), Tolerance(1e-2, 0.05)),
    "tf32": (Tolerance(1e-3, 0.02), Tolerance(1e-2, 0.05)),
    "fp16": (Tolerance(3e-3, 0.02), Tolerance(1e-2, 0.05)),
    "bf16": (Tolerance(3e-2, 0.05), Tolerance(5e-2, 0.1)),
}


def tolerance(precision: str, *, same_device: bool) -> Tolerance:
    """Return the tolerance for a precision, on the same device or another one."""
    same, other = TOLERANCES.get(precision, TOLERANCES["bf16"])
    return same if same_device else other


class Unlike(NamedTuple):
    """A feature of an utterance, computed twice, that differs."""

    id: str
    feature: str
    by: float  # of the spread; of the frames, for whole numbers
    whole: bool  # whether these are whole numbers
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # where these differ
    frames: float = 1.0  # share of the frames that differ
    first: float = 0.0  # place of the first one that does, from 0 to 1

    @property
    def at_the_end(self) -> bool:
        """Whether only the last frames differ."""
        return self.shapes is None and self.frames < 0.5 and self.first > 0.5

    def told(self) -> str:
        """Return by how much they differ, as the end of a sentence."""
        if self.shapes is not None:
            before, now = self.shapes
            if before[1:] == now[1:]:
                return f"has {now[0]} frames instead of {before[0]}"
            return f"has the shape {now} instead of {before}"
        if self.whole:
            return f"differs in {self.by:.2g} of its frames"
        where = ", in its last frames" if self.at_the_end else ""
        return f"differs by {self.by:.2g} of its spread{where}"


def spread(arrays: Iterable[Array]) -> float:
    """Return the standard deviation of a feature about the mean of each dimension.

    Of a feature that is constant its magnitude; of zeros 1.
    """
    seen = [array.astype(np.float64) for array in arrays if array.size]
    if not seen or len({array.shape[1:] for array in seen}) > 1:
        return 1.0
    frames = np.concatenate(seen)
    frames[~np.isfinite(frames)] = 0
    candidates = (frames - frames.mean(axis=0)).std(), frames.std(), np.abs(frames).max()
    return next((float(found) for found in candidates if found > 1e-30), 1.0)


def unlike(
    named: tuple[str, str],
    before: ProbeRows,
    now: ProbeRows,
    spread: float,
    tolerance: Tolerance,
    slack: Any = 0.0,
) -> Unlike | None:
    """Compare an array with the same one computed again; None if they are alike.

    Args:
        named: the utterance's id and the feature.
        before: the array of before.
        now: the array of now.
        spread: of the feature.
        tolerance: as far as they may be apart.
        slack: what real numbers may differ by beyond that, for each one or for all.
    """
    id, feature = named
    whole = before.array.dtype.kind != "f" and now.array.dtype.kind != "f"
    shapes = (before.total, *before.array.shape[1:]), (now.total, *now.array.shape[1:])
    if shapes[0] != shapes[1]:
        return Unlike(id, feature, np.inf, whole, shapes)
    rows = min(len(before.array), len(now.array))
    one, other = before.array[:rows], now.array[:rows]
    if not one.size or (one.dtype == other.dtype and one.tobytes() == other.tobytes()):
        return None
    apart = _apart(one, other)
    wrong = apart > (0 if whole else tolerance.spread * spread + slack)
    off = wrong.reshape(rows, -1).any(axis=1)
    share = float(off.mean())
    if share <= (tolerance.share if whole else 0):
        return None
    by = share if whole else float(apart[wrong].max()) / spread
    return Unlike(id, feature, by, whole, None, share, int(off.argmax()) / rows)


def _apart(one: Array, other: Array) -> NDArray[np.float64]:
    """Return the distance of each pair of numbers; infinite where one of them is no number."""
    first, second = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.abs(first - second)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    apart[same] = 0
    apart[np.isnan(apart)] = np.inf
    return apart


# Probes compared: which inputs and features of which utterance are others than before.


@dataclass(frozen=True)
class Comparison:
    """Utterances that were computed twice.

    Attributes:
        ids: the utterances.
        inputs: the inputs that differ: the id, and the name of the input.
        features: the features that differ by more than the tolerance.
        same_bits: whether nothing differs in any bit.
    """

    ids: Sequence[str]
    inputs: Sequence[tuple[str, str]] = ()
    features: Sequence[Unlike] = ()
    same_bits: bool = False

    @property
    def alike(self) -> bool:
        """Whether inputs and features are the same."""
        return not self.inputs and not self.features

    def without(self, ids: Container[str]) -> Comparison:
        """Return the comparison of the other utterances."""
        return replace(
            self,
            ids=[id for id in self.ids if id not in ids],
            inputs=[each for each in self.inputs if each[0] not in ids],
            features=[each for each in self.features if each.id not in ids],
        )

    def told(self) -> list[str]:
        """Return a sentence for each kind of difference, naming the worst of each feature."""
        lines = [
            f"input {name!r} of {id!r} is another: the data set, its pipeline or the audio has "
            "changed"
            for name, id in {name: id for id, name in reversed(self.inputs)}.items()
        ]
        for found in worst(self.features):
            of = sum(each.feature == found.feature for each in self.features)
            also = f" (and {of - 1} more of {len(self.ids)})" if of > 1 else ""
            lines.append(f"{found.feature} of {found.id!r}, computed again, {found.told()}{also}")
        if self.ids and self.same_bits:
            number = f"{len(self.ids)} utterance{'s' if len(self.ids) > 1 else ''}"
            lines.append(f"{number} computed again: all the same to the bit")
        return lines


def worst(features: Iterable[Unlike]) -> list[Unlike]:
    """Return of each feature the utterance that differs most."""
    found: dict[str, Unlike] = {}
    for each in features:
        if each.feature not in found or each.by > found[each.feature].by:
            found[each.feature] = each
    return list(found.values())


def compare(
    before: Mapping[str, Probed], now: Mapping[str, Probed], tolerance: Tolerance
) -> Comparison:
    """Compare utterances with the same ones computed again.

    Inputs are compared exactly, where both times had one of that name.
    """
    ids = [id for id in before if id in now]
    inputs = [
        (id, name)
        for id in ids
        for name, digest in before[id].inputs.items()
        if now[id].inputs.get(name, digest) != digest
    ]
    features, same_bits = [], not inputs
    for name in {name: None for id in ids for name in before[id].features}:
        of_spread = spread(seen_frames(before, name))
        for id in ids:
            one, other = before[id].features[name], now[id].features.get(name)
            if other is None:
                continue
            if found := unlike((id, name), one, other, of_spread, tolerance):
                features.append(found)
            same_bits &= unlike((id, name), one, other, of_spread, Tolerance(0, 0)) is None
    return Comparison(ids, inputs, features, same_bits)

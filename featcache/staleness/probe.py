"""`Probe`: utterances that were computed alone, to be computed again and compared.

In bytes, all little-endian: the length of the JSON text that follows (8 bytes), the text, and the
arrays one after another, in the order in which the text names them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from featcache.errors import CorruptCacheError
from featcache.interface import Array

MOST_BYTES = 64 << 20  # of a probe that is kept
_HEADER_BYTES = 1 << 20  # set aside for the text: ids, names and digests


class Rows(NamedTuple):
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
    features: Mapping[str, Rows]
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


def as_rows(value: Any) -> Rows:
    """Return what `compute_features` gives for a feature, in memory; bfloat16 as float32."""
    if hasattr(value, "detach"):
        tensor = value.detach().cpu()
        value = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    array = np.atleast_1d(np.asarray(value))
    if array.dtype.kind not in "fiub":
        raise TypeError(f"no array of numbers: {array.dtype}")
    # a copy: whoever computed it may use its memory again
    copied = np.array(array, array.dtype.newbyteorder("<"), order="C")
    return Rows(copied, len(copied))


def _first_rows(array: Array, nbytes: int) -> Array:
    row_bytes = max(array.itemsize * math.prod(array.shape[1:]), 1)
    return np.ascontiguousarray(array[: nbytes // row_bytes])


class _Arrays:
    """Arrays that lie one after another in memory."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def take(self, dtype: str, shape: list[int], total: int) -> Rows:
        kind = np.dtype(dtype)
        if kind.kind not in "fiub":
            raise ValueError(f"no dtype of a feature: {dtype!r}")
        nbytes = kind.itemsize * math.prod(shape)
        taken, self._data = self._data[:nbytes], self._data[nbytes:]
        return Rows(np.frombuffer(taken, kind).reshape(shape), total)


def seen_frames(probe: Mapping[str, Probed], feature: str) -> Iterator[Array]:
    """Iterate over the arrays of a feature."""
    for probed in probe.values():
        if feature in probed.features:
            yield probed.features[feature].array

"""Data sets that ESPnet's iterators read, the order of batches in an epoch, and `CommonCollateFn`.

It pads utterances to one batch, as ESPnet's models expect it.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from featcache import FeatureDataset
from featcache.errors import ConfigError, FeatureError, nearest
from featcache.espnet.batch_samplers import build_batch_sampler
from featcache.espnet.shapes import Ints
from featcache.samplers import Batches

ArrayOrTensor = NDArray[Any] | torch.Tensor
EspnetItem = tuple[str, Mapping[str, ArrayOrTensor]]
PaddedBatch = tuple[list[str], dict[str, torch.Tensor]]
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(eq=False)
class CommonCollateFn:
    """ESPnet's collate function: pads utterances to the longest one; takes tensors, too.

    Args:
        float_pad_value: fills the end of all arrays but those of signed integers.
        int_pad_value: fills the end of arrays of signed integers.
        not_sequence: names without a time axis, which get no lengths.

    >>> collate = CommonCollateFn(int_pad_value=-1)
    >>> first, second = {"text": np.array([1, 2, 3])}, {"text": np.array([4, 5])}
    >>> ids, batch = collate([("u1", first), ("u2", second)])
    >>> batch["text"].tolist(), batch["text_lengths"].tolist()
    ([[1, 2, 3], [4, 5, -1]], [3, 2])
    """

    float_pad_value: float = 0.0
    int_pad_value: int = -32768
    not_sequence: Collection[str] = ()

    def __post_init__(self) -> None:
        names = self.not_sequence
        self.not_sequence = (names,) if isinstance(names, str) else tuple(sorted(names))

    def __call__(self, data: Sequence[EspnetItem] | Mapping[str, object]) -> PaddedBatch:
        """Return the ids and, per name, a padded tensor followed by its `<name>_lengths`, int64.

        `data` are pairs of an id and a dict of arrays of shape (frames, ...), equal in all but the
        frames; or a batch of a `FeatureDataset`, of tensors or NumPy's arrays, whose padding is
        filled anew, and whose packed or nested features stay as they are. A tensor has shape
        (batch, longest, ...), the dtype of the first utterance's array, names in the first one's
        order, and memory of its own; each array is copied once.

        Raises `FeatureError` naming the utterance and the name that do not fit, `ConfigError` for a
        padding value that the dtype cannot hold.
        """
        if isinstance(data, Mapping):
            return self._repaint(data)
        ids, arrays = _pairs(data)
        batch = {}
        for name in arrays[0]:
            column = [utterance[name] for utterance in arrays]
            batch[name] = self._padded(name, ids, column)
            if name not in self.not_sequence:
                batch[f"{name}_lengths"] = torch.tensor(list(map(len, column)))
        return ids, batch

    def _padded(
        self, name: str, ids: Sequence[str], arrays: Sequence[ArrayOrTensor]
    ) -> torch.Tensor:
        first = arrays[0]
        for id, array in zip(ids, arrays, strict=True):
            if misfit := _misfit(array, first, ids[0]):
                raise FeatureError(f"utterance {id!r}, {name!r}: {misfit}")
        try:
            empty = _tensor(first[:0])
        except (TypeError, ValueError):
            raise FeatureError(
                f"utterance {ids[0]!r}, {name!r}: torch has no dtype {str(first.dtype)!r}"
            ) from None
        pad = self._pad_value(name, empty.dtype)
        padded = empty.new_empty((len(arrays), max(map(len, arrays)), *first.shape[1:]))
        # numpy copies read-only arrays (mapped files), which torch warns of or copies twice
        if all(isinstance(array, np.ndarray) and array.dtype == first.dtype for array in arrays):
            _fill(padded.numpy(), arrays, pad)
        else:
            _fill(padded, [_tensor(array) for array in arrays], pad)
        return padded

    def _pad_value(self, name: str, dtype: torch.dtype) -> float:
        setting = "int_pad_value" if dtype in SIGNED else "float_pad_value"
        value: float = getattr(self, setting)
        try:
            # a single number takes too large a value as inf
            return torch.empty(2, dtype=dtype).fill_(value)[0].item()
        except RuntimeError:
            raise ConfigError(
                f"{setting} {value!r} of the collate function does not fit {name!r}, which is "
                f"{str(dtype).removeprefix('torch.')}; give one that does"
            ) from None

    def _repaint(self, padded: Mapping[str, object]) -> PaddedBatch:
        """Fill the padding of a batch where it is padded with zeros, in place."""
        batch: dict[str, Any] = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in padded.items()
            if name != "id"
        }
        for name, value in [*batch.items()]:
            lengths = batch.get(f"{name}_lengths")
            if isinstance(value, torch.Tensor) and isinstance(lengths, torch.Tensor):
                packed = value.is_nested or f"{name}_cu_seqlens" in padded
                if not packed and (pad := self._pad_value(name, value.dtype)):
                    for row, length in zip(value, lengths.tolist(), strict=True):
                        row[length:] = pad
                if name in self.not_sequence:
                    del batch[f"{name}_lengths"]
        return list(cast("Sequence[str]", padded["id"])), batch


def _pairs(data: Sequence[EspnetItem]) -> tuple[list[str], list[Mapping[str, ArrayOrTensor]]]:
    """Split into ids and dicts, all with the names of the first."""
    for item in data:
        if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Mapping)):
            raise FeatureError(
                f"a batch to pad is a list of (id, {{name: array}}), not of {type(item).__name__}"
            )
    if not data:
        raise FeatureError("a batch to pad has no utterances")
    ids, arrays = [id for id, _ in data], [utterance for _, utterance in data]
    for id, utterance in zip(ids, arrays, strict=True):
        if differing := sorted(utterance.keys() ^ arrays[0].keys()):
            raise FeatureError(
                f"utterances {ids[0]!r} and {id!r} of one batch differ in what they have: "
                f"{differing!r} is only in one"
            )
    for name in arrays[0]:
        if name.endswith("_lengths"):
            raise FeatureError(
                f"utterance {ids[0]!r}: {name!r} is reserved for the lengths, use another name"
            )
    return ids, arrays


def _misfit(array: ArrayOrTensor, first: ArrayOrTensor, first_id: str) -> str:
    """Return why an array cannot be padded together with the first one; "" if it can."""
    if not isinstance(array, np.ndarray | torch.Tensor):
        return f"an array or tensor is needed, not {type(array).__name__}"
    if array.ndim == 0:
        return "a single number has no time axis; give an array of shape (1,)"
    shape, first_shape = tuple(array.shape), tuple(first.shape)
    if shape[1:] != first_shape[1:]:
        return f"shape {shape} does not fit {first_shape} of {first_id!r}; only axis 0 may differ"
    return ""


def _fill(out: Any, arrays: Sequence[ArrayOrTensor], pad: float) -> None:
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
        row[len(array) :] = pad


def _tensor(array: ArrayOrTensor) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array.detach()
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))


# Batches of an epoch and their order: ESPnet's rules, by index.

Utterance = int | str
BatchList = Sequence[Sequence[Utterance]]


def random_state(epoch: int, seed: int) -> np.random.RandomState:
    """Return ESPnet's generator of an epoch; raises `ConfigError` where there is none."""
    if not 0 <= epoch + seed < 2**32:
        raise ConfigError(
            f"the sum of epoch and seed, {epoch + seed}, is not within 0 to 2**32 - 1; epochs "
            "count from 1"
        )
    return np.random.RandomState(epoch + seed)


def epoch_order(batches: int, epoch: int, seed: int, shuffle: bool, per_epoch: int | None) -> Ints:
    """Return the numbers of the batches that epoch `epoch` (from 1 on) takes out of `batches`.

    Without `per_epoch` all of them. Otherwise that many: passes over all batches follow each other,
    each with an order of its own, and each epoch goes on where the one before it ended.

    >>> epoch_order(3, epoch=2, seed=0, shuffle=False, per_epoch=2)
    array([2, 0])
    """
    if per_epoch is None:
        return _pass(batches, epoch, seed, shuffle)
    if not batches:
        raise ConfigError(f"there are no batches of which to take {per_epoch} per epoch")
    start = per_epoch * (epoch - 1)
    stop = start + per_epoch
    taken = [
        _pass(batches, begin // batches, seed, shuffle)[max(start - begin, 0) : stop - begin]
        for begin in range(start // batches * batches, stop, batches)
    ]
    return np.concatenate(taken)


@dataclass(frozen=True)
class EpochRule:
    """The batches that epochs take; `per_epoch` None: all of them."""

    per_epoch: int | None
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.per_epoch is not None and self.per_epoch < 1:
            raise ConfigError(f"an epoch takes at least 1 batch, not {self.per_epoch!r}")

    def batches(self, batches: BatchList, epoch: int, shuffle: bool | None) -> BatchList:
        """Return those of `batches` that an epoch takes; `shuffle` overrides that of the rule."""
        shuffled = self.shuffle if shuffle is None else shuffle
        order = epoch_order(len(batches), epoch, self.seed, shuffled, self.per_epoch)
        if isinstance(batches, Batches):
            return batches.take(order)
        return [batches[number] for number in order.tolist()]


def reshuffled(batches: BatchList, epoch: int, seed: int) -> BatchList:
    """Shuffle the utterances of all batches into batches of the size of the first.

    Raises `ConfigError` if the first batch is empty.
    """
    if not len(batches):
        return batches
    size = len(batches[0])
    if not size:
        raise ConfigError(
            "the first batch is empty, and with shuffle_within_batch it gives the size of all"
        )
    if isinstance(batches, Batches):
        items = batches.items[batches.ends[0] : batches.ends[-1]]
        shuffled = items[random_state(epoch, seed).permutation(len(items))]
        return Batches(
            shuffled,
            np.append(np.arange(0, len(items), size), len(items)),
            keys=batches.keys,
            numbering=batches.numbering,
        )
    flat = [utterance for batch in batches for utterance in batch]
    flat = [flat[place] for place in random_state(epoch, seed).permutation(len(flat)).tolist()]
    return [flat[start : start + size] for start in range(0, len(flat), size)]


def _pass(batches: int, number: int, seed: int, shuffle: bool) -> Ints:
    # shuffling a list and permuting its numbers take the same draws
    return random_state(number, seed).permutation(batches) if shuffle else np.arange(batches)


# Inputs of the factories: ESPnet's kind of data set or a `FeatureDataset`, and its batches.

Collate = Callable[[Any], Any]


class ItemDataset(Protocol):
    """A data set: indexed by an id or a row, gives `(id, {name: array})`; or a `FeatureDataset`."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return an utterance."""
        ...


class _Pairs:
    """The utterances of a `FeatureDataset` as ESPnet's collate functions expect them: in numpy."""

    def __init__(self, dataset: FeatureDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> tuple[str, dict[str, ArrayOrTensor]]:
        item = self._dataset[index]
        values = {name: value for name, value in item.items() if not name.endswith("_lengths")}
        return values.pop("id"), as_arrays(values)


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, ArrayOrTensor]:
    """Return tensors as numpy arrays, but for those of a dtype that numpy does not have."""
    return {
        name: value if value.dtype == torch.bfloat16 else value.numpy()
        for name, value in tensors.items()
    }


def batch_list(
    batches: BatchList | Mapping[str, object] | Iterable[Any], dataset: ItemDataset
) -> BatchList:
    """Return the batches; made by `build_batch_sampler` where its arguments are given.

    Raises `ConfigError` for what is no list of batches.
    """
    if isinstance(batches, Mapping):
        check_names("batches", batches, build_batch_sampler)
        batches = build_batch_sampler(**with_lengths(batches, dataset))
    if isinstance(batches, Batches) and isinstance(dataset, FeatureDataset):
        dataset.require_made_for(batches)
    if isinstance(batches, str) or not isinstance(batches, Iterable):
        raise ConfigError(
            "batches are lists of ids or rows, or the arguments of build_batch_sampler, not "
            f"{batches!r}"
        )
    listed = batches if isinstance(batches, Sequence) else list(batches)
    if len(listed) and (isinstance(listed[0], str) or not isinstance(listed[0], Sized)):
        raise ConfigError(f"batches are lists of ids or rows, but the first one is {listed[0]!r}")
    return listed


def check_names(argument: str, given: Mapping[str, object], builder: Callable[..., object]) -> None:
    """Raise `ConfigError` for an argument that a builder does not have."""
    known = inspect.signature(builder).parameters
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{argument}: {builder.__name__} has no argument {name!r}; {nearest(name, known)}"
            )


def with_lengths(arguments: Mapping[str, object], dataset: ItemDataset) -> dict[str, Any]:
    """Return a builder's arguments; a `FeatureDataset` gives lengths where shape files do not."""
    given = dict(arguments)
    if not given.get("shape_files") and given.get("lengths") is None:
        given |= {"lengths": dataset} if isinstance(dataset, FeatureDataset) else {}
    return given


def epoch_loader(
    dataset: ItemDataset,
    collate_fn: Collate | None,
    num_workers: int,
    pin_memory: bool,
    batches: Iterable[Any],
    seed: int,
) -> DataLoader[PaddedBatch]:
    """Return a DataLoader over `batches`, whose workers are seeded as ESPnet's."""
    source = dataset
    if isinstance(dataset, FeatureDataset):
        # it pads batches itself; a collate function of the user's own takes them one by one
        collate_fn = CommonCollateFn(int_pad_value=0) if collate_fn is None else collate_fn
        source = dataset if isinstance(collate_fn, CommonCollateFn) else _Pairs(dataset)
    return DataLoader(
        source,  # type: ignore[arg-type]
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        worker_init_fn=partial(_seed_worker, seed),
    )


def _seed_worker(seed: int, worker: int) -> None:
    random.seed(seed + worker)
    np.random.seed((seed + worker) % 2**32)

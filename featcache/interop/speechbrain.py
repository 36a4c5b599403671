"""SpeechBrain: `PaddedBatch`es of a cache, with labels; normalisers; checkpoints of loaders.

`FeatureCacheMixin` lets `Brain.fit` and `Brain.evaluate` take a `FeatureLoader` as it is. Once this
module is imported, any `Checkpointer` saves and loads a `FeatureLoader` among its recoverables, as
one line of JSON.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TypeGuard

import numpy as np
import torch

from featcache.container_files import write_durably
from featcache.errors import MissingDependencyError, StateError
from featcache.extraction.datasets import DynamicItems
from featcache.interface import Array
from featcache.loading.batches import Item
from featcache.loading.dataset import FeatureDataset, Transform
from featcache.loading.layouts import Batch
from featcache.loading.loader import FeatureLoader
from featcache.mvn import GlobalMVN
from featcache.reading import CachePath
from featcache.tables import FeatureTable

try:
    from speechbrain.core import Brain, Stage
    from speechbrain.dataio.batch import PaddedBatch, PaddedData
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.utils.checkpoints import DEFAULT_LOAD_HOOKS, DEFAULT_SAVE_HOOKS
    from speechbrain.utils.distributed import main_process_only
except ImportError as error:
    raise MissingDependencyError(
        f"featcache.interop.speechbrain needs 'speechbrain', which does not load: {error}; "
        "try: pip install 'featcache[speechbrain]'"
    ) from error


def padded_batch(batch: Batch | list[Item]) -> PaddedBatch:
    """Make a SpeechBrain batch of one of a `FeatureLoader` or `FeatureDataset`, without a copy.

    A feature becomes `PaddedData`: its tensor, and float32 lengths relative to the longest, so that
    `torch.round(lengths * data.shape[1])` are its frames; a feature without a time axis has lengths
    of 1, as it has in SpeechBrain. Ids, numbers, features of a packed or jagged batch and all else
    stay what they are, but that NumPy's arrays become tensors; the keys "<feature>_lengths" of
    padded features are left out. Items that come one by one are padded first.

    Use it as `FeatureLoader(..., collate=padded_batch)` or `DataLoader(FeatureDataset(...),
    collate_fn=padded_batch)`.

    >>> lengths = torch.tensor([3, 2])
    >>> batch = padded_batch({"id": ["a", "b"], "x": torch.ones(2, 3), "x_lengths": lengths})
    >>> batch.id, batch.x.lengths
    (['a', 'b'], tensor([1.0000, 0.6667]))
    """
    batch = {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for key, value in FeatureDataset.collate(batch).items()
    }
    lengths = {f"{key}_lengths" for key in batch if _is_padded(key, batch)}
    values = {key: _value(key, batch) for key in batch if key not in lengths}
    moved = [key for key, value in values.items() if isinstance(value, torch.Tensor | PaddedData)]
    # of the examples it takes their number and keys; the values are here already
    made = PaddedBatch(
        [dict.fromkeys(values)] * len(batch.get("id", next(iter(batch.values())))),
        padded_keys=[],
        device_prep_keys=moved,
        apply_default_convert=False,
        nonpadded_stack=False,
    )
    for key, value in values.items():
        setattr(made, key, value)
    return made


def _is_padded(key: str, batch: Batch) -> bool:
    value = batch[key]
    # one number for each utterance is none
    dense = isinstance(value, torch.Tensor) and value.ndim > 1 and not value.is_nested
    return dense and f"{key}_cu_seqlens" not in batch


def _value(key: str, batch: Batch) -> object:
    data = batch[key]
    if not _is_padded(key, batch):
        return data
    lengths = batch.get(f"{key}_lengths")
    if lengths is None:
        return PaddedData(data, torch.ones(len(data)))
    return PaddedData(data, lengths.float() / max(data.shape[1], 1))


def with_items(
    dataset: DynamicItemDataset, keys: Iterable[str] | Mapping[str, str] | None = None
) -> Transform:
    """Make a transform that adds items of a `DynamicItemDataset` to each utterance, by its id.

    Labels come out of the pipeline that the recipe has anyway, in the threads that read. Only these
    keys are computed, and what they take: the audio is not loaded unless one of them needs it.
    Tensors and arrays are padded along axis 0 with their lengths, as SpeechBrain does. The data set
    stays as it is. Use it as `FeatureLoader(..., transform=with_items(dataset, ["tokens"]))`.

    Args:
        dataset: the data set.
        keys: of its entries or dynamic items, also under other names, {"labels": "tokens"}; all its
            output keys of now if None. A key that the loader gives already is left alone.

    Raises `ConfigError` for a key that the data set does not have; an utterance that it does not
    have ends in a `KeyNotFoundError` when it is read.

    >>> from speechbrain.dataio.dataset import DynamicItemDataset
    >>> count = {"func": len, "takes": "text", "provides": "letters"}
    >>> dataset = DynamicItemDataset({"utt-1": {"text": "yes"}}, [count])
    >>> with_items(dataset, ["text", "letters"])({"id": "utt-1"}, np.random.default_rng())
    {'id': 'utt-1', 'text': 'yes', 'letters': 3}
    """
    return partial(_add_items, DynamicItems(dataset, keys))


def _add_items(items: DynamicItems, item: Item, _: np.random.Generator) -> Item:
    found = items.of(item["id"], less=item)
    lengths = {f"{key}_lengths": len(value) for key, value in found.items() if _is_array(value)}
    return item | lengths | found


def _is_array(value: object) -> TypeGuard[torch.Tensor | Array]:
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0


def save_normalizer(
    cache: FeatureTable | CachePath,
    feature: str,
    path: str | PathLike[str],
    *,
    allow_incomplete: bool = False,
) -> None:
    """Write the statistics of a feature as a file that SpeechBrain's `InputNormalization` loads.

    Its `_load` does so, and with it the Pretrainer and checkpoints (`normalizer.ckpt`): "count" is
    the number of frames, "glob_mean" and "glob_std" float32 of the shape of a frame, from float64
    statistics of all frames without padding, the variance at least 1e-10 as there.

    An `InputNormalization` goes on updating in training mode: `update_until_epoch=-1` and
    `epoch=` at each call keep the statistics.

    Args:
        cache: a cache, or any table: the statistics are those of its utterances.
        feature: its name.
        path: the file.
        allow_incomplete: also take a cache that lacks utterances, which else raises
            `IncompleteError`.

    Raises `FeatureError` for statistics of no frames.

    >>> import tempfile
    >>> from featcache import CacheWriter, FeatureStorageConfig
    >>> folder = tempfile.mkdtemp()
    >>> with CacheWriter(folder + "/cache", [FeatureStorageConfig("fbank")]) as writer:
    ...     writer.write("utt-1", {"fbank": np.array([[1.0, 2.0], [3.0, 6.0]])})
    >>> save_normalizer(folder + "/cache", "fbank", folder + "/normalizer.ckpt")
    >>> from speechbrain.processing.features import InputNormalization
    >>> norm = InputNormalization(update_until_epoch=-1)
    >>> norm._load(folder + "/normalizer.ckpt")
    >>> norm(torch.tensor([[[1.0, 2.0], [3.0, 6.0]]]), epoch=1)
    tensor([[[-1., -1.],
             [ 1.,  1.]]])
    """
    table = FeatureTable.of(cache)
    mvn = GlobalMVN.from_cache(table, feature, allow_incomplete=allow_incomplete)
    # plain tensors: SpeechBrain loads them with `weights_only`
    state = {"count": int(table.stats(feature).count), "glob_mean": mvn.mean, "glob_std": mvn.std}
    file = io.BytesIO()
    torch.save(state, file)
    write_durably(Path(path), file.getvalue())


def use_loader(
    brain: Brain, loader: FeatureLoader[object], stage: Stage, checkpoint_prefix: str | None
) -> None:
    """Make a Brain tell the loader each epoch, and its Checkpointer save where it is."""
    if stage == Stage.TRAIN:
        brain.train_sampler = loader  # `Brain.fit` calls its set_epoch
    if brain.checkpointer is not None and checkpoint_prefix is not None:
        brain.checkpointer.add_recoverable(checkpoint_prefix + stage.name, loader)


@main_process_only  # type: ignore[untyped-decorator]  # the state is the same on all ranks
def _save(loader: FeatureLoader[object], path: Path) -> None:
    Path(path).write_text(json.dumps(loader.state_dict()) + "\n")


def _load(loader: FeatureLoader[object], path: Path, end_of_epoch: bool) -> None:
    if end_of_epoch:
        return  # the next epoch begins anew
    try:
        state = json.loads(Path(path).read_text())
        if not isinstance(state, Mapping):
            raise ValueError("no state")
    except ValueError as error:
        raise StateError(
            f"{str(path)!r} holds no state of a FeatureLoader; delete this checkpoint"
        ) from error
    loader.load_state_dict(state)


DEFAULT_SAVE_HOOKS[FeatureLoader] = _save
DEFAULT_LOAD_HOOKS[FeatureLoader] = _load

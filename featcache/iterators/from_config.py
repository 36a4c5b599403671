"""`build_iter_factory`: factories as ESPnet3's `dataloader` configuration declares them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from featcache.errors import ConfigError, nearest
from featcache.iterators.dataset_input import ItemDataset
from featcache.iterators.multiple import IterFactory, ShardedIterFactory

KEYS = ("iter_factory", "multiple_iterator", "num_shards")
SHARD = "{shard_idx}"


def build_iter_factory(config: Mapping[str, object], dataset: ItemDataset) -> IterFactory:
    """Make what a block such as `dataloader.train` of an ESPnet3 configuration declares.

    Args:
        config: "iter_factory", with "_target_" and arguments (nested ones too); with
            "multiple_iterator: true" an epoch takes one of "num_shards" shards, whose number stands
            for `{shard_idx}` in any text. A dict, or OmegaConf's.
        dataset: data set of all shards.

    Raises `ConfigError` for what is not such a block, or names what cannot be imported.

    >>> target = "featcache.iterators.SequenceIterFactory"
    >>> block = {"iter_factory": {"_target_": target, "batches": [["a"]]}}
    >>> [ids for ids, batch in build_iter_factory(block, {"a": ("a", {})}).build_iter(epoch=1)]
    [('a',)]
    """
    for name in config:
        if name not in KEYS:
            raise ConfigError(
                f"a block with an iter_factory has no {name!r}; {nearest(name, KEYS)}"
            )
    declared, shards = config.get("iter_factory"), config.get("num_shards", 1)
    if not isinstance(declared, Mapping):
        raise ConfigError(f"iter_factory is a block with a _target_, not {declared!r}")
    build = partial(_shard_factory, declared, dataset)
    if not config.get("multiple_iterator", False):
        if shards != 1:
            raise ConfigError(f"num_shards is {shards!r}, for which multiple_iterator must be true")
        return build(None)
    if shards != 1 and not _mentions(declared):
        raise ConfigError(
            f"with {shards!r} shards, shape_files or another argument must name {SHARD!r}"
        )
    return ShardedIterFactory(build, shards)  # type: ignore[arg-type]


def _shard_factory(
    declared: Mapping[str, object], dataset: ItemDataset, shard: int | None
) -> IterFactory:
    factory: IterFactory = _called(declared, {**_arguments(declared, shard), "dataset": dataset})
    return factory


def _arguments(declared: Mapping[str, object], shard: int | None) -> dict[str, Any]:
    for name in declared:
        if name.startswith("_") and name != "_target_":
            raise ConfigError(
                f"{name!r} of a configuration is not understood here; make the object with Hydra"
            )
    return {name: _made(value, shard) for name, value in declared.items() if name != "_target_"}


def _made(value: object, shard: int | None) -> object:
    """Return a value of the configuration with objects made of blocks that have a `_target_`."""
    if isinstance(value, str):
        return value if shard is None else value.replace(SHARD, str(shard))
    if isinstance(value, Mapping):
        arguments = _arguments(value, shard)
        return _called(value, arguments) if "_target_" in value else arguments
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_made(item, shard) for item in value]
    return value


def _called(declared: Mapping[str, object], arguments: dict[str, Any]) -> Any:
    target = str(declared.get("_target_"))
    module, _, name = target.rpartition(".")
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"_target_ {target!r} cannot be imported: {error}") from error
    return function(**arguments)


def _mentions(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_mentions, value.values()))
    if isinstance(value, str) or not isinstance(value, Sequence):
        return isinstance(value, str) and SHARD in value
    return any(map(_mentions, value))

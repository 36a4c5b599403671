"""`DynamicItems`: items that a SpeechBrain data set computes of an utterance, by id, in threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from featcache.errors import ConfigError, KeyNotFoundError, nearest


class DynamicItems:
    """Some items of a `DynamicItemDataset` by utterance id, and nothing else computed.

    The data set itself stays as it is, its output keys too. Threads may ask at a time: each has a
    pipeline of its own, since one that runs a generator is not to be shared. Picklable if the data
    and the functions of these items are.

    Args:
        dataset: the data set.
        keys: of its entries or dynamic items; as a mapping, from the names that they get; its
            output keys, as they are now, if None.

    Raises `ConfigError` for another data set, and for a key that it does not have.
    """

    def __init__(self, dataset: Any, keys: Iterable[str] | Mapping[str, str] | None = None) -> None:
        pipeline: Any = getattr(dataset, "pipeline", None)
        if not is_dynamic(dataset):
            kind = type(dataset).__name__
            raise ConfigError(f"a DynamicItemDataset of SpeechBrain is needed, not {kind!r}")
        keys = pipeline.output_mapping if keys is None else keys
        keys = [keys] if isinstance(keys, str) else keys
        self.keys = dict(keys) if isinstance(keys, Mapping) else {key: key for key in keys}
        for key in self.keys.values():
            if key not in pipeline.key_to_node:
                known = nearest(key, pipeline.key_to_node)
                raise ConfigError(f"the data set has no key {key!r}; {known}")
        self._data: Mapping[str, Mapping[str, Any]] = dataset.data
        self._static, self._items = _needed(pipeline, self.keys.values())
        self._pipelines = threading.local()

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The functions that compute the items, those of what they take included."""
        return [item.func for item in self._items]

    def of(self, id: str, less: Iterable[str] = ()) -> dict[str, Any]:
        """Return the items of an utterance, except those of the names `less`.

        Raises `KeyNotFoundError` for an id that the data set does not have.
        """
        entry = self._data.get(id)
        if entry is None:
            hint = partial(nearest, id, self._data)
            raise KeyNotFoundError(f"the data set has no utterance {id!r}", hint=hint)
        wanted = tuple(name for name in self.keys if name not in less)
        made: Any = self._pipelines
        if getattr(made, "wanted", None) != wanted:
            made.wanted, made.pipeline = wanted, self._pipeline(wanted)
        found: dict[str, Any] = made.pipeline.compute_outputs({**entry, "id": id})
        return found

    def _pipeline(self, wanted: Iterable[str]) -> Any:
        from speechbrain.utils.data_pipeline import DataPipeline

        names = {name: self.keys[name] for name in wanted}
        return DataPipeline(self._static, list(map(_unused, self._items)), names)

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in vars(self).items() if key != "_pipelines"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._pipelines = threading.local()


def is_dynamic(dataset: object) -> bool:
    """Say whether something is a `DynamicItemDataset`, or made like one."""
    return hasattr(getattr(dataset, "pipeline", None), "key_to_node") and isinstance(
        getattr(dataset, "data", None), Mapping
    )


def _needed(pipeline: Any, keys: Iterable[str]) -> tuple[list[str], list[Any]]:
    """Return the keys of entries and the dynamic items that some keys are made of.

    Raises `ConfigError` where an item takes what nothing provides.
    """
    order = pipeline.dg.get_evaluation_order(pipeline.get_selected_node_ids(keys))
    nodes = [node.data for node in order]
    static = [node.key for node in nodes if not hasattr(node, "takes")]
    chosen = {id(node) for node in nodes if hasattr(node, "takes")}
    items = [item for item in pipeline.dynamic_items if id(item) in chosen]
    for key in (key for item in items for key in item.takes):
        if key not in pipeline.key_to_node:
            known = nearest(key, pipeline.key_to_node)
            raise ConfigError(f"a dynamic item takes {key!r}, which the data set lacks; {known}")
    return static, items


def _unused(item: Any) -> Any:
    """Return a copy of a dynamic item, which has not begun to generate anything."""
    item = copy.copy(item)
    if hasattr(item, "current_generator"):
        item.current_generator, item.num_provided_items = None, 0
    return item

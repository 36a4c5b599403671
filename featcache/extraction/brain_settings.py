"""Split, stage, storage and settings of a run, as a `Brain` or the like tells them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from featcache.errors import ConfigError
from featcache.staleness.extractors import hparams_of
from featcache.storage import FeatureStorage


def split_and_stage(extractor: object, split: str | None, stage: Any) -> tuple[str, Any]:
    """Return the split and the stage; what is not given follows from the other."""
    if split is None:
        split = "train" if stage is None else name_of(stage).lower()
    if stage is not None:
        return split, stage
    core = sys.modules.get("speechbrain.core")  # a Brain can only come from a loaded SpeechBrain
    if core is None or not isinstance(extractor, core.Brain):
        return split, split
    kinds = {"valid": "VALID", "dev": "VALID", "test": "TEST"}
    found = [name for prefix, name in kinds.items() if split.lower().startswith(prefix)]
    return split, core.Stage[found[0] if found else "TRAIN"]


def name_of(stage: object) -> str:
    """Return the name of a stage, SpeechBrain's or any other."""
    return str(getattr(stage, "name", stage))


def find_storage(extractor: object) -> FeatureStorage:
    """Return the one storage in the hparams; raises `ConfigError` if that is not to be found."""
    hparams = hparams_of(extractor)
    found = {name: value for name, value in hparams.items() if isinstance(value, FeatureStorage)}
    if len(set(map(id, found.values()))) == 1:
        return next(iter(found.values()))
    there = "there are no hparams"
    if found:
        there = f"they have several: {', '.join(map(repr, found))}"
    elif hparams:
        there = f"they have none, only {', '.join(map(repr, hparams))}"
    for name, value in hparams.items():  # above all a declaration whose `!new:` was forgotten
        if not found and isinstance(value, Mapping) and {"root", "features"} <= value.keys():
            there = f"{name!r} is a plain dict: in YAML write {name}: !new:featcache.FeatureStorage"
    raise ConfigError(
        f"give storage=, a FeatureStorage, or declare exactly one in hparams; {there}"
    )


def settings_of(extractor: object) -> dict[str, object]:
    """Return what counts for features whatever `compute_features` names."""
    settings: dict[str, object] = {}
    if isinstance(precision := getattr(extractor, "eval_precision", None), str):
        settings["precision"] = precision
    hparams = hparams_of(extractor)
    if isinstance(sample_rate := hparams.get("sample_rate"), int | float):
        settings["sample_rate"] = sample_rate
    return settings

"""A cache compared with what a `Brain`, or the like, would compute now."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from featcache.extraction.brain_environment import (
    collate_fn_of,
    computing,
    probe_source_of,
    provenance_of,
)
from featcache.extraction.brain_settings import (
    find_storage,
    name_of,
    settings_of,
    split_and_stage,
)
from featcache.extraction.checking import Checking, check_of
from featcache.extraction.datasets import check_source, visible_ids
from featcache.extraction.destination import Destination
from featcache.extraction.random_state import kept_random_state
from featcache.extraction.record import Record
from featcache.extraction.shares import shares_of
from featcache.staleness.witnesses import witnesses
from featcache.storage import FeatureStorage


def compare(
    extractor: Any,
    dataset: object,
    stage: object,
    split: str | None,
    storage: FeatureStorage | None,
    kwargs: Mapping[str, object],
    fingerprint: Mapping[str, object],
    check: int | Literal["probe", "all"],
) -> None:
    """Compare the cache of a split, and write nothing; see `FeatureCacheMixin.check_features`."""
    check_source(dataset)
    split, stage = split_and_stage(extractor, split, stage)
    storage = find_storage(extractor) if storage is None else storage
    again = partial(provenance_of, extractor, collate_fn_of(dataset, kwargs))
    made_with = again()
    made_from = {"stage": name_of(stage), **settings_of(extractor), **fingerprint}
    with kept_random_state(), computing(made_with, again):
        for share in shares_of(storage, split, overwrite=False):
            ids = visible_ids(dataset)
            to = Destination(storage, split, ids, False, False, shared=True, share=share)
            source = probe_source_of(
                extractor, dataset, stage, kwargs, to, mentioned=made_with.mentioned
            )
            record = Record(to, partial(witnesses, made_with, extractor, dataset))
            checking = Checking(to, source, check_of(check), record)
            checking.compare_only(made_with.fingerprint(made_from))

"""Loaders of a `Brain`: its own method makes them, but of a `FeatureLoader`, which is one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from featcache.loading.loader import FeatureLoader


def taking_loaders(make: Callable[..., Any], of_loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method `make_dataloader`: `of_loader` for a `FeatureLoader`, else `make`."""

    @functools.wraps(make)
    def make_dataloader(self: Any, dataset: Any, stage: Any, *args: Any, **kwargs: Any) -> Any:
        method = of_loader if isinstance(dataset, FeatureLoader) else make
        return method(self, dataset, stage, *args, **kwargs)

    return make_dataloader

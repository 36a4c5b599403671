"""Groups of features that share the containers of a part."""

from __future__ import annotations

from collections.abc import Mapping

from featcache.declaration.feature_config import FeatureStorageConfig


def container_groups(features: Mapping[str, FeatureStorageConfig]) -> list[tuple[str, list[str]]]:
    """Say which features share containers: (directory within the part, with a slash, names).

    Features with the same backend and the same options of it share. Where one backend has several
    groups, each has a directory of its own, named after its first feature; else that is "".
    """
    groups: dict[tuple[str, object], list[str]] = {}
    for name, feature in features.items():
        groups.setdefault((feature.backend, feature.make_backend()), []).append(name)
    backends = [backend for backend, _ in groups]
    return [
        ("" if backends.count(backend) == 1 else f"{names[0]}/", names)
        for (backend, _), names in groups.items()
    ]

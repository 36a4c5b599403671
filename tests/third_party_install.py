"""Installs a storage format of a stranger for a test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from featcache.registry import BACKENDS, CODECS

SOURCE = Path(__file__).with_name("third_party_format.py").read_text()


def install(
    site: Path, distribution: str, entry_points: Mapping[str, Mapping[str, str]], **modules: str
) -> None:
    """Put a package into a directory as pip would."""
    for name, source in modules.items():
        (site / f"{name}.py").write_text(source)
    info = site / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(lines))


def install_flat(site: Path, name: str = "flat", source: str = SOURCE) -> None:
    module, codec = f"{name}_format", "squeeze" if name == "flat" else f"squeeze_{name}"
    entry_points = {
        BACKENDS: {name: f"{module}:FlatBackend"},
        CODECS: {codec: f"{module}:SqueezeCodec"},
    }
    install(site, name, entry_points, **{module: source.replace('"squeeze"', repr(codec))})

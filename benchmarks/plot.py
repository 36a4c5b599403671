"""Draw the figures that `load.py` wrote: GB/s of padded batches, warm and cold beside each other.

python benchmarks/plot.py results.json results.png
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

COLOURS = {"ours": "#1f6fb4", "peer": "#d98032", "limit": "#9a9a9a"}
# in this order
NAMES = {"limit": "limits: plain copies", "ours": "featcache", "peer": "other libraries"}


@click.command()
@click.argument("figures", type=click.Path(path_type=Path, exists=True))
@click.argument("picture", type=click.Path(path_type=Path))
def main(figures: Path, picture: Path) -> None:
    """Draw FIGURES, the JSON of `load.py`, as PICTURE."""
    draw(json.loads(figures.read_text()), picture)


def draw(content: dict[str, Any], picture: Path) -> None:
    """Draw one row of bars for each method, the fastest on top within each kind."""
    kinds = {name: row[0] for name, row in content["warm"].items()}
    first = list(NAMES).index
    order = sorted(kinds, key=lambda name: (first(kinds[name]), -median(content, "warm", name)))
    places = np.cumsum([0.0, *(1.0 if kinds[a] == kinds[b] else 1.7 for a, b in pairwise(order))])
    figure, axes = plt.subplots(
        1, 2, sharey=True, figsize=(13, 0.36 * len(order) + 1.9), layout="constrained"
    )
    for axis, table, title in zip(
        axes, ("warm", "cold"), ("warm page cache", "cold, from disk"), strict=True
    ):
        bars(axis, content, table, dict(zip(order, places.tolist(), strict=True)), kinds)
        axis.set_title(title, fontsize=11)
    axes[0].set_yticks(places, order, fontsize=9)
    axes[0].margins(y=0.01)
    axes[0].invert_yaxis()
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in NAMES]
    axes[1].legend(handles=handles, loc="lower right", frameon=False)
    figure.suptitle(
        "Padded batches of random utterances, GB/s (median, line: quartiles)", fontsize=13
    )
    figure.supxlabel(
        f"{content['data']}\n{content['about'].splitlines()[0]}", fontsize=8, color="#555555"
    )
    figure.savefig(picture, dpi=110)


def median(content: dict[str, Any], table: str, name: str) -> float:
    """Return the median rate of a method."""
    return float(np.median(content[table][name][1:]))


def bars(
    axis: Axes, content: dict[str, Any], table: str, places: dict[str, float], kinds: dict[str, str]
) -> None:
    """Draw the bars of one table with their figures."""
    shown = {name: place for name, place in places.items() if name in content[table]}
    widest = max(float(np.percentile(content[table][name][1:], 75)) for name in shown)
    for name, place in shown.items():
        low, middle, high = np.percentile(content[table][name][1:], (25, 50, 75))
        axis.barh(place, middle, height=0.78, color=COLOURS[kinds[name]])
        axis.plot([low, high], [place, place], color="#222222", linewidth=1)
        axis.text(high + widest * 0.015, place, f"{middle:.2f}", va="center", fontsize=8.5)
    axis.set_xlim(0, widest * 1.12)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)


if __name__ == "__main__":
    main()

"""`featcache.taps` beside a forward pass that is cut by hand: HuBERT base, layers 6 and 9 of 12.

    python benchmarks/taps.py [--batches 20] [--utterances 4] [--seconds 10]

The weights are random. Each batch has new lengths, within 5 % of each other, as batches of an
extraction have; the two ways take turns on one thread, in the time of the processor. Values and
lengths have to be equal.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from machine import describe

import featcache

LAYERS = (6, 9)
RATE_HZ = 16_000
Found = tuple[list[int], list[torch.Tensor]]


@click.command()
@click.option("--batches", default=20, show_default=True)
@click.option("--utterances", default=4, show_default=True)
@click.option("--seconds", default=10.0, show_default=True, help="Of the longest batch.")
def main(batches: int, utterances: int, seconds: float) -> None:
    """Print the median time of both, and that of their ratios."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(describe(Path(), "torch", "transformers"))
    hubert: Any = transformers.HubertModel  # its annotations fit no strict check
    model = hubert(transformers.HubertConfig()).eval()
    tapped = featcache.taps(model, [f"encoder.layers.{layer}" for layer in LAYERS])

    def by_tapping(waves: torch.Tensor, lengths: list[int]) -> Found:
        frames, features = tapped(waves, lengths)
        return next(iter(frames.values())), [*features.values()]

    ways: dict[str, Callable[[torch.Tensor, list[int]], Found]] = {
        "by hand": lambda waves, lengths: by_hand(model, waves, lengths),
        "taps": by_tapping,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(batches + 1):  # the first one is no part of it
        longest = int(seconds * RATE_HZ * (0.3 + 0.7 * float(torch.rand(()))))
        drawn = torch.randint(int(0.95 * longest), longest, (utterances - 1,)).tolist()
        waves, found = torch.randn(utterances, longest), {}
        for name in sorted(ways, reverse=number % 2 == 0):
            begin = time.process_time()
            found[name] = ways[name](waves, [longest, *drawn])
            times[name].append(time.process_time() - begin)
        one, other = found.values()
        assert one[0] == other[0]
        assert all(map(torch.equal, one[1], other[1]))
    for name, taken in times.items():
        print(f"{name:8} {statistics.median(taken[1:]):.3f} s a batch")
    ratios = [a / b for a, b in zip(times["taps"][1:], times["by hand"][1:], strict=True)]
    print(f"taps / by hand: {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")


@torch.no_grad()
def by_hand(model: Any, waves: torch.Tensor, lengths: list[int]) -> Found:
    """Run the encoder up to the last layer, and compute lengths by its own formula."""
    hidden = model.feature_projection(model.feature_extractor(waves).transpose(1, 2))
    hidden = model.encoder.layer_norm(hidden + model.encoder.pos_conv_embed(hidden))
    found = []
    for number, layer in enumerate(model.encoder.layers[: LAYERS[-1] + 1]):
        hidden = layer(hidden)
        if number in LAYERS:
            found.append(hidden)
    formula = model._get_feat_extract_output_lengths
    return formula(torch.tensor(lengths)).tolist(), found


if __name__ == "__main__":
    main()

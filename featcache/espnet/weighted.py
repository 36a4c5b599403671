"""ESPnet's batches drawn by a weight of each utterance, with replacement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.espnet.arrays import Floats, Ints
from featcache.espnet.categories import drawn_by, require_either
from featcache.espnet.shapes import NumberedUtterances, read_table

Weights = Sequence[float] | NDArray[np.floating] | NDArray[np.integer]


def named_by_weights(path: str) -> NumberedUtterances:
    """Return the utterances that a file of weights names, without lengths."""
    keys = read_table(path).keys
    return NumberedUtterances(f"weight file {path!r}", len(keys), [], keys)


def drawn_rows(
    found: NumberedUtterances,
    utt2weight_file: str | None,
    weights: Weights | None,
    kept: Ints | None,
    seed: int,
) -> Ints:
    """Draw as many of the `kept` rows (None: all) as have a weight, each by its share of them.

    A file has an utterance and its weight on each line, of all utterances where these have lengths;
    the draws go by its ids in order, as ESPnet's do.

    Raises `ConfigError` for weights that cannot be drawn by.
    """
    require_either("utt2weight_file", utt2weight_file, "weights", weights)
    if weights is not None:
        rows, shares = np.arange(found.count), np.asarray(weights, np.float64)
        if shares.shape != (found.count,):
            raise ConfigError(f"weights has shape {shares.shape} for {found.count} utterances")
        where = "weights"
    else:
        where = f"weight file {str(utt2weight_file)!r}"
        rows, shares = _read_weights(found, str(utt2weight_file), where)
    if kept is not None:
        chosen = np.isin(rows, kept)
        rows, shares = rows[chosen], shares[chosen]
    total = np.sum(shares)
    if not (np.isfinite(shares).all() and shares.min(initial=0) >= 0 and 0 < total < np.inf):
        raise ConfigError(f"{where}: weights are numbers from 0 on, with a finite sum above 0")
    uniform = np.random.RandomState(seed).random_sample(len(rows))
    return rows[drawn_by(shares / total, uniform)]


def _read_weights(found: NumberedUtterances, path: str, where: str) -> tuple[Ints, Floats]:
    """Return the rows that a file names, in the order of their ids, and their weights."""
    table = read_table(path)
    keys, values = table.keys, []
    for line in range(len(table)):
        try:
            values.append(float(table.value(line).split(" ")[0]))
        except ValueError:
            raise ConfigError(
                f"{where}, line {line + 1}: a number is needed after {keys[line]!r}, not "
                f"{table.value(line)!r}"
            ) from None
    rows = found.rows(keys, np.arange(len(table)), where)
    if found.shapes and len(rows) < found.count:
        raise ConfigError(f"{where} has weights of {len(rows)} of {found.count} utterances")
    order = sorted(range(len(keys)), key=keys[:].__getitem__)
    return rows[order], np.array(values)[order]

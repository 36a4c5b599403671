"""The two builders of batch samplers, with ESPnet's names, arguments and batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache import FeatureTable
from featcache.errors import ConfigError
from featcache.espnet.by_size import (
    Descending,
    binned_batches,
    folded_batches,
    folded_sizes,
    sorted_batches,
    unsorted_batches,
)
from featcache.espnet.categories import (
    CategoryLimits,
    balanced_batches,
    categorized,
    category_pools,
    count,
    dataset_members,
    dataset_pools,
    drawn_by,
    epoch_seed,
    power_batches,
    require_either,
    require_type,
)
from featcache.espnet.shapes import (
    Floats,
    Ints,
    Labels,
    NumberedUtterances,
    Shapes,
    category_codes,
    codes_of,
    elements,
    read_table,
    require_one_frame_shape,
    utterances_of,
)
from featcache.samplers import Batches, LengthsLike

Weights = Sequence[float] | NDArray[np.floating] | NDArray[np.integer]

_TYPES = ("unsorted", "sorted", "folded", "length", "numel", "weighted", "length_weighted")
_UNSORTED, _WEIGHTED = ("unsorted", "weighted"), ("weighted", "length_weighted")
_BINNED = ("length", "numel", "length_weighted")
RELEASES = ("202511", "202611")  # of ESPnet, whose batches differ
_CATEGORY_TYPES = ("catbel", "catpow", "catpow_balance_dataset")


def build_batch_sampler(
    type: str,
    batch_size: int | None = None,
    batch_bins: int | None = None,
    shape_files: Sequence[str] | None = None,
    sort_in_batch: str = "descending",
    sort_batch: str = "ascending",
    drop_last: bool = False,
    min_batch_size: int = 1,
    fold_lengths: Sequence[int] = (),
    padding: bool = True,
    utt2category_file: str | None = None,
    *,
    utt2weight_file: str | None = None,
    filtered_key_file: str | None = None,
    lengths: LengthsLike | None = None,
    categories: Labels | None = None,
    weights: Weights | None = None,
    epoch: int = 1,
    release: str = "202511",
) -> Batches:
    """Cut utterances into batches, the same as ESPnet's function of this name, id for id.

    Args:
        type: "unsorted" or "sorted" (batches of `batch_size`), "folded" (fewer utterances where
            they are longer than `fold_lengths`), "length" or "numel" (batches of about `batch_bins`
            frames, or numbers), "weighted" and "length_weighted" (as many utterances as there are,
            drawn by their weights, in batches of `batch_size` or as "length" cuts them).
        batch_size: utterances of a batch, for the first three types and "weighted".
        batch_bins: the other types close a batch with the utterance that makes it larger than this.
        shape_files: files of an utterance and its length or shape ("utt-1 575,80") on each line;
            batches then hold ids.
        sort_in_batch: "descending" or "ascending", by length of the first shape file, within a
            batch.
        sort_batch: the same for the order of the batches.
        drop_last: leave out the utterances that do not fill a last batch, unless it is the only
            one.
        min_batch_size: a smaller last batch is shared among the others.
        fold_lengths: one length for each shape file.
        padding: whether a batch counts as padded to its longest utterance, for "length" and
            "numel".
        utt2category_file: "folded" batches hold one category each; other types ignore it, as in
            ESPnet.
        utt2weight_file: an utterance and its weight on each line. "weighted" reads the utterances
            from here, not from the shape files; "length_weighted" needs a weight of each.
        filtered_key_file: an utterance on each line, which is left out; others are passed over.
        lengths: in place of shape files: a cache, a `FeatureTable`, a data set with a `.table`, an
            integer array of lengths (utterances,) or shapes (utterances, dims), or a list of those;
            batches then hold row numbers. Each feature with a time axis counts as a shape file.
        categories: labels of all rows: "unsorted" and "folded" batches then hold one category each.
        weights: weights of all rows, in place of `utt2weight_file`.
        epoch: seeds the draws of the weighted types, from 1 on: how often ESPnet's sampler, which
            draws anew each time, has been iterated over.
        release: "202511", or "202611" for the "folded" batches of that release: `drop_last` leaves
            out the rest of each category, a short last batch is shared from the last one on.

    Raises `ConfigError` for what cannot be batched; for files with the line.

    >>> list(build_batch_sampler("sorted", batch_size=2, lengths=[30, 10, 20, 50]))
    [[2, 1], [3, 0]]
    """
    require_type(type, _TYPES, "build_category_batch_sampler", _CATEGORY_TYPES)
    _require_used(type, categories, weights, release)
    most = count("batch_bins", batch_bins) if type in _BINNED else count("batch_size", batch_size)
    minimum = count("min_batch_size", min_batch_size)
    way = Descending() if type in _UNSORTED else Descending.of(sort_in_batch, sort_batch)
    cutter = _Cutter(type, most, minimum, drop_last, padding, way, fold_lengths, release)
    found = _found(type, shape_files, lengths, utt2weight_file)
    codes = _codes(found, categories, utt2category_file if type == "folded" else None)
    rows = None if filtered_key_file is None else found.without(str(filtered_key_file))
    if type in _WEIGHTED:
        # ESPnet's "length_weighted" has drawn once more, when it was made
        seed = epoch_seed(epoch_seed(epoch) - (type == "weighted"))
        rows = drawn_rows(found, utt2weight_file, weights, rows, seed)
    if rows is None:
        return found.batches(cutter.cut(found.count, found.shapes, codes))
    shapes = [shape.take(rows) for shape in found.shapes]
    cut = cutter.cut(len(rows), shapes, None if codes is None else codes[rows])
    return found.batches(Batches(rows[cut.items], cut.ends))


def _require_used(
    type: str, categories: Labels | None, weights: Weights | None, release: str
) -> None:
    """Raise `ConfigError` for labels or weights that a type does not use, and unknown releases."""
    if categories is not None and type not in ("unsorted", "folded"):
        raise ConfigError(
            f"batches of one category each are made by 'unsorted' and 'folded', not by {type!r}"
        )
    if weights is not None and type not in _WEIGHTED:
        raise ConfigError(
            f"batches are drawn by weights by {' and '.join(map(repr, _WEIGHTED))}, not by {type!r}"
        )
    if release not in RELEASES:
        raise ConfigError(f"release is one of {', '.join(RELEASES)}, not {release!r}")


@dataclass(frozen=True)
class _Cutter:
    """Arguments of `build_batch_sampler` that say where batches end."""

    type: str
    most: int
    minimum: int
    drop_last: bool
    padding: bool
    way: Descending
    fold_lengths: Sequence[int]
    release: str

    def cut(self, count: int, shapes: list[Shapes], codes: Ints | None) -> Batches:
        """Cut `count` rows, which have these shapes and codes of categories."""
        if self.type == "unsorted":
            return unsorted_batches(count, codes, self.most, self.drop_last)
        if self.type == "weighted":
            return Batches(np.arange(count), np.append(np.arange(0, count, self.most), count))
        frames = shapes[0].lengths
        if self.type == "sorted":
            return sorted_batches(frames, self.most, self.drop_last, self.way)
        few = self.minimum, self.drop_last
        if self.type in _BINNED:
            counts = _counts(shapes, self.type == "numel", self.padding)
            return binned_batches(frames, counts, self.most, *few, self.padding, self.way)
        sizes = folded_sizes(shapes, self.fold_lengths, self.most, self.minimum)
        return folded_batches(frames, codes, sizes, *few, self.way, self.release == RELEASES[0])


def _found(
    type: str,
    shape_files: Sequence[str] | None,
    lengths: LengthsLike | None,
    utt2weight_file: str | None,
) -> NumberedUtterances:
    """Return the utterances, with the lengths that a type needs."""
    if type == "weighted" and lengths is None and utt2weight_file is not None:
        return named_by_weights(str(utt2weight_file))
    if type in _UNSORTED:
        return utterances_of(shape_files, lengths, shaped=0)
    found = utterances_of(shape_files, lengths, shaped=1 if type == "sorted" else None)
    if not found.shapes:
        raise ConfigError(
            f"{found.name} has no feature with a time axis: there are no lengths to batch by"
        )
    return found


def _codes(
    found: NumberedUtterances, labels: Labels | None, utt2category_file: str | None
) -> Ints | None:
    """Return a number for the category of each row, by labels or by a file; None without both."""
    if utt2category_file is None:
        return None if labels is None else codes_of(labels, found.count, "categories")
    if labels is not None:
        raise ConfigError("give either utt2category_file or categories, not both")
    return category_codes(found, str(utt2category_file))


def _counts(shapes: list[Shapes], numbers: bool, padding: bool) -> Ints:
    """Return the frames, or the numbers, of each utterance over all features."""
    for one in shapes if numbers and padding else ():
        require_one_frame_shape(one)
    counts: Ints = np.sum([elements(one) if numbers else one.lengths for one in shapes], axis=0)
    return counts


def build_category_batch_sampler(
    type: str,
    batch_size: int | None = None,
    batch_bins: int | None = None,
    shape_files: Sequence[str] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    upsampling_factor: float = 1.0,
    category_upsampling_factor: float = 1.0,
    dataset_upsampling_factor: float = 1.0,
    dataset_scaling_factor: float = 1.2,
    drop_last: bool = False,
    category2utt_file: str | None = None,
    dataset2utt_parent_dir: str | None = None,
    epoch: int = 1,
    num_batches: int | None = None,
    distributed: bool = False,
    *,
    lengths: LengthsLike | None = None,
    categories: Labels | None = None,
    datasets: Labels | None = None,
) -> tuple[Batches, dict[str, object]]:
    """Draw batches by category for one epoch, the same as ESPnet's function of this name.

    Args:
        type: "catbel" (batches of `batch_size`, about as many of each category), "catpow"
            (categories are drawn by their share of frames to the power of `upsampling_factor`),
            "catpow_balance_dataset" (data sets are drawn first, then categories within).
        batch_size: utterances of a batch, for "catbel"; it uses none of the arguments up to
            `drop_last`.
        batch_bins: the other types close a batch with the utterance that makes it larger than this
            many frames.
        shape_files: one file of an utterance and its length on each line; batches then hold ids.
            Not for "catbel".
        min_batch_size: utterances that a batch has at least; a smaller last one is left out.
        max_batch_size: utterances that a batch has at most.
        upsampling_factor: from 0 (all categories alike) to 1 (as they are), for "catpow".
        category_upsampling_factor: the same for the categories of a data set, for
            "catpow_balance_dataset".
        dataset_upsampling_factor: the same for data sets.
        dataset_scaling_factor: frames to draw, over those that are there; from 1 on.
        drop_last: leave a last batch out that is not closed.
        category2utt_file: a category and its utterances on each line.
        dataset2utt_parent_dir: the folder of a file `dataset2utt` of a data set and its utterances
            on each line.
        epoch: seeds the draws, from 0 on.
        num_batches: only returned, for the iterator of the epochs.
        distributed: only returned, for the iterator of the epochs.
        lengths: in place of the shape file, as for `build_batch_sampler`; batches then hold row
            numbers.
        categories: labels of all rows, in place of `category2utt_file`.
        datasets: labels of all rows, in place of `dataset2utt_parent_dir`.

    Returns the batches and the arguments but `type`, from which another epoch's are built. Raises
    `ConfigError` for what cannot be batched, also if not one batch can be filled.

    >>> labels = ["a", "a", "a", "b", "b", "c"]
    >>> batches, arguments = build_category_batch_sampler("catbel", batch_size=2, categories=labels)
    >>> list(batches), list(build_category_batch_sampler("catbel", **arguments | {"epoch": 2})[0])
    ([[4, 5], [3, 0]], [[3, 1], [0, 5]])
    """
    # what the caller gave: nothing else has a name yet
    arguments = {name: value for name, value in locals().items() if name != "type"}
    require_type(type, _CATEGORY_TYPES, "build_batch_sampler", _TYPES)
    seed = epoch_seed(epoch)
    known = _utterances(type, shape_files, lengths)
    found, members = categorized(known, category2utt_file, categories)
    if type == "catbel":
        size = count("batch_size", batch_size)
        return found.batches(balanced_batches(members, size, seed)), arguments
    limits = CategoryLimits.of(batch_bins, min_batch_size, max_batch_size, drop_last)
    frames, scaling = found.shapes[0].lengths, dataset_scaling_factor
    if type == "catpow":
        pools = category_pools(frames, members, upsampling_factor, scaling)
    else:
        sets = dataset_members(found, dataset2utt_parent_dir, datasets)
        factors = category_upsampling_factor, dataset_upsampling_factor
        pools = dataset_pools(frames, members, sets, *factors, scaling)
    return found.batches(power_batches(frames, pools, limits, seed)), arguments


def _utterances(
    type: str, shape_files: Sequence[str] | None, lengths: LengthsLike | None
) -> NumberedUtterances | None:
    """Return the utterances, with one length each if it is needed; None for those of categories."""
    if type == "catbel":
        return None if lengths is None else utterances_of(None, lengths, shaped=0)
    found = utterances_of(shape_files, lengths, separator=" ")
    several = found.shapes if not isinstance(found.ids, FeatureTable) else found.shapes[:1]
    if len(several) != 1:
        raise ConfigError(
            f"{type!r} takes the lengths of one shape file, array or feature, not of {len(several)}"
        )
    return found


# Utterances drawn by a weight of each, with replacement.


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

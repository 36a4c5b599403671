"""The two builders of batch samplers, with ESPnet's names, arguments and batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from featcache import FeatureTable
from featcache.errors import ConfigError
from featcache.espnet.arrays import Ints
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
    epoch_seed,
    power_batches,
    require_type,
)
from featcache.espnet.shapes import (
    Labels,
    NumberedUtterances,
    category_codes,
    codes_of,
    elements,
    require_one_frame_shape,
    utterances_of,
)
from featcache.samplers import Batches, LengthsLike

_TYPES = ("unsorted", "sorted", "folded", "length", "numel")
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
    lengths: LengthsLike | None = None,
    categories: Labels | None = None,
) -> Batches:
    """Cut utterances into batches, the same as ESPnet's function of this name, id for id.

    Args:
        type: "unsorted" or "sorted" (batches of `batch_size`), "folded" (fewer utterances where
            they are longer than `fold_lengths`), "length" or "numel" (batches of about `batch_bins`
            frames, or numbers).
        batch_size: utterances of a batch, for the first three types.
        batch_bins: the last two types close a batch with the utterance that makes it larger than
            this.
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
        lengths: in place of shape files: a cache, a `FeatureTable`, a data set with a `.table`, an
            integer array of lengths (utterances,) or shapes (utterances, dims), or a list of those;
            batches then hold row numbers. Each feature with a time axis counts as a shape file.
        categories: labels of all rows: "unsorted" and "folded" batches then hold one category each.

    Raises `ConfigError` for what cannot be batched; for files with the line.

    >>> list(build_batch_sampler("sorted", batch_size=2, lengths=[30, 10, 20, 50]))
    [[2, 1], [3, 0]]
    """
    require_type(type, _TYPES, "build_category_batch_sampler", _CATEGORY_TYPES)
    if categories is not None and type not in ("unsorted", "folded"):
        raise ConfigError(
            f"batches of one category each are made by 'unsorted' and 'folded', not by {type!r}"
        )
    minimum = count("min_batch_size", min_batch_size)
    binned = type in ("length", "numel")
    most = count("batch_bins", batch_bins) if binned else count("batch_size", batch_size)
    if type == "unsorted":
        found = utterances_of(shape_files, lengths, shaped=0)
        codes = _codes(found, categories, None)
        return found.batches(unsorted_batches(found.count, codes, most, drop_last))
    way = Descending.of(sort_in_batch, sort_batch)
    found = _with_lengths(shape_files, lengths, 1 if type == "sorted" else None)
    frames = found.shapes[0].lengths
    if type == "sorted":
        return found.batches(sorted_batches(frames, most, drop_last, way))
    if binned:
        counts = _counts(found, type == "numel", padding)
        return found.batches(binned_batches(frames, counts, most, minimum, drop_last, padding, way))
    codes = _codes(found, categories, utt2category_file)
    sizes = folded_sizes(found.shapes, fold_lengths, most, minimum)
    return found.batches(folded_batches(frames, codes, sizes, minimum, drop_last, way))


def _with_lengths(
    shape_files: Sequence[str] | None, lengths: LengthsLike | None, shaped: int | None
) -> NumberedUtterances:
    found = utterances_of(shape_files, lengths, shaped=shaped)
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


def _counts(found: NumberedUtterances, numbers: bool, padding: bool) -> Ints:
    """Return the frames, or the numbers, of each utterance over all features."""
    for shapes in found.shapes if numbers and padding else ():
        require_one_frame_shape(shapes)
    counts: Ints = np.sum(
        [elements(shapes) if numbers else shapes.lengths for shapes in found.shapes], axis=0
    )
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

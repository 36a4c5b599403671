"""The two builders of batch samplers, with ESPnet's names, arguments and batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from featcache.errors import ConfigError, nearest
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.balanced import category_balanced_batches
from featcache.samplers.espnet.by_bins import binned_batches, element_counts, frame_counts
from featcache.samplers.espnet.by_size import folded_batches, sorted_batches, unsorted_batches
from featcache.samplers.espnet.categories import Members, labelled_members, read_members
from featcache.samplers.espnet.inputs import (
    Labels,
    NumberedUtterances,
    ShapesLike,
    category_codes,
    codes_of,
    utterances_of,
)
from featcache.samplers.espnet.power import (
    Limits,
    category_pools,
    dataset_pools,
    drawn_batches,
    shuffled,
)
from featcache.tables.table import FeatureTable

# shape files that count
_SHAPES = {"unsorted": 0, "sorted": 1, "folded": None, "length": None, "numel": None}
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
    lengths: ShapesLike | None = None,
    categories: Labels | None = None,
) -> Batches:
    """Cut utterances into batches, the same as ESPnet's function of this name, id for id.

    Args: type: "unsorted" or "sorted" (batches of `batch_size`), "folded" (fewer utterances where
        they are longer than
            `fold_lengths`), "length" or "numel" (batches of about `batch_bins` frames, or numbers).
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
    if type not in _SHAPES:
        raise _unknown(type, _SHAPES, "build_category_batch_sampler", _CATEGORY_TYPES)
    if categories is not None and type not in ("unsorted", "folded"):
        raise ConfigError(
            f"batches of one category each are made by 'unsorted' and 'folded', not by {type!r}"
        )
    minimum = _count("min_batch_size", min_batch_size)
    if type != "unsorted":
        _direction("sort_in_batch", sort_in_batch)
        _direction("sort_batch", sort_batch)
    found = utterances_of(shape_files, lengths, shaped=_SHAPES[type])
    if type != "unsorted" and not found.shapes:
        raise ConfigError(
            f"{found.name} has no feature with a time axis: there are no lengths to batch by"
        )
    codes = None if categories is None else codes_of(categories, found.count, "categories")
    if type == "unsorted":
        batches = unsorted_batches(found.count, _count("batch_size", batch_size), drop_last, codes)
    elif type == "sorted":
        size = _count("batch_size", batch_size)
        batches = sorted_batches(
            found.shapes[0].lengths, size, drop_last, sort_in_batch, sort_batch
        )
    elif type == "folded":
        folds = _folds(fold_lengths, found)
        if utt2category_file is not None:
            if codes is not None:
                raise ConfigError("give either utt2category_file or categories, not both")
            codes = category_codes(found, str(utt2category_file))
        size, all_lengths = (
            _count("batch_size", batch_size),
            [shapes.lengths for shapes in found.shapes],
        )
        batches = folded_batches(
            all_lengths, folds, size, minimum, drop_last, sort_in_batch, sort_batch, codes
        )
    else:
        bins = (
            frame_counts(found.shapes)
            if type == "length"
            else element_counts(found.shapes, padding)
        )
        most, by = _count("batch_bins", batch_bins), found.shapes[0].lengths
        batches = binned_batches(
            by, bins, most, minimum, drop_last, padding, sort_in_batch, sort_batch
        )
    return found.batches(batches)


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
    lengths: ShapesLike | None = None,
    categories: Labels | None = None,
    datasets: Labels | None = None,
) -> tuple[Batches, dict[str, object]]:
    """Draw batches by category for one epoch, the same as ESPnet's function of this name.

    Args: type: "catbel" (batches of `batch_size`, about as many of each category), "catpow"
        (categories are drawn by
            their share of frames to the power of `upsampling_factor`), "catpow_balance_dataset"
            (data sets are drawn first, then categories within).
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
    arguments: dict[str, object] = {
        name: value for name, value in locals().items() if name != "type"
    }
    if type not in _CATEGORY_TYPES:
        raise _unknown(type, _CATEGORY_TYPES, "build_batch_sampler", _SHAPES)
    seed = _epoch(epoch)
    if type == "catbel":
        return _balanced(
            _count("batch_size", batch_size), category2utt_file, lengths, categories, seed
        ), arguments
    limits = Limits(
        _count("batch_bins", batch_bins),
        _count("min_batch_size", min_batch_size),
        None if max_batch_size is None else _count("max_batch_size", max_batch_size),
        drop_last,
    )
    scaling = _factor("dataset_scaling_factor", dataset_scaling_factor, least=1)
    found = _with_one_length(type, shape_files, lengths)
    by_length = found.shapes[0].lengths
    members = _categories(found, category2utt_file, categories)
    if type == "catpow":
        pools = category_pools(
            by_length, members, _factor("upsampling_factor", upsampling_factor), scaling
        )
    else:
        within = _datasets(found, dataset2utt_parent_dir, datasets)
        factor = _factor("category_upsampling_factor", category_upsampling_factor)
        over = _factor("dataset_upsampling_factor", dataset_upsampling_factor)
        pools = dataset_pools(by_length, members, within, factor, over, scaling)
    pools = replace(pools, members=shuffled(pools.members, seed))
    batches = drawn_batches(by_length, pools, limits, seed)
    if len(batches) == 0:
        raise ConfigError(
            f"no batch could be made: fewer than {limits.min_batch_size} utterances "
            "(min_batch_size) were drawn"
            + (
                f", or none was larger than {limits.bins} frames (batch_bins) with drop_last=True"
                if drop_last
                else ""
            )
        )
    return found.batches(batches), arguments


def _balanced(
    batch_size: int,
    path: str | None,
    lengths: ShapesLike | None,
    categories: Labels | None,
    epoch: int,
) -> Batches:
    keys, found = None, None
    if lengths is not None:
        found = utterances_of(None, lengths, shaped=0)
        members = _categories(found, path, categories)
    else:
        _either("category2utt_file", path, "categories", categories)
        if path is not None:
            keys, members = read_members(str(path))
        elif categories is not None:
            members = labelled_members(categories, len(categories), "categories")
    batches = category_balanced_batches(members, batch_size, epoch)
    if len(batches) == 0:
        raise ConfigError(
            f"no batch of {batch_size} utterances (batch_size) can be filled from "
            f"{len(members.rows)} utterances of "
            f"{len(members.sizes)} categories with about as many of each; try a smaller batch_size"
        )
    return Batches(batches.items, batches.ends, keys) if found is None else found.batches(batches)


def _categories(found: NumberedUtterances, path: str | None, labels: Labels | None) -> Members:
    _either("category2utt_file", path, "categories", labels)
    if labels is not None:
        return labelled_members(labels, found.count, "categories")
    ids, members = read_members(str(path))
    return Members(found.rows(ids, members.codes, f"category file {str(path)!r}"), members.ends)


def _datasets(found: NumberedUtterances, folder: str | None, labels: Labels | None) -> Members:
    _either("dataset2utt_parent_dir", folder, "datasets", labels)
    if labels is not None:
        return labelled_members(labels, found.count, "datasets")
    path = str(Path(str(folder), "dataset2utt"))
    ids, members = read_members(path)
    rows = found.find(ids, f"data set file {path!r}")
    return members.renumbered(rows)  # utterances that are not there are passed over, as in ESPnet


def _with_one_length(
    type: str, shape_files: Sequence[str] | None, lengths: ShapesLike | None
) -> NumberedUtterances:
    found = utterances_of(shape_files, lengths, separator=" ")
    several = found.shapes if not isinstance(found.ids, FeatureTable) else found.shapes[:1]
    if len(several) != 1:
        raise ConfigError(
            f"{type!r} takes the lengths of one shape file, array or feature, not of {len(several)}"
        )
    return found


def _folds(fold_lengths: Sequence[int], found: NumberedUtterances) -> list[float]:
    if isinstance(fold_lengths, str) or not isinstance(fold_lengths, Sequence):
        raise ConfigError(
            f"fold_lengths is a list, a number for each shape file or feature, not {fold_lengths!r}"
        )
    folds: list[float] = list(fold_lengths)
    if len(folds) != len(found.shapes):
        names = ", ".join(shapes.name for shapes in found.shapes)
        raise ConfigError(
            f"{len(folds)} fold_lengths for {len(found.shapes)} lengths: one is needed for each of "
            f"{names}"
        )
    if not min(folds) > 0:
        raise ConfigError(f"fold_lengths are greater than 0, not {folds!r}")
    return folds


def _unknown(type: str, known: Iterable[str], other: str, others: Iterable[str]) -> ConfigError:
    if type in others:
        return ConfigError(f"batches of type {type!r} are made by {other}")
    return ConfigError(
        f"no batch sampler {type!r}; {nearest(type, known)}; {other} makes {', '.join(others)}"
    )


def _either(argument: str, value: object, other: str, labels: object) -> None:
    if (value is None) == (labels is None):
        found = "not both" if labels is not None else "none is given"
        raise ConfigError(f"give either {argument} or {other}, {found}")


def _direction(argument: str, value: str) -> None:
    if value not in ("ascending", "descending"):
        raise ConfigError(f"{argument} is 'ascending' or 'descending', not {value!r}")


def _count(argument: str, value: float | None) -> int:
    """Return an integer from 1 on; also from a float without a fraction, as YAML reads 1e6."""
    if value is None:
        raise ConfigError(f"{argument} is needed for this type of sampler")
    number = isinstance(value, int | float | np.integer) and not isinstance(value, bool)
    if not (number and value >= 1 and value % 1 == 0):
        raise ConfigError(f"{argument} is an integer from 1 on, not {value!r}")
    return int(value)


def _factor(argument: str, value: float, least: float = 0) -> float:
    if not isinstance(value, int | float) or not least <= value < math.inf:
        raise ConfigError(f"{argument} is a number from {least} on, not {value!r}")
    return value


def _epoch(epoch: int) -> int:
    if not isinstance(epoch, int | np.integer) or not 0 <= epoch < 2**32:
        raise ConfigError(f"epoch is an integer from 0 to 2**32 - 1, not {epoch!r}")
    return int(epoch)

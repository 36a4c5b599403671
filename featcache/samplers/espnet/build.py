"""The two builders of batch samplers, with ESPnet's names, arguments and batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec

from featcache.errors import ConfigError
from featcache.samplers.batches import Batches
from featcache.samplers.espnet.arguments import (
    count,
    epoch_seed,
    factor,
    require_type,
)
from featcache.samplers.espnet.balanced import CatBel
from featcache.samplers.espnet.by_bins import Binned
from featcache.samplers.espnet.by_size import Folded, Sorted, Unsorted
from featcache.samplers.espnet.categories import Categorized
from featcache.samplers.espnet.cut import Descending
from featcache.samplers.espnet.numbered_utterances import (
    Labels,
    NumberedUtterances,
    ShapesLike,
    category_codes,
    codes_of,
    utterances_of,
)
from featcache.samplers.espnet.power import CatPow, CatPowBalanced, Limits
from featcache.tables.table import FeatureTable

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
    lengths: ShapesLike | None = None,
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
    if type in ("length", "numel"):
        bins, way = count("batch_bins", batch_bins), Descending.of(sort_in_batch, sort_batch)
        elements = type == "numel"
        return _built(
            Binned(bins, minimum, drop_last, padding, elements, way), shape_files, lengths
        )
    size = count("batch_size", batch_size)
    if type == "unsorted":
        return _built(Unsorted(size, drop_last), shape_files, lengths, categories)
    way = Descending.of(sort_in_batch, sort_batch)
    if type == "sorted":
        return _built(Sorted(size, drop_last, way), shape_files, lengths)
    if utt2category_file is not None and categories is not None:
        raise ConfigError("give either utt2category_file or categories, not both")
    folded = Folded(size, minimum, drop_last, fold_lengths, way)
    return _built(folded, shape_files, lengths, categories, utt2category_file)


def _built(
    sampler: Unsorted | Sorted | Folded | Binned,
    shape_files: Sequence[str] | None,
    lengths: ShapesLike | None,
    categories: Labels | None = None,
    utt2category_file: str | None = None,
) -> Batches:
    found = utterances_of(shape_files, lengths, shaped=sampler.shaped)
    if sampler.shaped != 0 and not found.shapes:
        raise ConfigError(
            f"{found.name} has no feature with a time axis: there are no lengths to batch by"
        )
    codes = None if categories is None else codes_of(categories, found.count, "categories")
    if utt2category_file is not None:
        codes = category_codes(found, str(utt2category_file))
    return found.batches(sampler.batches(found, codes))


P = ParamSpec("P")


def _with_arguments(build: Callable[P, Batches]) -> Callable[P, tuple[Batches, dict[str, object]]]:
    """Return, beside the batches, all arguments of the call but `type`."""
    signature = inspect.signature(build)

    @wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> tuple[Batches, dict[str, object]]:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        arguments = {name: value for name, value in call.arguments.items() if name != "type"}
        return build(*args, **kwargs), arguments

    returned = "tuple[Batches, dict[str, object]]"
    built.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return built


@_with_arguments
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
) -> Batches:
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
    require_type(type, _CATEGORY_TYPES, "build_batch_sampler", _TYPES)
    seed = epoch_seed(epoch)
    if type == "catbel":
        found = _categorized(lengths, category2utt_file, categories)
        return CatBel(count("batch_size", batch_size)).batches(found, seed)
    limits = Limits.of(batch_bins, min_batch_size, max_batch_size, drop_last)
    scaling = factor("dataset_scaling_factor", dataset_scaling_factor, least=1)
    utterances = _with_one_length(type, shape_files, lengths)
    found = Categorized.of(utterances, category2utt_file, categories)
    if type == "catpow":
        upsampling = factor("upsampling_factor", upsampling_factor)
        return CatPow(limits, upsampling, scaling).batches(found, seed)
    found = found.with_datasets(dataset2utt_parent_dir, datasets)
    upsampling = factor("category_upsampling_factor", category_upsampling_factor)
    between = factor("dataset_upsampling_factor", dataset_upsampling_factor)
    return CatPowBalanced(limits, upsampling, between, scaling).batches(found, seed)


def _categorized(
    lengths: ShapesLike | None, category2utt_file: str | None, labels: Labels | None
) -> Categorized:
    if lengths is None:
        return Categorized.alone(category2utt_file, labels)
    return Categorized.of(utterances_of(None, lengths, shaped=0), category2utt_file, labels)


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

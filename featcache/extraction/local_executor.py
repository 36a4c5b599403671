"""One pass over a data set in this process, on one or several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from functools import partial

import torch

from featcache._closing import closed_after
from featcache.errors import ConfigError
from featcache.extraction.computation import Computation
from featcache.extraction.dataset_batches import DatasetBatches, LoadedBatch, batches_of_stream
from featcache.extraction.datasets import named
from featcache.extraction.outcomes import Outcome, ProgressBar
from featcache.extraction.process_part import ProcessPart
from featcache.extraction.run import Publish, Run, check_lengths, longest_first
from featcache.extraction.while_filling import WhileFilling
from featcache.interface import Ints
from featcache.staleness.watch import Watch
from featcache.writing.part_writer import PartWriter


def compute_here(
    run: Run, watch: Watch, missing: Ints | None, bar: ProgressBar, publish_if_due: Publish
) -> Outcome:
    """Compute and store utterances; whatever happens, all parts are sealed in the end.

    Args:
        run: what is computed, and where it is stored.
        watch: compares what features are made with.
        missing: their numbers in the data set; None: whatever comes of the data set.
        bar: progress and failures are reported to it.
        publish_if_due: to be called often, with what seals the parts of this process.
    """
    job, options, ids = run.job, run.options, run.opened.ids
    part, filling = ProcessPart(), WhileFilling(run.destination.path, watch)
    # not inference_mode, as in `FeatureCacheMixin`
    with closed_after(part.finish), torch.no_grad():
        # nobody writes before all ranks can
        writer, batches = run.ranks.each(partial(_open, run, missing, part, filling))
        computation = Computation(
            job.compute,
            batches if isinstance(batches, DatasetBatches) else None,
            writer,
            skip_failures=options.skips_failures,
            # what is known is not even loaded
            only_missing=ids is not None and job.by_number,
            retries=options.retries,
            check_new=partial(_check_new, run),
            seed=run.opened.seed,
            beside=run.destination.beside,
            filling=filling,
        )
        try:
            with contextlib.closing(iter(batches)) as loaded:
                for number, batch in enumerate(loaded, start=1):
                    computation.process(batch)
                    publish_if_due(part.seal)
                    bar.update(computation.progress())
                    if number == options.most_batches:
                        return Outcome()
        finally:
            bar.end(computation.progress(), computation.failures)
        wanted = job.size or 0 if missing is None else len(missing)
        left_out = max(wanted - computation.processed, 0)
        return Outcome(left_out, stopped=False, seen=computation.seen if ids is None else None)


def _open(
    run: Run, missing: Ints | None, part: ProcessPart, filling: WhileFilling
) -> tuple[PartWriter, DatasetBatches | Generator[LoadedBatch, None, None]]:
    """Open a part of the cache, and prepare the batches of this rank for it."""
    job = run.job
    if missing is None and run.ranks.size > 1:
        raise ConfigError(
            "under torchrun cache_features needs a map-style dataset, to share it out to ranks"
        )
    filling.begin()
    writer = part.writer(run.open_part, filling)
    if missing is None:
        return writer, batches_of_stream(job.source, job.loader_kwargs, job.mentioned)
    writer.expect_more(len(missing))
    lengths = None if job.lengths is None else check_lengths(job.lengths, len(job.source))
    order, ids = longest_first(missing, lengths), run.opened.ids
    return writer, DatasetBatches(job.source, order, job.loader_kwargs, ids, run.loading)


def _check_new(run: Run, ids: Sequence[str]) -> None:
    """Raise `ConfigError` if the cache must not be given a data set that shows no ids."""
    # those that show them were compared when the cache was opened
    if run.opened.ids is None and run.opened.full and not run.options.append:
        raise ConfigError(
            f"cache {str(run.destination.path)!r} is complete without {named(ids, 3)}, and this "
            "data set shows no ids by which the two could be compared; give it an attribute "
            "`ids`, or append=True to add what is new"
        )

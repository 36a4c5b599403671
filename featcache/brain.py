"""`FeatureCacheMixin`: a SpeechBrain `Brain`, or the like, that computes and caches features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from featcache.extraction.brain_job import (
    evaluating,
    find_storage,
    job_of,
    name_of,
    provenance_of,
    settings_of,
    split_and_stage,
    stage_of,
    taking_loaders,
)
from featcache.extraction.destination import Destination
from featcache.extraction.fill import compare, fill
from featcache.extraction.job import RunOptions
from featcache.extraction.random_state import kept_random_state
from featcache.extraction.run import Ranks
from featcache.loading.loader import FeatureLoader
from featcache.storage import FeatureStorage
from featcache.tables.table import FeatureTable
from featcache.workers.config import ParallelConfig, config_or_client

if TYPE_CHECKING:
    from dask.distributed import Client


class FeatureCacheMixin:
    """Gives a `Brain` the method `cache_features`; the class itself defines `compute_features`.

    `Brain.fit` and `Brain.evaluate` then take a `FeatureLoader`, too: see `make_dataloader`.

    It may stand before or after `Brain` among the bases. Any other object needs `modules` (a
    `ModuleDict` or a dict) and `device`; `hparams`, `evaluation_ctx`, `eval_precision`,
    `noprogressbar`, `debug` and `debug_batches` are used if it has them::

        class MyBrain(featcache.FeatureCacheMixin, sb.Brain):
            def compute_features(self, batch, stage):
                fbank = self.modules.fbank(batch.sig.data)
                frames = batch.num_samples // 160 + 1
                return featcache.unpad(batch.id, frames, {"fbank": fbank})

        brain = MyBrain(modules, hparams=hparams)
        train = brain.cache_features(train_set, sb.Stage.TRAIN)
        valid = brain.cache_features(valid_set, sb.Stage.VALID)
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        first = next(base for base in cls.__mro__ if "make_dataloader" in vars(base))
        # a Brain before the mixin: its own method would be found
        if not issubclass(first, FeatureCacheMixin):
            theirs, ours = vars(first)["make_dataloader"], FeatureCacheMixin.make_dataloader
            cls.make_dataloader = taking_loaders(theirs, ours)  # type: ignore[method-assign]

    def compute_features(self, batch: Any, stage: Any) -> list[dict[str, Any]]:
        """Compute the features of a batch, which has been moved to `self.device`.

        A class defines it. Called without gradients, all modules in evaluation mode, in the
        precision of evaluation.

        Returns for each utterance of the batch a dict of its "id" and all declared features, cut to
        the utterance's own length: tensors or arrays of shape (frames, *dims), on any device.
        `featcache.unpad` makes it of padded ones.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has to define compute_features(batch, stage)"
        )

    def cache_features(
        self,
        dataset: object,
        stage: object = None,
        *,
        split: str | None = None,
        storage: FeatureStorage | None = None,
        loader_kwargs: Mapping[str, object] | None = None,
        progressbar: bool | None = None,
        resume: bool = True,
        overwrite: bool = False,
        append: bool = False,
        annotations: str | Sequence[str] = (),
        on_error: Literal["raise", "skip"] = "raise",
        on_changed: Literal["raise", "recompute"] = "raise",
        retries: int = 2,
        publish_every_s: float | None = None,
        fingerprint: Mapping[str, object] | None = None,
        check: int | Literal["probe", "all"] | None = "probe",
        accept: bool = False,
        parallel: ParallelConfig | Mapping[str, object] | Client | None = None,
    ) -> FeatureTable:
        """Compute the features that the cache of a split lacks; return the dataset's part of it.

        First the cache is compared with what would be computed now: code, weights, settings, a few
        utterances computed again, and the recordings; see `docs/explanation/what-is-checked.md`.
        Then whatever is missing is computed. Stopped at any moment, the same call goes on.
        Utterances in the cache are not loaded again if the dataset shows its ids (`data_ids` or
        `ids`), else not computed again. The cache is complete when each utterance of the dataset is
        stored or has failed (`cache.failed`). Under torchrun each rank computes its share. With
        `--debug` a few batches are cached, as incomplete. The global random generators are left as
        they were.

        Returns the view of this dataset's utterances. Its `cache` is the whole, which may hold
        others: a line in the log says so.

        Args:
            dataset: a dataset; or a loader, which is used as it is.
            stage: given to `compute_features`; by default that of the split. "train" is
                `Stage.TRAIN` to a Brain.
            split: names the cache, `storage.path(split)`; by default after the stage, "train"
                without one.
            storage: by default the one `FeatureStorage` in `self.hparams`.
            loader_kwargs: arguments of the DataLoader: batch_size, num_workers, ... Never shuffles
                or drops anything. By default each utterance is computed by itself.
            progressbar: by default shown unless `self.noprogressbar`.
            resume: False begins an incomplete cache anew.
            overwrite: begins a complete cache anew; readers have the old one until the new one is
                whole.
            append: adds a dataset to a complete cache that holds none of its utterances; otherwise
                that is taken for a mistake in the split, and refused.
            annotations: keys of the dataset to store beside the features, such as "text", "speaker"
                or "duration": of its entries, or dynamic items that need no features. Utterances
                that are in the cache already get them, too.
            on_error: "skip" goes on after an utterance that fails, and notes it in the cache's
                `work-failures.jsonl`. Later calls leave it out, or try it again with "raise".
            on_changed: of utterances whose recording or other input has changed since, "raise"
                names them in an error, "recompute" computes them again. A recording that was moved
                or stored in another lossless format has not changed.
            retries: further attempts at an utterance that fails, or that its worker dies of; needs
                a dataset with items by number.
            publish_every_s: readers see what is there about every so many seconds; None: only at
                the end.
            fingerprint: what else the features are made from, JSON values. A key that featcache
                fills in itself ("modules", "source", "hparams", ...; see
                `featcache.staleness.provenance`) is replaced by yours; None leaves it out.
            check: utterances to load and compute again, each alone, and to compare with the cache:
                "probe" takes the four that are kept with it, a number more, "all" all, None none.
            accept: keeps the cache after a change of code or settings, if the utterances kept with
                it come out the same to the bit; `featcache.inspect.made_from` tells what was.
            parallel: computes on Dask's workers: a `ParallelConfig` or such a mapping, or a client
                of `get_client`, by which several splits share the workers. Each gets a copy of this
                object as it is now, and uses its GPU if it has one. The dataset must show its ids;
                where it shows lengths ("duration"), long utterances come first.

        Raises `StaleCacheError`, with what differs, if the cache was made from something else, or
        the input of utterances has changed; `ComputeError` if computing fails; `FeatureError` for
        arrays that cannot be stored as declared; `IncompleteError` if it failed on another rank;
        `ConfigError` for code that was edited since it was loaded, and for a dataset that is empty
        or belongs to another split; `CacheError` for a cache that lacks something and cannot be
        written to. What was computed before is kept in each case.
        """
        debug = getattr(self, "debug_batches", 2) if getattr(self, "debug", False) else None
        if progressbar is None:
            progressbar = not getattr(self, "noprogressbar", False)
        split, stage = split_and_stage(self, split, stage)
        options = RunOptions(
            resume=resume,
            overwrite=overwrite,
            append=append,
            annotations=annotations,
            on_error=on_error,
            on_changed=on_changed,
            retries=retries,
            publish_every_s=publish_every_s,
            check=check,
            accept=accept,
            progressbar=progressbar,
            colour=getattr(self, "tqdm_barcolor", {}).get(name_of(stage).lower()),
            most_batches=debug,
        )
        to = Destination.of(storage or find_storage(self), split)
        given = loader_kwargs or {}, fingerprint or {}
        workers = None if parallel is None else config_or_client(parallel)
        with (
            kept_random_state(),
            Ranks() as ranks,
            job_of(self, dataset, stage, *given, workers, ranks.size) as job,
        ):
            return fill(job, to, options, ranks)

    def check_features(
        self,
        dataset: object,
        stage: object = None,
        *,
        split: str | None = None,
        storage: FeatureStorage | None = None,
        loader_kwargs: Mapping[str, object] | None = None,
        fingerprint: Mapping[str, object] | None = None,
        check: int | Literal["probe", "all"] = "probe",
    ) -> None:
        """Compare the cache of a split as `cache_features` does, and write nothing.

        Code, weights and settings are compared, and utterances computed again: all with
        `check="all"`. The arguments are those of `cache_features`.

        Raises `StaleCacheError` with what differs, `NotACacheError` if nothing is cached.
        """
        split, stage = split_and_stage(self, split, stage)
        to = Destination.of(storage or find_storage(self), split)
        options = RunOptions(check=check)
        given = loader_kwargs or {}, fingerprint or {}
        with kept_random_state(), job_of(self, dataset, stage, *given) as job:
            compare(job, to, options)

    def expectation(
        self,
        stage: object = None,
        *,
        collate_fn: object = None,
        fingerprint: Mapping[str, object] | None = None,
    ) -> dict[str, object]:
        """Return the fingerprint of the features that this object computes now, as plain data.

        For the `expect` of `featcache.open`, `FeatureStorage.attach`, `cache` and `reader`, where
        the features are not computed but read: a cache that was made from something else is refused
        there. It holds for all splits, unless `stage` names one. Reads all weights that count.

        Args:
            stage: that of `cache_features`; by default none is expected.
            collate_fn: that of the dataset or of `loader_kwargs` there, if there was one.
            fingerprint: as it was given there.
        """
        made_with = provenance_of(self, collate_fn)
        made_from = {} if stage is None else {"stage": name_of(stage_of(self, stage))}
        with kept_random_state(), evaluating(self, made_with.modules.values()):
            return made_with.fingerprint({**made_from, **settings_of(self), **(fingerprint or {})})

    def make_dataloader(
        self,
        dataset: object,
        stage: object,
        ckpt_prefix: str | None = "dataloader-",
        **loader_kwargs: object,
    ) -> Any:
        """Return a `FeatureLoader` as it is, as `Brain.fit` and `evaluate` do with a DataLoader.

        SpeechBrain tells it each epoch and saves it with its checkpoints: a training stopped in the
        middle of an epoch goes on with the very next batch. Its samplers share out their batches
        over ranks. `loader_kwargs` do not concern it. Any other dataset is left to SpeechBrain.
        """
        if isinstance(dataset, FeatureLoader):
            from featcache.interop.speechbrain import use_loader

            use_loader(self, dataset, stage, ckpt_prefix)
            return dataset
        return super().make_dataloader(dataset, stage, ckpt_prefix, **loader_kwargs)  # type: ignore[misc]

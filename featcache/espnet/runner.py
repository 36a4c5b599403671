"""`CollectStatsRunner`: ESPnet3's collect-stats, here or on workers, and the making of its shards.

A shard is a range of utterances, in a directory that other runs go on with.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from featcache import CacheWriter, EnvironmentProvider, FeatureStorageConfig, ParallelConfig
from featcache.container_files import WriterLock, write_durably
from featcache.errors import (
    ComputeError,
    ConfigError,
    DuplicateIdError,
    FeatureError,
    IncompleteError,
    StaleCacheError,
    describe,
    indented,
)
from featcache.espnet.hooks import (
    FEATS,
    LENGTHS,
    RUN,
    SHARDS,
    SPLIT,
    FinishedShards,
    Hooks,
    Shard,
    finish_shard,
    has_features,
    merge_shards,
    read_shard,
)
from featcache.espnet.shapes import Ints
from featcache.inspect import differences, provenance
from featcache.workers import Attempt, Attempts, config_or_client

if TYPE_CHECKING:
    from dask.distributed import Client

    from featcache.workers import Dispatch


# `ShardMaker`: makes shards in a process.

Declared = Mapping[str, FeatureStorageConfig]


@dataclass(frozen=True)
class StatsSettings:
    """Settings of a run, the same for all its shards."""

    hooks: type[Hooks]
    shards: Path  # those that are done
    collected: Path  # the features
    attempts: Path  # where shards are made, and workers note the batch that they are at
    batch_size: int | None
    features: Declared | None  # of the cache; None: no features are kept
    all_keys: bool = False
    made_from: Mapping[str, object] = field(default_factory=dict)


class ShardTask(NamedTuple):
    """A shard to be made."""

    name: str
    indices: Ints
    number: int = 0  # of this attempt: no two attempts of a run share it


class ShardMaker:
    """A process's share in a run: its environment, and its attempts at shards."""

    def __init__(self, env: object) -> None:
        if not isinstance(env, Mapping):
            raise ConfigError(f"an environment is a dict by name, not {env!r}")
        for name in ("dataset", "model", "collate_fn"):
            if name not in env:
                raise ConfigError(
                    f"the environment needs {name!r}; it has "
                    f"{', '.join(map(repr, env)) or 'nothing'}"
                )
        self._env: dict[str, Any] = dict(env)
        self.attempts = Attempts()

    def inspect(
        self, settings: StatsSettings, task: ShardTask
    ) -> tuple[dict[str, object], Declared | None]:
        """Return what statistics are made from here, and declarations of the features.

        Those are found by computing the utterances of the task; None if no features are kept.
        """
        with self.attempts.begin(settings.attempts, task.number) as attempt:
            made_from = {**fingerprint_of(self._env), **_asked(settings)}
            if settings.features is None:
                return made_from, None
            attempt.note_batch(0)
            env = {**self._env, "write_collected_feats": True, **_asked(settings)}
            feats = self._compute(settings.hooks, task.indices.tolist(), env)[2]
            dtypes = {
                key: next(iter(of_key.values())).dtype.name
                for key, of_key in feats.items()
                if not key.endswith(LENGTHS)  # the cache has them anyway
            }
            return made_from, {key: FeatureStorageConfig(key, dtypes[key]) for key in dtypes}

    def make(self, settings: StatsSettings, task: ShardTask) -> None:
        """Make a shard; it lies under its name with the attempts when this returns.

        Raises `TaskTakenError` if another process has, or had, this attempt at it.
        """
        with self.attempts.begin(settings.attempts, task.number) as attempt:
            made, placed = (at / task.name for at in (settings.attempts, settings.shards))
            if made.exists() or placed.exists():  # its maker was lost right after
                return
            directory = settings.attempts / f"shard-{task.number:06d}"
            directory.mkdir()
            self._fill(settings, task, attempt, directory)
            finish_shard(directory, task.indices)
            directory.rename(made)

    def _fill(
        self, settings: StatsSettings, task: ShardTask, attempt: Attempt, shard_dir: Path
    ) -> None:
        """Run the hooks over the batches of a shard."""
        hooks, state = settings.hooks, dict[str, Any]()
        collects = settings.features is not None
        env = {**self._env, "write_collected_feats": collects, **_asked(settings)}
        env |= {"feats_dir": settings.collected} if collects else {}
        writers = hooks.open_writers(shard_dir, **env)
        size = settings.batch_size or 1
        for start in range(0, len(task.indices), size):
            if not attempt.is_wanted:
                raise IncompleteError("the run has been stopped")
            attempt.note_batch(start)
            batch = task.indices[start : start + size].tolist()
            result = self._compute(hooks, batch if settings.batch_size else batch[0], env)
            hooks.write_record(writers, result, state, **env)
        hooks.close_writers(writers)

    def _compute(self, hooks: type[Hooks], batch: list[int] | int, env: Mapping[str, Any]) -> Any:
        """Call `forward`; an error names the utterance, if it comes from a single one."""
        try:
            return hooks.forward(batch, **env)
        except Exception as failure:  # whatever the user's code raises
            error, culprits = failure, [batch] if isinstance(batch, int) else batch
        for index in culprits if len(culprits) > 1 else ():
            try:
                hooks.forward([index], **env)
            except Exception as failure:
                error, culprits = failure, [index]
                break
        if isinstance(error, FeatureError | DuplicateIdError | ConfigError):
            raise error
        named = ", ".join(_name_of(env["dataset"], index) for index in culprits)
        raise ComputeError(
            f"collecting statistics of {named} failed with {describe(error)}; what was done before "
            "is kept"
        ) from error


def _asked(settings: StatsSettings) -> dict[str, object]:
    """Return what a run asks of the hooks beyond ESPnet's: nothing, by default."""
    return {"all_keys": True} if settings.all_keys else {}


def _name_of(dataset: Any, index: int) -> str:
    """Return an utterance's id, where the data set shows its ids or can load it, or its number."""
    ids: Any = getattr(dataset, "ids", None)
    if hasattr(ids, "__getitem__") and len(ids) == len(dataset):
        return repr(ids[index])
    try:
        id = dataset[index][0]
    except Exception:  # maybe that is what failed
        id = None
    return repr(id) if isinstance(id, str) else f"utterance {index}"


def fingerprint_of(env: Mapping[str, Any]) -> dict[str, object]:
    """Return the fingerprint of `collect_feats` of the model: its code, the modules it names."""
    model, found = env["model"], {}
    if callable(collect := getattr(model, "collect_feats", None)):
        found = provenance(collect, model).fingerprint({})
    kwargs = env.get("collect_stats_kwargs") or {}
    return {**found, "collect_stats_kwargs": {name: repr(value) for name, value in kwargs.items()}}


# `ShardDirectory`: the shards of a split on disk, those that are done and those to be made.

Mask = NDArray[np.bool_]
MADE_FROM = "made_from.json"
# whatever the number of workers, so that the same numbers are added in the same order
MOST_SHARDS = 512


class ShardDirectory:
    """The directory `shards` of a split."""

    def __init__(self, split: Path) -> None:
        self._split = split
        self.path = split / SHARDS

    def create(self, *, anew: bool = False) -> None:
        """Make the directory, unless it is there.

        `anew` removes all shards first, and the cache of their features.
        """
        if anew:
            shutil.rmtree(self.path, ignore_errors=True)
            if (self._split / FEATS / "featcache.json").exists():
                shutil.rmtree(self._split / FEATS)
        self.path.mkdir(exist_ok=True)

    @contextmanager
    def attempts(self) -> Iterator[Path]:
        """Yield a directory for the attempts of a run, which ends with it."""
        for left in self._split.glob(f"{RUN}*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        directory = self._split / f"{RUN}{secrets.token_hex(4)}"
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)  # NFS keeps files that are open

    def require_made_from(self, made_from: Mapping[str, object]) -> None:
        """Note what the statistics are made from, or compare it with what is noted."""
        path, new = self.path / MADE_FROM, json.dumps(made_from).encode()
        if path.exists():
            try:
                before = json.loads(path.read_bytes())
            except ValueError:  # damaged, so that nobody knows
                before = None
            changed = differences(before, json.loads(new))
            if not changed:
                return
            if any(map(read_shard, self.path.glob(f"{SPLIT}*"))):
                raise StaleCacheError(
                    f"what is done in {str(self._split)!r} was made from something else than it "
                    f"would be now:{indented(changed)}\n"
                    "start anew (resume=False), or give another directory"
                )
            self.create(anew=True)  # nothing is done: what failed at once was mended
        write_durably(path, new)

    def done(self, wanted: Ints, writer: CacheWriter | None) -> tuple[list[Shard], Mask]:
        """Return the shards that are done, by their first utterances, and what of `wanted` is not.

        Removes shards that are of no use: damaged, of other utterances, or without features where
        a `writer` of these is given.
        """
        places = np.full(wanted.max() + 1, -1)  # of the utterances that are still to be found
        places[wanted] = np.arange(len(wanted))
        found: dict[int, Shard] = {}
        for directory in sorted(self.path.glob("*/")):
            shard = read_shard(directory)
            if (
                shard is not None
                and shard.indices.max() < len(places)
                and (places[shard.indices] >= 0).all()
                and (writer is None or has_features(shard, writer))
            ):
                found[int(places[shard.indices[0]])] = shard
                places[shard.indices] = -1
            else:  # renamed first: a worker that was lost may be at it
                gone = directory.rename(directory.with_name(f"removed-{secrets.token_hex(4)}"))
                shutil.rmtree(gone, ignore_errors=True)
        return [found[place] for place in sorted(found)], places[wanted] >= 0


def cut_shards(wanted: Ints, missing: Mask, batch_size: int) -> list[ShardTask]:
    """Cut utterances into shards of whole batches, then leave out those that are not missing.

    So a run that goes on has the shards that it had.
    """
    size = batch_size * -(-len(wanted) // (batch_size * MOST_SHARDS))
    starts, run = range(0, len(wanted), size), secrets.token_hex(4)
    cut = [wanted[start : start + size][missing[start : start + size]] for start in starts]
    return [
        ShardTask(f"{SPLIT}{run}-{number:05d}", indices)
        for number, indices in enumerate(cut)
        if len(indices)
    ]


# Executors of a collect-stats run: this process, or the workers of a Dask client.

DEATHS = 3  # of workers at one batch: then it is the batch's fault
R = TypeVar("R")
Work = Callable[[ShardMaker, StatsSettings, ShardTask], R]


class ShardJob(NamedTuple):
    """Work for a worker."""

    work: Work[object]
    settings: StatsSettings
    task: ShardTask


class LocalCollection:
    """This process alone."""

    def __init__(self, maker: ShardMaker) -> None:
        self._maker = maker
        self._numbers = count()  # of attempts

    def run(
        self, work: Work[R], settings: StatsSettings, tasks: Iterable[ShardTask]
    ) -> Iterator[tuple[ShardTask, R]]:
        """Do some work on tasks; yields each that is done, with what came of it."""
        for task, number in zip(tasks, self._numbers, strict=False):
            yield task, work(self._maker, settings, task._replace(number=number))


class DaskExecutor:
    """Workers of Dask."""

    def __init__(self, dispatch: Dispatch[ShardJob]) -> None:
        self._dispatch = dispatch

    def run(
        self, work: Work[R], settings: StatsSettings, tasks: Iterable[ShardTask]
    ) -> Iterator[tuple[ShardTask, R]]:
        """Run tasks; yields each that is done, with what came of it."""
        from featcache.workers import LostAttempt

        deaths = Counter[tuple[str, int]]()
        for task in tasks:
            self._dispatch.add(ShardJob(work, settings, task))
        for job, outcome in self._dispatch.outcomes():
            task = job.task
            if not isinstance(outcome, LostAttempt):
                yield task, outcome
            elif outcome.batch is None:  # it was waiting there, the worker was at another
                self._dispatch.add(job)
            else:
                first = max(outcome.batch, 0)
                deaths[task.name, first] += 1
                if deaths[task.name, first] == DEATHS:
                    batch = task.indices[first : first + (settings.batch_size or 1)].tolist()
                    raise _deadly(batch) from outcome.error
                self._dispatch.add(job)


def _deadly(batch: list[int]) -> ComputeError:
    return ComputeError(
        f"{DEATHS} workers died when they were at utterances {', '.join(map(str, batch))} of the "
        "data set: out of memory, or a crash in a library? Their logs may say more; what was done "
        "is kept"
    )


@contextmanager
def executor_for(
    provider: EnvironmentProvider, parallel: ParallelConfig | Client | None, attempts: Path
) -> Iterator[LocalCollection | DaskExecutor]:
    """Yield this process, new workers, which end with the block, or those of a client.

    `attempts` is a directory for the notes of workers on what they are at.
    """
    if parallel is None:
        maker = ShardMaker(provider.build_env_local())
        yield LocalCollection(maker)
        return
    from featcache.workers import Dispatch, workers_of

    set_up = partial(_set_up, provider.build_worker_setup_fn())
    with (
        workers_of(parallel, set_up) as workers,
        Dispatch[ShardJob](workers, attempts) as dispatch,
    ):
        yield DaskExecutor(dispatch)


def _set_up(setup_fn: Callable[[], object]) -> dict[str, object]:
    maker = ShardMaker(setup_fn())
    return {"work": partial(_do, maker), "attempts": maker.attempts}


def _do(maker: ShardMaker, number: int, job: ShardJob, report: object) -> object:
    return job.work(maker, job.settings, job.task._replace(number=number))


# `CollectStatsRunner`: statistics and shapes of a data set, in the files that ESPnet reads.


class Totals(TypedDict):
    """Sums over all frames of a split, by key."""

    sum: dict[str, NDArray[np.float64]]
    sq: dict[str, NDArray[np.float64]]  # of squares
    count: dict[str, int]


class CollectStatsRunner(Hooks):
    """Collect statistics and shapes of a model's features, as ESPnet3's runner of this name does.

    `runner(range(len(dataset)))` writes into `output_dir/mode`, and returns what `merge` does:

    - `<key>_stats.npz`: "count", "sum", "sum_square" (and "mean", "m2"), float64, for each key of
      `collect_feats`;
    - `<key>_shape`: "id frames,dims" by line, in the order of the ids' UTF-8 bytes. Integer inputs
      of the model that have lengths get one, too: "id length";
    - `stats_keys`, `stats_keys.txt`, `shape_keys.txt`, `feat_keys_written.txt`: names of keys;
    - `shards/`: what is done. Stopped or killed at any moment, the same call goes on from there,
      also with other workers, batches or utterances. For the same utterances and batch size all
      files are the same to the last bit.

    Args:
        provider: builds the environment, once in each process: "dataset", "model", "collate_fn",
            and perhaps "device" and "collect_stats_kwargs", for `model.collect_feats`.
        output_dir: the directory of all splits.
        mode: name of the split.
        write_collected_feats: keep the features: in a cache, `collect_feats`, and as
            `collect_feats/<key>.scp` with one `.npy` for each utterance.
        batch_size: utterances a batch; None gives `forward` one number at a time.
        parallel: how many workers, and where: `ParallelConfig` or such a mapping, or a client of
            `get_client`; None computes in this process.
        resume: False removes what an earlier call has left of shards and features.
        all_keys: as ESPnet3, also count `<key>_lengths` as a key, of one number an utterance
            (`mel_lengths_stats.npz`, `mel_lengths_shape`), and write the shapes of all inputs of
            the model (`speech_shape`).

    A subclass may override the four steps that `Hooks` has, as static methods.

    Raises `ComputeError` for an utterance that fails, naming it; `FeatureError` for what cannot be
    stored or has no statistics; `StaleCacheError` if the model is another than in what is done;
    `CacheLockedError` if another process is at work here. What is done is kept in each case.

    >>> import tempfile, torch, featcache
    >>> class Tones(featcache.EnvironmentProvider):
    ...     def build_env_local(self):
    ...         arrays = {n: torch.full((n, 2), 3.0).numpy() for n in (4, 5)}
    ...         dataset = [(f"utt-{n}", {"speech": array}) for n, array in arrays.items()]
    ...         collate = featcache.espnet.CommonCollateFn()
    ...         return {"dataset": dataset, "model": self, "collate_fn": collate}
    ...
    ...     def collect_feats(self, speech, speech_lengths):
    ...         return {"feats": speech, "feats_lengths": speech_lengths}
    >>> runner = CollectStatsRunner(Tones(), tempfile.mkdtemp(), "train", batch_size=2)
    >>> runner(range(2))["count"]
    {'feats': 9}
    """

    def __init__(
        self,
        provider: EnvironmentProvider,
        output_dir: str | Path,
        mode: str,
        write_collected_feats: bool = False,
        *,
        batch_size: int | None = None,
        parallel: ParallelConfig | Mapping[str, object] | Client | None = None,
        resume: bool = True,
        all_keys: bool = False,
    ) -> None:
        if not isinstance(mode, str) or mode in ("", ".", "..") or "/" in mode or "\0" in mode:
            raise ConfigError(f"mode {mode!r} is not usable as the name of a directory")
        self.provider = provider
        if batch_size is not None and not (isinstance(batch_size, Integral) and batch_size >= 1):
            raise ConfigError(f"batch_size must be an integer of at least 1, not {batch_size!r}")
        self.directory = Path(output_dir).expanduser().absolute() / mode
        self._shards = ShardDirectory(self.directory)
        self.write_collected_feats = write_collected_feats
        self.batch_size = batch_size
        self.parallel = None if parallel is None else config_or_client(parallel)
        self.resume = resume
        self.all_keys = all_keys

    def merge(self, shard_dirs: Sequence[Path]) -> Totals:
        """Merge shards into the files of the split; returns {"sum", "sq", "count"}, each by key.

        Statistics are merged in the order of `shard_dirs`; the order of lines is that of their ids.
        """
        if not shard_dirs:
            raise ConfigError("there are no shards to merge")
        merged = merge_shards(shard_dirs, self.directory, self.write_collected_feats)
        return {
            "sum": {key: stats.sum for key, stats in merged.items()},
            "sq": {key: stats.sum_square for key, stats in merged.items()},
            "count": {key: stats.count for key, stats in merged.items()},
        }

    def __call__(self, indices: Iterable[int]) -> Totals:
        """Collect the utterances of these numbers that are not done yet, and merge all of them."""
        wanted = _checked(indices)
        self.directory.mkdir(parents=True, exist_ok=True)
        with WriterLock(self.directory):
            self._shards.create(anew=not self.resume)
            return self.merge([shard.directory for shard in self._collect(wanted)])

    def _collect(self, wanted: Ints) -> list[Shard]:
        """Make the shards that are missing; return all of them by their first utterances."""
        with (
            self._shards.attempts() as attempts,
            ExitStack() as at_end,
            executor_for(self.provider, self.parallel, attempts) as executor,
        ):
            settings = StatsSettings(
                hooks=type(self),
                shards=self._shards.path,
                collected=self.directory / FEATS,
                attempts=attempts,
                batch_size=self.batch_size,
                features={} if self.write_collected_feats else None,
                all_keys=self.all_keys,
            )
            sample = ShardTask("sample", wanted[: self.batch_size or 1])
            ((_, (made_from, features)),) = executor.run(ShardMaker.inspect, settings, [sample])
            self._shards.require_made_from(made_from)
            writer = None
            if features is not None:
                writer = at_end.enter_context(CacheWriter(settings.collected, features, made_from))
            missing = self._shards.done(wanted, writer)[1]
            finished = at_end.enter_context(FinishedShards(attempts, self._shards.path, writer))
            settings = replace(settings, features=features, made_from=made_from)
            tasks = cut_shards(wanted, missing, self.batch_size or 1)
            there = len(wanted) - np.count_nonzero(missing)
            with tqdm(total=len(wanted), initial=there, unit="utt", disable=None) as bar:
                for task, _ in executor.run(ShardMaker.make, settings, tasks):
                    finished.place_if_due()
                    bar.update(len(task.indices))
        shards, missing = self._shards.done(wanted, None)
        if missing.any():
            raise IncompleteError(
                f"shards in {str(self._shards.path)!r} are gone; the same call makes them again"
            )
        return shards


def _checked(indices: Iterable[int]) -> Ints:
    listed = np.asarray(indices if isinstance(indices, range | np.ndarray) else list(indices))
    if not listed.size or listed.dtype.kind not in "iu" or listed.ndim != 1 or listed.min() < 0:
        raise ConfigError(f"indices are numbers of utterances, at least one, not {indices!r}")
    if len(np.unique(listed)) < len(listed):
        raise ConfigError("indices hold an utterance twice, which would count twice")
    return listed.astype(np.int64)

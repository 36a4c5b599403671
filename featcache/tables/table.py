"""`FeatureTable`: numbered rows of one or several caches, in whatever order, with their columns."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from featcache._checks import directory, listed_ids
from featcache.declaration import FEW_FRAMES
from featcache.errors import CacheError, ConfigError
from featcache.format import Column
from featcache.interface import Bytes, Ints
from featcache.reading import CachePath, Expectation, check_complete, open_generation
from featcache.registry import get_toolkit
from featcache.stats import FeatureStats
from featcache.tables.columns import (
    Columns,
    Value,
    arrow_table,
    data_frame,
    order_by,
    rows_that_meet,
    sampled_rows,
    split_rows,
    what_keeps_nothing,
)
from featcache.tables.order import Order
from featcache.tables.segments import SegmentSource, segments_of
from featcache.tables.selection import (
    Ids,
    PaddedFeatures,
    Selection,
    chosen_rows,
    rows_of_keys,
)
from featcache.tables.shown import (
    plot_lengths,
    plot_stats,
    plot_utterance,
    shortened,
    table_html,
    view_line,
)
from featcache.tables.times import Align, Alignment

if TYPE_CHECKING:
    import datasets
    import lhotse
    import pandas
    import pyarrow
    from matplotlib.axes import Axes

    from featcache.tables.mixes import MixPlan


_MUX = "lhotse mixes the cuts of its sources: CutSet.mux(..., weights=[...])"
MOST_COMPLETED = 1000  # ids that are offered where one types a key
_log = logging.getLogger("featcache")


class RowOrder(Protocol):
    """Rows in an order, of which a slice gives some."""

    def __len__(self) -> int:
        """Count the rows."""

    def __getitem__(self, places: slice, /) -> Ints:
        """Return the rows at some places."""


class FeatureTable(Mapping[str, dict[str, NDArray[Any]]]):
    """Features of numbered utterances: of one cache or several, or a view of some of them.

    Several are joined over the same ids, or come one after another. Made by `featcache.open`,
    whose `Cache` is a table that can be edited, by `join` and `concat`, and as a view by the
    methods of another table. A view holds row numbers and no data. The rows of one cache are in the
    order of its ids' UTF-8 bytes. Threads, forks and pickles may share it, and workers share the
    row numbers.

    A mapping from utterance ids to dicts of arrays.

    Attributes:
        selection: the rows and the caches below, for what is built on tables.
        made: the calls that made it of a cache, in words; "" for all rows.
    """

    # Each method looks at `selection` once: that of a cache changes when a thread edits it

    def __init__(self, selection: Selection, made: str = "") -> None:
        self.selection = selection
        self.made = made

    @classmethod
    def of(cls, source: FeatureTable | CachePath) -> FeatureTable:
        """Return the table of a cache, opened where a path is given; a table as it is."""
        if isinstance(source, FeatureTable):
            return source.table
        if not isinstance(source, str | os.PathLike):
            raise ConfigError(
                "a cache is given as what featcache.open, join or concat return, or as the path of "
                f"a directory, not {source!r}"
            )
        path = directory(source, "a cache").absolute()
        return FeatureTable(Selection.of(open_generation(path, Expectation.of(None))))

    def __repr__(self) -> str:
        made = f"; {shortened(self.made, 100)}" if self.made else ""
        return f"<FeatureTable: {view_line(self)}{made}>"

    def _repr_html_(self) -> str:
        return table_html(self)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.ids[:MOST_COMPLETED])

    def __len__(self) -> int:
        return len(self.selection)

    def __iter__(self) -> Iterator[str]:
        return iter(self.selection)

    def __contains__(self, id: object) -> bool:
        return id in self.selection

    @property
    def ids(self) -> Sequence[str]:
        """The utterance ids, in the order of rows; looked up as they are asked for."""
        return Ids(self.selection)

    def id(self, row: int) -> str:
        """Return the id of a row; raises `RowError` for one that is not there."""
        selection = self.selection
        selection.check(row)
        return selection.id(row)

    def find(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids, int64, -1 where there is none.

        Quick for ids that are not there: nothing is looked up that is close to them.
        """
        return self.selection.find(listed_ids(ids))

    def rows(self, ids: Iterable[str]) -> Ints:
        """Return the rows of many ids, int64; raises `KeyNotFoundError` for an unknown one."""
        return self.selection.rows(ids)

    def numbers(self, keys: Sequence[int | str]) -> Ints:
        """Return the rows that ids or row numbers, also mixed, stand for.

        Raises `KeyNotFoundError` or `RowError`.
        """
        return rows_of_keys(self.selection, keys)

    def __getitem__(self, id: str) -> dict[str, NDArray[Any]]:
        selection = self.selection
        try:
            return {name: selection.read(id, name) for name in selection.blocks.features}
        except CacheError:
            if not self._has_moved_on(selection):
                raise
        return self[id]

    __eq__ = object.__eq__  # a mapping would compare all arrays
    __hash__ = object.__hash__

    def _has_moved_on(self, selection: Selection) -> bool:
        """Whether a thread edits the cache, so that another generation is read than `selection`."""
        return False

    @property
    def table(self) -> FeatureTable:
        """This table; of a cache, that of the generation that it reads now."""
        return self

    @property
    def path(self) -> Path:
        """The directory of the one cache below; raises `ConfigError` where there are several."""
        if len(self.paths) > 1:
            paths = ", ".join(repr(str(path)) for path in self.paths)
            raise ConfigError(f"{self!r} is made of several caches: {paths}; choose from .paths")
        return self.paths[0]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The directories of the caches below, each once."""
        return self.selection.blocks.paths

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return self.selection.blocks.features

    @property
    def complete(self) -> bool:
        """Whether all caches below are complete."""
        return all(opened.manifest.complete for opened in self.selection.blocks.generations)

    @property
    def annotations(self) -> tuple[str, ...]:
        """Names of the annotations."""
        return self.selection.annotations

    def annotation(self, name: str) -> Column:
        """Return the values of an annotation in the order of rows, None where there is none.

        Of joined caches, those of the first that has it. Raises `KeyNotFoundError` for an unknown
        annotation.
        """
        return self.selection.annotation(name)

    def require_complete(self) -> None:
        """Raise `IncompleteError` for a cache that its writer has not finished."""
        for opened in self.selection.blocks.generations:
            check_complete(opened)

    def has_frames(self, feature: str) -> bool:
        """Whether a feature has a time axis."""
        return self.selection.blocks.has_frames(feature)

    def dims(self, feature: str) -> tuple[int, ...]:
        """Return the shape of one frame, or of the whole array of a feature without a time axis."""
        return self.selection.blocks.dims(feature)

    def dtype(self, feature: str) -> str:
        """Return the declared dtype of a feature."""
        return self.selection.blocks.of_feature(feature)[0].declared_dtype

    @property
    def plan(self) -> MixPlan | None:
        """The plan of a mix: rows of an epoch, of each source; None where an epoch takes all."""
        return self.selection.plan

    def epoch_rows(self, epoch: int, *, seed: int = 0) -> RowOrder:
        """Return the rows of an epoch in their order: of a mix as planned, else all.

        None comes twice. `[begin:end]` gives some of them, int64, and draws no others; `seed` is
        that of a sampler.

        >>> mixed.epoch_rows(3, seed=1)[:4]  # doctest: +SKIP
        array([  7, 912,  44,   3])
        """
        plan = self.selection.plan
        return Order(len(self), None) if plan is None else plan.order(epoch, seed)

    def lengths(
        self, feature: str, *, ids: Iterable[str] | None = None, rows: Ints | None = None
    ) -> Ints:
        """Return the frames of all rows, int64, read-only; or of those that `ids` or `rows` list.

        All of one cache are its mapped column. Some are checked against what is stored first.
        """
        table = self.table
        table.selection.blocks.require(feature)
        rows = rows if ids is None else table.rows(ids)
        if rows is None:
            return table.selection.lengths(feature)
        return table.selection.checked_lengths(feature, rows)

    def read(
        self,
        id: str,
        feature: str,
        start: int | None = None,
        stop: int | None = None,
        *,
        copy: bool = True,
    ) -> NDArray[Any]:
        """Return a writable copy of an array, or of its frames from `start` to before `stop`.

        Shape (frames, *dims), or `dims` without a time axis; declared dtype, bfloat16 as the
        float32 of the same value. Only the bytes of these frames are read, or the blocks that hold
        them where a codec is used.

        With `copy=False` the array is read-only: the mapped bytes themselves where they are the
        array, that is without a codec, in one piece, no bfloat16, not with `mapped=False`. It stays
        good as long as you hold it, after `close`, `refresh` and `compact`, too; so long the disk
        keeps its file. Whoever cuts an adopted file short ends the process, as with any mapped one.
        `torch.from_numpy` warns of an array that is read-only.

        Raises `KeyNotFoundError` for an unknown id or feature, `WindowError` unless 0 <= start <=
        stop <= frames.
        """
        selection = self.selection
        try:
            return selection.read(id, feature, start, stop, copy=copy)
        except CacheError:
            if not self._has_moved_on(selection):
                raise
        return self.read(id, feature, start, stop, copy=copy)

    def read_batch(self, ids: Iterable[str], feature: str) -> PaddedFeatures:
        """Return the arrays of several utterances, copied into one array padded with zeros.

        Raises `KeyNotFoundError` for an unknown id or feature.
        """
        selection = self.selection
        selection.blocks.require(feature)
        listed = listed_ids(ids)
        try:
            return selection.read_padded(selection.rows(listed), feature)
        except CacheError:
            if not self._has_moved_on(selection):
                raise
        return self.read_batch(listed, feature)

    def stats(self, feature: str) -> FeatureStats:
        """Return count, mean and variance over all frames of a feature; exact.

        For a view, the arrays of the cache that it holds, or the others, if they are fewer, are
        read once. The table keeps them; more than 5 s are told in the log. Of a mix each utterance
        counts once, however often an epoch takes it.

        Raises `KeyNotFoundError` if none were collected.
        """
        return self.selection.stats(feature)

    def read_into(
        self, rows: Ints, feature: str, starts: Ints, lengths: Ints, out: Sequence[Bytes]
    ) -> None:
        """Read `lengths` frames from `starts` on of each row into the bytes of one of `out`.

        Zeros fill the rest of these bytes.
        """
        self.selection.read_into(rows, feature, starts, lengths, out)

    def select(self, keys: Iterable[str] | Iterable[int]) -> FeatureTable:
        """Return the view of these utterances, ids or row numbers, in their order.

        Raises `KeyNotFoundError` or `RowError` for one that is not there, and `ConfigError` for
        one that comes twice.
        """
        table = self.table
        return _view(table, chosen_rows(table.selection, keys), "select(...)")

    def select_features(self, features: str | Sequence[str]) -> FeatureTable:
        """Return the view of all utterances that has these features alone, as for `concat`.

        Of a mix, a mix of the same plan. Raises `KeyNotFoundError` for a feature that is not there,
        and `ConfigError` where none is named.

        >>> featcache.concat(a, b.select_features(["fbank"]))  # doctest: +SKIP
        """
        table, names = self.table, [features] if isinstance(features, str) else [*features]
        if not names:
            known = ", ".join(map(repr, table.features))
            raise ConfigError(f"a table has at least one feature; there are {known}")
        made = f"select_features({', '.join(map(repr, names))})"
        return FeatureTable(table.selection.with_features(names), _trail(table, made))

    def filter(
        self, where: Callable[[Mapping[str, Value]], object] | None = None, **conditions: object
    ) -> FeatureTable:
        """Return the view of the utterances that meet all conditions, in their order.

        Args:
            where: called with each utterance that meets the others, a mapping of "id", of features
                to their frames and of annotations to their values; keeps it where it returns true.
            conditions: by name "id", a feature, whose frames count, or an annotation: a range
                `(least, most)`, both included, None for no end; a set or a list of values; or one
                value. None stands for a missing value, which is in no range.

        >>> table.filter(fbank=(100, 3000), speaker={"anna", "ben"})  # doctest: +SKIP
        """
        table = self.table
        rows = rows_that_meet(table, conditions, where)
        said = [f"{name}={condition!r:.80}" for name, condition in conditions.items()]
        said += [f"where={where!r:.80}"] if where is not None else []
        made = f"filter({', '.join(said)})"
        if not len(rows) and len(table):
            _tell_nothing(table, f"{made} keeps", what_keeps_nothing(conditions))
        return _view(table, rows, made)

    def sample(self, amount: float, *, seed: int = 0) -> FeatureTable:
        """Return a view of a share of the utterances, 0.1, or of a number of them, 500, at random.

        They are in the order of this table, and depend on the ids and the seed alone.
        """
        table = self.table
        rows = sampled_rows(table, amount, seed)
        if not len(rows) and len(table):
            _tell_nothing(table, f"sample({amount!r}) draws", "draw more")
        return _view(table, rows, f"sample({amount!r})")

    def split(
        self, shares: Mapping[str, float], *, by: str | None = None, seed: int = 0
    ) -> dict[str, FeatureTable]:
        """Return views that share out all utterances at random, by name.

        Args:
            shares: the share of each view, `{"train": 0.9, "valid": 0.1}`; together 1.
            by: an annotation: no value of it is in two views, e.g. "speaker". Sizes are then as
                near to the shares as its values allow, and the log tells where that is far; no view
                is empty.
            seed: draws others. The same ids and seed give the same views everywhere.
        """
        table = self.table
        parts = split_rows(table, shares, by, seed)
        return {name: _view(table, rows, f"split(...)[{name!r}]") for name, rows in parts.items()}

    def sort(self, by: str, *, descending: bool = False) -> FeatureTable:
        """Return the view in the order of "id", of the frames of a feature or of an annotation.

        Utterances of one value stay in their order; those without one come last.
        """
        table = self.table
        rows = order_by(Columns(table)[by], by, descending=descending)
        return _view(table, rows, f"sort({by!r}{', descending=True' * descending})")

    def segments(
        self, source: SegmentSource, *, align: Align = "trim", tolerance_frames: int = FEW_FRAMES
    ) -> FeatureTable:
        """Return a view of segments, with ids of their own, cut by `frame_s` and `offset_s`.

        A cut goes to the nearest boundary between frames, half-way to the later one: neighbours
        share no frame and leave none out. Features without a time axis are given whole.

        Args:
            source: `{id: (recording, start_s, stop_s)}`, a CSV file with these columns, or
                `Windows(10.0, hop_s=5.0)` of all recordings. Further columns, or a dict as fourth
                value, are annotations of the segments; all others are those of the recording.
            align: "trim" ends all features of a recording where the first of them ends; "error"
                refuses a segment of which any feature lacks a frame.
            tolerance_frames: most frames, of the longest, that "trim" takes off; else refused.

        Raises `WindowError` for a stop beyond the end, and for a listed segment without a frame of
        some feature. Frames without `frame_s` are not read.
        """
        table = self.table
        segments = segments_of(table, source, Alignment(align, tolerance_frames))
        if not len(segments.rows) and len(table):
            _tell_nothing(table, f"segments({source!r:.80}) cuts", "see what should list them")
        made = _trail(table, f"segments({source!r:.80})")
        return FeatureTable(table.selection.cut(segments), made)

    def plot(self, id: str, *, feature: str | None = None, ax: Axes | None = None) -> Axes:
        """Plot an array of an utterance with matplotlib, and return the axes.

        Args:
            id: the utterance.
            feature: which; None: the first.
            ax: axes to plot into; None makes a figure.

        Raises `MissingDependencyError` without matplotlib, `KeyNotFoundError` for an unknown id.
        """
        return plot_utterance(self.table, id, feature or self._first(), ax)

    def plot_lengths(
        self, feature: str | None = None, *, buckets: int = 8, ax: Axes | None = None
    ) -> Axes:
        """Plot a histogram of frames with the borders of buckets, and say how much they pad."""
        return plot_lengths(self.table, feature or self._first(), buckets, ax)

    def plot_stats(self, feature: str | None = None, *, ax: Axes | None = None) -> Axes:
        """Plot mean and deviation of each dimension; constant ones are marked."""
        return plot_stats(self.table, feature or self._first(), ax)

    def _first(self) -> str:
        """Name of the first feature with a time axis, or of the first one."""
        named = (name for name in self.features if self.has_frames(name))
        return next(named, self.features[0])

    def to_arrow(self) -> pyarrow.Table:
        """Return a `pyarrow.Table` of ids, frames of the features and annotations.

        >>> pyarrow.parquet.write_table(table.to_arrow(), "train.parquet")  # doctest: +SKIP
        """
        return arrow_table(self.table)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `pandas.DataFrame` of ids, frames of the features and annotations."""
        return data_frame(self.table)

    def to_features(
        self, *, sample_rate_hz: int, feature: str | None = None, native: bool = False
    ) -> lhotse.FeatureSet:
        """Return lhotse's manifest of a feature: what lies in caches is read there by lhotse.

        The recording of each utterance has the id of the utterance, starts with its features, and
        is as long as the annotation "duration" says, if this makes as many frames by lhotse's
        rules, else as its frames.

        Args:
            sample_rate_hz: the rate of the recordings, which lhotse counts frames by.
            feature: its name, None: the only one. It has frames of one dimension, and `frame_s`.
            native: names the files of the backends `hdf5` (as `numpy_hdf5` or `lilcom_hdf5`) and
                `lilcom` (as `lilcom_chunky`), which lhotse reads without featcache, a few times
                slower. Such a manifest holds until the cache is written or edited again.

        Raises `ConfigError` for a feature that is no such, for a `native` one of another backend,
        and for segments, which lhotse cuts itself; `MissingDependencyError` without lhotse.

        >>> cache.to_features(sample_rate_hz=16000).to_file("feats.jsonl.gz")  # doctest: +SKIP
        """
        self._tell_unplanned("to_features", _MUX)
        to_features = get_toolkit("to_features")
        return to_features(
            self.table, sample_rate_hz=sample_rate_hz, feature=feature, native=native
        )

    def to_cuts(
        self, *, sample_rate_hz: int, feature: str | None = None, native: bool = False
    ) -> lhotse.CutSet:
        """Return a lhotse cut for each utterance: its features, a supervision of its annotations.

        Cuts have no recording. The annotations text, speaker, language and gender are fields of one
        supervision as long as the cut; all other annotations, and all other features, are in
        `custom`: those with `frame_s` as `TemporalArray`, the others as `Array`. The cuts are
        objects in memory, as lhotse has them; `cuts.to_file("cuts.jsonl.gz")` saves them, with the
        path of the cache. Of a mix there is a cut for each of its rows, without the plan, which the
        log tells. Arguments and errors are those of `to_features`.

        >>> import featcache, numpy as np, tempfile
        >>> path, declared = tempfile.mkdtemp(), featcache.FeatureStorageConfig("f", frame_s=0.01)
        >>> with featcache.CacheWriter(path, [declared]) as writer:
        ...     for id in "ab":
        ...         writer.write(id, {"f": np.zeros((100, 80))}, annotations={"speaker": id})
        >>> (cut,) = featcache.open(path).filter(speaker="b").to_cuts(sample_rate_hz=16000)
        >>> cut.load_features().shape, cut.supervisions[0].speaker, cut.duration
        ((100, 80), 'b', 1.0)
        """
        self._tell_unplanned("to_cuts", _MUX)
        to_cuts = get_toolkit("to_cuts")
        return to_cuts(self.table, sample_rate_hz=sample_rate_hz, feature=feature, native=native)

    def to_hf_dataset(
        self, features: str | Sequence[str] | None = None, *, length: str | None = None
    ) -> datasets.Dataset:
        """Return a HuggingFace data set: a row for each utterance, its features by name.

        Columns are "id", the annotations, "length", and one for each feature, read from the cache
        when a row is asked for, in any format and in workers. `select`, `shuffle`, `filter` and
        `save_to_disk` go by names, and copy no array; whoever loads what was saved has the caches
        at the same paths, and imports `featcache.interop.hf_dataset` first. `map` and `filter` with
        `input_columns=` read no other column; a function of `map` that reads a feature makes it a
        column of arrays, unless `remove_columns=` names it. Of a mix it has each of its rows once,
        without the plan, which the log tells: `select` takes the rows of an epoch, `epoch_rows`.

        Args:
            features: names of features; None: all.
            length: the feature whose frames are counted in the column "length", which the Trainer's
                `train_sampling_strategy="group_by_length"` goes by; None: the first with frames.

        Raises `ConfigError` for an annotation "length" beside features with frames, and for
        segments; `MissingDependencyError` without datasets.

        >>> import featcache, numpy as np, tempfile
        >>> path = tempfile.mkdtemp()
        >>> with featcache.CacheWriter(path, [featcache.FeatureStorageConfig("fbank")]) as writer:
        ...     writer.write("u1", {"fbank": np.ones((5, 3))}, annotations={"text": "one"})
        >>> dataset = featcache.open(path).to_hf_dataset()
        >>> dataset[0]["text"], dataset[0]["length"], dataset[0]["fbank"].shape
        ('one', 5, (5, 3))
        """
        rows = "dataset.select(table.epoch_rows(0)[:]) has those of epoch 0"
        self._tell_unplanned("to_hf_dataset", rows)
        return get_toolkit("to_hf_dataset")(self.table, features, length=length)

    def to_kaldi(self, directory: str | os.PathLike[str], *, feature: str | None = None) -> None:
        """Write a feature as a data directory of Kaldi, which ESPnet reads, too.

        `feats.ark`, `feats.scp`, `utt2num_frames`, `feats_shape`; `cmvn.ark` and `feats_stats.npz`
        where statistics were collected; and `text`, `utt2spk`, `spk2utt`, `utt2dur`, `utt2lang` of
        the annotations text, speaker, duration, language, whose utterances without a value are left
        out of the file. Values are written as float32, float64 as such, both without loss; integers
        without dims as int32. The directory appears whole or not at all.

        Args:
            directory: a new or an empty one. `feats.scp` names its absolute path.
            feature: its name; None: the only one.

        Raises `ConfigError` for a directory that holds something, and where `feature` has to be
        named; `FeatureError` for what Kaldi's formats cannot hold: more than one dimension a frame,
        integers beyond int32, no frames, ids or speakers with white space, texts of several lines,
        utterances with several rows, as of a mix.

        >>> import featcache, numpy as np, tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with featcache.CacheWriter(folder / "f", [featcache.FeatureStorageConfig("f")]) as w:
        ...     w.write("u1", {"f": np.ones((5, 3))})
        >>> featcache.open(folder / "f").to_kaldi(folder / "data")
        >>> (folder / "data" / "feats_shape").read_text()
        'u1 5,3\\n'
        """
        get_toolkit("to_kaldi")(self.table, directory, feature=feature)

    def _tell_unplanned(self, what: str, advice: str) -> None:
        """Warn of a mix that is handed to a library which knows nothing of its plan."""
        if self.plan is not None:
            _log.warning("%s gives each row of a mix once, without its plan; %s", what, advice)

    @property
    def digest(self) -> str:
        """A digest of the ids in their order: of those below, and of what was made of them."""
        return self.selection.digest


def _view(table: FeatureTable, rows: Ints, made: str) -> FeatureTable:
    return FeatureTable(table.selection.take(rows), _trail(table, made))


def _trail(table: FeatureTable, made: str) -> str:
    return f"{table.made}.{made}" if table.made else made


def _tell_nothing(table: FeatureTable, what: str, advice: str) -> None:
    _log.warning("%s nothing of %r: the view is empty; %s", what, table, advice)

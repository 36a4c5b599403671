"""`FeatureDataset`: rows of a table as items for PyTorch's DataLoader."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Literal, cast, overload

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from featcache._cached import cached_property
from featcache._checks import errors_about, whole_number
from featcache.errors import ConfigError, UnknownNameError, WindowError, nearest
from featcache.interface import Ints
from featcache.loading.batches import Item, ShownBatch, batch_of, torch_dtype
from featcache.loading.choices import Choices
from featcache.loading.layouts import (
    Batch,
    Jagged,
    Layout,
    Packed,
    ends_by,
    layout_of,
    places_of,
    require_layout,
)
from featcache.loading.memory import Allocate, Shape, fresh, worker_memory
from featcache.reading.containers import Containers, Wanted
from featcache.reading.feature_arrays import memory_for
from featcache.reading.opening import CachePath
from featcache.samplers.batches import BatchOf, Needs, Numbering, require_rows_of, within_table
from featcache.tables.table import FeatureTable
from featcache.tables.times import PartByRule, Seconds, frames_of

# Indices of items: a row or an id, and the frames or seconds of it where not all is wanted.

Key = int | str
Part = slice | Seconds | PartByRule
Index = Key | tuple[Key, Part]


def key_and_part(index: Index) -> tuple[Key, Part | None]:
    """Return the row or id of an index, and the part of it that is wanted; None for all."""
    if not isinstance(index, tuple):
        return index, None
    if len(index) == 2 and isinstance(index[1], Part):
        return index
    raise ConfigError(
        "an index is a row number, an id, or one of them with frames, [id, 100:200], or with "
        f"seconds, [id, featcache.Seconds(1.0, 2.5)], not {index!r}"
    )


def keys_and_parts(indices: Sequence[Index]) -> tuple[Sequence[Key], Sequence[Part | None]]:
    """Return the rows or ids of a batch, and the parts that are wanted; no parts: all of all."""
    if {int, str}.issuperset(map(type, indices)):  # which those of most samplers are
        return cast(Sequence[Key], indices), ()
    keys, parts = zip(*map(key_and_part, indices), strict=True)
    return keys, parts


def cuts_by_feature(
    table: FeatureTable,
    features: Sequence[str],
    rows: Ints,
    keys: Sequence[Key],
    parts: Sequence[Part | None],
) -> Mapping[str, list[tuple[int, slice]]]:
    """Return, for each feature, the frames of those rows of which a part is wanted, by place."""
    cuts = [(place, part) for place, part in enumerate(parts) if isinstance(part, slice)]
    by_feature = {name: cuts.copy() for name in features}
    timed = [(place, part) for place, part in enumerate(parts) if isinstance(part, Seconds)]
    if timed:
        places, seconds = zip(*timed, strict=True)
        named = [keys[place] for place in places]
        for place, frames in zip(
            places, frames_of(table, rows[[*places]], named, seconds, features), strict=True
        ):
            for name, cut in frames.items():
                by_feature.setdefault(name, []).append((place, cut))
    ruled = [(place, part) for place, part in enumerate(parts) if isinstance(part, PartByRule)]
    if ruled:
        cut_rows = rows[[place for place, _ in ruled]]
        for name in filter(table.has_frames, by_feature):
            times = table.selection.blocks.frame_times(name)
            frame_s = None if times is None else times.frame_s
            lengths = table.lengths(name, rows=cut_rows).tolist()
            by_feature[name] += [
                (place, part.frames(name, frame_s, length))
                for (place, part), length in zip(ruled, lengths, strict=True)
            ]
    return by_feature


def span_of(feature: str, key: Key, length: int, cut: slice) -> tuple[int, int]:
    """Return the first frame and the number of frames of a cut through `length` frames."""
    start = 0 if cut.start is None else cut.start
    stop = length if cut.stop is None else cut.stop
    whole = isinstance(start, int | np.integer) and isinstance(stop, int | np.integer)
    if cut.step is not None or not whole or not 0 <= start <= stop <= length:
        steps = "" if cut.step is None else f" in steps of {cut.step}"
        hint = "" if whole else ", in whole numbers; seconds are featcache.Seconds(start_s, stop_s)"
        raise WindowError(
            f"utterance {key!r}, feature {feature!r}: frames {start} to {stop}{steps} are not "
            f"within 0 to {length}{hint}"
        )
    return start, stop - start


# `FeatureDataset`: utterances of a cache as torch items, and whole padded batches.
#
# A batch is read straight from the cache's bytes into its tensors, as its layout has it.

_log = logging.getLogger("featcache")
Dtype = str | torch.dtype
Transform = Callable[[Item, np.random.Generator], Item]
ARRAYS = ("torch", "numpy")
PACKED = Packed()
BESIDE = ("lengths", "cu_seqlens", "max_seqlen", "position_ids")  # of a feature in a batch


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Contents of a batch, known before anything is read."""

    rows: Ints
    # per feature the first frame and the number of frames of each row
    spans: Mapping[str, tuple[Ints, Ints]]
    ends: Mapping[str, Ints]  # per feature where the places of the rows begin and end, in frames
    nbytes: int
    filled: int  # of these bytes, no padding
    draw: tuple[int, int]  # seed and epoch


class _WholeBatch(Batch):
    """A batch that tells how to hand it on: torch's own collate function wants a list."""

    def __missing__(self, key: object) -> object:
        if key == 0:
            raise ConfigError(
                "batches are made already; give the DataLoader collate_fn=FeatureDataset.collate"
            )
        raise KeyError(key)


class FeatureDataset(Dataset[Item]):
    """Features of a cache as a map-style data set, by row number or by id.

    An item is a dict: "id", per feature its tensor of shape (frames, *dims) and under
    "<feature>_lengths" its frames; a feature without a time axis has shape `dims` and no lengths.
    An index `(row or id, slice)` reads these frames alone, of every feature with a time axis;
    `(row or id, Seconds(1.0, 2.5))` the frames of this time, each feature's own.
    Negative rows count from the end, as in lists; a slice or a list of indices gives a list of
    items.

    A batch, `__getitems__(indices)`, is one dict: "id" a list, tensors of shape (utterances,
    longest, *dims) with zeros behind the frames, lengths int64; or as another `layout` has it.
    torch's DataLoader asks for batches in this way; its `collate_fn=FeatureDataset.collate` hands
    them on. In a DataLoader's worker they are made in shared memory. Threads, forks and pickles may
    share it, as far as they may share its `transform`.

    Args:
        source: a cache or its path, or caches put together by `join` or `concat`.
        features: names of the features to read, all by default.
        annotations: names of the annotations to read, none by default. Those of an item are plain
            values, None where there is none. A batch lists them; numbers and bools that every
            utterance of the caches has are a tensor, of floats in torch's default dtype.
        dtypes: dtypes to convert features to, e.g. {"ssl": "float32", "tokens": torch.int64}; else
            as declared. As torch does it: what does not fit into a smaller dtype overflows.
        transform: called with each item and a generator, `transform(item, rng)`, returns an item.
            It runs where the reading runs. A tensor or array that it adds with "<name>_lengths"
            beside it is laid out as features are, other ones and numbers are stacked, the rest
            listed, as are annotations that a batch lists, without lengths. A note on its errors
            names the utterance. The generator is `numpy.random.default_rng((seed, epoch, row))`: a
            row has the same draw on any worker and rank, and after a resume. Seed and epoch are
            those of the sampler that made a batch, where it is one of `featcache.samplers`, also in
            a DataLoader; else those of this data set, whose `set_epoch` workers hear of that are
            started after it.
        seed: that of a batch whose sampler has none, and of single items.
        layout: how the utterances of a batch lie in the tensor of a feature with a time axis:
            "padded", "packed", "jagged", or an object of `featcache.loading` with settings,
            `Padded(pad_to=[400, 800])` or `Packed(multiple_of=8, position_ids=True)`.
        arrays: "torch", or "numpy" for NumPy arrays in place of all tensors, over the same memory.
            bfloat16 is then read as float32: NumPy does not have it.
        variants: `{"fbank": ["fbank", "fbank_v1"]}`: each item has one of these stored features
            as "fbank", drawn by seed, epoch and row as for `transform`. Features that this and
            `layers` name are not read by themselves, unless `features` names them.
        layers: `{"ssl": ["ssl-6", "ssl-9"]}`: stored features of one shape, in one tensor of shape
            (frames, layers, *dims).
        random_crop_s: seconds of an utterance, at a random time by seed, epoch and row, of which
            all features have the frames; no other bytes are read. Shorter utterances are whole.
            Where features have less time than that in common, they may begin at other times.
            Samplers that are made from the data set know the lengths of crops.
        allow_incomplete: also read caches that their writer has not finished.

    Raises `IncompleteError` for an unfinished cache, `KeyNotFoundError` for an unknown feature or
    id, `RowError` for an unknown row, `WindowError` for frames that an utterance does not have, and
    `ConfigError` for a batch of a sampler that was made for other utterances, that counted another
    layout (batches to pack, lengths to pad to), or frames of other crops. (A sampler made from
    bare lengths is trusted where they are those of all rows; a host that copies the batches into
    lists of its own, as `torch.utils.data.Subset` does, hides what they number.)

    >>> dataset = FeatureDataset("features/train")            # doctest: +SKIP
    >>> dataset["utt-7", 100:200]["fbank"].shape              # doctest: +SKIP
    torch.Size([100, 80])
    """

    def __init__(
        self,
        source: FeatureTable | CachePath,
        features: str | Sequence[str] | None = None,
        *,
        annotations: str | Sequence[str] = (),
        dtypes: Mapping[str, Dtype] | None = None,
        transform: Transform | None = None,
        seed: int = 0,
        layout: str | Layout = "padded",
        arrays: Literal["torch", "numpy"] = "torch",
        variants: Mapping[str, Sequence[str]] | None = None,
        layers: Mapping[str, Sequence[str]] | None = None,
        random_crop_s: float | None = None,
        allow_incomplete: bool = False,
    ) -> None:
        self.seed = whole_number("seed", seed, 0)
        self.epoch = 0
        self.table = FeatureTable.of(source)
        if not allow_incomplete:
            self.table.require_complete()
        self.table.selection.share()  # for workers
        named = [features] if isinstance(features, str) else features
        self.choices = Choices(self.table, named, variants, layers, random_crop_s)
        wanted = [*self.choices.features]
        self.layout = layout_of(layout)
        self.arrays = _checked_arrays(arrays, self.layout)
        self._dtypes = self._dtypes_of(wanted, dtypes or {})
        if not wanted:
            known = ", ".join(map(repr, self.table.features))
            raise ConfigError(f"no feature is asked for; there are {known}")
        self._annotations = [annotations] if isinstance(annotations, str) else list(annotations)
        self._listed = {name for name in self._annotations if not self._stacked(name)}
        _check_names([*wanted, *self._annotations], self.layout)
        self._transform = transform
        _tell_nothing(self.table)
        self._told = False  # that a mix is read without its plan
        self._proof: tuple[object, ...] = ()  # that a sampler's numbers are rows of the table
        self._met: Needs | None = None  # of the last sampler: batches are laid out as it counted

    def view(self, table: FeatureTable) -> FeatureDataset:
        """Return a data set over a view of the table, with the same features and transform."""
        made = FeatureDataset(
            table,
            self.features,
            annotations=self._annotations,
            dtypes=self._dtypes,
            transform=self._transform,
            seed=self.seed,
            layout=self.layout,
            arrays=self.arrays,
            variants=self.choices.variants,
            layers=self.choices.layers,
            random_crop_s=self.choices.random_crop_s,
            allow_incomplete=True,  # as this one, if it is
        )
        made.set_epoch(self.epoch)
        return made

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that `transform` draws for, where no sampler or loader has one."""
        self.epoch = whole_number("epoch", epoch, 0)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features in an item."""
        return tuple(self._dtypes)

    @property
    def transforms(self) -> bool:
        """Whether items go through a transform."""
        return self._transform is not None

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        return f"<FeatureDataset: {len(self)} utterances of {', '.join(self.features)}>"

    @overload
    def __getitem__(self, index: Index) -> Item: ...
    @overload
    def __getitem__(self, index: slice | list[Index]) -> list[Item]: ...
    def __getitem__(self, index: Index | slice | list[Index]) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        if isinstance(index, np.ndarray | torch.Tensor) and index.ndim == 1:
            index = cast(list[Index], index.tolist())
        if isinstance(index, BatchOf):
            return list(self._items(self._plan(index, None, PACKED)))
        if isinstance(index, list):
            return [self[one] for one in index]
        return next(self._items(self._plan([self._from_the_end(index)], None, PACKED)))

    def __getitems__(self, indices: Sequence[Index]) -> Batch:
        allocate = fresh if get_worker_info() is None else worker_memory()
        return _WholeBatch(self.read(self.plan(indices), allocate))

    @staticmethod
    def collate(batch: Batch | list[Item]) -> Batch:
        """Hand on a batch, and pad a list of items: the `collate_fn` of a DataLoader."""
        return batch_of(batch) if isinstance(batch, list) else ShownBatch(batch)

    def collated(self, batch: Batch | list[Item]) -> Batch:
        """Hand on a batch, and make one of a list of items in the layout of this data set."""
        return self._batch_of(batch, fresh) if isinstance(batch, list) else ShownBatch(batch)

    def plan(self, indices: Sequence[Index], epoch: int | None = None) -> BatchPlan:
        """Return the rows, frames and size of a batch, without reading any array.

        `epoch` is that of a batch which does not say it, as those of foreign samplers.
        """
        return self._plan(indices, epoch, self._laid_out)

    def _plan(self, indices: Sequence[Index], epoch: int | None, layout: Layout) -> BatchPlan:
        if isinstance(indices, str) or not isinstance(indices, Sized):
            raise ConfigError(f"a batch is a list of row numbers or ids, not {indices!r}")
        if len(indices) == 0:
            raise ConfigError("a batch needs at least one utterance")
        self.require_made_for(indices)
        if self.table.plan is not None and getattr(indices, "draw", None) is None:
            self._tell_unplanned(len(indices))
        keys, parts = keys_and_parts(indices)
        rows = self.table.numbers(keys)
        draw = getattr(indices, "draw", None)
        draw = draw or (self.seed, self.epoch if epoch is None else epoch)
        if any(isinstance(part, Seconds | PartByRule) for part in parts):
            self.choices.require_same_times()
        first_stored = {name: self.choices.stored(name)[0] for name in self.features}
        cuts = cuts_by_feature(self.table, [*first_stored.values()], rows, keys, parts)
        spans, ends, nbytes, filled = {}, {}, 0, 0
        for name, (starts, lengths, wholes) in self.choices.spans(rows, draw).items():
            if self.choices.has_frames(name):
                for place, cut in cuts[first_stored[name]]:
                    whole = int(wholes[place])
                    starts[place], lengths[place] = span_of(name, keys[place], whole, cut)
                ends[name] = ends_by(
                    layout, name, lengths, lambda place: self.table.id(int(rows[place]))
                )
            else:
                ends[name] = np.arange(len(rows) + 1)
            spans[name] = starts, lengths
            frames = int(ends[name][-1])
            if self._transform is not None and self.choices.has_frames(name):
                frames = self._frames_of_items(lengths)
            frame_bytes = math.prod(self.choices.dims(name)) * self._dtypes[name].itemsize
            nbytes += frames * frame_bytes
            filled += int(lengths.sum()) * frame_bytes
        return BatchPlan(rows, spans, ends, nbytes, filled, draw)

    def _frames_of_items(self, lengths: Ints) -> int:
        """Return the frames of a batch of items, padding included, if `transform` changes none."""
        try:
            return int(self.layout.ends(lengths)[-1])
        except ConfigError:  # longer than all of `pad_to`: perhaps `transform` makes them shorter
            return int(lengths.max()) * len(lengths)

    def require_made_for(self, batches: object) -> None:
        """Raise `ConfigError` for a batch or a sampler that does not go with this data set.

        Its numbers count other utterances, or it counted another layout or other frames.
        """
        numbering = getattr(batches, "numbering", None)
        if isinstance(numbering, Numbering) and numbering.table is not self.table:
            if numbering.proof != self._proof:
                require_rows_of(self.table, numbering)
            self._proof = numbering.proof
        needs = getattr(batches, "needs", None)
        if isinstance(needs, Needs) and needs is not self._met:
            if needs != self._met:
                require_layout(self.layout, needs)
                self._require_crops(needs)
            self._met = needs

    def _require_crops(self, needs: Needs) -> None:
        crop_s = self.choices.random_crop_s
        if needs.of_table and needs.random_crop_s != crop_s:
            raise ConfigError(
                f"the batch sampler counts frames for random_crop_s={needs.random_crop_s!r}, and "
                f"the FeatureDataset has random_crop_s={crop_s!r}; make the sampler of this data "
                f"set: {needs.sampler}(dataset, ...)"
            )

    def read(self, plan: BatchPlan, allocate: Allocate) -> Batch:
        """Read a planned batch into tensors that `allocate` makes."""
        if self._transform is not None:
            return self._batch_of(list(self._items(plan)), allocate)
        batch: Batch = ShownBatch(id=self._ids(plan))
        for name in self._dtypes:
            ends, dims = plan.ends[name], self.choices.dims(name)
            if self.choices.has_frames(name):
                values = self._values(plan, name, self.layout.shape(ends, dims), allocate)
                lengths = plan.spans[name][1]
                batch.update(self.layout.entries(name, values, lengths, allocate))
            else:
                batch[name] = self._values(plan, name, (len(plan.rows), *dims), allocate)
        for name in self._annotations:
            batch[name] = self.table.annotation(name).take(plan.rows)
            if name not in self._listed:
                values = torch.tensor(batch[name])
                batch[name] = allocate(tuple(values.shape), values.dtype).copy_(values)
        return self._in_arrays(batch)

    def wanted(self, plan: BatchPlan) -> Wanted:
        """Return what a planned batch reads of object stores."""
        wanted: Wanted = {}
        if self.lies_afar:
            for name, span in plan.spans.items():
                self.choices.want(plan.rows, name, span, plan.draw, wanted)
        return wanted

    @property
    def lies_afar(self) -> bool:
        """Whether some bytes lie in an object store, and what was read lately was not all here."""
        return self.is_remote and any(each.lie_afar for each in self._containers)

    @cached_property
    def is_remote(self) -> bool:
        """Whether bytes of any of its caches lie in an object store."""
        return any(each.is_remote for each in self._containers)

    @property
    def asked(self) -> tuple[int, int, int]:
        """Requests to object stores, their bytes, and bytes read, of its caches in this process."""
        places = {id(each): each for some in self._containers for each in some.counts}
        counts = places.values()
        return (
            sum(each.gets for each in counts),
            sum(each.nbytes for each in counts),
            sum(each.read_bytes for each in counts),
        )

    @property
    def _containers(self) -> list[Containers]:
        opened = self.table.selection.blocks.generations
        return [each.containers for one in opened for each in one.sets.values() or (one,)]

    def _batch_of(self, items: list[Item], allocate: Allocate) -> Batch:
        return self._in_arrays(batch_of(items, self.layout, allocate, self._listed))

    def _in_arrays(self, batch: Batch) -> Batch:
        """Put NumPy arrays in the place of tensors, where they are asked for."""
        if self.arrays == "numpy":
            for name, value in batch.items():
                if isinstance(value, torch.Tensor):
                    batch[name] = value.numpy()
        return batch

    def _ids(self, plan: BatchPlan) -> list[str]:
        return self.table.selection.ids_of(plan.rows)

    def _values(self, plan: BatchPlan, name: str, shape: Shape, allocate: Allocate) -> torch.Tensor:
        """Read a feature into one tensor."""
        dtype, dims = self._dtypes[name], self.choices.dims(name)
        stored = torch_dtype(self.choices.dtype(name))
        with memory_for(name, shape[: len(shape) - len(dims)], dims):
            out = allocate(shape, dtype)
            read = out if dtype == stored else fresh(shape, stored)
        outs = places_of(read, plan.ends[name])
        self.choices.read_into(plan.rows, name, plan.spans[name], plan.draw, outs)
        if read is not out:
            out.copy_(read)  # float16 to float32 takes numpy 16 times as long
        return out

    def _dtypes_of(
        self, features: list[str], others: Mapping[str, Dtype]
    ) -> dict[str, torch.dtype]:
        """Return the dtypes of features: those asked for, else as declared."""
        found = {name: torch_dtype(self.choices.dtype(name)) for name in features}
        if self.arrays == "numpy":
            half = torch.bfloat16
            found |= {name: torch.float32 for name, kind in found.items() if kind == half}
        found |= _other_dtypes(others, features)
        if self.arrays == "numpy" and torch.bfloat16 in found.values():
            raise ConfigError("NumPy has no bfloat16; with arrays='numpy' give another of dtypes")
        return found

    def _stacked(self, name: str) -> bool:
        annotation = self.table.annotation(name)
        return annotation.kind in ("int", "float", "bool") and not annotation.has_missing

    @property
    def _laid_out(self) -> Layout:
        """The layout that is read; of items without padding, from which a batch is made then."""
        return self.layout if self._transform is None else PACKED

    def _items(self, plan: BatchPlan) -> Iterator[Item]:
        frames = {
            name: self._values(plan, name, (int(ends[-1]), *self.choices.dims(name)), fresh)
            for name, ends in plan.ends.items()
        }
        columns = {name: self.table.annotation(name).take(plan.rows) for name in self._annotations}
        for number, (row, id) in enumerate(zip(plan.rows.tolist(), self._ids(plan), strict=True)):
            item: Item = {"id": id}
            for name, tensor in frames.items():
                begin = int(plan.ends[name][number])
                if self.choices.has_frames(name):
                    length = int(plan.spans[name][1][number])
                    item[name] = tensor[begin : begin + length]
                    item[f"{name}_lengths"] = length
                else:
                    item[name] = tensor[begin]
            item |= {name: column[number] for name, column in columns.items()}
            item = self._in_arrays(item)
            if self._transform is not None:
                try:
                    item = self._transform(item, np.random.default_rng((*plan.draw, row)))
                except Exception as error:
                    error.add_note(f"in the transform of utterance {id!r}")
                    raise
            yield item

    def _tell_unplanned(self, size: int) -> None:
        """Warn once of batches of a mix that no sampler of featcache has made."""
        if size > 1 and not self._told:
            self._told = True
            _log.warning(
                "batches of a mix are drawn by a sampler that knows nothing of its plan: give "
                "featcache.samplers to the loader, or it reads each row once an epoch"
            )

    def _from_the_end(self, index: Index) -> Index:
        """Return an index whose row, if it is negative, is counted from the end."""
        key, cut = key_and_part(index)
        if isinstance(key, int | np.integer) and -len(self) <= key < 0:
            key = int(key) + len(self)
        return key if cut is None else (key, cut)


def _other_dtypes(dtypes: Mapping[str, Dtype], features: list[str]) -> dict[str, torch.dtype]:
    if not isinstance(dtypes, Mapping):
        raise ConfigError(
            "dtypes is a mapping of features to dtypes, "
            f"{dict.fromkeys(features[:1], 'float32')!r}, not {dtypes!r}"
        )
    found = {}
    for name, dtype in dtypes.items():
        if name not in features:
            raise ConfigError(
                f"dtypes names a feature {name!r} that is not read; {nearest(name, features)}"
            )
        with errors_about(f"dtypes, feature {name!r}"):
            found[name] = torch_dtype(dtype)
    return found


def _checked_arrays(arrays: Literal["torch", "numpy"], layout: Layout) -> Literal["torch", "numpy"]:
    if arrays not in ARRAYS:
        raise UnknownNameError(f"arrays has no choice {arrays!r}; {nearest(arrays, ARRAYS)}")
    if arrays == "numpy" and isinstance(layout, Jagged):
        raise ConfigError("NumPy has no nested tensors; with arrays='numpy' take layout='packed'")
    return arrays


def _check_names(names: list[str], layout: Layout) -> None:
    kinds = BESIDE if isinstance(layout, Packed) else BESIDE[:1]
    for name in names:
        beside = {f"{name}_{what}" for what in kinds}
        if name == "id" or beside.intersection(names) or names.count(name) > 1:
            raise ConfigError(f"{names!r}: an item has other uses for these names")


def _tell_nothing(table: FeatureTable) -> None:
    """Warn of a table without utterances: a loop over it does nothing, and says nothing."""
    if not len(table):
        _log.warning("%r has no utterances: there is nothing to load of it", table)


def dataset_of(source: object) -> FeatureDataset | None:
    """Return a `FeatureDataset` as it is, some items of one as that of a view; else None."""
    owner, table = within_table(source) or (None, None)
    if table is None or not isinstance(owner, FeatureDataset):
        return None
    return owner if table is owner.table else owner.view(table)

"""Epochs of a sampler: batches drawn by seed and epoch, their state, and their shares by rank."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from featcache._checks import number_in_state, whole_number
from featcache.errors import ConfigError, StateError
from featcache.format import ends_of
from featcache.interface import Ints
from featcache.samplers.batches import Batches, EpochBatches, WindowedBatches
from featcache.tables import VERSION, Order, check_version, drawn, mixed

# One iteration of a sampler on one rank, and hosts that would share its batches out again.

# attributes by which wrappers hold the sampler that they share out
HOLDS = ("batch_sampler", "sampler", "dataset")


@dataclass(frozen=True, slots=True)
class RankShare:
    """The batches of all ranks from a step on, in steps of one batch for each rank.

    Attributes:
        first: the step, of these batches, that comes first.
        before: steps of the whole epoch that come before it.
    """

    batches: EpochBatches
    rank: int
    world_size: int
    first: int = 0
    before: int = 0

    def __len__(self) -> int:
        return len(self.batches) // self.world_size - self.first

    def __getitem__(self, step: int) -> list[int] | list[str]:
        return self.batches.batch((self.first + step) * self.world_size + self.rank)

    def position(self, step: int) -> int:
        """Return how many utterances of the epoch all ranks have taken after that many steps."""
        if step == len(self):  # what drop_last leaves out is done with, too
            return self.batches.utterances
        return self.batches.end((self.first + step) * self.world_size)

    def step_at(self, position: int) -> int:
        """Return the first step that begins at a position of the epoch or behind it."""
        number = self.batches.number_at(position)
        number += self.batches.end(number) < position
        return min(-(-number // self.world_size), len(self.batches) // self.world_size)


class Iteration(Iterator[list[int] | list[str]]):
    """This rank's batches of an epoch, which may still be chosen until the first one is taken.

    A loader that reads ahead says what it has handed on (`deliver`), and when it comes to its end.

    Attributes:
        ended: whether it was asked for more than there is.
        comes_again: whether `set_epoch` named its epoch anew.
    """

    def __init__(self, begin: Callable[[Iteration], object]) -> None:
        self._begin = begin
        self._share: RankShare | None = None
        self._steps = 0  # of the share: asking for its length costs as much as a batch
        self._taken = 0
        self._delivered: int | None = None
        self.ended = False
        self.comes_again = False

    def __next__(self) -> list[int] | list[str]:
        if self._share is None:
            self._begin(self)
        step = self._taken
        if step == self._steps:
            self.ended = self.ended or self._delivered is None
            raise StopIteration
        self._taken = step + 1
        return self.share[step]

    def take(self, share: RankShare) -> None:
        """Begin with these batches."""
        self._steps = len(share)
        self._share = share

    def deliver(self, batches: int) -> None:
        """Count so many batches as handed on, whatever was taken to read ahead."""
        self._delivered = batches

    def end(self) -> None:
        """Note that all was handed on, and more asked for."""
        self.ended = True

    def come_again(self) -> None:
        """Note that `set_epoch` named the epoch anew."""
        self.comes_again = True

    @property
    def share(self) -> RankShare:
        """The batches of this iteration, which has begun."""
        assert self._share is not None
        return self._share

    @property
    def steps(self) -> int:
        """Batches that were taken, or delivered."""
        return self._taken if self._delivered is None else self._delivered

    @property
    def complete(self) -> bool:
        """Whether all batches were taken, or delivered."""
        return self.steps == len(self.share)


def refuse_sharing_again(sampler: object) -> None:
    """Raise `ConfigError` if a wrapper that iterates gives its process a part of the batches only.

    The sampler has shared them out already: most would never be seen. Such wrappers (of
    accelerate, SpeechBrain) name the number of processes in an attribute, and ask for the first
    batch from a method of their own.
    """
    frame = sys._getframe(1)  # noqa: SLF001  # no other way to look
    while frame is not None:
        caller = frame.f_locals.get("self")
        processes = _processes(caller)
        if processes > 1 and _leads_to(caller, sampler):
            raise ConfigError(
                f"{type(caller).__name__} would share the batches out over {processes} processes, "
                "but the sampler does so itself, and most would never be seen: leave the loader "
                "out of accelerate's prepare(), or use a FeatureLoader, which prepare() hands on "
                "as it is; give SpeechBrain the loader whole, not as loader arguments"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _processes(caller: object) -> int:
    found = getattr(caller, "__dict__", {})
    counts = [found.get("num_processes"), found.get("num_replicas")]
    return max((count for count in counts if isinstance(count, int)), default=1)


def _leads_to(holder: object, sampler: object, depth: int = 4) -> bool:
    if holder is sampler:
        return True
    held = getattr(holder, "__dict__", {})
    return depth > 0 and any(
        _leads_to(held[name], sampler, depth - 1) for name in HOLDS if name in held
    )


# Sharing of an epoch's batches among ranks, shuffled so that the ranks' batches are alike.

# Up to 48, each divisible by many numbers of ranks: the batches of a step are then in one group.
GROUP_SIZES = (1, 2, 4, 6, 12, 24, 48)


def share_out(ends: Ints, position: int, world_size: int, drop_last: bool) -> Ints:
    """Return where the batches from `position` on begin and end, a multiple of `world_size`.

    The incomplete last step's batches are cut into as many as there are ranks, from the largest on;
    where they have too few utterances, those of the steps before it as well. Raises `ConfigError`
    where that cannot be done.

    >>> share_out(np.array([0, 4, 8, 13]), 0, 2, False).tolist()
    [0, 4, 8, 10, 13]
    """
    rest = np.concatenate([[position], ends[np.searchsorted(ends, position, "right") :]])
    count = len(rest) - 1
    over = count % world_size
    if over == 0:
        return rest
    if drop_last and (position or count > over):
        return rest[: count - over + 1]
    missing = world_size - over
    sizes = np.diff(rest)
    # more batches that can be made of the last one, the last two, ...
    spare = np.cumsum(sizes[::-1] - 1)
    if drop_last or spare[-1] < missing:
        raise ConfigError(
            f"{count} batches of {rest[-1] - position} utterances cannot be shared by {world_size} "
            f"ranks{', and drop_last leaves nothing' if drop_last else ''}; use fewer ranks, "
            f"smaller batches{'' if drop_last else ', or drop_last=True'}"
        )
    enough = int(np.searchsorted(spare, missing)) + 1
    first = count - over - max(-(-(enough - over) // world_size), 0) * world_size
    pieces = np.ones(count - first, np.int64)
    for _ in range(missing):
        pieces[np.argmax(sizes[first:] / pieces)] += 1
    cuts = [
        begin + size * np.arange(1, parts + 1) // parts
        for begin, size, parts in zip(rest[first:-1], sizes[first:], pieces, strict=True)
    ]
    return np.concatenate([rest[: first + 1], *cuts])


def group_size(count: int) -> int:
    """Return how many of so many batches make a group.

    At most the square root of `count`: larger groups leave little to shuffle, smaller ones give few
    ranks batches that are alike.
    """
    return max(size for size in GROUP_SIZES if size * size <= max(count, 1))


def shuffled_in_groups(count: int, key: int) -> Ints:
    """Return the numbers below `count` in random order: groups of neighbours, each shuffled, too.

    The size of a group depends on `count` alone, so that any number of ranks sees one order.
    Numbers that fill no group (6 here) come last, so that all groups begin at a multiple of their
    size.

    >>> shuffled_in_groups(9, key=5).tolist()
    [2, 3, 5, 4, 7, 6, 1, 0, 8]
    """
    size = group_size(count)
    groups, over = divmod(count, size)
    begin = (drawn(key, "begin") * (groups + 1) >> 64) * size
    order = np.arange(count)
    whole = np.delete(order, slice(begin, begin + over)).reshape(groups, size)
    within = mixed(order[: groups * size].astype(np.uint64), drawn(key, "within"))
    within_groups = np.argsort(within.reshape(groups, size), axis=1, kind="stable")
    whole = np.take_along_axis(whole, within_groups, axis=1)[Order(groups, drawn(key, "groups"))[:]]
    return np.concatenate([whole.ravel(), begin + Order(over, drawn(key, "over"))[:]])


def split_up(ends: Ints, count: int) -> Ints:
    """Return the ends of `count` batches: the largest are halved until there are enough.

    >>> split_up(np.array([0, 4, 5, 9]), 5).tolist()
    [0, 2, 4, 5, 7, 9]
    """
    while (missing := count - (len(ends) - 1)) > 0:
        sizes = np.diff(ends)
        largest = np.argsort(-sizes, kind="stable")[:missing]
        largest = largest[sizes[largest] > 1]
        if not len(largest):
            return ends
        ends = np.sort(np.concatenate([ends, ends[largest] + sizes[largest] // 2]))
    return ends


DRAWS = 20  # of an epoch's batches, until they are not too many


def drawn_evenly(
    draw: Callable[[int, int], tuple[Ints, Ints]],
    epoch: int,
    count: int,
    spare: Callable[[int, Ints], int],
    *,
    own_rows: bool = False,
) -> tuple[Ints, Ints, int]:
    """Return the rows and ends of an epoch of `count` batches, and that count.

    Hosts ask for the number of batches once, so all epochs have the same. `draw(epoch, number)`
    gives rows and ends; that of epoch 0 settles the count, where `count` is 0: as many more as
    `spare` says of their number and rows. It comes again where no draw of an epoch keeps to that;
    an epoch that has rows of its own (`own_rows`) then has more.
    """
    first = draw(0, 0) if epoch == 0 or not count else None
    if first is not None and not count:
        usual = len(first[1]) - 1
        count = min(usual + spare(usual, first[0]), len(first[0]))
    for number in range(DRAWS if epoch else 0):
        rows, ends = draw(epoch, number)
        if len(ends) - 1 <= count:
            return rows, split_up(ends, count), count
    if own_rows and epoch:
        return *draw(epoch, 0), count
    rows, ends = first or draw(0, 0)
    return rows, split_up(ends, count), count


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and number of ranks: those given, else those of `torch.distributed`, else 0 of 1.

    Raises `ConfigError` for one without the other, a rank that there is not, and for one of several
    processes that a launcher started but nothing has connected.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"rank and world_size are given together, not rank={rank!r} and "
            f"world_size={world_size!r}"
        )
    if rank is not None:
        size, number = whole_number("world_size", world_size, 1), whole_number("rank", rank, 0)
        if number >= size:
            raise ConfigError(
                f"rank must be below world_size={size}, not {number}; ranks count from 0"
            )
        return number, size
    return connected_rank(
        "call torch.distributed.init_process_group before the sampler is used, or give it rank "
        "and world_size"
    )


def connected_rank(advice: str) -> tuple[int, int]:
    """Return rank and number of ranks of `torch.distributed`; 0 of 1 without it.

    Raises `ConfigError`, with `advice`, for one of several processes that a launcher started but
    nothing has connected.
    """
    torch = sys.modules.get("torch")  # a process that has not loaded it is in no group
    if (
        torch is not None
        and torch.distributed.is_available()
        and torch.distributed.is_initialized()
    ):
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if _launched_with_others():
        # alone, each of them would train on everything
        raise ConfigError(f"several processes were started, but they are not connected; {advice}")
    return 0, 1


def _launched_with_others() -> bool:
    """Whether a launcher's variables name other processes.

    torchrun sets all of them, Lightning's ddp the last two.
    """
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    found = {name: os.environ.get(name, "") for name in alone}
    return any(value.isdigit() and int(value) > alone[name] for name, value in found.items())


class Shares(NamedTuple):
    """Share of a source: of an epoch, and the least and most of it in a window."""

    share: float
    least: float
    most: float


# The base of all samplers: an order of batches per epoch, shared out over any number of ranks.

State: TypeAlias = dict[str, object]  # numbers, strings and None


class EpochSampler(ABC):
    """An epoch's batches in an order that depends on seed and epoch alone, shared out over ranks.

    Give it to a DataLoader as `batch_sampler`. In each step the ranks take `world_size` batches
    that follow each other in that order, one each, so that all ranks have the same number of
    batches. Where they do not come out even, the batches of the last step are cut smaller until
    each rank has one; no utterance is given twice to make up the number.

    Without `rank` and `world_size`, those of `torch.distributed` when an iteration begins, or one
    rank if it is not in use. An iteration begins with its first batch. One that came to its end is
    followed by the next epoch, one that was left before by the same again; `set_epoch` has the last
    word. (A DataLoader with workers takes the last batches before it delivers them: left between,
    it goes on to the next epoch.) One thread iterates over a sampler, whose place is the sampler's;
    forks and pickles have a place of their own.

    Args:
        seed: draws another order; the same on all ranks.
        rank: number of this process, from 0, together with `world_size`.
        world_size: how many processes share the batches.
        drop_last: leave the last step's batches out instead of cutting them smaller.

    Raises `ConfigError` for what cannot work; for too few utterances to share, when the epoch is
    begun.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.seed = whole_number("seed", seed, 0)
        self._given_rank = None if rank is world_size is None else resolve_rank(rank, world_size)
        self.drop_last = drop_last
        self.epoch = 0
        self._start = 0  # the position of the iteration that was begun last, or of the next one
        self._ended = False  # the loaded state is that of an epoch that had come to its end
        self._iteration: Iteration | None = None  # begun last, in this epoch
        self._waiting = False  # a newer one was made, and has not begun
        # an epoch, and its batches of all ranks together
        self._batches: tuple[int, Batches | WindowedBatches] | None = None
        # two of them, by epoch, position, rank and world_size
        self._shares: dict[tuple[int, ...], RankShare] = {}

    @property
    def rank(self) -> int:
        """Number of this process, from 0, as it is now.

        Raises `ConfigError` where it cannot be known.
        """
        return self._rank_of_size()[0]

    @property
    def world_size(self) -> int:
        """Number of processes that share the batches, as it is now."""
        return self._rank_of_size()[1]

    @property
    def sampler(self) -> EpochSampler:
        """The sampler itself: Lightning and accelerate look here for `set_epoch`."""
        return self

    @abstractmethod
    def epoch_batches(self, epoch: int) -> Batches | WindowedBatches:
        """Return an epoch's batches in the order in which all ranks together take them.

        None of them empty.
        """

    @abstractmethod
    def settings(self) -> State:
        """Return what the order depends on beside seed and epoch: settings, a digest as "data"."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration.

        The one that the sampler is in comes again; after `load_state_dict` what was left of it
        comes.
        """
        number = whole_number("epoch", epoch, 0)
        if number != self.epoch:
            self._go_to(number, 0)
        else:
            self._ended = False
            if self._iteration is not None:
                self._iteration.come_again()

    def __iter__(self) -> Iterator[list[int] | list[str]]:
        """Iterate over this rank's batches of the epoch; after `load_state_dict` the rest, once."""
        self._waiting = True
        return Iteration(self._begin)

    def __len__(self) -> int:
        """Count the batches of a whole epoch for this rank, wherever in it the sampler is."""
        return len(self._shared(self.epoch, 0))

    def source_shares(self, window: int = 1000) -> dict[str, Shares]:
        """Return the share of each source of a mix in this epoch's batches of all ranks, by name.

        And the least and the most of it among any `window` utterances of batches that follow on.
        Raises `ConfigError` unless the rows are those of a mix.
        """
        table = getattr(self, "table", None)
        if table is None or table.plan is None:
            raise ConfigError(f"{self!r} has no mix, whose sources have shares")
        rows = np.concatenate([some.items for some in self._epoch(self.epoch).windows])
        source_of = table.plan.source_of(rows)
        window = min(whole_number("window", window, 1), len(rows))
        found = {}
        for number, name in enumerate(table.plan.taken):
            before = ends_of(source_of == number)
            some = before[window:] - before[:-window]
            least, most = int(some.min()) / window, int(some.max()) / window
            found[name] = Shares(int(before[-1]) / len(rows), least, most)
        return found

    def state_dict(self, steps: int | None = None) -> State:
        """Return where the epoch stands, the same on all ranks, as a dict that JSON can hold.

        Any number of ranks can go on from it: "position" counts the utterances that all ranks
        together have taken.

        Args:
            steps: batches that this rank has trained on since the iteration began. By default as
                many as were taken from the newest iterator; a DataLoader with workers takes more
                than it delivers: count these yourself.
        """
        newest = None if self._waiting else self._iteration
        epoch, start = self._coming() if self._waiting else (self.epoch, self._start)
        share = self._shared(epoch, start) if newest is None else newest.share
        ended = self._ended if newest is None else newest.ended and not newest.comes_again
        taken = 0 if newest is None else newest.steps
        done = taken if steps is None else whole_number("steps", steps, 0)
        if done > len(share):
            raise ConfigError(
                f"steps={done} is more than the {len(share)} of this iteration of epoch {epoch}"
            )
        return {
            **self._identity(),
            "epoch": epoch,
            "position": share.position(done),
            # then the next epoch comes, unless set_epoch names this one
            "ended": ended and steps is None,
            "version": VERSION,
        }

    @property
    def steps_before(self) -> int:
        """Steps of the epoch that came before the iteration which runs, or will, after a resume."""
        return self._shared(self.epoch, self._start).before

    @property
    def steps_done(self) -> int:
        """Steps of the epoch that are done with, as `state_dict` counts them."""
        newest = self._iteration
        if newest is None or (self._waiting and not newest.complete):
            return self.steps_before
        return self.steps_before + newest.steps

    def batch(self, step: int) -> list[int] | list[str]:
        """Return this rank's batch of a step of the epoch that the sampler is in.

        Steps before a resume are as this number of ranks shares them. Raises `ConfigError` for a
        step that the epoch does not have.
        """
        share, place = self._place(step, last=False)
        return share[place]

    def seek(self, step: int) -> None:
        """Begin the next iteration at a step of the epoch that the sampler is in.

        Raises `ConfigError` for a step that the epoch does not have; that after the last one is the
        next epoch.
        """
        share, place = self._place(step, last=True)
        self._go_to(self.epoch, share.position(place), ended=place == len(share))

    def _place(self, step: int, last: bool) -> tuple[RankShare, int]:
        """Return the batches that a step of the epoch is among, and its number there."""
        number, before = whole_number("step", step, 0), self.steps_before
        later = number >= before
        share = self._shared(self.epoch, self._start if later else 0)
        place = number - before if later else number
        if place >= len(share) + last:
            raise ConfigError(
                f"epoch {self.epoch} has {before + len(share)} steps, counted from 0, and no step "
                f"{number}"
            )
        return share, place

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to where a state was saved, by any number of ranks.

        What is left of its epoch comes next.

        Raises `StateError` for a state of other data, another seed or other settings, which it
        names, of another version of the order, and for a dict that is no state; the sampler is then
        as it was.
        """
        epoch, position, ended = self._check(state)
        utterances = self._epoch(epoch).utterances
        if position > utterances:
            raise StateError(
                f"epoch {epoch} has {utterances} utterances, and the state is of position "
                f"{position}; begin the epoch anew, without the state"
            )
        self._go_to(epoch, position, ended)

    def _go_to(self, epoch: int, position: int, ended: bool = False) -> None:
        # all at once: a signal's handler may look at the state anywhere
        self.epoch, self._start, self._ended, self._iteration, self._waiting = (
            epoch,
            position,
            ended,
            None,
            False,
        )

    def _coming(self) -> tuple[int, int]:
        """Return epoch and position of the next iteration."""
        newest = self._iteration
        if newest is not None and newest.complete:
            return self.epoch + (not newest.comes_again), 0
        return (self.epoch + 1, 0) if self._ended else (self.epoch, self._start)

    def _begin(self, iteration: Iteration) -> None:
        epoch, start = self._coming()
        share = self._shared(epoch, start)
        if share.world_size > 1:
            refuse_sharing_again(self)
        iteration.take(share)
        self._go_to(epoch, start)
        self._iteration = iteration

    def _where(self) -> str:
        ranks = "" if self._given_rank is None else ", rank {} of {}".format(*self._given_rank)
        return f"epoch {self.epoch}{ranks}"

    def _rank_of_size(self) -> tuple[int, int]:
        return self._given_rank or resolve_rank(None, None)

    def _epoch(self, epoch: int) -> Batches | WindowedBatches:
        if self._batches is None or self._batches[0] != epoch:
            self._batches = epoch, self.epoch_batches(epoch)
        return self._batches[1]

    def _shared(self, epoch: int, start: int) -> RankShare:
        """Return an epoch's batches from a position on: one step takes `world_size` in a row."""
        rank, world_size = self._rank_of_size()
        wanted = epoch, start, rank, world_size
        made = self._shares.get(wanted)
        if made is None:
            made = self._share_from(epoch, start, rank, world_size)
            for held in list(self._shares)[:-1]:
                self._shares.pop(held, None)  # a signal's handler may have been here
            self._shares[wanted] = made
        return made

    def _share_from(self, epoch: int, start: int, rank: int, world_size: int) -> RankShare:
        """Return a share of what is left; of the whole epoch where one of its steps begins there.

        So batches that are cut for the ranks come after a resume as they would have without it.
        """
        draw, share = (self.seed, epoch), partial(share_out, drop_last=self.drop_last)
        step = 0
        if start:
            with suppress(ConfigError):  # so many ranks cannot share all, but perhaps what is left
                whole = self._shared(epoch, 0)
                step = whole.step_at(start)
                if whole.position(step) == start:
                    return RankShare(whole.batches, rank, world_size, first=step, before=step)
        left = self._epoch(epoch).rest(start, world_size=world_size, share=share, draw=draw)
        return RankShare(left, rank, world_size, before=step)

    def _identity(self) -> State:
        return {"sampler": type(self).__name__, "seed": self.seed, **self.settings()}

    def _check(self, state: Mapping[str, object]) -> tuple[int, int, bool]:
        """Return epoch, position and end of a state that is one of this sampler's."""
        if not isinstance(state, Mapping):
            raise StateError(f"a sampler's state is the dict that state_dict() gave, not {state!r}")
        mine = self._identity()
        if state.get("sampler", mine["sampler"]) != mine["sampler"]:
            raise StateError(
                f"the state is of a {state['sampler']}, and this is a {mine['sampler']}"
            )
        check_version(state)
        keys = {*mine, "epoch", "position", "ended", "version"}
        if keys != set(state):
            found = sorted(map(str, state))
            raise StateError(
                f"the state of a {mine['sampler']} has the keys {sorted(keys)}, not {found}"
            )
        others = [
            f"{name}={state[name]!r} (here {value!r})"
            for name, value in mine.items()
            if state[name] != value
        ]
        if others:
            raise StateError(
                f"the state was saved with {', '.join(others)}; go on with the same data and "
                "settings, or without it"
            )
        epoch = number_in_state("epoch", state)
        return epoch, number_in_state("position", state), state["ended"] is True

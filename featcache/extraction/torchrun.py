"""The processes of one `torchrun`, which share the work and wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch

from featcache.errors import IncompleteError, describe
from featcache.samplers.ranks import connected_rank

T = TypeVar("T")
_CONNECT = (
    "call ddp_init_group(run_opts) of speechbrain.utils.distributed, or "
    "torch.distributed.init_process_group, first"
)


class Ranks:
    """This process's place among those that `torch.distributed` connects, or `alone`.

    A context manager: in it, the ranks talk through a group of their own, in which one may wait for
    the others as long as it takes. The usual group would give up after minutes (NCCL) while another
    rank still computes.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._group: Any = None
        self.rank, self.size = (0, 1) if alone else connected_rank(_CONNECT)

    def __enter__(self) -> Self:
        if self.size > 1:
            self._group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=365))
        return self

    def __exit__(self, *error: object) -> None:
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, once all have come here; they must be picklable."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def together(self, task: Callable[[], T]) -> list[T]:
        """Run `task` on every rank and return what all of them return.

        A task that fails on one rank fails on all: there with its own error, elsewhere with
        `IncompleteError`.
        """
        if self._group is None:
            return [task()]
        result, error = None, None
        try:
            result = task()
        except BaseException as failure:
            error = failure
        outcomes = self.gather((result, describe(error) if error is not None else None))
        if error is not None:
            raise error
        self.refuse_failures(text for _, text in outcomes)
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def refuse_failures(self, errors: Iterable[str | None]) -> None:
        """Raise `IncompleteError` if another rank has failed, given each one's error, or None."""
        for rank, error in enumerate(errors):
            if error is not None and rank != self.rank:
                raise IncompleteError(f"rank {rank} failed with {error}; what was computed is kept")

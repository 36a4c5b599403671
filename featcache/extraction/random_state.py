"""The global random generators, which an extraction leaves as it found them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Give the generators of Python, NumPy and torch back the state that they had.

    A DataLoader draws the seed of its workers from torch's, also where it needs none; data sets and
    features draw from all of them. A training with the same seed must not go another way because
    its features were cached now.
    """
    python, arrays, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if _has_begun() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)
        elif _has_begun():  # since then: back to the seeds that it began with
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


def _has_begun() -> bool:
    """Say whether CUDA is in use; looking must not begin it: processes may be forked yet."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

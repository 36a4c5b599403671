"""Guesses at what is wrong with the shape of an array: a batch axis, transposed axes."""

from __future__ import annotations

Shape = tuple[int, ...]


def guess(dims: Shape, expected: Shape, rows: int | None, *, declared: bool) -> str:
    """Say why frames have shape `dims`, not `expected`, and what to do, as the end of a message.

    Args:
        dims: shape of a frame, or of the array where there is no time axis.
        expected: the shape that it should have.
        rows: number of frames; None without a time axis.
        declared: whether `expected` was declared, or is what earlier utterances have.

    >>> guess((700, 80), (80,), rows=1, declared=True)
    'was a batch axis left in? write array[0]'
    """
    remedy = "" if declared else "; overwrite the cache if those are wrong"
    batched = rows == 1 and dims[1:] in (expected, expected[1:])
    if batched or (rows is None and dims == (1, *expected)):
        return f"was a batch axis left in? write array[0]{remedy}"
    if declared and dims == () and (rows,) == expected:
        return "is it one array an utterance, without a time axis? declare time_axis: null"
    unsure = not declared and rows is not None
    if len(dims) == len(expected) == 1 and (unsure or (rows,) == expected):
        return f"is the array transposed? its first axis is the frames{remedy}"
    return "mend the array, or dims" if declared else "overwrite the cache if those are wrong"


def looks_batched(shape: Shape) -> str | None:
    """Say so if an array (frames, *dims) looks like a batch of one; nothing in it is certain.

    >>> looks_batched((700, 80)), looks_batched((1, 700, 80)) is None
    (None, False)
    """
    if len(shape) < 3 or shape[0] != 1 or 0 in shape:
        return None
    return (
        f"shape {shape} is one frame of shape {shape[1:]}; was a batch axis left in? "
        f"write array[0], or declare dims: {list(shape[1:])} if it is right"
    )

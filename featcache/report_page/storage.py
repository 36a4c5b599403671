"""Section on storage: bytes by feature and codec, and what float16 and zstd would make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from featcache.errors import FeatcacheError
from featcache.interface import Array, Codec
from featcache.registry import get_codec
from featcache.report_page.charts import Html, bar_in_cell, element, joined, nbytes, number, percent
from featcache.report_page.facts import CacheFacts, FeatureFacts
from featcache.report_page.values import read_one
from featcache.report_page.view import BARS, IN_FULL, Child, View, facts_list, python, table

TIMES_HALF = {"float32": 2, "float64": 4}  # the size of float16
TRIED = 64  # utterances that are compressed for trial, of each feature
TRIED_FEATURES = 16  # the largest ones
TRIED_BYTES = 1 << 22  # of a feature
CODEC = "zstd"


def storage(view: View) -> Html:
    """Return the bytes of each feature, and what other ways would take."""
    facts = view.facts
    codec = _codec()
    largest = sorted(facts.features, key=lambda each: -each.raw)[:TRIED_FEATURES]
    most = max((each.stored for each in facts.features), default=0) or 1
    rows = [
        (element("code", each.name), element("span", each.shape, class_="whole"), each.dtype,
         each.backend, each.codec,
         nbytes(each.stored, view.named(f"bytes of {each.name}")),
         percent(each.stored / each.raw if each.raw else 1.0, view.named(f"share of {each.name}")),
         *_smaller(view, each, codec if each in largest else None),
         bar_in_cell(each.stored / most))
        for each in facts.features
    ]  # fmt: skip
    heads = ["feature", "shape", "dtype", "format", "codec", "stored", "of raw", f"with {CODEC}",
             "as float16", f"float16, {CODEC}", BARS]  # fmt: skip
    stored = sum(each.stored for each in facts.features)
    pairs: list[tuple[str, Child]] = [
        ("files", [number(facts.containers, view.named("files")), " in ",
                   number(facts.parts, view.named("parts")),
                   f" part{'s' * (facts.parts != 1)}, ",
                   nbytes(facts.files, view.named("bytes of files"))]),
        ("beside arrays", [nbytes(max(facts.files - stored, 0), view.named("bytes beside")),
                           " of headers, padding, and utterances that were deleted"]),
    ]  # fmt: skip
    inner = table(heads, rows, label="bytes by feature", sorts=True)
    return joined(
        element("div", inner, class_="high" if len(rows) > IN_FULL else None),
        facts_list(pairs),
        element("p", _how(facts, codec), class_="note"),
        python(f"featcache.inspect.estimate({facts.path!r})"),
    )


def _codec() -> Codec | None:
    """Return the codec; None where it is not installed, or its library is not."""
    try:
        codec = get_codec(CODEC)()
        codec.encode(np.zeros(1))  # loads the library
    except FeatcacheError:
        return None
    return codec


def _how(facts: CacheFacts, codec: Codec | None) -> str:
    if codec is None:
        return f"Bytes with {CODEC} are tried where it is installed: pip install 'featcache[zarr]'."
    few = f", of the {TRIED_FEATURES} largest features" * (len(facts.features) > TRIED_FEATURES)
    return (
        f"Bytes with {CODEC} were tried on up to {min(TRIED, len(facts.table))} utterances{few}. "
        "All formats and codecs that are installed are tried by this line:"
    )


def _smaller(view: View, feature: FeatureFacts, codec: Codec | None) -> Iterator[Child]:
    """Yield bytes with the codec, as float16, and as float16 with the codec."""
    halves = feature.dtype in TIMES_HALF
    half = feature.raw // TIMES_HALF.get(feature.dtype, 1)
    arrays = _some(view.facts, feature) if codec is not None and feature.raw else []
    tried = [("", feature.raw, arrays)]
    if halves:
        with np.errstate(over="ignore", invalid="ignore"):
            tried.append(("float16 ", half, [each.astype(np.float16) for each in arrays]))
    about = "≈ " if len(arrays) < len(view.facts.table) else ""
    told: list[Child] = [
        "-" if codec is None or not some else
        [about, nbytes(round(whole * _ratio(codec, some)),
                       view.named(f"{what}{CODEC} of {feature.name}"))]
        for what, whole, some in tried
    ]  # fmt: skip
    yield told[0]
    yield nbytes(half, view.named(f"float16 bytes of {feature.name}")) if halves else "-"
    yield told[1] if halves else "-"


def _some(facts: CacheFacts, feature: FeatureFacts) -> list[Array]:
    """Return arrays of utterances evenly spread over those that were read."""
    rows = facts.chosen.drawn[:: -(-len(facts.chosen.drawn) // TRIED)]
    found: list[Array] = []
    for row in rows.tolist():
        array = read_one(facts.opened, feature.name, row)
        if array is not None and array.size:
            found.append(array)
        if sum(each.nbytes for each in found) >= TRIED_BYTES:
            break
    return found


def _ratio(codec: Codec, arrays: Sequence[Array]) -> float:
    encoded = sum(len(codec.encode(np.ascontiguousarray(each))) for each in arrays)
    return encoded / sum(each.nbytes for each in arrays)

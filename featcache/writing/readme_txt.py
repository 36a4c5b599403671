"""`README.txt` in a cache directory: what it is, for somebody who finds it. Nothing reads it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from featcache.errors import FeatcacheError
from featcache.format.columns import ColumnFile
from featcache.format.manifest import Manifest

README = "README.txt"
_TEXT = """\
A featcache cache: speech features, computed once and stored to be read again and again.

{content}
{state}; generation {generation}, written {when} by {program}

In Python:    featcache.open({path!r})
In a shell:   featcache info {path}

Please change nothing by hand. This page is written anew with each generation, and nothing reads it.
"""


def write_readme(cache: Path, manifest: Manifest) -> None:
    """Write the page of a generation that is out; a disk that refuses it costs nothing else."""
    with contextlib.suppress(OSError, FeatcacheError):
        text = _TEXT.format(
            content="\n".join(_content(cache, manifest)),
            state="complete" if manifest.complete else "not complete",
            generation=manifest.generation,
            when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            program=Path(sys.argv[0]).name or "Python",
            path=cache.name,
        )
        page = cache / README
        page.unlink(missing_ok=True)  # a file that is cut to nothing is written out when it closes
        page.write_text(text, encoding="utf-8", errors="backslashreplace")


def _content(cache: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a line for the utterances, and one for each feature."""
    yield f"{manifest.rows:,} utterances"
    with ColumnFile(cache, manifest.index, expected=manifest.index_digest) as file:
        for name, declared in manifest.features.items():
            frames = int(file.column(f"{name}.rows", np.int64).sum())
            shape = ", ".join(map(str, ("frames", *manifest.dims.get(name, ()))))
            frame_s = declared.get("frame_s")
            hours = f", {frames * frame_s / 3600:,.2f} hours" if frame_s else ""
            codec = "" if declared["codec"] == "raw" else f", {declared['codec']}"
            yield (
                f"{name}: ({shape}) {declared['dtype']}, {declared['backend']}{codec}; "
                f"{frames:,} frames{hours}"
            )

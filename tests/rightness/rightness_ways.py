"""Ways into a cache: a recipe goes each of them in a fork of the process that has set it up."""

from __future__ import annotations

import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from featcache.errors import ComputeError, FeatcacheError

TRUTH = "truth"  # computes what there is now, and compares nothing
asked: dict[str, str] = {}  # the file for the answer, by way


class Lines(logging.Handler):
    """Keeps the log of featcache."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("featcache"):
            self.lines.append(record.getMessage())


def each(ways: Mapping[str, Callable[..., object]], *arguments: object) -> None:
    """Go the ways that are asked for; each gets the arguments, and a cache of its own."""
    for name, file in asked.items():
        child = os.fork()
        if child == 0:
            cache = Path(file).with_suffix("") / "all"
            answer = answer_of(lambda: ways[name](*arguments, cache))  # noqa: B023  # called at once
            Path(file).write_text(json.dumps(answer))
            os._exit(0)  # no handlers of a parent
        os.waitpid(child, 0)


def answer_of(run: Callable[[], object]) -> dict[str, Any]:
    """Run something, and say how it ended."""
    handler = Lines()
    logging.getLogger().addHandler(handler)
    logging.getLogger("featcache").setLevel(logging.INFO)
    answer: dict[str, Any] = {"error": None, "message": "", "refused": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
        except BaseException as error:
            notes = getattr(error, "__notes__", [])
            answer = {
                "error": type(error).__name__,
                "message": "\n".join([str(error), *notes]),
                "refused": isinstance(error, FeatcacheError)
                and not isinstance(error, ComputeError),
                "traceback": traceback.format_exc(),
            }
    told = [str(each.message) for each in caught if "featcache" in str(each.filename)]
    return {**answer, "log": handler.lines + told}

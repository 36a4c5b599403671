"""Runs recipes, each in a fork of this process, which has only imported libraries.

Reads one call a line, as JSON, and answers each with a line once the recipe has ended. With the
argument `--once` it runs one call itself, in an interpreter of its own.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # files change within a second, at the same length

import joblib  # type: ignore[import-untyped]  # noqa: E402, F401
import sklearn.cluster  # noqa: E402
import sklearn.decomposition  # noqa: E402, F401
import soundfile  # noqa: E402, F401
import speechbrain.augment.freq_domain  # noqa: E402
import speechbrain.dataio.dataset  # noqa: E402
import speechbrain.lobes.features  # noqa: E402
import speechbrain.nnet.linear  # noqa: E402
import speechbrain.utils.parameter_transfer  # noqa: E402, F401
import torch  # noqa: E402
import torchaudio  # noqa: E402, F401
from transformers import (  # noqa: E402, F401
    HubertModel,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
)

import featcache  # noqa: E402, F401
from featcache.errors import ComputeError, FeatcacheError  # noqa: E402


class Lines(logging.Handler):
    """Keeps the log of featcache."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("featcache"):
            self.lines.append(record.getMessage())


def run_recipe(call: dict[str, Any]) -> dict[str, Any]:
    """Run a script as `python script arguments` would, and say how it ended."""
    torch.set_num_threads(1)
    os.chdir(call["folder"])
    sys.argv = [call["script"], *call["arguments"]]
    sys.path.insert(0, str(Path(call["script"]).parent))
    handler = Lines()
    logging.getLogger().addHandler(handler)
    logging.getLogger("featcache").setLevel(logging.INFO)
    answer: dict[str, Any] = {"error": None, "message": "", "refused": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for patch in call["patches"]:
                exec(patch, {"__name__": "sitecustomize"})  # as an upgrade would have changed it
            runpy.run_path(call["script"], run_name="__main__")
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


def _finish(call: dict[str, Any]) -> None:
    answer = run_recipe(call)
    Path(call["answer"]).write_text(json.dumps(answer))
    os._exit(0)  # no handlers of a parent


def _serve() -> None:
    for line in sys.stdin:
        call = json.loads(line)
        environment = os.environ | call["environment"]
        if call["new_interpreter"]:
            command = [sys.executable, __file__, "--once", line]
            with Path(call["answer"] + ".text").open("w") as text:
                subprocess.run(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=text, stderr=text
                )
        else:
            child = os.fork()
            if child == 0:
                os.environ.update(call["environment"])
                with Path(call["answer"] + ".text").open("w") as text:
                    os.dup2(text.fileno(), 1)
                    os.dup2(text.fileno(), 2)
                _finish(call)
            os.waitpid(child, 0)
        print("done", flush=True)


if __name__ == "__main__":
    if "--once" in sys.argv:
        _finish(json.loads(sys.argv[-1]))
    print("ready", flush=True)
    _serve()

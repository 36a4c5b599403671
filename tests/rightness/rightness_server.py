"""Runs recipes, each in a fork of this process, which has only imported libraries.

Reads one call a line, as JSON, and answers each with a line once the recipe has ended. With the
argument `--once` it runs one call itself, in an interpreter of its own.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True  # files change within a second, at the same length

import joblib  # type: ignore[import-untyped]  # noqa: E402, F401
import rightness_ways  # noqa: E402
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


def run_recipe(call: dict[str, Any]) -> None:
    """Run a script as `python script arguments` would."""
    torch.set_num_threads(1)
    os.chdir(call["folder"])
    sys.argv = [call["script"], *call["arguments"]]
    sys.path.insert(0, str(Path(call["script"]).parent))
    rightness_ways.asked.update(call["ways"])
    for patch in call["patches"]:
        exec(patch, {"__name__": "sitecustomize"})  # as an upgrade would have changed it
    runpy.run_path(call["script"], run_name="__main__")


def _finish(call: dict[str, Any]) -> None:
    answer = rightness_ways.answer_of(lambda: run_recipe(call))
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

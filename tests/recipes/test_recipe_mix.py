import json
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from places import RECORDINGS, ROOT

RECIPE = ROOT / "recipes" / "mix"


# the recipe; kills itself before the optimiser's step, or with half of the checkpoint of a step
KILLED = """
import io, os, signal, sys
import torch
import train_on_mix as train

step, where, *arguments = sys.argv[1:]
update, save = train.Run.update, torch.save

def killed_update(run, batch):
    if run.step + 1 == int(step):
        os.kill(os.getpid(), signal.SIGKILL)
    return update(run, batch)

def killed_save(state, path):
    save(state, whole := io.BytesIO())
    if state["step"] >= int(step):
        path.write_bytes(whole.getvalue()[:len(whole.getvalue()) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, path)

if where == "update":
    train.Run.update = killed_update
else:
    torch.save = killed_save
train.main(arguments)
"""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Take twelve recordings of each digit by two speakers each; real ones where there are any."""
    folder = tmp_path_factory.mktemp("few")
    with zipfile.ZipFile(ROOT / "recipes" / "digits" / "corpus.zip") as corpus:
        few = [name for name in corpus.namelist() if int(name.split(".")[0].split("_")[2]) < 12]
        corpus.extractall(folder, few)
    real = {"path": str(RECORDINGS), "speakers": ["george", "theo"]}
    synthetic = {"path": str(folder), "speakers": ["carl", "ella"]}
    other = real if RECORDINGS.is_dir() else {"path": str(folder), "speakers": ["alan", "rose"]}
    return {"one": synthetic, "other": other}


def run(
    folder: Path, corpora: dict[str, object], checkpoint_steps: int, *kill: str
) -> subprocess.CompletedProcess[str]:
    settings: dict[str, object] = {
        "corpora": corpora,
        "mix": {"weights": {"one": 1, "other": 2}, "epoch_size": 150},
        "max_frames": 500,
        "epochs": 3,
        "output_folder": str(folder),
        "checkpoint_steps": checkpoint_steps,
    }
    given = [text for name, value in settings.items() for text in (f"--{name}", json.dumps(value))]
    script = ["-c", KILLED, *kill] if kill else ["train_on_mix.py"]
    command = [sys.executable, *script, "settings.yaml", *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=RECIPE)


def noted(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]


def test_a_run_that_is_killed_again_and_again_has_the_losses_and_weights_of_a_whole_one(
    corpora: dict[str, object], tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run(whole, corpora, 1000).returncode == 0
    expected = {note["step"]: note for note in noted(whole)}
    epoch = sum(note["epoch"] == 0 for note in expected.values())  # its steps
    assert 8 < epoch < len(expected) == max(expected) == 3 * epoch

    kills = [
        (2, 2, "update"),  # before the first checkpoint
        (2, epoch // 2, "update"),  # in the middle of an epoch
        (epoch, epoch + 3, "update"),  # after a checkpoint at the end of an epoch
        (3, 2 * epoch - 3, "save"),  # while a checkpoint is written
        (2, 3 * epoch, "update"),  # before the last step
    ]
    for checkpoint_steps, step, where in kills:
        killed = run(resumed, corpora, checkpoint_steps, str(step), where)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = run(resumed, corpora, 2)
    assert last.returncode == 0, last.stderr
    assert "goes on after step" in last.stdout

    notes = noted(resumed)
    assert len(notes) > len(expected)  # some steps were taken again
    assert notes[-1]["step"] == max(expected)
    for note in notes:
        assert note == expected[note["step"]]  # ids, and the loss to the bit
    weights = [torch.load(folder / "model.pt") for folder in (whole, resumed)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_setting_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "train_on_mix.py", "settings.yaml", "--epoch", "3"]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=RECIPE)
    assert refused.returncode == 1
    assert refused.stderr.startswith("no settings epoch; there are seed, ")

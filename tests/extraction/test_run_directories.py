"""The directory of a run goes at its end, and does no harm where it cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from parallel_helpers import Provider, assert_holds, extract

from featcache.errors import IncompleteError
from featcache.extraction.process_part import ProcessPart
from featcache.extraction.run import RUN, remove_runs


def test_runs_and_what_was_left_of_them_are_removed(tmp_path: Path) -> None:
    for name in (f"{RUN}0", f"{RUN}1", "work-removed-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan-items.npy").touch()
    (tmp_path / "parts").mkdir()
    remove_runs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["parts"]


@pytest.mark.parametrize("call", ["rmdir", "unlink", "rename"])
def test_a_directory_that_cannot_be_removed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = getattr(os, call)

    def refused(path: Any, *args: Any, **kwargs: Any) -> Any:
        if any(part in str(path) for part in (RUN, "work-removed-", "attempt-")):
            raise OSError(
                errno.ENOTEMPTY, "a worker that woke up late has written into it", str(path)
            )
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, call, refused)
    cache = extract(Provider(tmp_path, 4), parallel={"env": "local", "n_workers": 1})
    assert list(cache.path.glob("work-*"))
    monkeypatch.undo()
    assert_holds(extract(Provider(tmp_path, 5), parallel=None), range(5))


def test_a_worker_that_wakes_up_late_finds_its_run_over(tmp_path: Path) -> None:
    run = tmp_path / f"{RUN}0"
    run.mkdir()
    remove_runs(tmp_path)
    with pytest.raises(IncompleteError, match="the run is over"), ProcessPart().attempt(run, 3):
        raise AssertionError("nobody may write here any more")
    assert not run.exists()

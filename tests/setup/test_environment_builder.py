"""What is half made goes, whatever comes in between."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from skyctl.setup import wheels
from skyctl.setup.node import environment_builder


def test_a_signal_meanwhile_does_not_leave_what_is_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the node's agent has ended pip first, and then this process."""
    half = tmp_path / "env"
    (half / "bin").mkdir(parents=True)
    remove = shutil.rmtree
    came = []

    def interrupted(path: Path, *, ignore_errors: bool) -> None:
        if not came:
            came.append(path)
            raise SystemExit(143)
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(environment_builder.shutil, "rmtree", interrupted)
    with pytest.raises(SystemExit):
        environment_builder._discard_unfinished(half)
    assert came == [half]
    assert not half.exists()


def test_what_lies_in_the_working_folder_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have put it there (``/tmp``), or it is the user's own, named as one of Python's."""
    (tmp_path / "work").mkdir()
    for name in ("venv.py", "logging.py", "pip.py"):
        (tmp_path / "work" / name).write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path / "work")
    request: Any = None  # for errors alone
    environment_builder._create_venv(tmp_path / "env", request, None)
    assert (tmp_path / "env" / "bin" / "python").exists()
    done = subprocess.run([*wheels._local_pip_command(), "--version"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr

"""A half-made environment goes, whatever comes in between."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from skyctl.setup.node import environment_builder


def test_a_signal_meanwhile_does_not_leave_what_is_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the node's agent has ended uv first, and then this process."""
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

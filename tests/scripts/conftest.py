"""A folder with a cluster of local nodes, and the command run in it as a user runs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..helpers.commands import Skyctl
from ..helpers.processes import left_of_state


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Skyctl]:
    """Three local nodes, a, b and c; nothing of a run is left afterwards."""
    folder = tmp_path / "work"
    folder.mkdir()
    nodes = "".join(f"  - {{name: {name}, transport: local, threads: 1}}\n" for name in "abc")
    (folder / "cluster.yaml").write_text(f"name: three\nnodes:\n{nodes}")
    made = Skyctl(folder, tmp_path / "state")
    yield made
    made.end()
    assert left_of_state(made.state) == []

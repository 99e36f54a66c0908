"""A folder with a cluster of local nodes, and the command run in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..helpers.commands import Done, Skyctl
from ..helpers.processes import left_of_state


class Here(Skyctl):
    """Commands that leave nothing running are run inside this process."""

    def run(self, *words: str, code: int | None = 0, **env: str) -> Done:
        if "--detach" in words:
            return super().run(*words, code=code, **env)
        return self.run_inside(*words, code=code, **env)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Skyctl]:
    """Three local nodes, a, b and c; nothing of a run is left afterwards."""
    folder = tmp_path / "work"
    folder.mkdir()
    nodes = "".join(f"  - {{name: {name}, transport: local, threads: 1}}\n" for name in "abc")
    (folder / "cluster.yaml").write_text(f"name: three\nnodes:\n{nodes}")
    made = Here(folder, tmp_path / "state")
    yield made
    made.end()
    assert left_of_state(made.state) == []

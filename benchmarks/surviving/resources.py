"""The memory and open files that a run's launcher and agents take, attempt by attempt."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from surviving import lab
from surviving.backends import NODES

PAGE = os.sysconf("SC_PAGE_SIZE")


class Resources:
    """``look`` is called now and then; ``figures``: by process, its last look in each attempt."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._seen: dict[str, dict[int, tuple[float, int]]] = {}

    def look(self) -> None:
        """Takes in what is there now."""
        with suppress(OSError, ValueError, LookupError, StopIteration):  # half begun, or at its end
            state = self._run.state
            attempt = len(state["attempts"])
            if state["supervisor"] is not None:
                self._note("launcher", attempt, state["supervisor"]["pid"])
            for node in NODES:
                ranks = self._run.processes(node, "skyctl.worker.rank")
                if ranks:
                    agent = lab.of_tests("helpers.processes").parent(min(ranks))
                    self._note(node, attempt, agent)

    def _note(self, name: str, attempt: int, pid: int) -> None:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        self._seen.setdefault(name, {})[attempt] = (round(pages * PAGE / 2**20, 1), files)

    @property
    def figures(self) -> dict[str, dict[str, list[float]]]:
        """By process: resident MiB and open files, a number each attempt."""
        return {
            name: {"rss_mib": [one for one, _ in seen.values()], "files": [one for _, one in seen.values()]}
            for name, seen in self._seen.items()
        }

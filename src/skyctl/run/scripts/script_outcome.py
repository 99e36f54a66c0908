"""How a script's run has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyctl.run.scripts.script_ranks import ScriptRank


@dataclass(frozen=True)
class ScriptOutcome:
    """How a script's run has ended. ``returncodes``: by rank of the last attempt (negative: a signal)."""

    run_id: str
    ranks: tuple[ScriptRank, ...]
    returncodes: tuple[int | None, ...]
    restarts: int
    output: str | None = None
    output_files: int = 0

    def to_json(self) -> dict[str, Any]:
        """As ``skyctl run --json`` prints it."""
        return {
            "run_id": self.run_id,
            "status": "done",
            "restarts": self.restarts,
            "ranks": [
                {"rank": rank.rank, "node": rank.node, "local_rank": rank.local_rank, "returncode": code}
                for rank, code in zip(self.ranks, self.returncodes, strict=True)
            ],
            "output": self.output,
            "output_files": self.output_files,
        }

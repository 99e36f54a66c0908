"""A run that has ended, or is not looked after now, as its folder on this machine has it."""

from __future__ import annotations

from dataclasses import dataclass

from skyctl.files import RunPaths
from skyctl.records.plan import Plan
from skyctl.records.run_state import RunState


@dataclass(frozen=True)
class StoredRun:
    """A run as its folder on this machine has it."""

    paths: RunPaths
    state: RunState
    plan: Plan

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.plan.problem.layers)

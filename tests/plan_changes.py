"""Plans that a test needs a little different from what the planner made."""

from __future__ import annotations

from typing import Any

from skyctl.records.pipeline import Pipeline
from skyctl.records.plan import Plan


def with_stage(plan: Plan, number: int, **update: Any) -> Plan:
    """The plan of one pipeline with other values in one of its stages; nothing is checked."""
    stages = list(plan.placed_stages)
    stages[number] = stages[number].model_copy(update=update)
    pipeline = Pipeline(stages=tuple(stages), microbatches=plan.pipelines[0].microbatches)
    return plan.model_copy(update={"pipelines": (pipeline,)})

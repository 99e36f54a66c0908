"""Events of ranks, as tests need them: figures that nobody looks at are zero."""

from __future__ import annotations

from typing import Any

from skyctl.agent.task_events import to_message
from skyctl.worker.rank_events import StepEvent

_FIGURES: dict[str, Any] = {
    "iteration_s": 0.1,
    "compute_s": 0.0,
    "transfer_s": 0.0,
    "idle_s": 0.0,
    "forward_s": 0.0,
    "backward_s": 0.0,
    "weight_s": 0.0,
    "optimizer_s": 0.0,
    "input_message_s": None,
    "gradient_message_s": None,
    "loss": 1.0,
    "grad_norm": None,
    "learning_rate": None,
    "validates": False,
    "samples": 4,
    "peak_memory_bytes": None,
}


def step_event(step: int, **figures: Any) -> StepEvent:
    """One rank's event of that step."""
    return StepEvent(step=step, **{**_FIGURES, **figures})


def step_message(step: int, **figures: Any) -> dict[str, Any]:
    """The same as it comes over the wire."""
    return to_message(step_event(step, **figures))

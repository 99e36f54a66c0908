"""A run's folder as a supervisor writes it, without any process: for what only reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from skyctl.files import RunPaths, write_atomic
from skyctl.records.base import timestamp
from skyctl.records.run_state import RunAttempt, RunState

RUN_ID = "20261121-040405-cccc"
DEVICES = ("a/cpu:0", "b/cpu:0")
STEP = {
    **dict.fromkeys(("weight_s", "input_message_s", "gradient_message_s", "loss", "grad_norm"), None),
    **{"event": "step", "forward_s": 0.05, "backward_s": 0.1, "optimizer_s": 0.01, "learning_rate": 0.1},
    **{"validates": False, "samples": 32, "peak_memory_bytes": None},
}


def write_state(run_id: str = RUN_ID, **more: Any) -> RunPaths:
    """The run's folder and its state; ``more``: fields of it."""
    paths = RunPaths(run_id)
    if not paths.folder.exists():
        paths.create()
    fields: dict[str, Any] = {
        "run_id": run_id,
        "created": timestamp("milliseconds"),
        "written": timestamp("milliseconds"),
        "workload": "gpt:layers=2",
        "cluster": "here",
        "steps": 20,
        "status": "running",
        "attempts": (attempt(),),
        **more,
    }
    write_atomic(paths.state, RunState(**fields).to_json())
    return paths


def attempt(number: int = 1, from_step: int = 0, **more: Any) -> RunAttempt:
    """An attempt whose step is predicted to take 0.2 s."""
    fields: dict[str, Any] = {"devices": DEVICES, "why": "launched", "predicted_iteration_s": 0.2, **more}
    return RunAttempt(number=number, began=timestamp(), from_step=from_step, **fields)


def add_steps(paths: RunPaths, steps: Iterable[int], **more: Any) -> None:
    """Lines of ``metrics.jsonl``: step i has the loss 5 − i / 10 and took 0.2 s; ``more``: other figures."""
    lines = (
        json.dumps({"step": i, "loss": 5 - i / 10, "iteration_s": 0.2, "samples_per_s": 160.0, **more})
        for i in steps
    )
    with paths.metrics.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def add_events(paths: RunPaths, steps: Iterable[int], **more: Any) -> None:
    """Writes what the ranks of ``DEVICES`` have told: the first computes 3/4 of a step, the other 1/2."""
    with paths.events.open("a") as file:
        for step in steps:
            for rank, busy_s in enumerate((0.15, 0.1)):
                told = {
                    "node": "ab"[rank],
                    "who": f"rank-{rank}",
                    **STEP,
                    **{"step": step, "iteration_s": 0.2, "compute_s": busy_s, "transfer_s": 0.01},
                    "idle_s": 0.19 - busy_s,
                    **more,
                }
                file.write(json.dumps(told) + "\n")

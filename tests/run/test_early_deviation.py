"""The word after a few steps: once, where the prediction does not hold, with the reason."""

from __future__ import annotations

import pytest
from tests.helpers.bare_records import NO_PARTS, OF_MEASUREMENT, OF_REPLICA

from skyctl.records.measurement import (
    Measurement,
    ReplicaMeasurement,
    ReplicaPredicted,
    StepMeasurement,
    quantiles,
)
from skyctl.run.callbacks import RunCallbacks, StepProgress
from skyctl.run.early_deviation import EARLY_STEPS, with_early_deviation_note
from skyctl.run.step_metrics import (
    predicted_time_parts,
    with_differences,
)
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.schedule.step_times import StageTimes

PLAY = SimulationInput("1f1b", 2, (1,), (0,), (StageTimes(0.1, 0.2, 0.0),), ())


def run(factor: float) -> Measurement:
    """One device that takes ``factor`` times as long as planned."""
    took_s = 0.6 * factor
    parts = {"forward_s": 0.2 * factor, "backward_s": 0.4 * factor, "optimizer_s": 0.0}
    replica = ReplicaMeasurement(
        device="n1/cpu:0",
        compute_s=took_s,
        transfer_s=0.0,
        idle_s=0.0,
        peak_memory_bytes=None,
        predicted=ReplicaPredicted(
            compute_s=0.6, idle_s=0.0, memory_bytes=0.0, **predicted_time_parts(PLAY, 0)
        ),
        **NO_PARTS | parts,
        **OF_REPLICA,
    )
    done = Measurement(
        run_id="r",
        strategy="even",
        steps=(StepMeasurement(step=0, loss=1.0, iteration_s=took_s),),
        iteration_s=quantiles([took_s]),
        predicted_iteration_s=0.6,
        replicas=(replica,),
        final_loss=1.0,
        attempts=1,
        weights=None,
        **OF_MEASUREMENT,
    )
    return with_differences(PLAY, done)


@pytest.mark.parametrize(
    ("factor", "steps", "said"), [(1.5, 100, 3), (1.05, 100, 0), (0.8, 100, 3), (1.5, 6, 0)]
)
def test_one_word_early_on(factor: float, steps: int, said: int) -> None:
    notes: list[str] = []
    seen: list[int] = []
    watcher = with_early_deviation_note(
        RunCallbacks(step=lambda p: seen.append(p.step), note=notes.append), lambda: run(factor)
    )
    for step in range(min(steps, 20)):
        watcher.step(StepProgress(step, steps, 1.0, 0.6, 1.0, None))
    assert seen == list(range(min(steps, 20)))
    assert len(notes) == said
    if said:
        assert notes[0].startswith(f"after {EARLY_STEPS} steps: a step takes {0.6 * factor:.4f} s, predicted")
        assert "n1/cpu:0 computes" in notes[1]

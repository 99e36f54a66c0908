"""The measurement of an attempt: what its ranks have reported of its steps, beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import TypedDict

from skyctl.compare.deviation import find_differences
from skyctl.learning.observations import tells_layer_times
from skyctl.records.measurement import (
    Measurement,
    ReplicaMeasurement,
    ReplicaPredicted,
    StepMeasurement,
    middle_steps,
    quantile,
    quantiles,
)
from skyctl.records.plan import Plan
from skyctl.run.owner_figures import measured_owners
from skyctl.run.rank_spec import RankSpec
from skyctl.run.step_collector import StepCollector
from skyctl.schedule.simulation_input import SimulationInput
from skyctl.worker.rank_events import StepEvent


class TimeParts(TypedDict):
    """The parts of a stage's time, as its rank measures them and as the plan's prediction has them."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    input_message_s: float | None
    gradient_message_s: float | None


def build_measurement(
    run_id: str,
    plan: Plan,
    ranks: Sequence[RankSpec],
    collected: StepCollector,
    weights: str | None,
    simulations: Sequence[SimulationInput],
) -> Measurement:
    """The record of one attempt. Its first step is warm-up and is left out of the medians where it can be.

    Args:
        weights: path of the trained weights, or None.
        simulations: by pipeline, what the plan's prediction comes from, for the predicted parts of a stage's
            time.
    """
    first, done = collected.first, collected.reported
    steps = tuple(
        StepMeasurement(step=i, loss=collected.loss(i), iteration_s=collected.iteration_s(i))
        for i in range(first, done)
    )
    settled = list(collected.settled_steps) or list(range(first, done))
    stale = plan.problem.rhythm.is_stale
    predicted = {replica.device: replica for replica in plan.predicted.replicas}
    stages = [
        predicted_time_parts(simulation, stage, pipeline.local_steps or 1)
        for simulation, pipeline in zip(simulations, plan.pipelines, strict=True)
        for stage in range(len(simulation.stages))
    ]
    replicas = []
    for rank in ranks:
        told = collected.by_rank.get(rank.rank, {})
        events = [told[i] for i in settled if i in told]
        if not events or rank.joins:  # it was lost before the first step was over, or is not of the plan
            continue
        promised = predicted[rank.device]
        replicas.append(
            ReplicaMeasurement(
                device=rank.device,
                compute_s=median(event.compute_s for event in events),
                transfer_s=median(event.transfer_s for event in events),
                idle_s=median(event.idle_s for event in events),
                peak_memory_bytes=max(event.peak_memory_bytes or 0.0 for event in events) or None,
                predicted=ReplicaPredicted(
                    compute_s=promised.compute_s,
                    idle_s=promised.idle_s,
                    memory_bytes=promised.memory_bytes,
                    **stages[rank.rank],
                ),
                **measured_time_parts(events),
                layers_spread=layers_spread(events),
                layer_steps_s=_layer_steps(events) if _all_hold_all(plan) and tells_layer_times(plan) else (),
                sync_s=_median_or_none(event.sync_s for event in events),
            )
        )
    return Measurement(
        run_id=run_id,
        strategy=plan.strategy,
        steps=steps,
        iteration_s=quantiles([step.iteration_s for step in steps[1:] or steps]),
        predicted_iteration_s=plan.predicted.iteration_s,
        predicted_interval=plan.predicted.interval,
        replicas=tuple(replicas),
        final_loss=steps[-1].loss,
        attempts=1,
        weights=weights,
        sync_s=collected.sync_s(settled),
        predicted_sync_s=plan.predicted.sync_s if len(plan.pipelines) > 1 and not stale else None,
        mean_iteration_s=_mean_iteration_s(collected, settled) if stale else None,
        validation=tuple(measured for step, measured in sorted(collected.validation.items()) if step < done),
        owners=measured_owners([collected.owner_figures(i) for i in range(collected.oldest, done)]),
        backend=None if plan.backend is None else plan.backend.backend,
    )


def measured_time_parts(events: Sequence[StepEvent]) -> TimeParts:
    """The medians over one rank's steps; of a message None where no step waited for one."""
    return {
        "forward_s": median(event.forward_s for event in events),
        "backward_s": median(event.backward_s for event in events),
        "optimizer_s": median(event.optimizer_s for event in events),
        "input_message_s": _median_or_none(event.input_message_s for event in events),
        "gradient_message_s": _median_or_none(event.gradient_message_s for event in events),
    }


def _median_or_none(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return median(present) if present else None


def layers_spread(events: Sequence[StepEvent]) -> float | None:
    """p90 / p10 of one rank's seconds in its layers over its steps; None where they took no time."""
    seconds = [event.forward_s + event.backward_s + event.optimizer_s for event in events]
    low = quantile(seconds, 0.1)
    return quantile(seconds, 0.9) / low if low > 0 else None


def _all_hold_all(plan: Plan) -> bool:
    return len(plan.pipelines) > 1 and len(plan.placed_stages) == len(plan.pipelines)


def _layer_steps(events: Sequence[StepEvent]) -> tuple[float, ...]:
    return middle_steps([event.forward_s + event.backward_s for event in events])


def _mean_iteration_s(collected: StepCollector, steps: Sequence[int]) -> float:
    """Seconds of a step on average, over all ranks."""
    each = [[events[step].iteration_s for step in steps] for events in collected.by_rank.values()]
    return fmean(map(fmean, each))


def predicted_time_parts(simulation: SimulationInput, stage: int, local_steps: int = 1) -> TimeParts:
    """The same of the plan: the layers' forward and backward of a whole step, a message's way unqueued.

    ``local_steps``: where a step is a round, how many of them it is.
    """
    times, count = simulation.layer_times(stage), local_steps * simulation.microbatches
    return {
        "forward_s": count * times.forward_s,
        "backward_s": count * times.backward_s,
        "optimizer_s": local_steps * times.optimizer_s,
        "input_message_s": simulation.boundaries[stage - 1].forward.unqueued_s if stage else None,
        "gradient_message_s": simulation.boundaries[stage].backward.unqueued_s
        if stage + 1 < len(simulation.stages)
        else None,
    }


def with_differences(simulation: SimulationInput, done: Measurement) -> Measurement:
    """The measurement with what made it differ from its prediction (``differences``)."""
    return done.model_copy(update={"differences": find_differences(simulation, done)})

"""Runs of a plan as its own simulation plays them, on machines that are not as the plan has them."""

from __future__ import annotations

from collections.abc import Sequence

from tests.helpers.bare_records import OF_MEASUREMENT

from skyctl.planner.api import plan, predict
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.planner.prediction_interval import with_interval
from skyctl.records.measurement import (
    Measurement,
    Quantiles,
    ReplicaMeasurement,
    ReplicaPredicted,
    StepMeasurement,
)
from skyctl.records.plan import Plan
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Parallel, Problem
from skyctl.run.step_metrics import predicted_time_parts

A, B = IDS = ("ash/cpu:0", "oak/cpu:0")


def problem(
    parallel: Parallel,
    computing: dict[str, float] | None = None,
    link: tuple[str, str] | None = None,
    ids: Sequence[str] = IDS,
) -> Problem:
    """Three layers a device, of 10 ms each; messages of 21 ms, gradients of 20 ms.

    Args:
        computing: by device, how many times the seconds its layers take.
        link: the one that is three times slower.
    """
    layers, times = 3 * len(ids), {name: (computing or {}).get(name, 1.0) for name in ids}
    return Problem(
        layers=[
            Layer(
                name=str(i), flops=1.0, state_bytes=4e6, activation_bytes=1, output_bytes=2e6,
                gradient_bytes=2e6,
            )
            for i in range(layers)
        ],
        devices=[
            Device(
                id=name, flops_per_s=1.0, memory_bytes=None, time_uncertainty=0.05, overhead_uncertainty=0.3
            )
            for name in ids
        ],
        times={
            name: LayerTimes(
                forward_s=[0.003 * v] * layers,
                backward_s=[0.007 * v] * layers,
                optimizer_s=[0.001 * v] * layers,
            )
            for name, v in times.items()
        },
        links=[
            Link(
                source=a,
                target=b,
                latency_s=0.001,
                bandwidth_bytes_per_s=1e8 / (3.0 if (a, b) == link else 1.0),
                uncertainty=0.05,
            )
            for a in ids
            for b in ids
            if a != b
        ],
        microbatches=8,
        parallel=parallel,
    )  # fmt: skip


def planned(parallel: Parallel) -> Plan:
    return with_interval(plan(problem(parallel), "even"))


def predicted_on(real: Problem, made: Plan) -> Plan:
    """The same stages, planned on that problem."""
    return made.model_copy(update={"problem": real, "predicted": predict(real, made)})


def ran(made: Plan, real: Problem, *, sum_factor: float = 1.0, idle_s: float = 0.0) -> Measurement:
    """The plan's first steps on machines that are as ``real`` says, played by the plan's own simulation."""
    there = made.model_copy(update={"problem": real})
    step = predict(real, made)
    messages = len(made.pipelines) == 1
    sync_s = None if messages else sum_factor * step.sync_s
    median_s = step.iteration_s + (sum_factor - 1) * step.sync_s + idle_s
    known = {replica.device: replica for replica in step.replicas}
    replicas = []
    for before, now in zip(pipeline_simulations(made), pipeline_simulations(there), strict=True):
        for index in range(len(now.stages)):
            stage = made.placed_stages[len(replicas)]
            promised = known[stage.device]
            replicas.append(
                ReplicaMeasurement(
                    device=stage.device,
                    compute_s=promised.compute_s,
                    transfer_s=0.0,
                    idle_s=promised.idle_s + idle_s,
                    peak_memory_bytes=None,
                    predicted=ReplicaPredicted(
                        compute_s=promised.compute_s,
                        idle_s=promised.idle_s,
                        memory_bytes=0.0,
                        **predicted_time_parts(before, index),
                    ),
                    **predicted_time_parts(now, index),
                    layers_spread=None,
                    sync_s=sync_s,
                    layer_steps_s=(),
                )
            )
    return Measurement(
        run_id="r1",
        strategy="even",
        steps=[StepMeasurement(step=i, loss=1.0, iteration_s=median_s) for i in range(11)],
        iteration_s=Quantiles(median=median_s, p10=median_s, p90=median_s),
        predicted_iteration_s=made.predicted.iteration_s,
        replicas=replicas,
        final_loss=1.0,
        attempts=1,
        weights=None,
        sync_s=sync_s,
        **OF_MEASUREMENT,
    )

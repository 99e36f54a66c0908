"""The outcome of each strategy, and the row that says it: what is predicted, proved and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skyctl.compare.step_seconds import (
    StepVariation,
    mean_step_s,
    measured_steps,
    predicted_interval,
    predicted_step_s,
    uneven_steps,
)
from skyctl.records.base import Count, Index, Name, Positive, Record, Seconds, Seq
from skyctl.records.cluster import split_device_id
from skyctl.records.interval import Interval
from skyctl.records.measurement import Measurement, Quantiles
from skyctl.records.plan import Plan
from skyctl.records.problem import Objective, Parallel, Problem
from skyctl.workload.recipe import microbatch_sizes

BASELINE = "even"
"""The strategy that speed-ups are over."""
ALONE = "alone"
"""The strategy of the fastest device that holds the whole model."""
SYNCHRONOUS = "synchronous"
"""The row of the best plan without the rhythm that the others have; owners average after every step there."""
REFERENCE_ROWS = ("pipeline", "data", "hybrid", SYNCHRONOUS)
"""The names of rows that stand beside the strategies': the best plan of another form or rhythm."""
OPTIMAL = "optimal"
"""The strategy of the exact search."""
SEARCHED = ("heuristic", OPTIMAL)
"""Strategies whose name does not say how their plan shares the work out."""
PROVED_GAP = 1e-9
"""A plan this close to its bound, value / bound − 1, is at the bound: what is left is rounding."""


@dataclass(frozen=True)
class StrategyOutcome:
    """A strategy's plan and measurement. ``error``: why there is no plan, or no measurement.

    ``undecided``: there is no plan because none was found in time, not because none can be.
    """

    strategy: str
    plan: Plan | None = None
    error: str | None = None
    measurement: Measurement | None = None
    undecided: bool = False


class DeviceShare(Record):
    """A device's layers [start, stop) and its times in a step. ``label``: its shortest clear name.

    ``microbatches``, ``samples``: of each step (of a round, each local step), that its pipeline takes; None
    where there is only one (and ``samples`` where the batch is not known).
    """

    device: Name
    label: Name
    start: Index
    stop: Count
    predicted_compute_s: Seconds
    predicted_idle_s: Seconds
    measured_compute_s: Seconds | None = None
    measured_transfer_s: Seconds | None = None
    measured_idle_s: Seconds | None = None
    microbatches: Count | None = None
    samples: Count | None = None


class ComparisonRow(Record):
    """A strategy in figures. ``None``: unknown, or without meaning there.

    ``status``: the certificate's, or without a plan ``infeasible`` (proved) or ``undecided``.
    ``bound_s``: no plan of that problem can do better, in its ``objective``; ``gap``: this plan's distance
    from it, value / bound − 1. ``predicted_speedup``, ``measured_speedup``: times as fast as even.
    ``prediction_error``: predicted / measured − 1. ``error``: why it is infeasible or did not run.
    ``predicted_interval``: of ``predicted_s``. ``predicted_sync_s``, ``measured_sync_s``: of the step, what
    summing the pipelines' gradients takes after the last backward; None where there is one pipeline.
    ``steps_per_iteration``: how many synchronous steps' samples its run trains on in what it counts as a
    step; more than 1 for rounds. All seconds of the row and its shares are divided by it.
    ``mean_measured_s``: the measured step on average, where a row of the comparison has a parameter server;
    then ``predicted_s`` is on average, too, and speed-ups and errors are of these, not of the median.
    ``parallel``: how the plan shares the work out, where the comparison's plans differ in that.
    """

    strategy: Name
    status: Literal["optimal", "bounded", "feasible", "infeasible", "undecided"]
    layers: str = ""
    shares: Seq[DeviceShare] = ()
    unused: Seq[str] = ()
    microbatches: Count | None = None
    objective: Objective | None = None
    predicted_s: Seconds | None = None
    bound_s: Seconds | None = None
    gap: float | None = None
    predicted_speedup: float | None = None
    measured: Quantiles | None = None
    measured_speedup: float | None = None
    prediction_error: float | None = None
    final_loss: float | None = None
    run_id: str | None = None
    error: str | None = None
    predicted_interval: Interval | None = None
    predicted_sync_s: Seconds | None = None
    measured_sync_s: Seconds | None = None
    steps_per_iteration: Positive = 1.0
    mean_measured_s: Seconds | None = None
    parallel: Parallel | None = None

    @property
    def device_label(self) -> str:
        """The label of the device of a plan that has only one."""
        return self.shares[0].label if self.shares else ""

    @property
    def label(self) -> str:
        """The strategy, and what its name does not say: the device of ``alone``, the parallelism found."""
        more = self.device_label if self.strategy == ALONE else None
        if self.strategy in SEARCHED:
            more = self.parallel
        return f"{self.strategy} ({more})" if more else self.strategy

    @property
    def within_interval(self) -> bool | None:
        """Whether the measured median lies in the predicted interval; None where one of them is unknown."""
        if self.measured is None or self.predicted_interval is None:
            return None
        return self.predicted_interval.holds(self.measured.median)

    @property
    def planned(self) -> bool:
        """Whether the strategy gave a plan."""
        return self.status not in ("infeasible", "undecided")

    @property
    def why_no_plan(self) -> str:
        """The status, and the reason where it is known."""
        return f"{self.status}: {self.error}" if self.error else self.status

    @property
    def measured_s(self) -> float | None:
        """The measured step that is compared: the median, or on average; None: it was not run."""
        if self.measured is None:
            return None
        return self.measured.median if self.mean_measured_s is None else self.mean_measured_s

    @property
    def shown_s(self) -> float | None:
        """The step's seconds: as measured, else as predicted."""
        return self.predicted_s if self.measured_s is None else self.measured_s

    @property
    def shown_speedup(self) -> float | None:
        """Times as fast as even: as measured, else as predicted."""
        return self.measured_speedup if self.measured else self.predicted_speedup

    @property
    def proved(self) -> bool:
        """Whether the plan is at a bound that no plan can pass."""
        return self.gap is not None and self.gap <= PROVED_GAP


def summarize_outcomes(outcomes: Sequence[StrategyOutcome]) -> list[ComparisonRow]:
    """A row for each outcome, in their order; bounds and speed-ups are taken over all of them."""
    bounds = _bounds(outcomes)
    uneven = uneven_steps(outcome.plan for outcome in outcomes)
    rows = [_row(outcome, bounds, uneven) for outcome in outcomes]
    if len({row.parallel for row in rows if row.planned and row.strategy != ALONE}) < 2:
        rows = [row.model_copy(update={"parallel": None}) for row in rows]
    base = next((row for row in rows if row.strategy == BASELINE), None)
    if base is None:
        return rows
    return [
        row.model_copy(
            update={
                "predicted_speedup": _ratio(base.predicted_s, row.predicted_s),
                "measured_speedup": _ratio(base.measured_s, row.measured_s),
            }
        )
        for row in rows
    ]


def _bounds(outcomes: Sequence[StrategyOutcome]) -> list[tuple[Problem, float]]:
    """For each distinct problem its best lower bound, which holds for all of its plans."""
    best: list[tuple[Problem, float]] = []
    for outcome in outcomes:
        if outcome.plan is None or outcome.plan.certificate.lower_bound_s is None:
            continue
        problem, bound = outcome.plan.problem, outcome.plan.certificate.lower_bound_s
        for i, (earlier, value) in enumerate(best):
            if earlier == problem:
                best[i] = (earlier, max(value, bound))
                break
        else:
            best.append((problem, bound))
    return best


def _row(
    outcome: StrategyOutcome, bounds: list[tuple[Problem, float]], uneven: StepVariation | None
) -> ComparisonRow:
    """The outcome's row, without its speed-ups."""
    plan, measurement = outcome.plan, outcome.measurement
    if plan is None:
        return ComparisonRow(
            strategy=outcome.strategy,
            status="undecided" if outcome.undecided else "infeasible",
            error=outcome.error or "no plan was made",
        )
    bound_s = next((value for problem, value in bounds if problem == plan.problem), None)
    steps = plan.steps_per_iteration
    predicted_s = predicted_step_s(plan, uneven)
    measured = measured_steps(plan, measurement) if measurement else None
    mean_s = mean_step_s(plan, measurement) if measurement and uneven is not None else None
    shares = _shares(plan, measurement)
    return ComparisonRow(
        strategy=outcome.strategy,
        status=plan.certificate.status,
        layers=_holdings(plan, shares),
        shares=tuple(shares),
        unused=tuple(device_labels(plan.problem)[device.device] for device in plan.unused),
        microbatches=plan.problem.microbatches,
        objective=plan.problem.objective,
        predicted_s=predicted_s,
        bound_s=None if bound_s is None else bound_s / steps,
        gap=plan.certificate.value_s / bound_s - 1 if bound_s else None,
        measured=measured,
        prediction_error=_ratio(
            predicted_s, measured.median if measured and mean_s is None else mean_s, minus=1
        ),
        final_loss=measurement.final_loss if measurement else None,
        run_id=measurement.run_id if measurement else None,
        error=outcome.error,
        predicted_interval=predicted_interval(plan, uneven),
        predicted_sync_s=plan.predicted.sync_s / steps if len(plan.pipelines) > 1 else None,
        measured_sync_s=_ratio(measurement.sync_s if measurement else None, steps),
        steps_per_iteration=steps,
        mean_measured_s=mean_s,
        parallel=plan.problem.parallel,
    )


def _holdings(plan: Plan, shares: Sequence[DeviceShare]) -> str:
    """Which device has which layers; with several pipelines, how many microbatches each takes.

    Pipelines of one stage each are named by their devices alone. Owners each take all of their own batches.
    """
    if plan.problem.owners is not None:
        of_device = {share.device: share for share in shares}
        held = [
            " · ".join(_range(of_device[stage.device]) for stage in pipeline.stages)
            if len(pipeline.stages) > 1
            else of_device[pipeline.stages[0].device].label
            for pipeline in plan.pipelines
        ]
        return f"{' | '.join(held)}, each on batches of its own{_local_steps(plan)}"
    if len(plan.pipelines) == len(shares) > 1:
        each = " · ".join(f"{share.label} {share.microbatches}" for share in shares)
        return f"{each} of {plan.problem.microbatches} microbatches, all layers{_local_steps(plan)}"
    if len(plan.pipelines) > 1:
        of_device = {share.device: share for share in shares}
        rows = [
            " · ".join(_range(of_device[stage.device]) for stage in pipeline.stages)
            + f" ({pipeline.microbatches})"
            for pipeline in plan.pipelines
        ]
        return f"{' | '.join(rows)} of {plan.problem.microbatches} microbatches"
    return " · ".join(map(_range, shares))


def _local_steps(plan: Plan) -> str:
    """``; 4 local steps`` or, by pipeline, ``; 4 · 9 local steps``; nothing where the plan has no rounds."""
    if not plan.problem.rhythm.is_rounds:
        return ""
    counts = [pipeline.local_steps or 1 for pipeline in plan.pipelines]
    each = " · ".join(map(str, counts)) if len(set(counts)) > 1 else str(counts[0])
    return f"; {each} local step{'' if set(counts) == {1} else 's'}"


def _range(share: DeviceShare) -> str:
    return f"{share.label} {share.start}–{share.stop}"


def _samples_taken(plan: Plan) -> dict[str, dict[str, int]]:
    """By device, the ``microbatches`` and ``samples`` of its pipeline, where there are several."""
    if len(plan.pipelines) == 1:
        return {}
    sizes: list[int] = []
    if plan.workload is not None:
        sizes = microbatch_sizes(plan.workload.batch_size, plan.problem.microbatches)
    samples: dict[str, dict[str, int]] = {}
    first = 0
    for pipeline in plan.pipelines:
        taken = {"microbatches": pipeline.microbatches}
        if sizes:
            taken["samples"] = sum(sizes[first : first + pipeline.microbatches])
        first += pipeline.microbatches if plan.problem.owners is None else 0
        samples |= {stage.device: taken for stage in pipeline.stages}
    return samples


def _ratio(over: float | None, under: float | None, minus: float = 0) -> float | None:
    return over / under - minus if over is not None and under else None


def _shares(plan: Plan, measurement: Measurement | None) -> list[DeviceShare]:
    """In the order of ranks."""
    labels = device_labels(plan.problem)
    predicted = {replica.device: replica for replica in plan.predicted.replicas}
    measured = {replica.device: replica for replica in measurement.replicas} if measurement else {}
    taken = _samples_taken(plan)
    steps = plan.steps_per_iteration
    shares = []
    for stage in plan.placed_stages:
        planned, ran = predicted.get(stage.device), measured.get(stage.device)
        shares.append(
            DeviceShare(
                device=stage.device,
                label=labels[stage.device],
                start=stage.start,
                stop=stage.stop,
                predicted_compute_s=planned.compute_s / steps if planned else 0.0,
                predicted_idle_s=planned.idle_s / steps if planned else 0.0,
                measured_compute_s=ran.compute_s / steps if ran else None,
                measured_transfer_s=ran.transfer_s / steps if ran else None,
                measured_idle_s=ran.idle_s / steps if ran else None,
                **taken.get(stage.device, {}),
            )
        )
    return shares


def pipeline_problem(outcomes: Sequence[StrategyOutcome]) -> Problem | None:
    """The problem that the rows answer: that of ``alone`` or a row beside only where there is no other."""
    planned = [outcome for outcome in outcomes if outcome.plan is not None]
    planned.sort(key=lambda outcome: outcome.strategy in (ALONE, *REFERENCE_ROWS))
    return planned[0].plan.problem if planned and planned[0].plan is not None else None


def device_labels(problem: Problem) -> dict[str, str]:
    """By device, what to call it: the node's name where it has one device only, else the whole id."""
    nodes = [split_device_id(device.id)[0] for device in problem.devices]
    return {
        device.id: node if node and nodes.count(node) == 1 else device.id
        for device, node in zip(problem.devices, nodes, strict=True)
    }

"""Re-checks a plan and its certificate from the records alone (the bound's proof is in ``lower_bound.py``).

Shared with the planner is the contract itself: the records, ``schedule.actions``, ``schedule.simulation``,
and how bytes are written for people. Times, memory and bounds are added up anew (``problem_data.py``).
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.planner.stage_memory import human_bytes
from skyctl.planner.verification import lower_bound
from skyctl.planner.verification.data_verification import check_data_plan
from skyctl.planner.verification.form_bounds import check_forms
from skyctl.planner.verification.hybrid_verification import check_hybrid_plan
from skyctl.planner.verification.pipeline_checks import tie_exchange_s
from skyctl.planner.verification.problem_data import ProblemData
from skyctl.planner.verification.round_verification import check_round_plan
from skyctl.planner.verification.verdict import (
    TOLERANCE,
    Check,
    Verdict,
    check_bound,
    check_certificate,
    check_claims,
    check_unused,
    check_value,
    is_close,
)
from skyctl.records.base import require_record
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.schedule.actions import check_in_flight
from skyctl.schedule.simulation import BoundaryTimes, MessageTimes, SimulatedStep, StageTimes, simulate

# Reads a plan's stages from its record, with the words for what is wrong with them.


class CheckedStage(NamedTuple):
    """Layers [start, stop) on a device (its index in the problem), and how they are executed.

    Microbatches in flight, by how many microbatches weight gradients are deferred, whether it recomputes.
    """

    device: int
    start: int
    stop: int
    in_flight: int
    weights_behind: int = 0
    recompute: bool = False


def read_stages(problem: Problem, plan: Plan) -> tuple[CheckedStage, ...]:
    """The stages of a plan of one pipeline.

    Raises:
        InputError: see ``api.predict``.
    """
    index = {device.id: d for d, device in enumerate(problem.devices)}
    microbatches = problem.microbatches
    out: list[CheckedStage] = []
    if len(plan.pipelines) != 1:
        raise InputError(f"the plan has {len(plan.pipelines)} pipelines; the problem asks for one")
    if (given := plan.pipelines[0].microbatches) != microbatches:
        raise InputError(f"the plan's stages run {given} microbatches, the problem has {microbatches}")
    for number, stage in enumerate(plan.placed_stages):
        if stage.device not in index:
            raise InputError(f"the plan names device {stage.device!r}, which is not in the problem")
        if not 1 <= stage.in_flight <= microbatches:
            raise InputError(
                f"stage {number} keeps {stage.in_flight} in flight, it may be 1 to {microbatches}"
            )
        device = index[stage.device]
        running = (stage.in_flight, stage.weights_behind, stage.recompute)
        out.append(CheckedStage(device, stage.start, stage.stop, *running))
    if out[-1].stop != len(problem.layers):
        raise InputError(f"the plan covers {out[-1].stop} layers, the problem has {len(problem.layers)}")
    if any(later.in_flight > earlier.in_flight for earlier, later in itertools.pairwise(out)):
        raise InputError(
            "the plan's in-flight numbers grow along the pipeline; its stages would wait for ever"
        )
    return tuple(out)


def verify(problem: Problem, plan: Plan) -> Verdict:
    """Checks shape, pins, in-flight numbers, memory, the predicted times, the certificate and its bound.

    Raises:
        InputError: no problem, or no plan.
    """
    require_record(problem, Problem, "verify")
    require_record(plan, Plan, "verify")
    if problem.rhythm.is_stale and problem.sync == "auto":  # a parameter server's routes are a star
        problem = problem.model_copy(update={"sync": "star"})
    same = problem == plan.problem
    checks = [Check(name="problem", ok=same, detail="as in the plan" if same else "not the plan's problem")]
    checks += check_claims(problem, plan)
    checks += check_forms(problem, plan) if same else []
    if problem.rhythm.is_rounds:
        checks += check_round_plan(problem, plan)
    elif problem.parallel == "data":
        checks += check_data_plan(problem, plan)
    elif problem.parallel == "hybrid":
        checks += check_hybrid_plan(problem, plan)
    else:
        checks += _check_pipeline(problem, plan)
    return Verdict(ok=all(check.ok for check in checks), checks=tuple(checks))


def _check_pipeline(problem: Problem, plan: Plan) -> list[Check]:
    """Every check of a plan of one pipeline; fewer where it can't be read."""
    try:
        held = read_stages(problem, plan)
    except InputError as exc:
        return [Check(name="stages", ok=False, detail=exc.message)]
    facts = ProblemData(problem)
    if not facts.finite():
        return [Check(name="stages", ok=False, detail="the problem's times or bytes are too large to add up")]
    in_flight = [stage.in_flight for stage in held]
    behind = [stage.weights_behind for stage in held]
    wrong = check_in_flight(problem.schedule, in_flight, problem.microbatches, behind)
    read = [
        Check(name="stages", ok=True, detail=f"{len(held)} stages cover {facts.layers} layers"),
        Check(name="in flight", ok=wrong is None, detail=wrong or f"as {problem.schedule} has it"),
    ]
    if wrong is not None:
        return read
    needs = [_need_bytes(facts, stage) for stage in held]
    step, largest = _play(facts, held)
    exchange_s = tie_exchange_s(problem, [stage[:3] for stage in held])
    whole_s = step.iteration_s + exchange_s
    witness = plan.certificate.witness
    unproved = None if witness is None else "its witness does"
    return [
        *read,
        _recompute(problem, held),
        check_unused(problem, plan),
        _pins(facts, held),
        _memory(facts, held, needs),
        check_value(plan, largest if problem.objective == "bottleneck" else whole_s),
        _prediction(plan, step, largest, needs, exchange_s),
        check_certificate(plan),
        check_bound(plan, lambda bound_s: lower_bound.prove(facts, bound_s, witness), unproved),
    ]


def _need_bytes(facts: ProblemData, stage: CheckedStage) -> float:
    """The contract's formula: reserved, state, activations in flight, the largest workspace, the window;
    weight gradients put off; with recomputation inputs in place of activations, which one layer has then."""
    layers = facts.problem.layers[stage.start : stage.stop]
    received = 0.0
    if stage.start > 0:
        received += facts.problem.layers[stage.start - 1].output_bytes
    if stage.stop < facts.layers:
        received += layers[-1].output_bytes
    kept = [layer.activation_bytes for layer in layers]
    once = [layer.workspace_bytes for layer in layers]
    put_off = 0.0
    if stage.recompute:
        once = [layer.activation_bytes + layer.workspace_bytes for layer in layers]
        for i in range(max(1, stage.start), stage.stop):
            entering = facts.problem.layers[i - 1].output_bytes
            kept[i - stage.start] = min(kept[i - stage.start], entering)
    elif facts.split:
        put_off = (stage.weights_behind + 1) * math.fsum(layer.deferred_bytes for layer in layers)
    return (
        facts.problem.devices[stage.device].reserved_bytes
        + math.fsum(layer.state_bytes for layer in layers)
        + stage.in_flight * math.fsum(kept)
        + put_off
        + max(once)
        + facts.problem.receive_window * received
    )


def _play(facts: ProblemData, held: tuple[CheckedStage, ...]) -> tuple[SimulatedStep, float]:
    """(the step, simulated; the largest stage's forward and backward in seconds)."""
    problem = facts.problem
    stages, layers_s = [], []
    for stage in held:
        part = slice(stage.start, stage.stop)
        forward, backward, optimizer = (math.fsum(x[part].tolist()) for x in facts.columns(stage.device))
        weight = min(backward, math.fsum(facts.weights(stage.device)[part].tolist()))
        overhead_s = facts.stage_overhead_s(stage.device, stage.start, stage.stop)
        if stage.recompute:
            stages.append(StageTimes(forward + overhead_s, backward + forward + overhead_s, optimizer))
        else:
            stages.append(StageTimes(forward + overhead_s, backward + overhead_s, optimizer, weight))
        layers_s.append(forward + backward + (forward if stage.recompute else 0.0))
    links = {(link.source, link.target): link for link in problem.links}
    shared: dict[tuple[str, str], dict[int, float]] = {}
    for number, resource in enumerate(problem.shared):
        for source, target in resource.links:
            shared.setdefault((source, target), {})[number] = resource.bandwidth_bytes_per_s

    def hop(source: int, target: int, size: float) -> MessageTimes:
        ends = (problem.devices[source].id, problem.devices[target].id)
        link = links.get(ends)
        size *= 1.0 if link is None else link.sent_share
        also = tuple((number, size / rate) for number, rate in shared.get(ends, {}).items())
        if link is None:
            return MessageTimes(shared=also)
        return MessageTimes(size / link.bandwidth_bytes_per_s, link.latency_s, also)

    boundaries = []
    for a, b in itertools.pairwise(held):
        size = problem.layers[a.stop - 1].output_bytes
        boundaries.append(BoundaryTimes(hop(a.device, b.device, size), hop(b.device, a.device, size)))
    in_flight = [stage.in_flight for stage in held]
    behind = [stage.weights_behind for stage in held]
    step = simulate(
        problem.schedule, problem.microbatches, in_flight, stages, boundaries, deferred_weights=behind
    )
    return step, max(layers_s)


def _recompute(problem: Problem, held: tuple[CheckedStage, ...]) -> Check:
    """Stages recompute only where the problem lets them, and put nothing off then."""
    for number, stage in enumerate(held):
        if stage.recompute and not problem.recompute:
            detail = f"stage {number} recomputes, the problem does not allow it"
            return Check(name="recompute", ok=False, detail=detail)
        if stage.recompute and stage.weights_behind:
            detail = f"stage {number} recomputes, and its weight gradients are {stage.weights_behind} behind"
            return Check(name="recompute", ok=False, detail=detail)
    count = sum(stage.recompute for stage in held)
    return Check(name="recompute", ok=True, detail=f"{count} of {len(held)} stages recompute")


def _pins(facts: ProblemData, held: tuple[CheckedStage, ...]) -> Check:
    for device, may, where in (
        (held[0].device, facts.may_be_first, "first"),
        (held[-1].device, facts.may_be_last, "last"),
    ):
        if not may(device):
            name = facts.problem.devices[device].id
            return Check(name="pins", ok=False, detail=f"{name} may not hold the {where} stage")
    return Check(name="pins", ok=True, detail="first and last stage are where they may be")


def _memory(facts: ProblemData, held: tuple[CheckedStage, ...], needs: list[float]) -> Check:
    for stage, need in zip(held, needs, strict=True):
        device = facts.problem.devices[stage.device]
        if device.memory_bytes is not None and not need <= device.memory_bytes * (1 + 1e-12):
            detail = f"{device.id} needs {human_bytes(need)}, it has {human_bytes(device.memory_bytes)}"
            return Check(name="memory", ok=False, detail=detail)
    return Check(name="memory", ok=True, detail="every stage fits its device")


def _prediction(
    plan: Plan, step: SimulatedStep, largest_s: float, needs: list[float], exchange_s: float
) -> Check:
    said = plan.predicted
    ok = is_close(said.iteration_s, step.iteration_s + exchange_s) and is_close(said.bottleneck_s, largest_s)
    ok = ok and is_close(said.sync_s, exchange_s)
    ok = ok and [r.device for r in said.replicas] == [s.device for s in plan.placed_stages]
    if ok:
        slack = TOLERANCE * max(step.iteration_s, 1e-6)
        for s, replica in enumerate(said.replicas):
            # a stage of microseconds beside seconds: its share of a sum's rounding may be more than its own
            near = abs(replica.compute_s - step.compute_s[s]) <= 1e-3 * slack
            ok = ok and (near or is_close(replica.compute_s, step.compute_s[s]))
            ok = ok and abs(replica.idle_s - step.idle_s[s]) <= slack
            ok = ok and is_close(replica.memory_bytes, needs[s])
    return Check(name="prediction", ok=ok, detail="simulated again" if ok else "differs from the simulation")

"""Every size, every way to run it, every strategy: planned, simulated, and set against even."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from skyctl.compare.paper.closed import Factors
from skyctl.compare.paper.records import Case, Entry, Execution, MemoryRow, Name, Paper
from skyctl.control.paper.cases import BATCH, LARGEST, SIZES, problem, slow_factors, told_factors
from skyctl.control.paper.filling import least_sum_s
from skyctl.control.paper.twostage import two_stages
from skyctl.planner.api import assigned, plan
from skyctl.records.plan import Certificate, Plan
from skyctl.records.problem import Problem

EXECUTIONS: tuple[Execution, ...] = ("chain", "chain-sum", "steady", "step")
LIMIT_S = 2.0
"""Seconds for ``step``'s ``optimal``, which is not proved."""

PROOF_S = 60.0
"""For the others, which are proved within a second on a machine that has nothing else to do."""

MEMORY_SCALES: tuple[float | None, ...] = (0.125, 0.25, 0.5, 1.0, None)
"""Of a card, for the least sum at the largest size."""

EXACT = 1e-9
Assignment = list[tuple[str, int, int]]
Made = tuple[Plan, Certificate]


def experiment(
    sizes: Sequence[tuple[int, int]] = SIZES,
    executions: Sequence[Execution] = EXECUTIONS,
    *,
    limit_s: float = LIMIT_S,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Paper:
    """The whole experiment. All but ``step``'s ``optimal`` is the same every time; that depends on time.

    Args:
        sizes: (nodes, encoders).
        limit_s: for each ``optimal`` of ``step``.
    """
    began = time.perf_counter()
    cases = []
    for nodes, encoders in sizes:
        dynamic = published_heuristic(problem(nodes, encoders, "chain"))
        for execution in executions:
            on_progress(f"{nodes} nodes × {encoders} encoders, {execution}")
            cases.append(_case(nodes, encoders, execution, dynamic, limit_s))
    memory = []
    if LARGEST in sizes and "chain-sum" in executions:
        on_progress("memory")
        memory = [memory_row(scale) for scale in MEMORY_SCALES]
    return Paper(
        factors=_factors(list(dict.fromkeys(nodes for nodes, _ in sizes))),
        cases=tuple(cases),
        memory=tuple(memory),
        wall_s=time.perf_counter() - began,
    )


def published_heuristic(asked: Problem) -> Assignment:
    """The two-stage heuristic's plan; it knows layers' flops and bytes, devices' times and free memory."""
    ids = [device.id for device in asked.devices]
    times = [asked.times.get(name) for name in ids]
    cuts = two_stages(
        [layer.flops for layer in asked.layers],
        [layer.state_bytes + layer.activation_bytes for layer in asked.layers],
        [math.inf if d.memory_bytes is None else d.memory_bytes for d in asked.devices],
        [
            1 / device.flops_per_s if known is None else math.fsum((*known.forward_s, *known.backward_s))
            for device, known in zip(asked.devices, times, strict=True)
        ],
    )
    return [(name, start, stop) for name, start, stop in zip(ids, cuts, cuts[1:], strict=False)]


def _factors(nodes: Sequence[int]) -> dict[str, tuple[float, ...]]:
    found = {f"{count - 1} workers": tuple(slow_factors(count)) for count in nodes}
    return {**found, f"{nodes[-1] - 1}, second set": tuple(told_factors(nodes[-1]))}


def memory_row(scale: float | None) -> MemoryRow:
    """The least sum at the largest size with other memory. Even needs a tenth of a card there."""
    asked = problem(*LARGEST, "chain-sum", scale)
    even_s = time_s(plan(asked, "even"), "chain-sum")
    best, proof = _least_sum(asked)
    return MemoryRow(
        scale=scale,
        reduction=1 - time_s(best, "chain-sum") / even_s,
        stages=len(best.stages),
        gap=proof.gap,
    )


def time_s(made: Plan, execution: Execution) -> float:
    """One batch's seconds: the simulated step, or in steady state all microbatches on the slowest stage."""
    if execution == "steady":
        return BATCH * made.predicted.bottleneck_s
    return made.predicted.iteration_s


def _case(nodes: int, encoders: int, execution: Execution, dynamic: Assignment, limit_s: float) -> Case:
    asked = problem(nodes, encoders, execution)
    patience_s = limit_s if execution == "step" else PROOF_S
    makers: dict[Name, Callable[[], Made]] = {
        "even": lambda: _proved(plan(asked, "even")),
        "dynamic": lambda: _proved(assigned(asked, dynamic)),
        "heuristic": lambda: _proved(plan(asked, "heuristic")),
        "optimal": lambda: (
            _least_sum(asked) if execution == "chain-sum" else _proved(plan(asked, "optimal", patience_s))
        ),
    }
    entries: list[Entry] = []
    for name, make in makers.items():
        began = time.perf_counter()
        made, proof = make()
        wall_s = time.perf_counter() - began
        value_s = time_s(made, execution)
        entries.append(
            Entry(
                strategy=name,
                time_s=value_s,
                reduction=1 - value_s / (entries[0].time_s if entries else value_s),
                stages=len(made.stages),
                status=proof.status,
                gap=proof.gap,
                plan_s=wall_s,
            )
        )
    return Case(
        nodes=nodes,
        workers=len(asked.devices),
        encoders=encoders,
        layers=len(asked.layers),
        execution=execution,
        limit=1 - _least_s(asked, execution) / entries[0].time_s,
        entries=tuple(entries),
    )


def _proved(made: Plan) -> Made:
    return made, made.certificate


def _least_sum(asked: Problem) -> Made:
    """The heuristic's plan, with the bound by filling in the place of the planner's certificate."""
    made, bound_s = plan(asked, "heuristic"), least_sum_s(asked)
    gap = max(0.0, made.predicted.iteration_s / bound_s - 1)
    proof = made.certificate.model_copy(
        update={
            "status": "optimal" if gap <= EXACT else "bounded",
            "lower_bound_s": bound_s,
            "gap": gap,
            "method": "local search; bound by filling",
        }
    )
    return made, proof


def _least_s(asked: Problem, execution: Execution) -> float:
    """The closed form: perfect balance (``chain-sum``: the fastest device alone), layers not whole."""
    work = math.fsum(layer.flops for layer in asked.layers) * asked.microbatches
    seconds = [work / device.flops_per_s for device in asked.devices]
    factors = Factors.of(seconds)
    if execution == "chain":
        return factors.harmonic
    if execution == "chain-sum":
        return factors.least
    return factors.harmonic / len(seconds)

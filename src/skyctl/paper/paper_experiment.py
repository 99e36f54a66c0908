"""Every size, every way to run it, every strategy: planned, simulated, and set against even."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from skyctl.paper.paper_result import (
    Execution,
    MemoryLimitRow,
    PaperCase,
    PaperEntry,
    PaperResult,
    PaperStrategy,
    SlowdownFactors,
)
from skyctl.paper.two_stage_heuristic import two_stage_cuts
from skyctl.planner.api import assigned, plan
from skyctl.records.plan import Certificate, Plan
from skyctl.records.problem import Device, Layer, Problem

EXECUTIONS: tuple[Execution, ...] = ("chain", "chain-sum", "steady", "step")
LIMIT_S = 2.0
"""Seconds for ``step``'s ``optimal``, which is not proved."""

PROOF_S = 60.0
"""Seconds for the others, which are proved within one on a machine that has nothing else to do."""

MEMORY_SCALES: tuple[float | None, ...] = (0.125, 0.25, 0.5, 1.0, None)
"""Parts of a card's memory that the least sum at the largest size is planned with (None: no limit)."""

EXACT = 1e-9
Assignment = list[tuple[str, int, int]]
CertifiedPlan = tuple[Plan, Certificate]


STATE_BYTES = 8.0
"""A parameter and its gradient in float32; SGD keeps nothing more."""

FLOPS_PER_S = 5e12
"""Of a worker that is not slowed down: about half of what a P100 can at most."""

CARD_BYTES = (16_280 - 500) * 2.0**20
"""A 16 GB card's memory less what the published code leaves free."""

SIZES = tuple((nodes, encoders) for nodes in (16, 32, 64) for encoders in (40, 80, 160))
LARGEST = (64, 160)

_SLOWDOWN_SEED, _TOLD_SEED = 35, 32


HIDDEN, HEADS, TOKENS, BATCH = 1024, 16, 128, 32

VOCABULARY, CLASSES = 30522, 3


def slowdown_factors(nodes: int) -> list[float]:
    """How many times as long each worker takes: whole numbers from 2 to 7."""
    drawn: npt.NDArray[Any] = np.random.default_rng(_SLOWDOWN_SEED).integers(low=1, high=7, size=nodes)
    return [1.0 + float(s) for s in drawn[1:]]


def allocator_factors(nodes: int) -> list[float]:
    """The factors that the published allocator is told, from [1, 2)."""
    drawn: npt.NDArray[Any] = np.random.default_rng(_TOLD_SEED).random(nodes)
    return [1.0 + float(x) for x in drawn[1:]]


def paper_devices(nodes: int, memory_scale: float | None = 1.0) -> tuple[Device, ...]:
    """The workers, in the order of their ranks. ``memory_scale``: of a card (None: without limit)."""
    return tuple(
        Device(
            id=f"n{rank}/cuda:0",
            flops_per_s=FLOPS_PER_S / factor,
            memory_bytes=None if memory_scale is None else memory_scale * CARD_BYTES,
        )
        for rank, factor in enumerate(slowdown_factors(nodes), start=1)
    )


def bert_layers(encoders: int, samples: int = BATCH) -> tuple[Layer, ...]:
    """3 · encoders + 3 layers, for microbatches of ``samples``. Backward takes twice the forward.

    Activations: what autograd keeps of each layer in float32, a layer's input counted with it.
    """
    h, t = HIDDEN, TOKENS
    scores = HEADS * t / h  # attention's t × t numbers a head, in units of t × h
    tensor = 4.0 * samples * t * h
    # name, forward flops a sample, parameters, kept tensors of t × h numbers
    attention = ("attention", 8.0 * t * h**2 + 4.0 * t**2 * h, 4.0 * h**2, 7.0 + 2.0 * scores)
    body = ("body", 8.0 * t * h**2, 4.0 * h**2, 9.0)
    tail = ("tail", 8.0 * t * h**2, 4.0 * h**2, 7.0)
    parts = [("embedding", 10.0 * t * h, float((VOCABULARY + 512) * h), 3.0)]
    for i in range(encoders):
        parts += [(f"encoder.{i}.{part[0]}", *part[1:]) for part in (attention, body, tail)]
    parts += [("pooler", 2.0 * h**2, float(h**2), 3.0 / t)]
    parts += [("classifier", 2.0 * CLASSES * h, float(CLASSES * h), 1.0 / t)]
    return tuple(
        Layer(
            name=name,
            flops=3.0 * samples * flops,
            state_bytes=STATE_BYTES * parameters,
            activation_bytes=kept * tensor,
            output_bytes=tensor,
        )
        for name, flops, parameters, kept in parts
    )


def paper_problem(
    nodes: int, encoders: int, execution: Execution, memory_scale: float | None = 1.0
) -> Problem:
    """The problem that the planner is asked for one size and one way to run it."""
    chained = execution in ("chain", "chain-sum")
    return Problem(
        layers=bert_layers(encoders, BATCH if chained else 1),
        devices=paper_devices(nodes, memory_scale),
        microbatches=1 if chained else BATCH,
        schedule="sequential" if chained else "1f1b",
        objective="bottleneck" if execution in ("chain", "steady") else "iteration",
    )


def run_experiment(
    sizes: Sequence[tuple[int, int]] = SIZES,
    executions: Sequence[Execution] = EXECUTIONS,
    *,
    limit_s: float = LIMIT_S,
    on_progress: Callable[[str], None] = lambda _: None,
) -> PaperResult:
    """The whole experiment. All but ``step``'s ``optimal`` is the same every time; that depends on time.

    Args:
        sizes: (nodes, encoders).
        limit_s: for each ``optimal`` of ``step``.
    """
    began = time.perf_counter()
    cases = []
    for nodes, encoders in sizes:
        dynamic = published_heuristic(paper_problem(nodes, encoders, "chain"))
        for execution in executions:
            on_progress(f"{nodes} nodes × {encoders} encoders, {execution}")
            cases.append(_case(nodes, encoders, execution, dynamic, limit_s))
    memory = []
    if LARGEST in sizes and "chain-sum" in executions:
        on_progress("memory")
        memory = [memory_row(scale) for scale in MEMORY_SCALES]
    return PaperResult(
        factors=_factors(list(dict.fromkeys(nodes for nodes, _ in sizes))),
        cases=tuple(cases),
        memory=tuple(memory),
        wall_s=time.perf_counter() - began,
    )


def published_heuristic(problem: Problem) -> Assignment:
    """The two-stage heuristic's plan; it knows layers' flops and bytes, devices' times and free memory."""
    ids = [device.id for device in problem.devices]
    times = [problem.times.get(name) for name in ids]
    cuts = two_stage_cuts(
        [layer.flops for layer in problem.layers],
        [layer.state_bytes + layer.activation_bytes for layer in problem.layers],
        [math.inf if d.memory_bytes is None else d.memory_bytes for d in problem.devices],
        [
            1 / device.flops_per_s
            if layer_times is None
            else math.fsum((*layer_times.forward_s, *layer_times.backward_s))
            for device, layer_times in zip(problem.devices, times, strict=True)
        ],
    )
    return [(name, start, stop) for name, start, stop in zip(ids, cuts, cuts[1:], strict=False)]


def _factors(nodes: Sequence[int]) -> dict[str, tuple[float, ...]]:
    by_workers = {f"{count - 1} workers": tuple(slowdown_factors(count)) for count in nodes}
    return {**by_workers, f"{nodes[-1] - 1}, second set": tuple(allocator_factors(nodes[-1]))}


def memory_row(scale: float | None) -> MemoryLimitRow:
    """The least sum at the largest size with other memory. Even needs a tenth of a card there."""
    problem = paper_problem(*LARGEST, "chain-sum", scale)
    even_s = batch_time_s(plan(problem, "even"), "chain-sum")
    best, proof = _least_sum(problem)
    return MemoryLimitRow(
        scale=scale,
        reduction=1 - batch_time_s(best, "chain-sum") / even_s,
        stages=len(best.placed_stages),
        gap=proof.gap,
    )


def batch_time_s(paper_plan: Plan, execution: Execution) -> float:
    """One batch's seconds: the simulated step, or in steady state all microbatches on the slowest stage."""
    if execution == "steady":
        return BATCH * paper_plan.predicted.bottleneck_s
    return paper_plan.predicted.iteration_s


def _case(nodes: int, encoders: int, execution: Execution, dynamic: Assignment, limit_s: float) -> PaperCase:
    problem = paper_problem(nodes, encoders, execution)
    patience_s = limit_s if execution == "step" else PROOF_S
    makers: dict[PaperStrategy, Callable[[], CertifiedPlan]] = {
        "even": lambda: _proved(plan(problem, "even")),
        "dynamic": lambda: _proved(assigned(problem, dynamic)),
        "heuristic": lambda: _proved(plan(problem, "heuristic")),
        "optimal": lambda: (
            _least_sum(problem) if execution == "chain-sum" else _proved(plan(problem, "optimal", patience_s))
        ),
    }
    entries: list[PaperEntry] = []
    for name, make in makers.items():
        began = time.perf_counter()
        paper_plan, proof = make()
        wall_s = time.perf_counter() - began
        value_s = batch_time_s(paper_plan, execution)
        entries.append(
            PaperEntry(
                strategy=name,
                time_s=value_s,
                reduction=1 - value_s / (entries[0].time_s if entries else value_s),
                stages=len(paper_plan.placed_stages),
                status=proof.status,
                gap=proof.gap,
                plan_s=wall_s,
            )
        )
    return PaperCase(
        nodes=nodes,
        workers=len(problem.devices),
        encoders=encoders,
        layers=len(problem.layers),
        execution=execution,
        limit=1 - _least_s(problem, execution) / entries[0].time_s,
        entries=tuple(entries),
    )


def _proved(paper_plan: Plan) -> CertifiedPlan:
    return paper_plan, paper_plan.certificate


def _least_sum(problem: Problem) -> CertifiedPlan:
    """The heuristic's plan, certified by the bound by filling in place of the planner's."""
    paper_plan, bound_s = plan(problem, "heuristic"), least_sum_s(problem)
    gap = max(0.0, paper_plan.predicted.iteration_s / bound_s - 1)
    proof = paper_plan.certificate.model_copy(
        update={
            "status": "optimal" if gap <= EXACT else "bounded",
            "lower_bound_s": bound_s,
            "gap": gap,
            "method": "local search; bound by filling",
        }
    )
    return paper_plan, proof


def _least_s(problem: Problem, execution: Execution) -> float:
    """The closed form: perfect balance (``chain-sum``: the fastest device alone), layers not whole."""
    work = math.fsum(layer.flops for layer in problem.layers) * problem.microbatches
    seconds = [work / device.flops_per_s for device in problem.devices]
    factors = SlowdownFactors.of(seconds)
    if execution == "chain":
        return factors.harmonic
    if execution == "chain-sum":
        return factors.least
    return factors.harmonic / len(seconds)


def least_sum_s(problem: Problem) -> float:
    """A lower bound, in seconds, of a chain of stages' sum where memory is limited; found by filling.

    A device's stage is a range of layers that its memory holds, so its work is at most that of the best such
    range. Fast devices are filled so, one after the other, until all work is placed. No plan has a smaller
    sum: it places the same work, and on each device no more than that. The schedule is ``sequential``, the
    layers' flops are the costs, links cost nothing. Infinity where the devices hold less than all layers.
    """
    left = math.fsum(layer.flops for layer in problem.layers)
    sum_s = 0.0
    for device in sorted(problem.devices, key=lambda d: -d.flops_per_s):
        room = math.inf if device.memory_bytes is None else device.memory_bytes - device.reserved_bytes
        taken = min(left, max_range_flops(problem, room))
        sum_s += problem.microbatches * taken / device.flops_per_s
        left -= taken
        if left <= 0:
            return sum_s
    return math.inf


def max_range_flops(problem: Problem, room: float) -> float:
    """The most work of any range of layers that ``room`` bytes hold, with one microbatch in flight."""
    best = flops = held = 0.0
    start = 0
    for layer in problem.layers:
        flops += layer.flops
        held += layer.state_bytes + layer.activation_bytes
        while held > room:
            first = problem.layers[start]
            flops -= first.flops
            held -= first.state_bytes + first.activation_bytes
            start += 1
        best = max(best, flops)
    return best

"""Proves a bound on plans of several pipelines, of few devices, by what each set of them can take.

For every set of devices the paths through a pipeline (``proof_by_paths``) say how many microbatches it can
have, as one pipeline over exactly these in some order and with some cuts, until its last backward, with the
least latency of a sum and the least optimizer after it, reaches a limit. More microbatches take no less. If
no way to part the devices into such sets takes all microbatches, no plan is below the limit. Of sums nothing
else counts, and of shared resources that no message is faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from skyctl.planner.verification.problem_data import ProblemData, Proof
from skyctl.planner.verification.proofs.proof_by_paths import MAX_TABLE_CELLS, PathTables, table_cells
from skyctl.planner.verification.step import CheckedStep

MAX_DEVICES = 11
ROUNDING = 1e-11
"""Relative to the limit: how far above it still counts as below."""

Counts = npt.NDArray[np.int64]


def prove_by_sets(step: CheckedStep, below_s: float) -> Proof:
    """Whether no plan of two pipelines or more has a step below ``below_s`` seconds."""
    devices, wanted = len(step.ids), step.problem.microbatches
    if not 2 <= devices <= MAX_DEVICES or table_cells(step.facts) > MAX_TABLE_CELLS:
        return Proof(None, "there are too many sets of devices for tables of paths")
    limit_s = below_s * (1 + ROUNDING) - _least_after_s(step)
    most = np.zeros(1 << devices, dtype=np.int64)
    for count in range(1, wanted):
        keeps = _keep(step, count, limit_s)
        if not keeps.any():
            break
        most[keeps] = count
    taken = _most_together(most)
    if taken < wanted:
        return Proof(True, f"below it, disjoint sets of devices take {taken} of {wanted} microbatches")
    return Proof(None, "disjoint sets of devices may take all microbatches below it, were there no sums")


def _least_after_s(step: CheckedStep) -> float:
    """The least seconds after the last backward: a sum's way out and in, and the slowest optimizer."""
    wires, ids = step.sums.wires, step.ids
    latency_s = min(
        min(wires.latency_s.get((a, b), 0.0) for b in ids if b != a)
        + min(wires.latency_s.get((b, a), 0.0) for b in ids if b != a)
        for a in ids
    )
    optimizers = np.stack([step.facts.columns(d)[2] for d in range(len(ids))])
    return latency_s + float(optimizers.min(axis=0).max())


def _keep(step: CheckedStep, count: int, limit_s: float) -> npt.NDArray[np.bool_]:
    """By set of devices (as bits), whether paths let it end ``count`` microbatches in less."""
    update: dict[str, Any] = {"microbatches": count, "recompute": False}
    facts = ProblemData(step.problem.model_copy(update=update))
    out = np.zeros(1 << facts.devices, dtype=np.bool_)
    for (chosen, first), span in PathTables(facts, limit_s).span.items():
        if facts.may_be_first(first) and span[0] < limit_s:
            out[chosen] = True
    return out


def _most_together(most: Counts) -> int:
    """The most that disjoint sets take together, where each set takes ``most`` of it."""
    alone = most.tolist()
    best = [0] * len(alone)
    for devices in range(1, len(alone)):
        lowest = devices & -devices
        others = part = devices ^ lowest
        best[devices] = best[others]  # the lowest is unused
        while True:
            best[devices] = max(best[devices], alone[part | lowest] + best[others ^ part])
            if not part:
                break
            part = (part - 1) & others
    return best[-1]

"""Reads a plan's stages from its record, with the words for what is wrong with them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem


class Held(NamedTuple):
    """Layers [start, stop) on a device (its index in the problem), with that many microbatches in flight,
    weight gradients that many behind, and recomputing or not."""

    device: int
    start: int
    stop: int
    in_flight: int
    weights_behind: int = 0
    recompute: bool = False


def read_stages(problem: Problem, plan: Plan) -> tuple[Held, ...]:
    """The stages of a plan with one replica a stage.

    Raises:
        InputError: see ``api.predict``.
    """
    index = {device.id: d for d, device in enumerate(problem.devices)}
    microbatches = problem.microbatches
    out: list[Held] = []
    for number, stage in enumerate(plan.stages):
        if len(stage.replicas) != 1:
            raise InputError(f"stage {number} has {len(stage.replicas)} replicas; version 1 has one a stage")
        replica = stage.replicas[0]
        if replica.device not in index:
            raise InputError(f"the plan names device {replica.device!r}, which is not in the problem")
        if replica.microbatches != microbatches:
            raise InputError(
                f"stage {number} runs {replica.microbatches} microbatches, the problem has {microbatches}"
            )
        if not 1 <= replica.in_flight <= microbatches:
            raise InputError(
                f"stage {number} keeps {replica.in_flight} in flight, it may be 1 to {microbatches}"
            )
        device = index[replica.device]
        running = (replica.in_flight, replica.weights_behind, replica.recompute)
        out.append(Held(device, stage.start, stage.stop, *running))
    if out[-1].stop != len(problem.layers):
        raise InputError(f"the plan covers {out[-1].stop} layers, the problem has {len(problem.layers)}")
    if any(later.in_flight > earlier.in_flight for earlier, later in itertools.pairwise(out)):
        raise InputError(
            "the plan's in-flight numbers grow along the pipeline; its stages would wait for ever"
        )
    return tuple(out)

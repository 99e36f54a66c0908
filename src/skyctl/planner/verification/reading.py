"""Reads what a plan's record says of rows, shares, groups and routes, with the words for what is wrong there.

One pipeline is one row; where devices hold all layers each, every row has one stage. Nothing is shared with
the planner's own reader.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.planner.verification.route_bound import Wires
from skyctl.planner.verification.routes import (
    CheckedRoute,
    Trees,
    checked_routes,
    is_ring,
    is_star,
    ways_from_root,
)
from skyctl.planner.verification.verdict import TOLERANCE
from skyctl.records.pipeline import Pipeline
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem, SyncRoutes
from skyctl.records.sync import Sync

DEFAULT_CHUNK_BYTES: int = Sync.model_fields["chunk_bytes"].default


class HeldRange(NamedTuple):
    """Layers [start, stop) on a device (its index in the problem), and how they are executed.

    Microbatches in flight, and of a step in all; by how many of them weight gradients follow the backward;
    whether activations are computed again.
    """

    device: int
    start: int
    stop: int
    in_flight: int
    microbatches: int
    weights_behind: int = 0
    recompute: bool = False


class SummedRange(NamedTuple):
    """Layers [start, stop) that the same devices hold, one of every row, and their gradients' routes."""

    start: int
    stop: int
    trees: Trees
    devices: tuple[str, ...]


Row = tuple[HeldRange, ...]
"""A pipeline's stages."""


class ReadPlan(NamedTuple):
    """A plan as ``verify`` plays it: pipelines, what they sum in messages of how many bytes, local steps."""

    rows: tuple[Row, ...]
    groups: tuple[SummedRange, ...] = ()
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    local_steps: tuple[int, ...] = ()

    @property
    def held(self) -> tuple[HeldRange, ...]:
        """All stages in the order of ranks."""
        return tuple(chain.from_iterable(self.rows))


def read_plan(problem: Problem, plan: Plan) -> ReadPlan:
    """A plan's pipelines, and what they sum over which routes.

    Raises:
        InputError: they are not what a plan of this problem can have: the message says what is wrong.
    """
    _require_parallelism(problem)
    rows = tuple(_read_row(problem, n, pipeline) for n, pipeline in enumerate(plan.pipelines))
    devices = [stage.device for row in rows for stage in row]
    if len(set(devices)) < len(devices):
        twice = next(d for d in devices if devices.count(d) > 1)
        raise InputError(f"{problem.devices[twice].id} holds more than one stage")
    _require_shares(problem, rows)
    steps = tuple(pipeline.local_steps or 0 for pipeline in plan.pipelines)
    if len(rows) == 1:
        if plan.sync is not None:
            raise InputError("one pipeline alone has nobody to sum with")
        return ReadPlan(rows, local_steps=steps)
    if plan.sync is None:
        raise InputError("nothing says how the pipelines' gradients or weights are summed")
    return ReadPlan(rows, _read_groups(problem, plan.sync, rows), plan.sync.chunk_bytes, steps)


def read_stages(problem: Problem, plan: Plan) -> Row:
    """The stages of a plan of one pipeline.

    Raises:
        InputError: see ``api.predict``.
    """
    if len(plan.pipelines) != 1:
        raise InputError(f"the plan has {len(plan.pipelines)} pipelines; the problem asks for one")
    row = _read_row(problem, 0, plan.pipelines[0])
    if (given := row[0].microbatches) != problem.microbatches:
        raise InputError(
            f"the plan's stages run {given} microbatches, the problem has {problem.microbatches}"
        )
    return row


def held_together(problem: Problem, rows: Sequence[Row]) -> list[tuple[int, int, list[str]]]:
    """(start, stop, devices in the problem's order) of every largest range that the same ones hold."""
    cuts = sorted({held.start for row in rows for held in row})
    out = []
    for start, stop in pairwise([*cuts, len(problem.layers)]):
        devices = sorted(held.device for row in rows for held in row if held.start <= start < held.stop)
        out.append((start, stop, [problem.devices[d].id for d in devices]))
    return out


def _require_parallelism(problem: Problem) -> None:
    """Raises InputError where the problem asks for what plans of its parallelism do not have."""
    if problem.parallel == "pipeline" and not problem.rhythm.is_rounds:
        return
    if problem.schedule not in ("1f1b", "sequential") or problem.objective != "iteration":
        raise InputError(
            f"no pipelines side by side have schedule {problem.schedule}, objective {problem.objective}"
        )
    if problem.parallel == "hybrid" and (problem.sync in ("trees", "server") or problem.helpers):
        raise InputError("hybrids sum over rings and stars, without helpers")


def _read_row(problem: Problem, number: int, pipeline: Pipeline) -> Row:
    index = {device.id: d for d, device in enumerate(problem.devices)}
    share = pipeline.microbatches
    row = []
    at = 0
    for place, stage in enumerate(pipeline.stages):
        if stage.device not in index:
            raise InputError(f"the plan names device {stage.device!r}, which is not in the problem")
        if not 1 <= stage.in_flight <= share:
            raise InputError(f"stage {place} keeps {stage.in_flight} in flight, it may be 1 to {share}")
        if stage.start != at:
            raise InputError(f"a stage of pipeline {number} starts at layer {stage.start}, not at {at}")
        at = stage.stop
        running = (stage.in_flight, share, stage.weights_behind, stage.recompute)
        row.append(HeldRange(index[stage.device], stage.start, stage.stop, *running))
    if at != len(problem.layers):
        raise InputError(f"the plan covers {at} layers, the problem has {len(problem.layers)}")
    if any(later.in_flight > earlier.in_flight for earlier, later in pairwise(row)):
        raise InputError(
            "the plan's in-flight numbers grow along the pipeline; its stages would wait for ever"
        )
    return tuple(row)


def _require_shares(problem: Problem, rows: Sequence[Row]) -> None:
    """Raises InputError where shares are not the step's, or pipelines not of the problem's parallelism."""
    shares, wanted = [row[0].microbatches for row in rows], problem.microbatches
    rounds = problem.rhythm.is_rounds
    whole = set(shares) == {wanted} if rounds and problem.owners is not None else sum(shares) == wanted
    if not whole:
        raise InputError(f"the shares are {shares} microbatches, the problem has {wanted}")
    if rounds:
        return
    if problem.parallel == "pipeline" and len(rows) != 1:
        raise InputError(f"the plan has {len(rows)} pipelines; the problem asks for one")
    if problem.parallel == "hybrid" and len(rows) < 2:
        raise InputError("a hybrid has two pipelines or more, the plan has one")
    if problem.parallel == "data" and any(len(row) != 1 for row in rows):
        raise InputError(f"some pipeline is not one stage of all {len(problem.layers)} layers")


def _read_groups(problem: Problem, sync: Sync, rows: Sequence[Row]) -> tuple[SummedRange, ...]:
    of = "weights" if problem.rhythm.is_rounds else "gradients"
    if sync.of != of:
        raise InputError(f"the plan sums {sync.of}, the problem's rhythm {of}")
    if sync.format != problem.sync_format:
        raise InputError(f"{sync.of} are sent as {sync.format}, the problem says {problem.sync_format}")
    if sync.uncompressed_steps != problem.sync_uncompressed_steps:
        raise InputError(
            f"{sync.uncompressed_steps} steps are uncompressed, the problem says "
            f"{problem.sync_uncompressed_steps}"
        )
    wanted = held_together(problem, rows)
    if [(group.start, group.stop) for group in sync.groups] != [(a, b) for a, b, _ in wanted]:
        ranges = ", ".join(f"[{start}, {stop})" for start, stop, _ in wanted)
        raise InputError(f"the sync groups are not the layers that the same devices hold: {ranges}")
    over_trees = problem.parallel == "data" and not problem.rhythm.is_rounds
    may_help = set(Wires(problem).may_help) if over_trees else set()
    out = []
    for group, (start, stop, devices) in zip(sync.groups, wanted, strict=True):
        trees = checked_routes(group.routes)
        if over_trees:
            _require_trees(trees, devices, may_help)
        if (not over_trees or problem.sync in ("ring", "star")) and not _is_asked(
            trees, devices, problem.sync
        ):
            raise InputError(
                f"the routes of layers [{start}, {stop}) are no ring or star of {', '.join(devices)}"
                + (f", as sync {problem.sync} asks for" if problem.sync != "auto" else "")
            )
        out.append(SummedRange(start, stop, trees, tuple(devices)))
    return tuple(out)


def _is_asked(trees: Trees, devices: Sequence[str], sync: SyncRoutes) -> bool:
    """Whether the trees are a ring or a star, of those that ``sync`` leaves."""
    return (sync != "star" and is_ring(trees, devices)) or (sync != "ring" and is_star(trees, devices))


def _require_trees(trees: Sequence[CheckedRoute], replicas: Sequence[str], may_help: set[str]) -> None:
    """Raises InputError where the routes do not bring every replica the sum of all, or go over others.

    Others than those that may help, or that do nothing there.
    """
    if abs(math.fsum(tree.share for tree in trees) - 1) > TOLERANCE:
        raise InputError("the routes' shares do not add up to 1")
    for number, tree in enumerate(trees):
        for edges, child in ((tree.up, 0), (tree.down, 1)):
            reached = [tree.root, *(edge[child] for edge in edges)]
            named = {tree.root, *(device for edge in edges for device in edge)}
            if len(set(reached)) < len(reached) or named != set(reached) or not set(replicas) <= named:
                raise InputError(f"route {number} does not go to each holder once, and to nobody else")
            if helper := sorted(named - set(replicas) - may_help):
                raise InputError(f"route {number} goes over {helper[0]}, which may not help to sum")
            inner = {tree.root, *(edge[1 - child] for edge in edges)}
            if idle := sorted(named - set(replicas) - inner):
                raise InputError(f"route {number} ends at {idle[0]}, which holds nothing")
            if len(ways_from_root(edges, tree.root, child, {})) < len(named):
                raise InputError(f"route {number} has no way between its root {tree.root} and some holder")

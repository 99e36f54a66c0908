"""What a supervised run begins with: a fresh one, or one that has ended and goes on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from skyctl.control.request import Request
from skyctl.control.running import RunOptions
from skyctl.errors import InputError
from skyctl.files import RunPaths, read_record
from skyctl.records.cluster import Cluster
from skyctl.records.plan import Plan
from skyctl.supervise.attempts.replanning import node_of, nodes_in
from skyctl.supervise.custody.checkpoints import Known
from skyctl.supervise.custody.orders import options_of, request_of


@dataclass(frozen=True)
class Again:
    """A run that has ended and is to go on. ``nodes``: those worth connecting to."""

    known: Known
    request: Request
    options: RunOptions
    nodes: tuple[str, ...]

    def plan_for(self, there: Collection[str]) -> Plan:
        """The plan to begin with: the run's last, or its first where that knows more of the nodes there are.

        Nodes of it that are not there are left out by the supervisor.
        """
        last, first = self.known.plan, _first_plan(self.known)
        ours = {node_of(device.id) for device in last.problem.devices}
        more = {node_of(device.id) for device in first.problem.devices} & set(there)
        return last if more <= ours else first


def to_resume(known: Known, cluster: Cluster, steps: int | None, max_restarts: int | None = None) -> Again:
    """What it needs to go on.

    Args:
        steps: so many more than its newest checkpoint has (None: to the end that it was to have).

    Raises:
        InputError: it is not over, has no checkpoint, or has nothing left to do.
    """
    state = known.state
    if state.status == "done":
        raise InputError(
            f"run {state.run_id} has ended well after {state.step} steps; its checkpoints are gone",
            hint="its weights are in its folder",
        )
    done = state.checkpoint
    if done is None:
        raise InputError(
            f"run {state.run_id} has no checkpoint to go on from",
            hint="launch it again; --checkpoint-every N writes one every N steps",
        )
    total = state.steps if steps is None else done + steps
    if total <= done:
        raise InputError(
            f"run {state.run_id} has a checkpoint of its last step, {done}", hint="give --steps for more"
        )
    options = replace(options_of(state), steps=total)
    if max_restarts is not None:
        options = replace(options, max_restarts=max_restarts)
    request = request_of(state)
    request = replace(request, recipe=replace(request.recipe, total_steps=total))
    planned = {node_of(device.id) for device in _first_plan(known).problem.devices} | set(
        nodes_in(known.plan)
    )
    nodes = tuple(node.name for node in cluster.nodes if node.name in planned)
    if not nodes:
        raise InputError(
            f"cluster {cluster.name!r} has none of the run's nodes ({', '.join(sorted(planned))})",
            hint="give the cluster file that it was launched with: -c FILE",
        )
    return Again(known, request, options, nodes)


def _first_plan(known: Known) -> Plan:
    path = RunPaths(known.paths.run_id, 1).plan
    return read_record(Plan, path) if path.is_file() else known.plan

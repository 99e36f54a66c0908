"""Sums of a given size over a cluster's routes, without a user's model: plans to be run, and their figures.

The model is a layer of parameters and nothing else, every node has one microbatch of a data-parallel step,
and the ordinary runtime plays it: so what is measured is what a run's sums take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skyctl import workload
from skyctl.compare.outcome import StrategyOutcome
from skyctl.errors import InfeasibleError, InputError, NodeError, SkyctlError, UndecidedError
from skyctl.jobs.node_sessions import require_all
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.data.tree_layouts import pack_set
from skyctl.planner.routes.route_names import name_routes
from skyctl.planning.plan_from_profile import plan_profile
from skyctl.planning.plan_options import PlanOptions
from skyctl.records.backend import AUTO, SKYCTL, Backend, BackendChoice, BackendRequest
from skyctl.records.cluster import split_device_id
from skyctl.records.plan import Plan, WorkloadRef
from skyctl.records.problem import SyncRoutes
from skyctl.records.profile import NodeFailure, Profile
from skyctl.records.sync_format import SyncFormat

GRADIENTS_FILE = Path(workload.__path__[0], "gradients_only.py")
"""``skyctl.workload.gradients_only``, which is not imported here: it imports torch."""
NUMBER_BYTES = 4
HELPED: tuple[SyncRoutes, ...] = ("auto", "server", "trees")
"""Ways to sum that may go over helpers; a ring and a star are of those that hold what is summed."""
PACKING_S = 10.0
"""For the bound, at most."""


def gradients_source(nbytes: int) -> str:
    """The workload whose gradients have so many bytes as float32, as it is typed.

    Raises:
        InputError: not a whole number of float32 numbers, or none.
    """
    count, rest = divmod(nbytes, NUMBER_BYTES)
    if rest or not count:
        raise InputError(f"{nbytes} bytes are no sum of float32 numbers, which have 4 each")
    return f"{GRADIENTS_FILE},numbers={count}"


def sums_alone(source: str) -> bool:
    """Whether a workload is ``gradients_source``'s: zeros that are summed, and nothing that is trained."""
    return source.startswith(f"{GRADIENTS_FILE},")


def plan_sums(
    profile: Profile,
    ref: WorkloadRef,
    nodes: Sequence[str],
    syncs: Sequence[SyncRoutes],
    sync_format: SyncFormat | None = None,
    helpers: Sequence[str] | None = None,
    backend: BackendRequest | None = None,
) -> list[StrategyOutcome]:
    """A plan for each way to sum, under its name: a microbatch on the first device of each node.

    Args:
        helpers: further nodes, which only help to sum.
        backend: what is to carry the gradients; with ``auto`` what the first plan comes to serves all.

    Raises:
        InputError: the backend asked for carries no node's tensors.
        NodeError: one of these nodes was not measured.
    """
    first: dict[str, str] = {}
    for device in profile.devices:
        first.setdefault(split_device_id(device.id)[0], device.id)
    failed = [failure for failure in profile.failures if failure.node in (*nodes, *(helpers or ()))]
    require_all({failure.node: _not_measured(failure) for failure in failed})
    shares = [(first[node], 1) for node in nodes]
    outcomes = []
    chosen: BackendRequest | BackendChoice | None = backend
    if helpers and backend == AUTO:
        chosen = BackendChoice(backend=SKYCTL, reason="helpers", about=tuple(helpers))
    for sync in syncs:
        options = PlanOptions(
            parallel="data",
            sync=sync,
            sync_format=sync_format,
            microbatches=len(shares),
            assign_shares=shares,
            only_nodes=[*nodes, *(helpers or ())],
            helpers=helpers if sync in HELPED else None,
            learn=False,
            backend=chosen,
        )
        try:
            made = plan_profile(profile, options, ref)
            outcomes.append(StrategyOutcome(sync, made))
            chosen = made.backend if chosen == AUTO else chosen
        except (InfeasibleError, UndecidedError) as exc:
            undecided = isinstance(exc, UndecidedError)
            outcomes.append(StrategyOutcome(sync, error=exc.message, undecided=undecided))
    return outcomes


def _not_measured(failure: NodeFailure) -> SkyctlError:
    return NodeError(
        f"node {failure.node} was not measured: {failure.error}",
        node=failure.node,
        hint=f"{failure.hint or 'measure it again'}: skyctl bench-sync --refresh",
    )


@dataclass(frozen=True)
class SumFigures:
    """One way to sum: predicted, and measured where it was run.

    Attributes:
        sync: as it was asked for.
        kind: what its routes are (``route_names``), and how many; None: there is no plan.
        nbytes: of the gradients, as they are sent.
        predicted_s, measured_s: from the last backward to the last byte of the sum, the median one.
        bound_mbit: no routes among these nodes carry more; None: not known.
        backend: what carries the gradients; None: the plan does not say, or there is none.
        error: why there is no plan, or no measurement.
    """

    sync: str
    kind: str | None = None
    routes: int = 0
    nbytes: float = 0.0
    predicted_s: float | None = None
    measured_s: float | None = None
    bound_mbit: float | None = None
    backend: Backend | None = None
    error: str | None = None

    @property
    def rate_mbit(self) -> float | None:
        """Gradients summed a second, as measured."""
        return self.nbytes * 8e-6 / self.measured_s if self.measured_s else None


def sum_figures(outcomes: Sequence[StrategyOutcome]) -> list[SumFigures]:
    """The figures of each way to sum."""
    bounds: dict[str, float | None] = {}
    figures = []
    for outcome in outcomes:
        plan, done = outcome.plan, outcome.measurement
        if plan is None or plan.sync is None:
            figures.append(SumFigures(outcome.strategy, error=outcome.error))
            continue
        if plan.sync.format not in bounds:
            bounds[plan.sync.format] = _bound_mbit(plan)
        routes = plan.sync.groups[0].routes
        figures.append(
            SumFigures(
                sync=outcome.strategy,
                kind=name_routes(routes).kind,
                routes=len(routes),
                nbytes=ReplicaCosts(plan.problem).total_bytes,
                predicted_s=plan.predicted.sync_s,
                measured_s=None if done is None else done.sync_s,
                bound_mbit=bounds[plan.sync.format],
                backend=None if plan.backend is None else plan.backend.backend,
                error=outcome.error,
            )
        )
    return figures


def _bound_mbit(plan: Plan) -> float | None:
    """The rate that no routes among a plan's devices exceed; None: their links cost nothing."""
    model = ReplicaCosts(plan.problem)
    holders = tuple(sorted(model.ids.index(stage.device) for stage in plan.placed_stages))
    byte_s = pack_set(model, holders, time.perf_counter() + PACKING_S).byte_s
    return 8e-6 / byte_s if byte_s > 0 else None

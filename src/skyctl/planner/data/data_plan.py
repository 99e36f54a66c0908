"""Plans of data parallelism, by strategy: every device that takes part holds all layers and has its share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from skyctl.errors import InputError
from skyctl.planner.data.data_placement import (
    DataPlacement,
    ReplicaGroup,
    asked_groups,
    fitting_group,
    least_gain,
)
from skyctl.planner.data.replica_costs import ReplicaCosts
from skyctl.planner.data.replica_shortage import (
    raise_if_short,
    raise_no_replica,
    raise_too_few_microbatches,
)
from skyctl.planner.data.route_search import search_routes
from skyctl.planner.data.set_bounds import ONE_LINE
from skyctl.planner.data.set_search import SetSearch, best_alone, search_all, search_greedy
from skyctl.planner.data.unused_reasons import explain_unused
from skyctl.planner.plan_record import make_certificate, make_plan
from skyctl.planner.requirements import as_planned
from skyctl.planner.routes.route_layouts import Layout
from skyctl.planner.stale_workers import root_of
from skyctl.planner.step import play
from skyctl.records.plan import Certificate, Plan, Strategy, Witness
from skyctl.records.problem import Problem

ALONE_METHOD = "the fastest device that holds all layers"
ASSIGNED_S = 10.0
"""Seconds to pack trees for a user's own shares, at most."""
SEARCH_SHARE = 0.9
"""Of the time, until when plans are looked for; what is left is for why devices are unused."""
GREEDY_METHOD = "water-filling over greedy sets"
ROUTES_WORDS = {
    "auto": "all routes",
    "trees": "all routes",
    "ring": "a ring",
    "star": "stars",
    "server": "stars, helpers' as well",
}
"""By a problem's ``sync``: what the certificate speaks of."""
SERVER_METHOD = "as for sums, then played with measured steps"


class TimeLimit(NamedTuple):
    """When a plan was begun, and until when it is searched for and explained; of ``time.perf_counter``."""

    began: float
    search_until: float
    until: float

    @classmethod
    def of(cls, seconds: float) -> TimeLimit:
        """From now on, with a part left for the reasons."""
        began = time.perf_counter()
        return cls(began, began + SEARCH_SHARE * seconds, began + seconds)


def plan_data(problem: Problem, strategy: Strategy, time_limit_s: float) -> Plan:
    """A plan of data parallelism by one strategy but ``assigned``.

    Raises:
        InputError: the problem's schedule or objective is one of pipelines.
        InfeasibleError: no device can hold all layers (``even``: one of them can't, or gets no microbatch).
    """
    problem = as_planned(problem)
    limit = TimeLimit.of(time_limit_s)
    model = ReplicaCosts(problem)
    if strategy == "even":
        even = _even(model, limit.search_until)
        return _made_plan(model, strategy, even, f"equal shares, {_routes_word(even)}", limit)
    if strategy == "alone":
        alone = best_alone(model)
        if alone is None:
            raise_no_replica(model)
        return _made_plan(model, strategy, alone, ALONE_METHOD, limit)
    search = _search(model, strategy, limit.search_until)
    if search.best is None:
        raise_no_replica(model)
    return _made_plan(model, strategy, search.best, _method(problem, strategy, search), limit, search)


def _search(model: ReplicaCosts, strategy: Strategy, deadline: float) -> SetSearch:
    if model.problem.sync in ONE_LINE:
        return (search_greedy if strategy == "heuristic" else search_all)(model, deadline)
    return search_routes(model, deadline, prove=strategy == "optimal")


def _method(problem: Problem, strategy: Strategy, search: SetSearch) -> str:
    """How a plan was found and what proves it, for the certificate: over which routes is part of it."""
    routes = ROUTES_WORDS[problem.sync]
    looked_at = f"{search.sets} sets" + (f", trees of {search.packed}" if search.packed else "")
    if strategy == "heuristic":
        return f"{GREEDY_METHOD}, {routes}"
    if search.complete:
        return f"every set of holders, {routes}: {looked_at}"
    return f"{GREEDY_METHOD}, {routes}: {looked_at}; bound by each device's work and lines"


def _routes_word(placed: DataPlacement) -> str:
    """The kind of routes that a candidate sums over, in a word."""
    layout = placed.group.layout
    if layout.trees:
        return "trees"
    return "a ring" if layout.root is None else "a star"


def assigned_data(problem: Problem, assignment: Sequence[tuple[str, int]]) -> Plan:
    """The plan with a user's own shares, (device, microbatches), summed the fastest way that ``sync`` leaves.

    Raises:
        InputError: unknown or repeated device, a share below 1, or shares that are not the step's in sum.
        InfeasibleError: a device's memory or a pin does not allow it.
    """
    limit = TimeLimit.of(ASSIGNED_S)
    problem = as_planned(problem)
    model = ReplicaCosts(problem)
    shares: dict[int, int] = {}
    for item in assignment:
        if not (isinstance(item, tuple | list) and [type(part) for part in item] == [str, int]):
            raise InputError(
                f"where every device holds all layers, an assignment is a list of (device, microbatches), "
                f"not of {item!r}",
                hint='assign=[("n1/cpu:0", 5), ("n2/cpu:0", 3)]; on the command line --assign "n1=5,n2=3"',
            )
        name, count = item
        if name not in model.ids:
            raise InputError(f"the assignment names device {name!r}, the problem has: {', '.join(model.ids)}")
        if model.ids.index(name) in shares:
            raise InputError(f"the assignment names {name!r} more than once")
        if name in (problem.helpers or ()):
            raise InputError(
                f"the assignment gives {name!r} microbatches, and --helper says that it holds nothing"
            )
        if count < 1:
            raise InputError(
                f"the assignment gives {name!r} {count} microbatches; leave it out, or give it 1"
            )
        shares[model.ids.index(name)] = count
    if (total := sum(shares.values())) != model.microbatches:
        raise InputError(
            f"the assignment's shares add up to {total} microbatches, the step has {model.microbatches}",
            hint=f"change a share by {abs(model.microbatches - total)}, or the number with --microbatches",
        )
    replicas = tuple(sorted(shares))
    groups = asked_groups(model, replicas, limit.search_until)
    best = _best_routes(model, groups, [shares[d] for d in replicas])
    if best is None:
        raise_if_short(model, Layout(replicas), "the assignment")
    return _made_plan(model, "assigned", best, "as assigned", limit)


def _best_routes(
    model: ReplicaCosts, groups: Sequence[ReplicaGroup], shares: Sequence[int]
) -> DataPlacement | None:
    """The fastest way of these to sum, with those shares; None: there is none."""
    placements = [group.with_shares(shares) for group in groups]
    return min(placements, key=partial(_weighed_s, least_gain(model.problem)), default=None)


def _weighed_s(gain: float, placed: DataPlacement) -> float:
    """A step's seconds; trees' count more, so that a ring or a star that is hardly slower is taken."""
    return placed.iteration_s * (1 + gain if placed.group.layout.trees else 1)


def _even(model: ReplicaCosts, deadline: float) -> DataPlacement:
    """Equal shares for all devices, the first ones one more, in a ring: what needs no measurement.

    Helpers hold nothing, and a ring has none. If the problem's ``sync`` asks for other routes, the sum goes
    over the fastest of these. With a parameter server the routes are a star at the first one.

    Args:
        deadline: when trees are packed no further.
    """
    helpers = model.problem.helpers or ()
    holding = tuple(d for d, name in enumerate(model.ids) if name not in helpers)
    layout = Layout(holding, holding[0] if model.problem.rhythm.is_stale and holding else None)
    count = len(layout.replicas)
    if not count:
        raise_no_replica(model)
    if model.microbatches < count:
        raise_too_few_microbatches(model, count)
    share, more = divmod(model.microbatches, count)
    if model.problem.sync in ("auto", "ring") or model.problem.rhythm.is_stale:
        group = fitting_group(model, layout)
        groups = [] if group is None else [group]
    else:
        groups = asked_groups(model, holding, deadline)
    even = _best_routes(model, groups, [share + (number < more) for number in range(count)])
    if even is None:
        raise_if_short(model, layout, "equal shares for all devices")
    return even


def _made_plan(
    model: ReplicaCosts,
    strategy: Strategy,
    placed: DataPlacement,
    method: str,
    limit: TimeLimit,
    search: SetSearch | None = None,
) -> Plan:
    """The plan's record, with its certificate and why devices are unused.

    Replicas, root and shares of a parameter server are those of the best star that sums, which has the same
    work and the same lines; its steps are then played, and nothing is proved of them.

    ``search``: the search that the placement comes from.
    """
    proved = search if strategy == "optimal" else None
    proof = make_certificate(
        placed.iteration_s,
        None if proved is None else proved.bound_s,
        proved=proved is not None and proved.complete,
        method=method,
        wall_s=time.perf_counter() - limit.began,
    )
    if search is not None and search.prices:
        proof = proof.model_copy(update={"witness": Witness(route_prices=search.prices)})
    why = explain_unused(model, strategy, placed, proof, limit.until)
    candidate = placed.candidate(model)
    if not model.problem.rhythm.is_stale or not candidate.sums:
        return make_plan(model, strategy, play(model, candidate), proof, why)
    root = candidate.pipelines[root_of(candidate)]
    others = (pipeline for pipeline in candidate.pipelines if pipeline != root)
    step = play(model, candidate._replace(pipelines=(root, *others)))
    served = Certificate(
        status="feasible",
        value_s=step.iteration_s,
        lower_bound_s=None,
        gap=None,
        method=f"{method}; {SERVER_METHOD}",
        wall_s=proof.wall_s,
    )
    return make_plan(model, strategy, step, served, why)

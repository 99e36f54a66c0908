"""Plans of data parallelism, by strategy: every device that takes part holds all layers and has its share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from skyctl.errors import InputError
from skyctl.planner.data.data_placement import (
    DataPlacement,
    HolderGroup,
    asked_groups,
    fitting_group,
    least_gain,
    make_group,
)
from skyctl.planner.data.holder_costs import DataModel
from skyctl.planner.data.holder_shortage import (
    raise_if_short,
    raise_no_holder,
    raise_too_few_microbatches,
)
from skyctl.planner.data.route_layouts import Layout, make_sync, read_routes
from skyctl.planner.data.route_search import search_routes
from skyctl.planner.data.set_bounds import ONE_LINE
from skyctl.planner.data.set_search import SetSearch, best_alone, search_all, search_greedy
from skyctl.planner.data.stale_plan import predict_stale, star_problem, with_server
from skyctl.planner.data.unused_holders import explain_unused
from skyctl.planner.plan_record import make_certificate
from skyctl.records.plan import (
    Certificate,
    Pipeline,
    PlacedStage,
    Plan,
    Prediction,
    ReplicaPrediction,
    Strategy,
    Witness,
)
from skyctl.records.problem import Problem

ALONE_METHOD = "the fastest device that holds all layers"
ASSIGNED_S = 10.0
"""Seconds to pack trees for a user's own shares, at most."""
GREEDY_METHOD = "water-filling over greedy sets"
ROUTES_WORDS = {
    "auto": "all routes",
    "trees": "all routes",
    "ring": "a ring",
    "star": "stars",
    "server": "stars, helpers' as well",
}
"""By a problem's ``sync``: what the certificate speaks of."""


def plan_data(problem: Problem, strategy: Strategy, time_limit_s: float) -> Plan:
    """A plan of data parallelism by one strategy but ``assigned``.

    Raises:
        InputError: the problem's schedule or objective is one of pipelines.
        InfeasibleError: no device can hold all layers (``even``: one of them can't, or gets no microbatch).
    """
    began = time.perf_counter()
    problem = star_problem(problem)
    model = DataModel(problem)
    if strategy == "even":
        even = _even(model, began + time_limit_s)
        return _made_plan(model, strategy, even, f"equal shares, {_routes_word(even)}", began)
    if strategy == "alone":
        alone = best_alone(model)
        if alone is None:
            raise_no_holder(model)
        return _made_plan(model, strategy, alone, ALONE_METHOD, began)
    found = _search(model, strategy, began + time_limit_s)
    if found.best is None:
        raise_no_holder(model)
    return _made_plan(model, strategy, found.best, _method(problem, strategy, found), began, found)


def _search(model: DataModel, strategy: Strategy, deadline: float) -> SetSearch:
    if model.problem.sync in ONE_LINE:
        return (search_greedy if strategy == "heuristic" else search_all)(model, deadline)
    return search_routes(model, deadline, prove=strategy == "optimal")


def _method(problem: Problem, strategy: Strategy, found: SetSearch) -> str:
    """How a plan was found and what proves it, for the certificate: over which routes is part of it."""
    routes = ROUTES_WORDS[problem.sync]
    looked_at = f"{found.sets} sets" + (f", trees of {found.packed}" if found.packed else "")
    if strategy == "heuristic":
        return f"{GREEDY_METHOD}, {routes}"
    if found.complete:
        return f"every set of holders, {routes}: {looked_at}"
    return f"{GREEDY_METHOD}, {routes}: {looked_at}; bound by each device's work and lines"


def _routes_word(placed: DataPlacement) -> str:
    """What a candidate sums over, in a word."""
    layout = placed.group.layout
    if layout is None or layout.trees:
        return "trees"
    return "a ring" if layout.root is None else "a star"


def assigned_data(problem: Problem, assignment: Sequence[tuple[str, int]]) -> Plan:
    """The plan with a user's own shares, (device, microbatches), summed the fastest way that ``sync`` leaves.

    Raises:
        InputError: unknown or repeated device, a share below 1, or shares that are not the step's in sum.
        InfeasibleError: a device's memory or a pin does not allow it.
    """
    began = time.perf_counter()
    problem = star_problem(problem)
    model = DataModel(problem)
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
    holders = tuple(sorted(shares))
    groups = asked_groups(model, holders, began + ASSIGNED_S)
    best = _best_routes(model, groups, [shares[d] for d in holders])
    if best is None:
        raise_if_short(model, Layout(holders), "the assignment")
    return _made_plan(model, "assigned", best, "as assigned", began)


def _best_routes(
    model: DataModel, groups: Sequence[HolderGroup], shares: Sequence[int]
) -> DataPlacement | None:
    """The fastest way of these to sum, with those shares; None: there is none."""
    made = [group.with_shares(shares) for group in groups]
    return min(made, key=partial(_weighed_s, least_gain(model.problem)), default=None)


def _weighed_s(gain: float, placed: DataPlacement) -> float:
    """A step's seconds; trees' count more, so that a ring or a star that is hardly slower is taken."""
    layout = placed.group.layout
    return placed.iteration_s * (1 + gain if layout is not None and layout.trees else 1)


def _even(model: DataModel, deadline: float) -> DataPlacement:
    """Equal shares for all devices, the first ones one more, in a ring: what needs no measurement.

    Helpers hold nothing, and a ring has none. Where the problem's ``sync`` asks for other routes, it is over
    the fastest of these; with a parameter server it is a star at the first device.

    Args:
        deadline: when trees are packed no further.
    """
    helpers = model.problem.helpers or ()
    holding = tuple(d for d, name in enumerate(model.ids) if name not in helpers)
    layout = Layout(holding, holding[0] if model.problem.rhythm.is_stale and holding else None)
    count = len(layout.holders)
    if not count:
        raise_no_holder(model)
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
    model: DataModel,
    strategy: Strategy,
    placed: DataPlacement,
    method: str,
    began: float,
    found: SetSearch | None = None,
) -> Plan:
    """The plan's record, with its certificate and why devices are unused.

    ``found``: the search that it comes from.
    """
    proved = found if strategy == "optimal" else None
    proof = make_certificate(
        placed.iteration_s,
        None if proved is None else proved.bound_s,
        proved=proved is not None and proved.complete,
        method=method,
        wall_s=time.perf_counter() - began,
    )
    if found is not None and found.prices:
        proof = proof.model_copy(update={"witness": Witness(route_prices=found.prices)})
    layout = placed.group.layout
    assert layout is not None
    made = _record(model, strategy, placed, proof, layout)
    return with_server(model, placed, made) if model.problem.rhythm.is_stale else made


def _record(
    model: DataModel, strategy: Strategy, placed: DataPlacement, proof: Certificate, layout: Layout
) -> Plan:
    layers = len(model.problem.layers)
    pipelines = tuple(
        Pipeline(
            stages=(
                PlacedStage(start=0, stop=layers, device=model.ids[d], in_flight=1, recompute=cost.recompute),
            ),
            microbatches=share,
        )
        for d, share, cost in zip(placed.holders, placed.shares, placed.group.costs, strict=True)
    )
    return Plan(
        form="grid" if len(pipelines) == 1 else "pipelines",
        strategy=strategy,
        problem=model.problem,
        pipelines=pipelines,
        unused=explain_unused(model, strategy, placed, proof),
        predicted=_prediction(model, placed),
        certificate=proof,
        sync=make_sync(
            layout,
            model.ids,
            layers,
            format=model.problem.sync_format,
            uncompressed_steps=model.problem.sync_uncompressed_steps,
            chunk_bytes=placed.group.chunk_bytes,
        ),
    )


def _prediction(model: DataModel, placed: DataPlacement) -> Prediction:
    busy = zip(placed.holders, placed.compute_s, placed.memory_bytes, strict=True)
    return Prediction(
        iteration_s=placed.iteration_s,
        bottleneck_s=max(cost.layers_s for cost in placed.group.costs),
        sync_s=max(0.0, placed.sync_s),
        replicas=tuple(
            ReplicaPrediction(
                device=model.ids[d],
                compute_s=busy_s,
                idle_s=max(0.0, placed.iteration_s - busy_s),
                memory_bytes=need,
            )
            for d, busy_s, need in busy
        ),
    )


def predict_data(problem: Problem, plan: Plan) -> Prediction:
    """What a plan of data parallelism would take on ``problem``, over the routes that its record has.

    Raises:
        InputError: see ``api.predict``.
    """
    model = DataModel(problem)
    placed = read_data_placement(model, plan)
    if problem.rhythm.is_stale and len(placed.holders) > 1:
        return predict_stale(model, placed)
    return _prediction(model, placed)


def read_data_placement(model: DataModel, plan: Plan) -> DataPlacement:
    """The candidate that a plan's record is.

    Raises:
        InputError: it names devices that the problem lacks, has another number of microbatches or layers, a
            pipeline of several stages, or a sync over other layers.
    """
    index = {name: d for d, name in enumerate(model.ids)}
    layers = len(model.problem.layers)
    holders, shares, costs = [], [], []
    for number, pipeline in enumerate(plan.pipelines):
        if len(pipeline.stages) != 1:
            raise InputError(
                f"pipeline {number} has {len(pipeline.stages)} stages; the problem asks for devices that "
                "hold all layers each",
                hint="plan it with --parallel pipeline",
            )
        stage = pipeline.stages[0]
        if stage.device not in index:
            raise InputError(f"the plan names device {stage.device!r}, which is not in the problem")
        if stage.stop != layers:
            raise InputError(f"the plan covers {stage.stop} layers, the problem has {layers}")
        holders.append(index[stage.device])
        shares.append(pipeline.microbatches)
        costs.append(model.cost(index[stage.device], recompute=stage.recompute))
    if sum(shares) != model.microbatches:
        raise InputError(
            f"the plan's pipelines take {sum(shares)} microbatches, the problem has {model.microbatches}"
        )
    routes = read_routes(plan.sync, index, layers)
    chunk_bytes = None if plan.sync is None else plan.sync.chunk_bytes
    return make_group(model, tuple(holders), costs, routes, chunk_bytes=chunk_bytes).with_shares(shares)

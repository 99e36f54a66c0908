"""A plan of two pipelines with cuts of their own, written by hand, for tests of what shows and carries it."""

from __future__ import annotations

from tests.planner.data_problems import data_problem

from skyctl.planner.routes.route_layouts import Layout, route_records
from skyctl.records.pipeline import Pipeline, PlacedStage
from skyctl.records.plan import Certificate, Plan, Prediction, ReplicaPrediction
from skyctl.records.sync import Sync, SyncGroup

BUSY_S = {"n0/cpu:0": 9.0, "n1/cpu:0": 9.0, "n2/cpu:0": 6.0}


def hybrid_plan(**more) -> Plan:
    """n0 and n1 have two layers each of six microbatches, n2 has all four of two; two groups are summed."""
    problem = data_problem(
        speeds=(2.0, 2.0, 1.0),
        rate=1e4,
        microbatches=8,
        layers=4,
        parallel="hybrid",
        memory=[None, 2**30, None],
    )  # fmt: skip
    ids = [device.id for device in problem.devices]

    def stage(device: int, start: int, stop: int) -> PlacedStage:
        return PlacedStage(start=start, stop=stop, device=ids[device], in_flight=1)

    groups = []
    for replicas, start, stop in (((0, 2), 0, 2), ((1, 2), 2, 4)):
        routes = route_records(Layout(replicas, root=replicas[0]).routes(), ids)
        groups.append(SyncGroup(start=start, stop=stop, routes=routes))
    return Plan(
        form="pipelines",
        strategy="optimal",
        problem=problem,
        pipelines=(
            Pipeline(stages=(stage(0, 0, 2), stage(1, 2, 4)), microbatches=6),
            Pipeline(stages=(stage(2, 0, 4),), microbatches=2),
        ),
        sync=Sync(groups=tuple(groups)),
        predicted=Prediction(
            iteration_s=10.0,
            bottleneck_s=3.0,
            sync_s=0.04,
            replicas=tuple(
                ReplicaPrediction(device=name, compute_s=busy_s, idle_s=10.0 - busy_s, memory_bytes=2**28)
                for name, busy_s in BUSY_S.items()
            ),
            stale=None,
        ),
        certificate=Certificate(
            status="feasible", value_s=10.0, lower_bound_s=None, gap=None, method="by hand", wall_s=0.0
        ),
        **more,
    )

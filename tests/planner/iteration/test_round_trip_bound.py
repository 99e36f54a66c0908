"""The bound by trips: never above an optimum, close where it can be, proved again by verify's own code."""

import time
from itertools import pairwise

import pytest
from tests.planner.planner_problems import problem, random_problem

from skyctl.errors import InfeasibleError
from skyctl.planner.api import plan
from skyctl.planner.cost_model import CostModel
from skyctl.planner.iteration import round_trip_bound
from skyctl.planner.iteration.pipeline_shapes import ShapeSet
from skyctl.planner.iteration.round_trip_tables import cluster_devices
from skyctl.planner.verification.problem_data import ProblemData
from skyctl.planner.verification.proofs import proof_by_round_trips
from skyctl.records.problem import Link

SCHEDULES = ("sequential", "gpipe", "1f1b", "eager-1f1b")


def sited(sites, *, near=0.01, far=0.5, speeds=None, microbatches=32, layers=30):
    """Devices in sites; a message there or back takes ``near`` or ``far`` seconds."""
    count = sum(sites)
    site = [g for g, size in enumerate(sites) for _ in range(size)]
    base = problem([1.0] * layers, speeds or [1.0] * count, objective="iteration", microbatches=microbatches)
    ids = [d.id for d in base.devices]
    links = tuple(
        Link(
            source=ids[a], target=ids[b], latency_s=0.0,
            bandwidth_bytes_per_s=1 / (near if site[a] == site[b] else far),
        )
        for a in range(count) for b in range(count) if a != b
    )  # fmt: skip
    shaped = tuple(x.model_copy(update={"output_bytes": 1.0}) for x in base.layers)
    return base.model_copy(update={"layers": shaped, "links": links})


@pytest.mark.parametrize("seed", range(60))
def test_never_above_the_optimum(seed):
    p = random_problem(seed, objective="iteration", schedule=SCHEDULES[seed % 4])
    if seed % 3 == 0:
        p = p.model_copy(update={"microbatches": p.microbatches + 10})
    try:
        value = plan(p, time_limit_s=60).certificate.value_s
    except InfeasibleError:
        return
    bound = round_trip_bound.RoundTripBound(CostModel(p), value * 1.5).largest(0.0, value * 1.2)
    assert bound <= value * (1 + 1e-9)
    assert not proof_by_round_trips.prove(ProblemData(p), value * 1.001).holds


@pytest.mark.parametrize("seed", range(20))
def test_verify_proves_it_again(seed):
    p = random_problem(seed, objective="iteration", schedule=SCHEDULES[seed % 4])
    try:
        value = plan(p, "heuristic").certificate.value_s
    except InfeasibleError:
        return
    bound = round_trip_bound.RoundTripBound(CostModel(p), value).largest(0.0, value)
    if bound > 0:
        assert proof_by_round_trips.prove(ProblemData(p), bound * (1 - 1e-6)).holds


def test_clusters_are_found():
    assert [len(site) for site in cluster_devices(CostModel(sited([3, 2, 4]))).members] == [3, 2, 4]
    assert len(cluster_devices(CostModel(sited([3, 3], far=0.012))).members) == 1
    assert len(cluster_devices(CostModel(problem(speeds=[1.0] * 5))).members) == 1


def test_least_links_are_a_forest():
    sites = cluster_devices(CostModel(sited([3, 2])))
    assert sites.least[0] == pytest.approx([0.0, 0.02, 0.04])
    assert sites.least_anywhere == pytest.approx([0.0, 0.02, 0.04, 0.06, 1.06])


def test_counts_fill_and_drain():
    """Equal devices and no links: M + S − 1 times the stage is the optimum, and the bound."""
    p = problem([1.0] * 24, [1.0] * 12, objective="iteration", microbatches=32)
    bound = round_trip_bound.RoundTripBound(CostModel(p), 200.0).largest(0.0, 200.0)
    assert bound == pytest.approx((32 + 12 - 1) * 2.0, rel=0.01)


def test_a_slow_boundary_between_clusters_raises_the_bound():
    """A slow boundary between two sites raises the bound far above that without it."""
    near = round_trip_bound.RoundTripBound(CostModel(sited([6, 6], far=0.01)), 300.0).largest(0.0, 300.0)
    far = round_trip_bound.RoundTripBound(CostModel(sited([6, 6], far=2.0)), 300.0).largest(0.0, 300.0)
    assert far > near * 1.03


@pytest.mark.slow
def test_shapes_as_one_set_bound_much_and_hold_where_time_is_out(monkeypatch):
    """Many devices in sites have too many shapes to look at; sets of them bound nearly as much."""
    p = sited([6, 6, 6, 6], far=0.1, speeds=[1 + i % 5 for i in range(24)], layers=60)
    value = plan(p, "heuristic").certificate.value_s
    bound = round_trip_bound.RoundTripBound(CostModel(p), value)
    low = bound._largest_of_all(0.0, value, divides=False)
    assert 0.9 * value < low <= bound._largest_of_all(low, value, divides=True) < value
    assert proof_by_round_trips.prove(ProblemData(p), low * (1 - 1e-6)).holds

    def late(*args):
        raise TimeoutError

    monkeypatch.setattr(bound.shapes, "halves", late)
    assert bound.largest(0.0, value) == low


@pytest.mark.parametrize("sites", [[2, 2], [3, 2], [1, 2, 1]])
@pytest.mark.parametrize("far", [0.3, 3.0])
def test_every_set_of_shapes_lets_the_optimum_stand(sites, far):
    p = sited(sites, near=0.2, far=far, speeds=[2.0, 1.0, 3.0, 1.5, 1.0][: sum(sites)], layers=9)
    planned = plan(p, time_limit_s=120)
    value, stages = planned.certificate.value_s, len(planned.stages)
    site = [g for g, size in enumerate(sites) for _ in range(size)]
    used = [site[int(stage.replicas[0].device[1])] for stage in planned.stages]
    crossings = sum(a != b for a, b in pairwise(used))
    bound = round_trip_bound.RoundTripBound(CostModel(p), 2 * value)
    trips = proof_by_round_trips._Trips(ProblemData(p), value * 1.001)
    for least in range(crossings + 1):
        for most in range(crossings, stages):
            shape = bound.shapes.relaxed(ShapeSet(stages, least, most))
            assert not bound.refutes(shape, value * 1.001)
            assert not trips.no_plans(stages, least, most)


def test_out_of_time_claims_nothing():
    p = sited([4, 4, 4])
    late = time.perf_counter() - 1
    assert round_trip_bound.RoundTripBound(CostModel(p), 200.0, late).largest(1.0, 200.0) == 1.0


def test_devices_without_work_are_left_alone():
    p = problem([0.0] * 4, [1.0, 1.0], objective="iteration")
    assert round_trip_bound.RoundTripBound(CostModel(p), 1.0).largest(0.0, 1.0) == 0.0
    assert proof_by_round_trips.prove(ProblemData(p), 0.5).holds is None


def there_and_back_again(per=4, far=0.3):
    """Three sites, the third hopeless; the best plan goes from the first to the second and back."""
    named = [*(f"a{i}" for i in range(2)), "b", "c"]
    held = dict(zip(named, (3 * per, per, 2 * per, 10 * per), strict=True))
    base = problem(
        [1.0] * (3 * per),
        [1e-4 if d == "c" else 1.0 for d in named],
        memory=[float(x) for x in held.values()],
        objective="iteration",
        microbatches=16,
    )
    layers = tuple(
        x.model_copy(update={"output_bytes": 1.0, "state_bytes": 0.0, "activation_bytes": 1.0})
        for x in base.layers
    )
    ids = [d.id for d in base.devices]
    links = tuple(
        Link(
            source=ids[i], target=ids[j], latency_s=0.0,
            bandwidth_bytes_per_s=1e4 if named[i][0] == named[j][0] else 2 / far,
        )
        for i in range(4) for j in range(4) if i != j
    )  # fmt: skip
    return base.model_copy(update={"layers": layers, "links": links}), ids


def test_a_cluster_may_be_visited_twice():
    p, ids = there_and_back_again()
    value = plan(p, assign=[(ids[0], 0, 4), (ids[2], 4, 8), (ids[1], 8, 12)]).certificate.value_s
    assert round_trip_bound.RoundTripBound(CostModel(p), 2 * value).largest(0.0, 2 * value) <= value
    assert not proof_by_round_trips.prove(ProblemData(p), value * 1.01).holds


def test_a_longer_range_may_fit_where_a_shorter_does_not():
    """A receive window larger than the memory at every other boundary."""
    base = problem([1.0] * 26, [1.0] * 13, memory=[20.0] * 13, objective="iteration", receive_window=1)
    layers = tuple(
        x.model_copy(update={"output_bytes": 1.0 if i % 2 else 100.0}) for i, x in enumerate(base.layers)
    )
    p = base.model_copy(update={"layers": layers})
    value = plan(p, "heuristic").certificate.value_s
    assert round_trip_bound.RoundTripBound(CostModel(p), 1e3).largest(0.0, 1e3) <= value * (1 + 1e-9)

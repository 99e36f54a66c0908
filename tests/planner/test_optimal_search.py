"""Optimal equals brute force; proofs, properties, CP-SAT against subsets, faults."""

import random

import pytest
from tests.planner.planner_problems import brute_force, problem, random_problem, undecided

from skyctl.errors import InfeasibleError, UndecidedError
from skyctl.planner.api import plan, verify
from skyctl.planner.bottleneck import device_subsets
from skyctl.planner.bottleneck.cp_sat import IntervalSolver
from skyctl.planner.cost_model import CostModel, StageAssignment
from skyctl.planner.evaluation import bottleneck_s, least_execution, step_lower_bound_s, step_s
from skyctl.planner.pipeline_depth import execution_choices
from skyctl.records.problem import Link


@pytest.mark.parametrize("seed", range(80))
def test_equals_brute_force(seed):
    p = random_problem(seed)
    best = brute_force(p)
    if best is None:
        with pytest.raises(InfeasibleError):
            plan(p)
        return
    planned = plan(p)
    assert planned.certificate.status == "optimal"
    assert planned.certificate.value_s == pytest.approx(best, rel=1e-9)
    assert planned.certificate.gap == 0.0
    verdict = verify(p, planned)
    assert verdict.ok, verdict
    assert verdict.checks[-1].checked


def test_it_is_deterministic():
    p = random_problem(7, objective="iteration")
    a, b = plan(p), plan(p)
    assert a.stages == b.stages
    assert a.predicted == b.predicted


@pytest.mark.parametrize("seed", range(30))
def test_the_closed_form_is_a_lower_bound(seed):
    """On random plans, not only good ones, every schedule."""
    r = random.Random(seed)
    p = random_problem(seed, schedule=r.choice(["sequential", "gpipe", "1f1b", "eager-1f1b"]))
    model = CostModel(p)
    for _ in range(10):
        count = r.randint(1, model.max_stages)
        cuts = [0, *sorted(r.sample(range(1, model.layers), count - 1)), model.layers]
        placement = [
            StageAssignment(d, cuts[i], cuts[i + 1])
            for i, d in enumerate(r.sample(range(model.devices), count))
        ]
        base = least_execution(model, placement)
        for execution in execution_choices(model, placement, base) if model.chooses_depth else [base]:
            assert step_lower_bound_s(model, placement) <= step_s(model, placement, execution) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_cp_sat_agrees_with_subsets(seed):
    """The same question to both: is there a plan within a limit?"""
    p = random_problem(seed, objective="bottleneck")
    model = CostModel(p)
    solver = IntervalSolver(model, deadline=float("inf"))
    free = device_subsets.placement_within(model, float("inf"))
    asked = solver.cover(float("inf"), False)
    assert (free is None) == (asked is None)
    if free is None or asked is None:
        return
    assert model.is_allowed(free)
    assert model.is_allowed(asked)
    value = plan(p).certificate.value_s
    for limit, strict in ((value, False), (value, True), (value * 1.2, False), (value * 0.9, False)):
        a, b = device_subsets.placement_within(model, limit, strict=strict), solver.cover(limit, strict)
        assert (a is None) == (b is None) == (limit < value or strict)
        if b is not None:
            assert model.is_allowed(b)
            assert bottleneck_s(model, b) <= limit


def test_many_equal_devices_are_proved_by_counts():
    r = random.Random(3)
    p = problem(flops=[1.0, 2.0] * 30, speeds=[r.choice([1, 2, 4]) for _ in range(24)])
    planned = plan(p, time_limit_s=120)
    assert planned.certificate.status == "optimal"
    assert len({s.replicas[0].device for s in planned.stages}) == len(planned.stages)
    assert verify(p, planned).ok


def test_many_different_devices_go_to_cp_sat():
    r = random.Random(4)
    flops = [r.uniform(1, 9) for _ in range(30)]
    p = problem(flops=flops, speeds=[r.uniform(1, 4) for _ in range(24)])
    planned = plan(p, time_limit_s=10)
    assert "CP-SAT" in planned.certificate.method
    assert planned.certificate.status in ("optimal", "bounded")
    assert planned.certificate.gap <= 0.01
    assert verify(p, planned).ok


def test_out_of_time_says_so():
    r = random.Random(1)
    p = problem(flops=[r.uniform(1, 9) for _ in range(40)], speeds=[r.uniform(1, 4) for _ in range(20)])
    planned = plan(p, time_limit_s=0.0)
    assert planned.certificate.status == "bounded"
    assert 0 < planned.certificate.lower_bound_s <= planned.certificate.value_s
    assert verify(p, planned).ok


def test_stopped_search_gives_a_valid_bound():
    p = random_problem(3, objective="iteration")
    best = plan(p).certificate.value_s
    stopped = plan(p, time_limit_s=0.0).certificate
    assert stopped.lower_bound_s <= best * (1 + 1e-9)
    assert stopped.value_s >= best * (1 - 1e-9)


def test_a_slow_device_is_left_out_with_the_reason():
    p = problem(flops=[1.0] * 8, speeds=[4, 4, 0.1], objective="iteration", microbatches=8)
    planned = plan(p)
    assert [u.device for u in planned.unused] == ["n2/cpu:0"]
    assert "the best way found to add it is 789% slower" in planned.unused[0].reason


def test_a_slow_link_is_avoided():
    ids = ["n0/cpu:0", "n1/cpu:0", "n2/cpu:0"]
    slow = tuple(
        Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=1e-3)
        for a in ids for b in ids if a != b and ids[2] in (a, b)
    )  # fmt: skip
    base = problem(flops=[3.0] * 6, speeds=[1, 1, 1], objective="iteration", microbatches=8)
    layers = tuple(x.model_copy(update={"output_bytes": 1.0}) for x in base.layers)
    planned = plan(base.model_copy(update={"layers": layers, "links": slow}))
    assert planned.unused[0].device == ids[2]


def test_pins_are_kept():
    p = problem(speeds=[1, 2, 4], first_stage=["n1/cpu:0"], last_stage=["n0/cpu:0"])
    stages = plan(p).stages
    assert stages[0].replicas[0].device == "n1/cpu:0"
    assert stages[-1].replicas[0].device == "n0/cpu:0"


@pytest.mark.parametrize("strategy", ["optimal", "heuristic"])
@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ([0.5, 0.5], "layer 'layer0' fits on no device"),
        ([2.0, 2.0], "2 B short"),
    ],
)
def test_infeasible_says_why(strategy, memory, words):
    with pytest.raises(InfeasibleError, match=words):
        plan(problem(memory=memory), strategy)


def test_infeasible_names_what_would_be_enough():
    p = problem(memory=[3.0, 3.0], schedule="gpipe")
    layers = tuple(x.model_copy(update={"activation_bytes": 0.1}) for x in p.layers)
    with pytest.raises(InfeasibleError) as raised:
        plan(p.model_copy(update={"layers": layers}))
    assert "more on n0/cpu:0 would be enough" in str(raised.value) or "short" in str(raised.value)


def test_undecided_is_not_infeasible():
    """20 devices that can't hold it for a reason only a search would find, and no time for it."""
    with pytest.raises(UndecidedError):
        plan(undecided(), time_limit_s=0.0)


def test_one_device_and_more_devices_than_layers():
    alone = plan(problem(flops=[1, 2, 3], speeds=[2]))
    assert alone.certificate.value_s == pytest.approx(3.0)
    many = plan(problem(flops=[1, 1], speeds=[1, 1, 1, 1, 1]))
    assert many.certificate.value_s == pytest.approx(1.0)
    assert len(many.unused) == 3
    assert all(u.reason == "only 2 layers" for u in many.unused)


def test_eager_keeps_more_in_flight_where_a_link_is_slow():
    ids = ["n0/cpu:0", "n1/cpu:0"]
    links = tuple(
        Link(source=a, target=b, latency_s=5.0, bandwidth_bytes_per_s=1.0) for a, b in (ids, ids[::-1])
    )
    base = problem(flops=[3.0] * 4, speeds=[1, 1], objective="iteration", microbatches=12, links=links)
    static = plan(base)
    eager = plan(base.model_copy(update={"schedule": "eager-1f1b"}))
    assert eager.certificate.value_s < static.certificate.value_s
    assert eager.stages[0].replicas[0].in_flight > 2
    assert verify(eager.problem, eager).ok

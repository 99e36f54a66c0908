"""The baselines do what their sources describe, flaws included."""

import itertools
import random

import pytest
from baselines import BASELINES
from baselines.common import NotApplicableError
from baselines.deepspeed import balanced_cuts
from baselines.sky import two_stages
from baselines.sky_milp import SOLVERS, published_milp
from baselines.weights import even, largest_remainder, ram_proportional, speed_proportional
from tables.instances import QUALITY, devices, paper_case, plain_layers, published_case, quality_case

from skyctl import Problem, plan


def a_problem(costs, factors, memory=None):
    return Problem(
        layers=plain_layers([1e9 * c for c in costs]),
        devices=tuple(devices(factors, memory)),
        microbatches=4,
        objective="bottleneck",
    )


def value(problem, assignment):
    return plan(problem, assign=assignment).certificate.value_s


def counts(assignment):
    return [stop - start for _, start, stop in assignment]


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("seed", range(5))
def test_covers_the_layers_and_is_not_better_than_optimal(name, seed):
    problem = quality_case(QUALITY[0], seed, "bottleneck")
    best = plan(problem).certificate
    assert best.status == "optimal"
    assert value(problem, BASELINES[name](problem)) >= best.value_s * (1 - 1e-9)


@pytest.mark.parametrize("name", BASELINES)
def test_measured_times_count_as_speeds(name):
    problem = quality_case(QUALITY[0], 1, "bottleneck")
    seconds = {d.id: [layer.flops / d.flops_per_s for layer in problem.layers] for d in problem.devices}
    timed = problem.model_copy(
        update={
            "devices": tuple(d.model_copy(update={"flops_per_s": 1.0}) for d in problem.devices),
            "times": {
                name: {"forward_s": [x / 3 for x in row], "backward_s": [2 * x / 3 for x in row],
                       "optimizer_s": [0.0] * len(row)}
                for name, row in seconds.items()
            },
        }
    )  # fmt: skip
    timed = Problem.model_validate_json(timed.model_dump_json(warnings=False))
    assert BASELINES[name](timed) == BASELINES[name](problem)


def test_even():
    assert counts(even(a_problem([1] * 7, [1, 1, 1]))) == [3, 2, 2]
    assert counts(even(a_problem([1] * 2, [1, 1, 1]))) == [1, 1]


def test_in_proportion_to_memory():
    problem = a_problem([1] * 10, [1, 1, 1], [100, 300, 600])
    assert counts(ram_proportional(problem)) == [1, 3, 6]
    tiny = a_problem([1] * 10, [1, 1, 1], [1, 500, 500])
    assert counts(ram_proportional(tiny)) == [1, 4, 5]
    with pytest.raises(NotApplicableError):
        ram_proportional(a_problem([1] * 3, [1, 1]))


def test_in_proportion_to_speed_within_capacity():
    assert counts(speed_proportional(a_problem([1] * 10, [1, 2, 4]))) == [6, 3, 1]
    assert counts(speed_proportional(a_problem([1] * 10, [1, 2, 4], [4, 10, 10]))) == [4, 4, 2]
    with pytest.raises(NotApplicableError):
        speed_proportional(a_problem([1] * 10, [1, 1], [4, 5]))


@pytest.mark.parametrize("seed", range(30))
def test_largest_remainder(seed):
    r = random.Random(seed)
    n = r.randint(1, 9)
    total, weights = r.randint(1, 60), [r.uniform(0.1, 5) for _ in range(n)]
    shares = largest_remainder(total, weights)
    assert sum(shares) == total
    assert all(abs(s - total * w / sum(weights)) < 1 for s, w in zip(shares, weights, strict=True))
    caps = [r.randint(0, total) for _ in range(n)]
    caps[0] += max(0, total - sum(caps))
    capped = largest_remainder(total, weights, caps)
    assert sum(capped) == total
    assert all(s <= cap for s, cap in zip(capped, caps, strict=True))


def test_two_stages_leave_a_slow_first_device_as_it_is():
    problem = a_problem([1] * 24, [6, 1, 1, 1])
    assert counts(two_stages(problem))[0] == counts(even(problem))[0]
    assert value(problem, two_stages(problem)) == pytest.approx(value(problem, even(problem)))
    described = two_stages(problem, compare_next=True)
    assert counts(described)[0] < 6


def test_two_stages_take_layers_from_a_slow_next_device():
    problem = a_problem([1] * 24, [1, 6, 1, 1])
    assert counts(two_stages(problem))[1] < 6


def test_two_stages_at_the_papers_size():
    problem = paper_case("63")
    gain = 1 - value(problem, two_stages(problem)) / value(problem, even(problem))
    assert gain == pytest.approx(0.0076, abs=5e-4)


def test_two_stages_keep_to_memory():
    problem = a_problem([1] * 12, [1, 1, 1], [2, 4, 8])
    assert all(count <= room for count, room in zip(counts(two_stages(problem)), [2, 4, 8], strict=True))
    with pytest.raises(NotApplicableError):
        two_stages(a_problem([1] * 12, [1, 1, 1], [2, 4, 5]))


def test_balanced_parts():
    assert balanced_cuts([1.0] * 8, 4) == [0, 2, 4, 6, 8]
    assert balanced_cuts([1.0] * 3, 4) == [0, 1, 2, 3, 3]


@pytest.mark.parametrize(("first", "misses"), [(1, False), (6, True)])
def test_balanced_parts_miss_the_optimum_where_the_first_layer_is_heavy(first, misses):
    r = random.Random(0)
    missed = 0
    for _ in range(100):
        weights = [first * r.uniform(1, 9), *(r.uniform(1, 9) for _ in range(11))]
        cuts = balanced_cuts(weights, 4)
        found = max(sum(weights[p:q]) for p, q in itertools.pairwise(cuts))
        best = min(
            max(sum(weights[p:q]) for p, q in itertools.pairwise((0, *inner, 12)))
            for inner in itertools.combinations(range(1, 12), 3)
        )
        assert found >= best * (1 - 1e-12)
        missed += found > best * 1.001
    assert (missed > 0) == misses
    assert missed < 50


def test_metis_splits_equal_layers_by_capacity():
    balancer = BASELINES["layer balancer (Metis)"]
    assert counts(balancer(a_problem([1] * 12, [1, 1, 1]))) == [4, 4, 4]
    assert counts(balancer(a_problem([1] * 12, [1, 2]))) == [8, 4]
    assert counts(balancer(a_problem([1] * 5, [1]))) == [5]


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_published_milp_is_right_when_it_may_finish(solver):
    problem = a_problem([1, 2, 3, 1, 2], [1, 3], [3, 4])
    found = published_milp(problem, solver, 20.0, gap=0.0)
    assert found.status == "within its gap"
    best = plan(problem).certificate.value_s
    assert value(problem, found.assignment) == pytest.approx(best, rel=1e-5)
    assert found.bound_s == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_published_milp_says_what_it_has_not_found(solver):
    assert published_milp(a_problem([1] * 6, [1, 1], [2, 3]), solver, 20.0).status == "infeasible"
    assert published_milp(published_case(8, 10), solver, 0.01).assignment is None

"""What a microbatch takes beside a stage's layers: in the prediction, the search, the bound and the check."""

import contextlib
import random

import pytest
from tests.planner.planner_problems import brute_force, problem, random_problem

from skyctl import InfeasibleError, plan, predict, verify


def handled(seed, schedule="1f1b", **fixed):
    """A random problem whose devices take their time beside the layers; some are alike but for that."""
    r = random.Random(seed)
    given = random_problem(seed, objective="iteration", schedule=schedule, **fixed)
    mean = sum(x.flops for x in given.layers) / len(given.layers) / given.devices[0].flops_per_s

    def some():
        return r.choice([0.0, r.uniform(0, 2) * mean])

    names = ("handling_s", "neighbour_s", "action_s")
    devices = [d.model_copy(update={name: some() for name in names}) for d in given.devices]
    return given.model_validate({**dict(given), "devices": [dict(d) for d in devices]})


@pytest.mark.parametrize("seed", range(60))
def test_optimal_equals_brute_force(seed):
    given = handled(seed, ("1f1b", "gpipe", "sequential")[seed % 3])
    best = brute_force(given)
    if best is None:
        with pytest.raises(InfeasibleError):
            plan(given)
        return
    found = plan(given)
    assert found.certificate.status == "optimal"
    assert found.certificate.value_s == pytest.approx(best, rel=1e-9)
    assert verify(given, found).ok


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["eager-1f1b", "zero-bubble"])
@pytest.mark.parametrize("seed", range(12))
def test_what_is_claimed_holds_where_depths_are_chosen_too(seed, schedule):
    given = handled(seed, schedule)
    try:
        found = plan(given)
    except InfeasibleError:
        return
    assert verify(given, found).ok
    assert predict(given, found).iteration_s == pytest.approx(found.certificate.value_s)
    for strategy in ("heuristic", "even"):
        with contextlib.suppress(InfeasibleError):
            other = plan(given, strategy)
            assert found.certificate.lower_bound_s <= other.certificate.value_s * (1 + 1e-9)


@pytest.mark.parametrize("key", ["handling_s", "neighbour_s", "action_s"])
def test_devices_that_differ_only_in_overhead_are_not_interchangeable(key):
    given = problem((1.0,) * 4, (1.0, 1.0, 1.0), microbatches=8)
    devices = [{**dict(d), key: s} for d, s in zip(given.devices, (0.5, 0.0, 0.4), strict=True)]
    given = given.model_validate({**dict(given), "devices": devices})
    assert plan(given).certificate.value_s == pytest.approx(brute_force(given))


def test_half_of_the_overhead_is_in_each_action():
    given = problem((3.0, 3.0), (1.0, 1.0), microbatches=1)
    devices = [{**dict(d), "handling_s": 0.5} for d in given.devices]
    given = given.model_validate({**dict(given), "devices": devices})
    made = plan(given, assign=[(d.id, i, i + 1) for i, d in enumerate(given.devices)])
    said = predict(given, made)
    assert said.iteration_s == pytest.approx(7.0)
    assert [x.compute_s for x in said.replicas] == pytest.approx([3.5, 3.5])
    assert said.bottleneck_s == pytest.approx(3.0)

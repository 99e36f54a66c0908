"""A microbatch's time beside a stage's layers: in the prediction, the search, the bound and the check."""

import contextlib
import random

import pytest
from tests.planner import data_problems, hybrid_problems
from tests.planner.planner_problems import brute_force, problem, random_problem

from skyctl import InfeasibleError, plan, predict, verify


def handled(seed, schedule="1f1b", **fixed):
    """A random problem whose devices take their time beside the layers; some are alike but for that."""
    r = random.Random(seed)
    given = random_problem(seed, objective="iteration", schedule=schedule, **fixed)
    mean = sum(x.flops for x in given.layers) / len(given.layers) / given.devices[0].flops_per_s

    def some():
        return r.choice([0.0, r.uniform(0, 2) * mean])

    names = ("handling_s", "neighbour_s", "action_s", "step_s")
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
    planned = plan(given)
    assert planned.certificate.status == "optimal"
    assert planned.certificate.value_s == pytest.approx(best, rel=1e-9)
    assert verify(given, planned).ok


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["eager-1f1b", "zero-bubble"])
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.matrix if seed % 3 else ()) for seed in range(12)]
)
def test_what_is_claimed_holds_where_depths_are_chosen_too(seed, schedule):
    given = handled(seed, schedule)
    try:
        planned = plan(given)
    except InfeasibleError:
        return
    assert verify(given, planned).ok
    assert predict(given, planned).iteration_s == pytest.approx(planned.certificate.value_s)
    for strategy in ("heuristic", "even"):
        with contextlib.suppress(InfeasibleError):
            other = plan(given, strategy)
            assert planned.certificate.lower_bound_s <= other.certificate.value_s * (1 + 1e-9)


@pytest.mark.parametrize("key", ["handling_s", "neighbour_s", "action_s", "step_s"])
def test_devices_that_differ_only_in_overhead_are_not_interchangeable(key):
    given = problem((1.0,) * 4, (1.0, 1.0, 1.0), microbatches=8)
    devices = [{**dict(d), key: s} for d, s in zip(given.devices, (0.5, 0.0, 0.4), strict=True)]
    given = given.model_validate({**dict(given), "devices": devices})
    assert plan(given).certificate.value_s == pytest.approx(brute_force(given))


def test_half_of_the_overhead_is_in_each_action():
    given = problem((3.0, 3.0), (1.0, 1.0), microbatches=1)
    devices = [{**dict(d), "handling_s": 0.5} for d in given.devices]
    given = given.model_validate({**dict(given), "devices": devices})
    planned = plan(given, assign=[(d.id, i, i + 1) for i, d in enumerate(given.devices)])
    predicted = predict(given, planned)
    assert predicted.iteration_s == pytest.approx(7.0)
    assert [x.compute_s for x in predicted.replicas] == pytest.approx([3.5, 3.5])
    assert predicted.bottleneck_s == pytest.approx(3.0)


def with_steps(given, *seconds):
    """The problem whose devices take so long once a step, in turn."""
    devices = [{**dict(d), "step_s": seconds[i % len(seconds)]} for i, d in enumerate(given.devices)]
    return given.model_validate({**dict(given), "devices": devices})


def test_who_holds_all_layers_pays_once_a_step_whatever_its_share():
    given = data_problems.data_problem([1.0, 1.0], layers=2, microbatches=4)
    times = {"forward_s": (1.0, 1.0), "backward_s": (2.0, 2.0), "optimizer_s": (0.0, 0.0)}
    given = given.model_validate({**dict(given), "times": {d.id: times for d in given.devices}})
    slower = with_steps(given, 0.5, 0.25)
    steps_s = [
        predict(asked, plan(asked, assign=[(d.id, 2) for d in asked.devices])).iteration_s
        for asked in (given, slower)
    ]
    assert steps_s[1] - steps_s[0] == pytest.approx(0.5)


def test_a_longer_pipeline_pays_at_both_ends():
    given = hybrid_problems.random_hybrid_problem(3, devices=(4, 4), layers=(4, 4), microbatches=(4, 4))
    spread = with_steps(given, 0.5).with_steps_spread()
    assert spread.parallel == "hybrid"
    assert {device.step_s for device in spread.devices} == {0.0}
    for name, times in spread.times.items():
        more = [a - b for a, b in zip(times.optimizer_s, given.times[name].optimizer_s, strict=True)]
        assert more == pytest.approx([0.25, 0.0, 0.0, 0.25])


@pytest.mark.parametrize("seed", range(24))
def test_plans_side_by_side_pay_it_too_in_search_bound_and_check(seed):
    is_data = bool(seed % 2)
    module = data_problems if is_data else hybrid_problems
    given = (module.random_data_problem if is_data else module.random_hybrid_problem)(seed)
    given = with_steps(given, 0.3, 0.0, 0.6)
    best = module.brute_force(given.with_steps_spread())
    if best is None:
        with pytest.raises(InfeasibleError):
            plan(given)
        return
    planned = plan(given)
    assert planned.problem == given
    assert planned.certificate.lower_bound_s <= best * (1 + 1e-9)
    assert planned.certificate.value_s >= best * (1 - 1e-9)
    assert verify(given, planned).ok

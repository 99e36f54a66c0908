"""verify: plans hold, and a record that was changed anywhere does not."""

import json
import random

import pytest
from tests.planner.planner_problems import brute_force, layer, problem, random_problem

from skyctl.errors import InfeasibleError, RecordError
from skyctl.planner.api import assigned, plan, verify
from skyctl.planner.prediction_interval import with_interval
from skyctl.records.base import parse
from skyctl.records.plan import Plan
from skyctl.records.problem import Link


def changed(planned, *edits):
    """The same plan with values set at (key, …) paths."""
    raw = json.loads(planned.to_json())
    for *path, key, value in edits:
        at = raw
        for step in path:
            at = at[step]
        at[key] = value
    return parse(Plan, json.dumps(raw), "plan.json")


def failing(p, planned):
    verdict = verify(p, planned)
    assert verdict.ok == all(check.ok for check in verdict.checks)
    return {check.name for check in verdict.checks if not check.ok}


def claiming(planned, bound, status="bounded"):
    value = planned.certificate.value_s
    edits = [
        ("certificate", "status", status),
        ("certificate", "lower_bound_s", bound),
        ("certificate", "gap", value / bound - 1),
    ]
    return changed(planned, *edits)


def linked():
    """Three unequal devices, every quantity of the model in use, only one order and cut is best."""
    base = problem(
        flops=[3.0, 2.0, 4.0, 1.0, 5.0, 2.0], speeds=[1, 2, 3], memory=[14.0, 22.0, 32.0],
        objective="iteration", receive_window=1, schedule="1f1b", microbatches=6,
    )  # fmt: skip
    layers = tuple(
        layer(i, x.flops, 2.0 + i, 0.5 + 0.1 * i, 1.0 + i, 0.25 * i) for i, x in enumerate(base.layers)
    )
    ids = [device.id for device in base.devices]
    links = tuple(
        Link(source=a, target=b, latency_s=0.01, bandwidth_bytes_per_s=50.0)
        for a in ids for b in ids if a != b
    )  # fmt: skip
    devices = tuple(device.model_copy(update={"reserved_bytes": 0.5}) for device in base.devices)
    return base.model_copy(update={"layers": layers, "links": links, "devices": devices})


@pytest.mark.parametrize("seed", range(3000, 3060))
def test_what_plan_makes_holds(seed):
    p = random_problem(seed)
    for strategy in ("even", "heuristic", "optimal"):
        try:
            planned = plan(p, strategy)
        except InfeasibleError:
            continue
        verdict = verify(p, planned)
        assert verdict.ok, verdict
        assert [c.name for c in verdict.checks if not c.checked] == (
            [] if strategy == "optimal" else ["bound"]
        )


@pytest.mark.parametrize("seed", range(40))
def test_a_raised_bound_never_holds(seed):
    """1% above what brute force finds, under a plan 2% worse where there is one."""
    p = random_problem(seed)
    best = brute_force(p)
    if best is None:
        return
    r = random.Random(seed)
    worse = None
    for _ in range(200):
        devices = r.sample([d.id for d in p.devices], r.randint(1, len(p.devices)))
        stages = min(len(devices), len(p.layers))
        cuts = [0, *sorted(r.sample(range(1, len(p.layers)), stages - 1)), len(p.layers)]
        try:
            tried = assigned(p, [(d, cuts[i], cuts[i + 1]) for i, d in enumerate(devices[:stages])])
        except InfeasibleError:
            continue
        if tried.certificate.value_s >= best * 1.02:
            worse = tried
            break
    if worse is None:
        return
    assert failing(p, claiming(worse, best * 1.01)) == {"bound"}
    assert failing(p, claiming(worse, best * (1 - 1e-9))) == set()
    assert "bound" in failing(p, claiming(worse, worse.certificate.value_s, "optimal"))


def test_the_plan_as_it_is():
    p = linked()
    assert failing(p, plan(p)) == set()


@pytest.mark.parametrize(
    ("edits", "check"),
    [
        ([("certificate", "value_s", 0.5)], "value"),
        ([("certificate", "gap", 0.25)], "certificate"),
        ([("certificate", "gap", None)], "certificate"),
        ([("certificate", "lower_bound_s", None)], "certificate"),
        ([("certificate", "lower_bound_s", 1e-3)], "certificate"),
        ([("certificate", "lower_bound_s", 0.0)], "certificate"),
        ([("certificate", "lower_bound_s", 1e9)], "certificate"),
        ([("certificate", "status", "feasible")], "certificate"),
        ([("predicted", "iteration_s", 1.0)], "prediction"),
        ([("predicted", "bottleneck_s", 1.0)], "prediction"),
        ([("predicted", "replicas", 0, "compute_s", 1.0)], "prediction"),
        ([("predicted", "replicas", 0, "idle_s", 99.0)], "prediction"),
        ([("predicted", "replicas", 0, "memory_bytes", 1.0)], "prediction"),
        ([("stages", 0, "replicas", 0, "in_flight", 1)], "stages"),
        ([("stages", 0, "replicas", 0, "in_flight", 6)], "in flight"),
        ([("stages", 0, "replicas", 0, "in_flight", 7)], "stages"),
        ([("stages", 0, "replicas", 0, "microbatches", 3)], "stages"),
        ([("stages", 2, "replicas", 0, "microbatches", 3)], "stages"),
        ([("unused", [{"device": "n0/cpu:0", "reason": "slow"}])], "unused"),
        ([("unused", [{"device": "n7/cpu:0", "reason": "slow"}])], "unused"),
    ],
)
def test_each_tampered_number_fails(edits, check):
    p = linked()
    planned = plan(p)
    assert len(planned.stages) == 3
    assert check in failing(p, changed(planned, *edits))


def test_an_optimal_status_with_a_gap_fails():
    p = linked()
    planned = plan(p)
    low = planned.certificate.value_s * 0.9
    assert failing(p, claiming(planned, low)) == set()
    assert failing(p, claiming(planned, low, "optimal")) == {"certificate"}


def test_another_order_of_stages_fails():
    p = linked()
    planned = plan(p)
    a, b, _ = (stage.replicas[0].device for stage in planned.stages)
    swapped = changed(
        planned, ("stages", 0, "replicas", 0, "device", b), ("stages", 1, "replicas", 0, "device", a)
    )
    assert {"value", "prediction"} <= failing(p, swapped)


def test_another_cut_fails():
    p = linked()
    planned = plan(p)
    at = planned.stages[0].stop
    moved = changed(planned, ("stages", 0, "stop", at + 1), ("stages", 1, "start", at + 1))
    assert {"value", "prediction"} <= failing(p, moved)


def test_a_stage_in_a_grid_has_one_device():
    p = problem(speeds=[1, 1])
    planned = plan(p, "even")
    stage = planned.stages[0].replicas[0].model_dump()
    both = [{**stage, "microbatches": 2, "in_flight": 1}, {**stage, "device": "n1/cpu:0", "microbatches": 2}]
    raw = json.loads(planned.to_json())
    raw["stages"] = [{"start": 0, "stop": 6, "replicas": both}]
    with pytest.raises(RecordError, match="a stage has one device, not 2"):
        parse(Plan, json.dumps(raw), "plan.json")


def _with_device(p, name, **update):
    devices = tuple(d.model_copy(update=update) if d.id == name else d for d in p.devices)
    return p.model_copy(update={"devices": devices})


def test_a_changed_problem_fails_by_name():
    p = linked()
    planned = plan(p)
    first, last = planned.stages[0].replicas[0].device, planned.stages[-1].replicas[0].device
    need = planned.predicted.replicas[0].memory_bytes
    assert failing(_with_device(p, first, memory_bytes=need), planned) == {"problem"}
    assert "memory" in failing(_with_device(p, first, memory_bytes=need * 0.999), planned)
    assert failing(_with_device(p, first, reserved_bytes=30.0), planned) >= {
        "problem",
        "memory",
        "prediction",
    }
    assert "pins" in failing(p.model_copy(update={"first_stage": (last,)}), planned)
    assert "pins" in failing(p.model_copy(update={"last_stage": (first,)}), planned)
    assert "in flight" in failing(p.model_copy(update={"schedule": "gpipe"}), planned)
    assert "stages" in failing(p.model_copy(update={"microbatches": 5}), planned)
    assert "stages" in failing(p.model_copy(update={"layers": p.layers[:-1]}), planned)
    others = tuple(d.model_copy(update={"id": f"x{i}"}) for i, d in enumerate(p.devices))
    assert "stages" in failing(p.model_copy(update={"devices": others, "links": ()}), planned)
    slower = tuple(link.model_copy(update={"latency_s": 1.0}) for link in p.links)
    assert {"problem", "value"} <= failing(p.model_copy(update={"links": slower}), planned)
    assert {"problem", "value"} <= failing(_with_device(p, first, flops_per_s=0.5), planned)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1.0"])
@pytest.mark.parametrize("key", ["value_s", "lower_bound_s", "wall_s"])
def test_no_number_at_all_is_a_record_error(key, value):
    text = plan(problem()).to_json()
    raw = json.loads(text)
    raw["certificate"][key] = "HERE"
    with pytest.raises(RecordError, match=key):
        parse(Plan, json.dumps(raw).replace('"HERE"', value), "plan.json")


def test_numbers_too_large_to_add_up_fail():
    p = problem()
    planned = plan(p, "even")
    slow = tuple(d.model_copy(update={"flops_per_s": 1e-308}) for d in p.devices)
    assert "stages" in failing(p.model_copy(update={"devices": slow}), planned)


def test_an_interval_holds_the_step_and_needs_uncertain_figures():
    base = problem()
    sure, interval = plan(base), {"low_s": 0.0, "high_s": 1e9}
    assert failing(base, changed(sure, ("predicted", "interval", interval))) == {"interval"}
    devices = tuple(d.model_copy(update={"time_uncertainty": 0.05}) for d in base.devices)
    p = base.model_copy(update={"devices": devices})
    unsure = with_interval(plan(p))
    assert unsure.predicted.interval is not None
    assert verify(p, unsure).ok
    for low, high in ((0.0, 0.99), (1.01, 2.0)):
        ends = {"low_s": low * unsure.predicted.iteration_s, "high_s": high * unsure.predicted.iteration_s}
        assert failing(p, changed(unsure, ("predicted", "interval", ends))) == {"interval"}
    assert failing(p, changed(unsure, ("pipeline_iteration_s", 1.0))) == {"pipeline beside it"}


def test_what_can_not_be_checked_is_named():
    """Eager 1F1B's depths are the plan's choice: where paths do not settle it, nothing is claimed."""
    base = linked().model_copy(update={"schedule": "eager-1f1b", "microbatches": 12})
    slow = tuple(link.model_copy(update={"latency_s": 4.0}) for link in base.links)
    p = base.model_copy(update={"links": slow})
    planned = plan(p, "heuristic")
    verdict = verify(p, claiming(planned, planned.certificate.value_s * 0.999))
    assert verdict.ok
    assert [check.name for check in verdict.checks if not check.checked] == ["bound"]
    assert verdict.checks[-1].detail

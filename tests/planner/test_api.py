"""plan, assigned, predict, verify: shapes, errors, tampering."""

import json

import pytest
from tests.planner.planner_problems import problem, random_problem

import skyctl
from skyctl.errors import InfeasibleError, InputError
from skyctl.planner.api import assigned, plan, predict, verify
from skyctl.planner.cost_model import CostModel
from skyctl.planner.explanation.plan_reasons import find_binding_constraint, stage_views
from skyctl.planner.stage_memory import human_bytes
from skyctl.records.base import parse
from skyctl.records.plan import Plan
from skyctl.records.problem import Link


def ranges(planned):
    return [(s.replicas[0].device, s.start, s.stop) for s in planned.stages]


def test_even_gives_the_first_ones_one_more():
    planned = plan(problem(flops=[1.0] * 8, speeds=[1, 1, 1]), "even")
    assert ranges(planned) == [("n0/cpu:0", 0, 3), ("n1/cpu:0", 3, 6), ("n2/cpu:0", 6, 8)]
    assert planned.certificate.status == "feasible"


def test_even_leaves_the_last_ones_unused():
    planned = plan(problem(flops=[1.0] * 2, speeds=[1, 1, 1]), "even")
    assert [u.device for u in planned.unused] == ["n2/cpu:0"]


def test_even_that_does_not_fit_names_device_need_and_has():
    with pytest.raises(InfeasibleError, match=r"n1/cpu:0 layers \[3, 6\), which need 3 B; it has 2 B"):
        plan(problem(memory=[None, 2.0]), "even")
    with pytest.raises(InfeasibleError, match="first stage; allowed there: n1/cpu:0"):
        plan(problem(first_stage=["n1/cpu:0"]), "even")


def test_alone_is_the_fastest_device_that_holds_all_layers():
    planned = plan(problem(speeds=[1, 4, 2], memory=[None, 5.0, None]), "alone")
    assert ranges(planned) == [("n2/cpu:0", 0, 6)]  # the fastest has too little memory
    assert planned.strategy == "alone"
    assert planned.certificate.status == "feasible"
    assert {unused.reason for unused in planned.unused} == {"one device trains alone"}
    assert verify(planned.problem, planned).ok
    assert ranges(plan(problem(speeds=[1, 4], first_stage=["n0/cpu:0"]), "alone")) == [("n0/cpu:0", 0, 6)]


def test_alone_recomputes_where_it_fits_no_other_way():
    layers = tuple(
        layer.model_copy(update={"activation_bytes": 5.0, "output_bytes": 0.1}) for layer in problem().layers
    )
    small = problem(speeds=[1, 4], memory=[None, 20.0]).model_copy(update={"layers": layers})
    assert ranges(plan(small, "alone")) == [("n0/cpu:0", 0, 6)]
    planned = plan(small.model_copy(update={"recompute": True}), "alone")
    assert ranges(planned) == [("n1/cpu:0", 0, 6)]
    assert planned.stages[0].replicas[0].recompute


def test_where_nothing_fits_alone_the_largest_device_is_named():
    with pytest.raises(
        InfeasibleError, match=r"no device can train alone: that gives n1/cpu:0 layers \[0, 6\)"
    ):
        plan(problem(memory=[2.0, 3.0]), "alone")


@pytest.mark.parametrize(
    ("name", "also"),
    [("whole_blocks", {"whole_blocks": True}), ("strategy", {"strategy": "optimal"})],
)
def test_an_assignment_is_not_searched_for(name, also):
    given = problem(speeds=[1, 2])
    with pytest.raises(InputError, match=f"{name} does not go with assign") as raised:
        plan(given, assign=[("n1/cpu:0", 0, 4), ("n0/cpu:0", 4, 6)], **also)
    assert raised.value.hint == f"leave {name} out, or assign"


def test_assigned():
    planned = plan(problem(speeds=[1, 2]), assign=[("n1/cpu:0", 0, 4), ("n0/cpu:0", 4, 6)])
    assert planned.strategy == "assigned"
    assert ranges(planned) == [("n1/cpu:0", 0, 4), ("n0/cpu:0", 4, 6)]
    assert planned.certificate.value_s == pytest.approx(2.0)
    partial = assigned(problem(speeds=[1, 2]), [("n1/cpu:0", 0, 6)])
    assert partial.unused[0].reason == "not assigned"


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([("n0/cpu:0", 0, 5)], "covers 5 layers, the problem has 6"),
        ([("n0/cpu:0", 1, 6)], "must start at 0"),
        ([("n0/cpu:0", 0, 3), ("n1/cpu:0", 2, 6)], "must start at 3"),
        ([("n0/cpu:0", 0, 3), ("n0/cpu:0", 3, 6)], "more than one range"),
        ([("n0/cpu:0", 0, 0), ("n1/cpu:0", 0, 6)], "empty range"),
        ([("n9/cpu:0", 0, 6)], "n9/cpu:0"),
        ([("n0/cpu:0", 0, 7)], "covers 7 layers"),
        ([], "covers 0 layers"),
    ],
)
def test_assigned_wrongly(ranges, words):
    with pytest.raises(InputError, match=words):
        assigned(problem(), ranges)


def test_unknown_strategy():
    with pytest.raises(InputError, match="unknown strategy 'best'"):
        plan(problem(), "best")


def test_the_contracts_memory_formula():
    p = random_problem(5, receive_window=2)
    part = p.layers[1:3]
    expected = sum(x.state_bytes + 3 * x.activation_bytes for x in part) + max(
        x.workspace_bytes for x in part
    )
    expected += 2 * (p.layers[0].output_bytes + (p.layers[2].output_bytes if len(p.layers) > 3 else 0.0))
    assert CostModel(p).need_bytes(1, 3, 3) == pytest.approx(expected)


def test_plans_round_trip_and_verify_from_the_file():
    for strategy in ("even", "heuristic", "optimal"):
        p = problem(speeds=[1, 2, 3])
        planned = plan(p, strategy)
        again = parse(Plan, planned.to_json(), "plan.json")
        assert again == planned
        assert verify(again.problem, again).ok
        assert predict(p, again) == planned.predicted


def test_lazy_names_of_the_package():
    assert skyctl.plan is plan
    assert skyctl.verify is verify


def tampered(planned, path, value):
    raw = json.loads(planned.to_json())
    at = raw
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return parse(Plan, json.dumps(raw), "plan.json")


@pytest.mark.parametrize(
    ("path", "value", "check"),
    [
        (("certificate", "value_s"), 0.5, "value"),
        (("certificate", "lower_bound_s"), 0.9, "certificate"),
        (("certificate", "gap"), 0.25, "certificate"),
        (("predicted", "iteration_s"), 1.0, "prediction"),
        (("predicted", "replicas", 0, "memory_bytes"), 1.0, "prediction"),
        (("stages", 0, "replicas", 0, "in_flight"), 1, "in flight"),
        (("stages", 0, "replicas", 0, "microbatches"), 3, "stages"),
    ],
)
def test_verify_catches_tampering(path, value, check):
    planned = plan(problem(speeds=[1, 1]))
    verdict = verify(planned.problem, tampered(planned, path, value))
    assert not verdict.ok
    assert check in [c.name for c in verdict.checks if not c.ok]


def test_verify_catches_a_false_proof():
    """An even split that claims to be optimal."""
    for objective in ("bottleneck", "iteration"):
        p = problem(speeds=[1, 3], objective=objective)
        poor = plan(p, "even")
        value = poor.certificate.value_s
        proof = {
            "status": "optimal",
            "value_s": value,
            "lower_bound_s": value,
            "gap": 0.0,
            "method": "",
            "wall_s": 0.0,
        }
        verdict = verify(p, tampered(poor, ("certificate",), proof))
        assert [c.name for c in verdict.checks if not c.ok] == ["bound"]


def test_verify_catches_memory_and_pins():
    p = problem(speeds=[1, 1])
    planned = plan(p, "even")
    small = tuple(d.model_copy(update={"memory_bytes": 1.0}) for d in p.devices)
    verdict = verify(p.model_copy(update={"devices": small, "last_stage": ("n0/cpu:0",)}), planned)
    assert {"problem", "memory", "pins"} <= {c.name for c in verdict.checks if not c.ok}


def test_explain():
    ids = ["n0/cpu:0", "n1/cpu:0"]
    link = Link(source=ids[0], target=ids[1], latency_s=0.0, bandwidth_bytes_per_s=0.01)
    base = problem(speeds=[1, 1], objective="iteration")
    layers = tuple(x.model_copy(update={"output_bytes": 1.0}) for x in base.layers)
    p = base.model_copy(update={"layers": layers, "links": (link,)})
    planned = assigned(p, [(ids[0], 0, 4), (ids[1], 4, 6)])
    views = stage_views(planned)
    assert [v.load for v in views] == [1.0, 0.5]
    assert views[0].link_s == 100.0
    assert find_binding_constraint(planned).kind == "link"
    assert find_binding_constraint(assigned(base, [(ids[0], 0, 4), (ids[1], 4, 6)])).name == ids[0]
    tight = problem(speeds=[1, 4], memory=[None, 2.0])
    assert find_binding_constraint(plan(tight)).kind == "memory"


def test_human():
    assert [human_bytes(x) for x in (12, 2048, 3.5 * 2**20, 2**31)] == ["12 B", "2 KiB", "3.5 MiB", "2 GiB"]

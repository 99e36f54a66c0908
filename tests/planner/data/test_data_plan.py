"""Data parallelism: plans that can be worked out by hand, what is refused, verify on changed records."""

import itertools
import json

import pytest
from tests.planner.data_problems import data_problem, random_data_problem

from skyctl import InfeasibleError, plan, predict, verify
from skyctl.errors import InputError, RecordError
from skyctl.planner.api import assigned
from skyctl.planner.data import unused_reasons
from skyctl.planner.data.unused_reasons import least_paying
from skyctl.planner.routes.route_layouts import Layout, use_of
from skyctl.records.base import parse
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem, SharedResource


def shares(planned):
    return {p.stages[0].device.partition("/")[0]: p.microbatches for p in planned.pipelines}


def lines(problem, rate):
    """The problem with a line to and from each device, over which all its links go."""
    ids = [d.id for d in problem.devices]
    resources = [
        SharedResource(name=f"{name} {way}", bandwidth_bytes_per_s=rate, links=pairs)
        for name in ids
        for way, pairs in (
            ("out", [(name, x) for x in ids if x != name]),
            ("in", [(x, name) for x in ids if x != name]),
        )
    ]
    return problem.model_copy(update={"shared": tuple(resources)})


def test_two_equal_devices_share_the_microbatches_and_hide_all_but_the_first_layers_gradients():
    problem = data_problem(rate=100.0)  # 6 s a microbatch, 1 s for each of two layers' gradients
    planned = plan(problem)
    assert shares(planned) == {"n0": 4, "n1": 4}
    assert planned.predicted.iteration_s == pytest.approx(4 * 6 + 1)
    assert planned.predicted.sync_s == pytest.approx(1)
    assert planned.certificate.status == "optimal"
    assert verify(problem, planned).ok


def test_shares_follow_speed():
    planned = plan(data_problem(speeds=(4.0, 2.0, 1.0, 1.0), microbatches=16, rate=1e9))
    assert shares(planned) == {"n0": 8, "n1": 4, "n2": 2, "n3": 2}
    assert planned.predicted.iteration_s == pytest.approx(12.0, rel=1e-6)


def test_who_does_not_pay_for_its_gradients_is_left_out_and_told_from_when_on_it_would():
    problem = data_problem(rate=100.0, gradient=10_000.0)  # 200 s for all gradients, 2 of them hidden
    planned = plan(problem)
    assert shares(planned) == {"n0": 8}
    assert planned.sync is None
    assert planned.form == "grid"
    assert planned.predicted.iteration_s == pytest.approx(48)
    (unused,) = planned.unused
    assert unused.reason.startswith(
        "the plan is proved best without it; with it a step would be 4.62 times as long"
    )
    assert least_paying(planned) == (68, "n1/cpu:0")  # 34 · 6 + 198 < 68 · 6, and 67 are just as fast
    assert "from 68 microbatches" in unused.reason
    for microbatches, count in ((67, 1), (68, 2)):
        assert len(plan(problem.model_copy(update={"microbatches": microbatches})).pipelines) == count


def test_reasons_do_without_trees_once_their_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = data_problem((1.0,) * 4, rate=100.0, gradient=10_000.0)
    monkeypatch.setattr(unused_reasons, "PACKED_S", 0.0)
    monkeypatch.setattr(unused_reasons, "asked_groups", lambda *_: pytest.fail("trees were packed"))
    unused = plan(problem, "heuristic").unused
    assert len(unused) == 3
    assert all("times as long" in left_out.reason for left_out in unused)


def test_a_ring_uses_every_line_three_quarters_twice_and_a_star_its_roots_line_three_times():
    problem = lines(data_problem(speeds=(1.0,) * 4, layers=1, gradient=400.0), 100.0)
    planned = assigned(problem, [(d.id, 2) for d in problem.devices])
    assert planned.predicted.sync_s == pytest.approx(6)  # 2 · 3/4 of 400 bytes at 100 a second
    assert len(planned.sync.groups[0].routes) == 4
    star = Layout((0, 1, 2, 3), root=2)
    used = use_of(star.routes(), {})
    assert used.added == {2: 3.0}
    assert used.passed == {0: 2.0, 1: 2.0, 2: 6.0, 3: 2.0}
    assert set(used.links.values()) == {1.0}


def test_a_star_at_the_device_with_the_fat_lines_beats_a_ring_over_thin_ones():
    problem = data_problem(speeds=(1.0,) * 4, rate=10.0, layers=1, gradient=100.0, microbatches=400)
    fat = tuple(
        x.model_copy(update={"bandwidth_bytes_per_s": 100.0 if "n2" in x.source + x.target else 10.0})
        for x in problem.links
    )
    problem = problem.model_copy(update={"links": fat})
    planned = plan(problem)  # trees over the thin lines, too, would save 0.1 s of 301
    assert planned.certificate.value_s < plan(problem.model_copy(update={"sync": "ring"})).certificate.value_s
    (route,) = planned.sync.groups[0].routes
    assert route.root == "n2/cpu:0"
    assert planned.predicted.sync_s == pytest.approx(1)


def test_latency_is_that_of_the_longest_way_up_and_down():
    planned = assigned(data_problem(speeds=(1.0,) * 3, rate=1e12, latency=0.5, microbatches=3),
                    [(f"n{i}/cpu:0", 1) for i in range(3)])  # fmt: skip
    assert len(planned.sync.groups[0].routes) == 1  # a star: once up and once down, a ring: twice each
    assert planned.predicted.sync_s == pytest.approx(1.0)
    assert (
        use_of(Layout((0, 1, 2)).routes(), dict.fromkeys(itertools.permutations(range(3), 2), 0.5)).latency_s
        == 2.0
    )


def test_adding_competes_with_computing():
    problem = data_problem(rate=1e12)
    slow = problem.devices[0].model_copy(update={"reduce_byte_s": 0.1, "message_byte_s": 0.01})
    changed = problem.model_copy(update={"devices": (slow, problem.devices[1])})
    planned = plan(
        changed
    )  # n0 is not the root: 200 bytes sent and received, 4 s; a ring would add 100, 10 s
    assert planned.sync.groups[0].routes[0].root == "n1/cpu:0"
    assert planned.predicted.iteration_s == pytest.approx(4 * 6 + 4)


def test_bfloat16_halves_the_bytes_and_gradient_bytes_are_a_quarter_of_the_state_where_unknown():
    problem = data_problem(rate=10.0, layers=1, gradient=100.0)
    assert plan(problem).predicted.sync_s == pytest.approx(10)
    half = plan(problem.model_copy(update={"sync_format": "bfloat16"}))
    assert half.predicted.sync_s == pytest.approx(5)
    assert half.sync.format == "bfloat16"
    assert verify(half.problem, half).ok
    unknown = problem.layers[0].model_copy(update={"gradient_bytes": None})
    assert plan(problem.model_copy(update={"layers": (unknown,)})).predicted.sync_s == pytest.approx(10)


@pytest.mark.parametrize(("name", "sync_s", "room"), [("int8", 10 * 33 / 128, 0), ("fixed32", 10, 100)])
def test_what_other_formats_take(name: str, sync_s: float, room: float):
    """A scale of 4 bytes for 128 bytes; integers of as many bytes as the float32 gradients."""
    problem = data_problem(rate=10.0, layers=1, gradient=100.0)
    need = plan(problem).predicted.replicas[0].memory_bytes
    planned = plan(problem.model_copy(update={"sync_format": name}))
    assert planned.predicted.sync_s == pytest.approx(sync_s)
    assert planned.predicted.replicas[0].memory_bytes == need + room
    assert verify(planned.problem, planned).ok
    written = json.loads(planned.to_json())
    assert written["sync"]["format"] == name


def test_compressed_sums_take_two_passes():
    """Of 20 × 30 numbers, 4 · 50 in two passes and 10 whole: latency counts twice, residuals are kept."""
    layer = {"gradient_matrices": ((20, 30), (2, 5)), "gradient_bytes": 4.0 * 620}
    problem = data_problem(rate=100.0, layers=1, gradient=2480.0, latency=0.25)
    problem = problem.model_copy(update={"layers": (problem.layers[0].model_copy(update=layer),)})
    need = plan(problem).predicted.replicas[0].memory_bytes
    fields = {**dict(problem), "sync_format": "powersgd:4", "sync_uncompressed_steps": 3}
    planned = plan(Problem.model_validate(fields))
    assert planned.predicted.sync_s == pytest.approx(4 * (4 * 50 + 20) / 100.0 + 2 * 2 * 0.25)
    kept = 4 * (20 * 30 + 4 * (20 + 2 * 30))
    assert planned.predicted.replicas[0].memory_bytes == need + kept + (2 << 20), "of one edge"
    assert verify(planned.problem, planned).ok
    assert (planned.sync.format, planned.sync.uncompressed_steps) == ("powersgd:4", 3)
    assert planned.sync.chunk_bytes == 16384, "a quarter of what a slow line has in one pass"
    lying = planned.model_copy(update={"sync": planned.sync.model_copy(update={"uncompressed_steps": 2})})
    assert not verify(planned.problem, lying).ok
    with pytest.raises(InputError, match="needs the gradient_bytes and gradient_matrices of every layer"):
        Problem.model_validate({**dict(data_problem()), "sync_format": "powersgd:4"})


@pytest.mark.parametrize(
    "name", ["powersgd", "powersgd:0", "powersgd:257", "powersgd:04", "int4", "powersgd:x"]
)
def test_formats_that_there_are_not(name: str):
    with pytest.raises(
        InputError, match="sync_format: there is float32, bfloat16, fixed32, int8 and powersgd"
    ):
        Problem.model_validate({**dict(data_problem()), "sync_format": name})


def test_even_gives_all_devices_equal_shares_in_a_ring():
    planned = plan(data_problem(speeds=(1.0, 9.0, 1.0), microbatches=8, rate=100.0), "even")
    assert shares(planned) == {"n0": 3, "n1": 3, "n2": 2}
    assert len(planned.sync.groups[0].routes) == 3
    assert planned.certificate.status == "feasible"
    with pytest.raises(InfeasibleError, match="3 devices need 3 microbatches a step, it has 2"):
        plan(data_problem(speeds=(1.0, 1.0, 1.0), microbatches=2), "even")


@pytest.mark.parametrize(
    ("sync", "roots", "words"), [("star", 1, "a star"), ("server", 1, "a star"), ("trees", 3, "trees")]
)
def test_even_sums_over_the_routes_that_are_asked_for(sync: str, roots: int, words: str):
    problem = data_problem(speeds=(1.0, 9.0, 1.0), microbatches=8, rate=100.0, sync=sync)
    planned = plan(problem, "even")
    assert shares(planned) == {"n0": 3, "n1": 3, "n2": 2}
    assert len(planned.sync.groups[0].routes) == roots
    assert planned.certificate.method == f"equal shares, {words}"
    assert verify(problem, planned).ok


def test_alone_and_assigned():
    problem = data_problem(speeds=(1.0, 2.0), rate=100.0)
    assert shares(plan(problem, "alone")) == {"n1": 8}
    assert shares(plan(problem, assign=[("n1/cpu:0", 3), ("n0/cpu:0", 5)])) == {"n0": 5, "n1": 3}
    for wrong, match in (
        ([("n9/cpu:0", 8)], "names device 'n9/cpu:0'"),
        ([("n0/cpu:0", 8), ("n0/cpu:0", 1)], "more than once"),
        ([("n0/cpu:0", 0), ("n1/cpu:0", 8)], "0 microbatches"),
        ([("n0/cpu:0", 7)], "add up to 7 microbatches, the step has 8"),
        ([("n0/cpu:0", 0, 2)], "list of"),
    ):
        with pytest.raises(InputError, match=match):
            plan(problem, assign=wrong)


def test_fewer_microbatches_than_devices_leave_devices_out():
    planned = plan(data_problem(speeds=(1.0,) * 4, microbatches=2, rate=1e9))
    assert len(planned.pipelines) == 2
    assert {unused.reason for unused in planned.unused} == {
        "the step has only 2 microbatches, one for each of the others"
    }


def test_infeasible_says_who_lacks_how_much_and_that_a_pipeline_fits():
    problem = data_problem(memory=[500.0, 700.0])  # two layers of 400 bytes
    for strategy in ("optimal", "heuristic", "alone"):
        with pytest.raises(
            InfeasibleError, match=r"n1/cpu:0 needs 800 B and has 700 B \(100 B short\)"
        ) as caught:
            plan(problem, strategy)
        assert caught.value.hint == "a pipeline fits: --parallel pipeline"
    with pytest.raises(InfeasibleError, match="n0/cpu:0 needs") as caught:
        plan(problem, "even")
    assert "a pipeline fits" in caught.value.hint
    with pytest.raises(InfeasibleError) as caught:
        plan(data_problem(memory=[100.0, 100.0]))
    assert caught.value.hint is None
    with pytest.raises(InfeasibleError, match="both the first and the last layer"):
        plan(data_problem(first_stage=["n0/cpu:0"], last_stage=["n1/cpu:0"]))


def test_chunks_need_memory_and_who_can_not_hold_the_model_is_left_out():
    short = plan(data_problem(memory=[None, 700.0, None], speeds=(1.0, 9.0, 1.0), rate=1e9))
    assert shares(short) == {"n0": 4, "n2": 4}
    assert "n1/cpu:0 needs 800 B and has 700 B" in short.unused[0].reason
    tight = plan(data_problem(memory=[900.0, None], rate=1e9))
    (route,) = tight.sync.groups[0].routes
    assert route.root == "n1/cpu:0"  # 2 MiB are under way to it; the other has none
    assert [round(r.memory_bytes) for r in tight.predicted.replicas] == [800, 800 + (2 << 20)]


def test_schedules_and_objectives_of_pipelines_are_refused():
    for more in ({"schedule": "gpipe"}, {"objective": "bottleneck"}):
        with pytest.raises(InputError, match=r"--parallel data|holds all layers"):
            plan(data_problem(**more))
    with pytest.raises(InputError, match="nothing is cut"):
        plan(data_problem(), whole_blocks=True)


def test_plans_are_read_again():
    planned = plan(data_problem(rate=100.0))
    raw = json.loads(planned.to_json())
    assert raw["form"] == "pipelines"
    assert "stages" not in raw
    assert parse(Plan, planned.to_json(), "plan.json") == planned
    alone = plan(data_problem(rate=0.01))
    assert json.loads(alone.to_json())["form"] == "grid"
    assert parse(Plan, alone.to_json(), "plan.json") == alone


def test_predict_takes_other_numbers_and_refuses_other_forms():
    planned = plan(data_problem(rate=100.0))
    slower = planned.problem.model_copy(update={"links": data_problem(rate=10.0).links})
    assert predict(slower, planned).iteration_s == pytest.approx(4 * 6 + 18)
    with pytest.raises(InputError, match="pipelines"):
        predict(planned.problem.model_copy(update={"parallel": "pipeline"}), planned)
    pipeline = plan(data_problem(rate=100.0, parallel="pipeline"))
    with pytest.raises(InputError, match="2 stages"):
        predict(planned.problem, pipeline)
    with pytest.raises(InputError, match="take 8 microbatches, the problem has 9"):
        predict(planned.problem.model_copy(update={"microbatches": 9}), planned)


def changed(planned, *path, value):
    raw = json.loads(planned.to_json())
    at = raw
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return parse(Plan, json.dumps(raw), "plan.json")


def failing(planned):
    return {check.name for check in verify(planned.problem, planned).checks if not check.ok}


def places(node, at=()):
    """Every value of a JSON document, with the way to it."""
    yield at, node
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from places(value, (*at, key))


def others(value):
    """The values that somebody might put in a value's place."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value - 1, 0.999 * value, 1.001 * value, -1, 10**9]
    if isinstance(value, str):
        return ["", "n9/cpu:0", "n0/cpu:0", "n1/cpu:0", "n2/cpu:0"]
    return [value[:-1], [*value, *value[:1]]] if isinstance(value, list) else [{}]


FREE = {("certificate", "method"), ("certificate", "wall_s"), ("certificate", "witness")}
"""Words, how long planning took, and prices: others that prove the same bound are a proof as well."""


@pytest.mark.parametrize("speeds", [(2.0, 1.0, 1.0), (1.0, 1.0)])
def test_no_value_of_a_plan_can_be_changed_unseen(speeds):
    """Refused as no plan, or by ``verify``; a tree that takes as long as the plan's own may stand."""
    planned = plan(data_problem(speeds=speeds, rate=50.0, latency=0.25, microbatches=12))
    assert planned.sync is not None
    raw = json.loads(planned.to_json())
    values = {name: raw[name] for name in ("form", "pipelines", "sync", "predicted", "certificate")}
    tried = 0
    for path, value in places(values):
        for new in () if path[:2] in FREE or not path else others(value):
            tried += 1
            try:
                other = changed(planned, *path, value=new)
            except RecordError:
                continue
            same = other.model_copy(update={"sync": planned.sync}) == planned
            assert failing(other) or same, (path, value, new)
    assert tried > 100


def test_verify_rejects_what_was_changed():
    planned = plan(data_problem(speeds=(2.0, 1.0, 1.0), rate=50.0, microbatches=12))
    assert len(planned.pipelines) == 3
    assert failing(planned) == set()
    value = planned.certificate.value_s
    for path, new, names in (
        (("predicted", "iteration_s"), value * 0.999, {"prediction"}),
        (("predicted", "sync_s"), 0.0, {"prediction"}),
        (("predicted", "bottleneck_s"), 1.0, {"prediction"}),
        (("predicted", "replicas", 0, "memory_bytes"), 1.0, {"prediction"}),
        (("predicted", "replicas", 0, "compute_s"), 1.0, {"prediction"}),
        (("certificate", "value_s"), value * 0.99, {"value", "certificate"}),
        (("sync", "format"), "bfloat16", {"pipelines"}),
        (("sync", "chunk_bytes"), 1 << 22, {"prediction"}),
        (("problem", "links", 0, "bandwidth_bytes_per_s"), 5.0, {"value", "prediction"}),
        (("pipelines", 0, "stages", 0, "in_flight"), 2, {"in flight"}),
        (("pipelines", 0, "stages", 0, "recompute"), True, {"recompute", "value", "prediction"}),
        (("problem", "first_stage"), ["n0/cpu:0"], {"pins"}),
        (("unused",), [{"device": "n0/cpu:0", "reason": "-"}], {"unused"}),
    ):
        assert failing(changed(planned, *path, value=new)) >= names, path
    moved = json.loads(planned.to_json())["pipelines"]
    moved[0]["microbatches"] += 1
    moved[1]["microbatches"] -= 1
    assert "value" in failing(changed(planned, "pipelines", value=moved))
    routes = json.loads(planned.to_json())["sync"]["groups"]
    for route in routes[0]["routes"]:
        route["root"], route["up"], route["down"] = "n1/cpu:0", *star("n1/cpu:0", ["n0/cpu:0", "n2/cpu:0"])
    other = changed(planned, "sync", "groups", value=routes)
    assert failing(other) <= {"value", "prediction"}  # a tree, too, only its times may differ
    routes[0]["routes"][0]["up"] = [["n0/cpu:0", "n2/cpu:0"], ["n2/cpu:0", "n0/cpu:0"]]
    with pytest.raises(RecordError, match=r"no way leads|more than one parent"):
        changed(planned, "sync", "groups", value=routes)


def star(root, others):
    return [[x, root] for x in others], [[root, x] for x in others]


def test_verify_knows_a_bound_that_is_too_high():
    planned = plan(data_problem(speeds=(2.0, 1.0, 1.0), rate=50.0, microbatches=12), "even")
    best = plan(planned.problem.model_copy(update={"sync": "trees"})).certificate.value_s
    value = planned.certificate.value_s
    for bound, holds in ((best, True), (best * 1.001, False)):
        proof = planned.certificate.model_copy(
            update={"status": "bounded", "lower_bound_s": bound, "gap": value / bound - 1}
        )
        claiming = planned.model_copy(update={"certificate": proof})
        (check,) = (c for c in verify(planned.problem, claiming).checks if c.name == "bound")
        assert (check.ok, check.checked) == (holds, True)


def test_more_devices_than_all_sets_of_are_looked_at_get_a_bound_that_verifies():
    seeds = [random_data_problem(s) for s in range(40)]
    problem = next(
        p for p in seeds if len(p.devices) == 5 and p.links and p.first_stage is p.last_stage is None
    )
    devices = [
        d.model_copy(update={"id": f"{i}-{d.id}", "memory_bytes": None})
        for i in range(3) for d in problem.devices
    ]  # fmt: skip
    big = problem.model_copy(update={"devices": tuple(devices), "times": {}, "links": (), "shared": (),
                                     "microbatches": 40})  # fmt: skip
    linked = data_problem(speeds=(1.0,) * 15, rate=3.0, gradient=1.0).links
    names = {f"n{i}/cpu:0": d.id for i, d in enumerate(devices)}
    links = tuple(
        x.model_copy(update={"source": names[x.source], "target": names[x.target],
                             "bandwidth_bytes_per_s": 1.0 + (i * 7919 % 13)})
        for i, x in enumerate(linked)
    )  # fmt: skip
    big = big.model_copy(update={"links": links})
    planned = plan(big)
    assert planned.certificate.status in ("bounded", "optimal")
    assert planned.certificate.gap < 0.5
    verdict = verify(big, planned)
    assert verdict.ok
    assert all(check.checked for check in verdict.checks)


def test_numbers_that_can_not_be_computed_with_are_refused():
    for more in ({"gradient": 1e299}, {"gradient": 1e200, "rate": 1e-150}):
        with pytest.raises(InputError, match=r"too much to compute with|too large|add up to more"):
            data_problem(**more)
    big = data_problem(gradient=1e140, rate=1e-140, latency=1e100)
    assert verify(big, plan(big)).ok

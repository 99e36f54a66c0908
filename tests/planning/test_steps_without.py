"""The time of a step while nodes are away: played again from the ranks' own rules, and by brute force."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

import pytest
from tests.planner.data_problems import all_shares, data_problem, delayed, random_data_problem
from tests.planner.hybrid_plans import hybrid_plan
from tests.planner.hybrid_problems import random_hybrid_problem

from skyctl.cli.command_output import Output
from skyctl.cli.run_options import LaunchOptions
from skyctl.cli.show_pipelines import describe_steps_without
from skyctl.errors import SkyctlError
from skyctl.planner.api import assigned
from skyctl.planner.api import plan as plan_problem
from skyctl.planner.verification.reading import ReadPlan, Row, read_plan
from skyctl.planner.verification.routes import CheckedRoute
from skyctl.planner.verification.step import CheckedStep
from skyctl.planning.steps_without import RemainingSteps, StepWithout, steps_without
from skyctl.records.plan import Plan
from skyctl.records.problem import Problem
from skyctl.worker.elastic.microbatch_shares import even_shares
from skyctl.worker.elastic.route_trees import routes_among
from skyctl.worker.rank_order import RouteTree

N0, N1, N2 = "n0/cpu:0", "n1/cpu:0", "n2/cpu:0"


def shared_out(**more: Any) -> Plan:
    """Three devices, n0 twice as fast: four, two and two microbatches of 6 s, or 3 s on n0."""
    problem = data_problem(speeds=(2.0, 1.0, 1.0), **{"rate": 1e4, "microbatches": 8, **more})
    return plan_problem(problem, "optimal")


def played_again(plan: Plan, away: Collection[str]) -> float | None:
    """A step of what ``verify`` reads of the plan, dealt and routed as ranks do that are left."""
    problem = plan.problem
    step, read = CheckedStep(problem), read_plan(problem, plan)
    gone = {d for d, device in enumerate(problem.devices) if device.id in away}
    left = {n: row for n, row in enumerate(read.rows) if gone.isdisjoint(held.device for held in row)}
    if not left:
        return None
    paces = {n: max(_pace_s(step, row, place) for place in range(len(row))) for n, row in left.items()}
    rows = []
    for n, (first, stop) in even_shares(problem.microbatches, paces).items():
        count = stop - first
        rows.append(
            tuple(held._replace(microbatches=count, in_flight=min(held.in_flight, count)) for held in left[n])
        )
    if len(rows) == 1:
        return step.play(ReadPlan((rows[0],))).iteration_s
    holding = {held.device for row in rows for held in row}
    index = {device.id: d for d, device in enumerate(problem.devices)}
    helping = {index[name] for name in plan.helpers} - gone
    groups = []
    for group in read.groups:
        trees = [_by(index, RouteTree, tree) for tree in group.trees]
        left_trees = routes_among(trees, holding | helping)
        spliced = tuple(_by(step.ids, CheckedRoute, tree) for tree in left_trees)
        devices = tuple(name for name in group.devices if index[name] in holding)
        groups.append(group._replace(trees=spliced, devices=devices))
    return step.play(ReadPlan(tuple(rows), tuple(groups), read.chunk_bytes)).iteration_s


def _by(names: Any, cls: Any, tree: Any) -> Any:
    """The tree with each device under another name."""
    up, down = (tuple((names[a], names[b]) for a, b in edges) for edges in (tree.up, tree.down))
    return cls(tree.share, names[tree.root], up, down)


def _pace_s(step: CheckedStep, row: Row, place: int) -> float:
    times = step.stage_times(row[place])
    return times.forward_s + times.backward_s


def helped_data_problem(seed: int) -> Problem:
    """Sums over trees, for which the last device may be a helper."""
    problem = random_data_problem(seed)
    more = {"sync": "trees", "helpers": (problem.devices[-1].id,)}
    return Problem.model_validate({**dict(problem), **more})


@pytest.mark.parametrize("make", [random_data_problem, helped_data_problem, random_hybrid_problem])
def test_a_step_without_devices_is_what_verify_plays_of_it(make: Any) -> None:
    looked_at = 0
    for seed in range(50):
        try:
            plan = plan_problem(make(seed), "heuristic")
        except SkyctlError:
            continue
        if len(plan.pipelines) < 2:
            continue
        steps = RemainingSteps(plan)
        assert steps.step_s() == pytest.approx(plan.predicted.iteration_s)
        devices = [*(stage.device for stage in plan.placed_stages), *plan.helpers]
        draw = random.Random(seed)
        away = draw.sample(devices, draw.randint(1, len(devices) - 1))
        for these in ({away[0]}, set(away)):
            expected = played_again(plan, these)
            assert steps.step_s(these) == (None if expected is None else pytest.approx(expected)), seed
            looked_at += expected is not None
    assert looked_at > 10


def test_no_other_shares_of_those_that_are_left_end_earlier() -> None:
    """Without links a step is its computing: 6 s of a microbatch at speed 1."""
    draw = random.Random(0)
    for _ in range(20):
        speeds = [draw.uniform(0.5, 3.0) for _ in range(draw.randint(2, 4))]
        microbatches = draw.randint(len(speeds), 9)
        shares = [(f"n{n}/cpu:0", 1) for n in range(1, len(speeds))]
        shares.insert(0, (N0, microbatches - len(shares)))
        plan = assigned(data_problem(speeds=speeds, microbatches=microbatches), shares)
        for gone in range(len(speeds)):
            left = [speed for n, speed in enumerate(speeds) if n != gone]
            least_s = min(
                max(6 * count / speed for count, speed in zip(counts, left, strict=True))
                for counts in all_shares(microbatches, len(left))
            )
            assert RemainingSteps(plan).step_s({f"n{gone}/cpu:0"}) == pytest.approx(least_s)


def test_whoever_leaves_late_makes_others_do_its_part_again() -> None:
    """Sums of 200 bytes over a star at n0 take 20 ms, 10 ms of them after the last backward."""
    plan = shared_out()
    assert plan.predicted.iteration_s == pytest.approx(12.01)
    figures = [
        (found.node, found.step_s, found.factor, found.leaving_step_s) for found in steps_without(plan)
    ]
    assert figures == [
        ("n0", *(pytest.approx(x) for x in (24.01, 24.01 / 12.01, 12.01 + 12 + 0.02))),
        ("n1", *(pytest.approx(x) for x in (18.01, 18.01 / 12.01, 12.01 + 6 + 0.02))),
        ("n2", *(pytest.approx(x) for x in (18.01, 18.01 / 12.01, 12.01 + 6 + 0.02))),
    ]


def test_a_run_is_its_steps_with_those_that_are_there() -> None:
    steps = RemainingSteps(shared_out())
    whole_s, without_s = steps.step_s(), steps.step_s({N1})
    assert whole_s is not None
    assert without_s is not None
    left_s, next_s = steps.leaving_step_s({N1}), steps.leaving_step_s({N2}, {N1})
    assert left_s is not None
    assert next_s is not None
    assert next_s > left_s
    gone = {N1}
    assert steps.run_s([(), gone, gone, ()]) == pytest.approx(whole_s + left_s + without_s + whole_s)
    assert steps.run_s([gone, {N1, N2}, {N2}]) == pytest.approx(left_s + next_s + without_s)
    assert steps.run_s([gone, {N0, N1, N2}]) is None


def test_a_pipeline_leaves_with_any_of_its_devices() -> None:
    plan = hybrid_plan()
    steps = RemainingSteps(plan)
    assert steps.step_s({N0}) == steps.step_s({N1}) == steps.step_s({N0, N1})
    assert steps.step_s({N2, N1}) is None
    assert [step.step_s is None for step in steps_without(plan)] == [False, False, False]


def test_a_node_of_all_pipelines_leaves_nothing() -> None:
    plan = hybrid_plan()
    text = plan.to_json().replace('"n2/cpu:0"', '"n0/cpu:1"')
    both, other = steps_without(Plan.model_validate_json(text))
    assert (both.node, both.step_s, both.factor, both.leaving_step_s) == ("n0", None, None, None)
    assert other.step_s is not None
    said = describe_steps_without([both, other])
    assert said.endswith("; no pipeline is left without n0")
    assert " without n1; " in said
    assert describe_steps_without([both]) == (
        "if a node leaves and the others go on: no pipeline is left without n0"
    )


def test_devices_that_the_plan_does_not_use_may_be_away() -> None:
    plan = assigned(data_problem(speeds=(2.0, 1.0, 1.0), rate=1e4), [(N0, 1), (N1, 7)])
    steps = RemainingSteps(plan)
    assert steps.step_s({N2}) == steps.step_s() == pytest.approx(plan.predicted.iteration_s)


def test_of_other_rhythms_nothing_is_said() -> None:
    problem = delayed(data_problem(speeds=(1.0, 1.0), rate=1e4))
    assert steps_without(plan_problem(problem, "heuristic")) == ()
    alone = data_problem(speeds=(1.0, 1.0), rate=1e4, parallel="pipeline")
    assert steps_without(plan_problem(alone, "heuristic")) == ()


def test_a_launch_whose_steps_survive_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    plan = shared_out()
    LaunchOptions(elastic=True).check_elastic(Output(), plan)
    assert describe_steps_without(steps_without(plan)) in capsys.readouterr().err
    LaunchOptions().check_elastic(Output(), plan)
    assert capsys.readouterr().err == ""


def test_of_many_nodes_the_longest_steps_are_said() -> None:
    same = [StepWithout(f"a{n}", 2.0, 1.25, 3.0) for n in range(6)]
    steps = [*same, *(StepWithout(f"b{n}", 10.0 + n, 5.0, 20.0 + n) for n in range(7))]
    said = describe_steps_without(steps)
    assert said.startswith("if a node leaves and the others go on: a step takes 16.0 s (5.00×) without b6, ")
    assert said.endswith("less without others; the step in which it leaves takes up to 26.0 s")
    assert "a0" not in said
    assert "2.00 s (1.25×) without a0, a1, a2, a3 or 2 more" in describe_steps_without(same)


def test_a_device_that_is_back_exchanges_with_the_roots() -> None:
    """Over a star that is as planned; a new one of the same figures takes the place of one that is away."""
    star = plan_problem(
        data_problem(speeds=(2.0, 1.0, 1.0), microbatches=8, rate=1e4, sync="star"), "optimal"
    )
    assert star.sync is not None
    (route,) = star.sync.groups[0].routes
    others = {N0, N1, N2} - {route.root}
    for device in sorted(others):
        back = RemainingSteps(star).step_s({device}, [device])
        assert back == pytest.approx(star.predicted.iteration_s)
    steps = RemainingSteps(star)
    assert steps.microbatch_s(N1) == pytest.approx(2 * steps.microbatch_s(N0))


def test_with_one_device_more_shares_are_smaller_and_sums_longer() -> None:
    four = data_problem(speeds=(2.0, 1.0, 1.0, 1.0), microbatches=20, rate=1e4)
    plan = shared_out(microbatches=20)
    steps = RemainingSteps(plan, four)
    now_s, then_s = steps.step_s(), steps.step_s((), ["n3/cpu:0"])
    assert now_s is not None
    assert then_s is not None
    assert then_s < now_s
    slow = RemainingSteps(plan, data_problem(speeds=(2.0, 1.0, 1.0, 0.01), microbatches=20, rate=1e4))
    slower_s = slow.step_s((), ["n3/cpu:0"])
    assert slower_s is not None
    assert slower_s > now_s, "each has one microbatch at least"

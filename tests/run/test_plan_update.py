"""Another plan for a run under way: devices left out and put in, as seen, and whether to move."""

from __future__ import annotations

import itertools
import json

import pytest
from tests.learning.profiles import device as measured_device
from tests.learning.profiles import profile as measured_profile

from skyctl.checkpoint.launcher import policy
from skyctl.errors import InfeasibleError
from skyctl.files import save_profile
from skyctl.learning.problem_from_profile import build_problem
from skyctl.planner.api import plan, verify
from skyctl.planner.plan_record import pipeline_simulations
from skyctl.planning.backend_choice import check_backend_of_plan
from skyctl.records.backend import BackendChoice, BackendReason
from skyctl.records.cluster import Cluster, Node, node_of
from skyctl.records.plan import Plan, WorkloadRef
from skyctl.records.plan_nodes import nodes_in, writers_in
from skyctl.records.problem import Device, Layer, LayerTimes, Link, Problem, SharedResource
from skyctl.records.rhythm import Rhythm
from skyctl.run.change_notes import backend_note
from skyctl.run.joined_node import _from_profile, with_node
from skyctl.run.plan_update import (
    observed_slowdowns,
    plan_step_s,
    replan,
    replan_without,
    same_stages,
    slow_devices,
    with_link_down,
    with_observed_times,
    without_nodes,
    worth_moving,
)
from skyctl.worker.rank_events import StepEvent

from ..helpers.events import step_event
from ..helpers.hybrid_plans import hybrid_plan

NODES = ("a", "b", "c")


def problem(*names: str, memory_bytes: float | None = None, layers: int = 6, **more: object) -> Problem:
    ids = [f"{name}/cpu:0" for name in names]
    cost = (0.01,) * layers
    return Problem(
        layers=tuple(
            Layer(name=f"l{i}", flops=1e9, state_bytes=1e6, activation_bytes=1e3, output_bytes=1e3)
            for i in range(layers)
        ),
        devices=tuple(Device(id=i, flops_per_s=1e9, memory_bytes=memory_bytes) for i in ids),
        times={i: LayerTimes(forward_s=cost, backward_s=cost, optimizer_s=(0.0,) * layers) for i in ids},
        links=tuple(
            Link(source=s, target=t, latency_s=1e-4, bandwidth_bytes_per_s=1e7)
            for s, t in itertools.permutations(ids, 2)
        ),
        microbatches=4,
        **more,  # type: ignore[arg-type]
    )


def test_a_lost_node_is_left_out_of_everything() -> None:
    shared = SharedResource(
        name="line a",
        bandwidth_bytes_per_s=1e6,
        links=(("a/cpu:0", "b/cpu:0"), ("a/cpu:0", "c/cpu:0")),
    )
    alone = SharedResource(name="b", bandwidth_bytes_per_s=1e6, links=(("b/cpu:0", "a/cpu:0"),))
    whole = problem(*NODES, shared=(shared, alone), first_stage=("a/cpu:0", "b/cpu:0"))
    left = without_nodes(whole, {"b": "gone"})
    assert [device.id for device in left.devices] == ["a/cpu:0", "c/cpu:0"]
    assert set(left.times) == {"a/cpu:0", "c/cpu:0"}
    assert {(link.source, link.target) for link in left.links} == {
        ("a/cpu:0", "c/cpu:0"),
        ("c/cpu:0", "a/cpu:0"),
    }
    assert [one.links for one in left.shared] == [(("a/cpu:0", "c/cpu:0"),)]
    assert left.first_stage == ("a/cpu:0",)
    Problem.model_validate(left.model_dump())


def test_a_pin_without_a_device_and_nothing_left_are_infeasible() -> None:
    pinned = problem(*NODES, last_stage=("b/cpu:0",))
    with pytest.raises(InfeasibleError, match=r"only b/cpu:0 may hold the last stage \(--pin-last\)"):
        without_nodes(pinned, {"b": "it went black"})
    with pytest.raises(InfeasibleError, match="no device is left"):
        without_nodes(problem("a"), {"a": "it went black"})


def test_the_rest_is_planned_by_the_same_strategy() -> None:
    whole = problem(*NODES)
    had = plan(whole, "optimal")
    assert set(nodes_in(had)) == set(NODES)
    made = replan(had, without_nodes(whole, {"b": ""}))
    assert set(nodes_in(made)) == {"a", "c"}
    assert made.strategy == "optimal"
    assert replan(plan(whole, "even"), without_nodes(whole, {"c": ""})).strategy == "even"


@pytest.mark.parametrize("sync", ["auto", "server", "trees"])
def test_what_is_left_to_one_device_can_be_verified(sync: str) -> None:
    whole = problem("a", "b", parallel="data", sync=sync)
    made = replan(plan(whole), without_nodes(whole, {"b": ""}))
    assert nodes_in(made) == ("a",)
    assert verify(made.problem, made).ok


def test_a_helper_that_is_left_alone_holds_nothing() -> None:
    whole = problem("a", "b", parallel="data", helpers=("b/cpu:0",))
    with pytest.raises(InfeasibleError, match="every device is to help"):
        replan(plan(whole), without_nodes(whole, {"a": ""}))


def test_a_holder_beside_the_first_writes_no_checkpoints() -> None:
    made = plan(problem("a", "b", parallel="data"))
    assert len(nodes_in(made)) == 2
    assert writers_in(made) == nodes_in(made)[:1]
    cut = plan(problem("a", "b"), "even")
    assert writers_in(cut) == nodes_in(cut) == ("a", "b")


def test_a_dead_link_is_planned_around_for_good() -> None:
    """Two nodes that can't connect stay holders, whose gradients go another way; after a loss, too."""
    base = problem(*"abcd", parallel="data", objective="iteration")
    base = base.model_copy(update={"microbatches": 64})
    had = plan(base)
    there = set("abcd")
    assert replan_without(had, there, {}, {}, None) is had
    for lost in ("", "d"):
        made = replan_without(had, there - {lost}, {lost: "gone"} if lost else {}, {}, None, ("c", "a"))
        assert {node_of(stage.device) for stage in made.placed_stages} == there - {lost}
        assert made.sync is not None
        for route in made.sync.groups[0].routes:
            assert all({"a/cpu:0", "c/cpu:0"} != set(edge) for edge in (*route.up, *route.down))
    down = with_link_down(base, ("a", "c"))
    assert set(with_link_down(down, ("c", "a")).links) == set(down.links)


def test_of_pipelines_with_cuts_of_their_own_each_stage_is_seen_and_one_pipeline_is_left() -> None:
    base = json.loads(plan(problem(*"abc", objective="iteration"), "heuristic", 1.0).to_json())
    rows = [([("a/cpu:0", 0, 2), ("b/cpu:0", 2, 6)], 1), ([("c/cpu:0", 0, 6)], 3)]
    had = Plan.model_validate(hybrid_plan(base, rows))
    took_s = {"a": 0.04, "b": 0.16, "c": 0.36}  # planned: two, four and three times six layers, of 0.02 s
    events = [
        [
            step_event(step, forward_s=seconds / 2, backward_s=seconds / 2, optimizer_s=0.0)
            for step in range(5)
        ]
        for seconds in took_s.values()
    ]
    assert observed_slowdowns(had, events) == pytest.approx({"a/cpu:0": 1.0, "b/cpu:0": 2.0, "c/cpu:0": 1.0})
    assert replan_without(had, set("abc"), {}, {}, None) is had
    made = replan_without(had, {"b"}, {"a": "gone", "c": "gone"}, {}, None)
    assert [stage.device for stage in made.placed_stages] == ["b/cpu:0"]


def test_a_run_with_a_delay_says_nothing_of_how_fast_devices_are() -> None:
    """Its layers' times hold what the sums took beside them; those of rounds are of as much as was made."""
    events = [[step_event(step, forward_s=9.0, backward_s=9.0) for step in range(8)]] * 2
    for rhythm in (Rhythm(), Rhythm(delay=1), Rhythm(local_steps=2)):
        had = plan(problem("a", "b", parallel="data", rhythm=rhythm))
        assert len(had.pipelines) == 2
        assert bool(observed_slowdowns(had, events)) == rhythm.is_synchronous


def with_gpu(whole: Problem) -> Problem:
    """The problem with a device of another kind, four times as fast."""
    gpu = Device(id="gpu/cuda:0", flops_per_s=4e9, memory_bytes=None)
    cost = (0.0025,) * len(whole.layers)
    times = LayerTimes(forward_s=cost, backward_s=cost, optimizer_s=(0.0,) * len(whole.layers))
    links = (
        Link(source=s, target=t, latency_s=1e-4, bandwidth_bytes_per_s=1e7)
        for one in whole.devices
        for s, t in ((one.id, gpu.id), (gpu.id, one.id))
    )
    update = {
        "devices": (*whole.devices, gpu),
        "times": {**whole.times, gpu.id: times},
        "links": (*whole.links, *links),
    }
    return whole.model_copy(update=update)


@pytest.mark.parametrize(
    ("reason", "backend", "left_out"), [("near", "skyctl", False), ("asked", "gloo", True)]
)
def test_a_device_that_gloo_does_not_carry_ends_no_run(
    reason: BackendReason, backend: str, left_out: bool
) -> None:
    """A backend that was chosen gives way to ours; one that was asked for leaves such devices out."""
    whole = problem("a", "b")
    chosen = BackendChoice(backend="gloo", reason=reason, costs="gloo")
    had = plan(whole).model_copy(update={"backend": chosen})
    made = replan(had, with_gpu(whole))
    assert ("gpu/cuda:0" in {stage.device for stage in made.placed_stages}) is not left_out
    assert made.backend is not None
    assert made.backend.backend == backend
    check_backend_of_plan(made, encrypt=False)
    assert (backend_note(had, made) is None) is left_out


def test_an_asked_backend_that_carries_nothing_that_is_left_says_so() -> None:
    both = with_gpu(problem("a"))
    had = plan(problem("a", "b")).model_copy(
        update={"backend": BackendChoice(backend="gloo", reason="asked")}
    )
    with pytest.raises(InfeasibleError, match="--backend gloo carries the tensors of no device that is left"):
        replan(had, without_nodes(both, {"a": "it went black"}))


def test_what_does_not_fit_any_more_says_what_is_short() -> None:
    whole = problem(*NODES, memory_bytes=3e6)
    with pytest.raises(InfeasibleError):
        replan(plan(whole, "optimal"), without_nodes(whole, {"a": "", "b": ""}))


def test_a_node_comes_with_links_as_the_slowest_known() -> None:
    small = problem("a", "b")
    other = problem("d")
    made = with_node(small, other, "d")
    Problem.model_validate(made.model_dump())
    new = {(x.source, x.target): x for x in made.links if "d/cpu:0" in (x.source, x.target)}
    assert set(new) == {(f"{n}/cpu:0", "d/cpu:0") for n in "ab"} | {("d/cpu:0", f"{n}/cpu:0") for n in "ab"}
    assert {x.bandwidth_bytes_per_s for x in new.values()} == {1e7}
    back = with_node(without_nodes(problem(*NODES), {"b": ""}), problem(*NODES), "b")
    assert {device.id for device in back.devices} == {f"{name}/cpu:0" for name in NODES}
    assert len(back.links) == 6
    Problem.model_validate(back.model_dump())


def test_a_node_comes_with_the_lines_it_shares() -> None:
    line = SharedResource(
        name="uplink", bandwidth_bytes_per_s=1e6, links=(("a/cpu:0", "b/cpu:0"), ("a/cpu:0", "c/cpu:0"))
    )
    whole = problem(*NODES).model_copy(update={"shared": (line,)})
    less = without_nodes(whole, {"c": ""})
    assert less.shared[0].links == line.links[:1]
    back = with_node(less, whole, "c")
    assert back.shared == (line,)
    alone = with_node(without_nodes(whole, {"b": "", "c": ""}), whole, "c")
    assert alone.shared[0].links == line.links[1:]
    Problem.model_validate(back.model_dump())


def test_a_node_that_joins_is_known_by_the_clusters_profile() -> None:
    """It need not be measured then, whatever the run's parallelism."""
    profile = measured_profile(*(measured_device(name, 1.0) for name in ("a", "c")))
    save_profile(profile.model_copy(update={"cluster": "here"}))
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    one = build_problem(profile, 4, only_nodes=["a"])
    cluster = Cluster(name="here", nodes=(Node(name="c", transport="local"),))
    now = plan(one).model_copy(update={"workload": ref})
    for parallel in ("pipeline", "data"):
        found = _from_profile("c", now, one.model_copy(update={"parallel": parallel}), cluster)
        assert found is not None
        assert {device.id for device in found.devices} == {"a/cpu:0", "c/cpu:0"}


def test_what_was_seen_is_a_factor_a_device() -> None:
    given = problem(*NODES)
    devices = [d.model_copy(update={"action_s": 0.01}) for d in given.devices]
    had = plan(given.model_copy(update={"devices": tuple(devices)}), "optimal")
    (play,) = pipeline_simulations(had)

    def events(rank: int, factor: float, steps: int = 8) -> list[StepEvent]:
        times = play.layer_times(rank)
        planned_s = play.microbatches * (times.forward_s + times.backward_s)
        return [step_event(0, forward_s=factor * planned_s)] * steps

    seen = observed_slowdowns(had, [events(0, 1.0), events(1, 2.0), events(2, 1.5, steps=2)])
    first, second = (stage.replicas[0].device for stage in had.stages[:2])
    assert seen == pytest.approx({first: 1.0, second: 2.0})
    assert slow_devices(seen) == [second]
    slower = with_observed_times(had.problem, seen)
    assert {d.id: d.action_s for d in slower.devices if d.id in seen} == {first: 0.01, second: 0.02}
    assert plan_step_s(slower, had) > 1.4 * plan_step_s(had.problem, had)
    better = replan(had, slower)
    assert not same_stages(better, had)
    assert better.predicted.iteration_s < plan_step_s(slower, had)


@pytest.mark.parametrize(
    ("now_s", "then_s", "left", "cost_s", "worth"),
    [
        (2.0, 1.0, 100, 30.0, True),
        (2.0, 1.0, 40, 30.0, False),
        (1.0, 0.98, 10_000, 30.0, False),
        (1.0, 2.0, 10_000, 30.0, False),
        (0.02, 0.01, 1000, 2.0, True),
    ],
)
def test_moving_must_be_worth_it(now_s: float, then_s: float, left: int, cost_s: float, worth: bool) -> None:
    assert worth_moving(now_s, then_s, left, cost_s) is worth


def test_checkpoints_cost_little_and_come_every_five_minutes_at_least() -> None:
    quick = plan(problem(*NODES), "optimal")
    step = quick.predicted.iteration_s
    share = max(s.stop - s.start for s in quick.stages) * (1e6 / 150e6 + 0.01)
    every = policy.checkpoint_interval(quick, replicas=0)
    assert share / (every * step) < 0.025
    assert policy.checkpoint_interval(quick, replicas=2) >= every
    heavy = problem(*NODES).model_copy(
        update={
            "layers": tuple(
                layer.model_copy(update={"state_bytes": 1e12}) for layer in problem(*NODES).layers
            )
        }
    )
    assert policy.checkpoint_interval(plan(heavy, "heuristic"), 2) == int(
        300 / plan(heavy, "heuristic").predicted.iteration_s
    )

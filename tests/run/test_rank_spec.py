"""The orders of each rank, and plans that do not match the cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.helpers.hybrid_plans import hybrid_plan
from tests.plan_changes import with_stage

from skyctl.checkpoint.node.recovery import RestorePoint, ShardSource
from skyctl.errors import InfeasibleError, InputError, MismatchError
from skyctl.records.cluster import Cluster, Node
from skyctl.records.pipeline import Pipeline, PlacedStage
from skyctl.records.plan import Certificate, Machine, Plan, Prediction, ReplicaPrediction, WorkloadRef
from skyctl.records.problem import Device, Layer, Link, Problem, Tie
from skyctl.records.rhythm import Rhythm
from skyctl.records.sync import Route, Sync, SyncGroup
from skyctl.run.elastic_spec import elastic_order
from skyctl.run.rank_spec import (
    AttemptCheckpoints,
    RankSpec,
    check_plan_fits,
    holding_specs,
    last_ranks,
    peer_pairs,
    rank_specs,
    used_nodes,
)
from skyctl.run.round_spec import check_rounds
from skyctl.worker.rank_order import (
    CheckpointOptions,
    HelperOrder,
    LinkDtypes,
    RankOrder,
    ResumePoint,
    RoutePlace,
    RouteTree,
    SumOrder,
)
from skyctl.workload.recipe import Recipe
from skyctl.workload.workload_spec import WorkloadSpec


def make_plan(*devices: str) -> Plan:
    layers = tuple(
        Layer(name=f"l{i}", flops=1.0, state_bytes=1.0, activation_bytes=1.0, output_bytes=1.0)
        for i in range(len(devices))
    )
    problem = Problem(
        layers=layers,
        devices=tuple(Device(id=d, flops_per_s=1.0, memory_bytes=None) for d in devices),
        microbatches=4,
    )
    stages = tuple(
        PlacedStage(start=i, stop=i + 1, device=d, in_flight=len(devices) - i) for i, d in enumerate(devices)
    )
    return Plan(
        strategy="even",
        problem=problem,
        pipelines=(Pipeline(stages=stages, microbatches=4),),
        predicted=Prediction(
            iteration_s=1.0,
            bottleneck_s=1.0,
            replicas=tuple(
                ReplicaPrediction(device=d, compute_s=1.0, idle_s=0.0, memory_bytes=1.0) for d in devices
            ),
            sync_s=0.0,
            stale=None,
        ),
        certificate=Certificate(
            status="feasible", value_s=1.0, lower_bound_s=None, gap=None, method="even", wall_s=0.0
        ),
    )


TOLD = dict.fromkeys(("a", "b", "idle", "d"), WorkloadSpec("train.py"))
CLUSTER = Cluster(
    name="c",
    nodes=(
        Node(name="a", host="192.0.2.1", threads=2),
        Node(name="b", transport="local", slowdown=3.0),
        Node(name="idle", host="192.0.2.3"),
    ),
)


def test_ranks_know_their_neighbours_and_their_own_paths() -> None:
    told = {name: WorkloadSpec("train.py", path=f"/{name}/train.py") for name in ("a", "b")}
    specs = rank_specs(
        make_plan("b/cpu:0", "a/cpu:0"),
        CLUSTER,
        run_id="r",
        steps=7,
        workload=told,
        addresses={"a": "192.0.2.1", "b": "192.0.2.9"},
    )
    assert [(s.rank, s.node, s.device) for s in specs] == [(0, "b", "b/cpu:0"), (1, "a", "a/cpu:0")]
    first, last = held(specs)
    assert (first.world.before, first.world.after, first.world.hosts) == (None, 1, {1: "192.0.2.1"})
    assert (last.world.before, last.world.after, last.world.hosts) == (0, None, {0: "192.0.2.9"})
    assert first.workload.path == "/b/train.py"
    assert (first.slowdown, last.threads) == (3.0, 2)
    assert first.layers == (0, 1)
    assert (first.recompute, first.weights_behind) == (False, 0)
    assert (first.checkpoint, first.resume, first.first_step) == (None, None, 0)


def test_ranks_know_what_they_go_on_from_and_where_they_keep_their_own() -> None:
    shards = {layer: ShardSource(f"{layer}" * 64, 1, ("a",)) for layer in range(2)}
    checkpoints = AttemptCheckpoints(
        attempt=3, folders={"a": "/a/r", "b": "/b/r"}, origin=RestorePoint(5, 2, shards), every=4, keep=9
    )
    specs = rank_specs(
        make_plan("b/cpu:0", "a/cpu:0"),
        CLUSTER,
        run_id="r",
        steps=7,
        workload=TOLD,
        addresses={"a": "192.0.2.1", "b": "192.0.2.9"},
        checkpoints=checkpoints,
    )
    first, last = held(specs)
    assert first.checkpoint == CheckpointOptions(Path("/b/r"), every=4, keep=9, at_end=True, attempt=3)
    assert (first.resume, first.first_step) == (ResumePoint(5, Path("/b/r"), {0: "0" * 64}), 5)
    assert last.resume == ResumePoint(5, Path("/a/r"), {1: "1" * 64})


def test_a_launch_uses_the_threads_that_were_measured() -> None:
    plan = make_plan("b/cpu:0", "a/cpu:0")
    machines = [
        Machine(device=device, name="x", cpu_model="x", cpus=8.0, threads=4, python="3.11.0", torch="2.6.0")
        for device in ("a/cpu:0", "b/cpu:0")
    ]
    specs = rank_specs(
        plan.model_copy(update={"machines": tuple(machines)}),
        CLUSTER,
        run_id="r",
        steps=2,
        workload=TOLD,
        addresses={"a": "192.0.2.1", "b": "192.0.2.9"},
    )
    assert [order.threads for order in held(specs)] == [4, 2], "what cluster.yaml says goes first"


def test_both_ends_of_a_link_are_told_the_same_dtype() -> None:
    plan = make_plan("b/cpu:0", "a/cpu:0", "idle/cpu:0")
    links = tuple(
        Link(source=s, target=t, latency_s=0.0, bandwidth_bytes_per_s=1.0, dtype=dtype, sent_share=0.5)
        for s, t, dtype in (
            ("b/cpu:0", "a/cpu:0", "int8"),
            ("a/cpu:0", "b/cpu:0", "bfloat16"),
            ("idle/cpu:0", "a/cpu:0", "int8"),
            ("b/cpu:0", "idle/cpu:0", "bfloat16"),  # no neighbours
        )
    )
    specs = rank_specs(
        plan.model_copy(update={"problem": plan.problem.model_copy(update={"links": links})}),
        CLUSTER,
        run_id="r",
        steps=1,
        workload=TOLD,
        addresses={"a": "192.0.2.1", "b": "192.0.2.9", "idle": "192.0.2.3"},
    )
    first, middle, last = (order.link_dtypes for order in held(specs))
    assert first == LinkDtypes(to_next="int8", from_next="bfloat16")
    assert middle == LinkDtypes(from_next="int8", to_previous="bfloat16", from_previous="int8")
    assert last == LinkDtypes(to_previous="int8")


def test_a_plan_whose_numbers_in_flight_are_not_the_schedules_is_refused() -> None:
    plan = make_plan("b/cpu:0", "a/cpu:0")
    with pytest.raises(InputError, match="stage 0 keeps 4 in flight, 1f1b keeps 2"):
        check_plan_fits(with_stage(plan, 0, in_flight=4), CLUSTER)


def test_weight_gradients_behind_a_schedule_that_has_none_are_refused() -> None:
    plan = make_plan("b/cpu:0", "a/cpu:0")
    changed = with_stage(plan, 0, weights_behind=1)
    with pytest.raises(InputError, match="stage 0 has its weight gradients 1 microbatches behind"):
        check_plan_fits(changed, CLUSTER)
    problem = plan.problem.model_copy(update={"schedule": "zero-bubble"})
    check_plan_fits(changed.model_copy(update={"problem": problem}), CLUSTER)


def test_only_nodes_that_hold_a_stage_are_used() -> None:
    assert [n.name for n in used_nodes(make_plan("b/cpu:0", "a/cpu:0"), CLUSTER)] == ["a", "b"]


def test_a_plan_for_another_cluster_is_refused_by_name() -> None:
    with pytest.raises(MismatchError, match=r"'elsewhere/cpu:0'.*it has a, b, idle") as caught:
        check_plan_fits(make_plan("elsewhere/cpu:0"), CLUSTER)
    assert caught.value.exit_code == 5


def test_a_device_the_inventory_does_not_list_is_refused() -> None:
    cluster = Cluster(name="c", nodes=(Node(name="a", host="h", devices=("cuda:0",)),))
    with pytest.raises(MismatchError, match="lists cuda:0"):
        check_plan_fits(make_plan("a/cuda:1"), cluster)
    check_plan_fits(make_plan("a/cuda:0"), cluster)


def held(specs: Sequence[RankSpec]) -> list[RankOrder]:
    """The orders, all of ranks that hold layers."""
    return [spec.order for spec in specs if isinstance(spec.order, RankOrder)]


def sums(spec: RankSpec) -> SumOrder:
    assert spec.order.sync is not None
    return spec.order.sync


def clocks(specs: Sequence[RankSpec]) -> list[tuple[int | None, tuple[int, ...]]]:
    """By rank, with whose clock it compares its own, and who theirs with its."""
    return [(spec.order.world.clock_of, spec.order.world.clock_for) for spec in specs]


def make_plan_side_by_side(root: str = "b/cpu:0", layers: int = 3) -> Plan:
    """Pipelines of 1 and 3 microbatches on b and a, summed by a star; and a device that holds nothing."""
    base = make_plan("b/cpu:0", "a/cpu:0", "idle/cpu:0")
    others = [device for device in ("b/cpu:0", "a/cpu:0") if device != root]
    route = Route(
        share=1.0,
        root=root,
        up=tuple((device, root) for device in others),
        down=tuple((root, device) for device in others),
    )
    pipelines = tuple(
        Pipeline(
            stages=(PlacedStage(start=0, stop=layers, device=device, in_flight=1),), microbatches=microbatches
        )
        for device, microbatches in (("b/cpu:0", 1), ("a/cpu:0", 3))
    )
    values = {name: getattr(base, name) for name in ("strategy", "problem", "certificate")}
    held = base.predicted.model_copy(update={"replicas": base.predicted.replicas[:2]})
    sync = Sync(groups=(SyncGroup(start=0, stop=layers, routes=(route,)),), chunk_bytes=1024)
    return Plan(**values, form="pipelines", pipelines=pipelines, predicted=held, sync=sync)


def test_pipelines_side_by_side_know_their_microbatches_and_whom_to_sum_with() -> None:
    plan = make_plan_side_by_side()
    check_plan_fits(plan, CLUSTER)
    specs = rank_specs(
        plan,
        CLUSTER,
        run_id="r",
        steps=7,
        workload=TOLD,
        addresses={"a": "192.0.2.1", "b": "192.0.2.9"},
    )
    first, second = held(specs)
    assert [(o.pipeline, o.stage, o.stages, o.layers) for o in (first, second)] == [
        (0, 0, 1, (0, 3)),
        (1, 0, 1, (0, 3)),
    ]
    assert (first.microbatches, first.microbatch_range) == (4, (0, 1))
    assert (second.microbatches, second.microbatch_range) == (4, (1, 4))
    assert all(one.world.before is None and one.world.after is None for one in (first, second))
    assert (first.weights, second.weights) == (True, False), "one pipeline's are enough"
    assert first.sync is not None
    assert second.sync is not None
    assert (second.sync.format, second.sync.chunk_bytes) == ("float32", 1024)
    assert second.world.hosts == {0: "192.0.2.9"}
    [group] = second.sync.groups
    assert (group.number, group.start, group.stop) == (0, 0, 3)
    assert group.routes == (RoutePlace(1.0, (), 0, 0, ()),)
    [root] = first.sync.groups[0].routes
    assert (root.up_children, root.up_parent, root.down_children) == ((1,), None, (1,))
    assert (last_ranks(specs), peer_pairs(specs)) == ((0, 1), [(0, 1)])
    assert clocks(specs) == [(None, (1,)), (0, ())]


def test_a_helper_comes_last_and_is_told_no_workload() -> None:
    """It is on the second route alone, so what is agreed on comes to it beside the first one."""
    nodes = tuple(Node(name=name, host=f"192.0.2.{i}") for i, name in enumerate(("a", "b", "idle")))
    cluster = Cluster(name="c", nodes=nodes)
    star = make_plan_side_by_side().sync.groups[0].routes[0]
    over = Route(
        share=0.5,
        root="b/cpu:0",
        up=(("a/cpu:0", "idle/cpu:0"), ("idle/cpu:0", "b/cpu:0")),
        down=(("b/cpu:0", "a/cpu:0"),),
    )
    base = make_plan_side_by_side()
    routes = (star.model_copy(update={"share": 0.5}), over)
    plan = base.model_copy(update={"sync": Sync(groups=(SyncGroup(start=0, stop=3, routes=routes),))})
    assert plan.helpers == ("idle/cpu:0",)
    check_plan_fits(plan, cluster)
    assert [node.name for node in used_nodes(plan, cluster)] == ["a", "b", "idle"]
    addresses = {"a": "192.0.2.1", "b": "192.0.2.9", "idle": "192.0.2.7"}
    specs = rank_specs(
        plan, cluster, run_id="r", steps=7, workload=TOLD, addresses=addresses,
        recipe=Recipe(validate_every=3, total_steps=7),
    )  # fmt: skip
    helper = specs[2]
    assert (helper.device, helper.helps, [spec.helps for spec in specs[:2]]) == (
        "idle/cpu:0",
        True,
        [False] * 2,
    )
    assert holding_specs(specs) == specs[:2]
    assert isinstance(helper.order, HelperOrder)
    assert helper.order.figures_every == (3,)
    (group,) = helper.order.sync.groups
    nowhere = RoutePlace(0.5, (), None, None, ())
    assert group.routes == (nowhere, replace(nowhere, up_children=(1,), up_parent=0))
    assert group.agreement == replace(nowhere, down_parent=1)
    agreements = [sums(spec).groups[0].agreement for spec in specs[:2]]
    assert [one and one.down_children for one in agreements] == [(1,), (2,)]
    assert (last_ranks(specs), peer_pairs(specs)) == ((0, 1), [(0, 1), (0, 2), (1, 2)])
    assert [of for of, _ in clocks(specs)] == [None, 0, 0]


def make_hybrid(*, star: bool = False) -> Plan:
    """Pipelines of layers 0–1 on b and 1–4 on a, and of 0–3 on idle and 3–4 on d: three groups of layers."""
    base = json.loads(make_plan("b/cpu:0", "a/cpu:0", "idle/cpu:0", "d/cpu:0").to_json())
    rows = [
        ([("b/cpu:0", 0, 1), ("a/cpu:0", 1, 4)], 3),
        ([("idle/cpu:0", 0, 3), ("d/cpu:0", 3, 4)], 1),
    ]
    return Plan.model_validate(hybrid_plan(base, rows, star=star))


WIDE = Cluster(name="c", nodes=tuple(Node(name=name, host="192.0.2.1") for name in ("a", "b", "idle", "d")))


def test_both_ends_of_a_connection_give_a_group_the_same_tags() -> None:
    """Though one of them is in other groups than the other."""
    plan = make_hybrid()
    check_plan_fits(plan, WIDE)
    specs = rank_specs(
        plan, WIDE, run_id="r", steps=7, workload=TOLD, addresses=dict.fromkeys(TOLD, "192.0.2.1")
    )
    groups = [sums(spec).groups for spec in specs]
    assert [[group.number for group in own] for own in groups] == [[0], [1, 2], [0, 1], [2]]
    tags = {(group.number, group.first_tag) for own in groups for group in own}
    assert tags == {(0, 0), (1, 6), (2, 12)}, "two and two for each of a ring's two routes"
    ends = [(spec.order.world.before, spec.order.world.after) for spec in specs]
    assert ends == [(None, 1), (0, None), (None, 3), (2, None)]
    assert peer_pairs(specs) == [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)]
    assert last_ranks(specs) == (1, 3)
    compared = [(None, (1, 2)), (0, ()), (0, (3,)), (2, ())]
    assert clocks(specs) == compared, "stages that follow compare along the row"
    assert [order.microbatch_range for order in held(specs)] == [(0, 3), (0, 3), (3, 4), (3, 4)]
    assert [order.weights for order in held(specs)] == [True, True, False, False]


def changed_problem(plan: Plan, **values: object) -> Plan:
    return plan.model_copy(update={"problem": plan.problem.model_copy(update=values)})


def test_what_this_version_does_not_launch_is_refused() -> None:
    elsewhere = Cluster(name="c", nodes=(Node(name="a"), Node(name="b")))
    with pytest.raises(MismatchError, match=r"device 'idle/cpu:0', but cluster 'c' has no node 'idle'"):
        check_plan_fits(make_plan_side_by_side(root="idle/cpu:0"), elsewhere)
    plan = make_plan_side_by_side()
    deep = plan.pipelines[1].stages[0].model_copy(update={"in_flight": 2})
    odd = (plan.pipelines[0], plan.pipelines[1].model_copy(update={"stages": (deep,)}))
    with pytest.raises(InputError, match="pipeline 1: stage 0 keeps 2 in flight"):
        check_plan_fits(plan.model_copy(update={"pipelines": odd}), CLUSTER)
    plan = make_hybrid()
    assert plan.sync is not None
    fixed = plan.model_copy(update={"sync": plan.sync.model_copy(update={"format": "fixed32"})})
    with pytest.raises(InputError, match="the plan sums 3 groups of layers as fixed32"):
        check_plan_fits(fixed, WIDE)
    side = make_plan_side_by_side()
    assert side.sync is not None
    low = side.model_copy(update={"sync": side.sync.model_copy(update={"format": "powersgd:2"})})
    with pytest.raises(InputError, match="as powersgd:2, which goes with a synchronous rhythm") as found:
        check_plan_fits(changed_problem(low, rhythm=Rhythm(delay=1)), CLUSTER)
    assert "without --sync-delay" in (found.value.hint or "")
    with pytest.raises(
        InputError, match="weights are averaged as float32, bfloat16, int8, and the plan has fixed32"
    ):
        check_rounds(
            changed_problem(
                side.model_copy(update={"sync": side.sync.model_copy(update={"format": "fixed32"})}),
                rhythm=Rhythm(local_steps=2),
            )
        )
    with pytest.raises(InputError, match="pipelines side by side do not run under zero-bubble"):
        check_plan_fits(changed_problem(plan, schedule="zero-bubble"), WIDE)
    with pytest.raises(InputError, match="pipeline 0 cuts between layers 0, 3, which share parameters"):
        check_plan_fits(changed_problem(plan, ties=(Tie(layers=(0, 3), bytes=1.0),)), WIDE)
    route = make_hybrid(star=True).sync.groups[0].routes[0]
    over = route.model_copy(update={"up": (*route.up, ("d/cpu:0", "b/cpu:0"))})
    first = plan.sync.groups[0].model_copy(update={"routes": (over,)})
    helped = plan.sync.model_copy(update={"groups": (first, *plan.sync.groups[1:])})
    with pytest.raises(InputError, match="a route of layers 0–1 goes over d/cpu:0, which does not hold them"):
        check_plan_fits(plan.model_copy(update={"sync": helped}), WIDE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"root": "a/cpu:0"}, "is to hold the weights for all"),
        ({"over": "idle/cpu:0"}, "push to b/cpu:0 itself"),
        ({"format": "int8"}, "travel as float32, and the plan has int8"),
    ],
)
def test_a_parameter_server_is_a_star_at_the_first_device(changes: dict[str, str], words: str) -> None:
    plan = changed_problem(
        make_plan_side_by_side(root=changes.get("root", "b/cpu:0")), rhythm=Rhythm(staleness=2)
    )
    assert plan.sync is not None
    (route,) = plan.sync.groups[0].routes
    if over := changes.get("over"):
        up, down = (("a/cpu:0", over), (over, "b/cpu:0")), (("b/cpu:0", over), (over, "a/cpu:0"))
        route = route.model_copy(update={"up": up, "down": down})
    group = plan.sync.groups[0].model_copy(update={"routes": (route,)})
    sync = plan.sync.model_copy(update={"groups": (group,), "format": changes.get("format", "float32")})
    plan = plan.model_copy(update={"sync": sync})
    if not words:
        check_plan_fits(plan, CLUSTER)
        return
    with pytest.raises(InputError, match=words):
        check_plan_fits(plan, CLUSTER)


@pytest.mark.parametrize(("staleness", "wait_s"), [(0, 1800.0), (2, 1800.0), (99, 5000.0), (None, 50_000.0)])
def test_a_rank_waits_for_all_steps_that_another_may_be_behind(staleness: int | None, wait_s: float) -> None:
    plan = changed_problem(make_plan_side_by_side(), rhythm=Rhythm(staleness=staleness))
    told = dict.fromkeys("ab", "192.0.2.1")
    specs = rank_specs(
        plan, CLUSTER, run_id="r", steps=1000, workload=TOLD, addresses=told
    )  # fmt: skip
    assert [spec.order.world.timeout_s for spec in specs] == [wait_s] * 2


def test_ranks_that_may_leave_know_all_of_them_and_all_routes() -> None:
    plan = make_plan_side_by_side()
    elastic = elastic_order(plan, 1)
    assert elastic.shares == {0: (0, 1), 1: (1, 4)}
    assert elastic.pipelines == {0: 0, 1: 1}
    assert elastic.routes == {0: (RouteTree(1.0, 0, ((1, 0),), ((0, 1),)),)}
    assert elastic.witness, "of two the launcher decides which goes on"
    addresses = {"a": "192.0.2.1", "b": "192.0.2.9"}
    specs = rank_specs(
        plan, CLUSTER, run_id="r", steps=7, workload=TOLD, addresses=addresses, elastic=elastic
    )
    assert [order.elastic for order in held(specs)] == [elastic, elastic]
    assert all(order.weights for order in held(specs)), "whoever is left has them"
    assert all(spec.is_elastic for spec in specs)


def test_stages_of_pipelines_may_leave_and_each_group_knows_its_routes() -> None:
    elastic = elastic_order(make_hybrid(star=True), 1)
    assert elastic.pipelines == {0: 0, 1: 0, 2: 2, 3: 2}
    assert elastic.shares == {0: (0, 3), 2: (3, 4)}
    assert {number: [route.root for route in routes] for number, routes in elastic.routes.items()} == {
        0: [0],
        1: [2],
        2: [1],
    }


def test_what_does_not_survive_a_lost_device_says_why() -> None:
    plan = make_plan_side_by_side()
    with pytest.raises(InputError, match="the plan has one pipeline"):
        elastic_order(make_plan("a/cpu:0", "b/cpu:0"), 1)
    uneven = make_hybrid()
    workload = WorkloadRef(source="t", digest="d", batch_size=9, dtype="float32", seed=0)
    with pytest.raises(InputError, match="not all of one size"):
        elastic_order(uneven.model_copy(update={"workload": workload}), 1)
    with pytest.raises(InputError, match="late, stale or made in rounds"):
        elastic_order(changed_problem(plan, rhythm=Rhythm(delay=1)), 1)
    assert plan.sync is not None
    with pytest.raises(InputError, match="sums as int8"):
        elastic_order(plan.model_copy(update={"sync": plan.sync.model_copy(update={"format": "int8"})}), 1)
    with pytest.raises(InputError, match="--min-pipelines 3: the plan has 2"):
        elastic_order(plan, 3)


def test_a_second_copy_of_gradients_needs_room() -> None:
    plan = make_plan_side_by_side()
    small = tuple(device.model_copy(update={"memory_bytes": 1.5}) for device in plan.problem.devices)
    with pytest.raises(InfeasibleError, match="second copy of gradients"):
        elastic_order(changed_problem(plan, devices=small), 1)
    room = tuple(device.model_copy(update={"memory_bytes": 2.0}) for device in plan.problem.devices)
    assert elastic_order(changed_problem(plan, devices=room), 1)

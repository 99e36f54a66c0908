"""Profile → problem: the figures land where they belong, and gaps are named."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from skyctl.compare.conclusion import conclude
from skyctl.compare.outcome import pipeline_problem, summarize_outcomes
from skyctl.control.assignment import parse_assign
from skyctl.control.comparison_job import ComparisonJob, plan_strategies
from skyctl.control.figure_uncertainty import slice_uncertainty
from skyctl.control.plan_creation import PlanOptions, plan_profile
from skyctl.control.problem_from_profile import DEFAULT_REDUCE_BYTE_S, HEAP_SHARE, build_problem
from skyctl.control.problem_overrides import override_problem
from skyctl.control.profiles import lacks_links, profile_misfit, unmeasured_nodes
from skyctl.control.training_request import TrainingRequest
from skyctl.errors import InfeasibleError, InputError, MismatchError
from skyctl.records.cluster import Node
from skyctl.records.plan import WorkloadRef
from skyctl.records.profile import (
    HANDLING_NEIGHBOURS,
    DeviceProfile,
    LayerCosts,
    LayerTiming,
    LineProfile,
    LinkProfile,
    NodeFailure,
    NodeProfile,
    Profile,
    ShapeProfile,
    SiteProfile,
    UplinkProfile,
    WorkloadProfile,
)
from skyctl.workload.workload_spec import make_spec


def timing(signature: str, seconds: float, size: int = 2) -> LayerTiming:
    return LayerTiming(
        signature=signature,
        microbatch_size=size,
        forward_s=seconds,
        backward_s=2 * seconds,
        optimizer_s=seconds / 10,
        spread=0.01,
        repeats=5,
    )


def costs(name: str, signature: str) -> LayerCosts:
    return LayerCosts(
        name=name,
        signature=signature,
        flops=3e6,
        state_bytes=1e6,
        activation_bytes=1e5,
        output_bytes=1e4,
        workspace_bytes=0.0,
        deferred_bytes=5e4,
    )


def device(
    node: str, speed: float, memory: float = 1e9, timings: tuple[LayerTiming, ...] = ()
) -> DeviceProfile:
    return DeviceProfile(
        id=f"{node}/cpu:0",
        node=node,
        name="cpu",
        threads=1,
        slowdown=1.0,
        memory_bytes=memory,
        memory_from="free memory",
        reserved_bytes=0.0,
        flops_per_s=1e9 / speed,
        timings=timings or (timing("attention", 0.01 * speed), timing("mlp", 0.02 * speed)),
    )


def profile(*devices: DeviceProfile, links: tuple[LinkProfile, ...] = ()) -> Profile:
    layers = tuple(costs(f"block.{i}.{kind}", kind) for i in range(3) for kind in ("attention", "mlp"))
    return Profile(
        cluster="c",
        cluster_digest="d",
        created="2026-01-01T00:00:00Z",
        nodes=(),
        devices=devices,
        links=links,
        workload=WorkloadProfile(
            source="gpt:…",
            digest="w",
            batch_size=8,
            dtype="float32",
            shapes=(ShapeProfile(microbatch_size=2, microbatches=4, layers=layers),),
        ),
    )


def test_each_layer_gets_its_own_kind_of_time() -> None:
    problem = build_problem(profile(device("a", 1.0), device("b", 2.0)), 4)
    assert problem.times["b/cpu:0"].forward_s == (0.02, 0.04) * 3
    assert problem.times["a/cpu:0"].optimizer_s == (0.001, 0.002) * 3
    assert [layer.name for layer in problem.layers][:2] == ["block.0.attention", "block.0.mlp"]


def test_pins_and_limits_name_nodes() -> None:
    problem = build_problem(
        profile(device("a", 1.0), device("b", 2.0)), 4, first_stage=["b"], only_nodes=["b", "c"]
    )
    assert problem.first_stage == ("b/cpu:0",)
    assert [d.id for d in problem.devices] == ["b/cpu:0"]
    with pytest.raises(MismatchError, match="--pin-last z"):
        build_problem(profile(device("a", 1.0)), 4, last_stage=["z"])
    with pytest.raises(MismatchError, match="no device on z"):
        build_problem(profile(device("a", 1.0)), 4, only_nodes=["z"])


def test_an_unmeasured_number_of_microbatches_is_named_with_those_there_are() -> None:
    with pytest.raises(InputError, match="for 4 microbatches, not for 16"):
        build_problem(profile(device("a", 1.0)), 16)


def test_a_layer_without_measurement_is_named() -> None:
    with pytest.raises(MismatchError, match=r"'a/cpu:0' has no measurement of layer 'block.0.mlp'"):
        build_problem(profile(device("a", 1.0, timings=(timing("attention", 0.01),))), 4)


def test_a_skipped_layer_takes_the_time_of_its_flops() -> None:
    skipped = LayerTiming(signature="mlp", microbatch_size=2, skipped="too large")
    problem = build_problem(profile(device("a", 1.0, timings=(timing("attention", 0.01), skipped))), 4)
    assert problem.times["a/cpu:0"].forward_s[1] == pytest.approx(0.001)
    assert problem.times["a/cpu:0"].backward_s[1] == pytest.approx(0.002)


def test_what_weight_gradients_take_and_hold_is_passed_on() -> None:
    """A layer without the figure, and it is not known for that device."""
    known = timing("attention", 0.01).model_copy(update={"weight_s": 0.005})
    skipped = LayerTiming(signature="mlp", microbatch_size=2, skipped="too large")
    found = profile(
        device("a", 1.0, timings=(known, skipped)), device("b", 1.0, timings=(known, timing("mlp", 0.01)))
    )
    problem = build_problem(found, 4)
    assert problem.times["a/cpu:0"].weight_s == pytest.approx((0.005, 0.001) * 3)
    assert problem.times["b/cpu:0"].weight_s is None
    assert {layer.deferred_bytes for layer in problem.layers} == {5e4 * HEAP_SHARE}


def test_a_pair_that_could_not_be_connected_is_never_planned_over() -> None:
    broken = tuple(LinkProfile(source=s, target=t, error="refused") for s, t in (("a", "b"), ("b", "a")))
    found = plan_profile(profile(device("a", 1.0), device("b", 1.0), links=broken), PlanOptions())
    assert len(found.stages) == 1
    with pytest.raises(InfeasibleError, match="could not be connected"):
        plan_profile(profile(device("a", 1.0), device("b", 1.0), links=broken), PlanOptions(strategy="even"))


def test_messages_cost_a_device_what_its_two_cheapest_links_take() -> None:
    """And never less than over loopback; links not measured so, or to nodes left out, don't count."""
    cost = {("a", "b"): 4e-8, ("b", "a"): 2e-8, ("a", "c"): 1e-7, ("c", "a"): 3e-8, ("a", "z"): 1e-9}
    links = tuple(
        LinkProfile(
            source=ends[0],
            target=ends[1],
            latency_s=0.0,
            bandwidth_bytes_per_s=1e7,
            source_byte_s=each if ends[0] == "a" else None,
            target_byte_s=each if ends[1] == "a" else None,
        )
        for ends, each in cost.items()
    )
    devices = [device(node, 1.0).model_copy(update={"handling_s": 1e-3}) for node in "abc"]
    found = build_problem(profile(*devices, links=links), 4).devices
    per_byte, once = (4e-8 + 2e-8 + 1e-7 + 3e-8) / 2, 1e-3 / HANDLING_NEIGHBOURS
    assert [one.neighbour_s for one in found] == pytest.approx([once + per_byte * 1e4, once, once])
    assert [one.handling_s + one.action_s for one in found] == [0.0] * 3
    dear = devices[0].model_copy(update={"handling_byte_s": 1e-6, "action_s": 2e-4})
    dear_one = build_problem(profile(dear, *devices[1:], links=links), 4).devices[0]
    assert dear_one.neighbour_s == pytest.approx(0.011 / HANDLING_NEIGHBOURS)
    assert dear_one.action_s == 2e-4


def test_a_data_problem_says_what_summing_gradients_takes() -> None:
    """A message's byte as over loopback or over the links, whichever is more; a pipeline needs none of it."""
    measured = {"reduce_byte_s": 3e-10, "message_byte_s": 1e-9}
    a, b, c = (device(node, 1.0).model_copy(update=measured) for node in "abc")
    links = tuple(
        LinkProfile(
            source=ends[0],
            target=ends[1],
            latency_s=0.0,
            bandwidth_bytes_per_s=1e7,
            source_byte_s=4e-9 if ends[0] == "a" else None,
            target_byte_s=2e-9 if ends[1] == "a" else None,
        )
        for ends in ("ab", "ba", "ac", "ca")
    )
    found = profile(a, b, c, links=links)
    rows = tuple(
        layer.model_copy(update={"gradient_bytes": 4e5}) for layer in found.workload.shapes[0].layers
    )
    shape = found.workload.shapes[0].model_copy(update={"layers": rows})
    found = found.model_copy(update={"workload": found.workload.model_copy(update={"shapes": (shape,)})})
    data = build_problem(found, 4, parallel="data")
    assert data.parallel == "data"
    assert [d.reduce_byte_s for d in data.devices] == [3e-10] * 3
    # what the first one's links take comes to what a sum takes
    assert [d.message_byte_s for d in data.devices] == pytest.approx([4e-9, 1e-9, 1e-9])
    assert {layer.gradient_bytes for layer in data.layers} == {4e5}
    pipeline = build_problem(found, 4)
    assert {(d.reduce_byte_s, d.message_byte_s) for d in pipeline.devices} == {(0.0, 0.0)}
    assert {layer.gradient_bytes for layer in pipeline.layers} == {None}


def test_a_profile_from_before_sums_were_measured_gets_stated_figures() -> None:
    old = device("a", 1.0).model_copy(update={"handling_byte_s": 8e-10 * HANDLING_NEIGHBOURS})
    data = build_problem(profile(old), 4, parallel="data")
    assert data.devices[0].reduce_byte_s == DEFAULT_REDUCE_BYTE_S
    assert data.devices[0].message_byte_s == pytest.approx(4e-10)
    assert data.layers[0].gradient_bytes is None


def test_what_a_step_costs_once_is_shared_by_its_microbatches() -> None:
    devices = [device(node, 1.0).model_copy(update={"step_s": 2e-3}) for node in "ab"]
    assert [one.handling_s for one in build_problem(profile(*devices), 4).devices] == [5e-4, 5e-4]


def line(node: str, direction: Literal["in", "out"], rate: float) -> LineProfile:
    return LineProfile(node=node, direction=direction, bandwidth_bytes_per_s=rate, peers=("x", "y"))


def test_a_nodes_line_is_shared_by_all_its_devices_links_with_other_nodes() -> None:
    second = device("m", 1.0).model_copy(update={"id": "m/cpu:1"})
    measured = profile(device("a", 1.0), device("m", 1.0), second, device("b", 1.0))
    measured = measured.model_copy(update={"lines": (line("m", "in", 2e6), line("b", "out", 3e6))})
    into, out = build_problem(measured, 4).shared
    assert (into.name, into.bandwidth_bytes_per_s) == ("m in", 2e6)
    assert set(into.links) == {(other, f"m/cpu:{i}") for other in ("a/cpu:0", "b/cpu:0") for i in (0, 1)}
    assert (out.name, out.bandwidth_bytes_per_s) == ("b out", 3e6)
    assert set(out.links) == {("b/cpu:0", "a/cpu:0"), ("b/cpu:0", "m/cpu:0"), ("b/cpu:0", "m/cpu:1")}


def test_a_line_that_no_two_links_can_share_is_left_out() -> None:
    measured = profile(device("a", 1.0), device("m", 1.0), device("b", 1.0))
    measured = measured.model_copy(update={"lines": (line("m", "in", 2e6), line("gone", "in", 2e6))})
    assert [s.name for s in build_problem(measured, 4).shared] == ["m in"]
    assert build_problem(measured, 4, only_nodes=["a", "m"]).shared == ()
    assert build_problem(measured, 4, only_nodes=["a", "b"]).shared == ()


def test_a_line_makes_the_middle_of_the_pipeline_slower() -> None:
    rates = {"a": 1e7, "m": 1e6, "b": 1e7}
    links = tuple(
        LinkProfile(source=s, target=t, latency_s=0.0, bandwidth_bytes_per_s=min(rates[s], rates[t]))
        for s in rates
        for t in rates
        if s != t
    )
    free = profile(*(device(n, 0.1) for n in rates), links=links)
    held = free.model_copy(update={"lines": (line("m", "in", 5e5), line("m", "out", 5e5))})
    options = PlanOptions(microbatches=4, strategy="even")
    order = [plan_profile(p, options).predicted.iteration_s for p in (free, held)]
    assert order[1] > 1.05 * order[0]


def test_a_plan_prefers_the_fast_device() -> None:
    found = plan_profile(profile(device("slow", 4.0), device("fast", 1.0)), PlanOptions(microbatches=4))
    share = {s.replicas[0].device: s.stop - s.start for s in found.stages}
    assert share["fast/cpu:0"] > share.get("slow/cpu:0", 0)


def test_all_layers_on_each_device_have_one_schedule_and_a_pipeline_beside_them() -> None:
    both = profile(device("slow", 4.0), device("fast", 1.0))
    options = PlanOptions(parallel="data", sync_format="bfloat16", beside_pipeline=True)
    found = plan_profile(both, options)
    assert (found.problem.parallel, found.problem.sync_format) == ("data", "bfloat16")
    assert (found.problem.schedule, found.problem.recompute) == ("1f1b", True)
    assert found.pipeline_iteration_s is not None
    share = {p.stages[0].device: p.microbatches for p in found.pipelines}
    assert share["fast/cpu:0"] > share.get("slow/cpu:0", 0)
    assert plan_profile(both, PlanOptions(parallel="data")).pipeline_iteration_s is None
    with pytest.raises(InputError, match="orders a pipeline's stages"):
        plan_profile(both, PlanOptions(parallel="data", schedule="zero-bubble"))
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    rows = plan_strategies(both, PlanOptions(parallel="data"), ref)
    assert [len(row.plan.pipelines) for row in rows if row.plan is not None and row.strategy == "alone"] == [
        1
    ]
    assert all(row.plan is not None and row.plan.problem.parallel == "data" for row in rows)


@pytest.mark.parametrize(("form", "other"), [("data", "pipeline"), (None, "data")])
def test_a_comparison_has_a_row_of_the_other_form(form: str | None, other: str) -> None:
    both = profile(device("slow", 4.0), device("fast", 1.0))
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    request: Any = SimpleNamespace(ref=lambda _digest: ref)
    loaded: Any = SimpleNamespace(digest="w")
    cluster: Any = None
    job = ComparisonJob(cluster, request, loaded, PlanOptions(parallel=form), other_form=True)
    outcomes = job.plans(both)
    assert [one.strategy for one in outcomes] == ["even", "alone", "heuristic", other, "optimal"]
    parallel = {one.strategy: one.plan.problem.parallel for one in outcomes if one.plan is not None}
    assert parallel[other] == other
    assert parallel["optimal"] == (form or "pipeline")
    problem = pipeline_problem(outcomes)
    assert problem is not None
    assert problem.parallel == parallel["optimal"]
    row = summarize_outcomes(outcomes)[3]
    assert (row.strategy, row.proved) == (other, True)
    assert conclude(outcomes).over(other) is not None or conclude(outcomes).best == other


def test_a_comparison_of_all_forms_has_a_row_of_each_and_takes_one() -> None:
    both = profile(device("slow", 4.0), device("fast", 1.0))
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    request: Any = SimpleNamespace(ref=lambda _digest: ref)
    loaded: Any = SimpleNamespace(digest="w")
    cluster: Any = None
    outcomes = ComparisonJob(cluster, request, loaded, PlanOptions(parallel="auto")).plans(both)
    assert [one.strategy for one in outcomes] == [
        "even", "alone", "heuristic", "pipeline", "data", "hybrid", "optimal",
    ]  # fmt: skip
    plans = {one.strategy: one.plan for one in outcomes}
    taken = plans["optimal"]
    assert taken is not None
    assert [one.parallel for one in taken.forms] == ["pipeline", "data", "hybrid"]
    own = plans[taken.problem.parallel]
    assert own is not None
    assert (taken.pipelines, own.forms) == (own.pipelines, ())
    for name in ("even", "alone", "heuristic", "pipeline"):
        made = plans[name]
        assert made is None or made.problem.parallel == "pipeline"
    forms = ComparisonJob(cluster, request, loaded, PlanOptions(parallel="hybrid"), other_form=True)
    assert [one.strategy for one in forms.plans(both)][3:] == ["pipeline", "data", "optimal"]
    asked = PlanOptions(parallel="auto", sync="trees")
    outcomes = ComparisonJob(cluster, request, loaded, asked).plans(both)
    assert [one.strategy for one in outcomes][3:] == ["pipeline", "data", "optimal"]
    assert outcomes[-1].plan is not None
    assert outcomes[-1].plan.problem.parallel == "data"


def test_auto_plans_what_a_profile_says_in_every_form() -> None:
    """Their problems are the same but for the form, so what is proved of each can be found again."""
    both = profile(device("slow", 4.0), device("fast", 1.0))
    plan = plan_profile(both, PlanOptions(parallel="auto"))
    assert [one.parallel for one in plan.forms] == ["pipeline", "data", "hybrid"]
    assert all(one.reduce_byte_s > 0 for one in plan.problem.devices)
    assert plan.predicted.iteration_s <= min(one.iteration_s or 1e9 for one in plan.forms) * 1.01


def ask(microbatches: int | None = None) -> tuple[TrainingRequest, str]:
    return TrainingRequest(make_spec("gpt:layers=3", batch_size=8), microbatches), "w"


def nodes(*names: str, **settings: Any) -> list[Node]:
    return [Node(name=name, transport="local", **settings) for name in names]


def test_a_profile_fits_only_the_cluster_that_it_was_measured_on() -> None:
    request, digest = ask(4)
    measured = profile(device("a", 1.0), device("b", 2.0))
    assert profile_misfit(measured, request, digest, nodes("a", "b")) is None
    assert profile_misfit(measured, request, digest, nodes("a")) is None
    assert profile_misfit(measured, request, digest, nodes("a", "b", "c")) == "node c is not in it"
    failed = measured.model_copy(update={"failures": (NodeFailure(node="c", error="no torch"),)})
    assert profile_misfit(failed, request, digest, nodes("a", "b", "c")) is None
    assert unmeasured_nodes(failed, nodes("a", "b", "c")) == ["c"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"slowdown": 2.0}, "slowdown 1, now 2"),
        ({"threads": 2}, "1 threads, now 2"),
        ({"memory_gib": 0.1}, "now memory_gib is 0.1"),
        ({"devices": ("cuda:0",)}, "measured on a/cpu:0"),
    ],
)
def test_a_node_that_has_changed_must_be_measured_again(changed: dict[str, Any], words: str) -> None:
    request, digest = ask(4)
    assert words in str(profile_misfit(profile(device("a", 1.0)), request, digest, nodes("a", **changed)))


def test_what_is_typed_to_ask_for_it_again(tmp_path: Path) -> None:
    assert ask()[0].words() == ["gpt:layers=3", "--batch-size", "8"]
    (tmp_path / "book.txt").write_text("text")
    spec = make_spec("gpt:layers=3", dtype="bfloat16", seed=3, data_path=str(tmp_path / "book.txt"))
    data = ["--data", str((tmp_path / "book.txt").resolve())]
    flags = ["--microbatches", "4", "--dtype", "bfloat16", "--seed", "3", *data]
    assert TrainingRequest(spec, 4).words() == ["gpt:layers=3", *flags]
    assert TrainingRequest(make_spec("gpt:layers=3", random_inputs=True)).words()[1:] == ["--random-inputs"]


def test_what_was_measured_is_said_where_it_does_not_fit() -> None:
    measured = profile(device("a", 1.0))
    request, digest = ask(2)
    assert "at 4 microbatches, not at 2" in str(profile_misfit(measured, request, digest, nodes("a")))
    assert profile_misfit(measured, ask(4)[0], "other", nodes("a")) == "it holds gpt:…"


def test_left_to_itself_the_best_strategys_microbatches_serve_all() -> None:
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    outcomes = plan_strategies(
        profile(device("a", 1.0), device("b", 3.0)), PlanOptions(), ref, ("optimal", "even")
    )
    assert [o.strategy for o in outcomes] == ["optimal", "even"]
    assert {o.plan.problem.microbatches for o in outcomes if o.plan} == {4}


def test_a_strategy_that_does_not_fit_is_an_outcome_that_says_why() -> None:
    ref = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)
    small = profile(device("a", 1.0), device("b", 1.0, memory=1.6e6))
    even, optimal = plan_strategies(small, PlanOptions(), ref, ("even", "optimal"))
    assert even.plan is None
    assert "b/cpu:0" in str(even.error)
    assert optimal.plan is not None
    with pytest.raises(InfeasibleError, match="no strategy"):
        plan_strategies(profile(device("a", 1.0, memory=1e6)), PlanOptions(), ref)


def test_the_command_line_wins_over_a_problem_file() -> None:
    problem = build_problem(profile(device("a", 1.0), device("b", 2.0)), 4)
    options = PlanOptions(schedule="gpipe", objective="bottleneck", microbatches=8)
    changed = override_problem(problem, options, "b", "a/cpu:0")
    assert (changed.schedule, changed.objective, changed.microbatches) == ("gpipe", "bottleneck", 8)
    assert (changed.first_stage, changed.last_stage) == (("b/cpu:0",), ("a/cpu:0",))
    assert override_problem(problem, PlanOptions()) == problem
    with pytest.raises(InputError, match="--pin-last 'z' is no device"):
        override_problem(problem, options, None, "z")


def test_an_assignment_is_taken_as_given() -> None:
    assign = parse_assign("a=0:1,b=1:6")
    found = plan_profile(profile(device("a", 1.0), device("b", 1.0)), PlanOptions(assign=assign))
    assert [(s.start, s.stop) for s in found.stages] == [(0, 1), (1, 6)]
    assert found.strategy == "assigned"


@pytest.mark.parametrize("text", ["a", "a=1", "a=1:x", "=0:3", "", "a=0:²", "a=0:" + "1" * 5000])
def test_a_malformed_assignment_says_what_is_wanted(text: str) -> None:
    with pytest.raises(InputError, match="NODE=START:STOP"):
        parse_assign(text)


def test_an_assignment_to_an_unknown_device_lists_the_devices() -> None:
    with pytest.raises(InputError, match=r"no device is so called\. Devices: a/cpu:0"):
        plan_profile(profile(device("a", 1.0)), PlanOptions(assign=[("q", 0, 6)]))


def test_a_sites_uplink_is_shared_by_all_links_that_cross_it_each_way_apart() -> None:
    names = ("a0", "a1", "b0", "b1")
    links = tuple(
        LinkProfile(source=s, target=t, latency_s=0.0, bandwidth_bytes_per_s=1e7)
        for s in names
        for t in names
        if s != t
    )
    free = profile(*(device(name, 0.1) for name in names), links=links)
    sites = (SiteProfile(name="a", nodes=names[:2]), SiteProfile(name="b", nodes=names[2:]))
    ways: tuple[Literal["in", "out"], ...] = ("out", "in")
    uplinks = tuple(
        UplinkProfile(site="a", direction=way, bandwidth_bytes_per_s=2e5 * (1 + number), pairs=())
        for number, way in enumerate(ways)
    )
    held = free.model_copy(update={"sites": sites, "uplinks": uplinks})
    out, into = build_problem(held, 4).shared
    assert (out.name, out.bandwidth_bytes_per_s) == ("site a out", 2e5)
    assert (into.name, into.bandwidth_bytes_per_s) == ("site a in", 4e5)
    crossing = {(f"a{i}/cpu:0", f"b{j}/cpu:0") for i in (0, 1) for j in (0, 1)}
    assert set(out.links) == crossing
    assert set(into.links) == {way[::-1] for way in crossing}
    assert build_problem(held, 4, only_nodes=["a0", "b0"]).shared == ()
    assert build_problem(held, 4, only_nodes=["b0", "b1"]).shared == ()
    options = PlanOptions(microbatches=4, strategy="even")
    seconds = [plan_profile(p, options).predicted.iteration_s for p in (free, held)]
    assert seconds[1] > 1.05 * seconds[0]


def test_a_profile_of_several_nodes_without_links_says_so() -> None:
    link = LinkProfile(source="a", target="b", latency_s=0.0, bandwidth_bytes_per_s=1e7)
    assert lacks_links(profile(device("a", 1.0), device("b", 1.0)))
    assert not lacks_links(profile(device("a", 1.0), device("b", 1.0), links=(link,)))
    assert not lacks_links(profile(device("a", 1.0)))


def test_figures_that_contradict_each_other_are_an_input_error() -> None:
    wrong = tuple(
        timing(kind, 0.01).model_copy(update={"weight_s": 1e9, "split_s": 0.02})
        for kind in ("attention", "mlp")
    )
    with pytest.raises(InputError, match=r"can't be planned with.*weight_s"):
        build_problem(profile(device("a", 1.0, timings=wrong)), 4)


def test_a_device_whose_slices_are_shorter_than_a_forward_is_less_sure() -> None:
    """Of 10 ms it runs 1.2 at a time; an even share of the layers takes 90 ms, pauses included."""
    known = profile(device("a", 1.0), device("b", 1.0))
    facts = {
        "platform": "p",
        "python": "3",
        "torch": "2",
        "cpu_model": "c",
        "address": None,
        "interface": None,
    }
    memory = {"memory_total_bytes": 1e9, "memory_available_bytes": 1e9}
    node = NodeProfile(name="a", hostname="a", cpus=0.12, quota_period_s=0.01, **facts, **memory)
    steady = [one.time_uncertainty for one in build_problem(known, 4).devices]
    sliced = build_problem(known.model_copy(update={"nodes": (node,)}), 4).devices
    times = build_problem(known, 4).times["a/cpu:0"]
    forward_s, backward_s = sum(times.forward_s) / 2, sum(times.backward_s) / 2
    slices = slice_uncertainty(0.0012, 0.01, forward_s, 4 * (forward_s + backward_s))
    expected = math.hypot(steady[0] or 0.0, slices)
    assert [one.time_uncertainty for one in sliced] == pytest.approx([expected, steady[1]])
    assert expected > (steady[0] or 0.0) + 1e-3

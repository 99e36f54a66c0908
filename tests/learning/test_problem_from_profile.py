"""Profile → problem: the figures land where they belong, and gaps are named."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from tests.helpers.bare_records import OF_NODE
from tests.learning.profiles import device, nodes, profile, timing

from skyctl.cli.command_output import Output
from skyctl.cli.show_profile import warn_unmeasured
from skyctl.errors import InfeasibleError, InputError, MismatchError
from skyctl.learning.corrections import Corrections
from skyctl.learning.figure_uncertainty import slice_uncertainty
from skyctl.learning.problem_from_profile import HEAP_SHARE, build_problem
from skyctl.planning.plan_from_profile import plan_profile
from skyctl.planning.plan_options import PlanOptions
from skyctl.planning.problem_overrides import override_problem
from skyctl.probe.node.samples import ClockScale, LayerSamples, TimingSample, timing_figures
from skyctl.records.base import parse
from skyctl.records.cluster import Cluster
from skyctl.records.plan import Plan
from skyctl.records.problem import MOST_UNCERTAINTY, Problem
from skyctl.records.profile import (
    HANDLING_NEIGHBOURS,
    LayerTiming,
    LineProfile,
    LinkProfile,
    NodeProfile,
    SiteProfile,
    UplinkProfile,
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
    attention = timing("attention", 0.01).model_copy(update={"weight_s": 0.005})
    skipped = LayerTiming(signature="mlp", microbatch_size=2, skipped="too large")
    whole = profile(
        device("a", 1.0, timings=(attention, skipped)),
        device("b", 1.0, timings=(attention, timing("mlp", 0.01))),
    )
    problem = build_problem(whole, 4)
    assert problem.times["a/cpu:0"].weight_s == pytest.approx((0.005, 0.001) * 3)
    assert problem.times["b/cpu:0"].weight_s is None
    assert {layer.deferred_bytes for layer in problem.layers} == {5e4 * HEAP_SHARE}


def test_a_pair_that_could_not_be_connected_is_never_planned_over() -> None:
    broken = tuple(LinkProfile(source=s, target=t, error="refused") for s, t in (("a", "b"), ("b", "a")))
    plan = plan_profile(profile(device("a", 1.0), device("b", 1.0), links=broken), PlanOptions())
    assert len(plan.stages) == 1
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
    planned_devices = build_problem(profile(*devices, links=links), 4).devices
    per_byte, once = (4e-8 + 2e-8 + 1e-7 + 3e-8) / 2, 1e-3 / HANDLING_NEIGHBOURS
    assert [each.neighbour_s for each in planned_devices] == pytest.approx(
        [once + per_byte * 1e4, once, once]
    )
    assert [each.handling_s + each.action_s for each in planned_devices] == [0.0] * 3
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
    whole = profile(a, b, c, links=links)
    rows = tuple(
        layer.model_copy(update={"gradient_bytes": 4e5}) for layer in whole.workload.shapes[0].layers
    )
    shape = whole.workload.shapes[0].model_copy(update={"layers": rows})
    whole = whole.model_copy(update={"workload": whole.workload.model_copy(update={"shapes": (shape,)})})
    data = build_problem(whole, 4, parallel="data")
    assert data.parallel == "data"
    assert [d.reduce_byte_s for d in data.devices] == [3e-10] * 3
    # what the first one's links take comes to what a sum takes
    assert [d.message_byte_s for d in data.devices] == pytest.approx([4e-9, 1e-9, 1e-9])
    assert {layer.gradient_bytes for layer in data.layers} == {4e5}
    pipeline = build_problem(whole, 4)
    assert {(d.reduce_byte_s, d.message_byte_s) for d in pipeline.devices} == {(0.0, 0.0)}
    assert {layer.gradient_bytes for layer in pipeline.layers} == {None}


def test_what_a_step_costs_once_is_its_devices() -> None:
    devices = [device(node, 1.0).model_copy(update={"step_s": 2e-3}) for node in "ab"]
    planned_devices = build_problem(profile(*devices), 4).devices
    assert [(each.step_s, each.handling_s) for each in planned_devices] == [(2e-3, 0.0), (2e-3, 0.0)]


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


def test_the_command_line_wins_over_a_problem_file() -> None:
    problem = build_problem(profile(device("a", 1.0), device("b", 2.0)), 4)
    options = PlanOptions(schedule="gpipe", objective="bottleneck", microbatches=8)
    changed = override_problem(problem, options, "b", "a/cpu:0")
    assert (changed.schedule, changed.objective, changed.microbatches) == ("gpipe", "bottleneck", 8)
    assert (changed.first_stage, changed.last_stage) == (("b/cpu:0",), ("a/cpu:0",))
    assert override_problem(problem, PlanOptions()) == problem
    with pytest.raises(InputError, match="--pin-last 'z' is no device"):
        override_problem(problem, options, None, "z")


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


def test_figures_that_contradict_each_other_are_an_input_error() -> None:
    wrong = tuple(
        timing(kind, 0.01).model_copy(update={"weight_s": 1e9, "split_s": 0.02})
        for kind in ("attention", "mlp")
    )
    with pytest.raises(InputError, match=r"can't be planned with.*weight_s"):
        build_problem(profile(device("a", 1.0, timings=wrong)), 4)


def test_a_device_whose_slices_are_shorter_than_a_forward_is_less_sure() -> None:
    """Of 10 ms it runs 1.2 at a time; an even share of the layers takes 90 ms, pauses included."""
    whole = profile(device("a", 1.0), device("b", 1.0))
    facts = {
        **OF_NODE,
        "platform": "p",
        "python": "3",
        "torch": "2",
        "cpu_model": "c",
        "address": None,
        "interface": None,
    }
    memory = {"memory_total_bytes": 1e9, "memory_available_bytes": 1e9}
    facts["quota_period_s"] = 0.01
    node = NodeProfile(name="a", hostname="a", cpus=0.12, **facts, **memory)
    steady = [each.time_uncertainty for each in build_problem(whole, 4).devices]
    sliced = build_problem(whole.model_copy(update={"nodes": (node,)}), 4).devices
    times = build_problem(whole, 4).times["a/cpu:0"]
    forward_s, backward_s = sum(times.forward_s) / 2, sum(times.backward_s) / 2
    slices = slice_uncertainty(0.0012, 0.01, forward_s, 4 * (forward_s + backward_s))
    expected = math.hypot(steady[0] or 0.0, slices)
    assert [each.time_uncertainty for each in sliced] == pytest.approx([expected, steady[1]])
    assert expected > (steady[0] or 0.0) + 1e-3


def test_times_that_hardly_repeat_are_planned_with_and_the_device_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A few repetitions took a thousand times as long as the others, and runs spread further still."""
    repetitions = [TimingSample(0.01, 0.01, 0.02, 0.02)] * 7 + [TimingSample(10.0, 10.0, 20.0, 20.0)] * 3
    measured = LayerSamples()
    measured.add((0, 2), repetitions, [1] * len(repetitions))
    figures = timing_figures(measured, (0, 2), ClockScale(1.0, True, 0.0), 0.0)
    noisy = tuple(LayerTiming(signature=name, microbatch_size=2, **figures) for name in ("attention", "mlp"))
    whole = profile(device("a", 1.0), device("b", 1.0, timings=noisy))
    written = plan_profile(whole, PlanOptions()).to_json()
    problem = Corrections(spreads={"b/cpu:0": 3.0}).apply_to(parse(Plan, written, "plan.json").problem)
    sure, unsure = parse(Problem, problem.to_json(), "problem.json").devices
    assert (sure.time_uncertainty or 0.0) < 0.1
    assert unsure.time_uncertainty == MOST_UNCERTAINTY
    warn_unmeasured(Output(), whole, Cluster(name="c", nodes=tuple(nodes("a", "b"))))
    printed = capsys.readouterr().err
    assert "b/cpu:0 are hardly known" in printed
    assert "a/cpu:0" not in printed

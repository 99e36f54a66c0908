"""The choice of a backend in each case, what it costs, and what a plan in another's place keeps."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.bare_records import OF_NODE
from tests.learning.profiles import device, profile
from tests.run.test_rank_spec import make_plan

from skyctl.errors import InputError
from skyctl.jobs.sum_benchmark import plan_sums
from skyctl.planner.api import verify
from skyctl.planning.backend_choice import (
    choice_at_addresses,
    describe_choice,
    describe_left_out,
    is_private,
    profile_over,
    replanned_choice,
)
from skyctl.planning.plan_from_profile import plan_profile
from skyctl.planning.plan_options import PlanOptions
from skyctl.records.backend import BackendChoice, BackendReason
from skyctl.records.plan import Plan, WorkloadRef
from skyctl.records.profile import DeviceProfile, LinkProfile, MessageCosts, NodeProfile, Profile

OURS = {"handling_s": 1e-3, "handling_byte_s": 2e-9, "step_s": 1e-3, "message_byte_s": 1e-9}
REF = WorkloadRef(source="gpt:…", digest="w", batch_size=8, dtype="float32", seed=0)


def node(name: str, address: str | None = "10.0.0.1") -> NodeProfile:
    return NodeProfile(
        name=name,
        hostname=name,
        platform="linux",
        python="3.11",
        torch="2.13",
        cpu_model="cpu",
        cpus=1.0,
        memory_total_bytes=1e9,
        memory_available_bytes=1e9,
        address=address,
        interface=None,
        **OF_NODE,
    )


def measured(
    *kinds: str, times: float | None = 1.0, addresses: tuple[str | None, ...] = ("10.0.0.1", "192.168.1.7")
) -> Profile:
    """Two equal devices; messages over Gloo take ``times`` as long as over ours (None: not measured)."""
    names = ("a", "b")
    devices: list[DeviceProfile] = []
    for name, kind in zip(names, kinds or ("cpu", "cpu"), strict=True):
        costs = None if times is None else {key: times * value for key, value in OURS.items()}
        more: dict[str, Any] = {**OURS, "reduce_byte_s": 1e-10, "id": f"{name}/{kind}:0"}
        more["gloo"] = MessageCosts(**costs) if costs is not None and kind == "cpu" else None
        devices.append(device(name, 1.0).model_copy(update=more))
    nodes = tuple(node(name, address) for name, address in zip(names, addresses, strict=True))
    links = tuple(
        LinkProfile(source=x, target=y, latency_s=1e-4, bandwidth_bytes_per_s=1e9)
        for x, y in (("a", "b"), ("b", "a"))
    )
    return profile(*devices, links=links).model_copy(update={"nodes": nodes})


def planned(given: Profile, **asked: Any) -> Plan:
    return plan_profile(given, PlanOptions(**{"backend": "auto", "parallel": "pipeline", **asked}), REF)


def chosen(given: Profile, **asked: Any) -> BackendChoice:
    choice = planned(given, **asked).backend
    assert choice is not None
    return choice


@pytest.mark.parametrize(
    ("given", "asked", "backend", "reason", "about"),
    [
        (measured(), {}, "gloo", "near", ()),
        (measured(times=1.0, addresses=("127.0.0.1", "127.0.0.1")), {}, "gloo", "near", ()),
        (measured(times=0.5), {}, "gloo", "near", ()),
        (measured(times=9.0), {}, "skyctl", "slower", ()),
        (measured(times=None), {}, "skyctl", "unmeasured", ("a/cpu:0", "b/cpu:0")),
        (measured().model_copy(update={"encrypted": True}), {}, "skyctl", "encryption", ()),
        (measured(), {"first_stage": ["a"]}, "skyctl", "pins", ()),
        (measured(), {"parallel": "data", "helpers": ["b"]}, "skyctl", "helpers", ("b",)),
        (measured(addresses=("10.0.0.1", "203.0.113.5")), {}, "skyctl", "public address", ("b",)),
        (measured(addresses=("10.0.0.1", None)), {}, "skyctl", "unknown address", ("b",)),
        (measured("cpu", "cuda"), {}, "skyctl", "devices", ("a/cpu:0", "b/cuda:0")),
        (measured("mps", "mps"), {}, "skyctl", "devices", ("b/mps:0",)),
        (measured("cuda", "cuda"), {}, "nccl", "cuda", ()),
        (measured("cuda", "cuda"), {"first_stage": ["a"]}, "skyctl", "pins", ()),
        (measured("cuda", "cuda", addresses=("8.8.8.8", "10.0.0.1")), {}, "skyctl", "public address", ("a",)),
        (measured(), {"backend": "gloo"}, "gloo", "asked", ()),
        (measured(times=None), {"backend": "gloo"}, "gloo", "asked", ("a/cpu:0", "b/cpu:0")),
        (measured(), {"backend": "skyctl"}, "skyctl", "asked", ()),
        (measured("cuda", "cuda"), {"backend": "nccl"}, "nccl", "asked", ()),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_the_choice_in_each_case(
    given: Profile, asked: dict[str, Any], backend: str, reason: BackendReason, about: tuple[str, ...]
) -> None:
    choice = chosen(given, **asked)
    assert (choice.backend, choice.reason, choice.about) == (backend, reason, about)
    line = describe_choice(choice, 1.0)
    assert line.startswith(f"tensors go over {backend}: ")
    assert all(name in line for name in about)


def with_quick_rings() -> Profile:
    """Two devices whose sums over skyctl's routes hold a link up, and over Gloo's own ring do not."""
    given = measured()
    slow = OURS | {"message_byte_s": 1e-8}
    devices = tuple(
        each.model_copy(update={**slow, "gloo": MessageCosts(**slow, ring_byte_s=1e-10)})
        for each in given.devices
    )
    return given.model_copy(update={"devices": devices})


def test_over_gloo_sums_go_in_its_own_ring_where_that_is_faster() -> None:
    given = with_quick_rings()
    by_routes, by_ring = (planned(given, parallel="data", sync=sync) for sync in ("star", "auto"))
    assert by_ring.problem.sync == "ring"
    assert by_ring.predicted.sync_s < 0.5 * by_routes.predicted.sync_s
    assert verify(by_ring.problem, by_ring).ok


def test_bounds_of_parallelisms_whose_sums_can_not_go_in_rings_are_not_claimed() -> None:
    plan = planned(with_quick_rings(), parallel="auto")
    assert plan.problem.sync == "ring"
    bounds = {outcome.parallel: outcome.lower_bound_s for outcome in plan.forms}
    assert bounds["hybrid"] is None
    assert bounds["pipeline"] is not None
    assert verify(plan.problem, plan).ok


def test_no_ring_is_planned_where_sums_are_left_out() -> None:
    plan = planned(with_quick_rings(), parallel="auto", objective="bottleneck")
    assert plan.problem.parallel == "pipeline"


def test_without_a_request_a_plan_says_nothing() -> None:
    plan = planned(measured(), backend=None)
    assert plan.backend is None


def test_a_plan_over_gloo_reckons_with_its_messages_and_keeps_what_ours_would_take() -> None:
    """More per message, but little enough that Gloo is taken."""
    split = {"assign": [("a", 0, 3), ("b", 3, 6)]}
    given = measured(times=1.5)
    over_gloo, ours = planned(given, **split), planned(given, backend="skyctl", **split)
    assert over_gloo.backend is not None
    assert over_gloo.backend.reason == "near"
    assert over_gloo.backend.costs == "gloo"
    assert over_gloo.predicted.iteration_s > ours.predicted.iteration_s
    assert over_gloo.backend.alternative == "skyctl"
    assert over_gloo.backend.alternative_s == pytest.approx(ours.predicted.iteration_s)
    asked = planned(given, backend="gloo", **split)
    assert asked.predicted == over_gloo.predicted
    assert Plan.model_validate_json(over_gloo.to_json()).backend == over_gloo.backend


def test_a_slower_gloo_is_the_alternative() -> None:
    plan = planned(measured(times=9.0), assign=[("a", 0, 3), ("b", 3, 6)])
    assert plan.backend is not None
    assert (plan.backend.reason, plan.backend.alternative) == ("slower", "gloo")
    assert plan.backend.alternative_s is not None
    assert plan.backend.alternative_s > 1.02 * plan.predicted.iteration_s


def test_without_figures_of_gloo_its_predictions_are_ours_and_say_so() -> None:
    plan = planned(measured(times=None), backend="gloo")
    assert plan.backend is not None
    assert plan.backend.costs == "skyctl"
    assert plan.predicted == planned(measured(), backend="skyctl").predicted
    assert "predicted with what messages cost over skyctl" in describe_choice(plan.backend, 1.0)


def test_devices_that_an_asked_backend_does_not_carry_are_left_out_by_name() -> None:
    given = measured("cpu", "cuda")
    for backend, left, other in (("gloo", "b/cuda:0", "a/cpu:0"), ("nccl", "a/cpu:0", "b/cuda:0")):
        plan = planned(given, backend=backend)
        assert [each.id for each in plan.problem.devices] == [other]
        assert f"left out: {left}: --backend {backend}" in str(describe_left_out(plan, given))
    assert describe_left_out(planned(given), given) is None
    with pytest.raises(InputError, match=r"--backend nccl carries tensors between CUDA devices.* a/cpu:0"):
        planned(measured(), backend="nccl")
    with pytest.raises(InputError, match=r"--backend gloo carries tensors between CPUs.* a/cuda:0"):
        planned(measured("cuda", "cuda"), backend="gloo")


def test_what_links_take_more_than_loopback_stays() -> None:
    ends = {"source_byte_s": 5e-9, "target_byte_s": 7e-9}
    given = measured(times=2.0)
    given = given.model_copy(update={"links": tuple(link.model_copy(update=ends) for link in given.links)})
    over, unknown = profile_over(given, "gloo")
    more = OURS["handling_byte_s"] / (2 * 4 / 3)
    assert not unknown
    assert [link.source_byte_s for link in over.links] == pytest.approx([5e-9 + more] * 2)
    assert [link.target_byte_s for link in over.links] == pytest.approx([7e-9 + more] * 2)
    assert {each.handling_s for each in over.devices} == {2 * OURS["handling_s"]}


@pytest.mark.parametrize(
    ("address", "private"),
    [
        ("127.0.0.1", True),
        ("10.1.2.3", True),
        ("172.31.0.1", True),
        ("172.32.0.1", False),
        ("192.168.0.9", True),
        ("100.64.0.1", False),
        ("203.0.113.5", False),
        ("0.0.0.0", False),
        ("no address", False),
    ],
)
def test_which_addresses_are_private(address: str, private: bool) -> None:
    assert is_private(address) is private


NEAR = BackendChoice(backend="gloo", reason="near", costs="gloo", alternative="skyctl", alternative_s=1.0)
ASKED = BackendChoice(backend="gloo", reason="asked", costs="gloo")


def test_a_replanned_run_keeps_its_backend_where_it_carries_all_devices() -> None:
    cpus, mixed = make_plan("a/cpu:0", "b/cpu:0"), make_plan("a/cpu:0", "b/cuda:0")
    assert replanned_choice(None, cpus) is None
    kept = replanned_choice(NEAR, cpus)
    assert kept == BackendChoice(backend="gloo", reason="near", costs="gloo")
    given_way = replanned_choice(NEAR, mixed)
    assert given_way is not None
    assert (given_way.backend, given_way.reason, given_way.about) == ("skyctl", "devices", ("b/cuda:0",))
    assert "predicted with what messages cost over gloo" in describe_choice(given_way, 1.0)
    assert replanned_choice(ASKED, mixed) == ASKED


def test_at_a_public_address_what_nobody_asked_for_gives_way() -> None:
    there = {"a": "10.0.0.1", "b": "198.51.100.9"}
    choice = choice_at_addresses(NEAR, there)
    assert choice is not None
    assert (choice.backend, choice.reason, choice.about) == ("skyctl", "public address", ("b",))
    assert choice_at_addresses(NEAR, {"a": "10.0.0.1"}) == NEAR
    assert choice_at_addresses(ASKED, there) == ASKED
    assert choice_at_addresses(None, there) is None


@pytest.mark.parametrize(
    ("backend", "helpers", "backend_of_plans"),
    [("auto", None, "gloo"), ("auto", ["c"], "skyctl"), ("gloo", None, "gloo"), (None, None, None)],
)
def test_all_ways_to_sum_go_over_one_backend(
    backend: Any, helpers: list[str] | None, backend_of_plans: str | None
) -> None:
    given = measured()
    if helpers:
        third = device("c", 1.0).model_copy(update=OURS)
        given = given.model_copy(
            update={"devices": (*given.devices, third), "nodes": (*given.nodes, node("c"))}
        )
    shape = given.workload.shapes[0] if given.workload is not None else None  # a microbatch of each node
    assert shape is not None
    two = shape.model_copy(update={"microbatches": 2})
    given = given.model_copy(
        update={"workload": given.workload and given.workload.model_copy(update={"shapes": (two,)})}
    )
    rows = plan_sums(given, REF, ["a", "b"], ["ring", "star"], helpers=helpers, backend=backend)
    plans = [row.plan for row in rows if row.plan is not None]
    assert len(plans) == 2
    assert {plan.backend and plan.backend.backend for plan in plans} == {backend_of_plans}

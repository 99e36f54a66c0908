"""A backend that was chosen gives way to ours where it does not serve; one that was asked for stays."""

from __future__ import annotations

import pytest
from tests.run.test_rank_spec import CLUSTER, make_plan

from skyctl.errors import InputError, NodeError
from skyctl.planning.backend_choice import check_backend_of_plan, with_asked_backend
from skyctl.records.backend import BackendChoice, BackendReason
from skyctl.records.plan import Plan
from skyctl.run.backend_change import backend_at_addresses, without_gloo
from skyctl.run.change_notes import backend_note
from skyctl.run.rank_spec import rank_specs
from skyctl.workload.workload_spec import WorkloadSpec

BOTH = ("a/cpu:0", "b/cpu:0")


def over_gloo(reason: BackendReason) -> Plan:
    chosen = BackendChoice(backend="gloo", reason=reason, costs="gloo")
    return make_plan(*BOTH).model_copy(update={"backend": chosen})


@pytest.mark.parametrize(
    ("reason", "addresses", "backend"),
    [
        ("near", {"a": "10.0.0.1", "b": "203.0.113.9"}, "skyctl"),
        ("near", {"a": "10.0.0.1", "b": "10.0.0.2"}, "gloo"),
        ("near", None, "gloo"),
        ("asked", {"a": "10.0.0.1", "b": "203.0.113.9"}, "gloo"),
    ],
)
def test_addresses_are_looked_at_once_they_are_known(
    reason: BackendReason, addresses: dict[str, str] | None, backend: str
) -> None:
    had = over_gloo(reason)

    def find(_needed: tuple[str, ...]) -> dict[str, str]:
        if addresses is None:
            raise NodeError("it has gone", node="a")
        return addresses

    settled = backend_at_addresses(had, find)
    assert settled.backend is not None
    assert settled.backend.backend == backend
    note = backend_note(had, settled)
    assert (note is not None) == (backend == "skyctl")
    assert note is None or "b are reached at an address that is not private" in note


@pytest.mark.parametrize(("reason", "backend"), [("near", "skyctl"), ("asked", "gloo")])
def test_after_ranks_that_came_to_no_step_over_gloo_ours_is_tried(
    reason: BackendReason, backend: str
) -> None:
    had = over_gloo(reason)
    made = without_gloo(had)
    assert made.backend is not None
    assert made.backend.backend == backend
    assert (backend_note(had, made) is not None) == (backend == "skyctl")


def test_a_plan_that_chose_gloo_can_be_run_encrypted() -> None:
    """As any other plan that was made without TLS; one that was asked for is refused."""
    plan = with_asked_backend(over_gloo("near"), None, encrypt=True)
    assert plan.backend is not None
    assert (plan.backend.backend, plan.backend.reason) == ("skyctl", "encryption")
    check_backend_of_plan(plan, encrypt=True)
    with pytest.raises(InputError, match="--backend gloo does not go with --encrypt"):
        check_backend_of_plan(with_asked_backend(over_gloo("asked"), None, encrypt=True), encrypt=True)


def test_a_plan_that_chose_gloo_may_be_given_another_device() -> None:
    """By hand, say; and nobody is told of an option that was never given."""
    chosen = over_gloo("near").backend
    plan = make_plan("a/cpu:0", "b/cuda:7").model_copy(update={"backend": chosen})
    settled_plan = with_asked_backend(plan, None)
    assert settled_plan.backend is not None
    assert (settled_plan.backend.backend, settled_plan.backend.about) == ("skyctl", ("b/cuda:7",))
    check_backend_of_plan(settled_plan, encrypt=False)


@pytest.mark.parametrize(
    ("plan", "backend"),
    [
        (make_plan(*BOTH), "skyctl"),
        (over_gloo("near"), "gloo"),
        (with_asked_backend(over_gloo("near"), "skyctl"), "skyctl"),
        (with_asked_backend(make_plan("a/cuda:0", "b/cuda:0"), "nccl"), "nccl"),
    ],
)
def test_ranks_are_told_what_the_plan_says(plan: Plan, backend: str) -> None:
    specs = rank_specs(
        plan,
        CLUSTER,
        run_id="r",
        steps=1,
        workload=dict.fromkeys("ab", WorkloadSpec("gpt:")),
        addresses={"a": "10.0.0.1", "b": "10.0.0.2"},
    )
    assert {spec.order.world.backend for spec in specs} == {backend}
